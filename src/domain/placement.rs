//! Which pools may hold branches of a volume, and in which format.
//!
//! Each filter has a name and gives its reason: a pool that does not qualify is told to the user with the figure or the
//! label that decided. Nothing here allocates for a pool that qualifies.

mod paths;

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use super::NodeName;
use super::policy::{FormatChoice, FsType, Placement, Policy};
use super::pool::{Enforcement, Media, PoolReport, PoolState, PoolView};
use super::reach::{Attaches, Network, Unreachable};
use super::split::{BranchFormat, Reach, Request};
use super::volume::VolumeMode;
use paths::Paths;

/// Why a pool cannot hold a branch of this volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejection<'a> {
    /// Filter `state`: it is absent or read-only.
    State {
        /// How it is.
        state: PoolState,
        /// What its node says about it.
        message: &'a str,
    },
    /// Filter `nodeSelector` or `poolSelector`: a label is missing or other.
    Label {
        /// The parameter.
        selector: &'static str,
        /// The label.
        key: &'a str,
        /// Its value in the selector.
        wanted: &'a str,
        /// Its value on the node or pool.
        found: Option<&'a str>,
    },
    /// Filter `media`.
    Media {
        /// What it is on.
        found: Media,
        /// What the class allows.
        allowed: &'a [Media],
    },
    /// Filter `placement`: only the consumer's node may hold branches, and it is on another.
    NotConsumer {
        /// The consumer's node.
        consumer: &'a NodeName,
        /// What binds branches to it.
        tie: Tie,
    },
    /// Filter `topology`: only the consumer's node may hold branches, and none will run on this one.
    OutsideTopology {
        /// What binds branches to it.
        tie: Tie,
    },
    /// Filter `format`: a directory's size cannot be enforced here, and the class does not accept that.
    NotEnforced {
        /// What its node says about it.
        message: &'a str,
    },
    /// Filter `format`: images of this filesystem cannot be made here.
    NoImages {
        /// The filesystem; `None`: no images at all.
        fs_type: Option<FsType>,
    },
    /// Filter `format`: the class wants directories, the volume is a block device.
    DirectoryBlock,
    /// Filter `reach`: a branch here could not serve the node that uses the volume.
    OutOfReach(Unreachable),
}

/// What binds the branches of a volume to the node that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tie {
    /// The class: `placement: local`.
    Placement,
    /// The request: [`Reach::OneNode`].
    Reach,
    /// No node reaches branches of another.
    Isolated,
    /// Several nodes may use it at once, which only directories over NFS could serve.
    Shared,
}

impl fmt::Display for Tie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Placement => "placement local",
            Self::Reach => "a volume on one node",
            Self::Isolated => "a volume on one node (nodes cannot reach each other's branches)",
            Self::Shared => "a volume on one node (only directory branches over NFS serve several at once)",
        })
    }
}

impl Rejection<'_> {
    /// A few words that are the same for pools rejected alike, to be counted.
    #[must_use]
    pub fn brief(&self) -> String {
        match self {
            Self::State { state, .. } => state_word(*state).to_owned(),
            Self::Label { selector, key, wanted, .. } => format!("outside {selector} {key}={wanted}"),
            Self::Media { found, allowed } => {
                let allowed: Vec<&str> = allowed.iter().map(|media| media_word(*media)).collect();
                format!("media {} not in {}", media_word(*found), allowed.join(","))
            }
            Self::NotConsumer { .. } => "not on the consumer's node".to_owned(),
            Self::OutsideTopology { .. } => "outside the topology".to_owned(),
            Self::NotEnforced { .. } => "without size enforcement".to_owned(),
            Self::NoImages { fs_type: Some(fs_type) } => format!("without {fs_type} images"),
            Self::NoImages { fs_type: None } => "without images".to_owned(),
            Self::DirectoryBlock => "with branchFormat directory".to_owned(),
            Self::OutOfReach(obstacle) => obstacle.brief(),
        }
    }
}

