//! Whether the store answers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::Store;

/// How long a store may take to answer before it is not well.
const BOUND: Duration = Duration::from_secs(2);

/// Tells whether the store answers, at no cost to a store that others share: probes ask it every few seconds.
#[async_trait]
pub trait Health: Send + Sync {
    /// Whether it answers.
    ///
    /// # Errors
    /// Why not; a sentence.
    async fn check(&self) -> Result<(), String>;
}

/// Asks the store itself: for one that is in this process.
pub struct Asked(pub Arc<dyn Store>);

#[async_trait]
impl Health for Asked {
    async fn check(&self) -> Result<(), String> {
        match tokio::time::timeout(BOUND, self.0.nodes().get("any")).await {
            Err(_) => Err(format!("the store does not answer within {} s", BOUND.as_secs())),
            Ok(Err(error)) => Err(format!("the store does not answer: {error}")),
            Ok(Ok(_)) => Ok(()),
        }
    }
}
