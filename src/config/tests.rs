use super::*;
use crate::domain::pool::{Media, Reserve};

fn read(text: &str) -> Result<Config, Faults> {
    parse(Path::new("agent.yaml"), text, &Overrides::default(), "host1")
}

fn with(text: &str, change: impl FnOnce(&mut Overrides)) -> Result<Config, Faults> {
    let mut overrides = Overrides::default();
    change(&mut overrides);
    parse(Path::new("agent.yaml"), text, &overrides, "host1")
}

fn faults(text: &str) -> String {
    read(text).expect_err("the text should be refused").to_string()
}

#[test]
fn an_empty_file_gives_the_defaults() {
    for text in ["", "# nothing\n", "---\n"] {
        let config = read(text).unwrap();
        assert_eq!(config.node.as_str(), "host1");
        assert_eq!(config.csi_socket, Path::new("/var/lib/union-csi/csi.sock"));
        assert_eq!(config.http_listen, DEFAULT_LISTEN.parse().ok());
        assert_eq!(config.allowed_targets.len(), 4);
        assert_eq!(config.measure_interval, Duration::from_secs(5));
        assert_eq!(config.max_volumes, None);
    }
}

#[test]
fn the_sample_is_valid_and_states_the_defaults() {
    let text = include_str!("../../config/agent.yaml");
    let config = read(text).unwrap();
    assert_eq!(config.pools.len(), 2);
    assert_eq!(config.pools[0].media, Some(Media::Hdd));
    let defaults = read("").unwrap();
    assert_eq!(Config { pools: Vec::new(), ..config }, defaults, "what the sample sets is the default");
    for key in keys::KEYS {
        let name = key.path.split(['.', '[']).next().unwrap();
        assert!(text.contains(&format!("{name}:")), "the sample lacks {}", key.path);
    }
}

#[test]
fn directories_of_pools_are_read_and_shown_as_they_were_given() {
    let text = "poolsUnder:\n  - path: /srv/union\n  - path: /srv/bulk\n    reserve: 20Gi\n    labels: {tier: slow}\n";
    let config = read(text).unwrap();
    let [first, second] = config.pools_under.as_slice() else { panic!("{:?}", config.pools_under) };
    assert_eq!((first.path.as_path(), first.reserve), (Path::new("/srv/union"), Reserve::Percent(5)));
    assert_eq!(second.reserve, Reserve::Bytes(crate::domain::Bytes::gib(20)));
    assert_eq!(second.labels["tier"], "slow");
    assert_eq!(read(&yaml_text(&config)), Ok(config));

    let wrong = faults(
        "poolsUnder:\n  - path: srv\n  - {}\n  - path: /a\n    labels: {t: [x]}\n  - path: /a\n    glob: x\n  - path: \
         /var/lib/union-csi/p\n",
    );
    for part in
        ["poolsUnder[0].path", "poolsUnder[1].path", "labels.t", "listed already", "glob", "inside stateDir"]
    {
        assert!(wrong.contains(part), "{part} in {wrong}");
    }
}

#[test]
fn all_faults_are_told_at_once_with_line_and_remedy() {
    insta::assert_snapshot!(faults(
        r#"nodename: a
nodeName: Not_Valid
stateDir: var/lib
csi:
  endpoint: tcp://127.0.0.1:5000
  allowedTargets: [/, mnt]
http:
  listen: localhost
  hostNames: ["http://nas"]
pools:
  - name: one
    path: /mnt/one
    reserve: 120%
    madia: ssd
  - name: one
    path: /mnt/one/inner
    media: floppy
    labels:
      tier: true
      "a,b": x
  - path: mnt/two
  - name: four
    path: /mnt/one
  - nonsense
measureInterval: 5
mergerfs:
  startTimeout: 1d
  options: [a, b]
createTimeout: 2h
maxVolumes: 0
log:
  filter: "=="
  format: xml
"#
    ));
}

#[test]
fn broken_yaml_is_told_with_its_line() {
    for (text, line) in
        [("pools:\n  - name: [a\n", 2..=3), ("a: 1\nb: 2\nstateDir: /a\nstateDir: /b\n", 4..=4)]
    {
        let Err(Faults(faults)) = read(text) else { panic!("{text:?} was accepted") };
        let Origin::File { line: at, .. } = faults[0].origin else { panic!("{faults:?}") };
        assert!(line.contains(&at), "{faults:?}");
    }
    assert!(faults("- a\n- b\n").contains("is a list, not a mapping"));
}

