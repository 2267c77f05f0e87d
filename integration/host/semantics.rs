//! The claims of `docs/SEMANTICS.md`, executed: each row of its table is a probe here, run on real volumes.
//!
//! A row without a probe, a probe without a row, or another answer than the table's fails the test, so that the page says
//! what users get and nothing else. What the page says of power cuts has a test of its own.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom as RawSeek};
use union_csi::csi::proto::volume_capability::access_mode::Mode as AccessMode;

use crate::agent::{Agent, Wanted};
use crate::support::{Scratch, disk, run};

/// Does the behaviour hold in this directory? Errors count as "no".
type Probe = fn(&Path) -> io::Result<bool>;

fn fresh(dir: &Path, name: &str, content: &[u8]) -> io::Result<File> {
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(dir.join(name))?;
    file.write_all(content)?;
    Ok(file)
}

fn text(path: &Path) -> io::Result<String> {
    fs::read_to_string(path)
}

fn allocate(dir: &Path, flags: FallocateFlags) -> io::Result<bool> {
    let file = fresh(dir, "f", &[1; 65536])?;
    rustix::fs::fallocate(&file, flags, 4096, 8192)?;
    Ok(true)
}

fn aligned() -> Vec<u8> {
    vec![0; 3 * 4096]
}

/// The part of the buffer that begins at a page.
fn page(buffer: &mut [u8]) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(4096);
    &mut buffer[skip..skip + 4096]
}

fn direct(dir: &Path, write: bool) -> io::Result<bool> {
    fresh(dir, "f", &[9; 8192])?.sync_all()?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(i32::try_from(OFlags::DIRECT.bits()).unwrap_or(0))
        .open(dir.join("f"))?;
    let mut buffer = aligned();
    let page = page(&mut buffer);
    if write {
        page.fill(5);
        return Ok(file.write_at(page, 4096)? == 4096 && fs::read(dir.join("f"))?[4096] == 5);
    }
    Ok(file.read_at(page, 0)? == 4096 && page[0] == 9)
}

fn locks_exclude(
    dir: &Path,
    second: fn(&File) -> rustix::io::Result<()>,
    first: fn(&File) -> rustix::io::Result<()>,
) -> io::Result<bool> {
    let one = fresh(dir, "f", b"x")?;
    let two = OpenOptions::new().read(true).write(true).open(dir.join("f"))?;
    first(&one)?;
    let refused = second(&two).is_err();
    drop(one);
    Ok(refused && second(&two).is_ok())
}

fn sqlite(dir: &Path, journal: &str) -> io::Result<bool> {
    let program = format!(
        "import sqlite3\nc = sqlite3.connect('db')\nassert c.execute('pragma journal_mode={journal}').fetchone()[0] == '{journal}'\n\
         c.execute('create table t (n integer)')\n\
         for n in range(200):\n    c.execute('insert into t values (?)', (n,))\n    c.commit()\n\
         d = sqlite3.connect('db')\nassert d.execute('select sum(n) from t').fetchone()[0] == 19900\n\
         assert d.execute('pragma integrity_check').fetchone()[0] == 'ok'\n"
    );
    Ok(Command::new("python3").args(["-c", &program]).current_dir(dir).status()?.success())
}

/// Whether a file has its place on the disk after syncfs: its extents, where the branch has it, are not `DELALLOC` any more
/// (linux/fiemap.h; not asked with `FIEMAP_FLAG_SYNC`, which would write it out).
fn syncfs_writes_out(dir: &Path) -> io::Result<bool> {
    fresh(dir, "f", &[1; 65536])?;
    rustix::fs::syncfs(File::open(dir)?)?;
    let program = "import fcntl, os, struct\n\
         try: path = os.getxattr('f', 'user.mergerfs.fullpath')\n\
         except OSError: path = 'f'\n\
         ask = struct.pack('=QQIIII', 0, 2**63, 0, 0, 8, 0) + bytes(8 * 56)\n\
         answer = fcntl.ioctl(os.open(path, os.O_RDONLY), 0xC020660B, ask)\n\
         extents = [struct.unpack_from('=I', answer, 32 + n * 56 + 40)[0] for n in range(struct.unpack_from('=I', answer, 20)[0])]\n\
         assert extents\n\
         print(any(flags & 4 for flags in extents))\n";
    let out = Command::new("python3").args(["-c", program]).current_dir(dir).output()?;
    match String::from_utf8_lossy(&out.stdout).trim() {
        "True" => Ok(false),
        "False" => Ok(true),
        _ => panic!("FIEMAP: {}", String::from_utf8_lossy(&out.stderr)),
    }
}

