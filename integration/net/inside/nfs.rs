//! Both ends of the NFS transport, and what workloads do on it.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::error::Error;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use union_csi::node::transport::nfs::{NfsConsumer, NfsOwner};
use union_csi::node::transport::{
    Consumer, Endpoint, ExportId, Generation, Owner, Patience, Peer, Right, Source, TransportError,
};
use union_csi::platform::Host;
use union_csi::platform::nfs::{NFS_PORT, NfsRoots, NfsServing};

/// Short, so that tests need not wait long; the kernel takes no less.
const LEASE: Duration = Duration::from_secs(10);

const USAGE: &str = "export|allow|allow-to-read|fence|hear|tend|unexport|exports|attach|detach|force-detach|attachments|append|append-locked|hold|hold-range|try-lock|\
     try-range";

/// `nfs ACTION ARGUMENT...`; a branch is told as `BRANCH@GENERATION`.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["export", id, directory] => {
            let endpoint = owner()?.export(&parse(id)?, &Source::Directory(PathBuf::from(directory)))?;
            println!("{}", endpoint.name);
        }
        ["allow", id, address] => owner()?.allow(&parse(id)?, &peer(address)?, Right::Write, None)?,
        ["allow-to-read", id, address] => owner()?.allow(&parse(id)?, &peer(address)?, Right::Read, None)?,
        ["fence", id, address] => owner()?.fence(&parse(id)?, &peer(address)?)?,
        ["hear", id, directory, address] => {
            owner()?.hear(&parse(id)?, &Source::Directory(PathBuf::from(directory)), &peer(address)?)?;
        }
        ["tend"] => owner()?.tend()?,
        ["unexport", branch] => owner()?.unexport(&branch.parse()?)?,
        ["exports"] => {
            for export in owner()?.exports()? {
                println!("{}@{} {}", export.id.branch, export.id.generation, export.allowed.join(","));
            }
        }
        ["attach", id, address] => println!("{}", attach(id, address)?),
        ["detach", id] => consumer()?.detach(&parse(id)?)?,
        ["force-detach", id] => consumer()?.force_detach(&parse(id)?)?,
        ["attachments"] => {
            for found in consumer()?.attachments()? {
                println!("{}@{} {:?}", found.id.branch, found.id.generation, found.link);
            }
        }
        ["append", file] => append(Path::new(file))?,
        ["append-locked", file, word, times] => {
            let mut file = OpenOptions::new().read(true).append(true).open(file)?;
            for _ in 0..times.parse::<u32>()? {
                range(&file, true, libc::F_WRLCK)?;
                file.write_all(format!("{word}\n").as_bytes())?;
                range(&file, true, libc::F_UNLCK)?;
            }
        }
        ["hold-range", file] => {
            let file = OpenOptions::new().read(true).write(true).open(file)?;
            range(&file, true, libc::F_WRLCK)?;
            println!("held");
            std::io::stdout().flush()?;
            std::thread::sleep(Duration::from_secs(600));
        }
        ["try-range", file] => {
            let file = OpenOptions::new().read(true).write(true).open(file)?;
            match range(&file, false, libc::F_WRLCK) {
                Ok(()) => println!("free"),
                Err(Errno::EAGAIN | Errno::EACCES) => println!("taken"),
                Err(error) => return Err(error.into()),
            }
        }
        ["hold", file] => {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(file)?;
            file.lock()?;
            println!("held");
            std::io::stdout().flush()?;
            std::thread::sleep(Duration::from_secs(600));
        }
        ["try-lock", file] => {
            let file = OpenOptions::new().read(true).write(true).open(file)?;
            match file.try_lock() {
                Ok(()) => println!("free"),
                Err(TryLockError::WouldBlock) => println!("taken"),
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
        _ => return Err(format!("say {USAGE}, not {words:?}").into()),
    }
    Ok(())
}

/// Locks or unlocks the whole file by fcntl(2); `wait`: until whoever has it lets it go.
fn range(file: &File, wait: bool, kind: libc::c_int) -> Result<(), Errno> {
    let whole = libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let how = if wait { FcntlArg::F_SETLKW(&whole) } else { FcntlArg::F_SETLK(&whole) };
    fcntl(file, how).map(drop)
}

/// The words of the contract are told apart by the tests.
fn attach(id: &str, address: &str) -> Result<String, Box<dyn Error>> {
    let id = parse(id)?;
    let endpoint = Endpoint {
        address: (address.parse::<Ipv4Addr>()?, NFS_PORT).into(),
        name: format!("/{}@{}", id.branch, id.generation),
    };
    match consumer()?.attach(&id, &endpoint, None, Patience::Wait) {
        Ok(attached) => Ok(attached.at.ok_or("attached nowhere")?.display().to_string()),
        Err(TransportError::Refused { reason, .. }) => Err(format!("REFUSED: {reason}").into()),
        Err(TransportError::Unreachable { reason, .. }) => Err(format!("UNREACHABLE: {reason}").into()),
        Err(other) => Err(other.into()),
    }
}

/// Appends numbered records to a file that stays open, tells each one that is on the disk, and how that ended.
fn append(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    for number in 0_u32.. {
        let written = file.write_all(format!("{number:08}\n").as_bytes()).and_then(|()| file.sync_all());
        if let Err(error) = written {
            println!("ended by {}", error.raw_os_error().unwrap_or(0));
            return Ok(());
        }
        println!("{number:08}");
        std::io::stdout().flush()?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn parse(text: &str) -> Result<ExportId, Box<dyn Error>> {
    let (branch, generation) = text.split_once('@').ok_or("say BRANCH@GENERATION")?;
    Ok(ExportId { branch: branch.parse()?, generation: Generation(generation.parse()?) })
}

fn peer(address: &str) -> Result<Peer, Box<dyn Error>> {
    Ok(Peer { node: "node".parse()?, identity: address.to_owned() })
}

/// This machine's address, as its name is in `/etc/hosts`.
fn own() -> Result<IpAddr, Box<dyn Error>> {
    let (mut name, mut hosts) = (String::new(), String::new());
    File::open("/etc/hostname")?.read_to_string(&mut name)?;
    File::open("/etc/hosts")?.read_to_string(&mut hosts)?;
    let line = hosts.lines().find(|l| l.split_whitespace().last() == Some(name.trim()));
    Ok(line.and_then(|l| l.split_whitespace().next()).ok_or("no address")?.parse()?)
}

fn owner() -> Result<NfsOwner, Box<dyn Error>> {
    let serving = NfsServing {
        address: (own()?, NFS_PORT).into(),
        lease: LEASE,
        threads: 8,
        recovery: "/pool/recovery".into(),
    };
    Ok(NfsOwner::new(
        Host::new(),
        NfsRoots::default(),
        serving,
        "/run/union-csi/nfs".into(),
        "/pool/fences".into(),
    ))
}

fn consumer() -> Result<NfsConsumer, Box<dyn Error>> {
    Ok(NfsConsumer::new(Host::new(), NfsRoots::default(), "/run/union-csi/attached".into(), own()?))
}
