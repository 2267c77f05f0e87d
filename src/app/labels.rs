//! The labels of this node's Kubernetes Node, for whoever publishes the node's storage.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::domain::NodeName;
use crate::node::executor::ClusterLabels;

/// Labels of a node rarely change, and a watch of each node would cost more than reading it this often.
const EVERY: Duration = Duration::from_secs(300);

/// Until they are known for the first time.
const UNTIL_KNOWN: Duration = Duration::from_secs(30);

/// Tells the node's labels to `tell` until `stop`. A Node that is gone or cannot be read leaves the last ones in place.
pub(super) async fn follow(
    client: Client,
    node: NodeName,
    tell: watch::Sender<ClusterLabels>,
    stop: CancellationToken,
) {
    let nodes: Api<Node> = Api::all(client);
    // Without spec and status: these are long.
    let read = || async { Ok(nodes.get_metadata(node.as_str()).await?.metadata.labels.unwrap_or_default()) };
    if stop.run_until_cancelled(keep(&node, read, tell)).await.is_none() {
        tracing::debug!("the node's labels are not followed any longer");
    }
}

async fn keep<F>(node: &NodeName, read: impl Fn() -> F, tell: watch::Sender<ClusterLabels>)
where
    F: Future<Output = Result<BTreeMap<String, String>, kube::Error>>,
{
    let mut told = false;
    loop {
        match read().await {
            Ok(labels) => {
                told = false;
                tell.send_if_modified(|known| {
                    let news = known.as_ref() != Some(&labels);
                    *known = Some(labels);
                    news
                });
            }
            // Once, not every five minutes.
            Err(error) if !told => {
                told = true;
                tracing::warn!(
                    node.name = %node, %error,
                    "the labels of this node's Node cannot be read; classes' nodeSelectors see those last known"
                );
            }
            Err(_) => {}
        }
        let known = tell.borrow().is_some();
        tokio::time::sleep(if known { EVERY } else { UNTIL_KNOWN }).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn labels(value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("zone".to_owned(), value.to_owned())])
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_gone_keeps_the_labels_that_it_had() {
        // Last answer first.
        let answers = RefCell::new(vec![Ok(labels("b")), Err(()), Err(()), Ok(labels("a")), Err(())]);
        let read = || {
            let answer = answers.borrow_mut().pop();
            async move {
                match answer {
                    Some(Ok(labels)) => Ok(labels),
                    Some(Err(())) => Err(kube::Error::LinesCodecMaxLineLengthExceeded),
                    None => std::future::pending().await,
                }
            }
        };
        let tell = watch::Sender::new(None);
        let mut seen = tell.subscribe();
        let node = "n".parse().unwrap();
        let mut history = Vec::new();
        let watch = async {
            for _ in 0..2 {
                seen.changed().await.unwrap();
                history.push(seen.borrow_and_update().clone());
            }
        };
        tokio::select! {
            () = keep(&node, read, tell) => {}
            () = watch => {}
        }
        assert_eq!(history, [Some(labels("a")), Some(labels("b"))], "failures between them change nothing");
    }
}
