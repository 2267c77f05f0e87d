//! Examples of the three decisions, and a model of all parties that is searched for a way to break what they promise.

mod examples;
mod explore;
mod random;
mod world;
