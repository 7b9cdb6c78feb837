//! Every kind of response to a batch between others, caused by its first, middle or last event.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::rules::outbox::BatcherState;
use serde_json::json;

use super::peer::{Peer, ReceivedBatch, Reply};
use super::support::{Rig, http, until, until_settled};
use crate::journal::support::range;

/// The first, a middle and the last event of the second batch of ten.
const PLACES: [u64; 3] = [11, 15, 20];
const ALL: u64 = 25;

fn status(status: u16) -> Reply {
    Reply::Status(status, Vec::new(), String::new())
}

/// Delivers 25 events to a server. Returns the received batches, the stored seqs and the number of failed events.
async fn delivered(reply_to: impl FnMut(&[u64]) -> Reply + Send + 'static) -> (Vec<ReceivedBatch>, Vec<u64>, u64) {
    let (peer, url) = Peer::start();
    peer.reply_with(reply_to);
    let rig = Rig::new();
    rig.append(1..=ALL).await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, ALL).await;
    until(&delivery, "the idle state", |status| status.state == BatcherState::Idle).await;
    let status = delivery.status();
    assert_eq!((status.settled, status.backlog, status.sent + status.failed), (ALL, 0, ALL));
    assert_eq!(delivery.finish(Duration::from_secs(5)).await, 0);
    assert_eq!(rig.cursor().await, ALL);
    (peer.batches(), peer.stored_seqs(), status.failed)
}

fn all_but(seqs: &[u64]) -> Vec<u64> {
    range(1..=ALL).into_iter().filter(|seq| !seqs.contains(seq)).collect()
}

#[tokio::test]
async fn events_named_in_a_partial_response_are_dropped() {
    for place in PLACES {
        let reply_to =
            move |seqs: &[u64]| Reply::Partial(seqs.iter().position(|seq| *seq == place).into_iter().collect());
        let (batches, stored, failed) = delivered(reply_to).await;
        assert_eq!((stored, failed, batches.len()), (all_but(&[place]), 1, 3), "{place}");
    }
}

