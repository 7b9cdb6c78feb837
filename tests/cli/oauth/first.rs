//! The first authorization of a server, and the checks that prevent a wrong one.

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use super::fixture::{
    InteractiveCommand, OauthFixture, authorization_url, http_get, query_parameter, redirect_target, visit,
};

/// Returns the data of the events about authorizations.
fn authorizations(fixture: &OauthFixture) -> Vec<Value> {
    let actions = fixture.home.events().into_iter().filter(|event| event["type"] == "control.action");
    let data = actions.map(|event| event["data"].clone());
    data.filter(|data| data["action"].as_str().is_some_and(|action| action.starts_with("auth_"))).collect()
}

#[test]
fn a_server_that_requires_oauth_names_the_command_and_connects_after_it() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run("");
    let row = fixture.home.wait_status("files", "requires_reauth");
    let name = "files-acme-alice-f1";
    assert_eq!(row["status_message"], "authorization required (HTTP 401)");
    assert_eq!(row["remedy"], "authorize");
    assert!(fixture.call("whoami").contains(&format!("satellite auth {name}")));

    let outcome = fixture.authorize(&[]).exits(0);
    assert!(outcome.stdout.contains(&format!("{name} is authorized\n{name} is online")), "{outcome:#?}");
    assert!(fixture.call("whoami").starts_with("subject-"));
    assert_eq!(fixture.home.state_database().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fixture.authority.shared.state().scopes_asked, ["read"], "the scope of the challenge");
    let recorded = authorizations(&fixture);
    let outcomes: Vec<_> = recorded.iter().map(|data| [&data["action"], &data["outcome"]]).collect();
    assert_eq!(outcomes, [["auth_begin", "succeeded"], ["auth_finish", "succeeded"]], "{recorded:#?}");
    assert_eq!(recorded[0]["target"]["process_id"], name);
    assert!(recorded.iter().all(|data| data["actor"]["kind"] == "owner"), "{recorded:#?}");
    satellite.terminate().exits(0);

    // The next satellite uses the stored grant.
    let satellite = fixture.run("");
    fixture.home.wait_online("files");
    assert_eq!(fixture.authority.token_requests("authorization_code"), 1);
    satellite.terminate().exits(0);
}

#[test]
fn without_a_browser_the_redirect_url_or_its_code_can_be_pasted() {
    for paste_url in [true, false] {
        let fixture = OauthFixture::new();
        let satellite = fixture.run("");
        fixture.home.wait_status("files", "requires_reauth");
        let mut auth = InteractiveCommand::start(&fixture.home, &["auth", "files", "--no-browser"]);
        let redirect = redirect_target(&authorization_url(&auth.running));
        auth.type_line(&if paste_url { redirect } else { query_parameter(&redirect, "code").unwrap() });
        auth.running.finish().exits(0);
        fixture.home.wait_online("files");
        satellite.terminate().exits(0);
    }
}

#[test]
fn the_code_can_be_entered_on_another_device() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let auth = fixture.home.background(&["auth", "files", "--device"]);
    let stdout = auth.wait_stdout(|text| text.contains("type the code ") && text.ends_with('\n'));
    assert!(stdout.contains("/device\n"), "{stdout}");
    fixture.authority.type_code(stdout.trim().rsplit(' ').next().unwrap());
    auth.finish().exits(0);
    fixture.home.wait_online("files");
    satellite.terminate().exits(0);
}

#[test]
fn a_configured_client_is_used_without_dynamic_registration() {
    let mut fixture = OauthFixture::new();
    fixture.home.env.push(("CLIENT_SECRET".to_owned(), "planted-by-hand".to_owned()));
    fixture.authority.add_client("by-hand", "planted-by-hand");
    fixture.authority.configure(|behavior| behavior.registers = false);
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let refused = fixture.home.satellite(&["auth", "files"]).exits(1);
    assert!(refused.stderr.contains("oauth = { client_id"), "{refused:#?}");
    satellite.terminate().exits(0);

    let issuer = fixture.authority.shared.state().url.clone();
    let satellite = fixture.run(&format!(
        "oauth = {{ client_id = \"by-hand\", client_secret = \"env:CLIENT_SECRET\", issuer = \"{issuer}\", scopes = [\"write\"] }}"
    ));
    fixture.home.wait_status("files", "requires_reauth");
    fixture.authorize(&[]).exits(0);
    assert_eq!(fixture.call("write"), "written");
    assert!(fixture.grant()["client_secret"].is_null(), "the secret is only in the configuration");
    satellite.terminate().exits(0);
}

#[test]
fn metadata_of_another_resource_is_rejected_before_any_redirect() {
    let fixture = OauthFixture::new();
    fixture.server.set_metadata_resource("http://127.0.0.1:1/mcp");
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let refused = fixture.home.satellite(&["auth", "files"]).exits(1);
    assert!(refused.stderr.contains("resource mismatch"), "{refused:#?}");
    assert_eq!(fixture.grants().len(), 0);
    let recorded = authorizations(&fixture);
    assert!(recorded.len() == 1 && recorded[0]["outcome"] != "succeeded", "{recorded:#?}");
    assert!(recorded[0]["reason"].as_str().unwrap().contains("resource mismatch"), "{recorded:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_token_for_another_resource_fails_without_a_renewal_loop() {
    let fixture = OauthFixture::new();
    fixture.authority.configure(|behavior| behavior.audience = Some("http://127.0.0.1:1/mcp".to_owned()));
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let outcome = fixture.authorize(&[]).exits(1);
    assert!(outcome.stderr.contains("requires_reauth"), "{outcome:#?}");
    assert!(fixture.message().contains("rejects a token"), "{}", fixture.message());
    assert!(fixture.authority.token_requests("refresh_token") <= 1, "at most one renewal");
    satellite.terminate().exits(0);
}

#[test]
fn an_authorization_server_with_another_issuer_is_rejected() {
    let fixture = OauthFixture::new();
    fixture.authority.configure(|behavior| behavior.issuer = Some("https://as.example.com".to_owned()));
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let refused = fixture.home.satellite(&["auth", "files"]).exits(1);
    assert!(refused.stderr.contains("issuer mismatch"), "{refused:#?}");
    satellite.terminate().exits(0);
}

#[test]
fn a_callback_from_another_issuer_is_rejected_and_its_code_is_not_used() {
    let fixture = OauthFixture::new();
    fixture.authority.configure(|behavior| behavior.iss = Some("https://evil.example.com".to_owned()));
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let outcome = fixture.authorize(&[]).exits(1);
    assert!(outcome.stderr.contains("the response does not come from the issuer"), "{outcome:#?}");
    assert_eq!(fixture.authority.token_requests("authorization_code"), 0);
    satellite.terminate().exits(0);
}

#[test]
fn a_forged_callback_does_not_end_the_authorization() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let auth = fixture.home.background(&["auth", "files"]);
    let page = authorization_url(&auth);
    let callback = query_parameter(&page, "redirect_uri").unwrap();
    assert_eq!(http_get(&format!("{callback}?code=theirs&state=theirs")).0, 400);
    visit(&page);
    auth.finish().exits(0);
    satellite.terminate().exits(0);
}
