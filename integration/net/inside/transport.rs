//! Both ends of every transport, one call of the contract for each run: `inside transport KIND ACTION [NAME=VALUE...]`.
//!
//! Answers are JSON; a refusal is an answer too: `{"error": "Held", "text": "…"}`. Each run is a process of its own, as an
//! agent that was restarted is: what it knows, it read from the kernel.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use union_csi::domain::NodeName;
use union_csi::node::transport::nfs::{self, NfsConsumer, NfsOwner};
use union_csi::node::transport::nvme_tcp::{self, DEFAULT_PORT, HostIdentity, NvmeConsumer, NvmeOwner};
use union_csi::node::transport::{
    Abilities, Ability, Attached, Consumer, Endpoint, ExportId, Generation, Owner, Patience, Peer, Right,
    Secret, Source, TransportError,
};
use union_csi::platform::Host;
use union_csi::platform::nfs::{NFS_PORT, NfsRoots, NfsServing};
use union_csi::platform::nvme::Nvme;

type Answer = Result<Value, Box<dyn Error>>;

/// What stands behind `NAME=`.
struct Given(BTreeMap<String, String>);

impl Given {
    fn parse(arguments: &[String]) -> Self {
        Self(arguments.iter().filter_map(|a| a.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect())
    }

    fn maybe(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn text(&self, name: &str) -> Result<&str, Box<dyn Error>> {
        self.maybe(name).ok_or_else(|| format!("{name}= is missing").into())
    }

    fn id(&self) -> Result<ExportId, Box<dyn Error>> {
        let generation = Generation(self.text("generation")?.parse()?);
        Ok(ExportId { branch: self.text("branch")?.parse()?, generation })
    }

    fn peer(&self) -> Result<Peer, Box<dyn Error>> {
        let node: NodeName = "peer".parse()?;
        Ok(Peer { node, identity: self.text("peer")?.to_owned() })
    }

    fn secret(&self) -> Option<Secret> {
        self.maybe("secret").and_then(|s| Secret::read(s.as_bytes(), None))
    }

    fn endpoint(&self) -> Result<Endpoint, Box<dyn Error>> {
        Ok(Endpoint { address: self.text("address")?.parse()?, name: self.text("name")?.to_owned() })
    }

    fn patience(&self) -> Result<Patience, Box<dyn Error>> {
        Ok(match self.maybe("patience") {
            None | Some("wait") => Patience::Wait,
            Some(seconds) => Patience::GiveUpAfter(Duration::from_secs(seconds.parse()?)),
        })
    }
}

/// Runs one action.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [kind, action, given @ ..] = arguments else { return Err("inside transport KIND ACTION".into()) };
    let given = Given::parse(given);
    let answer = match kind.as_str() {
        "nfs" => nfs(action, &given),
        "nvme" => nvme(action, &given),
        other => Err(format!("there is no transport {other}").into()),
    };
    let answer = match answer {
        Err(error) => match error.downcast::<TransportError>() {
            Ok(refused) => refusal(&refused),
            Err(error) => return Err(error),
        },
        Ok(answer) => answer,
    };
    Ok(writeln!(std::io::stdout(), "{answer}")?)
}

fn nvme(action: &str, given: &Given) -> Answer {
    let host = Host::new();
    let nvme = Nvme::new(&host)?;
    match action {
        "probe" => {
            return Ok(probed(&nvme_tcp::probe(&host, &nvme)));
        }
        "key" => return Ok(json!({ "key": union_csi::store::keys::generate().chap() })),
        _ => {}
    }
    let address: IpAddr = given.text("at")?.parse()?;
    let port = given.maybe("port").map_or(Ok(DEFAULT_PORT), str::parse)?;
    let write_through = given.maybe("write-through") != Some("no");
    let owner = NvmeOwner::new(&host, nvme.clone(), vec![SocketAddr::new(address, port)]);
    let node = std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().parse()?;
    let machine = std::fs::read_to_string("/etc/machine-id")?;
    let consumer = NvmeConsumer::new(&host, nvme, HostIdentity::of(&node, &machine));
    let source = |path: &str| Source::Image { path: path.into(), write_through, encrypted: false };
    call(&owner, &consumer, source, action, given)
}

fn nfs(action: &str, given: &Given) -> Answer {
    let (host, roots) = (Host::new(), NfsRoots::default());
    if action == "probe" {
        return Ok(probed(&nfs::probe(&host, &roots)?));
    }
    let address: IpAddr = given.text("at")?.parse()?;
    let serving = NfsServing {
        address: (address, NFS_PORT).into(),
        // The shortest that the kernel takes: tests need not wait longer.
        lease: Duration::from_secs(10),
        threads: 8,
        recovery: "/mnt/recovery".into(),
    };
    let owner = NfsOwner::new(
        host.clone(),
        roots.clone(),
        serving,
        "/run/union-csi/nfs".into(),
        "/mnt/fences".into(),
    );
    let consumer = NfsConsumer::new(host, roots, "/run/union-csi/attached".into(), address);
    call(&owner, &consumer, |path| Source::Directory(path.into()), action, given)
}

fn probed(abilities: &Abilities) -> Value {
    let word = |ability: &Ability| match ability {
        Ability::Able { how } => json!({ "able": how }),
        Ability::Unable { reason } => json!({ "unable": reason }),
    };
    json!({
        "owner": word(&abilities.owner),
        "consumer": word(&abilities.consumer),
        "authentication": word(&abilities.authentication),
        "encryption": word(&abilities.encryption),
    })
}

/// One call of the contract, whatever the transport.
fn call(
    owner: &dyn Owner,
    consumer: &dyn Consumer,
    source: impl Fn(&str) -> Source,
    action: &str,
    given: &Given,
) -> Answer {
    Ok(match action {
        "export" => endpoint(&owner.export(&given.id()?, &source(given.text("source")?))?),
        "allow" => json!(owner.allow(&given.id()?, &given.peer()?, Right::Write, given.secret().as_ref())?),
        "fence" => json!(owner.fence(&given.id()?, &given.peer()?)?),
        "unexport" => json!(owner.unexport(&given.text("branch")?.parse()?)?),
        "grown" => json!(owner.grown(&given.id()?)?.get()),
        "exports" => owner
            .exports()?
            .iter()
            .map(|e| {
                json!({
                    "branch": e.id.branch.as_str(),
                    "generation": e.id.generation.0,
                    "endpoint": e.endpoint.as_ref().map(endpoint),
                    "allowed": e.allowed,
                })
            })
            .collect(),
        "identity" => json!(consumer.identity()?),
        "attach" => {
            let (id, endpoint) = (given.id()?, given.endpoint()?);
            attached(&consumer.attach(&id, &endpoint, given.secret().as_ref(), given.patience()?)?)
        }
        "export-many" => export_many(owner, source, given)?,
        "attach-many" => attach_many(consumer, given)?,
        "detach-many" => timed(given, |id| Ok(consumer.detach(&id)?))?,
        "unexport-many" => timed(given, |id| Ok(owner.unexport(&id.branch)?))?,
        "count" => {
            let (begun, exports) = (Instant::now(), owner.exports()?.len());
            let exporting = milliseconds(begun);
            let (begun, one) = (Instant::now(), owner.exports_of(&many(0)?.branch)?.len());
            let asking = milliseconds(begun);
            let (begun, attachments) = (Instant::now(), consumer.attachments()?.len());
            json!({
                "exports": exports, "exports_ms": exporting, "of_one": one, "of_one_ms": asking,
                "attachments": attachments, "attachments_ms": milliseconds(begun),
            })
        }
        "patience" => json!(consumer.set_patience(&given.id()?, given.patience()?)?),
        "detach" => json!(consumer.detach(&given.id()?)?),
        "force-detach" => json!(consumer.force_detach(&given.id()?)?),
        "attachments" => consumer.attachments()?.iter().map(attached).collect(),
        other => return Err(format!("there is no action {other}").into()),
    })
}

/// One of many exports.
fn many(number: u32) -> Result<ExportId, Box<dyn Error>> {
    Ok(ExportId { branch: format!("many-{number}").parse()?, generation: Generation(1) })
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// The same for each export from number `from` to before `to`: how long each took, and, where one fails, at which and why.
fn timed(given: &Given, mut work: impl FnMut(ExportId) -> Result<(), Box<dyn Error>>) -> Answer {
    let (from, to): (u32, u32) = (given.text("from")?.parse()?, given.text("to")?.parse()?);
    let mut took = Vec::new();
    for number in from..to {
        let begun = Instant::now();
        if let Err(error) = work(many(number)?) {
            return Ok(json!({ "ms": took, "failed": number, "why": error.to_string() }));
        }
        took.push(milliseconds(begun));
    }
    Ok(json!({ "ms": took }))
}

/// Exports `<source>/<number>` for each, and opens it to the peer; their names go to the file `names`.
fn export_many(owner: &dyn Owner, source: impl Fn(&str) -> Source, given: &Given) -> Answer {
    let (directory, peer) = (given.text("source")?, given.peer()?);
    let mut names = std::fs::OpenOptions::new().create(true).append(true).open(given.text("names")?)?;
    let mut number: u32 = given.text("from")?.parse()?;
    timed(given, |id| {
        let endpoint = owner.export(&id, &source(&format!("{directory}/{number}")))?;
        owner.allow(&id, &peer, Right::Write, None)?;
        number += 1;
        Ok(writeln!(names, "{}", endpoint.name)?)
    })
}

/// Attaches each, by the names that the file `names` has.
fn attach_many(consumer: &dyn Consumer, given: &Given) -> Answer {
    let (address, names) = (given.text("address")?.parse()?, std::fs::read_to_string(given.text("names")?)?);
    let mut names = names.lines().skip(given.text("from")?.parse()?);
    timed(given, |id| {
        let name = names.next().ok_or("there are fewer names")?.to_owned();
        consumer.attach(&id, &Endpoint { address, name }, None, Patience::Wait)?;
        Ok(())
    })
}

fn endpoint(endpoint: &Endpoint) -> Value {
    json!({ "address": endpoint.address.to_string(), "name": endpoint.name })
}

fn attached(attached: &Attached) -> Value {
    json!({
        "branch": attached.id.branch.as_str(),
        "generation": attached.id.generation.0,
        "endpoint": attached.endpoint.as_ref().map(endpoint),
        "at": attached.at,
        "link": format!("{:?}", attached.link),
    })
}

fn refusal(error: &TransportError) -> Value {
    let all = format!("{error:?}");
    let variant: String = all.chars().take_while(|c| c.is_alphanumeric()).collect();
    json!({ "error": variant, "text": error.to_string() })
}
