//! Counts refused actions, so that a script that repeats one does not fill the journal.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::model::event::{ActionOutcome, Event};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};

const REFUSAL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of refusals that are counted at once. Each further one is an event.
const REFUSALS_MAX: usize = 1024;

/// Refusals of the last second, by action, client, target and reason.
#[derive(Clone, Default)]
pub(crate) struct RefusalCounts(Arc<Mutex<HashMap<String, RepeatedRefusal>>>);

struct RepeatedRefusal {
    since: Instant,
    /// Number of equal refusals that have no event yet.
    pending: u64,
}

impl RefusalCounts {
    /// Passes an event to `emit`. A refusal that equals one within the last second is counted, and emitted with the others
    /// at the end of that second.
    pub(crate) fn count(&self, event: Event, emit: impl FnOnce(Event) + Send + 'static) {
        let Event::ControlAction { action, outcome: ActionOutcome::Refused, actor, target, reason, .. } = &event else {
            return emit(event);
        };
        let target = target.as_ref().map(|target| &target.process_id);
        let key = format!("{action} {} {:?} {:?} {target:?} {reason:?}", actor.kind, actor.name, actor.address);
        let now = Instant::now();
        let mut refusals = self.lock();
        if let Some(last) = refusals.get_mut(&key)
            && (last.pending > 0 || now.duration_since(last.since) < REFUSAL_INTERVAL)
            && let Ok(runtime) = Handle::try_current()
        {
            last.pending += 1;
            if last.pending == 1 {
                runtime.spawn(self.clone().emit_later(key, last.since + REFUSAL_INTERVAL, event, emit));
            }
            return;
        }
        if refusals.len() >= REFUSALS_MAX {
            refusals.retain(|_, last| last.pending > 0 || now.duration_since(last.since) < REFUSAL_INTERVAL);
        }
        if refusals.len() < REFUSALS_MAX {
            refusals.insert(key, RepeatedRefusal { since: now, pending: 0 });
        }
        drop(refusals);
        emit(event);
    }

    /// Emits the counted refusals as one event: the last one, and the number of those before it.
    async fn emit_later(self, key: String, at: Instant, mut event: Event, emit: impl FnOnce(Event) + Send) {
        sleep_until(at).await;
        let counted = self.lock().remove(&key).map_or(0, |counted| counted.pending);
        if let Event::ControlAction { repeated, .. } = &mut event {
            *repeated = counted.saturating_sub(1);
        }
        emit(event);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, RepeatedRefusal>> {
        // No lock holder calls code that could panic halfway through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use mcp_satellite_actors::model::event::ActionActor;
    use tokio::sync::mpsc;

    use super::*;

    fn refusal(action: &str) -> Event {
        let text = |text: &str| text.to_owned();
        let actor = ActionActor { kind: text("token"), name: None, role: None, via: text("http"), address: None };
        Event::ControlAction {
            action: text(action),
            outcome: ActionOutcome::Refused,
            actor,
            target: None,
            reason: None,
            keys: Vec::new(),
            repeated: 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_refusals_are_one_event_also_if_no_later_one_follows() {
        let (counts, (emitted, mut events)) = (RefusalCounts::default(), mpsc::unbounded_channel());
        let count = |action: &str| {
            let emitted = emitted.clone();
            counts.count(refusal(action), move |event| {
                if let Event::ControlAction { action, repeated, .. } = event {
                    let _ = emitted.send((action, repeated));
                }
            });
        };
        for _ in 0..10 {
            count("stop");
        }
        count("start");
        let mut received = Vec::new();
        while received.len() < 3 {
            received.extend(events.recv().await);
        }
        let event = |action: &str, repeated| (action.to_owned(), repeated);
        assert_eq!(received, [event("stop", 0), event("start", 0), event("stop", 8)]);
        count("stop");
        assert_eq!(events.recv().await, Some(event("stop", 0)));
    }
}
