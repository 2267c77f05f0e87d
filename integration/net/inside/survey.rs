//! What a node finds out about its network and its kernel: `inside survey look|follow STATE_DIR [interface=X] [subnet=X]`.
//!
//! `look` prints it once, `follow` at first and whenever it changes, a line of JSON each, until it is killed.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use tokio_util::sync::CancellationToken;
use union_csi::domain::reach::Transport;
use union_csi::node::survey::{NetworkSettings, Survey};
use union_csi::node::transport::{Carried, Transports};
use union_csi::platform::Host;

/// Runs one action.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [action, state, given @ ..] = arguments else {
        return Err("inside survey look|follow STATE_DIR".into());
    };
    let mut settings = NetworkSettings::default();
    for (name, value) in given.iter().filter_map(|argument| argument.split_once('=')) {
        match name {
            "interface" => settings.interface = Some(value.to_owned()),
            "subnet" => settings.subnet = Some(value.parse()?),
            _ => return Err(format!("there is no {name}=").into()),
        }
    }
    let node = std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().parse()?;
    let transports = Arc::new(Transports::none());
    let survey =
        Survey::new(&Host::new(), &node, settings, Path::new(state), transports.clone(), Arc::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut seen = transports.watch();
        survey.look().await;
        print(&transports, &seen.borrow_and_update().clone())?;
        match action.as_str() {
            "look" => return Ok(()),
            "follow" => {}
            other => return Err(format!("there is no action {other}").into()),
        }
        let (stop, told) = (CancellationToken::new(), async {
            while seen.changed().await.is_ok() {
                print(&transports, &seen.borrow_and_update().clone())?;
            }
            Ok(())
        });
        tokio::select! {
            () = survey.run(stop) => Err("the survey ended".into()),
            ended = told => ended,
        }
    })
}

fn print(transports: &Transports, carried: &Carried) -> Result<(), Box<dyn Error>> {
    let ends = |transport| {
        let word = |error: Option<String>| error.unwrap_or_else(|| "there".to_owned());
        json!({
            "owner": word(transports.owner(transport).err().map(|e| e.to_string())),
            "consumer": word(transports.consumer(transport).err().map(|e| e.to_string())),
        })
    };
    let line = json!({
        "network": carried.network,
        "transports": carried.transports,
        "ends": { "nvme-tcp": ends(Transport::NvmeTcp), "nfs": ends(Transport::Nfs) },
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
