//! What the configured pools are and have.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::domain::PoolName;
use crate::domain::pool::{Media, Reserve};

/// One pool, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Name, unique on the node.
    pub name: PoolName,
    /// Directory.
    pub path: PathBuf,
    /// Labels, for `poolSelector`.
    pub labels: BTreeMap<String, String>,
    /// What to keep free. Default 5 %.
    pub reserve: Reserve,
    /// Kind of disk; detected when absent.
    pub media: Option<Media>,
    /// UUID that the filesystem must have; recorded at first use when absent.
    pub uuid: Option<String>,
}
