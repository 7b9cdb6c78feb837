//! Servers outlive their satellite: it is killed, and the next one below the same keeper continues their sessions.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use jiff::Timestamp;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::home::{Outcome, pid};
use testkit::installed::installed;
use testkit::process::{send, wait_stopped};
use testkit::wait::wait_until;

use super::fixture::{Fixture, NOT_RESTARTED, RunningSatellite, SERVERS, STUBBORN};
use super::mechanism::for_each_mechanism;
use super::process::{ProcessInfo, alive};
use super::restart::recoveries;

/// More bytes than a pipe holds.
const LARGE: usize = 300_000;

impl Fixture {
    fn row_of(&self, server: &str) -> Value {
        self.home.row(server).unwrap()
    }

    /// Returns the number of calls that a simulated server has received.
    #[track_caller]
    fn received(&self, server: &str) -> u64 {
        let received = self.home.satellite(&["call", server, "received"]).exits(0).json();
        received["structuredContent"]["calls"].as_u64().unwrap()
    }

    #[track_caller]
    fn echo(&self, server: &str) {
        let answer = self.home.satellite(&["call", server, "echo", r#"{"text": "still here"}"#]).exits(0).json();
        assert_eq!(answer["structuredContent"]["text"], "still here");
    }

    /// Returns the events of this kind of a server.
    fn events_of(&self, server: &str, kind: &str) -> Vec<Value> {
        let events = self.home.events().into_iter();
        let of = |event: &Value| event["type"] == kind && event["data"]["server_slug"] == server;
        events.filter(of).map(|event| event["data"].clone()).collect()
    }

    /// Changes the configuration file of `start_with`.
    fn change_config(&self, change: impl FnOnce(String) -> String) {
        let file = self.home.path().join("restart.toml");
        fs::write(&file, change(fs::read_to_string(&file).unwrap())).unwrap();
    }
}

impl RunningSatellite<'_> {
    #[track_caller]
    fn kill_satellite(&mut self, starts: usize) {
        send(self.satellite.pid, Signal::SIGKILL);
        self.wait_restarted(starts);
    }

    /// Kills the satellite, acts while none runs, and waits for the next one.
    #[track_caller]
    fn kill_satellite_and(&mut self, starts: usize, act: impl FnOnce()) {
        self.kill_below_stopped_keeper();
        act();
        self.process.signal(Signal::SIGCONT);
        self.wait_restarted(starts);
    }
}

fn started_at(row: &Value) -> Timestamp {
    row["started_at"].as_str().unwrap_or_else(|| panic!("{row:#}")).parse().unwrap()
}

/// Requires that the server of `before` runs on as if nothing had happened.
#[track_caller]
fn assert_same_server(before: &Value, after: &Value) {
    for field in ["pid", "wrapper_pid", "status", "isolation", "held_by", "identity", "restarts", "exits_in_window"] {
        assert_eq!(before[field], after[field], "{field}: {after:#}");
    }
    // The age is measured anew, by another clock.
    let difference = started_at(after).duration_since(started_at(before)).as_secs_f64().abs();
    assert!(difference < 1.5, "{before:#}\n{after:#}");
}

#[test]
fn servers_of_a_killed_satellite_are_adopted() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let servers: String = SERVERS.iter().map(|(slug, flags)| fixture.server(slug, flags)).collect();
        let mut running = fixture.start_with("", &servers);
        let before = fixture.home.rows();
        let all = |running: &RunningSatellite<'_>| {
            running.members().len() == SERVERS.len() * (2 + mechanism.sandbox.processes())
        };
        wait_until("all processes", || all(&running));
        for generation in [2, 3] {
            let old = running.members();
            running.kill_satellite(generation);
            for before in &before {
                let server = before["server"].as_str().unwrap();
                assert_same_server(before, &fixture.row_of(server));
                fixture.echo(server);
                let adopted = fixture.events_of(server, "mcp.server.adopted");
                assert_eq!(adopted.len(), generation - 1);
                assert_eq!(adopted[generation - 2]["pid"], before["pid"]);
                let received = fixture.home.satellite(&["call", server, "received"]).exits(0).json();
                let received = &received["structuredContent"];
                assert_eq!((&received["calls"], &received["initialized"]), (&(generation - 1).into(), &1.into()));
            }
            assert_eq!(running.members(), old);
            let recovered = fixture.home.events();
            let recovered: Vec<_> = recovered.iter().filter(|event| event["type"] == "satellite.recovered").collect();
            let last = &recovered[generation - 2]["data"];
            assert_eq!((&last["adopted"], &last["ended"]), (&SERVERS.len().into(), &0.into()), "{last:#}");
        }
        for kind in ["mcp.server.restarted", "mcp.server.crashed", "mcp.server.permanently_failed"] {
            assert!(!fixture.home.events().iter().any(|event| event["type"] == kind), "{kind}");
        }
        assert_eq!(recoveries(&fixture.home.events()).len(), 2, "and numbers without a gap");
        running.terminate();
    });
}

