//! What the kernel shows of volumes' mounts.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::record::{Origin, Record, branch_mount};
use crate::domain::VolumeId;
use crate::domain::union::UnionKind;
use crate::platform::mount::{MountEntry, MountTable};

/// The mounts of one moment, by mount point.
#[derive(Debug)]
pub(super) struct View {
    table: Arc<MountTable>,
    top: HashMap<PathBuf, usize>,
}

/// What is mounted at a place, seen from one volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found<'a> {
    /// Nothing.
    Nothing,
    /// The volume as it is served now.
    Ours(&'a MountEntry),
    /// The volume as it was served before: its union is gone.
    Stale(&'a MountEntry),
    /// Something else.
    Foreign(&'a MountEntry),
}

impl View {
    /// A view of the table.
    pub(super) fn new(table: Arc<MountTable>) -> Self {
        let mut stacks: HashMap<&Path, Vec<usize>> = HashMap::with_capacity(table.entries.len());
        for (index, entry) in table.entries.iter().enumerate() {
            stacks.entry(&entry.mount_point).or_default().push(index);
        }
        // A mount that was moved beneath another is listed later and still lies below: the parents tell.
        let topmost = |stack: &[usize]| {
            let covered =
                |i: usize| stack.iter().any(|&j| j != i && table.entries[j].parent == table.entries[i].id);
            stack.iter().rev().copied().find(|&i| !covered(i)).or_else(|| stack.last().copied())
        };
        let top = stacks
            .iter()
            .filter_map(|(point, stack)| topmost(stack).map(|i| ((*point).to_owned(), i)))
            .collect();
        Self { table, top }
    }

    /// The mounts.
    pub(super) fn table(&self) -> &MountTable {
        &self.table
    }

    /// The topmost mount exactly at `path`.
    pub(super) fn at(&self, path: &Path) -> Option<&MountEntry> {
        self.top.get(path).map(|&index| &self.table.entries[index])
    }

    /// The volume's MergerFS, where it is mounted at `path`.
    pub(super) fn union_at(&self, path: &Path, volume: &VolumeId) -> Option<&MountEntry> {
        self.at(path).filter(|entry| is_union_of(entry, volume))
    }

    /// What the volume's binds show when they are made now; `None` where what they are made of is not mounted.
    pub(super) fn origin(&self, record: &Record, directory: &Path) -> Option<Origin> {
        let data = |point: &Path| {
            self.at(point).map(|e| Origin { device: e.device, root: e.root.join(super::DATA) })
        };
        match record.kind {
            UnionKind::Mergerfs => data(&record.union_mount(directory)),
            // It is mounted on the `data` directory itself.
            UnionKind::Overlay => self
                .at(&record.union_mount(directory).join(super::DATA))
                .map(|e| Origin { device: e.device, root: e.root.clone() }),
            UnionKind::Bind => data(&branch_mount(directory, record.branches.first()?.spec.index)),
            UnionKind::Block => {
                let device = record.branches.first()?.device.as_ref()?;
                let holder = self.table.containing(device)?;
                let below = device.strip_prefix(&holder.mount_point).ok()?;
                Some(Origin { device: holder.device, root: holder.root.join(below) })
            }
        }
    }

    /// What is mounted at `path`, for the volume that is served from `now` and was served from `before`.
    pub(super) fn find(
        &self,
        path: &Path,
        volume: &VolumeId,
        now: Option<&Origin>,
        before: Option<&Origin>,
    ) -> Found<'_> {
        let Some(entry) = self.at(path) else { return Found::Nothing };
        let is = |origin: Option<&Origin>| {
            origin.is_some_and(|o| o.device == entry.device && o.root == entry.root)
        };
        // The node of a device that is gone: another device may have the name by now, with a node of its own.
        let is_removed = |origin: Option<&Origin>| {
            origin.is_some_and(|o| o.device == entry.device) && is_removed(&entry.root)
        };
        if is(now) {
            Found::Ours(entry)
        } else if is(before) || is_removed(now) || is_removed(before) || is_union_of(entry, volume) {
            Found::Stale(entry)
        } else {
            Found::Foreign(entry)
        }
    }

    /// Where else than below `except` and at the paths of `known` the origin is mounted, or a part of it.
    pub(super) fn elsewhere(&self, origin: &Origin, except: &Path, known: &[&Path]) -> Vec<&Path> {
        self.table
            .entries
            .iter()
            .filter(|e| e.device == origin.device && e.root.starts_with(&origin.root))
            .map(|e| e.mount_point.as_path())
            .filter(|point| !point.starts_with(except) && !known.contains(point))
            .collect()
    }
}

/// True where what was mounted has lost its name since then, as `/proc/self/mountinfo` shows it.
fn is_removed(root: &Path) -> bool {
    root.as_os_str().as_encoded_bytes().ends_with(b"//deleted")
}

/// True for a mount of the volume's MergerFS, whatever became of its process.
fn is_union_of(entry: &MountEntry, volume: &VolumeId) -> bool {
    entry.fs_type.starts_with("fuse") && entry.source == volume.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: u64, parent: u64, minor: u32, point: &str) -> MountEntry {
        MountEntry {
            id,
            parent,
            device: (0, minor),
            root: "/data".into(),
            mount_point: point.into(),
            options: vec!["rw".into()],
            fs_type: "fuse.mergerfs".into(),
            source: format!("vol-{minor}"),
            super_options: vec!["rw".into()],
        }
    }

    fn view(entries: Vec<MountEntry>) -> View {
        View::new(Arc::new(MountTable { entries }))
    }

    fn origin(minor: u32) -> Origin {
        Origin { device: (0, minor), root: "/data".into() }
    }

    #[test]
    fn the_topmost_of_a_stack_is_told_by_its_parents_not_by_its_line() {
        let stacked = view(vec![entry(1, 0, 1, "/t"), entry(2, 1, 2, "/t")]);
        assert_eq!(stacked.at(Path::new("/t")).unwrap().id, 2);
        let beneath = view(vec![entry(1, 3, 1, "/t"), entry(3, 0, 2, "/t")]);
        assert_eq!(beneath.at(Path::new("/t")).unwrap().id, 1, "number 3 was moved beneath number 1");
    }

    #[test]
    fn a_mount_is_ours_only_with_the_same_device_and_root() {
        let volume: VolumeId = "vol-1".parse().unwrap();
        let view = view(vec![entry(1, 0, 1, "/a"), entry(2, 0, 2, "/b")]);
        let (one, seven) = (origin(1), origin(7));
        let find = |path: &'static str, now, before| view.find(Path::new(path), &volume, now, before);
        assert!(matches!(find("/a", Some(&one), None), Found::Ours(_)));
        assert!(matches!(find("/a", Some(&seven), Some(&one)), Found::Stale(_)));
        assert!(matches!(find("/a", None, None), Found::Stale(_)), "its fsname tells that it was ours");
        assert!(matches!(find("/b", Some(&one), None), Found::Foreign(_)));
        assert_eq!(find("/c", Some(&one), None), Found::Nothing);
    }

    #[test]
    fn the_node_of_a_device_that_is_gone_is_stale_whatever_has_its_name_now() {
        let volume: VolumeId = "vol-1".parse().unwrap();
        let node = |id, root: &str, point: &str| MountEntry {
            root: root.into(),
            fs_type: "devtmpfs".to_owned(),
            source: "udev".to_owned(),
            ..entry(id, 0, 5, point)
        };
        let view =
            view(vec![node(1, "/nvme0n1//deleted", "/a"), node(2, "/nvme0n1", "/b"), node(3, "/sda", "/c")]);
        let now = Origin { device: (0, 5), root: "/nvme0n1".into() };
        let find = |path: &'static str| view.find(Path::new(path), &volume, Some(&now), None);
        assert!(matches!(find("/a"), Found::Stale(_)));
        assert!(matches!(find("/b"), Found::Ours(_)));
        assert!(matches!(find("/c"), Found::Foreign(_)));
    }

    #[test]
    fn other_mounts_of_a_volume_are_found_parts_included() {
        let part = MountEntry { root: "/data/sub".into(), ..entry(4, 0, 1, "/sub-path") };
        let view = view(vec![entry(1, 0, 1, "/state/v/union-1"), entry(2, 0, 1, "/staging"), part]);
        let found = view.elsewhere(&origin(1), Path::new("/state/v"), &[Path::new("/staging")]);
        assert_eq!(found, [Path::new("/sub-path")]);
    }
}
