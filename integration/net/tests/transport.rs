//! The contract of transports (`src/node/transport`), between two machines or three: what every transport must do, called as
//! agents would call it, each call by a new process.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Machine, Network, Result};

/// Longer than any call of the contract may take.
const CALL: Duration = Duration::from_secs(120);
/// The bound of a call that waits for nobody.
const FORCED: Duration = Duration::from_secs(30);

/// One machine's end of a transport.
#[derive(Clone, Copy)]
pub struct End<'a> {
    pub machine: &'a Machine,
    pub kind: &'static str,
}

impl End<'_> {
    /// One call; its answer, or `{"error", "text"}`.
    pub fn ask(&self, call: &str) -> Result<Value> {
        let at = self.machine.address();
        let (action, rest) = call.split_once(' ').unwrap_or((call, ""));
        let line = format!("inside transport {} {action} at={at} {rest}", self.kind);
        // A process does not end while one of its threads is stuck in the kernel: that counts as waiting too.
        let bound = if action == "force-detach" { FORCED } else { CALL };
        let text = self.machine.run_within(bound, &line)?;
        Ok(serde_json::from_str(&text).unwrap_or_else(|e| panic!("{line}: {text:?}: {e}")))
    }

    /// A call that must succeed.
    pub fn must(&self, call: &str) -> Result<Value> {
        let answer = self.ask(call)?;
        assert!(answer.get("error").is_none(), "{} on {}: {answer}", call, self.machine.name());
        Ok(answer)
    }

    /// A call that must be refused in that way; what it says.
    pub fn refused(&self, call: &str, error: &str) -> Result<String> {
        let answer = self.ask(call)?;
        assert_eq!(answer["error"], error, "{call} on {}: {answer}", self.machine.name());
        Ok(answer["text"].as_str().unwrap_or_default().to_owned())
    }

    /// What this machine calls itself.
    pub fn identity(&self) -> Result<String> {
        Ok(self.must("identity")?.as_str().unwrap_or_default().to_owned())
    }

    /// How an attachment stands; nothing when there is none.
    pub fn link(&self, generation: u64) -> Result<Option<String>> {
        let all = self.must("attachments")?;
        let of = |a: &&Value| a["generation"] == generation;
        Ok(all
            .as_array()
            .and_then(|a| a.iter().find(of))
            .map(|a| a["link"].as_str().unwrap_or_default().to_owned()))
    }

    /// Waits until an attachment stands so.
    pub fn until_link(&self, generation: u64, wanted: Option<&str>, bound: Duration) -> Result {
        let deadline = Instant::now() + bound;
        loop {
            let link = self.link(generation)?;
            if link.as_deref() == wanted {
                return Ok(());
            }
            assert!(Instant::now() < deadline, "the attachment is {link:?}, not {wanted:?}");
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

/// The branch that is exported.
pub const BRANCH: &str = "pvc-1-0";

/// `branch=… generation=…`.
pub fn id(generation: u64) -> String {
    format!("branch={BRANCH} generation={generation}")
}

/// `address=… name=…`.
pub fn at(endpoint: &Value) -> String {
    let text = |name: &str| endpoint[name].as_str().unwrap_or_default().to_owned();
    format!("address={} name={}", text("address"), text("name"))
}

/// What a transport differs in, for the contract. What is not named here is the same for all.
pub struct Kind {
    pub name: &'static str,
    /// An export goes to one peer at a time: another is `Held` off until the first is fenced.
    pub one_peer: bool,
    /// The consumer's kernel can be told to give up by itself while the owner is silent; one that cannot is `Unable`.
    pub gives_up: bool,
    /// The export has a size of its own, which grows when the owner says so; one that has none is `Unable`.
    pub grows: bool,
    /// Makes the source of an export on the owner.
    pub make: fn(&Machine) -> Result,
    /// The source.
    pub source: &'static str,
    /// The file of the owner that [`Self::target`] writes to.
    pub bytes: &'static str,
    /// What of an attachment is written to, byte by byte.
    pub target: fn(&str) -> String,
    /// Makes a new attachment usable as a directory: how, the first time.
    pub format: fn(&Machine, &str) -> Result,
    /// The directory of an attachment.
    pub open: fn(&Machine, &str) -> Result<String>,
    /// Ends the use of it.
    pub close: fn(&Machine, &str) -> Result,
    /// Removes the source.
    pub clear: fn(&Machine) -> Result,
}

/// How long a silent owner may stay unnoticed: two keep-alive periods, and a slow machine.
pub const NOTICE: Duration = Duration::from_secs(40);

impl Kind {
    pub fn end<'a>(&self, net: &'a Network, name: &str) -> End<'a> {
        End { machine: net.machine(name), kind: self.name }
    }

    /// A branch of `a` that is attached at `b`: the endpoint, and where it is.
    pub fn attached(&self, net: &Network, generation: u64) -> Result<(Value, String)> {
        let (owner, consumer) = (self.end(net, "a"), self.end(net, "b"));
        let endpoint = owner.must(&format!("export {} source={}", id(generation), self.source))?;
        owner.must(&format!("allow {} peer={}", id(generation), consumer.identity()?))?;
        let attached = consumer.must(&format!("attach {} {}", id(generation), at(&endpoint)))?;
        Ok((endpoint, attached["at"].as_str().expect("a path").to_owned()))
    }

    /// Ends everything, whatever it is.
    pub fn finish(&self, net: &Network, generation: u64) -> Result {
        for name in ["b", "c"] {
            let end = self.end(net, name);
            end.must(&format!("force-detach {}", id(generation)))?;
            end.until_link(generation, None, NOTICE)?;
        }
        self.end(net, "a").must(&format!("unexport branch={BRANCH}"))?;
        (self.clear)(net.machine("a"))
    }

    /// What the owner's disk holds of what consumers wrote.
    pub fn sum(&self, owner: &Machine) -> Result<String> {
        owner.run(format!("dd if={} bs=1M iflag=direct 2>/dev/null | sha256sum", self.bytes))
    }

    /// Four writers that never stop by themselves, each to a part of what is at `device`; they tell what was written.
    pub fn writers(&self, device: &str) -> String {
        let target = (self.target)(device);
        format!(
            r#"
            write() {{
                i=0
                while :; do
                    i=$((i + 1))
                    printf '%-65536d' $i | dd of={target} bs=64k seek=$(($1 * 200 + i % 200)) oflag=direct conv=notrunc iflag=fullblock 2>/dev/null || return 0
                    [ $((i % 10)) != 0 ] || echo "written by $1: $i"
                done
            }}
            for n in 0 1 2 3; do write $n & done
            wait
            echo all writers ended
            "#
        )
    }
}

