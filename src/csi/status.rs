//! Errors as gRPC codes: one exhaustive table for each error enum.
//!
//! A code is an instruction to the caller, and decides more than the words: an orchestrator repeats `ABORTED`,
//! `UNAVAILABLE` and `DEADLINE_EXCEEDED` knowing that work may be going on (Kubernetes then keeps the volume as
//! "uncertain" and cleans up after itself), and takes every other code as "nothing was done". The tests below say for
//! each error what is to happen next.

use std::fmt::Display;

use tonic::{Code, Response, Status};

use super::controller::ControllerError;
use super::guard::InFlight;
use super::node::NodeError;
use super::parse::InvalidRequest;
use super::provision::ProvisionError;
use crate::node::volume::VolumeError;
use crate::store::StoreError;
use crate::store::attach::AttachRefused;

/// An error that a caller is told.
pub(super) trait Coded: Display {
    /// What the caller shall do.
    fn code(&self) -> Code;
}

/// The reply to a call. Failures are logged here, once; a call that shall be repeated is no fault of anyone.
pub(super) fn reply<T>(
    method: &'static str,
    subject: &str,
    result: Result<T, impl Coded>,
) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|error| {
        let code = error.code();
        match code {
            Code::Internal | Code::Unavailable => {
                tracing::error!(rpc.method = method, rpc.code = %code, volume.id = subject, %error, "call failed");
            }
            _ => {
                tracing::info!(rpc.method = method, rpc.code = %code, volume.id = subject, %error, "call refused");
            }
        }
        Status::new(code, error.to_string())
    })
}

impl Coded for InvalidRequest {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
}

impl Coded for InFlight {
    fn code(&self) -> Code {
        Code::Aborted
    }
}

impl Coded for StoreError {
    fn code(&self) -> Code {
        match self {
            Self::Exists { .. } | Self::Missing { .. } | Self::Conflict { .. } => Code::Aborted,
            Self::Malformed { .. } => Code::Internal,
            Self::Backend { .. } => Code::Unavailable,
        }
    }
}

impl Coded for ProvisionError {
    fn code(&self) -> Code {
        match self {
            Self::Differs { .. } => Code::AlreadyExists,
            Self::Deleting { .. } | Self::Vanished { .. } => Code::Aborted,
            Self::NoRoom { .. } => Code::ResourceExhausted,
            Self::NotReady { .. } | Self::NotGone { .. } => Code::DeadlineExceeded,
            Self::Attached { .. } => Code::FailedPrecondition,
            Self::Store { source } => source.code(),
        }
    }
}

impl Coded for AttachRefused {
    fn code(&self) -> Code {
        match self {
            Self::Changing { .. } => Code::Aborted,
            Self::Differently { .. } => Code::AlreadyExists,
            Self::Elsewhere { .. }
            | Self::Undivided { .. }
            | Self::Unreachable { .. }
            | Self::Unsupported { .. } => Code::FailedPrecondition,
        }
    }
}

impl Coded for ControllerError {
    fn code(&self) -> Code {
        match self {
            Self::Invalid { source } => source.code(),
            Self::InFlight { source } => source.code(),
            Self::Provision { source } => source.code(),
            Self::Store { source } => source.code(),
            Self::UnknownVolume { .. } | Self::UnknownNode { .. } => Code::NotFound,
            Self::Attach { source } => source.code(),
            Self::NodeFull { .. } => Code::ResourceExhausted,
            Self::Token { .. } => Code::Aborted,
        }
    }
}

impl Coded for VolumeError {
    fn code(&self) -> Code {
        match self {
            Self::Unknown { .. } => Code::NotFound,
            Self::Path { .. } => Code::InvalidArgument,
            Self::Differs { .. } => Code::AlreadyExists,
            Self::Request { .. } | Self::NotStaged { .. } | Self::Busy { .. } | Self::Union { .. } => {
                Code::FailedPrecondition
            }
            // It waits for others and not for a repair.
            Self::NotYet { .. } => Code::Aborted,
            Self::Incomplete { .. } => Code::Unavailable,
            Self::Host { .. } => Code::Internal,
            Self::Store { source, .. } => source.code(),
        }
    }
}

impl Coded for NodeError {
    fn code(&self) -> Code {
        match self {
            Self::Invalid { source } => source.code(),
            Self::InFlight { source } => source.code(),
            Self::Provision { source } => source.code(),
            Self::Volume { source } => source.code(),
            Self::UnknownVolume { .. } => Code::NotFound,
            Self::StagingPathMissing { .. } => Code::FailedPrecondition,
            Self::Directory { .. } | Self::Died { .. } => Code::Internal,
            Self::Ephemeral { .. } | Self::Stopping { .. } => Code::Unavailable,
        }
    }
}

#[cfg(test)]
mod tests;
