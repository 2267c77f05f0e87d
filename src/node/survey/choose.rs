//! Which of the machine's interfaces and addresses other nodes use. Pure: the same facts give the same choice.

use std::cmp::Reverse;
use std::net::IpAddr;

use super::settings::NetworkSettings;
use crate::domain::reach::StorageNetwork;
use crate::platform::net::{Address, Interface, NetworkFacts};

/// What every link of IPv6 carries in one piece (RFC 8200, section 5), and far below what any network for storage has.
const LEAST_MTU: u32 = 1280;

/// Names are listed up to here: a node of a cluster has an interface for each pod.
const LISTED: usize = 8;

/// This node's place on the network, and whether it can be reached there now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// As it is told.
    pub(super) network: StorageNetwork,
    /// Its addresses, the one to be used first: one of each family.
    pub(super) addresses: Vec<IpAddr>,
    /// The link carries.
    pub(super) up: bool,
}

impl Place {
    /// Nowhere, and why.
    pub(super) fn nowhere(interface: &str, problem: String) -> Self {
        let network =
            StorageNetwork { interface: interface.to_owned(), problem, ..StorageNetwork::default() };
        Self { network, ..Self::default() }
    }
}

/// Chooses. What is wrong stands in `problem`, with what to do; the speed of the link is not looked at.
pub(super) fn choose(facts: &NetworkFacts, settings: &NetworkSettings) -> Place {
    let interface = match find(facts, settings) {
        Ok(interface) => interface,
        Err(problem) => {
            return Place::nowhere(settings.interface.as_deref().unwrap_or_default(), problem);
        }
    };
    let name = &interface.name;
    let addresses = addresses(interface, settings);
    let mut problems = Vec::new();
    if !interface.up {
        problems.push(format!(
            "interface {name} is down: check its cable and its configuration (ip link show dev {name})"
        ));
    }
    if addresses.is_empty() {
        let within = settings.subnet.map(|subnet| format!(" within {subnet}")).unwrap_or_default();
        problems.push(format!(
            "interface {name} has no address{within} that other nodes could use: give it one, or name another interface \
             with network.interface"
        ));
    }
    if let Some(mtu) = interface.mtu.filter(|mtu| *mtu < LEAST_MTU) {
        problems.push(format!(
            "interface {name} carries packets of at most {mtu} bytes: set its MTU to that of the network, 1500 or more"
        ));
    }
    Place {
        network: StorageNetwork {
            interface: name.clone(),
            addresses: addresses.iter().map(IpAddr::to_string).collect(),
            megabits: None,
            mtu: interface.mtu,
            problem: problems.join("; "),
        },
        addresses,
        up: interface.up,
    }
}

/// The interface, or what there is instead.
fn find<'f>(facts: &'f NetworkFacts, settings: &NetworkSettings) -> Result<&'f Interface, String> {
    let all = &facts.interfaces;
    if let Some(name) = &settings.interface {
        return all.iter().find(|interface| interface.name == *name).ok_or_else(|| {
            let there = names(all.iter().filter(|interface| !interface.loopback));
            format!("there is no interface {name} (there {there}): correct network.interface, or bring it up")
        });
    }
    // Of several default routes the kernel takes the one with the lowest metric.
    let default = |interface: &Interface| {
        let routes = facts.default_routes.iter().filter(|route| route.interface == interface.index);
        routes.map(|route| (route.ipv6, route.metric)).min()
    };
    let usable = |interface: &&Interface| !interface.loopback && !addresses(interface, settings).is_empty();
    if let Some(subnet) = settings.subnet {
        let rank = |interface: &&Interface| {
            let route = default(interface);
            (Reverse(interface.up), route.is_none(), route, interface.index)
        };
        return all.iter().filter(usable).min_by_key(rank).ok_or_else(|| {
            let there = names(all.iter().filter(|interface| !interface.loopback));
            format!(
                "no interface has an address within {subnet} (there {there}): correct network.subnet, or give this node \
                 such an address"
            )
        });
    }
    let routed = all.iter().filter_map(|interface| Some((default(interface)?, interface.index, interface)));
    if let Some((_, _, interface)) = routed.min_by_key(|(route, index, _)| (*route, *index)) {
        return Ok(interface);
    }
    let up: Vec<&Interface> = all.iter().filter(|interface| interface.up).filter(usable).collect();
    match up.as_slice() {
        [only] => Ok(only),
        [] => Err(
            "no interface is up that has an address which other nodes could use: give this node one, or set \
                   network.interface: off where it is to serve none"
                .to_owned(),
        ),
        several => Err(format!(
            "this node has no default route, and several interfaces are up (there {}): choose one with network.interface \
             or network.subnet",
            names(several.iter().copied())
        )),
    }
}

