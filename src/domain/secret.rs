//! What two nodes share to prove to each other who they are: keys for DH-HMAC-CHAP, in the spelling of the NVMe
//! specifications, `DHHC-1:<hash>:<base64 of key and its CRC-32>:`.
//!
//! One key is made and kept for a consumer and an owner. The consumer proves that it has it; what the owner proves in turn is
//! a second key made from the first, because one key for both directions would let a stranger answer with what it was asked.

use std::fmt;

use sha2::{Digest, Sha256};

/// The key is 32 bytes, and transformed with SHA-256 and the host's NQN before it is used.
const PREFIX: &str = "DHHC-1:01:";

/// A secret that both ends share, in the transport's own spelling (NVMe: `DHHC-1:…`). Never printed. It belongs to a consumer
/// and an owner, not to a branch: the kernel of an owner keeps one for each peer.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    /// The key that is made of these random bytes.
    #[must_use]
    pub fn of(random: &[u8]) -> Self {
        Self::spelled(&Sha256::digest(random))
    }

    /// The key that the owner proves to have, where this one is the consumer's.
    #[must_use]
    pub fn of_owner(&self) -> Self {
        Self::spelled(&Sha256::digest(format!("owner's key for {}", self.0).as_bytes()))
    }

    /// It looks like a key, and can be one part of the options of a connection.
    #[must_use]
    pub fn is_well_formed(&self) -> bool {
        let Some(rest) = self.0.strip_prefix("DHHC-1:") else { return false };
        let mut parts = rest.split(':');
        let (hash, key, end) = (parts.next(), parts.next(), parts.next());
        let base64 = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'=');
        hash.is_some_and(|h| h.len() == 2 && h.bytes().all(|b| b.is_ascii_digit()))
            && key.is_some_and(|k| k.len() >= 48 && k.bytes().all(base64))
            && end == Some("")
            && parts.next().is_none()
    }

    fn spelled(key: &[u8]) -> Self {
        let mut bytes = key.to_vec();
        bytes.extend(crc32(key).to_le_bytes());
        Self(format!("{PREFIX}{}:", base64(&bytes)))
    }
}

/// CRC-32 as in IEEE 802.3, reflected.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
    !bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

/// Base 64 with padding (RFC 4648, section 4).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0, |bits, i| bits << 8 | usize::from(group.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let digit = DIGITS[bits >> (18 - 6 * i) & 63];
            text.push(if i <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_and_base64_are_the_standards_own() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926, "the check value of CRC-32");
        for (plain, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), text, "RFC 4648, section 10");
        }
    }

    #[test]
    fn keys_differ_are_well_formed_and_never_printed() {
        let (a, b) = (Secret::of(b"a"), Secret::of(b"b"));
        assert!(a != b && a.of_owner() != a && a.of_owner() == a.of_owner() && a.of_owner() != b.of_owner());
        for key in [&a, &b, &a.of_owner()] {
            assert!(key.is_well_formed(), "{}", key.0);
            assert_eq!(key.0.len(), PREFIX.len() + 48 + 1, "32 bytes and 4 of the checksum");
            assert!(!format!("{key:?}").contains("DHHC"));
        }
    }

    #[test]
    fn what_could_smuggle_another_option_in_is_no_key() {
        let good = Secret::of(b"a").0;
        for bad in [
            String::new(),
            "DHHC-1:01:short:".to_owned(),
            good.replace(':', ","),
            format!("{good},ctrl_loss_tmo=1"),
            format!("{good}\n"),
            good.trim_end_matches(':').to_owned(),
        ] {
            assert!(!Secret(bad.clone()).is_well_formed(), "{bad:?}");
        }
    }
}
