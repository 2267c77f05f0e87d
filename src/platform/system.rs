//! What the machine's service manager tells.

use std::ffi::OsString;
use std::time::Duration;

use super::Host;

/// How long it may take to answer.
const BOUND: Duration = Duration::from_secs(3);

impl Host {
    /// Whether the machine is being switched off or rebooted: `SystemState` of systemd (org.freedesktop.systemd1(5)) is "stopping"
    /// from the moment that this was asked for. False where systemd is not there.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        let args = ["show", "--property=SystemState", "--value"].map(OsString::from);
        self.run("systemctl", &args, BOUND).is_ok_and(|state| state.trim() == "stopping")
    }
}
