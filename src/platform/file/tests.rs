use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::*;

fn scratch() -> (tempfile::TempDir, Host) {
    (tempfile::tempdir().unwrap(), Host::new())
}

#[test]
fn what_is_written_replaces_what_was_and_leaves_nothing_beside_it() {
    let (dir, host) = scratch();
    let path = dir.path().join("state");
    host.write_atomic(&path, b"one").unwrap();
    host.write_atomic(&path, b"two").unwrap();
    assert_eq!(host.read_file(&path, 3).unwrap().unwrap(), b"two");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_write_that_fails_leaves_the_old_file_and_nothing_beside_it() {
    let (dir, host) = scratch();
    let path = dir.path().join("state");
    fs::create_dir(&path).unwrap();
    host.write_atomic(&path, b"two").unwrap_err();
    assert!(path.is_dir());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn writing_over_a_symlink_replaces_the_symlink() {
    let (dir, host) = scratch();
    fs::write(dir.path().join("other"), "other").unwrap();
    symlink("other", dir.path().join("state")).unwrap();
    host.write_atomic(&dir.path().join("state"), b"new").unwrap();
    assert_eq!(fs::read(dir.path().join("other")).unwrap(), b"other");
    assert_eq!(fs::read(dir.path().join("state")).unwrap(), b"new");
}

#[test]
fn what_a_crash_left_is_known_by_its_name_and_removed() {
    let (dir, host) = scratch();
    fs::write(dir.path().join(".tmp-0123456789abcdef0123456789abcdef"), "half").unwrap();
    fs::write(dir.path().join(".tmp-of-somebody"), "whole").unwrap();
    fs::write(dir.path().join("state"), "whole").unwrap();
    assert_eq!(host.remove_temporaries(dir.path()).unwrap(), 1);
    assert_eq!(host.remove_temporaries(&dir.path().join("none")).unwrap(), 0);
    assert!(dir.path().join(".tmp-of-somebody").exists(), "another program's file was removed");
    assert_eq!(host.remove_temporaries(dir.path()).unwrap(), 0);
    assert_eq!(fs::read(dir.path().join("state")).unwrap(), b"whole");
}

#[test]
fn a_missing_file_is_none_and_a_long_one_an_error() {
    let (dir, host) = scratch();
    let path = dir.path().join("file");
    assert_eq!(host.read_file(&path, 10).unwrap(), None);
    fs::write(&path, "eleven bytes").unwrap();
    assert!(matches!(host.read_file(&path, 10), Err(HostError::Unexpected { .. })));
    assert_eq!(host.read_file(&path, 12).unwrap().unwrap().len(), 12);
}

#[test]
fn only_a_regular_file_is_read() {
    let (dir, host) = scratch();
    fs::write(dir.path().join("file"), "x").unwrap();
    symlink("file", dir.path().join("link")).unwrap();
    assert_eq!(host.read_file(&dir.path().join("link"), 10).unwrap_err().errno(), Some(libc::ELOOP));
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
    assert!(matches!(host.read_file(&fifo, 10), Err(HostError::Unexpected { .. })));
    assert!(matches!(host.read_file(dir.path(), 10), Err(HostError::Unexpected { .. })));
}

#[test]
fn directories_are_made_with_their_parents_once() {
    let (dir, host) = scratch();
    let path = dir.path().join("a/b/c");
    assert!(host.ensure_directory(&path, 0o2770).unwrap());
    assert!(!host.ensure_directory(&path, 0o700).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o2770, "what is there stays");
}

#[test]
fn a_file_or_symlink_in_the_place_of_a_directory_is_refused() {
    let (dir, host) = scratch();
    fs::write(dir.path().join("file"), "").unwrap();
    symlink(dir.path(), dir.path().join("link")).unwrap();
    for path in ["file", "link", "file/below"] {
        let error = host.ensure_directory(&dir.path().join(path), 0o700).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOTDIR), "{path}");
    }
}

#[test]
fn reserved_space_is_occupied_and_thin_space_is_not() {
    let (dir, host) = scratch();
    let (full, thin) = (dir.path().join("full"), dir.path().join("thin"));
    for _ in 0..2 {
        host.ensure_allocated(&full, 1 << 20, false).unwrap();
        host.ensure_allocated(&thin, 1 << 20, true).unwrap();
    }
    let (bytes, length) = host.occupied(&full).unwrap();
    assert!(bytes >= 1 << 20, "{bytes}");
    assert_eq!(length, 1 << 20);
    assert_eq!(host.occupied(&thin).unwrap(), (0, 1 << 20));
}

