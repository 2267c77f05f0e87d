use std::os::unix::fs::MetadataExt;

use union_csi::node::union::{Phase, UnionError, watch_exit};

use super::*;

/// A file of so many MiB, written to the disk.
fn write_mib(path: &Path, mib: usize) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    let block = vec![7_u8; 1 << 20];
    (0..mib).try_for_each(|_| file.write_all(&block))?;
    file.sync_all()
}

#[test]
fn a_volume_larger_than_each_of_its_three_disks_is_filled_and_every_file_lies_whole_on_one() {
    let machine = Machine::with_disks(&[48, 40, 32]);
    let unions = machine.working_agent();
    let spec = machine.spec();
    unions.ensure(&spec).expect("a union");
    let data = spec.mount_point.join("data");
    let space = machine.host.space(&data, Duration::from_secs(5)).expect("space");
    assert!(space.total > 80 << 20, "{space:?} is not more than each disk");
    for n in 0..75 {
        write_mib(&data.join(format!("file{n}")), 1).expect("75 MiB fit on no single disk");
    }
    for n in 0..75 {
        let name = format!("data/file{n}");
        let holders: Vec<u64> = machine
            .branches
            .iter()
            .filter_map(|b| std::fs::metadata(b.join(&name)).ok().map(|m| m.len()))
            .collect();
        assert_eq!(holders, [1 << 20], "{name} is on one disk, whole");
    }
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn small_branches_take_new_files() {
    let machine = Machine::with_disks(&[16, 16]);
    let unions = machine.working_agent();
    let spec = UnionSpec { smallest: Bytes::mib(16), ..machine.spec() };
    unions.ensure(&spec).expect("a union");
    std::fs::write(spec.mount_point.join("data/small"), "x").expect("minfreespace must not forbid it");
    unions.stop(&volume(), false).expect("stop");
}

/// Makes the first branch nearly full.
fn fill_first(machine: &Machine, leave_mib: u64) {
    let free = machine.host.space(&machine.branches[0], Duration::from_secs(5)).expect("space").available;
    let filler = usize::try_from((free >> 20) - leave_mib).expect("small");
    write_mib(&machine.branches[0].join("data/filler"), filler).expect("filler");
}

#[test]
fn new_files_go_where_there_is_room() {
    let machine = Machine::with_disks(&[24, 64]);
    let unions = machine.working_agent();
    fill_first(&machine, 0);
    unions.ensure(&UnionSpec { smallest: Bytes::mib(24), ..machine.spec() }).expect("a union");
    for n in 0..20 {
        write_mib(&machine.spec().mount_point.join(format!("data/new{n}")), 1)
            .expect("the other disk has room");
    }
    unions.stop(&volume(), false).expect("stop");
}

/// MergerFS 2.33.5 with `moveonenospc` puts zeros in front of such a file.
#[test]
fn a_file_that_outgrows_its_branch_is_moved_whole_or_its_writer_is_told() {
    use std::io::Write;
    for append in [true, false] {
        let machine = Machine::with_disks(&[24, 64]);
        let unions = machine.working_agent();
        std::fs::write(machine.branches[0].join("data/grows"), "").expect("file");
        fill_first(&machine, 4);
        unions.ensure(&UnionSpec { smallest: Bytes::mib(24), ..machine.spec() }).expect("a union");
        let grows = machine.spec().mount_point.join("data/grows");
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).append(append).open(&grows).expect("open");
        let mut written = Vec::new();
        let mut told = None;
        for n in 0..12_u8 {
            let block = vec![n + 1; 1 << 20];
            match file.write_all(&block) {
                Ok(()) => written.extend(block),
                Err(error) => told = Some(error),
            }
            if told.is_some() {
                break;
            }
        }
        drop(file);
        let found = std::fs::read(&grows).expect("read");
        assert!(found.starts_with(&written), "append {append}: what was written is not what is there");
        match told {
            Some(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
                assert!(!unions.abilities().moves_files, "the self-test says that files are moved");
            }
            None => {
                assert!(unions.abilities().moves_files, "the self-test says that files are not moved");
                assert!(machine.branches[1].join("data/grows").exists());
            }
        }
        unions.stop(&volume(), false).expect("stop");
    }
}

