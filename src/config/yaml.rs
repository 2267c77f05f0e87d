//! YAML as a tree that knows its lines.
//!
//! Deserializing straight into a struct would stop at the first fault; this tree takes everything that is YAML, and
//! [`super::read`] then tells all that is wrong with it.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// A value and the line that it begins in.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) line: u64,
    pub(super) value: Value,
}

/// A key of a mapping and the line that it stands in.
#[derive(Clone, Debug)]
pub(super) struct Name {
    pub(super) line: u64,
    pub(super) text: String,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float,
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Name, Node)>),
}

impl Value {
    /// What it is, for people.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "true or false",
            Self::Int(_) | Self::Float => "a number",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self { line: referenced.line(), value })
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<String>::deserialize(deserializer)?;
        Ok(Self { line: referenced.line(), text: value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Int(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Int(v.into()))
    }

    fn visit_i128<E>(self, v: i128) -> Result<Value, E> {
        Ok(Value::Int(v))
    }

    fn visit_u128<E: serde::de::Error>(self, v: u128) -> Result<Value, E> {
        i128::try_from(v).map(Value::Int).map_err(|_| E::custom("the number is too large"))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        let _ = v;
        Ok(Value::Float)
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Text(v.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(node) = seq.next_element()? {
            list.push(node);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<Name>()? {
            entries.push((name, map.next_value()?));
        }
        if entries.len() > MAX_ENTRIES {
            return Err(A::Error::custom("the mapping has too many keys"));
        }
        Ok(Value::Map(entries))
    }
}

/// More keys than any sensible mapping has; a bound for hostile input.
const MAX_ENTRIES: usize = 10_000;

/// The file as a tree; the line (0 where unknown) and the fault where it is not YAML.
pub(super) fn parse(text: &str) -> Result<Node, (u64, String)> {
    let empty = text.lines().all(|line| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line == "---"
    });
    if empty {
        return Ok(Node { line: 1, value: Value::Map(Vec::new()) });
    }
    serde_saphyr::from_str(text).map_err(|e| {
        let line = e.location().map_or(0, |at| at.line());
        let message = e.without_snippet().to_string();
        // Its own words end in "at line 3, column 5", which stands in front of the fault already.
        let message = message.split(" at line ").next().unwrap_or(&message).trim().to_owned();
        (line, message)
    })
}
