//! Tests with deliberately broken runtimes, one for each invariant. Each defect must be found by the check of its own
//! invariant and by no other.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, pending, ready};
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::{Answer, Batch, Connector, EventSink, Line, Link, OpenError, Process, ProcessEnd};

use super::drive::Caller;
use super::scenario::{Moment, Scenario, When};
use super::seams::Seams;
use super::tests::{broken_by, broken_under, honest, told};
use super::types::{Answered, FaultKind, Invariant, Nth, PlannedCall};
use crate::connect::sim::{Script, SimConnector};

// One in this many instances gets the broken connector.
const ONE_IN: u32 = 20;

fn is_broken(spec: &InstanceSpec) -> bool {
    Nth::of(spec.id.installation.as_str()).is_some_and(|nth| nth.0 % ONE_IN == 7)
}

// Caller that answers every fiftieth call with the response to another call.
struct Confused {
    caller: Arc<dyn Caller>,
    calls: AtomicU64,
    said: Mutex<Option<String>>,
    // True: the wrong response is always the first one. False: it is the previous one.
    first: bool,
}

impl Confused {
    fn around(caller: Arc<dyn Caller>, first: bool) -> Arc<dyn Caller> {
        Arc::new(Self { caller, calls: AtomicU64::new(0), said: Mutex::default(), first })
    }
}

impl Caller for Confused {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, Answered> {
        async move {
            let answered = self.caller.call(call).await;
            let Answered::Text(text) = answered else { return answered };
            let mut said = self.said.lock().unwrap();
            let other = said.clone();
            if !self.first || said.is_none() {
                *said = Some(text.clone());
            }
            let is_wrong = self.calls.fetch_add(1, Ordering::Relaxed) % 50 == 49;
            Answered::Text(other.filter(|_| is_wrong).unwrap_or(text))
        }
        .boxed()
    }
}

#[test]
fn an_answer_to_another_caller_is_caught() {
    let seams = Seams { caller: |caller| Confused::around(caller, false), ..honest() };
    assert_eq!(broken_by(seams), [Invariant::OwnAnswer]);
}

#[test]
fn an_answer_that_is_given_twice_and_another_never_is_caught() {
    let seams = Seams { caller: |caller| Confused::around(caller, true), ..honest() };
    assert_eq!(broken_by(seams), [Invariant::OwnAnswer]);
}

// Sink that removes one event, or overwrites its status.
struct Lossy {
    sink: Arc<dyn EventSink>,
    gone: Mutex<Option<u64>>,
    is_it: fn(&Envelope) -> bool,
    hides: bool,
}

impl Lossy {
    fn around(sink: Arc<dyn EventSink>, is_it: fn(&Envelope) -> bool, hides: bool) -> Arc<dyn EventSink> {
        Arc::new(Self { sink, gone: Mutex::default(), is_it, hides })
    }
}

impl EventSink for Lossy {
    fn send(&self, batch: Arc<Batch>) -> BoxFuture<'static, Answer> {
        // The inner sink may panic on purpose; do not hold the lock then.
        let mut gone = *self.gone.lock().unwrap();
        let mut events = batch.events.clone();
        if gone.is_none() {
            gone = events.iter().find(|envelope| (self.is_it)(envelope)).map(|envelope| envelope.seq);
            *self.gone.lock().unwrap() = gone;
        }
        if let Some(gone) = gone {
            if self.hides {
                // Repeat the previous status: no event number is missing.
                for envelope in events.iter_mut().filter(|envelope| envelope.seq == gone) {
                    if let Event::StatusChanged { status, .. } = &mut envelope.event {
                        *status = Status::Connecting;
                    }
                }
            } else {
                events.retain(|envelope| envelope.seq != gone);
            }
        }
        self.sink.send(Arc::new(Batch { id: batch.id, events }))
    }

    fn is_prompt(&self) -> bool {
        self.sink.is_prompt()
    }
}

// Caller that never completes one call.
struct Forgetful {
    caller: Arc<dyn Caller>,
    calls: AtomicU64,
}

impl Caller for Forgetful {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, Answered> {
        if self.calls.fetch_add(1, Ordering::Relaxed) == 50 {
            return pending().boxed();
        }
        self.caller.call(call)
    }
}

#[test]
fn an_answer_that_never_comes_is_caught_in_a_closed_loop() {
    let text = r#"
about = "Callers that wait for their answers."
seconds = 20
fleet = { instances = 10, teams = 2 }
servers = [{ name = "tools" }]
load = { loop = "closed", callers = 4, think = "100ms" }
limits = { growth = 100.0 }"#;
    let forgetful = |caller| Arc::new(Forgetful { caller, calls: AtomicU64::new(0) }) as _;
    let found = told(text, 1, Seams { caller: forgetful, ..honest() });
    let broken: Vec<_> = found.violations.iter().map(|violation| violation.invariant).collect();
    assert_eq!(broken, [Invariant::OwnAnswer], "{:?}", found.violations);
    assert!(found.calls.answered > 50, "the others are answered as ever: {}", found.calls.answered);
}

#[test]
fn giving_up_too_early_is_caught() {
    let seams = Seams {
        spec: |mut spec| {
            Arc::make_mut(&mut spec.policy).restart.max_crashes = 1;
            spec
        },
        ..honest()
    };
    let crashes = |scenario: &mut Scenario| scenario.faults.retain(|rule| rule.kind == FaultKind::Crash);
    assert_eq!(broken_under(crashes, seams), [Invariant::RestartBudget]);
}

