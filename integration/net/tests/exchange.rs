//! What a workload sees while the filesystem below it is exchanged for another.

use std::time::Duration;

use crate::support::on_shared;

const SOON: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(120);

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_workload_sees_the_directory_beneath_at_no_time_while_its_volume_is_exchanged_and_nothing_of_it_stays() {
    on_shared(|net| {
        let machine = net.machine("a");
        // What is mounted there is passed on, as the kubelet's directory is; to a service with a namespace of its own.
        machine.run(
            "cd /run && mkdir exchange && mount --bind exchange exchange && mount --make-shared exchange",
        )?;
        let service = "exec unshare --mount --propagation slave -- sh -c 'echo pid $$; exec sleep 600'";
        let mut service = machine.start_command(service, SOON + LONG)?;
        assert!(service.says("pid ", SOON)?);
        let told = service.output_so_far();
        let pid = told.trim().trim_start_matches("pid ");

        let said = machine.run_within(LONG, "inside known exchange /run/exchange 30")?;
        let looks = said.strip_prefix("missing 0 of ").and_then(|looks| looks.parse::<u64>().ok());
        assert!(looks.is_some_and(|looks| looks > 1000), "{said}");

        // What is unmounted is unmounted there too.
        machine.run(format!("grep -q ' /run/exchange ' /proc/{pid}/mountinfo"))?;
        machine.run(format!("! grep ' /run/exchange/' /proc/{pid}/mountinfo >&2"))?;
        service.kill();
        machine.run(
            "umount /run/exchange && ! grep -q /run/exchange /proc/self/mountinfo && rm -r /run/exchange",
        )?;
        Ok(())
    });
}
