//! What programs find in a directory that several nodes use at once: each sentence of "Used by several nodes at once" in
//! docs/SEMANTICS.md, by two consumers over NFS and by the owner, which uses its directory itself.

use std::path::Path;
use std::time::Duration;

use crate::support::{Machine, Network, Result, on_shared};

/// The owner's pool, its own way to the files, and that of consumers.
const POOL: &str = "/pool";
const OWN: &str = "/pool/v-0/data";
const DATA: &str = "/run/union-csi/attached/v-0@1/data";

const SOON: Duration = Duration::from_secs(30);
/// Longer than anything is remembered: 5 s.
const FORGOTTEN: Duration = Duration::from_secs(30);

struct Shared<'a> {
    owner: &'a Machine,
    one: &'a Machine,
    two: &'a Machine,
}

impl<'a> Shared<'a> {
    fn new(net: &'a Network) -> Result<Self> {
        let (owner, one, two) = (net.machine("a"), net.machine("b"), net.machine("c"));
        owner.run(format!(
            "mkfs.ext4 -q -F /disk/data && mkdir -p {POOL} && mount /disk/data {POOL} && mkdir -p {OWN}
             inside nfs export v-0@1 {POOL}/v-0"
        ))?;
        for consumer in [one, two] {
            owner.run(format!("inside nfs allow v-0@1 {}", consumer.address()))?;
            consumer.run(format!("inside nfs attach v-0@1 {}", owner.address()))?;
        }
        Ok(Self { owner, one, two })
    }

    /// Each machine, with its way to the files.
    fn all(&self) -> [(&'a Machine, &'static str); 3] {
        [(self.owner, OWN), (self.one, DATA), (self.two, DATA)]
    }

