//! Decisions of the link as pure functions of time and randomness: poll intervals, backoff, order of commands, expiry,
//! and the success of a command.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::model::backoff::Backoff;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::jitter::JitterRng;

use crate::wire::{CommandPriority, CommandTarget, PollCommands, PollingMode};
use mcp_satellite_config::PollIntervals;

// Spreads the retries of many satellites.
const JITTER_PERCENT: u8 = 10;
// Lower limit of every poll interval, whatever is configured or requested.
const INTERVAL_MIN: Duration = Duration::from_millis(10);
// Limits of the pause that a backend can request between two polls.
const REQUESTED_PAUSE_MIN: Duration = Duration::from_millis(50);
const REQUESTED_PAUSE_MAX: Duration = Duration::from_secs(300);

#[derive(Debug, Clone)]
pub struct RetryPacer {
    backoff: Backoff,
    failures: u32,
    jitter: JitterRng,
}

impl RetryPacer {
    /// Creates a pacer whose delay doubles from `first` to `max`.
    pub fn new(first: Duration, max: Duration, jitter: JitterRng) -> Self {
        Self { backoff: Backoff::doubling(first, max), failures: 0, jitter }
    }

    /// Returns the delay after another failure. A longer pause that the backend requests is honoured, up to the
    /// maximum.
    pub fn delay_after_failure(&mut self, retry_after: Option<Duration>) -> Duration {
        self.failures = self.failures.saturating_add(1);
        paced_delay(self.backoff, self.failures, retry_after, &mut self.jitter)
    }

    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

fn paced_delay(backoff: Backoff, attempt: u32, retry_after: Option<Duration>, jitter: &mut JitterRng) -> Duration {
    // Limited because a satellite that pauses receives no commands, not even `kill`.
    let requested = retry_after.unwrap_or_default().min(backoff.maximum);
    jitter.jitter(backoff.delay(attempt).max(INTERVAL_MIN), JITTER_PERCENT).max(requested)
}

#[derive(Debug, Clone)]
pub struct PollPacer {
    intervals: PollIntervals,
    max: Duration,
    mode: PollingMode,
    failures: u32,
    jitter: JitterRng,
}

impl PollPacer {
    pub fn new(intervals: PollIntervals, max: Duration, jitter: JitterRng) -> Self {
        Self { intervals, max, mode: PollingMode::default(), failures: 0, jitter }
    }

    pub fn mode(&self) -> PollingMode {
        self.mode
    }

    pub fn is_failing(&self) -> bool {
        self.failures > 0
    }

    /// Returns the delay after a response. `limit` is the maximum number of commands in a response.
    pub fn delay_after_response(&mut self, answer: &PollCommands, limit: usize) -> Duration {
        self.failures = 0;
        self.mode = answer.polling_mode;
        let requested = answer.next_poll_interval.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let interval = requested.map_or_else(
            || self.interval(self.mode),
            |requested| requested.clamp(REQUESTED_PAUSE_MIN, REQUESTED_PAUSE_MAX),
        );
        let urgent = answer.commands.iter().filter_map(|command| match command.priority {
            CommandPriority::Immediate => Some(self.intervals.immediate),
            CommandPriority::High => Some(self.intervals.high),
            CommandPriority::Normal | CommandPriority::Low => None,
        });
        // A full response may not contain all waiting commands.
        let immediate = (answer.commands.len() >= limit).then_some(self.intervals.immediate);
        urgent.chain(immediate).fold(interval, Duration::min).max(INTERVAL_MIN)
    }

    pub fn delay_after_failure(&mut self, retry_after: Option<Duration>) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let backoff = Backoff::doubling(self.interval(self.mode), self.max);
        // The first failure already doubles the interval.
        paced_delay(backoff, self.failures.saturating_add(1), retry_after, &mut self.jitter)
    }

    fn interval(&self, mode: PollingMode) -> Duration {
        match mode {
            PollingMode::Immediate => self.intervals.immediate,
            PollingMode::High => self.intervals.high,
            PollingMode::Normal => self.intervals.normal,
            PollingMode::Idle => self.intervals.idle,
        }
    }
}

