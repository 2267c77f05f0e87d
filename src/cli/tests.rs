use std::path::Path;

use axum::body::Body;
use axum::http::{Request, header};
use clap::CommandFactory;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tower::ServiceExt;

use super::output::Look;
use super::*;
use crate::config::Overrides;
use crate::domain::pool::PoolView;
use crate::http::api::{PlanAnswer, Status, VolumeView};
use crate::http::fixture::{self, FakeMachine};

const WIDE: Look = Look { width: 100, colour: false };
const NARROW: Look = Look { width: 60, colour: false };

/// What the made-up agent answers.
fn ask<T: DeserializeOwned>(path: &str) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let router = crate::http::router(fixture::view(FakeMachine::default(), false));
        let request = Request::get(path).header(header::HOST, "localhost").body(Body::empty()).unwrap();
        let body = router.oneshot(request).await.unwrap().into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&body)
            .unwrap_or_else(|e| panic!("{path}: {e}: {}", String::from_utf8_lossy(&body)))
    })
}

fn widest(text: &str) -> usize {
    text.lines().filter(|l| !l.starts_with('!')).map(|l| l.chars().count()).max().unwrap_or(0)
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

/// `systemd/union-csi.service`: the values of a key.
fn unit(key: &str) -> Vec<&'static str> {
    let unit = include_str!("../../systemd/union-csi.service");
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

#[test]
fn the_service_says_what_the_command_line_understands() {
    let commands: Vec<_> = unit("ExecStartPre").into_iter().chain(unit("ExecStart")).collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    for command in commands {
        let words: Vec<_> = command.split_whitespace().collect();
        assert!(words[0].ends_with("/union-csi"), "{command}");
        Cli::try_parse_from(&words).unwrap_or_else(|e| panic!("{command}: {e}"));
    }
    Cli::try_parse_from(["union-csi", "volume", "mount", "media", "/srv/media", "--at-boot"]).unwrap();
}

#[test]
fn the_service_makes_the_state_directory_that_the_agent_uses_by_itself() {
    let config = crate::config::parse(Path::new("agent.yaml"), "", &Overrides::default(), "box").unwrap();
    assert_eq!(
        unit("StateDirectory"),
        [config.state_dir.strip_prefix("/var/lib").unwrap().to_str().unwrap()]
    );
    let mode = u32::from_str_radix(unit("StateDirectoryMode")[0], 8).unwrap();
    assert_eq!(mode, 0o700, "as the agent makes it: private");
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in Cli::command().get_subcommands_mut() {
        let help = command.render_long_help().to_string();
        let nested = command.get_subcommands().next().is_some();
        assert!(nested || help.contains("Examples:"), "{} has no example:\n{help}", command.get_name());
    }
}

#[test]
fn status_is_one_screen() {
    let (status, volumes): (Status, Vec<VolumeView>) = (ask("/v1/status"), ask("/v1/volumes"));
    let text = status::text(WIDE, &status, &volumes);
    assert!(widest(&text) <= 100);
    insta::assert_snapshot!("status_100", text);
    let text = status::text(NARROW, &status, &volumes);
    assert!(widest(&text) <= 60, "{}", widest(&text));
    insta::assert_snapshot!("status_60", text);
}

#[test]
fn a_volume_is_diagnosed_in_one_screen() {
    let pools: Vec<PoolView> = ask("/v1/pools");
    let status: Status = ask("/v1/status");
    for id in ["media", "pvc-5d0e"] {
        let volume: VolumeView = ask(&format!("/v1/volumes/{id}"));
        insta::assert_snapshot!(format!("doctor_{id}"), doctor::screen(WIDE, &volume, &pools, &status));
    }
}

#[test]
fn a_plan_and_a_refusal_are_explained() {
    let plan: PlanAnswer = serde_json::from_str(
        r#"{"feasible":true,"plan":{"capacity":1099511627776,"branches":[
            {"index":0,"node":"nas","pool":"disk1","size":805306368000,"usable":805306368000,"format":"directory"},
            {"index":1,"node":"nas","pool":"disk2","size":301000000000,"usable":294205259776,"format":"image","fsType":"ext4"}
        ]}}"#,
    )
    .unwrap();
    insta::assert_snapshot!("plan", plan::text(WIDE, &plan));
    let refusal: PlanAnswer = serde_json::from_str(
        r#"{"feasible":false,"refusal":{"requested":5497558138880,"largest":1253656657920,
            "reason":"5Ti does not fit: the largest volume that fits now is 1.1 TiB (1253656657920 bytes); 1 of 2 pools qualify","pools":[
            {"node":"nas","pool":"disk1","allocatable":770000000000,"usable":770000000000,"reason":"gives all it has"},
            {"node":"nas","pool":"usb","allocatable":0,"usable":0,"reason":"absent: nothing is mounted at /mnt/usb; mount the filesystem with UUID 51c7-aa02"}
        ]}}"#,
    )
    .unwrap();
    insta::assert_snapshot!("refusal", plan::text(WIDE, &refusal));
    let narrow = plan::text(NARROW, &refusal);
    assert!(narrow.lines().skip(2).all(|l| l.chars().count() <= 60), "{narrow}");
}

#[test]
fn a_hostile_name_cannot_write_to_the_terminal() {
    let mut volumes: Vec<VolumeView> = ask("/v1/volumes");
    volumes[0].request_name = "a\x1b]0;owned\x07b".into();
    volumes[0].message = "x\x1b[2J".into();
    let text = status::table(WIDE, &volumes);
    assert!(!text.contains('\x1b') && !text.contains('\x07'), "{text:?}");
}

#[test]
fn agent_flags_keep_the_meaning_of_the_thesis() {
    let cli = Cli::try_parse_from([
        "union-csi",
        "agent",
        "--endpoint",
        "unix:///tmp/csi.sock",
        "--mode",
        "node",
        "--pool",
        "a=/mnt/a",
        "--pool",
        "b=/mnt/b",
    ])
    .unwrap();
    let Command::Agent(args) = cli.command else { panic!("not the agent") };
    let overrides = args.overrides();
    assert_eq!(overrides.endpoint.as_deref(), Some("unix:///tmp/csi.sock"));
    assert_eq!(overrides.pools.len(), 2);
    assert!(Cli::try_parse_from(["union-csi", "agent", "--mode", "some"]).is_err());
    assert_eq!(Cli::try_parse_from(["union-csi", "--version"]).unwrap_err().exit_code(), 0);
    assert_eq!(Cli::try_parse_from(["union-csi"]).unwrap_err().exit_code(), 2);
}
