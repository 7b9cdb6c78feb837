//! A server that floods its stderr. `.ci/drive.py flood` measures the delay of the other servers.

use std::fs;

use testkit::home::pid;

use super::fixture::{Fixture, SHORT};
use super::mechanism::{Sandbox, for_each_mechanism_once};

/// The number of bytes that the server writes during the test.
const FLOOD_BYTES: u64 = 100 << 20;
const GROWTH_MAX: u64 = 64 << 20;

/// Returns a number from `/proc/PID/FILE`, in the unit of that file.
#[track_caller]
fn number(pid: i32, file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_flood_on_stderr_blocks_no_other_server_and_is_not_buffered() {
    for_each_mechanism_once(|mechanism| {
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let servers =
            fixture.server("flooding", &["--stderr-bytes-per-second", "100000000"]) + &fixture.server("quiet", &[]);
        let running = fixture.run(&fixture.config("flood.toml", SHORT, &servers));
        let rows = fixture.home.wait_all_online();
        let rss = || number(running.satellite.pid, "status", "VmRSS:") << 10;
        let flooding = pid(rows.iter().find(|row| row["server"] == "flooding").unwrap());
        let before = rss();
        let mut most = before;
        while number(flooding, "io", "wchar:") < FLOOD_BYTES {
            fixture.home.satellite(&["call", "quiet", "echo"]).exits(0);
            most = most.max(rss());
        }
        fixture.home.satellite(&["call", "flooding", "echo"]).exits(0);
        assert!(most < before + GROWTH_MAX, "the satellite has grown from {before} to {most} bytes");
        running.terminate();
    });
}