#[test]
fn reserving_keeps_content_and_never_shortens() {
    let (dir, host) = scratch();
    let path = dir.path().join("disk.img");
    fs::write(&path, "content").unwrap();
    host.ensure_allocated(&path, 4096, false).unwrap();
    assert!(fs::read(&path).unwrap().starts_with(b"content\0"));
    for thin in [false, true] {
        assert!(matches!(host.ensure_allocated(&path, 4095, thin), Err(HostError::Unexpected { .. })));
    }
    assert_eq!(fs::metadata(&path).unwrap().len(), 4096);
}

#[test]
fn removing_what_is_absent_is_no_error() {
    let (dir, host) = scratch();
    assert!(!host.remove_file(&dir.path().join("x")).unwrap());
    assert!(!host.remove_directory(&dir.path().join("x")).unwrap());
    fs::create_dir_all(dir.path().join("d/e")).unwrap();
    assert_eq!(host.remove_directory(&dir.path().join("d")).unwrap_err().errno(), Some(libc::ENOTEMPTY));
    assert!(host.remove_directory(&dir.path().join("d/e")).unwrap());
}

#[test]
fn a_rename_moves_between_directories() {
    let (dir, host) = scratch();
    fs::create_dir(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("a"), "a").unwrap();
    host.rename(&dir.path().join("a"), &dir.path().join("d/b")).unwrap();
    assert_eq!(fs::read(dir.path().join("d/b")).unwrap(), b"a");
}

#[test]
fn mode_and_owner_are_set_on_the_entry_and_never_through_a_symlink() {
    let (dir, host) = scratch();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let me = fs::metadata(&file).unwrap();
    host.set_owner_mode(&file, Some(me.uid()), Some(me.gid()), Some(0o2755)).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o2755);
    symlink("file", dir.path().join("link")).unwrap();
    let error = host.set_owner_mode(&dir.path().join("link"), None, None, Some(0o777)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ELOOP));
}

#[test]
fn a_lock_is_held_by_one_and_free_when_it_is_dropped() {
    let (dir, host) = scratch();
    let path = dir.path().join("lock");
    let held = host.try_lock(&path).unwrap();
    assert!(held.is_some());
    assert!(host.try_lock(&path).unwrap().is_none());
    drop(held);
    assert!(host.try_lock(&path).unwrap().is_some());
}

#[test]
fn a_path_beneath_a_root_is_opened_as_it_is_named() {
    let (dir, host) = scratch();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    assert_eq!(host.open_beneath(&root, &root.join("a/b"), false).unwrap_err().errno(), Some(libc::ENOENT));
    let made = host.open_beneath(&root, &root.join("a/b"), true).unwrap();
    assert_eq!(fs::read_link(fd_path(&made)).unwrap(), fs::canonicalize(root.join("a/b")).unwrap());
    host.open_beneath(&root, "a/./b".as_ref(), false).unwrap();
    host.open_beneath(&root, &root, false).unwrap();
}

#[test]
fn a_path_beneath_a_root_cannot_lead_out_of_it() {
    let (dir, host) = scratch();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("a")).unwrap();
    fs::create_dir(dir.path().join("outside")).unwrap();
    symlink(dir.path().join("outside"), root.join("link")).unwrap();
    symlink("a", root.join("inner")).unwrap();
    for create in [false, true] {
        for (path, errno) in [
            ("link", libc::ELOOP),
            ("link/x", libc::ELOOP),
            ("inner", libc::ELOOP),
            ("../outside", libc::EXDEV),
            ("a/../../outside", libc::EXDEV),
        ] {
            for path in [root.join(path), path.into()] {
                let error = host.open_beneath(&root, &path, create).unwrap_err();
                assert_eq!(error.errno(), Some(errno), "{error}");
            }
        }
        let error = host.open_beneath(&root, &dir.path().join("outside"), create).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EXDEV));
    }
    assert_eq!(fs::read_dir(dir.path().join("outside")).unwrap().count(), 0);
}

#[test]
fn a_file_beneath_a_root_is_made_once_and_nothing_else_passes_for_it() {
    let (dir, host) = scratch();
    let root = dir.path();
    for _ in 0..2 {
        host.ensure_file_beneath(root, "pod/device".as_ref()).unwrap();
    }
    assert!(fs::metadata(root.join("pod/device")).unwrap().is_file());
    fs::write(root.join("elsewhere"), "").unwrap();
    symlink("../elsewhere", root.join("pod/link")).unwrap();
    let errno = |path: &str| host.ensure_file_beneath(root, path.as_ref()).unwrap_err().errno().unwrap();
    assert_eq!(errno("pod/link"), libc::ELOOP);
    assert_eq!(errno("pod"), libc::EISDIR);
    assert_eq!(errno("../x"), libc::EXDEV);
    assert_eq!(errno(""), libc::EISDIR);
}
