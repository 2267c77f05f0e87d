use proptest::prelude::*;

use super::Strategy;
use super::*;

fn parse(pairs: &[(&str, &str)]) -> Result<Policy, Vec<ParamError>> {
    Policy::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
}

fn faults(pairs: &[(&str, &str)]) -> Vec<String> {
    parse(pairs).expect_err("must be refused").iter().map(ToString::to_string).collect()
}

#[test]
fn nothing_given_is_the_default() {
    assert_eq!(parse(&[]), Ok(Policy::default()));
}

#[test]
fn every_parameter_is_read() {
    let policy = parse(&[
        ("splitQuantum", "512Mi"),
        ("minBranches", "2"),
        ("maxBranches", "8"),
        ("strategy", "balanced"),
        ("placement", "any"),
        ("nodeSelector", "zone=a, example.com/rack=7"),
        ("poolSelector", "tier=fast,empty="),
        ("media", "ssd, nvme,ssd"),
        ("branchFormat", "directory"),
        ("enforcement", "none"),
        ("provisioning", "thick"),
        ("fsType", "xfs"),
        ("csi.storage.k8s.io/fstype", "xfs"),
        ("csi.storage.k8s.io/pvc/name", "anything: at all"),
        ("writeThrough", "always"),
        ("onBranchLoss", "servePartial"),
        ("branchTimeout", "1h30m"),
        ("authentication", "required"),
        ("encryption", "required"),
        ("union", "always"),
        ("mergerfs.cache.negative_entry", "5"),
        ("mergerfs.category.create", "mfs"),
    ])
    .unwrap();
    let map = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<BTreeMap<_, _>>()
    };
    assert_eq!(
        policy,
        Policy {
            quantum: Bytes::mib(512),
            min_branches: 2,
            max_branches: 8,
            strategy: Strategy::Balanced,
            placement: Placement::Any,
            node_selector: map(&[("zone", "a"), ("example.com/rack", "7")]),
            pool_selector: map(&[("tier", "fast"), ("empty", "")]),
            media: vec![Media::Nvme, Media::Ssd],
            format: FormatChoice::Directory,
            accept_unenforced: true,
            thin: false,
            fs_type: FsType::Xfs,
            write_through: true,
            on_branch_loss: OnBranchLoss::ServePartial,
            branch_timeout: Duration::from_secs(5400),
            authentication: Authentication::Required,
            encryption: Encryption::Required,
            union: UnionMode::Always,
            mergerfs: map(&[("cache.negative-entry", "5"), ("category.create", "mfs")]),
        }
    );
}

#[test]
fn images_are_written_through_unless_the_class_says_never_and_directories_have_nothing_to_say() {
    let through = |pairs: &[(&str, &str)]| parse(pairs).unwrap().write_through;
    assert!(through(&[]) && through(&[("writeThrough", "always")]));
    assert!(
        !through(&[("writeThrough", "never")])
            && !through(&[("writeThrough", "never"), ("branchFormat", "image")])
    );
    let told = faults(&[("writeThrough", "never"), ("branchFormat", "directory")]);
    assert!(told.len() == 1 && told[0].contains("leave writeThrough out"), "{told:?}");
}

#[test]
fn encryption_is_off_unless_it_is_required_and_goes_with_authentication() {
    let of = |pairs: &[(&str, &str)]| parse(pairs).unwrap();
    let demands = |policy: &Policy| (policy.requires_authentication(), policy.requires_encryption());
    assert_eq!(demands(&of(&[])), (false, false));
    assert_eq!(demands(&of(&[("authentication", "required"), ("encryption", "off")])), (true, false));
    assert_eq!(demands(&of(&[("encryption", "required")])), (true, true));
    assert!(faults(&[("encryption", "whenPossible")])[0].contains("off or required"));
}

#[test]
fn all_faults_are_told_at_once_with_key_value_and_remedy() {
    let faults = faults(&[
        ("splitQuantum", "10"),
        ("strategey", "fewest"),
        ("mergerfs.category.create", "epmfs"),
        ("mergerfs.catgory.create", "mfs"),
        ("minBranches", "0"),
        ("fsType", "zfs"),
        ("completelyDifferent", "1"),
    ]);
    assert_eq!(
        faults,
        [
            "parameter \"completelyDifferent\" is not known",
            "parameter fsType: \"zfs\" is not allowed: use ext4, xfs or btrfs",
            "parameter minBranches: \"0\" is not allowed: use a number from 1 to 256",
            "parameter splitQuantum: \"10\" is not allowed: use a quantity of 1Mi or more, a multiple of 4Ki, such as \
             512Mi or 1Gi",
            "parameter \"strategey\" is not known; did you mean \"strategy\"?",
            "parameter mergerfs.category.create: \"epmfs\" is not allowed: use one of ff, lfs, lus, mfs, pfrd, rand",
            "parameter \"mergerfs.catgory.create\" is not known; did you mean \"category.create\"?",
        ]
    );
}

#[test]
fn parameters_that_contradict_each_other_are_refused() {
    for pairs in [
        [("minBranches", "5"), ("maxBranches", "4")],
        [("fsType", "xfs"), ("csi.storage.k8s.io/fstype", "ext4")],
        [("provisioning", "thin"), ("branchFormat", "directory")],
        [("enforcement", "none"), ("branchFormat", "image")],
        [("mergerfs.posix-acl", "true"), ("mergerfs.posix_acl", "false")],
    ] {
        let faults = faults(&pairs);
        assert!(faults.len() == 1 && faults[0].contains("contradict"), "{faults:?}");
    }
}

