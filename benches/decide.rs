//! Cost of rules: a charge to a restart budget, and the transitions of a slot from a crash until it is online again,
//! compared with the look-up of a slot in a map of 10,000 instances.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::collections::HashMap;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use mcp_satellite_actors::model::catalogue::Catalogue;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::{Policy, RestartPolicy};
use mcp_satellite_actors::model::remote::ServerInfo;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::jitter::JitterRng;
use mcp_satellite_actors::rules::restart::ExitHistory;
use mcp_satellite_actors::rules::slot::{Slot, SlotInput};
use serde_json::value::RawValue;

use common::{BenchReport, format_duration, format_number, spec};

/// Uptime of a server before each crash.
const UPTIME: Duration = Duration::from_secs(400);

fn main() {
    let home = tempfile::tempdir().unwrap();
    let mut criterion = Criterion::default().output_directory(home.path()).without_plots();
    look_up(&mut criterion);
    charge(&mut criterion);
    crash(&mut criterion);

    let mut report = BenchReport::new("decide", ["operation", "median", "ratio to look-up"]);
    let baseline = median(home.path(), "look_up");
    for (bench, name) in [
        ("look_up", "look-up of an instance among 10,000 by id"),
        ("charge", "charge of one exit to a restart budget"),
        ("crash", "transitions of a slot from crash to online, 7 inputs"),
    ] {
        let took = median(home.path(), bench);
        report.row([name.to_owned(), format_duration(took), format_number(took.div_duration_f64(baseline))]);
    }
    report.publish();
}

fn median(home: &Path, bench: &str) -> Duration {
    let text = std::fs::read_to_string(home.join(bench).join("new/estimates.json")).unwrap();
    let estimates: serde_json::Value = serde_json::from_str(&text).unwrap();
    Duration::from_secs_f64(estimates["median"]["point_estimate"].as_f64().unwrap() / 1e9)
}

fn look_up(criterion: &mut Criterion) {
    let policy = Arc::new(Policy::default());
    let ids: Vec<InstanceId> =
        (0..10_000).map(|nth| spec(nth, 100, 10, &["simulated".to_owned()], &policy).id).collect();
    let slots: HashMap<InstanceId, usize> = ids.iter().cloned().zip(0..).collect();
    let mut cycle = ids.iter().cycle();
    criterion.bench_function("look_up", |bencher| bencher.iter(|| slots.get(black_box(cycle.next().unwrap()))));
}

/// Measures charges to a budget that is always nearly spent, so that the history has its largest size.
fn charge(criterion: &mut Criterion) {
    let policy = RestartPolicy { max_crashes: 5, ..RestartPolicy::default() };
    let (mut history, mut now) = (ExitHistory::default(), Instant::now());
    criterion.bench_function("charge", |bencher| {
        bencher.iter(|| {
            now += policy.window / 4;
            black_box(history.charge(&policy, now, true, Duration::from_secs(1)))
        });
    });
}

fn server_info() -> ServerInfo {
    let object = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
    ServerInfo {
        era: Era::Sessions,
        name: "server".to_owned(),
        version: "1".to_owned(),
        protocol: "2025-11-25".to_owned(),
        capabilities: object(r#"{"tools":{}}"#),
        instructions: None,
        handshake_result: object("{}"),
    }
}

fn crash(criterion: &mut Criterion) {
    let spec = Arc::new(spec(0, 1, 1, &["simulated".to_owned()], &Arc::new(Policy::default())));
    let (info, catalogue) = (Arc::new(server_info()), Arc::<Catalogue>::default());
    let (mut slot, _) = Slot::new(spec, JitterRng::new(0, ""));
    let (mut now, mut runs) = (Instant::now(), 0);
    let start = |slot: &mut Slot, now: Instant, run: RunNumber| {
        for input in [
            SlotInput::Granted(run),
            SlotInput::Spawned(run, Some(1)),
            SlotInput::FirstByte(run),
            SlotInput::Initialized(run, Arc::clone(&info)),
            SlotInput::Discovered(run, Arc::clone(&catalogue)),
        ] {
            black_box(slot.handle(now, input));
        }
    };
    start(&mut slot, now, RunNumber(runs));
    assert_eq!(slot.status, Status::Online);
    criterion.bench_function("crash", |bencher| {
        bencher.iter(|| {
            now += UPTIME;
            let exit =
                WorkerExit { signal: Some(9), uptime: Some(UPTIME), ..WorkerExit::from_cause(ExitCause::Exited) };
            black_box(slot.handle(now, SlotInput::Ended(RunNumber(runs), exit)));
            black_box(slot.handle(now, SlotInput::Tick(None)));
            runs += 1;
            start(&mut slot, now, RunNumber(runs));
        });
    });
    assert_eq!(slot.status, Status::Online);
}
