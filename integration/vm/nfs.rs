//! NFS between the two ends of one kernel, over its loopback: what does not need a second machine.
//!
//! There is one NFS server in a kernel, so that all of it is one test.

#![allow(clippy::unwrap_used, reason = "it is a test, whatever clippy takes its helpers for")]

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use union_csi::node::transport::nfs::{NfsConsumer, NfsOwner, probe};
use union_csi::node::transport::{
    Ability, Consumer, Endpoint, ExportId, Generation, Link, Owner, Patience, Peer, Right, Source,
    TransportError,
};
use union_csi::platform::Host;
use union_csi::platform::nfs::{NfsRoots, NfsServing};

use crate::support::{Scratch, run};

const SELF: &str = "127.0.0.1";

fn id(branch: &str, generation: u64) -> ExportId {
    ExportId { branch: branch.parse().unwrap(), generation: Generation(generation) }
}

fn peer(address: &str) -> Peer {
    Peer { node: "node".parse().unwrap(), identity: address.to_owned() }
}

/// A filesystem on a loop device, a server that keeps its mount points in a scratch directory, and a client.
struct Rig {
    scratch: Scratch,
    host: Host,
}

impl Rig {
    fn new() -> Self {
        let scratch = Scratch::new();
        let image = scratch.join("pool.img");
        std::fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
        run("mkfs.ext4", &["-q", image.to_str().unwrap()]);
        std::fs::create_dir(scratch.join("pool")).unwrap();
        run("mount", &["-o", "loop", image.to_str().unwrap(), scratch.join("pool").to_str().unwrap()]);
        Self { scratch, host: Host::new() }
    }

    fn owner(&self) -> NfsOwner {
        let serving = NfsServing {
            address: format!("{SELF}:2049").parse().unwrap(),
            lease: Duration::from_secs(10),
            threads: 4,
            recovery: self.scratch.join("pool/recovery"),
        };
        let fences = self.scratch.join("pool/fences");
        NfsOwner::new(self.host.clone(), NfsRoots::default(), serving, self.scratch.join("exports"), fences)
    }

    fn consumer(&self) -> NfsConsumer {
        let at = self.scratch.join("attached");
        NfsConsumer::new(self.host.clone(), NfsRoots::default(), at, SELF.parse().unwrap())
    }

    fn branch(&self, name: &str) -> PathBuf {
        let place = self.scratch.join("pool").join(name);
        std::fs::create_dir_all(place.join("data")).unwrap();
        place
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // Mounts go with the scratch directory; the server goes here, and with it what it holds of them.
        for attached in self.consumer().attachments().unwrap_or_default() {
            let _ = self.consumer().force_detach(&attached.id);
        }
        for exported in self.owner().exports().unwrap_or_default() {
            let _ = self.owner().unexport(&exported.id.branch);
        }
        let _ = std::fs::write("/proc/fs/nfsd/threads", "0\n");
        for cache in ["nfsd.fh", "nfsd.export", "auth.unix.ip"] {
            let _ = std::fs::write(format!("/proc/net/rpc/{cache}/flush"), "1\n");
        }
    }
}

fn errno<T: std::fmt::Debug>(outcome: std::io::Result<T>) -> Option<i32> {
    outcome.err().and_then(|e| e.raw_os_error())
}

