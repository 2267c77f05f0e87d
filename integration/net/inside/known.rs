//! What programs find of paths that exist, and what breaks beneath them: `inside known ACTION ...`.
//!
//! - `look DIRECTORY NAME...`: looks up each of these, which all exist, and tries to make them anew, one after the other, for ever:
//!   those whose names begin with `d` as directories, others as files. `there MS`, `refused MS ERRNO` where that changes;
//!   `missing NAME MS` and `made NAME MS` each time.
//! - `listen PORT...`: keeps these TCP ports of all addresses.
//! - `exchange DIRECTORY ROUNDS`: puts a new filesystem with the file `file` in the place of the one before it, at DIRECTORY/target as
//!   the kubelet has it and at DIRECTORY/pod in a mount namespace of its own, so often, while a program there looks for the file
//!   without a pause; says how often that was `missing`, of how many looks.
//! - `look-for FILE`: that program; it ends when its input does.
//! - `shutdown MAJOR:MINOR`: shuts the filesystem on that device down, as it does itself after an error of its disk.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::env;
use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use union_csi::platform::Host;
use union_csi::platform::mount::MountAttr;
use union_csi::platform::shutdown::Shutdown;

/// Between two paths that are looked up.
const LOOK_PAUSE: Duration = Duration::from_millis(15);

/// Does one action.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["look", directory, names @ ..] if !names.is_empty() => look(Path::new(directory), names),
        ["listen", ports @ ..] => listen(ports),
        ["exchange", directory, rounds] => exchange(Path::new(directory), rounds.parse()?),
        ["look-for", file] => look_for(Path::new(file)),
        ["shutdown", device] => shut_down(device),
        _ => Err("say look DIRECTORY NAME..., listen PORT..., exchange DIRECTORY ROUNDS, look-for FILE or \
                  shutdown MAJOR:MINOR"
            .into()),
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

/// Mounts the next filesystem; where, and its number.
fn next(directory: &Path, round: u32) -> Result<(PathBuf, (u32, u32)), Box<dyn Error>> {
    let host = Host::new();
    let at = directory.join(format!("volume-{round}"));
    fs::create_dir_all(&at)?;
    host.mount_filesystem(Path::new("volume"), &at, "tmpfs", MountAttr::default(), "size=1m")?;
    fs::write(at.join("file"), "content")?;
    let device = host.mounts()?.at(&at).ok_or("it is not mounted")?.device;
    Ok((at, device))
}

fn exchange(directory: &Path, rounds: u32) -> Result<(), Box<dyn Error>> {
    let host = Host::new();
    let (mut at, mut device) = next(directory, 0)?;
    let (target, pod) = (directory.join("target"), directory.join("pod"));
    for point in [&target, &pod] {
        fs::create_dir_all(point)?;
    }
    host.bind(&at, &target, MountAttr::default())?;
    let script = format!(
        "mount --bind {0} {1} && exec {2} known look-for {1}/file",
        target.display(),
        pod.display(),
        env::current_exe()?.display()
    );
    let mut looker = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--", "sh", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut said = BufReader::new(looker.stdout.take().ok_or("no output")?).lines();
    said.next().ok_or("it does not begin")??;
    for round in 1..=rounds {
        host.unmount(&at, true)?;
        let (living, number) = next(directory, round)?;
        let report = host.swap_mounts(device, &living)?;
        if report.swapped < 2 || report.failed > 0 {
            return Err(format!("round {round}: {report:?}").into());
        }
        (at, device) = (living, number);
    }
    drop(looker.stdin.take());
    println!("{}", said.next().ok_or("it says nothing")??);
    looker.wait()?;
    for point in [&target, &at] {
        host.unmount(point, false)?;
    }
    Ok(())
}

fn look_for(file: &Path) -> Result<(), Box<dyn Error>> {
    println!("begins");
    let ended = thread::spawn(|| io::stdin().read_to_end(&mut Vec::new()));
    let (mut missing, mut looks) = (0_u64, 0_u64);
    while !ended.is_finished() {
        missing += u64::from(fs::symlink_metadata(file).is_err());
        looks += 1;
    }
    println!("missing {missing} of {looks}");
    Ok(())
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
