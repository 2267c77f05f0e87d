//! What disks and kernels hold when no volume is used.

use std::collections::BTreeSet;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use super::super::cluster::{Cluster, Node};
use super::judge::Found;
use super::{NODES, Sabotage};

/// What is on its way out may take that long.
const LEFT_BOUND: Duration = Duration::from_secs(90);
const LOOK_BOUND: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(300);

/// What a node must not have while none of its volumes is used: a line each.
const LEFT: &str = r#"
    shopt -s nullglob
    say() { printf '%s\n' "$@"; }
    for each in /sys/class/nvme/nvme* /sys/kernel/config/nvmet/subsystems/* /sys/block/loop*/loop \
        /state/kubelet/plugins/kubernetes.io/csi/*/* /state/kubelet/pods/*; do say "$each"; done
    while read -r from at _; do
        case "$from $at" in
        *' /programs' | *' /pool' | *' /state') ;;
        /dev/* | *:/* | *mergerfs* | *' /state/'*) say "mount $from at $at" ;;
        esac
    done </proc/mounts
    if [ -e /proc/fs/nfsd/exports ]; then
        while read -r line; do case $line in '#'* | *'fsid=0'*) ;; *) say "export $line" ;; esac; done </proc/fs/nfsd/exports
    fi
    agent=$(</run/agent.pid)
    # Without a process for each: in software emulation each costs as much as all the rest.
    for each in /proc/[0-9]*; do
        pid=${each#/proc/} words=()
        mapfile -d '' -t words 2>/dev/null <"$each/cmdline" || continue
        [ ${#words[@]} -gt 0 ] || continue
        case "$pid ${words[*]}" in
        "1 "* | "$agent "* | "$$ "* | *'inside agent' | *' /bin/bash -euo pipefail -c '*) ;;
        *) [ ! -e "$each" ] || say "process $pid ${words[*]}" ;;
        esac
    done
    for each in /proc/"$agent"/task/*; do
        stat=
        read -r stat 2>/dev/null <"$each/stat" || continue
        stat=${stat##*) }
        [ "${stat:0:1}" != D ] || say "the agent waits for the kernel: $(tr '\n' ';' <"$each/stack")"
    done
"#;

/// Checks each branch on the node's disk, and prints the files that pods wrote: a line `file BRANCH NAME BYTES` and then the bytes.
const LOOK: &str = r#"
    shopt -s nullglob
    show() {
        local file size
        for file in "$2"/*; do
            [ -f "$file" ] || continue
            size=$(stat -c %s "$file")
            printf 'file %s %s %s\n' "$1" "${file##*/}" "$size"
            cat "$file"
        done
    }
    for branch in /pool/branches/*; do
        name=${branch##*/}
        printf 'branch %s\n' "$name"
        if [ -e "$branch/disk.img" ]; then
            # After a loss of power the journal holds what is not in its place yet. Whoever mounts it next gets that; a check before
            # reads over it, and finds what the kernel had written back meanwhile at odds with what it had not.
            mkdir -p /run/look
            if mount -o loop "$branch/disk.img" /run/look; then umount /run/look; else printf 'broken %s it cannot be mounted\n' "$name"; continue; fi
            type=$(blkid -o value -s TYPE "$branch/disk.img")
            case $type in
            ext4) checked=$(fsck.ext4 -fn "$branch/disk.img" 2>&1) || printf 'broken %s %s\n' "$name" "${checked//$'\n'/; }"
                options=ro,loop,noload ;;
            xfs) checked=$(xfs_repair -f -n "$branch/disk.img" 2>&1) || printf 'broken %s %s\n' "$name" "${checked//$'\n'/; }"
                options=ro,loop,norecovery ;;
            *) printf 'broken %s its filesystem is %s\n' "$name" "$type"; continue ;;
            esac
            mount -o "$options" "$branch/disk.img" /run/look
            show "$name" /run/look/data
            umount /run/look
        else
            show "$name" "$branch/data"
        fi
    done
"#;

/// What a kernel says when something is wrong with itself, whatever is done to its devices.
const KERNEL: [&str; 6] =
    ["BUG:", "Oops", "general protection", "Kernel panic", "refcount_t", "WARNING: CPU"];
/// What it says when its processor is stopped by the host, or slow.
const SLOW: &str = "soft lockup";

/// What is left in kernels, mount tables and process lists, and objects that should not be; nothing once all is given back.
///
/// Waits for what is on its way.
pub fn left(cluster: &Cluster, branches: &BTreeSet<String>) -> Vec<String> {
    let end = Instant::now() + LEFT_BOUND;
    loop {
        let mut left: Vec<String> = thread::scope(|scope| {
            let looking: Vec<_> = cluster
                .nodes()
                .into_iter()
                .map(|node| scope.spawn(move || node.machine.run_within(LOOK_BOUND, LEFT)))
                .collect();
            let said = looking.into_iter().map(|each| each.join().expect("looking does not panic"));
            said.zip(NODES)
                .flat_map(|(said, node)| match said {
                    Ok(text) => text.lines().map(|line| format!("{node}: {line}")).collect(),
                    Err(error) => vec![format!("{node}: {error}")],
                })
                .collect()
        });
        left.extend(objects(cluster, branches));
        if left.is_empty() || Instant::now() > end {
            return left;
        }
        thread::sleep(PAUSE);
    }
}

