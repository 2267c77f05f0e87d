//! The options that are used or may be asked for, with what they take.

use snafu::Snafu;

use super::version::Version;

/// An option of a node or a class was refused.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
pub enum InvalidOption {
    /// Not among the allowed ones.
    #[snafu(display("mergerfs option {key:?} cannot be set{hint}; allowed are {}", super::allowed_keys().join(", ")))]
    Unknown {
        /// The option.
        key: String,
        /// Why not, or what was meant; empty or beginning with `: `.
        hint: String,
    },
    /// Not a value that it takes.
    #[snafu(display("mergerfs option {key}={value:?} is not valid: use {allowed}"))]
    Value {
        /// The option.
        key: String,
        /// The value.
        value: String,
        /// What it takes.
        allowed: String,
    },
}

/// What an option takes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// `true` or `false`.
    Bool,
    /// A number within these bounds.
    Number { least: u64, most: u64, unit: &'static str },
    /// Bytes, with `K`, `M`, `G` or `T` behind them where wanted.
    Size,
    /// One of these words.
    Word(&'static [&'static str]),
    /// Plain text without a meaning.
    Text,
}

/// One option.
#[derive(Debug)]
pub(super) struct Known {
    /// Name in the `a-b` style of 2.41.
    pub key: &'static str,
    /// First version that has it.
    pub since: Version,
    /// What earlier versions call the same thing.
    pub formerly: Option<&'static str>,
    /// What it takes.
    pub kind: Kind,
    /// What it does, where nodes and classes may set it.
    pub meaning: Option<&'static str>,
    /// A union without it is not what was asked for.
    pub essential: bool,
}

impl Known {
    /// The name (`a-b` style) that `version` has for it.
    pub(super) fn name(&self, version: Version) -> Option<&'static str> {
        if version >= self.since { Some(self.key) } else { self.formerly }
    }
}

const ALWAYS: Version = Version::MINIMUM;
const DAY: Kind = Kind::Number { least: 0, most: 86_400, unit: "seconds" };
/// Policies that look at the branches and not at paths: a path-preserving one (`ep…`, `msp…`) answers ENOSPC while other
/// branches have room.
const CREATE: &[&str] = &["ff", "lfs", "lus", "mfs", "pfrd", "rand"];

const fn ours(key: &'static str, kind: Kind) -> Known {
    Known { key, since: ALWAYS, formerly: None, kind, meaning: None, essential: false }
}

const fn open(key: &'static str, kind: Kind, meaning: &'static str) -> Known {
    Known { meaning: Some(meaning), ..ours(key, kind) }
}

/// In the order in which they are given: a `category.*` sets all its functions, so `func.*` comes after it.
pub(super) const TABLE: &[Known] = &[
    Known { essential: true, ..ours("fsname", Kind::Text) },
    Known {
        essential: true,
        ..open("category.create", Kind::Word(CREATE), "Which branch gets new files and directories.")
    },
    open("func.getattr", Kind::Word(&["ff", "newest"]), "Which branch's attributes are shown."),
    Known {
        since: Version::new(2, 36, 0),
        ..open(
            "func.readdir",
            Kind::Word(&["seq", "cosr", "cor"]),
            "Whether branches are listed one after the other or at once.",
        )
    },
    Known {
        essential: true,
        ..open("minfreespace", Kind::Size, "A branch with less free space gets no new files.")
    },
    // Later versions move by default, so it must be said either way.
    Known {
        essential: true,
        ..open(
            "moveonenospc",
            Kind::Word(&["false", "ff", "lfs", "lus", "mfs", "pfrd", "rand"]),
            "Whether, and to which branch, a file moves whose branch is full.",
        )
    },
    open(
        "inodecalc",
        Kind::Word(&[
            "hybrid-hash",
            "path-hash",
            "devino-hash",
            "hybrid-hash32",
            "path-hash32",
            "devino-hash32",
        ]),
        "How inode numbers are made.",
    ),
    open(
        "cache.files",
        Kind::Word(&["off", "partial", "full", "auto-full"]),
        "How file contents are kept in the page cache.",
    ),
    open("cache.attr", DAY, "How long the kernel keeps attributes."),
    open("cache.entry", DAY, "How long the kernel keeps names that exist."),
    open("cache.negative-entry", DAY, "How long the kernel keeps names that do not exist."),
    open("cache.readdir", Kind::Bool, "Whether the kernel keeps directory listings."),
    open("cache.symlinks", Kind::Bool, "Whether the kernel keeps the targets of symlinks."),
    open("cache.statfs", DAY, "How long free space is kept for choosing branches."),
    ours("security-capability", Kind::Bool),
    open("statfs-ignore", Kind::Word(&["none", "ro", "nc"]), "Branches that free space leaves out."),
    Known { since: Version::new(2, 40, 2), ..ours("export-support", Kind::Bool) },
    Known {
        since: Version::new(2, 35, 0),
        formerly: Some("threads"),
        ..open(
            "process-thread-count",
            Kind::Number { least: 4, most: 256, unit: "threads" },
            "Threads that work on requests.",
        )
    },
    Known {
        since: Version::new(2, 41, 0),
        ..open(
            "passthrough.io",
            Kind::Word(&["off", "rw"]),
            "Whether the kernel reads and writes the branch's file itself.",
        )
    },
    open("async-read", Kind::Bool, "Lets the kernel send several reads of one file at once."),
    open("dropcacheonclose", Kind::Bool, "Drops a file's pages of the branch when it is closed."),
    open("posix-acl", Kind::Bool, "Whether POSIX access control lists work."),
    // `nosys` makes the kernel stop asking, and with it the question whether the process answers.
    open("xattr", Kind::Word(&["passthrough", "noattr"]), "Whether extended attributes work."),
    Known {
        since: Version::new(2, 40, 0),
        ..open(
            "parallel-direct-writes",
            Kind::Bool,
            "Lets the kernel send several direct writes to one file at once.",
        )
    },
];

