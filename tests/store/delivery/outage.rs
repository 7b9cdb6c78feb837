//! Long outages of a sink.

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

use super::peer::{BoundAddress, Peer};
use super::support::{Rig, http, until, until_settled};
use crate::journal::support::range;

/// A sink that rejects batches until it is opened.
#[derive(Clone)]
struct Gate {
    open: Arc<AtomicBool>,
    attempts: watch::Sender<usize>,
    events: Arc<Mutex<Vec<u64>>>,
    sizes: Arc<AtomicUsize>,
}

impl Default for Gate {
    fn default() -> Self {
        let (open, events, sizes) = (Arc::default(), Arc::default(), Arc::default());
        Self { open, attempts: watch::Sender::new(0), events, sizes }
    }
}

impl EventSink for Gate {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let gate = self.clone();
        async move {
            if !gate.open.load(Ordering::Acquire) {
                gate.attempts.send_modify(|attempts| *attempts += 1);
                return SinkAnswer::Unavailable("closed".to_owned());
            }
            gate.sizes.fetch_max(batch.events.len(), Ordering::AcqRel);
            gate.events.lock().unwrap().extend(batch.events.iter().map(|event| event.seq));
            SinkAnswer::Accepted
        }
        .boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn an_hour_of_outage_loses_nothing_with_one_attempt_per_interval() {
    // Tokio does not advance paused time while a blocking task runs, so the journal's thread has enough time.
    let (release, held) = std::sync::mpsc::channel::<()>();
    let holding = tokio::task::spawn_blocking(move || held.recv());
    let (rig, gate) = (Rig::new(), Gate::default());
    rig.append(1..=1).await;
    let delivery = Delivery::start(rig.journal.clone(), "there", Arc::new(gate.clone()), &BatchPolicy::default());
    let (began, mut last) = (Instant::now(), 1);
    for nth in 1..=1200 {
        gate.attempts.subscribe().wait_for(|attempts| *attempts >= nth).await.unwrap();
        until(&delivery, "an error in the status", |status| status.last_error.is_some()).await;
        rig.append(last + 1..=last + 20).await;
        last += 20;
        tokio::time::advance(Duration::from_secs(3)).await;
    }
    assert_eq!(began.elapsed(), Duration::from_secs(3600));
    gate.attempts.subscribe().wait_for(|attempts| *attempts >= 1201).await.unwrap();
    assert_eq!(*gate.attempts.borrow(), 1201, "one attempt per interval");
    assert_eq!(delivery.status().backlog, last);
    assert_eq!(delivery.status().last_error.as_deref(), Some("closed"));
    gate.open.store(true, Ordering::Release);
    tokio::time::advance(Duration::from_secs(3)).await;
    until_settled(&delivery, last).await;
    assert!(*gate.events.lock().unwrap() == range(1..=last), "events are not delivered once and in order");
    assert_eq!(gate.sizes.load(Ordering::Acquire), 100);
    assert_eq!(rig.cursor().await, last);
    drop(release);
    assert!(holding.await.unwrap().is_err());
}

/// `.ci/long` runs this for a minute.
#[tokio::test]
async fn an_outage_with_refused_connections_loses_nothing() {
    let seconds = std::env::var("OUTAGE_SECONDS").map_or(2.0, |text| text.parse().unwrap());
    let (rig, peer, address) = (Rig::new(), Peer::new(), BoundAddress::new());
    let delivery = rig.deliver(http(&address.url()));
    let (began, mut last) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs_f64(seconds) {
        rig.append(last + 1..=last + 50).await;
        last += 50;
        sleep(Duration::from_millis(20)).await;
    }
    until(&delivery, "an error in the status", |status| status.last_error.is_some()).await;
    let reason = delivery.status().last_error.unwrap();
    assert!(reason.contains("Connection refused"), "{reason}");
    assert_eq!((delivery.status().backlog, peer.batches().len()), (last, 0));
    drop(peer.listen(address));
    until_settled(&delivery, last).await;
    assert_eq!(peer.stored_seqs(), range(1..=last));
    let keys: std::collections::BTreeSet<_> = peer.batches().into_iter().map(|batch| batch.key).collect();
    assert_eq!(keys.len(), peer.batches().len(), "ids of batches must be unique");
}
