# The small virtual machine of the scripts in this folder; sourced, not run.
# QEMU in software, Debian's kernel package unpacked, everything in one initramfs. Nothing of the host is touched.
# shellcheck shell=bash

CACHE="$ROOT/target/vm"

# The programs that the agent uses, and those that the tests use beside them.
AGENT_PROGRAMS=(mergerfs setpriv mkfs.ext4 mkfs.xfs mkfs.btrfs blkid chattr)
TEST_PROGRAMS=(mount umount losetup lsattr tune2fs unshare dd df truncate sync fallocate blockdev btrfs xfs_io modprobe
    dash bash perl grep id curl dmsetup setfacl getfacl setfattr getfattr)
# What the kernel package has as modules. The last ones are only used where something asks for them.
MODULES=(crc32c_generic virtio_pci virtio_blk virtio_rng loop ext4 xfs btrfs fuse overlay quota_v2 nfsd nfsv4 dm-mod)
# Which parts of Python's library the tests' short programs need; the whole is larger than all the rest.
PYTHON_LIBRARY=(encodings collections json re importlib sqlite3)

# Which kernel: Debian's own of this release, or the one of its backports.
KERNEL=${KERNEL:-stable}

# vm_prepare: checks for the programs, unpacks the kernel once, and makes the directory for this run's files, WORK.
vm_prepare() {
    need qemu-system-x86_64 qemu-system-x86 busybox busybox-static cpio cpio depmod kmod setfacl acl curl curl xfs_io xfsprogs
    need_host_programs
    vm_kernel
    WORK=$(mktemp -d /tmp/union-csi-vm.XXXXXX)
    QEMU=
    trap vm_cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# vm_kernel: unpacks the kernel's package, once, at KERNEL_FILES; RELEASE is what it calls itself.
vm_kernel() {
    local apt=() package
    case $KERNEL in
    stable) KERNEL_FILES="$CACHE/kernel" ;;
    backports) KERNEL_FILES="$CACHE/kernel-backports" ;;
    *) die "KERNEL is stable or backports, not $KERNEL." ;;
    esac
    mkdir -p "$CACHE"
    # Several may run at the same time.
    exec 9>"$CACHE/lock"
    flock 9
    if ! compgen -G "$KERNEL_FILES/lib/modules/*/modules.dep" >/dev/null; then
        rm -rf "$KERNEL_FILES" "$CACHE"/*.deb
        if [ "$KERNEL" = backports ]; then
            # Package lists of their own: this machine's configuration stays as it is.
            mkdir -p "$CACHE"/apt/{lists/partial,cache/archives/partial}
            (. /etc/os-release && echo "deb http://deb.debian.org/debian ${VERSION_CODENAME:-none}-backports main") >"$CACHE/apt/sources.list"
            apt=(-o "Dir::Etc::SourceList=$CACHE/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
                -o "Dir::State::Lists=$CACHE/apt/lists" -o "Dir::Cache=$CACHE/apt/cache")
        fi
        apt_get "${apt[@]}" update -qq
        package=$(apt-cache "${apt[@]}" depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*-amd64\).*/\1/p' | head -n 1)
        [ -n "$package" ] || { echo "no kernel package linux-image-amd64 ($KERNEL) in the package lists"; exit 77; }
        step "unpacking $package"
        (cd "$CACHE" && apt-get "${apt[@]}" download -qq "$package" 2>/dev/null &&
            dpkg-deb -x "$package"_*.deb "$KERNEL_FILES" && rm -rf ./*.deb apt)
        # Newer packages have their modules compressed, which the smallest readers do not know.
        find "$KERNEL_FILES/lib/modules" -name '*.ko.xz' -exec xz -d {} +
        depmod -b "$KERNEL_FILES" "$(basename "$KERNEL_FILES"/lib/modules/*)"
    fi
    exec 9>&-
    RELEASE=$(basename "$KERNEL_FILES"/lib/modules/*)
}

# shellcheck disable=SC2317 # called by the trap
vm_cleanup() {
    [ -z "$QEMU" ] || kill -9 "$QEMU" 2>/dev/null || true
    rm -rf "$WORK"
}

# vm_add FILE...: libraries and programs, with what they are linked to, at their own places.
vm_add() {
    local file
    for file in "$@"; do
        [ -e "$WORK/root$file" ] || install -D "$file" "$WORK/root$file"
        { ldd "$file" 2>/dev/null || true; } | sed -n 's/^[^/]*\(\/[^ ]*\).*/\1/p' | while read -r file; do
            [ -e "$WORK/root$file" ] || install -D "$file" "$WORK/root$file"
        done
    done
}

