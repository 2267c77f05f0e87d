//! The table of parameters, and the parser that it drives.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{
    Authentication, Bytes, Encryption, FormatChoice, FsType, GRAIN, MAX_BRANCHES, MIN_QUANTUM, Media,
    OnBranchLoss, ParamError, Placement, Policy, Strategy, UnionMode, mergerfs,
};
use crate::domain::duration;
use crate::domain::spelling::nearest;

/// Kubernetes' own keys in `parameters` (<https://kubernetes-csi.github.io/docs/external-provisioner.html>).
const KUBERNETES: &str = "csi.storage.k8s.io/";

/// Kubernetes' key for the filesystem type.
const KUBERNETES_FS_TYPE: &str = "csi.storage.k8s.io/fstype";

/// What `mergerfs.*` parameters begin with.
const MERGERFS: &str = "mergerfs.";

/// Bounds of `branchTimeout`: below, an ordinary pause of a disk is a loss; above, a workload hangs for a day.
const BRANCH_TIMEOUT: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// One StorageClass parameter, for documents and help.
#[derive(Clone, Copy)]
pub struct Parameter {
    /// Its key; `mergerfs.*` stands for all of those.
    pub key: &'static str,
    /// What it may be set to.
    pub values: &'static str,
    /// What it is when it is not given.
    pub default: &'static str,
    /// What it does; a sentence.
    pub meaning: &'static str,
    /// Takes a value over; false where it is not allowed.
    set: fn(&mut Policy, &str) -> bool,
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parameter").field("key", &self.key).finish_non_exhaustive()
    }
}

/// Every StorageClass parameter, in the order in which they are best explained.
#[must_use]
pub const fn parameters() -> &'static [Parameter] {
    PARAMETERS
}

