//! The `policy` tables. As parsed, each number can be missing. A missing number is taken from the tier above, and at
//! the top from the defaults of the runtime.

use std::time::Duration;

use mcp_satellite_model::policy::{
    BatchPolicy, DegradedAction, HealthCheck, HealthPolicy, IdlePolicy, IsolationPolicy, LogPolicy, MemoryPolicy,
    Policy, PolicyError, ReconnectPolicy, RemotePolicy, RestartPolicy, RetryPolicy, SandboxBind, SessionPolicy,
    TeamBudgetPolicy, WatchdogPolicy,
};
use mcp_satellite_model::spec::ServerTarget;
use toml_span::Span;

use super::errors::ConfigFindings;
use super::gateway::GatewayLimits;
use super::reader::{ParsedLimit, TableReader};

/// Generates the struct of a parsed table. Its fields have the names of the policy's fields: `field: Type = reader`
/// sets `policy.field`.
macro_rules! section {
    ($(#[$doc:meta])* $name:ident of $policy:ident { $($field:ident: $kind:ty = $read:path),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $name {
            at: Span,
            $($field: Option<$kind>,)+
        }

        impl $name {
            /// Keys of the table.
            pub(crate) const KEYS: &'static [&'static str] = &[$(stringify!($field)),+];

            pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
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
    RestartTable of RestartPolicy {
        window: Duration = TableReader::positive,
        max_crashes: usize = TableReader::count::<1, _>,
        delays: Vec<Duration> = TableReader::durations,
        quick: Duration = TableReader::duration,
    }
);
section!(
    SessionPolicyTable of SessionPolicy {
        handshake_timeout: Duration = TableReader::positive,
        request_timeout: Duration = TableReader::positive,
        request_timeout_max: Duration = TableReader::positive,
        terminate_grace: Duration = TableReader::duration,
        line_max: usize = TableReader::count::<1024, _>,
        calls_in_flight_max: usize = TableReader::count::<1, _>,
        callers_waiting_max: usize = TableReader::count::<1, _>,
        list_changed_debounce: Duration = TableReader::duration,
        list_pages_max: usize = TableReader::count::<1, _>,
        list_entries_max: usize = TableReader::count::<1, _>,
        list_bytes_max: usize = size,
        list_timeout: Duration = TableReader::positive,
        exit_drain: Duration = TableReader::duration,
        drain_timeout: Duration = TableReader::duration,
        permit_hold_max: Duration = TableReader::positive,
    }
);
section!(
    IdleTable of IdlePolicy {
        idle: Duration = idle,
        grace: Duration = TableReader::duration,
        sweep: Duration = TableReader::positive,
    }
);
section!(
    WatchdogTable of WatchdogPolicy {
        silence: Duration = TableReader::positive,
        ping_timeout: Duration = TableReader::positive,
    }
);
section!(
    HealthTable of HealthPolicy {
        check: HealthCheck = health_check,
        interval: Duration = TableReader::positive,
        timeout: Duration = TableReader::positive,
        threshold: u32 = TableReader::count::<1, _>,
        on_degraded: DegradedAction = on_degraded,
    }
);
section!(
    RetryTable of RetryPolicy {
        attempts_max: u32 = TableReader::count::<1, _>,
        delays: Vec<Duration> = TableReader::durations,
    }
);
section!(
    RemoteTable of RemotePolicy {
        connect_timeout: Duration = TableReader::positive,
        header_timeout: Duration = TableReader::positive,
        close_timeout: Duration = TableReader::duration,
        server_errors_max: u32 = TableReader::count::<1, _>,
    }
);
section!(
    LogsTable of LogPolicy {
        lines_per_second_max: u32 = TableReader::count::<1, _>,
        line_max: usize = TableReader::count::<16, _>,
        batch_delay: Duration = TableReader::duration,
        batch_lines_max: usize = TableReader::count::<1, _>,
    }
);
section!(
    /// The `[policy.team]` table, at the top level of the file only.
    TeamBudgetTable of TeamBudgetPolicy {
        window: Duration = TableReader::positive,
        max_exits: usize = TableReader::count::<1, _>,
    }
);
section!(
    /// The `[policy.memory]` table, at the top level of the file only.
    MemoryTable of MemoryPolicy {
        pressure_max_percent: u8 = TableReader::percent,
        available_min_percent: u8 = TableReader::percent,
        start_interval: Duration = TableReader::positive,
    }
);
section!(
    BatchingTable of BatchPolicy {
        interval: Duration = TableReader::positive,
        store_delay: Duration = TableReader::duration,
        batch_max: usize = TableReader::count::<1, _>,
        queue_max: usize = TableReader::count::<1, _>,
        backoff_max: Duration = TableReader::positive,
        flush_timeout: Duration = TableReader::duration,
        request_delay: Duration = TableReader::positive,
        request_lines_max: usize = TableReader::count::<1, _>,
        request_payload_max: usize = size,
    }
);
section!(
    GatewayLimitsTable of GatewayLimits {
        body_max: usize = size,
        bodies_max: usize = size,
        streams_max: usize = size,
        session_idle: Duration = TableReader::positive,
        session_age_max: Duration = TableReader::positive,
        sessions_max: usize = TableReader::count::<1, _>,
        sessions_per_user_max: usize = TableReader::count::<1, _>,
        connections_max: usize = TableReader::count::<1, _>,
        unauthenticated_max: usize = TableReader::count::<1, _>,
        unauthenticated_per_peer_max: usize = TableReader::count::<1, _>,
        header_timeout: Duration = TableReader::positive,
        requests_per_second: u32 = TableReader::count_or_off,
        burst: u32 = TableReader::count::<1, _>,
        calls_per_user_max: usize = TableReader::count_or_off,
        request_timeout: Option<Duration> = positive_as_option,
        resume_grace: Duration = TableReader::duration,
        drain_timeout: Duration = TableReader::duration,
    }
);

fn size(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<usize> {
    fields.bytes(key).get().and_then(|size| usize::try_from(size.value).ok())
}

fn idle(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<Duration> {
    fields.positive_or_off(key, IdlePolicy::OFF)
}

#[expect(clippy::option_option, reason = "whether it was typed, and what it is then")]
fn positive_as_option(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<Option<Duration>> {
    fields.positive(key).map(Some)
}

fn health_check(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<HealthCheck> {
    let words = [("ping", HealthCheck::Ping), ("tools_list", HealthCheck::ToolsList), ("get", HealthCheck::Get)];
    fields.read_choice(key, &words)
}

fn on_degraded(fields: &mut TableReader<'_, '_>, key: &'static str) -> Option<DegradedAction> {
    fields.read_choice(key, &[("warn", DegradedAction::Warn), ("reconnect", DegradedAction::Reconnect)])
}

/// Parsed `[policy.reconnect]`. The mode selects a preset, also for `[policy.health]`.
#[derive(Debug, Default)]
pub(crate) struct ReconnectTable {
    at: Span,
    mode: Option<ReconnectMode>,
    backoff_min: Option<Duration>,
    backoff_max: Option<Duration>,
    jitter_percent: Option<u8>,
    attempts_max: Option<ParsedLimit<u32>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ReconnectMode {
    #[default]
    Persistent,
    Bounded,
}

impl ReconnectTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            mode: fields
                .read_choice("mode", &[("persistent", ReconnectMode::Persistent), ("bounded", ReconnectMode::Bounded)]),
            backoff_min: fields.positive("backoff_min"),
            backoff_max: fields.positive("backoff_max"),
            jitter_percent: fields.percent("jitter_percent"),
            attempts_max: fields.limit("attempts_max", TableReader::count::<1, _>),
        }
    }

    fn put(self, EffectivePolicy { policy, mode, .. }: &mut EffectivePolicy) -> Span {
        // Repeating the active mode has no effect: other settings of the tiers above stay.
        if let Some(other) = self.mode.filter(|typed| typed != mode) {
            *mode = other;
            let (reconnect, health) = match other {
                ReconnectMode::Persistent => (ReconnectPolicy::persistent(), HealthPolicy::persistent()),
                ReconnectMode::Bounded => (ReconnectPolicy::bounded(), HealthPolicy::bounded()),
            };
            // The mode affects how persistently a server is checked, not the kind of check.
            let check = policy.health.check;
            (policy.reconnect, policy.health) = (reconnect, HealthPolicy { check, ..health });
        }
        let reconnect = &mut policy.reconnect;
        put(self.backoff_min, &mut reconnect.backoff_min);
        put(self.backoff_max, &mut reconnect.backoff_max);
        put(self.jitter_percent, &mut reconnect.jitter_percent);
        put(self.attempts_max.map(ParsedLimit::into_option), &mut reconnect.attempts_max);
        self.at
    }
}

fn put<T>(typed: Option<T>, target: &mut T) {
    if let Some(typed) = typed {
        *target = typed;
    }
}

#[derive(Debug, Default)]
pub(crate) struct IsolationTable {
    at: Span,
    preset: Option<IsolationPolicy>,
    network: Option<bool>,
    binds: Option<Vec<SandboxBind>>,
    allow_env: Option<Vec<String>>,
    memory_max: Option<ParsedLimit<u64>>,
    cpu_time_max: Option<ParsedLimit<Duration>>,
    processes_max: Option<ParsedLimit<u64>>,
    open_files_max: Option<ParsedLimit<u64>>,
    file_size_max: Option<ParsedLimit<u64>>,
    tmp_size: Option<u64>,
}

impl IsolationTable {
    fn read(fields: &mut TableReader<'_, '_>) -> Self {
        let presets = [("standard", IsolationPolicy::standard()), ("strict", IsolationPolicy::strict())];
        Self {
            at: fields.at,
            preset: fields.read_choice("preset", &presets),
            network: fields.flag("network").get().map(|network| network.value),
            binds: fields.binds("binds"),
            allow_env: fields.code_variables("allow_env"),
            memory_max: fields.limit("memory_max", |fields, key| fields.bytes(key).get().map(|size| size.value)),
            cpu_time_max: fields.limit("cpu_time_max", TableReader::positive),
            processes_max: fields.limit("processes_max", TableReader::count::<1, _>),
            open_files_max: fields.limit("open_files_max", TableReader::count::<8, _>),
            file_size_max: fields.limit("file_size_max", |fields, key| fields.bytes(key).get().map(|size| size.value)),
            tmp_size: fields.bytes("tmp_size").get().map(|size| size.value),
        }
    }

    fn put(self, policy: &mut IsolationPolicy) {
        if let Some(preset) = self.preset {
            // A preset contains only limits; network, binds and variables stay.
            let IsolationPolicy { network, binds, allow_env, .. } = std::mem::take(policy);
            *policy = IsolationPolicy { network, binds, allow_env, ..preset };
        }
        put(self.network, &mut policy.network);
        put(self.binds, &mut policy.binds);
        put(self.allow_env, &mut policy.allow_env);
        put(self.memory_max.map(ParsedLimit::into_option), &mut policy.memory_max);
        put(self.cpu_time_max.map(ParsedLimit::into_option), &mut policy.cpu_time_max);
        put(self.processes_max.map(ParsedLimit::into_option), &mut policy.processes_max);
        put(self.open_files_max.map(ParsedLimit::into_option), &mut policy.open_files_max);
        put(self.file_size_max.map(ParsedLimit::into_option), &mut policy.file_size_max);
        put(self.tmp_size, &mut policy.tmp_size);
    }
}

/// Effective policy of a tier and all tiers above it.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct EffectivePolicy {
    pub(crate) policy: Policy,
    mode: ReconnectMode,
    /// True if a tier sets `idle`. Servers of an `mcp.json` are put to sleep only then.
    pub(crate) sets_idle: bool,
}

#[derive(Debug, Default)]
pub(crate) struct PolicyTier {
    restart: RestartTable,
    session: SessionPolicyTable,
    idle: IdleTable,
    watchdog: WatchdogTable,
    reconnect: ReconnectTable,
    health: HealthTable,
    retry: RetryTable,
    remote: RemoteTable,
    logs: LogsTable,
    isolation: IsolationTable,
}

impl PolicyTier {
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            restart: fields.section("restart", RestartTable::read),
            session: fields.section("session", SessionPolicyTable::read),
            idle: fields.section("idle", IdleTable::read),
            watchdog: fields.section("watchdog", WatchdogTable::read),
            reconnect: fields.section("reconnect", ReconnectTable::read),
            health: fields.section("health", HealthTable::read),
            retry: fields.section("retry", RetryTable::read),
            remote: fields.section("remote", RemoteTable::read),
            logs: fields.section("logs", LogsTable::read),
            isolation: fields.section("isolation", IsolationTable::read),
        }
    }

    pub(crate) fn without_sleep() -> Self {
        Self { idle: IdleTable { idle: Some(IdlePolicy::OFF), ..IdleTable::default() }, ..Self::default() }
    }

    pub(crate) fn from_mcp_json(fields: &mut TableReader<'_, '_>) -> Self {
        let at = fields.span_of("idle").unwrap_or_default();
        Self { idle: IdleTable { at, idle: idle(fields, "idle"), ..IdleTable::default() }, ..Self::default() }
    }

    pub(crate) fn has_idle_settings(&self) -> bool {
        let IdleTable { idle, grace, sweep, at: _ } = &self.idle;
        idle.is_some() || grace.is_some() || sweep.is_some()
    }

    pub(crate) fn unused_sections(&self, target: &ServerTarget) -> impl Iterator<Item = (&'static str, Span)> {
        let Self { restart, session: _, idle, watchdog, reconnect: _, health, retry, remote, logs, isolation } = self;
        let sections = match target {
            ServerTarget::Stdio { .. } => vec![("health", health.at), ("retry", retry.at), ("remote", remote.at)],
            ServerTarget::Remote { .. } => vec![
                ("restart", restart.at),
                ("idle", idle.at),
                ("watchdog", watchdog.at),
                ("logs", logs.at),
                ("isolation", isolation.at),
            ],
        };
        sections.into_iter().filter(|(_, at)| is_present(*at))
    }

    pub(crate) fn merge_over(self, above: &EffectivePolicy, findings: &mut ConfigFindings) -> EffectivePolicy {
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
            let (min, max) =
                (display_duration(policy.reconnect.backoff_min), display_duration(policy.reconnect.backoff_max));
            findings.error(reconnect, message, format!("the values are \"{min}\" and \"{max}\"; set both"));
        }
        let was_good = above.remote.connect_timeout <= above.remote.header_timeout;
        if was_good && policy.remote.connect_timeout > policy.remote.header_timeout {
            let message = "`connect_timeout` is longer than `header_timeout`, which includes it";
            let (connect, header) =
                (display_duration(policy.remote.connect_timeout), display_duration(policy.remote.header_timeout));
            findings.error(remote, message, format!("the values are \"{connect}\" and \"{header}\"; set both"));
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
fn is_present(section: Span) -> bool {
    section != Span::default()
}

fn display_duration(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(duration)
}

impl TeamBudgetTable {
    pub(crate) fn into_policy(self) -> TeamBudgetPolicy {
        let mut policy = TeamBudgetPolicy::default();
        self.put(&mut policy);
        policy
    }
}

impl MemoryTable {
    pub(crate) fn into_policy(self) -> MemoryPolicy {
        let mut policy = MemoryPolicy::default();
        self.put(&mut policy);
        policy
    }
}

impl GatewayLimitsTable {
    pub(crate) fn into_limits(self, findings: &mut ConfigFindings) -> GatewayLimits {
        let mut limits = GatewayLimits::default();
        let at = self.put(&mut limits);
        if limits.body_max < 1024 {
            findings.error(at, "`body_max` is too small for a message", "give at least \"1KiB\"");
        }
        if limits.bodies_max < limits.body_max {
            let message = "`bodies_max` is less than `body_max`: a body that is allowed could never be read";
            findings.error(at, message, "make it a few times as large; its default is \"256MiB\"");
        }
        limits
    }
}

impl BatchingTable {
    pub(crate) fn into_policy(self, findings: &mut ConfigFindings) -> BatchPolicy {
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
