//! TLS of the kernel's connections: `inside tls serve SECONDS`, `inside tls key IDENTITY SECRET`.
//!
//! `key` puts a key into the kernel's keyring and prints its number; `serve` answers the kernel as the agent does.

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use union_csi::node::handshake;
use union_csi::platform::Host;
use union_csi::platform::keyring::NvmeKeyring;
use union_csi::platform::tls::Handshakes;

/// Runs one action.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let host = Host::new();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["key", identity, secret] => {
            let ring = NvmeKeyring::find(&host)?.ok_or("there is no keyring .nvme")?;
            let serial = ring.ensure(identity, secret.as_bytes())?;
            Ok(writeln!(std::io::stdout(), "{serial}")?)
        }
        ["keys"] => {
            let ring = NvmeKeyring::find(&host)?.ok_or("there is no keyring .nvme")?;
            Ok(writeln!(std::io::stdout(), "{:?}", ring.keys()?)?)
        }
        ["serve", seconds] => {
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::DEBUG)
                .with_ansi(false)
                .with_writer(std::io::stdout)
                .init();
            let handshakes = Handshakes::listen(&host)?.ok_or("this kernel asks nobody for TLS")?;
            let end = Instant::now() + Duration::from_secs(seconds.parse()?);
            writeln!(std::io::stdout(), "listening")?;
            handshake::answer(&host, &handshakes, &|| Instant::now() > end);
            Ok(())
        }
        _ => Err("inside tls key IDENTITY SECRET | keys | serve SECONDS".into()),
    }
}
