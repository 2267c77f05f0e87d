//! `union-csi doctor VOLUME`: from the pod to the disk in one screen.

use super::client::AgentArgs;
use super::draw::{self, Tone};
use super::output::{Look, Out};
use super::{CliError, DONE, FAILED, Format, status, volumes};
use crate::domain::pool::{PoolState, PoolView};
use crate::http::api::{HealthState, Status, VolumeView};
use crate::node::volume::{LinkState, RemoteBranch};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi doctor media\n  \
    union-csi doctor pvc-0c7e8a4e --output json\n\n\
Exits with 0 where nothing is wrong, 1 where something is.")]
pub(super) struct Args {
    /// The volume, by its id or name
    volume: String,
    #[command(flatten)]
    agent: AgentArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let volume = volumes::one(&args.agent, &args.volume)?;
    let pools: Vec<PoolView> = args.agent.get("/v1/pools")?;
    let status: Status = args.agent.get("/v1/status")?;
    let findings = findings(&volume, &pools, &status);
    match args.output {
        Format::Text => out.print(&text(out.look, &volume, &pools, &findings))?,
        Format::Json => {
            let pools: Vec<&PoolView> = pools.iter().filter(|p| holds(p, &volume)).collect();
            out.json(&serde_json::json!({ "volume": volume, "pools": pools, "findings": findings }))?;
        }
    }
    Ok(if findings.is_empty() { DONE } else { FAILED })
}

fn holds(pool: &PoolView, volume: &VolumeView) -> bool {
    volume.branches.iter().any(|b| b.node == pool.node && b.pool == pool.pool.name)
}

/// Everything that is wrong, a sentence each.
fn findings(volume: &VolumeView, pools: &[PoolView], status: &Status) -> Vec<String> {
    let mut found = Vec::new();
    if volume.state != HealthState::Healthy {
        found.push(volume.message.clone());
    }
    for pool in pools.iter().filter(|p| holds(p, volume)) {
        if pool.pool.state != PoolState::Ready {
            let state = draw::pool_state(pool.pool.state);
            found.push(format!("pool {}/{} is {state}: {}", pool.node, pool.pool.name, pool.pool.message));
        }
        let unwritten = pool.pool.promised.saturating_sub(pool.pool.occupied);
        if pool.pool.free < unwritten {
            found.push(format!(
                "pool {}/{} has {} free and promised {} more: others filled it; make room, or branches cannot be filled",
                pool.node,
                pool.pool.name,
                draw::size(pool.pool.free),
                draw::size(unwritten)
            ));
        }
    }
    if let Some(local) = &volume.local {
        if let Some(space) = local.space.filter(|s| s.available < s.total / 20) {
            let left = draw::size(crate::domain::Bytes::new(space.available));
            found.push(format!("the volume is nearly full: {left} left"));
        }
        for branch in &local.branches {
            if let Some(remote) = branch.remote.as_ref().filter(|r| r.link != LinkState::Live) {
                found.push(format!("branch {} lies on node {}", branch.id, reached(remote)));
            }
        }
        let attached = local.branches.len();
        if attached < volume.branches.len() {
            found.push(format!("{attached} of {} branches are attached here", volume.branches.len()));
        }
    }
    found.extend(status.problems.iter().cloned());
    found
}

/// The screen of a volume with all that is wrong with it.
#[cfg(test)]
pub(super) fn screen(look: Look, volume: &VolumeView, pools: &[PoolView], status: &Status) -> String {
    text(look, volume, pools, &findings(volume, pools, status))
}

/// How a branch of another node is reached, and how that stands.
fn reached(remote: &RemoteBranch) -> String {
    let by = match (remote.transport, remote.generation) {
        (Some(transport), Some(generation)) => format!(" by {transport}, generation {generation}"),
        _ => String::new(),
    };
    let since = remote.since.map_or_else(String::new, |since| format!(" since {since}"));
    format!("{}{by}: {}{since}", remote.node, remote.link.words())
}

/// The screen: pod, mount, process, branches, disks.
fn text(look: Look, volume: &VolumeView, pools: &[PoolView], findings: &[String]) -> String {
    let strong = |text: &str| look.paint(Tone::Strong, text);
    let soft = |text: &str| look.paint(Tone::Soft, text);
    let (word, tone) = draw::health(volume.state);
    let mut out = format!("{}  {}  {}\n\n", strong(&status::name(volume)), look.paint(tone, word), volume.id);
    match &volume.local {
        None => out.push_str("It is not mounted on the node that was asked.\n\n"),
        Some(local) => {
            for pod in &volume.pods {
                out.push_str(&format!("{} {pod}\n", soft("pod     ")));
            }
            for target in &local.targets {
                out.push_str(&format!("{} {}\n", soft("mount   "), target.display()));
            }
            if let Some(staging) = &local.staging {
                out.push_str(&format!("{} {}\n", soft("staged  "), staging.display()));
            }
            let process = local.pid.map_or_else(String::new, |pid| format!(", process {pid}"));
            let heals = match local.heals {
                0 => String::new(),
                1 => ", replaced once".to_owned(),
                n => format!(", replaced {n} times"),
            };
            out.push_str(&format!("{} {}{process}{heals}\n", soft("union   "), status::kind(local.union)));
            // The list of branches follows below, with what each is.
            let shown = local.options.iter().filter(|(k, _)| *k != "branches");
            let options: Vec<String> = shown.map(|(k, v)| format!("{k}={v}")).collect();
            if !options.is_empty() {
                out.push_str(&format!("{} {}\n", soft("options "), options.join(" ")));
            }
            if let Some(space) = local.space {
                let bytes = |n: u64| draw::size(crate::domain::Bytes::new(n));
                out.push_str(&format!(
                    "{} {} of {}, {} available\n",
                    soft("used    "),
                    bytes(space.used),
                    bytes(space.total),
                    bytes(space.available)
                ));
            }
            for branch in &local.branches {
                let device =
                    branch.device.as_ref().map_or_else(String::new, |d| format!(" on {}", d.display()));
                out.push_str(&format!(
                    "{} {} {} {}{device}\n",
                    soft("branch  "),
                    branch.mount.display(),
                    soft("from"),
                    branch.backing.display()
                ));
                if let Some(remote) = &branch.remote {
                    out.push_str(&format!("{} {}\n", soft("  node  "), reached(remote)));
                }
            }
            out.push('\n');
        }
    }
    out.push_str(&volumes::branch_table(look, volume));
    let disks: Vec<PoolView> = pools.iter().filter(|p| holds(p, volume)).cloned().collect();
    if !disks.is_empty() {
        out.push('\n');
        out.push_str(&status::pools(look, &disks));
    }
    out.push('\n');
    if findings.is_empty() {
        out.push_str(&format!("{}\n", look.paint(Tone::Good, "Nothing is wrong.")));
    }
    for finding in findings {
        out.push_str(&status::notice(look, Tone::Bad, finding));
    }
    out
}
