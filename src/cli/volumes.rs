//! `union-csi volumes [ID]`: all volumes, or one with its branches.

use super::client::{AgentArgs, query};
use super::draw::{self, Cell, Tone};
use super::output::{Look, Out};
use super::{CliError, DONE, Format, status};
use crate::http::api::VolumeView;
use crate::node::volume::LinkState;
use crate::store::object::BranchPhase;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi volumes\n  \
    union-csi volumes media\n  \
    union-csi volumes pvc-0c7e8a4e --output json")]
pub(super) struct Args {
    /// One volume, by its id or name
    #[arg(value_name = "ID")]
    id: Option<String>,
    #[command(flatten)]
    agent: AgentArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    match &args.id {
        Some(id) => {
            let volume = one(&args.agent, id)?;
            match args.output {
                Format::Text => out.print(&branches(out.look, &volume))?,
                Format::Json => out.json(&volume)?,
            }
        }
        None => {
            let volumes: Vec<VolumeView> = args.agent.get("/v1/volumes")?;
            match args.output {
                Format::Text if volumes.is_empty() => out.print("No volumes.\n")?,
                Format::Text => out.print(&status::table(out.look, &volumes))?,
                Format::Json => out.json(&volumes)?,
            }
        }
    }
    Ok(DONE)
}

/// One volume of the agent.
pub(super) fn one(agent: &AgentArgs, id: &str) -> Result<VolumeView, CliError> {
    // The same encoding serves a path's segment: "=" is all that `query` adds.
    let segment = query(&[(String::new(), id.to_owned())]);
    agent.get(&format!("/v1/volumes/{}", segment.trim_start_matches('=')))
}

/// A volume in a line, its branches below.
fn branches(look: Look, volume: &VolumeView) -> String {
    status::table(look, std::slice::from_ref(volume)) + "\n" + &branch_table(look, volume)
}

/// A line for each branch.
pub(super) fn branch_table(look: Look, volume: &VolumeView) -> String {
    let head = [
        Cell::left("BRANCH"),
        Cell::left("WHERE"),
        Cell::right("SIZE"),
        Cell::right("ON DISK"),
        Cell::left("FORMAT"),
        Cell::left("STATE"),
    ];
    let links: Vec<_> = volume.local.iter().flat_map(|local| &local.branches).collect();
    let rows: Vec<Vec<Cell>> = volume
        .branches
        .iter()
        .map(|branch| {
            let link = links.iter().find(|l| l.id == branch.id).and_then(|l| l.remote.as_ref());
            let away = link.filter(|l| l.link != LinkState::Live).map(|l| format!(", {}", l.link.words()));
            let (word, tone) = match branch.phase {
                BranchPhase::Bound => ("bound", Tone::Good),
                BranchPhase::Pending => ("pending", Tone::Wait),
                BranchPhase::Refused => ("refused", Tone::Wait),
                BranchPhase::Failing => ("failing", Tone::Bad),
                BranchPhase::Lost => ("lost", Tone::Bad),
            };
            let state =
                if branch.reason.is_empty() { word.to_owned() } else { format!("{word}: {}", branch.reason) };
            let tone = if away.is_some() { Tone::Bad } else { tone };
            let state = state + &away.unwrap_or_default();
            let format = format!("{:?}", branch.format).to_lowercase();
            vec![
                Cell::left(branch.index.to_string()),
                Cell::left(format!("{}/{}", branch.node, branch.pool)),
                Cell::right(draw::size(branch.size)),
                Cell::right(draw::size(branch.bytes_used)),
                Cell::left(format),
                Cell::left(state).tone(tone),
            ]
        })
        .collect();
    if rows.is_empty() { "No branches yet.\n".to_owned() } else { draw::table(look, &head, &rows) }
}
