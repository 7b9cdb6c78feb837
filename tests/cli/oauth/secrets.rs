//! The secrets of an authorization are stored only in `DIR/state.db`.

use std::fs;
use std::path::Path;

use testkit::process::processes;

use super::fixture::{InteractiveCommand, OauthFixture, authorization_url, redirect_target};

/// Collects every file below a directory.
fn files(directory: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let kind = path.symlink_metadata().unwrap().file_type();
        if kind.is_dir() {
            files(&path, found);
        } else if kind.is_file() {
            found.push(path);
        }
    }
}

#[test]
fn no_token_code_verifier_or_secret_leaks() {
    let mut fixture = OauthFixture::new();
    fixture.home.env.push(("RUST_LOG".to_owned(), "trace".to_owned()));
    let satellite = fixture.run("");
    fixture.home.wait_status("files", "requires_reauth");
    let mut auth = InteractiveCommand::start(&fixture.home, &["auth", "files", "--no-browser"]);
    let redirect = redirect_target(&authorization_url(&auth.running));
    let cmdlines = || processes().into_iter().map(|(_, cmdline)| cmdline).collect::<String>();
    let mut output = cmdlines();
    auth.type_line(&redirect);
    auth.running.finish().exits(0);
    fixture.home.wait_online("files");
    // The server echoes the token in an error; it is masked before and after a renewal.
    output += &fixture.call("leak");
    fixture.authority.expire_access_tokens();
    output += &fixture.call("leak");
    output += &fixture.home.satellite(&["status", "--json", "--satellite"]).stdout;
    output += &fixture.home.satellite(&["logs", "files", "--requests"]).stdout;
    fixture.authority.revoke_all();
    output += &fixture.call("whoami");
    fixture.home.wait_status("files", "requires_reauth");
    let stored = (fixture.home.rows(), fixture.home.events());
    output += &(format!("{stored:?}") + &cmdlines());
    let outcome = satellite.terminate().exits(0);
    output += &(outcome.stdout + &outcome.stderr);
    assert!(output.contains("your header was Bearer [secret]"));

    let secrets = fixture.authority.shared.state().secrets.clone();
    assert!(secrets.len() >= 7, "{secrets:?}");
    let mut other_files = Vec::new();
    files(fixture.home.path(), &mut other_files);
    let other_files = other_files.into_iter().filter(|path| *path != fixture.home.state_database());
    let other_files: Vec<_> = other_files.map(|path| (path.display().to_string(), fs::read(&path).unwrap())).collect();
    for secret in secrets {
        assert!(!output.contains(&secret), "{secret} is in the output");
        for (path, bytes) in &other_files {
            assert!(memchr::memmem::find(bytes, secret.as_bytes()).is_none(), "{secret} is in {path}");
        }
    }
}
