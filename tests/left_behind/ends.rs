//! The matrix: every way to end, with every mechanism. Each test covers one way.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{Home, json_lines, pid};
use testkit::process::send;
use testkit::wait::wait_for;

use super::fixture::{Fixture, LONG, SERVERS, SHORT};
use super::mechanism::{Sandbox, for_each_mechanism};
use super::process::{alive, zombies_of};
use crate::SATELLITE;

#[test]
fn a_stop_leaves_no_process() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        std::thread::scope(|scope| {
            for (slug, _) in SERVERS {
                let home = &fixture.home;
                scope.spawn(move || home.satellite(&["stop", slug]).exits(0));
            }
        });
        // `stop` returns after all processes have ended.
        assert!(running.members().is_empty(), "left behind: {:#?}", running.members());
        running.terminate();
    });
}

#[test]
fn a_crash_leaves_no_process_for_the_next_run() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        let old = running.members();
        let killed: Vec<_> = fixture.home.rows().iter().map(pid).collect();
        for pid in &killed {
            send(*pid, Signal::SIGKILL);
        }
        let back = |row: &Value| row["status"] == "online" && row["restarts"] == 1 && !killed.contains(&pid(row));
        let all_back = || Some(fixture.home.rows()).filter(|rows| rows.iter().all(back));
        wait_for("all servers to be online again", all_back, || format!("{:#?}", fixture.home.rows()));
        assert!(alive(&old).is_empty(), "left behind: {:#?}", alive(&old));
        running.terminate();
    });
}

#[test]
fn sigterm_to_the_keeper_ends_all_processes() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        fixture.start(SHORT).terminate();
    });
}

#[test]
fn sigterm_to_the_satellite_ends_all_processes() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        send(running.satellite.pid, Signal::SIGTERM);
        running.ended_cleanly().exits(0);
    });
}

#[test]
fn sigterm_to_the_process_group_counts_as_one_signal() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let mut running = fixture.start(SHORT);
        running.signal_group(Signal::SIGTERM);
        let outcome = running.ended_cleanly().exits(0);
        assert!(outcome.stderr.contains("every server gets its grace"), "{outcome:#?}");
    });
}

#[test]
fn a_second_sigterm_kills_all_processes_at_once() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let mut running = fixture.start(LONG);
        running.process.signal(Signal::SIGTERM);
        running.process.wait_stderr(|log| log.contains("a second signal kills at once"));
        // The keeper has read the first signal. The same signal within 5 ms belongs to the same request.
        std::thread::sleep(Duration::from_millis(5));
        running.process.signal(Signal::SIGTERM);
        let outcome = running.ended_cleanly().exits(1);
        assert!(outcome.stderr.contains("killed by a second signal"), "{outcome:#?}");
    });
}

#[test]
fn killing_the_keeper_ends_all_processes() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let mut running = fixture.start(LONG);
        let (home, members) = (&fixture.home, running.members());
        running.process.signal(Signal::SIGKILL);
        assert_eq!(running.process.finish().signal, Some(9));
        wait_for("all processes to end", || home.traces().is_empty().then_some(()), || format!("{:?}", home.traces()));
        assert!(alive(&members).is_empty());
        fixture.start_without_servers().terminate();
    });
}

#[test]
fn the_keeper_ends_the_processes_of_a_killed_satellite() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(LONG);
        send(running.satellite.pid, Signal::SIGKILL);
        running.ended().exits(137);
        fixture.start_without_servers().terminate();
    });
}

#[test]
fn the_next_start_ends_the_processes_of_a_killed_satellite_and_keeper() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let killed = fixture.start(LONG).kill_both();
        let next = fixture.start_without_servers();
        killed.is_reclaimed();
        let log = json_lines(&next.process.stderr());
        let reclaimed = log.iter().find(|line| line["message"] == "ended the processes that a killed satellite left");
        // A sandbox ends with the keeper, and its processes end with it, usually before this check.
        if mechanism.sandbox == Sandbox::None {
            assert!(killed.left.len() >= SERVERS.len(), "processes are missing: {:#?}", killed.left);
            let reclaimed = reclaimed.unwrap_or_else(|| panic!("{log:#?}"));
            for (slug, _) in SERVERS {
                let instance = format!("{slug}-acme-alice-{slug}");
                assert!(reclaimed["instances"].as_str().unwrap().contains(&instance), "{reclaimed:#}");
            }
        }
        next.terminate();
    });
}

#[test]
fn the_keeper_adopts_orphaned_processes() {
    for_each_mechanism(|mechanism| {
        // In a sandbox its first process adopts the orphans.
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        let members = running.members();
        let servers: Vec<_> = fixture.home.rows().iter().map(pid).collect();
        let sleepers: Vec<_> = members.iter().filter(|member| member.line.starts_with("sleep ")).collect();
        let adopted = sleepers.iter().filter(|sleeper| sleeper.parent == running.keeper()).count();
        let children = sleepers.iter().filter(|sleeper| servers.contains(&sleeper.parent)).count();
        assert_eq!((adopted, children), (2, 1), "{members:#?}");
        running.terminate();
    });
}

#[test]
fn the_keeper_reaps_orphans_that_have_ended() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        for (slug, _) in SERVERS {
            fixture.home.satellite(&["stop", slug]).exits(0);
        }
        let zombies = || zombies_of(running.keeper());
        wait_for("all orphans to be reaped", || zombies().is_empty().then_some(()), || format!("{:?}", zombies()));
        running.terminate();
    });
}

#[test]
fn the_keeper_reports_how_a_server_has_ended() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let server = |slug: &str, script: &str| {
            format!(
                "[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\ncommand = \"/bin/sh\"\n\
                 args = [\"-c\", \"{script}\"]\n"
            )
        };
        // The first process of a PID namespace ignores most signals, but not SIGKILL of its child.
        let servers = server("code", "exit 7") + &server("killed", "sh -c 'kill -9 $$' ; exit $?");
        let leader = server("leader", "kill -9 $$; exit 3");
        let running = fixture.run(&fixture.config("ends.toml", SHORT, &(servers + &leader)));
        let end = |slug: &str| {
            let row = fixture.home.wait_row(slug, "an end", |row| row["last_exit"].is_string());
            row["last_exit"].as_str().unwrap().to_owned()
        };
        assert!(end("code").starts_with("exited with code 7"), "{}", end("code"));
        let killed = end("killed");
        assert!(killed.contains("137") || killed.starts_with("killed by SIGKILL"), "{killed}");
        if mechanism.sandbox == Sandbox::None {
            assert!(end("leader").starts_with("killed by SIGKILL"), "{}", end("leader"));
        }
        running.terminate();
    });
}

#[test]
fn satellite_check_leaves_no_cgroup() {
    let home = Home::new(SATELLITE);
    let config = home.write("satellite.toml", "");
    for _ in 0..5 {
        let output = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0).stdout;
        if let Some((_, rest)) = output.split_once("under `") {
            let cgroup = rest.split('`').next().unwrap();
            assert!(!Path::new(cgroup).exists(), "{output}");
        }
    }
}
