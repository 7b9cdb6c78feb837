//! Tests with deliberately broken runtimes, one for each invariant. Each defect must be found by the check of its own
//! invariant and by no other.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, pending, ready};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{
    Connectors, EventSink, OpenError, ProcessConnector, ProcessEnd, ProcessLink, ServerProcess, SinkAnswer, SinkBatch,
};

use super::drive::LoadCaller;
use super::scenario::{FaultTiming, RunMoment, Scenario};
use super::test_hooks::TestHooks;
use super::tests::{default_hooks, run_text, violated_by, violated_under};
use super::types::{CallOutcome, FaultKind, InstanceNo, Invariant, PlannedCall};
use mcp_satellite_sim::{SimConnector, SimScript};

// One in this many instances gets the broken connector.
const ONE_IN: u32 = 20;

fn is_broken(spec: &InstanceSpec) -> bool {
    InstanceNo::from_installation_id(spec.id.installation.as_str()).is_some_and(|nth| nth.0 % ONE_IN == 7)
}

// Caller that answers every fiftieth call with the response to another call.
struct MixedUpCaller {
    caller: Arc<dyn LoadCaller>,
    calls: AtomicU64,
    kept_text: Mutex<Option<String>>,
    // True: the wrong response is always the first one. False: it is the previous one.
    always_first: bool,
}

impl MixedUpCaller {
    fn wrap(caller: Arc<dyn LoadCaller>, first: bool) -> Arc<dyn LoadCaller> {
        Arc::new(Self { caller, calls: AtomicU64::new(0), kept_text: Mutex::default(), always_first: first })
    }
}

impl LoadCaller for MixedUpCaller {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, CallOutcome> {
        async move {
            let answered = self.caller.call(call).await;
            let CallOutcome::Text(text) = answered else { return answered };
            let mut first_text = self.kept_text.lock().unwrap();
            let other = first_text.clone();
            if !self.always_first || first_text.is_none() {
                *first_text = Some(text.clone());
            }
            let is_wrong = self.calls.fetch_add(1, Ordering::Relaxed) % 50 == 49;
            CallOutcome::Text(other.filter(|_| is_wrong).unwrap_or(text))
        }
        .boxed()
    }
}

#[test]
fn a_response_to_another_caller_is_detected() {
    let hooks = TestHooks { caller: |caller| MixedUpCaller::wrap(caller, false), ..default_hooks() };
    assert_eq!(violated_by(hooks), [Invariant::OwnAnswer]);
}

#[test]
fn a_repeated_response_in_place_of_another_is_detected() {
    let hooks = TestHooks { caller: |caller| MixedUpCaller::wrap(caller, true), ..default_hooks() };
    assert_eq!(violated_by(hooks), [Invariant::OwnAnswer]);
}

// Sink that removes one event, or overwrites its status.
struct LossySink {
    sink: Arc<dyn EventSink>,
    lost_seq: Mutex<Option<u64>>,
    is_target: fn(&Envelope) -> bool,
    hides_gap: bool,
}

impl LossySink {
    fn wrap(sink: Arc<dyn EventSink>, is_it: fn(&Envelope) -> bool, hides: bool) -> Arc<dyn EventSink> {
        Arc::new(Self { sink, lost_seq: Mutex::default(), is_target: is_it, hides_gap: hides })
    }
}

impl EventSink for LossySink {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        // The inner sink may panic on purpose; do not hold the lock then.
        let mut lost = *self.lost_seq.lock().unwrap();
        let mut events = batch.events.clone();
        if lost.is_none() {
            lost = events.iter().find(|envelope| (self.is_target)(envelope)).map(|envelope| envelope.seq);
            *self.lost_seq.lock().unwrap() = lost;
        }
        if let Some(lost) = lost {
            if self.hides_gap {
                // Repeat the previous status: no event number is missing.
                for envelope in events.iter_mut().filter(|envelope| envelope.seq == lost) {
                    if let Event::StatusChanged { status, .. } = &mut envelope.event {
                        *status = Status::Connecting;
                    }
                }
            } else {
                events.retain(|envelope| envelope.seq != lost);
            }
        }
        self.sink.send(Arc::new(SinkBatch { id: batch.id, events }))
    }

    fn is_prompt(&self) -> bool {
        self.sink.is_prompt()
    }
}

// Caller that never completes one call.
struct HangingCaller {
    caller: Arc<dyn LoadCaller>,
    calls: AtomicU64,
}

impl LoadCaller for HangingCaller {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, CallOutcome> {
        if self.calls.fetch_add(1, Ordering::Relaxed) == 50 {
            return pending().boxed();
        }
        self.caller.call(call)
    }
}

#[test]
fn a_missing_response_in_a_closed_loop_is_detected() {
    let text = r#"
about = "Callers that wait for their answers."
seconds = 20
fleet = { instances = 10, teams = 2 }
servers = [{ name = "tools" }]
load = { loop = "closed", callers = 4, think = "100ms" }
limits = { growth = 100.0 }"#;
    let hanging_caller = |caller| Arc::new(HangingCaller { caller, calls: AtomicU64::new(0) }) as _;
    let found = run_text(text, 1, TestHooks { caller: hanging_caller, ..default_hooks() });
    let broken: Vec<_> = found.violations.iter().map(|violation| violation.invariant).collect();
    assert_eq!(broken, [Invariant::OwnAnswer], "{:?}", found.violations);
    assert!(found.calls.answered > 50, "the other calls are answered: {}", found.calls.answered);
}

#[test]
fn giving_up_a_server_too_early_is_detected() {
    let hooks = TestHooks {
        spec: |mut spec| {
            Arc::make_mut(&mut spec.policy).restart.max_crashes = 1;
            spec
        },
        ..default_hooks()
    };
    let crashes = |scenario: &mut Scenario| scenario.faults.retain(|rule| rule.kind == FaultKind::Crash);
    assert_eq!(violated_under(crashes, hooks), [Invariant::RestartBudget]);
}

