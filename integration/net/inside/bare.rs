//! Images of other nodes attached by nothing but the kernel's own files and calls, and how long each takes: what the driver's
//! own attaching is compared with. `inside bare attach one-by-one|together FS DATA IMAGE...`, an image being
//! `ADDRESS,PORT,NQN,DIRECTORY`; `inside bare detach IMAGE...`.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount, umount};
use serde_json::json;

/// The host that images are exported to.
const HOST: &str = "nqn.2024-01.org.union-csi.test:consumer";
const HOST_ID: &str = "6b2a4b0e-7c2c-4c39-9a0a-0d0f2f5b1c11";

/// How long a device is waited for.
const APPEAR_BOUND: Duration = Duration::from_secs(30);
/// Between two looks: short, since what is measured ends with one.
const STEP: Duration = Duration::from_millis(1);

type Done<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

struct Image<'a> {
    address: &'a str,
    port: &'a str,
    nqn: &'a str,
    directory: PathBuf,
}

impl<'a> Image<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        match text.split(',').collect::<Vec<_>>()[..] {
            [address, port, nqn, directory] => Ok(Self { address, port, nqn, directory: directory.into() }),
            _ => Err(format!("{text:?} is not ADDRESS,PORT,NQN,DIRECTORY")),
        }
    }

    /// Connects, and mounts the filesystem when its device is there; how long the first took, and all of it.
    fn attach(&self, fs_type: &str, data: &str) -> Done<(Duration, Duration)> {
        let begun = Instant::now();
        let mut fabrics = OpenOptions::new().read(true).write(true).open("/dev/nvme-fabrics")?;
        let Self { address, port, nqn, directory } = self;
        let options = format!(
            "transport=tcp,traddr={address},trsvcid={port},nqn={nqn},hostnqn={HOST},hostid={HOST_ID},reconnect_delay=2,\
             ctrl_loss_tmo=-1,keep_alive_tmo=5,nr_io_queues=4"
        );
        fabrics.write_all(options.as_bytes())?;
        let mut answer = [0; 256];
        let _ = fabrics.read(&mut answer)?;
        let device = self.device()?;
        let connected = begun.elapsed();
        fs::create_dir_all(directory)?;
        mount(Some(&device), directory, Some(fs_type), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(data))?;
        Ok((connected, begun.elapsed()))
    }

    fn device(&self) -> Done<PathBuf> {
        let deadline = Instant::now() + APPEAR_BOUND;
        loop {
            for entry in fs::read_dir("/sys/block")? {
                let (entry, at) = entry.map(|e| (e.file_name(), e.path()))?;
                let name = entry.to_string_lossy();
                let is = |file: &str, wanted: &str| {
                    fs::read_to_string(at.join(file)).is_ok_and(|text| text.trim() == wanted)
                };
                let device = Path::new("/dev").join(&*name);
                if name.starts_with("nvme")
                    && is("device/subsysnqn", self.nqn)
                    && !is("hidden", "1")
                    && device.exists()
                {
                    return Ok(device);
                }
            }
            if Instant::now() > deadline {
                return Err(format!("no device of {} appears", self.nqn).into());
            }
            thread::sleep(STEP);
        }
    }

    fn detach(&self) -> Done {
        umount(&self.directory)?;
        for entry in fs::read_dir("/sys/class/nvme")? {
            let at = entry?.path();
            if fs::read_to_string(at.join("subsysnqn")).is_ok_and(|nqn| nqn.trim() == self.nqn) {
                fs::write(at.join("delete_controller"), "1")?;
            }
        }
        Ok(())
    }
}

/// Attaches or detaches images.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["attach", order, fs_type, data, ref images @ ..] => {
            let images = images.iter().map(|text| Image::parse(text)).collect::<Result<Vec<_>, _>>()?;
            let begun = Instant::now();
            let attach = |image: &Image<'_>| image.attach(fs_type, data);
            let each: Vec<_> = match order {
                "one-by-one" => images.iter().map(attach).collect(),
                "together" => thread::scope(|scope| {
                    let all: Vec<_> = images.iter().map(|image| scope.spawn(move || attach(image))).collect();
                    all.into_iter().map(|one| one.join().expect("no panic")).collect()
                }),
                other => return Err(format!("{other:?} is neither one-by-one nor together").into()),
            };
            let all = begun.elapsed().as_secs_f64();
            let each = each.into_iter().collect::<Done<Vec<_>>>().map_err(|e| e.to_string())?;
            let connect: f64 = each.iter().map(|(connected, _)| connected.as_secs_f64()).sum();
            let mounted: f64 = each.iter().map(|(_, mounted)| mounted.as_secs_f64()).sum();
            println!("{}", json!({ "seconds": all, "connect": connect, "mount": mounted - connect }));
        }
        ["detach", ref images @ ..] => {
            for image in images {
                Image::parse(image)?.detach().map_err(|e| e.to_string())?;
            }
        }
        _ => return Err("say bare attach ORDER FS DATA IMAGE... or bare detach IMAGE...".into()),
    }
    Ok(())
}
