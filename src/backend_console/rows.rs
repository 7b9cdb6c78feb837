//! The instances of all satellites, as reported. One task reads the changes of the database and publishes them; pages
//! and streams read what was published.
//!
//! An instance of a satellite that is not connected is `offline`: its last reported status may be wrong by now.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::printable::line;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_backend::server::api::InstanceState;
use mcp_satellite_backend::server::{BackendHandle, InstanceChange, InstanceChanges, SatelliteConnection};
use mcp_satellite_console::feed::{Attention, FeedScope, InstanceRow, RowChanges, RowSource, STOPPED};
use mcp_satellite_console::problem::Problem;
use ring::digest;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Interval in which the connections of the satellites are read.
const CONNECTIONS_INTERVAL: Duration = Duration::from_secs(2);
/// Time for which changes are collected.
const COLLECTING: Duration = Duration::from_millis(100);
/// Time after which a database that does not answer makes the pages out of date.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_secs(1);
/// Bytes of an instance's name. A longer one, or one with control characters, is cut, and its digest is added.
const NAME_MAX: usize = 256;
/// Characters of other text in a row.
const TEXT_MAX: usize = 200;

/// A reported instance.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReportedRow {
    /// Name of the satellite.
    pub(super) satellite: String,
    pub(super) is_connected: bool,
    pub(super) state: InstanceState,
    pub(super) row: InstanceRow,
}

/// All instances at one revision.
#[derive(Debug, Clone, Default)]
struct ReportedRows {
    /// Number of the last change of an instance in the database, plus the number of changed connections.
    revision: u64,
    by_name: BTreeMap<Arc<str>, Arc<ReportedRow>>,
}

/// Reads the published instances. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct RowsReader {
    published: watch::Receiver<Arc<ReportedRows>>,
    /// False before the first state was read, and while the database does not answer.
    is_fresh: watch::Receiver<bool>,
}

impl RowsReader {
    /// # Errors
    /// The published instances may be out of date.
    pub(super) fn check(&self) -> Result<(), Problem> {
        let why = "the database of the backend does not answer; the log of the backend contains the reason";
        // An error means that the task has ended.
        let is_fresh = *self.is_fresh.borrow() && self.is_fresh.has_changed().is_ok();
        is_fresh.then_some(()).ok_or_else(|| Problem::new("closing", why))
    }

    pub(super) fn find(&self, name: &str) -> Option<Arc<ReportedRow>> {
        self.published.borrow().by_name.get(name).cloned()
    }

    pub(super) fn revision(&self) -> u64 {
        self.published.borrow().revision
    }

    /// Returns all instances in order of name.
    pub(super) fn all(&self) -> Vec<Arc<ReportedRow>> {
        self.published.borrow().by_name.values().cloned().collect()
    }
}

/// Returns the name of an instance among those of all satellites.
pub(super) fn instance_name(satellite: &str, instance: &str) -> String {
    let name = format!("{satellite}:{instance}");
    if name.len() <= NAME_MAX && line(&name) == name {
        return name;
    }
    let mut cut = line(first_chars(&name, NAME_MAX / 4));
    cut.push('~');
    for byte in &digest::digest(&digest::SHA256, name.as_bytes()).as_ref()[..8] {
        // Writing to a String does not fail.
        let _ = write!(cut, "{byte:02x}");
    }
    cut
}

fn first_chars(text: &str, max: usize) -> &str {
    text.char_indices().nth(max).map_or(text, |(end, _)| &text[..end])
}

fn cut(text: &str) -> String {
    line(first_chars(text, TEXT_MAX))
}

/// Returns a reader, and the task that publishes.
pub(super) fn follow(backend: BackendHandle) -> (RowsReader, impl Future<Output = ()> + Send) {
    let (publish, published) = watch::channel(Arc::default());
    let (set_fresh, is_fresh) = watch::channel(false);
    let follower = RowsFollower {
        backend,
        publish,
        set_fresh,
        seen: None,
        rows: HashMap::new(),
        connections: HashMap::new(),
        changed_connections: 0,
        is_changed: true,
    };
    (RowsReader { published, is_fresh }, follower.run())
}

struct RowsFollower {
    backend: BackendHandle,
    publish: watch::Sender<Arc<ReportedRows>>,
    set_fresh: watch::Sender<bool>,
    /// Number of the last change that was read.
    seen: Option<i64>,
    /// Rows by id of the satellite and name of the instance there.
    rows: HashMap<(String, String), Arc<ReportedRow>>,
    connections: HashMap<String, SatelliteConnection>,
    changed_connections: u64,
    is_changed: bool,
}

