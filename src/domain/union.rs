//! Which mechanism joins the branches of a volume, and with which options.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What serves a volume's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnionKind {
    /// One branch, bound directly: no union.
    Bind,
    /// The kernel's overlayfs over read-only layers.
    Overlay,
    /// A MergerFS process.
    Mergerfs,
    /// One image branch given as a block device.
    Block,
}
