//! How a volume shall be used: access type and access mode.

use super::InvalidRequest;
use crate::csi::proto;
use crate::csi::proto::volume_capability::AccessType;
use crate::csi::proto::volume_capability::access_mode::Mode;
use crate::domain::policy::FsType;
use crate::domain::volume::{AccessMode, VolumeMode, mount_flags};
use crate::node::volume::Access;

/// One way to use a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::csi) struct Capability {
    /// Who may use it at the same time.
    pub mode: AccessMode,
    /// Files, with flags and group, or block.
    pub access: Access,
    /// The filesystem that the caller expects; absent: it does not care.
    pub fs_type: Option<FsType>,
}

impl Capability {
    /// Files or block.
    pub(in crate::csi) const fn volume_mode(&self) -> VolumeMode {
        match self.access {
            Access::Mount { .. } => VolumeMode::Filesystem,
            Access::Block => VolumeMode::Block,
        }
    }
}

const FIELD: &str = "volume_capability";

/// Reads one capability: known, complete, and one that this version can serve.
pub(in crate::csi) fn capability(
    given: Option<&proto::VolumeCapability>,
) -> Result<Capability, InvalidRequest> {
    let given = given.ok_or_else(|| InvalidRequest::new(FIELD, "is required"))?;
    let mode = access_mode(given.access_mode.as_ref())?;
    if let Some(reason) = mode.refusal() {
        return Err(InvalidRequest::new(
            "volume_capability.access_mode",
            format!("{} is not supported: {reason}", name(mode)),
        ));
    }
    match &given.access_type {
        None => Err(InvalidRequest::new(FIELD, "access_type is required: mount or block")),
        Some(AccessType::Block(_)) => Ok(Capability { mode, access: Access::Block, fs_type: None }),
        Some(AccessType::Mount(mount)) => Ok(Capability {
            mode,
            access: Access::Mount {
                flags: mount_flags(&mount.mount_flags)
                    .map_err(|reason| InvalidRequest::new("volume_capability.mount.mount_flags", reason))?,
                group: mount_group(&mount.volume_mount_group)?,
            },
            fs_type: fs_type(&mount.fs_type)?,
        }),
    }
}

/// Reads the capabilities of one request: at least one, all of the same access type, one filesystem.
pub(in crate::csi) fn capabilities(
    given: &[proto::VolumeCapability],
) -> Result<Vec<Capability>, InvalidRequest> {
    const FIELD: &str = "volume_capabilities";
    let all = given.iter().map(|c| capability(Some(c))).collect::<Result<Vec<_>, _>>()?;
    let first = all.first().ok_or_else(|| InvalidRequest::new(FIELD, "at least one is required"))?;
    if all.iter().any(|c| c.volume_mode() != first.volume_mode()) {
        return Err(InvalidRequest::new(FIELD, "mount and block cannot be mixed in one volume"));
    }
    let mut wanted = all.iter().filter_map(|c| c.fs_type);
    if let Some(fs) = wanted.next()
        && wanted.any(|other| other != fs)
    {
        return Err(InvalidRequest::new(FIELD, "fs_type must be the same in all of them"));
    }
    Ok(all)
}

fn access_mode(given: Option<&proto::volume_capability::AccessMode>) -> Result<AccessMode, InvalidRequest> {
    const FIELD: &str = "volume_capability.access_mode";
    let number = given.ok_or_else(|| InvalidRequest::new(FIELD, "is required"))?.mode;
    match Mode::try_from(number) {
        Ok(Mode::SingleNodeWriter) => Ok(AccessMode::SingleNodeWriter),
        Ok(Mode::SingleNodeReaderOnly) => Ok(AccessMode::SingleNodeReaderOnly),
        Ok(Mode::MultiNodeReaderOnly) => Ok(AccessMode::MultiNodeReaderOnly),
        Ok(Mode::MultiNodeSingleWriter) => Ok(AccessMode::MultiNodeSingleWriter),
        Ok(Mode::MultiNodeMultiWriter) => Ok(AccessMode::MultiNodeMultiWriter),
        Ok(Mode::SingleNodeSingleWriter) => Ok(AccessMode::SingleNodeSingleWriter),
        Ok(Mode::SingleNodeMultiWriter) => Ok(AccessMode::SingleNodeMultiWriter),
        Ok(Mode::Unknown) => Err(InvalidRequest::new(FIELD, "must not be UNKNOWN")),
        Err(_) => Err(InvalidRequest::new(FIELD, format!("{number} is no mode of CSI 1.12"))),
    }
}

/// The mode's name in the protocol.
fn name(mode: AccessMode) -> &'static str {
    match mode {
        AccessMode::SingleNodeWriter => Mode::SingleNodeWriter,
        AccessMode::SingleNodeReaderOnly => Mode::SingleNodeReaderOnly,
        AccessMode::MultiNodeReaderOnly => Mode::MultiNodeReaderOnly,
        AccessMode::MultiNodeSingleWriter => Mode::MultiNodeSingleWriter,
        AccessMode::MultiNodeMultiWriter => Mode::MultiNodeMultiWriter,
        AccessMode::SingleNodeSingleWriter => Mode::SingleNodeSingleWriter,
        AccessMode::SingleNodeMultiWriter => Mode::SingleNodeMultiWriter,
    }
    .as_str_name()
}

fn mount_group(given: &str) -> Result<Option<u32>, InvalidRequest> {
    if given.is_empty() {
        return Ok(None);
    }
    // u32::MAX is (gid_t) -1, "no change" to chown(2).
    given.parse().ok().filter(|gid| *gid != u32::MAX).map(Some).ok_or_else(|| {
        InvalidRequest::new(
            "volume_capability.mount.volume_mount_group",
            format!("{given:?} is not a numeric group id"),
        )
    })
}

fn fs_type(given: &str) -> Result<Option<FsType>, InvalidRequest> {
    match given {
        "" => Ok(None),
        "ext4" => Ok(Some(FsType::Ext4)),
        "xfs" => Ok(Some(FsType::Xfs)),
        "btrfs" => Ok(Some(FsType::Btrfs)),
        other => Err(InvalidRequest::new(
            "volume_capability.mount.fs_type",
            format!("{other:?} is not supported: use ext4, xfs or btrfs, or leave it empty"),
        )),
    }
}
