//! What is wrong with a configuration, for the person who must put it right.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Where a setting came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Origin {
    /// A place in the file.
    #[serde(rename_all = "camelCase")]
    File {
        /// The file.
        path: PathBuf,
        /// Line, from 1; 0: the file as a whole.
        line: u64,
    },
    /// A flag, or the environment variable behind it.
    Flag(&'static str),
    /// The default.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Flag(name) => f.write_str(name),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Fault {
    /// Where it is.
    pub origin: Origin,
    /// The key, as `pools[1].reserve`; empty where the file as a whole is meant.
    pub key: String,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        write!(f, "{}; {}", self.problem, self.remedy)
    }
}

/// All faults of a configuration, in the order of the file; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl Faults {
    /// The file itself cannot be read.
    #[must_use]
    pub fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        Self(vec![Fault {
            origin: Origin::File { path: path.to_owned(), line: 0 },
            key: String::new(),
            problem: format!("cannot be read: {error}"),
            remedy: "name a file that exists and can be read with --config".to_owned(),
        }])
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, s) = (self.0.len(), if self.0.len() == 1 { "" } else { "s" });
        write!(f, "the configuration has {n} fault{s}; nothing was started")?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Faults {}
