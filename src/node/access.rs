//! What of the fencing protocol ([`crate::domain::access`]) a node carries out on its own branches.

use crate::store::object::BranchSpec;

/// What this node's own volumes do with its branches: the owner's part must know, and must be able to end it.
pub trait LocalUse: Send + Sync {
    /// Ends the use of the branch by a volume of this node, now, whoever has files of it open: they get errors, and nothing that
    /// they write reaches the branch any more. What is not used here is ended already. To be called without the branch's turn,
    /// as it waits for the volume's.
    ///
    /// # Errors
    /// Why the branch may still be written to; a sentence.
    fn end(&self, branch: &BranchSpec) -> Result<(), String>;
}
