//! Recorder of a run: it receives every event as the sink of the runtime, every start and every probe. It takes one
//! lock per batch and allocates nothing per event.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::WallClock;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::checks::InvariantChecks;
use super::fleet::LoadFleet;
use super::recovery_log::RecoveryLog;
use super::types::{BudgetReset, FaultVictim, InstanceNo, ProbeResult};

/// Clock of a run. The runtime's wall clock derives from it, so each event timestamp maps to a time of the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunClock {
    began: Instant,
    epoch: Timestamp,
}

impl RunClock {
    pub(crate) fn start(epoch: Timestamp) -> Self {
        Self { began: Instant::now(), epoch }
    }

    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn instant(&self, at: Duration) -> Instant {
        self.began + at
    }

    pub(crate) fn time_of(&self, timestamp: Timestamp) -> Duration {
        Duration::try_from(timestamp.duration_since(self.epoch)).unwrap_or_default()
    }

    pub(crate) fn wall_clock(self) -> WallClock {
        Arc::new(move || {
            let elapsed = SignedDuration::try_from(self.began.elapsed()).unwrap_or_default();
            self.epoch.checked_add(elapsed).unwrap_or(self.epoch)
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SinkBehavior {
    Accept,
    Fail,
    Panic,
}

pub(crate) struct RunRecorder {
    pub clock: RunClock,
    sink_behavior: AtomicU8,
    state: Mutex<RecorderState>,
}

pub(crate) struct RecorderState {
    pub checks: InvariantChecks,
    pub recovery_log: RecoveryLog,
    // Hash of the events of each instance in their order; the last entry is for events without an instance.
    order: Vec<u64>,
    trace: Option<BufWriter<File>>,
    // Reason why the trace is incomplete.
    trace_failed: Option<io::Error>,
    // Receives each instance that failed permanently.
    given_up: mpsc::UnboundedSender<InstanceNo>,
    // Id of the last batch. A batch with the same id is a repetition: the response was lost.
    last_batch: Option<u64>,
}

impl RunRecorder {
    // The receiver yields the instances that fail permanently.
    pub(crate) fn new(
        clock: RunClock,
        checks: InvariantChecks,
        recovery_log: RecoveryLog,
        trace: Option<&Path>,
    ) -> io::Result<(Arc<Self>, mpsc::UnboundedReceiver<InstanceNo>)> {
        let (given_up, receiver) = mpsc::unbounded_channel();
        let trace = trace.map(File::create).transpose()?.map(BufWriter::new);
        let order = vec![FNV_BASIS; recovery_log.len() + 1];
        let ledger = Mutex::new(RecorderState {
            checks,
            recovery_log,
            order,
            trace,
            trace_failed: None,
            given_up,
            last_batch: None,
        });
        Ok((
            Arc::new(Self { clock, sink_behavior: AtomicU8::new(SinkBehavior::Accept as u8), state: ledger }),
            receiver,
        ))
    }

    pub(crate) fn set_sink_behavior(&self, behavior: SinkBehavior) {
        self.sink_behavior.store(behavior as u8, Ordering::Relaxed);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, RecorderState> {
        // A poisoned lock is harmless: the sink panics on purpose before it changes anything.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn record_start(&self, nth: InstanceNo) {
        let at = self.clock.now();
        self.state().checks.record_start(nth, at);
    }

    pub(crate) fn record_reset(&self, reset: BudgetReset) {
        let at = self.clock.now();
        self.state().checks.record_reset(reset, at);
    }

    pub(crate) fn record_probe(&self, probe: &ProbeResult) {
        self.state().checks.record_probe(probe);
    }
}

impl EventSink for RunRecorder {
    fn send(&self, batch: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
        let behavior = self.sink_behavior.load(Ordering::Relaxed);
        if behavior == SinkBehavior::Fail as u8 {
            return ready(SinkAnswer::Unavailable("the sink rejects all batches".to_owned())).boxed();
        }
        assert!(behavior != SinkBehavior::Panic as u8, "the sink was asked to panic");
        self.state().record_batch(&batch, self.clock);
        ready(SinkAnswer::Accepted).boxed()
    }

    fn is_prompt(&self) -> bool {
        true
    }
}

impl RecorderState {
    fn record_batch(&mut self, batch: &SinkBatch, clock: RunClock) {
        if self.last_batch.replace(batch.id) == Some(batch.id) {
            return;
        }
        for envelope in &batch.events {
            let at = clock.time_of(envelope.timestamp);
            let nth =
                envelope.event.subject().and_then(|of| InstanceNo::from_installation_id(of.installation_id.as_str()));
            self.checks.record_event(envelope);
            self.trace_event(at, nth, envelope);
            if let Some(nth) = nth {
                let violations = self.recovery_log.record_event(at, nth, &envelope.event);
                self.checks.add_violations(violations);
                if matches!(envelope.event, Event::PermanentlyFailed { .. }) {
                    // The receiver is dropped once the faults are over.
                    let _ = self.given_up.send(nth);
                }
            } else {
                self.recovery_log.record_team_event(&envelope.event);
            }
        }
    }

    fn trace_event(&mut self, at: Duration, nth: Option<InstanceNo>, envelope: &Envelope) {
        let millis = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        let (kind, status) = (envelope.event.kind(), status(&envelope.event));
        let last = self.order.len() - 1;
        if let Some(order) = self.order.get_mut(nth.map_or(last, |nth| nth.0 as usize)) {
            for part in [kind.as_bytes(), status.as_bytes(), &millis.to_le_bytes()] {
                *order = part.iter().fold(*order, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(FNV_PRIME));
            }
        }
        if self.trace.is_some() {
            let name = nth.map_or_else(|| "-".to_owned(), |nth| format!("i{}", nth.0));
            self.write(format_args!("{millis:>9} {:>8} {name:<8} {kind} {status}\n", envelope.seq));
        }
    }

    pub(crate) fn trace_action(&mut self, at: Duration, victim: FaultVictim, what: fmt::Arguments<'_>) {
        if self.trace.is_some() {
            let name = match victim {
                FaultVictim::Instance(nth) => format!("i{}", nth.0),
                FaultVictim::Team(team) => LoadFleet::team(team).to_string(),
                FaultVictim::Satellite => "-".to_owned(),
            };
            self.write(format_args!("{:>9} {:>8} {name:<8} {what}\n", at.as_millis(), "-"));
        }
    }

    fn write(&mut self, line: fmt::Arguments<'_>) {
        if let Some(trace) = &mut self.trace
            && let Err(error) = trace.write_fmt(line)
        {
            // A full disk must not end the run.
            (self.trace, self.trace_failed) = (None, Some(error));
        }
    }

    pub(crate) fn order_hash(&self) -> u64 {
        let bytes = self.order.iter().flat_map(|order| order.to_le_bytes());
        bytes.fold(FNV_BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME))
    }

    pub(crate) fn close(&mut self) {
        if let Some(mut trace) = self.trace.take()
            && let Err(error) = trace.flush()
        {
            self.trace_failed = Some(error);
        }
    }

    pub(crate) fn trace_error(&self) -> Option<String> {
        self.trace_failed.as_ref().map(ToString::to_string)
    }
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

fn status(event: &Event) -> &'static str {
    match event {
        Event::StatusChanged { status, .. } => status.as_str(),
        _ => "",
    }
}
