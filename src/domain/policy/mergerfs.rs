//! The options of mergerfs in a StorageClass and in a node's configuration.
//!
//! What may be set, and to what, stands in one table, [`crate::domain::mergerfs`], which the start of a union obeys too: an
//! option that is accepted here is not refused there, when the volume is full of data already.

use std::collections::BTreeMap;

use super::ParamError;
use crate::domain::mergerfs::{InvalidOption, allowed_keys, check_option, reason_against};
use crate::domain::spelling::nearest;

/// Checks options given without the `mergerfs.` prefix; what comes back has its keys in the `a-b` style.
///
/// # Errors
/// Every fault there is, in the order of the keys.
pub fn parse(given: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Vec<ParamError>> {
    let mut options = BTreeMap::new();
    let mut faults = Vec::new();
    for (key, value) in given {
        let name = key.replace('_', "-");
        match check_option(&name, value) {
            Err(InvalidOption::Unknown { .. }) => faults.push(unknown(key, &name)),
            Err(InvalidOption::Value { value, allowed, .. }) => {
                faults.push(ParamError::Value { key: key.clone(), value, allowed });
            }
            Ok(()) => {
                if options.insert(name.clone(), value.clone()).is_some_and(|other| other != *value) {
                    faults.push(ParamError::Conflict {
                        key: key.clone(),
                        other: name,
                        reason: "they are two spellings of one option; give one of them".to_owned(),
                    });
                }
            }
        }
    }
    if faults.is_empty() { Ok(options) } else { Err(faults) }
}

fn unknown(key: &str, name: &str) -> ParamError {
    match reason_against(name).or_else(|| reason_against(key)) {
        Some(reason) => ParamError::Refused { key: key.to_owned(), reason: reason.to_owned() },
        None => ParamError::Unknown { key: key.to_owned(), nearest: nearest(key, allowed_keys()) },
    }
}
