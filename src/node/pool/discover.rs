//! Proposing pools from the machine's mounted disks. Nothing is taken: the administrator reviews what is proposed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{BRANCHES, PoolSettings};
use crate::domain::pool::{Enforcement, Media};
use crate::domain::{Bytes, PoolName};
use crate::platform::mount::MountTable;
use crate::platform::{Host, Result};

/// How long all mounted filesystems may take to tell their sizes.
const DISKS_BOUND: Duration = Duration::from_secs(15);

/// Filesystems that can hold branches: local, and able to reserve a file's room.
const SUITABLE: [&str; 4] = ["ext4", "xfs", "btrfs", "f2fs"];

/// Mount points that belong to the system or to other programs; what is mounted below them as well.
const NOT_OURS: [&str; 10] = [
    "/boot",
    "/efi",
    "/run",
    "/snap",
    "/etc",
    "/usr",
    "/nix",
    "/var/lib/kubelet",
    "/var/lib/containers",
    "/var/lib/docker",
];

/// Less than this is not worth a pool.
const LEAST: Bytes = Bytes::gib(1);

/// A pool that could be configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProposedPool {
    /// A name made from the mount point, unique among the proposed and the configured ones.
    pub name: PoolName,
    /// Its directory: the mount point.
    pub path: PathBuf,
    /// UUID of the filesystem, to be written into the configuration.
    pub uuid: Option<String>,
    /// Filesystem type.
    pub filesystem: String,
    /// Kind of disk.
    pub media: Media,
    /// How a directory's size can be enforced, and where it cannot, what would help.
    pub enforcement: (Enforcement, String),
    /// Size of the filesystem.
    pub total: Bytes,
    /// What is free.
    pub free: Bytes,
    /// Why it should be proposed only as a comment, to be taken knowingly; a sentence.
    pub caution: Option<String>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Discovery {
    /// Pools that could be configured, by path.
    pub proposed: Vec<ProposedPool>,
    /// Mount points of disks that are no pools, and why; by path.
    pub skipped: Vec<(PathBuf, String)>,
}

/// A mounted filesystem, as far as the decision needs it.
#[derive(Clone, Debug)]
struct Candidate {
    mount_point: PathBuf,
    /// Root of the mount within its filesystem.
    root: PathBuf,
    device: (u32, u32),
    filesystem: String,
    read_only: bool,
    /// File behind its loop device.
    backing: Option<PathBuf>,
    total: Bytes,
    removable: bool,
}

/// Looks at the machine's disks. `configured` are the pools that exist already.
///
/// # Errors
/// The mount table cannot be read.
pub fn discover(host: &Host, configured: &[PoolSettings]) -> Result<Discovery> {
    let mounts = host.mounts()?;
    let taken: Vec<(u32, u32)> =
        configured.iter().filter_map(|s| host.resolve_directory(&s.path).ok()).map(|(_, d)| d).collect();
    let mut found = Discovery::default();
    let mut names: BTreeSet<String> = configured.iter().map(|s| s.name.as_str().to_owned()).collect();
    let mut devices = BTreeSet::new();
    let mut candidates = candidates(host, &mounts)?;
    // The shortest path first: it is the disk's own mount, others show parts of it.
    candidates.sort_by_key(|c| (c.mount_point.as_os_str().len(), c.mount_point.clone()));
    for candidate in candidates {
        let path = candidate.mount_point.clone();
        let caution = match judge(&candidate, &taken) {
            _ if !devices.insert(candidate.device) => Err("another mount of the same filesystem".to_owned()),
            judged => judged,
        };
        match caution {
            Err(reason) => found.skipped.push((path, reason)),
            Ok(caution) => {
                let space = host.space(&path, super::ANSWER_BOUND)?;
                let Some(name) = name_for(&path, &mut names) else { continue };
                found.proposed.push(ProposedPool {
                    name,
                    uuid: host.filesystem_uuid(&path)?,
                    filesystem: candidate.filesystem,
                    media: host.media(candidate.device).unwrap_or_default(),
                    enforcement: host.enforcement(&path)?,
                    total: Bytes::new(space.total),
                    free: Bytes::new(space.available),
                    caution,
                    path,
                });
            }
        }
    }
    found.proposed.sort_by(|a, b| a.path.cmp(&b.path));
    found.skipped.sort();
    Ok(found)
}

fn candidates(host: &Host, mounts: &MountTable) -> Result<Vec<Candidate>> {
    let mut candidates = Vec::new();
    for disk in host.mounted_disks(DISKS_BOUND)? {
        // The topmost mount there; what it covers cannot be seen.
        let Some(entry) = mounts.at(&disk.mount_point) else { continue };
        candidates.push(Candidate {
            mount_point: disk.mount_point,
            root: entry.root.clone(),
            device: entry.device,
            filesystem: entry.fs_type.clone(),
            read_only: entry.read_only(),
            backing: host.loop_backing(source_number(&entry.source).unwrap_or(entry.device)).unwrap_or(None),
            total: Bytes::new(disk.total),
            removable: disk.removable,
        });
    }
    Ok(candidates)
}

