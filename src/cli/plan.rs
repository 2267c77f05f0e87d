//! `union-csi plan`: which split a volume would get now, or why none.

use std::io::Read;
use std::path::PathBuf;

use super::client::{AgentArgs, query};
use super::draw::{self, Cell, Tone};
use super::output::{Look, Out};
use super::{CliError, DONE, Format, INFEASIBLE, cli_error};
use crate::domain::pool::PoolView;
use crate::domain::split::{Infeasible, Plan};
use crate::http::api::PlanAnswer;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi plan --size 1Ti\n  \
    union-csi plan --size 1Ti --param strategy=balanced --param media=nvme,ssd\n  \
    union-csi plan --size 4Ti --pools bought.json --output json\n  \
    union-csi pools --output json | union-csi plan --size 4Ti --pools -\n\n\
Nothing is made. Parameters are those of a StorageClass. FILE describes a cluster as `union-csi pools --output json`\n\
shows one: a list of pools with at least node, name, total and free (in bytes).\n\
Exits with 0 where the volume fits, 3 where it does not, 2 where the question is none.")]
pub(super) struct Args {
    /// Usable bytes that the volume must have at least, as 1Ti
    #[arg(long, short, value_name = "SIZE")]
    size: String,
    /// A StorageClass parameter; may be repeated
    #[arg(long = "param", short, value_name = "KEY=VALUE")]
    params: Vec<String>,
    /// Node that will use the volume
    #[arg(long, value_name = "NODE")]
    consumer: Option<String>,
    /// Access mode of the claim
    #[arg(long, value_name = "MODE", value_parser = ["ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany", "ReadWriteMany"])]
    access: Option<String>,
    /// All branches on one node, or on any as if all nodes reached each other [default: as the nodes do, those of FILE all]
    #[arg(long, value_name = "REACH", value_parser = ["one-node", "any-node"])]
    reach: Option<String>,
    /// Plan for the cluster described in FILE ("-": standard input) instead of asking the agent
    #[arg(long, value_name = "FILE")]
    pools: Option<PathBuf>,
    #[command(flatten)]
    agent: AgentArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let mut pairs = vec![("size".to_owned(), args.size.clone())];
    pairs.extend(args.consumer.iter().map(|node| ("consumer".to_owned(), node.clone())));
    pairs.extend(args.access.iter().map(|mode| ("access".to_owned(), mode.clone())));
    pairs.extend(args.reach.iter().map(|reach| ("reach".to_owned(), reach.clone())));
    pairs.extend(super::parameters(&args.params)?);
    let answer: PlanAnswer = match &args.pools {
        Some(file) => crate::http::plan_answer(&pairs, &described(file)?, None)
            .map_err(|reasons| CliError::Question { reasons })?,
        None => args.agent.get(&format!("/v1/plan?{}", query(&pairs))).map_err(question)?,
    };
    match args.output {
        Format::Text => out.print(&text(out.look, &answer))?,
        Format::Json => out.json(&answer)?,
    }
    Ok(if answer.feasible { DONE } else { INFEASIBLE })
}

/// The agent's refusal of a question is a wrong question.
fn question(error: CliError) -> CliError {
    match error {
        CliError::Refused { status: 400, reasons, .. } => CliError::Question { reasons },
        other => other,
    }
}

/// The described cluster.
fn described(file: &std::path::Path) -> Result<Vec<PoolView>, CliError> {
    let from_stdin = file.as_os_str() == "-";
    let text = if from_stdin {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(file)
    };
    let name = if from_stdin { "standard input".to_owned() } else { file.display().to_string() };
    let usage = |problem: String| {
        let remedy = "give a JSON list of pools, as `union-csi pools --output json` prints";
        cli_error::UsageSnafu { problem, remedy }.build()
    };
    let text = text.map_err(|e| usage(format!("{name} cannot be read: {e}")))?;
    serde_json::from_str(&text).map_err(|e| usage(format!("{name} does not describe pools: {e}")))
}

/// The answer for people.
pub(super) fn text(look: Look, answer: &PlanAnswer) -> String {
    match (&answer.plan, &answer.refusal) {
        (Some(plan), _) => feasible(look, plan),
        (None, Some(refusal)) => infeasible(look, refusal),
        (None, None) => "The agent gave neither a plan nor a reason.\n".to_owned(),
    }
}

fn feasible(look: Look, plan: &Plan) -> String {
    let n = plan.branches.len();
    let what = if n == 1 { "branch" } else { "branches" };
    let fits = look.paint(Tone::Good, "It fits");
    let head = [
        Cell::left("BRANCH"),
        Cell::left("WHERE"),
        Cell::right("TAKES"),
        Cell::right("GIVES"),
        Cell::left("FORMAT"),
    ];
    let rows: Vec<Vec<Cell>> = plan
        .branches
        .iter()
        .map(|b| {
            let format = match b.fs_type {
                Some(fs) => format!("{:?}, {fs:?}", b.format).to_lowercase(),
                None => format!("{:?}", b.format).to_lowercase(),
            };
            vec![
                Cell::left(b.index.to_string()),
                Cell::left(format!("{}/{}", b.node, b.pool)),
                Cell::right(draw::size(b.size)),
                Cell::right(draw::size(b.usable)),
                Cell::left(format),
            ]
        })
        .collect();
    format!(
        "{fits}: {} usable in {n} {what}.\n\n{}",
        draw::size(plan.capacity),
        draw::table(look, &head, &rows)
    )
}

fn infeasible(look: Look, refusal: &Infeasible) -> String {
    let told = draw::wrap(&refusal.reason, look.width).join("\n");
    let mut out = look.paint(Tone::Bad, &told) + "\n";
    if refusal.pools.is_empty() {
        return out;
    }
    let head = [Cell::left("POOL"), Cell::right("AVAILABLE"), Cell::right("COULD GIVE"), Cell::left("WHY")];
    let rows: Vec<Vec<Cell>> = refusal
        .pools
        .iter()
        .map(|p| {
            vec![
                Cell::left(format!("{}/{}", p.node, p.pool)),
                Cell::right(draw::size(p.allocatable)),
                Cell::right(draw::size(p.usable)),
                Cell::left(&*p.reason),
            ]
        })
        .collect();
    out.push('\n');
    out.push_str(&draw::table(look, &head, &rows));
    out
}
