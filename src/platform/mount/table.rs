//! Reading the kernel's table of mounts.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::{MountEntry, MountTable};
use crate::platform::{HostError, Result, failed};

/// The mounts that `file`, some process's `/proc/PID/mountinfo`, lists.
pub(in crate::platform) fn table_of(file: &Path) -> Result<MountTable> {
    let text = std::fs::read(file).map_err(failed("read", file))?;
    parse_table(&file.display().to_string(), &text)
}

/// The mounts that the text of a mountinfo file lists; `subject` is named in errors.
pub(in crate::platform) fn parse_table(subject: &str, text: &[u8]) -> Result<MountTable> {
    parse(text).map_err(|reason| HostError::Unexpected { subject: subject.to_owned(), reason })
}

/// Parses mountinfo (proc_pid_mountinfo(5)). Fields are separated by single blanks: the source may be empty.
fn parse(text: &[u8]) -> Result<MountTable, String> {
    let lines = text.split(|b| *b == b'\n').filter(|line| !line.is_empty());
    let entries = lines
        .enumerate()
        .map(|(number, line)| {
            entry(line).ok_or_else(|| {
                format!("line {} is not a mount: {}", number + 1, String::from_utf8_lossy(line))
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(MountTable { entries })
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|b| *b == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let root = path(fields.next()?);
    let mount_point = path(fields.next()?);
    let options = options(fields.next()?);
    // None, one or several optional fields; the kernel never writes one that is a lone hyphen.
    fields.find(|field| *field == b"-")?;
    let fs_type = text(fields.next()?);
    let source = text(fields.next()?);
    // Some filesystems print blanks unescaped in their options.
    let super_options = self::options(&fields.collect::<Vec<_>>().join(&b' '));
    let root = within_server(&fs_type, &source).filter(|_| root == Path::new("/")).unwrap_or(root);
    let absolute = mount_point.is_absolute();
    absolute.then_some(MountEntry {
        id,
        parent,
        device,
        root,
        mount_point,
        options,
        fs_type,
        source,
        super_options,
    })
}

/// Mounts of these are of a path at a server, not of a whole filesystem.
pub(in crate::platform) fn is_nfs(fs_type: &str) -> bool {
    matches!(fs_type, "nfs" | "nfs4")
}

/// The kernel's NFS client shows each of its mounts with the root `/`, and the path at the server, with what was bound below it, in
/// the source.
fn within_server(fs_type: &str, source: &str) -> Option<PathBuf> {
    let (_, path) = source.split_once(":/").filter(|_| is_nfs(fs_type))?;
    Some(Path::new("/").join(path))
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(&unescape(field)).into_owned()
}

fn options(field: &[u8]) -> Vec<String> {
    field.split(|b| *b == b',').filter(|o| !o.is_empty()).map(text).collect()
}

/// Resolves `\ooo`. The kernel escapes every backslash, so what is not an escape stands for itself.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let escaped = match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if byte == b'\\' => {
                Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
            }
            _ => None,
        };
        out.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(line: &str) -> MountEntry {
        parse(line.as_bytes()).unwrap().entries.remove(0)
    }

    #[test]
    fn binds_of_nfs_have_the_root_that_their_source_tells() {
        let root = |fs_type: &str, source: &str| {
            let line = format!("36 35 0:45 / /mnt rw - {fs_type} {source} rw");
            entry(line.as_bytes()).unwrap().root
        };
        assert_eq!(root("nfs4", "10.0.0.1:/v-0@2/data"), PathBuf::from("/v-0@2/data"));
        assert_eq!(root("nfs4", "[fd00::1]:/v-0@2"), PathBuf::from("/v-0@2"));
        assert_eq!(root("nfs4", "10.0.0.1:/"), PathBuf::from("/"));
        assert_eq!(root("fuse", "a:/b"), PathBuf::from("/"));
    }

    #[test]
    fn a_line_is_read_field_by_field() {
        let e =
            one("36 35 98:7 /mnt1 /mnt2 rw,noatime shared:3 master:1 - ext3 /dev/root rw,errors=continue\n");
        assert_eq!((e.id, e.parent, e.device), (36, 35, (98, 7)));
        assert_eq!((e.root, e.mount_point), (PathBuf::from("/mnt1"), PathBuf::from("/mnt2")));
        assert_eq!(e.options, ["rw", "noatime"]);
        assert_eq!((e.fs_type.as_str(), e.source.as_str()), ("ext3", "/dev/root"));
        assert_eq!(e.super_options, ["rw", "errors=continue"]);
    }

    #[test]
    fn optional_fields_may_be_absent_or_many() {
        assert_eq!(one("1 0 0:1 / / rw - tmpfs t rw").fs_type, "tmpfs");
        assert_eq!(
            one("1 0 0:1 / / rw shared:1 master:2 propagate_from:3 unbindable - tmpfs t rw").fs_type,
            "tmpfs"
        );
    }

    #[test]
    fn escapes_are_resolved() {
        let e = one(r"1 0 0:1 /a\040b /x\011\012\134\043y rw - fuse.mergerfs sou\040rce rw");
        assert_eq!(e.root, PathBuf::from("/a b"));
        assert_eq!(e.mount_point, PathBuf::from("/x\t\n\\#y"));
        assert_eq!(e.source, "sou rce");
        assert_eq!(one(r"1 0 0:1 / /a\134040 rw - t s rw").mount_point, PathBuf::from(r"/a\040"));
        assert_eq!(one(r"1 0 0:1 / /a\9\ rw - t s rw").mount_point, PathBuf::from(r"/a\9\"));
    }

    #[test]
    fn a_path_need_not_be_utf8() {
        let table = parse(b"1 0 0:1 / /\xff\xfe rw - t s rw\n").unwrap();
        assert_eq!(table.entries[0].mount_point, PathBuf::from(OsString::from_vec(b"/\xff\xfe".to_vec())));
    }

    #[test]
    fn an_empty_source_and_blanks_in_the_options_are_kept_apart() {
        let e = one("1 0 0:1 / /a rw - tmpfs  rw,note=a b,size=1");
        assert_eq!(e.source, "");
        assert_eq!(e.super_options, ["rw", "note=a b", "size=1"]);
    }

    #[test]
    fn what_is_no_mount_is_an_error_with_its_line() {
        for line in [
            "1 0 0:1 / / rw tmpfs t rw",
            "x 0 0:1 / / rw - t s rw",
            "1 0 01 / / rw - t s rw",
            "1 0 0:1 / relative rw - t s rw",
            "1 0",
            "1 0 0:1 / / rw - t",
        ] {
            let text = format!("1 0 0:1 / / rw - t s rw\n{line}\n");
            assert!(parse(text.as_bytes()).unwrap_err().starts_with("line 2 "), "{line}");
        }
    }

    #[test]
    fn nothing_is_an_empty_table() {
        assert_eq!(parse(b"").unwrap().entries, []);
    }

    fn tree(lines: &[&str]) -> MountTable {
        parse(lines.join("\n").as_bytes()).unwrap()
    }

    #[test]
    fn of_mounts_on_one_directory_the_last_is_on_top() {
        let t = tree(&["1 0 0:1 / / rw - t s rw", "2 1 0:2 / /a rw - t s rw", "3 2 0:3 / /a rw - t s rw"]);
        assert_eq!(t.at("/a".as_ref()).unwrap().id, 3);
        assert_eq!(t.containing("/a/b".as_ref()).unwrap().id, 3);
        assert_eq!(t.containing("/ab".as_ref()).unwrap().id, 1);
        assert_eq!(t.at("/a/b".as_ref()), None);
    }

    #[test]
    fn a_mount_below_another_counts_however_the_lines_are_ordered() {
        // What MOVE_MOUNT_BENEATH leaves: the newer mount is the parent of the older.
        let t = tree(&["1 0 0:1 / / rw - t s rw", "2 3 0:2 / /a rw - t s rw", "3 1 0:3 / /a rw - t s rw"]);
        assert_eq!(t.at("/a".as_ref()).unwrap().id, 2);
    }

    #[test]
    fn a_mount_hidden_by_a_later_one_above_it_is_not_at_its_path() {
        let t = tree(&["1 0 0:1 / / rw - t s rw", "2 1 0:2 / /a/b rw - t s rw", "3 1 0:3 / /a rw - t s rw"]);
        assert_eq!(t.containing("/a/b/c".as_ref()).unwrap().id, 3);
        assert_eq!(t.at("/a/b".as_ref()), None);
        assert_eq!(t.below("/a".as_ref()).count(), 2);
    }

    #[test]
    fn without_a_root_mount_the_deepest_counts() {
        let t = tree(&["5 4 0:1 / /jail rw - t s rw", "6 5 0:2 / /jail/a rw - t s rw"]);
        assert_eq!(t.containing("/jail/a/b".as_ref()).unwrap().id, 6);
        assert_eq!(t.containing("/other".as_ref()), None);
    }
}