fn objects(cluster: &Cluster, branches: &BTreeSet<String>) -> Vec<String> {
    let mut left: Vec<String> =
        cluster.attachments().into_iter().map(|name| format!("attachment {name}")).collect();
    for split in cluster.splits().iter().filter(|split| !split.spec.attached.is_empty()) {
        left.push(format!("volume {} is attached: {:?}", split.meta.name, split.spec.attached));
    }
    let now: BTreeSet<String> = cluster.branches().into_iter().map(|branch| branch.meta.name).collect();
    if now != *branches {
        left.push(format!("the branches are {now:?}, and were {branches:?}"));
    }
    left
}

/// What the disks of all nodes hold.
#[derive(Debug, Default)]
pub struct Disks {
    /// The files that pods wrote.
    pub found: Vec<Found>,
    /// What is wrong with a filesystem, or with which branches there are.
    pub faults: Vec<String>,
}

/// Reads them all, behind every cache of every consumer.
pub fn disks(cluster: &Cluster, branches: &BTreeSet<String>, sabotage: Sabotage) -> Disks {
    let mut disks = Disks::default();
    let mut names = BTreeSet::new();
    let looks: Vec<_> = thread::scope(|scope| {
        let looking: Vec<_> =
            cluster.nodes().into_iter().map(|node| scope.spawn(move || look(node, sabotage))).collect();
        looking.into_iter().map(|each| each.join().expect("looking does not panic")).collect()
    });
    for (look, node) in looks.into_iter().zip(NODES) {
        match look {
            Ok(bytes) => {
                if !read(&bytes, &mut names, &mut disks) {
                    disks.faults.push(format!("{node}: what it said of its disk is not understood"));
                }
            }
            Err(said) => disks.faults.push(format!("{node}: {said}")),
        }
    }
    if names != *branches {
        disks.faults.push(format!("on the disks are the branches {names:?}; there should be {branches:?}"));
    }
    disks
}

fn look(node: Node<'_>, sabotage: Sabotage) -> Result<Vec<u8>, String> {
    if let Some(script) = sabotage.script() {
        node.machine.run(script).map_err(|error| error.to_string())?;
    }
    let output = node.machine.attempt(LOOK_BOUND, LOOK).map_err(|error| error.to_string())?;
    if output.success() { Ok(output.stdout) } else { Err(output.errors()) }
}

/// Takes in what [`LOOK`] printed; whether all of it was understood.
fn read(mut bytes: &[u8], names: &mut BTreeSet<String>, disks: &mut Disks) -> bool {
    while !bytes.is_empty() {
        let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else { return false };
        let line = String::from_utf8_lossy(&bytes[..end]).into_owned();
        bytes = &bytes[end + 1..];
        match line.split(' ').collect::<Vec<_>>().as_slice() {
            ["branch", name] => {
                names.insert((*name).to_owned());
            }
            ["broken", ..] => disks.faults.push(line),
            ["file", branch, file, size] => {
                let Some(content) = size.parse().ok().and_then(|size| bytes.get(..size)) else {
                    return false;
                };
                bytes = &bytes[content.len()..];
                disks.found.push(Found {
                    branch: (*branch).to_owned(),
                    file: (*file).to_owned(),
                    bytes: content.to_vec(),
                });
            }
            _ => return false,
        }
    }
    true
}

/// How much of each console was read.
#[derive(Debug, Default)]
pub struct Consoles([usize; NODES.len()]);

impl Consoles {
    /// What the kernels said of themselves since the last look.
    pub fn complaints(&mut self, cluster: &Cluster) -> Vec<String> {
        let mut said = Vec::new();
        for (node, read) in cluster.nodes().into_iter().zip(&mut self.0) {
            let text = fs::read(node.machine.console()).unwrap_or_default();
            let text = String::from_utf8_lossy(text.get(*read..).unwrap_or_default()).into_owned();
            said.extend(
                complaints(&text).into_iter().map(|line| format!("{}'s kernel: {line}", node.name())),
            );
            *read += text.len();
        }
        said
    }
}

fn complaints(text: &str) -> Vec<String> {
    let bad = |line: &&str| !line.contains(SLOW) && KERNEL.iter().any(|word| line.contains(word));
    text.lines().filter(bad).map(|line| line.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_said_of_its_disk_is_read_byte_by_byte() {
        let (mut names, mut disks) = (BTreeSet::new(), Disks::default());
        let said = b"branch v-0\nfile v-0 f 5\nab\n\0cfile v-0 g 0\nbranch v-1\nbroken v-1 a; b\n";
        assert!(read(said, &mut names, &mut disks));
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["v-0", "v-1"]);
        assert_eq!(disks.faults, ["broken v-1 a; b"]);
        let found = |file: &str, bytes: &[u8]| Found {
            branch: "v-0".to_owned(),
            file: file.to_owned(),
            bytes: bytes.to_vec(),
        };
        assert_eq!(disks.found, [found("f", b"ab\n\0c"), found("g", b"")]);
        assert!(!read(b"file v-0 f 9\nabc", &mut BTreeSet::new(), &mut Disks::default()), "cut off");
        assert!(!read(b"mount: no\n", &mut BTreeSet::new(), &mut Disks::default()));
    }

    #[test]
    fn kernels_that_complain_of_themselves_are_heard() {
        let text = "[ 1.0] EXT4-fs error (device nvme0n1): its device is gone\r\n\
                    [ 2.0] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [mount:311]\r\n\
                    [ 3.0] BUG: unable to handle page fault for address: 0000000000001000\r\n";
        let heard = ["[ 3.0] BUG: unable to handle page fault for address: 0000000000001000"];
        assert_eq!(complaints(text), heard);
    }
}
