//! A satellite on a disk that hangs and on a full disk. Each test mounts its own file system; `fsfreeze` blocks all
//! writers until it is thawed.

use std::fs::{self, File};
use std::io::{Read as _, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, Satellite, pid, seq};
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;

/// An ext4 file system in a file, mounted below a home.
struct Volume {
    mounted: PathBuf,
}

impl Volume {
    /// Mounts a volume and moves the home's data directory there. Returns `None` if mounting is not permitted.
    #[expect(clippy::print_stderr, reason = "whoever runs the tests should know what is not tested")]
    fn mount_below(home: &mut Home) -> Option<Self> {
        let (image, mounted) = (home.path().join("image"), home.path().join("disk"));
        File::create(&image).unwrap().set_len(48 << 20).unwrap();
        fs::create_dir(&mounted).unwrap();
        let made = run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), image.as_ref()])
            .and_then(|()| run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), mounted.as_ref()]));
        if let Err(why) = made {
            let why = format!("SKIPPED: a disk that can be frozen cannot be mounted: {why}");
            assert!(std::env::var_os("MCP_MOUNTS").is_none_or(|needed| needed != "required"), "{why}");
            eprintln!("{why}");
            return None;
        }
        home.use_data_dir("disk/data");
        Some(Self { mounted })
    }

    /// Blocks all writers until the returned guard is dropped.
    fn freeze(&self) -> FreezeGuard<'_> {
        run("fsfreeze", &["-f".as_ref(), self.mounted.as_ref()]).unwrap();
        FreezeGuard(self)
    }

    /// Fills the volume.
    fn fill(&self) {
        let mut file = File::create(self.filler()).unwrap();
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![7; size]).and_then(|()| file.sync_data()).is_ok() {}
        }
    }

    fn free(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.mounted.join("filler")
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Lazy unmount: a failed test may still have files open there.
        let _ = umount2(&self.mounted, MntFlags::MNT_DETACH);
    }
}

/// Thaws the volume when it is dropped.
struct FreezeGuard<'a>(&'a Volume);

impl Drop for FreezeGuard<'_> {
    fn drop(&mut self) {
        let _ = run("fsfreeze", &["-u".as_ref(), self.0.mounted.as_ref()]);
    }
}

fn run(program: &str, args: &[&Path]) -> Result<(), String> {
    let status = Command::new(program).args(args).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if status.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&status.stderr).into_owned()) }
}

/// A configuration on a volume with the servers `files` and `notes`; `notes` requires a value of its user.
fn on_a_volume(home: &mut Home) -> Option<(Volume, String)> {
    let volume = Volume::mount_below(home)?;
    let text = r#"
[policy.restart]
delays = ["1ms"]
[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice" }]
[[teams.installations]]
id = "files"
server = "files"
keep = "always_on"
SIM
[[teams.installations]]
id = "notes"
server = "notes"
keep = "always_on"
user_required = ["KEY"]
SIM
"#;
    let config = home.write("satellite.toml", text).to_str().unwrap().to_owned();
    Some((volume, config))
}

fn started<'a>(home: &'a Home, config: &str) -> (Satellite<'a>, Value) {
    let satellite = home.run(&["--config", config]);
    let row = home.wait_online("files");
    (satellite, row)
}

fn journal(home: &Home) -> Value {
    home.satellite(&["status", "--satellite", "--json"]).exits(0).json()["journal"].clone()
}

fn wait_journal(home: &Home, state: &str) -> Value {
    wait_for(state, || Some(journal(home)).filter(|now| now["state"] == state), || journal(home).to_string())
}