const PARAMETERS: &[Parameter] = &[
    Parameter {
        key: "splitQuantum",
        values: "a quantity of 1Mi or more, a multiple of 4Ki, such as 512Mi or 1Gi",
        default: "1Gi",
        meaning: "Branch sizes are multiples of it; one branch takes the rest.",
        set: |policy, value| {
            let quantum =
                value.parse::<Bytes>().ok().filter(|q| *q >= MIN_QUANTUM && q.round_down_to(GRAIN) == *q);
            put(&mut policy.quantum, quantum)
        },
    },
    Parameter {
        key: "minBranches",
        values: "a number from 1 to 256",
        default: "1",
        meaning: "A volume has at least this many branches.",
        set: |policy, value| put(&mut policy.min_branches, branches(value)),
    },
    Parameter {
        key: "maxBranches",
        values: "a number from 1 to 256, not below minBranches",
        default: "16, or minBranches where that is more",
        meaning: "A volume has at most this many branches.",
        set: |policy, value| put(&mut policy.max_branches, branches(value)),
    },
    Parameter {
        key: "strategy",
        values: "fewest, balanced or spread",
        default: "fewest",
        meaning: "fewest: as few branches as fit, one of them best-fit; balanced: in proportion to free space; \
                  spread: over as many nodes as possible, or over the disks of the one node that a volume is on.",
        set: |policy, value| {
            let known = [
                ("fewest", Strategy::Fewest),
                ("balanced", Strategy::Balanced),
                ("spread", Strategy::Spread),
            ];
            put(&mut policy.strategy, one_of(value, &known))
        },
    },
    Parameter {
        key: "placement",
        values: "local, preferLocal or any",
        default: "preferLocal; any where strategy is spread",
        meaning: "Where branches may lie: on the consumer's node only, there first, or on any node.",
        set: |policy, value| {
            let known = [
                ("local", Placement::Local),
                ("preferLocal", Placement::PreferLocal),
                ("any", Placement::Any),
            ];
            put(&mut policy.placement, one_of(value, &known))
        },
    },
    Parameter {
        key: "nodeSelector",
        values: "key=value pairs separated by commas",
        default: "none",
        meaning: "Only nodes that carry all of these labels hold branches.",
        set: |policy, value| put(&mut policy.node_selector, labels(value)),
    },
    Parameter {
        key: "poolSelector",
        values: "key=value pairs separated by commas",
        default: "none",
        meaning: "Only pools that carry all of these labels hold branches.",
        set: |policy, value| put(&mut policy.pool_selector, labels(value)),
    },
    Parameter {
        key: "media",
        values: "nvme, ssd, hdd or unknown, or several separated by commas",
        default: "all",
        meaning: "Only pools on these kinds of disk hold branches.",
        set: |policy, value| put(&mut policy.media, media(value)),
    },
    Parameter {
        key: "branchFormat",
        values: "auto, image or directory",
        default: "auto",
        meaning: "What a branch is on its disk: a file with its own filesystem, or a plain directory; auto takes \
                  directories where the pool can enforce their size, else images.",
        set: |policy, value| {
            let known = [
                ("auto", FormatChoice::Auto),
                ("image", FormatChoice::Image),
                ("directory", FormatChoice::Directory),
            ];
            put(&mut policy.format, one_of(value, &known))
        },
    },
    Parameter {
        key: "enforcement",
        values: "required or none",
        default: "required",
        meaning: "none accepts directory branches on pools that cannot enforce their size: they can outgrow it.",
        set: |policy, value| {
            put(&mut policy.accept_unenforced, one_of(value, &[("required", false), ("none", true)]))
        },
    },
    Parameter {
        key: "provisioning",
        values: "thick or thin",
        default: "thick",
        meaning: "thin makes images sparse: made at once, but writing can fail when others fill the disk.",
        set: |policy, value| put(&mut policy.thin, one_of(value, &[("thick", false), ("thin", true)])),
    },
    Parameter {
        key: "fsType",
        values: "ext4, xfs or btrfs",
        default: "ext4",
        meaning: "The filesystem in image branches; csi.storage.k8s.io/fstype means the same.",
        set: |policy, value| {
            let known = [("ext4", FsType::Ext4), ("xfs", FsType::Xfs), ("btrfs", FsType::Btrfs)];
            put(&mut policy.fs_type, one_of(value, &known))
        },
    },
    Parameter {
        key: "writeThrough",
        values: "always or never",
        default: "always",
        meaning: "Whether what is written to an image over the network is on its owner's disk before the writer is told so. \
                  never: writing to branches on other nodes is faster; after a crash of an owner, pods elsewhere get errors and \
                  must open their files anew, and lose what they had not flushed (fsync).",
        set: |policy, value| {
            put(&mut policy.write_through, one_of(value, &[("always", true), ("never", false)]))
        },
    },
    Parameter {
        key: "onBranchLoss",
        values: "fail, readOnly or servePartial",
        default: "fail",
        meaning: "What becomes of a volume that lost a branch: it goes and returns when it is complete, or the rest is \
                  served read-only, or the rest is served writable.",
        set: |policy, value| {
            let known = [
                ("fail", OnBranchLoss::Fail),
                ("readOnly", OnBranchLoss::ReadOnly),
                ("servePartial", OnBranchLoss::ServePartial),
            ];
            put(&mut policy.on_branch_loss, one_of(value, &known))
        },
    },
    Parameter {
        key: "branchTimeout",
        values: "a length of time from 1s to 24h, such as 30s, 5m or 1h30m",
        default: "5m",
        meaning: "How long a branch that does not answer makes its files wait before it counts as lost.",
        set: |policy, value| {
            let timeout = duration::parse(value).ok().filter(|timeout| BRANCH_TIMEOUT.contains(timeout));
            put(&mut policy.branch_timeout, timeout)
        },
    },
    Parameter {
        key: "authentication",
        values: "whenPossible or required",
        default: "whenPossible",
        meaning: "Whether nodes prove to each other who they are before a branch is used over the network: wherever both \
                  can, or always, with no branches on nodes that cannot, nor for them. Only NVMe over TCP knows it; images go \
                  by that.",
        set: |policy, value| {
            let known =
                [("whenPossible", Authentication::WhenPossible), ("required", Authentication::Required)];
            put(&mut policy.authentication, one_of(value, &known))
        },
    },
    Parameter {
        key: "encryption",
        values: "off or required",
        default: "off",
        meaning: "Whether what is used over the network is encrypted on its way (TLS 1.3 by both kernels): not at all, or always, \
                  with no branches on nodes that cannot, nor for them. required includes authentication: required. Only NVMe over \
                  TCP knows it; images go by that. It takes processor time at both ends, and connections are made anew only while \
                  the agents of both nodes run.",
        set: |policy, value| {
            let known = [("off", Encryption::Off), ("required", Encryption::Required)];
            put(&mut policy.encryption, one_of(value, &known))
        },
    },
    Parameter {
        key: "union",
        values: "whenNeeded or always",
        default: "whenNeeded",
        meaning: "whenNeeded binds a volume of one branch directly; always puts a union there too.",
        set: |policy, value| {
            let known = [("whenNeeded", UnionMode::WhenNeeded), ("always", UnionMode::Always)];
            put(&mut policy.union, one_of(value, &known))
        },
    },
    Parameter {
        key: "mergerfs.*",
        values: "an allow-listed option of mergerfs",
        default: "chosen by what the host can do",
        meaning: "Options of the volume's MergerFS process; they win over those of the node.",
        // Handled apart: the key carries the option's name.
        set: |_, _| false,
    },
];

fn put<T>(place: &mut T, value: Option<T>) -> bool {
    match value {
        Some(value) => {
            *place = value;
            true
        }
        None => false,
    }
}

fn one_of<T: Copy>(value: &str, known: &[(&str, T)]) -> Option<T> {
    known.iter().find(|(name, _)| *name == value).map(|(_, value)| *value)
}

fn branches(value: &str) -> Option<u32> {
    value.parse().ok().filter(|n| (1..=MAX_BRANCHES).contains(n))
}

fn media(value: &str) -> Option<Vec<Media>> {
    let known =
        [("nvme", Media::Nvme), ("ssd", Media::Ssd), ("hdd", Media::Hdd), ("unknown", Media::Unknown)];
    let mut media =
        value.split(',').map(|name| one_of(name.trim(), &known)).collect::<Option<Vec<Media>>>()?;
    media.sort_unstable();
    media.dedup();
    Some(media)
}