# vm_tree: the programs and the kernel's modules, at WORK/root.
vm_tree() {
    local root="$WORK/root" program module file
    mkdir -p "$root"/{bin,sbin,usr/bin,usr/sbin,usr/lib,proc,sys,dev,tmp,etc,run,lib/modules,lib64,mnt,srv}
    ln -s /proc/self/mounts "$root/etc/mtab"
    ln -s ../tmp "$root/var"
    for program in "${AGENT_PROGRAMS[@]}" "${TEST_PROGRAMS[@]}"; do
        file=$(command -v "$program") || die "$program is missing on this machine."
        vm_add "$(readlink -f "$file")"
        [ -e "$root/usr/bin/$program" ] || ln -s "$(readlink -f "$file")" "$root/usr/bin/$program"
    done
    if [ -x /usr/bin/python3 ]; then
        local library
        library=$(/usr/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
        vm_add "$(readlink -f /usr/bin/python3)"
        ln -sf "$(readlink -f /usr/bin/python3)" "$root/usr/bin/python3"
        mkdir -p "$root$library/lib-dynload"
        cp "$library"/*.py "$root$library/"
        for module in "${PYTHON_LIBRARY[@]}"; do cp -r "$library/$module" "$root$library/"; done
        find "$root$library" -name __pycache__ -prune -exec rm -rf {} +
        for module in "$library"/lib-dynload/{_json,_sqlite3,mmap}.*; do [ ! -e "$module" ] || vm_add "$module"; done
    fi
    install "$(command -v busybox)" "$root/bin/busybox"
    cp /etc/mke2fs.conf "$root/etc/"
    printf 'root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$root/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
    for module in "${MODULES[@]}"; do
        modprobe -d "$KERNEL_FILES" -S "$RELEASE" --show-depends "$module" 2>/dev/null |
            sed -n 's/^insmod \([^ ]*\).*/\1/p' | while read -r file; do
            install -D "$file" "$root/lib/modules/$RELEASE/${file#*"/lib/modules/$RELEASE/"}"
        done
    done
    depmod -b "$root" "$RELEASE" 2>/dev/null
}

# What of systemd makes a machine that starts a service, and is shut down: no devices, journal, or network.
SYSTEMD_UNITS=({basic,sysinit,multi-user,sockets,timers,paths,slices,swap,network,local-fs,local-fs-pre,shutdown,umount,final,poweroff,reboot}.target
    systemd-{poweroff,reboot}.service)

# vm_systemd: systemd, as this machine has it, at WORK/root.
vm_systemd() {
    local from root="$WORK/root" unit program
    from=$(dirname "$(readlink -f "$(command -v systemd)")")
    for program in systemd systemd-shutdown; do vm_add "$from/$program"; done
    vm_add "$(readlink -f "$(command -v systemctl)")"
    mkdir -p "$root/etc/systemd/system/multi-user.target.wants" "$root$from/system"
    for unit in "${SYSTEMD_UNITS[@]}"; do cp "$from/system/$unit" "$root$from/system/"; done
    ln -s multi-user.target "$root$from/system/default.target"
    # Where it was built to look for itself.
    [ -e "$root/lib/systemd" ] || ln -s "$from" "$root/lib/systemd"
    printf '[Manager]\nLogTarget=console\nDefaultStandardOutput=null\n' >"$root/etc/systemd/system.conf"
    printf '%032d\n' 1 >"$root/etc/machine-id"
    echo "exec $from/systemd" >"$WORK/exec-systemd"
}

# vm_root: everything that each boot needs, as WORK/base.cpio.gz. What it runs is /run-this, which vm_start adds.
vm_root() {
    local root="$WORK/root"
    vm_tree
    cat >"$root/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
# Not busybox's shell: it prefers its own programs to those of PATH.
ln -sf /usr/bin/dash /bin/sh
ln -sf /usr/bin/bash /bin/bash
hostname vm
export PATH=/usr/bin:/usr/sbin:/bin:/sbin TERM=dumb RUST_BACKTRACE=1 HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs -o size=80% tmp /tmp
mount -t cgroup2 cgroup /sys/fs/cgroup
for module in ${MODULES[*]}; do modprobe \$module; done
ip link set lo up
cd /tmp
# Another first process may take the place of this one.
[ ! -e /start ] || . /start
/bin/sh /run-this
sync
poweroff -f
INIT
    chmod +x "$root/init"
    vm_pack "$root" >"$WORK/base.cpio.gz"
}

# vm_pack DIRECTORY: the directory as a compressed archive; the kernel unpacks several, one after the other.
vm_pack() { (cd "$1" && find . -print0 | cpio --null --create --format=newc --quiet | gzip -1); }

# vm_start CONSOLE DIRECTORY [QEMU-ARGUMENT...]: boots the base with what is in the directory, in the background, as QEMU.
vm_start() {
    local console=$1 extra=$2
    shift 2
    { cat "$WORK/base.cpio.gz" && vm_pack "$extra"; } >"$WORK/initramfs"
    : >"$console"
    qemu-system-x86_64 \
        -accel tcg,thread=multi,tb-size=64 -cpu max -m 1536 -smp 1 -nodefaults -no-user-config -display none -no-reboot \
        -kernel "$KERNEL_FILES/boot/vmlinuz-$RELEASE" -initrd "$WORK/initramfs" \
        -append 'console=ttyS0 quiet panic=-1 mitigations=off audit=0 random.trust_cpu=on' \
        -serial file:"$console" -device virtio-rng-pci "$@" 2>"$WORK/qemu.err" &
    QEMU=$!
}

# vm_wait SECONDS CONSOLE: waits until the machine has powered itself off.
vm_wait() {
    local deadline=$((SECONDS + $1))
    while kill -0 "$QEMU" 2>/dev/null; do
        [ "$SECONDS" -lt "$deadline" ] || {
            kill -9 "$QEMU"
            tail -n 60 "$2"
            die "the machine did not end by itself within $1 s; see $2"
        }
        sleep 0.2
    done
    wait "$QEMU" || { cat "$WORK/qemu.err"; die "QEMU failed."; }
    QEMU=
}

# vm_kill: the machine loses its power.
vm_kill() {
    kill -9 "$QEMU"
    wait "$QEMU" 2>/dev/null || true
    QEMU=
}