#[test]
fn a_flag_wins_over_the_file() {
    let text = "nodeName: filed\nstateDir: /a\nhttp:\n  listen: 127.0.0.1:1\n";
    let config = with(text, |o| {
        o.node_name = Some("typed".into());
        o.state_dir = Some("/b".into());
        o.http_listen = Some("off".into());
        o.endpoint = Some("unix:///c/s.sock".into());
        o.pools = vec!["p=/mnt/p".into()];
    })
    .unwrap();
    assert_eq!(config.node.as_str(), "typed");
    assert_eq!(config.state_dir, Path::new("/b"));
    assert_eq!(config.http_listen, None);
    assert_eq!(config.csi_socket, Path::new("/c/s.sock"));
    assert_eq!(config.pools[0].path, Path::new("/mnt/p"));
    assert_eq!(config.pools[0].reserve, Reserve::Percent(5));
}

#[test]
fn a_bad_flag_is_a_fault_that_names_the_flag() {
    let faults = with("", |o| {
        o.http_listen = Some("9830".into());
        o.pools = vec!["p".into()];
    })
    .unwrap_err()
    .to_string();
    assert!(faults.contains("--http-listen: \"9830\" is not an address and port"), "{faults}");
    assert!(faults.contains("--pool: \"p\" is not NAME=PATH"), "{faults}");
}

#[test]
fn a_socket_path_that_the_kernel_would_refuse_is_a_fault_of_what_made_it_long() {
    let long = format!("/{}", "x".repeat(107));
    let endpoint = faults(&format!("csi:\n  endpoint: unix://{long}\n"));
    assert!(endpoint.contains("agent.yaml:2: csi.endpoint: the socket's path has 108 bytes"), "{endpoint}");
    let state = faults(&format!("stateDir: {long}\n"));
    assert!(state.contains("agent.yaml:1: stateDir: the socket's path has"), "{state}");
    let fits = format!("/{}", "x".repeat(106));
    assert!(read(&format!("csi:\n  endpoint: unix://{fits}\n")).is_ok());
}

#[test]
fn a_pool_inside_the_state_directory_is_refused() {
    let told = faults("stateDir: /srv/state\npools:\n  - {name: a, path: /srv/state/pool}\n");
    assert!(told.contains("agent.yaml:3: pool a: /srv/state/pool lies inside stateDir"), "{told}");
}

#[test]
fn the_effective_configuration_read_again_is_itself() {
    let text = "nodeName: \"1\"\nhttp: {listen: 'off'}\nmaxVolumes: 7\nnodeLabels: {a: 'true', b: ''}\n\
                mergerfs: {options: {cache.files: \"off\", statfs-ignore: ro}, startTimeout: 1m30s}\n\
                pools:\n  - {name: a, path: /mnt/a, reserve: 1Gi, labels: {t: '1'}}\n  - {name: b, path: /mnt/b, media: nvme}\n";
    let config = read(text).unwrap();
    let shown = yaml_text(&config);
    assert_eq!(read(&shown).map_err(|f| format!("{f}\n{shown}")), Ok(config));
}

#[test]
fn a_mergerfs_option_that_no_class_may_set_is_refused_here_too() {
    let told = faults("mergerfs:\n  options:\n    allow_root: true\n    cache.files: sometimes\n");
    assert!(told.contains("agent.yaml:3: mergerfs.options.allow_root: "), "{told}");
    assert!(told.contains("agent.yaml:4: mergerfs.options.cache.files: "), "{told}");
}

#[test]
fn a_named_file_that_is_missing_is_a_fault() {
    let missing = Path::new("/nonexistent/agent.yaml");
    let told = load(Some(missing), &Overrides::default()).unwrap_err().to_string();
    assert!(told.contains("/nonexistent/agent.yaml: cannot be read"), "{told}");
}

fn in_pod(text: &str) -> Config {
    with(text, |o| o.api_server = Some(ApiServer { host: "10.96.0.1".into(), port: 443 })).unwrap()
}

#[test]
fn kubernetes_is_used_in_a_pod_or_with_a_kubeconfig_and_else_the_embedded_store() {
    assert_eq!(read("").unwrap().kubernetes, None);
    assert_eq!(in_pod("store: local\n").kubernetes, None);
    let pod = in_pod("").kubernetes.unwrap();
    assert!(matches!(pod.access, Access::InCluster { .. }));
    assert_eq!((pod.namespace.as_str(), pod.lease_duration), ("union", Duration::from_secs(12)));
    let file = in_pod("kubernetes: {kubeconfig: /etc/k}\n").kubernetes.unwrap();
    assert_eq!(file.access, Access::Kubeconfig("/etc/k".into()), "what was set wins over the pod's account");
    let flag = with("", |o| o.kubeconfig = Some("/k".into())).unwrap().kubernetes.unwrap();
    assert_eq!(flag.access, Access::Kubeconfig("/k".into()));
}

