//! What lies among a node's branches and is nobody's.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Bytes, PoolName};

/// How many are named: a store that was lost leaves thousands, and the list is for people.
pub const NAMED: usize = 32;

/// Something in the directory of branches of a pool that no `Branch` object tells of.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnclaimedBranch {
    /// The pool.
    pub pool: PoolName,
    /// Its name there: of a branch, where it is one.
    pub name: String,
    /// Where it lies on its node.
    pub path: String,
    /// What it takes of the pool; absent where it cannot be understood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// Why it cannot be understood; empty where it can.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

/// All of a node's, counted, and the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Unclaimed {
    /// How many there are.
    #[serde(default)]
    pub count: u32,
    /// The first of them, by pool and name.
    #[serde(default)]
    pub branches: Vec<UnclaimedBranch>,
}

impl Unclaimed {
    /// Of all.
    #[must_use]
    pub fn of(mut all: Vec<UnclaimedBranch>) -> Self {
        let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
        all.sort();
        all.truncate(NAMED);
        Self { count, branches: all }
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many are counted without being named.
    #[must_use]
    pub fn unnamed(&self) -> u64 {
        u64::from(self.count).saturating_sub(self.branches.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_are_named_in_order_and_all_are_counted() {
        let one = |n: usize| UnclaimedBranch {
            pool: "p".parse().unwrap(),
            name: format!("v-{n:03}"),
            path: String::new(),
            size: None,
            problem: String::new(),
        };
        let all = Unclaimed::of((0..100).rev().map(one).collect());
        assert_eq!((all.count, all.branches.len(), all.unnamed()), (100, NAMED, 68));
        assert_eq!(all.branches[0].name, "v-000");
        assert!(Unclaimed::of(Vec::new()).is_empty());
    }
}