#[test]
fn a_class_cannot_ask_for_moving_where_it_damages_files() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let mut spec = machine.spec();
    spec.options.insert("moveonenospc".to_owned(), "mfs".to_owned());
    assert_eq!(unions.ensure(&spec).is_ok(), unions.abilities().moves_files);
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn every_option_that_was_given_is_read_back_from_the_running_process() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let mut spec = machine.spec();
    spec.options.insert("cache.negative-entry".to_owned(), "0".to_owned());
    spec.options.insert("func.getattr".to_owned(), "newest".to_owned());
    unions.ensure(&spec).expect("a union");
    let options = unions.options(&volume()).expect("options");
    let key = options.keys().find(|k| k.starts_with("cache.negative")).expect("translated");
    assert_eq!(options[key], "0");
    assert_eq!(options["func.getattr"], "newest");
    assert_eq!(options["category.create"], "pfrd");
    assert_eq!(options["minfreespace"], (1 << 20).to_string());
    assert_eq!(
        options["branches"],
        format!("{}=RW:{}=RW", machine.branches[0].display(), machine.branches[1].display())
    );
    assert_eq!(Some(&options["version"]), unions.abilities().mergerfs_version.as_ref());
    unions.stop(&volume(), false).expect("stop");
}

#[test]
fn an_option_that_is_not_allowed_starts_nothing() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let mut spec = machine.spec();
    spec.options.insert("follow-symlinks".to_owned(), "all".to_owned());
    let error = unions.ensure(&spec).expect_err("refused").to_string();
    assert!(error.contains("lead out of the volume"), "{error}");
    machine.assert_clean();
}

