//! Ending what is attached here of other nodes' branches and that no volume here needs: what an agent left that died, or that could
//! not end it then.

use super::Core;
use crate::domain::reach::Transport;
use crate::node::transport::{Attached, Consumer, Link, TransportError};

impl Core {
    /// Looks at all attachments of this node once.
    pub(super) fn sweep(&self) {
        for transport in [Transport::NvmeTcp, Transport::Nfs] {
            // What this node cannot attach it has not attached.
            let Ok(consumer) = self.transports.consumer(transport) else { continue };
            let attached = match consumer.attachments() {
                Ok(attached) => attached,
                Err(error) => {
                    tracing::warn!(transport = transport.as_str(), %error, "attachments that nobody needs are not looked for");
                    continue;
                }
            };
            for attached in attached {
                self.sweep_one(&*consumer, &attached);
            }
            self.links.forget(transport);
        }
    }

    /// Ends the attachment if no record has it. A record is written before its branches are attached, and removed after they were
    /// let go, both by whoever holds the volume's lock.
    fn sweep_one(&self, consumer: &dyn Consumer, attached: &Attached) {
        let id = &attached.id;
        let Some(volume) = id.branch.volume() else { return };
        let slot = self.slots.of(&volume);
        let Ok(_guard) = slot.lock.try_lock() else { return };
        // One that cannot be read may need it.
        let Ok(record) = self.records.load(&volume) else { return };
        let needed = record.is_some_and(|record| {
            let of = |b: &super::record::StagedBranch| {
                b.spec.id == id.branch && b.remote.as_ref().is_some_and(|r| r.generation == id.generation)
            };
            record.branches.iter().any(of)
        });
        if needed {
            return;
        }
        // What a workload may still have of it is written out, as long as its owner answers.
        let ended = match attached.link {
            Link::Live => consumer.detach(id),
            Link::Connecting | Link::Dead => consumer.force_detach(id),
        };
        let (branch, generation) = (&id.branch, id.generation);
        match ended {
            Ok(()) => tracing::info!(
                branch.id = %branch, branch.generation = %generation,
                "a branch of another node was attached here and no volume needed it: it is detached"
            ),
            Err(error @ TransportError::InUse { .. }) => tracing::warn!(
                branch.id = %branch, branch.generation = %generation, %error,
                "no volume needs a branch that is attached here, and something uses it"
            ),
            Err(error) => tracing::warn!(
                branch.id = %branch, branch.generation = %generation, %error,
                "a branch that no volume needs is not detached yet"
            ),
        }
    }
}
