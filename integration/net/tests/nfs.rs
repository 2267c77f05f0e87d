//! Directories over NFS between machines: several writers, fences, lost power, cut links.

use std::time::Duration;

use super::transport::{self, Kind};
use crate::support::{Machine, Network, Result, Running, on_shared};

/// Where the owner's pool is mounted, and a consumer's attachment of the first branch.
const POOL: &str = "/pool";
const DATA: &str = "/run/union-csi/attached/v-0@1/data";

const SOON: Duration = Duration::from_secs(30);

/// Through the contract of transports.
const NFS: Kind = Kind {
    name: "nfs",
    one_peer: false,
    gives_up: false,
    grows: false,
    make: |owner| {
        owner
            .run(
                "mkfs.ext4 -q -F /disk/data; mkdir -p /mnt; mount /disk/data /mnt; mkdir -p /mnt/branch/data",
            )
            .map(drop)
    },
    source: "/mnt/branch",
    bytes: "/mnt/branch/data/bytes",
    target: |mount| format!("{mount}/data/bytes"),
    format: |_, _| Ok(()),
    open: |_, mount| Ok(format!("{mount}/data")),
    close: |_, _| Ok(()),
    clear: |owner| {
        owner.run("echo 0 >/proc/fs/nfsd/threads; umount /run/union-csi/nfs; umount /mnt").map(drop)
    },
};

/// A pool with two branches, the first of which is exported.
fn serve(owner: &Machine) -> Result {
    owner.run(format!(
        "mkfs.ext4 -q -F /disk/data && mkdir -p {POOL} && mount /disk/data {POOL} && mkdir -p {POOL}/v-0/data {POOL}/v-1/data"
    ))?;
    export(owner)
}

fn export(owner: &Machine) -> Result {
    owner.run(format!("inside nfs export v-0@1 {POOL}/v-0")).map(drop)
}

fn allow(owner: &Machine, consumer: &Machine) -> Result {
    owner.run(format!("inside nfs allow v-0@1 {}", consumer.address())).map(drop)
}

fn fence(owner: &Machine, consumer: &Machine) -> Result {
    owner.run(format!("inside nfs fence v-0@1 {}", consumer.address())).map(drop)
}

fn attach(consumer: &Machine, owner: &Machine) -> Result {
    consumer.run(format!("inside nfs attach v-0@1 {}", owner.address())).map(drop)
}

/// One owner, and two consumers that may use its branch.
fn two_consumers(net: &Network) -> Result<(&Machine, &Machine, &Machine)> {
    let (owner, one, two) = (net.machine("a"), net.machine("b"), net.machine("c"));
    serve(owner)?;
    for consumer in [one, two] {
        allow(owner, consumer)?;
        attach(consumer, owner)?;
    }
    Ok((owner, one, two))
}

/// One owner, a consumer that has its branch, and a writer there to whom some records are safe.
fn one_writer(net: &Network, bound: Duration) -> Result<(&Machine, &Machine, Running)> {
    let (owner, one) = (net.machine("a"), net.machine("b"));
    serve(owner)?;
    allow(owner, one)?;
    attach(one, owner)?;
    let mut writer = one.start_command(format!("inside nfs append {DATA}/log"), bound)?;
    assert!(writer.says("00000010", SOON)?);
    Ok((owner, one, writer))
}

/// Ends a writer that never had an error, and requires every record that it was told is safe.
fn lost_nothing(owner: &Machine, mut writer: Running) -> Result {
    writer.kill();
    let told = writer.output_so_far();
    assert!(!told.contains("ended"), "{told}");
    require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/log"))?, &told);
    Ok(())
}

fn leave(owner: &Machine, consumers: &[&Machine]) -> Result {
    for consumer in consumers {
        consumer.run("inside nfs detach v-0@1")?;
    }
    owner.run("inside nfs unexport v-0; test -z \"$(inside nfs exports)\"")?;
    // Nothing of the server keeps the disk.
    owner.run(format!("echo 0 >/proc/fs/nfsd/threads; umount /run/union-csi/nfs; umount {POOL}"))?;
    Ok(())
}