/// Returns true if a command has expired by the backend's clock, which showed `server_time` when `since` began.
pub fn is_expired(expires_at: Option<Timestamp>, server_time: Timestamp, since: Duration) -> bool {
    let Some(expires_at) = expires_at else { return false };
    let since = SignedDuration::try_from(since).unwrap_or(SignedDuration::MAX);
    // A time beyond the calendar is after every expiry.
    server_time.checked_add(since).map_or(true, |now| expires_at <= now)
}

/// Selection of instances by parts of their id. An absent part matches all instances.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "parts of an instance's id")]
pub struct InstanceScope {
    pub installation: Option<String>,
    pub team: Option<String>,
    pub user: Option<String>,
}

impl InstanceScope {
    pub fn overlaps(&self, other: &Self) -> bool {
        let may_be = |one: &Option<String>, other: &Option<String>| match (one, other) {
            (Some(one), Some(other)) => one == other,
            (None, _) | (_, None) => true,
        };
        may_be(&self.installation, &other.installation)
            && may_be(&self.team, &other.team)
            && may_be(&self.user, &other.user)
    }

    pub fn matches(&self, installation: &str, team: &str, user: &str) -> bool {
        let is = |wanted: &Option<String>, id: &str| wanted.as_ref().is_none_or(|wanted| wanted == id);
        is(&self.installation, installation) && is(&self.team, team) && is(&self.user, user)
    }
}

impl From<CommandTarget> for InstanceScope {
    fn from(target: CommandTarget) -> Self {
        Self { installation: Some(target.installation_id), team: target.team_id, user: target.user_id }
    }
}

/// Queue of commands. Commands with overlapping scopes run one after the other, most urgent first; others run
/// concurrently. An `immediate` command waits only for other immediate ones and ignores the limit.
#[derive(Debug)]
pub struct CommandLanes {
    concurrent_max: usize,
    // Most urgent first; equal priorities in order of arrival.
    waiting: Vec<CommandLaneEntry>,
    running: Vec<CommandLaneEntry>,
}

#[derive(Debug)]
struct CommandLaneEntry {
    id: String,
    scope: InstanceScope,
    priority: CommandPriority,
}

impl CommandLanes {
    pub fn new(concurrent_max: usize) -> Self {
        Self { concurrent_max, waiting: Vec::new(), running: Vec::new() }
    }

    pub fn contains(&self, id: &str) -> bool {
        self.waiting.iter().chain(&self.running).any(|entry| entry.id == id)
    }

