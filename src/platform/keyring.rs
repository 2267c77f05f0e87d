//! The kernel's keyring `.nvme`, which its NVMe drivers take keys for TLS from (keyrings(7)).
//!
//! A key there has a description, the name under which both ends know it, and a secret. The kernel gives each a number of its
//! own; whoever changes a secret makes a new key, and connections keep the one that they were made with.
//!
//! Keyrings belong to the machine, not to a process: what was put there stays until it is taken out or the machine restarts.

use std::ffi::CString;
use std::fmt;
use std::path::Path;

use super::{Host, HostError, Result, failed};

/// The kind of key that the drivers take.
const KIND: &str = "psk";
/// The keyring's name.
const RING: &str = ".nvme";
/// What is named in errors.
const SUBJECT: &str = "the kernel's keyring .nvme";
/// Longer than a description is: two NQNs of 223 bytes, and what stands around them.
const DESCRIPTION: usize = 1024;
/// Longer than a secret is.
const SECRET: usize = 256;

// Commands of keyctl(2), from linux/keyctl.h.
const DESCRIBE: libc::c_int = 6;
const LINK: libc::c_int = 8;
const UNLINK: libc::c_int = 9;
const READ: libc::c_int = 11;
/// The keyring of this thread, made where there is none; it goes with the thread.
const OF_THREAD: i32 = -1;

/// The number that the kernel gave a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeySerial(pub i32);

impl fmt::Display for KeySerial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A key for TLS. Its secret is printed nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsKey {
    /// Its number.
    pub serial: KeySerial,
    /// Under which both ends know it.
    pub identity: String,
    /// What only they know.
    pub secret: Vec<u8>,
}

impl fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsKey")
            .field("serial", &self.serial)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

/// The keyring.
#[derive(Clone, Debug)]
pub struct NvmeKeyring {
    host: Host,
    serial: i32,
}

impl NvmeKeyring {
    /// Looks for it; `None` where this kernel has none, or its module `nvme-keyring` is not loaded.
    ///
    /// # Errors
    /// `/proc/keys` cannot be read.
    pub fn find(host: &Host) -> Result<Option<Self>> {
        let path = Path::new("/proc/keys");
        host.enter("read keys", path)?;
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(failed("read", path))?,
        };
        Ok(ring_in(&text).map(|serial| Self { host: host.clone(), serial }))
    }

    /// All keys for TLS that it has. What is taken out meanwhile is left out.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn keys(&self) -> Result<Vec<TlsKey>> {
        self.host.enter("keyctl read", SUBJECT)?;
        self.possess()?;
        let mut found = Vec::new();
        for serial in self.serials()? {
            let Ok(described) = fill(DESCRIBE, serial, DESCRIPTION) else { continue };
            let Some(identity) = identity_in(&String::from_utf8_lossy(&described)) else { continue };
            let Ok(secret) = fill(READ, serial, SECRET) else { continue };
            found.push(TlsKey { serial: KeySerial(serial), identity, secret });
        }
        Ok(found)
    }

    /// Sees to it that it has this secret under this identity, and no other: add_key(2).
    ///
    /// # Errors
    /// The kernel takes no key: EDQUOT where root has too many, EPERM or ENOSYS where a container keeps the call from us.
    pub fn ensure(&self, identity: &str, secret: &[u8]) -> Result<KeySerial> {
        let there = self.keys()?.into_iter().find(|key| key.identity == identity && key.secret == secret);
        if let Some(key) = there {
            return Ok(key.serial);
        }
        self.host.enter("add_key", SUBJECT)?;
        add(identity, secret, self.serial)
    }

    /// Takes a key out; connections that were made with it go on. What is not there was taken out already.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn ensure_absent(&self, identity: &str) -> Result<()> {
        for key in self.keys()?.iter().filter(|key| key.identity == identity) {
            self.host.enter("keyctl unlink", SUBJECT)?;
            control(UNLINK, key.serial.0, self.serial).map(drop)?;
        }
        Ok(())
    }

    /// Lets this thread read what the keyring has: the kernel gives it to whom it is linked to.
    fn possess(&self) -> Result<()> {
        control(LINK, self.serial, OF_THREAD).map(drop)
    }

    fn serials(&self) -> Result<Vec<i32>> {
        // It may grow between two looks.
        let mut room = 64 * size_of::<i32>();
        loop {
            let (read, whole) = read_into(READ, self.serial, room)?;
            if whole <= room {
                let numbers = read.chunks_exact(size_of::<i32>());
                return Ok(numbers.filter_map(|n| Some(i32::from_ne_bytes(n.try_into().ok()?))).collect());
            }
            room = whole * 2;
        }
    }
}

