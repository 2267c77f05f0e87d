//! Who may use a volume, and how: access modes, flags, groups.

use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_read_write_once_pod_volume_has_one_pod_at_a_time() {
    let machine = Machine::new(&[256]);
    let mut csi = machine.agent.csi().await;
    let mode = Mode::SingleNodeSingleWriter;
    let wanted = Wanted { modes: vec![mode], ..of_branches("alone", 32, "1", &[]) };
    let id = csi.create(&wanted).await.expect("CreateVolume").volume_id;
    let alone = Use { mode, ..PLAIN };
    let first = mount(&mut csi, &id, alone).await;
    let second = machine.scratch.join("targets/second");
    refused(
        publish(&mut csi, &id, &second, alone).await,
        Code::FailedPrecondition,
        &[&first.display().to_string(), "one workload"],
    );
    assert!(!second.exists() || fs::read_dir(&second).expect("it").next().is_none(), "it is not mounted");
    publish(&mut csi, &id, &first, alone).await.expect("the first pod's call repeated");
    csi.unpublish(&id).await.expect("the first pod ends");
    publish(&mut csi, &id, &second, alone).await.expect("the next pod");
    unpublish(&mut csi, &id, &second).await.expect("it ends");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    csi.delete(&id).await.expect("DeleteVolume");
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_only_are_served_by_overlayfs_what_a_writer_left() {
    let machine = Machine::new(&[128, 128, 128]);
    let mut csi = machine.agent.csi().await;
    let modes = vec![WRITER, Mode::MultiNodeReaderOnly];
    let wanted = Wanted { modes, ..of_branches("read", 200, "3", &[]) };
    let id = csi.create(&wanted).await.expect("CreateVolume").volume_id;
    let target = mount(&mut csi, &id, PLAIN).await;
    assert_eq!(machine.served_by(&id), "mergerfs");
    for i in 0..60 {
        fs::write(target.join(format!("file{i}")), format!("content {i}")).expect("a file");
    }
    fs::create_dir(target.join("dir")).expect("a directory");
    fs::write(target.join("dir/deep"), "deep").expect("a file");
    csi.unpublish(&id).await.expect("NodeUnpublishVolume");
    csi.unstage(&id).await.expect("NodeUnstageVolume");

    let readers = Use { mode: Mode::MultiNodeReaderOnly, ..PLAIN };
    let target = mount(&mut csi, &id, readers).await;
    assert_eq!(machine.served_by(&id), "overlay");
    assert_eq!(machine.unions(), [0; 0], "no process serves it");
    for i in 0..60 {
        let text = fs::read_to_string(target.join(format!("file{i}"))).expect("a file");
        assert_eq!(text, format!("content {i}"));
    }
    assert_eq!(fs::read_to_string(target.join("dir/deep")).expect("the file"), "deep");
    assert_eq!(fs::read_dir(&target).expect("the volume").count(), 61, "each file once, and nothing else");
    let error = fs::write(target.join("new"), "x").expect_err("a reader wrote");
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    // A writer has to wait until the readers are gone.
    refused(
        publish(&mut csi, &id, &machine.scratch.join("targets/writer"), PLAIN).await,
        Code::AlreadyExists,
        &["reading only"],
    );
    remove(&mut csi, &id).await;
    machine.is_clean();
}

/// Runs a shell script as a user that is not root, in the volume.
pub(super) fn as_user(target: &Path, gid: &str, script: &str) -> bool {
    let out = Command::new("setpriv")
        .args(["--reuid=4321", &format!("--regid={gid}"), "--clear-groups", "sh", "-c", script])
        .current_dir(target)
        .output()
        .expect("setpriv");
    out.status.success()
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_the_mount_group_write_and_files_deep_below_keep_their_group() {
    let machine = Machine::new(&[128, 128, 128]);
    let mut csi = machine.agent.csi().await;
    for count in ["1", "3"] {
        let id = csi
            .create(&of_branches(&format!("group{count}"), 90, count, &[]))
            .await
            .expect("CreateVolume")
            .volume_id;
        // Without a group only root writes.
        let target = mount(&mut csi, &id, PLAIN).await;
        assert!(!as_user(&target, "5555", "echo x > own"), "{count} branches: anybody can write");
        fs::create_dir_all(target.join("deep/deeper")).expect("directories");
        fs::write(target.join("deep/deeper/file"), "x").expect("a file");
        std::os::unix::fs::chown(target.join("deep/deeper/file"), Some(77), Some(88)).expect("chown");
        fs::set_permissions(target.join("deep/deeper/file"), fs::Permissions::from_mode(0o640))
            .expect("its mode");
        csi.unpublish(&id).await.expect("NodeUnpublishVolume");
        csi.unstage(&id).await.expect("NodeUnstageVolume");

        let group = Use { group: "5555", ..PLAIN };
        let target = mount(&mut csi, &id, group).await;
        let root = fs::metadata(&target).expect("its root");
        assert_eq!(root.gid(), 5555);
        assert_eq!(root.mode() & 0o2070, 0o2070, "group may write and is inherited: {:o}", root.mode());
        assert!(
            as_user(&target, "5555", "echo x > own && mkdir sub && echo y > sub/f"),
            "{count} branches: a member writes"
        );
        assert_eq!(fs::metadata(target.join("sub/f")).expect("it").gid(), 5555, "new files get the group");
        assert!(!as_user(&target, "6666", "echo x > foreign"), "{count} branches: others do not write");
        let deep = fs::metadata(target.join("deep/deeper/file")).expect("the file");
        assert_eq!((deep.uid(), deep.gid(), deep.mode() & 0o7777), (77, 88, 0o640), "no recursive chown");
        assert!(fs::metadata(target.join("deep")).expect("it").gid() != 5555, "no recursive chown");

        refused(
            publish(&mut csi, &id, &machine.scratch.join("targets/other"), Use { group: "6666", ..PLAIN })
                .await,
            Code::AlreadyExists,
            &["5555", "6666"],
        );
        remove(&mut csi, &id).await;
    }
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn mount_flags_and_read_only_hold_and_another_way_on_the_same_target_is_refused() {
    let machine = Machine::new(&[128, 128, 128]);
    let mut csi = machine.agent.csi().await;
    for count in ["1", "3"] {
        let id = csi
            .create(&of_branches(&format!("flags{count}"), 90, count, &[]))
            .await
            .expect("CreateVolume")
            .volume_id;
        let flags = Use { flags: &["noexec", "noatime"], ..PLAIN };
        let target = mount(&mut csi, &id, flags).await;
        fs::write(target.join("program"), "#!/bin/sh\nexit 0\n").expect("a program");
        fs::set_permissions(target.join("program"), fs::Permissions::from_mode(0o755)).expect("its mode");
        let error = Command::new(target.join("program")).status().expect_err("it ran in spite of noexec");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        let options = mount_options(&target);
        for option in ["noexec", "noatime", "nosuid", "nodev"] {
            assert!(options.contains(option), "{count} branches: {option} is missing in {options}");
        }

        let reader = machine.scratch.join("targets/reader");
        let readonly = Use { readonly: true, ..flags };
        publish(&mut csi, &id, &reader, readonly).await.expect("readOnly beside a writer");
        let error = fs::write(reader.join("new"), "x").expect_err("written through a readOnly mount");
        assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
        assert!(fs::read(reader.join("program")).is_ok());
        fs::write(target.join("new"), "x").expect("the writer goes on");

        refused(publish(&mut csi, &id, &reader, flags).await, Code::AlreadyExists, &["rw", "ro"]);
        refused(publish(&mut csi, &id, &target, readonly).await, Code::AlreadyExists, &["rw", "ro"]);
        publish(&mut csi, &id, &reader, readonly).await.expect("the same again");
        refused(stage(&mut csi, &id, PLAIN).await, Code::AlreadyExists, &["noexec"]);

        for bad in ["suid", "dev", "data=journal"] {
            let bad_flag = Use { flags: &[bad], ..PLAIN };
            refused(
                publish(&mut csi, &id, &machine.scratch.join("targets/bad"), bad_flag).await,
                Code::InvalidArgument,
                &[bad],
            );
        }
        unpublish(&mut csi, &id, &reader).await.expect("the reader ends");
        remove(&mut csi, &id).await;
    }
    machine.is_clean();
}

fn mount_options(target: &Path) -> String {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let line = table
        .lines()
        .rfind(|l| l.split(' ').nth(4) == target.to_str())
        .unwrap_or_else(|| panic!("{} is not mounted", target.display()));
    line.split(' ').nth(5).expect("options").to_owned()
}