#[test]
fn adopted_servers_are_measured_and_recorded() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let mut running = fixture.start_with("", &fixture.server("one", &[]));
        let started = |lines: Vec<Value>| {
            let rows = lines.into_iter().filter(|line| line.get("started").is_some());
            rows.map(|line| line["started"].clone()).collect::<Vec<_>>()
        };
        let before = started(fixture.ledger());
        assert_eq!(before.len(), 1 + usize::from(mechanism.sandbox.processes() > 0), "and the trial of the sandbox");
        let server = before.last().unwrap().clone();
        running.kill_satellite(2);
        fixture.home.wait_row("one", "usage", |row| row["rss_bytes"].as_u64().is_some_and(|bytes| bytes > 100_000));
        assert_eq!(started(fixture.ledger())[0], server);
        assert_eq!(fixture.row_of("one")["unrecorded"], false);
        // The next crash of the server is charged, and its processes are ended, as ever.
        let old = pid(&fixture.row_of("one"));
        send(old, Signal::SIGKILL);
        let row = fixture.home.wait_row("one", "restarted", |row| row["status"] == "online" && row["pid"] != old);
        assert_eq!((&row["restarts"], &row["exits_in_window"]), (&1.into(), &1.into()), "{row:#}");
        running.terminate();
    });
}

#[test]
fn both_processes_killed_after_an_adoption_leave_servers_that_are_reclaimed() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let servers: String = SERVERS.iter().map(|(slug, flags)| fixture.server(slug, flags)).collect();
        let mut running = fixture.start_with("", &servers);
        running.kill_satellite(2);
        let killed = running.kill_both();
        let next = fixture.start_without_servers();
        killed.is_reclaimed();
        next.terminate();
    });
}

#[test]
fn a_killed_keeper_ends_adopted_servers() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let servers: String = SERVERS.iter().map(|(slug, flags)| fixture.server(slug, flags)).collect();
        let mut running = fixture.start_with("", &servers);
        running.kill_satellite(2);
        let (members, satellite) = (running.members(), running.satellite.clone());
        running.process.signal(Signal::SIGKILL);
        let outcome = running.process.finish();
        assert_eq!(outcome.signal, Some(9));
        wait_until("every process to end", || !satellite.is_alive() && alive(&members).is_empty());
    });
}

#[test]
fn the_end_of_its_input_ends_an_adopted_server() {
    let fixture = Fixture::plain();
    let servers = fixture.server("polite", &["--ignore-sigterm"]);
    let mut running = fixture.start_with("", &servers);
    fixture.change_config(|text| text.replace("terminate_grace = \"300ms\"", "terminate_grace = \"1h\""));
    running.kill_satellite(2);
    running.terminate();
}

