//! Immutable snapshots of all instances, published by the registry. Cloning a snapshot costs one reference count, and
//! readers never wait for writers. A published snapshot is a message too: nothing modifies it.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use imbl::ordmap::DiffItem;
use jiff::Timestamp;
use mcp_satellite_session::UnansweredCalls;

use crate::calls::{CallPort, InstanceCounters};
use crate::model::catalogue::{Catalogue, Revisions};
use crate::model::event::EventSubject;
use crate::model::exit::RuntimeEnd;
use crate::model::ids::{InstallationId, InstanceId, TeamId, UserId};
use crate::model::remedy::Remedy;
use crate::model::remote::{ConnectionState, ServerHealth, ServerInfo};
use crate::model::spec::InstanceSpec;
use crate::model::status::Status;
use crate::rules::request_log::logged_name;
use crate::rules::restart::ExitHistory;
use crate::rules::slot::RequestedState;

/// Containment of a process: its isolation and the means to end it completely.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessContainment {
    /// Process ID of the sandbox itself, if there is one.
    pub wrapper_pid: Option<u32>,
    /// Name of the sandbox, or `none`.
    pub isolation: &'static str,
    /// Means to find the process and all its descendants: a cgroup, a PID namespace, or its process group and a marker.
    pub mechanism: &'static str,
    /// User under which the process runs, inside and outside the sandbox.
    pub identity: String,
}

/// Instances, ordered by team, user and installation.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub(crate) instances: imbl::OrdMap<InstanceId, PublishedView>,
    pub(crate) revision: u64,
    pub(crate) end: Option<RuntimeEnd>,
}

/// Instance in a snapshot. Two are equal if they are the same allocation, so that the comparison of two snapshots reads
/// no instance.
#[derive(Debug, Clone)]
pub(crate) struct PublishedView(pub(crate) Arc<InstanceView>);

impl PartialEq for PublishedView {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Difference between two snapshots.
#[derive(Debug, Clone, Default)]
pub struct SnapshotChanges {
    /// Instances that are new or were published again, in order.
    pub changed: Vec<Arc<InstanceView>>,
    /// Instances that the later snapshot does not contain, in order.
    pub removed: Vec<InstanceId>,
}

/// Restart budget of an instance. The instance fails permanently when as many exits as `exits_max` are in the window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestartBudget {
    /// Number of unwanted exits in the window that exhausts the budget.
    pub exits_max: usize,
    /// Duration for which an exit counts.
    pub window: Duration,
    /// Times since the unwanted exits that count, oldest first. All are shorter than `window`.
    pub exit_ages: Vec<Duration>,
}

impl RestartBudget {
    /// Returns the number of further exits after which the instance fails permanently.
    pub fn remaining(&self) -> usize {
        self.exits_max.saturating_sub(self.exit_ages.len())
    }
}

/// State of one instance, as last reported by the supervisor of its team.
#[derive(Debug, Clone)]
pub struct InstanceView {
    /// Specification of the instance.
    pub spec: Arc<InstanceSpec>,
    /// Identity used in its events.
    pub subject: Arc<EventSubject>,
    /// Status shown to the user.
    pub status: Status,
    /// Reason of the status.
    pub message: Option<String>,
    /// Next step, if waiting does not help.
    pub remedy: Option<Remedy>,
    /// Time at which the instance entered this status.
    pub since: Timestamp,
    /// State requested by a person.
    pub requested_state: RequestedState,
    /// True if the instance sleeps or is being woken; shown in addition to `online`.
    pub dormant: bool,
    /// State of the connection; `None` for a process.
    pub connection: Option<ConnectionState>,
    /// Health of the server. The counters contain the time of the last check.
    pub health: ServerHealth,
    /// Self-description of the server from its last handshake.
    pub server: Option<Arc<ServerInfo>>,
    /// Process ID of the current run.
    pub pid: Option<u32>,
    /// Containment of that process.
    pub containment: Option<Arc<ProcessContainment>>,
    /// Total number of restarts, after an unwanted exit or on request.
    pub restarts: u64,
    pub(crate) history: ExitHistory,
    /// Time of the next attempt, while a delay runs.
    pub next_retry_at: Option<Instant>,
    /// Number of the next or current attempt; `None` if it does not follow a failure.
    pub attempt: Option<usize>,
    /// Time at which the current run was initialized.
    pub initialized_at: Option<Instant>,
    /// Catalogue as last read, in any status.
    pub catalogue: Option<Arc<Catalogue>>,
    /// Counters of changes of the catalogue. Readers that notify clients remember the values of their last
    /// notification.
    pub revisions: Revisions,
    /// Port for calls, while a run accepts them.
    pub port: Option<CallPort>,
    /// Port of a run that accepts no more calls, until those in progress finish.
    pub(crate) draining: Option<CallPort>,
    /// Live counters.
    pub counters: Arc<InstanceCounters>,
    /// Last failure; `None` once the instance is healthy again.
    pub last_error: Option<String>,
    /// Reason of the last exit.
    pub last_exit: Option<String>,
}

