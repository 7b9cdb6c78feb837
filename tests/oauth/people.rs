//! One user's grant is one user's, reaches as far as it was given, and goes with what it was for.

use super::yard::{Yard, page_of, visit, wait_until};

#[test]
fn one_users_grant_never_serves_another() {
    let yard = Yard::new();
    let config = yard.config(&["alice", "bob"], "");
    let satellite = yard.home.run(&["--config", config.to_str().unwrap()]);
    wait_until("both to wait", || yard.home.rows().iter().all(|row| row["status"] == "requires_reauth"));
    let authorize = |user: &str| {
        let auth = yard.home.background(&["auth", "files", "--user", user]);
        visit(&page_of(&auth));
        auth.finish().exits(0);
    };
    let whoami = |user: &str| yard.home.satellite(&["call", "files", "whoami", "--user", user]);
    authorize("alice");
    whoami("alice").exits(0);
    let bobs = yard.home.satellite(&["reconnect", "files", "--user", "bob"]).exits(1);
    assert!(bobs.stderr.contains("satellite auth files-acme-bob-f1"), "{bobs:#?}");
    authorize("bob");
    let name = |user: &str| whoami(user).exits(0).json()["content"][0]["text"].clone();
    let names = (name("alice"), name("bob"));
    assert_ne!(names.0, names.1);
    satellite.terminate().exits(0);

    // Kept apart, too.
    let satellite = yard.home.run(&["--config", config.to_str().unwrap()]);
    yard.home.wait_all_online();
    assert_eq!((name("alice"), name("bob")), names);
    satellite.terminate().exits(0);
}

#[test]
fn a_scope_that_is_missing_costs_one_call_and_is_asked_for_the_next_time_beside_what_there_is() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    let said = yard.call("write");
    let command = "satellite auth files-acme-alice-f1 --scope write";
    assert!(said.contains("lacks the scopes `write`") && said.contains(command), "{said}");
    assert!(yard.call("whoami").starts_with("subject-"));
    assert_eq!(yard.home.row("files").unwrap()["status"], "online");

    yard.authorize(&["--scope", "write"]).exits(0);
    assert_eq!(yard.authority.knows.state().scopes_asked.last().unwrap(), "write read");
    assert_eq!(yard.call("write"), "written");
    satellite.terminate().exits(0);
}

#[test]
fn what_is_given_up_is_revoked_and_forgotten() {
    let yard = Yard::new();
    let satellite = yard.run_authorized();
    let token = yard.grant()["refresh_token"].as_str().unwrap().to_owned();
    let outcome = yard.home.satellite(&["auth", "files", "--revoke"]).exits(0);
    assert!(outcome.stdout.contains("no authorization any more"), "{outcome:#?}");
    assert!(yard.authority.knows.state().revoked.contains(&token));
    assert_eq!(yard.grant_files().len(), 0);
    yard.home.wait_status("files", "requires_reauth");
    yard.home.satellite(&["auth", "files", "--revoke"]).exits(0);
    satellite.terminate().exits(0);
}

#[test]
fn what_is_uninstalled_is_revoked_and_forgotten_also_where_nobody_can_be_told() {
    for reachable in [true, false] {
        let yard = Yard::new();
        let satellite = yard.run_authorized();
        let token = yard.grant()["refresh_token"].as_str().unwrap().to_owned();
        if !reachable {
            yard.authority.go_away();
        }
        let removed = "[satellite]\nretention = \"0s\"\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = []\n";
        yard.home.write("satellite.toml", removed);
        wait_until("its file to be gone", || yard.grant_files().is_empty());
        if reachable {
            wait_until("its revocation", || yard.authority.knows.state().revoked.contains(&token));
        }
        satellite.terminate().exits(0);
    }
}

#[test]
fn a_server_can_be_authorized_before_any_satellite_runs() {
    let yard = Yard::new();
    let config = yard.config(&["alice", "bob"], "");
    let refused = yard.home.satellite(&["auth", "files"]).exits(3);
    assert!(refused.stderr.contains("--config FILE"), "{refused:#?}");
    let config = config.to_str().unwrap();
    yard.home.satellite(&["auth", "files", "--config", config]).exits(2);
    let outcome = yard.authorize(&["--user", "bob", "--config", config]).exits(0);
    assert!(outcome.stdout.ends_with("files-acme-bob-f1 is authorized\n"), "{outcome:#?}");
    let satellite = yard.home.run(&["--config", config]);
    let bob_is_online = || yard.home.rows().iter().any(|row| row["user"] == "bob" && row["status"] == "online");
    wait_until("bob's to be online", bob_is_online);
    satellite.terminate().exits(0);

    yard.home.satellite(&["auth", "files", "--user", "bob", "--config", config, "--revoke"]).exits(0);
    assert_eq!((yard.grant_files().len(), yard.authority.knows.state().revoked.len()), (0, 2));
}
