//! What is not allowed to be true of the files that pods wrote.

use std::collections::BTreeMap;

use super::super::faults::Told;
use super::records::{LENGTH, parse};

/// A pod that wrote to the volume; each has a tag of its own.
#[derive(Debug)]
pub struct Pod {
    /// In each of its records.
    pub tag: String,
    /// What it told.
    pub told: Told,
    /// Its last words may not have been heard: its machine lost its power, or did not answer.
    pub cut_off: bool,
    /// Its volume was taken from it: its calls may fail.
    pub taken: bool,
}

/// A file as it lies on a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The branch.
    pub branch: String,
    /// The file's name.
    pub file: String,
    /// All of it.
    pub bytes: Vec<u8>,
}

/// Everything that must not be, in words; nothing where all is well. `pods` in the order in which they had the volume.
pub fn faults(pods: &[Pod], found: &[Found]) -> Vec<String> {
    let mut faults = Vec::new();
    for pod in pods.iter().filter(|pod| !pod.taken) {
        if let Some((file, at, errno)) = pod.told.errors.first() {
            let count = pod.told.errors.len();
            faults.push(format!(
                "{}: {count} calls failed, first on {file} after {at} ms with error {errno}; its volume was never taken",
                pod.tag
            ));
        }
    }
    let mut names: Vec<&str> = found.iter().map(|f| f.file.as_str()).collect();
    names.extend(pods.iter().flat_map(|pod| pod.told.safe.keys().map(String::as_str)));
    names.sort_unstable();
    names.dedup();
    for name in names {
        let copies: Vec<&Found> = found.iter().filter(|f| f.file == name).collect();
        match copies.as_slice() {
            [] => faults.push(format!("{name} is nowhere, though records in it were safe")),
            [one] => faults.extend(in_file(pods, one)),
            several => {
                let on: Vec<String> =
                    several.iter().map(|f| format!("{} ({} bytes)", f.branch, f.bytes.len())).collect();
                faults.push(format!("{name} is on several branches: {}", on.join(", ")));
            }
        }
    }
    faults
}

/// What is wrong with one file.
fn in_file(pods: &[Pod], found: &Found) -> Vec<String> {
    let name = &found.file;
    let mut faults = Vec::new();
    // How often each record is there: by the pod's place in order, and the record's number.
    let mut there: BTreeMap<(usize, u64), usize> = BTreeMap::new();
    let mut before = (0, 0);
    // Told once for each writer: the first, and how many there are.
    let mut strangers: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (place, bytes) in found.bytes.chunks(LENGTH).enumerate() {
        let Some((tag, number)) = parse(bytes) else {
            if *bytes == [0; LENGTH]
                && let Some(pod) = ended_while_it_wrote(pods, before)
            {
                before = (pod, u64::MAX);
                continue;
            }
            let text = String::from_utf8_lossy(bytes);
            faults.push(format!("{name}: what is at record {place} was written by nobody: {text:?}"));
            continue;
        };
        let Some(pod) = pods.iter().position(|pod| pod.tag == tag) else {
            strangers.entry(tag).or_insert((place, 0)).1 += 1;
            continue;
        };
        if (pod, number) < before {
            let (last, at) = (&pods[before.0].tag, before.1);
            faults.push(format!("{name}: record {number} of {tag} comes after {at} of {last}: out of place"));
        }
        before = before.max((pod, number));
        *there.entry((pod, number)).or_default() += 1;
    }
    for (tag, (place, count)) in strangers {
        faults.push(format!("{name}: record {place} is of {tag}, who is not known; {count} are"));
    }
    for (index, pod) in pods.iter().enumerate() {
        let tag = &pod.tag;
        let safe: Vec<u64> =
            pod.told.safe.get(name).into_iter().flatten().map(|(number, _)| *number).collect();
        let lost: Vec<u64> =
            safe.iter().copied().filter(|number| !there.contains_key(&(index, *number))).collect();
        if let (Some(first), Some(last)) = (lost.first(), lost.last()) {
            let (lost, of) = (lost.len(), safe.len());
            faults.push(format!("{name}: {lost} of {of} safe records of {tag} are lost, {first} to {last}"));
        }
        // One may have been on its way when the pod ended.
        let next = safe.iter().max().map_or(0, |last| last + 1);
        for ((_, number), count) in there.range((index, 0)..=(index, u64::MAX)) {
            if *number > next && !pod.cut_off {
                faults.push(format!("{name}: record {number} of {tag} is there, which wrote up to {next}"));
            }
            // A call that failed was made again, and may have done its work both times.
            let failed = pod.told.failed(name, *number);
            if *count > 1 + failed {
                faults.push(format!(
                    "{name}: record {number} of {tag} is there {count} times, and failed {failed} times"
                ));
            }
        }
    }
    faults
}

/// The pod, of those that wrote nothing later than `before`, whose last record may be zeros: ext4 may have the size of a file on the
/// disk before what was appended (docs/SEMANTICS.md, Durability). None of it comes after that.
fn ended_while_it_wrote(pods: &[Pod], before: (usize, u64)) -> Option<usize> {
    let by_force = |index: &usize| pods[*index].cut_off || pods[*index].taken;
    (before.0..pods.len()).filter(by_force).find(|index| (*index, u64::MAX) > before)
}

#[cfg(test)]
mod tests {
    use super::super::records::record;
    use super::*;

