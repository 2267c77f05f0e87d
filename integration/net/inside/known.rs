//! What programs find of paths that exist, and what breaks beneath them: `inside known ACTION ...`.
//!
//! - `look DIRECTORY NAME...`: looks up each of these, which all exist, and tries to make them anew, one after the other, for ever:
//!   those whose names begin with `d` as directories, others as files. `there MS`, `refused MS ERRNO` where that changes;
//!   `missing NAME MS` and `made NAME MS` each time.
//! - `listen PORT...`: keeps these TCP ports of all addresses.
//! - `shutdown MAJOR:MINOR`: shuts the filesystem on that device down, as it does itself after an error of its disk.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use union_csi::platform::Host;
use union_csi::platform::shutdown::Shutdown;

/// Between two paths that are looked up.
const LOOK_PAUSE: Duration = Duration::from_millis(15);

/// Does one action.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["look", directory, names @ ..] if !names.is_empty() => look(Path::new(directory), names),
        ["listen", ports @ ..] => listen(ports),
        ["shutdown", device] => shut_down(device),
        _ => Err("say look DIRECTORY NAME..., listen PORT... or shutdown MAJOR:MINOR".into()),
    }
}

fn listen(ports: &[&str]) -> Result<(), Box<dyn Error>> {
    let bind = |port: &&str| TcpListener::bind(format!("0.0.0.0:{port}"));
    let _kept = ports.iter().map(bind).collect::<io::Result<Vec<_>>>()?;
    println!("begins");
    io::stdout().flush()?;
    loop {
        thread::park();
    }
}

fn shut_down(device: &str) -> Result<(), Box<dyn Error>> {
    let (major, minor) = device.split_once(':').ok_or("say MAJOR:MINOR")?;
    match Host::new().shut_down((major.parse()?, minor.parse()?))? {
        Shutdown::Done => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

/// What a call told of a path that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    There,
    Missing,
    Made,
    Refused(i32),
}

fn look(directory: &Path, names: &[&str]) -> Result<(), Box<dyn Error>> {
    let begun = Instant::now();
    println!("begins");
    let mut last = None;
    for name in names.iter().cycle() {
        let path = directory.join(name);
        for making in [false, true] {
            let seen = match (making, name.starts_with('d')) {
                (false, _) => seen(fs::symlink_metadata(&path).map(drop), false),
                (true, true) => seen(fs::create_dir(&path), true),
                (true, false) => {
                    seen(OpenOptions::new().write(true).create_new(true).open(&path).map(drop), true)
                }
            };
            let at = begun.elapsed().as_millis();
            match seen {
                Seen::Missing => println!("missing {name} {at}"),
                Seen::Made => println!("made {name} {at}"),
                seen if last == Some(seen) => {}
                Seen::There => println!("there {at}"),
                Seen::Refused(errno) => println!("refused {at} {errno}"),
            }
            last = Some(seen);
        }
        io::stdout().flush()?;
        thread::sleep(LOOK_PAUSE);
    }
    Ok(())
}

fn seen(outcome: io::Result<()>, making: bool) -> Seen {
    match outcome {
        Ok(()) if making => Seen::Made,
        Ok(()) => Seen::There,
        Err(error) => match error.kind() {
            io::ErrorKind::AlreadyExists if making => Seen::There,
            io::ErrorKind::NotFound => Seen::Missing,
            _ => Seen::Refused(error.raw_os_error().unwrap_or(0)),
        },
    }
}
