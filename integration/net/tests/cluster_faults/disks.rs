//! The disk of a branch's node is full, or fails.

use serde_json::json;

use super::{Pod, errnos, errors, longest, no_one_is_stuck};
use crate::support::Result;
use crate::support::cluster::{BOUND, Cluster, on_cluster};
use crate::support::faults::{Fault, Told, record};

const ENOSPC: i32 = 28;

/// Everything that is left on the pool of `b` is taken, also what is kept for root.
const FILL: &str = "dd if=/dev/zero of=/pool/junk bs=1M 2>/dev/null || true; dd if=/dev/zero of=/pool/junk2 bs=4k 2>/dev/null || true
     sync /pool; df -k /pool | tail -n 1";

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_full_disk_is_not_noticed_by_images_and_told_to_who_writes_to_a_directory() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "full", &json!({}))?;
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        let [image, directory] = &mut pods;
        a.machine.run(format!("echo known >{0}/known; sync -f {0}", directory.data))?;
        eprintln!("{}", b.machine.run_within(BOUND, FILL)?);
        // What is promised to an image is taken from the disk when it is made.
        a.machine.run_within(
            BOUND,
            format!("dd if=/dev/urandom of={}/load bs=64k count=300 conv=fsync", image.data),
        )?;
        image.goes_on()?;
        assert_eq!(image.told().errors, [], "an image has its room");
        let refused = a.machine.attempt(
            BOUND,
            format!("dd if=/dev/urandom of={}/load bs=64k count=64 conv=fsync", directory.data),
        )?;
        assert!(!refused.success() && refused.errors().contains("No space left"), "{refused}");
        assert_eq!(a.machine.run(format!("cat {}/known", directory.data))?, "known", "nothing is hidden");
        directory.fails();
        let (_, said) = directory.condition()?;
        eprintln!("condition of the directory: {said}");
        b.machine.run("rm /pool/junk /pool/junk2; sync /pool")?;
        directory.goes_on()?;
        let [image, directory] = pods;
        assert_eq!(errnos(&image.leave()?), [] as [i32; 0]);
        let told = directory.leave()?;
        assert_eq!(errnos(&told), [ENOSPC]);
        record(
            "owner-full",
            &Fault {
                fault: "the disk of a branch's node is filled by something else".to_owned(),
                seen: "nothing, where the branch is an image; ENOSPC where it is a directory".to_owned(),
                longest_pause_seconds: told.longest_pause_seconds(),
                errors: errors(&[told]),
                after: "goes on by itself when there is room".to_owned(),
            },
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_full_disk_under_a_thin_image_gives_errors_and_takes_nothing_that_was_safe() {
    on_cluster(|cluster| {
        let mut pod = Pod::begin(cluster, "thin", "48Mi", json!({"provisioning": "thin"}))?;
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        b.machine.run_within(BOUND, FILL)?;
        let load = a
            .machine
            .attempt(BOUND, format!("dd if=/dev/urandom of={}/load bs=64k count=600 conv=fsync", pod.data))?;
        assert!(!load.success(), "there is no room for that: {load}");
        eprintln!("{load}");
        let told = pod.told();
        eprintln!("the writer beside it: {:?}; {:?}", errnos(&told), pod.condition()?);
        b.machine.run("rm /pool/junk /pool/junk2; sync /pool")?;
        let (cluster, told) = (pod.cluster, super::ends(pod.writer)?);
        // The filesystem may have stopped itself: an end and a new start make it whole from its journal.
        a.unmount(&pod.volume, "thin")?;
        let data = a.mount(&pod.volume, "thin")?;
        told.require_in(super::LOG, "x", &super::text(a, &data, super::LOG)?);
        super::leave(cluster, &pod.volume, "a", "thin")?;
        record(
            "owner-full-thin",
            &Fault {
                fault: "the disk of a branch's node is full, and the branch is a thin image".to_owned(),
                seen: "what needs room on the disk fails; the volume's filesystem may stop".to_owned(),
                longest_pause_seconds: None,
                errors: 1,
                after: "when there is room, a new start of the pod makes it whole again".to_owned(),
            },
        );
        Ok(())
    });
}

/// The pool of `b` on a device of device-mapper that can be made to fail.
fn on_mapper(cluster: &Cluster) -> Result {
    let b = cluster.node("b");
    b.stop_agent()?;
    b.machine.run(
        "umount /pool
         disk=$(readlink -f /disk/data)
         export DM_DISABLE_UDEV=1
         dmsetup create pool --table \"0 $(blockdev --getsz $disk) linear $disk 0\"
         dmsetup mknodes pool
         mount /dev/mapper/pool /pool",
    )?;
    b.start_agent_only()?;
    b.ready()
}

/// The disk under the pods' branches fails, and is back after a boot; what they were told.
fn fails_and_is_back(cluster: &Cluster, mut pods: Vec<Pod<'_>>) -> Result<Vec<Told>> {
    let b = cluster.node("b");
    b.machine.run(
        "export DM_DISABLE_UDEV=1
         dmsetup suspend --noflush --nolockfs pool
         dmsetup load pool --table \"0 $(blockdev --getsz $(readlink -f /disk/data)) error\"
         dmsetup resume pool",
    )?;
    for pod in &mut pods {
        pod.fails();
        let (given, said) = (errnos(&pod.told()), pod.unwell());
        eprintln!("{}: {given:?}: {said}", pod.claim());
    }
    let pool = cluster.within(BOUND, "the node reports its pool as failed", || {
        let nodes = cluster.storage_nodes();
        let b = nodes.iter().find(|n| n.meta.name == "b")?.clone();
        let pool = b.status.pools.first()?.clone();
        (pool.state != union_csi::domain::pool::PoolState::Ready).then_some(pool)
    });
    eprintln!("the pool: {:?} {}", pool.state, pool.message);
    no_one_is_stuck(cluster, "a");
    // The cable is back: a mounted filesystem that stopped itself is mounted anew by a boot.
    b.machine.pull_plug();
    b.boot()?;
    for pod in &mut pods {
        pod.goes_on()?;
    }
    pods.iter().for_each(Pod::well);
    pods.into_iter().map(Pod::leave).collect()
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_disk_that_fails_gives_errors_to_pods_elsewhere_and_their_safe_records_are_there_when_it_is_back() {
    on_cluster(|cluster| {
        on_mapper(cluster)?;
        let pods = Pod::both(cluster, "failing", &json!({"branchTimeout": "60s"}))?;
        let told = fails_and_is_back(cluster, Vec::from(pods))?;
        record(
            "owner-disk-fails",
            &Fault {
                fault: "the disk of a branch's node fails, and is back after a boot".to_owned(),
                seen: "its calls fail; the volume and the node's pool are reported as not well".to_owned(),
                longest_pause_seconds: longest(&told),
                errors: errors(&told),
                after: "the volume heals under the running pod".to_owned(),
            },
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_disk_that_fails_under_an_image_with_xfs_loses_nothing_that_was_safe() {
    on_cluster(|cluster| {
        on_mapper(cluster)?;
        // There is no smaller XFS.
        let xfs = json!({"branchTimeout": "60s", "fsType": "xfs"});
        let pod = Pod::begin(cluster, "failing-xfs", "304Mi", xfs)?;
        fails_and_is_back(cluster, vec![pod]).map(drop)
    });
}
