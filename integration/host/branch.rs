//! Branches on real disks.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use union_csi::domain::policy::FsType;
use union_csi::domain::pool::Enforcement;
use union_csi::domain::split::BranchFormat;
use union_csi::domain::{Bytes, overhead};
use union_csi::node::branch::BranchError;
use union_csi::platform::{Gate, Host};
use union_csi::store::object::{BranchPhase, BranchSpec};

use crate::support::{Node, Scratch, disk, node, run};

pub(crate) fn image(pool: &str, mib: u64, fs: Option<FsType>) -> BranchSpec {
    let size = Bytes::mib(mib);
    BranchSpec {
        id: "vol-0".parse().expect("branch"),
        volume: "vol".parse().expect("volume"),
        index: 0,
        node: "node-1".parse().expect("node"),
        pool: pool.parse().expect("pool"),
        size,
        usable: overhead::usable(size, fs),
        format: BranchFormat::Image,
        fs_type: fs,
        thin: false,
        accept_unenforced: false,
        write_through: true,
        encrypted: false,
        access: None,
        sharing: None,
    }
}

pub(crate) fn directory(pool: &str, mib: u64) -> BranchSpec {
    BranchSpec {
        format: BranchFormat::Directory,
        fs_type: None,
        accept_unenforced: true,
        ..image(pool, mib, None)
    }
}

fn place(disk: &Path) -> PathBuf {
    disk.join("branches/vol-0")
}

pub(crate) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .map(|entries| entries.map(|e| e.expect("entry").file_name().into_string().expect("name")).collect())
        .unwrap_or_default();
    names.sort();
    names
}

fn mounted(at: &Path) -> bool {
    Host::new().mounts().expect("mounts").at(at).is_some()
}

/// Loop devices of branches' images below the scratch directory.
fn loops_below(scratch: &Scratch) -> Vec<String> {
    let all = run("losetup", &["-n", "-l", "-O", "NAME,BACK-FILE"]);
    let root = scratch.path().display().to_string();
    all.lines().filter(|l| l.contains(&root) && l.contains("disk.img")).map(str::to_owned).collect()
}

fn enable_quota(disk: &Path) {
    let disk = disk.to_str().expect("path");
    run("btrfs", &["quota", "enable", disk]);
    run("btrfs", &["quota", "rescan", "-w", disk]);
}

fn make(node: &Node, spec: &BranchSpec) {
    let status = node.branches.ensure_present(spec, false).expect("the branch is made");
    assert_eq!(status.phase, BranchPhase::Bound);
}

