//! What two nodes share to prove to each other who they are, and to encrypt what they send: keys for DH-HMAC-CHAP and for TLS, in
//! the spelling of the NVMe specifications, `DHHC-1:<hash>:<base64 of key and its CRC-32>:` and `NVMeTLSkey-1:` in the same form.
//!
//! One key is made and kept for a consumer and an owner. The consumer proves that it has it; what the owner proves in turn is
//! a second key made from the first, because one key for both directions would let a stranger answer with what it was asked.
//!
//! The key for TLS is another: what a consumer proves to have its kernel shows in sysfs (`dhchap_secret`), at first to everybody.

use std::fmt;

use sha2::{Digest, Sha256};

/// The key is 32 bytes, and transformed with SHA-256 and the host's NQN before it is used.
const PREFIX: &str = "DHHC-1:01:";

/// The same of keys for TLS, which are 32 bytes and go with SHA-256.
const TLS_PREFIX: &str = "NVMeTLSkey-1:01:";

/// A TLS key as a kernel takes it, for one connection's two ends.
pub type Psk = [u8; 32];

/// What both ends share. Never printed. It belongs to a consumer and an owner, not to a branch: the kernel of an owner keeps one
/// key for each peer.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// By which each proves to have it, spelled as above.
    chap: String,
    /// By which they encrypt what they send. Secrets of programs of before have none.
    tls: Option<String>,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Secret {
    /// The one that is made of these random bytes. Neither of its keys tells anything of the other.
    #[must_use]
    pub fn of(random: &[u8]) -> Self {
        let tls = Sha256::new().chain_update(b"key for TLS from ").chain_update(random).finalize();
        Self { chap: spelled(PREFIX, &Sha256::digest(random)), tls: Some(spelled(TLS_PREFIX, &tls)) }
    }

    /// What was written down; `None` where it is no secret.
    #[must_use]
    pub fn read(chap: &[u8], tls: Option<&[u8]>) -> Option<Self> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let chap = text(chap).filter(|key| is_well_formed(key, "DHHC-1:"))?;
        let tls = match tls {
            Some(tls) => Some(text(tls).filter(|key| is_well_formed(key, "NVMeTLSkey-1:"))?),
            None => None,
        };
        Some(Self { chap, tls })
    }

    /// The key that the consumer proves to have.
    #[must_use]
    pub fn chap(&self) -> &str {
        &self.chap
    }

    /// The key that the owner proves to have.
    #[must_use]
    pub fn chap_of_owner(&self) -> String {
        spelled(PREFIX, &Sha256::digest(format!("owner's key for {}", self.chap).as_bytes()))
    }

    /// The key for TLS, as it is written down.
    #[must_use]
    pub fn tls(&self) -> Option<&str> {
        self.tls.as_deref()
    }

    /// The key by which both ends of connections of that identity encrypt; each identity has its own.
    #[must_use]
    pub fn psk(&self, identity: &str) -> Option<Psk> {
        let tls = self.tls.as_deref()?;
        Some(Sha256::digest(format!("key for {identity} from {tls}").as_bytes()).into())
    }

    /// The same without the key for TLS.
    #[must_use]
    pub fn without_tls(self) -> Self {
        Self { tls: None, ..self }
    }
}

/// It looks like a key, and can be one part of the options of a connection.
fn is_well_formed(text: &str, prefix: &str) -> bool {
    let Some(rest) = text.strip_prefix(prefix) else { return false };
    let mut parts = rest.split(':');
    let (hash, key, end) = (parts.next(), parts.next(), parts.next());
    let base64 = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'=');
    hash.is_some_and(|h| h.len() == 2 && h.bytes().all(|b| b.is_ascii_digit()))
        && key.is_some_and(|k| k.len() >= 48 && k.bytes().all(base64))
        && end == Some("")
        && parts.next().is_none()
}

fn spelled(prefix: &str, key: &[u8]) -> String {
    let mut bytes = key.to_vec();
    bytes.extend(crc32(key).to_le_bytes());
    format!("{prefix}{}:", base64(&bytes))
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
        let all = |s: &Secret| [s.chap().to_owned(), s.chap_of_owner(), s.tls().unwrap().to_owned()];
        let mut keys: Vec<String> = [all(&a), all(&b)].concat();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 6, "each is another");
        for secret in [&a, &b, &a.clone().without_tls()] {
            assert_eq!(secret.chap().len(), PREFIX.len() + 48 + 1, "32 bytes and 4 of the checksum");
            let read = Secret::read(secret.chap().as_bytes(), secret.tls().map(str::as_bytes));
            assert_eq!(read.as_ref(), Some(secret), "one of before has no key for TLS");
            assert_eq!(format!("{secret:?}"), "Secret(…)");
        }
    }

    #[test]
    fn each_connection_has_a_key_for_tls_of_its_own_where_there_is_one() {
        let (a, b) = (Secret::of(b"a"), Secret::of(b"b"));
        assert_eq!(a.psk("one"), a.clone().psk("one"));
        assert!(a.psk("one").is_some() && a.psk("one") != a.psk("two") && a.psk("one") != b.psk("one"));
        assert_eq!(a.without_tls().psk("one"), None);
    }

    #[test]
    fn what_could_smuggle_another_option_in_is_no_key() {
        let secret = Secret::of(b"a");
        let (good, tls) = (secret.chap().to_owned(), secret.tls().unwrap().to_owned());
        for bad in [
            String::new(),
            "DHHC-1:01:short:".to_owned(),
            good.replace(':', ","),
            format!("{good},ctrl_loss_tmo=1"),
            format!("{good}\n"),
            good.trim_end_matches(':').to_owned(),
            tls.clone(),
        ] {
            assert_eq!(Secret::read(bad.as_bytes(), None), None, "{bad:?}");
        }
        assert_eq!(Secret::read(good.as_bytes(), Some(good.as_bytes())), None, "one is not the other");
        assert_eq!(Secret::read(good.as_bytes(), Some(b"")), None);
    }
}
