//! Versions of MergerFS and the words that they use.

use std::fmt;

/// A released version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    major: u16,
    minor: u16,
    patch: u16,
}

/// How a version spells the names of options and of their attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `a_b`: 2.33 and 2.34.
    Underscore,
    /// Old names `a_b`, new ones `a-b`: 2.35 to 2.40.
    Mixed,
    /// `a-b`: 2.41 and later.
    Dash,
}

impl Version {
    /// The oldest version that is used; 2.33.5 is the oldest that was tried. Earlier ones take changes of the branch list by
    /// an ioctl on any file of the union, by which a container could reach the host's files.
    pub const MINIMUM: Self = Self::new(2, 33, 0);

    /// Version `major.minor.patch`.
    #[must_use]
    pub const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Self { major, minor, patch }
    }

    /// The version in what `mergerfs --version` printed: `mergerfs version: 2.33.5`, `mergerfs v2.40.2`, `v2.42.0-3-gab`.
    /// `None` where there is none in it.
    #[must_use]
    pub fn parse(output: &str) -> Option<Self> {
        let line = output.lines().find(|l| l.trim_start().starts_with("mergerfs")).unwrap_or(output);
        line.split_whitespace().find_map(Self::parse_word)
    }

    fn parse_word(word: &str) -> Option<Self> {
        let word = word.strip_prefix('v').unwrap_or(word);
        let mut parts = word.splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let (minor, cut) = leading_number(parts.next()?)?;
        let patch = match parts.next() {
            Some(part) if !cut => leading_number(part).map_or(0, |(n, _)| n),
            _ => 0,
        };
        Some(Self { major, minor, patch })
    }

    /// How this version spells names.
    #[must_use]
    pub fn dialect(self) -> Dialect {
        if self < Self::new(2, 35, 0) {
            Dialect::Underscore
        } else if self < Self::new(2, 41, 0) {
            Dialect::Mixed
        } else {
            Dialect::Dash
        }
    }

    /// True where the program has I/O passthrough; whether it works is up to the kernel and the self-test.
    #[must_use]
    pub fn may_pass_through(self) -> bool {
        self >= Self::new(2, 41, 0)
    }

    /// True where this version is new enough to be used.
    #[must_use]
    pub fn supported(self) -> bool {
        self >= Self::MINIMUM
    }
}

/// The number at the start of `text`, and whether something follows it.
fn leading_number(text: &str) -> Option<(u16, bool)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text[..digits].parse().ok().map(|n| (n, digits < text.len()))
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}.{}.{}", self.major, self.minor, self.patch))
    }
}

impl Dialect {
    /// `key` (`a-b` style) as this dialect spells it.
    #[must_use]
    pub fn spell(self, key: &str) -> String {
        let old = key.replace('-', "_");
        match self {
            Self::Dash => key.to_owned(),
            Self::Underscore => old,
            Self::Mixed if MIXED_WITH_UNDERSCORE.contains(&key) => old,
            Self::Mixed => key.to_owned(),
        }
    }
}

/// Names that kept their underscore up to 2.40 (the list of options in its manual).
const MIXED_WITH_UNDERSCORE: &[&str] = &[
    "async-read",
    "cache.negative-entry",
    "fuse-msg-size",
    "link-cow",
    "posix-acl",
    "security-capability",
    "statfs-ignore",
];