/// Loop devices by name, because a btrfs mount does not have its device's number.
fn source_number(source: &str) -> Option<(u32, u32)> {
    source.strip_prefix("/dev/loop")?.parse().ok().map(|n| (7, n))
}

/// Whether it is proposed, and with which caution; else why not.
fn judge(candidate: &Candidate, taken: &[(u32, u32)]) -> std::result::Result<Option<String>, String> {
    let path = &candidate.mount_point;
    if !SUITABLE.contains(&candidate.filesystem.as_str()) {
        return Err(format!("{} cannot hold branches", candidate.filesystem));
    }
    if candidate.backing.as_deref().is_some_and(is_our_image) {
        return Err("a branch of a volume".to_owned());
    }
    if taken.contains(&candidate.device) {
        return Err("a pool lies on it already".to_owned());
    }
    if candidate.read_only {
        return Err("mounted read-only".to_owned());
    }
    if let Some(system) = NOT_OURS.iter().find(|p| path.starts_with(p)) {
        return Err(format!("{system} belongs to the system or to another program"));
    }
    if candidate.total < LEAST {
        return Err(format!("smaller than {LEAST}"));
    }
    if candidate.root != Path::new("/") && candidate.filesystem != "btrfs" {
        return Err("shows only a part of its filesystem".to_owned());
    }
    if path == Path::new("/") {
        return Ok(Some(
            "the system lies on this disk: a full pool would fill it; use a directory of its own and a generous reserve"
                .to_owned(),
        ));
    }
    if candidate.removable {
        return Ok(Some("the disk can be taken out".to_owned()));
    }
    Ok(None)
}

/// Whether a file is a branch's image: `…/branches/<id>/disk.img`.
fn is_our_image(file: &Path) -> bool {
    file.ends_with(crate::node::branch::record::IMAGE)
        && file.ancestors().nth(2).is_some_and(|p| p.ends_with(BRANCHES))
}

/// A name from the path's last part, made unique.
fn name_for(path: &Path, names: &mut BTreeSet<String>) -> Option<PoolName> {
    let last = path.file_name().map_or("root".into(), |n| n.to_string_lossy());
    let plain: String = last
        .to_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .take(50)
        .collect();
    let trimmed = plain.trim_matches('-');
    let base = if trimmed.is_empty() { "disk" } else { trimmed };
    let name = std::iter::once(base.to_owned())
        .chain((2_u32..).map(|n| format!("{base}-{n}")))
        .find(|name| !names.contains(name))?;
    names.insert(name.clone());
    name.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(path: &str) -> Candidate {
        Candidate {
            mount_point: path.into(),
            root: "/".into(),
            device: (8, 1),
            filesystem: "ext4".to_owned(),
            read_only: false,
            backing: None,
            total: Bytes::gib(100),
            removable: false,
        }
    }

    #[test]
    fn a_data_disk_is_proposed_and_the_systems_disk_only_with_a_caution() {
        assert_eq!(judge(&candidate("/mnt/data"), &[]), Ok(None));
        assert!(judge(&candidate("/"), &[]).unwrap().unwrap().contains("system"));
        let stick = Candidate { removable: true, ..candidate("/media/stick") };
        assert!(judge(&stick, &[]).unwrap().is_some());
    }

    #[test]
    fn what_is_in_use_unfit_or_the_systems_is_not_proposed() {
        for no in [
            Candidate { filesystem: "tmpfs".to_owned(), ..candidate("/mnt/a") },
            Candidate { filesystem: "nfs4".to_owned(), ..candidate("/mnt/a") },
            Candidate { read_only: true, ..candidate("/mnt/a") },
            Candidate { total: Bytes::mib(500), ..candidate("/mnt/a") },
            Candidate { root: "/sub".into(), ..candidate("/mnt/a") },
            Candidate { backing: Some("/p/branches/v-0/disk.img".into()), ..candidate("/mnt/a") },
            candidate("/boot"),
            candidate("/boot/efi"),
            candidate("/var/lib/kubelet/pods/x"),
        ] {
            assert!(judge(&no, &[]).is_err(), "{no:?}");
        }
        assert!(judge(&candidate("/mnt/a"), &[(8, 1)]).is_err(), "a pool lies on it");
        assert!(judge(&candidate("/bootstrap"), &[]).is_ok());
        let other = Candidate { backing: Some("/images/disk.img".into()), ..candidate("/mnt/a") };
        assert!(judge(&other, &[]).is_ok(), "a loop device of somebody's disk image");
    }

    #[test]
    fn names_are_valid_and_unique() {
        let mut names = BTreeSet::new();
        for (path, want) in [
            ("/mnt/Big Disk", "big-disk"),
            ("/srv/big-disk", "big-disk-2"),
            ("/", "root"),
            ("/mnt/___", "disk"),
            ("/mnt/größe", "gr--e"),
        ] {
            assert_eq!(name_for(Path::new(path), &mut names).unwrap().as_str(), want);
        }
    }
}
