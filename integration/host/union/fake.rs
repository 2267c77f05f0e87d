//! Programs that are no mergerfs, or a bad one.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use union_csi::platform::Gate;

use super::*;

fn script(machine: &Machine, content: &str) -> PathBuf {
    let path = machine.scratch.join("fake-mergerfs");
    std::fs::write(&path, content).expect("script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    path
}

/// What the agent says of a program.
fn problem(machine: &mut Machine, program: PathBuf) -> String {
    machine.settings.path = program;
    let unions = machine.agent();
    let abilities = unions.abilities();
    assert_eq!(abilities.mergerfs_version, None);
    assert!(abilities.overlay, "the agent starts all the same, and overlayfs needs no mergerfs");
    let error = unions.ensure(&machine.spec()).expect_err("no union").to_string();
    let problem = abilities.mergerfs_problem.clone().expect("a problem");
    assert!(error.contains(&problem), "{error}");
    machine.assert_clean();
    problem
}

#[test]
fn a_missing_mergerfs_is_told_with_a_remedy() {
    let mut machine = Machine::with_directories(2);
    let told = problem(&mut machine, "/nowhere/mergerfs".into());
    assert!(told.contains("was not found") && told.contains("mergerfs.path"), "{told}");
    let told = problem(&mut machine, "no-such-program-anywhere".into());
    assert!(told.contains("was not found"), "{told}");
    let told = problem(&mut machine, "relative/mergerfs".into());
    assert!(told.contains("absolute path"), "{told}");
}

#[test]
fn a_mergerfs_that_comes_later_is_found_when_a_union_is_wanted() {
    let mut machine = Machine::with_directories(2);
    let real = machine.settings.path.clone();
    let program = machine.scratch.join("later");
    machine.settings.path = program.clone();
    let unions = machine.agent();
    assert!(unions.abilities().mergerfs_problem.is_some());
    let paths = std::env::var_os("PATH").expect("PATH");
    let mut found = std::env::split_paths(&paths).map(|directory| directory.join(&real));
    let found = found.find(|path| path.is_file()).expect("mergerfs");
    std::os::unix::fs::symlink(found, &program).expect("a link");
    unions.ensure(&machine.spec()).expect_err("it is not tested for each call");
    until_it_is_tested_again();
    let running = unions.ensure(&machine.spec()).expect("a union");
    assert!(matches!(running, UnionState::Running { .. }), "{running:?}");
    assert_eq!(unions.abilities().mergerfs_problem, None);
    unions.stop(&machine.spec().volume, false).expect("its end");
    machine.assert_clean();
}

/// 20 s after the test that failed, as the agent has it.
fn until_it_is_tested_again() {
    std::thread::sleep(std::time::Duration::from_secs(21));
}

#[test]
fn a_mergerfs_that_cannot_be_executed_is_told() {
    let mut machine = Machine::with_directories(2);
    let program = script(&machine, "#!/bin/sh\necho mergerfs version: 2.33.5\n");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o644)).expect("chmod");
    let told = problem(&mut machine, program);
    assert!(told.contains("make it executable"), "{told}");
}

#[test]
fn a_program_that_is_no_mergerfs_is_told() {
    let mut machine = Machine::with_directories(2);
    let program = script(&machine, "#!/bin/sh\necho hello there\n");
    let told = problem(&mut machine, program);
    assert!(told.contains("hello there") && told.contains("no version"), "{told}");
}

#[test]
fn a_mergerfs_that_is_too_old_is_told() {
    let mut machine = Machine::with_directories(2);
    let program = script(&machine, "#!/bin/sh\necho mergerfs version: 2.28.1\n");
    let told = problem(&mut machine, program);
    assert!(told.contains("2.28.1") && told.contains("older than 2.33.0"), "{told}");
}

#[test]
fn a_mergerfs_that_ends_at_once_is_told_with_its_last_words() {
    let mut machine = Machine::with_directories(2);
    let program = script(
        &machine,
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo mergerfs version: 2.33.5\necho fuse: device not found >&2\nexit 1\n",
    );
    let told = problem(&mut machine, program);
    assert!(told.contains("fuse: device not found"), "{told}");
}

#[test]
fn a_mergerfs_that_never_mounts_is_ended_in_time() {
    let mut machine = Machine::with_directories(2);
    machine.settings.start_timeout = Duration::from_millis(300);
    // Named by the scratch directory, so that the test finds it should it be left.
    let program = script(
        &machine,
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo mergerfs version: 2.33.5\ntrap '' TERM\nwhile :; do sleep 0.05; done\n",
    );
    let told = problem(&mut machine, program);
    assert!(told.contains("did not mount within"), "{told}");
}

#[test]
fn a_mergerfs_whose_version_hangs_is_given_up() {
    let mut machine = Machine::with_directories(2);
    let program = script(&machine, "#!/bin/sh\nexec sleep 60\n");
    let told = problem(&mut machine, program);
    assert!(told.contains("did not finish"), "{told}");
}

