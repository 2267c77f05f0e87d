//! The lines that fill the server's caches, and what it tells of them. Pure.
//!
//! `auth.unix.ip` says to which domain a client's address belongs, `nfsd.export` what a domain may do with a path, and
//! `nfsd.fh` which path a file handle's beginning stands for. An entry without its last part is a refusal: the client
//! gets an error at once. Without any entry the client waits until there is one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Entries never expire: the largest number that the kernel's parser reads everywhere (seconds since 1970, in 2038).
/// rpc.mountd(8) gives the same for what an administrator exports by hand.
const NEVER: u32 = 0x7fff_ffff;

// Flags of an export, from linux/nfsd/export.h. None of `ROOTSQUASH`, `ASYNC`, `INSECURE_PORT` is ever given: users keep
// their numbers, root included, what was acknowledged is on the disk, and only a peer's kernel may speak.
const READ_ONLY: u32 = 0x1;
const NO_SUBTREE_CHECK: u32 = 0x400;
const FSID: u32 = 0x2000;
const CROSS_MOUNT: u32 = 0x4000;
const V4_ROOT: u32 = 0x1_0000;

/// The user and group of requests without any (RFC 8881, `nobody`).
const NOBODY: u32 = 65534;

/// A cache of the server, by its name under `/proc/net/rpc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Address to domain.
    Addresses,
    /// Domain and path to rights.
    Exports,
    /// Domain and file handle to path.
    Handles,
}

impl Cache {
    /// Its directory's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Addresses => "auth.unix.ip",
            Self::Exports => "nfsd.export",
            Self::Handles => "nfsd.fh",
        }
    }
}

/// How file handles of an export begin (`enum fsid_source` and `fsid_type` of the kernel's `nfsfh.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleKey {
    /// The root of what one client sees: number 0.
    Root,
    /// An export that is the root of its filesystem.
    Uuid([u8; 16]),
    /// An export of a directory within a filesystem, with the number of that directory's inode.
    InodeUuid(u64, [u8; 16]),
}

impl HandleKey {
    fn kind(self) -> u8 {
        match self {
            Self::Root => 1,
            Self::Uuid(_) => 6,
            Self::InodeUuid(..) => 7,
        }
    }

    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Root => vec![0; 4],
            Self::Uuid(uuid) => uuid.to_vec(),
            // As the kernel lays the number in memory.
            Self::InodeUuid(inode, uuid) => [inode.to_ne_bytes().as_slice(), &uuid].concat(),
        }
    }
}

/// The address belongs to the domain.
#[must_use]
pub fn address(address: IpAddr, domain: &str) -> String {
    format!("nfsd {address} {NEVER} {}\n", quoted(domain.as_bytes()))
}

/// The directory is the root of what the domain sees: mount points that are exported lie in it.
#[must_use]
pub fn root(domain: &str, path: &Path) -> String {
    let flags = READ_ONLY | NO_SUBTREE_CHECK | FSID | CROSS_MOUNT | V4_ROOT;
    format!("{} {flags} {NOBODY} {NOBODY} 0\n", head(domain, path))
}

/// The domain may read the directory, and write it unless `read_only`.
#[must_use]
pub fn granted(domain: &str, path: &Path, uuid: [u8; 16], read_only: bool) -> String {
    let head = head(domain, path);
    let flags = NO_SUBTREE_CHECK | if read_only { READ_ONLY } else { 0 };
    format!("{head} {flags} {NOBODY} {NOBODY} 0 uuid {}\n", hex(&uuid))
}

/// How what is told of a path begins.
fn head(domain: &str, path: &Path) -> String {
    format!("{} {} {NEVER}", quoted(domain.as_bytes()), quoted(path.as_os_str().as_bytes()))
}

/// The domain's handles that begin so are of what lies at the path; without a path they are stale.
#[must_use]
pub fn handle(domain: &str, key: HandleKey, path: Option<&Path>) -> String {
    let path = path.map(|p| format!(" {}", quoted(p.as_os_str().as_bytes()))).unwrap_or_default();
    format!("{} {} {} {NEVER}{path}\n", quoted(domain.as_bytes()), key.kind(), hex(&key.bytes()))
}

