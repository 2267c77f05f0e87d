//! Branch lists: `PATH=MODE:PATH=MODE`.

use std::path::Path;

use snafu::Snafu;

/// A path cannot stand in a branch list.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(display(
    "{path:?} cannot be a branch: {reason} (MergerFS reads ':' '=' ',' '*' '?' '[' '{{' '~' and '\\' as syntax)"
))]
pub struct BadBranchPath {
    path: String,
    reason: &'static str,
}

/// The path as text that a branch list can hold.
///
/// # Errors
/// It is not absolute, not UTF-8, or holds a character that MergerFS would read as syntax.
pub fn check_branch_path(path: &Path) -> Result<&str, BadBranchPath> {
    let bad = |reason| BadBranchPathSnafu { path: path.to_string_lossy(), reason }.build();
    let text = path.to_str().ok_or_else(|| bad("it is not UTF-8"))?;
    if !path.is_absolute() {
        return Err(bad("it is not absolute"));
    }
    if text.contains([':', '=', ',', '*', '?', '[', ']', '{', '}', '~', '\\'])
        || text.contains(char::is_control)
    {
        return Err(bad("it holds a character with a meaning"));
    }
    Ok(text)
}

/// The branch list for these paths, all with one mode.
///
/// # Errors
/// See [`check_branch_path`].
pub fn branch_list<P: AsRef<Path>>(paths: &[P], read_only: bool) -> Result<String, BadBranchPath> {
    let mode = if read_only { "RO" } else { "RW" };
    let parts: Result<Vec<_>, _> =
        paths.iter().map(|p| check_branch_path(p.as_ref()).map(|p| format!("{p}={mode}"))).collect();
    Ok(parts?.join(":"))
}

/// Paths and modes of a branch list as read back; a missing mode is `RW`, a third field is left out.
#[must_use]
pub fn parse_branch_list(list: &str) -> Vec<(String, String)> {
    list.trim()
        .split(':')
        .filter(|b| !b.is_empty())
        .map(|branch| {
            let (path, mode) = branch.split_once('=').unwrap_or((branch, "RW"));
            let mode = mode.split(',').next().unwrap_or("RW");
            (path.to_owned(), mode.to_owned())
        })
        .collect()
}
