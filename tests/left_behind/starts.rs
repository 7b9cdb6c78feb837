//! Processes that are killed while many servers start.

use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use testkit::home::Running;
use testkit::process::send;
use testkit::wait::wait_for;

use super::fixture::{Fixture, LONG, RunningSatellite, SHORT};
use super::mechanism::for_each_mechanism;
use super::process::zombies_of;

/// Number of servers that start at once.
const MANY: usize = 12;
/// Number of kills in one case, each a step later than the one before.
const KILLS: u32 = 8;
const STEP: Duration = Duration::from_millis(23);

fn many(fixture: &Fixture) -> String {
    (0..MANY).map(|number| fixture.server(&format!("s{number}"), &["--grandchild", "setsid"])).collect()
}

#[track_caller]
fn all_ended(fixture: &Fixture, what: &str) {
    let traces = || fixture.home.traces();
    wait_for(what, || traces().is_empty().then_some(()), || format!("{:?}", traces()));
}

/// Waits until the first process besides keeper, satellite and helper exists.
#[track_caller]
fn first_start(fixture: &Fixture, process: &Running) {
    let is_there = || (!fixture.home.processes().is_empty()).then_some(());
    wait_for("the first server", is_there, || process.stderr());
}

#[test]
fn killing_the_keeper_during_starts_leaves_no_process() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let config = fixture.config("many.toml", LONG, &many(&fixture));
        for kill in 0..KILLS {
            let mut process = fixture.launch(&config);
            first_start(&fixture, &process);
            thread::sleep(STEP * kill);
            process.signal(Signal::SIGKILL);
            assert_eq!(process.finish().signal, Some(9));
            all_ended(&fixture, "all processes to end");
        }
        // No server has lost a part of its restart budget.
        let running = fixture.run(&config);
        assert_eq!(fixture.home.wait_all_online().len(), MANY);
        send(running.satellite.pid, Signal::SIGKILL);
        running.ended().exits(137);
    });
}

#[test]
fn killing_the_satellite_during_starts_leaves_no_process() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let config = fixture.config("many.toml", LONG, &many(&fixture));
        for kill in 0..KILLS {
            let running = fixture.run(&config);
            thread::sleep(STEP * kill);
            send(running.satellite.pid, Signal::SIGKILL);
            running.ended().exits(137);
        }
        fixture.start_without_servers().terminate();
    });
}

#[test]
fn killing_the_helper_during_starts_loses_no_server() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.run(&fixture.config("many.toml", SHORT, &many(&fixture)));
        for _ in 0..KILLS {
            kill_helper_if_there(&running);
            thread::sleep(STEP);
        }
        assert_eq!(fixture.home.wait_all_online().len(), MANY);
        // A child that the lost helper has forked last may be one server too many.
        let there = MANY * (2 + mechanism.sandbox.processes());
        let members = || Some(running.members()).filter(|members| members.len() == there);
        wait_for(&format!("{there} processes"), members, || format!("{:#?}", running.members()));
        let zombies = || zombies_of(running.keeper());
        wait_for("lost children to be reaped", || zombies().is_empty().then_some(()), || format!("{:?}", zombies()));
        running.terminate();
    });
}

/// Between two starts there may be no helper.
fn kill_helper_if_there(running: &RunningSatellite<'_>) {
    if let Some(helper) = running.helper() {
        send(helper.pid, Signal::SIGKILL);
    }
}
