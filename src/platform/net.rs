//! Interfaces, addresses and default routes of this machine, from the kernel by rtnetlink(7) and sysfs.
//!
//! Facts only: which of them other nodes are to use is decided elsewhere. They are those of the network namespace that this
//! process is in; in a container that is the machine's only where it shares its network.
//!
//! Unlike the rest of this layer these functions are asynchronous, as the crate for the protocol is. They need the runtime of
//! the caller, who also sets the bound: a kernel whose network is being changed answers later.

use std::net::IpAddr;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use futures::future::{Either, FutureExt, select};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage, State};
use rtnetlink::packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteType};
use rtnetlink::{Handle, IpVersion, MulticastGroup, RouteMessageBuilder};

use super::{Host, HostError, Result, failed};

/// What is asked, as it stands in errors.
const NETLINK: &str = "the kernel's network";

/// sysfs asks the driver for the speed of a link, and a driver may hang.
const SPEED_BOUND: Duration = Duration::from_secs(2);

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// The kernel's number for it, by the order of making.
    pub index: u32,
    /// It is switched on, and what is below it carries; so is one whose driver tells nothing of that.
    pub up: bool,
    /// It leads nowhere but to this machine.
    pub loopback: bool,
    /// The largest packet in bytes.
    pub mtu: Option<u32>,
    /// Its addresses, in the kernel's order.
    pub addresses: Vec<Address>,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// How many of its bits are those of the network.
    pub prefix: u8,
    /// It came after another of the same network (IPv4), or is one of those that change for privacy (IPv6).
    pub secondary: bool,
    /// It was set to stay, and not for a time by DHCPv6 or by a router.
    pub permanent: bool,
    /// It can be used, also for new connections: nobody else has it, and it does not run out.
    pub usable: bool,
}

/// A route to everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The interface's number.
    pub interface: u32,
    /// For IPv6, not IPv4.
    pub ipv6: bool,
    /// The kernel prefers the lowest.
    pub metric: u32,
}

/// What the kernel tells of this machine's network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkFacts {
    /// All interfaces, in the order of their numbers.
    pub interfaces: Vec<Interface>,
    /// Of the main table.
    pub default_routes: Vec<DefaultRoute>,
}

impl Host {
    /// Interfaces, addresses and default routes as they are now.
    ///
    /// # Errors
    /// The errno of the socket or of the kernel's answer.
    pub async fn network(&self) -> Result<NetworkFacts> {
        self.enter("netlink", NETLINK)?;
        let (connection, handle, _) = rtnetlink::new_connection().map_err(failed("netlink", NETLINK))?;
        let asked = pin!(ask(handle));
        // The connection works only while it is polled.
        match select(asked, pin!(connection)).await {
            Either::Left((answer, _)) => answer.map_err(explain),
            Either::Right(_) => Err(HostError::Unexpected {
                subject: NETLINK.to_owned(),
                reason: "the connection to it ended before the answer".to_owned(),
            }),
        }
    }

    /// An element whenever an interface or an address came, went or changed, several for one change as well; and for those
    /// that were lost. Not for routes: a machine that routes has very many.
    ///
    /// # Errors
    /// The errno of the socket.
    pub fn network_changes(&self) -> Result<BoxStream<'static, ()>> {
        self.enter("netlink", NETLINK)?;
        let groups = [MulticastGroup::Link, MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, handle, messages) =
            rtnetlink::new_multicast_connection(&groups).map_err(failed("netlink", NETLINK))?;
        // The connection ends with its last handle.
        let news = messages.map(move |_| {
            let _ = &handle;
        });
        let work = connection.into_stream().filter_map(|()| async { None });
        Ok(stream::select(news, work).boxed())
    }

    /// Speed of an interface's link in megabits a second; `None` where the kernel does not tell: many virtual ones, and those
    /// that are down.
    ///
    /// # Errors
    /// The gate's only.
    pub fn link_megabits(&self, interface: &str) -> Result<Option<u32>> {
        let path = Path::new("/sys/class/net").join(interface).join("speed");
        self.enter("read", &path)?;
        let owned = path.clone();
        let read = self.probes.ask(&path, SPEED_BOUND, move || std::fs::read_to_string(owned))?;
        Ok(read.and_then(|text| speed(&text.ok()?)))
    }
}

/// Drivers that do not know write -1, and old ones 65535 or 2^32 - 1.
fn speed(text: &str) -> Option<u32> {
    text.trim().parse().ok().filter(|megabits| !matches!(*megabits, 0 | 0xffff | u32::MAX))
}

async fn ask(handle: Handle) -> std::result::Result<NetworkFacts, rtnetlink::Error> {
    let links: Vec<LinkMessage> = handle.link().get().execute().try_collect().await?;
    let addresses: Vec<AddressMessage> = handle.address().get().execute().try_collect().await?;
    let mut default_routes = Vec::new();
    for version in [IpVersion::V4, IpVersion::V6] {
        let wanted = match version {
            IpVersion::V4 => RouteMessageBuilder::<std::net::Ipv4Addr>::new().build(),
            IpVersion::V6 => RouteMessageBuilder::<std::net::Ipv6Addr>::new().build(),
        };
        let mut routes = pin!(handle.route().get(wanted).execute());
        while let Some(route) = routes.try_next().await? {
            default_routes.extend(defaults(&route));
        }
    }
    // A kernel without IPv6 answers for all that it has.
    default_routes.sort_by_key(|route| (route.ipv6, route.metric, route.interface));
    default_routes.dedup();
    let mut interfaces: Vec<Interface> = links.iter().filter_map(interface).collect();
    interfaces.sort_by_key(|interface| interface.index);
    for message in &addresses {
        let mut interfaces = interfaces.iter_mut();
        let at = interfaces.find(|interface| interface.index == message.header.index);
        if let (Some(at), Some(address)) = (at, address(message)) {
            at.addresses.push(address);
        }
    }
    Ok(NetworkFacts { interfaces, default_routes })
}