impl RowsFollower {
    async fn run(mut self) {
        let (ending, mut changes) = (self.backend.ending(), self.backend.watch_instances());
        let mut next_connections = Instant::now();
        loop {
            // Marked as seen before the reads, so that a change after them wakes the task again.
            changes.borrow_and_update();
            let with_connections = Instant::now() >= next_connections;
            let read = timeout(READ_TIMEOUT, self.read(with_connections)).await.unwrap_or(false);
            self.set_fresh.send_if_modified(|is_fresh| std::mem::replace(is_fresh, read) != read);
            if with_connections {
                next_connections = Instant::now() + CONNECTIONS_INTERVAL;
            }
            if !read {
                tokio::select! {
                    () = ending.cancelled() => return,
                    () = sleep(RETRY) => continue,
                }
            }
            self.publish();
            tokio::select! {
                () = ending.cancelled() => return,
                () = sleep_until(next_connections) => {}
                watched = changes.changed() => {
                    if watched.is_err() {
                        return;
                    }
                    sleep(COLLECTING).await;
                }
            }
        }
    }

    /// Reads what has changed. Returns false if the database does not answer, which is logged there.
    async fn read(&mut self, with_connections: bool) -> bool {
        if with_connections {
            let Ok(connections) = self.backend.connections().await else { return false };
            self.apply_connections(connections);
        }
        loop {
            let Ok(changes) = self.backend.instance_changes(self.seen).await else { return false };
            let is_last = changes.changes.is_empty() || changes.is_complete;
            self.apply(changes);
            if is_last {
                return true;
            }
        }
    }

    fn apply_connections(&mut self, connections: Vec<SatelliteConnection>) {
        let mut earlier = std::mem::take(&mut self.connections);
        for now in connections {
            let id = now.satellite_id.clone();
            // Rows of a satellite whose connection was not known yet show it as connected.
            let was_connected = earlier.remove(&id).is_none_or(|before| before.connected);
            let now = self.connections.entry(id.clone()).insert_entry(now).into_mut();
            if was_connected == now.connected {
                continue;
            }
            self.changed_connections += 1;
            self.is_changed = true;
            for ((satellite, _), row) in &mut self.rows {
                if *satellite == id {
                    *row = Arc::new(ReportedRow::new(row.state.clone(), row.satellite.clone(), Some(now)));
                }
            }
        }
    }

    fn apply(&mut self, changes: InstanceChanges) {
        let InstanceChanges { is_complete, changes, through } = changes;
        if is_complete {
            self.rows.clear();
        }
        self.is_changed |= is_complete || !changes.is_empty();
        self.seen = Some(through);
        for change in changes {
            match change {
                InstanceChange::Set(state, satellite) => {
                    let key = (state.satellite_id.clone(), state.instance.clone());
                    let connection = self.connections.get(&state.satellite_id);
                    self.rows.insert(key, Arc::new(ReportedRow::new(*state, satellite, connection)));
                }
                InstanceChange::Removed { satellite_id, instance } => {
                    self.rows.remove(&(satellite_id, instance));
                }
            }
        }
    }

    fn publish(&mut self) {
        if !std::mem::take(&mut self.is_changed) {
            return;
        }
        let changes = self.seen.and_then(|seen| u64::try_from(seen).ok()).unwrap_or(0);
        let by_name = self.rows.values().map(|row| (row.row.name.clone(), row.clone())).collect();
        self.publish.send_replace(Arc::new(ReportedRows { revision: changes + self.changed_connections, by_name }));
    }
}

impl ReportedRow {
    fn new(state: InstanceState, satellite: String, connection: Option<&SatelliteConnection>) -> Self {
        // A satellite that reports before its connection was read has just been in contact.
        let is_connected = connection.is_none_or(|connection| connection.connected);
        let reported = Status::ALL.iter().copied().find(|status| status.as_str() == state.status);
        let is_stopped = reported == Some(Status::Offline) && state.remedy == Some(Remedy::Start);
        let (status, since, attention) = match reported {
            Some(status) if is_connected => (status, state.since, reported_attention(&state, status, is_stopped)),
            reported => {
                let at = connection.and_then(|connection| connection.last_contact).unwrap_or(state.since);
                let attention = lost_attention(&satellite, reported, is_connected);
                (Status::Offline, at, (!is_stopped).then_some(attention))
            }
        };
        let row = InstanceRow {
            name: instance_name(&satellite, &state.instance).into(),
            server: cut(&state.server_slug),
            // The overview has a grid for each team of each satellite.
            team: cut(&format!("{satellite} · {}", state.team_id)),
            user: cut(&state.user_id),
            status,
            since: since.as_millisecond(),
            flags: u8::from(is_stopped) * STOPPED,
            restarts: 0,
            retry: None,
            attention,
        };
        Self { satellite, is_connected, state, row }
    }

