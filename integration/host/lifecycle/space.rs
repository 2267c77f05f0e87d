//! How much a volume holds, and what is told of it.

use super::*;

/// What `df` shows as size and as available.
fn df(path: &Path) -> (u64, u64) {
    let space = rustix::fs::statvfs(path).expect("statvfs");
    (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
}

#[tokio::test(flavor = "multi_thread")]
async fn df_shows_at_least_what_was_asked_for() {
    let machine = Machine::new(&[1200, 1400, 1600]);
    let mut csi = machine.agent.csi().await;
    let mut faults = Vec::new();
    for (format, more) in [
        ("image", &[("fsType", "ext4")][..]),
        ("image", &[("fsType", "xfs")]),
        ("image", &[("fsType", "btrfs")]),
        ("directory", &[("enforcement", "none")]),
    ] {
        for count in ["1", "3"] {
            let name = format!("{format}-{}-{count}", more[0].1);
            let more: Vec<_> = more.iter().copied().chain([("branchFormat", format)]).collect();
            let mut wanted = of_branches(&name, 1000, count, &more);
            wanted.bytes += 4097;
            let volume = csi.create(&wanted).await.unwrap_or_else(|e| panic!("CreateVolume {name}: {e}"));
            let id = volume.volume_id;
            let target = mount(&mut csi, &id, PLAIN).await;
            let (size, available) = df(&target);
            let asked = u64::try_from(wanted.bytes).expect("a size");
            if size < asked || volume.capacity_bytes < wanted.bytes {
                faults.push(format!("{name}: asked {asked}, told {}, df {size}", volume.capacity_bytes));
            }
            if available < asked / 100 * 98 {
                faults.push(format!("{name}: asked {asked}, available to its user {available}"));
            }
            remove(&mut csi, &id).await;
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_are_the_sums_over_the_branches() {
    let machine = Machine::new(&[128, 192, 256]);
    let mut csi = machine.agent.csi().await;
    let id = csi.create(&of_branches("stats", 300, "3", &[])).await.expect("CreateVolume").volume_id;
    let target = mount(&mut csi, &id, PLAIN).await;
    fs::write(target.join("file"), vec![1; 8 << 20]).expect("a file");
    fs::File::open(&target).and_then(|d| d.sync_all()).expect("fsync");
    let ask = |path: &Path| proto::NodeGetVolumeStatsRequest {
        volume_id: "stats".to_owned(),
        volume_path: path.display().to_string(),
        ..Default::default()
    };
    let reply = csi.node.node_get_volume_stats(ask(&target)).await.expect("NodeGetVolumeStats").into_inner();
    assert!(!reply.volume_condition.expect("a condition").abnormal);
    let of = |unit: proto::volume_usage::Unit| {
        reply.usage.iter().find(|u| u.unit == i32::from(unit)).unwrap_or_else(|| panic!("no {unit:?}"))
    };
    let (bytes, inodes) = (of(proto::volume_usage::Unit::Bytes), of(proto::volume_usage::Unit::Inodes));
    let mounts: Vec<_> =
        (0..3).map(|i| machine.scratch.join(&format!("state/volumes/{id}/branches/{i}"))).collect();
    let branches: Vec<_> = mounts.iter().map(|m| rustix::fs::statvfs(m).expect("a branch")).collect();
    let sum = |f: fn(&rustix::fs::StatVfs) -> u64| -> i64 {
        branches.iter().map(f).sum::<u64>().try_into().expect("a sum")
    };
    assert_eq!(bytes.total, sum(|s| s.f_blocks * s.f_frsize));
    assert_eq!(inodes.total, sum(|s| s.f_files));
    assert!(bytes.used >= 8 << 20, "{bytes:?}");
    assert!(inodes.used > 0 && inodes.available == sum(|s| s.f_favail), "{inodes:?}");
    assert!(bytes.available <= bytes.total - bytes.used, "{bytes:?}");

    refused(csi.node.node_get_volume_stats(ask(Path::new("/nowhere"))).await, Code::NotFound, &["stats"]);
    refused(
        csi.node.node_get_volume_stats(ask(Path::new(""))).await,
        Code::InvalidArgument,
        &["volume_path"],
    );
    remove(&mut csi, &id).await;
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_directories_serve_where_the_class_needs_no_enforcement_and_only_there() {
    let machine = Machine::new(&[128, 128]);
    let mut csi = machine.agent.csi().await;
    let enforced = of_branches("enforced", 100, "2", &[("branchFormat", "directory")]);
    refused(csi.create(&enforced).await, Code::ResourceExhausted, &["disk0", "disk1", "enforce"]);
    for count in ["1", "2"] {
        let more = [("branchFormat", "directory"), ("enforcement", "none")];
        let id = csi.create(&of_branches("plain", 64, count, &more)).await.expect("CreateVolume").volume_id;
        let target = mount(&mut csi, &id, PLAIN).await;
        fs::write(target.join("file"), "plain").expect("a file");
        csi.unpublish(&id).await.expect("NodeUnpublishVolume");
        csi.unstage(&id).await.expect("NodeUnstageVolume");
        let found = machine.disks.iter().flat_map(|d| {
            machine.branches().into_iter().map(move |b| d.join("pool/branches").join(b).join("data/file"))
        });
        let found: Vec<_> = found.filter_map(|f| fs::read_to_string(f).ok()).collect();
        assert_eq!(found, ["plain"], "the file lies plainly on one disk");
        csi.delete(&id).await.expect("DeleteVolume");
    }
    machine.is_clean();
}
