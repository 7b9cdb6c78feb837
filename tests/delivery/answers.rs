//! Every answer that a server can give, to a batch in the middle of others, because of its first, middle or last event.

use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::rules::outbox::BatcherState;
use serde_json::json;

use crate::peer::{Came, Peer, Reply};
use crate::support::{Rig, http, range, until, until_settled};

/// The first, a middle and the last event of the second batch of ten.
const PLACES: [u64; 3] = [11, 15, 20];
const ALL: u64 = 25;

fn status(status: u16) -> Reply {
    Reply::Status(status, Vec::new(), String::new())
}

/// Has 25 events delivered to a server in this mood; what came, and what it has.
async fn delivered(mood: impl FnMut(&[u64]) -> Reply + Send + 'static) -> (Vec<Came>, Vec<u64>, u64) {
    let (peer, url) = Peer::start();
    peer.does(mood);
    let rig = Rig::new();
    rig.append(1..=ALL).await;
    let delivery = rig.deliver(http(&url));
    until_settled(&delivery, ALL).await;
    until(&delivery, "rest", |status| status.state == BatcherState::Idle).await;
    let status = delivery.status();
    assert_eq!((status.settled, status.backlog, status.sent + status.failed), (ALL, 0, ALL));
    assert_eq!(delivery.finish(Duration::from_secs(5)).await, 0);
    assert_eq!(rig.cursor().await, ALL);
    (peer.came(), peer.has(), status.failed)
}

fn all_but(seqs: &[u64]) -> Vec<u64> {
    range(1..=ALL).into_iter().filter(|seq| !seqs.contains(seq)).collect()
}

#[tokio::test]
async fn the_events_that_a_partial_answer_names_are_dropped_and_the_rest_is_taken() {
    for place in PLACES {
        let mood = move |seqs: &[u64]| Reply::Partial(seqs.iter().position(|seq| *seq == place).into_iter().collect());
        let (came, has, failed) = delivered(mood).await;
        assert_eq!((has, failed, came.len()), (all_but(&[place]), 1, 3), "{place}");
    }
}

