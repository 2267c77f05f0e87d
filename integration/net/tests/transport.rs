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

/// What a transport differs in, for the contract.
pub struct Kind {
    pub name: &'static str,
    /// Makes the source of an export on the owner.
    pub make: fn(&Machine) -> Result,
    /// The source.
    pub source: &'static str,
    /// Makes a new attachment usable as a directory: how, the first time.
    pub format: fn(&Machine, &str) -> Result,
    /// The directory of an attachment.
    pub open: fn(&Machine, &str) -> Result<String>,
    /// Ends the use of it.
    pub close: fn(&Machine, &str) -> Result,
    /// Removes the source.
    pub clear: fn(&Machine) -> Result,
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
        owner.refused(&format!("allow {} peer={stranger}", id(0)), "Held")?;
        other.refused(&attach, "Refused")?;

        let attached = consumer.must(&attach)?;
        assert_eq!(consumer.must(&attach)?, attached);
        assert_eq!(attached["link"], "Live");
        assert_eq!(consumer.must("attachments")?, json!([attached]));
        assert_eq!(owner.must(&export)?, endpoint, "an export in use is left alone");
        let device = attached["at"].as_str().expect("a path");
        if round == 0 {
            (kind.format)(consumer.machine, device)?;
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
