//! What of this node is nobody's: branches on its disks that no object tells of, and objects of volumes whose pod is gone.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use tracing::warn;

use super::{Executor, State};
use crate::domain::unclaimed::{NAMED, Unclaimed, UnclaimedBranch};
use crate::domain::{PoolName, VolumeId};
use crate::store::object::{Branch, LABEL_EPHEMERAL};

/// As last found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Strays {
    /// All branches on the disks that no object tells of.
    pub(super) on_disks: Vec<UnclaimedBranch>,
    /// The same, for the store.
    pub(super) unclaimed: Unclaimed,
    /// The first ephemeral volumes that lie here and have no directory of their pod here, by name.
    pub(super) abandoned: Vec<VolumeId>,
}

impl Strays {
    pub(super) fn new(on_disks: Vec<UnclaimedBranch>, mut abandoned: Vec<VolumeId>) -> Self {
        abandoned.truncate(NAMED);
        Self { unclaimed: Unclaimed::of(on_disks.clone()), on_disks, abandoned }
    }
}

/// Which branches on the disks were warned of.
#[derive(Debug, Default)]
pub(super) struct Warned(HashSet<(PoolName, String)>);

impl Warned {
    /// Those that were not warned of yet.
    pub(super) fn new_ones<'a>(&mut self, on_disks: &'a [UnclaimedBranch]) -> Vec<&'a UnclaimedBranch> {
        on_disks.iter().filter(|one| self.0.insert((one.pool.clone(), one.name.clone()))).collect()
    }
}

impl Executor {
    /// Finds what is nobody's, warns of what is new, and has it published where it changed.
    pub(super) async fn look_for_strays(&self, state: &mut State) {
        // Before all objects were heard of, everything would be.
        if !state.read {
            return;
        }
        let on_disks = self.pools.unclaimed(|name| state.wanted.contains_key(name));
        for stray in state.warned.new_ones(&on_disks) {
            warn!(
                branch.id = stray.name, pool.name = %stray.pool, branch.path = stray.path, problem = stray.problem,
                "a branch on the disk belongs to no volume: it is kept and its room is counted; see \
                 docs/OPERATIONS.md for what to do with it"
            );
        }
        let (volumes, directories) = (ephemeral(state.wanted.values()), self.facts.ephemeral_dir.clone());
        let abandoned = match volumes.is_empty() {
            true => Vec::new(),
            false => tokio::task::spawn_blocking(move || without_directory(volumes, &directories))
                .await
                .unwrap_or_default(),
        };
        let found = Strays::new(on_disks, abandoned);
        self.strays.send_if_modified(|known| {
            let changed = known.as_deref() != Some(&found);
            if changed {
                *known = Some(Arc::new(found));
            }
            changed
        });
    }
}

/// The ephemeral volumes among those of these branches, but those that are on their way out. Ordered.
fn ephemeral<'a>(branches: impl Iterator<Item = &'a Branch>) -> Vec<VolumeId> {
    let stays = |b: &&Branch| b.meta.deleting.is_none() && b.meta.labels.contains_key(LABEL_EPHEMERAL);
    let mut volumes: Vec<VolumeId> = branches.filter(stays).map(|b| b.spec.volume.clone()).collect();
    volumes.sort();
    volumes.dedup();
    volumes
}

/// Those of them without a directory. It is made before anything else of a volume and removed last, so a volume
/// without one is nobody's. Blocks.
fn without_directory(volumes: Vec<VolumeId>, directories: &Path) -> Vec<VolumeId> {
    // What cannot be told is not told.
    let gone = |volume: &VolumeId| matches!(directories.join(volume).try_exists(), Ok(false));
    volumes.into_iter().filter(gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::contract;

    #[test]
    fn an_ephemeral_volume_without_its_directory_is_nobodys() {
        let directory = tempfile::tempdir().unwrap();
        let inline = |name: &str, index| {
            let mut branch = contract::branch(name, index, "n");
            branch.meta.labels.insert(LABEL_EPHEMERAL.to_owned(), "true".to_owned());
            branch
        };
        let mut going = inline("going", 0);
        going.meta.deleting = Some(jiff::Timestamp::UNIX_EPOCH);
        let branches = [
            inline("used", 0),
            inline("gone", 1),
            inline("gone", 0),
            going,
            contract::branch("ordinary", 0, "n"),
        ];
        std::fs::create_dir(directory.path().join("used")).unwrap();
        let found = without_directory(ephemeral(branches.iter()), directory.path());
        assert_eq!(found.iter().map(VolumeId::as_str).collect::<Vec<_>>(), ["gone"]);
    }
}