#[test]
fn calls_in_flight_get_a_fate_and_are_sent_once() {
    let fixture = Fixture::plain();
    let servers: String = (0..4).map(|nth| fixture.server(&format!("s{nth}"), &[])).collect();
    let mut running = fixture.start_with("", &servers);
    let call = |server: usize, args: &str| fixture.home.satellite(&["call", &format!("s{server}"), "sleep", args]);
    let outcomes: Vec<(usize, Outcome)> = thread::scope(|scope| {
        let waiting: Vec<_> =
            (0..16).map(|nth| (nth % 4, scope.spawn(move || call(nth % 4, r#"{"ms": 3600000}"#)))).collect();
        wait_until("all calls are in flight", || {
            fixture.home.rows().iter().map(|row| row["calls_in_flight"].as_u64().unwrap()).sum::<u64>() == 16
        });
        running.kill_satellite(2);
        waiting.into_iter().map(|(server, call)| (server, call.join().unwrap())).collect()
    });
    for (_, outcome) in &outcomes {
        assert_eq!(outcome.code, Some(1), "{outcome:#?}");
        assert!(!outcome.stderr.is_empty(), "{outcome:#?}");
    }
    for nth in 0..4 {
        let server = format!("s{nth}");
        assert_eq!(fixture.received(&server), 4, "each call was received once");
        fixture.echo(&server);
        assert_eq!(fixture.row_of(&server)["restarts"], 0);
    }
    running.terminate();
}

#[test]
fn callers_during_a_crash_get_one_answer_each() {
    let fixture = Fixture::plain();
    let servers: String = (0..4).map(|nth| fixture.server(&format!("s{nth}"), &["--call-delay", "20ms"])).collect();
    let mut running = fixture.start_with("", &servers);
    let is_over = AtomicBool::new(false);
    let callers = &|server: usize| {
        let (mut answered, mut failed) = (0, 0);
        while !is_over.load(Ordering::Acquire) {
            let outcome = fixture.home.satellite(&["call", &format!("s{server}"), "echo"]);
            match outcome.code {
                Some(0) => answered += 1,
                Some(1) => failed += 1,
                _ => panic!("{outcome:#?}"),
            }
        }
        (answered, failed)
    };
    let counts: Vec<(u64, u64)> = thread::scope(|scope| {
        let callers: Vec<_> = (0..4).map(|server| scope.spawn(move || callers(server))).collect();
        wait_until("calls", || fixture.home.rows().iter().all(|row| row["calls"].as_u64().unwrap() > 2));
        running.kill_satellite(2);
        wait_until("calls", || fixture.home.rows().iter().all(|row| row["calls"].as_u64().unwrap() > 2));
        running.kill_satellite(3);
        is_over.store(true, Ordering::Release);
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    for (server, (answered, failed)) in counts.into_iter().enumerate() {
        let received = fixture.received(&format!("s{server}"));
        assert!((answered..=answered + failed).contains(&received), "{answered} {failed} {received}");
        assert!(failed <= 2, "a caller has one call in flight: {failed}");
        assert_eq!(fixture.row_of(&format!("s{server}"))["restarts"], 0);
    }
    assert_eq!(recoveries(&fixture.home.events()).len(), 2);
    running.terminate();
}

#[test]
fn a_request_to_end_while_no_satellite_runs_ends_the_servers() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("wrapped", STUBBORN));
    let satellite = running.satellite.pid;
    send(satellite, Signal::SIGKILL);
    wait_until("the keeper to notice the crash", || !Path::new(&format!("/proc/{satellite}")).exists());
    running.process.signal(Signal::SIGTERM);
    let outcome = running.ended();
    // On a slow machine the next satellite has started before and ends by itself.
    assert!(matches!(outcome.code, Some(137 | 1 | 0)), "{outcome:#?}");
}

#[test]
fn a_half_written_request_is_terminated_and_the_session_continues() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("slow", &[]));
    let before = fixture.row_of("slow");
    let server = pid(&before);
    send(server, Signal::SIGSTOP);
    wait_stopped(server);
    thread::scope(|scope| {
        // One argument of a command line has at most 128 KiB.
        let text = "x".repeat(LARGE / 3);
        let args = json!({"text": text}).to_string();
        let calls: Vec<_> = (0..3)
            .map(|_| {
                let args = args.clone();
                let fixture = &fixture;
                scope.spawn(move || fixture.home.satellite(&["call", "slow", "echo", &args]))
            })
            .collect();
        wait_until("the pipe is full", || fixture.row_of("slow")["calls_in_flight"] == 3 && is_full(server));
        running.kill_satellite_and(2, || send(server, Signal::SIGCONT));
        for call in calls {
            assert_eq!(call.join().unwrap().code, Some(1));
        }
    });
    assert_same_server(&before, &fixture.row_of("slow"));
    fixture.echo("slow");
    assert_eq!(fixture.events_of("slow", "mcp.server.adopted").len(), 1);
    running.terminate();
}

/// Returns true if stdin of a process holds as many bytes as it can.
fn is_full(pid: i32) -> bool {
    let stdin = fs::File::open(format!("/proc/{pid}/fd/0")).unwrap();
    let waiting = rustix::io::ioctl_fionread(&stdin).unwrap();
    waiting >= 60_000
}

#[test]
fn a_server_that_does_not_read_is_restarted_without_charge() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("frozen", &[]));
    let before = fixture.row_of("frozen");
    send(pid(&before), Signal::SIGSTOP);
    running.kill_satellite(2);
    let after = fixture.row_of("frozen");
    assert_ne!(after["pid"], before["pid"]);
    assert_eq!((&after["exits_in_window"], &after["restarts"]), (&0.into(), &1.into()), "{after:#}");
    let restarted = fixture.events_of("frozen", "mcp.server.restarted");
    assert_eq!(restarted[0]["restart_reason"], "adoption");
    fixture.echo("frozen");
    running.terminate();
}

