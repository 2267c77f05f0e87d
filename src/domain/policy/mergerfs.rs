//! The options of mergerfs that a StorageClass or a node may set, and their values.
//!
//! An option is listed where no value allowed for it can lose data, stop the union from answering, open the host to a
//! workload, or take away what the driver relies on (its branches, its control file, its mount options). Values are
//! checked against closed lists because mergerfs 2.33.5 accepts a bad policy at run time and crashes at the next create.
//! Names and meanings: <https://trapexit.github.io/mergerfs/latest/config/options/>.

use std::collections::BTreeMap;

use super::ParamError;
use super::parameters::nearest;

/// An option of mergerfs.
#[derive(Clone, Copy, Debug)]
pub struct MergerfsOption {
    /// Its name, in the `a-b` style.
    pub name: &'static str,
    /// What it may be set to.
    pub values: Values,
    /// What it does; a sentence.
    pub meaning: &'static str,
}

/// What an option may be set to.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// A whole number, with its unit.
    Number {
        /// The smallest.
        min: u32,
        /// The largest.
        max: u32,
        /// What it counts.
        unit: &'static str,
    },
    /// A number of bytes as mergerfs writes it: digits, then nothing, `K`, `M`, `G` or `T`, which are powers of 1024.
    Size,
}

impl Values {
    fn admit(self, value: &str) -> bool {
        match self {
            Self::OneOf(words) => words.contains(&value),
            Self::Number { min, max, .. } => {
                plain_number(value).is_some_and(|n| (u64::from(min)..=u64::from(max)).contains(&n))
            }
            Self::Size => {
                let (digits, scale) = match value.as_bytes().last() {
                    Some(b'K') => (&value[..value.len() - 1], 10),
                    Some(b'M') => (&value[..value.len() - 1], 20),
                    Some(b'G') => (&value[..value.len() - 1], 30),
                    Some(b'T') => (&value[..value.len() - 1], 40),
                    _ => (value, 0),
                };
                // mergerfs counts in a signed 64-bit number.
                plain_number(digits).is_some_and(|n| n <= (i64::MAX as u64) >> scale)
            }
        }
    }

    fn describe(self) -> String {
        match self {
            Self::OneOf(words) => words.join(", "),
            Self::Number { min, max, unit } => format!("a number of {unit} from {min} to {max}"),
            Self::Size => "a number of bytes, with K, M, G or T for powers of 1024".to_owned(),
        }
    }
}

/// Digits only: no sign, no space, no leading zero that some parsers take for octal.
fn plain_number(text: &str) -> Option<u64> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let octal = text.len() > 1 && text.starts_with('0');
    if plain && !octal { text.parse().ok() } else { None }
}

/// Policies that choose a branch for something new. Left out: `all` and `erofs`, which make it on every branch or none;
/// the path-preserving `ep*`, which answer ENOSPC while other branches have room.
const CREATE: Values = Values::OneOf(&[
    "pfrd", "mfs", "lfs", "lus", "ff", "rand", "newest", "msppfrd", "mspmfs", "msplfs", "msplus",
]);

/// The same, for files that did not fit where they were.
const MOVE: Values = Values::OneOf(&[
    "true", "false", "pfrd", "mfs", "lfs", "lus", "ff", "rand", "newest", "msppfrd", "mspmfs", "msplfs",
    "msplus",
]);

const SEARCH: Values = Values::OneOf(&["ff", "newest"]);
const SWITCH: Values = Values::OneOf(&["true", "false"]);
const SECONDS: Values = Values::Number { min: 0, max: 86_400, unit: "seconds" };
const THREADS: Values = Values::Number { min: 1, max: 256, unit: "threads" };

macro_rules! options {
    ($($name:literal, $values:expr, $meaning:literal;)*) => {
        &[$(MergerfsOption { name: $name, values: $values, meaning: $meaning }),*]
    };
}

