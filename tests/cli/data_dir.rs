//! The data directory: selection, unsafe contents and deletion.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use testkit::home::{Home, Outcome, Satellite, make_private, seq};
use testkit::wait::wait_for;

use crate::SATELLITE;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn config(home: &Home) -> String {
    home.servers("satellite.toml", &[("notes", &[])]).to_str().unwrap().to_owned()
}

/// Creates a private `.satellite`, as a cloned repository could contain it.
fn plant_data_dir(home: &Home) -> std::path::PathBuf {
    let dir = home.path().join(".satellite");
    fs::create_dir(&dir).unwrap();
    set_mode(&dir, 0o700);
    dir
}

/// Runs a command that must exit with 1 before the greeting.
#[track_caller]
fn refused(home: &Home, args: &[&str]) -> Outcome {
    let outcome = home.bare(args).exits(1);
    assert!(!outcome.stdout.contains("satellite is running"), "{outcome:#?}");
    outcome
}

#[test]
fn links_in_a_cloned_data_directory_are_refused_and_targets_stay_unchanged() {
    let home = Home::new(SATELLITE);
    let config = config(&home);
    let victims = home.path().join("victims");
    fs::create_dir(&victims).unwrap();
    let names = ["id_ed25519", "bashrc", "profile", "ledger"];
    for name in names {
        fs::write(victims.join(name), "precious").unwrap();
        make_private(&victims.join(name));
    }
    set_mode(&victims, 0o700);
    let dir = plant_data_dir(&home);
    fs::create_dir(dir.join("journal")).unwrap();
    set_mode(&dir.join("journal"), 0o700);
    symlink(&victims, dir.join("catalogues")).unwrap();
    symlink(victims.join("bashrc"), dir.join("lock")).unwrap();
    symlink(victims.join("ledger"), dir.join("ledger")).unwrap();
    symlink(victims.join("profile"), dir.join("journal/seq")).unwrap();

    let ignored = home.run_bare(&["--config", &config]);
    let warning = ignored.process.stderr();
    assert!(warning.contains("`./.satellite` is ignored") && warning.contains("--data-dir ./.satellite"), "{warning}");
    ignored.terminate().exits(0);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4, "files were written into the unknown directory");
    let links = refused(&home, &["run", "--config", &config, "--data-dir", "./.satellite"]).stderr;
    for link in ["catalogues", "lock", "ledger", "journal/seq"] {
        let command = format!("rm '{}'", dir.canonicalize().unwrap().join(link).display());
        assert!(links.contains(&command), "{command}: {links}");
    }
    // A symbolic link to a data directory is refused as well.
    let elsewhere = home.path().join("elsewhere");
    fs::rename(&dir, &elsewhere).unwrap();
    symlink(&elsewhere, &dir).unwrap();
    assert!(home.bare(&["status"]).exits(3).stderr.contains("`./.satellite` is ignored"));

    let mut left: Vec<_> = fs::read_dir(&victims).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["bashrc", "id_ed25519", "ledger", "profile"]);
    assert!(names.iter().all(|name| fs::read_to_string(victims.join(name)).unwrap() == "precious"));
}

#[test]
fn dot_satellite_is_used_only_if_a_satellite_created_it() {
    let mut home = Home::new(SATELLITE);
    home.use_data_dir(".satellite");
    let config = config(&home);
    let running_on = |satellite: Satellite<'_>| {
        let greeting = satellite.wait_start_message();
        satellite.terminate().exits(0);
        let directory = greeting.split("data in ").nth(1).unwrap().lines().next().unwrap();
        Path::new(directory).strip_prefix(home.path().canonicalize().unwrap()).unwrap().to_str().unwrap().to_owned()
    };
    let default = "share/mcp-satellite";
    assert_eq!(running_on(home.run_bare(&["--config", &config])), default);
    assert_eq!(running_on(home.run_bare(&["--config", &config, "--data-dir", ".satellite"])), ".satellite");
    assert_eq!(running_on(home.run_bare(&["--config", &config])), ".satellite");
    assert_eq!(fs::read_to_string(home.data_dir().join(".gitignore")).unwrap(), "*\n");
    // A directory keeps its identity when it is moved.
    fs::rename(home.data_dir(), home.path().join("moved")).unwrap();
    fs::rename(home.path().join("moved"), home.data_dir()).unwrap();
    assert_eq!(running_on(home.run_bare(&["--config", &config])), ".satellite");
    // Without the record in the state directory, the satellite does not know the directory.
    fs::rename(home.path().join("state"), home.path().join("lost")).unwrap();
    assert_eq!(running_on(home.run_bare(&["--config", &config])), default);
    assert_eq!(running_on(home.run_bare(&["--config", &config, "--data-dir", "./.satellite"])), ".satellite");
    assert_eq!(running_on(home.run_bare(&["--config", &config])), default, "a named directory was not created here");
}

