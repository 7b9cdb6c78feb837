//! Client credentials: authorization without a person.

use testkit::wait::wait_until;

use super::fixture::OauthFixture;

fn oauth(issuer: &str) -> String {
    format!(
        "oauth = {{ grant = \"client_credentials\", client_id = \"robot\", client_secret = \"file:secret\", \
         issuer = \"{issuer}\", scopes = [\"write\"] }}"
    )
}

#[test]
fn a_client_secret_is_sent_only_to_the_configured_issuer() {
    let fixture = OauthFixture::new();
    fixture.authority.add_client("robot", "planted-robot");
    fixture.home.write("secret", "planted-robot");
    let satellite = fixture.run(&oauth("https://as.example.com"));
    fixture.home.wait_status("files", "requires_reauth");
    assert!(fixture.message().contains("`https://as.example.com` is configured"), "{}", fixture.message());
    assert_eq!(fixture.authority.token_requests("client_credentials"), 0);
    satellite.terminate().exits(0);
}

#[test]
fn client_credentials_need_no_person_and_renew_automatically() {
    let fixture = OauthFixture::new();
    fixture.authority.add_client("robot", "planted-robot");
    fixture.authority.configure(|behavior| behavior.lifetime = 3);
    fixture.home.write("secret", "planted-robot");
    let satellite = fixture.run(&oauth(&fixture.authority.shared.state().url.clone()));
    fixture.home.wait_online("files");
    assert_eq!((fixture.call("whoami"), fixture.call("write")), ("robot".to_owned(), "written".to_owned()));
    wait_until("another token", || fixture.authority.token_requests("client_credentials") >= 2);
    assert_eq!(fixture.call("whoami"), "robot");
    satellite.terminate().exits(0);
}

#[test]
fn a_rejected_secret_is_reported_and_a_changed_one_is_tried_at_once() {
    let fixture = OauthFixture::new();
    fixture.authority.add_client("robot", "planted-robot");
    fixture.home.write("secret", "planted-wrong");
    let satellite = fixture.run(&oauth(&fixture.authority.shared.state().url.clone()));
    fixture.home.wait_status("files", "requires_reauth");
    assert!(fixture.message().contains("invalid_client"), "{}", fixture.message());
    fixture.home.write("secret", "planted-robot");
    fixture.home.wait_online("files");
    satellite.terminate().exits(0);
}
