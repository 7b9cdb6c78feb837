//! Ending many takes no longer than ending one.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::mechanism::{Sandbox, everywhere_once};
use super::scene::{STUBBORN, Scene};

const MANY: usize = 50;
/// As ratios go: fifty graces in a row would be fifty.
const RATIO_MAX: u32 = 5;

/// How long the end of a satellite with this many stubborn servers takes.
fn ending(scene: &Scene, servers: usize) -> Duration {
    let texts: String = (0..servers).map(|number| scene.server(&format!("s{number}"), STUBBORN)).collect();
    let mut playing = scene.run(&scene.config("stubborn.toml", "1s", &texts));
    assert_eq!(scene.home.wait_all_online().len(), servers);
    let began = Instant::now();
    playing.process.signal(Signal::SIGTERM);
    let outcome = playing.ended_cleanly().exits(0);
    let took = began.elapsed();
    let stopped = scene.home.satellite(&["events", "--json", "--since", "0", "--type", "mcp.server.stopped"]);
    let stopped = stopped.exits(0).json_lines();
    assert_eq!(stopped.len(), servers, "{outcome:#?}");
    for event in stopped {
        assert_eq!((&event["data"]["kind"], &event["data"]["forced"]), (&"shutdown".into(), &true.into()), "{event:#}");
    }
    took
}

#[test]
fn fifty_stubborn_servers_take_one_grace_and_not_fifty() {
    everywhere_once(|mechanism| {
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let one = ending(&Scene::new(mechanism), 1);
        let many = ending(&Scene::new(mechanism), MANY);
        assert!(many < one * RATIO_MAX, "{MANY} took {many:?}, one took {one:?}");
    });
}
