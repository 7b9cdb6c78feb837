//! The share of the servers in clients' files that run after `satellite import`. All files of the fixtures of
//! `crates/clients` are imported into one configuration; simulated servers stand in for the programs and addresses that
//! this machine does not have. A server that waits gets its values, as its next step says. The test prints the share
//! and every exception.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use testkit::home::Home;
use testkit::wait::wait_for;

use super::SATELLITE;
use super::import::{CLIENTS, copy};

/// Servers that their clients can start and the satellite cannot: transports and variables that it does not support.
const NOT_SUPPORTED: [&str; 3] = ["claude-code live", "vscode config", "vscode socket"];
/// Entries that define no server: parts of a client, references to definitions elsewhere, invalid entries.
const NO_SERVERS: [&str; 10] = [
    "claude-code broken",
    "codex incomplete",
    "continue anthropic/memory-mcp",
    "goose developer",
    "goose script",
    "goose todo",
    "goose ui",
    "opencode org-default",
    "zed implicit-extension",
    "zed mcp-server-postgres",
];

/// All files below a directory.
fn files(directory: &Path, into: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() { files(&path, into) } else { into.push(path) }
    }
}

/// Imports all files of all clients into one configuration. Returns its path and the rows of the imports.
fn import_all(home: &Home) -> (PathBuf, Vec<Value>) {
    let config = home.path().join("satellite.toml");
    let mut rows = Vec::new();
    for client in CLIENTS {
        let user = home.path().join(client);
        fs::create_dir(&user).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        copy(&root.join("crates/clients/tests/fixtures").join(format!("home-{client}")), &user);
        // The servers of a project's file are imported only if the file is named.
        let mut sources = vec![client.to_owned()];
        let mut of_project = Vec::new();
        if user.join("project").exists() {
            files(&user.join("project"), &mut of_project);
        }
        sources.extend(of_project.iter().map(|path| path.display().to_string()));
        for source in sources {
            let mut command = home.command(&["import", &source, "--yes", "--json", "--config"]);
            command.arg(&config).current_dir(&user).env("HOME", &user).env("XDG_CONFIG_HOME", user.join(".config"));
            let outcome = home.start(command).finish().exits(0).json();
            rows.extend(outcome["servers"].as_array().unwrap().iter().cloned());
        }
    }
    (config, rows)
}

/// Replaces what this machine does not have: the program of each server by `program`, its URL by `url`, which keeps the
/// variables of the URL, and directories of another machine by those of the test.
fn replace_missing(home: &Home, text: &str, program: &Path, url: &str) -> String {
    let own = home.path().display();
    let text = text.replace("/home/ann", &format!("{own}/ann"));
    let replaced = text.lines().map(|line| match line.split_once(" = ") {
        Some(("command", _)) => format!("command = \"{}\"", program.display()),
        Some(("url", value)) => {
            let variables = value.split("${").skip(1).filter_map(|rest| rest.split_once('}'));
            let variables: Vec<_> = variables.map(|(variable, _)| format!("part=${{{variable}}}")).collect();
            let mark = if variables.is_empty() { "" } else { "?" };
            format!("url = \"{url}{mark}{}\"", variables.join("&"))
        }
        // The simulated server speaks the newer transport only.
        Some(("transport", _)) => "transport = \"http\"".to_owned(),
        Some(("cwd", path)) => {
            let path = Path::new(path.trim_matches('"'));
            let path = if path.starts_with(home.path()) { path } else { home.path() };
            fs::create_dir_all(path).unwrap();
            format!("cwd = \"{}\"", path.display())
        }
        _ if line == "[gateway]" => "[gateway]\nlisten = \"127.0.0.1:0\"".to_owned(),
        _ => line.to_owned(),
    });
    replaced.collect::<Vec<_>>().join("\n")
}

/// Waits until each server is online or waits for its user.
fn settled(home: &Home) -> BTreeMap<String, Value> {
    let is_settled = |row: &Value| row["status"] == "online" || row["status"] == "awaiting_user_config";
    let rows = || Some(home.rows()).filter(|rows| !rows.is_empty() && rows.iter().all(is_settled));
    let rows = wait_for("all servers to settle", rows, || {
        format!("{:#?}", home.rows().into_iter().filter(|row| !is_settled(row)).collect::<Vec<_>>())
    });
    rows.into_iter().map(|row| (row["server"].as_str().unwrap().to_owned(), row)).collect()
}

