//! Where a command acts: here, or on the host of the container that it was started in.

use std::path::{Path, PathBuf};

use clap::ValueEnum;

use super::CliError;
use crate::config;
use crate::platform::container::{Entry, Surroundings, enter_host};

/// Whether to leave a container for its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum HostNamespace {
    /// Where this is a container that sees its host.
    #[default]
    Auto,
    /// Always; an error where that cannot be.
    Enter,
    /// Never.
    Stay,
}

/// Of the commands that act on the machine.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct PlaceArgs {
    /// In a container: act on its host, entering the namespaces of process 1
    #[arg(long, env = "UNION_CSI_HOST_NAMESPACE", value_name = "WHEN", value_enum, default_value_t)]
    host_namespace: HostNamespace,
}

impl PlaceArgs {
    /// Goes where the command is to act. Of the container, the directories of both files are kept, and
    /// what Kubernetes and the image put into it. Called before any thread exists.
    pub(super) fn enter(
        &self,
        config: Option<&Path>,
        kubeconfig: Option<&Path>,
    ) -> Result<Surroundings, CliError> {
        let entry = match self.host_namespace {
            HostNamespace::Auto => Entry::Auto,
            HostNamespace::Enter => Entry::Always,
            HostNamespace::Stay => Entry::Never,
        };
        let config = config.unwrap_or_else(|| Path::new(config::DEFAULT_FILE));
        let mut keep =
            vec![PathBuf::from(config::SERVICE_ACCOUNT_DIR), PathBuf::from(config::BUNDLED_MERGERFS)];
        let files = std::iter::once(config).chain(kubeconfig);
        keep.extend(files.filter_map(Path::parent).map(Path::to_owned));
        Ok(enter_host(entry, &keep)?)
    }
}
