//! The satellites of the backend, requested by a satellite.

use std::time::Duration;

use mcp_satellite::backend::link::FleetError;
use testkit::wait::until;

use super::fixture::LinkFixture;
use super::peer::{Peer, PeerResponse};

#[tokio::test]
async fn a_response_is_shared_for_a_short_time() {
    let peer = Peer::start().await;
    peer.token("token-1");
    let fixture = LinkFixture::new(&peer, Some("token-1")).await;
    let linked = fixture.link();
    let fleet = until("the backend is known", async || linked.link.fleet().await, Result::is_ok).await.unwrap();
    assert_eq!((&*fleet.satellites[0].name, fleet.satellites[0].instances["online"]), ("satellite-0001", 2));
    let requests = peer.requests("fleet");
    assert_eq!(requests[0].bearer, "api-key-0123456789-1");
    let all = futures::future::join_all((0..50).map(|_| linked.link.fleet())).await;
    assert!(all.iter().all(Result::is_ok));
    // The machine may be so slow that the response becomes too old meanwhile.
    assert!(peer.requests("fleet").len() < requests.len() + 25, "every reader sends a request");
}

#[tokio::test]
async fn failures_of_the_backend_are_reported_and_change_nothing() {
    let peer = Peer::start().await;
    let mut fixture = LinkFixture::new(&peer, None).await;
    fixture.plan.request_timeout = Duration::from_millis(300);
    let unregistered = fixture.link();
    assert_eq!(unregistered.link.fleet().await, Err(FleetError::NotRegistered));
    drop(unregistered);
    peer.token("token-1");
    fixture.plan.token = Some("token-1".into());
    let linked = fixture.link();
    until("the backend is known", async || linked.link.fleet().await, Result::is_ok).await.unwrap();
    let status = |status, body: &str| PeerResponse::Status(status, body.to_owned());
    for (response, text) in [
        (status(404, r#"{"error": "there is no such path"}"#), "a newer `satellite backend`"),
        (status(500, "no"), "answered 500"),
        (status(200, "[]"), "invalid response"),
        (PeerResponse::Huge(9 << 20), "larger than"),
        (PeerResponse::Never, "did not answer within"),
        (PeerResponse::Reset, "satellite status"),
    ] {
        peer.respond("fleet", Some(response));
        let is_expected =
            |result: &Result<_, FleetError>| result.as_ref().is_err_and(|error| error.to_string().contains(text));
        let error = until(text, async || linked.link.fleet().await, is_expected).await.unwrap_err();
        assert!(!error.to_string().contains("api-key"), "{error}");
    }
    // The connection itself is not affected.
    assert_eq!(linked.wait_until("a contact", |status| status.connected).await.last_error, None);
    peer.respond("fleet", None);
    until("the backend answers again", async || linked.link.fleet().await, Result::is_ok).await.unwrap();
}
