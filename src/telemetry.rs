//! Logs and metrics of the agent.

use tracing_subscriber::EnvFilter;

/// Starts logging on standard error. `filter` was checked with the configuration. A second call changes nothing: the
/// first subscriber stays.
pub fn init(filter: &str, json: bool) {
    let filter = EnvFilter::new(filter);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Only a second call can fail, and what it wanted exists then.
    let _ = if json { builder.json().flatten_event(true).try_init() } else { builder.try_init() };
}
