//! What fits, what does not, and what is told of it.

use std::collections::BTreeMap;

use super::*;

async fn capacity(csi: &mut Csi, parameters: &[(&str, &str)]) -> proto::GetCapacityResponse {
    let request = proto::GetCapacityRequest {
        parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        ..Default::default()
    };
    csi.controller.get_capacity(request).await.expect("GetCapacity").into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_size_that_is_told_is_the_largest_that_is_made() {
    let machine = Machine::new(&[500, 700, 900]);
    let mut csi = machine.agent.csi().await;
    for parameters in [
        &[("splitQuantum", "16Mi")][..],
        &[("splitQuantum", "16Mi"), ("maxBranches", "1")],
        &[("splitQuantum", "16Mi"), ("strategy", "balanced")],
        &[("splitQuantum", "16Mi"), ("maxBranches", "2"), ("fsType", "xfs")],
        &[("splitQuantum", "16Mi"), ("fsType", "btrfs")],
        &[("splitQuantum", "16Mi"), ("branchFormat", "directory"), ("enforcement", "none")],
    ] {
        let room = capacity(&mut csi, parameters).await;
        let largest = u64::try_from(room.maximum_volume_size.expect("maximum_volume_size")).expect("a size");
        assert!(largest > 300 * MIB, "{parameters:?}: {room:?}");
        assert!(room.available_capacity >= room.maximum_volume_size.unwrap_or_default(), "{room:?}");
        refused(
            csi.create(&Wanted::new("larger", largest + 16 * MIB, parameters)).await,
            Code::ResourceExhausted,
            &["largest", &union_csi::domain::Bytes::new(largest).shown()],
        );
        let volume = csi
            .create(&Wanted::new("largest", largest, parameters))
            .await
            .unwrap_or_else(|e| panic!("{parameters:?}: {largest} was told as possible: {e}"));
        assert!(volume.capacity_bytes >= i64::try_from(largest).expect("a size"));
        let target = mount(&mut csi, "largest", PLAIN).await;
        fs::write(target.join("file"), "x").expect("a file");
        remove(&mut csi, "largest").await;
        assert_eq!(capacity(&mut csi, parameters).await, room, "{parameters:?}: the room is there again");
    }
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_hundred_volumes_at_once_those_that_fit_are_made_and_the_rest_when_others_go() {
    const DISK: u64 = 400;
    let machine = Machine::new(&[DISK; 3]);
    let mut csi = machine.agent.csi().await;
    // 32 MiB of files need 48 MiB of disk in steps of 16: each disk has room for few, all together for less than 100.
    let wanted =
        |i: usize| Wanted::new(&format!("v{i}"), 32 * MIB, &[("splitQuantum", "16Mi"), ("maxBranches", "1")]);
    let mut waiting: Vec<usize> = (0..100).collect();
    let mut made_at_all = 0;
    let mut rounds = 0;
    while !waiting.is_empty() {
        rounds += 1;
        let calls: Vec<_> = waiting
            .drain(..)
            .map(|i| {
                let mut csi = csi.clone();
                tokio::spawn(async move { (i, csi.create(&wanted(i)).await) })
            })
            .collect();
        let mut made = Vec::new();
        for call in calls {
            let (i, result) = call.await.expect("no panic");
            match result {
                Ok(volume) => made.push(volume.volume_id),
                Err(error) => {
                    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
                    waiting.push(i);
                }
            }
        }
        let mut promised: BTreeMap<String, u64> = BTreeMap::new();
        for id in &made {
            for (pool, size) in machine.plan_of(id) {
                *promised.entry(pool).or_default() += size;
            }
        }
        for (pool, sum) in &promised {
            assert!(*sum <= DISK * MIB, "{pool} has promised {sum} bytes");
        }
        assert!(!made.is_empty(), "round {rounds} made nothing and {} wait", waiting.len());
        if !waiting.is_empty() {
            let room = capacity(&mut csi, &[("splitQuantum", "16Mi"), ("maxBranches", "1")]).await;
            let most = room.maximum_volume_size.expect("maximum_volume_size");
            assert!(most < 32 << 20, "{} were refused and {most} bytes would fit", waiting.len());
        }
        assert_eq!(machine.branches().len(), made.len(), "a refused volume left a branch");
        made_at_all += made.len();
        for id in made {
            csi.delete(&id).await.expect("DeleteVolume");
        }
    }
    assert_eq!(made_at_all, 100);
    assert!(rounds > 1, "all fitted at once: the test proves nothing");
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn create_volume_again_is_the_same_volume_or_already_exists() {
    let machine = Machine::new(&[256, 256]);
    let mut csi = machine.agent.csi().await;
    let request =
        |required: u64, limit: u64, parameters: &[(&str, &str)], modes: &[Mode]| proto::CreateVolumeRequest {
            name: "same".to_owned(),
            capacity_range: Some(proto::CapacityRange {
                required_bytes: i64::try_from(required * MIB).expect("a size"),
                limit_bytes: i64::try_from(limit * MIB).expect("a size"),
            }),
            volume_capabilities: modes.iter().map(|m| mounted(*m)).collect(),
            parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            ..Default::default()
        };
    let class = [("splitQuantum", "16Mi")];
    let first = csi.controller.create_volume(request(64, 128, &class, &[WRITER])).await;
    let first = first.expect("CreateVolume").into_inner().volume.expect("a volume");
    let has = u64::try_from(first.capacity_bytes).expect("a size") / MIB;
    for same in [
        request(64, 128, &class, &[WRITER]),
        request(32, 0, &class, &[WRITER]),
        request(has, has + 1, &class, &[WRITER]),
        request(64, 128, &class, &[Mode::SingleNodeMultiWriter]),
        request(64, 128, &class, &[Mode::SingleNodeReaderOnly]),
    ] {
        let volume =
            csi.controller.create_volume(same.clone()).await.unwrap_or_else(|e| panic!("{same:?}: {e}"));
        assert_eq!(volume.into_inner().volume.expect("a volume"), first, "{same:?}");
    }
    let mut block = request(64, 128, &class, &[WRITER]);
    for capability in &mut block.volume_capabilities {
        capability.access_type = Some(AccessType::Block(proto::volume_capability::BlockVolume {}));
    }
    for (other, word) in [
        (request(has + 1, 0, &class, &[WRITER]), "required_bytes"),
        (request(8, 16, &class, &[WRITER]), "limit_bytes"),
        (request(64, 128, &[("splitQuantum", "32Mi")], &[WRITER]), "splitQuantum"),
        (request(64, 128, &[("splitQuantum", "16Mi"), ("fsType", "xfs")], &[WRITER]), "fsType"),
        (request(64, 128, &class, &[Mode::MultiNodeReaderOnly]), "volume_capabilities"),
        (block, "volume_capabilities"),
    ] {
        refused(csi.controller.create_volume(other).await, Code::AlreadyExists, &["same", word]);
    }
    assert_eq!(machine.branches().len(), 1, "one volume of one branch");
    csi.delete("same").await.expect("DeleteVolume");
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn list_volumes_pages_name_every_volume_once() {
    let machine = Machine::new(&[256]);
    let mut csi = machine.agent.csi().await;
    let names: Vec<_> = (0..7).map(|i| format!("v{i}")).collect();
    for name in &names {
        csi.create(&Wanted::new(name, 4 * MIB, &[("splitQuantum", "1Mi")])).await.expect("CreateVolume");
    }
    let page = |max_entries: i32, starting_token: &str| {
        let request = proto::ListVolumesRequest { max_entries, starting_token: starting_token.to_owned() };
        let mut controller = csi.controller.clone();
        async move { controller.list_volumes(request).await.map(tonic::Response::into_inner) }
    };
    let (mut seen, mut token) = (Vec::new(), String::new());
    loop {
        let reply = page(3, &token).await.expect("ListVolumes");
        assert!(reply.entries.len() <= 3);
        seen.extend(reply.entries.into_iter().filter_map(|e| e.volume).map(|v| v.volume_id));
        token = reply.next_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(seen, names);
    assert_eq!(page(0, "").await.expect("all").entries.len(), 7);
    refused(page(-1, "").await, Code::InvalidArgument, &["max_entries"]);
    refused(page(3, "v2").await, Code::Aborted, &["starting_token"]);
    for name in &names {
        csi.delete(name).await.expect("DeleteVolume");
    }
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_class_asks_for_is_what_it_gets() {
    let scratch = Scratch::new();
    let disks: Vec<_> = [300, 400, 500]
        .iter()
        .enumerate()
        .map(|(i, mib)| disk(&scratch, &format!("disk{i}"), "ext4", *mib))
        .collect();
    let mut yaml = String::from("nodeLabels: { zone: a }\n");
    // The helper writes the pools last; these have labels and media, so they come by the agent's own file.
    yaml.push_str("pools:\n");
    for (i, (media, tier)) in [("hdd", "slow"), ("ssd", "fast"), ("nvme", "fast")].iter().enumerate() {
        fs::create_dir(disks[i].join("pool")).expect("a pool directory");
        yaml.push_str(&format!(
            "  - {{ name: disk{i}, path: {}, reserve: \"0\", media: {media}, labels: {{ tier: {tier} }} }}\n",
            disks[i].join("pool").display()
        ));
    }
    let agent = Agent::start_with(Path::new(PROGRAM), scratch.path(), &yaml);
    let machine = Machine { agent, disks, scratch };
    let mut csi = machine.agent.csi().await;
    let quantum = ("splitQuantum", "16Mi");
    for (mib, parameters, pools) in [
        (64, &[quantum, ("media", "hdd")][..], &["disk0"][..]),
        (64, &[quantum, ("media", "ssd")], &["disk1"]),
        (600, &[quantum, ("media", "ssd,nvme")], &["disk1", "disk2"]),
        (600, &[quantum, ("poolSelector", "tier=fast")], &["disk1", "disk2"]),
        (
            64,
            &[quantum, ("nodeSelector", "zone=a"), ("minBranches", "2"), ("poolSelector", "tier=fast")],
            &["disk1", "disk2"],
        ),
        (300, &[quantum, ("minBranches", "3")], &["disk0", "disk1", "disk2"]),
        (300, &[quantum, ("strategy", "balanced")], &["disk0", "disk1", "disk2"]),
        // The smallest disk that holds it.
        (200, &[quantum], &["disk0"]),
        (310, &[quantum], &["disk1"]),
    ] {
        let plan = machine.json(&format!(
            "/v1/plan?size={mib}Mi&{}",
            parameters.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join("&")
        ));
        csi.create(&Wanted::new("class", mib * MIB, parameters))
            .await
            .unwrap_or_else(|e| panic!("{parameters:?}: {e}"));
        let mut made = machine.plan_of("class");
        made.sort();
        let used: Vec<_> = made.iter().map(|(pool, _)| pool.as_str()).collect();
        assert_eq!(used, pools, "{mib} MiB, {parameters:?}");
        let mut planned: Vec<_> = plan["plan"]["branches"]
            .as_array()
            .unwrap_or_else(|| panic!("{plan}"))
            .iter()
            .map(|b| (b["pool"].as_str().expect("a pool").to_owned(), b["size"].as_u64().expect("a size")))
            .collect();
        planned.sort();
        assert_eq!(made, planned, "{parameters:?}: what /v1/plan told is what was made");
        if parameters.contains(&("strategy", "balanced")) {
            assert!(made[0].1 < made[1].1 && made[1].1 < made[2].1, "in proportion: {made:?}");
        }
        csi.delete("class").await.expect("DeleteVolume");
    }
    for (parameters, word) in [
        (&[quantum, ("media", "unknown")][..], "media"),
        (&[quantum, ("poolSelector", "tier=gold")], "tier"),
        (&[quantum, ("nodeSelector", "zone=b")], "zone"),
        (&[quantum, ("minBranches", "4")], "4"),
    ] {
        let result = csi.create(&Wanted::new("class", 64 * MIB, parameters)).await;
        refused(result, Code::ResourceExhausted, &["disk0", "disk1", "disk2", word]);
    }
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_union_is_made_when_it_is_needed_or_always_as_the_class_says() {
    let machine = Machine::new(&[256]);
    let mut csi = machine.agent.csi().await;
    for (union, kind) in [("whenNeeded", "bind"), ("always", "mergerfs")] {
        let id = csi
            .create(&of_branches("union", 32, "1", &[("union", union), ("mergerfs.cache.attr", "7")]))
            .await;
        let id = id.expect("CreateVolume").volume_id;
        let target = mount(&mut csi, &id, PLAIN).await;
        fs::write(target.join("file"), "x").expect("a file");
        assert_eq!(machine.served_by(&id), kind);
        if kind == "mergerfs" {
            let volume = machine.json(&format!("/v1/volumes/{id}"));
            assert_eq!(volume["local"]["options"]["cache.attr"], "7", "{volume}");
        }
        remove(&mut csi, &id).await;
    }
    machine.is_clean();
}
