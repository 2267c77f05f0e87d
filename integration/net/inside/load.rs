//! Work on a filesystem, and how fast it went: `inside load KIND DIRECTORY MIB|COUNT`.
//!
//! One number on standard output, operations or MiB a second. What is read was dropped from the caches before.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

/// How long work without an end of its own goes on.
const RANDOM: Duration = Duration::from_secs(4);

/// One kind of work.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [kind, directory, amount] = arguments else { return Err("inside load KIND DIRECTORY AMOUNT".into()) };
    let (directory, amount) = (Path::new(directory), amount.parse::<u64>()?);
    let file = directory.join("load");
    let rate = match kind.as_str() {
        "write" => sequential_write(&file, amount)?,
        "read" => sequential_read(&file)?,
        "random-write" => random_write(&file)?,
        "random-read" => random_read(&file)?,
        "create" => create(directory, amount)?,
        "list" => list(directory)?,
        "stat" => each(directory, amount, |path| fs::metadata(path).map(drop))?,
        "open" => each(directory, amount, |path| fs::read(path).map(drop))?,
        "remove" => {
            let rate = each(directory, amount, |path| fs::remove_file(path))?;
            fs::remove_dir_all(directory.join("small"))?;
            rate
        }
        other => return Err(format!("there is no work {other:?}").into()),
    };
    println!("{rate:.2}");
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "a count of operations")]
fn a_second(count: u64, begun: Instant) -> f64 {
    count as f64 / begun.elapsed().as_secs_f64()
}

/// 1 MiB at a time, the last fsync included; MiB a second.
fn sequential_write(file: &Path, mib: u64) -> io::Result<f64> {
    let block: Vec<u8> = (0..MIB).map(|i| u8::try_from(i % 251).unwrap_or_default()).collect();
    let begun = Instant::now();
    let mut file = File::create(file)?;
    for _ in 0..mib {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(a_second(mib, begun))
}

fn drop_caches() -> io::Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "3")
}

fn sequential_read(file: &Path) -> io::Result<f64> {
    drop_caches()?;
    let mut block = vec![0; MIB];
    let begun = Instant::now();
    let mut file = File::open(file)?;
    let mut read = 0;
    loop {
        match file.read(&mut block)? {
            0 => return Ok(a_second(read, begun) / 1048576.0),
            n => read += n as u64,
        }
    }
}

/// Pages of the file in an order that repeats from run to run.
fn pages(file: &File) -> io::Result<impl Iterator<Item = u64> + use<>> {
    let count = (file.metadata()?.len() / PAGE as u64).max(1);
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    Ok(std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % count * PAGE as u64
    }))
}

/// 4 KiB and fdatasync each; operations a second.
fn random_write(file: &Path) -> io::Result<f64> {
    let file = OpenOptions::new().write(true).open(file)?;
    let page = [5; PAGE];
    let (begun, mut count) = (Instant::now(), 0);
    for at in pages(&file)? {
        file.write_all_at(&page, at)?;
        file.sync_data()?;
        count += 1;
        if begun.elapsed() > RANDOM {
            break;
        }
    }
    Ok(a_second(count, begun))
}

fn random_read(file: &Path) -> io::Result<f64> {
    drop_caches()?;
    let file = File::open(file)?;
    let mut page = [0; PAGE];
    let (begun, mut count) = (Instant::now(), 0);
    for at in pages(&file)? {
        file.read_exact_at(&mut page, at)?;
        count += 1;
        if begun.elapsed() > RANDOM {
            break;
        }
    }
    Ok(a_second(count, begun))
}

fn small(directory: &Path, index: u64) -> PathBuf {
    directory.join("small").join(format!("d{}", index % 20)).join(format!("f{index}"))
}

/// 4 KiB each, with all of them on the disk at the end; files a second.
fn create(directory: &Path, count: u64) -> io::Result<f64> {
    for index in 0..20 {
        fs::create_dir_all(directory.join("small").join(format!("d{index}")))?;
    }
    let begun = Instant::now();
    for index in 0..count {
        fs::write(small(directory, index), [7; PAGE])?;
    }
    nix::unistd::syncfs(File::open(directory)?)?;
    Ok(a_second(count, begun))
}

/// Names a second, of all directories.
fn list(directory: &Path) -> io::Result<f64> {
    let (begun, mut count) = (Instant::now(), 0);
    for entry in fs::read_dir(directory.join("small"))? {
        for name in fs::read_dir(entry?.path())? {
            name?;
            count += 1;
        }
    }
    Ok(a_second(count, begun))
}

fn each(directory: &Path, count: u64, work: impl Fn(&Path) -> io::Result<()>) -> io::Result<f64> {
    let begun = Instant::now();
    for index in 0..count {
        work(&small(directory, index))?;
    }
    Ok(a_second(count, begun))
}
