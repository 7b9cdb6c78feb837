//! The actor that knows every instance's status and catalogue: a projection of what the teams tell, published as an
//! immutable snapshot. Many updates that queued up are one publication.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::{oneshot, watch};

use crate::model::ids::InstanceId;
use crate::model::snapshot::{InstanceView, Snapshot};

/// What the registry is told.
pub(crate) enum Msg {
    /// An instance is new or has changed.
    Put(Arc<InstanceView>),
    /// An instance is gone.
    Remove(InstanceId),
    /// Everything that queued up before this is applied: publish.
    Publish,
    /// Publish what was told before this, then answer.
    Barrier(oneshot::Sender<()>),
    /// For the load harness and the tests: panic, as a fault of ours would.
    Panic,
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

/// The snapshot to go on from, and where to publish. The sender is Root's, so readers keep their receivers if the
/// registry dies.
pub(crate) struct Args {
    pub(crate) snapshot: Snapshot,
    pub(crate) published: watch::Sender<Arc<Snapshot>>,
}

pub(crate) struct StatusRegistry;

pub(crate) struct State {
    snapshot: Snapshot,
    published: watch::Sender<Arc<Snapshot>>,
    /// Whether a `Publish` is in the mailbox.
    due: bool,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for StatusRegistry {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        Ok(State { snapshot: args.snapshot, published: args.published, due: false })
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match msg {
            Msg::Put(view) => {
                state.snapshot.instances.insert(view.spec.id.clone(), view);
            }
            Msg::Remove(id) => {
                state.snapshot.instances.remove(&id);
            }
            Msg::Publish => {
                state.publish();
                return Ok(());
            }
            Msg::Barrier(reply) => {
                state.publish();
                // An error says that nobody waits any more.
                let _ = reply.send(());
                return Ok(());
            }
            Msg::Panic => std::panic::panic_any("asked to panic"),
        }
        if !state.due {
            state.due = true;
            // It queues up behind the updates that are already waiting. To oneself it fails only when one is ending.
            let _ = cast!(myself, Msg::Publish);
        }
        Ok(())
    }
}

impl State {
    fn publish(&mut self) {
        // A `Publish` behind a `Barrier` has nothing left to do.
        if std::mem::take(&mut self.due) {
            self.published.send_if_modified(|published| {
                // The last snapshot of a runtime stays.
                let runs = published.ended.is_none();
                if runs {
                    *published = Arc::new(self.snapshot.clone());
                }
                runs
            });
        }
    }
}
