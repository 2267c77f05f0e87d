use std::path::Path;

use proptest::prelude::*;

use super::*;

const V2_33: Version = Version::new(2, 33, 5);
const V2_40: Version = Version::new(2, 40, 2);
const V2_42: Version = Version::new(2, 42, 0);

fn wanted(overrides: &BTreeMap<String, String>) -> Wanted<'_> {
    Wanted {
        fsname: "pvc-1",
        smallest: Bytes::gib(1),
        read_only: false,
        remote: false,
        passthrough: false,
        moves: true,
        overrides,
        refused: &[],
    }
}

fn given(version: Version, wanted: &Wanted<'_>) -> String {
    options(version, wanted).unwrap().iter().map(Setting::argument).collect::<Vec<_>>().join(",")
}

fn set(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn the_version_is_found_in_what_each_release_prints() {
    for (printed, version) in [
        ("mergerfs version: 2.33.5\n", V2_33),
        ("mergerfs version: 2.33.5\nFUSE library version: 2.9.7-mergerfs_2.30.0\n", V2_33),
        ("mergerfs v2.40.2\n\nhttps://github.com/trapexit/mergerfs\n", V2_40),
        ("v2.42.0", V2_42),
        ("mergerfs v2.42.0-3-gabcdef0", V2_42),
        ("mergerfs 2.40.2~ds-1", V2_40),
        ("mergerfs version: 2.41-rc1", Version::new(2, 41, 0)),
    ] {
        assert_eq!(Version::parse(printed), Some(version), "{printed:?}");
    }
    for nonsense in
        ["", "hello", "usage: cat [FILE]", "mergerfs version: unknown", "2", "v.1.2", "99999999.1.1"]
    {
        assert_eq!(Version::parse(nonsense), None, "{nonsense:?}");
    }
}

#[test]
fn versions_are_ordered_as_numbers() {
    assert!(Version::new(2, 9, 0) < V2_33);
    assert!(V2_33 < V2_40 && V2_40 < V2_42);
    assert!(!Version::new(2, 32, 9).supported());
    assert!(Version::new(2, 33, 0).supported());
}

#[test]
fn a_2_33_gets_the_options_that_it_has_in_its_words() {
    assert_eq!(
        given(V2_33, &wanted(&BTreeMap::new())),
        "allow_other,use_ino,fsname=pvc-1,category.create=pfrd,minfreespace=4194304,moveonenospc=pfrd,\
         inodecalc=hybrid-hash,cache.files=auto-full,cache.attr=60,cache.entry=60,cache.negative_entry=5,\
         cache.readdir=true,cache.symlinks=true,cache.statfs=1,security_capability=false,statfs_ignore=ro,threads=16"
    );
}

#[test]
fn a_2_40_mixes_underscores_and_dashes() {
    assert_eq!(
        given(V2_40, &wanted(&BTreeMap::new())),
        "fsname=pvc-1,category.create=pfrd,minfreespace=4194304,moveonenospc=pfrd,inodecalc=hybrid-hash,\
         cache.files=auto-full,cache.attr=60,cache.entry=60,cache.negative_entry=5,cache.readdir=true,\
         cache.symlinks=true,cache.statfs=1,security_capability=false,statfs_ignore=ro,export-support=false,\
         process-thread-count=16"
    );
}

#[test]
fn a_2_42_has_passthrough_where_it_works() {
    let overrides = BTreeMap::new();
    let on = Wanted { passthrough: true, ..wanted(&overrides) };
    assert_eq!(
        given(V2_42, &on),
        "fsname=pvc-1,category.create=pfrd,minfreespace=4194304,moveonenospc=pfrd,inodecalc=hybrid-hash,\
         cache.files=auto-full,cache.attr=60,cache.entry=60,cache.negative-entry=5,cache.readdir=true,\
         cache.symlinks=true,cache.statfs=1,security-capability=false,statfs-ignore=ro,export-support=false,\
         process-thread-count=16,passthrough.io=rw"
    );
    assert!(given(V2_42, &wanted(&overrides)).ends_with("passthrough.io=off"));
}

#[test]
fn a_union_with_a_branch_elsewhere_gets_more_threads_and_does_not_run_without_them() {
    let overrides = BTreeMap::new();
    let remote = Wanted { remote: true, refused: &["process-thread-count".to_owned()], ..wanted(&overrides) };
    for (version, name) in [(V2_33, "threads"), (V2_42, "process-thread-count")] {
        let settings = options(version, &remote).unwrap();
        let threads = settings.iter().find(|s| s.name == name).unwrap();
        assert_eq!((threads.value.as_deref(), threads.essential), (Some("32"), true));
    }
    let class = set(&[("process-thread-count", "64")]);
    let asked = Wanted { overrides: &class, ..remote };
    assert!(given(V2_33, &asked).contains("threads=64"));
}

#[test]
fn an_option_of_the_class_wins_and_is_translated() {
    let overrides = set(&[("cache.negative-entry", "0"), ("process-thread-count", "32")]);
    let given = given(V2_33, &wanted(&overrides));
    assert!(given.contains("cache.negative_entry=0") && !given.contains("cache.negative_entry=5"), "{given}");
    assert!(given.contains("threads=32"), "{given}");
}

#[test]
fn an_option_that_this_version_lacks_is_an_error_and_not_ignored() {
    let overrides = set(&[("passthrough.io", "rw")]);
    let error = options(V2_33, &wanted(&overrides)).unwrap_err();
    assert!(error.to_string().contains("came with 2.41.0"), "{error}");
}

#[test]
fn what_a_program_refused_is_left_out_unless_it_is_essential_or_asked_for() {
    let overrides = set(&[("cache.statfs", "9")]);
    let refused = ["cache.statfs", "cache.attr", "category.create"].map(str::to_owned);
    let given = given(V2_33, &Wanted { refused: &refused, ..wanted(&overrides) });
    assert!(given.contains("cache.statfs=9"), "{given}");
    assert!(!given.contains("cache.attr"), "{given}");
    assert!(given.contains("category.create=pfrd"), "{given}");
}

#[test]
fn a_program_that_damages_files_when_it_moves_them_is_told_not_to() {
    let none = BTreeMap::new();
    let given = given(V2_42, &Wanted { moves: false, ..wanted(&none) });
    assert!(given.contains("moveonenospc=false"), "later versions move by default: {given}");
    assert!(given.contains("cache.statfs=0"), "{given}");
    assert!(given.contains("minfreespace=16777216"), "{given}");
    let asked = set(&[("moveonenospc", "mfs")]);
    let error = options(V2_33, &Wanted { moves: false, ..wanted(&asked) }).unwrap_err();
    assert!(error.to_string().contains("does not keep files whole"), "{error}");
    let asked = set(&[("moveonenospc", "false")]);
    assert!(options(V2_33, &Wanted { moves: false, ..wanted(&asked) }).is_ok());
}

#[test]
fn options_that_lead_out_of_the_volume_or_break_supervision_are_refused() {
    for key in
        ["follow-symlinks", "link-exdev", "rename-exdev", "symlinkify", "security-capability", "fsname"]
    {
        assert!(check_option(key, "x").unwrap_err().to_string().contains("cannot be set"), "{key}");
    }
    assert!(check_option("xattr", "nosys").is_err());
    assert!(
        check_option("category.create", "epmfs").is_err(),
        "path-preserving policies give ENOSPC too early"
    );
    assert!(check_option("cache.writeback", "true").unwrap_err().to_string().contains("too late"));
}

#[test]
fn a_misspelt_option_is_answered_with_the_right_name() {
    let error = check_option("cache.negative_entry", "5").unwrap_err().to_string();
    assert!(error.contains("write cache.negative-entry"), "{error}");
    let error = check_option("threads", "5").unwrap_err().to_string();
    assert!(error.contains("process-thread-count"), "{error}");
}

#[test]
fn values_are_checked() {
    for (key, value) in [
        ("cache.attr", "60"),
        ("posix-acl", "true"),
        ("minfreespace", "10M"),
        ("category.create", "mfs"),
        ("process-thread-count", "16"),
    ] {
        assert_eq!(check_option(key, value), Ok(()), "{key}={value}");
    }
    for (key, value) in [
        ("cache.attr", "-1"),
        ("cache.attr", "+1"),
        ("cache.attr", ""),
        ("cache.attr", "99999999999999999999"),
        ("posix-acl", "maybe"),
        ("minfreespace", "10X"),
        ("minfreespace", "M"),
        ("minfreespace", "18446744073709551615T"),
        ("process-thread-count", "1"),
        ("category.create", "mfs,branches=/etc"),
    ] {
        assert!(check_option(key, value).is_err(), "{key}={value}");
    }
}

#[test]
fn values_that_read_back_in_other_words_are_the_same() {
    assert!(same("minfreespace", "4194304", "4M"));
    assert!(same("cache.readdir", "true", "1"));
    assert!(same("cache.attr", "60", "060"));
    assert!(!same("minfreespace", "4194304", "4G"));
    assert!(!same("cache.readdir", "true", "nothing"));
    assert!(!same("category.create", "pfrd", "epmfs"));
}

#[test]
fn the_refused_option_is_found_in_what_a_program_prints() {
    for (printed, key) in [
        ("fuse: unknown option `cache.negative_entry=5'", "cache.negative-entry"),
        ("* ERROR: unknown option - statfs-ignore=ro", "statfs-ignore"),
        ("it ended at once: fuse: unknown option `threads=16'; more", "process-thread-count"),
        ("unknown option: bogus", "bogus"),
    ] {
        assert_eq!(refused_option(printed).as_deref(), Some(key), "{printed}");
    }
    assert_eq!(refused_option("fuse: mount failed: Operation not permitted"), None);
}

#[test]
fn branch_lists_hold_plain_absolute_paths_only() {
    let paths = ["/b/one", "/b/two words"];
    assert_eq!(branch_list(&paths, false).unwrap(), "/b/one=RW:/b/two words=RW");
    assert_eq!(branch_list(&paths, true).unwrap(), "/b/one=RO:/b/two words=RO");
    for bad in ["relative", "/a:b", "/a=RW", "/a,b", "/a*", "/a?", "/a[b]", "/{a,b}", "/a\nb", "/a\\b", "/~"]
    {
        assert!(check_branch_path(Path::new(bad)).is_err(), "{bad}");
    }
    use std::os::unix::ffi::OsStrExt;
    assert!(check_branch_path(Path::new(std::ffi::OsStr::from_bytes(b"/a\xff"))).is_err());
}

#[test]
fn a_branch_list_read_back_is_compared_without_its_limits() {
    assert_eq!(parse_branch_list("/a=RW:/b=RW\n"), parse_branch_list("/a:/b=RW,4G"));
    assert_ne!(parse_branch_list("/a=RW:/b=RW"), parse_branch_list("/a=RW:/b=RO"));
    assert_ne!(parse_branch_list("/a:/b"), parse_branch_list("/b:/a"));
    assert_ne!(parse_branch_list("/a:/b"), parse_branch_list("/a"));
}

proptest! {
    #[test]
    fn a_branch_always_has_room_for_new_files_when_it_is_empty(size in 1u64.., moves: bool) {
        let limit = minfreespace(Bytes::new(size), moves).get();
        prop_assert!(limit <= size / 4);
        prop_assert!(limit <= 1 << 30);
        prop_assert!(limit <= minfreespace(Bytes::new(size), false).get());
    }

    #[test]
    fn no_checked_value_can_smuggle_in_another_option(key in proptest::sample::select(allowed_keys()), value in ".*") {
        if check_option(key, &value).is_ok() {
            prop_assert!(!value.contains([',', ':', '=', '\\', '\n', '\0']));
        }
    }

    #[test]
    fn every_default_is_confirmed_by_itself_and_every_name_leads_back_to_its_key(minor in 33u16..60, patch in 0u16..9) {
        let none = BTreeMap::new();
        for setting in options(Version::new(2, minor, patch), &wanted(&none)).unwrap() {
            if let Some(value) = &setting.value {
                prop_assert!(confirmed(&setting, value));
                let complaint = format!("fuse: unknown option `{}={value}'", setting.name);
                prop_assert_eq!(refused_option(&complaint), Some(setting.key.to_owned()));
            }
        }
    }

    #[test]
    fn parsing_never_panics(text in ".*") {
        let _ = (Version::parse(&text), parse_branch_list(&text), refused_option(&text));
    }
}
