//! Amounts of bytes, read and written as Kubernetes quantities.
//!
//! Text is exact in both directions: what [`Bytes`] displays, it parses to the same amount. Parsing follows
//! <https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>: a decimal number, then a binary
//! suffix (`Ki` … `Ei`), a decimal one (`n u m k M G T P E`) or an exponent (`e3`, `E3`); what does not come out to
//! whole bytes is rounded up, as Kubernetes does.

use std::borrow::Cow;
use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use snafu::Snafu;

/// An amount of bytes. In JSON a number of bytes; a quantity string such as `"1Gi"` is read as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);
    /// The largest amount.
    pub const MAX: Self = Self(u64::MAX);

    /// `n` bytes.
    #[must_use]
    pub const fn new(n: u64) -> Self {
        Self(n)
    }

    /// `n` mebibytes (2^20).
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` gibibytes (2^30).
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The number of bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// True for no bytes.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The sum, or the largest amount where it would overflow.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, or zero where it would be negative.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The product, or the largest amount where it would overflow.
    #[must_use]
    pub const fn saturating_mul(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }

    /// The sum, or `None` where it would overflow.
    #[must_use]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The difference, or `None` where it would be negative.
    #[must_use]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The product, or `None` where it would overflow.
    #[must_use]
    pub const fn checked_mul(self, n: u64) -> Option<Self> {
        match self.0.checked_mul(n) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The largest multiple of `quantum` that is not above this amount; a quantum of zero leaves it as it is.
    #[must_use]
    pub const fn round_down_to(self, quantum: Self) -> Self {
        match self.0.checked_rem(quantum.0) {
            Some(rest) => Self(self.0 - rest),
            None => self,
        }
    }

    /// The smallest multiple of `quantum` that is not below this amount, or `None` where it would overflow; a quantum of
    /// zero leaves it as it is.
    #[must_use]
    pub const fn round_up_to(self, quantum: Self) -> Option<Self> {
        match self.0.checked_rem(quantum.0) {
            None | Some(0) => Some(self),
            Some(rest) => self.checked_add(Self(quantum.0 - rest)),
        }
    }

    /// The amount as people can read it and programs can take it over: exact, and in words too where that is long.
    #[must_use]
    pub fn shown(self) -> String {
        let exact = self.to_string();
        if exact.len() <= 8 { exact } else { format!("{} ({} bytes)", self.human(), self.0) }
    }

    /// The amount for people: binary units, rounded to one decimal, such as `1.5 GiB`.
    #[must_use]
    pub fn human(self) -> String {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return format!("{} B", self.0);
        }
        for (power, unit) in UNITS.iter().enumerate() {
            let scale = 1_u128 << (10 * (power + 1));
            let tenths = (u128::from(self.0) * 10 + scale / 2) / scale;
            if tenths < 10_240 || power + 1 == UNITS.len() {
                let (whole, tenth) = (tenths / 10, tenths % 10);
                return if tenth == 0 {
                    format!("{whole} {unit}")
                } else {
                    format!("{whole}.{tenth} {unit}")
                };
            }
        }
        self.to_string()
    }
}

/// The exact quantity: the largest binary suffix that divides the amount, else the plain number.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        let (mut number, mut suffix) = (self.0, 0);
        while number != 0 && number.is_multiple_of(1024) && suffix + 1 < SUFFIXES.len() {
            number /= 1024;
            suffix += 1;
        }
        f.pad(&format!("{number}{}", SUFFIXES[suffix]))
    }
}

/// Saturating.
impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Self::saturating_add)
    }
}

/// Saturating.
impl<'a> Sum<&'a Self> for Bytes {
    fn sum<I: Iterator<Item = &'a Self>>(amounts: I) -> Self {
        amounts.copied().sum()
    }
}

/// A text is not an amount of bytes.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
pub enum InvalidQuantity {
    /// It is not a quantity at all.
    #[snafu(display(
        "{text:?} is not a quantity: write a number of bytes with an optional suffix, such as 500Mi, 1.5Gi, 10G or 1e9"
    ))]
    Malformed {
        /// The text, shortened.
        text: String,
    },
    /// It is below zero.
    #[snafu(display("{text:?} is negative: give an amount of zero or more"))]
    Negative {
        /// The text, shortened.
        text: String,
    },
    /// It is above the largest amount.
    #[snafu(display("{text:?} is too large: the largest amount is {}", Bytes::MAX))]
    TooLarge {
        /// The text, shortened.
        text: String,
    },
}

/// What a suffix multiplies by: `2^binary * 10^decimal`.
#[derive(Clone, Copy)]
struct Scale {
    kibi: u32,
    decimal: i64,
}

fn scale(suffix: &str) -> Option<Scale> {
    let decimal = |decimal| Some(Scale { kibi: 0, decimal });
    let binary = |kibi| Some(Scale { kibi, decimal: 0 });
    match suffix {
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            // An exponent that does not fit is as good as the largest one: overflow, or a fraction of a byte.
            let magnitude = digits.parse::<i64>().unwrap_or(i64::MAX).min(1 << 32);
            decimal(if exponent.starts_with('-') { -magnitude } else { magnitude })
        }
    }
}

/// Decimal digits, the least significant first, times 1024.
fn times_1024(digits: &mut Vec<u8>) {
    let mut carry = 0_u32;
    for digit in digits.iter_mut() {
        let value = u32::from(*digit) * 1024 + carry;
        *digit = u8::try_from(value % 10).unwrap_or(0);
        carry = value / 10;
    }
    while carry > 0 {
        digits.push(u8::try_from(carry % 10).unwrap_or(0));
        carry /= 10;
    }
}

impl FromStr for Bytes {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let shown = || text.chars().take(64).collect::<String>();
        let malformed = || InvalidQuantity::Malformed { text: shown() };
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(malformed());
        }
        let scale = scale(suffix).ok_or_else(malformed)?;

        // The number is `digits * 10^point`, exactly; no digit is dropped before the final rounding.
        let mut digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).rev().map(|b| b - b'0').collect();
        while digits.last() == Some(&0) {
            digits.pop();
        }
        if digits.is_empty() {
            return Ok(Self::ZERO);
        }
        if text.starts_with('-') {
            return Err(InvalidQuantity::Negative { text: shown() });
        }
        for _ in 0..scale.kibi {
            times_1024(&mut digits);
        }
        let point = scale.decimal - i64::try_from(fraction.len()).unwrap_or(i64::MAX);
        let below = usize::try_from(-point).unwrap_or(0).min(digits.len());
        let rounds_up = digits[..below].iter().any(|digit| *digit != 0);
        let mut value = 0_u64;
        let too_large = || InvalidQuantity::TooLarge { text: shown() };
        for digit in digits[below..].iter().rev() {
            value =
                value.checked_mul(10).and_then(|v| v.checked_add(u64::from(*digit))).ok_or_else(too_large)?;
        }
        // Any amount but zero overflows within 20 steps.
        for _ in 0..point.max(0) {
            value = value.checked_mul(10).ok_or_else(too_large)?;
        }
        value.checked_add(u64::from(rounds_up)).map(Self).ok_or_else(too_large)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Amount;

        impl Visitor<'_> for Amount {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or a quantity such as \"10Gi\"")
            }

            fn visit_u64<E: de::Error>(self, n: u64) -> Result<Bytes, E> {
                Ok(Bytes(n))
            }

            fn visit_i64<E: de::Error>(self, n: i64) -> Result<Bytes, E> {
                u64::try_from(n)
                    .map(Bytes)
                    .map_err(|_| E::custom(InvalidQuantity::Negative { text: n.to_string() }))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Amount)
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "An amount of bytes: a number, or a quantity such as \"10Gi\" (read; numbers are written)",
            "x-kubernetes-int-or-string": true,
            "anyOf": [
                { "type": "integer", "format": "int64", "minimum": 0 },
                {
                    "type": "string",
                    "pattern": r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$"
                }
            ]
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<u64, InvalidQuantity> {
        text.parse().map(Bytes::get)
    }

    #[test]
    fn every_suffix_of_kubernetes_is_read() {
        for (text, bytes) in [
            ("0", 0),
            ("-0", 0),
            ("+5", 5),
            ("1", 1),
            ("1.", 1),
            (".5Ki", 512),
            ("1n", 1),
            ("1000000000n", 1),
            ("1000001u", 2),
            ("1500m", 2),
            ("2000m", 2),
            ("1k", 1000),
            ("1M", 1_000_000),
            ("1G", 1_000_000_000),
            ("1T", 1_000_000_000_000),
            ("1P", 1_000_000_000_000_000),
            ("1E", 1_000_000_000_000_000_000),
            ("1Ki", 1 << 10),
            ("1Mi", 1 << 20),
            ("1Gi", 1 << 30),
            ("1Ti", 1 << 40),
            ("1Pi", 1 << 50),
            ("15Ei", 15 << 60),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1E+3", 1000),
            ("1500e-3", 2),
            ("0.1Gi", 107_374_183),
            ("1.5Gi", 3 << 29),
            ("1e-999999999999999999999", 1),
            ("0e999999999999999999999", 0),
            ("000000000000000000000000000001Ki", 1024),
            ("1.00000000000000000000000000000000000000001", 2),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_quantity_is_refused_with_the_text_and_a_remedy() {
        for text in [
            "", " ", "1 Gi", " 1Gi", "1Gi ", "1gi", "1K", "1KiB", "1GB", "Gi", ".", "+", "-", "--1", "1.2.3",
            "1e", "1e+", "1e1.5", "0x10", "1_000", "ten", "١", "1e3Ki", "NaN", "inf", "1,5Gi",
        ] {
            let error = parse(text).expect_err(text);
            assert!(matches!(error, InvalidQuantity::Malformed { .. }), "{text}: {error}");
            assert!(error.to_string().contains("1.5Gi"), "{error}");
        }
        assert!(matches!(parse("-1"), Err(InvalidQuantity::Negative { .. })));
        assert!(matches!(parse("-0.5Gi"), Err(InvalidQuantity::Negative { .. })));
        for text in
            ["16Ei", "18446744073709551616", "18446744073709551615.1", "1e20", "1e99999999999999999999"]
        {
            assert!(matches!(parse(text), Err(InvalidQuantity::TooLarge { .. })), "{text}");
        }
    }

    #[test]
    fn amounts_are_written_with_the_largest_suffix_that_is_exact() {
        for (bytes, text) in [
            (0, "0"),
            (1000, "1000"),
            (1024, "1Ki"),
            (1536, "1536"),
            (3 << 29, "1536Mi"),
            (1 << 40, "1Ti"),
            (1 << 60, "1Ei"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(format!("[{:>6}]", Bytes::gib(1)), "[   1Gi]");
    }

    #[test]
    fn amounts_for_people_have_one_decimal_at_most() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Bytes(bytes).human(), text);
        }
    }

    #[test]
    fn json_holds_numbers_and_accepts_quantities() {
        assert_eq!(serde_json::to_string(&Bytes::mib(1)).unwrap(), "1048576");
        for json in ["1048576", "\"1Mi\"", "\"1048576\""] {
            assert_eq!(serde_json::from_str::<Bytes>(json).unwrap(), Bytes::mib(1), "{json}");
        }
        for json in ["-1", "\"-1\"", "1.5", "null", "[]", "\"x\""] {
            assert!(serde_json::from_str::<Bytes>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn rounding_goes_to_multiples() {
        let (ten, gib) = (Bytes(10), Bytes::gib(1));
        assert_eq!(Bytes(25).round_down_to(ten), Bytes(20));
        assert_eq!(Bytes(25).round_up_to(ten), Some(Bytes(30)));
        assert_eq!(Bytes(20).round_up_to(ten), Some(Bytes(20)));
        assert_eq!(Bytes(20).round_up_to(Bytes::ZERO), Some(Bytes(20)));
        assert_eq!(Bytes(20).round_down_to(Bytes::ZERO), Bytes(20));
        assert_eq!(Bytes::MAX.round_up_to(gib), None);
        assert_eq!([gib, gib, Bytes::MAX].iter().sum::<Bytes>(), Bytes::MAX);
    }

    /// Digits of a number, times `10^exponent * 1024^kibi`, rounded up: a second way to the same result, on 256 bits as
    /// four limbs.
    fn reference(digits: u64, exponent: i32, kibi: u32) -> Option<u64> {
        let mut limbs = [digits, 0, 0, 0];
        let multiply = |limbs: &mut [u64; 4], by: u64| {
            let mut carry = 0_u128;
            for limb in limbs.iter_mut() {
                let wide = u128::from(*limb) * u128::from(by) + carry;
                *limb = u64::try_from(wide & u128::from(u64::MAX)).unwrap();
                carry = wide >> 64;
            }
            assert_eq!(carry, 0);
        };
        (0..kibi).for_each(|_| multiply(&mut limbs, 1024));
        (0..exponent).for_each(|_| multiply(&mut limbs, 10));
        let mut inexact = false;
        for _ in exponent..0 {
            let mut rest = 0_u128;
            for limb in limbs.iter_mut().rev() {
                let wide = (rest << 64) | u128::from(*limb);
                *limb = u64::try_from(wide / 10).unwrap();
                rest = wide % 10;
            }
            inexact |= rest != 0;
        }
        if limbs[1..] == [0, 0, 0] { limbs[0].checked_add(u64::from(inexact)) } else { None }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(bytes in prop_oneof![any::<u64>(), (0_u64..1024, 0_u32..6).prop_map(|(n, p)| n << (10 * p))]) {
            prop_assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
            let json = serde_json::to_string(&Bytes(bytes)).unwrap();
            prop_assert_eq!(serde_json::from_str::<Bytes>(&json).unwrap(), Bytes(bytes));
        }

        #[test]
        fn any_number_agrees_with_wide_arithmetic(digits in any::<u64>(), shift in 0_usize..30, exponent in -25_i32..20, suffix in 0_usize..14) {
            const SUFFIXES: [(&str, i32, u32); 14] = [
                ("n", -9, 0), ("u", -6, 0), ("m", -3, 0), ("", 0, 0), ("k", 3, 0), ("M", 6, 0), ("G", 9, 0),
                ("e", 0, 0), ("Ki", 0, 1), ("Mi", 0, 2), ("Gi", 0, 3), ("Ti", 0, 4), ("Pi", 0, 5), ("Ei", 0, 6),
            ];
            let (suffix, mut decimal, kibi) = SUFFIXES[suffix];
            let mut text = format!("{digits:0>31}");
            text.insert(text.len() - shift, '.');
            text.push_str(suffix);
            if suffix == "e" {
                text.push_str(&exponent.to_string());
                decimal = exponent;
            }
            let expected = reference(digits, decimal - i32::try_from(shift).unwrap(), kibi);
            prop_assert_eq!(parse(&text).ok(), expected, "{}", text);
        }

        #[test]
        fn no_text_panics(text in "\\PC*|[-+]?[0-9.]{0,8}[numkMGTPEKie+-]{0,4}[0-9]{0,4}") {
            let _ = parse(&text);
        }
    }
}
