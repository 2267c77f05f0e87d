//! `union-csi pools discover`: a configuration for this machine's disks, to be reviewed.

use std::fmt::Write as _;
use std::path::PathBuf;

use super::draw;
use super::output::Out;
use super::place::PlaceArgs;
use super::{CliError, DONE, Format};
use crate::config::{self, Overrides};
use crate::domain::pool::Enforcement;
use crate::node::pool::discover::{Discovery, ProposedPool, discover};
use crate::platform::Host;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi pools discover > agent.yaml\n  \
    union-csi check-config --config agent.yaml\n\n\
Nothing is taken: what is printed is a proposal to review and to put into /etc/union-csi/agent.yaml.")]
pub(super) struct Args {
    /// Configuration whose pools exist already [default: /etc/union-csi/agent.yaml, if it is there]
    #[arg(long, env = "UNION_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    place: PlaceArgs,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let surroundings = args.place.enter(args.config.as_deref(), None)?;
    let config = config::load_at(&surroundings, args.config.as_deref(), &Overrides::default())?;
    let found = discover(&Host::new(), &config.pools).map_err(|source| CliError::Host { source })?;
    match args.output {
        Format::Text => out.print(&yaml(&found))?,
        Format::Json => out.json(&json(&found))?,
    }
    Ok(DONE)
}

/// The proposal as a file.
fn yaml(found: &Discovery) -> String {
    let mut out = String::from(
        "# Proposed by `union-csi pools discover`. Review it: remove what Union CSI shall not use.\n\
         # What is commented out wants a decision.\n",
    );
    // A mapping without a value is an empty list: what is commented out below it can be taken by removing the signs.
    out.push_str("pools:\n");
    for pool in &found.proposed {
        entry(&mut out, pool);
    }
    if !found.skipped.is_empty() {
        out.push_str("\n# Not proposed:\n");
        for (path, reason) in &found.skipped {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "#   {}: {}", line(&path.to_string_lossy()), line(reason));
        }
    }
    out
}

fn entry(out: &mut String, pool: &ProposedPool) {
    let (free, total) = (draw::size(pool.free), draw::size(pool.total));
    let media = media_word(pool);
    let _ = writeln!(out, "  # {free} free of {total}, {}, {media}", line(&pool.filesystem));
    if let (Enforcement::None, advice) = &pool.enforcement
        && !advice.is_empty()
    {
        let _ = writeln!(out, "  # {}", line(advice));
    }
    let sign = match &pool.caution {
        Some(caution) => {
            let _ = writeln!(out, "  # Careful: {}", line(caution));
            "# "
        }
        None => "",
    };
    let _ = writeln!(out, "  {sign}- name: \"{}\"", pool.name);
    // A path in JSON's quotes is one in YAML's.
    let _ = writeln!(out, "  {sign}  path: {}", serde_json::json!(pool.path.to_string_lossy()));
    if let Some(uuid) = &pool.uuid {
        let _ = writeln!(out, "  {sign}  uuid: \"{uuid}\"");
    }
    let _ = writeln!(out, "  {sign}  reserve: 5%");
}

fn media_word(pool: &ProposedPool) -> &'static str {
    use crate::domain::pool::Media;
    match pool.media {
        Media::Nvme => "nvme",
        Media::Ssd => "ssd",
        Media::Hdd => "hdd",
        Media::Unknown => "kind of disk not known",
    }
}

/// Text that stays in its comment.
fn line(text: &str) -> String {
    draw::fit(text, usize::MAX)
}

fn json(found: &Discovery) -> serde_json::Value {
    let proposed: Vec<_> = found
        .proposed
        .iter()
        .map(|p| {
            serde_json::json!({
                "name": p.name, "path": p.path, "uuid": p.uuid, "filesystem": p.filesystem, "media": p.media,
                "enforcement": p.enforcement.0, "enforcementMessage": p.enforcement.1,
                "total": p.total, "free": p.free, "caution": p.caution,
            })
        })
        .collect();
    let skipped: Vec<_> = found
        .skipped
        .iter()
        .map(|(path, reason)| serde_json::json!({ "path": path, "reason": reason }))
        .collect();
    serde_json::json!({ "proposed": proposed, "skipped": skipped })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Bytes;
    use crate::domain::pool::Media;

    #[test]
    fn the_proposal_is_a_configuration_that_takes_only_what_is_safe() {
        let pool = |name: &str, caution: Option<&str>| ProposedPool {
            name: name.parse().unwrap(),
            path: format!("/mnt/{name} \"x\"\n").into(),
            uuid: Some("51c7-aa02".into()),
            filesystem: "xfs".into(),
            media: Media::Hdd,
            enforcement: (Enforcement::None, "mount it with\nprjquota".into()),
            total: Bytes::gib(100),
            free: Bytes::gib(50),
            caution: caution.map(str::to_owned),
        };
        let found = Discovery {
            proposed: vec![
                pool("disk1", None),
                pool("1e5", None),
                pool("root", Some("it is the system's disk")),
            ],
            skipped: vec![("/boot".into(), "belongs to the\nsystem".into())],
        };
        let text = yaml(&found);
        let config = config::parse("agent.yaml".as_ref(), &text, &Overrides::default(), "nas")
            .unwrap_or_else(|faults| panic!("{faults}\n{text}"));
        let names: Vec<&str> = config.pools.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["disk1", "1e5"], "{text}");
        let none =
            config::parse("agent.yaml".as_ref(), &yaml(&Discovery::default()), &Overrides::default(), "nas");
        assert_eq!(none.map(|c| c.pools.len()), Ok(0), "nothing to propose is a configuration as well");
    }
}