/// Everything twice: the second call finds what the first one left, and the whole circle can be gone through again.
pub fn everything_can_be_done_twice(net: &Network, kind: &Kind) -> Result {
    let end = |name: &str| End { machine: net.machine(name), kind: kind.name };
    let (owner, consumer, other) = (end("a"), end("b"), end("c"));
    let (peer, stranger) = (consumer.identity()?, other.identity()?);
    assert_ne!(peer, stranger);
    (kind.make)(owner.machine)?;
    let mut sum = String::new();
    for round in 0..2 {
        let export = format!("export {} source={}", id(0), kind.source);
        let endpoint = owner.must(&export)?;
        assert_eq!(owner.must(&export)?, endpoint);
        let listed = |allowed: &[&str]| json!([{ "branch": BRANCH, "generation": 0, "endpoint": endpoint, "allowed": allowed }]);
        assert_eq!(owner.must("exports")?, listed(&[]), "nobody may use it");

        let attach = format!("attach {} {}", id(0), at(&endpoint));
        consumer.refused(&attach, "Refused")?;
        assert_eq!(consumer.must("attachments")?, json!([]), "nothing stays of it");
        for _ in 0..2 {
            owner.must(&format!("allow {} peer={peer}", id(0)))?;
        }
        assert_eq!(owner.must("exports")?, listed(&[&peer]));
        other.refused(&attach, "Refused")?;
        let allow_other = format!("allow {} peer={stranger}", id(0));
        if kind.one_peer {
            owner.refused(&allow_other, "Held")?;
            other.refused(&attach, "Refused")?;
        } else {
            owner.must(&allow_other)?;
            assert_eq!(owner.must("exports")?, listed(&[&peer, &stranger]));
            assert_eq!(other.must(&attach)?["link"], "Live");
        }

        let attached = consumer.must(&attach)?;
        assert_eq!(consumer.must(&attach)?, attached);
        assert_eq!(attached["link"], "Live");
        assert_eq!(consumer.must("attachments")?, json!([attached]));
        assert_eq!(owner.must(&export)?, endpoint, "an export in use is left alone");
        let device = attached["at"].as_str().expect("a path");
        if round == 0 {
            (kind.format)(consumer.machine, device)?;
        }
        if !kind.one_peer {
            // The fence of one is not felt by the other.
            owner.must(&format!("fence {} peer={stranger}", id(0)))?;
            assert_eq!(owner.must("exports")?, listed(&[&peer]));
            assert_eq!(other.link(0)?.as_deref(), Some("Connecting"), "nothing answers it");
            other.must(&format!("force-detach {}", id(0)))?;
            other.refused(&attach, "Refused")?;
            assert_eq!(consumer.must("attachments")?, json!([attached]));
        }
        let impatient = format!("patience {} patience=60", id(0));
        if kind.gives_up {
            consumer.must(&impatient)?;
        } else {
            consumer.refused(&impatient, "Unable")?;
        }
        consumer.must(&format!("patience {} patience=wait", id(0)))?;
        let grown = format!("grown {}", id(0));
        if kind.grows {
            assert!(owner.must(&grown)?.is_u64());
        } else {
            owner.refused(&grown, "Unable")?;
        }
        let directory = (kind.open)(consumer.machine, device)?;
        if round == 0 {
            let write =
                format!("dd if=/dev/urandom of={directory}/file bs=1M count=8 conv=fsync 2>/dev/null");
            consumer.machine.run(write)?;
            sum = consumer.machine.run(format!("sha256sum <{directory}/file"))?;
            assert!(sum.len() > 64);
        }
        assert_eq!(consumer.machine.run(format!("sha256sum <{directory}/file"))?, sum);
        (kind.close)(consumer.machine, device)?;
        for _ in 0..2 {
            consumer.must(&format!("detach {}", id(0)))?;
        }
        assert_eq!(consumer.must("attachments")?, json!([]));
        consumer.must(&format!("force-detach {}", id(0)))?;
        consumer.refused(&format!("patience {} patience=5", id(0)), "Absent")?;

        for _ in 0..2 {
            owner.must(&format!("fence {} peer={peer}", id(0)))?;
        }
        assert_eq!(owner.must("exports")?, listed(&[]), "the export stays, closed");
        consumer.refused(&attach, "Refused")?;
        for _ in 0..2 {
            owner.must(&format!("unexport branch={BRANCH}"))?;
        }
        assert_eq!(owner.must("exports")?, json!([]));
        owner.refused(&format!("allow {} peer={peer}", id(0)), "Absent")?;
        owner.refused(&format!("grown {}", id(0)), "Absent")?;
        owner.must(&format!("fence {} peer={peer}", id(0)))?;
    }
    (kind.clear)(owner.machine)
}

