//! Which nodes can reach which branches: the transports, what each node can carry by them, and the one answer to whether a
//! branch on one node serves another.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NodeName;
use super::policy::Policy;
use super::split::BranchFormat;

/// A way to reach a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// The branch is on the node that uses it.
    Local,
    /// NVMe over TCP; carries image branches, each to one node.
    NvmeTcp,
    /// NFS 4.2; carries directory branches.
    Nfs,
}

impl Transport {
    /// The one that carries branches of that format between nodes.
    #[must_use]
    pub const fn between_nodes(format: BranchFormat) -> Self {
        match format {
            BranchFormat::Image => Self::NvmeTcp,
            BranchFormat::Directory => Self::Nfs,
        }
    }

    /// Its name, as in the objects.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::NvmeTcp => "nvme-tcp",
            Self::Nfs => "nfs",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One thing that a node's kernel can or cannot do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Ability {
    /// Whether it can.
    pub able: bool,
    /// Where it can: built in, loaded, or loaded on demand. Where it cannot: why, and what would help.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// What a node can carry by one transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TransportReport {
    /// The transport.
    pub transport: Transport,
    /// Whether branches of this node can be exported.
    pub owner: Ability,
    /// Whether branches of other nodes can be attached.
    pub consumer: Ability,
    /// Whether both ends can prove to each other who they are (NVMe: DH-HMAC-CHAP).
    pub authentication: Ability,
    /// Whether both ends can encrypt what is sent (NVMe: TLS 1.3). Agents of before do not tell.
    #[serde(default = "untold")]
    pub encryption: Ability,
    /// What the node calls itself to owners (an NVMe host NQN); absent where its address is what they know it by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
}

fn untold() -> Ability {
    Ability { able: false, reason: "its agent is of a version that does not encrypt".to_owned() }
}

/// A node on the network that branches are reached over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StorageNetwork {
    /// The interface.
    #[serde(default)]
    pub interface: String,
    /// Addresses of this node there, the one to be used first.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Speed of the link in megabits a second; absent where the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub megabits: Option<u32>,
    /// The largest packet in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// What is wrong with it, and what to do; empty where nothing is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

/// What of a node decides whom its branches can serve and whose it can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeReach {
    /// The node.
    pub node: NodeName,
    /// What it can carry.
    pub transports: Vec<TransportReport>,
    /// Its addresses on the storage network.
    pub addresses: Vec<String>,
}

impl NodeReach {
    /// A node that tells of nothing.
    #[must_use]
    pub fn silent(node: NodeName) -> Self {
        Self { node, transports: Vec::new(), addresses: Vec::new() }
    }

    /// Whether it tells of nothing.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.transports.is_empty()
    }

    /// Whether [`Self::can_own`], without a reason.
    #[must_use]
    pub fn owns(&self, transport: Transport) -> bool {
        !self.addresses.is_empty() && self.report(transport).is_some_and(|report| report.owner.able)
    }

    /// Whether [`Self::can_consume`], without a reason.
    #[must_use]
    pub fn consumes(&self, transport: Transport) -> bool {
        self.report(transport).is_some_and(|report| report.consumer.able)
    }

    /// By what it can attach branches of other nodes.
    #[must_use]
    pub fn attaches(&self) -> Attaches {
        Attaches { nvme: self.consumes(Transport::NvmeTcp), nfs: self.consumes(Transport::Nfs) }
    }

    /// What it can carry for volumes of such a class: where that requires authentication or encryption, only by what it can do
    /// so with.
    #[must_use]
    pub fn under(&self, policy: &Policy) -> Cow<'_, Self> {
        if !self.transports.iter().any(|report| lack(report, policy).is_some()) {
            return Cow::Borrowed(self);
        }
        let mut reach = self.clone();
        for report in &mut reach.transports {
            let Some(reason) = lack(report, policy) else { continue };
            let unable = |end: &mut Ability| {
                if end.able {
                    *end = Ability { able: false, reason: reason.clone() };
                }
            };
            unable(&mut report.owner);
            unable(&mut report.consumer);
        }
        Cow::Owned(reach)
    }

    fn report(&self, transport: Transport) -> Option<&TransportReport> {
        self.transports.iter().find(|report| report.transport == transport)
    }

    /// Whether other nodes can attach its branches by that transport.
    ///
    /// # Errors
    /// What it lacks.
    pub fn can_own(&self, transport: Transport) -> Result<(), Unreachable> {
        let ability = self.report(transport).map(|report| &report.owner);
        self.needs(transport, End::Owner, ability)?;
        if self.addresses.is_empty() {
            return Err(Unreachable::NoAddress { node: self.node.clone() });
        }
        Ok(())
    }

    /// Whether it can attach branches of other nodes by that transport.
    ///
    /// # Errors
    /// What it lacks.
    pub fn can_consume(&self, transport: Transport) -> Result<(), Unreachable> {
        self.needs(transport, End::Consumer, self.report(transport).map(|report| &report.consumer))
    }

    fn needs(&self, transport: Transport, end: End, ability: Option<&Ability>) -> Result<(), Unreachable> {
        let reason = match ability {
            Some(ability) if ability.able => return Ok(()),
            Some(ability) => ability.reason.clone(),
            None => "its agent tells of no such transport".to_owned(),
        };
        Err(Unreachable::Unable { node: self.node.clone(), transport, end, reason })
    }
}

