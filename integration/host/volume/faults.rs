//! Every place where the machine can fail, tried in turn; and a crash at every such place.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use union_csi::node::volume::VolumeError;
use union_csi::platform::{Gate, Host};

use super::rig::{DIRECTORY, IMAGE, Piece, Rig, Vol};

/// Fails effect number N once, or every effect from number N on, as for a process that is gone.
#[derive(Debug, Default)]
struct Faults {
    /// Effects until the failing one; negative: none fails.
    left: AtomicI64,
    crash: std::sync::atomic::AtomicBool,
    failed: AtomicU64,
    last: std::sync::Mutex<String>,
}

impl Faults {
    fn arm(&self, number: i64, crash: bool) {
        self.failed.store(0, Ordering::SeqCst);
        self.crash.store(crash, Ordering::SeqCst);
        self.left.store(number, Ordering::SeqCst);
    }

    /// Disarms, and tells whether anything failed.
    fn disarm(&self) -> bool {
        self.left.store(i64::MIN / 2, Ordering::SeqCst);
        self.crash.store(false, Ordering::SeqCst);
        self.failed.load(Ordering::SeqCst) > 0
    }

    fn last(&self) -> String {
        self.last.lock().expect("last").clone()
    }
}

impl Gate for Faults {
    fn enter(&self, effect: &'static str, subject: &str) -> io::Result<()> {
        let left = self.left.fetch_sub(1, Ordering::SeqCst);
        let fails = left == 0 || (left < 0 && self.crash.load(Ordering::SeqCst));
        if !fails {
            return Ok(());
        }
        if self.failed.fetch_add(1, Ordering::SeqCst) == 0 {
            *self.last.lock().expect("last") = format!("{effect} {subject}");
        }
        Err(io::Error::from_raw_os_error(libc::EIO))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Stage,
    Publish,
    Unpublish,
    Unstage,
}

async fn take(rig: &Rig, vol: &Vol, step: Step) -> Result<(), VolumeError> {
    match step {
        Step::Stage => rig.volumes.stage(&vol.stage()).await,
        Step::Publish => rig.volumes.publish(&vol.publish()).await,
        Step::Unpublish => rig.volumes.unpublish(&vol.id, &vol.target).await,
        Step::Unstage => rig.volumes.unstage(&vol.id, &vol.staging).await,
    }
}

/// A node whose machine and whose way to other nodes can fail, and a volume that it may use.
async fn on_faulty_ground(pieces: &[Piece<'_>]) -> (Rig, Arc<Faults>, Vol) {
    let mut rig = Rig::new(&["a", "b", "far", "far2"]);
    let faults = Arc::new(Faults::default());
    faults.disarm();
    rig.fabric.behind(faults.clone());
    rig.restart(&Host::behind(faults.clone())).await;
    let vol = rig.volume(pieces).await;
    rig.grant(&vol, 1, 1).await;
    (rig, faults, vol)
}

/// Fails each effect of each call in turn; each failed call is repeated and then must succeed, and at the end nothing is
/// left. Tells how many places there were.
async fn fail_everywhere(pieces: &[Piece<'_>], crash: bool) -> u64 {
    let steps = [Step::Stage, Step::Publish, Step::Unpublish, Step::Unstage];
    let (rig, faults, vol) = on_faulty_ground(pieces).await;
    rig.up(&vol).await;
    fs::write(vol.target.join("file"), "content").expect("write");
    rig.down(&vol).await;
    let mut places = 0;
    for failing in steps {
        for number in 0.. {
            let mut hit = false;
            for step in steps {
                if step != failing {
                    take(&rig, &vol, step).await.unwrap_or_else(|e| {
                        panic!("{step:?} after {failing:?} with fault {number} ({}): {e}", faults.last())
                    });
                    continue;
                }
                faults.arm(number, crash);
                let result = take(&rig, &vol, step).await;
                hit = faults.disarm();
                assert!(hit || result.is_ok(), "{step:?} without a fault: {result:?}");
                // What was refused, and what only seemed done, is done by the next call.
                take(&rig, &vol, step).await.unwrap_or_else(|e| {
                    panic!("{step:?} repeated after fault {number} ({}): {e}", faults.last())
                });
                if step == Step::Publish {
                    let content = fs::read_to_string(vol.target.join("file"));
                    assert_eq!(content.expect("the file"), "content", "fault {number} ({})", faults.last());
                }
            }
            rig.assert_nothing_left_after(&format!("{failing:?} with fault {number} ({})", faults.last()));
            assert_eq!(rig.fabric.attached_now(), [], "{failing:?} with fault {number} ({})", faults.last());
            if !hit {
                break;
            }
            places += 1;
        }
    }
    places
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_calls_that_fail_anywhere_succeed_when_repeated() {
    let places = fail_everywhere(&[("a", 24, IMAGE), ("b", 24, DIRECTORY)], false).await;
    assert!(places > 60, "only {places} places were tried");
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_one_branch_survives_a_fault_anywhere() {
    let places = fail_everywhere(&[("a", 24, IMAGE)], false).await;
    assert!(places > 40, "only {places} places were tried");
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_over_nodes_survives_a_fault_anywhere_also_of_the_way_between() {
    let pieces = [("a", 24, IMAGE), ("far", 24, IMAGE), ("far2", 24, DIRECTORY)];
    let places = fail_everywhere(&pieces, false).await;
    assert!(places > 80, "only {places} places were tried");
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_one_branch_elsewhere_survives_a_crash_anywhere() {
    let places = fail_everywhere(&[("far", 24, IMAGE)], true).await;
    assert!(places > 40, "only {places} places were tried");
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_staging_crashed_anywhere_has_nothing_attached_elsewhere_after_the_next_start() {
    let pieces = [("a", 24, IMAGE), ("far", 24, IMAGE), ("far2", 24, DIRECTORY)];
    let (mut rig, faults, vol) = on_faulty_ground(&pieces).await;
    let mut left = 0;
    for number in 0.. {
        faults.arm(number, true);
        let staged = rig.volumes.stage(&vol.stage()).await;
        // Whatever it would still have done it does no more: its agent is gone.
        let hit = faults.failed.load(Ordering::SeqCst) > 0;
        faults.disarm();
        left += usize::from(!rig.fabric.attached_now().is_empty());
        rig.restart(&Host::behind(faults.clone())).await;
        rig.volumes.recover().await;
        rig.volumes.sweep().await;
        if staged.is_err() {
            assert_eq!(rig.fabric.attached_now(), [], "fault {number} ({})", faults.last());
        }
        rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
        rig.assert_nothing_left_after(&format!("fault {number} ({})", faults.last()));
        assert_eq!(rig.fabric.attached_now(), [], "fault {number} ({})", faults.last());
        if !hit {
            break;
        }
    }
    assert!(left > 10, "something was attached after {left} crashes only");
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_calls_that_crash_anywhere_are_finished_by_the_next() {
    let places = fail_everywhere(&[("a", 24, IMAGE), ("b", 24, DIRECTORY)], true).await;
    assert!(places > 60, "only {places} places were tried");
}

/// The kernel gives the number of a device whose last mount is gone to the next mount on the machine.
#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_unstaging_failed_anywhere_is_not_taken_for_one_that_was_staged_meanwhile() {
    for format in [IMAGE, DIRECTORY] {
        let (rig, faults, vol) = on_faulty_ground(&[("a", 24, format), ("b", 24, format)]).await;
        let other = rig.volume(&[("a", 24, format), ("b", 24, format)]).await;
        for number in 0.. {
            rig.volumes.stage(&vol.stage()).await.expect("stage");
            faults.arm(number, false);
            let _ = rig.volumes.unstage(&vol.id, &vol.staging).await;
            let hit = faults.disarm();
            rig.volumes.stage(&other.stage()).await.expect("stage the other");
            let again = rig.volumes.unstage(&vol.id, &vol.staging).await;
            again.unwrap_or_else(|e| panic!("unstage after fault {number} ({}): {e}", faults.last()));
            rig.volumes.unstage(&other.id, &other.staging).await.expect("unstage the other");
            rig.assert_nothing_left_after(&format!("{format:?} with fault {number} ({})", faults.last()));
            if !hit {
                assert!(number > 10, "only {number} places were tried");
                break;
            }
        }
    }
}