/// A sentence for people.
impl fmt::Display for Rejection<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::State { state, message: "" } => {
                write!(f, "the pool is {}", state_word(*state))
            }
            Self::State { state, message } => write!(f, "the pool is {}: {message}", state_word(*state)),
            Self::Label { selector, key, wanted, found: Some(found) } => {
                write!(f, "{selector} asks for {key}={wanted}, here it is {found:?}")
            }
            Self::Label { selector, key, wanted, found: None } => {
                write!(f, "{selector} asks for {key}={wanted}, here is no label {key}")
            }
            Self::Media { .. } => write!(f, "{}", self.brief()),
            Self::NotConsumer { consumer, tie } => {
                write!(f, "{tie} allows branches on the consumer's node {consumer} only")
            }
            Self::OutsideTopology { tie } => {
                write!(f, "{tie} needs a node that may use the volume, and this one may not")
            }
            Self::NotEnforced { message } => {
                write!(f, "it cannot enforce the size of a directory branch")?;
                if !message.is_empty() {
                    write!(f, " ({message})")?;
                }
                write!(f, "; enforcement none would accept that")
            }
            Self::NoImages { fs_type: Some(fs_type) } => {
                write!(f, "it cannot hold images with {fs_type}: mkfs or the kernel's support is missing")
            }
            Self::NoImages { fs_type: None } => write!(f, "it cannot hold images"),
            Self::DirectoryBlock => {
                write!(f, "branchFormat directory cannot serve a block volume: use image or auto")
            }
            Self::OutOfReach(obstacle) => obstacle.fmt(f),
        }
    }
}

const fn state_word(state: PoolState) -> &'static str {
    match state {
        PoolState::Ready => "ready",
        PoolState::Absent => "absent",
        PoolState::ReadOnly => "read-only",
    }
}

const fn media_word(media: Media) -> &'static str {
    match media {
        Media::Nvme => "nvme",
        Media::Ssd => "ssd",
        Media::Hdd => "hdd",
        Media::Unknown => "unknown",
    }
}

