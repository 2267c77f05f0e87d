//! The records that pods write in random sequences of faults, as the program inside writes and the test reads them.

/// Bytes of a record. It divides every block: one that was not acknowledged is there as a whole, or not at all, or as zeros.
pub const LENGTH: usize = 32;

/// Who wrote it (at most 14 bytes, no space), the number, a checksum of both.
pub fn record(tag: &str, number: u64) -> String {
    let text = format!("{tag:<14} {number:07}");
    format!("{text} {:08x}\n", sum(&text))
}

/// Writer and number of a record that is whole.
pub fn parse(bytes: &[u8]) -> Option<(&str, u64)> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (tag, rest) = text.split_once(' ')?;
    let number = rest.split_whitespace().next()?.parse().ok()?;
    (record(tag, number) == text).then_some((tag, number))
}

/// FNV-1a, of 32 bits.
fn sum(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
