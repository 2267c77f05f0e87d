//! Mount flags of a class or a claim, as attributes of a mount.

use super::error::VolumeError;
use super::record::Record;
use super::types::{Access, PublishRequest};
use crate::domain::union::UnionKind;
use crate::platform::mount::{MountAttr, MountEntry};

/// Attributes that every volume's mounts have: what a workload stores must not gain rights from the host.
const ALWAYS: MountAttr =
    MountAttr { read_only: false, nosuid: true, nodev: true, noexec: false, noatime: false };

/// The attributes that `flags` ask for; the last of two opposites counts, as in mount(8).
///
/// # Errors
/// A sentence that names the flag.
pub(super) fn parse(flags: &[String]) -> Result<MountAttr, String> {
    flags.iter().try_fold(ALWAYS, |attr, flag| {
        Ok(match flag.as_str() {
            "ro" => MountAttr { read_only: true, ..attr },
            "rw" => MountAttr { read_only: false, ..attr },
            "noatime" => MountAttr { noatime: true, ..attr },
            "atime" | "relatime" => MountAttr { noatime: false, ..attr },
            "noexec" => MountAttr { noexec: true, ..attr },
            "exec" => MountAttr { noexec: false, ..attr },
            "nodev" | "nosuid" => attr,
            "dev" | "suid" => {
                return Err(format!(
                    "mount flag {flag:?} is refused: volumes are always mounted nosuid,nodev; remove the flag"
                ));
            }
            _ => {
                return Err(format!(
                    "mount flag {flag:?} is not one of ro, rw, noatime, relatime, noexec, exec, nodev, nosuid"
                ));
            }
        })
    })
}

/// The attributes of the mount at the staging path.
pub(super) fn staged(record: &Record) -> Result<MountAttr, VolumeError> {
    let attr = attr_of(record, &record.request.access)?;
    Ok(MountAttr { read_only: attr.read_only || record.reader_only(), ..attr })
}

/// The attributes of the mount at a target: what the stage has and what the request adds.
pub(super) fn published(record: &Record, publish: &PublishRequest) -> Result<MountAttr, VolumeError> {
    if record.kind == UnionKind::Block {
        return Ok(MountAttr::default());
    }
    let (stage, own) = (staged(record)?, attr_of(record, &publish.access)?);
    Ok(MountAttr {
        read_only: stage.read_only || own.read_only || publish.read_only || publish.access_mode.reader_only(),
        nosuid: stage.nosuid || own.nosuid,
        nodev: stage.nodev || own.nodev,
        noexec: stage.noexec || own.noexec,
        noatime: stage.noatime || own.noatime,
    })
}

fn attr_of(record: &Record, access: &Access) -> Result<MountAttr, VolumeError> {
    match access {
        Access::Mount { flags, .. } => {
            parse(flags).map_err(|reason| VolumeError::Request { volume: record.volume().clone(), reason })
        }
        Access::Block => Ok(MountAttr::default()),
    }
}

/// The attributes that a mount has.
pub(super) fn of(entry: &MountEntry) -> MountAttr {
    let has = |option: &str| entry.options.iter().any(|o| o == option);
    MountAttr {
        read_only: has("ro"),
        nosuid: has("nosuid"),
        nodev: has("nodev"),
        noexec: has("noexec"),
        noatime: has("noatime"),
    }
}

/// What a mount with the attributes `found` has otherwise than `wanted`; `None` where nothing.
pub(super) fn difference(found: MountAttr, wanted: MountAttr) -> Option<String> {
    let pairs = [
        ("ro", "rw", found.read_only, wanted.read_only),
        ("nosuid", "suid", found.nosuid, wanted.nosuid),
        ("nodev", "dev", found.nodev, wanted.nodev),
        ("noexec", "exec", found.noexec, wanted.noexec),
        ("noatime", "relatime", found.noatime, wanted.noatime),
    ];
    let name = |on: &'static str, off: &'static str, is: bool| if is { on } else { off };
    let differing: Vec<_> = pairs
        .into_iter()
        .filter(|(_, _, found, wanted)| found != wanted)
        .map(|(on, off, found, wanted)| {
            format!("it is mounted {} and {} is asked for", name(on, off, found), name(on, off, wanted))
        })
        .collect();
    (!differing.is_empty()).then(|| differing.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(list: &[&str]) -> Result<MountAttr, String> {
        parse(&list.iter().map(|&f| f.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_volume_is_always_nosuid_and_nodev() {
        let attr = flags(&[]).unwrap();
        assert!(attr.nosuid && attr.nodev && !attr.read_only && !attr.noexec && !attr.noatime);
        for flag in ["suid", "dev"] {
            assert!(flags(&[flag]).unwrap_err().contains("nosuid,nodev"));
        }
    }

    #[test]
    fn the_last_of_two_opposites_counts() {
        assert!(!flags(&["ro", "rw"]).unwrap().read_only);
        assert!(flags(&["rw", "ro", "noatime", "noexec"]).unwrap().read_only);
    }

    #[test]
    fn an_unknown_flag_is_named() {
        assert!(flags(&["data=writeback"]).unwrap_err().contains("data=writeback"));
        assert!(flags(&["ro,noatime"]).is_err(), "one flag an element");
    }

    #[test]
    fn a_difference_is_told_in_words() {
        let rw = flags(&[]).unwrap();
        let ro = flags(&["ro"]).unwrap();
        assert_eq!(difference(rw, rw), None);
        assert_eq!(difference(ro, rw).unwrap(), "it is mounted ro and rw is asked for");
    }
}
