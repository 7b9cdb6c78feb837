//! Decisions of the keeper about its satellites, of which one runs at a time; each is a generation. Pure: the time is an
//! argument.
//!
//! ```text
//!            ┌──────────────────────────── delay ────────────────────────────┐
//!            ▼                                                               │
//!         Starting ──Ready──► Serving ──Stopping──► Stopping ──Done──► Done  │
//!            │                   │                      │               │    │
//!            │ crash, too slow,  │ crash, hang          │ crash         ▼    │
//!            │ failed restart    │                      └───────────► Ended  │
//!            └───────────────────┴──► (Killed) ──► within the budget ────────┘
//!                                                  budget spent ───► Ended
//! ```

use std::time::{Duration, Instant};

use mcp_satellite_actors::model::exit::signal_name;
use mcp_satellite_actors::model::policy::RestartPolicy;
use mcp_satellite_actors::rules::restart::{ExitHistory, RestartVerdict};

use super::messages::KeeperRequest;

/// Exit code for a death by signal, minus the signal's number.
const SIGNAL_BASE: u8 = 128;
/// Exit code after SIGKILL.
const KILLED: u8 = SIGNAL_BASE + 9;

/// Time within which a process that is finished, or was killed, must end. A thread that waits in the kernel for a hanging
/// disk can prevent that.
pub(super) const END_TIMEOUT: Duration = mcp_satellite_files::disk::WAIT_MAX;
/// Shortest time limit for the start of a satellite after a crash. It reads databases, which takes longer than to answer.
const START_TIMEOUT_MIN: Duration = Duration::from_secs(60);

/// Returns the restart budget: the third crash within five minutes ends everything.
fn restart_policy() -> RestartPolicy {
    RestartPolicy {
        window: Duration::from_secs(5 * 60),
        max_crashes: 3,
        delays: vec![Duration::from_secs(1), Duration::from_secs(5)],
        quick: Duration::from_secs(60),
    }
}

/// End of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessExit {
    Code(u8),
    Signal(i32),
}

/// End of a satellite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GenerationEnd {
    /// The satellite reported that it was finished with this code.
    Done(u8),
    /// The process exited with this code without a report.
    Exited(u8),
    /// The process was ended by this signal.
    Signalled(i32),
    /// The actors did not answer for this time.
    Hung(Duration),
    /// The satellite was not ready within this time.
    NotReady(Duration),
    /// The process could not be forked: an error number.
    NotForked(i32),
}

impl GenerationEnd {
    /// Returns the exit code of the keeper if this end is the last one.
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::Done(code) | Self::Exited(code) => code,
            Self::Signalled(signal) => u8::try_from(signal).map_or(KILLED, |signal| SIGNAL_BASE.saturating_add(signal)),
            Self::Hung(_) | Self::NotReady(_) => KILLED,
            Self::NotForked(_) => 1,
        }
    }

    /// Returns the reason without a subject, such as `killed by SIGKILL`.
    pub(super) fn reason(self) -> String {
        match self {
            Self::Done(code) => format!("ended at its start with code {code}"),
            Self::Exited(code) => format!("exited with code {code}"),
            Self::Signalled(signal) => format!("killed by {}", signal_name(signal)),
            Self::Hung(timeout) => format!("killed by the keeper: its actors did not answer for {timeout:?}"),
            Self::NotReady(timeout) => format!("killed by the keeper: it was not ready within {timeout:?}"),
            Self::NotForked(errno) => format!("not forked: {}", std::io::Error::from_raw_os_error(errno)),
        }
    }
}

/// State of the satellite, according to its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SatellitePhase {
    /// The satellite starts. After a crash it must be ready until then.
    Starting { until: Option<Instant> },
    /// The actors must answer within the hang timeout.
    Serving { alive_at: Instant },
    /// The satellite ends its servers. No limit applies.
    Stopping,
    /// The satellite is finished with `code`; its process must end until then.
    Done { code: u8, until: Instant },
    /// The keeper killed the satellite, which has not answered since `lost_at`; its process must end until then.
    Killed { end: GenerationEnd, lost_at: Instant, until: Instant },
    /// The satellite has ended; the next one starts at `until`.
    Pausing { until: Instant, end: GenerationEnd },
    /// The satellite has ended and is not started again. `crashes` is their number if they have spent the budget.
    Ended { end: GenerationEnd, crashes: Option<usize> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeeperEffect {
    Kill,
    /// The process of the satellite does not end; the keeper goes on without it.
    Abandon,
    Start,
}

/// A satellite that has ended, as the next one learns of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LostGeneration {
    pub(super) end: GenerationEnd,
    /// Time for which it was ready.
    pub(super) uptime: Duration,
    /// Time at which it was last known to work.
    pub(super) lost_at: Instant,
}

