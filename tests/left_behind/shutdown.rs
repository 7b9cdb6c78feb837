//! Ending many servers takes about as long as ending one.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::fixture::{Fixture, STUBBORN};
use super::mechanism::{Sandbox, for_each_mechanism_once};

const MANY: usize = 50;
/// The highest ratio of the two durations; fifty graces one after the other would be fifty.
const RATIO_MAX: u32 = 5;

/// Returns the duration of the shutdown of a satellite with this many stubborn servers.
fn shutdown_duration(fixture: &Fixture, servers: usize) -> Duration {
    let texts: String = (0..servers).map(|number| fixture.server(&format!("s{number}"), STUBBORN)).collect();
    let mut running = fixture.run(&fixture.config("stubborn.toml", "1s", &texts));
    assert_eq!(fixture.home.wait_all_online().len(), servers);
    let began = Instant::now();
    running.process.signal(Signal::SIGTERM);
    let outcome = running.ended_cleanly().exits(0);
    let took = began.elapsed();
    let stopped = fixture.home.satellite(&["events", "--json", "--since", "0", "--type", "mcp.server.stopped"]);
    let stopped = stopped.exits(0).json_lines();
    assert_eq!(stopped.len(), servers, "{outcome:#?}");
    for event in stopped {
        assert_eq!((&event["data"]["kind"], &event["data"]["forced"]), (&"shutdown".into(), &true.into()), "{event:#}");
    }
    took
}

#[test]
fn the_shutdown_of_fifty_stubborn_servers_takes_one_grace() {
    for_each_mechanism_once(|mechanism| {
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let one = shutdown_duration(&Fixture::new(mechanism), 1);
        let many = shutdown_duration(&Fixture::new(mechanism), MANY);
        assert!(many < one * RATIO_MAX, "{MANY} took {many:?}, one took {one:?}");
    });
}
