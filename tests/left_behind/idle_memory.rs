//! Memory of an idle satellite.

use std::fs;

use testkit::wait::wait_for;

use super::fixture::Fixture;
use super::mechanism::{Mechanism, Sandbox};

/// Returns the resident part of the program's code, from 0 to 1.
fn resident_code(pid: i32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let is_code = |line: &&str| line.contains(" r-xp ") && line.ends_with(program.to_str().unwrap());
    let mapping: Vec<&str> = text.lines().skip_while(|line| !is_code(line)).take(8).collect();
    let kilobytes = |name| {
        let line = mapping.iter().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap()
    };
    kilobytes("Rss:") / kilobytes("Size:")
}

#[test]
fn an_idle_satellite_and_its_keeper_release_the_code_that_they_do_not_use() {
    let fixture = Fixture::new(Mechanism { sandbox: Sandbox::None, cgroups: false });
    let running = fixture.start_without_servers();
    for (pid, most) in [(running.keeper(), 0.1), (running.satellite.pid, 0.5)] {
        let is_released = || (resident_code(pid) < most).then_some(());
        wait_for("the pages are released", is_released, || format!("resident: {}", resident_code(pid)));
    }
    running.terminate();
}