#[derive(Debug)]
pub(super) struct KeeperRules {
    phase: SatellitePhase,
    generation: u32,
    /// False until the first satellite has sent its settings, and while they say so.
    restarts: bool,
    hang_timeout: Option<Duration>,
    ready_at: Option<Instant>,
    /// True after a signal that asks the satellite to end.
    is_end_requested: bool,
    crashes: ExitHistory,
    previous: Option<LostGeneration>,
}

impl KeeperRules {
    pub(super) fn new() -> Self {
        Self {
            phase: SatellitePhase::Starting { until: None },
            generation: 1,
            restarts: false,
            hang_timeout: None,
            ready_at: None,
            is_end_requested: false,
            crashes: ExitHistory::default(),
            previous: None,
        }
    }

    pub(super) fn phase(&self) -> SatellitePhase {
        self.phase
    }

    /// Returns the number of the satellite that runs, or ran last; the first one is 1.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    pub(super) fn previous(&self) -> Option<LostGeneration> {
        self.previous
    }

    /// Notes a message of the satellite.
    pub(super) fn receive(&mut self, now: Instant, message: &KeeperRequest) {
        self.phase = match (self.phase, message) {
            // What an ended satellite has sent before changes nothing.
            (
                SatellitePhase::Killed { .. }
                | SatellitePhase::Done { .. }
                | SatellitePhase::Pausing { .. }
                | SatellitePhase::Ended { .. },
                _,
            ) => return,
            (phase, KeeperRequest::Configure { keep_servers, hang_timeout_ms }) => {
                self.restarts = *keep_servers;
                self.hang_timeout = hang_timeout_ms.map(Duration::from_millis);
                phase
            }
            (_, KeeperRequest::Done { code }) => SatellitePhase::Done { code: *code, until: now + END_TIMEOUT },
            (SatellitePhase::Starting { .. }, KeeperRequest::Ready) => {
                self.ready_at = Some(now);
                SatellitePhase::Serving { alive_at: now }
            }
            (SatellitePhase::Serving { .. }, KeeperRequest::Alive) => SatellitePhase::Serving { alive_at: now },
            (_, KeeperRequest::Stopping) => SatellitePhase::Stopping,
            // A second `Ready`, and answers to probes that were sent before.
            (
                phase @ (SatellitePhase::Starting { .. } | SatellitePhase::Serving { .. } | SatellitePhase::Stopping),
                KeeperRequest::Ready | KeeperRequest::Alive,
            ) => phase,
            // They concern descriptors, not the satellite.
            (phase, KeeperRequest::KeepDescriptor { .. } | KeeperRequest::ForgetDescriptor { .. }) => phase,
        };
    }

    /// Notes that the satellite is asked to end: no other one follows.
    pub(super) fn request_end(&mut self) {
        self.is_end_requested = true;
        if let SatellitePhase::Pausing { end, .. } = self.phase {
            self.phase = SatellitePhase::Ended { end, crashes: None };
        }
    }

    /// Notes that the process of the satellite has ended, or is abandoned (`None`). Decides whether another one starts.
    pub(super) fn satellite_ended(&mut self, now: Instant, exit: Option<ProcessExit>) {
        let is_reported = matches!(self.phase, SatellitePhase::Done { .. });
        let (end, lost_at) = match (self.phase, exit) {
            (SatellitePhase::Killed { end, lost_at, .. }, _) => (end, lost_at),
            (SatellitePhase::Done { code, .. }, None) => (GenerationEnd::Done(code), now),
            (SatellitePhase::Done { .. }, Some(ProcessExit::Code(code))) => (GenerationEnd::Done(code), now),
            (_, Some(ProcessExit::Code(code))) => (GenerationEnd::Exited(code), now),
            (_, Some(ProcessExit::Signal(signal))) => (GenerationEnd::Signalled(signal), now),
            // Only a killed or finished satellite is abandoned.
            (_, None) => (GenerationEnd::Exited(KILLED), now),
        };
        // A failure to start ends everything, but not if servers are to be kept over a crash: the cause may pass.
        let is_orderly = is_reported && (self.generation == 1 || self.ready_at.is_some());
        let is_last = is_orderly || self.is_end_requested || self.phase == SatellitePhase::Stopping || !self.restarts;
        if is_last {
            self.phase = SatellitePhase::Ended { end, crashes: None };
        } else {
            self.charge(now, end, lost_at);
        }
    }

    /// Notes that the next satellite could not be forked.
    pub(super) fn fork_failed(&mut self, now: Instant, errno: i32) {
        self.charge(now, GenerationEnd::NotForked(errno), now);
    }

    fn charge(&mut self, now: Instant, end: GenerationEnd, lost_at: Instant) {
        let uptime = self.ready_at.map(|ready| lost_at.saturating_duration_since(ready)).unwrap_or_default();
        // Clients are without a satellite since the last one was ready.
        let lost_at = match self.previous {
            Some(previous) if self.ready_at.is_none() => previous.lost_at,
            _ => lost_at,
        };
        self.previous = Some(LostGeneration { end, uptime, lost_at });
        self.phase = match self.crashes.charge(&restart_policy(), now, true, uptime) {
            RestartVerdict::Restart { delay, .. } => SatellitePhase::Pausing { until: now + delay, end },
            RestartVerdict::GiveUp { exits, .. } => SatellitePhase::Ended { end, crashes: Some(exits) },
        };
    }

    /// Returns the effect of a time limit that has passed.
    pub(super) fn expire(&mut self, now: Instant) -> Option<KeeperEffect> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return None;
        }
        let (end, lost_at) = match self.phase {
            SatellitePhase::Starting { .. } => (GenerationEnd::NotReady(self.start_timeout()?), now),
            SatellitePhase::Serving { alive_at } => (GenerationEnd::Hung(self.hang_timeout?), alive_at),
            SatellitePhase::Done { .. } | SatellitePhase::Killed { .. } => return Some(KeeperEffect::Abandon),
            SatellitePhase::Pausing { .. } => {
                self.generation += 1;
                self.ready_at = None;
                let until = self.start_timeout().and_then(|timeout| now.checked_add(timeout));
                self.phase = SatellitePhase::Starting { until };
                return Some(KeeperEffect::Start);
            }
            // They have no limit.
            SatellitePhase::Stopping | SatellitePhase::Ended { .. } => return None,
        };
        self.phase = SatellitePhase::Killed { end, lost_at, until: now + END_TIMEOUT };
        Some(KeeperEffect::Kill)
    }

    /// Returns the time at which `expire` has an effect.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.phase {
            SatellitePhase::Starting { until } => until,
            SatellitePhase::Serving { alive_at } => alive_at.checked_add(self.hang_timeout?),
            SatellitePhase::Stopping | SatellitePhase::Ended { .. } => None,
            SatellitePhase::Done { until, .. }
            | SatellitePhase::Killed { until, .. }
            | SatellitePhase::Pausing { until, .. } => Some(until),
        }
    }

    fn start_timeout(&self) -> Option<Duration> {
        Some(self.hang_timeout?.saturating_mul(2).max(START_TIMEOUT_MIN))
    }

    /// Returns true if the watchdog of the service manager, with this interval, may be notified. The keeper acts on a
    /// satellite that hangs after its own limit; without that limit the watchdog detects it.
    pub(super) fn allows_watchdog(&self, now: Instant, interval: Duration) -> bool {
        match self.phase {
            SatellitePhase::Serving { alive_at } if self.hang_timeout.is_none() => {
                now.saturating_duration_since(alive_at) < interval
            }
            // The manager has a limit of its own for a start.
            SatellitePhase::Starting { .. } => self.generation > 1,
            SatellitePhase::Stopping => false,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests;
