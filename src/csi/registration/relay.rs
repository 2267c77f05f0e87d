//! Makes a kubelet's requests such that they are understood.
//!
//! An HTTP/2 request names an authority (RFC 9113, 8.3.1). The kubelet names the path of the registration socket there,
//! percent-encoded, which RFC 3986 does not allow for a host with a port; the `http` crate refuses it, and the connection
//! with it. (For the CSI socket the kubelet says `localhost`.) Nobody here asks what the authority is, so between the
//! socket and the server its value is replaced, and nothing else is looked at.
//!
//! Frames are those of RFC 9113, section 4.1; header blocks those of RFC 7541. Which bytes are a value follows from the
//! lengths alone: neither Huffman codes nor the dynamic table have to be known. The server's table then holds the new
//! value where the kubelet's holds the old one, so that later references mean the same. It is counted shorter there, which
//! would matter only after a table of 4096 bytes has overflowed; a registration is two requests.

use std::io;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

/// Connections that wait for the server. A kubelet has one.
pub(super) const WAITING: usize = 8;

/// What goes between socket and server at once: a frame of the largest size that a server takes unless it says otherwise.
const FRAME: usize = 16_384;

/// What a client begins with (RFC 9113, 3.4).
const PREFACE: usize = 24;
const HEADERS: u8 = 1;
const END_HEADERS: u8 = 0x04;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;

/// Index of `:authority` in the static table (RFC 7541, appendix A).
const AUTHORITY: usize = 1;
const LOCALHOST: &[u8] = b"localhost";

/// Accepts connections for ever and hands them on, each behind a relay, which runs as long as this does.
pub(super) async fn accept(listener: UnixListener, server: mpsc::Sender<io::Result<DuplexStream>>) {
    let mut relays = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    let (near, far) = tokio::io::duplex(FRAME);
                    // Nobody is served when as many wait: then this one is told so by the end of its connection.
                    if server.try_send(Ok(far)).is_ok() {
                        relays.push(relay(client, near));
                    }
                }
                // Out of descriptors, which passes.
                Err(error) => {
                    tracing::warn!(%error, "a connection to the registration socket was not accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(()) = relays.next() => {}
        }
    }
}

async fn relay(client: UnixStream, server: DuplexStream) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = tokio::io::split(server);
    let (asked, answered) = tokio::join!(requests(from_client, to_server), answers(from_server, to_client));
    if let Err(error) = asked.and(answered) {
        tracing::debug!(%error, "a connection to the registration socket broke");
    }
}

async fn answers(mut server: ReadHalf<DuplexStream>, mut client: OwnedWriteHalf) -> io::Result<()> {
    tokio::io::copy(&mut server, &mut client).await?;
    client.shutdown().await
}

async fn requests(mut client: OwnedReadHalf, mut server: WriteHalf<DuplexStream>) -> io::Result<()> {
    let copied = copy_frames(&mut client, &mut server).await;
    // Also where it broke: the server shall not wait for more.
    server.shutdown().await?;
    copied
}

async fn copy_frames(client: &mut OwnedReadHalf, server: &mut WriteHalf<DuplexStream>) -> io::Result<()> {
    let mut preface = [0; PREFACE];
    client.read_exact(&mut preface).await?;
    server.write_all(&preface).await?;
    loop {
        let mut head = [0; 9];
        match client.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        };
        let [l0, l1, l2, kind, flags, ..] = head;
        let length = usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2);
        if length > FRAME {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame is too long"));
        }
        let mut payload = vec![0; length];
        client.read_exact(&mut payload).await?;
        if kind == HEADERS
            && flags & END_HEADERS != 0
            && let Some(changed) = with_local_authority(flags, &payload)
        {
            payload = changed;
        }
        let [_, l0, l1, l2] = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
        head[..3].copy_from_slice(&[l0, l1, l2]);
        server.write_all(&head).await?;
        server.write_all(&payload).await?;
    }
}

/// The payload of a HEADERS frame with another authority; `None` where it is not understood, or would be too long.
fn with_local_authority(flags: u8, payload: &[u8]) -> Option<Vec<u8>> {
    let (padded, prioritised) = (flags & PADDED != 0, flags & PRIORITY != 0);
    let begin = usize::from(padded) + if prioritised { 5 } else { 0 };
    let padding = if padded { usize::from(*payload.first()?) } else { 0 };
    let end = payload.len().checked_sub(padding)?;
    let mut changed = payload.get(..begin)?.to_vec();
    changed.extend(replaced(payload.get(begin..end)?)?);
    changed.extend_from_slice(payload.get(end..)?);
    (changed.len() <= FRAME).then_some(changed)
}