impl InstanceView {
    /// Returns the number of unwanted exits that count against the restart budget at `now`.
    pub fn exits_in_window(&self, now: Instant) -> usize {
        self.history.exits_in_window(&self.spec.policy.restart, now)
    }

    /// Returns the restart budget of the instance and the exits that count against it at `now`.
    pub fn restart_budget(&self, now: Instant) -> RestartBudget {
        let policy = &self.spec.policy.restart;
        RestartBudget {
            exits_max: policy.max_crashes,
            window: policy.window,
            exit_ages: self.history.ages_in_window(policy, now).collect(),
        }
    }

    /// Returns the instance without its run, which ended with the supervisor of its team.
    pub(crate) fn without_run(&self) -> Self {
        Self {
            port: None,
            draining: None,
            pid: None,
            containment: None,
            initialized_at: None,
            health: ServerHealth::Unknown,
            ..self.clone()
        }
    }

    /// Returns the number of unanswered calls.
    pub fn calls_in_flight(&self) -> usize {
        self.port.iter().chain(&self.draining).map(CallPort::calls_in_flight).sum()
    }

    /// Returns the unanswered calls, at most `max`, with masked names. The list does not contain the calls of a session that
    /// does not answer within `timeout`; they are counted.
    pub async fn unanswered_calls(&self, max: usize, timeout: Duration) -> UnansweredCalls {
        let is_used = |port: &&CallPort| port.calls_in_flight() > 0;
        let lists = self.port.iter().chain(&self.draining).filter(is_used).map(|port| async move {
            let counted = || UnansweredCalls { total: port.calls_in_flight(), newest: Vec::new() };
            tokio::time::timeout(timeout, port.unanswered_calls(max)).await.unwrap_or_else(|_elapsed| counted())
        });
        let mut calls = UnansweredCalls::default();
        for UnansweredCalls { total, newest } in join_all(lists).await {
            calls.total += total;
            calls.newest.extend(newest);
        }
        calls.newest.sort_by_key(|call| Reverse(call.since));
        calls.newest.truncate(max);
        let mask = &self.spec.mask;
        for call in &mut calls.newest {
            call.method = logged_name(&call.method, mask);
            call.tool = call.tool.as_deref().map(|tool| logged_name(tool, mask));
        }
        calls
    }

    /// Returns the catalogue offered to the user: `None` unless the status is `online`.
    pub fn offered_catalogue(&self) -> Option<&Arc<Catalogue>> {
        (self.status == Status::Online).then_some(self.catalogue.as_ref()).flatten()
    }
}

impl Snapshot {
    /// Returns the instance with this identity.
    pub fn get(&self, id: &InstanceId) -> Option<&Arc<InstanceView>> {
        self.instances.get(id).map(|view| &view.0)
    }

