//! One image, one device: nothing attaches an image twice, and nothing detaches another's.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use union_csi::platform::Host;
use union_csi::platform::loopdev::LoopOptions;

use super::ground::{Container, Ground, WRITER, csi, readable, split, until, write_record};
use crate::support::{Scratch, run};

/// The devices that the kernel says have this file.
fn devices_of(file: &Path) -> Vec<String> {
    let out = run("losetup", &["-n", "-O", "NAME", "-j", file.to_str().expect("utf-8")]);
    out.lines().map(str::to_owned).collect()
}

fn image(scratch: &Scratch) -> PathBuf {
    let file = scratch.join("branch/disk.img");
    fs::create_dir_all(file.parent().expect("a parent")).expect("a directory");
    fs::File::create(&file).expect("a file").set_len(16 << 20).expect("its size");
    file
}

fn options() -> LoopOptions {
    LoopOptions { direct_io: true, autoclear: true, ..LoopOptions::default() }
}

#[test]
fn an_image_has_one_device_however_many_attach_it_at_once() {
    let scratch = Scratch::new();
    let file = image(&scratch);
    for _ in 0..10 {
        let together = Barrier::new(8);
        let held: Vec<_> = std::thread::scope(|scope| {
            let attach = || {
                together.wait();
                // A host of its own, as another agent has: they share nothing but the kernel.
                Host::new().loop_attach(&file, &options())
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(attach)).collect();
            threads.into_iter().filter_map(|t| t.join().expect("no panic").ok()).collect()
        });
        assert!(!held.is_empty(), "nobody attached it");
        assert!(held.iter().all(|h| h.device.path == held[0].device.path), "two devices: {held:?}");
        assert_eq!(devices_of(&file).len(), 1);
    }
}

#[test]
fn an_image_that_is_attached_under_another_name_is_not_attached_again() {
    let scratch = Scratch::new();
    let file = image(&scratch);
    let elsewhere = scratch.join("elsewhere/other.img");
    fs::create_dir_all(elsewhere.parent().expect("a parent")).expect("a directory");
    fs::hard_link(&file, &elsewhere).expect("a second name");
    let host = Host::new();
    let held = host.loop_attach(&elsewhere, &options()).expect("attached");
    let error = host.loop_attach(&file, &options()).expect_err("the same file was attached twice");
    assert_eq!(error.errno(), Some(libc::EWOULDBLOCK), "{error}");
    assert_eq!(devices_of(&file).len(), 1);
    drop(held);
    host.loop_attach(&file, &options()).expect("free again when the device is gone");
}

#[test]
fn a_device_that_is_another_program_s_by_now_is_not_detached() {
    let scratch = Scratch::new();
    let file = image(&scratch);
    let host = Host::new();
    let raw = LoopOptions { autoclear: false, tag: "of-one".to_owned(), ..options() };
    let device = host.loop_attach(&file, &raw).expect("attached").device.path;
    assert!(!host.loop_detach(&device, "of-another").expect("asked"), "it was detached");
    assert_eq!(devices_of(&file).len(), 1);
    assert!(host.loop_detach(&device, "of-one").expect("detached"));
    assert_eq!(devices_of(&file), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_that_lives_on_in_another_namespace_never_leads_to_a_second_device_or_a_removal() {
    let mut ground = Ground::new(1, 256);
    let (id, target) = ground.up(&split("lives-on", 48, 1, &[])).await;
    (0..5).try_for_each(|n| write_record(&target, n)).expect("records");
    let image = ground.disks[0].join("pool/branches").join(format!("{id}-0/disk.img"));
    let devices = devices_of(&image);
    assert_eq!(devices.len(), 1);
    // The mounts of the other namespace at the volume's own paths go with their directories; this one does not.
    let inside = ground.scratch.join("inside");
    fs::create_dir(&inside).expect("a directory");
    let container = Container::new(&format!("mount --bind {} {}", target.display(), inside.display()));
    let inside = container.path(&inside);
    let mut calls = csi(&ground).await;
    for round in 0..3 {
        calls.unpublish(&id).await.expect("NodeUnpublishVolume");
        calls.unstage(&id).await.expect("NodeUnstageVolume");
        assert_eq!(devices_of(&image), devices, "round {round}: the other namespace has it mounted");
        // It is written there while it is staged here: one filesystem, which both see.
        write_record(&inside, 10 + round).expect("a record in the container");
        if round == 1 {
            ground.agent.kill();
            ground.agent.restart();
            calls = csi(&ground).await;
        }
        calls.stage(&id, WRITER).await.expect("NodeStageVolume");
        calls.publish(&id, WRITER).await.expect("NodePublishVolume");
        assert_eq!(devices_of(&image), devices, "round {round}: staged again");
        (0..5).chain(10..=10 + round).try_for_each(|n| readable(&target, n)).expect("the records");
    }
    calls.unpublish(&id).await.expect("NodeUnpublishVolume");
    calls.unstage(&id).await.expect("NodeUnstageVolume");
    let deleted = tokio::time::timeout(std::time::Duration::from_secs(3), calls.delete(&id)).await;
    assert!(!matches!(deleted, Ok(Ok(()))), "it was deleted while it is mounted");
    assert!(image.exists(), "the image was removed under a mount");
    (0..5).try_for_each(|n| readable(&inside, n)).expect("the records in the container");
    drop(container);
    until("its removal", || if image.exists() { Err("the image is there".to_owned()) } else { Ok(()) }).await;
    csi(&ground).await.delete(&id).await.expect("DeleteVolume");
    ground.assert_nothing_left().await;
}