#[test]
fn a_union_outlives_its_agent_and_the_next_agent_adopts_the_same_process() {
    let machine = Machine::with_directories(2);
    let first = machine.working_agent();
    let started = first.ensure(&machine.spec()).expect("a union");
    drop(first);
    let second = machine.working_agent();
    assert_eq!(second.volumes().expect("volumes"), [volume()]);
    assert_eq!(second.observe(&volume()).expect("observe"), started);
    assert_eq!(second.ensure(&machine.spec()).expect("adopted"), started);
    second.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

/// What the next test kills: an agent that starts a union and stays.
#[test]
#[ignore = "run by another test, as an agent of its own"]
fn as_an_agent_of_its_own() {
    let Ok(root) = std::env::var("UNION_CSI_TEST_AGENT") else { return };
    let spec: UnionSpec =
        serde_json::from_slice(&std::fs::read(format!("{root}/spec.json")).expect("spec")).expect("spec");
    let settings = MergerfsSettings {
        path: "mergerfs".into(),
        options: BTreeMap::new(),
        start_timeout: Duration::from_secs(10),
    };
    let unions = Unions::probe(&Host::new(), &settings, &Path::new(&root).join("state"));
    unions.ensure(&spec).expect("a union");
    std::fs::write(format!("{root}/ready"), "").expect("ready");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn kill_minus_9_of_the_agent_leaves_the_union_running() {
    let machine = Machine::with_directories(2);
    let root = machine.scratch.path();
    std::fs::write(root.join("spec.json"), serde_json::to_vec(&machine.spec()).expect("spec")).expect("spec");
    let mut agent = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "union::real::as_an_agent_of_its_own"])
        .env("UNION_CSI_TEST_AGENT", root)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("agent");
    eventually("the agent has a union", || {
        assert!(agent.try_wait().expect("agent").is_none(), "the agent ended");
        root.join("ready").exists()
    });
    let file = machine.spec().mount_point.join("data/file");
    std::fs::write(&file, "before").expect("write");
    agent.kill().expect("SIGKILL");
    agent.wait().expect("agent");
    assert_eq!(std::fs::read_to_string(&file).expect("read"), "before", "it serves on");
    let next = machine.working_agent();
    let state = next.observe(&volume()).expect("observe");
    assert_eq!(process(&next.ensure(&machine.spec()).expect("adopted")), process(&state));
    next.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn a_dead_union_is_seen_and_started_anew() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let state = unions.ensure(&machine.spec()).expect("a union");
    let UnionState::Running { device, .. } = state else { panic!("{state:?}") };
    signal(&process(&state), Signal::SIGKILL);
    assert!(machine.host.process_wait(&process(&state), Duration::from_secs(10)).expect("wait"));
    assert_eq!(unions.observe(&volume()).expect("observe"), UnionState::Dead { device: Some(device) });
    let anew = unions.ensure(&machine.spec()).expect("started anew");
    assert_ne!(process(&anew).pid, process(&state).pid);
    assert_eq!(machine.mounted("fuse.mergerfs"), [machine.spec().mount_point], "the dead mount is gone");
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn the_end_of_the_process_is_told_at_once() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let process = process(&unions.ensure(&machine.spec()).expect("a union"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let watched = watch_exit(&machine.host, &process);
        tokio::pin!(watched);
        let early = tokio::time::timeout(Duration::from_millis(50), &mut watched).await;
        assert!(early.is_err(), "told before it ended");
        signal(&process, Signal::SIGKILL);
        tokio::time::timeout(Duration::from_secs(10), &mut watched).await.expect("told").expect("watched");
        watch_exit(&machine.host, &process).await.expect("gone already");
    });
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn a_process_that_stands_still_is_hung_and_not_dead() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let state = unions.ensure(&machine.spec()).expect("a union");
    let UnionState::Running { device, .. } = state else { panic!("{state:?}") };
    signal(&process(&state), Signal::SIGSTOP);
    let process = process(&state);
    assert_eq!(
        unions.observe(&volume()).expect("observe"),
        UnionState::Hung { process: process.clone(), device }
    );
    let error = unions.ensure(&machine.spec()).expect_err("not adopted").to_string();
    assert!(error.contains("does not answer"), "{error}");
    signal(&process, Signal::SIGCONT);
    eventually("it answers again", || unions.observe(&volume()).expect("observe") == state);
    signal(&process, Signal::SIGSTOP);
    unions.stop(&volume(), true).expect("a hung union can be stopped by force");
    machine.assert_clean();
}

#[test]
fn a_branch_that_stands_still_is_told_from_a_process_that_does() {
    let machine = Machine::with_directories(3);
    let unions = machine.working_agent();
    // A union of two branches is itself the branch of another one, and then its process stops.
    let inner = UnionSpec {
        volume: "inner".parse().expect("a name"),
        branches: machine.branches[..2].to_vec(),
        mount_point: machine.scratch.join("mnt/inner"),
        ..machine.spec()
    };
    let below = unions.ensure(&inner).expect("a union");
    let outer = UnionSpec {
        branches: vec![machine.branches[2].clone(), inner.mount_point.clone()],
        // Nothing is remembered: whatever is asked of a file is asked of the branches.
        options: [("cache.attr", "0"), ("cache.entry", "0"), ("cache.statfs", "0")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
        ..machine.spec()
    };
    let above = unions.ensure(&outer).expect("a union");
    signal(&process(&below), Signal::SIGSTOP);
    let data = outer.mount_point.join("data");
    eventually("the branch does stand still", || {
        let liveness = machine.host.liveness(&data, Duration::from_millis(300)).expect("asked");
        liveness == union_csi::platform::mount::Liveness::Hung
    });
    assert_eq!(unions.observe(&volume()).expect("observe"), above);
    assert!(matches!(unions.observe(&inner.volume).expect("observe"), UnionState::Hung { .. }));
    unions.stop(&volume(), true).expect("a union over a hung branch can be stopped by force");
    signal(&process(&below), Signal::SIGCONT);
    unions.stop(&inner.volume, true).expect("stop");
    eventually("what waited for the branch has ended", || processes_of(machine.scratch.path()).is_empty());
    machine.assert_clean();
}

#[test]
fn a_dead_union_is_replaced_beside_its_mount_and_discarded_later() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let old = machine.spec();
    let state = unions.ensure(&old).expect("a union");
    signal(&process(&state), Signal::SIGKILL);
    assert!(machine.host.process_wait(&process(&state), Duration::from_secs(10)).expect("wait"));
    let new = UnionSpec { mount_point: machine.scratch.join("mnt/pvc-1/1"), ..old.clone() };
    let replaced = unions.replace(&new).expect("replaced");
    assert_eq!(machine.mounted("fuse.mergerfs").len(), 2, "the dead one stays until its mounts were swapped");
    assert_eq!(unions.observe(&volume()).expect("observe"), replaced);
    assert_eq!(unions.replace(&new).expect("again"), replaced);
    assert_eq!(unions.ensure(&old).expect("adopted where it is"), replaced);
    unions.discard_replaced(&volume()).expect("discard");
    assert_eq!(machine.mounted("fuse.mergerfs"), std::slice::from_ref(&new.mount_point));
    assert!(!old.mount_point.exists());
    unions.stop(&volume(), false).expect("stop");
    assert!(!new.mount_point.exists());
    machine.assert_clean();
}

