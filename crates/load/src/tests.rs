//! Complete runs in virtual time. Each test runs on its own thread, whose allocations are counted as the memory of the
//! run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use super::random::RunSeed;
use super::scenario::{self, CallLoad, Scenario, ScenarioOverrides};
use super::setup::RunSetup;
use super::test_hooks::TestHooks;
use super::types::{FaultKind, Invariant, ProgressDisplay, RunFindings, RunSample, ServerEnvironment};
use super::{build_runtime, run, silence_deliberate_panics};

struct CountingAllocator;

thread_local! {
    static HEAP: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// Bytes allocated by this thread and not freed yet.
fn heap() -> u64 {
    HEAP.get()
}

fn update_heap(change: impl FnOnce(u64) -> u64) {
    // A thread that is terminating has no counter any more.
    let _ = HEAP.try_with(|heap| heap.set(change(heap.get())));
}

// SAFETY: all methods delegate to the system allocator; the counter does not access the allocated memory.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        update_heap(|heap| heap.wrapping_add(layout.size() as u64));
        // SAFETY: the caller guarantees the conditions of `GlobalAlloc::alloc`, which are those of the system
        // allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // Memory of this thread may be freed by a thread of another test; saturation keeps the counter valid.
        update_heap(|heap| heap.saturating_sub(layout.size() as u64));
        // SAFETY: `memory` was allocated by the system allocator with the same layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

struct SilentDisplay;

impl ProgressDisplay for SilentDisplay {
    fn show_phase(&self, _name: &'static str) {}
    fn show_online(&self, _online: usize, _of: usize) {}
    fn show_sample(&self, _sample: &RunSample, _injected: u64, _violations: u64) {}
}

// No replaced parts, except that memory is counted per thread.
pub(super) fn default_hooks() -> TestHooks {
    TestHooks { memory: heap, ..TestHooks::default() }
}

// A small `mixed` scenario with few calls: tests are built without optimizations.
fn run_mixed(seed: u64, instances: usize, seconds: u64, change: fn(&mut Scenario), hooks: TestHooks) -> RunFindings {
    silence_deliberate_panics();
    let (instances, teams) = (Some(instances), Some(instances / 10));
    let overrides = ScenarioOverrides { instances, teams, duration: Some(Duration::from_secs(seconds)) };
    let mut scenario = scenario::load("mixed").unwrap().with_overrides(overrides).unwrap();
    if let CallLoad::Open { per_second, .. } = &mut scenario.load {
        *per_second = 20.0;
    }
    change(&mut scenario);
    run_scenario(scenario, seed, hooks)
}

pub(super) fn run_text(text: &str, seed: u64, hooks: TestHooks) -> RunFindings {
    silence_deliberate_panics();
    run_scenario(scenario::parse("test", text).unwrap(), seed, hooks)
}

fn run_scenario(scenario: Scenario, seed: u64, hooks: TestHooks) -> RunFindings {
    let setup = RunSetup {
        scenario,
        seed: RunSeed(seed),
        mode: ServerEnvironment::Virtual,
        gateway: false,
        program: PathBuf::new(),
        repeat: String::new(),
        // For the analysis of a failing test.
        trace: std::env::var_os("LOAD_TRACE").map(PathBuf::from),
        hooks,
    };
    build_runtime(ServerEnvironment::Virtual).unwrap().block_on(run(setup, &SilentDisplay)).unwrap()
}

// Returns the invariants that a run with these parts violates, at most one.
pub(super) fn violated_by(hooks: TestHooks) -> Vec<Invariant> {
    violated_under(|_| (), hooks)
}

pub(super) fn violated_under(change: fn(&mut Scenario), hooks: TestHooks) -> Vec<Invariant> {
    let violations = run_mixed(7, 100, 120, change, hooks).violations;
    let mut broken: Vec<_> = violations.iter().map(|violation| violation.invariant).collect();
    broken.sort_unstable();
    broken.dedup();
    assert!(broken.len() <= 1, "more than one invariant is violated: {violations:#?}");
    broken
}

#[test]
fn a_correct_runtime_violates_no_invariant() {
    let found = run_mixed(seed(), 200, 300, |_| (), default_hooks());
    assert_eq!(found.violations, []);
    assert!(found.calls.answered > 4000, "{:?}", found.calls);
    assert!(found.injected.len() > 20, "{:?}", found.injected);
}

// A failing seed can be tried with `LOAD_SEED`.
fn seed() -> u64 {
    std::env::var("LOAD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7)
}

#[test]
fn the_seed_determines_the_order_of_events_of_each_instance() {
    let order = |seed| run_mixed(seed, 100, 120, |_| (), default_hooks()).order;
    let first = order(3);
    assert_eq!(order(3), first);
    assert_ne!(order(4), first);
}

// A fleet of ten servers of one kind.
fn scenario_of_ten(rest: &str) -> String {
    format!(
        r#"
about = "Ten of a kind."
fleet = {{ instances = 10, teams = 2 }}
servers = [{{ name = "tools" }}]
limits = {{ growth = 100.0 }}
{rest}"#
    )
}

// Each injected fault has a known outcome for each victim.
fn assert_all_accounted(found: &RunFindings) {
    for (kind, outcome) in &found.outcomes {
        let injected = found.injected.get(kind).copied().unwrap_or_default();
        let of_instances = !matches!(kind, FaultKind::TeamPanic);
        assert!(!of_instances || outcome.total() == injected, "{kind:?}: {outcome:?} of {injected}");
    }
}

#[test]
fn permanently_failed_instances_are_restarted_without_waiting_for_others() {
    let found = run_text(
        &scenario_of_ten(
            r#"
seconds = 60
load = { loop = "open", per_second = 5 }
policy = { max_crashes = 1, window = "1h" }
faults = [{ kind = "crash", at = "20 %", share = 1.0 }, { kind = "worker_panic", at = "25 %", share = 1.0 }]"#,
        ),
        1,
        default_hooks(),
    );
    assert_eq!(found.violations, []);
    assert_eq!(found.manual_restarts, 10);
    assert_eq!(found.outcomes[&FaultKind::Crash].failed_permanently, 10);
    assert_eq!(
        found.impossible[&FaultKind::WorkerPanic],
        10,
        "worker panics must be impossible without workers: {:?}",
        found.injected
    );
    assert_all_accounted(&found);
}

#[test]
fn hanging_instances_without_calls_are_probed_at_the_end() {
    let found = run_text(
        &scenario_of_ten(
            r#"
seconds = 200
load = { loop = "open", per_second = 0.001 }
policy = { silence = "5s", ping_timeout = "2s", request_timeout = "10s" }
faults = [{ kind = "hang", at = "99 %", share = 1.0 }]"#,
        ),
        1,
        default_hooks(),
    );
    assert_eq!(found.violations, []);
    assert_eq!(found.outcomes[&FaultKind::Hang].recovered, 10, "{:?}", found.outcomes);
    assert!(found.seconds >= 200.0, "{}", found.seconds);
    assert_all_accounted(&found);
}

#[test]
fn recovery_of_a_repeatedly_failing_team_allows_its_restart_delays() {
    let found = run_text(
        &scenario_of_ten(
            r#"
seconds = 100
load = { loop = "open", per_second = 5 }
policy = { delays = ["100ms"] }
faults = [
    { kind = "team_panic", at = "20 %", teams = 1.0 },
    { kind = "team_panic", at = "40 %", teams = 1.0 },
    { kind = "team_panic", at = "60 %", teams = 1.0 },
]"#,
        ),
        1,
        default_hooks(),
    );
    assert_eq!(found.violations, []);
    let longest = found.recoveries[&FaultKind::TeamPanic].quantile(1.0);
    assert!(longest > Duration::from_secs(2), "the restart delay of a team was not used: {longest:?}");
}

#[test]
fn failed_instances_are_restarted_even_if_their_events_are_dropped() {
    let found = run_text(
        &scenario_of_ten(
            r#"
seconds = 60
load = { loop = "open", per_second = 50 }
policy = { max_crashes = 1, window = "1h" }
events = { queue_max = 20 }
faults = [
    { kind = "sink_fails", at = "20 %", lasts = "20s" },
    { kind = "crash", at = "30 %", share = 1.0 },
]"#,
        ),
        1,
        default_hooks(),
    );
    assert_eq!(found.violations, []);
    assert!(found.events.dropped > 0 && found.permanently_failed < 10, "{:?}", found.events);
    assert_eq!(found.manual_restarts, 10);
}

#[test]
fn a_fault_longer_than_the_load_ends_with_it() {
    let found = run_text(
        &scenario_of_ten(
            r#"
seconds = 20
load = { loop = "open", per_second = 5 }
faults = [{ kind = "crash_loop", at = "50 %", share = 0.5, lasts = "1h" }]"#,
        ),
        1,
        default_hooks(),
    );
    assert_eq!(found.violations, []);
    assert!(found.seconds < 200.0, "{}", found.seconds);
}

#[test]
fn every_fault_of_a_mixed_run_has_an_outcome() {
    let found = run_mixed(7, 300, 60, |_| (), default_hooks());
    assert_eq!(found.violations, []);
    assert_all_accounted(&found);
    let cut = found.outcomes[&FaultKind::StreamCut];
    assert!(cut.recovered + cut.unharmed > 0, "{cut:?}");
}

#[test]
fn a_flapping_fleet_violates_no_invariant() {
    for seed in 1..=2 {
        let scenario = scenario::load("flap").unwrap();
        let overrides = ScenarioOverrides { instances: Some(200), teams: Some(10), duration: None };
        silence_deliberate_panics();
        let mut scenario = scenario.with_overrides(overrides).unwrap();
        if let CallLoad::Closed { callers, .. } = &mut scenario.load {
            *callers = 4;
        }
        let found = run_scenario(scenario, seed, default_hooks());
        assert_eq!(found.violations, [], "seed {seed}");
        assert_all_accounted(&found);
    }
}
