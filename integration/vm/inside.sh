# What the scenarios use inside the machine (dash). Lines that the outside looks for go to the serial line.

# A failed expectation ends the machine; the outside reports the line.
fail() {
    echo "FAIL: $*"
    tail -n 25 /tmp/agent.log 2>/dev/null
    union-csi status 2>&1
    poweroff -f
    sleep 60
}

# expect WHAT COMMAND...: the command succeeds.
expect() {
    what=$1
    shift
    "$@" >/tmp/said 2>&1 || { cat /tmp/said; fail "$what"; }
}

# eventually WHAT COMMAND...: the command succeeds within a minute.
eventually() {
    what=$1 deadline=$(($(seconds) + 60))
    shift
    until "$@" >/tmp/said 2>&1; do
        [ "$(seconds)" -lt "$deadline" ] || { cat /tmp/said; fail "$what did not come within a minute"; }
        sleep 0.5
    done
}

seconds() { cut -d. -f1 /proc/uptime; }

device() { grep -lx "$1" /sys/block/vd*/serial | cut -d/ -f4; }

# make_disk NAME MKFS-COMMAND...: a filesystem on the disk.
make_disk() {
    name=$1
    shift
    "$@" "/dev/$(device "$name")" >/tmp/said 2>&1 || { cat /tmp/said; fail "$*"; }
}

# mount_disks NAME[,OPTION...]...: each at /disks/NAME. The directories beneath are on the machine's root.
mount_disks() {
    for disk in "$@"; do
        name=${disk%%,*} options=
        case $disk in *,*) options="-o ${disk#*,}" ;; esac
        mkdir -p "/disks/$name"
        # shellcheck disable=SC2086 # it is split on purpose
        mount $options "/dev/$(device "$name")" "/disks/$name" || fail "disk $name cannot be mounted"
    done
}

# configure STATE-DIRECTORY POOL-DISK...: writes the agent's configuration to standard output.
configure() {
    echo 'nodeName: box'
    echo "stateDir: $1"
    echo 'measureInterval: 2s'
    echo 'csi: { allowedTargets: [/srv] }'
    echo 'pools:'
    shift
    for disk in "$@"; do echo "  - { name: $disk, path: /disks/$disk, reserve: 0 }"; done
}

# start_agent POOL-DISK...: its state is on the disk called state.
start_agent() {
    configure /disks/state/union-csi "$@" >/tmp/agent.yaml
    export UNION_CSI_CONFIG=/tmp/agent.yaml
    setpriv --no-new-privs --inh-caps -all --bounding-set "-all,$(cat /capabilities)" union-csi agent >>/tmp/agent.log 2>&1 &
    AGENT=$!
    eventually 'a ready agent' curl -fsS http://127.0.0.1:9830/readyz
}

# As the service manager does at shutdown: the agent, then every other process, then the mounts.
shut_down() {
    kill "$AGENT"
    wait "$AGENT"
    killall mergerfs 2>/dev/null
    sleep 0.5
    tac /proc/mounts | while read -r _ point _; do
        case $point in /srv/* | /disks/*) umount "$point" || fail "$point does not unmount at shutdown" ;; esac
    done
}

# figure JSON-PATH EXPRESSION: the expression over what the API answers, as `a`.
figure() { curl -fsS "http://127.0.0.1:9830$1" | python3 -c "import json, sys; a = json.load(sys.stdin); print($2)"; }
is() {
    found=$(figure "$1" "$2")
    [ "$found" = "$3" ] || { echo "$2 of $1 is $found, not $3"; return 1; }
}
mounted() { grep -q " $1 " /proc/self/mounts; }
not() { ! "$@"; }

healthy() {
    is /v1/status '(a["ready"], a["problems"], a["volumes"]["abnormal"])' '(True, [], 0)' &&
        is "/v1/volumes/$1" 'a["state"]' healthy
}

# write NAME KIB: a file in the current directory, told as acknowledged when fsync has returned.
write() {
    dd if=/dev/urandom of="$1" bs=1k count="$2" conv=fsync 2>/dev/null || fail "$1 cannot be written"
    echo "ACK $(sha256sum "$1")"
}

# Every file that was ever acknowledged to the outside is whole. Run in the directory that they were written in.
acknowledged_is_whole() {
    sha256sum -c /acknowledged >/tmp/said 2>&1 || { grep -v ': OK$' /tmp/said; fail "acknowledged files are gone or differ"; }
    echo "WHOLE: $(wc -l </acknowledged) acknowledged files"
}

# What is on the disks is what the store knows of, and nothing else.
no_orphans() {
    figure /v1/volumes '"\n".join(b["id"] for v in a for b in v["branches"])' | sort | grep . >/tmp/known
    for disk in "$@"; do ls "/disks/$disk/branches"; done | sort >/tmp/present
    cmp -s /tmp/known /tmp/present
}
