//! The union's process ends or hangs; the agent ends.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::ground::{Container, Ground, READER, Records, assert_records, csi, readable, split, until};
use crate::support::signal;

fn errno(result: std::io::Result<impl Sized>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_mergerfs_comes_back_under_its_writers_here_and_in_containers() {
    let ground = Ground::new(3, 128);
    let (id, target) = ground.up(&split("killed", 150, 3, &[])).await;
    fs::create_dir(target.join("shared")).expect("a directory");
    fs::write(target.join("shared/file"), "shared").expect("a file");
    let here = target.display();
    let script =
        format!("mkdir {here}-ro; mount --bind {here}/shared {here}-ro; mount -o remount,bind,ro {here}-ro");
    let container = Container::new(&script);
    let read_only = ground.scratch.join(&format!("targets/{id}-ro"));
    let records = Records::write(&target.join("records"));
    records.progress().await;
    for round in 1..=3 {
        let pid = ground.mergerfs(&id);
        let begun = Instant::now();
        signal(pid, Signal::SIGKILL);
        until("another mergerfs", || match ground.told(&id)["local"]["pid"].as_u64() {
            Some(now) if now != u64::from(pid) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
        for place in [&target, &ground.scratch.join("staging").join(&id), &container.path(&target)] {
            until("a healed path", || {
                fs::read_to_string(place.join("shared/file")).map_err(|e| format!("{}: {e}", place.display()))
            })
            .await;
        }
        let inside = container.path(&read_only);
        until("the healed sub-directory", || {
            fs::read_to_string(inside.join("file")).map_err(|e| e.to_string())
        })
        .await;
        println!("round {round}: everything reads again {:?} after the kill", begun.elapsed());
        assert_eq!(errno(fs::write(inside.join("new"), "x")), Some(libc::EROFS), "it became writable");
        fs::write(container.path(&target).join(format!("from-container-{round}")), "x")
            .expect("the container writes");
        records.progress().await;
        let told = ground.told(&id);
        assert_eq!(told["local"]["heals"].as_u64(), Some(round), "{told}");
    }
    let (count, errors) = records.end();
    assert_records(&target.join("records"), count, &errors);
    println!("{count} records, {} attempts failed while there was no union", errors.len());
    drop(container);
    let _ = fs::remove_dir(&read_only);
    ground.down(&id).await;
    ground.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mergerfs_that_hangs_is_told_so_and_replaced_and_hinders_no_other_volume() {
    let ground = Ground::new(2, 256);
    let (id, target) = ground.up(&split("hung", 64, 2, &[])).await;
    let (other, other_target) = ground.up(&split("other", 128, 2, &[])).await;
    fs::write(target.join("file"), "kept").expect("a file");
    let records = Records::write(&other_target.join("records"));
    let pid = ground.mergerfs(&id);
    let begun = Instant::now();
    signal(pid, Signal::SIGSTOP);
    until("the report", || {
        let told = ground.told(&id);
        let message = told["message"].as_str().unwrap_or_default().to_owned();
        if told["state"] == "abnormal" && message.contains("answer") { Ok(()) } else { Err(told.to_string()) }
    })
    .await;
    println!("reported {:?} after it stopped", begun.elapsed());
    // Other volumes are made, used and removed meanwhile.
    let (third, third_target) = ground.up(&split("third", 48, 2, &[])).await;
    fs::write(third_target.join("file"), "x").expect("a file in another volume");
    ground.down(&third).await;
    // Whoever asks waits in the kernel until the connection is aborted.
    let file = target.join("file");
    let reader = tokio::task::spawn_blocking(move || {
        (0..1200).find_map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            fs::read_to_string(&file).ok()
        })
    });
    let read = tokio::time::timeout(Duration::from_secs(120), reader).await.expect("healed in time");
    println!("healed {:?} after it stopped", begun.elapsed());
    assert_eq!(read.expect("the reader").as_deref(), Some("kept"));
    let (count, errors) = records.end();
    assert!(errors.is_empty(), "another volume noticed: {:?}", errors.first_key_value());
    assert_records(&other_target.join("records"), count, &errors);
    ground.down(&id).await;
    ground.down(&other).await;
    ground.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_the_agent_is_not_noticed_by_any_volume_in_use() {
    let mut ground = Ground::new(3, 200);
    let (one, one_target) = ground.up(&split("one", 32, 1, &[])).await;
    let (three, three_target) = ground.up(&split("three", 150, 3, &[])).await;
    let (reads, reads_target) = ground.up(&split("reads", 64, 2, &[])).await;
    let filled = Records::write(&reads_target.join("records"));
    filled.progress().await;
    let (filled, _) = filled.end();
    let mut calls = csi(&ground).await;
    calls.unpublish(&reads).await.expect("NodeUnpublishVolume");
    calls.unstage(&reads).await.expect("NodeUnstageVolume");
    calls.stage(&reads, READER).await.expect("NodeStageVolume, reader only");
    calls.publish(&reads, READER).await.expect("NodePublishVolume, reader only");
    assert_eq!(ground.told(&reads)["local"]["union"], "overlay", "{}", ground.told(&reads));

    let writers =
        [Records::write(&one_target.join("records")), Records::write(&three_target.join("records"))];
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let reader = {
        let (stop, directory) = (stop.clone(), reads_target.join("records"));
        std::thread::spawn(move || {
            let mut number = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                readable(&directory, number % filled)?;
                number += 1;
            }
            Ok::<_, String>(number)
        })
    };
    let pid = ground.mergerfs(&three);
    for round in 0..4 {
        for writer in &writers {
            writer.progress().await;
        }
        let begun = Instant::now();
        ground.agent.kill();
        writers[1].progress().await;
        ground.agent.restart();
        println!("round {round}: ready again after {:?}", begun.elapsed());
        assert_eq!(ground.mergerfs(&three), pid, "its mergerfs was replaced");
        for id in [&one, &three, &reads] {
            let told = ground.told(id);
            assert_eq!(told["state"], "healthy", "{told}");
            assert_eq!(told["local"]["heals"], 0, "{told}");
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let read = reader.join().expect("the reader").expect("no error in the reader");
    println!("{read} reads without an error");
    for (writer, target) in writers.into_iter().zip([&one_target, &three_target]) {
        let (count, errors) = writer.end();
        assert!(errors.is_empty(), "{:?}", errors.first_key_value());
        assert_records(&target.join("records"), count, &errors);
    }
    for id in [&one, &three, &reads] {
        ground.down(id).await;
    }
    ground.assert_nothing_left().await;
}