    pub fn len(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn push(&mut self, id: &str, scope: InstanceScope, priority: CommandPriority) {
        let at = self.waiting.partition_point(|entry| entry.priority <= priority);
        self.waiting.insert(at, CommandLaneEntry { id: id.to_owned(), scope, priority });
    }

    pub fn start_next(&mut self) -> Option<String> {
        let full = self.running.len() >= self.concurrent_max;
        let free = |at: &usize| {
            let entry = &self.waiting[*at];
            let immediate = entry.priority == CommandPriority::Immediate;
            let running =
                self.running.iter().filter(|other| !immediate || other.priority == CommandPriority::Immediate);
            let mut before = self.waiting[..*at].iter().chain(running);
            (immediate || !full) && !before.any(|other| other.scope.overlaps(&entry.scope))
        };
        let at = (0..self.waiting.len()).find(free)?;
        let entry = self.waiting.remove(at);
        let id = entry.id.clone();
        self.running.push(entry);
        Some(id)
    }

    pub fn finish(&mut self, id: &str) {
        self.running.retain(|entry| entry.id != id);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandEffect {
    Up,
    /// As configured: online, stopped by a person, or waiting for values of its user.
    Configured,
    Down,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "of the snapshot, by name")]
pub struct ObservedInstance {
    pub status: Status,
    pub wants_to_run: bool,
    pub has_process: bool,
    /// True if the instance has the configuration and the run that the command requests.
    pub is_new: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EffectProgress {
    Visible,
    Pending,
    /// The effect cannot follow without another change.
    Impossible,
}

pub fn effect_progress(effect: CommandEffect, seen: ObservedInstance) -> EffectProgress {
    match (effect, seen.status) {
        (CommandEffect::Down, _) if !seen.wants_to_run && !seen.has_process => EffectProgress::Visible,
        (CommandEffect::Down, _) => EffectProgress::Pending,
        (CommandEffect::Configured, _) if !seen.wants_to_run => EffectProgress::Visible,
        (CommandEffect::Configured, Status::AwaitingUserConfig) => EffectProgress::Visible,
        (CommandEffect::Up | CommandEffect::Configured, Status::Online) if seen.is_new => EffectProgress::Visible,
        (CommandEffect::Up | CommandEffect::Configured, Status::Online) => EffectProgress::Pending,
        // Only a person or another configuration changes this status.
        (CommandEffect::Up, Status::AwaitingUserConfig) => EffectProgress::Impossible,
        (CommandEffect::Up | CommandEffect::Configured, Status::PermanentlyFailed | Status::RequiresReauth) => EffectProgress::Impossible,
        (
            CommandEffect::Up | CommandEffect::Configured,
            Status::Provisioning
            | Status::CommandReceived
            | Status::Connecting
            | Status::DiscoveringTools
            | Status::SyncingTools
            | Status::Restarting
            // The supervisor retries these, where the policy allows it.
            | Status::Offline
            | Status::Error,
        ) => EffectProgress::Pending,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::BackendCommand;

    fn jitter_rng() -> JitterRng {
        JitterRng::new(1, "satellite-0001")
    }

    fn pacer() -> PollPacer {
        PollPacer::new(PollIntervals::default(), Duration::from_secs(300), jitter_rng())
    }

    fn command(id: &str, priority: CommandPriority) -> BackendCommand {
        BackendCommand {
            id: id.to_owned(),
            command_type: "restart".to_owned(),
            priority,
            payload: serde_json::Map::new(),
            expires_at: None,
        }
    }

    fn answer(
        polling_mode: PollingMode,
        next_poll_interval: Option<f64>,
        priorities: &[CommandPriority],
    ) -> PollCommands {
        let commands = priorities.iter().map(|priority| command("c", *priority)).collect();
        PollCommands { commands, polling_mode, next_poll_interval, server_time: None }
    }

    fn milliseconds(duration: Duration) -> u128 {
        duration.as_millis()
    }

    #[test]
    fn the_poll_delay_follows_the_mode_or_the_requested_seconds() {
        use PollingMode::{High, Idle, Immediate, Normal};
        for (mode, requested, wanted) in [
            (Immediate, None, 2_000),
            (High, None, 10_000),
            (Normal, None, 30_000),
            (Idle, None, 60_000),
            (Idle, Some(7.5), 7_500),
            (Immediate, Some(45.0), 45_000),
            // Requested intervals are limited in both directions.
            (Normal, Some(0.0), 50),
            (Normal, Some(1e9), 300_000),
            (Normal, Some(1e300), 30_000),
            // Invalid numbers are ignored.
            (Normal, Some(-3.0), 30_000),
            (High, Some(f64::NAN), 10_000),
        ] {
            let wait = pacer().delay_after_response(&answer(mode, requested, &[]), 10);
            assert_eq!(milliseconds(wait), wanted, "{mode:?}, {requested:?}");
        }
    }

    #[test]
    fn urgent_commands_and_full_responses_shorten_the_poll_delay() {
        use CommandPriority::{High, Immediate, Low, Normal};
        for (priorities, limit, wanted) in [
            (&[Low, Normal][..], 10, 60),
            (&[Low, High], 10, 10),
            (&[Low, High, Immediate], 10, 2),
            (&[Low, Low], 2, 2),
        ] {
            let wait = pacer().delay_after_response(&answer(PollingMode::Idle, None, priorities), limit);
            assert_eq!(wait.as_secs(), wanted, "{priorities:?} of {limit}");
        }
    }

    #[test]
    fn failures_double_the_delay_up_to_the_limit_with_jitter() {
        let mut pace = pacer();
        pace.delay_after_response(&answer(PollingMode::Immediate, None, &[]), 10);
        let delays: Vec<f64> = (0..10).map(|_| pace.delay_after_failure(None).as_secs_f64()).collect();
        for (delay, wanted) in delays.iter().zip([4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0, 300.0]) {
            assert!((wanted * 0.9..=wanted * 1.1).contains(delay), "{delay} for {wanted}");
        }
        assert!((delays[7] - delays[8]).abs() > 0.001 && (delays[8] - delays[9]).abs() > 0.001, "{delays:?}");
        assert!(pace.is_failing());
        assert_eq!(pace.delay_after_response(&answer(PollingMode::Immediate, None, &[]), 10).as_secs(), 2);
        assert!(!pace.is_failing());
        assert!(pace.delay_after_failure(None) < Duration::from_secs(5), "the backoff starts again");
    }

    #[test]
    fn a_maximal_failure_count_does_not_overflow() {
        let mut pace = pacer();
        pace.failures = u32::MAX;
        assert!(pace.delay_after_failure(None) <= Duration::from_secs(330));
        let mut retries = RetryPacer::new(Duration::from_secs(2), Duration::from_secs(300), jitter_rng());
        retries.failures = u32::MAX;
        assert!(retries.delay_after_failure(None) <= Duration::from_secs(330));
    }

    #[test]
    fn a_requested_pause_is_honoured_up_to_the_maximum_delay() {
        let requested = Some(Duration::from_secs(200));
        assert_eq!(pacer().delay_after_failure(requested).as_secs(), 200);
        assert!(pacer().delay_after_failure(Some(Duration::from_secs(1))) > Duration::from_secs(50));
        let mut retries = RetryPacer::new(Duration::from_secs(2), Duration::from_secs(300), jitter_rng());
        assert_eq!(retries.delay_after_failure(requested).as_secs(), 200);
        assert!(retries.delay_after_failure(None) < Duration::from_secs(5));
        let hour = Some(Duration::from_secs(3600));
        assert_eq!(pacer().delay_after_failure(hour).as_secs(), 300);
        assert_eq!(retries.delay_after_failure(hour).as_secs(), 300);
    }

    #[test]
    fn a_success_resets_the_backoff() {
        let mut retries = RetryPacer::new(Duration::from_secs(2), Duration::from_secs(300), jitter_rng());
        let delays = [(); 4].map(|()| retries.delay_after_failure(None).as_secs());
        assert!(delays[0] <= 2 && delays[3] >= 14, "{delays:?}");
        retries.reset();
        assert!(retries.delay_after_failure(None) < Duration::from_secs(3));
    }

    #[test]
    fn a_command_expires_by_the_clock_of_the_backend() {
        let at = |seconds: i64| Timestamp::from_second(1_800_000_000 + seconds).unwrap();
        for (expires, since, wanted) in [
            (None, 1_000_000, false),
            (Some(10), 0, false),
            (Some(10), 9, false),
            (Some(10), 10, true),
            (Some(0), 0, true),
            (Some(-1), 0, true),
        ] {
            let expired = is_expired(expires.map(at), at(0), Duration::from_secs(since));
            assert_eq!(expired, wanted, "{expires:?} after {since} s");
        }
        assert!(is_expired(Some(Timestamp::MAX), at(0), Duration::MAX));
    }

    fn scope(installation: &str, team: &str, user: &str) -> InstanceScope {
        let given = |part: &str| (!part.is_empty()).then(|| part.to_owned());
        InstanceScope { installation: given(installation), team: given(team), user: given(user) }
    }

    #[test]
    fn scopes_overlap_if_an_instance_can_be_in_both() {
        for (one, other, wanted) in [
            (scope("a", "", ""), scope("b", "", ""), false),
            (scope("a", "", ""), scope("a", "t", "u"), true),
            (scope("a", "t", "u"), scope("a", "t", "v"), false),
            (scope("a", "t", ""), scope("a", "s", ""), false),
            (scope("", "t", "u"), scope("a", "t", ""), true),
            (scope("", "", ""), scope("a", "t", "u"), true),
        ] {
            assert_eq!(one.overlaps(&other), wanted, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one), wanted, "{other:?} {one:?}");
        }
        assert!(scope("a", "t", "").matches("a", "t", "u") && !scope("a", "t", "v").matches("a", "t", "u"));
    }

    fn start_all(lanes: &mut CommandLanes) -> Vec<String> {
        std::iter::from_fn(|| lanes.start_next()).collect()
    }

    #[test]
    fn commands_of_one_instance_run_in_sequence_and_others_in_parallel() {
        let mut lanes = CommandLanes::new(8);
        for (id, installation) in [("1", "a"), ("2", "a"), ("3", "b"), ("4", "a")] {
            lanes.push(id, scope(installation, "", ""), CommandPriority::Normal);
        }
        assert_eq!(start_all(&mut lanes), ["1", "3"]);
        lanes.finish("3");
        assert_eq!(start_all(&mut lanes), [""; 0], "a slow command delays only its own instance");
        lanes.finish("1");
        assert_eq!(start_all(&mut lanes), ["2"]);
        assert!(lanes.contains("2") && lanes.contains("4") && !lanes.contains("1"));
        lanes.finish("2");
        assert_eq!(start_all(&mut lanes), ["4"]);
        lanes.finish("4");
        assert!(lanes.is_empty());
    }

    #[test]
    fn commands_run_by_priority_and_then_in_order_of_arrival() {
        use CommandPriority::{High, Immediate, Low, Normal};
        let mut lanes = CommandLanes::new(1);
        for (id, priority) in [("l", Low), ("n1", Normal), ("n2", Normal), ("i", Immediate), ("h", High)] {
            lanes.push(id, scope(id, "", ""), priority);
        }
        let mut order = Vec::new();
        while let Some(id) = lanes.start_next() {
            assert_eq!(lanes.start_next(), None, "one command at a time");
            lanes.finish(&id);
            order.push(id);
        }
        assert_eq!(order, ["i", "h", "n1", "n2", "l"]);
    }

    #[test]
    fn an_immediate_command_does_not_wait_for_less_urgent_running_ones() {
        let mut lanes = CommandLanes::new(1);
        lanes.push("spawn", scope("a", "", ""), CommandPriority::Normal);
        assert_eq!(start_all(&mut lanes), ["spawn"]);
        lanes.push("restart", scope("a", "", ""), CommandPriority::High);
        lanes.push("kill", scope("a", "", ""), CommandPriority::Immediate);
        lanes.push("kill again", scope("a", "", ""), CommandPriority::Immediate);
        assert_eq!(start_all(&mut lanes), ["kill"], "immediate commands for one instance keep their order");
        lanes.finish("kill");
        assert_eq!(start_all(&mut lanes), ["kill again"]);
        lanes.finish("kill again");
        lanes.finish("spawn");
        assert_eq!(start_all(&mut lanes), ["restart"]);
    }

    #[test]
    fn a_command_for_all_instances_waits_for_earlier_and_delays_later_ones() {
        let mut lanes = CommandLanes::new(8);
        lanes.push("1", scope("a", "", ""), CommandPriority::Normal);
        lanes.push("all", scope("", "", ""), CommandPriority::Normal);
        lanes.push("2", scope("b", "", ""), CommandPriority::Normal);
        assert_eq!(start_all(&mut lanes), ["1"]);
        lanes.finish("1");
        assert_eq!(start_all(&mut lanes), ["all"]);
        lanes.finish("all");
        assert_eq!(start_all(&mut lanes), ["2"]);
    }

    #[test]
    fn the_effects_of_commands_in_every_status_match_the_snapshot() {
        let row = |status: Status| {
            let seen = ObservedInstance { status, wants_to_run: true, has_process: false, is_new: true };
            let [up, configured, down] = [CommandEffect::Up, CommandEffect::Configured, CommandEffect::Down]
                .map(|effect| effect_progress(effect, seen));
            format!("{status:>20}  Up {up:?}  Configured {configured:?}  Down {down:?}")
        };
        insta::assert_snapshot!(Status::ALL.iter().map(|status| row(*status)).collect::<Vec<_>>().join("\n"));
        let seen = |wants_to_run, has_process, is_new| ObservedInstance {
            status: Status::Online,
            wants_to_run,
            has_process,
            is_new,
        };
        assert_eq!(
            effect_progress(CommandEffect::Up, seen(true, true, false)),
            EffectProgress::Pending,
            "the old run is still online"
        );
        assert_eq!(
            effect_progress(CommandEffect::Down, seen(false, true, true)),
            EffectProgress::Pending,
            "the process still runs"
        );
        assert_eq!(effect_progress(CommandEffect::Down, seen(false, false, true)), EffectProgress::Visible);
        assert_eq!(
            effect_progress(CommandEffect::Configured, seen(false, false, false)),
            EffectProgress::Visible,
            "a person has stopped it"
        );
    }
}