/// The probes, by the words of the table's first column.
fn probes() -> BTreeMap<&'static str, Probe> {
    let mut all: BTreeMap<&'static str, Probe> = BTreeMap::new();
    all.insert("write, fsync, read back", |d| {
        fresh(d, "f", b"content")?.sync_all()?;
        Ok(text(&d.join("f"))? == "content")
    });
    all.insert("append (`O_APPEND`) from two descriptors", |d| {
        fresh(d, "f", b"")?;
        let open = || OpenOptions::new().append(true).open(d.join("f"));
        let (mut a, mut b) = (open()?, open()?);
        a.write_all(b"a")?;
        b.write_all(b"b")?;
        a.write_all(b"c")?;
        Ok(text(&d.join("f"))? == "abc")
    });
    all.insert("truncate, and write beyond the end", |d| {
        let file = fresh(d, "f", b"0123456789")?;
        file.set_len(3)?;
        file.write_all_at(b"x", 5)?;
        Ok(fs::read(d.join("f"))? == b"012\0\0x")
    });
    all.insert("hard links", |d| {
        fresh(d, "f", b"x")?;
        fs::hard_link(d.join("f"), d.join("g"))?;
        Ok(fs::metadata(d.join("g"))?.nlink() == 2
            && fs::metadata(d.join("f"))?.ino() == fs::metadata(d.join("g"))?.ino())
    });
    all.insert("symbolic links", |d| {
        fresh(d, "f", b"x")?;
        std::os::unix::fs::symlink("f", d.join("s"))?;
        Ok(text(&d.join("s"))? == "x" && fs::read_link(d.join("s"))?.as_os_str() == "f")
    });
    all.insert("rename over an existing file", |d| {
        fresh(d, "f", b"new")?;
        fresh(d, "g", b"old")?;
        fs::rename(d.join("f"), d.join("g"))?;
        Ok(text(&d.join("g"))? == "new" && !d.join("f").exists())
    });
    all.insert("rename to another directory", |d| {
        fs::create_dir_all(d.join("a"))?;
        fs::create_dir_all(d.join("b"))?;
        fresh(&d.join("a"), "f", b"x")?;
        fs::rename(d.join("a/f"), d.join("b/f"))?;
        Ok(text(&d.join("b/f"))? == "x")
    });
    all.insert("rename of a directory that holds files", |d| {
        fs::create_dir_all(d.join("a/deep"))?;
        for i in 0..20 {
            fresh(&d.join("a/deep"), &format!("f{i}"), b"x")?;
        }
        fs::rename(d.join("a"), d.join("z"))?;
        Ok(fs::read_dir(d.join("z/deep"))?.count() == 20 && !d.join("a").exists())
    });
    all.insert("`RENAME_NOREPLACE`", |d| {
        fresh(d, "f", b"x")?;
        fresh(d, "g", b"y")?;
        let at = rustix::fs::CWD;
        let kept = rustix::fs::renameat_with(at, d.join("f"), at, d.join("g"), RenameFlags::NOREPLACE)
            == Err(rustix::io::Errno::EXIST);
        rustix::fs::renameat_with(at, d.join("f"), at, d.join("h"), RenameFlags::NOREPLACE)?;
        Ok(kept && text(&d.join("h"))? == "x")
    });
    all.insert("`RENAME_EXCHANGE`", |d| {
        fresh(d, "f", b"x")?;
        fresh(d, "g", b"y")?;
        let at = rustix::fs::CWD;
        rustix::fs::renameat_with(at, d.join("f"), at, d.join("g"), RenameFlags::EXCHANGE)?;
        Ok(text(&d.join("f"))? == "y")
    });
    all.insert("`O_EXCL` creates once", |d| {
        let make = || OpenOptions::new().write(true).create_new(true).open(d.join("f"));
        Ok(make().is_ok() && make().is_err_and(|e| e.kind() == io::ErrorKind::AlreadyExists))
    });
    all.insert("a file that was removed stays readable while open", |d| {
        let mut file = fresh(d, "f", b"still here")?;
        fs::remove_file(d.join("f"))?;
        file.write_all(b"!")?;
        file.seek(SeekFrom::Start(0))?;
        let mut all = String::new();
        file.read_to_string(&mut all)?;
        Ok(all == "still here!")
    });
    all.insert("`O_TMPFILE`", |d| {
        rustix::fs::open(d, OFlags::TMPFILE | OFlags::RDWR, Mode::from(0o600))?;
        Ok(true)
    });
    all.insert("`O_DIRECT` read", |d| direct(d, false));
    all.insert("`O_DIRECT` write", |d| direct(d, true));
    all.insert("fallocate: reserve", |d| allocate(d, FallocateFlags::empty()));
    all.insert("fallocate: keep size", |d| allocate(d, FallocateFlags::KEEP_SIZE));
    all.insert("fallocate: punch hole", |d| {
        allocate(d, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE)
    });
    all.insert("fallocate: zero range", |d| allocate(d, FallocateFlags::ZERO_RANGE));
    all.insert("fallocate: collapse range", |d| allocate(d, FallocateFlags::COLLAPSE_RANGE));
    all.insert("holes are found (`SEEK_HOLE`)", |d| {
        let file = fresh(d, "f", &[1; 4096])?;
        file.set_len(1 << 20)?;
        file.sync_all()?;
        Ok(rustix::fs::seek(&file, RawSeek::Hole(0))? < 1 << 20)
    });
    all.insert("copy_file_range", |d| {
        let from = fresh(d, "f", b"copied")?;
        let to = fresh(d, "g", b"")?;
        let mut at = 0;
        Ok(rustix::fs::copy_file_range(&from, Some(&mut at), &to, None, 6)? == 6
            && text(&d.join("g"))? == "copied")
    });
    all.insert("shared writable mmap", |d| {
        let program = "import mmap\nf = open('f', 'w+b')\nf.write(b'x' * 4096)\nf.flush()\nm = mmap.mmap(f.fileno(), 4096)\n\
                       m[0:4] = b'mmap'\nm.flush()\nassert open('f', 'rb').read(4) == b'mmap'\n";
        Ok(Command::new("python3").args(["-c", program]).current_dir(d).status()?.success())
    });
    all.insert("flock excludes within one mount", |d| {
        let take = |f: &File| rustix::fs::flock(f, FlockOperation::NonBlockingLockExclusive);
        locks_exclude(d, take, take)
    });
    all.insert("fcntl locks exclude between processes on one mount", |d| {
        let program = "import fcntl, os, sys\nf = open('f', 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\n\
                       if os.fork() == 0:\n    g = open('f', 'w')\n    try:\n        fcntl.lockf(g, fcntl.LOCK_EX | fcntl.LOCK_NB)\n\
                       \x20   except OSError:\n        os._exit(7)\n    os._exit(0)\n\
                       sys.exit(0 if os.waitstatus_to_exitcode(os.wait()[1]) == 7 else 1)\n";
        Ok(Command::new("python3").args(["-c", program]).current_dir(d).status()?.success())
    });
    all.insert("extended attributes (`user.*`)", |d| {
        fresh(d, "f", b"")?;
        xattr::set(d.join("f"), "user.colour", b"blue")?;
        Ok(xattr::get(d.join("f"), "user.colour")?.as_deref() == Some(b"blue"))
    });
    all.insert("POSIX ACL let a user in", |d| {
        fresh(d, "f", b"for one user")?;
        fs::set_permissions(d.join("f"), fs::Permissions::from_mode(0o600))?;
        fs::set_permissions(d, fs::Permissions::from_mode(0o755))?;
        let set = Command::new("setfacl").args(["-m", "u:65534:r", "f"]).current_dir(d).output()?;
        let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "cat", "f"];
        let read = Command::new("setpriv").args(user).current_dir(d).output()?;
        Ok(set.status.success() && read.stdout == b"for one user")
    });
    all.insert("owner, group, mode and times are kept", |d| {
        let file = fresh(d, "f", b"")?;
        fs::set_permissions(d.join("f"), fs::Permissions::from_mode(0o640))?;
        std::os::unix::fs::chown(d.join("f"), Some(1234), Some(4321))?;
        let then = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        file.set_modified(then)?;
        let meta = fs::metadata(d.join("f"))?;
        Ok(meta.mode() & 0o7777 == 0o640
            && meta.uid() == 1234
            && meta.gid() == 4321
            && meta.modified()? == then)
    });
    all.insert("set-user-id programs keep their bit and it has no effect", |d| {
        fs::copy("/usr/bin/id", d.join("id"))?;
        fs::set_permissions(d.join("id"), fs::Permissions::from_mode(0o4755))?;
        fs::set_permissions(d, fs::Permissions::from_mode(0o755))?;
        let out = Command::new("setpriv")
            .args(["--reuid=65534", "--clear-groups", "./id", "-u"])
            .current_dir(d)
            .output()?;
        Ok(String::from_utf8_lossy(&out.stdout).trim() == "65534")
    });
    all.insert("users other than root, and what their permissions allow", |d| {
        fs::set_permissions(d, fs::Permissions::from_mode(0o777))?;
        fresh(d, "secret", b"root's")?;
        fs::set_permissions(d.join("secret"), fs::Permissions::from_mode(0o600))?;
        let script = "echo mine > own && test \"$(cat own)\" = mine && mkdir sub && echo x > sub/f && rm -r sub && ! cat secret";
        let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", script];
        let out = Command::new("setpriv").args(user).current_dir(d).output()?;
        Ok(out.status.success() && fs::metadata(d.join("own"))?.uid() == 65534)
    });
    all.insert("named pipes and sockets", |d| {
        rustix::fs::mknodat(rustix::fs::CWD, d.join("p"), rustix::fs::FileType::Fifo, Mode::from(0o600), 0)?;
        let _socket = std::os::unix::net::UnixListener::bind(d.join("s"))?;
        Ok(fs::metadata(d.join("p"))?.file_type().is_fifo()
            && fs::metadata(d.join("s"))?.file_type().is_socket())
    });
    all.insert("fsync of a directory", |d| {
        File::open(d)?.sync_all()?;
        Ok(true)
    });
    // Once may be chance: the kernel writes out by itself too.
    all.insert("syncfs (`sync -f`) writes out the volume's files", |d| {
        (0..5).map(|_| syncfs_writes_out(d)).try_fold(true, |all, one| Ok(all && one?))
    });
    all.insert("names of 255 bytes", |d| {
        fresh(d, &"n".repeat(255), b"x")?;
        Ok(fs::read_dir(d)?.count() == 1)
    });
    all.insert("inotify tells of changes made through the volume", |d| {
        let watch = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::NONBLOCK)?;
        rustix::fs::inotify::add_watch(&watch, d, rustix::fs::inotify::WatchFlags::CREATE)?;
        fresh(d, "f", b"")?;
        let mut buffer = [0; 512];
        Ok(rustix::io::read(watch.as_fd(), &mut buffer)? > 0)
    });
    all.insert("SQLite, rollback journal", |d| sqlite(d, "delete"));
    all.insert("SQLite, write-ahead log (`WAL`)", |d| sqlite(d, "wal"));
    all
}

