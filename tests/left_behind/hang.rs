//! A satellite that does not answer is ended with everything below it.

use std::fs;

use nix::sys::signal::Signal;
use testkit::process::send;

use super::fixture::{Fixture, LONG, RunningSatellite, SERVERS, STUBBORN};
use super::mechanism::for_each_mechanism;

impl Fixture {
    /// Starts a satellite with a hang timeout of two seconds and waits until its servers are online.
    #[track_caller]
    fn start_with_hang_timeout(&self, grace: &str, servers: &str) -> RunningSatellite<'_> {
        let config = self.config("hang.toml", grace, servers);
        let text = fs::read_to_string(&config).unwrap();
        fs::write(&config, text.replacen("[satellite]\n", "[satellite]\nhang_timeout = \"2s\"\n", 1)).unwrap();
        let running = self.run(&config);
        self.home.wait_all_online();
        running
    }
}

#[test]
fn a_stopped_satellite_and_all_processes_are_killed_after_the_hang_timeout() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let servers: String = SERVERS.iter().map(|(slug, flags)| fixture.server(slug, flags)).collect();
        let running = fixture.start_with_hang_timeout(LONG, &servers);
        send(running.satellite.pid, Signal::SIGSTOP);
        let outcome = running.ended().exits(137);
        let why = "the actors of the satellite did not answer for 2s, so the keeper killed it";
        assert!(outcome.stderr.contains(why), "{outcome:#?}");
        fixture.start_without_servers().terminate();
    });
}

/// The satellite ends its servers for longer than the hang timeout: it answers no more, but does not hang.
#[test]
fn a_long_shutdown_is_not_a_hang() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start_with_hang_timeout("4s", &fixture.server("wrapped", STUBBORN));
        running.terminate();
    });
}