fn foreign<T: std::fmt::Debug>(outcome: Result<T, BranchError>) -> String {
    match outcome {
        Err(BranchError::Foreign { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_image_branch_lives_and_leaves_nothing_behind() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 1200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    for fs in [FsType::Ext4, FsType::Xfs, FsType::Btrfs] {
        let spec = image("one", 400, Some(fs));
        make(&node, &spec);
        assert_eq!(names(&place(&disk)), ["branch.json", "disk.img"]);
        assert_eq!(names(&disk.join("branches")), ["vol-0"]);
        let (occupied, length) = Host::new().occupied(&place(&disk).join("disk.img")).expect("occupied");
        assert!(occupied >= length && length == spec.size.get(), "{fs:?}: all of it is reserved: {occupied}");
        let at = scratch.join("at");
        let attached = node.branches.ensure_attached(&spec, &at, false).expect("attached");
        assert_eq!(attached.mount, at);
        assert_eq!(node.branches.ensure_attached(&spec, &at, false).expect("attached again"), attached);
        let devices = Host::new().loop_devices_of(&place(&disk).join("disk.img")).expect("loop devices");
        assert!(devices.len() == 1 && devices[0].direct_io, "{fs:?}: one device, direct I/O: {devices:?}");
        std::fs::write(at.join("data/file"), "content").expect("write");
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached again");
        assert!(!at.exists());
        assert_eq!(
            loops_below(&scratch),
            Vec::<String>::new(),
            "{fs:?}: the loop device went with the mount"
        );

        node.branches.ensure_attached(&spec, &at, true).expect("attached read-only");
        assert_eq!(std::fs::read_to_string(at.join("data/file")).expect("read"), "content");
        assert!(std::fs::write(at.join("data/other"), "").is_err());
        node.branches.ensure_attached(&spec, &at, false).expect("attached writable in its place");
        std::fs::write(at.join("data/other"), "").expect("write");
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
        node.branches.ensure_absent(&spec).expect("removed");
        node.branches.ensure_absent(&spec).expect("removed again");
        assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
        let again = node.branches.ensure_present(&spec, true);
        assert!(
            matches!(again, Err(BranchError::Missing { .. })),
            "a bound branch is not made anew: {again:?}"
        );
    }
}

#[test]
fn a_mounted_branch_shows_at_least_what_was_asked_for() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 3000);
    let node = node(&scratch, &Host::new(), &[&disk]);
    for fs in [FsType::Ext4, FsType::Xfs, FsType::Btrfs] {
        let wanted = Bytes::gib(1);
        let size = overhead::size_for(wanted, Some(fs)).expect("a size");
        let spec = BranchSpec { size, ..image("one", 0, Some(fs)) };
        make(&node, &spec);
        let at = scratch.join("at");
        node.branches.ensure_attached(&spec, &at, false).expect("attached");
        let space = Host::new().space(&at.join("data"), Duration::from_secs(5)).expect("space");
        assert!(space.available >= wanted.get(), "{fs:?}: df shows {} of {wanted}", space.available);
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
        node.branches.ensure_absent(&spec).expect("removed");
    }
}

#[test]
fn a_thin_image_takes_what_is_written_and_is_promised_whole() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 600);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let spec = BranchSpec { thin: true, ..image("one", 400, Some(FsType::Ext4)) };
    make(&node, &spec);
    let used = node.branches.occupied(&spec).expect("occupied");
    assert!(used < Bytes::mib(64), "{used} bytes of a new thin image");
    assert_eq!(node.pools.measure()[0].promised, spec.size);
    let second = BranchSpec { id: "vol-1".parse().expect("id"), index: 1, ..spec.clone() };
    let refused = node.branches.ensure_present(&second, false);
    assert!(matches!(refused, Err(BranchError::NoRoom { .. })), "never oversubscribed: {refused:?}");
    node.branches.ensure_absent(&spec).expect("removed");
}

#[test]
fn a_raw_image_gets_a_device_and_no_mount() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let spec = image("one", 64, None);
    make(&node, &spec);
    let at = scratch.join("at");
    let attached = node.branches.ensure_attached(&spec, &at, false).expect("attached");
    assert_eq!(attached.device.as_deref(), Some(attached.mount.as_path()));
    assert_eq!(node.branches.ensure_attached(&spec, &at, false).expect("again"), attached);
    let device = attached.mount.display().to_string();
    assert_eq!(run("blockdev", &["--getsize64", &device]), spec.size.get().to_string());
    assert_eq!(run("blockdev", &["--getss", &device]), "512");
    let busy = node.branches.ensure_absent(&spec);
    assert!(matches!(busy, Err(BranchError::InUse { .. })), "{busy:?}");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
    assert_eq!(loops_below(&scratch), Vec::<String>::new());
    node.branches.ensure_absent(&spec).expect("removed");
}

#[test]
fn a_directory_whose_size_cannot_be_enforced_needs_the_consent_of_the_class() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    assert_eq!(node.pools.measure()[0].enforcement, Enforcement::None);
    let refused =
        node.branches.ensure_present(&BranchSpec { accept_unenforced: false, ..directory("one", 64) }, false);
    assert!(matches!(refused, Err(BranchError::Unfit { .. })), "{refused:?}");
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
    let spec = directory("one", 64);
    make(&node, &spec);
    let at = scratch.join("at");
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    node.branches.ensure_attached(&spec, &at, false).expect("attached again");
    std::fs::write(at.join("data/file"), "content").expect("write");
    assert_eq!(
        std::fs::read_to_string(place(&disk).join("data/file")).expect("readable as it is"),
        "content"
    );
    let busy = node.branches.ensure_absent(&spec);
    assert!(matches!(busy, Err(BranchError::InUse { .. })), "{busy:?}");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
    node.branches.ensure_absent(&spec).expect("removed");
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
}

