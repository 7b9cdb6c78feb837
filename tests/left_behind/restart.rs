//! A satellite that crashes or hangs is started again by its keeper. The lock of its data directory and its listening
//! sockets stay open meanwhile.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::seq;
use testkit::port::free_port;
use testkit::process::send;
use testkit::wait::{GIVE_UP, wait_for, wait_until};

use super::fixture::{Fixture, NOT_RESTARTED, RunningSatellite, SERVERS, SHORT, STUBBORN};
use super::mechanism::{Mechanism, Sandbox, for_each_mechanism};
use super::process::alive;

/// Pause between two connections of a client: its unaccepted ones must fit into the backlog.
const CLIENT_PAUSE: Duration = Duration::from_millis(50);

impl Fixture {
    pub(crate) fn plain() -> Self {
        Self::new(Mechanism { sandbox: Sandbox::None, cgroups: false })
    }

    /// Starts a satellite that is started again after a crash, with an endpoint at any port and these settings, and waits
    /// until its servers are online.
    #[track_caller]
    pub(crate) fn start_with(&self, settings: &str, servers: &str) -> RunningSatellite<'_> {
        let config = self.config("restart.toml", SHORT, servers);
        let text = fs::read_to_string(&config).unwrap().replacen(NOT_RESTARTED, settings, 1);
        fs::write(&config, format!("{text}\n[gateway]\nlisten = \"127.0.0.1:0\"\n")).unwrap();
        let running = self.run(&config);
        self.home.wait_all_online();
        running
    }

    #[track_caller]
    fn satellite_status(&self) -> Value {
        self.home.satellite(&["status", "--satellite", "--json"]).exits(0).json()
    }

    #[track_caller]
    fn endpoint(&self) -> SocketAddr {
        let url = self.satellite_status()["endpoint"]["url"].as_str().unwrap().to_owned();
        url.trim_start_matches("http://").trim_end_matches("/mcp").parse().unwrap()
    }
}

/// Requires that each gap in the numbers is reported: events that were not stored before a kill. Returns generation and
/// reason of each recovery.
#[track_caller]
pub(crate) fn recoveries(events: &[Value]) -> Vec<(u64, String)> {
    let numbers: Vec<u64> = events.iter().map(seq).collect();
    let reports = || events.iter().filter(|event| event["type"] == "events.dropped").map(|event| &event["data"]);
    let is_reported = |number: u64| {
        reports().any(|data| (data["from_seq"].as_u64().unwrap()..=data["to_seq"].as_u64().unwrap()).contains(&number))
    };
    let is_stored = |number| numbers.binary_search(&number).is_ok();
    let missing = (1..=numbers.len() as u64).find(|number| !is_stored(*number) && !is_reported(*number));
    assert_eq!(missing, None, "an event is missing: {numbers:?}");
    let recovered = events.iter().filter(|event| event["type"] == "satellite.recovered").map(|event| &event["data"]);
    let recovered = recovered.inspect(|data| assert!(data["down_ms"].as_u64().unwrap() > 0, "{data:#}"));
    recovered.map(|data| (data["generation"].as_u64().unwrap(), data["reason"].as_str().unwrap().to_owned())).collect()
}

#[test]
fn a_killed_satellite_is_started_again_below_the_same_keeper() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let servers: String = SERVERS.iter().map(|(slug, flags)| fixture.server(slug, flags)).collect();
        let mut running = fixture.start_with("", &servers);
        let there = SERVERS.len() * (2 + mechanism.sandbox.processes());
        let members = |running: &RunningSatellite<'_>| {
            let members = || Some(running.members()).filter(|members| members.len() == there);
            wait_for(&format!("{there} processes"), members, || format!("{:#?}", running.members()))
        };
        let (old, before) = (members(&running), fixture.satellite_status());
        assert_eq!((&before["generation"], before.get("last_crash")), (&1.into(), None));
        send(running.satellite.pid, Signal::SIGKILL);
        running.wait_restarted(2);
        assert!(running.process.is_running());
        let after = fixture.satellite_status();
        assert_eq!((&after["generation"], &after["last_crash"]), (&2.into(), &"killed by SIGKILL".into()));
        assert_eq!(after["endpoint"]["url"], before["endpoint"]["url"]);
        assert_eq!(members(&running), old, "the same processes");
        assert_eq!(recoveries(&fixture.home.events()), [(2, "killed by SIGKILL".to_owned())]);
        let text = fixture.home.satellite(&["status", "--satellite"]).exits(0).stdout;
        assert!(text.contains("restarted after a crash: killed by SIGKILL (generation 2, since "), "{text}");
        running.terminate();
    });
}

#[test]
fn no_connection_is_refused_while_the_satellite_restarts() {
    let fixture = Fixture::plain();
    let [console, metrics] = [free_port(), free_port()].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let tables = format!("\n[console]\nlisten = \"{console}\"\n\n[telemetry]\nlisten = \"{metrics}\"\n");
    let mut running = fixture.start_with(&tables, &fixture.server("wrapped", STUBBORN));
    let (endpoint, control) = (fixture.endpoint(), fixture.home.data_dir().join("control.sock"));
    let (is_over, rounds) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                for address in [endpoint, console, metrics] {
                    TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
                }
                UnixStream::connect(&control).unwrap();
                rounds.fetch_add(1, Ordering::AcqRel);
                thread::sleep(CLIENT_PAUSE);
            }
        });
        running.kill_below_stopped_keeper();
        // Sent while no satellite runs, and answered by the next one.
        let mut waiting: Vec<_> = [(endpoint, "/mcp"), (console, "/v1/satellite"), (metrics, "/metrics")]
            .into_iter()
            .map(|(address, path)| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(Some(GIVE_UP)).unwrap();
                write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
                stream
            })
            .collect();
        let before = rounds.load(Ordering::Acquire);
        wait_until("connections without a satellite", || rounds.load(Ordering::Acquire) > before + 1);
        running.process.signal(Signal::SIGCONT);
        running.wait_restarted(2);
        for stream in &mut waiting {
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"HTTP/1.1");
        }
        is_over.store(true, Ordering::Release);
        client.join().unwrap();
    });
    running.terminate();
}