/// A word as the kernel's `qword_get` reads it: what would end or begin something else in octal.
fn quoted(word: &[u8]) -> String {
    let mut out = Vec::with_capacity(word.len());
    for &byte in word {
        if matches!(byte, b'\\' | b' ' | b'\n' | b'\t') {
            out.extend(format!("\\{byte:03o}").into_bytes());
        } else {
            out.push(byte);
        }
    }
    // Names of branches and addresses are ASCII; of a path that is not UTF-8 the kernel would be told something else, so it
    // is refused before this by whoever makes the path.
    String::from_utf8_lossy(&out).into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("\\x".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A line of `nfsd.export/content`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportEntry {
    /// What is exported.
    pub path: PathBuf,
    /// To whom.
    pub domain: String,
    /// True where the domain may use it; false for a refusal and for what has expired.
    pub granted: bool,
}

/// The lines of `auth.unix.ip/content`: `nfsd ADDRESS DOMAIN`, of those that it knows.
#[must_use]
pub fn parse_addresses(content: &[u8]) -> BTreeMap<IpAddr, String> {
    let line = |line: &str| {
        let mut words = line.strip_prefix("nfsd ")?.split(' ');
        let address: IpAddr = words.next()?.parse().ok()?;
        Some((address.to_canonical(), words.next()?.to_owned()))
    };
    String::from_utf8_lossy(content).lines().filter_map(line).collect()
}

/// The exports that the server has in mind.
#[must_use]
pub fn parse_exports(content: &[u8]) -> Vec<ExportEntry> {
    content.split(|b| *b == b'\n').filter_map(export_entry).collect()
}

/// `/path<TAB>domain(flags)`; refusals and expired entries begin with `# `.
fn export_entry(line: &[u8]) -> Option<ExportEntry> {
    let (void, line) = match line.strip_prefix(b"# ") {
        Some(rest) => (true, rest),
        None => (false, line),
    };
    if !line.starts_with(b"/") {
        return None;
    }
    let tab = line.iter().position(|b| *b == b'\t')?;
    let (path, rest) = (&line[..tab], &line[tab + 1..]);
    let open = rest.iter().rposition(|b| *b == b'(')?;
    let flags = &rest[open + 1..];
    Some(ExportEntry {
        path: PathBuf::from(OsString::from_vec(unquoted(path))),
        domain: String::from_utf8_lossy(&unquoted(&rest[..open])).into_owned(),
        granted: !void && flags != b")",
    })
}

/// Undoes the octal escapes of the kernel's `seq_path`.
fn unquoted(text: &[u8]) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text);
    while let [byte, tail @ ..] = rest {
        let octal = tail.get(..3).filter(|_| *byte == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match octal.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(value) => {
                out.push(value);
                rest = &tail[3..];
            }
            None => {
                out.push(*byte);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];

    #[test]
    fn an_address_belongs_to_its_domain_for_ever() {
        assert_eq!(
            address("10.0.0.2".parse().unwrap(), "union-csi:10.0.0.2"),
            "nfsd 10.0.0.2 2147483647 union-csi:10.0.0.2\n"
        );
        assert_eq!(address("fd00::2".parse().unwrap(), "d"), "nfsd fd00::2 2147483647 d\n");
    }

    #[test]
    fn a_grant_names_rights_and_identity() {
        assert_eq!(
            granted("d", Path::new("/r/v-0@1"), UUID, true).split(' ').nth(3),
            Some("1025"),
            "read-only"
        );
        assert_eq!(
            granted("d", Path::new("/r/v-0@1"), UUID, false),
            "d /r/v-0@1 2147483647 1024 65534 65534 0 uuid \\x000102030405060708090a0b0c0d0eff\n"
        );
        assert_eq!(root("d", Path::new("/r")), "d /r 2147483647 91137 65534 65534 0\n");
    }

    #[test]
    fn a_handle_is_known_by_its_kind_and_its_bytes() {
        assert_eq!(handle("d", HandleKey::Root, Some(Path::new("/r"))), "d 1 \\x00000000 2147483647 /r\n");
        let number = 258_u64;
        let wanted: String = number.to_ne_bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            handle("d", HandleKey::InodeUuid(number, UUID), None),
            format!("d 7 \\x{wanted}000102030405060708090a0b0c0d0eff 2147483647\n")
        );
        assert_eq!(
            handle("d", HandleKey::Uuid(UUID), None),
            "d 6 \\x000102030405060708090a0b0c0d0eff 2147483647\n"
        );
    }

    #[test]
    fn a_path_cannot_end_its_word() {
        let line = handle("d", HandleKey::Root, Some(Path::new("/a b\\c\nd\te")));
        assert_eq!(line, "d 1 \\x00000000 2147483647 /a\\040b\\134c\\012d\\011e\n");
    }

    #[test]
    fn whom_the_server_knows_is_read_back() {
        let content = b"#class IP domain\nnfsd 10.0.0.2 union-csi:10.0.0.2\nnfsd fd00:0000:0000:0000:0000:0000:0000:0002 six\n\
            # nfsd 10.0.0.3 expired\nnfsd 10.0.0.4\n";
        let known: Vec<_> = parse_addresses(content).into_iter().collect();
        let of = |address: &str, domain: &str| (address.parse::<IpAddr>().unwrap(), domain.to_owned());
        assert_eq!(known, [of("10.0.0.2", "union-csi:10.0.0.2"), of("fd00::2", "six")]);
    }

    #[test]
    fn what_the_server_has_in_mind_is_read_back() {
        let content =
            b"#path domain(flags)\n/r/a\\040b\tunion-csi:10.0.0.2(rw,no_root_squash,sync,wdelay,uuid=1)\n\
            # /r/c\tunion-csi:10.0.0.3()\n/r/d\t*(ro)\n# /r/e\td(rw)\n";
        let found = parse_exports(content);
        let short: Vec<_> =
            found.iter().map(|e| (e.path.to_str().unwrap(), e.domain.as_str(), e.granted)).collect();
        assert_eq!(
            short,
            [
                ("/r/a b", "union-csi:10.0.0.2", true),
                ("/r/c", "union-csi:10.0.0.3", false),
                ("/r/d", "*", true),
                ("/r/e", "d", false),
            ]
        );
    }
}