/// `are eth0, eth1 and 5 more`.
fn names<'f>(interfaces: impl Iterator<Item = &'f Interface>) -> String {
    let all: Vec<&str> = interfaces.map(|interface| interface.name.as_str()).collect();
    match all.as_slice() {
        [] => "is none".to_owned(),
        [only] => format!("is {only}"),
        _ if all.len() > LISTED => {
            format!("are {} and {} more", all[..LISTED].join(", "), all.len() - LISTED)
        }
        _ => format!("are {}", all.join(", ")),
    }
}

/// The best address of each family, IPv4 first.
fn addresses(interface: &Interface, settings: &NetworkSettings) -> Vec<IpAddr> {
    let good = |address: &&Address| {
        address.usable
            && reaches_others(address.ip)
            && settings.subnet.is_none_or(|subnet| subnet.contains(address.ip))
    };
    let all: Vec<&Address> = interface.addresses.iter().filter(good).collect();
    let best = |ipv6: bool| {
        let family = all.iter().filter(|address| address.ip.is_ipv6() == ipv6);
        // min_by_key takes the first of equals, and the kernel lists IPv4 addresses in the order of their coming.
        family.min_by_key(|address| rank(address)).map(|address| address.ip)
    };
    best(false).into_iter().chain(best(true)).collect()
}

/// Addresses that move from node to node for the sake of others (keepalived, kube-vip) come as secondary ones of a network, or
/// as networks of one address; so they are used only where there is no other. IPv6 addresses are listed with the latest
/// first, so among equals the value decides, which stays.
fn rank(address: &Address) -> (bool, bool, bool, u128) {
    let alone = u32::from(address.prefix) == if address.ip.is_ipv6() { u128::BITS } else { u32::BITS };
    match address.ip {
        IpAddr::V4(_) => (alone, address.secondary, false, 0),
        IpAddr::V6(v6) => (address.secondary, !address.permanent, alone, v6.into()),
    }
}