#[test]
fn a_missing_event_is_detected() {
    let hooks = TestHooks {
        sink: |sink| LossySink::wrap(sink, |it| it.seq >= 500 && matches!(it.event, Event::ToolExecuted { .. }), false),
        ..default_hooks()
    };
    assert_eq!(violated_by(hooks), [Invariant::NoGap]);
}

#[test]
fn a_skipped_status_is_detected() {
    let hooks = TestHooks {
        sink: |sink| {
            let is_it =
                |it: &Envelope| matches!(it.event, Event::StatusChanged { status: Status::DiscoveringTools, .. });
            LossySink::wrap(sink, is_it, true)
        },
        ..default_hooks()
    };
    assert_eq!(violated_by(hooks), [Invariant::LegalTransitions]);
}

#[test]
fn a_restart_beyond_the_budget_is_detected() {
    let hooks = TestHooks {
        spec: |mut spec| {
            let restart = &mut Arc::make_mut(&mut spec.policy).restart;
            restart.max_crashes += 50;
            restart.delays = vec![Duration::from_millis(100)];
            spec
        },
        ..default_hooks()
    };
    let loops = |scenario: &mut Scenario| {
        scenario.faults.retain(|rule| rule.kind == FaultKind::CrashLoop);
        scenario.faults.iter_mut().for_each(|rule| rule.timing = FaultTiming::At(RunMoment::Share(0.3)));
    };
    assert_eq!(violated_under(loops, hooks), [Invariant::RestartBudget]);
}

// Connector that breaks the starts of some instances.
struct TamperedConnector {
    connectors: Connectors,
    other: SimConnector,
    defect: ConnectorDefect,
    // Set once a defect that occurs only once has occurred.
    done: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum ConnectorDefect {
    // The server answers everything but calls.
    UnansweredCalls,
    // The process is reported as ended after a signal, but still runs.
    SurvivingProcess,
    // The instance has two servers, one of which is forgotten.
    SecondServer,
    // Each start of any instance leaks memory.
    MemoryLeak,
}

impl TamperedConnector {
    fn wrap(connectors: Connectors, how: ConnectorDefect) -> Connectors {
        let hanging = SimScript { hang_calls: true, ..SimScript::default() };
        connectors.clone().with_process(Self {
            connectors,
            other: SimConnector::new(hanging),
            defect: how,
            done: AtomicBool::new(false),
        })
    }
}

impl ProcessConnector for TamperedConnector {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        if self.defect == ConnectorDefect::MemoryLeak {
            vec![1_u8; 256 * 1024].leak();
        } else if is_broken(&spec) {
            let first = self.connectors.open(Arc::clone(&spec), run);
            return match self.defect {
                ConnectorDefect::UnansweredCalls => self.other.open(spec, run),
                ConnectorDefect::SurvivingProcess => async move { first.await.map(make_unkillable) }.boxed(),
                ConnectorDefect::SecondServer if self.done.swap(true, Ordering::Relaxed) => first,
                ConnectorDefect::SecondServer => {
                    let second = self.connectors.open(spec, run);
                    async move {
                        mem::forget(first.await?);
                        second.await
                    }
                    .boxed()
                }
                ConnectorDefect::MemoryLeak => first,
            };
        }
        self.connectors.open(spec, run)
    }
}

// The process of the returned link never receives a signal.
fn make_unkillable(link: ProcessLink) -> ProcessLink {
    let ProcessLink { reader, writer, stderr, process, guard } = link;
    mem::forget(guard);
    let writer = Box::new(Box::leak(writer));
    ProcessLink {
        reader,
        writer,
        stderr,
        process: Box::new(UnkillableProcess { process, signalled: false }),
        guard: Box::new(()),
    }
}

struct UnkillableProcess {
    process: Box<dyn ServerProcess>,
    signalled: bool,
}

impl ServerProcess for UnkillableProcess {
    fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        if self.signalled { ready(ProcessEnd { code: Some(0), signal: None }).boxed() } else { self.process.wait() }
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        if self.signalled { ready(()).boxed() } else { self.process.wait_all() }
    }

    fn terminate(&mut self) {
        self.signalled = true;
    }

    fn kill(&mut self) {
        self.signalled = true;
    }
}

#[test]
fn an_online_server_that_answers_no_calls_is_detected() {
    let hooks = TestHooks {
        connectors: |connectors| TamperedConnector::wrap(connectors, ConnectorDefect::UnansweredCalls),
        ..default_hooks()
    };
    assert_eq!(violated_by(hooks), [Invariant::OnlineIsCallable]);
}

#[test]
fn a_leftover_process_is_detected() {
    let hooks = TestHooks {
        connectors: |connectors| TamperedConnector::wrap(connectors, ConnectorDefect::SurvivingProcess),
        ..default_hooks()
    };
    assert_eq!(violated_by(hooks), [Invariant::NothingLeft]);
}

#[test]
fn a_second_server_of_an_instance_is_detected() {
    let hooks = TestHooks {
        connectors: |connectors| TamperedConnector::wrap(connectors, ConnectorDefect::SecondServer),
        ..default_hooks()
    };
    assert_eq!(violated_by(hooks), [Invariant::NothingLeft]);
}

#[test]
fn a_memory_leak_at_each_start_is_detected() {
    let hooks = TestHooks {
        connectors: |connectors| TamperedConnector::wrap(connectors, ConnectorDefect::MemoryLeak),
        ..default_hooks()
    };
    assert_eq!(violated_by(hooks), [Invariant::MemoryBack]);
}
