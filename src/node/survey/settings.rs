//! What the administrator says about the network between nodes.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use snafu::Snafu;

use crate::node::transport::nvme_tcp::{DEFAULT_PORT, DEFAULT_TLS_PORT};

/// The network that branches are reached over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSettings {
    /// Whether this node takes part: serves its branches to others and uses theirs. Default: true.
    pub enabled: bool,
    /// The interface; default: the one that `choose` finds.
    pub interface: Option<String>,
    /// Only addresses within it are used, and the interface is one that has such.
    pub subnet: Option<Subnet>,
    /// TCP port at which images are served. Default 4420.
    pub nvme_port: u16,
    /// TCP port at which images are served encrypted. Default 4421.
    pub nvme_tls_port: u16,
}

impl Default for NetworkSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            interface: None,
            subnet: None,
            nvme_port: DEFAULT_PORT,
            nvme_tls_port: DEFAULT_TLS_PORT,
        }
    }
}

impl NetworkSettings {
    /// Whether there is something to look for: an agent that shares its store with others takes part unless it is told not to,
    /// one that has it alone does only where an interface or subnet is named.
    #[must_use]
    pub const fn wanted(&self, shared: bool) -> bool {
        self.enabled && (shared || self.interface.is_some() || self.subnet.is_some())
    }
}

/// A range of addresses, as `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    first: IpAddr,
    prefix: u8,
}

/// A text is not a range of addresses.
#[derive(Debug, PartialEq, Eq, Snafu)]
pub enum InvalidSubnet {
    /// It has another form.
    #[snafu(display("{text:?} is not a range of addresses"))]
    Form {
        /// The text.
        text: String,
    },
    /// It names an address within a range.
    #[snafu(display("{text:?} names an address within the range {meant}"))]
    Within {
        /// The text.
        text: String,
        /// The range.
        meant: Subnet,
    },
}

impl Subnet {
    /// Whether the address is one of the range.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        mask(address, self.prefix) == Some(self.first)
    }
}

/// The first address of the range that this one is in; `None` where it has not so many bits.
fn mask(address: IpAddr, prefix: u8) -> Option<IpAddr> {
    let prefix = u32::from(prefix);
    match address {
        IpAddr::V4(v4) => {
            let rest = u32::BITS.checked_sub(prefix)?;
            let mask = u32::MAX.checked_shl(rest).unwrap_or(0);
            Some(IpAddr::V4((u32::from(v4) & mask).into()))
        }
        IpAddr::V6(v6) => {
            let rest = u128::BITS.checked_sub(prefix)?;
            let mask = u128::MAX.checked_shl(rest).unwrap_or(0);
            Some(IpAddr::V6((u128::from(v6) & mask).into()))
        }
    }
}

impl FromStr for Subnet {
    type Err = InvalidSubnet;

    fn from_str(text: &str) -> Result<Self, InvalidSubnet> {
        let parsed = || {
            let (address, prefix) = text.split_once('/')?;
            let (address, prefix) = (address.parse::<IpAddr>().ok()?, prefix.parse::<u8>().ok()?);
            Some((address, Self { first: mask(address, prefix)?, prefix }))
        };
        match parsed() {
            None => Err(InvalidSubnet::Form { text: text.to_owned() }),
            Some((address, subnet)) if subnet.first != address => {
                Err(InvalidSubnet::Within { text: text.to_owned(), meant: subnet })
            }
            Some((_, subnet)) => Ok(subnet),
        }
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_holds_its_addresses_and_no_others() {
        for (range, within, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("192.168.7.32/28", "192.168.7.47", "192.168.7.48"),
            ("0.0.0.0/0", "8.8.8.8", "fd00::1"),
            ("10.1.2.3/32", "10.1.2.3", "10.1.2.2"),
            ("fd00:1::/32", "fd00:1:2::3", "fd00:2::3"),
            ("::/0", "fd00::1", "10.0.0.1"),
        ] {
            let subnet: Subnet = range.parse().unwrap();
            assert_eq!(subnet.to_string(), range);
            assert!(subnet.contains(within.parse().unwrap()), "{within} in {range}");
            assert!(!subnet.contains(outside.parse().unwrap()), "{outside} not in {range}");
        }
    }

    #[test]
    fn what_is_no_range_is_refused_and_an_address_tells_the_range_it_is_in() {
        for text in ["10.0.0.0", "10.0.0.0/33", "::/129", "eth0", "10.0.0.0/-1", "/8", "10.0.0/8"] {
            assert!(matches!(text.parse::<Subnet>(), Err(InvalidSubnet::Form { .. })), "{text}");
        }
        let within = "10.1.2.3/8".parse::<Subnet>().unwrap_err();
        assert!(within.to_string().contains("10.0.0.0/8"), "{within}");
    }

    #[test]
    fn an_agent_that_is_alone_looks_for_no_network_unless_one_is_named() {
        let settings = NetworkSettings::default();
        assert!(settings.wanted(true) && !settings.wanted(false));
        let named = NetworkSettings { interface: Some("eth1".into()), ..settings.clone() };
        assert!(named.wanted(false));
        assert!(!NetworkSettings { enabled: false, ..settings }.wanted(true));
    }
}