#[tokio::test]
async fn an_invalid_event_is_found_and_dropped_alone() {
    for code in [400, 422] {
        for named in [true, false] {
            for place in PLACES {
                let reply_to = move |seqs: &[u64]| match seqs.iter().position(|seq| *seq == place) {
                    Some(index) if named => {
                        let body = json!({"failures": [{"index": index, "type": "x", "error": "not this one"}]});
                        Reply::Status(code, Vec::new(), body.to_string())
                    }
                    Some(_) => status(code),
                    None => Reply::Accept,
                };
                let (batches, stored, failed) = delivered(reply_to).await;
                assert_eq!((stored, failed), (all_but(&[place]), 1), "{code} {named} {place}");
                if named {
                    assert_eq!(batches.len(), 4, "one more request than batches");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_too_large_batch_is_split_and_a_too_large_event_dropped() {
    for place in PLACES {
        let small =
            move |seqs: &[u64]| if seqs.len() > 3 && seqs.contains(&place) { status(413) } else { Reply::Accept };
        let (_, stored, failed) = delivered(small).await;
        assert_eq!((stored, failed), (range(1..=ALL), 0), "{place}");
        let never = move |seqs: &[u64]| if seqs.contains(&place) { status(413) } else { Reply::Accept };
        let (_, stored, failed) = delivered(never).await;
        assert_eq!((stored, failed), (all_but(&[place]), 1), "{place}");
    }
}

/// Asserts that a batch with the event `place` is repeated in order and with its id after two failing replies.
async fn assert_repeated(place: u64, reply: Reply) {
    let mut left = 2;
    let name = format!("{reply:?} {place}");
    let reply_to = move |seqs: &[u64]| {
        if seqs.contains(&place) && left > 0 {
            left -= 1;
            return reply.clone();
        }
        Reply::Accept
    };
    let (batches, stored, failed) = delivered(reply_to).await;
    assert_eq!((stored, failed), (range(1..=ALL), 0), "{name}");
    let order: Vec<&[u64]> = batches.iter().map(|batch| &*batch.seqs).collect();
    let (first, second, third) = (range(1..=10), range(11..=20), range(21..=25));
    assert_eq!(order, [&*first, &*second, &*second, &*second, &*third], "{name}: a later batch was sent first");
    assert!(
        batches[1].key == batches[2].key && batches[2].key == batches[3].key,
        "{name}: a repeated batch has another id"
    );
    assert!(batches[0].key != batches[1].key && batches[3].key != batches[4].key);
}

#[tokio::test]
async fn a_rejected_batch_is_repeated_with_its_id_and_in_order() {
    for place in PLACES {
        for code in [401, 403, 404, 409, 418, 429, 500, 502, 503, 504] {
            assert_repeated(place, status(code)).await;
        }
        let elsewhere = vec![("location", "/elsewhere".to_owned())];
        for code in [301, 302, 307, 308] {
            assert_repeated(place, Reply::Status(code, elsewhere.clone(), String::new())).await;
        }
        assert_repeated(place, Reply::Status(503, vec![("retry-after", "soon".to_owned())], "<html>".repeat(100_000)))
            .await;
    }
}

#[tokio::test]
async fn a_batch_without_a_complete_response_is_repeated() {
    for place in PLACES {
        for reply in [Reply::Hang, Reply::Stall, Reply::Abort] {
            assert_repeated(place, reply).await;
        }
    }
}

#[tokio::test]
async fn a_success_status_is_accepted_with_any_body() {
    for reply in ["", "<html>welcome</html>", "[1, 2]", "\u{0}", "{\"failed\": \"none\"}"] {
        let reply = Reply::OtherBody(reply.to_owned());
        let (batches, stored, _) = delivered(move |_| reply.clone()).await;
        assert_eq!((batches.len(), stored), (3, range(1..=ALL)));
    }
    let (batches, stored, _) = delivered(|_| Reply::Endless).await;
    assert_eq!((batches.len(), stored), (3, range(1..=ALL)));
}

#[tokio::test]
async fn retry_after_delays_the_next_attempt() {
    enum After {
        Seconds(&'static str),
        Date,
    }
    let cases = [(11, After::Seconds("1"), 1.0), (15, After::Date, 0.9), (20, After::Seconds("0"), 0.0)];
    // A date has a resolution of one second, so two seconds are at least one.
    for (place, retry_after, least) in cases {
        let (peer, url) = Peer::start();
        let mut asked = None;
        let retried = std::sync::Arc::new(std::sync::Mutex::new(None));
        let seen = retried.clone();
        peer.reply_with(move |seqs: &[u64]| {
            if !seqs.contains(&place) {
                return Reply::Accept;
            }
            match asked {
                None => {
                    asked = Some(Instant::now());
                    let after = match retry_after {
                        After::Seconds(seconds) => seconds.to_owned(),
                        After::Date => {
                            let at = Timestamp::now() + SignedDuration::from_secs(2);
                            at.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
                        }
                    };
                    Reply::Status(429, vec![("retry-after", after)], String::new())
                }
                Some(at) => {
                    seen.lock().unwrap().get_or_insert(at.elapsed());
                    Reply::Accept
                }
            }
        });
        let rig = Rig::new();
        rig.append(1..=ALL).await;
        let delivery = rig.deliver(http(&url));
        until(&delivery, "a pause", |status| status.state == BatcherState::BackingOff).await;
        assert_eq!(delivery.status().last_error.as_deref(), Some("the sink asked for a pause"));
        until_settled(&delivery, ALL).await;
        assert_eq!(peer.stored_seqs(), range(1..=ALL));
        let pause = retried.lock().unwrap().unwrap();
        assert!(pause.as_secs_f64() >= least, "{pause:?}");
    }
}

#[tokio::test]
async fn the_status_shows_the_error_until_delivery_succeeds() {
    let (peer, url) = Peer::start();
    peer.reply_with(|_| status(503));
    let rig = Rig::new();
    rig.append(1..=ALL).await;
    let delivery = rig.deliver(http(&url));
    until(&delivery, "an error", |status| status.last_error.is_some() && status.state == BatcherState::Retrying).await;
    let status = delivery.status();
    assert_eq!(status.last_error, Some(format!("{url} answered 503 Service Unavailable")));
    assert_eq!((status.to.as_str(), status.backlog, status.sent), ("there", ALL, 0));
    assert_eq!(status.last_sent, None);
    peer.reply_with(|_| Reply::Accept);
    until_settled(&delivery, ALL).await;
    let status = delivery.status();
    assert_eq!((status.last_error, status.backlog, status.sent), (None, 0, ALL));
    assert!(status.last_sent.is_some());
}
