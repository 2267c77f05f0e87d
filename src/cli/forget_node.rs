//! `union-csi forget-node NAME`: gives up a node that is gone for good.

use std::path::PathBuf;

use jiff::Timestamp;
use serde_json::json;

use super::client::block_on;
use super::draw::{self, Cell};
use super::output::{self, Look, Out};
use super::{CliError, DONE, Format, USAGE, cli_error};
use crate::app::{FIELD_MANAGER, operator};
use crate::controllers::orphans::forget::act::{forget, look, ready};
use crate::controllers::orphans::forget::{Forgetting, Loss};
use crate::domain::{Bytes, NodeName};
use crate::store::kubernetes::KubernetesStore;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi forget-node worker-3\n  \
    union-csi forget-node worker-3 --accept-data-loss --dry-run\n  \
    union-csi forget-node worker-3 --accept-data-loss\n\n\
Without --accept-data-loss nothing is changed: what would be lost is listed. A node that is alive is refused. Given again,\n\
the command goes on where it was interrupted.")]
pub(super) struct Args {
    /// Node to forget
    #[arg(value_name = "NAME")]
    node: String,
    /// Forget it, and with it all files on it
    #[arg(long)]
    accept_data_loss: bool,
    /// Tell what would be written, and write nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

/// Which cluster, for commands that work on its objects.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ClusterArgs {
    /// Kubernetes configuration file [default: as kubectl finds it, or the pod's service account]
    #[arg(long, env = "UNION_CSI_KUBECONFIG", value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// Namespace of the program's objects
    #[arg(long, short, env = "UNION_CSI_NAMESPACE", value_name = "NAME", default_value = "union")]
    pub(super) namespace: String,
}

/// What came of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// It was done.
    Forgotten,
    /// It was asked what would be done.
    Tried,
    /// The losses were not accepted.
    NotAccepted,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let node: NodeName = args.node.parse().or_else(|e: crate::domain::InvalidId| {
        let remedy = "name it as `kubectl get storagenodes` does";
        cli_error::UsageSnafu { problem: e.to_string(), remedy }.fail()
    })?;
    let came = match (args.dry_run, args.accept_data_loss) {
        (true, _) => Came::Tried,
        (false, true) => Came::Forgotten,
        (false, false) => Came::NotAccepted,
    };
    let found = block_on(act(args, &node, came))??;
    match args.output {
        Format::Json => {
            let changed = came == Came::Forgotten && !found.steps.is_empty();
            out.json(&json!({"changed": changed, "forgetting": found}))?;
        }
        Format::Text => out.print(&text(out.look, &found, came))?,
    }
    if came == Came::NotAccepted && !found.steps.is_empty() {
        output::warn(&format!(
            "nothing was changed; if {node} is gone for good: union-csi forget-node {node} --accept-data-loss"
        ));
        return Ok(USAGE);
    }
    Ok(DONE)
}

async fn act(args: &Args, node: &NodeName, came: Came) -> Result<Forgetting, CliError> {
    let client = operator(args.cluster.kubeconfig.as_deref()).await?;
    let ready = ready(&client, node).await?;
    let store = KubernetesStore::new(client, &args.cluster.namespace, FIELD_MANAGER);
    Ok(match came {
        Came::Forgotten => forget(&store, node, ready, Timestamp::now).await?,
        Came::Tried | Came::NotAccepted => look(&store, node, ready, Timestamp::now()).await?,
    })
}

fn text(look: Look, found: &Forgetting, came: Came) -> String {
    let node = &found.node;
    if found.steps.is_empty() {
        return format!("Nothing is known of node {node}: there is nothing to forget.\n");
    }
    let verb = if came == Came::Forgotten { "is forgotten" } else { "would be forgotten" };
    let mut text = match found.losses.len() {
        0 => format!("Node {node} {verb}. No branch lies on it.\n"),
        1 => format!("Node {node} {verb}, with the branches of 1 volume:\n\n"),
        n => format!("Node {node} {verb}, with the branches of {n} volumes:\n\n"),
    };
    if !found.losses.is_empty() {
        text.push_str(&table(look, &found.losses));
    }
    if came == Came::Tried {
        text.push_str("\nThis would be written:\n");
        for step in &found.steps {
            text.push_str(&format!("  {step}\n"));
        }
    }
    text
}

fn table(look: Look, losses: &[Loss]) -> String {
    let head = [
        Cell::left("VOLUME"),
        Cell::left("CLAIM"),
        Cell::right("BRANCHES"),
        Cell::right("USED"),
        Cell::left("WHAT FOLLOWS"),
    ];
    let row = |loss: &Loss| {
        let used = loss.branches.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.bytes_used));
        vec![
            Cell::left(loss.volume.to_string()),
            Cell::left(loss.claim.clone().unwrap_or_else(|| "-".to_owned())),
            Cell::right(format!("{} of {}", loss.branches.len(), loss.of)),
            Cell::right(draw::size(used)),
            Cell::left(loss.consequence.told()),
        ]
    };
    draw::table(look, &head, &losses.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::orphans::forget::{Consequence, LostBranch, Step};
    use crate::store::object::BranchPhase;

    fn found() -> Forgetting {
        let branch = LostBranch {
            branch: "media-0".to_owned(),
            pool: "disk1".to_owned(),
            size: Bytes::gib(5),
            bytes_used: Bytes::gib(1),
            phase: BranchPhase::Bound,
        };
        Forgetting {
            node: "n1".parse().unwrap(),
            losses: vec![Loss {
                volume: "media".parse().unwrap(),
                claim: Some("web/media".to_owned()),
                branches: vec![branch],
                of: 2,
                consequence: Consequence::SomeFiles,
            }],
            steps: vec![Step::DeleteStorageNode, Step::DropBranch("media-0".to_owned())],
        }
    }

    #[test]
    fn what_is_lost_is_told_with_its_claim_and_the_writes_only_when_tried() {
        let look = Look { width: 120, colour: false };
        let tried = text(look, &found(), Came::Tried);
        for word in ["would be forgotten", "web/media", "1 of 2", "1 GiB", "files on these", "Branch media-0"]
        {
            assert!(tried.contains(word), "{word}: {tried}");
        }
        let done = text(look, &found(), Came::Forgotten);
        assert!(done.contains("is forgotten") && !done.contains("finalizer"), "{done}");
        let nothing = Forgetting { losses: Vec::new(), steps: Vec::new(), ..found() };
        assert!(text(look, &nothing, Came::Forgotten).contains("nothing to forget"));
    }
}
