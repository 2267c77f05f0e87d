# Shared by the scripts of this folder; sourced, not run.
# shellcheck shell=bash

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
    BOLD=$'\e[1m' RED=$'\e[31m' GREEN=$'\e[32m' YELLOW=$'\e[33m' PLAIN=$'\e[0m'
else
    BOLD='' RED='' GREEN='' YELLOW='' PLAIN=''
fi

# A step of a longer run, with the time since the script began.
step() { printf '%s[%3ds] %s%s\n' "$BOLD" "$SECONDS" "$*" "$PLAIN"; }
warn() { printf '%s%s%s\n' "$YELLOW" "$*" "$PLAIN" >&2; }
die() {
    printf '%s%s%s\n' "$RED" "$*" "$PLAIN" >&2
    exit 1
}

need_root() { [ "$(id -u)" = 0 ] || die "$0 mounts filesystems and must run as root."; }

# apt-get, one at a time: parts of the tests that run at the same time may each have something to install, and so may the
# machine itself.
apt_get() { flock /var/cache/apt apt-get -o DPkg::Lock::Timeout=300 "$@"; }

# need PROGRAM PACKAGE ...: installs the Debian/Ubuntu packages of the programs that are missing.
need() {
    local missing=()
    while [ $# -gt 0 ]; do
        command -v "$1" >/dev/null 2>&1 || missing+=("$2")
        shift 2
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    command -v apt-get >/dev/null 2>&1 ||
        die "These are missing and this machine has no apt-get: ${missing[*]}. Install them and try again."
    step "installing ${missing[*]}"
    local log
    log=$(mktemp)
    if ! { apt_get update -qq && DEBIAN_FRONTEND=noninteractive apt_get install -y -qq --no-install-recommends "${missing[@]}"; } \
        >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "apt-get could not install ${missing[*]}."
    fi
    rm -f "$log"
}

# What the agent itself needs on a host.
need_host_programs() {
    need mergerfs mergerfs mkfs.ext4 e2fsprogs mkfs.xfs xfsprogs mkfs.btrfs btrfs-progs losetup mount \
        setpriv util-linux setfattr attr curl curl
}

# What the nodes of a test's Kubernetes cluster run. Their packages must not start services.
need_kube_programs() {
    local policy=/usr/sbin/policy-rc.d ours='' status=0 busybox=busybox
    # A container of one program has no libraries. ldd fails on a program that needs none.
    if command -v busybox >/dev/null && ldd "$(command -v busybox)" >/dev/null 2>&1; then
        busybox='a static busybox'
    fi
    if ! command -v containerd >/dev/null && [ ! -e "$policy" ]; then
        ours=1
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    # What needs it ends the script when it cannot: the file must not stay.
    (need containerd containerd runc runc /usr/lib/cni/bridge containernetworking-plugins "$busybox" busybox-static \
        ip iproute2 nsenter util-linux mkfs.ext4 e2fsprogs mkfs.xfs xfsprogs) || status=$?
    [ -z "$ours" ] || rm -f "$policy"
    [ "$status" = 0 ] || exit "$status"
}

# A C compiler for one dependency, and Rust at the version of rust-toolchain.toml: the distribution's rustup, else rustup's
# own installer.
need_rust() {
    need cc build-essential
    PATH="$HOME/.cargo/bin:$PATH"
    command -v cargo >/dev/null 2>&1 && return 0
    command -v apt-get >/dev/null 2>&1 && apt_get update -qq
    if apt-cache show rustup >/dev/null 2>&1; then
        need rustup rustup
        return 0
    fi
    need curl curl
    step "installing rustup into $HOME/.cargo"
    curl --proto '=https' --tlsv1.2 -fsS https://sh.rustup.rs | sh -s -- -y --quiet --no-modify-path --profile minimal --default-toolchain none ||
        die "Rust is missing and could not be installed. Install rustup (https://rustup.rs) and try again."
}

# Go for the conformance suite; an older one fetches what go.mod asks for since 1.21.
need_go() {
    command -v go >/dev/null 2>&1 || need go golang-go
    local minor
    minor=$(go env GOVERSION | sed 's/go1\.\([0-9]*\).*/\1/')
    [ "$minor" -ge 21 ] || {
        echo "Go 1.21 or later is needed, $(go env GOVERSION) is installed: see https://go.dev/doc/install"
        return 77
    }
}

# Runs a command in mount and PID namespaces of its own: whatever it leaves, however it ends, is gone with them, unions that
# outlive their agent by design included. The shell in between reaps, as an init does.
private() {
    # shellcheck disable=SC2016 # the inner shell expands it
    UNION_CSI_TEST_OUTSIDE=$(readlink /proc/self/ns/mnt) \
        unshare --mount --propagation private --pid --fork --kill-child --mount-proc -- \
        bash -c '"$@" & wait $!' private "$@"
}
