//! What a caller does next, error by error. Kubernetes is the caller that these codes are chosen for: its sidecars and
//! its kubelet take `ABORTED`, `UNAVAILABLE`, `DEADLINE_EXCEEDED` (and the kubelet `RESOURCE_EXHAUSTED`) for "may still
//! be going on", repeat the call, and undo it when the claim or pod goes; any other code is "nothing was done".

use super::*;
use crate::domain::{Bytes, NodeName, VolumeId};

/// What the caller does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Calls again as it is, and undoes the call when nobody wants it any more.
    Repeats,
    /// Corrects the request: repeating cannot help.
    Corrects,
    /// Lets an administrator, or another call, change the state first.
    ChangesTheState,
    /// Looks for other room: another node, a smaller size.
    LooksElsewhere,
    /// Forgets the volume or node.
    Forgets,
    /// Reports a bug.
    Reports,
}

fn next(error: &impl Coded) -> Next {
    match error.code() {
        Code::Aborted | Code::Unavailable | Code::DeadlineExceeded => Next::Repeats,
        Code::InvalidArgument | Code::AlreadyExists => Next::Corrects,
        Code::FailedPrecondition => Next::ChangesTheState,
        Code::ResourceExhausted => Next::LooksElsewhere,
        Code::NotFound => Next::Forgets,
        Code::Internal => Next::Reports,
        other => panic!("no caller knows what to do with {other:?}"),
    }
}

fn volume() -> VolumeId {
    "pvc-1".parse().unwrap()
}

fn node() -> NodeName {
    "n".parse().unwrap()
}

fn text() -> String {
    "why".to_owned()
}

fn conflict() -> StoreError {
    StoreError::Conflict { kind: "VolumeSplit", name: text() }
}

fn down() -> StoreError {
    StoreError::Backend { action: text(), source: "why".into() }
}

fn invalid() -> InvalidRequest {
    InvalidRequest::new("name", "is required")
}

fn in_flight() -> InFlight {
    let guards = crate::csi::guard::Guards::default();
    let _first = guards.enter(&"pvc-1").unwrap();
    guards.enter(&"pvc-1").unwrap_err()
}

#[test]
fn a_request_that_is_wrong_is_corrected_and_one_that_is_early_is_repeated() {
    assert_eq!(next(&invalid()), Next::Corrects);
    assert_eq!(
        in_flight().code(),
        Code::Aborted,
        "the specification's code for an operation that is pending"
    );
}

#[test]
fn a_store_that_is_away_or_busy_is_asked_again() {
    let (kind, name) = ("VolumeSplit", text());
    assert_eq!(next(&down()), Next::Repeats);
    assert_eq!(next(&conflict()), Next::Repeats);
    assert_eq!(next(&StoreError::Exists { kind, name: name.clone() }), Next::Repeats);
    assert_eq!(next(&StoreError::Missing { kind, name: name.clone() }), Next::Repeats);
    assert_eq!(next(&StoreError::Malformed { kind, name, reason: text() }), Next::Reports);
}

#[test]
fn a_volume_that_is_being_made_or_removed_is_waited_for_and_one_without_room_is_not() {
    let volume = volume();
    assert_eq!(next(&ProvisionError::NotReady { volume: volume.clone(), reason: text() }), Next::Repeats);
    assert_eq!(next(&ProvisionError::NotGone { volume: volume.clone(), reason: text() }), Next::Repeats);
    assert_eq!(next(&ProvisionError::Deleting { volume: volume.clone() }), Next::Repeats);
    assert_eq!(next(&ProvisionError::Vanished { volume: volume.clone() }), Next::Repeats);
    assert_eq!(next(&ProvisionError::Differs { volume: volume.clone(), difference: text() }), Next::Corrects);
    assert_eq!(
        next(&ProvisionError::Attached { volume: volume.clone(), nodes: vec![] }),
        Next::ChangesTheState
    );
    assert_eq!(next(&ProvisionError::Store { source: down() }), Next::Repeats);
    let no_room =
        ProvisionError::NoRoom { volume, requested: Bytes::gib(2), largest: Bytes::gib(1), reason: text() };
    assert_eq!(next(&no_room), Next::LooksElsewhere);
}