/// What of a class's demands a node cannot meet by that transport; `None` where it meets all.
fn lack(report: &TransportReport, policy: &Policy) -> Option<String> {
    let told = |demand: &str, ability: &Ability| match ability.reason.as_str() {
        "" => demand.to_owned(),
        reason => format!("{demand}: {reason}"),
    };
    if policy.requires_encryption() && !report.encryption.able {
        Some(told("the class requires encryption, and it cannot encrypt what is sent", &report.encryption))
    } else if policy.requires_authentication() && !report.authentication.able {
        let demand = match policy.requires_encryption() {
            true => "encryption, which includes authentication",
            false => "authentication",
        };
        let demand = format!("the class requires {demand}, and it cannot prove who it is");
        Some(told(&demand, &report.authentication))
    } else {
        None
    }
}

/// By what a node can attach branches of other nodes: nodes that are alike in it reach the same branches, their own aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attaches {
    /// By NVMe over TCP.
    pub nvme: bool,
    /// By NFS.
    pub nfs: bool,
}

impl Attaches {
    /// By that transport.
    #[must_use]
    pub const fn by(self, transport: Transport) -> bool {
        match transport {
            Transport::Local => true,
            Transport::NvmeTcp => self.nvme,
            Transport::Nfs => self.nfs,
        }
    }

    /// By any.
    #[must_use]
    pub const fn any(self) -> bool {
        self.nvme || self.nfs
    }
}

/// What all nodes can carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    nodes: HashMap<NodeName, NodeReach>,
}

impl Network {
    /// That of these nodes.
    #[must_use]
    pub fn new(nodes: impl IntoIterator<Item = NodeReach>) -> Self {
        Self { nodes: nodes.into_iter().map(|node| (node.node.clone(), node)).collect() }
    }

    /// One in which these nodes can carry everything, for questions about nodes that do not exist, or as if they could.
    #[must_use]
    pub fn able(nodes: impl IntoIterator<Item = NodeName>) -> Self {
        let able = || Ability { able: true, reason: String::new() };
        let report = |transport| TransportReport {
            transport,
            owner: able(),
            consumer: able(),
            authentication: able(),
            encryption: able(),
            identity: None,
        };
        Self::new(nodes.into_iter().map(|node| NodeReach {
            addresses: vec![node.to_string()],
            node,
            transports: vec![report(Transport::NvmeTcp), report(Transport::Nfs)],
        }))
    }

    /// What the nodes can carry for volumes of such a class: see [`NodeReach::under`].
    #[must_use]
    pub fn under(&self, policy: &Policy) -> Cow<'_, Self> {
        if policy.requires_authentication() {
            Cow::Owned(Self::new(self.nodes.values().map(|node| node.under(policy).into_owned())))
        } else {
            Cow::Borrowed(self)
        }
    }

    /// Takes what a node can carry now, in place of what was known of it.
    pub fn put(&mut self, node: NodeReach) {
        self.nodes.insert(node.node.clone(), node);
    }

    /// Forgets a node.
    pub fn remove(&mut self, name: &NodeName) {
        self.nodes.remove(name);
    }

    /// One of its nodes.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<&NodeReach> {
        self.nodes.get(name)
    }

    /// All of them, in no order.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeReach> {
        self.nodes.values()
    }
}

