//! `bench latency`: each CSI call of a volume's life, one volume after the other.

use std::time::Instant;

use serde_json::json;
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use super::agent::{Agent, Wanted};
use super::report::{Report, percentile};
use super::{disks, number, program, scratch};

const CALLS: [&str; 6] = ["CreateVolume", "Stage", "Publish", "Unpublish", "Unstage", "Delete"];

pub async fn run() -> Report {
    let volumes = number("BENCH_VOLUMES", 200);
    let scratch = scratch();
    let disks = disks(&scratch, 8, 4096, false);
    let agent = Agent::start(&program(), scratch.path(), &disks, "");
    let mut csi = agent.csi().await;
    let mut report = Report::new(&["branches", "p50 ms", "p99 ms"]);

    for branches in [1_u64, 3, 8] {
        let count = branches.to_string();
        let parameters = [
            ("minBranches", count.as_str()),
            ("maxBranches", count.as_str()),
            ("strategy", "balanced"),
            ("splitQuantum", "64Mi"),
            ("branchFormat", "image"),
        ];
        // One branch of 1 GiB each: what a user asks for is a little less than the images take.
        let bytes = branches * 960 * (1 << 20);
        let mut times: [Vec<f64>; 6] = Default::default();
        let mut to_published = Vec::new();
        for i in 0..volumes {
            let wanted = Wanted::new(&format!("latency-{branches}-{i}"), bytes, &parameters);
            let mut laps = [0.0; 6];
            let begun = Instant::now();
            let mut lap = Instant::now();
            let mut mark = |slot: &mut f64| {
                *slot = lap.elapsed().as_secs_f64() * 1000.0;
                lap = Instant::now();
            };
            let id = csi.create(&wanted).await.expect("CreateVolume").volume_id;
            mark(&mut laps[0]);
            csi.stage(&id, Mode::SingleNodeWriter).await.expect("NodeStageVolume");
            mark(&mut laps[1]);
            csi.publish(&id, Mode::SingleNodeWriter).await.expect("NodePublishVolume");
            mark(&mut laps[2]);
            to_published.push(begun.elapsed().as_secs_f64() * 1000.0);
            csi.unpublish(&id).await.expect("NodeUnpublishVolume");
            mark(&mut laps[3]);
            csi.unstage(&id).await.expect("NodeUnstageVolume");
            mark(&mut laps[4]);
            csi.delete(&id).await.expect("DeleteVolume");
            mark(&mut laps[5]);
            for (all, lap) in times.iter_mut().zip(laps) {
                all.push(lap);
            }
            if i % 50 == 49 {
                eprintln!("{branches} branches: {} of {volumes} volumes", i + 1);
            }
        }
        let mut add = |name: &str, values: &[f64]| {
            let (p50, p99) = (percentile(values, 0.5), percentile(values, 0.99));
            report.row(
                name,
                vec![count.clone(), format!("{p50:.1}"), format!("{p99:.1}")],
                json!({ "branches": branches, "p50_ms": p50, "p99_ms": p99, "volumes": volumes }),
            );
        };
        for (call, values) in CALLS.iter().zip(&times) {
            add(call, values);
        }
        add("create to published", &to_published);
    }
    report.note(format!(
        "{volumes} volumes for each number of branches, one after the other, image branches of 1 GiB, ext4 in ext4."
    ));
    report
}
