//! `union-csi orphans`: what no claim needs any more.

use std::collections::HashMap;

use jiff::Timestamp;

use super::client::block_on;
use super::draw::{self, Cell};
use super::forget_node::ClusterArgs;
use super::output::{self, Look, Out};
use super::{CliError, DONE, Format};
use crate::app::{FIELD_MANAGER, operator};
use crate::controllers::orphans::look;
use crate::controllers::orphans::scan::{Orphan, OrphanKind};
use crate::store::kubernetes::KubernetesStore;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi orphans\n  \
    union-csi orphans --output json\n\n\
Nothing is deleted. The remedies delete files: read what is in a volume before.")]
pub(super) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let now = Timestamp::now();
    let found = block_on(async {
        let client = operator(args.cluster.kubeconfig.as_deref()).await?;
        let store = KubernetesStore::new(client.clone(), &args.cluster.namespace, FIELD_MANAGER);
        Ok::<_, CliError>(look(&client, &store, &args.cluster.namespace, &HashMap::new(), now).await?)
    })??;
    match args.output {
        Format::Json => out.json(&found.orphans)?,
        Format::Text => out.print(&text(out.look, &found.orphans, now))?,
    }
    if found.unnamed > 0 {
        output::warn(&format!(
            "{} more branches lie on disks without an object; the logs of their nodes' agents name them",
            found.unnamed
        ));
    }
    Ok(DONE)
}

fn text(look: Look, found: &[Orphan], now: Timestamp) -> String {
    if found.is_empty() {
        return "No orphans.\n".to_owned();
    }
    let head = ["WHAT", "NAME", "NODE", "SIZE", "AGE", "TO REMOVE IT AND ITS FILES"].map(Cell::left);
    let row = |orphan: &Orphan| {
        let what = match orphan.kind {
            OrphanKind::Branch => "branch without volume",
            OrphanKind::Volume => "volume without claim",
            OrphanKind::Retained => "retained volume",
            OrphanKind::PersistentVolume => "PersistentVolume without volume",
            OrphanKind::Ephemeral => "inline volume without pod",
            OrphanKind::Unclaimed => "branch on a disk without object",
        };
        let age = |at: Timestamp| format!("{} h", now.duration_since(at).as_hours());
        let age = orphan.created.map_or_else(|| "-".to_owned(), age);
        // A command that is cut short is none.
        let remedy = Cell::drawn(orphan.remedy.clone(), orphan.remedy.chars().count());
        let node = orphan.node.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        let size = orphan.size.map_or_else(|| "-".to_owned(), draw::size);
        vec![
            Cell::left(what),
            Cell::left(orphan.name.clone()),
            Cell::left(node),
            Cell::left(size),
            Cell::left(age),
            remedy,
        ]
    };
    draw::table(look, &head, &found.iter().map(row).collect::<Vec<_>>())
}
