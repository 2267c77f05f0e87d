//! What MergerFS of each version understands, and what is asked of it.
//!
//! In flow the version of a program and what a union must be; out flows a list of [`Setting`]s in the words of that
//! version, and a way to tell whether the running process really has them. Nothing here starts or asks a process: what
//! a version is said to understand is only believed after the self-test of [`crate::node::union`] has tried it.
//!
//! Invariants: no value holds `,` `:` or `=`, so that no option can smuggle in another one or change the branch list;
//! no option is allowed to users that lets files outside of the branches be reached (`follow-symlinks`, `link-exdev`,
//! `symlinkify`, …) or that breaks what the supervision relies on (`fsname`, `security-capability`, `xattr=nosys`).

mod known;
mod path;
mod version;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use snafu::Snafu;

pub use known::{Allowed, InvalidOption, allowed, allowed_keys, check_option, reason_against, same};
pub use path::{BadBranchPath, branch_list, check_branch_path, parse_branch_list};
pub use version::{Dialect, Version};

use known::{Kind, Known};

use super::Bytes;

/// Server threads of one union. A request that a branch does not answer holds a thread, so there must be more than the
/// default of one a core, or one slow branch stops the others.
pub const THREADS: u32 = 16;

/// The same where a branch lies on another node. While its owner is away it may keep dozens of threads waiting: with the
/// default a union then stops entirely, with so many, local files were answered within 0.24 s at worst (measured).
pub const REMOTE_THREADS: u32 = 32;

/// The option that says how many.
const THREADS_KEY: &str = "process-thread-count";

/// Seconds that the kernel may keep names and attributes. Long, because nothing but the union changes the branches of a
/// volume while it is mounted.
pub const CACHE_SECONDS: u32 = 60;

/// What a union is to be, as far as its options go.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// Source of the mount; names the volume.
    pub fsname: &'a str,
    /// Size of the smallest branch.
    pub smallest: Bytes,
    /// Mounted read-only.
    pub read_only: bool,
    /// Some branch lies on another node: the others must answer while it waits.
    pub remote: bool,
    /// I/O passthrough is to be used; only where it was seen to work.
    pub passthrough: bool,
    /// This program moves a file that outgrows its branch, and was seen to keep it whole. MergerFS 2.33.5 does not: a file
    /// that is written with `O_APPEND` comes out with zeros of its old length in front.
    pub moves: bool,
    /// Options of node and class, keys in the `a-b` style; they win over ours.
    pub overrides: &'a BTreeMap<String, String>,
    /// Keys (`a-b` style) that this program was seen to refuse; left out where they are ours.
    pub refused: &'a [String],
}

/// One option as it is given to a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Key in the `a-b` style, whatever the program calls it.
    pub key: &'static str,
    /// Name in the program's dialect.
    pub name: String,
    /// Value; `None` for a flag, which cannot be read back.
    pub value: Option<String>,
    /// A union without it is not what was asked for. Others are for speed, and are left out where a program refuses them.
    pub essential: bool,
}

impl Setting {
    /// The option as an element of `-o`.
    #[must_use]
    pub fn argument(&self) -> String {
        match &self.value {
            Some(value) => format!("{}={value}", self.name),
            None => self.name.clone(),
        }
    }
}

/// An option was asked for that this program does not have.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
pub enum OptionsError {
    /// Not an allowed option, or not a value of it.
    #[snafu(transparent)]
    Invalid {
        /// Which, and why.
        source: InvalidOption,
    },
    /// The option destroys data with this program.
    #[snafu(display(
        "mergerfs {version} here does not keep files whole that it moves (seen in the self-test at start): remove the \
         option moveonenospc or install a newer mergerfs"
    ))]
    Unsafe {
        /// The version here.
        version: Version,
    },
    /// The option came with a later version.
    #[snafu(display(
        "mergerfs {version} has no option {key}, which came with {since}: remove it or install a newer mergerfs"
    ))]
    TooOld {
        /// The option.
        key: String,
        /// The version here.
        version: Version,
        /// The first version that has it.
        since: Version,
    },
}

/// The smallest free space that a branch must have to get new files, from the size of the smallest branch.
///
/// MergerFS's own default of 4 GiB makes small branches unwritable. What lies below the limit on each branch takes growing
/// files but no new ones, so it should be little; but a file that is larger than what its branch has is told ENOSPC where
/// it cannot be moved, so there it must be more. With `moves` 1/256, at least 1 MiB and at most 64 MiB; without 1/64, at
/// least 1 MiB and at most 1 GiB; never more than a quarter of that branch.
#[must_use]
pub fn minfreespace(smallest: Bytes, moves: bool) -> Bytes {
    let (part, most) = if moves { (256, 64 << 20) } else { (64, 1 << 30) };
    let share = (smallest.get() / part).clamp(1 << 20, most);
    Bytes::new(share.min(smallest.get() / 4))
}