#[test]
fn a_directory_goes_over_nfs_to_who_is_allowed_and_to_nobody_else() {
    let host = Host::new();
    let abilities = probe(&host, &NfsRoots::default()).unwrap();
    for ability in [abilities.owner, abilities.consumer] {
        assert!(matches!(ability, Ability::Able { .. }), "{ability:?}");
    }
    let rig = Rig::new();
    let (owner, consumer) = (rig.owner(), rig.consumer());
    assert_eq!(owner.exports().unwrap(), []);

    let (first, second) = (id("v-0", 1), id("v-1", 1));
    let (place, other) = (rig.branch("v-0"), rig.branch("v-1"));
    let endpoint = owner.export(&first, &Source::Directory(place.clone())).unwrap();
    let elsewhere = owner.export(&second, &Source::Directory(other.clone())).unwrap();
    assert_eq!(owner.export(&first, &Source::Directory(place.clone())).unwrap(), endpoint, "twice is once");
    let attach = |id: &ExportId, endpoint: &Endpoint| consumer.attach(id, endpoint, None, Patience::Wait);

    println!("nobody is allowed yet");
    let outcome = attach(&first, &endpoint);
    assert!(matches!(outcome, Err(TransportError::Refused { .. })), "{outcome:?}");

    println!("one is allowed, on one branch");
    owner.allow(&first, &peer(SELF), Right::Write, None).unwrap();
    owner.allow(&first, &peer("10.9.9.9"), Right::Write, None).unwrap();
    let attached = attach(&first, &endpoint).unwrap();
    assert_eq!(attach(&first, &endpoint).unwrap(), attached, "twice is once");
    let outcome = attach(&second, &elsewhere);
    assert!(matches!(outcome, Err(TransportError::Refused { .. })), "{outcome:?}");
    let outcome = attach(&second, &endpoint);
    assert!(matches!(outcome, Err(TransportError::Foreign { .. })), "{outcome:?}");
    let outcome = attach(&id("v-0", 2), &Endpoint { name: "/v-0@2".to_owned(), ..endpoint.clone() });
    assert!(matches!(outcome, Err(TransportError::Refused { .. })), "{outcome:?}");
    let allowed: Vec<_> = owner.exports().unwrap().into_iter().map(|e| e.allowed).collect();
    assert_eq!(allowed, [vec!["10.9.9.9".to_owned(), SELF.to_owned()], vec![]]);

    println!("what is written there is here, with its owner and attributes");
    let at = attached.at.clone().unwrap();
    let data = at.join("data");
    std::fs::write(data.join("file"), "hello").unwrap();
    std::os::unix::fs::chown(data.join("file"), Some(1234), Some(99)).unwrap();
    std::fs::set_permissions(data.join("file"), std::fs::Permissions::from_mode(0o640)).unwrap();
    xattr::set(data.join("file"), "user.colour", b"red").unwrap();
    let meta = std::fs::metadata(place.join("data/file")).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (1234, 99, 0o640));
    assert_eq!(xattr::get(place.join("data/file"), "user.colour").unwrap().unwrap(), b"red");
    std::fs::write(data.join("by-root"), "x").unwrap();
    assert_eq!(std::fs::metadata(place.join("data/by-root")).unwrap().uid(), 0, "root is not squashed");

    println!("open files survive rename and unlink");
    let mut open = std::fs::OpenOptions::new().read(true).write(true).open(data.join("file")).unwrap();
    std::fs::rename(data.join("file"), data.join("renamed")).unwrap();
    open.write_all(b"HELLO").unwrap();
    open.sync_all().unwrap();
    assert_eq!(std::fs::read(place.join("data/renamed")).unwrap(), b"HELLO");
    std::fs::remove_file(data.join("renamed")).unwrap();
    let mut back = String::new();
    std::io::Seek::rewind(&mut open).unwrap();
    open.read_to_string(&mut back).unwrap();
    assert_eq!(back, "HELLO");
    drop(open);

    println!("in use it is not detached; another agent finds all as it is");
    let held = std::fs::File::open(data.join("by-root")).unwrap();
    assert!(matches!(consumer.detach(&first), Err(TransportError::InUse { .. })));
    drop(held);
    let found = rig.consumer().attachments().unwrap();
    assert_eq!(found, std::slice::from_ref(&attached));
    assert_eq!(rig.owner().exports().unwrap(), owner.exports().unwrap());

    println!("a fence of who has unmounted takes nothing else of it");
    owner.allow(&second, &peer(SELF), Right::Write, None).unwrap();
    let kept = attach(&second, &elsewhere).unwrap().at.unwrap().join("data/locked");
    let locked = std::fs::File::create(&kept).unwrap();
    locked.lock().unwrap();
    consumer.detach(&first).unwrap();
    let clients = || {
        let mut names: Vec<_> =
            std::fs::read_dir("/proc/fs/nfsd/clients").unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = clients();
    owner.fence(&first, &peer(SELF)).unwrap();
    assert_eq!(clients(), before, "the client keeps what it has");
    (&locked).write_all(b"still mine").unwrap();
    locked.sync_all().unwrap();
    let outcome = attach(&first, &endpoint);
    assert!(matches!(outcome, Err(TransportError::Refused { .. })), "{outcome:?}");
    drop(locked);

    println!("who is fenced while it writes waits until it lets go, and another peer keeps its right");
    owner.allow(&first, &peer(SELF), Right::Write, None).unwrap();
    let at = attach(&first, &endpoint).unwrap().at.unwrap();
    let writer = fenced_writer(&at.join("data/log"));
    while std::fs::metadata(place.join("data/log")).map_or(0, |m| m.len()) < 40 {
        std::thread::sleep(Duration::from_millis(10));
    }
    owner.fence(&first, &peer(SELF)).unwrap();
    let length = || std::fs::metadata(place.join("data/log")).unwrap().len();
    let fenced = length();
    assert_eq!(consumer.attachments().unwrap()[0].link, Link::Connecting, "nothing answers");
    assert_eq!(owner.exports().unwrap()[0].allowed, ["10.9.9.9"]);
    owner.tend().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(!writer.is_finished(), "an error would have come before its agent could act");
    consumer.force_detach(&first).unwrap();
    owner.tend().unwrap();
    // Which one is the kernel's choice: 6.1 tells a number of its own (512) where it had begun to claim the file.
    assert_ne!(writer.join().unwrap(), 0, "the writer gets an error");
    assert_eq!(length(), fenced, "nothing came after the fence");
    std::fs::write(&kept, "the other branch goes on").unwrap();
    assert_eq!(consumer.attachments().unwrap().len(), 1);

    println!("a later generation ends an earlier one, which does not come back");
    let later = id("v-1", 2);
    owner.export(&later, &Source::Directory(other.clone())).unwrap();
    assert_eq!(consumer.attachments().unwrap()[0].link, Link::Connecting);
    let outcome = owner.export(&second, &Source::Directory(other));
    assert!(matches!(outcome, Err(TransportError::Outdated { .. })), "{outcome:?}");
    let outcome = owner.allow(&second, &peer(SELF), Right::Write, None);
    assert!(matches!(outcome, Err(TransportError::Outdated { .. })), "{outcome:?}");
    consumer.force_detach(&second).unwrap();

    println!("what is not exported leaves nothing, and the disk can go");
    owner.unexport(&first.branch).unwrap();
    owner.unexport(&first.branch).unwrap();
    owner.unexport(&later.branch).unwrap();
    assert_eq!(owner.exports().unwrap(), []);
    assert_eq!(consumer.attachments().unwrap(), []);
    let _ = std::fs::write("/proc/fs/nfsd/threads", "0\n");
    run("umount", &[rig.scratch.join("pool").to_str().unwrap()]);
}

/// Appends records until that fails, and tells how.
fn fenced_writer(path: &Path) -> std::thread::JoinHandle<i32> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let mut file = std::fs::File::create(path).unwrap();
        for number in 0_u32..100_000 {
            let wrote = file.write_all(format!("{number:08}\n").as_bytes()).and_then(|()| file.sync_all());
            if let Some(errno) = errno(wrote) {
                return errno;
            }
        }
        0
    })
}
