use std::io;

use super::*;
use crate::node::transport::Generation;
use crate::platform::nvme::KernelFiles;
use crate::store::keys::generate;

fn id() -> ExportId {
    ExportId { branch: "pvc-1-0".parse().unwrap(), generation: Generation(3) }
}

fn endpoint() -> Endpoint {
    Endpoint { address: "[fd00::1]:4420".parse().unwrap(), name: names::subsystem(&id()).unwrap() }
}

fn identity() -> HostIdentity {
    HostIdentity::of(&"n".parse().unwrap(), "m")
}

fn consumer(root: &std::path::Path) -> NvmeConsumer {
    let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
    NvmeConsumer::new(&Host::new(), nvme, identity())
}

#[test]
fn a_connection_asks_for_what_was_measured() {
    let options = connect_options(&identity(), &endpoint(), None, None, Patience::Wait);
    let line = options.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(",");
    for part in ["traddr=fd00::1,", "trsvcid=4420,", "reconnect_delay=2,ctrl_loss_tmo=-1,keep_alive_tmo=5"] {
        assert!(line.contains(part), "{line}");
    }
    assert!(!line.contains("dhchap") && !line.contains("tls") && !line.contains('\n'));
    let key = generate();
    let options = connect_options(&identity(), &endpoint(), Some(&key), Some(KeySerial(77)), Patience::Wait);
    let of = |name: &str| options.iter().find(|(k, _)| *k == name).map(|(_, v)| v.clone());
    assert_eq!(of("dhchap_secret"), Some(key.chap().to_owned()));
    assert!(of("dhchap_ctrl_secret").is_some_and(|k| k != key.chap()), "each direction has its own key");
    assert_eq!((of("tls").as_deref(), of("tls_key").as_deref()), (Some(""), Some("77")));
}

#[test]
fn patience_is_counted_in_attempts() {
    let after = |s| loss_timeout(Patience::GiveUpAfter(Duration::from_secs(s)));
    assert_eq!(loss_timeout(Patience::Wait), -1);
    assert_eq!(after(0), 2, "one attempt is made");
    assert_eq!(after(60), 24, "12 attempts of 5 s");
    assert_eq!(after(u64::MAX), i64::from(i32::MAX));
}

#[test]
fn each_errno_of_connecting_means_one_thing() {
    let meant = |errno: Errno| {
        let source = io::Error::from(errno);
        refusal(
            &id(),
            &endpoint(),
            false,
            HostError::Syscall { call: "connect", subject: "x".into(), source },
        )
    };
    for errno in [Errno::IO, Errno::NOKEY, Errno::KEYREJECTED] {
        assert!(matches!(meant(errno), TransportError::Refused { .. }), "{errno}");
    }
    for errno in
        [Errno::CONNREFUSED, Errno::TIMEDOUT, Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::CONNRESET]
    {
        assert!(matches!(meant(errno), TransportError::Unreachable { .. }), "{errno}");
    }
    for errno in [Errno::INVAL, Errno::NOMEM] {
        assert!(matches!(meant(errno), TransportError::Kernel { .. }), "{errno}");
    }
    let late = HostError::Timeout { action: "connecting", subject: "x".into(), seconds: 1 };
    assert!(matches!(refusal(&id(), &endpoint(), false, late), TransportError::Unreachable { .. }));
}

#[test]
fn an_endpoint_of_another_branch_is_refused_before_anything_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let consumer = consumer(dir.path());
    let mut other = id();
    other.generation = Generation(4);
    let foreign = consumer.attach(&other, &endpoint(), None, Patience::Wait).unwrap_err();
    assert!(matches!(foreign, TransportError::Foreign { .. }), "{foreign}");
}

#[test]
fn what_is_to_be_encrypted_is_not_attached_by_a_node_that_encrypts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let consumer = consumer(dir.path());
    let readable = consumer.tls_key(&id(), &endpoint(), Some(&generate())).unwrap_err();
    assert!(matches!(readable, TransportError::Readable { .. }), "{readable}");
    let plain = generate().without_tls();
    assert_eq!(consumer.tls_key(&id(), &endpoint(), Some(&plain)).unwrap(), None);
}

#[test]
fn what_is_attached_is_read_from_sysfs_and_what_is_not_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let consumer = consumer(root);
    assert_eq!(consumer.attachments().unwrap(), []);
    assert!(matches!(consumer.set_patience(&id(), Patience::Wait), Err(TransportError::Absent { .. })));
    consumer.detach(&id()).unwrap();
    consumer.force_detach(&id()).unwrap();
    let put = |name: &str, value: &str| {
        let path = root.join("sys").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, value).unwrap();
    };
    let nqn = endpoint().name;
    for (name, nqn, state) in [
        ("nvme0", nqn.as_str(), "connecting"),
        ("nvme1", nqn.as_str(), "live"),
        ("nvme2", "nqn.other", "live"),
    ] {
        put(&format!("class/nvme/{name}/transport"), "tcp");
        put(&format!("class/nvme/{name}/subsysnqn"), nqn);
        put(&format!("class/nvme/{name}/state"), state);
        put(&format!("class/nvme/{name}/address"), "traddr=fd00::1,trsvcid=4420");
    }
    put("block/nvme7n1/device/subsysnqn", &nqn);
    put("block/nvme7n1/uuid", &names::uuid(&id()));
    put("block/nvme7n1/uevent", "DEVNAME=nvme7n1");
    let expected = Attached {
        id: id(),
        endpoint: Some(endpoint()),
        at: Some(root.join("dev/nvme7n1")),
        link: Link::Live,
    };
    assert_eq!(consumer.attachments().unwrap(), [expected]);
    put("block/nvme7n1/uuid", "another");
    assert_eq!(consumer.attachments().unwrap()[0].at, None, "a device of something else is not ours");
}