#[test]
fn a_directory_on_btrfs_ends_at_its_size() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "btrfs", 600);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let off = node.pools.measure().remove(0);
    assert_eq!(off.enforcement, Enforcement::None);
    assert!(off.enforcement_message.contains("btrfs quota enable"), "{}", off.enforcement_message);
    enable_quota(&disk);
    assert_eq!(node.pools.measure()[0].enforcement, Enforcement::Qgroup);
    let spec = BranchSpec { accept_unenforced: false, ..directory("one", 32) };
    make(&node, &spec);
    let at = scratch.join("at");
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    // A user may make subvolumes in the branch; it goes nevertheless.
    run("btrfs", &["subvolume", "create", at.join("data/nested").to_str().expect("path")]);
    let file = std::fs::File::create(at.join("data/file")).expect("file");
    let written = (0..64).try_for_each(|_| {
        io::Write::write_all(&mut &file, &vec![7; 1 << 20]).and_then(|()| file.sync_data())
    });
    assert_eq!(written.expect_err("64 MiB into 32").raw_os_error(), Some(122), "EDQUOT");
    drop(file);
    run("sync", &["-f", at.to_str().expect("path")]);
    let used = node.branches.occupied(&spec).expect("occupied");
    assert!(used > Bytes::mib(16) && used <= spec.size, "{used}");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
    node.branches.ensure_absent(&spec).expect("removed");
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
}

#[test]
fn a_directory_that_is_mounted_is_not_removed_whatever_its_filesystem() {
    for fs in ["ext4", "btrfs"] {
        let scratch = Scratch::new();
        let disk = disk(&scratch, "one", fs, 300);
        let node = node(&scratch, &Host::new(), &[&disk]);
        let spec = directory("one", 32);
        make(&node, &spec);
        let at = scratch.join("at");
        node.branches.ensure_attached(&spec, &at, false).expect("attached");
        std::fs::write(at.join("data/file"), "kept").expect("a file");
        let id = Host::new().mounts().expect("mounts").at(&at).expect("mounted").id;
        node.branches.ensure_attached(&spec, &at, false).expect("attached already");
        let now = Host::new().mounts().expect("mounts").at(&at).expect("mounted").id;
        assert_eq!(now, id, "{fs}: mounted anew");
        let refused = node.branches.ensure_absent(&spec);
        assert!(matches!(refused, Err(BranchError::InUse { .. })), "{fs}: {refused:?}");
        assert_eq!(std::fs::read_to_string(at.join("data/file")).expect("the file"), "kept", "{fs}");
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
        node.branches.ensure_absent(&spec).expect("removed");
    }
}

