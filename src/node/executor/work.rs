//! What is done for one branch.

use std::sync::Arc;
use std::time::Duration;

use tracing::{error, info, warn};

use super::fresh::Fresh;
use super::queue::backoff;
use crate::node::access::Exporter;
use crate::node::branch::{BranchError, Branches};
use crate::store::object::{Branch, BranchPhase, BranchStatus, FINALIZER};
use crate::store::{Store, StoreError};

/// Work on a branch has ended.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) name: String,
    /// It must be tried again after this.
    pub(super) retry: Option<Duration>,
    /// It is as it should be, as this object says.
    pub(super) settled: Option<Branch>,
    /// The disk changed.
    pub(super) changed: bool,
}

#[derive(Clone)]
pub(super) struct Worker {
    pub(super) store: Arc<dyn Store>,
    pub(super) branches: Arc<Branches>,
    pub(super) exporter: Arc<Exporter>,
    pub(super) fresh: Arc<Fresh>,
}

/// What follows from an attempt to make or find a branch.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Judgement {
    pub(super) status: BranchStatus,
    pub(super) retry: bool,
}

/// The status after an attempt. `before` is the status until now.
pub(super) fn judge(before: &BranchStatus, outcome: Result<BranchStatus, BranchError>) -> Judgement {
    let error = match outcome {
        Ok(status) => {
            let (export, conditions) = (before.export.clone(), before.conditions.clone());
            let status = BranchStatus { export, conditions, ..status };
            return Judgement { status, retry: false };
        }
        Err(error) => error,
    };
    let existed = existed(before);
    let (phase, retry) = match &error {
        // It is known to exist: nobody may plan it anew. Disks return, and files are put back.
        _ if existed => (BranchPhase::Lost, true),
        BranchError::NoRoom { .. }
        | BranchError::Unfit { .. }
        | BranchError::Pool { .. }
        | BranchError::Foreign { .. } => (BranchPhase::Refused, false),
        BranchError::Host { .. }
        | BranchError::InUse { .. }
        | BranchError::Missing { .. }
        | BranchError::Elsewhere { .. }
        | BranchError::Mark { .. } => (BranchPhase::Failing, true),
    };
    let status = BranchStatus { phase, reason: error.to_string(), ..before.clone() };
    Judgement { status, retry }
}

/// True for a branch that was bound once.
fn existed(status: &BranchStatus) -> bool {
    matches!(status.phase, BranchPhase::Bound | BranchPhase::Lost)
}

impl Worker {
    /// Brings the branch to what is wanted and writes what is.
    pub(super) async fn act(&self, branch: Branch, attempt: u32) -> Done {
        let name = branch.meta.name.clone();
        let done = if branch.meta.deleting.is_some() {
            self.remove(branch, attempt).await
        } else {
            self.provide(branch, attempt).await
        };
        done.unwrap_or_else(|e| {
            // Someone else changed the object meanwhile: its event is on the way, and says what to do now.
            let pause = backoff(&name, attempt);
            if !matches!(e, StoreError::Conflict { .. } | StoreError::Missing { .. }) {
                error!(branch.id = name, error = %e, retry_after = ?pause, "cannot write the state of a branch");
            }
            Done { name: name.clone(), retry: Some(pause), settled: None, changed: true }
        })
    }

    async fn provide(&self, mut branch: Branch, attempt: u32) -> Result<Done, StoreError> {
        let name = branch.meta.name.clone();
        if branch.status.phase == BranchPhase::Refused {
            return Ok(Done { name, retry: None, settled: Some(branch), changed: false });
        }
        let bound = existed(&branch.status);
        let (branches, spec) = (self.branches.clone(), branch.spec.clone());
        let outcome = blocking(move || branches.ensure_present(&spec, bound)).await;
        let failure = outcome.as_ref().err().map(ToString::to_string);
        let judgement = judge(&branch.status, outcome);
        let mut pause = judgement.retry.then(|| backoff(&name, attempt));
        let changed = judgement.status.phase != branch.status.phase;
        if changed {
            match &failure {
                None => info!(branch.id = name, pool.name = %branch.spec.pool, "the branch is bound"),
                Some(e) => {
                    warn!(branch.id = name, branch.phase = ?judgement.status.phase, error = e, retry_after = ?pause, "the branch cannot be provided");
                }
            }
        }
        let before = std::mem::replace(&mut branch.status, judgement.status);
        if branch.status.phase == BranchPhase::Bound && self.carry_out(&mut branch, false).await?.is_err() {
            pause = Some(backoff(&name, attempt));
        }
        if branch.status != before {
            branch = self.store.branches().update_status(branch).await?;
        }
        let settled = pause.is_none().then_some(branch);
        Ok(Done { name, retry: pause, settled, changed })
    }

