//! What the tests of the services share.

pub(super) mod fixture;