#[test]
fn with_kubernetes_the_socket_and_the_mounts_are_where_the_kubelet_looks() {
    let config = in_pod("kubernetes: {kubeletDir: /var/snap/kubelet}\n");
    assert_eq!(config.csi_socket, Path::new("/var/snap/kubelet/plugins/union.csi.union.io/csi.sock"));
    assert_eq!(config.allowed_targets[0], Path::new("/var/snap/kubelet"));
    let controller = in_pod("mode: controller\n");
    assert_eq!(
        controller.csi_socket,
        Path::new("/var/lib/union-csi/csi.sock"),
        "it may run beside a node's agent"
    );
    let set = in_pod("csi: {endpoint: unix:///run/u.sock}\n");
    assert_eq!(set.csi_socket, Path::new("/run/u.sock"));
    let elsewhere = in_pod("kubernetes: {kubeletDir: /k}\ncsi: {allowedTargets: [/srv]}\n");
    assert!(elsewhere.target_roots().contains(&"/k".into()), "{:?}", elsewhere.target_roots());
    let long = format!("kubernetes: {{kubeconfig: /k, kubeletDir: /{}}}\n", "x".repeat(90));
    assert!(
        faults(&long).contains("agent.yaml:1: kubernetes.kubeletDir: the socket's path has"),
        "{}",
        faults(&long)
    );
}

#[test]
fn roles_are_divided_in_a_cluster_only() {
    assert_eq!(in_pod("mode: node\n").mode, Mode::Node);
    assert!(
        faults("mode: node\n").contains("agent.yaml:1: mode: without Kubernetes one agent plays all roles")
    );
    let told = with("store: local\nkubernetes: {kubeconfig: /k}\n", |o| o.mode = Some("controller".into()));
    assert!(told.unwrap_err().to_string().contains("--mode: mode: without Kubernetes"));
}

#[test]
fn faults_of_the_cluster_are_told_with_their_remedies() {
    insta::assert_snapshot!(faults(
        r"mode: nodes
store: kubernetes
kubernetes:
  namespace: Union
  kubeletDir: /
  leaseDuration: 1s
  kubeConfig: /k
"
    ));
    let half = faults("store: kubernetes\nkubernetes: {kubeconfig: k, leaseDuration: 12500ms}\n");
    assert!(half.contains("\"k\" is a relative path"), "{half}");
    assert!(!half.contains("no API server"), "{half}");
    assert!(half.contains("not a whole number of seconds"), "{half}");
    let flag = with("store: local\n", |o| o.kubeconfig = Some("/k".into())).unwrap_err().to_string();
    assert!(flag.contains("--kubeconfig: store is local"), "{flag}");
}

#[test]
fn the_effective_configuration_of_a_cluster_read_again_is_itself() {
    let text = "mode: node\nkubernetes: {kubeconfig: /etc/k, namespace: storage, kubeletDir: /k, leaseDuration: 30s}\n";
    let config = read(text).unwrap();
    let shown = yaml_text(&config);
    assert_eq!(read(&shown).map_err(|f| format!("{f}\n{shown}")), Ok(config));
    let pod = in_pod("");
    assert_eq!(in_pod(&yaml_text(&pod)), pod);
}

#[test]
fn the_network_is_named_by_interface_or_by_range_or_switched_off() {
    let of = |text: &str| read(text).unwrap().network;
    assert_eq!(of(""), NetworkSettings::default());
    let text = "network:\n  interface: eth1\n  subnet: 10.0.0.0/8\n  nvmePort: 4421\n  nvmeTlsPort: 4422\n";
    let network = of(text);
    assert_eq!(network.interface.as_deref(), Some("eth1"));
    assert_eq!(network.subnet.map(|s| s.to_string()).as_deref(), Some("10.0.0.0/8"));
    assert_eq!((network.enabled, network.nvme_port, network.nvme_tls_port), (true, 4421, 4422));
    let off = of("network:\n  interface: off\n");
    assert!(!off.enabled && off.interface.is_none());
    for text in [text, "network:\n  interface: off\n"] {
        let config = read(text).unwrap();
        assert_eq!(read(&yaml_text(&config)), Ok(config));
    }
    let wrong = faults(
        "network:\n  interface: 10.0.0.0/8\n  subnet: 10.1.0.0/8\n  nvmePort: 0\n  nvmeTlsPort: x\n  mtu: 9000\n",
    );
    for part in
        ["network.interface", "write 10.0.0.0/8", "network.nvmePort", "network.nvmeTlsPort", "network.mtu"]
    {
        assert!(wrong.contains(part), "{part} in {wrong}");
    }
}