/// The keyring's number, from what `/proc/keys` shows.
fn ring_in(keys: &str) -> Option<i32> {
    let ring = keys.lines().find(|line| {
        let mut words = line.split_whitespace().skip(7);
        words.next() == Some("keyring") && words.next().is_some_and(|name| name.trim_end_matches(':') == RING)
    })?;
    let number = u32::from_str_radix(ring.split_whitespace().next()?, 16).ok()?;
    i32::try_from(number).ok()
}

/// The identity in `TYPE;UID;GID;PERMISSIONS;DESCRIPTION`, of a key for TLS.
fn identity_in(described: &str) -> Option<String> {
    let mut parts = described.trim_end_matches('\0').splitn(5, ';');
    let kind = parts.next()?;
    (kind == KIND).then(|| parts.nth(3).map(str::to_owned)).flatten()
}

/// What a command tells of a key, as far as it fits.
fn fill(command: libc::c_int, serial: i32, room: usize) -> Result<Vec<u8>> {
    read_into(command, serial, room).map(|(read, _)| read)
}

/// What a command tells of a key, and how long that is.
#[allow(unsafe_code)]
fn read_into(command: libc::c_int, serial: i32, room: usize) -> Result<(Vec<u8>, usize)> {
    let mut buffer = vec![0_u8; room];
    // SAFETY: the kernel writes at most as many bytes as the buffer has, which lives until the call returned.
    let whole =
        unsafe { libc::syscall(libc::SYS_keyctl, command, serial, buffer.as_mut_ptr(), buffer.len()) };
    let whole = usize::try_from(whole).map_err(|_| refused("keyctl"))?;
    buffer.truncate(whole);
    Ok((buffer, whole))
}

#[allow(unsafe_code)]
fn control(command: libc::c_int, first: i32, second: i32) -> Result<i64> {
    // SAFETY: these commands take numbers only.
    let done = unsafe { libc::syscall(libc::SYS_keyctl, command, first, second) };
    if done < 0 { Err(refused("keyctl")) } else { Ok(done) }
}

#[allow(unsafe_code)]
fn add(identity: &str, secret: &[u8], ring: i32) -> Result<KeySerial> {
    let text = |text: &str| {
        CString::new(text).map_err(|_| HostError::Unexpected {
            subject: "an identity for TLS".to_owned(),
            reason: "it has a zero byte".to_owned(),
        })
    };
    let (kind, identity) = (text(KIND)?, text(identity)?);
    // SAFETY: both strings end in a zero byte, the secret is as long as is said, and all live until the call returned.
    let serial = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            kind.as_ptr(),
            identity.as_ptr(),
            secret.as_ptr(),
            secret.len(),
            ring,
        )
    };
    i32::try_from(serial).ok().filter(|serial| *serial > 0).map(KeySerial).ok_or_else(|| refused("add_key"))
}

/// What errno says of the call before.
fn refused(call: &'static str) -> HostError {
    failed(call, SUBJECT)(std::io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keyring_is_known_by_its_name_and_kind() {
        let keys = "\
0c56a3f1 I------     1 perm 1f0b0000     0     0 keyring   .dns_resolver: empty
1f7a02b4 I------     2 perm 1f0f0000     0     0 keyring   .nvme: 3
20c8b4cf I--Q---     1 perm 3f010000     0     0 psk       .nvme: 32
3c0ce2d1 I--Q---     4 perm 1f3f0000     0 65534 keyring   _uid.0: empty
";
        assert_eq!(ring_in(keys), Some(0x1f7a_02b4));
        assert_eq!(ring_in("20c8b4cf I--Q---     1 perm 3f010000     0     0 psk       .nvme: 32\n"), None);
    }

    #[test]
    fn only_keys_for_tls_are_seen_and_their_secrets_are_never_printed() {
        assert_eq!(
            identity_in("psk;0;0;3f010000;NVMe0R01 nqn.a nqn.b;c\0").as_deref(),
            Some("NVMe0R01 nqn.a nqn.b;c")
        );
        assert_eq!(identity_in("user;0;0;3f010000;NVMe0R01 a b"), None);
        let key = TlsKey { serial: KeySerial(7), identity: "NVMe0R01 a b".to_owned(), secret: vec![77; 32] };
        assert!(!format!("{key:?}").contains("77"));
    }
}