/// A later generation takes the place of an earlier one, and is not undone by who is late.
pub fn generations_only_rise(net: &Network, kind: &Kind) -> Result {
    let owner = End { machine: net.machine("a"), kind: kind.name };
    (kind.make)(owner.machine)?;
    let export = |generation| format!("export {} source={}", id(generation), kind.source);
    owner.must(&export(1))?;
    owner.must(&export(2))?;
    let generations =
        |all: &Value| all.as_array().map(|a| a.iter().map(|e| e["generation"].clone()).collect::<Vec<_>>());
    assert_eq!(generations(&owner.must("exports")?), Some(vec![json!(2)]));
    owner.refused(&export(1), "Outdated")?;
    assert_eq!(generations(&owner.must("exports")?), Some(vec![json!(2)]));
    owner.must(&format!("unexport branch={BRANCH}"))?;
    (kind.clear)(owner.machine)
}

/// A fence ends what a live consumer is writing, and what it has sent before never lands after it.
pub fn a_fence_ends_a_live_writer_and_nothing_of_it_lands_afterwards(net: &Network, kind: &Kind) -> Result {
    let (owner, consumer, next) = (kind.end(net, "a"), kind.end(net, "b"), kind.end(net, "c"));
    (kind.make)(owner.machine)?;
    let (endpoint, device) = kind.attached(net, 0)?;
    let mut writer = consumer.machine.start_command(kind.writers(&device), Duration::from_secs(600))?;
    assert!(writer.says("written by 3", Duration::from_secs(60))?);
    owner.must(&format!("fence {} peer={}", id(0), consumer.identity()?))?;
    let fenced = kind.sum(owner.machine)?;
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(kind.sum(owner.machine)?, fenced, "something landed after the fence");

    owner.must(&format!("allow {} peer={}", id(0), next.identity()?))?;
    let attach = format!("attach {} {}", id(0), at(&endpoint));
    next.must(&attach)?;
    assert_ne!(consumer.link(0)?.as_deref(), Some("Live"), "the old consumer came back");
    assert_eq!(kind.sum(owner.machine)?, fenced);
    consumer.must(&format!("force-detach {}", id(0)))?;
    assert!(writer.says("all writers ended", NOTICE)?, "{}", writer.output_so_far());
    consumer.refused(&attach, "Refused")?;
    assert_eq!(kind.sum(owner.machine)?, fenced);
    next.must(&format!("detach {}", id(0)))?;
    kind.finish(net, 0)
}