#[test]
fn a_disk_that_hangs_stops_neither_supervision_nor_control() {
    let mut home = Home::new(SATELLITE);
    let Some((volume, config)) = on_a_volume(&mut home) else { return };
    let (satellite, row) = started(&home, &config);
    assert_eq!(row["unrecorded"], false);

    let frozen = volume.freeze();
    send(pid(&row), Signal::SIGKILL);
    let back = |now: &Value| now["status"] == "online" && now["pid"] != row["pid"];
    let now = home.wait_row("files", "online again", back);
    assert_eq!(now["unrecorded"], true, "{now:#}");
    let picture = home.satellite(&["status"]).exits(0).stdout;
    assert!(picture.contains("not in the ledger"), "{picture}");
    for verb in ["stop", "start", "restart", "reconnect"] {
        let stderr = home.satellite(&[verb, "files"]).exits(0).stderr;
        assert!(stderr.contains("not durable") && stderr.contains("the disk does not answer"), "{verb}: {stderr}");
    }
    let stderr = home.satellite(&["configure", "notes", "KEY=value-1"]).exits(0).stderr;
    assert!(stderr.contains("not durable") && stderr.contains("state.db"), "{stderr}");
    home.wait_online("notes");
    wait_journal(&home, "memory");

    drop(frozen);
    let values = || format!("{:?}", home.stored("user_values"));
    wait_for("the value to be stored", || values().contains("value-1").then_some(()), values);
    home.wait_row("files", "recorded in the ledger", |row| row["status"] == "online" && row["unrecorded"] == false);
    wait_journal(&home, "ok");
    let stopped = home.satellite(&["stop", "files"]).exits(0);
    assert_eq!(stopped.stderr, "", "the command is durable again");
    let outcome = satellite.terminate();
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
}

#[test]
fn shutdown_on_a_hanging_disk_reuses_no_event_number() {
    let mut home = Home::new(SATELLITE);
    let Some((volume, config)) = on_a_volume(&mut home) else { return };
    let (mut satellite, row) = started(&home, &config);
    let before = home.events();
    let follower = home.background(&["events", "--json", "--follow"]);
    send(pid(&row), Signal::SIGKILL);
    follower.wait_stdout(|text| text.contains("mcp.server.restarted"));
    let row = home.wait_online("files");

    let frozen = volume.freeze();
    send(pid(&row), Signal::SIGKILL);
    home.wait_row("files", "online again", |now| now["status"] == "online" && now["pid"] != row["pid"]);
    wait_journal(&home, "memory");
    satellite.signal(Signal::SIGTERM);
    let outcome = satellite.ended();
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    assert!(outcome.stderr.contains("events could not be delivered"), "{outcome:#?}");
    drop(frozen);

    let (satellite, _) = started(&home, &config);
    let events = home.events();
    let stored: Vec<(u64, Value)> = events.iter().map(|event| (seq(event), event.clone())).collect();
    assert!(stored.windows(2).all(|pair| pair[0].0 < pair[1].0));
    assert_eq!(events[..before.len()], before[..]);
    let is_dropped = |number: u64| {
        let dropped = events.iter().filter(|event| event["type"] == "events.dropped");
        let mut ranges = dropped.map(|event| (event["data"]["from_seq"].as_u64(), event["data"]["to_seq"].as_u64()));
        ranges.any(|(from, to)| from <= Some(number) && Some(number) <= to)
    };
    // Every event that the follower has received is stored unchanged or covered by an `events.dropped`.
    for line in follower.stdout().lines() {
        let received: Value = serde_json::from_str(line).unwrap();
        let found = stored.iter().find(|(number, _)| *number == seq(&received));
        assert!(
            found.map_or_else(|| is_dropped(seq(&received)), |(_, event)| *event == received),
            "{received:#} {found:#?}"
        );
    }
    let last = stored.last().unwrap().0;
    let missing: Vec<u64> = (1..=last).filter(|number| stored.iter().all(|(seq, _)| seq != number)).collect();
    assert!(
        missing.iter().all(|number| is_dropped(*number)),
        "events are missing without an events.dropped: {missing:?}"
    );
    satellite.terminate();
}

#[test]
fn a_log_file_on_a_hanging_disk_blocks_nothing() {
    let mut home = Home::new(SATELLITE);
    let Some((volume, config)) = on_a_volume(&mut home) else { return };
    let (binary, data_dir, disk) = (home.binary.display(), home.data_dir().display(), volume.mounted.display());
    let line = format!("{binary} run --config {config} --data-dir {data_dir} 2>{disk}/log");
    let mut satellite = home.shell(&line);
    let row = home.wait_online("files");
    let frozen = volume.freeze();
    send(pid(&row), Signal::SIGKILL);
    home.wait_row("files", "online again", |now| now["status"] == "online" && now["pid"] != row["pid"]);
    satellite.signal(Signal::SIGTERM);
    satellite.finish().exits(0);
    drop(frozen);
}

