//! The first authorization of a server, and what keeps it from being one.

use std::os::unix::fs::PermissionsExt;

use super::yard::{Typed, Yard, given, leads_to, opens, page_of, visit};

#[test]
fn a_server_that_wants_oauth_says_which_command_it_takes_and_goes_on_by_itself_once_it_was_given() {
    let yard = Yard::new();
    let satellite = yard.run("");
    let row = yard.home.wait_status("files", "requires_reauth");
    let name = "files-acme-alice-f1";
    assert_eq!(row["status_message"], "authorization required (HTTP 401)");
    assert_eq!(row["remedy"], "authorize");
    assert!(yard.call("whoami").contains(&format!("satellite auth {name}")));

    let outcome = yard.authorize(&[]).exits(0);
    assert!(outcome.stdout.contains(&format!("{name} is authorized\n{name} is online")), "{outcome:#?}");
    assert!(yard.call("whoami").starts_with("subject-"));
    assert_eq!(yard.grant_file().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(yard.authority.knows.state().scopes_asked, ["read"], "what its challenge asks for");
    satellite.terminate().exits(0);

    // It is there for the next satellite.
    let satellite = yard.run("");
    yard.home.wait_online("files");
    assert_eq!(yard.authority.asked("authorization_code"), 1);
    satellite.terminate().exits(0);
}

#[test]
fn without_a_browser_the_address_that_it_ends_at_is_pasted_or_the_code_in_it() {
    for whole in [true, false] {
        let yard = Yard::new();
        let satellite = yard.run("");
        yard.home.wait_status("files", "requires_reauth");
        let mut auth = Typed::start(&yard.home, &["auth", "files", "--no-browser"]);
        let back = leads_to(&page_of(&auth.running));
        auth.types(&if whole { back } else { given(&back, "code").unwrap() });
        auth.running.finish().exits(0);
        yard.home.wait_online("files");
        satellite.terminate().exits(0);
    }
}

#[test]
fn another_device_can_be_where_the_code_is_typed() {
    let yard = Yard::new();
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let auth = yard.home.background(&["auth", "files", "--device"]);
    let said = auth.wait_stdout(|text| text.contains("type the code ") && text.ends_with('\n'));
    assert!(said.contains("/device\n"), "{said}");
    yard.authority.type_code(said.trim().rsplit(' ').next().unwrap());
    auth.finish().exits(0);
    yard.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn a_client_that_was_registered_by_hand_is_used_where_nobody_can_register() {
    let mut yard = Yard::new();
    yard.home.env.push(("CLIENT_SECRET".to_owned(), "planted-by-hand".to_owned()));
    yard.authority.know_client("by-hand", "planted-by-hand");
    yard.authority.behave(|manner| manner.registers = false);
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let refused = yard.home.satellite(&["auth", "files"]).exits(1);
    assert!(refused.stderr.contains("oauth = { client_id"), "{refused:#?}");
    satellite.terminate().exits(0);

    let issuer = yard.authority.knows.state().url.clone();
    let satellite = yard.run(&format!(
        "oauth = {{ client_id = \"by-hand\", client_secret = \"env:CLIENT_SECRET\", issuer = \"{issuer}\", scopes = [\"write\"] }}"
    ));
    yard.home.wait_status("files", "requires_reauth");
    yard.authorize(&[]).exits(0);
    assert_eq!(yard.call("write"), "written");
    assert!(yard.grant()["client_secret"].is_null(), "it stays in the configuration");
    satellite.terminate().exits(0);
}

#[test]
fn metadata_that_is_about_another_server_is_refused_before_anybody_is_sent_anywhere() {
    let yard = Yard::new();
    yard.server.call_itself("http://127.0.0.1:1/mcp");
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let refused = yard.home.satellite(&["auth", "files"]).exits(1);
    assert!(refused.stderr.contains("resource mismatch"), "{refused:#?}");
    assert_eq!(yard.grant_files().len(), 0);
    satellite.terminate().exits(0);
}

#[test]
fn a_token_for_another_server_is_not_taken_and_nothing_goes_round_in_circles() {
    let yard = Yard::new();
    yard.authority.behave(|manner| manner.audience = Some("http://127.0.0.1:1/mcp".to_owned()));
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let outcome = yard.authorize(&[]).exits(1);
    assert!(outcome.stderr.contains("requires_reauth"), "{outcome:#?}");
    assert!(yard.message().contains("rejects a token"), "{}", yard.message());
    assert!(yard.authority.asked("refresh_token") <= 1, "it was renewed once to be sure");
    satellite.terminate().exits(0);
}

#[test]
fn an_authorization_server_that_says_it_is_another_is_refused() {
    let yard = Yard::new();
    yard.authority.behave(|manner| manner.issuer = Some("https://as.example.com".to_owned()));
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let refused = yard.home.satellite(&["auth", "files"]).exits(1);
    assert!(refused.stderr.contains("issuer mismatch"), "{refused:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn an_answer_that_somebody_else_has_given_is_refused_and_its_code_is_not_used() {
    let yard = Yard::new();
    yard.authority.behave(|manner| manner.iss = Some("https://evil.example.com".to_owned()));
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let outcome = yard.authorize(&[]).exits(1);
    assert!(outcome.stderr.contains("the response does not come from the issuer"), "{outcome:#?}");
    assert_eq!(yard.authority.asked("authorization_code"), 0);
    satellite.terminate().exits(0);
}

#[test]
fn a_page_that_guesses_our_port_does_not_end_what_a_person_has_begun() {
    let yard = Yard::new();
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let auth = yard.home.background(&["auth", "files"]);
    let page = page_of(&auth);
    let callback = given(&page, "redirect_uri").unwrap();
    assert_eq!(opens(&format!("{callback}?code=theirs&state=theirs")).0, 400);
    visit(&page);
    auth.finish().exits(0);
    satellite.terminate().exits(0);
}
