//! Keys that this node shares with others, beside its own state: what was exported with a key must be exported with the same
//! one after a reboot, and attached with it again after a crash of the agent, also while no API server answers.
//!
//! A file is what this node's kernel was told, not what the store has now. Only root reads it; whoever does reads the branches
//! too.

use std::path::{Path, PathBuf};

use snafu::{ResultExt, Snafu};

use crate::domain::Secret;
use crate::platform::{Host, HostError};
use crate::store::Pair;

/// Directory of the state directory.
const DIRECTORY: &str = "keys";
/// The same of the keys for TLS, in files of their own: agents of before understand the others.
const TLS_DIRECTORY: &str = "keys-tls";

/// Longer than any key is.
const LIMIT: usize = 1024;

/// A key is not kept, or cannot be read.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum KeyError {
    /// The file.
    #[snafu(display("cannot {action} the key for {pair}: {source}"))]
    File {
        /// What was to be done.
        action: &'static str,
        /// Whose key.
        pair: Pair,
        /// Why not.
        source: HostError,
    },
    /// It holds something else.
    #[snafu(display("{} does not hold the key for {pair}: remove it, and attach the volumes between them anew", path.display()))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Whose key it should hold.
        pair: Pair,
    },
}

/// The files.
#[derive(Clone, Debug)]
pub struct KeyFiles {
    host: Host,
    directory: PathBuf,
    tls: PathBuf,
}

impl KeyFiles {
    /// Those of this state directory.
    #[must_use]
    pub fn new(host: &Host, state_dir: &Path) -> Self {
        let (directory, tls) = (state_dir.join(DIRECTORY), state_dir.join(TLS_DIRECTORY));
        Self { host: host.clone(), directory, tls }
    }

    /// The key that was kept last; `None` where there was none.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn kept(&self, pair: &Pair) -> Result<Option<Secret>, KeyError> {
        let read = |path: &Path| {
            let found = self.host.read_file(path, LIMIT);
            found.with_context(|_| key_error::FileSnafu { action: "read", pair: pair.clone() })
        };
        let path = path(&self.directory, pair);
        let Some(chap) = read(&path)? else { return Ok(None) };
        let tls = read(&self::path(&self.tls, pair))?;
        match Secret::read(&chap, tls.as_deref()) {
            Some(key) => Ok(Some(key)),
            None => key_error::MalformedSnafu { path, pair: pair.clone() }.fail(),
        }
    }

    /// Keeps this key, or that there is none, down to the disk.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn keep(&self, pair: &Pair, key: Option<&Secret>) -> Result<(), KeyError> {
        // What cannot be read is written anew.
        if self.kept(pair).is_ok_and(|kept| kept.as_ref() == key) {
            return Ok(());
        }
        let written = self
            .put(&self.tls, pair, key.and_then(Secret::tls))
            .and_then(|()| self.put(&self.directory, pair, key.map(Secret::chap)));
        written.with_context(|_| key_error::FileSnafu { action: "keep", pair: pair.clone() })
    }

    fn put(&self, directory: &Path, pair: &Pair, text: Option<&str>) -> Result<(), HostError> {
        let path = path(directory, pair);
        match text {
            Some(text) => self
                .host
                .ensure_directory(&directory.join(pair.owner.as_str()), 0o700)
                .and_then(|_| self.host.write_atomic(&path, text.as_bytes())),
            None => self.host.remove_file(&path).map(drop),
        }
    }
}

fn path(directory: &Path, pair: &Pair) -> PathBuf {
    directory.join(pair.owner.as_str()).join(pair.consumer.as_str())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::store::keys::generate;

    #[test]
    fn what_is_kept_is_found_by_the_same_pair_only_and_by_nobody_but_root() {
        let directory = tempfile::tempdir().unwrap();
        let files = KeyFiles::new(&Host::new(), directory.path());
        let pair = |owner: &str, consumer: &str| Pair {
            owner: owner.parse().unwrap(),
            consumer: consumer.parse().unwrap(),
        };
        let (ours, key) = (pair("a", "b"), generate());
        assert_eq!(files.kept(&ours).unwrap(), None);
        files.keep(&ours, None).unwrap();
        files.keep(&ours, Some(&key)).unwrap();
        files.keep(&ours, Some(&key)).unwrap();
        assert_eq!(files.kept(&ours).unwrap(), Some(key));
        assert_eq!(files.kept(&pair("b", "a")).unwrap(), None);
        for path in ["keys", "keys/a", "keys/a/b", "keys-tls", "keys-tls/a", "keys-tls/a/b"] {
            let mode = std::fs::metadata(directory.path().join(path)).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{path}");
        }
        let next = generate();
        files.keep(&ours, Some(&next)).unwrap();
        assert_eq!(files.kept(&ours).unwrap(), Some(next.clone()));
        std::fs::write(directory.path().join("keys/a/b"), &next.chap()[..20]).unwrap();
        let error = files.kept(&ours).unwrap_err().to_string();
        assert!(error.contains("keys/a/b") && !error.contains("DHHC"), "{error}");
        let of_before = next.without_tls();
        files.keep(&ours, Some(&of_before)).unwrap();
        assert_eq!(files.kept(&ours).unwrap(), Some(of_before));
        files.keep(&ours, None).unwrap();
        assert_eq!(files.kept(&ours).unwrap(), None);
    }
}