/// The records that are in a log, and those that a writer was told are safe: the latter must be among the former.
fn require_acknowledged(log: &str, told: &str) {
    let found: std::collections::BTreeSet<&str> = log.lines().collect();
    let acknowledged: Vec<&str> = told.lines().filter(|l| !l.starts_with("ended")).collect();
    assert!(!acknowledged.is_empty());
    let lost: Vec<_> = acknowledged.iter().filter(|record| !found.contains(*record)).collect();
    assert!(
        lost.is_empty(),
        "{} of {} acknowledged records are lost: {lost:?}",
        lost.len(),
        acknowledged.len()
    );
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nfs_everything_can_be_done_twice() {
    on_shared(|net| transport::everything_can_be_done_twice(net, &NFS));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nfs_generations_only_rise() {
    on_shared(|net| transport::generations_only_rise(net, &NFS));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nfs_a_fence_ends_a_live_writer_and_nothing_of_it_lands_afterwards() {
    on_shared(|net| transport::a_fence_ends_a_live_writer_and_nothing_of_it_lands_afterwards(net, &NFS));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nfs_what_a_partitioned_consumer_still_has_to_send_never_lands_after_its_fence() {
    on_shared(|net| {
        transport::what_a_partitioned_consumer_still_has_to_send_never_lands_after_its_fence(net, &NFS)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nfs_a_consumer_waits_while_the_link_is_cut_and_goes_on_after_it() {
    on_shared(|net| transport::a_consumer_waits_while_the_link_is_cut_and_goes_on_after_it(net, &NFS));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nfs_force_detach_returns_while_the_link_is_cut_and_so_does_giving_up() {
    on_shared(|net| transport::force_detach_returns_while_the_link_is_cut_and_so_does_giving_up(net, &NFS));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn two_nodes_write_one_directory_by_nfs() {
    on_shared(|net| {
        let (owner, one, two) = two_consumers(net)?;
        one.run(format!("echo one >{DATA}/one && chown 1234:99 {DATA}/one && chmod 640 {DATA}/one && setfattr -n user.colour -v red {DATA}/one"))?;
        two.run(format!("echo two >{DATA}/two && sync {DATA}/two"))?;
        assert_eq!(one.run(format!("cat {DATA}/two"))?, "two");
        assert_eq!(two.run(format!("cat {DATA}/one; stat -c '%u %g %a' {DATA}/one"))?, "one\n1234 99 640");
        assert_eq!(two.run(format!("getfattr --only-values -n user.colour {DATA}/one"))?, "red");
        assert_eq!(owner.run(format!("stat -c %u {POOL}/v-0/data/two"))?, "0", "root is not squashed");

        // A lock of one node keeps the other out, until it is gone.
        one.run(format!("touch {DATA}/lock"))?;
        let mut holder =
            one.start_command(format!("inside nfs hold {DATA}/lock"), Duration::from_secs(120))?;
        assert!(holder.says("held", SOON)?);
        assert_eq!(two.run(format!("inside nfs try-lock {DATA}/lock"))?, "taken");
        holder.kill();
        two.eventually(SOON, format!("test $(inside nfs try-lock {DATA}/lock) = free"))?;

        // What one node has open, it keeps through a rename and an unlink of its own, and a rename of the other.
        let kept = one.run(format!(
            "exec 3<>{DATA}/open; echo first >&3; mv {DATA}/open {DATA}/moved; rm {DATA}/moved; echo second >&3; cat /proc/self/fd/3"
        ))?;
        assert_eq!(kept, "first\nsecond");
        let mut reader = one.start_command(
            format!("echo whole >{DATA}/theirs; exec 3<{DATA}/theirs; echo open; sleep 5; cat <&3"),
            SOON,
        )?;
        assert!(reader.says("open", SOON)?);
        two.run(format!("mv {DATA}/theirs {DATA}/renamed"))?;
        assert_eq!(reader.wait()?.text(), "open\nwhole");
        leave(owner, &[one, two])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn who_is_not_allowed_by_nfs_is_refused_and_a_fence_of_one_keeps_the_other() {
    on_shared(|net| {
        let (owner, one, two) = (net.machine("a"), net.machine("b"), net.machine("c"));
        serve(owner)?;
        allow(owner, one)?;
        attach(one, owner)?;
        let refused = two.attempt(SOON, format!("inside nfs attach v-0@1 {}", owner.address()))?;
        assert!(refused.errors().contains("REFUSED"), "{refused}");
        assert_eq!(
            two.run("ls /run/union-csi/attached 2>/dev/null || true; grep -c nfs4 /proc/mounts || true")?,
            "0"
        );
        allow(owner, two)?;
        attach(two, owner)?;

        let mut first =
            one.start_command(format!("inside nfs append {DATA}/first"), Duration::from_secs(120))?;
        let mut second =
            two.start_command(format!("inside nfs append {DATA}/second"), Duration::from_secs(120))?;
        assert!(first.says("00000010", SOON)? && second.says("00000010", SOON)?);
        let lock = two.start_command(format!("inside nfs hold {DATA}/lock"), Duration::from_secs(120))?;
        let mut lock = lock;
        assert!(lock.says("held", SOON)?);

        fence(owner, one)?;
        // It waits, without an error, and changes nothing.
        let size = owner.run(format!("stat -c %s {POOL}/v-0/data/first"))?;
        assert_eq!(owner.run(format!("sleep 5; stat -c %s {POOL}/v-0/data/first"))?, size);
        assert!(!first.has_ended(), "{}", first.output_so_far());
        assert_eq!(owner.run("inside nfs exports")?, format!("v-0@1 {}", two.address()));

        // The other one goes on, with its lock.
        let so_far = second.output_so_far().lines().count();
        assert!(second.says(&format!("{:08}", so_far + 10), SOON)?);
        assert_eq!(one.run("inside nfs attachments")?, "v-0@1 Connecting");
        one.run("inside nfs force-detach v-0@1")?;
        let ended = first.wait()?;
        assert!(ended.text().lines().last().is_some_and(|l| l.starts_with("ended by")), "{ended}");
        assert_eq!(owner.run(format!("stat -c %s {POOL}/v-0/data/first"))?, size);
        require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/first"))?, &ended.text());
        allow(owner, one)?;
        attach(one, owner)?;
        assert_eq!(one.run(format!("inside nfs try-lock {DATA}/lock"))?, "taken");
        second.kill();
        lock.kill();
        require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/second"))?, &second.output_so_far());
        leave(owner, &[one, two])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_nfs_server_that_answers_with_another_branch_is_foreign_and_nothing_of_it_stays() {
    on_shared(|net| {
        let (owner, consumer) = (net.machine("a"), net.machine("b"));
        serve(owner)?;
        allow(owner, consumer)?;
        let identity = format!("{POOL}/v-0/export.json");
        let true_one = owner.run(format!("cat {identity}"))?;
        for (false_one, told) in [
            (true_one.replace("v-0", "v-1"), "says branch v-1, generation 1"),
            (true_one.replace("\"generation\":1", "\"generation\":7"), "says branch v-0, generation 7"),
            ("{".to_owned(), "cannot be understood"),
            (String::new(), "has no export.json"),
        ] {
            assert_ne!(false_one, true_one);
            match false_one.as_str() {
                "" => owner.run(format!("rm {identity}")).map(drop)?,
                text => owner.write(&identity, text.as_bytes())?,
            }
            let refused = consumer.attempt(SOON, format!("inside nfs attach v-0@1 {}", owner.address()))?;
            assert!(
                refused.errors().contains("not with branch v-0") && refused.errors().contains(told),
                "{refused}"
            );
            consumer
                .run("test -z \"$(ls /run/union-csi/attached 2>/dev/null)\"; ! grep -q nfs4 /proc/mounts")?;
        }
        // The owner puts right what is its own, and the branch is attached.
        export(owner)?;
        attach(consumer, owner)?;
        leave(owner, &[consumer])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn who_only_reads_by_nfs_is_refused_writes_by_the_server_and_a_change_of_that_is_a_fence() {
    on_shared(|net| {
        let (owner, one, two) = (net.machine("a"), net.machine("b"), net.machine("c"));
        serve(owner)?;
        owner.run(format!("echo kept >{POOL}/v-0/data/file; chmod 666 {POOL}/v-0/data/file"))?;
        owner.run(format!("inside nfs allow-to-read v-0@1 {}", one.address()))?;
        allow(owner, two)?;
        for consumer in [one, two] {
            attach(consumer, owner)?;
            assert_eq!(consumer.run(format!("cat {DATA}/file"))?, "kept");
        }
        // Its own mount lets it write.
        one.run(format!("grep ' {}' /proc/mounts | grep -q ' nfs4 rw'", DATA.trim_end_matches("/data")))?;
        for attempt in ["echo new >", "touch ", "mkdir ", "echo more >>"] {
            for name in ["file", "new"] {
                if (attempt, name) == ("mkdir ", "file") {
                    continue;
                }
                let refused = one.attempt(SOON, format!("{attempt}{DATA}/{name}"))?;
                assert!(refused.errors().contains("Read-only file system"), "{attempt}{name}: {refused}");
            }
        }
        for attempt in ["rm", "chmod 600", "chown 7"] {
            let refused = one.attempt(SOON, format!("{attempt} {DATA}/file"))?;
            assert!(refused.errors().contains("Read-only file system"), "{attempt}: {refused}");
        }
        two.run(format!("echo new >{DATA}/new"))?;
        assert_eq!(one.run(format!("cat {DATA}/new"))?, "new", "beside who writes");

        // Who wrote may only read from now on: what it has open is fenced, and it attaches anew.
        let mut writer =
            two.start_command(format!("inside nfs append {DATA}/log"), Duration::from_secs(120))?;
        assert!(writer.says("00000010", SOON)?);
        owner.run(format!("inside nfs allow-to-read v-0@1 {}", two.address()))?;
        let size = owner.run(format!("stat -c %s {POOL}/v-0/data/log"))?;
        assert_eq!(owner.run(format!("sleep 5; stat -c %s {POOL}/v-0/data/log"))?, size);
        two.run("inside nfs force-detach v-0@1")?;
        let fenced = writer.wait()?;
        assert!(fenced.text().contains("ended by "), "{fenced}");
        require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/log"))?, &fenced.text());
        attach(two, owner)?;
        let refused = two.attempt(SOON, format!("touch {DATA}/two"))?;
        assert!(refused.errors().contains("Read-only file system"), "{refused}");
        // And the other way round; a server that is told anew all it exports keeps each right.
        owner.run(format!("inside nfs allow v-0@1 {}", one.address()))?;
        one.run("inside nfs force-detach v-0@1")?;
        attach(one, owner)?;
        one.run(format!("echo written >{DATA}/one"))?;
        owner.run("inside nfs allow v-0@1 10.77.0.4; inside nfs fence v-0@1 10.77.0.4")?;
        let refused = two.attempt(SOON, format!("touch {DATA}/two"))?;
        assert!(refused.errors().contains("Read-only file system"), "{refused}");
        leave(owner, &[one, two])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_writer_waits_for_an_nfs_owner_that_lost_power_and_goes_on() {
    on_shared(|net| {
        let (owner, one, two) = two_consumers(net)?;
        let mut writer =
            one.start_command(format!("inside nfs append {DATA}/log"), Duration::from_secs(300))?;
        let mut lock = two.start_command(format!("inside nfs hold {DATA}/lock"), Duration::from_secs(300))?;
        assert!(writer.says("00000030", SOON)? && lock.says("held", SOON)?);
        owner.pull_plug();
        one.eventually(SOON, "test \"$(inside nfs attachments)\" = 'v-0@1 Connecting'")?;
        owner.start()?;
        owner.run(format!("mkdir -p {POOL} && mount /disk/data {POOL}"))?;
        assert_eq!(owner.run("inside nfs exports")?, "", "a restart empties the kernel");
        // One is allowed late: it waits meanwhile.
        export(owner)?;
        allow(owner, two)?;
        let before = writer.output_so_far().lines().count();
        assert!(!writer.has_ended());
        allow(owner, one)?;
        assert!(
            writer.says(&format!("{:08}", before + 20), Duration::from_secs(60))?,
            "{}",
            writer.output_so_far()
        );
        lost_nothing(owner, writer)?;
        assert_eq!(one.run("inside nfs attachments")?, "v-0@1 Live");
        // The lock was claimed again.
        let taken = format!("test $(inside nfs try-lock {DATA}/lock) = taken");
        one.eventually(SOON, taken)?;
        lock.kill();
        leave(owner, &[one, two])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_nfs_attachment_of_an_owner_that_is_gone_is_taken_away_without_waiting() {
    on_shared(|net| {
        let (owner, one, writer) = one_writer(net, Duration::from_secs(200))?;
        net.cut("a", "b");
        one.eventually(SOON, "test \"$(inside nfs attachments)\" = 'v-0@1 Connecting'")?;
        let detach = one.attempt(Duration::from_secs(5), "inside nfs detach v-0@1")?;
        assert!(!detach.success(), "it is in use");
        one.run_within(SOON, "inside nfs force-detach v-0@1 && ! grep -q nfs4 /proc/self/mountinfo")?;
        let ended = writer.wait()?;
        assert!(ended.text().lines().last().is_some_and(|l| l.starts_with("ended by")), "{ended}");
        assert!(ended.stuck.is_empty(), "{ended}");

        // Fenced while it could not be reached, it changes nothing when it is back.
        fence(owner, one)?;
        let size = owner.run(format!("stat -c %s {POOL}/v-0/data/log"))?;
        net.heal("a", "b");
        assert_eq!(owner.run(format!("sleep 10; stat -c %s {POOL}/v-0/data/log"))?, size);
        require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/log"))?, &ended.text());
        leave(owner, &[])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn who_lost_an_nfs_branch_while_its_owner_was_off_waits_for_it_no_longer_than_until_it_is_back() {
    on_shared(|net| {
        let (owner, one, writer) = one_writer(net, Duration::from_secs(200))?;
        let works = works_in_it(one)?;
        owner.pull_plug();
        let_go(one, writer)?;
        // Whatever becomes of the branch: nothing of it is exported here.
        let hear = format!("inside nfs hear v-0@1 {POOL}/v-0 {}", one.address());
        start_again(owner)?;
        owner.run(format!("{hear}; {hear}"))?;
        is_told_so(owner, one, works)?;
        owner.run(format!("{hear}; {}", refused(one)))?;
        leave(owner, &[])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn who_was_fenced_by_nfs_before_its_owner_lost_power_waits_for_it_no_longer_than_until_it_is_back() {
    on_shared(|net| {
        let (owner, one, writer) = one_writer(net, Duration::from_secs(200))?;
        let works = works_in_it(one)?;
        net.isolate("b");
        fence(owner, one)?;
        owner.run("inside nfs unexport v-0")?;
        owner.pull_plug();
        net.heal_all();
        let_go(one, writer)?;
        start_again(owner)?;
        is_told_so(owner, one, works)?;
        leave(owner, &[])
    });
}

/// A program that works in the directory, which is kept by that also when it is unmounted, until it is told that it is gone: since
/// Linux 6.5 by its own kernel (EIO), before by the owner's (ESTALE). It tells first which.
fn works_in_it(consumer: &Machine) -> Result<Running> {
    let error = "error=Stale; compgen -G '/sys/fs/nfs/*:*/shutdown' >/dev/null && error=Input/output";
    let until_told = "until [[ $(stat log 2>&1 || true) == *$error* ]]; do sleep .5; done";
    let script = format!("cd {DATA}; {error}; echo works until $error; {until_told}; echo told");
    let mut works = consumer.start_command(script, Duration::from_secs(300))?;
    assert!(works.says("works", SOON)?);
    Ok(works)
}

/// A consumer whose owner is off gives its branch up.
fn let_go(consumer: &Machine, writer: Running) -> Result {
    consumer.eventually(SOON, "test \"$(inside nfs attachments)\" = 'v-0@1 Connecting'")?;
    consumer.run_within(SOON, "inside nfs force-detach v-0@1")?;
    writer.kill();
    Ok(())
}

/// An owner that lost its power has its disk again, and exports nothing yet.
fn start_again(owner: &Machine) -> Result {
    owner.start()?;
    owner.run(format!("mkdir -p {POOL} && mount /disk/data {POOL}")).map(drop)
}

/// Looks after the owner, and whether it refuses what the consumer let go of.
fn refused(consumer: &Machine) -> String {
    format!("inside nfs tend; [ -e {POOL}/fences/refused/{}/v-0@1:* ]", consumer.address())
}

/// Both ends are looked after until the owner has heard that the consumer let go, and who works in the directory is told.
fn is_told_so(owner: &Machine, consumer: &Machine, mut works: Running) -> Result {
    let by_its_own = works.output_so_far().contains("until Input/output");
    assert_eq!(works.says("told", Duration::from_secs(if by_its_own { 30 } else { 1 }))?, by_its_own);
    let refused = refused(consumer);
    let told = (0..30).any(|_| {
        consumer.run("inside nfs attachments").is_ok_and(|found| found.is_empty())
            && owner.attempt(SOON, &refused).is_ok_and(|output| output.success())
    });
    assert!(told, "it is not heard that it let go");
    assert!(works.says("told", Duration::from_secs(90))?, "{}", works.output_so_far());
    Ok(())
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_consumer_fenced_by_nfs_while_it_was_cut_off_never_writes_again() {
    on_shared(|net| {
        let (owner, one, two) = two_consumers(net)?;
        let mut writer =
            one.start_command(format!("inside nfs append {DATA}/log"), Duration::from_secs(200))?;
        let mut lock = one.start_command(format!("inside nfs hold {DATA}/lock"), Duration::from_secs(200))?;
        assert!(writer.says("00000010", SOON)? && lock.says("held", SOON)?);
        net.isolate("b");
        fence(owner, one)?;
        let size = owner.run(format!("stat -c %s {POOL}/v-0/data/log"))?;
        // Its lock went with it.
        assert_eq!(two.run(format!("inside nfs try-lock {DATA}/lock"))?, "free");
        net.heal_all();
        std::thread::sleep(Duration::from_secs(10));
        assert!(!writer.has_ended(), "{}", writer.output_so_far());
        one.run("inside nfs force-detach v-0@1")?;
        let ended = writer.wait()?;
        assert!(ended.text().lines().last().is_some_and(|l| l.starts_with("ended by")), "{ended}");
        assert_eq!(owner.run(format!("stat -c %s {POOL}/v-0/data/log"))?, size);
        require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/log"))?, &ended.text());
        lock.kill();
        leave(owner, &[two])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn what_a_fenced_consumer_has_of_other_branches_goes_on_when_it_lets_go_by_force() {
    on_shared(|net| {
        let (owner, one) = (net.machine("a"), net.machine("b"));
        serve(owner)?;
        let (at, peer) = (owner.address(), one.address());
        owner.run(format!("inside nfs export v-1@1 {POOL}/v-1"))?;
        owner.run(format!("inside nfs allow v-0@1 {peer}; inside nfs allow v-1@1 {peer}"))?;
        one.run(format!("inside nfs attach v-0@1 {at}; inside nfs attach v-1@1 {at}"))?;
        let other = DATA.replace("v-0", "v-1");
        let long = Duration::from_secs(200);
        let mut fenced = one.start_command(format!("inside nfs append {DATA}/log"), long)?;
        let mut kept = one.start_command(format!("inside nfs append {other}/log"), long)?;
        assert!(fenced.says("00000010", SOON)? && kept.says("00000010", SOON)?);
        net.isolate("b");
        fence(owner, one)?;
        net.heal_all();
        std::thread::sleep(Duration::from_secs(10));
        assert!(!fenced.has_ended() && !kept.has_ended());
        one.run_within(SOON, "inside nfs force-detach v-0@1")?;
        owner.run("inside nfs tend")?;
        owner.run(format!("[ -e {POOL}/fences/refused/{peer}/v-0@1:* ]"))?;
        let before = kept.output_so_far().lines().count();
        assert!(kept.says(&format!("{:08}", before + 20), SOON)?, "{}", kept.output_so_far());
        kept.kill();
        let told = kept.output_so_far();
        assert!(!told.contains("ended"), "{told}");
        require_acknowledged(&owner.run(format!("cat {POOL}/v-1/data/log"))?, &told);
        require_acknowledged(&owner.run(format!("cat {POOL}/v-0/data/log"))?, &fenced.wait()?.text());
        one.run("inside nfs detach v-1@1")?;
        owner.run("inside nfs unexport v-1")?;
        leave(owner, &[])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn what_an_owner_has_not_exported_yet_is_waited_for_also_by_who_asks_a_minute_later() {
    on_shared(|net| {
        let (owner, one, mut writer) = one_writer(net, Duration::from_secs(300))?;
        net.isolate("b");
        // As after a boot, with a pool that is late: the server runs, and knows of other branches only.
        owner.run(format!(
            "umount -l /run/union-csi/nfs/peers/{}/v-0@1; for each in nfsd.fh nfsd.export; do echo 1 >/proc/net/rpc/$each/flush; done",
            one.address()
        ))?;
        // Kernels before 5.6 took what nobody had told of for 30 s for refused.
        std::thread::sleep(Duration::from_secs(60));
        net.heal_all();
        std::thread::sleep(Duration::from_secs(10));
        assert!(!writer.has_ended(), "{}", writer.output_so_far());
        let before = writer.output_so_far().lines().count();
        allow(owner, one)?;
        assert!(writer.says(&format!("{:08}", before + 20), SOON)?, "{}", writer.output_so_far());
        lost_nothing(owner, writer)?;
        leave(owner, &[one])
    });
}