/// Which nodes' branches may serve a volume together, as far as the class and the request allow.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// All: they are taken to reach each other.
    All,
    /// Those that carry branches to the node that uses the volume or, while that is not known, to some that may.
    Network(&'a Network),
    /// Those that carry branches to a node that can attach so, whichever it is, its own aside.
    Remote(&'a Network, Attaches),
    /// Those of one node, because in this network no node reaches those of another.
    Isolated(&'a Network),
    /// Those of one node, because several nodes may use the volume at once and its branches serve one.
    Shared,
}

/// The filters of one request.
#[derive(Debug)]
pub struct Filters<'a> {
    request: &'a Request,
    policy: &'a Policy,
    topology: HashSet<&'a NodeName>,
    scope: Scope<'a>,
    /// Where branches may lie on several nodes and it is known what those can carry.
    paths: Option<Paths<'a>>,
}

impl<'a> Filters<'a> {
    /// The filters for `request` under `policy`.
    #[must_use]
    pub fn new(request: &'a Request, policy: &'a Policy, scope: Scope<'a>) -> Self {
        let topology = request.topology.iter().collect();
        let all = Self { request, policy, topology, scope, paths: None };
        let paths = match scope {
            _ if all.tie().is_some() => None,
            Scope::All | Scope::Isolated(_) | Scope::Shared => None,
            Scope::Network(network) => Some(Paths::new(network, request)),
            Scope::Remote(network, attaches) => Some(Paths::to_remote(network, attaches)),
        };
        Self { paths, ..all }
    }

    /// The format that a branch would have in this pool, or the first filter that it does not pass.
    ///
    /// # Errors
    /// Why it does not qualify.
    pub fn admit<'v>(&self, view: &'v PoolView) -> Result<BranchFormat, Rejection<'v>>
    where
        'a: 'v,
    {
        state(&view.pool)?;
        selector("nodeSelector", &self.policy.node_selector, &view.node_labels)?;
        selector("poolSelector", &self.policy.pool_selector, &view.pool.labels)?;
        self.media(&view.pool)?;
        self.placement(&view.node)?;
        self.format(view)
    }

    /// What binds all branches to one node, the consumer's where it is known; `None` where they may be on several.
    #[must_use]
    pub fn tie(&self) -> Option<Tie> {
        match (self.policy.placement, self.request.reach, self.scope) {
            (Placement::Local, ..) => Some(Tie::Placement),
            (_, Reach::OneNode, _) => Some(Tie::Reach),
            (_, Reach::AnyNode, Scope::Isolated(_)) => Some(Tie::Isolated),
            (_, Reach::AnyNode, Scope::Shared) => Some(Tie::Shared),
            (_, Reach::AnyNode, _) => None,
        }
    }

    /// True where the node comes first under `preferLocal`: it is the consumer's or, while that is not known, one of those
    /// that may become it.
    #[must_use]
    pub fn is_local(&self, node: &NodeName) -> bool {
        match &self.request.consumer {
            Some(consumer) => consumer == node,
            None => self.topology.contains(node),
        }
    }

    fn media<'v>(&self, pool: &'v PoolReport) -> Result<(), Rejection<'v>>
    where
        'a: 'v,
    {
        let allowed = &self.policy.media;
        if allowed.is_empty() || allowed.contains(&pool.media) {
            Ok(())
        } else {
            Err(Rejection::Media { found: pool.media, allowed })
        }
    }

    /// Branches may lie on nodes where the volume is not used: the topology says where consumers run. Only where the
    /// placement binds them together does it restrict branches.
    fn placement(&self, node: &NodeName) -> Result<(), Rejection<'a>> {
        let Some(tie) = self.tie() else { return Ok(()) };
        if !self.topology.is_empty() && !self.topology.contains(node) {
            return Err(Rejection::OutsideTopology { tie });
        }
        match (&self.request.consumer, self.scope) {
            (Some(consumer), Scope::Isolated(network)) if consumer != node => {
                let format = match (self.request.mode, self.policy.format) {
                    (VolumeMode::Filesystem, FormatChoice::Directory) => BranchFormat::Directory,
                    _ => BranchFormat::Image,
                };
                let obstacle = Paths::new(network, self.request).check(node, format).err();
                Err(obstacle.unwrap_or(Rejection::NotConsumer { consumer, tie }))
            }
            (Some(consumer), _) if consumer != node => Err(Rejection::NotConsumer { consumer, tie }),
            _ => Ok(()),
        }
    }

    /// `auto` takes a directory where its size is enforced and every node that may use the volume reaches it, else an image.
    fn format<'v>(&self, view: &'v PoolView) -> Result<BranchFormat, Rejection<'v>> {
        let pool = &view.pool;
        let fs_type = self.policy.fs_type;
        let enforced = pool.enforcement != Enforcement::None;
        let directory = enforced || self.policy.accept_unenforced;
        let image = || pool.image_filesystems.contains(&fs_type);
        let within = |format| match &self.paths {
            Some(paths) => paths.check(&view.node, format),
            None => Ok(format),
        };
        match (self.request.mode, self.policy.format) {
            (VolumeMode::Block, FormatChoice::Directory) => Err(Rejection::DirectoryBlock),
            // A raw image needs no mkfs, only a pool that can hold images.
            (VolumeMode::Block, _) if pool.image_filesystems.is_empty() => {
                Err(Rejection::NoImages { fs_type: None })
            }
            (VolumeMode::Block, _) => within(BranchFormat::Image),
            (VolumeMode::Filesystem, FormatChoice::Auto) => {
                let choices = [
                    (enforced, BranchFormat::Directory),
                    (image(), BranchFormat::Image),
                    (directory, BranchFormat::Directory),
                ];
                let mut choices = choices.into_iter().filter(|(can, _)| *can).map(|(_, format)| format);
                let reached = |format: &BranchFormat| {
                    self.paths.as_ref().is_none_or(|paths| paths.reaches_all(&view.node, *format))
                };
                match (choices.clone().find(reached), choices.next()) {
                    (Some(format), _) => Ok(format),
                    (None, Some(format)) => within(format).and_then(|format| match &self.paths {
                        Some(paths) => Err(paths.not_all(format)),
                        None => Ok(format),
                    }),
                    (None, None) => Err(Rejection::NoImages { fs_type: Some(fs_type) }),
                }
            }
            (VolumeMode::Filesystem, FormatChoice::Directory) if directory => within(BranchFormat::Directory),
            (VolumeMode::Filesystem, FormatChoice::Directory) => {
                Err(Rejection::NotEnforced { message: &pool.enforcement_message })
            }
            (VolumeMode::Filesystem, FormatChoice::Image) if image() => within(BranchFormat::Image),
            (VolumeMode::Filesystem, FormatChoice::Image) => {
                Err(Rejection::NoImages { fs_type: Some(fs_type) })
            }
        }
    }
}

fn state(pool: &PoolReport) -> Result<(), Rejection<'_>> {
    match pool.state {
        PoolState::Ready => Ok(()),
        state => Err(Rejection::State { state, message: &pool.message }),
    }
}

fn selector<'v>(
    selector: &'static str,
    wanted: &'v BTreeMap<String, String>,
    labels: &'v BTreeMap<String, String>,
) -> Result<(), Rejection<'v>> {
    for (key, wanted) in wanted {
        let found = labels.get(key).map(String::as_str);
        if found != Some(wanted) {
            return Err(Rejection::Label { selector, key, wanted, found });
        }
    }
    Ok(())
}
