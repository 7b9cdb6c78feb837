//! Decisions of the keeper about the satellite. Pure: the time is an argument.

use std::time::{Duration, Instant};

use super::messages::KeeperRequest;

/// Time within which a process that is finished, or was killed, must end. A thread that waits in the kernel for a hanging
/// disk can prevent that.
pub(super) const END_TIMEOUT: Duration = mcp_satellite_files::disk::WAIT_MAX;

/// State of the satellite, according to its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SatellitePhase {
    /// No limit applies: the satellite starts, ends its servers, or has none.
    Unlimited,
    /// The actors must answer within `timeout`.
    Serving { timeout: Duration, alive_at: Instant },
    /// The satellite is finished with `code`; its process must end until then.
    Done { code: u8, until: Instant },
    /// The satellite was killed because it did not answer for `timeout`; its process must end until then.
    Hung { timeout: Duration, until: Instant },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeeperEffect {
    KillSatellite,
    /// The process of the satellite does not end; the keeper ends everything without it.
    EndWithoutSatellite,
}

#[derive(Debug)]
pub(super) struct KeeperRules {
    phase: SatellitePhase,
}

impl KeeperRules {
    pub(super) fn new() -> Self {
        Self { phase: SatellitePhase::Unlimited }
    }

    pub(super) fn phase(&self) -> SatellitePhase {
        self.phase
    }

    /// Notes a message of the satellite.
    pub(super) fn receive(&mut self, now: Instant, message: &KeeperRequest) {
        self.phase = match (self.phase, message) {
            // What a killed satellite has sent before changes nothing.
            (SatellitePhase::Hung { .. } | SatellitePhase::Done { .. }, _) => return,
            (_, KeeperRequest::Done { code }) => SatellitePhase::Done { code: *code, until: now + END_TIMEOUT },
            (_, KeeperRequest::Ready { hang_timeout_ms: Some(timeout) }) => {
                SatellitePhase::Serving { timeout: Duration::from_millis(*timeout), alive_at: now }
            }
            (_, KeeperRequest::Ready { hang_timeout_ms: None } | KeeperRequest::Stopping) => SatellitePhase::Unlimited,
            (SatellitePhase::Serving { timeout, .. }, KeeperRequest::Alive) => {
                SatellitePhase::Serving { timeout, alive_at: now }
            }
            (SatellitePhase::Unlimited, KeeperRequest::Alive) => return,
        };
    }

    /// Returns the effect of a time limit that has passed.
    pub(super) fn expire(&mut self, now: Instant) -> Option<KeeperEffect> {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return None;
        }
        if let SatellitePhase::Serving { timeout, .. } = self.phase {
            self.phase = SatellitePhase::Hung { timeout, until: now + END_TIMEOUT };
            return Some(KeeperEffect::KillSatellite);
        }
        Some(KeeperEffect::EndWithoutSatellite)
    }

    /// Returns the time at which `expire` has an effect.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.phase {
            SatellitePhase::Unlimited => None,
            SatellitePhase::Serving { timeout, alive_at } => Some(alive_at + timeout),
            SatellitePhase::Done { until, .. } | SatellitePhase::Hung { until, .. } => Some(until),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const JUST_IN_TIME: Duration = Duration::from_millis(59_999);
    const READY: KeeperRequest = KeeperRequest::Ready { hang_timeout_ms: Some(60_000) };

    fn serving(at: Instant) -> KeeperRules {
        let mut rules = KeeperRules::new();
        rules.receive(at, &READY);
        rules
    }

    #[test]
    fn a_satellite_is_killed_only_after_the_whole_timeout_without_an_answer() {
        let start = Instant::now();
        let mut rules = serving(start);
        let mut now = start;
        for _ in 0..10 {
            now += JUST_IN_TIME;
            assert_eq!(rules.expire(now), None);
            rules.receive(now, &KeeperRequest::Alive);
        }
        assert_eq!(rules.deadline(), Some(now + TIMEOUT));
        now += TIMEOUT;
        assert_eq!(rules.expire(now), Some(KeeperEffect::KillSatellite));
        assert_eq!(rules.phase(), SatellitePhase::Hung { timeout: TIMEOUT, until: now + END_TIMEOUT });
    }

    #[test]
    fn a_satellite_is_killed_once_and_its_late_messages_do_not_revive_it() {
        let start = Instant::now();
        let mut rules = serving(start);
        let now = start + TIMEOUT;
        assert_eq!(rules.expire(now), Some(KeeperEffect::KillSatellite));
        for late in [KeeperRequest::Alive, READY, KeeperRequest::Stopping, KeeperRequest::Done { code: 0 }] {
            rules.receive(now, &late);
        }
        assert_eq!(rules.expire(now), None);
        assert_eq!(rules.expire(now + END_TIMEOUT), Some(KeeperEffect::EndWithoutSatellite));
    }

    #[test]
    fn no_limit_applies_before_the_actors_run_and_while_they_end() {
        let start = Instant::now();
        let mut rules = KeeperRules::new();
        rules.receive(start, &KeeperRequest::Alive);
        assert_eq!(rules.deadline(), None);
        let mut rules = serving(start);
        rules.receive(start, &KeeperRequest::Stopping);
        // An answer to a probe that was sent before.
        rules.receive(start, &KeeperRequest::Alive);
        assert_eq!(rules.deadline(), None);
        assert_eq!(rules.expire(start + TIMEOUT * 100), None);
        let mut rules = serving(start);
        rules.receive(start, &KeeperRequest::Ready { hang_timeout_ms: None });
        assert_eq!(rules.expire(start + TIMEOUT * 100), None);
    }

    #[test]
    fn a_finished_satellite_must_end_soon() {
        let start = Instant::now();
        let mut rules = serving(start);
        rules.receive(start, &KeeperRequest::Done { code: 7 });
        assert_eq!(rules.expire(start + END_TIMEOUT / 2), None);
        assert_eq!(rules.expire(start + END_TIMEOUT), Some(KeeperEffect::EndWithoutSatellite));
        assert_eq!(rules.phase(), SatellitePhase::Done { code: 7, until: start + END_TIMEOUT });
    }
}