    fn leave(self) -> Result {
        for consumer in [self.one, self.two] {
            consumer.run("inside nfs detach v-0@1")?;
        }
        self.owner.run("inside nfs unexport v-0; test -z \"$(inside nfs exports)\"")?;
        self.owner.run(format!("echo 0 >/proc/fs/nfsd/threads; umount /run/union-csi/nfs; umount {POOL}"))?;
        Ok(())
    }
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn shared_what_was_closed_is_found_by_every_later_open_and_names_at_once() {
    on_shared(|net| {
        let shared = Shared::new(net)?;
        let mut number = 0;
        for (writer, at) in shared.all() {
            for _ in 0..4 {
                number += 1;
                // Always of the same length: neither size nor second tells that it changed.
                writer.run(format!("printf %08d {number} >{at}/file"))?;
                for (reader, there) in shared.all() {
                    assert_eq!(reader.run(format!("cat {there}/file"))?, format!("{number:08}"));
                }
            }
            // A name that was looked for in vain is found as soon as it is there.
            for (reader, there) in shared.all() {
                reader.run(format!("test ! -e {there}/new-{number}"))?;
            }
            writer.run(format!("touch {at}/new-{number}"))?;
            for (reader, there) in shared.all() {
                reader.run(format!("test -e {there}/new-{number}"))?;
            }
        }
        shared.leave()
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn shared_what_is_open_or_listed_follows_after_some_seconds() {
    on_shared(|net| {
        let shared = Shared::new(net)?;
        shared.one.run(format!("echo first >{DATA}/log; ls {DATA} >/dev/null"))?;
        // A reader that keeps its file open, as `tail -f` does, and one that lists again and again.
        let follow = format!(
            "exec 3<{DATA}/log; cat <&3; until read -r line <&3; do sleep 0.2; done; echo \"then $line\""
        );
        let mut reader = shared.two.start_command(follow, Duration::from_secs(90))?;
        assert!(reader.says("first", SOON)?);
        shared.two.run(format!("ls {DATA} >/dev/null"))?;
        shared.one.run(format!("echo second >>{DATA}/log; touch {DATA}/listed; chmod 600 {DATA}/log"))?;
        assert!(reader.says("then second", FORGOTTEN)?, "{}", reader.output_so_far());
        shared.two.eventually(FORGOTTEN, format!("ls {DATA} | grep -qx listed"))?;
        shared.two.eventually(FORGOTTEN, format!("test $(stat -c %a {DATA}/log) = 600"))?;
        shared.owner.run(format!("echo third >>{OWN}/log; rm {OWN}/listed; chmod 640 {OWN}/log"))?;
        for consumer in [shared.one, shared.two] {
            assert_eq!(consumer.run(format!("tail -n 1 {DATA}/log"))?, "third");
            consumer.eventually(FORGOTTEN, format!("! ls {DATA} | grep -qx listed"))?;
            consumer.eventually(FORGOTTEN, format!("test $(stat -c %a {DATA}/log) = 640"))?;
        }
        shared.leave()
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn shared_a_name_is_made_once_and_a_rename_is_seen_whole() {
    on_shared(|net| {
        let shared = Shared::new(net)?;
        // All three race for the same names.
        let race = |at: &str| {
            format!(
                "made=0; set -C
                 until [ -e {at}/go ]; do :; done
                 for i in $(seq 60); do
                     if (: >{at}/file-$i) 2>/dev/null; then made=$((made + 1)); fi
                     if mkdir {at}/directory-$i 2>/dev/null; then made=$((made + 1)); fi
                 done
                 echo made $made"
            )
        };
        let mut racers = Vec::new();
        for (machine, at) in shared.all() {
            racers.push(machine.start_command(race(at), Duration::from_secs(120))?);
        }
        shared.owner.run(format!("touch {OWN}/go"))?;
        let mut made = 0;
        for racer in racers {
            let text = racer.wait()?.text();
            made += text.trim().rsplit(' ').next().and_then(|n| n.parse::<u32>().ok()).expect("a number");
        }
        assert_eq!(made, 120, "each name is made by one");

        // A reader never misses a file that is replaced by a rename, and never finds half of it.
        shared.one.run(format!("head -c 100000 /dev/zero | tr '\\0' a >{DATA}/whole"))?;
        let replace = shared.one.start_command(
            format!(
                "for i in $(seq 40); do
                     head -c 100000 /dev/zero | tr '\\0' b >{DATA}/next; mv {DATA}/next {DATA}/whole
                     head -c 100000 /dev/zero | tr '\\0' a >{DATA}/next; mv {DATA}/next {DATA}/whole
                 done; touch {DATA}/replaced"
            ),
            Duration::from_secs(120),
        )?;
        let read = |at: &str| {
            format!(
                "n=0; torn=0; missed=0
                 until [ -e {at}/replaced ]; do
                     n=$((n + 1)); found=$(cat {at}/whole 2>/tmp/why) || {{ missed=$((missed + 1)); cat /tmp/why; continue; }}
                     case $found in *ab*|*ba*) torn=$((torn + 1)) ;; esac
                     [ ${{#found}} = 100000 ] || torn=$((torn + 1))
                 done
                 echo \"torn $torn missed $missed\""
            )
        };
        let there = shared.two.start_command(read(DATA), Duration::from_secs(120))?;
        let here = shared.owner.start_command(read(OWN), Duration::from_secs(120))?;
        assert!(replace.wait()?.success());
        for reader in [there, here] {
            let text = reader.wait()?.text();
            assert!(text.ends_with("torn 0 missed 0"), "{text}");
        }
        shared.leave()
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn shared_locks_keep_other_nodes_out_and_the_owner_by_fcntl_only() {
    on_shared(|net| {
        let shared = Shared::new(net)?;
        shared.owner.run(format!("touch {OWN}/lock"))?;
        // Who holds which lock (`hold`: flock, `hold-range`: fcntl) leaves what to another that tries one.
        let (owner, one, two) = ((shared.owner, OWN), (shared.one, DATA), (shared.two, DATA));
        let cases = [
            (one, "hold", two, "try-lock", "taken"),
            (one, "hold-range", two, "try-range", "taken"),
            // At the owner both kinds of a consumer are fcntl locks.
            (one, "hold", two, "try-range", "taken"),
            (one, "hold", owner, "try-range", "taken"),
            (one, "hold-range", owner, "try-range", "taken"),
            (owner, "hold-range", one, "try-range", "taken"),
            (owner, "hold-range", one, "try-lock", "taken"),
            // The owner's own flock is of another kind, which no consumer sees.
            (one, "hold", owner, "try-lock", "free"),
            (owner, "hold", one, "try-lock", "free"),
        ];
        for ((holder, at), hold, (other, there), attempt, expected) in cases {
            let case = format!("{hold} on {}, {attempt} on {}", holder.name(), other.name());
            let mut held =
                holder.start_command(format!("inside nfs {hold} {at}/lock"), Duration::from_secs(120))?;
            assert!(held.says("held", SOON)?, "{case}");
            let found = other.run(format!("inside nfs {attempt} {there}/lock"))?;
            assert_eq!(found, expected, "{case}");
            held.kill();
            other.eventually(SOON, format!("test $(inside nfs {attempt} {there}/lock) = free"))?;
        }
        // A node that is gone loses its locks when its lease ends.
        let mut held =
            shared.one.start_command(format!("inside nfs hold {DATA}/lock"), Duration::from_secs(120))?;
        assert!(held.says("held", SOON)?);
        shared.one.pull_plug();
        assert_eq!(shared.two.run(format!("inside nfs try-lock {DATA}/lock"))?, "taken");
        let free = format!("test $(inside nfs try-lock {DATA}/lock) = free");
        shared.two.eventually(Duration::from_secs(60), free)?;
        drop(held);
        shared.one.start()?;
        shared.leave()
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn shared_appends_of_two_nodes_overwrite_each_other_unless_they_lock() {
    on_shared(|net| {
        let shared = Shared::new(net)?;
        // Both have the file open for appending; each takes its end to be where it saw it last.
        let append = |word: &str| {
            format!(
                "exec 3>>{DATA}/log; echo open; until [ -e /tmp/go ]; do sleep 0.05; done; rm /tmp/go
                 echo {word} >&3; exec 3>&-; echo closed"
            )
        };
        let mut lost = false;
        for _ in 0..20 {
            shared.owner.run(format!("rm -f {OWN}/log; touch {OWN}/log"))?;
            let mut first = shared.one.start_command(append("one"), SOON)?;
            let mut second = shared.two.start_command(append("two"), SOON)?;
            assert!(first.says("open", SOON)? && second.says("open", SOON)?);
            shared.one.run("touch /tmp/go")?;
            assert!(first.says("closed", SOON)?);
            shared.two.run("touch /tmp/go")?;
            assert!(second.says("closed", SOON)?);
            lost = shared.owner.run(format!("cat {OWN}/log"))? == "two";
            if lost {
                break;
            }
        }
        assert!(lost, "appending became atomic: say so in the documentation");

        // Under a lock nothing is lost, the owner's own appends under an fcntl lock included.
        let locked = |at: &str, word: &str| format!("inside nfs append-locked {at}/locked {word} 100");
        shared.owner.run(format!("touch {OWN}/locked"))?;
        let mut appenders = Vec::new();
        for ((machine, at), word) in shared.all().into_iter().zip(["own", "one", "two"]) {
            appenders.push(machine.start_command(locked(at, word), Duration::from_secs(120))?);
        }
        for appender in appenders {
            let outcome = appender.wait()?;
            assert!(outcome.success(), "{outcome}");
        }
        let counts = shared.owner.run(format!("sort {OWN}/locked | uniq -c | tr -s ' '"))?;
        assert_eq!(counts.split_whitespace().collect::<Vec<_>>(), ["100", "one", "100", "own", "100", "two"]);
        shared.leave()
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn shared_files_that_are_removed_or_mapped_while_open() {
    on_shared(|net| {
        let shared = Shared::new(net)?;
        // Removed where it is open: it stays as a hidden name that the others see, until it is closed.
        let mut open = shared.one.start_command(
            format!(
                "exec 3<>{DATA}/gone; echo kept >&3; rm {DATA}/gone; echo removed
                 until [ -e /tmp/close ]; do sleep 0.1; done; cat /proc/self/fd/3; exec 3>&-; echo closed"
            ),
            Duration::from_secs(120),
        )?;
        assert!(open.says("removed", SOON)?);
        assert_eq!(shared.owner.run(format!("ls -A {OWN} | grep -c '^\\.nfs'"))?, "1");
        shared.two.run(format!("test ! -e {DATA}/gone"))?;
        shared.one.run("touch /tmp/close")?;
        assert!(open.says("closed", SOON)?);
        assert!(open.output_so_far().contains("kept"), "{}", open.output_so_far());
        shared.owner.eventually(SOON, format!("! ls -A {OWN} | grep -q '^\\.nfs'"))?;

        // Removed elsewhere, by another consumer or by the owner: whoever has it open keeps it, nothing of it cached.
        for (remover, at) in [(shared.two, DATA), (shared.owner, OWN)] {
            let mut open = shared.one.start_command(
                format!(
                    "exec 2>&1; exec 3<>{DATA}/theirs 4<{DATA}/theirs; echo kept >&3; sync {DATA}/theirs; echo open
                     until [ -e /tmp/read ]; do sleep 0.1; done; rm /tmp/read
                     echo 3 >/proc/sys/vm/drop_caches; cat <&4; echo more | dd conv=fsync status=none >&3
                     echo 3 >/proc/sys/vm/drop_caches; cat <&4; echo ended"
                ),
                Duration::from_secs(120),
            )?;
            assert!(open.says("open", SOON)?);
            remover.run(format!("rm {at}/theirs; ! ls -A {at} | grep -q '^\\.nfs'"))?;
            shared.one.run("touch /tmp/read")?;
            assert!(open.says("ended", SOON)?, "{}", open.output_so_far());
            assert!(open.output_so_far().ends_with("kept\nmore\nended\n"), "{}", open.output_so_far());
        }

        // Mapped: what was written through memory and flushed is found by whoever maps it afterwards.
        for machine in [shared.owner, shared.one, shared.two] {
            machine.push(Path::new("/usr/sbin/xfs_io"), "/tmp/xfs_io")?;
        }
        shared.one.run(format!(
            "head -c 4096 /dev/zero >{DATA}/mapped
             /tmp/xfs_io -c 'mmap -rw 0 4096' -c 'mwrite -S 0x61 0 4' -c 'msync -s' {DATA}/mapped"
        ))?;
        for (reader, at) in [(shared.two, DATA), (shared.owner, OWN)] {
            let found =
                reader.run(format!("/tmp/xfs_io -r -c 'mmap -r 0 4096' -c 'mread -v 0 4' {at}/mapped"))?;
            assert!(found.contains("61 61 61 61"), "{found}");
        }
        shared.leave()
    });
}
