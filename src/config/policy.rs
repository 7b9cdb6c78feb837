//! The `policy` tables. As parsed, each number can be missing. A missing number is taken from the tier above, and at
//! the top from the defaults of the runtime.

use std::time::Duration;

use mcp_satellite_actors::model::policy::{
    BatchPolicy, Bind, HealthCheck, HealthPolicy, IdlePolicy, IsolationPolicy, LogPolicy, MemoryPolicy, OnDegraded,
    Policy, PolicyError, ReconnectPolicy, RemotePolicy, RestartPolicy, RetryPolicy, SessionPolicy, TeamBudgetPolicy,
    WatchdogPolicy,
};
use mcp_satellite_actors::model::spec::Target;
use toml_span::Span;

use super::errors::Findings;
use super::gateway::GatewayLimits;
use super::reader::{Ceiling, Fields};

/// Generates the struct of a parsed table. Its fields have the names of the policy's fields: `field: Type = reader`
/// sets `policy.field`.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident of $policy:ident { $($field:ident: $kind:ty = $read:path),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(super) struct $name {
            at: Span,
            $($field: Option<$kind>,)+
        }

        impl $name {
            pub(super) fn read(fields: &mut Fields<'_, '_>) -> Self {
                Self { at: fields.at, $($field: $read(fields, stringify!($field)),)+ }
            }

            fn put(self, policy: &mut $policy) -> Span {
                $(if let Some(value) = self.$field { policy.$field = value; })+
                self.at
            }
        }
    };
}

section!(
    Restart of RestartPolicy {
        window: Duration = Fields::positive,
        max_crashes: usize = Fields::count::<1, _>,
        delays: Vec<Duration> = Fields::durations,
        quick: Duration = Fields::duration,
    }
);
section!(
    Session of SessionPolicy {
        handshake_timeout: Duration = Fields::positive,
        request_timeout: Duration = Fields::positive,
        request_timeout_max: Duration = Fields::positive,
        terminate_grace: Duration = Fields::duration,
        line_max: usize = Fields::count::<1024, _>,
        calls_in_flight_max: usize = Fields::count::<1, _>,
        callers_waiting_max: usize = Fields::count::<1, _>,
        list_changed_debounce: Duration = Fields::duration,
        list_pages_max: usize = Fields::count::<1, _>,
        list_entries_max: usize = Fields::count::<1, _>,
        list_bytes_max: usize = size,
        list_timeout: Duration = Fields::positive,
        exit_drain: Duration = Fields::duration,
        drain_timeout: Duration = Fields::duration,
        permit_hold_max: Duration = Fields::positive,
    }
);
section!(
    Sleep of IdlePolicy {
        idle: Duration = idle,
        grace: Duration = Fields::duration,
        sweep: Duration = Fields::positive,
    }
);
section!(
    Watchdog of WatchdogPolicy {
        silence: Duration = Fields::positive,
        ping_timeout: Duration = Fields::positive,
    }
);
section!(
    Health of HealthPolicy {
        check: HealthCheck = health_check,
        interval: Duration = Fields::positive,
        timeout: Duration = Fields::positive,
        threshold: u32 = Fields::count::<1, _>,
        on_degraded: OnDegraded = on_degraded,
    }
);
section!(
    Retry of RetryPolicy {
        attempts_max: u32 = Fields::count::<1, _>,
        delays: Vec<Duration> = Fields::durations,
    }
);
section!(
    Remote of RemotePolicy {
        connect_timeout: Duration = Fields::positive,
        header_timeout: Duration = Fields::positive,
        close_timeout: Duration = Fields::duration,
        server_errors_max: u32 = Fields::count::<1, _>,
    }
);
section!(
    Logs of LogPolicy {
        lines_per_second_max: u32 = Fields::count::<1, _>,
        line_max: usize = Fields::count::<16, _>,
        batch_delay: Duration = Fields::duration,
        batch_lines_max: usize = Fields::count::<1, _>,
    }
);
section!(
    /// The `[policy.team]` table, at the top level of the file only.
    TeamBudget of TeamBudgetPolicy {
        window: Duration = Fields::positive,
        max_exits: usize = Fields::count::<1, _>,
    }
);
section!(
    /// The `[policy.memory]` table, at the top level of the file only.
    Memory of MemoryPolicy {
        pressure_max_percent: u8 = Fields::percent,
        available_min_percent: u8 = Fields::percent,
        start_interval: Duration = Fields::positive,
    }
);
section!(
    Batching of BatchPolicy {
        interval: Duration = Fields::positive,
        batch_max: usize = Fields::count::<1, _>,
        queue_max: usize = Fields::count::<1, _>,
        backoff_max: Duration = Fields::positive,
        flush_timeout: Duration = Fields::duration,
        request_delay: Duration = Fields::positive,
        request_lines_max: usize = Fields::count::<1, _>,
        request_payload_max: usize = size,
    }
);
section!(
    Limits of GatewayLimits {
        body_max: usize = size,
        bodies_max: usize = size,
        streams_max: usize = size,
        session_idle: Duration = Fields::positive,
        session_age_max: Duration = Fields::positive,
        sessions_max: usize = Fields::count::<1, _>,
        sessions_per_user_max: usize = Fields::count::<1, _>,
        connections_max: usize = Fields::count::<1, _>,
        unauthenticated_max: usize = Fields::count::<1, _>,
        unauthenticated_per_peer_max: usize = Fields::count::<1, _>,
        header_timeout: Duration = Fields::positive,
        requests_per_second: u32 = Fields::count_or_off,
        burst: u32 = Fields::count::<1, _>,
        calls_per_user_max: usize = Fields::count_or_off,
        request_timeout: Option<Duration> = given,
        resume_grace: Duration = Fields::duration,
        drain_timeout: Duration = Fields::duration,
    }
);

