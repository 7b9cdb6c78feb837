//! The actor that publishes the status and catalogue of every instance as an immutable snapshot. Queued updates result
//! in one publication.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef, cast};
use tokio::sync::{oneshot, watch};

use crate::model::ids::InstanceId;
use crate::model::snapshot::{InstanceView, PublishedView, Snapshot};
use crate::probe::{ActorAnswer, ActorProbe};

/// Messages to the registry. `Publish` follows the queued updates, and `Barrier` publishes and then replies. `Panic`
/// panics on purpose, for the load harness and the tests.
pub(crate) enum Msg {
    Put(Arc<InstanceView>),
    Remove(InstanceId),
    Publish,
    Barrier(oneshot::Sender<()>),
    Probe(ActorProbe),
    Panic,
}

#[cfg(feature = "cluster")]
impl ractor::Message for Msg {}

// Root owns the channel, so readers keep their receivers if the registry dies.
pub(crate) struct Args {
    pub(crate) snapshot: Snapshot,
    pub(crate) published: watch::Sender<Arc<Snapshot>>,
}

pub(crate) struct StatusRegistry;

pub(crate) struct State {
    snapshot: Snapshot,
    published: watch::Sender<Arc<Snapshot>>,
    // True if a `Publish` is in the mailbox.
    publish_pending: bool,
}

#[cfg_attr(feature = "async-trait", ractor::async_trait)]
impl Actor for StatusRegistry {
    type Msg = Msg;
    type State = State;
    type Arguments = Args;

    async fn pre_start(&self, _myself: ActorRef<Msg>, args: Args) -> Result<State, ActorProcessingErr> {
        Ok(State { snapshot: args.snapshot, published: args.published, publish_pending: false })
    }

    async fn handle(&self, myself: ActorRef<Msg>, msg: Msg, state: &mut State) -> Result<(), ActorProcessingErr> {
        match msg {
            Msg::Put(view) => {
                state.snapshot.instances.insert(view.spec.id.clone(), PublishedView(view));
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
                // The send fails if the caller no longer waits.
                let _ = reply.send(());
                return Ok(());
            }
            Msg::Probe(probe) => {
                probe.answer(|took| ActorAnswer::Registry { took });
                return Ok(());
            }
            Msg::Panic => std::panic::panic_any("asked to panic"),
        }
        if !state.publish_pending {
            state.publish_pending = true;
            // Queued behind the waiting updates. A cast to oneself fails only while the actor ends.
            let _ = cast!(myself, Msg::Publish);
        }
        Ok(())
    }
}

impl State {
    fn publish(&mut self) {
        // A `Publish` after a `Barrier` has nothing left to publish.
        if std::mem::take(&mut self.publish_pending) {
            self.published.send_if_modified(|published| {
                // The last snapshot of a runtime stays.
                let runs = published.end.is_none();
                if runs {
                    // Counts on over a restart of this actor.
                    self.snapshot.revision = published.revision + 1;
                    *published = Arc::new(self.snapshot.clone());
                }
                runs
            });
        }
    }
}