    /// Returns the time of the row's status.
    pub(super) fn since(&self) -> Timestamp {
        Timestamp::from_millisecond(self.row.since).unwrap_or_default()
    }

    /// Returns the reason of the row's status.
    pub(super) fn message(&self) -> Option<String> {
        match &self.row.attention {
            Some(attention) if !attention.message.is_empty() => Some(attention.message.clone()),
            _ => self.state.status_message.clone(),
        }
    }
}

/// Returns the need of an instance whose state is not known.
fn lost_attention(satellite: &str, reported: Option<Status>, is_connected: bool) -> Attention {
    let reported =
        reported.map_or_else(|| "an unknown status".to_owned(), |status| status.to_string().replace('_', " "));
    let message = if is_connected {
        format!("reported {reported}")
    } else {
        format!("its satellite {satellite} is not connected; last reported: {reported}")
    };
    let step = "start the satellite on its machine, or check its network".to_owned();
    Attention { urgency: 4, message, step: Some(step), remedy: None }
}

/// Returns the need of an instance according to its report.
fn reported_attention(state: &InstanceState, status: Status, is_stopped: bool) -> Option<Attention> {
    let urgency = match status {
        Status::PermanentlyFailed => 1,
        Status::RequiresReauth => 2,
        Status::Error => 3,
        Status::Offline if is_stopped => return None,
        Status::Offline => 4,
        Status::AwaitingUserConfig => 5,
        Status::Provisioning
        | Status::CommandReceived
        | Status::Connecting
        | Status::DiscoveringTools
        | Status::SyncingTools
        | Status::Online
        | Status::Restarting => return None,
    };
    let instance = cut(&state.instance);
    let at_machine = |command: &str| format!("`satellite {command} {instance}` on the machine of the satellite");
    let (step, remedy) = match state.remedy {
        None => (None, None),
        Some(Remedy::Restart) => (Some("fix the cause, then restart it".to_owned()), Some(Remedy::Restart)),
        Some(Remedy::Start) => (Some("start it".to_owned()), Some(Remedy::Start)),
        // A backend has no command for a new connection only.
        Some(Remedy::Reconnect) => (Some("restart it".to_owned()), Some(Remedy::Restart)),
        Some(Remedy::Configure) => (Some(at_machine("configure")), Some(Remedy::Configure)),
        Some(Remedy::Authorize) => (Some(at_machine("auth")), Some(Remedy::Authorize)),
        Some(Remedy::ReadLogs) => (Some(at_machine("logs")), Some(Remedy::ReadLogs)),
    };
    let message = cut(state.status_message.as_deref().unwrap_or_default());
    Some(Attention { urgency, message, step, remedy })
}

/// The published instances of a scope.
pub(super) struct PublishedRows {
    reader: RowsReader,
    position: Arc<ReportedRows>,
    scope: FeedScope,
}

impl PublishedRows {
    pub(super) fn new(reader: &RowsReader, scope: &FeedScope) -> Self {
        let mut reader = reader.clone();
        let position = reader.published.borrow_and_update().clone();
        Self { reader, position, scope: scope.clone() }
    }

    fn contains(&self, name: &str) -> bool {
        self.scope.instance.as_deref().is_none_or(|only| only == name)
    }
}

impl RowSource for PublishedRows {
    fn revision(&self) -> u64 {
        self.position.revision
    }

    fn rows(&self) -> Vec<InstanceRow> {
        let all = self.position.by_name.iter().filter(|(name, _)| self.contains(name));
        all.map(|(_, reported)| reported.row.clone()).collect()
    }

    fn take_changes(&mut self) -> RowChanges {
        let earlier = std::mem::replace(&mut self.position, self.reader.published.borrow_and_update().clone());
        let is_new = |(name, now): &(&Arc<str>, &Arc<ReportedRow>)| {
            self.contains(name) && earlier.by_name.get(*name).is_none_or(|before| !Arc::ptr_eq(before, now))
        };
        let is_gone = |name: &&Arc<str>| self.contains(name) && !self.position.by_name.contains_key(*name);
        RowChanges {
            set: self.position.by_name.iter().filter(is_new).map(|(_, now)| now.row.clone()).collect(),
            gone: earlier.by_name.keys().filter(is_gone).cloned().collect(),
        }
    }

    async fn changed(&mut self) -> bool {
        self.reader.published.changed().await.is_ok()
    }

    /// Satellites do not report their calls.
    fn calls_in_flight(&self) -> usize {
        0
    }

    async fn answers(&self) -> bool {
        self.reader.check().is_ok()
    }
}