fn size(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<usize> {
    fields.bytes(key).given().and_then(|size| usize::try_from(size.value).ok())
}

fn idle(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<Duration> {
    fields.positive_or_off(key, IdlePolicy::OFF)
}

#[expect(clippy::option_option, reason = "whether it was typed, and what it is then")]
fn given(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<Option<Duration>> {
    fields.positive(key).map(Some)
}

fn health_check(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<HealthCheck> {
    let words = [("ping", HealthCheck::Ping), ("tools_list", HealthCheck::ToolsList), ("get", HealthCheck::Get)];
    fields.one_of(key, &words)
}

fn on_degraded(fields: &mut Fields<'_, '_>, key: &'static str) -> Option<OnDegraded> {
    fields.one_of(key, &[("warn", OnDegraded::Warn), ("reconnect", OnDegraded::Reconnect)])
}

/// Parsed `[policy.reconnect]`. The mode selects a preset, also for `[policy.health]`.
#[derive(Debug, Default)]
pub(super) struct Reconnect {
    at: Span,
    mode: Option<Mode>,
    backoff_min: Option<Duration>,
    backoff_max: Option<Duration>,
    jitter_percent: Option<u8>,
    attempts_max: Option<Ceiling<u32>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Mode {
    #[default]
    Persistent,
    Bounded,
}

impl Reconnect {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            at: fields.at,
            mode: fields.one_of("mode", &[("persistent", Mode::Persistent), ("bounded", Mode::Bounded)]),
            backoff_min: fields.positive("backoff_min"),
            backoff_max: fields.positive("backoff_max"),
            jitter_percent: fields.percent("jitter_percent"),
            attempts_max: fields.limit("attempts_max", Fields::count::<1, _>),
        }
    }

    fn put(self, Held { policy, mode, .. }: &mut Held) -> Span {
        // Repeating the active mode has no effect: other settings of the tiers above stay.
        if let Some(other) = self.mode.filter(|typed| typed != mode) {
            *mode = other;
            let (reconnect, health) = match other {
                Mode::Persistent => (ReconnectPolicy::persistent(), HealthPolicy::persistent()),
                Mode::Bounded => (ReconnectPolicy::bounded(), HealthPolicy::bounded()),
            };
            // The mode affects how persistently a server is checked, not the kind of check.
            let check = policy.health.check;
            (policy.reconnect, policy.health) = (reconnect, HealthPolicy { check, ..health });
        }
        let reconnect = &mut policy.reconnect;
        put(self.backoff_min, &mut reconnect.backoff_min);
        put(self.backoff_max, &mut reconnect.backoff_max);
        put(self.jitter_percent, &mut reconnect.jitter_percent);
        put(self.attempts_max.map(Ceiling::meant), &mut reconnect.attempts_max);
        self.at
    }
}

fn put<T>(typed: Option<T>, meant: &mut T) {
    if let Some(typed) = typed {
        *meant = typed;
    }
}

#[derive(Debug, Default)]
pub(super) struct Isolation {
    at: Span,
    preset: Option<IsolationPolicy>,
    network: Option<bool>,
    binds: Option<Vec<Bind>>,
    memory_max: Option<Ceiling<u64>>,
    cpu_time_max: Option<Ceiling<Duration>>,
    processes_max: Option<Ceiling<u64>>,
    open_files_max: Option<Ceiling<u64>>,
    file_size_max: Option<Ceiling<u64>>,
    tmp_size: Option<u64>,
}

impl Isolation {
    fn read(fields: &mut Fields<'_, '_>) -> Self {
        let presets = [("standard", IsolationPolicy::standard()), ("strict", IsolationPolicy::strict())];
        Self {
            at: fields.at,
            preset: fields.one_of("preset", &presets),
            network: fields.flag("network").given().map(|network| network.value),
            binds: fields.binds("binds"),
            memory_max: fields.limit("memory_max", |fields, key| fields.bytes(key).given().map(|size| size.value)),
            cpu_time_max: fields.limit("cpu_time_max", Fields::positive),
            processes_max: fields.limit("processes_max", Fields::count::<1, _>),
            open_files_max: fields.limit("open_files_max", Fields::count::<8, _>),
            file_size_max: fields
                .limit("file_size_max", |fields, key| fields.bytes(key).given().map(|size| size.value)),
            tmp_size: fields.bytes("tmp_size").given().map(|size| size.value),
        }
    }

    fn put(self, policy: &mut IsolationPolicy) {
        if let Some(preset) = self.preset {
            // A preset contains only limits; network and binds stay.
            let (network, binds) = (policy.network, std::mem::take(&mut policy.binds));
            *policy = IsolationPolicy { network, binds, ..preset };
        }
        put(self.network, &mut policy.network);
        put(self.binds, &mut policy.binds);
        put(self.memory_max.map(Ceiling::meant), &mut policy.memory_max);
        put(self.cpu_time_max.map(Ceiling::meant), &mut policy.cpu_time_max);
        put(self.processes_max.map(Ceiling::meant), &mut policy.processes_max);
        put(self.open_files_max.map(Ceiling::meant), &mut policy.open_files_max);
        put(self.file_size_max.map(Ceiling::meant), &mut policy.file_size_max);
        put(self.tmp_size, &mut policy.tmp_size);
    }
}

/// Effective policy of a tier and all tiers above it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Held {
    pub(super) policy: Policy,
    mode: Mode,
    /// True if a tier sets `idle`. Servers of an `mcp.json` are put to sleep only then.
    pub(super) sets_idle: bool,
}

#[derive(Debug, Default)]
pub(super) struct Tier {
    restart: Restart,
    session: Session,
    idle: Sleep,
    watchdog: Watchdog,
    reconnect: Reconnect,
    health: Health,
    retry: Retry,
    remote: Remote,
    logs: Logs,
    isolation: Isolation,
}

impl Tier {
    pub(super) fn read(fields: &mut Fields<'_, '_>) -> Self {
        Self {
            restart: fields.section("restart", Restart::read),
            session: fields.section("session", Session::read),
            idle: fields.section("idle", Sleep::read),
            watchdog: fields.section("watchdog", Watchdog::read),
            reconnect: fields.section("reconnect", Reconnect::read),
            health: fields.section("health", Health::read),
            retry: fields.section("retry", Retry::read),
            remote: fields.section("remote", Remote::read),
            logs: fields.section("logs", Logs::read),
            isolation: fields.section("isolation", Isolation::read),
        }
    }

    pub(super) fn without_sleep() -> Self {
        Self { idle: Sleep { idle: Some(IdlePolicy::OFF), ..Sleep::default() }, ..Self::default() }
    }

    pub(super) fn of_mcp_json(fields: &mut Fields<'_, '_>) -> Self {
        let at = fields.span_of("idle").unwrap_or_default();
        Self { idle: Sleep { at, idle: idle(fields, "idle"), ..Sleep::default() }, ..Self::default() }
    }

    pub(super) fn speaks_of_sleep(&self) -> bool {
        let Sleep { idle, grace, sweep, at: _ } = &self.idle;
        idle.is_some() || grace.is_some() || sweep.is_some()
    }

    /// Returns the sections that have no effect on this kind of server, with their places.
    pub(super) fn beside_the_point(&self, target: &Target) -> impl Iterator<Item = (&'static str, Span)> {
        let Self { restart, session: _, idle, watchdog, reconnect: _, health, retry, remote, logs, isolation } = self;
        let sections = match target {
            Target::Stdio { .. } => vec![("health", health.at), ("retry", retry.at), ("remote", remote.at)],
            Target::Remote { .. } => vec![
                ("restart", restart.at),
                ("idle", idle.at),
                ("watchdog", watchdog.at),
                ("logs", logs.at),
                ("isolation", isolation.at),
            ],
        };
        sections.into_iter().filter(|(_, at)| is_there(*at))
    }

    /// Merges this tier over the effective policy of the tiers above.
    pub(super) fn over(self, above: &Held, findings: &mut Findings) -> Held {
        let mut held = above.clone();
        // First, because the mode sets the defaults of `health`.
        let reconnect = self.reconnect.put(&mut held);
        held.sets_idle |= self.idle.idle.is_some();
        let (policy, above) = (&mut held.policy, &above.policy);
        self.restart.put(&mut policy.restart);
        let session = self.session.put(&mut policy.session);
        self.idle.put(&mut policy.idle);
        self.watchdog.put(&mut policy.watchdog);
        self.health.put(&mut policy.health);
        self.retry.put(&mut policy.retry);
        let remote = self.remote.put(&mut policy.remote);
        let logs = self.logs.put(&mut policy.logs);
        self.isolation.put(&mut policy.isolation);

        // A contradiction between two numbers is reported at the tier that introduces it.
        let was_good = above.session.request_timeout <= above.session.request_timeout_max;
        if was_good && policy.session.request_timeout > policy.session.request_timeout_max {
            let message = "`request_timeout` is longer than `request_timeout_max`";
            findings.error(session, message, "give `request_timeout_max` too; its default is \"5m\"");
        }
        let was_good = above.reconnect.backoff_min <= above.reconnect.backoff_max;
        if was_good && policy.reconnect.backoff_min > policy.reconnect.backoff_max {
            let message = "`backoff_min` is longer than `backoff_max`";
            let (min, max) = (shown(policy.reconnect.backoff_min), shown(policy.reconnect.backoff_max));
            findings.error(reconnect, message, format!("here they are \"{min}\" and \"{max}\"; give both"));
        }
        let was_good = above.remote.connect_timeout <= above.remote.header_timeout;
        if was_good && policy.remote.connect_timeout > policy.remote.header_timeout {
            let message = "`connect_timeout` is longer than `header_timeout`, which includes it";
            let (connect, header) = (shown(policy.remote.connect_timeout), shown(policy.remote.header_timeout));
            findings.error(remote, message, format!("here they are \"{connect}\" and \"{header}\"; give both"));
        }
        if above.check().is_ok()
            && let Err(PolicyError { field, problem, remedy }) = policy.check()
        {
            let at = match field.split_once('.') {
                Some(("reconnect", _)) => reconnect,
                Some(("remote", _)) => remote,
                Some(("logs", _)) => logs,
                _ => session,
            };
            findings.error(at, format!("`policy.{field}` {problem}"), remedy);
        }
        held
    }
}

/// Returns true if the section was typed. A missing section has the default span.
fn is_there(section: Span) -> bool {
    section != Span::default()
}

fn shown(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(duration)
}

impl TeamBudget {
    pub(super) fn meant(self) -> TeamBudgetPolicy {
        let mut policy = TeamBudgetPolicy::default();
        self.put(&mut policy);
        policy
    }
}

impl Memory {
    pub(super) fn meant(self) -> MemoryPolicy {
        let mut policy = MemoryPolicy::default();
        self.put(&mut policy);
        policy
    }
}

impl Limits {
    pub(super) fn meant(self, findings: &mut Findings) -> GatewayLimits {
        let mut limits = GatewayLimits::default();
        let at = self.put(&mut limits);
        if limits.body_max < 1024 {
            findings.error(at, "`body_max` has no room for a message", "give at least \"1KiB\"");
        }
        if limits.bodies_max < limits.body_max {
            let message = "`bodies_max` is less than `body_max`: a body that is allowed could never be read";
            findings.error(at, message, "make it a few times as large; its default is \"256MiB\"");
        }
        limits
    }
}

impl Batching {
    pub(super) fn meant(self, findings: &mut Findings) -> BatchPolicy {
        let mut policy = BatchPolicy::default();
        let at = self.put(&mut policy);
        if policy.batch_max > policy.queue_max {
            let message = "`batch_max` is larger than `queue_max`: a full batch could never be gathered";
            findings.error(at, message, "make `queue_max` at least as large; its default is 10000");
        }
        if let Err(PolicyError { field, problem, remedy }) = policy.check() {
            findings.error(at, format!("`{field}` {problem}"), remedy);
        }
        policy
    }
}
