//! Nobody takes anything, for long.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite::delivery::Delivery;
use mcp_satellite_actors::model::policy::BatchPolicy;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::peer::{Peer, Place};
use crate::support::{Rig, http, range, until, until_settled};

/// A way that is closed at first.
#[derive(Clone)]
struct Gate {
    open: Arc<AtomicBool>,
    asked: watch::Sender<usize>,
    has: Arc<Mutex<Vec<u64>>>,
    sizes: Arc<AtomicUsize>,
}

impl Default for Gate {
    fn default() -> Self {
        let (open, has, sizes) = (Arc::default(), Arc::default(), Arc::default());
        Self { open, asked: watch::Sender::new(0), has, sizes }
    }
}

impl EventSink for Gate {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let gate = self.clone();
        async move {
            if !gate.open.load(Ordering::Acquire) {
                gate.asked.send_modify(|asked| *asked += 1);
                return SinkAnswer::Unavailable("closed".to_owned());
            }
            gate.sizes.fetch_max(batch.events.len(), Ordering::AcqRel);
            gate.has.lock().unwrap().extend(batch.events.iter().map(|event| event.seq));
            SinkAnswer::Accepted
        }
        .boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_an_hour_loses_nothing_and_is_asked_after_every_three_seconds() {
    // As long as a thread is waited for paused time stands still, so that the journal's has all the time that it needs.
    let (release, held) = std::sync::mpsc::channel::<()>();
    let holding = tokio::task::spawn_blocking(move || held.recv());
    let (rig, gate) = (Rig::new(), Gate::default());
    rig.append(1..=1).await;
    let delivery = Delivery::start(rig.journal.clone(), "there", Arc::new(gate.clone()), &BatchPolicy::default());
    let (began, mut last) = (Instant::now(), 1);
    for nth in 1..=1200 {
        gate.asked.subscribe().wait_for(|asked| *asked >= nth).await.unwrap();
        until(&delivery, "a complaint", |status| status.last_error.is_some()).await;
        rig.append(last + 1..=last + 20).await;
        last += 20;
        tokio::time::advance(Duration::from_secs(3)).await;
    }
    assert_eq!(began.elapsed(), Duration::from_secs(3600));
    gate.asked.subscribe().wait_for(|asked| *asked >= 1201).await.unwrap();
    assert_eq!(*gate.asked.borrow(), 1201, "once in each interval");
    assert_eq!(delivery.status().backlog, last);
    assert_eq!(delivery.status().last_error.as_deref(), Some("closed"));
    gate.open.store(true, Ordering::Release);
    tokio::time::advance(Duration::from_secs(3)).await;
    until_settled(&delivery, last).await;
    assert!(*gate.has.lock().unwrap() == range(1..=last), "each once, in order");
    assert_eq!(gate.sizes.load(Ordering::Acquire), 100);
    assert_eq!(rig.cursor().await, last);
    drop(release);
    assert!(holding.await.unwrap().is_err());
}

/// A minute in `.ci/long`.
#[tokio::test]
async fn an_outage_of_a_server_that_is_not_there_loses_nothing() {
    let seconds = std::env::var("OUTAGE_SECONDS").map_or(2.0, |text| text.parse().unwrap());
    let (rig, peer, place) = (Rig::new(), Peer::new(), Place::new());
    let delivery = rig.deliver(http(&place.url()));
    let (began, mut last) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs_f64(seconds) {
        rig.append(last + 1..=last + 50).await;
        last += 50;
        sleep(Duration::from_millis(20)).await;
    }
    until(&delivery, "a complaint", |status| status.last_error.is_some()).await;
    let reason = delivery.status().last_error.unwrap();
    assert!(reason.contains("Connection refused"), "{reason}");
    assert_eq!((delivery.status().backlog, peer.came().len()), (last, 0));
    drop(peer.listen(place));
    until_settled(&delivery, last).await;
    assert_eq!(peer.has(), range(1..=last));
    let keys: std::collections::BTreeSet<_> = peer.came().into_iter().map(|came| came.key).collect();
    assert_eq!(keys.len(), peer.came().len(), "each batch has an id of its own");
}
