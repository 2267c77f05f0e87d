//! The suite that every [`super::Store`] passes.