    /// Returns the instances, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<InstanceView>> {
        self.instances.values().map(|view| &view.0)
    }

    /// Returns the number of the publication; later snapshots of a runtime have higher numbers. The snapshot before the
    /// first publication has the number 0.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the differences from `earlier`, a snapshot of the same runtime. The cost grows with the number of
    /// instances that were published meanwhile, not with their total number.
    pub fn changes_since(&self, earlier: &Self) -> SnapshotChanges {
        let mut changes = SnapshotChanges::default();
        for difference in earlier.instances.diff(&self.instances) {
            match difference {
                DiffItem::Add(_, view) | DiffItem::Update { new: (_, view), .. } => {
                    changes.changed.push(view.0.clone());
                }
                DiffItem::Remove(id, _) => changes.removed.push(id.clone()),
            }
        }
        changes
    }

    /// Returns the reason why the runtime ended; `None` while it runs. Later snapshots do not differ.
    pub fn end(&self) -> Option<&RuntimeEnd> {
        self.end.as_ref()
    }

    /// Returns the last snapshot of a runtime that ended. A shutdown leaves each instance in its last state; otherwise
    /// instances that ran are shown as offline.
    pub(crate) fn with_end(&self, end: &RuntimeEnd) -> Self {
        let mut last = Self { end: Some(end.clone()), revision: self.revision + 1, ..self.clone() };
        if matches!(end, RuntimeEnd::ShutDown { .. }) {
            return last;
        }
        for view in self.iter() {
            let status = match view.status {
                kept @ (Status::AwaitingUserConfig | Status::RequiresReauth | Status::PermanentlyFailed) => kept,
                _ => Status::Offline,
            };
            let message = Some(format!("the satellite has ended: {end}")).filter(|_| status == Status::Offline);
            let view = InstanceView {
                status,
                message: message.or_else(|| view.message.clone()),
                dormant: false,
                connection: view.connection.map(|_| ConnectionState::Disconnected),
                next_retry_at: None,
                attempt: None,
                ..view.without_run()
            };
            last.instances.insert(view.spec.id.clone(), PublishedView(Arc::new(view)));
        }
        last
    }

    /// Returns the number of instances.
    pub fn len(&self) -> usize {
        self.instances.len()
    }

    /// Returns true if there are no instances.
    pub fn is_empty(&self) -> bool {
        self.instances.is_empty()
    }

    /// Returns the instances of a team.
    pub fn team(&self, team: &TeamId) -> impl Iterator<Item = &Arc<InstanceView>> {
        let first = InstanceId::lower_bound(team);
        let team = team.clone();
        self.instances.range(first..).map(|(_, view)| &view.0).take_while(move |view| view.spec.id.team == team)
    }

    /// Returns the instances of a user.
    pub fn user(&self, team: &TeamId, user: &UserId) -> impl Iterator<Item = &Arc<InstanceView>> {
        let first = InstanceId::new(team.clone(), user.clone(), InstallationId::from(""));
        let (team, user) = (team.clone(), user.clone());
        let is_of_user = move |view: &&Arc<InstanceView>| view.spec.id.team == team && view.spec.id.user == user;
        self.instances.range(first..).map(|(_, view)| &view.0).take_while(is_of_user)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;
    use crate::model::spec::{ConfigTier, InstanceConfig, InstanceInputs, ProcessLifetime, ServerTarget, UpdateMethod};

    fn view(team: &str, user: &str, installation: &str, status: Status) -> Arc<InstanceView> {
        let config = InstanceConfig {
            team: team.into(),
            team_slug: team.into(),
            user: user.into(),
            user_slug: user.into(),
            installation: installation.into(),
            server: "files".into(),
            target: ServerTarget::Stdio { command: "files".to_owned(), cwd: None },
            server_tier: ConfigTier::default(),
            team_tier: ConfigTier::default(),
            user_tier: ConfigTier::default(),
            user_required: Vec::new(),
            inputs: InstanceInputs::default(),
            lifetime: ProcessLifetime::Listed,
            update_method: UpdateMethod::default(),
            request_logging: true,
            policy: Arc::default(),
        };
        let spec = Arc::new(config.merge());
        Arc::new(InstanceView {
            subject: Arc::new(EventSubject::from(&*spec)),
            spec,
            status,
            message: None,
            remedy: None,
            since: Timestamp::UNIX_EPOCH,
            requested_state: RequestedState::Running,
            dormant: false,
            connection: None,
            health: ServerHealth::Unknown,
            server: None,
            pid: None,
            containment: None,
            restarts: 0,
            history: ExitHistory::default(),
            next_retry_at: None,
            attempt: None,
            initialized_at: None,
            catalogue: Some(Arc::default()),
            revisions: Revisions::default(),
            port: None,
            draining: None,
            counters: Arc::default(),
            last_error: None,
            last_exit: None,
        })
    }

    fn names<'a>(views: impl Iterator<Item = &'a Arc<InstanceView>>) -> Vec<String> {
        views.map(|view| view.spec.id.to_string()).collect()
    }

    #[test]
    fn a_team_and_a_user_get_only_their_own_instances() {
        let mut snapshot = Snapshot::default();
        for (team, user, installation) in
            [("b", "u", "1"), ("a", "u", "2"), ("ab", "u", "1"), ("a", "uv", "1"), ("a", "u", "1")]
        {
            let view = view(team, user, installation, Status::Online);
            snapshot.instances.insert(view.spec.id.clone(), PublishedView(view));
        }
        assert_eq!(names(snapshot.iter()), ["a/u/1", "a/u/2", "a/uv/1", "ab/u/1", "b/u/1"]);
        assert_eq!(names(snapshot.team(&"a".into())), ["a/u/1", "a/u/2", "a/uv/1"]);
        assert_eq!(names(snapshot.user(&"a".into(), &"u".into())), ["a/u/1", "a/u/2"]);
        assert_eq!(names(snapshot.user(&"a".into(), &"v".into())), Vec::<String>::new());
        assert_eq!(names(snapshot.team(&"".into())), Vec::<String>::new());
    }

    #[derive(Debug, Clone)]
    enum Change {
        Put(usize),
        PutAgain(usize),
        Remove(usize),
    }

    fn a_change() -> impl Strategy<Value = Change> {
        let nth = 0..300_usize;
        prop_oneof![
            3 => nth.clone().prop_map(Change::Put),
            1 => nth.clone().prop_map(Change::PutAgain),
            1 => nth.prop_map(Change::Remove),
        ]
    }

    fn apply(snapshot: &mut Snapshot, changes: &[Change]) {
        for change in changes {
            let id = |nth: usize| InstanceId::new(format!("t{}", nth % 3).into(), "u".into(), format!("{nth}").into());
            match *change {
                Change::Put(nth) => {
                    let view = view(&format!("t{}", nth % 3), "u", &format!("{nth}"), Status::Online);
                    snapshot.instances.insert(view.spec.id.clone(), PublishedView(view));
                }
                Change::PutAgain(nth) => {
                    if let Some(same) = snapshot.instances.get(&id(nth)).cloned() {
                        snapshot.instances.insert(id(nth), same);
                    }
                }
                Change::Remove(nth) => {
                    snapshot.instances.remove(&id(nth));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn changes_since_lists_exactly_the_changed_instances(
            first in proptest::collection::vec(a_change(), 0..300),
            then in proptest::collection::vec(a_change(), 0..60),
        ) {
            let mut earlier = Snapshot::default();
            apply(&mut earlier, &first);
            let mut later = earlier.clone();
            apply(&mut later, &then);
            let changed = later.iter().filter(|view| {
                earlier.get(&view.spec.id).is_none_or(|before| !Arc::ptr_eq(before, view))
            });
            let removed = earlier.iter().filter(|view| later.get(&view.spec.id).is_none());
            let changes = later.changes_since(&earlier);
            prop_assert_eq!(names(changes.changed.iter()), names(changed));
            prop_assert!(changes.changed.iter().all(|view| Arc::ptr_eq(view, later.get(&view.spec.id).unwrap())));
            let ids: Vec<String> = changes.removed.iter().map(ToString::to_string).collect();
            prop_assert_eq!(ids, names(removed));
        }
    }

    #[test]
    fn the_end_of_the_runtime_is_a_revision_that_contains_the_changed_instances() {
        let mut snapshot = Snapshot { revision: 7, ..Snapshot::default() };
        apply(&mut snapshot, &[Change::Put(1), Change::Put(2)]);
        let last = snapshot.with_end(&RuntimeEnd::Killed);
        assert_eq!((last.revision(), last.changes_since(&snapshot).changed.len()), (8, 2));
        let last = snapshot.with_end(&RuntimeEnd::ShutDown { events_lost: 0, in_time: true });
        assert_eq!((last.revision(), last.changes_since(&snapshot).changed.len()), (8, 0));
    }

    #[test]
    fn a_restart_budget_lists_the_ages_of_the_exits_in_its_window() {
        let began = Instant::now();
        let now = began + Duration::from_secs(400);
        let ages = [400, 299, 12].map(Duration::from_secs);
        let mut view = Arc::unwrap_or_clone(view("a", "u", "1", Status::Online));
        view.history = ExitHistory::from_exits([0, 101, 388].map(|at| (began + Duration::from_secs(at), true)), 0);
        let budget = view.restart_budget(now);
        assert_eq!((budget.exits_max, budget.window, budget.remaining()), (3, Duration::from_secs(300), 1));
        assert_eq!(budget.exit_ages, ages[1..]);
    }

    #[test]
    fn tools_are_offered_only_while_online() {
        for &status in Status::ALL {
            assert_eq!(view("a", "u", "1", status).offered_catalogue().is_some(), status == Status::Online, "{status}");
        }
    }
}
