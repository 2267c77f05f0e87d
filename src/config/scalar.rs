//! Single settings: text to value, with the fault and its remedy where it is none.

use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::MAX_SOCKET_PATH;
use crate::domain::Bytes;
use crate::domain::duration::format;
use crate::domain::pool::{Media, Reserve};
use crate::domain::spelling::nearest;
use crate::node::survey::{InvalidSubnet, Subnet};

/// What is wrong, and what to do.
pub(super) struct Wrong {
    pub(super) problem: String,
    pub(super) remedy: String,
}

pub(super) fn wrong(problem: impl Into<String>, remedy: impl Into<String>) -> Wrong {
    Wrong { problem: problem.into(), remedy: remedy.into() }
}

type Parsed<T> = Result<T, Wrong>;

/// A name of the domain (node, pool).
pub(super) fn name<T: std::str::FromStr<Err = crate::domain::InvalidId>>(text: &str) -> Parsed<T> {
    text.parse().map_err(|e: crate::domain::InvalidId| {
        let sentence = e.to_string();
        match sentence.split_once(": ") {
            Some((problem, remedy)) => wrong(problem, remedy),
            None => wrong(sentence.clone(), "choose another name"),
        }
    })
}

/// An absolute path without `.` and `..`.
pub(super) fn absolute(text: &str) -> Parsed<PathBuf> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err(wrong(
            format!("{text:?} is a relative path"),
            "write it from the root, beginning with '/'",
        ));
    }
    if text.split('/').any(|part| part == "..") {
        return Err(wrong(format!("{text:?} contains '..'"), "write the path that is meant, without '..'"));
    }
    // Collecting the components drops doubled and closing slashes and '.', so that equal paths compare equal.
    Ok(path.components().filter(|c| !matches!(c, Component::CurDir)).collect())
}

/// `unix:///path/to.sock`, as the CSI tools write it, or the bare path.
pub(super) fn socket(text: &str) -> Parsed<PathBuf> {
    let bare = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")).unwrap_or(text);
    if bare.contains("://") {
        return Err(wrong(
            format!("{text:?} is not a Unix socket"),
            "write unix:///run/union-csi/csi.sock; CSI is served over Unix sockets only",
        ));
    }
    let path = absolute(bare)?;
    check_socket(&path)?;
    Ok(path)
}

/// Bounds the path of a socket.
pub(super) fn check_socket(path: &Path) -> Parsed<()> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_SOCKET_PATH {
        return Err(wrong(
            format!("the socket's path has {bytes} bytes, and the kernel takes at most {MAX_SOCKET_PATH}"),
            "choose a shorter one with csi.endpoint (--endpoint)",
        ));
    }
    Ok(())
}

/// `ADDRESS:PORT` or `off`.
pub(super) fn listen(text: &str) -> Parsed<Option<SocketAddr>> {
    if text == "off" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        wrong(
            format!("{text:?} is not an address and port"),
            "write for example 127.0.0.1:9830, [::1]:9830 or 0.0.0.0:9830, or off",
        )
    })
}

/// The name of an interface, or `off`. The kernel's names have at most 15 bytes, no slash and no space (dev_valid_name).
pub(super) fn interface(text: &str) -> Parsed<Option<String>> {
    if text == "off" {
        return Ok(None);
    }
    let good = (1..=15).contains(&text.len())
        && text != "."
        && text != ".."
        && !text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
    if good {
        return Ok(Some(text.to_owned()));
    }
    Err(wrong(
        format!("{text:?} is not the name of an interface"),
        "write it as `ip link` shows it, for example eth1; to choose by address, use network.subnet; or off",
    ))
}

/// A range of addresses.
pub(super) fn subnet(text: &str) -> Parsed<Subnet> {
    text.parse().map_err(|error: InvalidSubnet| {
        let remedy = match &error {
            InvalidSubnet::Form { .. } => {
                "write address and bits of the network, as 10.0.0.0/8 or fd00::/64".to_owned()
            }
            InvalidSubnet::Within { meant, .. } => format!("write {meant}"),
        };
        wrong(error.to_string(), remedy)
    })
}

/// A TCP port.
pub(super) fn port(text: &str) -> Parsed<u16> {
    match text.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(wrong(format!("{text:?} is not a port"), "write a number from 1 to 65535")),
    }
}

/// `5%` or a quantity.
pub(super) fn reserve(text: &str) -> Parsed<Reserve> {
    let Some(percent) = text.strip_suffix('%') else {
        return bytes(text).map(Reserve::Bytes);
    };
    match percent.trim().parse::<u32>() {
        Ok(n) if n <= 100 => Ok(Reserve::Percent(u8::try_from(n).unwrap_or(100))),
        Ok(n) => {
            Err(wrong(format!("{n}% is more than the whole filesystem"), "reserve between 0% and 100% of it"))
        }
        Err(_) => Err(wrong(format!("{text:?} is not a share"), "write a whole number of percent, as 5%")),
    }
}

/// An amount in Kubernetes' syntax.
pub(super) fn bytes(text: &str) -> Parsed<Bytes> {
    text.parse().map_err(|e: crate::domain::quantity::InvalidQuantity| {
        wrong(e.to_string(), "write an amount as 500Mi, 20Gi or 2Ti")
    })
}