#[tokio::test]
async fn an_invalid_event_is_dropped_alone_whether_it_is_named_or_has_to_be_found() {
    for code in [400, 422] {
        for named in [true, false] {
            for place in PLACES {
                let mood = move |seqs: &[u64]| match seqs.iter().position(|seq| *seq == place) {
                    Some(index) if named => {
                        let body = json!({"failures": [{"index": index, "type": "x", "error": "not this one"}]});
                        Reply::Status(code, Vec::new(), body.to_string())
                    }
                    Some(_) => status(code),
                    None => Reply::Take,
                };
                let (came, has, failed) = delivered(mood).await;
                assert_eq!((has, failed), (all_but(&[place]), 1), "{code} {named} {place}");
                if named {
                    assert_eq!(came.len(), 4, "one more than there are batches");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_batch_that_is_too_large_comes_in_parts_and_an_event_that_is_too_large_alone_is_dropped() {
    for place in PLACES {
        let small = move |seqs: &[u64]| if seqs.len() > 3 && seqs.contains(&place) { status(413) } else { Reply::Take };
        let (_, has, failed) = delivered(small).await;
        assert_eq!((has, failed), (range(1..=ALL), 0), "{place}");
        let never = move |seqs: &[u64]| if seqs.contains(&place) { status(413) } else { Reply::Take };
        let (_, has, failed) = delivered(never).await;
        assert_eq!((has, failed), (all_but(&[place]), 1), "{place}");
    }
}

/// The batch with `place` is answered like this twice, and then taken.
async fn kept(place: u64, reply: Reply) {
    let mut left = 2;
    let name = format!("{reply:?} {place}");
    let mood = move |seqs: &[u64]| {
        if seqs.contains(&place) && left > 0 {
            left -= 1;
            return reply.clone();
        }
        Reply::Take
    };
    let (came, has, failed) = delivered(mood).await;
    assert_eq!((has, failed), (range(1..=ALL), 0), "{name}");
    let order: Vec<&[u64]> = came.iter().map(|came| &*came.seqs).collect();
    let (first, second, third) = (range(1..=10), range(11..=20), range(21..=25));
    assert_eq!(order, [&*first, &*second, &*second, &*second, &*third], "{name}: nothing overtakes it");
    assert!(came[1].key == came[2].key && came[2].key == came[3].key, "{name}: the same id for what comes again");
    assert!(came[0].key != came[1].key && came[3].key != came[4].key);
}

#[tokio::test]
async fn what_is_not_taken_now_comes_again_under_its_id_and_nothing_overtakes_it() {
    for place in PLACES {
        for code in [401, 403, 404, 409, 418, 429, 500, 502, 503, 504] {
            kept(place, status(code)).await;
        }
        let elsewhere = vec![("location", "/elsewhere".to_owned())];
        for code in [301, 302, 307, 308] {
            kept(place, Reply::Status(code, elsewhere.clone(), String::new())).await;
        }
        kept(place, Reply::Status(503, vec![("retry-after", "soon".to_owned())], "<html>".repeat(100_000))).await;
    }
}

#[tokio::test]
async fn a_server_that_is_silent_or_gone_before_its_answer_ends_is_sent_it_again() {
    for place in PLACES {
        for reply in [Reply::Hang, Reply::Stuck, Reply::Cut] {
            kept(place, reply).await;
        }
    }
}

#[tokio::test]
async fn a_success_is_a_success_whatever_is_said_about_it() {
    for reply in ["", "<html>welcome</html>", "[1, 2]", "\u{0}", "{\"failed\": \"none\"}"] {
        let reply = Reply::Babble(reply.to_owned());
        let (came, has, _) = delivered(move |_| reply.clone()).await;
        assert_eq!((came.len(), has), (3, range(1..=ALL)));
    }
    let (came, has, _) = delivered(|_| Reply::Endless).await;
    assert_eq!((came.len(), has), (3, range(1..=ALL)));
}

#[tokio::test]
async fn a_pause_that_was_asked_for_is_made() {
    enum After {
        Seconds(&'static str),
        Date,
    }
    let ways = [(11, After::Seconds("1"), 1.0), (15, After::Date, 0.9), (20, After::Seconds("0"), 0.0)];
    // A date has whole seconds: of two there is at least one left.
    for (place, retry_after, least) in ways {
        let (peer, url) = Peer::start();
        let mut asked = None;
        let retried = std::sync::Arc::new(std::sync::Mutex::new(None));
        let seen = retried.clone();
        peer.does(move |seqs: &[u64]| {
            if !seqs.contains(&place) {
                return Reply::Take;
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
                    Reply::Take
                }
            }
        });
        let rig = Rig::new();
        rig.append(1..=ALL).await;
        let delivery = rig.deliver(http(&url));
        until(&delivery, "a pause", |status| status.state == BatcherState::BackingOff).await;
        assert_eq!(delivery.status().last_error.as_deref(), Some("the sink asked for a pause"));
        until_settled(&delivery, ALL).await;
        assert_eq!(peer.has(), range(1..=ALL));
        let pause = retried.lock().unwrap().unwrap();
        assert!(pause.as_secs_f64() >= least, "{pause:?}");
    }
}

#[tokio::test]
async fn what_is_wrong_is_told_until_it_is_well() {
    let (peer, url) = Peer::start();
    peer.does(|_| status(503));
    let rig = Rig::new();
    rig.append(1..=ALL).await;
    let delivery = rig.deliver(http(&url));
    until(&delivery, "an error", |status| status.last_error.is_some() && status.state == BatcherState::Retrying).await;
    let status = delivery.status();
    assert_eq!(status.last_error, Some(format!("{url} answered 503 Service Unavailable")));
    assert_eq!((status.to.as_str(), status.backlog, status.sent), ("there", ALL, 0));
    assert_eq!(status.last_sent, None);
    peer.does(|_| Reply::Take);
    until_settled(&delivery, ALL).await;
    let status = delivery.status();
    assert_eq!((status.last_error, status.backlog, status.sent), (None, 0, ALL));
    assert!(status.last_sent.is_some());
}
