//! One union by hand.

use union_csi::node::union::merge::{MergeRequest, StopSignals, hold, merge};

use super::*;

fn request(machine: &Machine, options: &[&str]) -> MergeRequest {
    let target = machine.scratch.join("target");
    std::fs::create_dir_all(&target).expect("target");
    MergeRequest {
        branches: machine.branches.clone(),
        target,
        options: options.iter().map(|o| (*o).to_owned()).collect(),
        log: machine.scratch.join("merge.log"),
    }
}

/// As umount(8); another test that is just starting a program holds, for a moment, what this one has open.
fn unmount(machine: &Machine, target: &Path) {
    eventually("it is not busy", || machine.host.unmount(target, false).is_ok());
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime")
}

#[test]
fn directories_are_merged_by_hand_with_the_options_that_were_asked_for() {
    let machine = Machine::with_directories(2);
    std::fs::write(machine.branches[1].join("file"), "x").expect("file");
    let request = request(&machine, &["cache.attr=7", "category.create=mfs"]);
    let merged = merge(&machine.host, &machine.settings, &request).expect("merged");
    assert_eq!(names(&request.target), ["data", "file"]);
    assert_eq!(merged.options["cache.attr"], "7");
    assert_eq!(merged.options["category.create"], "mfs");
    unmount(&machine, &request.target);
    assert!(machine.host.process_wait(&merged.process, Duration::from_secs(10)).expect("wait"));
    assert!(request.target.exists(), "somebody's own directory stays");
    std::fs::write(request.target.join("own"), "x").expect("and is writable as before");
}

#[test]
fn a_signal_ends_a_union_that_is_held() {
    let machine = Machine::with_directories(2);
    let request = request(&machine, &[]);
    runtime().block_on(async {
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            let stop = StopSignals::listen().expect("signals");
            let merged = merge(&machine.host, &machine.settings, &request).expect("merged");
            nix::sys::signal::raise(signal).expect("raise");
            tokio::time::timeout(Duration::from_secs(20), hold(&machine.host, &merged, stop))
                .await
                .expect("in time")
                .expect("unmounted");
            assert_eq!(machine.mounted("fuse.mergerfs"), Vec::<PathBuf>::new());
            assert_eq!(processes_of(machine.scratch.path()), Vec::<i32>::new());
        }
    });
}

#[test]
fn a_held_union_whose_process_dies_is_an_error_and_leaves_no_dead_mount() {
    let machine = Machine::with_directories(2);
    let request = request(&machine, &[]);
    runtime().block_on(async {
        let stop = StopSignals::listen().expect("signals");
        let merged = merge(&machine.host, &machine.settings, &request).expect("merged");
        signal(&merged.process, Signal::SIGKILL);
        let error = tokio::time::timeout(Duration::from_secs(20), hold(&machine.host, &merged, stop))
            .await
            .expect("in time")
            .expect_err("it died");
        assert!(error.to_string().contains("has ended"), "{error}");
    });
    assert_eq!(machine.mounted("fuse.mergerfs"), Vec::<PathBuf>::new());
}

#[test]
fn what_cannot_be_merged_is_refused_before_anything_is_started() {
    let machine = Machine::with_directories(2);
    let good = request(&machine, &[]);
    let inside = machine.branches[0].join("target");
    std::fs::create_dir(&inside).expect("target");
    for (bad, told) in [
        (MergeRequest { target: machine.scratch.join("none"), ..good.clone() }, "is not a directory"),
        (MergeRequest { target: inside, ..good.clone() }, "lies in branch"),
        (MergeRequest { branches: vec![machine.scratch.join("none")], ..good.clone() }, "is not a directory"),
        (MergeRequest { branches: vec![], ..good.clone() }, "no branches"),
        (MergeRequest { options: vec!["symlinkify=true".to_owned()], ..good.clone() }, "cannot be set"),
        (MergeRequest { options: vec!["nonsense".to_owned()], ..good.clone() }, "write key=value"),
    ] {
        let error = merge(&machine.host, &machine.settings, &bad).expect_err(told).to_string();
        assert!(error.contains(told), "{error}");
    }
    assert_eq!(machine.mounted("fuse.mergerfs"), Vec::<PathBuf>::new());
    merge(&machine.host, &machine.settings, &good).expect("merged");
    let error = merge(&machine.host, &machine.settings, &good).expect_err("twice").to_string();
    assert!(error.contains("something is mounted"), "{error}");
    unmount(&machine, &good.target);
}
