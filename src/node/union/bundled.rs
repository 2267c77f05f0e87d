//! The MergerFS that came with the program's image.
//!
//! Unions outlive the container that the image was unpacked for, and run on its host. So the program is copied there
//! first, and has to run there: one that needs libraries that the host lacks does not.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::MergerfsSettings;
use super::detect::{PROGRAM_MAX, version_of};
use crate::platform::Host;

/// What `mergerfs.path` is where the administrator has set none.
const DEFAULT: &str = "mergerfs";

impl MergerfsSettings {
    /// Takes the program of the image, where there is one, it runs on this host, and the administrator has named no other.
    /// Copies are kept below `state_dir`, which must exist.
    pub fn prefer_bundled(&mut self, host: &Host, bundled: Option<&Path>, state_dir: &Path) {
        let Some(bundled) = bundled.filter(|_| self.path == Path::new(DEFAULT)) else { return };
        match install_bundled(host, bundled, &state_dir.join("bin")) {
            Ok(copy) => self.path = copy,
            Err(problem) => {
                tracing::warn!(problem, "the image's mergerfs cannot be used; the host's is looked for");
            }
        }
    }
}

/// Copies the program at `bundled` to `<directory>/mergerfs-<version>-<digest>`, unless that is there, and returns the
/// copy. It appears there whole and only when it was seen to run.
///
/// # Errors
/// Why it cannot be used, for the operator.
fn install_bundled(host: &Host, bundled: &Path, directory: &Path) -> Result<PathBuf, String> {
    let content = std::fs::read(bundled).map_err(|e| format!("it cannot be read: {e}"))?;
    if content.len() > PROGRAM_MAX {
        return Err(format!("it has {} bytes, which no mergerfs has", content.len()));
    }
    let digest = short_digest(&content);
    if let Some(copy) = existing(directory, &digest) {
        return Ok(copy);
    }
    let unfinished = directory.join(format!(".mergerfs-{digest}.new"));
    let written = host
        .ensure_directory(directory, 0o755)
        .and_then(|_| host.write_atomic(&unfinished, &content))
        .and_then(|()| host.set_owner_mode(&unfinished, None, None, Some(0o755)));
    written.map_err(|e| format!("it cannot be copied to the host: {e}"))?;
    let installed = version_of(host, &unfinished).and_then(|version| {
        let copy = directory.join(format!("mergerfs-{version}-{digest}"));
        host.rename(&unfinished, &copy).map(|()| copy).map_err(|e| format!("its copy cannot be renamed: {e}"))
    });
    installed.map_err(|problem| {
        // What stays is overwritten at the next start.
        let _ = std::fs::remove_file(&unfinished);
        format!(
            "it does not run on this host (is it a static program, and is {} mounted noexec?): {problem}",
            directory.display()
        )
    })
}

/// The beginning of a program's digest, which tells builds of one version apart.
pub(super) fn short_digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().take(4).map(|b| format!("{b:02x}")).collect()
}

fn existing(directory: &Path, digest: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    entries.map(|e| e.path()).find(|path| {
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        name.starts_with("mergerfs-") && name.ends_with(&format!("-{digest}"))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn program(dir: &Path, script: &str) -> PathBuf {
        let path = dir.join("bundled");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        path
    }

    fn left(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn it_is_copied_once_under_its_version_and_digest_and_can_be_run() {
        let dir = tempfile::tempdir().unwrap();
        let (bin, host) = (dir.path().join("bin"), Host::new());
        let bundled = program(dir.path(), "echo mergerfs v2.42.0");
        let copy = install_bundled(&host, &bundled, &bin).unwrap();
        let name = copy.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("mergerfs-2.42.0-"), "{name}");
        assert_eq!(std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(install_bundled(&host, &bundled, &bin).unwrap(), copy);
        assert_eq!(left(&bin), [name]);
    }

    #[test]
    fn it_is_used_unless_the_administrator_names_another_or_it_does_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::new();
        let settings = |path: &str| MergerfsSettings {
            path: path.into(),
            options: std::collections::BTreeMap::new(),
            start_timeout: std::time::Duration::from_secs(10),
        };
        let bundled = program(dir.path(), "echo mergerfs v2.42.0");
        let mut chosen = settings("/opt/mergerfs");
        chosen.prefer_bundled(&host, Some(&bundled), dir.path());
        assert_eq!(chosen, settings("/opt/mergerfs"));
        let mut open = settings("mergerfs");
        open.prefer_bundled(&host, None, dir.path());
        assert_eq!(open, settings("mergerfs"));
        open.prefer_bundled(&host, Some(&bundled), dir.path());
        assert!(open.path.starts_with(dir.path().join("bin")), "{}", open.path.display());
        let mut without = settings("mergerfs");
        without.prefer_bundled(&host, Some(&program(dir.path(), "exit 127")), dir.path());
        assert_eq!(without, settings("mergerfs"), "the host's is looked for");
    }

    #[test]
    fn one_that_does_not_run_on_the_host_is_told_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        let bundled = program(dir.path(), "echo libfuse.so.3: cannot open shared object file >&2; exit 127");
        let told = install_bundled(&Host::new(), &bundled, &bin).unwrap_err();
        assert!(told.contains("does not run on this host") && told.contains("libfuse.so.3"), "{told}");
        assert_eq!(left(&bin), Vec::<String>::new());
    }
}