#[test]
fn an_event_that_is_gone_is_caught() {
    let seams = Seams {
        sink: |sink| Lossy::around(sink, |it| it.seq >= 500 && matches!(it.event, Event::ToolExecuted { .. }), false),
        ..honest()
    };
    assert_eq!(broken_by(seams), [Invariant::NoGap]);
}

#[test]
fn a_status_that_is_skipped_is_caught() {
    let seams = Seams {
        sink: |sink| {
            let is_it =
                |it: &Envelope| matches!(it.event, Event::StatusChanged { status: Status::DiscoveringTools, .. });
            Lossy::around(sink, is_it, true)
        },
        ..honest()
    };
    assert_eq!(broken_by(seams), [Invariant::LegalTransitions]);
}

#[test]
fn a_restart_too_many_is_caught() {
    let seams = Seams {
        spec: |mut spec| {
            let restart = &mut Arc::make_mut(&mut spec.policy).restart;
            restart.max_crashes += 50;
            restart.delays = vec![Duration::from_millis(100)];
            spec
        },
        ..honest()
    };
    let loops = |scenario: &mut Scenario| {
        scenario.faults.retain(|rule| rule.kind == FaultKind::CrashLoop);
        scenario.faults.iter_mut().for_each(|rule| rule.when = When::At(Moment::Share(0.3)));
    };
    assert_eq!(broken_under(loops, seams), [Invariant::RestartBudget]);
}

// Connector that breaks the starts of some instances.
struct Tampered {
    connector: Arc<dyn Connector>,
    other: SimConnector,
    how: How,
    // Set once a defect that occurs only once has occurred.
    done: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    // The server answers everything but calls.
    Deaf,
    // The process is reported as ended after a signal, but still runs.
    Left,
    // The instance has two servers, one of which is forgotten.
    Twice,
    // Each start of any instance leaks memory.
    Leaks,
}

impl Tampered {
    fn around(connector: Arc<dyn Connector>, how: How) -> Arc<dyn Connector> {
        let deaf = Script { hang_calls: true, ..Script::default() };
        Arc::new(Self { connector, other: SimConnector::new(deaf), how, done: AtomicBool::new(false) })
    }
}

impl Connector for Tampered {
    fn open(&self, spec: Arc<InstanceSpec>, run: Run) -> BoxFuture<'static, Result<Link, OpenError>> {
        if self.how == How::Leaks {
            vec![1_u8; 256 * 1024].leak();
        } else if is_broken(&spec) {
            let first = self.connector.open(Arc::clone(&spec), run);
            return match self.how {
                How::Deaf => self.other.open(spec, run),
                How::Left => async move { first.await.map(left_behind) }.boxed(),
                How::Twice if self.done.swap(true, Ordering::Relaxed) => first,
                How::Twice => {
                    let second = self.connector.open(spec, run);
                    async move {
                        mem::forget(first.await?);
                        second.await
                    }
                    .boxed()
                }
                How::Leaks => first,
            };
        }
        self.connector.open(spec, run)
    }

    fn dial(&self, spec: &Arc<InstanceSpec>, run: Run) -> Box<dyn Line> {
        self.connector.dial(spec, run)
    }
}

// The process of the returned link never receives a signal.
fn left_behind(link: Link) -> Link {
    let Link { reader, writer, stderr, process, guard } = link;
    mem::forget(guard);
    let writer = Box::new(Box::leak(writer));
    Link { reader, writer, stderr, process: Box::new(Lying { process, told: false }), guard: Box::new(()) }
}

struct Lying {
    process: Box<dyn Process>,
    told: bool,
}

impl Process for Lying {
    fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    fn ended(&mut self) -> BoxFuture<'_, ProcessEnd> {
        if self.told { ready(ProcessEnd { code: Some(0), signal: None }).boxed() } else { self.process.ended() }
    }

    fn gone(&mut self) -> BoxFuture<'_, ()> {
        if self.told { ready(()).boxed() } else { self.process.gone() }
    }

    fn terminate(&mut self) {
        self.told = true;
    }

    fn kill(&mut self) {
        self.told = true;
    }
}

#[test]
fn a_server_that_is_online_and_deaf_is_caught() {
    let seams = Seams { connector: |connector| Tampered::around(connector, How::Deaf), ..honest() };
    assert_eq!(broken_by(seams), [Invariant::OnlineIsCallable]);
}

#[test]
fn a_process_that_is_left_is_caught() {
    let seams = Seams { connector: |connector| Tampered::around(connector, How::Left), ..honest() };
    assert_eq!(broken_by(seams), [Invariant::NothingLeft]);
}

#[test]
fn a_second_server_of_an_instance_is_caught() {
    let seams = Seams { connector: |connector| Tampered::around(connector, How::Twice), ..honest() };
    assert_eq!(broken_by(seams), [Invariant::NothingLeft]);
}

#[test]
fn memory_that_every_start_keeps_is_caught() {
    let seams = Seams { connector: |connector| Tampered::around(connector, How::Leaks), ..honest() };
    assert_eq!(broken_by(seams), [Invariant::MemoryBack]);
}