#[test]
fn a_branch_that_does_not_fit_is_refused_with_figures_and_leaves_nothing() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let room = node.pools.measure()[0].allocatable();
    match node.branches.ensure_present(&image("one", 1024, Some(FsType::Ext4)), false) {
        Err(BranchError::NoRoom { wanted, allocatable, .. }) => {
            assert_eq!(wanted, Bytes::gib(1));
            // What was told to planners, and what is kept for the branch's own directory.
            assert!(
                allocatable >= room && allocatable <= room.saturating_add(Bytes::mib(1)),
                "{allocatable}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
    assert_eq!(node.pools.measure()[0].promised, Bytes::ZERO);
    let exact = BranchSpec { size: Bytes::new(room.get() / 4096 * 4096), ..image("one", 0, None) };
    node.branches.ensure_present(&exact, false).expect("what was told as possible");
    assert_eq!(node.pools.measure()[0].allocatable().get() / 4096, 0, "the pool is full");
}

#[test]
fn branches_made_at_once_never_take_more_than_there_is() {
    let scratch = Scratch::new();
    // Room for seven of them and most of an eighth: what making one takes for a moment must not decide.
    let disk = disk(&scratch, "one", "ext4", 440);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let room = node.pools.measure()[0].allocatable().get() >> 20;
    let made: u64 = std::thread::scope(|scope| {
        let attempts: Vec<_> = (0..16)
            .map(|index| {
                let node = &node;
                let id = format!("vol-{index}").parse().expect("id");
                let spec = BranchSpec { id, index, ..image("one", 50, Some(FsType::Ext4)) };
                scope.spawn(move || node.branches.ensure_present(&spec, false))
            })
            .collect();
        attempts
            .into_iter()
            .map(|attempt| match attempt.join().expect("no panic") {
                Ok(_) => 1,
                Err(BranchError::NoRoom { .. }) => 0,
                Err(e) => panic!("{e}"),
            })
            .sum()
    });
    assert_eq!(made, room / 50, "as many as fit into {room} MiB, and no refusal without need");
    assert_eq!(node.pools.measure()[0].promised, Bytes::mib(50 * made));
    assert_eq!(names(&disk.join("branches")).len() as u64, made);
}

#[test]
fn what_is_not_the_branch_is_never_used_nor_removed() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let spec = image("one", 64, Some(FsType::Ext4));
    make(&node, &spec);
    let (record, image_file) = (place(&disk).join("branch.json"), place(&disk).join("disk.img"));
    let original = std::fs::read(&record).expect("record");
    let at = scratch.join("at");

    for (change, word) in [("\"vol\"", "volume"), ("\"size\": 67108864", "size"), ("\"image\"", "format")] {
        let text = String::from_utf8(original.clone()).expect("text");
        assert!(text.contains(change), "{text}");
        let other = match word {
            "volume" => "\"other\"",
            "size" => "\"size\": 67112960",
            _ => "\"directory\"",
        };
        std::fs::write(&record, text.replace(change, other)).expect("write");
        for reason in [
            foreign(node.branches.ensure_present(&spec, true)),
            foreign(node.branches.ensure_attached(&spec, &at, false)),
            foreign(node.branches.ensure_absent(&spec)),
        ] {
            assert!(reason.contains(word), "{reason}");
        }
    }
    for broken in ["", "{", "[]"] {
        std::fs::write(&record, broken).expect("write");
        foreign(node.branches.ensure_present(&spec, false));
        foreign(node.branches.ensure_absent(&spec));
    }
    std::fs::remove_file(&record).expect("remove");
    foreign(node.branches.ensure_present(&spec, false));
    foreign(node.branches.ensure_absent(&spec));
    std::fs::write(&record, &original).expect("write");

    let length = std::fs::File::options().write(true).open(&image_file).expect("image");
    length.set_len(spec.size.get() - 4096).expect("truncate");
    assert!(foreign(node.branches.ensure_attached(&spec, &at, false)).contains("bytes"));
    length.set_len(spec.size.get()).expect("extend");
    run("tune2fs", &["-U", "random", image_file.to_str().expect("path")]);
    assert!(foreign(node.branches.ensure_attached(&spec, &at, false)).contains("holds ext4"));
    run(
        "dd",
        &[
            "if=/dev/zero",
            &format!("of={}", image_file.display()),
            "bs=1M",
            "count=1",
            "conv=notrunc",
            "status=none",
        ],
    );
    assert!(foreign(node.branches.ensure_attached(&spec, &at, false)).contains("no filesystem"));
    std::fs::remove_file(&image_file).expect("remove");
    assert!(foreign(node.branches.ensure_present(&spec, true)).contains("is gone"));
    assert!(!at.exists() && !mounted(&at));
    // Its identity is its own: what was damaged can be removed.
    node.branches.ensure_absent(&spec).expect("removed");
}

#[test]
fn no_symlink_leads_out_of_a_branch() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let victim = scratch.join("victim");
    std::fs::create_dir(&victim).expect("victim");
    std::fs::write(victim.join("precious"), "content").expect("precious");
    let at = scratch.join("at");

    let spec = directory("one", 64);
    make(&node, &spec);
    let data = place(&disk).join("data");
    symlink(&victim, data.join("link")).expect("symlink");
    symlink("/", data.join("root")).expect("symlink");
    symlink("..", data.join("up")).expect("symlink");
    std::fs::create_dir_all(data.join("a/b/c")).expect("directories");
    symlink(&victim, data.join("a/b/c/link")).expect("symlink");
    node.branches.ensure_absent(&spec).expect("removed");
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());

    make(&node, &spec);
    std::fs::remove_dir(&data).expect("data");
    symlink(&victim, &data).expect("symlink");
    assert!(foreign(node.branches.ensure_attached(&spec, &at, false)).contains("no directory"));
    assert!(!mounted(&at));
    node.branches.ensure_absent(&spec).expect("removed");

    std::fs::create_dir_all(disk.join("branches")).expect("branches");
    symlink(&victim, place(&disk)).expect("symlink");
    foreign(node.branches.ensure_present(&spec, false));
    foreign(node.branches.ensure_absent(&spec));
    std::fs::remove_file(place(&disk)).expect("unlink");

    std::fs::remove_dir(disk.join("branches")).expect("branches");
    symlink(&victim, disk.join("branches")).expect("symlink");
    let refused = node.branches.ensure_present(&spec, false);
    assert!(matches!(refused, Err(BranchError::Pool { .. })), "{refused:?}");
    assert_eq!(names(&victim), ["precious"]);

    // In an image the attacker is the workload: root inside, writing to its own filesystem.
    std::fs::remove_file(disk.join("branches")).expect("unlink");
    let spec = image("one", 64, Some(FsType::Ext4));
    make(&node, &spec);
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    std::fs::remove_dir(at.join("data")).expect("data");
    symlink(&victim, at.join("data")).expect("symlink");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
    foreign(node.branches.ensure_attached(&spec, &at, false));
    assert!(!mounted(&at));
    assert_eq!(names(&victim), ["precious"]);
}

