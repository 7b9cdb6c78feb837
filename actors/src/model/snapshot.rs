//! What readers see: an immutable picture of every instance, published by the registry. Cloning it costs one
//! reference count, and reading never waits for writing. A published snapshot is a message, too: nobody writes to it.

use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;

use super::catalogue::{Catalogue, Revisions};
use super::event::Subject;
use super::exit::RuntimeEnd;
use super::ids::{InstallationId, InstanceId, TeamId, UserId};
use super::remedy::Remedy;
use super::remote::{Connection, Health, ServerInfo};
use super::spec::InstanceSpec;
use super::status::Status;
use crate::calls::{CallPort, Counters};
use crate::rules::restart::History;
use crate::rules::slot::Want;

/// How a process is kept: what it may see, and what makes its end complete.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Custody {
    /// The sandbox's own process, where there is one.
    pub wrapper_pid: Option<u32>,
    /// `none`, or the sandbox.
    pub isolation: &'static str,
    /// What holds the process and all that it starts: a cgroup, a PID namespace, or its group and a mark.
    pub held_by: &'static str,
    /// Whom it runs as, inside and outside.
    pub identity: String,
}

/// Every instance, ordered by team, user and installation.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub(crate) instances: imbl::OrdMap<InstanceId, Arc<InstanceView>>,
    pub(crate) ended: Option<RuntimeEnd>,
}

/// One instance, as its team's supervisor last told.
#[derive(Debug, Clone)]
pub struct InstanceView {
    /// What it is to be.
    pub spec: Arc<InstanceSpec>,
    /// What its events are marked with.
    pub subject: Arc<Subject>,
    /// What its user sees.
    pub status: Status,
    /// And why.
    pub message: Option<String>,
    /// The next step, where waiting does not help.
    pub remedy: Option<Remedy>,
    /// The time at which the instance entered this status.
    pub since: Timestamp,
    /// What a person wants of it.
    pub want: Want,
    /// Whether it sleeps or is being woken; shown beside `online`.
    pub dormant: bool,
    /// The connection of a remote instance; none for a process.
    pub connection: Option<Connection>,
    /// Whether it answers; when it was last asked is among the counters.
    pub health: Health,
    /// What its server said of itself when it was last there.
    pub server: Option<Arc<ServerInfo>>,
    /// The process of the current run.
    pub pid: Option<u32>,
    /// How that process is kept.
    pub custody: Option<Arc<Custody>>,
    /// Started again after an unwanted exit or on request, over all.
    pub restarts: u64,
    /// Unwanted exits; see [`InstanceView::exits_in_window`].
    pub(crate) history: History,
    /// When it is tried again, while a delay runs.
    pub next_retry_at: Option<Instant>,
    /// Which attempt that is, or is under way; none for one that no failure has brought about.
    pub attempt: Option<usize>,
    /// When the current run was initialized.
    pub initialized_at: Option<Instant>,
    /// Its tools as last read, whatever the status.
    pub catalogue: Option<Arc<Catalogue>>,
    /// How often what it offers has changed: whoever tells clients that there is something new remembers what it told.
    pub revisions: Revisions,
    /// Where calls go, while a run takes them.
    pub port: Option<CallPort>,
    /// The door of a run that takes no calls any more, while those inside finish.
    pub(crate) draining: Option<CallPort>,
    /// Live counters.
    pub counters: Arc<Counters>,
    /// The last failure; `None` once the instance is healthy again.
    pub last_error: Option<String>,
    /// How the last run ended.
    pub last_exit: Option<String>,
}

impl InstanceView {
    /// Unwanted exits that count against the restart budget at `now`.
    pub fn exits_in_window(&self, now: Instant) -> usize {
        self.history.in_window(&self.spec.policy.restart, now)
    }

    /// The same instance without its run: that ended with the supervisor of its team.
    pub(crate) fn without_run(&self) -> Self {
        Self {
            port: None,
            draining: None,
            pid: None,
            custody: None,
            initialized_at: None,
            health: Health::Unknown,
            ..self.clone()
        }
    }

    /// Calls that are not answered yet.
    pub fn calls_in_flight(&self) -> usize {
        self.port.iter().chain(&self.draining).map(CallPort::calls_in_flight).sum()
    }

    /// The tools that its user is offered: none unless `online`.
    pub fn offered(&self) -> Option<&Arc<Catalogue>> {
        (self.status == Status::Online).then_some(self.catalogue.as_ref()).flatten()
    }
}