/// An end of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Where the bytes lie.
    Owner,
    /// Where they are used.
    Consumer,
}

/// Why a branch on one node cannot serve another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unreachable {
    /// A node cannot be that end of the transport.
    Unable {
        /// The node.
        node: NodeName,
        /// The transport.
        transport: Transport,
        /// Which end.
        end: End,
        /// Why, and what would help.
        reason: String,
    },
    /// The owner has no address that others could reach.
    NoAddress {
        /// The owner.
        node: NodeName,
    },
    /// Who uses the volume is not known yet, and nobody who may could attach such a branch.
    NoConsumer {
        /// The transport.
        transport: Transport,
    },
    /// Who uses the volume is not known yet, and not everybody who may could attach such a branch.
    NotEveryConsumer {
        /// The transport.
        transport: Transport,
    },
}

impl Unreachable {
    /// A few words that are the same for pools with the same obstacle.
    #[must_use]
    pub fn brief(&self) -> String {
        match self {
            Self::Unable { transport, end: End::Owner, .. } => {
                format!("on nodes that cannot export by {transport}")
            }
            Self::Unable { node, transport, end: End::Consumer, .. } => {
                format!("out of reach of node {node}, which cannot attach by {transport}")
            }
            Self::NoAddress { .. } => "on nodes without an address on the storage network".to_owned(),
            Self::NoConsumer { transport } => format!("out of reach: no node can attach by {transport}"),
            Self::NotEveryConsumer { transport } => {
                format!("out of reach: not every node can attach by {transport}")
            }
        }
    }
}

/// A sentence for people.
impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unable { node, transport, end, reason } => {
                let does = match end {
                    End::Owner => "export branches",
                    End::Consumer => "attach branches of other nodes",
                };
                write!(f, "node {node} cannot {does} by {transport}")?;
                if reason.is_empty() { Ok(()) } else { write!(f, ": {reason}") }
            }
            Self::NoAddress { node } => write!(f, "node {node} has no address on the storage network"),
            Self::NoConsumer { transport } => write!(
                f,
                "none of the nodes that may use the volume can attach branches of other nodes by {transport}"
            ),
            Self::NotEveryConsumer { transport } => write!(
                f,
                "not all of the nodes that may use the volume can attach branches of other nodes by {transport}"
            ),
        }
    }
}

