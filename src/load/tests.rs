//! Whole runs in paused time.

use std::path::PathBuf;
use std::time::Duration;

use super::chance::Seed;
use super::scenario::{self, Overrides};
use super::seams::Seams;
use super::types::{Findings, Mode, Sample, Setup, Show};
use super::{run, threads};

struct Blind;

impl Show for Blind {
    fn phase(&self, _name: &'static str) {}
    fn online(&self, _online: usize, _of: usize) {}
    fn sample(&self, _sample: &Sample, _injected: u64, _violations: u64) {}
}

/// `mixed`, small: 200 servers in 20 teams for 5 minutes.
pub(super) fn mixed(seed: u64, seams: Seams) -> Findings {
    let overrides = Overrides { instances: Some(200), teams: Some(20), duration: Some(Duration::from_secs(300)) };
    let setup = Setup {
        scenario: scenario::load("mixed").unwrap().with(overrides).unwrap(),
        seed: Seed(seed),
        mode: Mode::Virtual,
        gateway: false,
        program: PathBuf::new(),
        repeat: String::new(),
        trace: std::env::var_os("LOAD_TRACE").map(PathBuf::from),
        seams,
    };
    threads(Mode::Virtual).unwrap().block_on(run(setup, &Blind)).unwrap()
}

#[test]
fn an_honest_runtime_breaks_no_promise() {
    let found = mixed(seed(), Seams::default());
    eprintln!("{}", serde_json::to_string_pretty(&Findings { samples: Vec::new(), ..found.clone() }).unwrap());
    assert_eq!(found.violations, []);
}

fn seed() -> u64 {
    std::env::var("LOAD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7)
}