#[test]
fn defaults_follow_what_else_was_given() {
    assert_eq!(parse(&[("minBranches", "20")]).unwrap().max_branches, 20);
    assert_eq!(parse(&[("strategy", "spread")]).unwrap().placement, Placement::Any);
    assert_eq!(parse(&[("strategy", "spread"), ("placement", "local")]).unwrap().placement, Placement::Local);
}

#[test]
fn values_outside_their_lists_are_refused() {
    for (key, value) in [
        ("splitQuantum", "0"),
        ("splitQuantum", "-1Gi"),
        ("splitQuantum", "1048577"),
        ("splitQuantum", "99Ei"),
        ("maxBranches", "257"),
        ("maxBranches", "99999999999"),
        ("minBranches", "-1"),
        ("placement", "Local"),
        ("nodeSelector", ""),
        ("nodeSelector", "a"),
        ("nodeSelector", "a=b,a=c"),
        ("nodeSelector", "a=b,"),
        ("nodeSelector", "=b"),
        ("nodeSelector", "a b=c"),
        ("poolSelector", "/a=b"),
        ("media", "tape"),
        ("media", ""),
        ("enforcement", "off"),
        ("provisioning", "Thin"),
        ("branchTimeout", "0"),
        ("branchTimeout", "25h"),
        ("branchTimeout", "5"),
        ("union", "never"),
        ("writeThrough", "false"),
        ("mergerfs.*", "x"),
    ] {
        assert!(parse(&[(key, value)]).is_err(), "{key}={value}");
    }
}

#[test]
fn options_that_could_harm_are_not_on_the_list() {
    for option in [
        "branches",
        "fsname",
        "export-support",
        "allow_other",
        "umask",
        "nullrw",
        "symlinkify",
        "follow-symlinks",
        "cache.writeback",
        "func.unlink",
        "category.action",
        "suid",
        "dev",
        "security-capability",
        "",
    ] {
        assert!(parse(&[(&format!("mergerfs.{option}"), "true")]).is_err(), "{option}");
    }
    for (option, value) in [
        ("xattr", "nosys"),
        ("category.create", "all"),
        ("category.create", "erofs"),
        ("category.create", "mfs,allow_other"),
        ("inodecalc", "passthrough"),
        ("passthrough.io", "wo"),
        ("minfreespace", "-1"),
        ("minfreespace", "9999999999T"),
        ("cache.attr", "-1"),
        ("cache.attr", "010"),
        ("threads", "0"),
    ] {
        assert!(parse(&[(&format!("mergerfs.{option}"), value)]).is_err(), "{option}={value}");
    }
}

#[test]
fn the_table_tells_the_defaults_that_the_parser_has() {
    for parameter in parameters() {
        if matches!(parameter.default, "none" | "all") || parameter.default.contains(' ') {
            continue;
        }
        assert_eq!(parse(&[(parameter.key, parameter.default)]), Ok(Policy::default()), "{}", parameter.key);
    }
}

#[test]
fn what_a_class_may_set_is_what_a_union_can_be_started_with() {
    use crate::domain::mergerfs::{Version, Wanted, allowed, options};
    let newest = Version::new(2, 42, 0);
    for option in allowed() {
        let value = option.values.strip_prefix("one of ").unwrap_or(match option.values.as_str() {
            "true or false" => "true",
            values if values.contains("K, M, G") => "64M",
            _ => "4",
        });
        let value = value.split(", ").next().unwrap_or(value);
        let policy = parse(&[(&format!("mergerfs.{}", option.key), value)]).unwrap();
        let wanted = Wanted {
            fsname: "v",
            smallest: Bytes::gib(1),
            read_only: false,
            remote: false,
            passthrough: true,
            moves: true,
            overrides: &policy.mergerfs,
            refused: &[],
        };
        let settings = options(newest, &wanted).unwrap_or_else(|e| panic!("{}={value}: {e}", option.key));
        let given = settings.iter().find(|s| s.key == option.key).and_then(|s| s.value.as_deref());
        assert_eq!(given, Some(value), "{}", option.key);
    }
    for (key, value) in
        [("func.create", "mfs"), ("statfs", "full"), ("moveonenospc", "true"), ("threads", "8")]
    {
        assert!(parse(&[(&format!("mergerfs.{key}"), value)]).is_err(), "{key}={value}");
    }
}

proptest! {
    #[test]
    fn no_parameters_panic(pairs in prop::collection::btree_map("[a-zA-Z._*/-]{0,20}|mergerfs\\.[a-z._-]{0,12}", "\\PC{0,20}", 0..6)) {
        let _ = Policy::parse(&pairs);
    }

    #[test]
    fn any_value_of_a_known_key_is_taken_or_refused_by_name(index in 0..parameters().len() - 1, value in "\\PC{0,20}|[0-9]{1,4}[KMGTi]{0,2}|[a-z=,]{0,10}") {
        let key = parameters()[index].key;
        if let Err(faults) = parse(&[(key, &value)]) {
            prop_assert!(faults.iter().all(|fault| fault.to_string().contains(key)));
        }
    }
}
