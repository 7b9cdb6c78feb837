//! What an authorization server hands out is nowhere but in `DIR/grants`.

use std::fs;
use std::path::Path;

use super::support::processes;
use super::yard::{Typed, Yard, leads_to, page_of};

/// Every file below a directory.
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
fn no_token_code_verifier_or_secret_is_seen_anywhere() {
    let mut yard = Yard::new();
    yard.home.env.push(("RUST_LOG".to_owned(), "trace".to_owned()));
    let satellite = yard.run("");
    yard.home.wait_status("files", "requires_reauth");
    let mut auth = Typed::start(&yard.home, &["auth", "files", "--no-browser"]);
    let back = leads_to(&page_of(&auth.running));
    let cmdlines = || processes().into_iter().map(|(_, cmdline)| cmdline).collect::<String>();
    let mut seen = cmdlines();
    auth.types(&back);
    auth.running.finish().exits(0);
    yard.home.wait_online("files");
    // Echoed as an error, masked also once it is another one.
    seen += &yard.call("leak");
    yard.authority.kill_access_tokens();
    seen += &yard.call("leak");
    seen += &yard.home.satellite(&["status", "--json", "--satellite"]).stdout;
    seen += &yard.home.satellite(&["logs", "files", "--requests"]).stdout;
    yard.authority.forget_all();
    seen += &yard.call("whoami");
    yard.home.wait_status("files", "requires_reauth");
    let told = (yard.home.rows(), yard.home.events());
    seen += &(format!("{told:?}") + &cmdlines());
    let outcome = satellite.terminate().exits(0);
    seen += &(outcome.stdout + &outcome.stderr);
    assert!(seen.contains("your header was Bearer [secret]"));

    let secrets = yard.authority.knows.state().secrets.clone();
    assert!(secrets.len() >= 7, "{secrets:?}");
    let mut kept = Vec::new();
    files(yard.home.path(), &mut kept);
    let kept = kept.into_iter().filter(|path| !path.starts_with(yard.home.data_dir().join("grants")));
    let kept: Vec<_> = kept.map(|path| (path.display().to_string(), fs::read(&path).unwrap())).collect();
    for secret in secrets {
        assert!(!seen.contains(&secret), "{secret} was seen");
        for (path, bytes) in &kept {
            assert!(memchr::memmem::find(bytes, secret.as_bytes()).is_none(), "{secret} is in {path}");
        }
    }
}
