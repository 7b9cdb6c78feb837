//! Settings that only a restart applies.

use std::time::Duration;

use mcp_satellite_actors::model::policy::{BatchPolicy, MemoryPolicy, TeamBudgetPolicy};

use crate::config::{BackendPlan, Plan, Profile, SinkPlan, TelemetryPlan};
use crate::connect::isolation::{Isolation, UidRange};
use crate::connect::process::CgroupMode;
use crate::journal::JournalLimits;

/// Settings of a plan that take effect at the start only; a reload cannot change them.
#[derive(PartialEq)]
pub(super) struct StartupSettings {
    name: String,
    backend: Option<BackendPlan>,
    journal: JournalLimits,
    sink: SinkPlan,
    pub(super) batch: BatchPolicy,
    telemetry: TelemetryPlan,
    team_budget: TeamBudgetPolicy,
    memory: MemoryPolicy,
    start_permits: Option<usize>,
    connect_permits: Option<usize>,
    profile: Profile,
    isolation: Isolation,
    cgroups: CgroupMode,
    uid_range: Option<UidRange>,
    hang_timeout: Duration,
    keep_servers: bool,
}

impl StartupSettings {
    pub(super) fn from_plan(plan: &Plan) -> Self {
        Self {
            name: plan.name.clone(),
            // A changed token is applied by a reload.
            backend: plan.backend.clone().map(|backend| BackendPlan { token: None, ..backend }),
            journal: plan.journal.clone(),
            sink: plan.sink.clone(),
            batch: plan.batch.clone(),
            telemetry: plan.telemetry.clone(),
            team_budget: plan.team_budget.clone(),
            memory: plan.memory.clone(),
            start_permits: plan.start_permits,
            connect_permits: plan.connect_permits,
            profile: plan.profile,
            isolation: plan.isolation,
            cgroups: plan.cgroups,
            uid_range: plan.uid_range,
            hang_timeout: plan.hang_timeout,
            keep_servers: plan.keep_servers,
        }
    }
}
