use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use super::*;

struct Fixture {
    dir: tempfile::TempDir,
    host: Host,
}

impl Fixture {
    /// `<dir>/parent/victim/`, and beside it `<dir>/outside/keep`, which must stay.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("parent/victim")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/keep"), "kept").unwrap();
        Self { dir, host: Host::new() }
    }

    fn victim(&self) -> std::path::PathBuf {
        self.dir.path().join("parent/victim")
    }

    fn remove(&self) -> Result<bool> {
        self.host.remove_tree(&self.dir.path().join("parent"), "victim")
    }

    fn assert_removed_and_nothing_else(&self) {
        assert!(self.remove().unwrap());
        assert!(!self.remove().unwrap(), "a second removal finds nothing");
        assert_eq!(fs::read_dir(self.dir.path().join("parent")).unwrap().count(), 0);
        assert_eq!(fs::read_to_string(self.dir.path().join("outside/keep")).unwrap(), "kept");
    }
}

#[test]
fn symlinks_are_removed_and_what_they_name_is_not() {
    let f = Fixture::new();
    let v = f.victim();
    symlink(f.dir.path().join("outside"), v.join("directory")).unwrap();
    symlink(f.dir.path().join("outside/keep"), v.join("file")).unwrap();
    symlink("../../outside", v.join("relative")).unwrap();
    symlink("/", v.join("root")).unwrap();
    symlink("nowhere", v.join("dangling")).unwrap();
    symlink("b", v.join("a")).unwrap();
    symlink("a", v.join("b")).unwrap();
    f.assert_removed_and_nothing_else();
}

#[test]
fn an_entry_that_is_itself_a_symlink_is_removed_as_one() {
    let f = Fixture::new();
    fs::remove_dir(f.victim()).unwrap();
    symlink(f.dir.path().join("outside"), f.victim()).unwrap();
    f.assert_removed_and_nothing_else();
}

#[test]
fn a_parent_that_is_a_symlink_is_refused() {
    let f = Fixture::new();
    symlink(f.dir.path().join("outside"), f.dir.path().join("link")).unwrap();
    let error = f.host.remove_tree(&f.dir.path().join("link"), "keep").unwrap_err();
    assert!(matches!(error.errno(), Some(libc::ELOOP | libc::ENOTDIR)), "{error}");
    f.assert_removed_and_nothing_else();
}

#[test]
fn only_one_plain_name_can_be_removed() {
    let f = Fixture::new();
    for name in ["", ".", "..", "a/b", "/", "victim/", "../outside", "a\0b"] {
        let error = f.host.remove_tree(&f.dir.path().join("parent"), name).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL), "{name:?}");
    }
    f.assert_removed_and_nothing_else();
}

#[test]
fn names_of_any_bytes_go() {
    let f = Fixture::new();
    for name in [b"new\nline".as_slice(), b"\xff\xfe", b" ", b"-rf", b"*", &[b'x'; 255]] {
        fs::create_dir(f.victim().join(OsStr::from_bytes(name))).unwrap();
        fs::write(f.victim().join(OsStr::from_bytes(name)).join("file"), "").unwrap();
    }
    f.assert_removed_and_nothing_else();
}

#[test]
fn ten_thousand_files_and_directories_beyond_one_batch_go() {
    let f = Fixture::new();
    for n in 0..10_000 {
        fs::write(f.victim().join(format!("f{n}")), "").unwrap();
    }
    for n in 0..BATCH + 10 {
        fs::create_dir(f.victim().join(format!("d{n}"))).unwrap();
    }
    f.assert_removed_and_nothing_else();
}

#[test]
fn a_tree_deeper_than_paths_can_be_goes_with_few_descriptors() {
    let f = Fixture::new();
    let mut at = open_directory(
        rustix::fs::open(f.dir.path().join("parent"), OFlags::PATH, Mode::empty()).unwrap().as_fd(),
        c"victim",
    )
    .unwrap();
    for _ in 0..2000 {
        rustix::fs::mkdirat(&at, c"dir", Mode::RWXU).unwrap();
        rustix::fs::mkdirat(&at, c"side", Mode::RWXU).unwrap();
        at = open_directory(at.as_fd(), c"dir").unwrap();
    }
    f.assert_removed_and_nothing_else();
}

#[test]
fn special_files_go_without_being_opened() {
    let f = Fixture::new();
    // Opening a FIFO would wait for a writer for ever.
    rustix::fs::mknodat(CWD, f.victim().join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    std::os::unix::net::UnixListener::bind(f.victim().join("socket")).unwrap();
    f.assert_removed_and_nothing_else();
}

#[test]
fn a_directory_that_keeps_being_swapped_for_a_symlink_never_leads_outside() {
    let f = Fixture::new();
    let v = f.victim();
    let swapped = v.join("swapped");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = fs::create_dir_all(swapped.join("deep"));
                let _ = fs::write(swapped.join("keep"), "bait");
                let _ = fs::rename(&swapped, v.join("aside"));
                let _ = symlink(f.dir.path().join("outside"), &swapped);
                let _ = fs::remove_file(&swapped);
                let _ = fs::rename(v.join("aside"), &swapped);
            }
        });
        for _ in 0..200 {
            // It may fail, since the directory is being filled; it may not reach outside.
            let _ = f.remove();
            assert_eq!(fs::read_to_string(f.dir.path().join("outside/keep")).unwrap(), "kept");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    fs::create_dir_all(&v).unwrap();
    f.assert_removed_and_nothing_else();
}

#[test]
fn a_missing_parent_is_an_absent_entry() {
    let f = Fixture::new();
    assert!(!f.host.remove_tree(&f.dir.path().join("missing"), "x").unwrap());
}