fn interface(message: &LinkMessage) -> Option<Interface> {
    let flags = message.header.flags;
    let (mut name, mut mtu, mut state) = (None, None, State::Unknown);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name = Some(text.clone()),
            LinkAttribute::Mtu(bytes) => mtu = Some(*bytes),
            LinkAttribute::OperState(told) => state = *told,
            _ => {}
        }
    }
    Some(Interface {
        name: name?,
        index: message.header.index,
        up: flags.contains(LinkFlags::Up) && matches!(state, State::Up | State::Unknown),
        loopback: flags.contains(LinkFlags::Loopback),
        mtu,
        addresses: Vec::new(),
    })
}

fn address(message: &AddressMessage) -> Option<Address> {
    let (mut own, mut shown) = (None, None);
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    for attribute in &message.attributes {
        match attribute {
            // Where there is a peer, it is what is shown.
            AddressAttribute::Local(ip) => own = Some(*ip),
            AddressAttribute::Address(ip) => shown = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    let unusable = AddressFlags::Tentative | AddressFlags::Dadfailed | AddressFlags::Deprecated;
    Some(Address {
        ip: own.or(shown)?,
        prefix: message.header.prefix_len,
        secondary: flags.contains(AddressFlags::Secondary),
        permanent: flags.contains(AddressFlags::Permanent),
        usable: !flags.intersects(unusable),
    })
}

/// The default routes that a route is: one for each interface that it is spread over.
fn defaults(message: &RouteMessage) -> Vec<DefaultRoute> {
    let header = &message.header;
    let everywhere = header.destination_prefix_length == 0
        && header.table == RouteHeader::RT_TABLE_MAIN
        && header.kind == RouteType::Unicast;
    if !everywhere {
        return Vec::new();
    }
    let (mut interfaces, mut metric) = (Vec::new(), 0);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => interfaces.push(*index),
            RouteAttribute::MultiPath(hops) => {
                interfaces.extend(hops.iter().map(|hop| hop.interface_index));
            }
            RouteAttribute::Priority(priority) => metric = *priority,
            _ => {}
        }
    }
    let ipv6 = header.address_family == AddressFamily::Inet6;
    interfaces.into_iter().map(|interface| DefaultRoute { interface, ipv6, metric }).collect()
}

fn explain(error: rtnetlink::Error) -> HostError {
    match error {
        rtnetlink::Error::NetlinkError(message) => {
            HostError::Syscall { call: "netlink", subject: NETLINK.to_owned(), source: message.to_io() }
        }
        other => HostError::Unexpected { subject: NETLINK.to_owned(), reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_that_is_not_known_is_none() {
        assert_eq!(speed("10000\n"), Some(10_000));
        for text in ["-1\n", "", "0", "65535", "4294967295", "fast"] {
            assert_eq!(speed(text), None, "{text:?}");
        }
    }

    #[test]
    fn an_interface_whose_driver_tells_nothing_is_up_when_it_is_switched_on() {
        let link = |flags, state: Option<State>| {
            let mut message = LinkMessage::default();
            message.header.index = 2;
            message.header.flags = flags;
            message.attributes = vec![LinkAttribute::IfName("x".to_owned()), LinkAttribute::Mtu(9000)];
            message.attributes.extend(state.map(LinkAttribute::OperState));
            interface(&message).unwrap()
        };
        assert!(link(LinkFlags::Up, None).up && link(LinkFlags::Up, Some(State::Unknown)).up);
        assert!(link(LinkFlags::Up, Some(State::Up)).up);
        assert!(!link(LinkFlags::empty(), Some(State::Unknown)).up);
        assert!(!link(LinkFlags::Up, Some(State::LowerLayerDown)).up, "its cable is out");
        assert_eq!(link(LinkFlags::Up | LinkFlags::Loopback, None).mtu, Some(9000));
    }

    #[test]
    fn only_a_route_of_the_main_table_to_everywhere_is_a_default() {
        let route = |table, prefix, attributes| {
            let mut message = RouteMessage::default();
            message.header.table = table;
            message.header.destination_prefix_length = prefix;
            message.header.kind = RouteType::Unicast;
            message.header.address_family = AddressFamily::Inet;
            message.attributes = attributes;
            defaults(&message)
        };
        let over = |index| vec![RouteAttribute::Oif(index), RouteAttribute::Priority(100)];
        let main = RouteHeader::RT_TABLE_MAIN;
        assert_eq!(route(main, 0, over(3)), [DefaultRoute { interface: 3, ipv6: false, metric: 100 }]);
        assert_eq!(route(main, 8, over(3)), []);
        assert_eq!(route(52, 0, over(3)), [], "a table that only some packets ask");
    }

    #[tokio::test]
    async fn the_loopback_interface_of_this_kernel_is_found_with_what_it_has() {
        let facts = Host::new().network().await.unwrap();
        let lo = facts.interfaces.iter().find(|i| i.loopback).expect("a loopback interface");
        assert!(!lo.name.is_empty() && lo.mtu.is_some());
        assert_eq!(Host::new().link_megabits(&lo.name).unwrap(), None);
    }
}
