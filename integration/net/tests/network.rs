//! The machines and their network are what the other tests take them for.

use std::time::{Duration, Instant};

use crate::support::{Options, on, on_shared};

const SECOND: Duration = Duration::from_secs(1);

#[test]
#[ignore = "boots machines: integration/net/run"]
fn three_machines_reach_each_other() {
    on_shared(|net| {
        for from in net.machines() {
            let others = net.machines().iter().map(|to| format!("{} {}", to.address(), to.name()));
            let others = others.collect::<Vec<_>>().join(" ");
            from.run(format!("for to in {others}; do ping -c 1 -W 5 $to >/dev/null; done"))?;
            assert_eq!(from.run("hostname")?, from.name());
            let version = from.run("union-csi --version")?;
            assert!(version.starts_with("union-csi "), "the program under test says {version:?}");
        }
        assert!(net.passed("a", "b") > 0 && net.passed("c", "b") > 0);
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_cut_link_drops_everything_until_it_is_healed() {
    on_shared(|net| {
        let (a, c) = (net.machine("a"), net.machine("c"));
        let ping = |to: &str| format!("ping -c 1 -W 1 {to} >/dev/null");
        a.run(ping("b"))?;
        net.cut("a", "b");
        assert!(!a.attempt(10 * SECOND, ping("b"))?.success(), "a cut link lets a ping through");
        a.run(ping("c"))?;
        c.run(ping("b"))?;
        net.heal("a", "b");
        a.eventually(10 * SECOND, ping("b"))?;

        net.cut_one_way("b", "a");
        let before = net.passed("a", "b");
        assert!(!a.attempt(10 * SECOND, ping("b"))?.success(), "an answer came over a cut direction");
        assert!(net.passed("a", "b") > before, "the other direction is cut too");
        net.heal("a", "b");

        net.isolate("b");
        assert!(!c.attempt(10 * SECOND, ping("b"))?.success(), "an isolated machine answers");
        net.heal_all();
        c.eventually(10 * SECOND, ping("b"))?;
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_delayed_link_delays_each_packet_in_both_directions() {
    on_shared(|net| {
        let a = net.machine("a");
        let time = |to: &str| -> crate::support::Result<f64> {
            let said = a.run(format!(
                "ping -c 3 -W 5 {to} | sed -n 's/.*time=\\([0-9.]*\\) ms/\\1/p' | sort -n | head -n 1"
            ))?;
            Ok(said.parse().expect("a time"))
        };
        net.delay("a", "b", Duration::from_millis(300));
        let (slow, other) = (time("b")?, time("c")?);
        assert!(slow >= 600.0, "{slow} ms to b and back");
        assert!(other < slow, "{other} ms to c and back, over a link that is not delayed");
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_narrow_link_lets_no_more_through_than_it_is_said_to() {
    on_shared(|net| {
        let (a, b) = (net.machine("a"), net.machine("b"));
        let bytes_per_second = 100_000;
        net.limit("a", "b", bytes_per_second);
        let taking = b.start_command("nc -l -p 5000 -w 60 | wc -c", 100 * SECOND)?;
        b.eventually(10 * SECOND, "netstat -ltn | grep -q :5000")?;
        let begun = Instant::now();
        a.run("head -c 400000 /dev/zero >/dev/tcp/b/5000")?;
        let output = taking.wait()?;
        assert_eq!(output.text(), "400000", "{output}");
        // A little of it is in the buffers of the switch at the end.
        assert!(begun.elapsed() >= 3 * SECOND, "{:?} for four seconds' worth", begun.elapsed());
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_paused_machine_says_nothing_until_it_goes_on() {
    on_shared(|net| {
        let (a, b) = (net.machine("a"), net.machine("b"));
        let mut counting =
            b.start_command("for i in $(seq 1000); do echo $i; sleep 0.1; done", 100 * SECOND)?;
        assert!(counting.says("3", 10 * SECOND)?);
        b.pause();
        assert!(
            !a.attempt(10 * SECOND, "ping -c 1 -W 2 b >/dev/null")?.success(),
            "a paused machine answers"
        );
        let told = counting.output_so_far();
        std::thread::sleep(SECOND);
        assert_eq!(counting.output_so_far(), told, "a paused machine goes on");
        b.resume();
        a.eventually(10 * SECOND, "ping -c 1 -W 1 b >/dev/null")?;
        assert!(counting.says("\n50\n", 60 * SECOND)?, "it does not go on");
        counting.kill();
        let output = counting.wait()?;
        assert!(!output.success() && !output.timed_out, "{output}");
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_network_of_its_own_has_what_was_asked_for() {
    let options = Options::new(1).memory_mib(320).disk("second", 64 << 20).mtu(9000);
    on(&options, |net| {
        let a = net.machine("a");
        assert_eq!(
            a.run("blockdev --getsize64 /disk/data /disk/second")?,
            format!("{}\n{}", 1 << 30, 64 << 20)
        );
        assert_eq!(a.run("cat /sys/class/net/eth0/mtu")?, "9000");
        let kib: u32 =
            a.run("sed -n 's/MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo")?.parse().expect("a number");
        assert!((256 << 10..320 << 10).contains(&kib), "{kib} KiB of memory");
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_command_that_hangs_is_killed_at_its_bound_and_holds_up_no_other() {
    on_shared(|net| {
        let a = net.machine("a");
        let begun = Instant::now();
        let hanging = a.start_command("echo begun; sleep 1000; echo never", 5 * SECOND)?;
        assert_eq!(a.run("echo beside")?, "beside");
        let output = hanging.wait()?;
        assert!(output.timed_out && output.stuck.is_empty(), "{output}");
        assert_eq!(output.text(), "begun");
        assert!(begun.elapsed() >= 5 * SECOND);

        let output = a.attempt(10 * SECOND, "echo out; echo err >&2; exit 7")?;
        assert_eq!((output.code, output.text(), output.errors()), (Some(7), "out".into(), "err".into()));
        let large: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        a.write("/tmp/large", &large)?;
        assert!(a.read("/tmp/large")? == large, "a large file came back otherwise");
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_pulled_plug_keeps_what_the_disk_completed_and_nothing_else() {
    on_shared(|net| {
        let a = net.machine("a");
        a.run("mkfs.ext4 -q -F /disk/data && mount /disk/data /mnt")?;
        a.run("dd if=/dev/urandom of=/mnt/kept bs=64k count=64 conv=fsync 2>/dev/null")?;
        let sum = a.run("sha256sum </mnt/kept")?;
        // The directory entry of the second comes with the next commit, five seconds later: too late.
        a.run("echo lost >/mnt/lost; echo lost >/tmp/lost")?;
        let boot = a.run("cat /proc/sys/kernel/random/boot_id")?;
        a.pull_plug();
        assert!(!a.is_on() && a.run("true").is_err(), "a machine without power runs commands");
        a.start()?;
        assert_ne!(a.run("cat /proc/sys/kernel/random/boot_id")?, boot);
        a.run("mount /disk/data /mnt")?;
        assert_eq!(a.run("sha256sum </mnt/kept")?, sum);
        assert_eq!(a.run("ls /mnt/lost /tmp/lost 2>/dev/null || true")?, "");

        a.run("echo flushed >/mnt/flushed; umount /mnt")?;
        a.reboot()?;
        assert_eq!(a.run("mount /disk/data /mnt; cat /mnt/flushed; umount /mnt")?, "flushed");
        Ok(())
    });
}