/// The same where the consumer cannot be told: it is cut off, and comes back with what it had to send.
pub fn what_a_partitioned_consumer_still_has_to_send_never_lands_after_its_fence(
    net: &Network,
    kind: &Kind,
) -> Result {
    let (owner, consumer) = (kind.end(net, "a"), kind.end(net, "b"));
    (kind.make)(owner.machine)?;
    let (_, device) = kind.attached(net, 0)?;
    let mut writer = consumer.machine.start_command(kind.writers(&device), Duration::from_secs(600))?;
    assert!(writer.says("written by 3", Duration::from_secs(60))?);
    net.cut("a", "b");
    owner.must(&format!("fence {} peer={}", id(0), consumer.identity()?))?;
    let fenced = kind.sum(owner.machine)?;
    net.heal("a", "b");
    std::thread::sleep(Duration::from_secs(15));
    assert_eq!(kind.sum(owner.machine)?, fenced, "something landed after the fence");
    assert_ne!(consumer.link(0)?.as_deref(), Some("Live"));
    consumer.must(&format!("force-detach {}", id(0)))?;
    assert!(writer.says("all writers ended", NOTICE)?, "{}", writer.output_so_far());
    assert_eq!(kind.sum(owner.machine)?, fenced);
    kind.finish(net, 0)
}

/// What uses an attachment waits for a silent owner, without an error, and goes on when it is back.
pub fn a_consumer_waits_while_the_link_is_cut_and_goes_on_after_it(net: &Network, kind: &Kind) -> Result {
    let (owner, consumer) = (kind.end(net, "a"), kind.end(net, "b"));
    (kind.make)(owner.machine)?;
    let (_, device) = kind.attached(net, 0)?;
    (kind.format)(consumer.machine, &device)?;
    let directory = (kind.open)(consumer.machine, &device)?;
    net.cut("a", "b");
    let write = format!(
        "dd if=/dev/zero of={directory}/during bs=64k count=16 conv=fsync 2>/dev/null; echo it is written"
    );
    let mut writer = consumer.machine.start_command(write, Duration::from_secs(300))?;
    consumer.until_link(0, Some("Connecting"), NOTICE)?;
    std::thread::sleep(Duration::from_secs(5));
    assert!(!writer.has_ended(), "it did not wait: {}", writer.output_so_far());
    net.heal("a", "b");
    assert!(writer.says("it is written", NOTICE)?, "{}", writer.output_so_far());
    consumer.until_link(0, Some("Live"), NOTICE)?;
    (kind.close)(consumer.machine, &device)?;
    consumer.must(&format!("detach {}", id(0)))?;
    kind.finish(net, 0)
}

/// An attachment is ended by force though its owner is silent, and the patience of one can end while it is.
pub fn force_detach_returns_while_the_link_is_cut_and_so_does_giving_up(
    net: &Network,
    kind: &Kind,
) -> Result {
    let (owner, consumer) = (kind.end(net, "a"), kind.end(net, "b"));
    (kind.make)(owner.machine)?;
    // Cut a moment ago, with requests under way: nobody knows yet.
    let (endpoint, device) = kind.attached(net, 0)?;
    let mut writer = consumer.machine.start_command(kind.writers(&device), Duration::from_secs(600))?;
    assert!(writer.says("written by 3", Duration::from_secs(60))?);
    net.cut("a", "b");
    let started = Instant::now();
    consumer.must(&format!("force-detach {}", id(0)))?;
    eprintln!("force-detach, link cut just before, requests under way: {:?}", started.elapsed());
    assert!(writer.says("all writers ended", Duration::from_secs(90))?, "{}", writer.output_so_far());
    consumer.until_link(0, None, Duration::from_secs(60))?;
    let attach = format!("attach {} {}", id(0), at(&endpoint));
    consumer.refused(&attach, "Unreachable")?;
    assert_eq!(consumer.must("attachments")?, json!([]));
    net.heal("a", "b");

    // What was ended by force can be had again, and is as new.
    let again = consumer.must(&attach)?;
    let device = again["at"].as_str().expect("a path");
    let mut writer = consumer.machine.start_command(kind.writers(device), Duration::from_secs(600))?;
    assert!(writer.says("written by 3", Duration::from_secs(60))?);
    net.cut("a", "b");
    consumer.until_link(0, Some("Connecting"), NOTICE)?;
    if kind.gives_up {
        consumer.must(&format!("patience {} patience=1", id(0)))?;
    } else {
        consumer.must(&format!("force-detach {}", id(0)))?;
    }
    assert!(writer.says("all writers ended", NOTICE)?, "{}", writer.output_so_far());
    net.heal("a", "b");
    kind.finish(net, 0)
}