/// Follows the next step of a server that waits, and returns the step.
fn follow_next_step(home: &Home, row: &Value) -> String {
    let step = row["next_step"].as_str().unwrap_or_else(|| panic!("no next step: {row:#}")).to_owned();
    let message = row["status_message"].as_str().unwrap();
    if let Some((_, file)) = message.split_once("cannot read the ") {
        let file = file.split('`').nth(1).unwrap();
        let file = file.strip_prefix("~/").map_or(PathBuf::from(file), |rest| home.path().join("opencode").join(rest));
        assert!(file.starts_with(home.path()), "{message}");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "FROM_FILE=given\n").unwrap();
    }
    let command = step.split('`').nth(1).unwrap_or_else(|| panic!("no command: {step}"));
    let mut words: Vec<String> = command.split(' ').skip(1).map(ToOwned::to_owned).collect();
    if words[0] == "configure" {
        words[2..].iter_mut().for_each(|key| key.push_str("=given"));
        words.push("--no-wait".to_owned());
    }
    home.satellite(&words.iter().map(String::as_str).collect::<Vec<_>>()).exits(0);
    step
}

#[test]
#[expect(clippy::print_stdout, reason = "the share is the result of this test")]
fn every_imported_server_runs_once_its_values_are_given() {
    let home = Home::new(SATELLITE);
    let (config, entries) = import_all(&home);
    let program = home.path().join("stand-in");
    let line = format!("#!/bin/sh\nexec {SATELLITE} sim-server --name {}\n", home.mark());
    fs::write(&program, line).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut remote = Command::new(SATELLITE);
    remote.args(["sim-server", "--http", "127.0.0.1:0"]).stdin(Stdio::null());
    let remote = home.start(remote);
    let listening = remote.wait_stdout(|text| text.contains('\n'));
    let url = listening.trim().strip_prefix("listening on ").unwrap();
    let text = replace_missing(&home, &fs::read_to_string(&config).unwrap(), &program, url);
    fs::write(&config, text).unwrap();

    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let before = settled(&home);
    let mut steps = BTreeMap::<String, Vec<String>>::new();
    // A server may wait for a value and for a file.
    for _ in 0..2 {
        for (server, row) in settled(&home).into_iter().filter(|(_, row)| row["status"] != "online") {
            steps.entry(server).or_default().push(follow_next_step(&home, &row));
        }
    }
    let waits = |row: &Value| steps.contains_key(row["server"].as_str().unwrap());
    let broken = || settled(&home).into_values().filter(|row| row["status"] != "online");
    wait_for(
        "all servers to be online",
        || broken().next().is_none().then_some(()),
        || format!("{:#?}", broken().collect::<Vec<_>>()),
    );
    let after = settled(&home);

    let name = |row: &Value| format!("{} {}", row["client"].as_str().unwrap(), row["name"].as_str().unwrap());
    let (mut at_once, mut with_values, mut disabled) = (0, Vec::new(), Vec::new());
    let (mut not_supported, mut no_servers, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for row in &entries {
        let reason = row["reason"].as_str().unwrap_or_default();
        match row["id"].as_str().map(|id| &before[id]) {
            Some(server) if after[server["server"].as_str().unwrap()]["status"] != "online" => {
                waiting.push(format!("{}: {}", name(row), server["status_message"]));
            }
            Some(server) if waits(server) => {
                with_values.push(format!("{}: {}", name(row), steps[server["server"].as_str().unwrap()].join(", ")));
            }
            Some(_) => at_once += 1,
            None if reason.contains("disabled in the client") => disabled.push(name(row)),
            None if NO_SERVERS.contains(&&*name(row)) => no_servers.push(format!("{}: {reason}", name(row))),
            None => not_supported.push(format!("{}: {reason}", name(row))),
        }
    }
    let running = at_once + with_values.len();
    let imported = running + waiting.len();
    let enabled = imported + not_supported.len();
    let list = |title: &str, lines: &[String]| println!("{title}: {}\n  {}", lines.len(), lines.join("\n  "));
    println!("entries in the files of {} clients: {}", CLIENTS.len(), entries.len());
    println!("servers that run at once: {at_once}");
    list("servers that run after their next step", &with_values);
    list("servers that are disabled in the client and not imported", &disabled);
    list("entries that define no server", &no_servers);
    list("servers that are not supported", &not_supported);
    list("imported servers that do not run", &waiting);
    let share = |title: &str, all: usize| {
        println!("{title} that run: {running} of {all} ({:.1} %)", 100.0 * running as f64 / all as f64);
    };
    share("imported servers", imported);
    share("enabled servers", enabled);

    let names = |lines: &[String]| {
        let mut names: Vec<_> = lines.iter().map(|line| line.split_once(": ").unwrap().0.to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&no_servers), NO_SERVERS);
    assert_eq!(names(&not_supported), NOT_SUPPORTED);
    // A fixture that is not read, or a status that does not mean what it says, would make the share meaningless.
    assert!(at_once >= 40 && with_values.len() >= 12, "{at_once} {with_values:#?}");
    drop(remote);
    satellite.terminate().exits(0);
}