#[test]
fn an_explicit_data_directory_can_be_a_symbolic_link() {
    let home = Home::new(SATELLITE);
    let config = config(&home);
    fs::create_dir(home.path().join("volume")).unwrap();
    set_mode(&home.path().join("volume"), 0o700);
    symlink(home.path().join("volume"), home.data_dir()).unwrap();
    let satellite = home.run(&["--config", &config]);
    home.wait_online("notes");
    satellite.terminate().exits(0);
    assert!(home.path().join("volume/journal/journal.db").exists());
}

#[test]
fn files_that_others_can_access_are_refused_with_a_chmod_command() {
    let home = Home::new(SATELLITE);
    let config = config(&home);
    let args = ["run", "--config", &config, "--data-dir", "data"];
    home.run(&["--config", &config]).terminate().exits(0);
    let data_dir = home.data_dir().canonicalize().unwrap();
    for (path, mode, repaired) in [
        ("", 0o755, 0o700),
        ("", 0o777, 0o700),
        ("lock", 0o644, 0o600),
        ("journal", 0o755, 0o700),
        ("journal/journal.db", 0o664, 0o600),
        ("journal/seq", 0o604, 0o600),
    ] {
        let path = if path.is_empty() { data_dir.clone() } else { data_dir.join(path) };
        set_mode(&path, mode);
        let refusal = refused(&home, &args).stderr;
        assert!(refusal.contains(&format!("chmod {repaired:o} '{}'", path.display())), "{refusal}");
        set_mode(&path, repaired);
    }
    // Commands do not connect to a socket in a directory that others can write to.
    set_mode(&data_dir, 0o777);
    assert!(home.satellite(&["status"]).exits(1).stderr.contains("chmod 700"));
    set_mode(&data_dir, 0o700);
    home.run(&["--config", &config]).terminate().exits(0);
}

#[test]
fn a_fifo_or_a_weak_token_as_token_file_is_refused() {
    let home = Home::new(SATELLITE);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"files": {"command": "SATELLITE", "args": ["SIM"]}}}"#);
    let args = ["run", "--mcp-json", mcp_json.to_str().unwrap(), "--data-dir", "data", "--listen", "localhost:0"];
    home.make_data_dir();
    let token = home.data_dir().join("token");
    nix::unistd::mkfifo(&token, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let refusal = refused(&home, &args).stderr;
    assert!(refusal.contains("is not a regular file"), "{refusal}");
    fs::remove_file(&token).unwrap();
    fs::write(&token, "short").unwrap();
    make_private(&token);
    let refusal = refused(&home, &args).stderr;
    assert!(refusal.contains("remove the file") && !refusal.contains("short"), "{refusal}");
}

