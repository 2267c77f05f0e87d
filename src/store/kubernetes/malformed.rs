//! Stored objects that this version does not understand: told once a version, and counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::wire::Misread;
use crate::store::object::Version;

/// Those of one kind.
#[derive(Debug)]
pub(super) struct Malformed {
    kind: &'static str,
    /// By name, the version that was told of.
    now: Mutex<BTreeMap<String, Version>>,
    /// Versions told of.
    told: AtomicU64,
}

impl Malformed {
    pub(super) const fn new(kind: &'static str) -> Self {
        Self { kind, now: Mutex::new(BTreeMap::new()), told: AtomicU64::new(0) }
    }

    fn now(&self) -> MutexGuard<'_, BTreeMap<String, Version>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells of it, unless this version of it was told of.
    pub(super) fn note(&self, misread: &Misread) {
        let told = self.now().insert(misread.name.clone(), misread.version.clone());
        if told.as_ref() == Some(&misread.version) {
            return;
        }
        self.told.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            object.kind = self.kind,
            object.name = misread.name,
            object.version = misread.version.0,
            reason = misread.reason,
            "stored object left out: not understood"
        );
    }

    /// The object of that name is gone, or is understood by now.
    pub(super) fn forget(&self, name: &str) {
        let mut now = self.now();
        if !now.is_empty() {
            now.remove(name);
        }
    }

    /// How many versions of objects were told of.
    pub(super) fn told(&self) -> u64 {
        self.told.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn misread(version: &str) -> Misread {
        Misread {
            name: "a".to_owned(),
            uid: String::new(),
            version: Version(version.to_owned()),
            reason: "odd".to_owned(),
        }
    }

    #[test]
    fn each_version_of_an_object_is_told_of_once() {
        let malformed = Malformed::new("Branch");
        for version in ["1", "1", "2", "2"] {
            malformed.note(&misread(version));
        }
        assert_eq!(malformed.told(), 2);
        malformed.forget("a");
        malformed.forget("another");
        malformed.note(&misread("2"));
        assert_eq!(malformed.told(), 3, "it was understood in between");
    }
}