#[test]
fn attaching_is_refused_in_a_way_that_says_what_must_change() {
    let (volume, node) = (volume(), node());
    let cases = [
        (ControllerError::Invalid { source: invalid() }, Next::Corrects),
        (ControllerError::InFlight { source: in_flight() }, Next::Repeats),
        (
            ControllerError::Provision { source: ProvisionError::Deleting { volume: volume.clone() } },
            Next::Repeats,
        ),
        (ControllerError::Store { source: down() }, Next::Repeats),
        (ControllerError::UnknownVolume { volume: text() }, Next::Forgets),
        (ControllerError::UnknownNode { node: text() }, Next::Forgets),
        (ControllerError::NodeFull { node: node.clone(), limit: 1 }, Next::LooksElsewhere),
    ];
    for (error, expected) in cases {
        assert_eq!(next(&error), expected, "{error}");
    }
    let refused = [
        (
            AttachRefused::Differently { volume: volume.clone(), node: node.clone(), how: text() },
            Next::Corrects,
        ),
        (AttachRefused::Elsewhere { volume: volume.clone(), node: node.clone() }, Next::ChangesTheState),
        (
            AttachRefused::Unreachable { volume: volume.clone(), node, holders: text(), reason: text() },
            Next::ChangesTheState,
        ),
        (AttachRefused::Unsupported { volume: volume.clone(), reason: text() }, Next::ChangesTheState),
        (AttachRefused::Changing { volume, reason: text() }, Next::Repeats),
    ];
    for (source, expected) in refused {
        let error = ControllerError::Attach { source };
        assert_eq!(next(&error), expected, "{error}");
    }
    let token = ControllerError::Token { token: text() };
    assert_eq!(token.code(), Code::Aborted, "the specification's code: list from the beginning");
}

#[test]
fn a_node_that_cannot_mount_says_whether_waiting_helps() {
    let (volume, path) = (volume(), std::path::PathBuf::from("/p"));
    let cases = [
        (VolumeError::Unknown { volume: volume.clone() }, Next::Forgets),
        (VolumeError::Path { path: path.clone(), reason: text() }, Next::Corrects),
        (VolumeError::Differs { volume: volume.clone(), path: path.clone(), reason: text() }, Next::Corrects),
        (VolumeError::Request { volume: volume.clone(), reason: text() }, Next::ChangesTheState),
        (VolumeError::NotStaged { volume: volume.clone(), staging: path }, Next::ChangesTheState),
        (VolumeError::Busy { volume: volume.clone(), reason: text() }, Next::ChangesTheState),
        (VolumeError::Union { volume: volume.clone(), reason: text() }, Next::ChangesTheState),
        (VolumeError::Incomplete { volume: volume.clone(), reason: text() }, Next::Repeats),
        (VolumeError::NotYet { volume: volume.clone(), reason: text() }, Next::Repeats),
        (VolumeError::Store { volume, source: down() }, Next::Repeats),
    ];
    for (error, expected) in cases {
        assert_eq!(next(&error), expected, "{error}");
    }
}

#[test]
fn what_may_be_half_done_on_a_node_is_never_taken_for_not_done() {
    let volume = volume();
    let unfinished =
        NodeError::Ephemeral { source: VolumeError::Union { volume: volume.clone(), reason: text() } };
    assert_eq!(next(&unfinished), Next::Repeats, "the kubelet unpublishes, which removes the volume");
    assert_eq!(next(&NodeError::Stopping { volume: text() }), Next::Repeats);
    assert_eq!(next(&NodeError::InFlight { source: in_flight() }), Next::Repeats);
    assert_eq!(next(&NodeError::Invalid { source: invalid() }), Next::Corrects);
    assert_eq!(next(&NodeError::UnknownVolume { volume: text() }), Next::Forgets);
    assert_eq!(next(&NodeError::StagingPathMissing { volume: text() }), Next::ChangesTheState);
    assert_eq!(
        next(&NodeError::Volume { source: VolumeError::Unknown { volume: volume.clone() } }),
        Next::Forgets
    );
    let vanished = NodeError::Provision { source: ProvisionError::Vanished { volume: volume.clone() } };
    assert_eq!(next(&vanished), Next::Repeats);
    let source = std::io::Error::other("why");
    let directory = NodeError::Directory { volume, action: "make", path: "/p".into(), source };
    assert_eq!(next(&directory), Next::Reports);
}

#[test]
fn the_reply_carries_the_code_and_the_words() {
    let status = reply::<()>("CreateVolume", "", Err(invalid())).unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "name: is required"));
}
