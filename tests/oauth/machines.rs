//! Client credentials: nobody is asked.

use super::yard::{Yard, wait_until};

fn oauth(issuer: &str) -> String {
    format!(
        "oauth = {{ grant = \"client_credentials\", client_id = \"robot\", client_secret = \"file:secret\", \
         issuer = \"{issuer}\", scopes = [\"write\"] }}"
    )
}

#[test]
fn a_secret_goes_to_no_other_authorization_server_than_the_configured_one() {
    let yard = Yard::new();
    yard.authority.know_client("robot", "planted-robot");
    yard.home.write("secret", "planted-robot");
    let satellite = yard.run(&oauth("https://as.example.com"));
    yard.home.wait_status("files", "requires_reauth");
    assert!(yard.message().contains("`https://as.example.com` is configured"), "{}", yard.message());
    assert_eq!(yard.authority.asked("client_credentials"), 0);
    satellite.terminate().exits(0);
}

#[test]
fn a_machine_needs_no_person_and_renews_by_itself() {
    let yard = Yard::new();
    yard.authority.know_client("robot", "planted-robot");
    yard.authority.behave(|manner| manner.lifetime = 3);
    yard.home.write("secret", "planted-robot");
    let satellite = yard.run(&oauth(&yard.authority.knows.state().url.clone()));
    yard.home.wait_online("files");
    assert_eq!((yard.call("whoami"), yard.call("write")), ("robot".to_owned(), "written".to_owned()));
    wait_until("another token", || yard.authority.asked("client_credentials") >= 2);
    assert_eq!(yard.call("whoami"), "robot");
    satellite.terminate().exits(0);
}

#[test]
fn a_secret_that_is_refused_is_said_to_be_and_another_one_is_tried_at_once() {
    let yard = Yard::new();
    yard.authority.know_client("robot", "planted-robot");
    yard.home.write("secret", "planted-wrong");
    let satellite = yard.run(&oauth(&yard.authority.knows.state().url.clone()));
    yard.home.wait_status("files", "requires_reauth");
    assert!(yard.message().contains("invalid_client"), "{}", yard.message());
    yard.home.write("secret", "planted-robot");
    yard.home.wait_online("files");
    satellite.terminate().exits(0);
}