/// A header block whose literal authority is `localhost`.
fn replaced(block: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader { block, at: 0 };
    let mut out = Vec::with_capacity(block.len());
    while let Some(&first) = block.get(reader.at) {
        let begin = reader.at;
        // How a field begins: RFC 7541, section 6. Bits of the number, and whether text follows.
        let (bits, literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => (5, false),
            _ => (4, true),
        };
        let index = reader.number(bits)?;
        if literal {
            if index == 0 {
                reader.text()?;
            }
            let value = reader.at;
            reader.text()?;
            if index == AUTHORITY {
                out.extend_from_slice(block.get(begin..value)?);
                // Not Huffman-coded, so the first bit is 0; the length takes the other seven.
                out.push(u8::try_from(LOCALHOST.len()).ok()?);
                out.extend_from_slice(LOCALHOST);
                continue;
            }
        }
        out.extend_from_slice(block.get(begin..reader.at)?);
    }
    Some(out)
}

struct Reader<'a> {
    block: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.block.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    /// A number that begins in the lowest `bits` of a byte (RFC 7541, 5.1).
    fn number(&mut self, bits: u32) -> Option<usize> {
        let most = (1_usize << bits) - 1;
        let mut number = usize::from(self.byte()?) & most;
        if number < most {
            return Some(number);
        }
        // No length in a frame takes more than three further bytes.
        for shift in [0, 7, 14] {
            let byte = usize::from(self.byte()?);
            number += (byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    /// Goes past a text (RFC 7541, 5.2).
    fn text(&mut self) -> Option<()> {
        let length = self.number(7)?;
        self.at = self.at.checked_add(length).filter(|end| *end <= self.block.len())?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(begin: u8, texts: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![begin];
        for text in texts {
            bytes.push(u8::try_from(text.len()).unwrap());
            bytes.extend_from_slice(text);
        }
        bytes
    }

    #[test]
    fn only_the_value_of_a_literal_authority_is_replaced() {
        for begin in [0x41, 0x01, 0x11] {
            let around = [
                vec![0x83, 0x86],
                field(0x44, &[b"/a/b"]),
                field(0x40, &[b"te", b"trailers"]),
                vec![0x3F, 0xE1, 0x1F],
            ];
            let block = |authority: &[u8]| {
                [
                    around[0].clone(),
                    around[1].clone(),
                    field(begin, &[authority]),
                    around[2].clone(),
                    around[3].clone(),
                ]
                .concat()
            };
            assert_eq!(replaced(&block(b"%2Fvar%2Fplugins")).unwrap(), block(b"localhost"), "{begin:#x}");
        }
        let without = [0x83, 0xBF, 0x84];
        assert_eq!(replaced(&without).unwrap(), without, "what refers to the table stays");
    }

    #[test]
    fn a_huffman_coded_or_long_value_is_replaced_by_its_length_alone() {
        let mut block = vec![0x41, 0x80 | 3, 0xFF, 0xFE, 0xFD];
        block.push(0x83);
        assert_eq!(replaced(&block).unwrap(), [field(0x41, &[b"localhost"]), vec![0x83]].concat());
        // 300 = 127 + 173: a first byte of ones, then 0xAD 0x01.
        let long = [vec![0x41, 0x7F, 0xAD, 0x01], vec![b'x'; 300], vec![0x83]].concat();
        assert_eq!(replaced(&long).unwrap(), [field(0x41, &[b"localhost"]), vec![0x83]].concat());
    }

    #[test]
    fn what_is_cut_short_is_left_alone() {
        let whole = [vec![0x83], field(0x40, &[b"name", b"value"]), field(0x41, &[b"%2Fvar"])].concat();
        let ends = [0, 1, 13];
        for end in 0..whole.len() {
            assert_eq!(replaced(&whole[..end]).is_some(), ends.contains(&end), "{end}");
        }
        assert_eq!(replaced(&[0x41, 0x7F, 0xFF, 0xFF, 0xFF, 0xFF]), None, "an endless number");
    }

    #[test]
    fn padding_and_priority_stay_around_the_block() {
        let block = field(0x41, &[b"%2Fvar"]);
        let payload = [vec![2], vec![0, 0, 0, 0, 16], block, vec![0, 0]].concat();
        let wanted = [vec![2], vec![0, 0, 0, 0, 16], field(0x41, &[b"localhost"]), vec![0, 0]].concat();
        assert_eq!(with_local_authority(PADDED | PRIORITY, &payload).unwrap(), wanted);
        assert_eq!(with_local_authority(PADDED, &[200, 0x83]), None);
        assert_eq!(with_local_authority(PADDED, &[]), None);
    }
}