#[test]
fn a_foreign_mount_is_not_taken_for_the_branch() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let at = scratch.join("at");
    std::fs::create_dir(&at).expect("at");
    run("mount", &["-t", "tmpfs", "tmpfs", at.to_str().expect("path")]);
    for spec in [
        directory("one", 64),
        BranchSpec { id: "vol-1".parse().expect("id"), index: 1, ..image("one", 64, Some(FsType::Ext4)) },
    ] {
        make(&node, &spec);
        let reason = foreign(node.branches.ensure_attached(&spec, &at, false));
        assert!(reason.contains("tmpfs"), "{reason}");
    }
    assert!(mounted(&at), "it was left alone");
}

#[test]
fn an_open_file_keeps_a_branch_until_force_is_used() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let spec = image("one", 64, Some(FsType::Ext4));
    make(&node, &spec);
    let at = scratch.join("at");
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    let open = std::fs::File::create(at.join("data/open")).expect("file");
    match node.branches.ensure_detached(&spec.id, &at, false) {
        Err(BranchError::Host { source, .. }) => assert_eq!(source.errno(), Some(16), "EBUSY"),
        other => panic!("{other:?}"),
    }
    assert!(mounted(&at));
    node.branches.ensure_detached(&spec.id, &at, true).expect("detached by force");
    assert!(!at.exists());
    let busy = node.branches.ensure_absent(&spec);
    assert!(matches!(busy, Err(BranchError::InUse { .. })), "the file is still open: {busy:?}");
    drop(open);
    node.branches.ensure_absent(&spec).expect("removed");
    assert_eq!(loops_below(&scratch), Vec::<String>::new());
}

#[test]
fn leftovers_are_swept_and_nothing_else_is() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let first = node(&scratch, &Host::new(), &[&disk]);
    make(&first, &image("one", 64, Some(FsType::Ext4)));
    let branches = disk.join("branches");
    for name in [".new-vol-7", ".gone-vol-8", "lost+found", ".hidden", "vol-9", ".new-..", ".new-A"] {
        std::fs::create_dir_all(branches.join(name).join("data")).expect("directory");
        std::fs::write(branches.join(name).join("data/file"), "content").expect("file");
    }
    let second = node(&scratch, &Host::new(), &[&disk]);
    let (swept, errors) = second.branches.sweep();
    assert_eq!((swept, errors.len()), (2, 0));
    assert_eq!(names(&branches), [".hidden", ".new-..", ".new-A", "lost+found", "vol-0", "vol-9"]);
    let found: Vec<_> =
        second.branches.scan().into_iter().map(|f| (f.branch.to_string(), f.size.is_ok())).collect();
    assert_eq!(found, [("vol-0".to_owned(), true), ("vol-9".to_owned(), false)]);
}

/// Fails effect number `at`, and where `dead` every later one too, as after a crash.
struct FailAt {
    at: u64,
    dead: bool,
    seen: AtomicU64,
    armed: AtomicBool,
}

impl FailAt {
    fn new(at: u64, dead: bool) -> Arc<Self> {
        Arc::new(Self { at, dead, seen: AtomicU64::new(0), armed: AtomicBool::new(false) })
    }

    fn tripped(&self) -> bool {
        self.seen.load(Ordering::SeqCst) >= self.at
    }
}

impl Gate for FailAt {
    fn enter(&self, _effect: &'static str, _subject: &str) -> io::Result<()> {
        if !self.armed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let number = self.seen.fetch_add(1, Ordering::SeqCst) + 1;
        if number == self.at || self.dead && number > self.at {
            return Err(io::Error::from_raw_os_error(5));
        }
        Ok(())
    }
}

