//! What is said on a machine's command channel, between the tests and the agent inside.
//!
//! Frames in both directions: the length of what follows (u32), the number of the command that it belongs to (u64), what it
//! is (u8), and its body; numbers are little endian. Many commands run at the same time, so one that hangs keeps no other
//! from being run.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// No frame is longer: what is larger goes in several.
pub const LARGEST: usize = 64 << 10;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The agent is there; the body is a [`Hello`].
    Hello,
    /// To the machine: run a [`Request`].
    Run,
    /// To the machine: standard input; an empty one ends it.
    Input,
    /// To the machine: end the command and all that it started in its process group.
    Kill,
    /// Standard output.
    Output,
    /// Standard error.
    Errors,
    /// The command ended; the body is an [`Ended`].
    Ended,
}

const KINDS: [Kind; 7] =
    [Kind::Hello, Kind::Run, Kind::Input, Kind::Kill, Kind::Output, Kind::Errors, Kind::Ended];

/// The agent's first word after each start of the machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The kernel's release.
    pub release: String,
    /// The kernel's id of this boot.
    pub boot_id: String,
}

/// A command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// For `bash -euo pipefail -c`.
    pub script: String,
    /// Killed when it has not ended after so many milliseconds.
    pub bound_ms: u64,
    /// Whether input follows.
    pub input: bool,
}

/// How a command ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ended {
    /// Its exit status; none when a signal ended it or it never ended.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// It was killed at its bound.
    pub timed_out: bool,
    /// It did not even end after it was killed: what its processes wait for, one line each.
    pub stuck: Vec<String>,
}

/// A frame.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The command that it belongs to.
    pub id: u64,
    /// What it is.
    pub kind: Kind,
    /// By kind.
    pub body: Vec<u8>,
}

impl Frame {
    /// A frame whose body is JSON.
    pub fn json(id: u64, kind: Kind, body: &impl Serialize) -> io::Result<Self> {
        Ok(Self { id, kind, body: serde_json::to_vec(body)? })
    }

    /// Its bytes, in one piece.
    pub fn encode(&self) -> Vec<u8> {
        let length = u32::try_from(self.body.len() + 9).expect("frames are small");
        let kind = KINDS.iter().position(|k| *k == self.kind).and_then(|at| u8::try_from(at).ok());
        let mut bytes = Vec::with_capacity(self.body.len() + 13);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.push(kind.expect("a known kind"));
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// Writes it.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.encode())
    }

    /// Reads the next one.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 13];
        from.read_exact(&mut head)?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let id =
            u64::from_le_bytes([head[4], head[5], head[6], head[7], head[8], head[9], head[10], head[11]]);
        let length = usize::try_from(length).ok().and_then(|l| l.checked_sub(9)).filter(|l| *l <= LARGEST);
        let kind = KINDS.get(usize::from(head[12])).copied();
        let (Some(length), Some(kind)) = (length, kind) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no frame"));
        };
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        Ok(Self { id, kind, body })
    }
}
