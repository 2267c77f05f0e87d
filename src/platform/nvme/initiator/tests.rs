use super::*;
use crate::platform::Host;
use crate::platform::nvme::KernelFiles;

fn put(root: &Path, name: &str, value: &str) {
    let path = root.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, value).unwrap();
}

fn controller(root: &Path, name: &str, nqn: &str, transport: &str, state: &str) {
    let at = format!("sys/devices/{name}");
    std::fs::create_dir_all(root.join("sys/class/nvme")).unwrap();
    std::os::unix::fs::symlink(root.join(&at), root.join("sys/class/nvme").join(name)).unwrap();
    put(root, &format!("{at}/transport"), &format!("{transport}\n"));
    put(root, &format!("{at}/subsysnqn"), &format!("{nqn}\n"));
    put(root, &format!("{at}/state"), &format!("{state}\n"));
    put(root, &format!("{at}/address"), "traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.2\n");
    put(root, &format!("{at}/ctrl_loss_tmo"), "off\n");
}

#[test]
fn the_kernel_tells_which_options_it_knows() {
    let options = parse_options(
        "instance=-1,cntlid=-1,transport=%s,traddr=%s,keep_alive_tmo=%d,hdr_digest,dhchap_secret=%s\n",
    );
    assert!(["traddr", "hdr_digest", "dhchap_secret"].iter().all(|o| options.contains(*o)), "{options:?}");
    assert!(!options.contains("tls"));
    let dir = tempfile::tempdir().unwrap();
    let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
    assert_eq!(nvme.connect_options().unwrap(), None, "a kernel without the device");
}

#[test]
fn answers_and_addresses_are_understood_or_refused() {
    assert_eq!(parse_instance("instance=12,cntlid=3\n").as_deref(), Some("nvme12"));
    assert_eq!(parse_instance("cntlid=3"), None);
    assert_eq!(parse_instance("instance=-1,cntlid=-1"), None);
    assert_eq!(parse_address("traddr=fd00::1,trsvcid=4420"), Some("[fd00::1]:4420".parse().unwrap()));
    assert_eq!(parse_address("traddr=10.0.0.1"), None);
    assert_eq!(parse_address(""), None);
    for (text, state) in [
        ("live", ControllerState::Live),
        ("connecting", ControllerState::Trying),
        ("deleting (no IO)", ControllerState::Going),
        ("dead", ControllerState::Going),
        ("something new", ControllerState::Going),
    ] {
        assert_eq!(ControllerState::parse(text), state, "{text}");
    }
}

#[test]
fn connections_by_other_transports_are_none_of_ours_and_the_address_is_only_read_while_live() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    controller(root, "nvme0", "nqn.disk", "pcie", "live");
    controller(root, "nvme1", "nqn.a", "tcp", "live");
    controller(root, "nvme2", "nqn.b", "tcp", "connecting");
    // One that is going away has no state any more.
    put(root, "sys/class/nvme/nvme3/transport", "tcp\n");
    let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
    let found = nvme.controllers().unwrap();
    assert_eq!(found.iter().map(|c| c.nqn.as_str()).collect::<Vec<_>>(), ["nqn.a", "nqn.b"]);
    assert_eq!(found[0].address, Some("10.0.0.1:4420".parse().unwrap()));
    assert_eq!((found[1].state, found[1].address), (ControllerState::Trying, None));
    assert!(nvme.set_loss_timeout("nvme2", -1).unwrap());
    assert!(!nvme.set_loss_timeout("nvme9", -1).unwrap(), "one that is gone is told");
    assert!(!nvme.disconnect("nvme9").unwrap());
    assert_eq!(std::fs::read_to_string(root.join("sys/class/nvme/nvme2/ctrl_loss_tmo")).unwrap(), "-1f\n");
}

#[test]
fn devices_are_found_by_their_subsystem_not_by_their_name() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for (name, nqn, uuid, hidden) in
        [("nvme0n1", "nqn.b", "bb", "0"), ("nvme1n1", "nqn.a", "aa", "0"), ("nvme1c4n1", "nqn.a", "aa", "1")]
    {
        let at = format!("sys/block/{name}");
        put(root, &format!("{at}/device/subsysnqn"), nqn);
        put(root, &format!("{at}/uuid"), uuid);
        put(root, &format!("{at}/hidden"), hidden);
        put(root, &format!("{at}/dev"), "259:5\n");
        put(root, &format!("{at}/uevent"), &format!("MAJOR=259\nMINOR=5\nDEVNAME={name}\n"));
        put(root, &format!("{at}/queue/max_sectors_kb"), "1280");
    }
    put(root, "sys/block/sda/device/subsysnqn", "nqn.a");
    let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
    let found = nvme.subsystem_devices("nqn.a").unwrap();
    let seen: Vec<_> = found.iter().filter(|d| !d.hidden).collect();
    assert_eq!(seen.len(), 1, "{found:?}");
    assert_eq!((seen[0].path.clone(), seen[0].device), (root.join("dev/nvme1n1"), (259, 5)));
    nvme.limit_requests(&found, 1024).unwrap();
    let limit = |name: &str| {
        std::fs::read_to_string(root.join(format!("sys/block/{name}/queue/max_sectors_kb"))).unwrap()
    };
    assert_eq!([limit("nvme0n1"), limit("nvme1n1"), limit("nvme1c4n1")], ["1280", "1024", "1024"]);
}

#[test]
fn of_one_subsystem_only_its_own_connections_are_told_and_of_all_each_device_with_its_subsystem() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    controller(root, "nvme4", "nqn.a", "tcp", "live");
    controller(root, "nvme5", "nqn.b", "tcp", "live");
    controller(root, "nvme6", "nqn.a", "pcie", "live");
    for (name, nqn) in [("nvme1n1", "nqn.a"), ("nvme2n1", "nqn.b")] {
        put(root, &format!("sys/block/{name}/device/subsysnqn"), nqn);
    }
    let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
    let names = |nqn: &str| nvme.controllers_of(nqn).unwrap().into_iter().map(|c| c.name).collect::<Vec<_>>();
    assert_eq!(names("nqn.a"), ["nvme4"]);
    assert_eq!(names("nqn.c"), Vec::<String>::new());
    assert_eq!(nvme.controller("nvme4").unwrap().unwrap().nqn, "nqn.a");
    assert_eq!(nvme.controller("nvme9").unwrap(), None);
    let devices = nvme.devices().unwrap();
    let all: Vec<_> = devices.iter().map(|d| (d.name.as_str(), d.nqn.as_str())).collect();
    assert_eq!(all, [("nvme1n1", "nqn.a"), ("nvme2n1", "nqn.b")]);
}

#[test]
fn what_a_connection_proves_to_have_is_hidden_from_all_but_root() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
    nvme.hide_keys("nvme0").unwrap();
    let path = dir.path().join("sys/class/nvme/nvme0/dhchap_secret");
    put(dir.path(), "sys/class/nvme/nvme0/dhchap_secret", "secret");
    nvme.hide_keys("nvme0").unwrap();
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
}
