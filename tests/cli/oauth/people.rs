//! Grants of users: separation, scopes and revocation.

use testkit::wait::wait_until;

use super::fixture::{OauthFixture, authorization_url, visit};

#[test]
fn the_grant_of_one_user_never_serves_another() {
    let fixture = OauthFixture::new();
    let config = fixture.config(&["alice", "bob"], "");
    let satellite = fixture.home.run(&["--config", config.to_str().unwrap()]);
    wait_until("requires_reauth of both", || fixture.home.rows().iter().all(|row| row["status"] == "requires_reauth"));
    let authorize = |user: &str| {
        let auth = fixture.home.background(&["auth", "files", "--user", user]);
        visit(&authorization_url(&auth));
        auth.finish().exits(0);
    };
    let whoami = |user: &str| fixture.home.satellite(&["call", "files", "whoami", "--user", user]);
    authorize("alice");
    whoami("alice").exits(0);
    let bobs = fixture.home.satellite(&["reconnect", "files", "--user", "bob"]).exits(1);
    assert!(bobs.stderr.contains("satellite auth files-acme-bob-f1"), "{bobs:#?}");
    authorize("bob");
    let name = |user: &str| whoami(user).exits(0).json()["content"][0]["text"].clone();
    let names = (name("alice"), name("bob"));
    assert_ne!(names.0, names.1);
    satellite.terminate().exits(0);

    // The stored grants are separate, too.
    let satellite = fixture.home.run(&["--config", config.to_str().unwrap()]);
    fixture.home.wait_all_online();
    assert_eq!((name("alice"), name("bob")), names);
    satellite.terminate().exits(0);
}

#[test]
fn a_missing_scope_fails_one_call_and_is_added_by_the_next_authorization() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    let output = fixture.call("write");
    let command = "satellite auth files-acme-alice-f1 --scope write";
    assert!(output.contains("lacks the scopes `write`") && output.contains(command), "{output}");
    assert!(fixture.call("whoami").starts_with("subject-"));
    assert_eq!(fixture.home.row("files").unwrap()["status"], "online");

    fixture.authorize(&["--scope", "write"]).exits(0);
    assert_eq!(fixture.authority.shared.state().scopes_asked.last().unwrap(), "write read");
    assert_eq!(fixture.call("write"), "written");
    satellite.terminate().exits(0);
}

#[test]
fn revoke_revokes_and_deletes_the_grant() {
    let fixture = OauthFixture::new();
    let satellite = fixture.run_authorized();
    let token = fixture.grant()["refresh_token"].as_str().unwrap().to_owned();
    let outcome = fixture.home.satellite(&["auth", "files", "--revoke"]).exits(0);
    assert!(outcome.stdout.contains("no authorization any more"), "{outcome:#?}");
    assert!(fixture.authority.shared.state().revoked.contains(&token));
    assert_eq!(fixture.grants().len(), 0);
    fixture.home.wait_status("files", "requires_reauth");
    fixture.home.satellite(&["auth", "files", "--revoke"]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn an_uninstalled_servers_grant_is_deleted_even_if_revocation_fails() {
    for reachable in [true, false] {
        let fixture = OauthFixture::new();
        let satellite = fixture.run_authorized();
        let token = fixture.grant()["refresh_token"].as_str().unwrap().to_owned();
        if !reachable {
            fixture.authority.stop();
        }
        let removed = "[satellite]\nretention = \"0s\"\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = []\n";
        fixture.home.write("satellite.toml", removed);
        wait_until("the removal of the grant", || fixture.grants().is_empty());
        if reachable {
            wait_until("its revocation", || fixture.authority.shared.state().revoked.contains(&token));
        }
        satellite.terminate().exits(0);
    }
}

#[test]
fn a_server_can_be_authorized_before_a_satellite_runs() {
    let fixture = OauthFixture::new();
    let config = fixture.config(&["alice", "bob"], "");
    let refused = fixture.home.satellite(&["auth", "files"]).exits(3);
    assert!(refused.stderr.contains("--config FILE"), "{refused:#?}");
    let config = config.to_str().unwrap();
    fixture.home.satellite(&["auth", "files", "--config", config]).exits(2);
    let outcome = fixture.authorize(&["--user", "bob", "--config", config]).exits(0);
    assert!(outcome.stdout.ends_with("files-acme-bob-f1 is authorized\n"), "{outcome:#?}");
    let satellite = fixture.home.run(&["--config", config]);
    let bob_is_online = || fixture.home.rows().iter().any(|row| row["user"] == "bob" && row["status"] == "online");
    wait_until("the server of bob to be online", bob_is_online);
    satellite.terminate().exits(0);

    fixture.home.satellite(&["auth", "files", "--user", "bob", "--config", config, "--revoke"]).exits(0);
    assert_eq!((fixture.grants().len(), fixture.authority.shared.state().revoked.len()), (0, 2));
}
