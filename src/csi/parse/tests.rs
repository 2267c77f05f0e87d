use std::collections::HashMap;

use rstest::rstest;
use tonic::metadata::MetadataMap;

use super::*;
use crate::csi::proto::volume_capability::access_mode::Mode;
use crate::csi::proto::volume_capability::{AccessMode as ProtoMode, AccessType, BlockVolume, MountVolume};
use crate::csi::proto::{
    CapacityRange, CreateVolumeRequest, NodePublishVolumeRequest, Topology, TopologyRequirement,
    VolumeCapability, VolumeContentSource,
};
use crate::domain::policy::FsType;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{Bytes, NodeName};
use crate::node::volume::Access;
use crate::store::object::VolumeSplitSpec;

fn mount(mode: Mode) -> VolumeCapability {
    mount_with(mode, MountVolume::default())
}

fn mount_with(mode: Mode, volume: MountVolume) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(ProtoMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(volume)),
    }
}

fn block(mode: Mode) -> VolumeCapability {
    VolumeCapability { access_type: Some(AccessType::Block(BlockVolume {})), ..mount(mode) }
}

fn request() -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: "pvc-1".to_owned(),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..CreateVolumeRequest::default()
    }
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn topology(node: &str) -> Topology {
    Topology { segments: map(&[(TOPOLOGY_KEY, node)]) }
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn refused(request: &CreateVolumeRequest) -> InvalidRequest {
    create_volume(request).unwrap_err()
}

fn made(request: &CreateVolumeRequest) -> VolumeSplitSpec {
    create_volume(request).unwrap()
}

// ---- names

#[rstest]
#[case::plain("pvc-1b2c")]
#[case::dots("..")]
#[case::way_out("../../../etc/passwd")]
#[case::slashes("a/b/c")]
#[case::colons("a:b=c,d*")]
#[case::unicode("größe-体积-🦀")]
#[case::blanks("my volume")]
#[case::longest(&"x".repeat(128))]
fn any_text_of_128_bytes_is_a_name_and_gives_an_id_that_is_safe_as_a_file_name(#[case] name: &str) {
    let spec = made(&CreateVolumeRequest { name: name.to_owned(), ..request() });
    assert_eq!(spec.request_name, name);
    let id = spec.volume.as_str();
    assert!(id.len() <= 63 && !id.contains(['/', ':', ',', '=']) && !id.starts_with('.'), "{id}");
}

#[rstest]
#[case::none("")]
#[case::too_long(&"x".repeat(129))]
#[case::too_long_in_bytes_though_not_in_characters(&"ä".repeat(65))]
#[case::newline("a\nb")]
#[case::zero("a\0b")]
#[case::delete("a\u{7f}")]
#[case::c1_control("a\u{85}")]
fn a_name_that_the_specification_does_not_allow_is_refused(#[case] name: &str) {
    assert_eq!(refused(&CreateVolumeRequest { name: name.to_owned(), ..request() }).field, "name");
}

// ---- sizes

#[rstest]
#[case::absent(None, Bytes::gib(1), None)]
#[case::required(Some((5, 0)), Bytes::new(5), None)]
#[case::both(Some((5, 9)), Bytes::new(5), Some(9))]
#[case::equal(Some((5, 5)), Bytes::new(5), Some(5))]
#[case::limit_below_the_default(Some((0, 9)), Bytes::new(9), Some(9))]
#[case::limit_above_the_default(Some((0, 9 << 30)), Bytes::gib(1), Some(9 << 30))]
#[case::largest(Some((i64::MAX, 0)), Bytes::new(u64::MAX >> 1), None)]
fn a_size_is_what_was_required_or_a_gibibyte_within_the_limit(
    #[case] range: Option<(i64, i64)>,
    #[case] capacity: Bytes,
    #[case] limit: Option<u64>,
) {
    let capacity_range =
        range.map(|(required_bytes, limit_bytes)| CapacityRange { required_bytes, limit_bytes });
    let spec = made(&CreateVolumeRequest { capacity_range, ..request() });
    assert_eq!((spec.capacity, spec.limit), (capacity, limit.map(Bytes::new)));
}

#[rstest]
#[case::nothing_said((0, 0), "capacity_range")]
#[case::negative((-1, 0), "capacity_range.required_bytes")]
#[case::most_negative((i64::MIN, 0), "capacity_range.required_bytes")]
#[case::negative_limit((1, -1), "capacity_range.limit_bytes")]
#[case::limit_below_required((2, 1), "capacity_range.limit_bytes")]
fn a_size_that_makes_no_sense_is_refused(#[case] range: (i64, i64), #[case] field: &str) {
    let capacity_range = Some(CapacityRange { required_bytes: range.0, limit_bytes: range.1 });
    assert_eq!(refused(&CreateVolumeRequest { capacity_range, ..request() }).field, field);
}

// ---- capabilities

#[rstest]
#[case(Mode::SingleNodeWriter, AccessMode::SingleNodeWriter)]
#[case(Mode::SingleNodeReaderOnly, AccessMode::SingleNodeReaderOnly)]
#[case(Mode::SingleNodeSingleWriter, AccessMode::SingleNodeSingleWriter)]
#[case(Mode::SingleNodeMultiWriter, AccessMode::SingleNodeMultiWriter)]
#[case(Mode::MultiNodeReaderOnly, AccessMode::MultiNodeReaderOnly)]
#[case(Mode::MultiNodeMultiWriter, AccessMode::MultiNodeMultiWriter)]
fn single_node_modes_and_readers_or_writers_on_many_nodes_are_served(
    #[case] given: Mode,
    #[case] mode: AccessMode,
) {
    assert_eq!(capability(Some(&mount(given))).unwrap().mode, mode);
}

#[test]
fn one_writer_beside_readers_elsewhere_is_refused_with_what_can_be_had() {
    let error = capability(Some(&mount(Mode::MultiNodeSingleWriter))).unwrap_err().to_string();
    for named in
        ["MULTI_NODE_SINGLE_WRITER is not supported", "MULTI_NODE_MULTI_WRITER", "MULTI_NODE_READER_ONLY"]
    {
        assert!(error.contains(named), "{error}");
    }
}

#[rstest]
#[case::image(&[("branchFormat", "image")], mount(Mode::MultiNodeMultiWriter), "branchFormat is image")]
#[case::branches(&[("minBranches", "2")], mount(Mode::MultiNodeMultiWriter), "minBranches is 2")]
#[case::keys(&[("authentication", "required")], mount(Mode::MultiNodeMultiWriter), "authentication is required")]
#[case::encryption(&[("encryption", "required")], mount(Mode::MultiNodeMultiWriter), "encryption is required")]
#[case::block(&[], block(Mode::MultiNodeMultiWriter), "volumeMode Filesystem")]
fn what_several_nodes_cannot_write_is_refused_with_the_remedy(
    #[case] parameters: &[(&str, &str)],
    #[case] asked: VolumeCapability,
    #[case] reason: &str,
) {
    let parameters = parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let many = CreateVolumeRequest {
        parameters: parameters.collect(),
        volume_capabilities: vec![asked],
        ..request()
    };
    let error = refused(&many);
    assert!(error.reason.contains(reason) && error.reason.contains("ReadWriteOnce"), "{error}");
    // A class that keeps volumes on one node makes them for the pods there; block access to one image is had there anyway.
    let mut local = many;
    local.parameters.insert("placement".to_owned(), "local".to_owned());
    assert_eq!(made(&local).access_modes, [AccessMode::MultiNodeMultiWriter]);
}

#[test]
fn an_incomplete_or_unknown_capability_is_refused_with_its_field() {
    let unknown =
        VolumeCapability { access_mode: Some(ProtoMode { mode: 99 }), ..mount(Mode::SingleNodeWriter) };
    let cases = [
        (None, "volume_capability"),
        (
            Some(VolumeCapability { access_mode: None, ..mount(Mode::SingleNodeWriter) }),
            "volume_capability.access_mode",
        ),
        (Some(mount(Mode::Unknown)), "volume_capability.access_mode"),
        (Some(unknown), "volume_capability.access_mode"),
        (Some(VolumeCapability { access_type: None, ..mount(Mode::SingleNodeWriter) }), "volume_capability"),
    ];
    for (given, field) in cases {
        assert_eq!(capability(given.as_ref()).unwrap_err().field, field, "{given:?}");
    }
}

#[test]
fn a_request_needs_a_capability_and_cannot_mix_files_and_block() {
    assert_eq!(capabilities(&[]).unwrap_err().field, "volume_capabilities");
    let mixed = [mount(Mode::SingleNodeWriter), block(Mode::SingleNodeWriter)];
    assert!(capabilities(&mixed).unwrap_err().reason.contains("mixed"));
}

#[test]
fn several_modes_of_one_volume_are_kept_each_once() {
    let modes = [Mode::SingleNodeWriter, Mode::MultiNodeReaderOnly, Mode::SingleNodeWriter];
    let spec = made(&CreateVolumeRequest { volume_capabilities: modes.map(mount).to_vec(), ..request() });
    assert_eq!(spec.access_modes, [AccessMode::SingleNodeWriter, AccessMode::MultiNodeReaderOnly]);
}

fn flags(given: &[&str]) -> Result<Vec<String>, InvalidRequest> {
    let mount_flags = given.iter().map(|f| (*f).to_owned()).collect();
    let volume = MountVolume { mount_flags, ..MountVolume::default() };
    capability(Some(&mount_with(Mode::SingleNodeWriter, volume))).map(|c| match c.access {
        Access::Mount { flags, .. } => flags,
        Access::Block => panic!("asked for a mount"),
    })
}

#[test]
fn mount_flags_are_taken_one_by_one_or_in_a_list() {
    assert_eq!(flags(&["noatime", "ro,noexec", "defaults", ""]).unwrap(), ["noatime", "ro", "noexec"]);
    assert!(flags(&[]).unwrap().is_empty());
}

#[rstest]
#[case::device("dev")]
#[case::setuid("suid")]
#[case::option_of_the_filesystem("data=writeback")]
#[case::hidden_in_a_list("noatime,allow_other")]
#[case::bind("bind")]
#[case::other_case("RO")]
fn a_mount_flag_that_is_not_allowed_is_refused_by_name(#[case] flag: &str) {
    let error = flags(&[flag]).unwrap_err();
    assert_eq!(error.field, "volume_capability.mount.mount_flags");
    assert!(error.reason.contains(flag.rsplit(',').next().unwrap()), "{error}");
}

fn group(text: &str) -> Result<Option<u32>, InvalidRequest> {
    let volume = MountVolume { volume_mount_group: text.to_owned(), ..MountVolume::default() };
    capability(Some(&mount_with(Mode::SingleNodeWriter, volume))).map(|c| match c.access {
        Access::Mount { group, .. } => group,
        Access::Block => panic!("asked for a mount"),
    })
}

#[test]
fn the_mount_group_is_a_number() {
    assert_eq!(group("").unwrap(), None);
    assert_eq!(group("1000").unwrap(), Some(1000));
    for bad in ["-1", "users", "4294967295", "4294967296", "1 "] {
        assert_eq!(group(bad).unwrap_err().field, "volume_capability.mount.volume_mount_group", "{bad}");
    }
}

// ---- parameters

#[test]
fn all_faults_of_the_parameters_are_told_at_once() {
    let parameters = map(&[("minBranches", "none"), ("sploitQuantum", "1Gi"), ("strategy", "best")]);
    let error = refused(&CreateVolumeRequest { parameters, ..request() });
    assert_eq!(error.field, "parameters");
    for part in ["minBranches", "sploitQuantum", "strategy"] {
        assert!(error.reason.contains(part), "{part} is missing in: {error}");
    }
}

#[test]
fn the_filesystem_that_the_capability_asks_for_is_kept_as_a_parameter() {
    let volume = MountVolume { fs_type: "xfs".to_owned(), ..MountVolume::default() };
    let volume_capabilities = vec![mount_with(Mode::SingleNodeWriter, volume)];
    let plain = CreateVolumeRequest { volume_capabilities, ..request() };
    assert_eq!(made(&plain).parameters, [("fsType".to_owned(), "xfs".to_owned())].into());

    let agreed = CreateVolumeRequest { parameters: map(&[("fsType", "xfs")]), ..plain.clone() };
    assert_eq!(made(&agreed).parameters.len(), 1);

    let at_odds = CreateVolumeRequest { parameters: map(&[("fsType", "btrfs")]), ..plain };
    assert_eq!(refused(&at_odds).field, "volume_capability.mount.fs_type");
}

#[test]
fn a_filesystem_that_is_unknown_or_two_at_once_are_refused() {
    let with = |fs: &str| {
        mount_with(Mode::SingleNodeWriter, MountVolume { fs_type: fs.to_owned(), ..MountVolume::default() })
    };
    assert_eq!(capability(Some(&with("ntfs"))).unwrap_err().field, "volume_capability.mount.fs_type");
    assert_eq!(capability(Some(&with("ext4"))).unwrap().fs_type, Some(FsType::Ext4));
    assert_eq!(capabilities(&[with("ext4"), with("xfs")]).unwrap_err().field, "volume_capabilities");
}

#[test]
fn what_the_provisioner_adds_about_the_claim_is_no_parameter() {
    let parameters = map(&[("csi.storage.k8s.io/pvc/name", "data"), ("csi.storage.k8s.io/pv/name", "pvc-1")]);
    assert!(made(&CreateVolumeRequest { parameters, ..request() }).parameters.is_empty());
}

#[test]
fn block_access_needs_one_branch_that_is_an_image() {
    let with = |pairs: &[(&str, &str)]| CreateVolumeRequest {
        volume_capabilities: vec![block(Mode::SingleNodeWriter)],
        parameters: map(pairs),
        ..request()
    };
    assert_eq!(made(&with(&[])).volume_mode, VolumeMode::Block);
    assert!(refused(&with(&[("minBranches", "2")])).reason.contains("minBranches is 2"));
    assert!(refused(&with(&[("branchFormat", "directory")])).reason.contains("needs an image"));
}

#[test]
fn what_is_not_served_yet_is_refused_by_its_field() {
    let source =
        CreateVolumeRequest { volume_content_source: Some(VolumeContentSource::default()), ..request() };
    assert_eq!(refused(&source).field, "volume_content_source");
    let mutable = CreateVolumeRequest { mutable_parameters: map(&[("a", "b")]), ..request() };
    assert_eq!(refused(&mutable).field, "mutable_parameters");
}

// ---- topology

#[rstest]
#[case::none(&[], &[], None, &[])]
#[case::preferred_first(&["a", "b"], &["b", "a"], Some("b"), &["a", "b"])]
#[case::only_one_possible(&["a"], &[], Some("a"), &["a"])]
#[case::several_possible(&["b", "a", "b"], &[], None, &["a", "b"])]
#[case::wish_only(&[], &["b", "a"], Some("b"), &[])]
fn the_first_preferred_node_is_the_consumer_and_the_requisite_ones_are_the_limits(
    #[case] requisite: &[&str],
    #[case] preferred: &[&str],
    #[case] consumer: Option<&str>,
    #[case] nodes: &[&str],
) {
    let list = |names: &[&str]| names.iter().map(|n| topology(n)).collect();
    let requirement = TopologyRequirement { requisite: list(requisite), preferred: list(preferred) };
    let spec = made(&CreateVolumeRequest { accessibility_requirements: Some(requirement), ..request() });
    assert_eq!(spec.consumer, consumer.map(node));
    assert_eq!(spec.topology, nodes.iter().map(|n| node(n)).collect::<Vec<_>>());
}

#[test]
fn what_nodes_can_attach_may_stand_beside_their_names() {
    let mut here = topology("a");
    here.segments.insert("union.csi.union.io/nvme-tcp".to_owned(), "true".to_owned());
    here.segments.insert("union.csi.union.io/nfs".to_owned(), "true".to_owned());
    let requirement = TopologyRequirement { requisite: vec![here], preferred: Vec::new() };
    let spec = made(&CreateVolumeRequest { accessibility_requirements: Some(requirement), ..request() });
    assert_eq!(spec.topology, [node("a")]);
}

#[rstest]
#[case::no_segment(&[])]
#[case::no_name(&[("union.csi.union.io/nfs", "true")])]
#[case::foreign(&[("topology.kubernetes.io/zone", "z")])]
#[case::one_too_many(&[(TOPOLOGY_KEY, "a"), ("zone", "z")])]
#[case::no_node(&[(TOPOLOGY_KEY, "Not A Node")])]
fn a_topology_that_is_not_ours_is_refused(#[case] segments: &[(&str, &str)]) {
    let requirement =
        TopologyRequirement { requisite: vec![Topology { segments: map(segments) }], preferred: Vec::new() };
    let error = refused(&CreateVolumeRequest { accessibility_requirements: Some(requirement), ..request() });
    assert_eq!(error.field, "accessibility_requirements");
    assert!(error.reason.contains(TOPOLOGY_KEY), "{error}");
}

// ---- inline volumes

fn publish(context: &[(&str, &str)]) -> NodePublishVolumeRequest {
    let mut volume_context = map(context);
    volume_context.insert("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned());
    volume_context.insert("csi.storage.k8s.io/pod.uid".to_owned(), "u".to_owned());
    NodePublishVolumeRequest {
        // What the kubelet calls it: longer than an id can be.
        volume_id: format!("csi-{}", "0123456789abcdef".repeat(4)),
        target_path: "/pods/u/mount".to_owned(),
        volume_capability: Some(mount(Mode::SingleNodeWriter)),
        volume_context,
        ..NodePublishVolumeRequest::default()
    }
}

fn inline_of(request: &NodePublishVolumeRequest) -> Result<Option<Inline>, InvalidRequest> {
    inline(request, &node("here"))
}

#[test]
fn an_inline_volume_lies_on_the_pods_node_and_has_the_size_that_was_asked_for() {
    let request = publish(&[("size", "2Gi"), ("maxBranches", "3")]);
    let Inline { spec, publish } = inline_of(&request).unwrap().unwrap();
    assert!(spec.ephemeral);
    assert_eq!(spec.capacity, Bytes::gib(2));
    assert_eq!((spec.consumer, spec.topology), (Some(node("here")), vec![node("here")]));
    let parameters = [("maxBranches", "3"), ("placement", "local")];
    assert_eq!(spec.parameters, parameters.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    assert_eq!(spec.request_name, request.volume_id);
    assert_eq!(publish.volume, spec.volume);
    assert_eq!(inline_of(&self::publish(&[])).unwrap().unwrap().spec.capacity, Bytes::gib(1));
}

#[rstest]
#[case::of_a_class_only("enforcement", "none")]
#[case::oversubscribing("provisioning", "thin")]
#[case::unknown("sizee", "1Gi")]
#[case::mergerfs_option_off_the_list("mergerfs.branches", "+>/etc")]
#[case::elsewhere("placement", "any")]
#[case::no_size("size", "0")]
#[case::negative_size("size", "-1Gi")]
#[case::no_number("size", "much")]
#[case::overflow("size", "99999999999Ei")]
#[case::across_reboots("union.io/mount-at-boot", "true")]
fn an_attribute_that_a_pod_must_not_set_is_refused_by_name(#[case] key: &str, #[case] value: &str) {
    let error = inline_of(&publish(&[(key, value)])).unwrap_err();
    assert_eq!(error.field, "volume_context");
    assert!(error.reason.contains(key), "{error}");
}

#[test]
fn an_inline_volume_is_neither_staged_nor_a_block_device() {
    let staged = NodePublishVolumeRequest { staging_target_path: "/s".to_owned(), ..publish(&[]) };
    assert_eq!(inline_of(&staged).unwrap_err().field, "staging_target_path");
    let device =
        NodePublishVolumeRequest { volume_capability: Some(block(Mode::SingleNodeWriter)), ..publish(&[]) };
    assert_eq!(inline_of(&device).unwrap_err().field, "volume_capability");
}

#[test]
fn a_volume_is_inline_only_where_it_is_said() {
    let ordinary = NodePublishVolumeRequest { volume_context: map(&[]), ..publish(&[]) };
    assert_eq!(inline_of(&ordinary), Ok(None));
    let off = map(&[("csi.storage.k8s.io/ephemeral", "false")]);
    assert_eq!(inline_of(&NodePublishVolumeRequest { volume_context: off, ..publish(&[]) }), Ok(None));
    let odd = map(&[("csi.storage.k8s.io/ephemeral", "yes")]);
    assert!(inline_of(&NodePublishVolumeRequest { volume_context: odd, ..publish(&[]) }).is_err());
}

// ---- the rest

#[test]
fn an_id_that_was_never_given_is_no_error_but_names_nothing() {
    assert!(volume_id("").is_err());
    assert_eq!(volume_id("../../etc"), Ok(None));
    assert_eq!(volume_id("pvc-1").unwrap().unwrap().as_str(), "pvc-1");
}

#[test]
fn paths_must_be_given_and_absolute() {
    assert_eq!(absolute_path("target_path", "").unwrap_err().field, "target_path");
    assert!(absolute_path("target_path", "a/b").is_err());
    assert!(absolute_path("target_path", "/a/b").is_ok());
}

#[rstest]
#[case("1H", Some(3600.0))]
#[case("2M", Some(120.0))]
#[case("30S", Some(30.0))]
#[case("1500m", Some(1.5))]
#[case("1000000u", Some(1.0))]
#[case("99999999n", Some(0.099_999_999))]
#[case("123456789S", None)]
#[case("S", None)]
#[case("-1S", None)]
#[case("1x", None)]
#[case("", None)]
fn the_callers_patience_is_read_as_grpc_writes_it(#[case] text: &'static str, #[case] seconds: Option<f64>) {
    let mut metadata = MetadataMap::new();
    assert_eq!(patience(&metadata), None);
    metadata.insert("grpc-timeout", text.parse().unwrap());
    assert_eq!(patience(&metadata).map(|p| p.as_secs_f64()), seconds);
}