/// A mergerfs that changes what it is told before it does it.
fn altering(machine: &Machine, version: &str, edit: &str) -> PathBuf {
    let content = format!(
        "#!/bin/bash\n[ \"$1\" = --version ] && exec echo mergerfs version: {version}\n\
         options=$(printf %s \"$3\" | sed -E '{edit}')\nexec mergerfs \"$1\" \"$2\" \"$options\" \"$4\" \"$5\"\n"
    );
    script(machine, &content)
}

#[test]
fn an_option_that_is_ignored_without_a_word_is_found_by_reading_back() {
    let mut machine = Machine::with_directories(2);
    let program = altering(&machine, "2.33.5", "s/category.create=[a-z]*/category.create=epmfs/");
    let told = problem(&mut machine, program);
    assert!(told.contains("category.create=epmfs instead of pfrd"), "{told}");
}

#[test]
fn a_union_that_only_root_could_use_is_refused() {
    let mut machine = Machine::with_directories(2);
    let program = altering(&machine, "2.33.5", "s/allow_other,//");
    let told = problem(&mut machine, program);
    assert!(told.contains("allow_other"), "{told}");
}

#[test]
fn an_option_for_speed_that_is_ignored_is_left_out_from_then_on() {
    let mut machine = Machine::with_directories(2);
    machine.settings.path = altering(&machine, "2.33.5", "s/cache.statfs=[0-9]*/cache.statfs=7/");
    let unions = machine.working_agent();
    assert_eq!(unions.abilities().refused_options, ["cache.statfs"]);
    unions.ensure(&machine.spec()).expect("a union");
    assert!(!unions.options(&volume()).expect("options").contains_key("cache.statfs"));
    unions.stop(&volume(), false).expect("stop");
    machine.assert_clean();
}

/// Holds the first look at a mount back until that mount is gone.
struct LateLook {
    seen: PathBuf,
}

impl Gate for LateLook {
    fn enter(&self, effect: &'static str, subject: &str) -> std::io::Result<()> {
        if effect == "statfs" && subject.ends_with("/union") && !self.seen.exists() {
            std::fs::write(&self.seen, "")?;
            eventually("the mount is gone", || {
                let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
                !table.contains(subject)
            });
        }
        Ok(())
    }
}

/// 2.33 mounts before it refuses an option: who asks that mount a moment later is answered by what lies beneath.
#[test]
fn an_option_that_is_refused_after_the_mount_was_seen_is_left_out_from_then_on() {
    let mut machine = Machine::with_directories(2);
    let seen = machine.scratch.join("seen");
    machine.settings.path = script(
        &machine,
        &format!(
            "#!/bin/bash\n[ \"$1\" = --version ] && exec echo mergerfs version: 2.33.5\n\
             [[ $3 == *cache.statfs=* ]] || exec mergerfs \"$@\"\n\
             mergerfs \"$@\" &\n\
             for _ in {{1..1000}}; do [ -e {} ] && break; sleep 0.01; done\n\
             echo \"fuse: unknown option \\`cache.statfs=1'\" >&2\n\
             umount -l \"$5\"\nexit 1\n",
            seen.display()
        ),
    );
    machine.host = Host::behind(Arc::new(LateLook { seen: seen.clone() }));
    let unions = machine.working_agent();
    assert!(seen.exists(), "the mount was seen before the option was refused");
    assert_eq!(unions.abilities().refused_options, ["cache.statfs"]);
    assert_eq!(machine.mounted("fuse.mergerfs"), Vec::<PathBuf>::new());
}

/// The dialect of 2.42 against a program that does not speak it: whatever it refuses is done without, or is told.
#[test]
fn a_version_that_is_not_what_it_says_is_still_tried_and_not_believed() {
    let mut machine = Machine::with_directories(2);
    let rename = "s/cache.negative-entry/cache.negative_entry/; s/statfs-ignore/statfs_ignore/; \
                  s/security-capability/security_capability/; s/^/allow_other,use_ino,/";
    machine.settings.path = altering(&machine, "2.42.0", rename);
    let unions = machine.working_agent();
    let abilities = unions.abilities();
    assert!(!abilities.passthrough, "2.33 has none, whatever it says");
    for option in ["export-support", "process-thread-count", "passthrough.io"] {
        assert!(abilities.refused_options.iter().any(|o| o == option), "{option}: {abilities:?}");
    }
}

#[test]
fn what_the_self_test_tells_of_direct_io_is_what_a_volume_does() {
    let machine = Machine::with_disks(&[32, 32]);
    let unions = machine.working_agent();
    let abilities = unions.abilities().clone();
    let spec = machine.spec();
    unions.ensure(&spec).expect("a union");
    let trial = machine
        .host
        .try_io(&spec.mount_point.join("data/trial"), Duration::from_secs(5))
        .expect("ordinary I/O works");
    assert_eq!((trial.direct_read, trial.direct_write), (abilities.direct_read, abilities.direct_write));
    let plain = machine
        .host
        .try_io(&machine.branches[0].join("trial"), Duration::from_secs(5))
        .expect("ordinary I/O works");
    assert!(plain.direct_read && plain.direct_write, "the trial finds direct I/O where there is some");
    unions.stop(&volume(), false).expect("stop");
}