#[test]
fn a_replacement_that_fails_leaves_the_old_union_on_record() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let old = machine.spec();
    let state = unions.ensure(&old).expect("a union");
    let mut new = UnionSpec { mount_point: machine.scratch.join("mnt/pvc-1/1"), ..old };
    new.options.insert("cache.attr".to_owned(), "x".to_owned());
    assert!(unions.replace(&new).is_err());
    assert_eq!(unions.observe(&volume()).expect("observe"), state);
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn a_running_union_of_other_branches_is_not_taken_for_the_wanted_one() {
    let machine = Machine::with_directories(3);
    let unions = machine.working_agent();
    let spec = machine.spec();
    unions.ensure(&spec).expect("a union");
    let other = UnionSpec { branches: spec.branches[..2].to_vec(), ..spec.clone() };
    assert!(matches!(unions.ensure(&other), Err(UnionError::Differs { .. })));
    let other = UnionSpec { read_only: true, ..spec };
    assert!(matches!(unions.ensure(&other), Err(UnionError::Differs { .. })));
    unions.stop(&volume(), false).expect("stop");
}

#[test]
fn what_is_mounted_there_by_somebody_else_is_left_alone() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let point = machine.spec().mount_point;
    std::fs::create_dir_all(&point).expect("mount point");
    crate::support::run("mount", &["-t", "tmpfs", "tmpfs", point.to_str().expect("path")]);
    let error = unions.ensure(&machine.spec()).expect_err("refused").to_string();
    assert!(error.contains("not on record"), "{error}");
    assert_eq!(machine.mounted("tmpfs"), [point]);
}

#[test]
fn a_union_in_use_is_only_stopped_by_force() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let spec = machine.spec();
    let state = unions.ensure(&spec).expect("a union");
    let open = std::fs::File::create(spec.mount_point.join("data/open")).expect("file");
    let Err(UnionError::Host { source, .. }) = unions.stop(&volume(), false) else { panic!("not busy") };
    assert_eq!(source.errno(), Some(libc::EBUSY));
    assert_eq!(unions.observe(&volume()).expect("observe"), state, "nothing was changed");
    drop(open);
    let view = machine.scratch.join("view");
    std::fs::create_dir(&view).expect("view");
    let attr = union_csi::platform::mount::MountAttr::default();
    machine.host.bind(&spec.mount_point.join("data"), &view, attr).expect("bind");
    let Err(UnionError::Host { source, .. }) = unions.stop(&volume(), false) else { panic!("not busy") };
    assert_eq!(source.errno(), Some(libc::EBUSY), "it is bound elsewhere");
    assert_eq!(unions.observe(&volume()).expect("observe"), state, "nothing was changed");
    unions.stop(&volume(), true).expect("by force");
    machine.host.unmount(&view, true).expect("unmount");
    machine.assert_clean();
    unions.stop(&volume(), false).expect("nothing to do is success");
}

