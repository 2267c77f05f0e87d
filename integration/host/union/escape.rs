//! MergerFS's control file lets any uid 0 and any gid 0 change the branches of a union. A pod must not reach it.

use std::process::{Command, Output};

use super::*;

/// Tries to get at a host directory, as a container would: in a mount namespace of its own, with `root` as its root,
/// without capabilities. Prints what it got.
const ATTACK: &str = r#"
cd /view
setfattr -n user.mergerfs.branches -v "+>$SECRET" .mergerfs 2>&1 && echo CONTROL-FILE
setfattr -n user.mergerfs.branches -v "+>$SECRET" /view/.mergerfs 2>&1 && echo CONTROL-FILE
setfattr -n user.mergerfs.branches -v "+>$SECRET" ../.mergerfs 2>&1 && echo CONTROL-FILE-ABOVE
setfattr -n user.mergerfs.branches -v "+>$SECRET" . 2>&1
# Versions before 2.33 change the branch list by this ioctl on any file: _IOW(0xDF, 2, char[4096]).
perl -e 'sysopen(F, "file", 0) or die "perl: $!"; my $b = pack("a4096", "branches=+>$ENV{SECRET}");
    ioctl(F, 0x5000DF02, $b) and print "IOCTL\n"; print "tried the ioctl: $!\n"' 2>&1
[ -e .mergerfs ] && echo SEES-CONTROL-FILE
for top in . .. ../.. ../../.. /view /; do
    cat "$top/top-secret" 2>&1 && echo ESCAPED
done
exit 0
"#;

fn attack(view: &Path, secret: &Path, user: &[&str]) -> String {
    // The view lies at /view of a small root that holds nothing else but the programs.
    let script = r#"
set -e
root=$(mktemp -d /tmp/union-csi-test-root-XXXXXX)
trap 'umount -R "$root" 2>/dev/null; rmdir "$root"' EXIT
mount -t tmpfs tmpfs "$root"
for top in usr bin sbin lib lib64 etc; do
    [ -e "/$top" ] || continue
    mkdir "$root/$top"
    mount --rbind -o ro "/$top" "$root/$top"
done
mkdir "$root/view" "$root/tmp" "$root/dev"
touch "$root/dev/null"
mount --bind /dev/null "$root/dev/null"
mount --bind "$VIEW" "$root/view"
chroot "$root" "$@"
"#;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c", script, "sh", "setpriv"])
        .args(user)
        .args(["--bounding-set", "-all", "--inh-caps", "-all", "sh", "-c", ATTACK])
        .env("VIEW", view)
        .env("SECRET", secret);
    let Output { status, stdout, stderr } = command.output().expect("unshare");
    assert!(status.success(), "the attack itself failed: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8_lossy(&stdout).into_owned()
}

const ROOT_WITHOUT_CAPABILITIES: &[&str] = &["--reuid", "0", "--regid", "0", "--clear-groups"];
const NOBODY_IN_GROUP_0: &[&str] = &["--reuid", "65534", "--regid", "0", "--clear-groups"];

fn secret(machine: &Machine) -> PathBuf {
    let secret = machine.scratch.join("secret");
    std::fs::create_dir(&secret).expect("secret");
    std::fs::write(secret.join("top-secret"), "x").expect("secret");
    secret
}

#[test]
fn a_container_without_capabilities_cannot_leave_the_data_of_its_volume() {
    for user in [ROOT_WITHOUT_CAPABILITIES, NOBODY_IN_GROUP_0] {
        let machine = Machine::with_directories(2);
        let unions = machine.working_agent();
        let spec = machine.spec();
        unions.ensure(&spec).expect("a union");
        std::fs::write(spec.mount_point.join("data/file"), "x").expect("file");
        let before = unions.options(&volume()).expect("options");
        let got = attack(&spec.mount_point.join("data"), &secret(&machine), user);
        for success in ["CONTROL-FILE", "IOCTL", "SEES-", "ESCAPED"] {
            assert!(!got.contains(success), "{user:?}: {got}");
        }
        assert!(got.contains("tried the ioctl"), "{got}");
        assert!(got.contains("No such file"), "the control file is not there at all: {got}");
        assert_eq!(unions.options(&volume()).expect("options")["branches"], before["branches"]);
        unions.stop(&volume(), false).expect("stop");
    }
}

/// The same attack on the union's root works, so the test above can fail.
#[test]
fn the_root_of_a_union_would_be_a_way_out() {
    for user in [ROOT_WITHOUT_CAPABILITIES, NOBODY_IN_GROUP_0] {
        let machine = Machine::with_directories(2);
        let unions = machine.working_agent();
        let spec = machine.spec();
        unions.ensure(&spec).expect("a union");
        let got = attack(&spec.mount_point, &secret(&machine), user);
        assert!(got.contains("CONTROL-FILE") && got.contains("ESCAPED"), "{user:?}: {got}");
        unions.stop(&volume(), false).expect("stop");
    }
}
