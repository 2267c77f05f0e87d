//! What a user asks of a volume.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a volume may be used at the same time; the CSI access modes (CSI 1.12, `VolumeCapability.AccessMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum AccessMode {
    /// One node, reading and writing (`SINGLE_NODE_WRITER`; Kubernetes ReadWriteOnce without the newer modes).
    SingleNodeWriter,
    /// One node, reading (`SINGLE_NODE_READER_ONLY`).
    SingleNodeReaderOnly,
    /// Many nodes, reading (`MULTI_NODE_READER_ONLY`).
    MultiNodeReaderOnly,
    /// Many nodes, one writing (`MULTI_NODE_SINGLE_WRITER`).
    MultiNodeSingleWriter,
    /// Many nodes, all writing (`MULTI_NODE_MULTI_WRITER`).
    MultiNodeMultiWriter,
    /// One node, one workload writing (`SINGLE_NODE_SINGLE_WRITER`; Kubernetes ReadWriteOncePod).
    SingleNodeSingleWriter,
    /// One node, many workloads writing (`SINGLE_NODE_MULTI_WRITER`; Kubernetes ReadWriteOnce).
    SingleNodeMultiWriter,
}

impl AccessMode {
    /// True where no workload may write.
    #[must_use]
    pub const fn reader_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }

    /// True where more than one node may use the volume at once.
    #[must_use]
    pub const fn multi_node(self) -> bool {
        matches!(self, Self::MultiNodeReaderOnly | Self::MultiNodeSingleWriter | Self::MultiNodeMultiWriter)
    }
}

impl AccessMode {
    /// Why no volume can be had in this mode; `None` where some can.
    ///
    /// One writer beside readers on other nodes would have to be told from them when they attach, and again each time another
    /// is to write. No orchestrator that is served asks for it.
    #[must_use]
    pub const fn refusal(self) -> Option<&'static str> {
        match self {
            Self::SingleNodeWriter
            | Self::SingleNodeReaderOnly
            | Self::SingleNodeSingleWriter
            | Self::SingleNodeMultiWriter
            | Self::MultiNodeReaderOnly
            | Self::MultiNodeMultiWriter => None,
            Self::MultiNodeSingleWriter => Some(
                "nothing would keep a second node from writing; use MULTI_NODE_MULTI_WRITER (ReadWriteMany) where several \
                 nodes are to write, or fill the volume in a single-node mode and use it as MULTI_NODE_READER_ONLY \
                 (ReadOnlyMany) then",
            ),
        }
    }
}

/// Whether a volume that was granted `granted` may be used in `wanted` mode.
///
/// A volume that one node may write serves every other single-node mode as well: orchestrators name the same intent by
/// the older `SINGLE_NODE_WRITER` or the newer `SINGLE_NODE_SINGLE_WRITER` and `SINGLE_NODE_MULTI_WRITER`, depending on
/// which of their parts asks. Reading on one node is in every grant.
#[must_use]
pub fn serves(granted: &[AccessMode], wanted: AccessMode) -> bool {
    let writable_on_one = |m: &AccessMode| !m.reader_only();
    granted.contains(&wanted)
        || (wanted == AccessMode::SingleNodeReaderOnly && !granted.is_empty())
        || (!wanted.multi_node() && granted.iter().any(writable_on_one))
}

/// Mount flags that are understood, by a bind of one branch and by a union alike. `dev` and `suid` are not among them:
/// volumes are always mounted `nodev,nosuid`.
const MOUNT_FLAGS: [&str; 10] =
    ["defaults", "rw", "ro", "atime", "noatime", "relatime", "nodev", "nosuid", "exec", "noexec"];

/// Reads mount flags; one text may hold several, separated by commas, as in fstab.
///
/// # Errors
/// Which of them are not understood, for people.
pub fn mount_flags(given: &[String]) -> Result<Vec<String>, String> {
    let split = given.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|flag| !flag.is_empty());
    let (known, unknown): (Vec<&str>, Vec<&str>) = split.partition(|flag| MOUNT_FLAGS.contains(flag));
    if unknown.is_empty() {
        return Ok(known.into_iter().filter(|flag| *flag != "defaults").map(str::to_owned).collect());
    }
    let reason = if unknown.iter().any(|flag| *flag == "dev" || *flag == "suid") {
        "; volumes are always mounted nodev and nosuid"
    } else {
        ""
    };
    Err(format!("{} not supported{reason}; known are {}", unknown.join(", "), MOUNT_FLAGS.join(", ")))
}

/// Files or a raw device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum VolumeMode {
    /// A mounted filesystem.
    #[default]
    Filesystem,
    /// A block device; only for volumes of one `image` branch.
    Block,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_single_writer_beside_readers_elsewhere_is_refused() {
        for mode in [
            AccessMode::SingleNodeWriter,
            AccessMode::SingleNodeReaderOnly,
            AccessMode::MultiNodeReaderOnly,
            AccessMode::MultiNodeSingleWriter,
            AccessMode::MultiNodeMultiWriter,
            AccessMode::SingleNodeSingleWriter,
            AccessMode::SingleNodeMultiWriter,
        ] {
            assert_eq!(mode.refusal().is_some(), mode == AccessMode::MultiNodeSingleWriter, "{mode:?}");
        }
    }

    #[test]
    fn a_volume_that_one_node_may_write_serves_every_single_node_mode() {
        use AccessMode::{
            MultiNodeMultiWriter, MultiNodeReaderOnly, SingleNodeMultiWriter, SingleNodeReaderOnly,
            SingleNodeSingleWriter, SingleNodeWriter,
        };
        for granted in [SingleNodeWriter, SingleNodeSingleWriter, SingleNodeMultiWriter] {
            for wanted in
                [SingleNodeWriter, SingleNodeReaderOnly, SingleNodeSingleWriter, SingleNodeMultiWriter]
            {
                assert!(serves(&[granted], wanted), "{granted:?} serves {wanted:?}");
            }
            assert!(!serves(&[granted], MultiNodeReaderOnly), "it may have images");
            assert!(!serves(&[granted], MultiNodeMultiWriter), "it may have several branches");
        }
        assert!(serves(&[MultiNodeMultiWriter], SingleNodeWriter));
        assert!(serves(&[MultiNodeReaderOnly], SingleNodeReaderOnly));
        assert!(!serves(&[MultiNodeReaderOnly], SingleNodeWriter), "a reader's volume is not written");
        assert!(!serves(&[SingleNodeReaderOnly], SingleNodeWriter), "a reader's volume is not written");
        assert!(!serves(&[], SingleNodeReaderOnly));
    }
}
