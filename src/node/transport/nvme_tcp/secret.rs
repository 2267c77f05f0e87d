//! Keys for DH-HMAC-CHAP, in the spelling of the NVMe specifications: `DHHC-1:<hash>:<base64 of key and its CRC-32>:`.
//!
//! One key is made and kept for a consumer and an owner. The consumer proves that it has it; what the owner proves in turn is
//! a second key made from the first, because one key for both directions would let a stranger answer with what it was asked.

use sha2::{Digest, Sha256};

use crate::node::transport::Secret;

/// The key is 32 bytes, and transformed with SHA-256 and the host's NQN before it is used.
const PREFIX: &str = "DHHC-1:01:";

/// A new key, from 366 random bits.
#[must_use]
pub fn generate() -> Secret {
    let mut hash = Sha256::new();
    for _ in 0..3 {
        hash.update(uuid::Uuid::new_v4().as_bytes());
    }
    spell(&hash.finalize())
}

/// The key that the owner proves to have, where `secret` is the consumer's.
pub(super) fn of_owner(secret: &Secret) -> Secret {
    spell(&Sha256::digest(format!("owner's key for {}", secret.0).as_bytes()))
}

/// It looks like a key, and can be one part of the options of a connection.
pub(super) fn well_formed(secret: &Secret) -> bool {
    let Some(rest) = secret.0.strip_prefix("DHHC-1:") else { return false };
    let mut parts = rest.split(':');
    let (hash, key, end) = (parts.next(), parts.next(), parts.next());
    let base64 = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'=');
    hash.is_some_and(|h| h.len() == 2 && h.bytes().all(|b| b.is_ascii_digit()))
        && key.is_some_and(|k| k.len() >= 48 && k.bytes().all(base64))
        && end == Some("")
        && parts.next().is_none()
}

fn spell(key: &[u8]) -> Secret {
    let mut bytes = key.to_vec();
    bytes.extend(crc32(key).to_le_bytes());
    Secret(format!("{PREFIX}{}:", base64(&bytes)))
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
        let (a, b) = (generate(), generate());
        assert!(a != b && of_owner(&a) != a && of_owner(&a) == of_owner(&a) && of_owner(&a) != of_owner(&b));
        for key in [&a, &b, &of_owner(&a)] {
            assert!(well_formed(key), "{}", key.0);
            assert_eq!(key.0.len(), PREFIX.len() + 48 + 1, "32 bytes and 4 of the checksum");
            assert!(!format!("{key:?}").contains("DHHC"));
        }
    }

    #[test]
    fn what_could_smuggle_another_option_in_is_no_key() {
        let good = generate().0;
        for bad in [
            String::new(),
            "DHHC-1:01:short:".to_owned(),
            good.replace(':', ","),
            format!("{good},ctrl_loss_tmo=1"),
            format!("{good}\n"),
            good.trim_end_matches(':').to_owned(),
        ] {
            assert!(!well_formed(&Secret(bad.clone())), "{bad:?}");
        }
    }
}
