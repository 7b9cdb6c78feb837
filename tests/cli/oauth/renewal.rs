//! Renewal of tokens: before they expire and after a rejection, once for concurrent calls, and while the authorization
//! server is unavailable.

use std::fs;

use mcp_satellite::console::client::ConsoleClient;
use serde_json::json;
use testkit::wait::wait_until;

use super::fixture::{OauthFixture, call_at_once, runtime};
use super::protected::Protected;

#[test]
fn fifty_calls_with_an_expired_token_share_one_renewal() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    fixture.authority.set_token_endpoint_answers(false);
    fixture.authority.expire_access_tokens();
    let refused = fixture.server.rejected_count();
    let client = ConsoleClient::new(fixture.home.data_dir()).unwrap();
    let (calls, ()) = runtime().block_on(async {
        let released = async {
            while fixture.server.rejected_count() < refused + 50 {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            fixture.authority.set_token_endpoint_answers(true);
        };
        futures::join!(call_at_once(&client, 50), released)
    });
    for call in calls {
        assert!(call.unwrap()["content"][0]["text"].as_str().unwrap().starts_with("subject-"));
    }
    assert_eq!(fixture.authority.token_requests("refresh_token"), 1);
    assert_eq!(fixture.home.row("files").unwrap()["status"], "online");
    satellite.terminate().exits(0);
}

#[test]
fn a_token_is_renewed_early_and_a_refresh_token_is_never_reused_after_a_kill() {
    let fixture = OauthFixture::new();
    fixture.authority.configure(|behavior| behavior.lifetime = 3);
    let satellite = fixture.run_authorized();
    let refused = fixture.server.rejected_count();
    let name = fixture.call("whoami");
    wait_until("two renewals", || {
        assert_eq!(fixture.call("whoami"), name);
        fixture.authority.token_requests("refresh_token") >= 2
    });
    assert_eq!(fixture.server.rejected_count(), refused, "no request was rejected");
    // A kill during a renewal loses its tokens. The next tokens live long: none is renewed when they are stored.
    fixture.authority.configure(|behavior| behavior.lifetime = 3600);
    wait_until("long-lived tokens are stored", || fixture.grant()["expires_in"] == 3600);
    satellite.kill();

    // Reusing a refresh token would revoke the whole grant.
    fixture.authority.expire_access_tokens();
    let satellite = fixture.run("");
    fixture.home.wait_online("files");
    assert_eq!(fixture.call("whoami"), name);
    satellite.terminate().exits(0);
}

#[test]
fn a_revoked_grant_requires_reauthorization_and_reports_the_reason() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    fixture.authority.revoke_all();
    let output = fixture.call("whoami");
    assert!(output.contains("invalid_grant") && output.contains("satellite auth files-acme-alice-f1"), "{output}");
    fixture.home.wait_status("files", "requires_reauth");
    assert!(fixture.message().contains("[secret]"), "the message of the server must be masked: {}", fixture.message());
    fixture.authorize(&[]).exits(0);
    fixture.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn an_unavailable_authorization_server_requires_no_reauthorization() {
    let fixture = OauthFixture::new();
    let config = fixture.config(&["alice"], "");
    fixture.authority.configure(|behavior| behavior.lifetime = 3);
    // The server accepts tokens beyond their announced lifetime: the satellite must go on using them.
    let satellite = fixture.home.run(&["--config", config.to_str().unwrap()]);
    fixture.home.wait_status("files", "requires_reauth");
    fixture.authorize(&[]).exits(0);
    fixture.authority.shared.state().extend_access_tokens();
    fixture.authority.stop();
    satellite.process.wait_stderr(|log| log.contains("cannot renew an authorization now"));
    assert!(fixture.call("whoami").starts_with("subject-"));
    assert_eq!(fixture.home.row("files").unwrap()["status"], "online");

    fixture.authority.expire_access_tokens();
    let output = fixture.call("whoami");
    assert!(output.contains("cannot be renewed") && output.contains("Connection refused"), "{output}");
    fixture.home.wait_status("files", "offline");
    fixture.authority.restart();
    fixture.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn a_wrong_clock_costs_one_renewal() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    let name = fixture.call("whoami");
    // The clock of the server is ahead: it rejects a token that should last an hour.
    fixture.authority.expire_access_tokens();
    assert_eq!(fixture.call("whoami"), name);
    assert_eq!(fixture.authority.token_requests("refresh_token"), 1);
    satellite.terminate().exits(0);

    // Our clock was ahead when the token was received, or it is behind now.
    for received_at in ["2099-01-01T00:00:00Z", "2001-01-01T00:00:00Z"] {
        let mut grant = fixture.grant();
        grant["received_at"] = json!(received_at);
        fixture.replace_grant(&grant);
        let before = fixture.authority.token_requests("refresh_token");
        let satellite = fixture.run("");
        fixture.home.wait_online("files");
        wait_until("one renewal", || fixture.authority.token_requests("refresh_token") == before + 1);
        assert_eq!(fixture.call("whoami"), name);
        satellite.terminate().exits(0);
    }
}

#[test]
fn a_token_that_expires_during_a_stream_is_renewed_and_the_stream_resumes() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    let name = fixture.call("whoami");
    assert_eq!(fixture.call("stream"), name);
    assert_eq!(fixture.authority.token_requests("refresh_token"), 1);
    satellite.terminate().exits(0);
}

#[test]
fn a_token_renewed_for_a_replaced_server_is_not_sent_to_the_new_one() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    fixture.authority.set_token_endpoint_answers(false);
    fixture.authority.expire_access_tokens();
    let call = fixture.home.background(&["call", "files", "whoami"]);
    wait_until("the start of a renewal", || fixture.authority.token_requests("refresh_token") == 1);
    // The other server accepts every token of the authorization server, so it would count this one.
    let other = Protected::start(&fixture.authority.shared);
    fixture.authority.shared.state().resource = fixture.server.url();
    let config = fs::read_to_string(fixture.home.path().join("satellite.toml")).unwrap();
    fixture.home.write("satellite.toml", &config.replace(&fixture.server.url(), &other.url()));
    wait_until("a request to the other server", || other.rejected_count() >= 1);
    fixture.authority.set_token_endpoint_answers(true);
    wait_until("the removal of the grant", || fixture.grants().is_empty());
    fixture.home.wait_status("files", "requires_reauth");
    assert_eq!(other.token_count(), 0, "no token was sent to the other server");
    drop(call);
    satellite.terminate().exits(0);
}