#[test]
fn only_servers_with_the_same_configuration_that_are_to_run_are_adopted() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let slugs = ["kept", "changed", "removed", "stopped", "died"];
        let servers: String = slugs.iter().map(|slug| fixture.server(slug, STUBBORN)).collect();
        let mut running = fixture.start_with("", &servers);
        let info = |slug: &str| ProcessInfo::read(pid(&fixture.row_of(slug))).unwrap();
        let [kept, changed, removed, stopped, died] = slugs.map(info);
        fixture.home.satellite(&["stop", "stopped"]).exits(0);
        running.kill_below_stopped_keeper();
        send(died.pid, Signal::SIGKILL);
        fixture.change_config(|text| {
            let (before, after) = text.split_once("[[teams.installations]]\nid = \"removed\"").unwrap();
            let rest = after.split_once("[[teams.installations]]").unwrap().1;
            let text = format!("{before}[[teams.installations]]{rest}");
            let (before, after) = text.split_once("id = \"changed\"").unwrap();
            format!("{before}id = \"changed\"{}", after.replacen("env = {", "env = { CHANGED = \"yes\",", 1))
        });
        running.process.signal(Signal::SIGCONT);
        running.process.wait_stdout(|text| text.matches("satellite is running").count() == 2);
        for slug in ["kept", "changed", "died"] {
            fixture.home.wait_online(slug);
            fixture.echo(slug);
        }
        assert!(kept.is_alive());
        wait_until("the others to end", || {
            [&changed, &removed, &stopped, &died].iter().all(|server| !server.is_alive())
        });
        assert_eq!(pid(&fixture.row_of("kept")), kept.pid);
        assert_eq!(fixture.row_of("stopped")["want"], "stopped");
        for slug in ["changed", "died"] {
            assert_eq!(fixture.row_of(slug)["exits_in_window"], 0);
            assert!(fixture.events_of(slug, "mcp.server.adopted").is_empty());
        }
        running.terminate();
    });
}

#[test]
fn a_setting_that_ends_servers_in_the_gap_ends_them() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("one", STUBBORN));
    let before = fixture.row_of("one");
    running.kill_satellite_and(2, || {
        fixture.change_config(|text| text.replacen("[satellite]\n", &format!("[satellite]\n{NOT_RESTARTED}"), 1));
    });
    assert_ne!(fixture.row_of("one")["pid"], before["pid"]);
    send(running.satellite.pid, Signal::SIGKILL);
    running.ended().exits(137);
}

#[test]
fn starts_in_progress_are_ended_and_other_servers_kept() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let servers = fixture.server("kept", STUBBORN) + &fixture.server("starting", &["--handshake-delay", "1h"]);
        let config = fixture.config("restart.toml", "300ms", &servers);
        fixture.change_config(|text| text.replacen(NOT_RESTARTED, "", 1));
        let running = fixture.run(&config);
        let kept = fixture.home.wait_online("kept");
        fixture.home.wait_row("starting", "its process", |row| row["pid"].is_number());
        let starting = ProcessInfo::read(pid(&fixture.row_of("starting"))).unwrap();
        send(running.satellite.pid, Signal::SIGKILL);
        running.process.wait_stdout(|text| text.matches("satellite is running").count() == 2);
        wait_until("the start to end", || !starting.is_alive());
        assert_same_server(&kept, &fixture.home.wait_online("kept"));
        running.terminate();
    });
}

#[test]
fn many_servers_are_adopted_together() {
    let fixture = Fixture::plain();
    let servers: String = (0..60).map(|nth| fixture.server(&format!("s{nth}"), &[])).collect();
    let mut running = fixture.start_with("", &servers);
    let pids = |fixture: &Fixture| fixture.home.rows().iter().map(pid).collect::<Vec<_>>();
    let before = pids(&fixture);
    running.kill_satellite(2);
    assert_eq!(pids(&fixture), before);
    running.terminate();
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn real_servers_are_adopted() {
    for_each_mechanism(|mechanism| {
        if mechanism.sandbox.processes() > 0 {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let everything = installed("node", "node_modules/@modelcontextprotocol/server-everything/dist/index.js");
        let time = installed("python3", "venv/bin/mcp-server-time");
        let mut servers = fixture.server("native", &[]);
        for (slug, command, args) in [
            ("everything", "node", vec![everything.as_str()]),
            ("time", time.as_str(), vec!["--local-timezone", "UTC"]),
        ] {
            let mark = fixture.home.mark();
            writeln!(
                servers,
                "[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\ncommand = {command:?}\nargs = {args:?}\n\
                 env = {{ {} = \"{mark}\" }}",
                testkit::home::MARK
            )
            .unwrap();
        }
        let mut running = fixture.start_with("", &servers);
        let before = fixture.home.rows();
        running.kill_satellite(2);
        for before in before {
            assert_same_server(&before, &fixture.row_of(before["server"].as_str().unwrap()));
        }
        let sum = fixture.home.satellite(&["call", "everything", "get-sum", r#"{"a": 2, "b": 40}"#]).exits(0);
        assert!(sum.stdout.contains("The sum of 2 and 40 is 42."), "{sum:#?}");
        let time = fixture.home.satellite(&["call", "time", "get_current_time", r#"{"timezone": "UTC"}"#]).exits(0);
        assert!(time.stdout.contains("UTC"), "{time:#?}");
        fixture.echo("native");
        running.terminate();
    });
}