#[test]
fn a_start_that_an_agent_did_not_finish_is_cleaned_up_by_the_next() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let state = unions.ensure(&machine.spec()).expect("a union");
    // As the record stands when an agent dies between the start of the process and its first answer.
    let file = machine.state().join("unions/pvc-1.json");
    let mut record = unions.record(&volume()).expect("record").expect("record");
    record.phase = Phase::Starting;
    std::fs::write(&file, serde_json::to_vec(&record).expect("record")).expect("write");
    let next = machine.working_agent();
    assert_eq!(next.observe(&volume()).expect("observe"), UnionState::Dead { device: None });
    let anew = next.ensure(&machine.spec()).expect("started anew");
    assert_ne!(process(&anew).pid, process(&state).pid);
    assert_eq!(machine.mounted("fuse.mergerfs").len(), 1);
    next.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn a_record_of_an_earlier_boot_is_no_union() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    unions.ensure(&machine.spec()).expect("a union");
    let mut record = unions.record(&volume()).expect("record").expect("record");
    unions.stop(&volume(), false).expect("stop");
    record.boot_id = "another".to_owned();
    if let Some(process) = &mut record.process {
        process.boot_id = "another".to_owned();
    }
    let file = machine.state().join("unions/pvc-1.json");
    std::fs::write(file, serde_json::to_vec(&record).expect("record")).expect("write");
    assert_eq!(unions.observe(&volume()).expect("observe"), UnionState::Absent);
    unions.ensure(&machine.spec()).expect("started anew");
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

#[test]
fn a_record_that_cannot_be_understood_stops_everything_about_the_volume() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    std::fs::create_dir_all(machine.state().join("unions")).expect("directory");
    std::fs::write(machine.state().join("unions/pvc-1.json"), "{").expect("write");
    assert!(unions.ensure(&machine.spec()).is_err(), "it may stand for a union that runs");
    assert!(unions.stop(&volume(), true).is_err());
    assert_eq!(machine.mounted("fuse.mergerfs"), Vec::<PathBuf>::new());
}

#[test]
fn branches_without_data_are_an_error() {
    let machine = Machine::with_directories(2);
    for branch in &machine.branches {
        std::fs::remove_dir(branch.join("data")).expect("remove");
    }
    let unions = machine.working_agent();
    let error = unions.ensure(&machine.spec()).expect_err("no data").to_string();
    assert!(error.contains("no data directory"), "{error}");
    machine.assert_clean();
}

#[test]
fn nothing_can_be_written_beneath_the_mount_point() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let spec = machine.spec();
    unions.ensure(&spec).expect("a union");
    machine.host.unmount(&spec.mount_point, true).expect("unmount");
    assert!(std::fs::write(spec.mount_point.join("stray"), "x").is_err(), "it would fill the root disk");
    unions.stop(&volume(), true).expect("stop");
    machine.assert_clean();
}

#[test]
fn everyone_may_use_a_union_and_permissions_hold() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let spec = machine.spec();
    unions.ensure(&spec).expect("a union");
    let data = spec.mount_point.join("data");
    std::fs::write(data.join("secret"), "x").expect("write");
    std::fs::write(data.join("public"), "x").expect("write");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(data.join("secret"), std::fs::Permissions::from_mode(0o600)).expect("chmod");
    let as_nobody = |file: &str| {
        // The scratch directory itself is root's alone: nobody comes in by a bind of the data, as a container does.
        let view = machine.scratch.join("view");
        let script = format!(
            "mount --bind {} /mnt && exec setpriv --reuid 65534 --regid 65534 --clear-groups cat /mnt/{file}",
            data.display()
        );
        let _ = view;
        std::process::Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .output()
            .expect("unshare")
    };
    assert_eq!(String::from_utf8_lossy(&as_nobody("public").stdout), "x");
    assert!(!as_nobody("secret").status.success());
    assert_eq!(std::fs::metadata(data.join("secret")).expect("stat").uid(), 0);
    unions.stop(&volume(), false).expect("stop");
}