/// Not those of this machine alone, of one link, or of many machines.
fn reaches_others(address: IpAddr) -> bool {
    let common = address.is_loopback() || address.is_unspecified() || address.is_multicast();
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !common && !link_local
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::net::DefaultRoute;

    fn address(text: &str) -> Address {
        let (ip, prefix) = text.split_once('/').unwrap();
        Address {
            ip: ip.parse().unwrap(),
            prefix: prefix.parse().unwrap(),
            secondary: false,
            permanent: true,
            usable: true,
        }
    }

    fn interface(index: u32, name: &str, addresses: &[&str]) -> Interface {
        Interface {
            name: name.to_owned(),
            index,
            up: true,
            loopback: name == "lo",
            mtu: Some(1500),
            addresses: addresses.iter().map(|text| address(text)).collect(),
        }
    }

    fn facts(interfaces: Vec<Interface>, routes: &[(u32, bool, u32)]) -> NetworkFacts {
        let route = |&(interface, ipv6, metric)| DefaultRoute { interface, ipv6, metric };
        let lo = interface(1, "lo", &["127.0.0.1/8", "::1/128"]);
        NetworkFacts {
            interfaces: std::iter::once(lo).chain(interfaces).collect(),
            default_routes: routes.iter().map(route).collect(),
        }
    }

    fn by(facts: &NetworkFacts) -> StorageNetwork {
        choose(facts, &NetworkSettings::default()).network
    }

    fn named(name: &str) -> NetworkSettings {
        NetworkSettings { interface: Some(name.to_owned()), ..NetworkSettings::default() }
    }

    fn within(subnet: &str) -> NetworkSettings {
        NetworkSettings { subnet: Some(subnet.parse().unwrap()), ..NetworkSettings::default() }
    }

    #[test]
    fn the_interface_of_the_default_route_is_taken_and_of_several_the_one_the_kernel_prefers() {
        let two = || vec![interface(2, "eth0", &["10.0.0.2/24"]), interface(3, "eth1", &["10.1.0.2/24"])];
        let found = by(&facts(two(), &[(3, false, 0)]));
        assert_eq!((found.interface.as_str(), found.problem.as_str()), ("eth1", ""));
        assert_eq!(found.addresses, ["10.1.0.2"]);
        assert_eq!(by(&facts(two(), &[(3, false, 100), (2, false, 600)])).interface, "eth1");
        assert_eq!(by(&facts(two(), &[(2, true, 0), (3, false, 100)])).interface, "eth1", "IPv4 first");
    }

    #[test]
    fn without_a_default_route_the_only_one_that_is_up_is_taken_and_of_several_none() {
        let mut dark = interface(3, "eth1", &["10.1.0.2/24"]);
        dark.up = false;
        let one = facts(vec![interface(2, "eth0", &["10.0.0.2/24"]), dark], &[]);
        assert_eq!(by(&one).interface, "eth0");

        let several =
            facts(vec![interface(2, "eth0", &["10.0.0.2/24"]), interface(3, "eth1", &["10.1.0.2/24"])], &[]);
        let none = by(&several);
        assert_eq!((none.interface.as_str(), none.addresses.len()), ("", 0));
        assert!(
            none.problem.contains("eth0, eth1") && none.problem.contains("network.interface"),
            "{none:?}"
        );
        let alone = by(&facts(vec![interface(2, "eth0", &["fe80::1/64"])], &[]));
        assert!(alone.problem.contains("no interface is up"), "{alone:?}");
    }

    #[test]
    fn addresses_of_one_link_and_those_that_cannot_be_used_now_are_ignored() {
        let mut eth0 = interface(
            2,
            "eth0",
            &["169.254.3.4/16", "10.0.0.2/24", "fe80::1/64", "fd00::2/64", "fd00::1/64"],
        );
        eth0.addresses[4].usable = false;
        assert_eq!(by(&facts(vec![eth0.clone()], &[(2, false, 0)])).addresses, ["10.0.0.2", "fd00::2"]);
        eth0.addresses.truncate(1);
        let none = by(&facts(vec![eth0], &[(2, false, 0)]));
        assert!(none.addresses.is_empty() && none.problem.contains("no address that"), "{none:?}");
    }

    #[test]
    fn of_several_addresses_the_one_that_stays_with_the_node_is_told() {
        let mut eth0 = interface(
            2,
            "eth0",
            &["10.0.0.100/32", "10.0.0.9/24", "10.0.0.2/24", "fd00::3/64", "fd00::2/64", "fd00::1/64"],
        );
        eth0.addresses[1].secondary = true;
        eth0.addresses[5].secondary = true;
        eth0.addresses[4].permanent = false;
        assert_eq!(by(&facts(vec![eth0.clone()], &[(2, false, 0)])).addresses, ["10.0.0.2", "fd00::3"]);
        eth0.addresses.truncate(1);
        assert_eq!(by(&facts(vec![eth0], &[(2, false, 0)])).addresses, ["10.0.0.100"], "it is the only one");
    }

    #[test]
    fn the_interface_that_was_named_is_taken_whatever_else_there_is() {
        let all = facts(
            vec![interface(2, "eth0", &["10.0.0.2/24"]), interface(3, "eth1", &["10.1.0.2/24"])],
            &[(2, false, 0)],
        );
        assert_eq!(choose(&all, &named("eth1")).network.interface, "eth1");
        let missing = choose(&all, &named("eth7")).network;
        assert_eq!((missing.interface.as_str(), missing.addresses.len()), ("eth7", 0));
        assert!(missing.problem.contains("no interface eth7 (there are eth0, eth1)"), "{missing:?}");
        let pods: Vec<Interface> = (2..40).map(|i| interface(i, &format!("veth{i}"), &[])).collect();
        let missing = choose(&facts(pods, &[]), &named("eth7")).network;
        assert!(missing.problem.contains("and 30 more"), "{missing:?}");
    }

    #[test]
    fn a_subnet_chooses_interface_and_address() {
        let all = facts(
            vec![
                interface(2, "eth0", &["192.168.0.2/24"]),
                interface(3, "eth1", &["172.16.0.2/24", "10.1.0.2/24", "fd00::1/64"]),
            ],
            &[(2, false, 0)],
        );
        let found = choose(&all, &within("10.0.0.0/8")).network;
        assert_eq!(
            (found.interface.as_str(), found.addresses.as_slice()),
            ("eth1", &["10.1.0.2".to_owned()][..])
        );
        let none = choose(&all, &within("10.2.0.0/16")).network;
        assert!(none.problem.contains("within 10.2.0.0/16") && none.addresses.is_empty(), "{none:?}");
        let both = NetworkSettings { interface: Some("eth0".into()), ..within("10.0.0.0/8") };
        let none = choose(&all, &both).network;
        assert_eq!(none.interface, "eth0");
        assert!(none.problem.contains("no address within 10.0.0.0/8"), "{none:?}");

        let mut dark = all.clone();
        dark.interfaces.push(interface(4, "eth2", &["10.9.0.2/24"]));
        dark.interfaces[2].up = false;
        assert_eq!(choose(&dark, &within("10.0.0.0/8")).network.interface, "eth2", "one that is up");
    }

    #[test]
    fn an_interface_that_is_down_keeps_its_addresses_and_says_so() {
        let mut eth0 = interface(2, "eth0", &["10.0.0.2/24"]);
        eth0.up = false;
        let place = choose(&facts(vec![eth0], &[(2, false, 0)]), &NetworkSettings::default());
        assert!(!place.up && place.network.problem.contains("eth0 is down"), "{place:?}");
        assert_eq!(place.addresses.len(), 1);
    }

    #[test]
    fn packets_too_small_are_a_problem() {
        let mut eth0 = interface(2, "eth0", &["10.0.0.2/24"]);
        eth0.mtu = Some(1280);
        assert_eq!(by(&facts(vec![eth0.clone()], &[(2, false, 0)])).problem, "");
        eth0.mtu = Some(1279);
        let small = by(&facts(vec![eth0], &[(2, false, 0)]));
        assert!(small.problem.contains("at most 1279 bytes") && small.addresses.len() == 1, "{small:?}");
    }
}
