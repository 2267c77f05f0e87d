//! Which MergerFS program runs the unions of this node.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::bundled::short_digest;
use crate::domain::mergerfs::Version;
use crate::platform::{Host, HostError};

/// How long `mergerfs --version` may take.
const VERSION_BOUND: Duration = Duration::from_secs(5);

/// Larger than any build of MergerFS (0.5 MB dynamic, 4 MB static).
pub(super) const PROGRAM_MAX: usize = 64 << 20;

/// A program to run unions with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// What is run.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
    /// Options (`a-b` style) that it was seen to refuse and that a union can do without.
    pub refused: Vec<String>,
    /// It was seen to move a file that outgrows its branch, whole.
    pub moves: bool,
}

/// Finds the configured program: an absolute path, or a name in `PATH`.
pub(super) fn find(host: &Host, configured: &Path) -> Result<Program, String> {
    let path = locate(configured)?;
    let version = version_of(host, &path)?;
    if !version.supported() {
        return Err(format!(
            "{} is mergerfs {version}, which is older than {} and lets containers out of their volumes: install a \
             newer one, or set mergerfs.path to it",
            path.display(),
            Version::MINIMUM
        ));
    }
    Ok(Program { path, version, refused: Vec::new(), moves: false })
}

fn locate(configured: &Path) -> Result<PathBuf, String> {
    let remedy = "install mergerfs, or set mergerfs.path to the program";
    let candidates: Vec<PathBuf> = if configured.is_absolute() {
        vec![configured.to_owned()]
    } else if configured.components().count() == 1 {
        // Also where administration programs lie, which the PATH of a service may leave out.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let standard = ["/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin", "/bin", "/sbin"];
        std::env::split_paths(&path)
            .chain(standard.iter().map(PathBuf::from))
            .filter(|d| d.is_absolute())
            .map(|d| d.join(configured))
            .collect()
    } else {
        return Err(format!(
            "mergerfs.path is {}: give an absolute path or a plain name",
            configured.display()
        ));
    };
    candidates
        .iter()
        .find_map(|c| std::fs::canonicalize(c).ok().filter(|p| p.is_file()))
        .ok_or_else(|| format!("{} was not found: {remedy}", configured.display()))
}

pub(super) fn version_of(host: &Host, path: &Path) -> Result<Version, String> {
    let printed = run_version(host, path)
        .map_err(|error| format!("{error}: make it executable, or set mergerfs.path to another"))?;
    Version::parse(&printed).ok_or_else(|| {
        let shown: String = printed.chars().take(80).filter(|c| !c.is_control()).collect();
        format!(
            "{} --version printed {shown:?}, which is no version of mergerfs: set mergerfs.path to a mergerfs",
            path.display()
        )
    })
}

fn run_version(host: &Host, path: &Path) -> Result<String, HostError> {
    host.run(&path.to_string_lossy(), &[OsString::from("--version")], VERSION_BOUND)
}

/// Copies the program to `<directory>/mergerfs-<version>-<digest>` and returns the copy, so that replacing the package
/// never changes the program of a running union or of one that is started to heal it. A copy that exists is used as it
/// is; none is ever overwritten. Where programs cannot be run from there (noexec), the original stays.
pub(super) fn keep_copy(host: &Host, program: Program, directory: &Path) -> Program {
    match copy(host, &program, directory) {
        Ok(path) if run_version(host, &path).is_ok() => Program { path, ..program },
        Ok(path) => {
            tracing::warn!(
                copy = %path.display(),
                program = %program.path.display(),
                "programs cannot be run from the state directory (noexec?); unions run the original, which must stay \
                 until they are restarted"
            );
            program
        }
        Err(error) => {
            tracing::warn!(
                %error,
                program = %program.path.display(),
                "mergerfs could not be copied to the state directory; unions run the original"
            );
            program
        }
    }
}

fn copy(host: &Host, program: &Program, directory: &Path) -> Result<PathBuf, HostError> {
    let content = host.read_file(&program.path, PROGRAM_MAX)?.unwrap_or_default();
    let digest = short_digest(&content);
    let target = directory.join(format!("mergerfs-{}-{digest}", program.version));
    if target.exists() {
        return Ok(target);
    }
    host.ensure_directory(directory, 0o755)?;
    let unfinished = directory.join(format!(".mergerfs-{digest}.new"));
    host.write_atomic(&unfinished, &content)?;
    host.set_owner_mode(&unfinished, None, None, Some(0o755))?;
    host.rename(&unfinished, &target)?;
    Ok(target)
}
