//! Requests become domain types here, once; what does not parse is `INVALID_ARGUMENT` with the field's name.
//!
//! Nothing here reads the store or the machine: the same request always gives the same answer.

mod capability;
mod create;
mod inline;

use std::path::PathBuf;
use std::time::Duration;

use snafu::Snafu;
use tonic::metadata::MetadataMap;

pub(super) use capability::{Capability, capabilities, capability};
pub(super) use create::{TOPOLOGY_KEY, create_volume, node_of_topology, policy};
pub(super) use inline::{Inline, inline};

use crate::domain::VolumeId;
pub(super) use crate::domain::volume::serves;

/// A field of a request is not as it must be.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(display("{field}: {reason}"))]
pub struct InvalidRequest {
    /// The field, as in the protocol.
    pub field: &'static str,
    /// What is wrong with it, and what would be right.
    pub reason: String,
}

impl InvalidRequest {
    pub(super) fn new(field: &'static str, reason: impl Into<String>) -> Self {
        Self { field, reason: reason.into() }
    }
}

/// Key in a volume context that asks for the volume to be mounted again after a reboot, by the agent itself: a machine
/// without an orchestrator has nobody else to do it.
pub(super) const MOUNT_AT_BOOT: &str = "union.io/mount-at-boot";

/// The text of a required field.
pub(super) fn required<'a>(field: &'static str, text: &'a str) -> Result<&'a str, InvalidRequest> {
    if text.is_empty() { Err(InvalidRequest::new(field, "is required")) } else { Ok(text) }
}

/// The id of a volume that may exist: `None` where the text is no id that this program ever gave.
pub(super) fn volume_id(text: &str) -> Result<Option<VolumeId>, InvalidRequest> {
    Ok(required("volume_id", text)?.parse().ok())
}

/// A path that the caller gave; whether it may be used is decided where it is used.
pub(super) fn absolute_path(field: &'static str, text: &str) -> Result<PathBuf, InvalidRequest> {
    let path = PathBuf::from(required(field, text)?);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(InvalidRequest::new(field, format!("{text:?} is not an absolute path")))
    }
}

/// A switch in a volume context: absent is off.
pub(super) fn switch(
    field: &'static str,
    context: &std::collections::HashMap<String, String>,
    key: &str,
) -> Result<bool, InvalidRequest> {
    match context.get(key).map(String::as_str) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => {
            Err(InvalidRequest::new(field, format!("{key} is {other:?}: use \"true\" or \"false\"")))
        }
    }
}

/// How long the caller is going to wait for the answer (`grpc-timeout`), where it said so.
///
/// Source: <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>: at most 8 digits and a unit.
pub(super) fn patience(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
