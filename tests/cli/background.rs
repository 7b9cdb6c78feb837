//! The user's satellite in the background: `up`, `down`, `service`, and a bridge that starts a satellite.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use serde_json::json;
use testkit::home::Home;
use testkit::wait::wait_until;

use super::stdio::StdioClient;
use crate::SATELLITE;

const UNIT: &str = "config/systemd/user/mcp-satellite.service";

/// Stops the satellite of a home, also if the test fails.
struct BackgroundHome(Home);

impl Drop for BackgroundHome {
    fn drop(&mut self) {
        let Self(home) = self;
        let _ = home.command(&["down"]).output();
        if !std::thread::panicking() {
            wait_until("all processes to end", || home.processes().is_empty());
        }
    }
}

/// A home without systemd whose user has a configuration.
fn background_home(servers: &str) -> BackgroundHome {
    let mut home = Home::new(SATELLITE);
    home.use_data_dir("share/mcp-satellite");
    fs::create_dir_all(home.path().join("config/mcp-satellite")).unwrap();
    home.write(
        "config/mcp-satellite/satellite.toml",
        &format!(
            "[gateway]\nlisten = \"127.0.0.1:0\"\n[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{{ id = \"u\", slug = \"alice\" }}]\n{servers}"
        ),
    );
    home.env.push(("PATH".to_owned(), fake_systemd(&home, "exit 1")));
    BackgroundHome(home)
}

const NOTES: &str = "[[teams.installations]]\nid = \"notes\"\nserver = \"notes\"\nSIM\n";

/// Writes a `systemctl` that records its arguments and runs `script`. Returns the `PATH` with it.
fn fake_systemd(home: &Home, script: &str) -> String {
    let directory = home.path().join("bin");
    fs::create_dir_all(&directory).unwrap();
    let log = directory.join("log");
    let file = directory.join("systemctl");
    fs::write(&file, format!("#!/bin/sh\necho \"$*\" >> {}\n{script}\n", log.display())).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", directory.display(), std::env::var("PATH").unwrap())
}

fn systemctl_calls(home: &Home) -> String {
    fs::read_to_string(home.path().join("bin/log")).unwrap_or_default()
}

#[test]
fn up_starts_a_detached_satellite_and_down_ends_it() {
    let home = background_home(NOTES);
    let BackgroundHome(home) = &home;
    let started = home.bare(&["up"]).exits(0).stdout;
    assert!(
        started.contains("in the background: 1 servers") && started.contains("MCP: http://127.0.0.1:"),
        "{started}"
    );
    home.wait_online("notes");
    let pid = home.bare(&["status", "--satellite", "--json"]).exits(0).json()["pid"].as_u64().unwrap();
    // The keeper leads a session of its own, so that no signal of the terminal reaches the satellite.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    assert_eq!(fields[1], fields[3], "the parent is not the leader of the session: {stat}");

    let again = home.bare(&["up"]).exits(0).stdout;
    assert!(again.contains("is running already"), "{again}");
    assert_eq!(home.bare(&["status", "--satellite", "--json"]).exits(0).json()["pid"], pid);
    assert!(fs::read_to_string(home.data_dir().join("satellite.log")).unwrap().contains("satellite is running"));
    assert!(home.bare(&["down"]).exits(0).stdout.contains("has ended"));
    home.bare(&["status"]).exits(3);
    home.bare(&["down"]).exits(3);
}

#[test]
fn up_reports_why_the_satellite_does_not_start() {
    let home = background_home("nonsense = 1\n");
    let BackgroundHome(home) = &home;
    let refused = home.bare(&["up"]).exits(1).stderr;
    assert!(refused.contains("did not start") && refused.contains("nonsense"), "{refused}");
    fs::remove_file(home.path().join("config/mcp-satellite/satellite.toml")).unwrap();
    let refused = home.bare(&["up"]).exits(1).stderr;
    assert!(refused.contains("no configuration is named") && !refused.contains("nonsense"), "{refused}");
}

#[test]
fn a_large_log_is_replaced_at_the_next_start() {
    let home = background_home("");
    let BackgroundHome(home) = &home;
    home.bare(&["up"]).exits(0);
    home.bare(&["down"]).exits(0);
    let log = home.data_dir().join("satellite.log");
    fs::OpenOptions::new().write(true).open(&log).unwrap().set_len(11 << 20).unwrap();
    home.bare(&["up"]).exits(0);
    assert!(fs::metadata(&log).unwrap().len() < 1 << 20);
    assert_eq!(fs::metadata(home.data_dir().join("satellite.log.1")).unwrap().len(), 11 << 20);
}