/// Options that people may come to ask for, and why they cannot be had.
const REASONS: &[(&str, &str)] = &[
    ("cache.writeback", "it reports a full branch too late"),
    ("follow-symlinks", "it would lead out of the volume"),
    ("link-exdev", "it would lead out of the volume"),
    ("rename-exdev", "it would lead out of the volume"),
    ("symlinkify", "it would lead out of the volume"),
    ("security-capability", "the mount is nosuid, where file capabilities mean nothing"),
    ("fsname", "it names the volume"),
    ("branches", "the plan decides on them"),
    ("threads", "use process-thread-count, which is translated for older versions"),
    ("allow_other", "it is always set"),
];

pub(super) fn find(key: &str) -> Option<&'static Known> {
    TABLE.iter().find(|k| k.key == key)
}

/// A program's own name for an option in the `a-b` style.
pub(super) fn canonical(name: &str) -> String {
    let dashed = name.replace('_', "-");
    TABLE.iter().find(|k| k.formerly == Some(name)).map_or(dashed, |k| k.key.to_owned())
}

/// The options that nodes and classes may set, `a-b` style, in a stable order.
#[must_use]
pub fn allowed_keys() -> Vec<&'static str> {
    allowed().iter().map(|option| option.key).collect()
}

/// An option that nodes and classes may set, for the documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Its name in the `a-b` style.
    pub key: &'static str,
    /// What it takes.
    pub values: String,
    /// What it does; a sentence.
    pub meaning: &'static str,
}

/// The options that nodes and classes may set, by name.
#[must_use]
pub fn allowed() -> Vec<Allowed> {
    let told = |k: &Known| Some(Allowed { key: k.key, values: k.kind.describe(), meaning: k.meaning? });
    let mut all: Vec<_> = TABLE.iter().filter_map(told).collect();
    all.sort_unstable_by_key(|option| option.key);
    all
}

/// Why an option cannot be set that people may come to ask for.
#[must_use]
pub fn reason_against(key: &str) -> Option<&'static str> {
    REASONS.iter().find(|(k, _)| *k == key).map(|(_, why)| *why)
}

/// Checks one option of a node or a class: `key` in the `a-b` style without a prefix.
///
/// # Errors
/// An option that may not be set, or a value that it does not take.
pub fn check_option(key: &str, value: &str) -> Result<(), InvalidOption> {
    let Some(known) = find(key).filter(|k| k.meaning.is_some()) else {
        let dashed = canonical(key);
        let hint = if dashed != key && find(&dashed).is_some_and(|k| k.meaning.is_some()) {
            format!(": write {dashed}")
        } else {
            reason_against(key).map_or(String::new(), |why| format!(": {why}"))
        };
        return UnknownSnafu { key, hint }.fail();
    };
    if known.kind.takes(value) {
        Ok(())
    } else {
        ValueSnafu { key, value, allowed: known.kind.describe() }.fail()
    }
}

/// True where two values of the option mean the same: sizes and booleans are written in more than one way.
#[must_use]
pub fn same(key: &str, a: &str, b: &str) -> bool {
    let (a, b) = (a.trim(), b.trim());
    match find(key).map(|k| k.kind) {
        Some(Kind::Size) => size(a).is_some() && size(a) == size(b),
        Some(Kind::Bool) => boolean(a).is_some() && boolean(a) == boolean(b),
        Some(Kind::Number { .. }) => a.parse::<u64>().is_ok() && a.parse::<u64>() == b.parse::<u64>(),
        Some(Kind::Word(_) | Kind::Text) | None => a == b,
    }
}

impl Kind {
    fn takes(self, value: &str) -> bool {
        match self {
            Self::Bool => matches!(value, "true" | "false"),
            Self::Number { least, most, .. } => {
                plain_number(value).is_some_and(|n| (least..=most).contains(&n))
            }
            Self::Size => size(value).is_some(),
            Self::Word(words) => words.contains(&value),
            Self::Text => !value.is_empty() && !value.contains([',', ':', '=', '\\', '\n']),
        }
    }

    /// What it takes, for people.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Bool => "true or false".to_owned(),
            Self::Number { least, most, unit } => format!("{least} to {most} ({unit})"),
            Self::Size => "a number of bytes, or one followed by K, M, G or T".to_owned(),
            Self::Word(words) => format!("one of {}", words.join(", ")),
            Self::Text => "plain text".to_owned(),
        }
    }
}

/// Digits only: `u64::from_str` would take a sign as well, and other parsers read a leading zero as octal.
fn plain_number(text: &str) -> Option<u64> {
    let octal = text.len() > 1 && text.starts_with('0');
    (!octal && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "1" | "yes" | "on" | "t" => Some(true),
        "false" | "0" | "no" | "off" | "f" => Some(false),
        _ => None,
    }
}

/// MergerFS's sizes: a number, with `K`, `M`, `G` or `T` for powers of 1024.
fn size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'm' | b'M' => (&text[..text.len() - 1], 20),
        b'g' | b'G' => (&text[..text.len() - 1], 30),
        b't' | b'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    plain_number(digits)?.checked_mul(1 << shift)
}