/// The rows of the table: behaviour, one branch, several branches.
fn claims() -> BTreeMap<String, (String, String)> {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/SEMANTICS.md"))
        .expect("docs/SEMANTICS.md");
    let table = page.split("<!-- probes -->").nth(1).expect("the table between <!-- probes --> marks");
    table
        .lines()
        .filter(|l| l.starts_with('|') && !l.starts_with("|-") && !l.starts_with("| behaviour"))
        .map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(|c| c.trim().to_owned()).collect();
            (cells[0].clone(), (cells[1].clone(), cells[2].clone()))
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn users_get_what_the_semantics_page_says() {
    let scratch = Scratch::new();
    let disks: Vec<_> =
        (0..3).map(|i| (format!("disk{i}"), disk(&scratch, &format!("disk{i}"), "ext4", 256))).collect();
    let agent = Agent::start(Path::new(env!("CARGO_BIN_EXE_union-csi")), scratch.path(), &disks, "");
    let mut csi = agent.csi().await;
    let quantum = ("splitQuantum", "16Mi");
    let mut places = Vec::new();
    for (name, count) in [("one", "1"), ("several", "3")] {
        let parameters = [
            quantum,
            ("minBranches", count),
            ("maxBranches", count),
            ("strategy", "balanced"),
            ("branchFormat", "image"),
        ];
        let id =
            csi.create(&Wanted::new(name, 100 << 20, &parameters)).await.expect("CreateVolume").volume_id;
        csi.stage(&id, AccessMode::SingleNodeWriter).await.expect("NodeStageVolume");
        places.push(csi.publish(&id, AccessMode::SingleNodeWriter).await.expect("NodePublishVolume"));
    }
    let status: serde_json::Value =
        serde_json::from_str(&agent.get("/v1/status").expect("/v1/status")).expect("status is JSON");
    let self_test = |row: &str| {
        let field = if row.contains("write") { "directWrite" } else { "directRead" };
        status
            .pointer(&format!("/abilities/{field}"))
            .and_then(serde_json::Value::as_bool)
            .expect("an ability")
    };

    let claims = claims();
    let probes = probes();
    let mut faults = Vec::new();
    for row in claims.keys().filter(|r| !probes.contains_key(r.as_str())) {
        faults.push(format!("{row:?} is claimed and not probed"));
    }
    for (row, probe) in &probes {
        let Some((one, several)) = claims.get(*row) else {
            faults.push(format!("{row:?} is probed and not in the table"));
            continue;
        };
        for (place, claim) in places.iter().zip([one, several]) {
            let dir = place.join("probe");
            fs::create_dir(&dir).expect("a directory for the probe");
            let result = probe(&dir);
            fs::remove_dir_all(&dir).unwrap_or_else(|e| {
                let left: Vec<_> =
                    fs::read_dir(&dir).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
                panic!("{row}: {e}; {} still holds {left:?}", dir.display())
            });
            let found = matches!(result, Ok(true));
            let claimed = match claim.as_str() {
                "yes" => true,
                "no" => false,
                "self-test" => self_test(row),
                other => panic!("{row}: the table says {other:?}; yes, no or self-test are understood"),
            };
            if found != claimed {
                faults.push(format!(
                    "{row:?} at {}: the page says {claim}, the probe {result:?}",
                    place.display()
                ));
            }
        }
    }
    for id in ["one", "several"] {
        csi.unpublish(id).await.expect("NodeUnpublishVolume");
        csi.unstage(id).await.expect("NodeUnstageVolume");
        csi.delete(id).await.expect("DeleteVolume");
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// What a disk has of a record that was appended, and not flushed, when the journal was committed for another file: what there is
/// of it after a power cut at this moment.
fn unflushed_append(filesystem: &str) -> Vec<u8> {
    let scratch = Scratch::new();
    let point = disk(&scratch, "disk", filesystem, 400);
    let mut file = fresh(&point, "f", b"first\n").expect("a file");
    file.sync_all().expect("its first record is flushed");
    file.write_all(b"second\n").expect("a second one");
    fresh(&point, "other", b"x").and_then(|other| other.sync_all()).expect("another file is flushed");
    let (image, copy) = (scratch.join("disk.disk"), scratch.join("copy.disk"));
    fs::copy(image, &copy).expect("the disk as it is now");
    drop(file);
    // Two filesystems of one UUID are not mounted at once.
    let point = point.to_str().expect("a path");
    run("umount", &[point]);
    run("mount", &["-o", "loop", copy.to_str().expect("a path"), point]);
    let left = fs::read(Path::new(point).join("f")).expect("the file is there");
    left.strip_prefix(b"first\n").expect("what was flushed is there").to_vec()
}

#[test]
fn what_was_appended_and_not_flushed_is_missing_after_a_power_cut_or_reads_as_zeros_on_ext4() {
    assert_eq!(unflushed_append("ext4"), [0; 7]);
    assert_eq!(unflushed_append("xfs"), b"");
    assert_eq!(unflushed_append("btrfs"), b"");
}