/// The options that a union of this kind gets from a program of `version`, in the order in which they are to be given.
///
/// # Errors
/// An override that is not allowed, or that this version does not have.
pub fn options(version: Version, wanted: &Wanted<'_>) -> Result<Vec<Setting>, OptionsError> {
    for (key, value) in wanted.overrides {
        check_option(key, value)?;
        if key == "moveonenospc" && value != "false" && !wanted.moves {
            return UnsafeSnafu { version }.fail();
        }
    }
    let dialect = version.dialect();
    let mut settings = flags(version, wanted);
    for known in known::TABLE {
        let own = default_value(known, wanted);
        let overridden = wanted.overrides.get(known.key).cloned();
        let asked = overridden.is_some();
        let Some(value) = overridden.or(own) else { continue };
        let Some(name) = known.name(version) else {
            if asked {
                return TooOldSnafu { key: known.key, version, since: known.since }.fail();
            }
            continue;
        };
        let waits = wanted.remote && known.key == THREADS_KEY;
        if !asked && !known.essential && !waits && wanted.refused.iter().any(|k| k == known.key) {
            continue;
        }
        let name = dialect.spell(name);
        settings.push(Setting {
            key: known.key,
            name,
            value: Some(value),
            essential: known.essential || asked || waits,
        });
    }
    Ok(settings)
}

/// Options without a value.
fn flags(version: Version, wanted: &Wanted<'_>) -> Vec<Setting> {
    let flag = |key: &'static str| Setting { key, name: key.to_owned(), value: None, essential: true };
    let mut flags = Vec::new();
    if wanted.read_only {
        flags.push(flag("ro"));
    }
    if version < Version::new(2, 40, 0) {
        // Later ones set both by themselves when they run as root; the mount is checked for `allow_other` in any case.
        flags.push(flag("allow_other"));
        flags.push(flag("use_ino"));
    }
    flags
}

/// What we ask for where nobody asks for something else; `None`: the program's own default.
fn default_value(known: &Known, wanted: &Wanted<'_>) -> Option<String> {
    let value = match known.key {
        "fsname" => wanted.fsname.to_owned(),
        "minfreespace" => minfreespace(wanted.smallest, wanted.moves).get().to_string(),
        // Random, weighted by free space: concurrent creates spread over the branches, and no path is tied to one.
        "category.create" => "pfrd".to_owned(),
        "moveonenospc" if wanted.moves => "pfrd".to_owned(),
        "moveonenospc" => "false".to_owned(),
        "inodecalc" => "hybrid-hash".to_owned(),
        // Pages stay cached over an open while size and time of the file stay the same. Needed for shared mmap before
        // Linux 6.6 and for passthrough.
        "cache.files" => "auto-full".to_owned(),
        "cache.attr" | "cache.entry" => CACHE_SECONDS.to_string(),
        "cache.negative-entry" => "5".to_owned(),
        "cache.readdir" | "cache.symlinks" => "true".to_owned(),
        // For this long new files go to a branch that is full by now: a file can be moved, but where it cannot, each
        // create asks the branches.
        "cache.statfs" => if wanted.moves { "1" } else { "0" }.to_owned(),
        // The mount is nosuid, where file capabilities mean nothing, and the question comes with every write.
        "security-capability" | "export-support" => "false".to_owned(),
        "statfs-ignore" => "ro".to_owned(),
        THREADS_KEY if wanted.remote => REMOTE_THREADS.to_string(),
        THREADS_KEY => THREADS.to_string(),
        "passthrough.io" if wanted.passthrough => "rw".to_owned(),
        "passthrough.io" => "off".to_owned(),
        _ => return None,
    };
    Some(value)
}

/// True where `found`, as read back, means the same as the setting's value.
#[must_use]
pub fn confirmed(setting: &Setting, found: &str) -> bool {
    setting.value.as_deref().is_none_or(|wanted| same(setting.key, wanted, found))
}

/// The option that a program complained about, in the `a-b` style, from what it printed when it refused to start
/// (``fuse: unknown option `x=1'`` of 2.33, `unknown option - x=1` of later ones).
#[must_use]
pub fn refused_option(output: &str) -> Option<String> {
    output.lines().find_map(|line| {
        let rest = line.split_once("unknown option")?.1;
        let rest = rest.trim_start_matches([' ', '-', ':', '`', '\'', '"']);
        let end = rest.find(['=', '\'', '"', '`', ' ']).unwrap_or(rest.len());
        let name = &rest[..end];
        (!name.is_empty()).then(|| known::canonical(name))
    })
}

/// The value of each setting's kind, for documentation: allowed keys with what they take.
#[must_use]
pub fn allowed_values(key: &str) -> Option<String> {
    known::find(key).filter(|k| k.meaning.is_some()).map(|k| Kind::describe(&k.kind))
}