impl Snapshot {
    /// One instance.
    pub fn get(&self, id: &InstanceId) -> Option<&Arc<InstanceView>> {
        self.instances.get(id)
    }

    /// All instances, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<InstanceView>> {
        self.instances.values()
    }

    /// How the runtime ended; `None` while it runs. Nothing changes after that.
    pub fn ended(&self) -> Option<&RuntimeEnd> {
        self.ended.as_ref()
    }

    /// The last snapshot of a runtime that ended. After a shutdown each instance is as it was left; otherwise what ran is
    /// gone, and is shown so.
    pub(crate) fn at_the_end(&self, end: &RuntimeEnd) -> Self {
        let mut last = Self { ended: Some(end.clone()), ..self.clone() };
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
                connection: view.connection.map(|_| Connection::Disconnected),
                next_retry_at: None,
                attempt: None,
                ..view.without_run()
            };
            last.instances.insert(view.spec.id.clone(), Arc::new(view));
        }
        last
    }

    /// How many instances there are.
    pub fn len(&self) -> usize {
        self.instances.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.instances.is_empty()
    }

    /// The instances of one team.
    pub fn team(&self, team: &TeamId) -> impl Iterator<Item = &Arc<InstanceView>> {
        let first = InstanceId::first_of(team);
        let team = team.clone();
        self.instances.range(first..).map(|(_, view)| view).take_while(move |view| view.spec.id.team == team)
    }

    /// The instances of one user.
    pub fn user(&self, team: &TeamId, user: &UserId) -> impl Iterator<Item = &Arc<InstanceView>> {
        let first = InstanceId::new(team.clone(), user.clone(), InstallationId::from(""));
        let (team, user) = (team.clone(), user.clone());
        let is_theirs = move |view: &&Arc<InstanceView>| view.spec.id.team == team && view.spec.id.user == user;
        self.instances.range(first..).map(|(_, view)| view).take_while(is_theirs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{InstanceConfig, Keep, Layer, OnUpdate, Target};

    fn view(team: &str, user: &str, installation: &str, status: Status) -> Arc<InstanceView> {
        let config = InstanceConfig {
            team: team.into(),
            team_slug: team.into(),
            user: user.into(),
            user_slug: user.into(),
            installation: installation.into(),
            server: "files".into(),
            target: Target::Stdio { command: "files".to_owned(), cwd: None },
            server_layer: Layer::default(),
            team_layer: Layer::default(),
            user_layer: Layer::default(),
            user_required: Vec::new(),
            keep: Keep::Listed,
            on_update: OnUpdate::default(),
            request_logging: true,
            policy: Arc::default(),
        };
        let spec = Arc::new(config.merge());
        Arc::new(InstanceView {
            subject: Arc::new(Subject::from(&*spec)),
            spec,
            status,
            message: None,
            remedy: None,
            since: Timestamp::UNIX_EPOCH,
            want: Want::Running,
            dormant: false,
            connection: None,
            health: Health::Unknown,
            server: None,
            pid: None,
            custody: None,
            restarts: 0,
            history: History::default(),
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
    fn a_team_and_a_user_see_their_own_instances_and_no_neighbours() {
        let mut snapshot = Snapshot::default();
        for (team, user, installation) in
            [("b", "u", "1"), ("a", "u", "2"), ("ab", "u", "1"), ("a", "uv", "1"), ("a", "u", "1")]
        {
            let view = view(team, user, installation, Status::Online);
            snapshot.instances.insert(view.spec.id.clone(), view);
        }
        assert_eq!(names(snapshot.iter()), ["a/u/1", "a/u/2", "a/uv/1", "ab/u/1", "b/u/1"]);
        assert_eq!(names(snapshot.team(&"a".into())), ["a/u/1", "a/u/2", "a/uv/1"]);
        assert_eq!(names(snapshot.user(&"a".into(), &"u".into())), ["a/u/1", "a/u/2"]);
        assert_eq!(names(snapshot.user(&"a".into(), &"v".into())), Vec::<String>::new());
        assert_eq!(names(snapshot.team(&"".into())), Vec::<String>::new());
    }

    #[test]
    fn tools_are_offered_while_online_and_never_else() {
        for status in Status::ALL {
            assert_eq!(view("a", "u", "1", status).offered().is_some(), status == Status::Online, "{status}");
        }
    }
}
