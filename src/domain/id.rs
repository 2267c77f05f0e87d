//! Names of things, valid by construction.
//!
//! Each name is safe as a file name, as a Kubernetes object name and as a label value, and holds none of the characters
//! that break MergerFS branch lists (`:` `=` `,` and globs).

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use snafu::Snafu;

/// The longest name, in bytes: a Kubernetes label value holds 63
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set>).
pub const MAX_NAME: usize = 63;

/// The longest node name, in bytes: a Kubernetes object name holds 253 (RFC 1123 subdomain).
pub const MAX_NODE_NAME: usize = 253;

/// What a name looks like (RFC 1123 subdomain), besides its length.
const PATTERN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";

/// A name was refused.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(display(
    "{kind} name {name:?} is not valid: use 1 to {max} lower-case letters, digits, '-' and '.', \
     with a letter or digit at its ends and beside each '.'"
))]
pub struct InvalidId {
    kind: &'static str,
    name: String,
    max: usize,
}

fn check(kind: &'static str, name: &str, max: usize) -> Result<(), InvalidId> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let ok = !name.is_empty()
        && name.len() <= max
        && name.bytes().all(|b| plain(b) || b == b'-' || b == b'.')
        && name.bytes().next().is_some_and(plain)
        && name.bytes().last().is_some_and(plain)
        && !["..", ".-", "-."].iter().any(|pair| name.contains(pair));
    if ok { Ok(()) } else { Err(InvalidId { kind, name: name.chars().take(2 * max).collect(), max }) }
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $kind:literal, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
        #[serde(try_from = "String", into = "String")]
        #[schemars(with = "String", extend("minLength" = 1, "maxLength" = $max, "pattern" = PATTERN))]
        pub struct $type(String);

        impl $type {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $type {
            type Err = InvalidId;
            fn from_str(name: &str) -> Result<Self, InvalidId> {
                check($kind, name, $max).map(|()| Self(name.to_owned()))
            }
        }

        impl TryFrom<String> for $type {
            type Error = InvalidId;
            fn try_from(name: String) -> Result<Self, InvalidId> {
                check($kind, &name, $max).map(|()| Self(name))
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl AsRef<std::path::Path> for $type {
            fn as_ref(&self) -> &std::path::Path {
                self.0.as_ref()
            }
        }
    };
}

name!(
    /// A volume: the CSI volume id, the name of its `VolumeSplit`, and of its directories on a node.
    VolumeId,
    "volume",
    MAX_NAME
);
name!(
    /// One branch of a volume: the name of its `Branch` object and of its directory in a pool.
    BranchId,
    "branch",
    MAX_NODE_NAME
);
name!(
    /// A pool, unique on its node.
    PoolName,
    "pool",
    MAX_NAME
);
name!(
    /// A node, unique in the cluster; in Kubernetes the name of its Node.
    NodeName,
    "node",
    MAX_NODE_NAME
);

impl VolumeId {
    /// The id of the volume that was asked for under `name`, which may be any text: a name that is a valid id is kept
    /// as it is (`pvc-…` from Kubernetes), any other becomes `v-` and 40 hexadecimal digits of its SHA-256.
    #[must_use]
    pub fn from_request_name(name: &str) -> Self {
        // A name that looks like one of our digests is hashed as well, so that no two names meet in one id.
        let digest_like = name
            .strip_prefix("v-")
            .is_some_and(|rest| rest.len() == 40 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
        match name.parse() {
            Ok(id) if !digest_like => id,
            _ => {
                let digest = Sha256::digest(name.as_bytes());
                let hex: String = digest.iter().take(20).map(|b| format!("{b:02x}")).collect();
                Self(format!("v-{hex}"))
            }
        }
    }

    /// The id of this volume's branch number `index`.
    #[must_use]
    pub fn branch(&self, index: u32) -> BranchId {
        BranchId(format!("{}-{index}", self.0))
    }
}

impl BranchId {
    /// The volume that it is a branch of; `None` for a name that no volume gives its branches.
    #[must_use]
    pub fn volume(&self) -> Option<VolumeId> {
        let (volume, index) = self.0.rsplit_once('-')?;
        let (volume, index): (VolumeId, u32) = (volume.parse().ok()?, index.parse().ok()?);
        (volume.branch(index) == *self).then_some(volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_tells_its_volume_and_other_names_none() {
        let volume: VolumeId = "pvc-1-2".parse().unwrap();
        assert_eq!(volume.branch(3).volume(), Some(volume));
        for other in ["pvc", "pvc-x", "pvc-03", "pvc-99999999999"] {
            assert_eq!(other.parse::<BranchId>().unwrap().volume(), None, "{other}");
        }
    }

    #[test]
    fn plain_names_are_kept_and_others_become_a_digest() {
        assert_eq!(VolumeId::from_request_name("pvc-1b2c").as_str(), "pvc-1b2c");
        for odd in ["Volume", "../../etc", "a:b=c,d", "größe", "", &"x".repeat(128), "a..b"] {
            let id = VolumeId::from_request_name(odd);
            assert!(id.as_str().starts_with("v-"), "{odd:?} became {id}");
            assert_eq!(id, VolumeId::from_request_name(odd), "the same name gives the same id");
            assert_eq!(id.as_str().parse(), Ok(id.clone()), "an id is a valid id");
        }
    }

    #[test]
    fn a_name_that_looks_like_a_digest_cannot_take_another_volumes_id() {
        let victim = VolumeId::from_request_name("größe");
        assert_ne!(VolumeId::from_request_name(victim.as_str()), victim);
    }

    #[test]
    fn names_that_could_leave_a_directory_or_break_a_branch_list_are_refused() {
        for bad in [
            "", ".", "..", "a/b", "a..b", "a.-b", "a-.b", "-a", "a-", "A", "a:b", "a=b", "a,b", "a*", "ä",
            "a b", "a\n",
        ] {
            assert!(bad.parse::<PoolName>().is_err(), "{bad:?} was accepted");
        }
        assert!("x".repeat(64).parse::<PoolName>().is_err());
        assert!("x".repeat(63).parse::<PoolName>().is_ok());
    }
}
