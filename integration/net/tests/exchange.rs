//! What a workload sees while the filesystem below it is exchanged for another.

use std::time::Duration;

use crate::support::on_shared;

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_workload_sees_the_directory_beneath_at_no_time_while_its_volume_is_exchanged() {
    on_shared(|net| {
        let machine = net.machine("a");
        let said = machine.run_within(Duration::from_secs(120), "inside known exchange /run/exchange 30")?;
        let looks = said.strip_prefix("missing 0 of ").and_then(|looks| looks.parse::<u64>().ok());
        assert!(looks.is_some_and(|looks| looks > 1000), "{said}");
        machine.run("! grep -q /run/exchange /proc/self/mountinfo && rm -r /run/exchange")?;
        Ok(())
    });
}