    /// Ends the branch's export and removes its files, or says why they stay.
    async fn take_away(&self, branch: &mut Branch) -> Result<Result<(), String>, StoreError> {
        // Whoever deleted the object, by hand or by mistake: only the volume's own deletion ends its files.
        let volume = &branch.spec.volume;
        if let Some(split) = self.store.splits().get(volume.as_str()).await?
            && split.needs(branch.spec.index)
        {
            let reason = format!(
                "deleted, but volume {volume} needs it: its files stay, and can be used, until the volume is deleted"
            );
            // Also by another node: its orders are obeyed as before.
            let _ = self.carry_out(branch, false).await?;
            return Ok(Err(reason));
        }
        // What was refused was never made.
        if branch.status.phase != BranchPhase::Refused
            && let Err(e) = self.carry_out(branch, true).await?
        {
            return Ok(Err(format!("cannot be removed: {e}")));
        }
        let (branches, spec) = (self.branches.clone(), branch.spec.clone());
        match blocking(move || branches.ensure_absent(&spec)).await {
            // What was refused was never made: there is nothing that an absent pool or another's files could keep.
            Err(BranchError::Pool { .. } | BranchError::Foreign { .. })
                if branch.status.phase == BranchPhase::Refused =>
            {
                Ok(Ok(()))
            }
            outcome => Ok(outcome.map_err(|e| format!("cannot be removed: {e}"))),
        }
    }

    async fn remove(&self, mut branch: Branch, attempt: u32) -> Result<Done, StoreError> {
        let name = branch.meta.name.clone();
        if !branch.meta.finalizers.iter().any(|f| f == FINALIZER) {
            return Ok(Done { name, retry: None, settled: Some(branch), changed: false });
        }
        let before = branch.status.clone();
        match self.take_away(&mut branch).await? {
            Ok(()) => {
                // Whoever sees the branch gone sees its room, too: who was waiting for it asks at once.
                self.fresh.wait().await;
                branch.meta.finalizers.retain(|f| f != FINALIZER);
                self.store.branches().update(branch).await?;
                info!(branch.id = name, "the branch is removed");
                Ok(Done { name, retry: None, settled: None, changed: true })
            }
            Err(e) => {
                let pause = backoff(&name, attempt);
                // A branch that is lost stays lost: whether it was bound must not be forgotten.
                let phase = if existed(&branch.status) { branch.status.phase } else { BranchPhase::Failing };
                let status = BranchStatus { phase, reason: e.clone(), ..branch.status.clone() };
                if status != before {
                    warn!(branch.id = name, error = e, retry_after = ?pause, "the branch is not removed");
                    branch.status = status;
                    self.store.branches().update_status(branch).await?;
                }
                Ok(Done { name, retry: Some(pause), settled: None, changed: false })
            }
        }
    }
}

/// Runs what blocks on a thread for it. A panic there is a panic here.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_room() -> BranchError {
        BranchError::NoRoom {
            branch: "v-0".parse().unwrap(),
            pool: "p".parse().unwrap(),
            wanted: crate::domain::Bytes::gib(2),
            allocatable: crate::domain::Bytes::gib(1),
        }
    }

    fn missing() -> BranchError {
        BranchError::Missing { branch: "v-0".parse().unwrap(), path: "/p/branches/v-0".into() }
    }

    fn absent() -> BranchError {
        BranchError::Pool {
            branch: "v-0".parse().unwrap(),
            pool: "p".parse().unwrap(),
            reason: "its disk is not mounted".to_owned(),
        }
    }

    fn host() -> BranchError {
        let source = crate::platform::failed("mount", "/x")(std::io::Error::from_raw_os_error(5));
        BranchError::Host { branch: "v-0".parse().unwrap(), action: "mount it", source }
    }

    fn status(phase: BranchPhase) -> BranchStatus {
        BranchStatus { phase, ..BranchStatus::default() }
    }

    #[test]
    fn a_new_branch_is_refused_for_what_a_new_plan_can_mend_and_tried_again_for_the_rest() {
        for (error, phase, retry) in [
            (no_room(), BranchPhase::Refused, false),
            (absent(), BranchPhase::Refused, false),
            (host(), BranchPhase::Failing, true),
        ] {
            for before in [BranchPhase::Pending, BranchPhase::Failing] {
                let text = error.to_string();
                let error = match &error {
                    BranchError::NoRoom { .. } => no_room(),
                    BranchError::Pool { .. } => absent(),
                    _ => host(),
                };
                let judgement = judge(&status(before), Err(error));
                assert_eq!((judgement.status.phase, judgement.retry), (phase, retry));
                assert_eq!(judgement.status.reason, text);
            }
        }
    }

    #[test]
    fn a_branch_that_was_bound_is_lost_but_never_refused_and_returns() {
        for error in [missing(), absent(), host()] {
            let lost = judge(&status(BranchPhase::Bound), Err(error));
            assert_eq!((lost.status.phase, lost.retry), (BranchPhase::Lost, true));
            let back = judge(&lost.status, Ok(status(BranchPhase::Bound)));
            assert_eq!((back.status.phase, back.retry), (BranchPhase::Bound, false));
            assert_eq!(back.status.reason, "");
        }
    }
}