#[test]
fn read_only_volumes_are_merged_by_overlayfs_and_by_mergerfs_alike() {
    for kind in [UnionKind::Overlay, UnionKind::Mergerfs] {
        let machine = Machine::with_directories(3);
        for (n, branch) in machine.branches.iter().enumerate() {
            std::fs::create_dir_all(branch.join("data/dir")).expect("directory");
            std::fs::write(branch.join(format!("data/dir/file{n}")), n.to_string()).expect("file");
        }
        let unions = machine.working_agent();
        assert!(unions.abilities().overlay);
        let spec = machine.read_only_spec(kind);
        let state = unions.ensure(&spec).expect("a union");
        let data = spec.mount_point.join("data");
        assert_eq!(names(&data.join("dir")), ["file0", "file1", "file2"], "{kind:?}");
        assert_eq!(std::fs::read_to_string(data.join("dir/file2")).expect("read"), "2", "{kind:?}");
        let refused = std::fs::write(data.join("new"), "x").expect_err("read-only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS), "{kind:?}");
        let next = machine.working_agent();
        assert_eq!(next.ensure(&spec).expect("adopted"), state, "{kind:?}");
        assert_eq!(next.observe(&volume()).expect("observe"), state, "{kind:?}");
        next.stop(&volume(), false).expect("stop");
        assert_eq!(next.observe(&volume()).expect("observe"), UnionState::Absent, "{kind:?}");
        machine.assert_clean();
    }
}

#[test]
fn a_writable_volume_is_never_merged_by_overlayfs() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let spec = UnionSpec { kind: UnionKind::Overlay, ..machine.spec() };
    assert!(matches!(unions.ensure(&spec), Err(UnionError::Request { .. })));
    machine.assert_clean();
}

#[test]
fn a_union_may_have_many_branches() {
    for kind in [UnionKind::Overlay, UnionKind::Mergerfs] {
        let machine = Machine::with_directories(64);
        for (n, branch) in machine.branches.iter().enumerate() {
            std::fs::write(branch.join(format!("data/file{n}")), "").expect("file");
        }
        let unions = machine.working_agent();
        let spec = machine.read_only_spec(kind);
        unions.ensure(&spec).expect("a union");
        assert_eq!(names(&spec.mount_point.join("data")).len(), 64, "{kind:?}");
        unions.stop(&volume(), false).expect("stop");
        machine.assert_clean();
    }
}

#[test]
fn a_long_log_is_put_aside() {
    let machine = Machine::with_directories(2);
    let unions = machine.working_agent();
    let log = machine.state().join("logs/pvc-1.log");
    std::fs::create_dir_all(log.parent().expect("parent")).expect("directory");
    std::fs::write(&log, vec![b'x'; (1 << 20) + 1]).expect("log");
    unions.ensure(&machine.spec()).expect("a union");
    assert!(std::fs::metadata(&log).expect("log").len() < 1 << 20);
    assert!(machine.state().join("logs/pvc-1.log.old").exists());
    unions.stop(&volume(), false).expect("stop");
}

#[test]
fn the_program_is_copied_once_and_never_overwritten() {
    let machine = Machine::with_directories(2);
    machine.working_agent();
    let bin = machine.state().join("bin");
    let copies = names(&bin);
    assert_eq!(copies.len(), 1, "{copies:?}");
    let inode = std::fs::metadata(bin.join(&copies[0])).expect("copy").ino();
    let again = machine.working_agent();
    assert_eq!(names(&bin), copies);
    assert_eq!(std::fs::metadata(bin.join(&copies[0])).expect("copy").ino(), inode);
    assert_eq!(again.program().expect("program").path, bin.join(&copies[0]));
}

#[test]
fn what_a_self_test_left_that_was_cut_off_is_removed() {
    let machine = Machine::with_directories(2);
    let old = machine.state().join("selftest-1");
    std::fs::create_dir_all(old.join("union")).expect("directory");
    crate::support::run("mount", &["-t", "tmpfs", "tmpfs", old.join("union").to_str().expect("path")]);
    machine.working_agent();
    machine.assert_clean();
}
