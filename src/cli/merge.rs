//! `union-csi merge`: one union by hand.

use std::path::{Path, PathBuf};

use super::client::block_on;
use super::output::Out;
use super::{CliError, DONE};
use crate::config::{self, Overrides};
use crate::node::union::merge::{MergeRequest, StopSignals, hold, merge};
use crate::platform::Host;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi merge --branches /mnt/disk1/films,/mnt/disk2/films --target /srv/films\n  \
    union-csi merge --branches /a,/b --target /m -o category.create=mfs,ro --block\n\n\
Without --block the union stays when the command has ended: umount ends it. What is seen at the target is MergerFS's own\n\
root with its control file in it; volumes never show that, so do not give it to a container.")]
pub(super) struct Args {
    /// Directories to merge, separated by commas; may be repeated
    #[arg(long, short, value_name = "A,B", value_delimiter = ',', required = true)]
    branches: Vec<PathBuf>,
    /// Directory to mount the union at
    #[arg(long, short, value_name = "DIR")]
    target: PathBuf,
    /// MergerFS options that a class may set, without "mergerfs."; and "ro"
    #[arg(short, long = "option", value_name = "KEY=VALUE", value_delimiter = ',')]
    options: Vec<String>,
    /// Stay until SIGTERM or SIGINT, then unmount
    #[arg(long)]
    block: bool,
    /// Configuration with the node's MergerFS settings [default: /etc/union-csi/agent.yaml, if it is there]
    #[arg(long, env = "UNION_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The MergerFS program
    #[arg(long, env = "UNION_CSI_MERGERFS_PATH", value_name = "PROGRAM")]
    mergerfs_path: Option<String>,
    /// Where MergerFS writes what it has to say
    #[arg(long, value_name = "FILE", default_value = "/var/log/union-csi-merge.log")]
    log: PathBuf,
}

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    path.canonicalize().map_err(|e| CliError::Usage {
        problem: format!("{} cannot be used: {e}", path.display()),
        remedy: "name a directory that exists".to_owned(),
    })
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let overrides = Overrides { mergerfs_path: args.mergerfs_path.clone(), ..Overrides::default() };
    let settings = config::load(args.config.as_deref(), &overrides)?.mergerfs;
    let request = MergeRequest {
        branches: args.branches.iter().map(|b| absolute(b)).collect::<Result<_, _>>()?,
        target: absolute(&args.target)?,
        options: args.options.clone(),
        log: args.log.clone(),
    };
    let host = Host::new();
    block_on(async {
        let failed = |source| CliError::Union { source };
        // Listened for before there is a union, so that no signal leaves one behind.
        let stop = args.block.then(StopSignals::listen).transpose().map_err(failed)?;
        let work = {
            let (host, settings) = (host.clone(), settings.clone());
            move || merge(&host, &settings, &request)
        };
        let merged = tokio::task::spawn_blocking(work)
            .await
            .map_err(|e| CliError::Output { source: std::io::Error::other(e) })?
            .map_err(failed)?;
        let end = if args.block { "a signal ends it" } else { "umount ends it" };
        out.print(&format!(
            "{} branches are merged at {} by mergerfs {}; {end}\n",
            args.branches.len(),
            merged.target.display(),
            merged.version
        ))?;
        match stop {
            Some(stop) => hold(&host, &merged, stop).await.map_err(failed),
            None => Ok(()),
        }
    })??;
    Ok(DONE)
}
