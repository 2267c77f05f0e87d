//! Lengths of time as Go and Kubernetes write them: `300ms`, `5m`, `1h30m`.

use std::time::Duration;

use snafu::Snafu;

/// A text is not a length of time.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(display("{text:?} is not a length of time: write numbers with units, such as 30s, 5m or 1h30m"))]
pub struct InvalidDuration {
    text: String,
}

const UNITS: [(&str, u128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// Reads a length of time: a sequence of decimal numbers, each with its unit (`ns`, `us`, `ms`, `s`, `m`, `h`), or `0`
/// (<https://pkg.go.dev/time#ParseDuration>). Fractions of a nanosecond are dropped.
///
/// # Errors
/// [`InvalidDuration`] for anything else, negative lengths included, and for more than 2^64 nanoseconds (584 years).
pub fn parse(text: &str) -> Result<Duration, InvalidDuration> {
    nanoseconds(text)
        .map(Duration::from_nanos)
        .ok_or_else(|| InvalidDuration { text: text.chars().take(64).collect() })
}

fn nanoseconds(text: &str) -> Option<u64> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = 0_u128;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        let scale = UNITS.iter().find(|(name, _)| *name == unit)?.1;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let whole: u128 = if whole.is_empty() { 0 } else { u128::from(whole.parse::<u64>().ok()?) };
        total = total.checked_add(whole * scale)?;
        let mut place = scale;
        for digit in fraction.bytes() {
            place /= 10;
            total = total.checked_add(u128::from(digit - b'0') * place)?;
        }
        rest = tail;
    }
    u64::try_from(total).ok()
}

/// Writes a length of time so that [`parse`] reads it back exactly, up to 2^64 nanoseconds.
#[must_use]
pub fn format(duration: Duration) -> String {
    let mut rest = duration.as_nanos();
    if rest == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    for (unit, scale) in UNITS.iter().rev().filter(|(unit, _)| unit.is_ascii()) {
        let count = rest / scale;
        rest %= scale;
        if count > 0 {
            text.push_str(&format!("{count}{unit}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lengths_are_read_as_go_reads_them() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1.5h", 5_400_000),
            (".5s", 500),
            ("1s500ms", 1500),
            ("+2s", 2000),
            ("1500us", 1),
        ] {
            assert_eq!(parse(text).unwrap().as_millis(), millis, "{text}");
        }
    }

    #[test]
    fn what_is_no_length_is_refused() {
        for text in ["", "+", "5", "m", "-5m", "5 m", "5d", "1.2.3s", ".s", "5mm", "9999999999999999999h"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(nanos in any::<u64>()) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&format(duration)), Ok(duration));
        }

        #[test]
        fn no_text_panics(text in "\\PC*|[0-9.]{0,25}[nuµmsh]{0,3}[0-9.]{0,4}[msh]?") {
            let _ = parse(&text);
        }
    }
}