#[test]
fn the_keeper_holds_no_socket_that_the_satellite_does_not_serve() {
    let fixture = Fixture::plain();
    let [first, second] = [free_port(), free_port()].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let mut running = fixture.start_with("", &fixture.server("wrapped", STUBBORN));
    let config = fixture.home.path().join("restart.toml");
    let text = fs::read_to_string(&config).unwrap().replace("terminate_grace = \"300ms\"", "terminate_grace = \"1h\"");
    let mut before = fixture.endpoint();
    let is_refused = |address: SocketAddr| TcpStream::connect(address).is_err();
    for address in [first, second] {
        fs::write(&config, text.replace("127.0.0.1:0", &address.to_string())).unwrap();
        fixture.home.satellite(&["reload"]).exits(0);
        assert_eq!(fixture.endpoint(), address);
        wait_until("the old address is closed", || is_refused(before));
        before = address;
    }
    // The moved socket is the one that is kept.
    send(running.satellite.pid, Signal::SIGKILL);
    TcpStream::connect(second).unwrap();
    running.wait_restarted(2);
    assert_eq!(fixture.endpoint(), second);
    running.process.signal(Signal::SIGTERM);
    running.process.wait_stderr(|log| log.contains("every server gets its grace"));
    wait_until("the endpoint is closed while a server ends", || is_refused(second));
    assert!(running.satellite.is_alive());
    // The second signal does not belong to the same request as the first one.
    thread::sleep(Duration::from_millis(5));
    running.process.signal(Signal::SIGTERM);
    running.ended().exits(1);
}

#[test]
fn the_third_crash_within_five_minutes_ends_everything() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("wrapped", STUBBORN));
    let mut expected = Vec::new();
    for generation in [2, 3] {
        send(running.satellite.pid, Signal::SIGKILL);
        running.wait_restarted(generation);
        expected.push((generation as u64, "killed by SIGKILL".to_owned()));
        // The command also lets the satellite store its last events.
        assert_eq!(recoveries(&fixture.home.events()), expected);
    }
    send(running.satellite.pid, Signal::SIGKILL);
    let outcome = running.ended().exits(137);
    let why =
        "the satellite was killed by SIGKILL; it has crashed 3 times within five minutes and is not started again";
    assert!(outcome.stderr.contains(why), "{outcome:#?}");
    assert_eq!(recoveries(&fixture.home.events()), expected);
    fixture.start_without_servers().terminate();
}

#[test]
fn no_other_satellite_can_use_the_data_directory_while_none_runs() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("wrapped", STUBBORN));
    running.kill_below_stopped_keeper();
    let config = fixture.config("other.toml", SHORT, "");
    let refused = fixture.home.satellite(&["run", "--config", config.to_str().unwrap()]).exits(2);
    assert!(refused.stderr.contains("a satellite is already running"), "{refused:#?}");
    running.process.signal(Signal::SIGCONT);
    running.wait_restarted(2);
    running.terminate();
}

#[test]
fn a_configuration_that_stays_broken_ends_everything_with_its_exit_code() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("wrapped", STUBBORN));
    running.kill_below_stopped_keeper();
    fs::write(fixture.home.path().join("restart.toml"), "[nonsense]\n").unwrap();
    running.process.signal(Signal::SIGCONT);
    let outcome = running.ended().exits(2);
    let why = "the satellite ended at its start with code 2; it has crashed 3 times within five minutes";
    assert!(outcome.stderr.contains(why), "{outcome:#?}");
}

#[test]
fn a_satellite_that_hangs_is_started_again() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("hang_timeout = \"2s\"\n", &fixture.server("wrapped", STUBBORN));
    let old = running.members();
    send(running.satellite.pid, Signal::SIGSTOP);
    running.wait_restarted(2);
    assert_eq!(alive(&old).len(), old.len(), "ended: {old:#?}");
    let reason = "killed by the keeper: its actors did not answer for 2s".to_owned();
    assert_eq!(recoveries(&fixture.home.events()), [(2, reason)]);
    running.terminate();
}

#[test]
fn after_a_request_to_end_no_satellite_follows() {
    let fixture = Fixture::plain();
    let mut running = fixture.start_with("", &fixture.server("wrapped", STUBBORN));
    running.kill_below_stopped_keeper();
    running.process.signal(Signal::SIGTERM);
    running.process.signal(Signal::SIGCONT);
    let outcome = running.ended().exits(137);
    assert_eq!(outcome.stdout.matches("satellite is running").count(), 1, "{outcome:#?}");
    fixture.start_without_servers().terminate();
}

#[test]
fn without_keep_servers_a_crash_ends_everything() {
    let fixture = Fixture::plain();
    let running = fixture.start_with(NOT_RESTARTED, &fixture.server("wrapped", STUBBORN));
    send(running.satellite.pid, Signal::SIGKILL);
    let outcome = running.ended().exits(137);
    assert!(outcome.stderr.contains("the satellite was killed by SIGKILL; the keeper ended "), "{outcome:#?}");
}