/// Runs `act` with each of its effects failing in turn, once alone and once with all that follow; after each failure
/// `recover` runs on a healthy machine. Tells how many effects there were.
fn fail_each(
    scratch: &Scratch,
    disk: &Path,
    prepare: impl Fn(&Node),
    act: impl Fn(&Node) -> bool,
    recover: impl Fn(&Node, &str),
) {
    for dead in [false, true] {
        for at in 1.. {
            assert!(at < 500, "it does not end");
            prepare(&node(scratch, &Host::new(), &[disk]));
            let gate = FailAt::new(at, dead);
            let failing = node(scratch, &Host::behind(gate.clone()), &[disk]);
            gate.armed.store(true, Ordering::SeqCst);
            let succeeded = act(&failing);
            assert!(succeeded || gate.tripped(), "failed without a failing effect");
            recover(&node(scratch, &Host::new(), &[disk]), &format!("effect {at} failed (dead: {dead})"));
            if !gate.tripped() {
                assert!(at > 5, "only {at} effects");
                break;
            }
        }
    }
}

fn crash(fs: &str, quota: bool, spec: &BranchSpec) {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", fs, 600);
    if quota {
        enable_quota(&disk);
    }
    let at = scratch.join("at");
    let branches = disk.join("branches");
    let clean = |node: &Node, what: &str| {
        node.branches.ensure_detached(&spec.id, &at, false).unwrap_or_else(|e| panic!("{what}: {e}"));
        node.branches.ensure_absent(spec).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(names(&branches), Vec::<String>::new(), "{what}");
        assert_eq!(loops_below(&scratch), Vec::<String>::new(), "{what}");
        assert!(!at.exists(), "{what}");
        assert_eq!(node.pools.measure()[0].promised, Bytes::ZERO, "{what}");
    };
    let use_it = |node: &Node, what: &str| {
        node.branches.ensure_present(spec, false).unwrap_or_else(|e| panic!("{what}: {e}"));
        node.branches.ensure_attached(spec, &at, false).unwrap_or_else(|e| panic!("{what}: {e}"));
        std::fs::write(at.join("data/file"), what).expect("write");
    };
    // Making: afterwards it can be made and used.
    fail_each(
        &scratch,
        &disk,
        |_| {},
        |node| node.branches.ensure_present(spec, false).is_ok(),
        |node, what| {
            use_it(node, what);
            clean(node, what);
        },
    );
    // Making, and then never again: the sweep and the removal leave nothing.
    fail_each(
        &scratch,
        &disk,
        |_| {},
        |node| node.branches.ensure_present(spec, false).is_ok(),
        |node, what| {
            assert!(node.branches.sweep().1.is_empty(), "{what}");
            clean(node, what);
        },
    );
    // Attaching.
    fail_each(
        &scratch,
        &disk,
        |node| make(node, spec),
        |node| node.branches.ensure_attached(spec, &at, false).is_ok(),
        |node, what| {
            use_it(node, what);
            clean(node, what);
        },
    );
    // Detaching.
    fail_each(
        &scratch,
        &disk,
        |node| use_it(node, "before"),
        |node| {
            let detached = node.branches.ensure_detached(&spec.id, &at, false).is_ok();
            // Too few effects to be worth a lower bound of their own.
            (0..6).for_each(|_| drop(node.branches.occupied(spec)));
            detached
        },
        |node, what| {
            assert_eq!(node.branches.ensure_present(spec, true).expect(what).phase, BranchPhase::Bound);
            clean(node, what);
        },
    );
    // Removing: it is whole or gone, and goes when asked again.
    fail_each(
        &scratch,
        &disk,
        |node| make(node, spec),
        |node| node.branches.ensure_absent(spec).is_ok(),
        |node, what| {
            if names(&branches).contains(&"vol-0".to_owned()) {
                assert_eq!(node.branches.ensure_present(spec, true).expect(what).phase, BranchPhase::Bound);
            }
            clean(node, what);
        },
    );
}

#[test]
fn a_crash_at_any_effect_of_an_image_is_made_good() {
    crash("ext4", false, &image("one", 64, Some(FsType::Ext4)));
}

#[test]
fn a_crash_at_any_effect_of_a_plain_directory_is_made_good() {
    crash("ext4", false, &directory("one", 64));
}

#[test]
fn a_crash_at_any_effect_of_a_subvolume_is_made_good() {
    crash("btrfs", true, &directory("one", 64));
}