#[test]
fn a_satellite_stops_when_its_data_directory_is_deleted() {
    let (home, mut next) = (Home::new(SATELLITE), Home::new(SATELLITE));
    next.use_data_dir(home.data_dir().to_str().unwrap());
    let first = home.run(&["--config", &config(&home)]);
    home.wait_online("notes");
    // The satellite may create files while the directory is deleted: try again.
    let deleted = || fs::remove_dir_all(home.data_dir()).is_ok().then_some(());
    wait_for("the directory to be deleted", deleted, String::new);
    let second = next.run(&["--config", &config(&next)]);
    let outcome = first.ended().exits(1);
    assert!(outcome.stderr.contains("was deleted or replaced under the running satellite"), "{outcome:#?}");
    next.wait_online("notes");
    next.satellite(&["call", "notes", "echo"]).exits(0);
    let seqs: Vec<u64> = next.events().iter().map(seq).collect();
    assert!(
        seqs.iter().copied().eq(1..=seqs.len() as u64),
        "the seqs are not consecutive, so both satellites wrote the journal: {seqs:?}"
    );
    second.terminate().exits(0);
}

#[test]
fn the_fallback_port_is_the_same_after_a_restart() {
    let home = Home::new(SATELLITE);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"files": {"command": "SATELLITE", "args": ["SIM"]}}}"#);
    let args = ["--mcp-json", mcp_json.to_str().unwrap()];
    let url = |satellite: Satellite<'_>| {
        let greeted = satellite.process.wait_stdout(|text| text.contains("MCP: "));
        satellite.terminate().exits(0);
        greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
    };
    let taken = wait_for("the default port to be free", || TcpListener::bind("127.0.0.1:7300").ok(), String::new);
    let first = url(home.run(&args));
    assert!(first.starts_with("http://127.0.0.1:") && !first.contains(":7300/"), "{first}");
    assert_eq!(url(home.run(&args)), first);
    drop(taken);
    assert_eq!(url(home.run(&args)), first, "the remembered port was not kept although clients know it");
    let remembered = fs::read_to_string(home.data_dir().join("listen")).unwrap();
    assert_eq!(format!("http://{}/mcp", remembered.trim()), first);
}

#[test]
fn listen_accepts_a_port_and_localhost() {
    let home = Home::new(SATELLITE);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"files": {"command": "SATELLITE", "args": ["SIM"]}}}"#);
    let mcp_json = mcp_json.to_str().unwrap();
    for host in ["localhost", ""] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let satellite = home.run(&["--mcp-json", mcp_json, "--listen", &format!("{host}:{port}")]);
        satellite.process.wait_stdout(|text| text.contains(&format!("MCP: http://127.0.0.1:{port}/mcp")));
        satellite.terminate().exits(0);
    }
    let refusal = home.bare(&["run", "--mcp-json", mcp_json, "--listen", "my-laptop:7300"]).exits(2).stderr;
    assert!(refusal.contains("127.0.0.1:7300"), "{refusal}");
}

#[test]
fn commands_find_the_only_running_satellite_and_list_several() {
    let [mut home, mut one, mut other] = [Home::new(SATELLITE), Home::new(SATELLITE), Home::new(SATELLITE)];
    home.use_data_dir("share/mcp-satellite");
    let state = home.path().join("state").to_str().unwrap().to_owned();
    for beside in [&mut one, &mut other] {
        beside.env.push(("XDG_STATE_HOME".to_owned(), state.clone()));
    }
    home.bare(&["status"]).exits(3);
    let first = one.run(&["--config", &config(&one)]);
    let outcome = home.bare(&["status", "--json"]).exits(0);
    assert_eq!(outcome.json().as_array().unwrap().len(), 1);
    assert!(outcome.stderr.contains("using the one on `"), "{outcome:#?}");
    home.bare(&["events", "--json"]).exits(0);
    let second = other.run(&["--config", &config(&other)]);
    let several = home.bare(&["status"]).exits(3).stderr;
    for running in [&one, &other] {
        let path = running.data_dir().canonicalize().unwrap();
        assert!(several.contains(&format!("`{}`", path.display())) && several.contains("--data-dir"), "{several}");
    }
    // The satellite on the default directory takes precedence.
    let here = home.run_bare(&["--config", &config(&home)]);
    assert!(!home.bare(&["status"]).exits(0).stderr.contains("using the one on"));
    for satellite in [here, first, second] {
        satellite.terminate().exits(0);
    }
}