#[test]
fn a_stop_on_a_full_disk_succeeds_with_a_warning() {
    let mut home = Home::new(SATELLITE);
    let Some((volume, config)) = on_a_volume(&mut home) else { return };
    let (satellite, _) = started(&home, &config);
    volume.fill();
    // SQLite first uses up free pages within its files.
    let stderr = wait_for(
        "a command that cannot be stored",
        || {
            home.satellite(&["start", "files"]).exits(0);
            Some(home.satellite(&["stop", "files"]).exits(0).stderr).filter(|stderr| !stderr.is_empty())
        },
        || journal(&home).to_string(),
    );
    assert!(stderr.contains("not durable") && stderr.contains("full"), "{stderr}");
    home.wait_status("files", "offline");
    volume.free();
    wait_journal(&home, "ok");
    satellite.kill();
    let satellite = home.run(&["--config", &config]);
    assert_eq!(home.row("files").unwrap()["want"], "stopped", "the stop was not stored after the disk had room");
    satellite.terminate();
}

#[test]
fn a_satellite_started_on_a_full_disk_uses_it_later() {
    let mut home = Home::new(SATELLITE);
    let Some((volume, config)) = on_a_volume(&mut home) else { return };
    fs::create_dir(home.data_dir()).unwrap();
    fs::set_permissions(home.data_dir(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    volume.fill();
    let (satellite, row) = started(&home, &config);
    assert_eq!(row["unrecorded"], true, "{row:#}");
    let reason = wait_journal(&home, "memory")["reason"].clone();
    assert!(reason.is_string(), "{reason}");
    let listed = home.satellite(&["events", "--json"]);
    assert!(!listed.stdout.contains("mcp.server.started"), "events without a number were listed: {listed:#?}");
    volume.free();
    wait_journal(&home, "ok");
    home.wait_event(0, "mcp.server.started", |_| true);
    home.wait_row("files", "recorded in the ledger", |row| row["unrecorded"] == false);
    satellite.terminate();
    let (satellite, _) = started(&home, &config);
    satellite.terminate();
}

#[test]
fn pages_of_the_api_tell_when_the_newest_events_are_missing() {
    let mut home = Home::new(SATELLITE);
    let Some((volume, config)) = on_a_volume(&mut home) else { return };
    let (address, token) = (format!("127.0.0.1:{}", testkit::port::free_port()), "reader-token-0123456789abcdef");
    home.env.push(("READER".to_owned(), token.to_owned()));
    let console = format!(
        "[console]\nlisten = \"{address}\"\n[[console.tokens]]\nname = \"reader\"\ntoken = \"env:READER\"\nrole = \
         \"viewer\"\ngrants = [\"calls:read\"]\n"
    );
    fs::write(&config, fs::read_to_string(&config).unwrap() + &console).unwrap();
    let (satellite, _) = started(&home, &config);
    let get = |path: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        let head = format!("Host: {address}\r\nConnection: close\r\nAuthorization: Bearer {token}");
        write!(stream, "GET {path} HTTP/1.1\r\n{head}\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let paths = ["/v1/events", "/v1/calls", "/v1/instances/files/logs", "/v1/instances/files/calls"];
    for path in paths {
        assert!(get(path).contains("\"complete\":true"), "{}", get(path));
    }
    volume.fill();
    wait_for(
        "an event that cannot be stored",
        || {
            home.satellite(&["stop", "files"]).exits(0);
            home.satellite(&["start", "files"]).exits(0);
            get("/v1/events").contains("\"complete\":false").then_some(())
        },
        || journal(&home).to_string(),
    );
    for path in paths {
        assert!(get(path).contains("\"complete\":false"), "{}", get(path));
    }
    volume.free();
    wait_journal(&home, "ok");
    for path in paths {
        assert!(get(path).contains("\"complete\":true"), "{}", get(path));
    }
    satellite.terminate();
}