/// How a branch of that format on `owner` reaches `consumer`.
///
/// # Errors
/// Why it does not.
pub fn reachable(
    owner: &NodeReach,
    consumer: &NodeReach,
    format: BranchFormat,
) -> Result<Transport, Unreachable> {
    if owner.node == consumer.node {
        return Ok(Transport::Local);
    }
    let transport = Transport::between_nodes(format);
    owner.can_own(transport)?;
    consumer.can_consume(transport)?;
    Ok(transport)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::policy::{Authentication, Encryption};

    fn node(name: &str, owner: bool, consumer: bool) -> NodeReach {
        let ability =
            |able| Ability { able, reason: if able { "" } else { "no module nvmet_tcp" }.to_owned() };
        let transports = [Transport::NvmeTcp, Transport::Nfs].map(|transport| TransportReport {
            transport,
            owner: ability(owner),
            consumer: ability(consumer),
            authentication: ability(false),
            encryption: ability(false),
            identity: None,
        });
        NodeReach {
            node: name.parse().unwrap(),
            transports: transports.into(),
            addresses: vec!["10.0.0.1".to_owned()],
        }
    }

    #[test]
    fn a_branch_reaches_its_own_node_whatever_that_lacks() {
        let bare = NodeReach { node: "a".parse().unwrap(), transports: Vec::new(), addresses: Vec::new() };
        for format in [BranchFormat::Image, BranchFormat::Directory] {
            assert_eq!(reachable(&bare, &bare, format), Ok(Transport::Local));
        }
    }

    #[test]
    fn images_go_by_nvme_and_directories_by_nfs_where_both_ends_can() {
        let (a, b) = (node("a", true, false), node("b", false, true));
        assert_eq!(reachable(&a, &b, BranchFormat::Image), Ok(Transport::NvmeTcp));
        assert_eq!(reachable(&a, &b, BranchFormat::Directory), Ok(Transport::Nfs));
    }

    #[test]
    fn where_a_class_requires_authentication_only_nodes_that_can_count() {
        let (able, mut keyed) = (node("a", true, true), node("k", true, true));
        for report in keyed.transports.iter_mut().filter(|r| r.transport == Transport::NvmeTcp) {
            report.authentication.able = true;
        }
        let required = Policy { authentication: Authentication::Required, ..Policy::default() };
        let network = Network::new([able.clone(), keyed.clone()]);
        assert_eq!(network.under(&Policy::default()), Cow::Borrowed(&network));
        let under = network.under(&required);
        let of = |name: &str| under.node(&name.parse().unwrap()).unwrap().clone();
        let (a, k) = (of("a"), of("k"));
        assert_eq!(reachable(&k, &k, BranchFormat::Image), Ok(Transport::Local));
        assert!(k.owns(Transport::NvmeTcp) && !k.owns(Transport::Nfs), "NFS knows none");
        for (owner, consumer) in [(&a, &k), (&k, &a)] {
            let told = reachable(owner, consumer, BranchFormat::Image).unwrap_err().to_string();
            assert!(told.contains("node a cannot") && told.contains("requires authentication"), "{told}");
            assert!(told.ends_with("no module nvmet_tcp"), "and what it lacks: {told}");
        }
    }

    #[test]
    fn where_a_class_requires_encryption_only_nodes_that_can_encrypt_and_prove_who_they_are_count() {
        let with = |name: &str, authentication, encryption| {
            let mut node = node(name, true, true);
            for report in node.transports.iter_mut().filter(|r| r.transport == Transport::NvmeTcp) {
                (report.authentication.able, report.encryption.able) = (authentication, encryption);
            }
            node
        };
        let policy = Policy { encryption: Encryption::Required, ..Policy::default() };
        let network = Network::new([with("a", true, true), with("b", true, false), with("c", false, true)]);
        assert_eq!(network.under(&Policy::default()), Cow::Borrowed(&network));
        let under = network.under(&policy);
        let of = |name: &str| under.node(&name.parse().unwrap()).unwrap().clone();
        let (a, b, c) = (of("a"), of("b"), of("c"));
        assert!(a.owns(Transport::NvmeTcp) && a.consumes(Transport::NvmeTcp));
        assert!(!a.owns(Transport::Nfs), "NFS is not encrypted");
        let told = reachable(&a, &b, BranchFormat::Image).unwrap_err().to_string();
        assert!(told.contains("node b cannot attach") && told.contains("requires encryption"), "{told}");
        let told = reachable(&c, &a, BranchFormat::Image).unwrap_err().to_string();
        assert!(told.contains("node c cannot export") && told.contains("cannot prove who it is"), "{told}");
    }

    #[test]
    fn a_node_whose_agent_says_nothing_of_encryption_cannot() {
        let able = serde_json::json!({ "able": true });
        let report: TransportReport = serde_json::from_value(serde_json::json!({
            "transport": "nvme-tcp", "owner": able, "consumer": able, "authentication": able
        }))
        .unwrap();
        assert!(!report.encryption.able && report.encryption.reason.contains("version"));
    }

    #[test]
    fn the_end_that_cannot_is_named_with_what_it_lacks() {
        let (a, b) = (node("a", true, false), node("b", false, true));
        let told = |owner: &NodeReach, consumer: &NodeReach| {
            reachable(owner, consumer, BranchFormat::Image).unwrap_err().to_string()
        };
        assert_eq!(told(&b, &a), "node b cannot export branches by nvme-tcp: no module nvmet_tcp");
        assert_eq!(
            told(&a, &node("c", true, false)),
            "node c cannot attach branches of other nodes by nvme-tcp: no module nvmet_tcp"
        );
        let lost = NodeReach { addresses: Vec::new(), ..a.clone() };
        assert_eq!(told(&lost, &b), "node a has no address on the storage network");
        let silent = NodeReach { transports: Vec::new(), ..a.clone() };
        assert_eq!(
            told(&silent, &b),
            "node a cannot export branches by nvme-tcp: its agent tells of no such transport"
        );
    }
}
