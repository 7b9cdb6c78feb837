//! A server that says more than anybody wants to know. What it costs the others is measured by `.ci/drive.py flood`.

use std::fs;

use super::mechanism::{Sandbox, everywhere_once};
use super::scene::{SHORT, Scene};
use super::support::pid;

/// What is flooded before the test is content.
const FLOOD_BYTES: u64 = 100 << 20;
const GROWTH_MAX: u64 = 64 << 20;

/// From `/proc/PID/FILE`, in the unit that it has there.
#[track_caller]
fn number(pid: i32, file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_flood_on_stderr_hinders_no_other_server_and_is_not_kept() {
    everywhere_once(|mechanism| {
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let scene = Scene::new(mechanism);
        let servers =
            scene.server("flooding", &["--stderr-bytes-per-second", "100000000"]) + &scene.server("quiet", &[]);
        let playing = scene.run(&scene.config("flood.toml", SHORT, &servers));
        let rows = scene.home.wait_all_online();
        let rss = || number(playing.satellite.pid, "status", "VmRSS:") << 10;
        let flooding = pid(rows.iter().find(|row| row["server"] == "flooding").unwrap());
        let before = rss();
        let mut most = before;
        while number(flooding, "io", "wchar:") < FLOOD_BYTES {
            scene.home.satellite(&["call", "quiet", "echo"]).exits(0);
            most = most.max(rss());
        }
        scene.home.satellite(&["call", "flooding", "echo"]).exits(0);
        assert!(most < before + GROWTH_MAX, "it has grown from {before} to {most} bytes");
        playing.terminate();
    });
}
