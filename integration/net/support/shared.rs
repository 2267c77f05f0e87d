//! One network of three machines that tests hand on to each other, since a start takes longer than most tests.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::Result;
use super::network::{Network, Options};

/// Nobody's between two tests.
static SHARED: Mutex<Option<Network>> = Mutex::new(None);

/// What a test must not leave behind: mounts of disks, devices of every kind, exports. A machine with any of it is started
/// anew for the next test.
const LEFT: &str = r#"
    shopt -s nullglob
    left=(/sys/class/nvme/nvme* /sys/kernel/config/nvmet/{subsystems,ports}/* /sys/block/dm-* /sys/block/loop*/loop
        /sys/block/nbd*/pid)
    while read -r from at _; do
        case "$from $at" in
        *' /programs') ;;
        /dev/* | *:/*) left+=("$from at $at") ;;
        esac
    done </proc/mounts
    if [ -e /proc/fs/nfsd/exports ]; then
        while read -r line; do case $line in '#'*) ;; *) left+=("export $line") ;; esac; done </proc/fs/nfsd/exports
    fi
    [ ${#left[@]} -eq 0 ] || { printf '%s\n' "${left[@]}"; exit 1; }
"#;

/// A machine that cannot answer that within this is started anew as well.
const LEFT_BOUND: Duration = Duration::from_secs(20);

/// Runs a test on the network that tests share: three machines, all on, every link whole, nothing exported or attached; the
/// contents of `/disk/data` are anything.
///
/// # Panics
/// As the test does, and when it returns an error; the consoles are printed then.
pub fn on_shared(test: impl FnOnce(&Network) -> Result) {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let network = match shared.take().map(settled) {
        Some(Ok(network)) => network,
        // One that cannot be brought in order says why at its next start, or not.
        Some(Err(_)) | None => match Network::boot_as("shared", &Options::new(3)) {
            Ok(network) => network,
            Err(error) => panic!("{error:?}"),
        },
    };
    finish(test(&network));
    *shared = Some(network);
}

/// Runs a test on a network of its own.
///
/// # Panics
/// As [`on_shared`] does.
pub fn on(options: &Options, test: impl FnOnce(&Network) -> Result) {
    let network = match Network::boot_with(options) {
        Ok(network) => network,
        Err(error) => panic!("{error:?}"),
    };
    finish(test(&network));
}

/// A panic drops the network, which then prints its consoles.
fn finish(ended: Result) {
    if let Err(error) = ended {
        panic!("{error:?}");
    }
}

/// The network as a test finds it.
fn settled(network: Network) -> Result<Network> {
    network.heal_all();
    let mut looking = Vec::new();
    for machine in network.machines() {
        machine.resume();
        // A machine that is off is in order.
        if let Ok(running) = machine.start_command(LEFT, LEFT_BOUND) {
            looking.push((machine, running));
        }
    }
    for (machine, running) in looking {
        if !running.wait().is_ok_and(|output| output.success()) {
            machine.pull_plug();
        }
    }
    network.start_all().map(|()| network)
}

/// Ends the shared network when no test is on it: another one needs the room.
pub(super) fn end_if_idle() {
    if let Ok(mut shared) = SHARED.try_lock() {
        *shared = None;
    }
}