/// `key=value,…`, in the syntax of Kubernetes labels
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set>). A key twice
/// is refused: it could only hold for equal values.
fn labels(value: &str) -> Option<BTreeMap<String, String>> {
    fn part(text: &str, may_be_empty: bool) -> bool {
        let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
        if text.is_empty() {
            return may_be_empty;
        }
        text.len() <= 63
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
            && edge(text.bytes().next())
            && edge(text.bytes().last())
    }
    let mut labels = BTreeMap::new();
    for pair in value.split(',') {
        let (key, value) = pair.split_once('=')?;
        let (key, value) = (key.trim(), value.trim());
        let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
        let prefix_fits = prefix.is_none_or(|prefix| {
            !prefix.is_empty() && prefix.len() <= 253 && prefix.split('.').all(|label| part(label, false))
        });
        if !prefix_fits || !part(name, false) || !part(value, true) {
            return None;
        }
        if labels.insert(key.to_owned(), value.to_owned()).is_some() {
            return None;
        }
    }
    Some(labels)
}

/// See [`Policy::parse`].
pub(super) fn parse(given: &BTreeMap<String, String>) -> Result<Policy, Vec<ParamError>> {
    let mut policy = Policy::default();
    let mut faults = Vec::new();
    let mut options = BTreeMap::new();
    for (key, value) in given {
        if let Some(option) = key.strip_prefix(MERGERFS) {
            options.insert(option.to_owned(), value.clone());
            continue;
        }
        let known = if key == KUBERNETES_FS_TYPE { "fsType" } else { key };
        match PARAMETERS.iter().find(|parameter| parameter.key == known) {
            Some(parameter) if (parameter.set)(&mut policy, value) => {}
            Some(parameter) => faults.push(ParamError::Value {
                key: key.clone(),
                value: value.clone(),
                allowed: parameter.values.to_owned(),
            }),
            None if key.starts_with(KUBERNETES) => {}
            None => faults.push(ParamError::Unknown {
                key: key.clone(),
                nearest: nearest(key, PARAMETERS.iter().map(|parameter| parameter.key)),
            }),
        }
    }
    match mergerfs::parse(&options) {
        Ok(options) => policy.mergerfs = options,
        Err(errors) => faults.extend(errors.into_iter().map(under_mergerfs)),
    }
    adapt_defaults(&mut policy, given);
    check_together(&policy, given, &mut faults);
    if faults.is_empty() { Ok(policy) } else { Err(faults) }
}

/// Defaults that depend on what else was given.
fn adapt_defaults(policy: &mut Policy, given: &BTreeMap<String, String>) {
    if !given.contains_key("maxBranches") {
        policy.max_branches = policy.max_branches.max(policy.min_branches);
    }
    // All branches on the consumer's node would be the contrary of what `spread` says.
    if policy.strategy == Strategy::Spread && !given.contains_key("placement") {
        policy.placement = Placement::Any;
    }
}

fn check_together(policy: &Policy, given: &BTreeMap<String, String>, faults: &mut Vec<ParamError>) {
    let mut conflict = |key: &str, other: &str, reason: &str| {
        faults.push(ParamError::Conflict {
            key: key.to_owned(),
            other: other.to_owned(),
            reason: reason.to_owned(),
        });
    };
    if policy.min_branches > policy.max_branches {
        let (min, max) = (policy.min_branches, policy.max_branches);
        conflict("minBranches", "maxBranches", &format!("{min} is more than {max}"));
    }
    if let (Some(ours), Some(theirs)) = (given.get("fsType"), given.get(KUBERNETES_FS_TYPE))
        && ours != theirs
    {
        conflict("fsType", KUBERNETES_FS_TYPE, "they mean the same; give one of them");
    }
    if policy.thin && policy.format == FormatChoice::Directory {
        conflict("provisioning", "branchFormat", "only images can be thin; a directory reserves nothing");
    }
    if policy.accept_unenforced && policy.format == FormatChoice::Image {
        conflict("enforcement", "branchFormat", "an image's size is always enforced; leave enforcement out");
    }
    if !policy.write_through && policy.format == FormatChoice::Directory {
        let reason =
            "only images are written through; what NFS had not written is sent again: leave writeThrough out";
        conflict("writeThrough", "branchFormat", reason);
    }
}

fn under_mergerfs(error: ParamError) -> ParamError {
    let prefixed = |key: String| format!("{MERGERFS}{key}");
    match error {
        ParamError::Unknown { key, nearest } => ParamError::Unknown { key: prefixed(key), nearest },
        ParamError::Value { key, value, allowed } => ParamError::Value { key: prefixed(key), value, allowed },
        ParamError::Refused { key, reason } => ParamError::Refused { key: prefixed(key), reason },
        ParamError::Conflict { key, other, reason } => {
            ParamError::Conflict { key: prefixed(key), other: prefixed(other), reason }
        }
    }
}
