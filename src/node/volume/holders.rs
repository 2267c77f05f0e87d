//! Who uses a volume here, in words for the operator who is to end that.

use std::path::Path;

use crate::platform::holders::Holder;

/// As many are named: each has to be ended, and the next look names the others.
const NAMED: usize = 4;

/// Names those who hold a branch, and where its volume is published; empty where neither is known.
pub(super) fn named<'p>(holders: &[Holder], targets: impl Iterator<Item = &'p Path>) -> String {
    let mut all: Vec<String> = holders.iter().map(one).collect();
    all.extend(targets.map(|target| format!("what uses {}", target.display())));
    let more = all.len().saturating_sub(NAMED);
    all.truncate(NAMED);
    let named = all.join(", ");
    if more == 0 { named } else { format!("{named}, and {more} more") }
}

fn one(holder: &Holder) -> String {
    let pod = pod_of(&holder.cgroup).map(|uid| format!(" of pod {uid}")).unwrap_or_default();
    let files = match holder.files {
        0 => None,
        1 => Some("1 open file".to_owned()),
        many => Some(format!("{many} open files")),
    };
    let mounted = holder.mounted.as_ref().map(|at| format!("mounted at {}", at.display()));
    let how: Vec<String> = files.into_iter().chain(mounted).collect();
    format!("process {} ({}){pod}: {}", holder.pid, holder.program, how.join(", "))
}

/// The UID of the pod that a process is of, by its cgroup: the kubelet names those `podUID`, or `…-podUID.slice` with `_` for `-`.
fn pod_of(cgroup: &str) -> Option<String> {
    /// Length of a UID in its usual form.
    const LENGTH: usize = 36;
    cgroup.split(['/', '\n']).find_map(|name| {
        let name = name.strip_suffix(".slice").unwrap_or(name);
        let uid = name.rsplit_once("pod")?.1;
        let fits =
            uid.len() == LENGTH && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-' || b == b'_');
        fits.then(|| uid.replace('_', "-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0a1b2c3d-0000-4000-8000-0123456789ab";

    fn holder(pid: i32, cgroup: &str) -> Holder {
        Holder { pid, program: "sleep".to_owned(), cgroup: cgroup.to_owned(), files: 2, mounted: None }
    }

    #[test]
    fn a_pod_is_known_by_its_cgroup_under_either_driver_of_the_kubelet() {
        let by_systemd = format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{}.slice/cri-containerd-1f.scope\n",
            UID.replace('-', "_")
        );
        let by_files = format!("4:memory:/kubepods/besteffort/pod{UID}/1f\n0::/\n");
        for text in [by_systemd, by_files] {
            assert_eq!(pod_of(&text).as_deref(), Some(UID), "{text}");
        }
        for text in ["0::/system.slice/union-csi.service\n", "0::/podman.slice\n", "", "0::/pod"] {
            assert_eq!(pod_of(text), None, "{text}");
        }
    }

    #[test]
    fn those_who_hold_a_branch_are_named_with_what_to_look_for_and_not_all_of_very_many() {
        let mounted = Holder { files: 0, mounted: Some("/data".into()), ..holder(8, "0::/x\n") };
        let target = Path::new("/pods/p/mount");
        let told = named(&[holder(7, &format!("0::/kubepods/pod{UID}/c")), mounted], [target].into_iter());
        assert_eq!(
            told,
            format!(
                "process 7 (sleep) of pod {UID}: 2 open files, process 8 (sleep): mounted at /data, what uses /pods/p/mount"
            )
        );
        let many: Vec<Holder> = (1..=9).map(|pid| holder(pid, "")).collect();
        assert!(named(&many, std::iter::empty()).ends_with(", and 5 more"));
        assert_eq!(named(&[], std::iter::empty()), "");
    }
}
