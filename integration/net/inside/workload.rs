//! What a container does with its volume: `inside workload ACTION ...`.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::records;

/// Between two records of one file.
const PAUSE: Duration = Duration::from_millis(20);
/// The same where the processor has more to do.
const LONG_PAUSE: Duration = Duration::from_millis(100);
/// After an error, before the next attempt.
const AGAIN: Duration = Duration::from_millis(500);

/// The text of a writer's record of that number.
type Form = fn(&str, u64) -> String;

/// `append DIRECTORY TAG NAME...`: appends numbered records to each of the files, one thread each, for ever. `ack NAME NUMBER MS`
/// is told of each record that fsync answered for, with the milliseconds since the start; `error NAME NUMBER MS ERRNO` of what
/// was refused, after which the file is opened anew and the same record is tried again. `records DIRECTORY TAG NAME...` is the
/// same with records of [`records::LENGTH`] bytes, each with a checksum, at
/// greater intervals.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Of a record that failed a part may have been written: the next begins a line of its own, where records are lines.
    let (form, apart, pause, directory, tag, names): (Form, _, _, _, _, _) = match words.as_slice() {
        ["append", directory, tag, names @ ..] => {
            (|tag, number| format!("{tag} {number:06}\n"), "\n", PAUSE, directory, tag, names)
        }
        ["records", directory, tag, names @ ..] => (records::record, "", LONG_PAUSE, directory, tag, names),
        _ => return Err("say append|records DIRECTORY TAG NAME...".into()),
    };
    let begun = Instant::now();
    println!("begins");
    let threads: Vec<_> = names
        .iter()
        .map(|name| {
            let (path, name, tag) =
                (PathBuf::from(directory).join(name), (*name).to_owned(), (*tag).to_owned());
            thread::spawn(move || append(&path, &name, begun, pause, apart, |number| form(&tag, number)))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a writer panicked")??;
    }
    Ok(())
}

fn append(
    path: &Path,
    name: &str,
    begun: Instant,
    pause: Duration,
    apart: &str,
    form: impl Fn(u64) -> String,
) -> io::Result<()> {
    let mut file = None;
    let mut number = 0_u64;
    let mut begin = "";
    let tell = |line: String| writeln!(io::stdout().lock(), "{line}").and_then(|()| io::stdout().flush());
    loop {
        let written = record(&mut file, path, &format!("{begin}{}", form(number)));
        let at = begun.elapsed().as_millis();
        match written {
            Ok(()) => {
                tell(format!("ack {name} {number} {at}"))?;
                number += 1;
                begin = "";
                thread::sleep(pause);
            }
            Err(error) => {
                tell(format!("error {name} {number} {at} {}", error.raw_os_error().unwrap_or(0)))?;
                file = None;
                begin = apart;
                thread::sleep(AGAIN);
            }
        }
    }
}

fn record(file: &mut Option<File>, path: &Path, text: &str) -> io::Result<()> {
    let open = match file.take() {
        Some(open) => open,
        None => OpenOptions::new().create(true).append(true).open(path)?,
    };
    let mut to = &open;
    to.write_all(text.as_bytes())?;
    open.sync_all()?;
    *file = Some(open);
    Ok(())
}