#[test]
fn a_bridge_starts_a_satellite_that_outlives_it() {
    let home = background_home(NOTES);
    let BackgroundHome(home) = &home;
    let mut client = StdioClient::start_bare(home, &["--server", "notes"]);
    let mut other = StdioClient::start_bare(home, &["--server", "notes"]);
    for client in [&mut client, &mut other] {
        client.initialize(&json!({}));
        let answer = client.call(&json!(1), "echo", &json!({"text": "hi"}));
        assert_eq!(answer["result"]["structuredContent"]["text"], "hi", "{answer:#}");
    }
    let (code, stderr) = client.close();
    assert!(code == Some(0) && stderr.contains("starting one in the background"), "{code:?} {stderr}");
    assert_eq!(other.close().0, Some(0));
    home.bare(&["status"]).exits(0);
}

#[test]
fn without_systemd_the_service_is_refused_with_the_alternative() {
    let home = background_home("");
    let BackgroundHome(home) = &home;
    let refused = home.bare(&["service", "install"]).exits(1).stderr;
    assert!(refused.contains("systemctl --user") && refused.contains("`satellite up` works without it"), "{refused}");
    assert!(!home.path().join(UNIT).exists());
    home.bare(&["service", "status"]).exits(3);
    assert!(home.bare(&["service", "uninstall"]).exits(0).stdout.contains("not installed"));
}

#[test]
fn the_service_is_installed_started_and_removed() {
    let mut home = background_home("");
    let path =
        fake_systemd(&home.0, "case \"$2\" in is-enabled) echo enabled;; is-active) echo inactive; exit 3;; esac");
    home.0.env.push(("PATH".to_owned(), path));
    let BackgroundHome(home) = &home;
    let installed = home.bare(&["service", "install"]).exits(0).stdout;
    assert!(installed.contains(UNIT) && installed.contains("loginctl enable-linger"), "{installed}");
    let unit = fs::read_to_string(home.path().join(UNIT)).unwrap();
    let data_dir: PathBuf = home.path().join("share/mcp-satellite");
    let line = format!(
        "ExecStart=\"{}\" run --data-dir \"{}\"\n",
        home.binary.canonicalize().unwrap().display(),
        data_dir.display()
    );
    assert!(unit.contains(&line) && unit.contains("Type=notify\n"), "{unit}");
    let status = home.bare(&["service", "status"]).exits(3).stdout;
    assert!(status.contains("enabled, inactive"), "{status}");
    home.bare(&["service", "install"]).exits(0);
    home.bare(&["service", "uninstall"]).exits(0);
    assert!(!home.path().join(UNIT).exists());
    let calls = systemctl_calls(home);
    for call in
        ["--user daemon-reload", "--user enable mcp-satellite.service", "--user disable --now mcp-satellite.service"]
    {
        assert!(calls.lines().any(|line| line == call), "{call}: {calls}");
    }
    // A unit of the user stays.
    fs::write(home.path().join(UNIT), "[Unit]\n").unwrap();
    for verb in ["install", "uninstall"] {
        assert!(home.bare(&["service", verb]).exits(2).stderr.contains("was not written by"), "{verb}");
    }
    assert_eq!(fs::read_to_string(home.path().join(UNIT)).unwrap(), "[Unit]\n");
}

#[test]
fn up_starts_the_unit_if_it_is_installed() {
    let mut home = background_home("");
    // This service manager runs the command of the unit.
    let script = format!(
        "case \"$2\" in start) cd /; setsid sh -c \"$(sed -n 's/^ExecStart=//p' {}) >{} 2>&1 &\";; is-active) echo active;; esac",
        home.0.path().join(UNIT).display(),
        home.0.path().join("journal.txt").display()
    );
    let path = fake_systemd(&home.0, &script);
    home.0.env.push(("PATH".to_owned(), path));
    let BackgroundHome(home) = &home;
    home.bare(&["service", "install"]).exits(0);
    let started = home.bare(&["up"]).exits(0).stdout;
    assert!(started.contains("as a systemd service of this user: 0 servers"), "{started}");
    assert!(!home.data_dir().join("satellite.log").exists());
    assert!(systemctl_calls(home).contains("--user start mcp-satellite.service"));
}