    /// A pod that told that, in short: `f 0-3` are safe records, `f !4` is a failed one.
    fn pod(tag: &str, told: &str) -> Pod {
        let mut text = String::new();
        for line in told.lines() {
            let (file, numbers) = line.split_once(' ').unwrap();
            match (numbers.strip_prefix('!'), numbers.split_once('-')) {
                (Some(number), _) => text += &format!("error {file} {number} 10 5\n"),
                (None, Some((first, last))) => {
                    for number in first.parse::<u64>().unwrap()..=last.parse().unwrap() {
                        text += &format!("ack {file} {number} 10\n");
                    }
                }
                _ => text += &format!("ack {file} {numbers} 10\n"),
            }
        }
        Pod { tag: tag.to_owned(), told: Told::read(&text), cut_off: false, taken: false }
    }

    fn file(branch: &str, name: &str, records: &[(&str, u64)]) -> Found {
        let bytes = records.iter().flat_map(|(tag, number)| record(tag, *number).into_bytes()).collect();
        Found { branch: branch.to_owned(), file: name.to_owned(), bytes }
    }

    fn only(pods: &[Pod], found: &[Found], expected: &str) {
        let said = faults(pods, found);
        assert!(said.len() == 1 && said[0].contains(expected), "{said:?}");
    }

    #[test]
    fn files_that_hold_every_safe_record_once_and_in_order_are_well() {
        let pods = [pod("x", "f 0-2\ng 0-1"), pod("y", "f 0-1")];
        let found = [
            file("0", "f", &[("x", 0), ("x", 1), ("x", 2), ("y", 0), ("y", 1)]),
            file("1", "g", &[("x", 0), ("x", 1), ("x", 2)]),
        ];
        assert_eq!(faults(&pods, &found), [""; 0], "the last record of g was on its way");
        assert_eq!(faults(&[], &[]), [""; 0]);
    }

    #[test]
    fn a_safe_record_that_is_not_there_is_lost() {
        only(
            &[pod("x", "f 0-2")],
            &[file("0", "f", &[("x", 0), ("x", 1)])],
            "1 of 3 safe records of x are lost, 2",
        );
        only(&[pod("x", "f 0-2")], &[file("0", "f", &[("x", 0), ("x", 2)])], "are lost, 1 to 1");
        only(&[pod("x", "f 0-2")], &[], "f is nowhere");
    }

    #[test]
    fn a_record_of_a_pod_whose_time_was_over_is_out_of_place() {
        let pods = [pod("x", "f 0-1"), pod("y", "f 0-1")];
        let found = [file("0", "f", &[("x", 0), ("y", 0), ("x", 1), ("y", 1)])];
        only(&pods, &found, "record 1 of x comes after 0 of y: out of place");
    }

    #[test]
    fn a_file_on_two_branches_hides_one_of_them() {
        let found = [file("0", "f", &[("x", 0)]), file("1", "f", &[("x", 0)])];
        only(&[pod("x", "f 0-0")], &found, "several branches: 0 (32 bytes), 1 (32 bytes)");
    }

    #[test]
    fn a_record_may_be_there_as_often_as_it_was_tried() {
        let twice = [file("0", "f", &[("x", 0), ("x", 0)])];
        only(&[pod("x", "f 0-0")], &twice, "is there 2 times, and failed 0 times");
        let mut failed = pod("x", "f !0\nf 0-0");
        failed.taken = true;
        assert_eq!(faults(&[failed], &twice), [""; 0]);
    }

    #[test]
    fn bytes_that_nobody_wrote_are_told() {
        let mut found = file("0", "f", &[("x", 0), ("x", 1)]);
        found.bytes[40] ^= 1;
        let said = faults(&[pod("x", "f 0-1")], &[found.clone()]);
        assert!(said[0].contains("at record 1 was written by nobody"), "{said:?}");
        found.bytes.truncate(LENGTH);
        found.bytes.extend([0; LENGTH]);
        assert!(faults(&[pod("x", "f 0-0")], &[found])[0].contains("written by nobody"));
        only(&[], &[file("0", "f", &[("z", 0)])], "record 0 is of z, who is not known");
    }

    #[test]
    fn the_last_record_of_a_pod_that_ended_by_force_may_be_zeros() {
        let pods = |taken| {
            let mut first = pod("x", "f 0-0");
            first.taken = taken;
            [first, pod("y", "f 0-1")]
        };
        let zeros = |after: usize, count: usize| {
            let mut found = file("0", "f", &[("x", 0), ("y", 0), ("y", 1)]);
            let at = after * LENGTH;
            found.bytes.splice(at..at, vec![0; count * LENGTH]);
            [found]
        };
        assert_eq!(faults(&pods(true), &zeros(1, 1)), [""; 0]);
        only(&pods(false), &zeros(1, 1), "at record 1 was written by nobody");
        only(&pods(true), &zeros(1, 2), "at record 2 was written by nobody");
        only(&pods(true), &zeros(0, 1), "record 0 of x comes after");
        only(&pods(true), &zeros(2, 1), "at record 2 was written by nobody");
        // A safe one is lost all the same.
        let mut lost = zeros(1, 1);
        lost[0].bytes.drain(..LENGTH);
        only(&pods(true), &lost, "1 of 1 safe records of x are lost");
    }

    #[test]
    fn more_records_than_the_one_on_its_way_are_told_of_a_pod_that_was_heard() {
        let found = [file("0", "f", &[("x", 0), ("x", 1), ("x", 2)])];
        let mut heard = pod("x", "f 0-0");
        only(std::slice::from_ref(&heard), &found, "record 2 of x is there, which wrote up to 1");
        heard.cut_off = true;
        assert_eq!(faults(&[heard], &found), [""; 0]);
    }

    #[test]
    fn a_call_fails_only_where_the_volume_was_taken() {
        let found = [file("0", "f", &[("x", 0)])];
        let mut pod = pod("x", "f 0-0\nf !1");
        only(std::slice::from_ref(&pod), &found, "x: 1 calls failed, first on f after 10 ms with error 5");
        pod.taken = true;
        assert_eq!(faults(&[pod], &found), [""; 0]);
    }
}
