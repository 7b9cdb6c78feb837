//! A token's life: renewed before its end and when it is refused, once for all who want it, whatever becomes of the
//! authorization server meanwhile.

use std::fs;

use mcp_satellite::console::client::ConsoleClient;
use serde_json::json;

use super::protected::Protected;
use super::yard::{Yard, call_at_once, runtime, wait_until};

#[test]
fn fifty_calls_with_a_dead_token_are_one_renewal_and_fifty_answers() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    yard.authority.answer_tokens(false);
    yard.authority.kill_access_tokens();
    let refused = yard.server.refused();
    let client = ConsoleClient::new(yard.home.data_dir()).unwrap();
    let (calls, ()) = runtime().block_on(async {
        let released = async {
            while yard.server.refused() < refused + 50 {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            yard.authority.answer_tokens(true);
        };
        futures::join!(call_at_once(&client, 50), released)
    });
    for call in calls {
        assert!(call.unwrap()["content"][0]["text"].as_str().unwrap().starts_with("subject-"));
    }
    assert_eq!(yard.authority.asked("refresh_token"), 1);
    assert_eq!(yard.home.row("files").unwrap()["status"], "online");
    satellite.terminate().exits(0);
}

#[test]
fn a_token_is_renewed_before_its_end_and_what_it_is_renewed_with_is_used_once_over_kills_too() {
    let yard = Yard::new();
    yard.authority.behave(|manner| manner.lifetime = 3);
    let satellite = yard.run_authorized();
    let refused = yard.server.refused();
    let name = yard.call("whoami");
    wait_until("two renewals", || {
        assert_eq!(yard.call("whoami"), name);
        yard.authority.asked("refresh_token") >= 2
    });
    assert_eq!(yard.server.refused(), refused, "nobody has noticed");
    satellite.kill();

    // A refresh token that came twice would end it all.
    let satellite = yard.run("");
    yard.home.wait_online("files");
    assert_eq!(yard.call("whoami"), name);
    satellite.terminate().exits(0);
}

#[test]
fn what_was_taken_back_there_asks_for_another_authorization_and_says_why() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    yard.authority.forget_all();
    let said = yard.call("whoami");
    assert!(said.contains("invalid_grant") && said.contains("satellite auth files-acme-alice-f1"), "{said}");
    yard.home.wait_status("files", "requires_reauth");
    assert!(yard.message().contains("[secret]"), "its words, without what it echoes: {}", yard.message());
    yard.authorize(&[]).exits(0);
    yard.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn an_authorization_server_that_is_down_costs_nothing_as_long_as_the_token_is_good_and_no_person_later() {
    let yard = Yard::new();
    let config = yard.config(&["alice"], "");
    yard.authority.behave(|manner| manner.lifetime = 3);
    // A server that takes tokens longer than was said: the clock alone ends none.
    let satellite = yard.home.run(&["--config", config.to_str().unwrap()]);
    yard.home.wait_status("files", "requires_reauth");
    yard.authorize(&[]).exits(0);
    yard.authority.knows.state().prolong();
    yard.authority.go_away();
    satellite.process.wait_stderr(|log| log.contains("cannot renew an authorization now"));
    assert!(yard.call("whoami").starts_with("subject-"));
    assert_eq!(yard.home.row("files").unwrap()["status"], "online");

    yard.authority.kill_access_tokens();
    let said = yard.call("whoami");
    assert!(said.contains("cannot be renewed") && said.contains("Connection refused"), "{said}");
    yard.home.wait_status("files", "offline");
    yard.authority.come_back();
    yard.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn clocks_that_are_wrong_cost_a_renewal_and_nothing_else() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    let name = yard.call("whoami");
    // Its server's clock is ahead: a token is dead that should have had an hour.
    yard.authority.kill_access_tokens();
    assert_eq!(yard.call("whoami"), name);
    assert_eq!(yard.authority.asked("refresh_token"), 1);
    satellite.terminate().exits(0);

    // Ours was ahead when it was received, or is behind now.
    for received_at in ["2099-01-01T00:00:00Z", "2001-01-01T00:00:00Z"] {
        let mut grant = yard.grant();
        grant["received_at"] = json!(received_at);
        fs::write(yard.grant_file(), grant.to_string()).unwrap();
        let before = yard.authority.asked("refresh_token");
        let satellite = yard.run("");
        yard.home.wait_online("files");
        wait_until("one renewal", || yard.authority.asked("refresh_token") == before + 1);
        assert_eq!(yard.call("whoami"), name);
        satellite.terminate().exits(0);
    }
}

#[test]
fn a_token_that_dies_in_the_middle_of_a_stream_is_renewed_and_the_stream_goes_on() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    let name = yard.call("whoami");
    assert_eq!(yard.call("stream"), name);
    assert_eq!(yard.authority.asked("refresh_token"), 1);
    satellite.terminate().exits(0);
}

#[test]
fn a_token_that_comes_for_a_server_in_whose_place_another_one_is_goes_to_nobody() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    yard.authority.answer_tokens(false);
    yard.authority.kill_access_tokens();
    let call = yard.home.background(&["call", "files", "whoami"]);
    wait_until("a renewal to be under way", || yard.authority.asked("refresh_token") == 1);
    // It takes whatever the authorization server has issued, and so would see the token and take it.
    let other = Protected::start(&yard.authority.knows);
    yard.authority.knows.state().resource = yard.server.url();
    let config = fs::read_to_string(yard.home.path().join("satellite.toml")).unwrap();
    yard.home.write("satellite.toml", &config.replace(&yard.server.url(), &other.url()));
    wait_until("the other one to be asked", || other.refused() >= 1);
    yard.authority.answer_tokens(true);
    wait_until("what has come to be given up", || yard.grant_files().is_empty());
    yard.home.wait_status("files", "requires_reauth");
    assert_eq!(other.tokens(), 0, "none was sent there");
    drop(call);
    satellite.terminate().exits(0);
}