const OPTIONS: &[MergerfsOption] = options! {
    "async-read", SWITCH, "Lets the kernel send several reads of one file at once.";
    "cache.attr", SECONDS, "How long the kernel keeps attributes.";
    "cache.entry", SECONDS, "How long the kernel keeps names that exist.";
    "cache.files", Values::OneOf(&["off", "partial", "full", "auto-full"]), "How file contents are kept in the page cache.";
    "cache.negative-entry", SECONDS, "How long the kernel keeps names that do not exist.";
    "cache.readdir", SWITCH, "Whether the kernel keeps directory listings.";
    "cache.statfs", SECONDS, "How long free space is kept for choosing branches.";
    "cache.symlinks", SWITCH, "Whether the kernel keeps the targets of symlinks.";
    "category.create", CREATE, "Which branch gets new files and directories.";
    "dropcacheonclose", SWITCH, "Tells the kernel to drop a file's pages of the branch when it is closed.";
    "flush-on-close", Values::OneOf(&["never", "always", "opened-for-write"]), "When closing a file flushes it.";
    "func.create", CREATE, "Which branch gets new files.";
    "func.getattr", SEARCH, "Which branch's attributes are shown.";
    "func.mkdir", CREATE, "Which branch gets new directories.";
    "func.mknod", CREATE, "Which branch gets new special files.";
    "func.readdir", Values::OneOf(&["seq", "cosr", "cor"]), "Whether branches are listed one after the other or at once.";
    "func.symlink", CREATE, "Which branch gets new symlinks.";
    "fuse-msg-size", Values::Number { min: 32, max: 1024, unit: "pages" }, "The largest request.";
    "inodecalc", Values::OneOf(&["hybrid-hash", "hybrid-hash32", "path-hash", "path-hash32", "devino-hash", "devino-hash32"]), "How inode numbers are made; passing those of the branches on would let them meet.";
    "minfreespace", Values::Size, "A branch with less free space gets no new files.";
    "moveonenospc", MOVE, "Whether, and to which branch, a file moves whose branch is full.";
    "parallel-direct-writes", SWITCH, "Lets the kernel send several direct writes to one file at once.";
    "passthrough.io", Values::OneOf(&["off", "rw"]), "Whether the kernel reads and writes the branch's file itself.";
    "posix-acl", SWITCH, "Whether POSIX access control lists work.";
    "process-thread-count", THREADS, "Threads that work on requests.";
    "process-thread-queue-depth", Values::Number { min: 0, max: 1024, unit: "requests" }, "Requests that may wait for a thread.";
    "read-thread-count", THREADS, "Threads that read requests.";
    "readahead", Values::Number { min: 0, max: 65_536, unit: "KiB" }, "How far the kernel reads ahead.";
    "statfs", Values::OneOf(&["base", "full"]), "Whether free space counts all branches or those that have the path.";
    "statfs-ignore", Values::OneOf(&["none", "ro", "nc"]), "Branches that free space leaves out.";
    "threads", THREADS, "The older name of read-thread-count.";
    "xattr", Values::OneOf(&["passthrough", "noattr"]), "Whether extended attributes work; nosys would take the control file away too.";
};

/// Every option that may be set, in alphabetical order.
#[must_use]
pub const fn options() -> &'static [MergerfsOption] {
    OPTIONS
}

/// Checks options given without the `mergerfs.` prefix; what comes back has its keys in the `a-b` style.
///
/// # Errors
/// Every fault there is, in the order of the keys.
pub fn parse(given: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Vec<ParamError>> {
    let mut options = BTreeMap::new();
    let mut faults = Vec::new();
    for (key, value) in given {
        let name = key.replace('_', "-");
        match OPTIONS.iter().find(|option| option.name == name) {
            None => faults.push(ParamError::Unknown {
                key: key.clone(),
                nearest: nearest(key, OPTIONS.iter().map(|option| option.name)),
            }),
            Some(option) if !option.values.admit(value) => faults.push(ParamError::Value {
                key: key.clone(),
                value: value.clone(),
                allowed: option.values.describe(),
            }),
            Some(_) => {
                if options.insert(name.clone(), value.clone()).is_some_and(|other| other != *value) {
                    faults.push(ParamError::Conflict {
                        key: key.clone(),
                        other: name,
                        reason: "they are two spellings of one option; give one of them".to_owned(),
                    });
                }
            }
        }
    }
    if faults.is_empty() { Ok(options) } else { Err(faults) }
}