/// A kind of disk.
pub(super) fn media(text: &str) -> Parsed<Media> {
    match text {
        "nvme" => Ok(Media::Nvme),
        "ssd" => Ok(Media::Ssd),
        "hdd" => Ok(Media::Hdd),
        "unknown" => Ok(Media::Unknown),
        other => Err(choice(other, "is no kind of disk that is known", &["nvme", "ssd", "hdd", "unknown"])),
    }
}

/// `text` or `json`; true for JSON.
pub(super) fn log_format(text: &str) -> Parsed<bool> {
    match text {
        "text" => Ok(false),
        "json" => Ok(true),
        other => Err(choice(other, "is no format of logs", &["text", "json"])),
    }
}

/// The fault of a word that is none of a few.
fn choice(typed: &str, is: &str, known: &[&str]) -> Wrong {
    let list = known.join(", ");
    match nearest(typed, known.iter().copied()) {
        Some(meant) => wrong(format!("{typed:?} {is}"), format!("did you mean {meant}? (one of {list})")),
        None => wrong(format!("{typed:?} {is}"), format!("choose one of {list}")),
    }
}

/// Directives of tracing's `EnvFilter`.
pub(super) fn log_filter(text: &str) -> Parsed<String> {
    match tracing_subscriber::EnvFilter::builder().parse(text) {
        Ok(_) if !text.trim().is_empty() => Ok(text.to_owned()),
        Ok(_) => Err(wrong("the filter is empty", "write for example info or info,union_csi::node=debug")),
        Err(e) => Err(wrong(
            format!("{text:?} is not a filter ({e})"),
            "write for example info or info,union_csi::node=debug",
        )),
    }
}

/// The MergerFS program.
pub(super) fn program(text: &str) -> Parsed<PathBuf> {
    if text.is_empty() {
        return Err(wrong("the path is empty", "give the program's absolute path, or its name in PATH"));
    }
    if text.contains('/') { absolute(text) } else { Ok(PathBuf::from(text)) }
}

/// A filesystem's UUID, as blkid shows it (also the short ones of FAT and the like).
pub(super) fn uuid(text: &str) -> Parsed<String> {
    let plain = text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    if text.len() >= 4 && text.len() <= 64 && plain {
        Ok(text.to_owned())
    } else {
        Err(wrong(format!("{text:?} is not a filesystem's UUID"), "copy it from `blkid` or `lsblk -f`"))
    }
}

/// A duration such as `500ms`, `5s` or `1m30s`, between the bounds.
pub(super) fn duration(text: &str, least: Duration, most: Duration) -> Parsed<Duration> {
    let range = || format!("between {} and {}", format(least), format(most));
    let Ok(value) = crate::domain::duration::parse(text) else {
        return Err(wrong(
            format!("{text:?} is not a duration"),
            format!("write a number with its unit (ms, s, m, h), as 5s or 1m30s, {}", range()),
        ));
    };
    if value < least || value > most {
        return Err(wrong(format!("{text} is out of bounds"), format!("choose a duration {}", range())));
    }
    Ok(value)
}

/// A label's key and value, as Kubernetes has them, so that a selector `key=value,…` can ask for it.
pub(super) fn label(key: &str, value: &str) -> Parsed<()> {
    let part = |s: &str| {
        s.len() <= 63
            && s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
            && s.bytes().next().is_none_or(|b| b.is_ascii_alphanumeric())
            && s.bytes().last().is_none_or(|b| b.is_ascii_alphanumeric())
    };
    let (prefix, name) = key.split_once('/').unwrap_or(("x", key));
    let good_key = !name.is_empty()
        && part(name)
        && !prefix.is_empty()
        && prefix.len() <= 253
        && prefix.split('.').all(|p| !p.is_empty() && part(p));
    let remedy =
        "use letters, digits, '-', '_' and '.', at most 63, beginning and ending with a letter or digit";
    if !good_key {
        return Err(wrong(format!("{key:?} is not the key of a label"), remedy));
    }
    if !part(value) {
        return Err(wrong(format!("{value:?} is not the value of a label"), remedy));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_lies_within_its_bounds() {
        let bounds = (Duration::from_secs(1), Duration::from_secs(60));
        assert_eq!(duration("1m", bounds.0, bounds.1).ok(), Some(Duration::from_secs(60)));
        for bad in ["", "5", "0s", "999ms", "61s", "-5s"] {
            assert!(duration(bad, bounds.0, bounds.1).is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn equal_paths_become_equal() {
        assert_eq!(absolute("/mnt//a/./b/").ok(), Some(PathBuf::from("/mnt/a/b")));
        assert!(absolute("mnt").is_err());
        assert!(absolute("/mnt/../etc").is_err());
        assert!(absolute("").is_err());
    }

    #[test]
    fn a_reserve_is_a_share_or_an_amount() {
        assert_eq!(reserve("5%").ok(), Some(Reserve::Percent(5)));
        assert_eq!(reserve("100%").ok(), Some(Reserve::Percent(100)));
        assert_eq!(reserve("2Gi").ok(), Some(Reserve::Bytes(Bytes::gib(2))));
        for bad in ["101%", "-1%", "%", "x", "", "5.5%", "-2Gi"] {
            assert!(reserve(bad).is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn labels_are_those_that_a_selector_can_name() {
        assert!(label("tier", "fast").is_ok());
        assert!(label("example.com/tier", "").is_ok());
        for (key, value) in [("", "x"), ("a,b", "x"), ("a", "x=y"), ("a", "x,y"), ("/a", "x"), ("-a", "x")] {
            assert!(label(key, value).is_err(), "{key}={value} was accepted");
        }
    }
}
