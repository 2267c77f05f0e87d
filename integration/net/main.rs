//! Several machines with kernels of their own on one network; run by `integration/net/run`, see the README beside it.

mod protocol;
mod support;
mod tests;
