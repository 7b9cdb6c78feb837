//! An instance as a row of the overview and of its stream.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::printable::line;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_gateway::remedy::next_step;
use serde::ser::SerializeTuple as _;
use serde::{Serialize, Serializer};

/// Columns of a row. A row may be shorter; the missing values are absent.
pub const COLUMNS: [&str; 13] = [
    "name", "server", "team", "user", "status", "since", "flags", "restarts", "retry", "urgency", "message", "step",
    "remedy",
];
/// Bit of `flags`: the instance sleeps or is being woken.
pub const DORMANT: u8 = 1;
/// Bit of `flags`: a person has stopped the instance.
pub const STOPPED: u8 = 2;
/// Lowest urgency of an instance that recovers by itself.
pub const RECOVERING: u8 = 6;

/// Characters of a reason in a row; the page of the instance has all of it.
const MESSAGE_MAX: usize = 200;

/// An instance in the grid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceRow {
    /// Full name, which identifies the row.
    pub name: Arc<str>,
    pub server: String,
    pub team: String,
    pub user: String,
    pub status: Status,
    /// Time at which the instance entered the status, in milliseconds since 1970.
    pub since: i64,
    pub flags: u8,
    pub restarts: u64,
    /// Time of the next attempt, in milliseconds since 1970.
    pub retry: Option<i64>,
    /// `None` if the instance needs nothing.
    pub attention: Option<Attention>,
}

/// Reason why an instance is in the list of those that need attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attention {
    /// Order of the list, from 1; the worst is first. From [`RECOVERING`] on the instance recovers by itself.
    pub urgency: u8,
    pub message: String,
    /// The next step as a command.
    pub step: Option<String>,
    pub remedy: Option<Remedy>,
}

impl InstanceRow {
    /// Returns the row of an instance at `now`.
    pub fn from_view(view: &InstanceView, now: std::time::Instant) -> Self {
        let spec = &view.spec;
        let is_stopped = view.requested_state == RequestedState::Stopped;
        let milliseconds = |until: Duration| i64::try_from(until.as_millis()).unwrap_or(i64::MAX);
        let retry_in = view.next_retry_at.map(|at| milliseconds(at.saturating_duration_since(now)));
        Self {
            name: spec.name.clone(),
            server: line(spec.server.as_str()),
            team: line(spec.team_slug.as_str()),
            user: line(spec.user_slug.as_str()),
            status: view.status,
            since: view.since.as_millisecond(),
            flags: (u8::from(view.dormant) * DORMANT) | (u8::from(is_stopped) * STOPPED),
            restarts: view.restarts,
            retry: retry_in.map(|pause| jiff::Timestamp::now().as_millisecond().saturating_add(pause)),
            attention: Attention::of(view, now),
        }
    }

    /// Returns the key by which the list of instances that need attention is sorted. Those that recover by themselves
    /// keep their places although their status changes often.
    pub fn attention_order(&self) -> Option<(u8, i64, &str)> {
        let urgency = self.attention.as_ref()?.urgency;
        Some((urgency, if urgency < RECOVERING { self.since } else { 0 }, &self.name))
    }
}

impl Attention {
    fn of(view: &InstanceView, now: std::time::Instant) -> Option<Self> {
        // An attempt that follows a failure waits or is in progress.
        let is_recovering = view.next_retry_at.is_some() || view.attempt.is_some();
        let urgency = match view.status {
            Status::PermanentlyFailed => 1,
            Status::RequiresReauth => 2,
            Status::Error => 3,
            // A person has stopped it.
            Status::Offline if view.requested_state == RequestedState::Stopped => return None,
            Status::Offline if !is_recovering => 4,
            Status::AwaitingUserConfig => 5,
            Status::Offline
            | Status::Provisioning
            | Status::CommandReceived
            | Status::Connecting
            | Status::DiscoveringTools
            | Status::SyncingTools
            | Status::Online
            | Status::Restarting => return Self::of_recovering(view, is_recovering, now),
        };
        let message = view.message.as_deref().or(view.last_error.as_deref()).unwrap_or_default();
        // A lost connection is opened again at once on request.
        let is_lost = view.status == Status::Offline && view.spec.is_remote();
        let remedy = view.remedy.or_else(|| is_lost.then_some(Remedy::Reconnect));
        let step = remedy.map(|remedy| next_step(remedy, &view.spec));
        Some(Self { urgency, message: short(message), step, remedy })
    }

    /// Returns the reason for an instance that takes calls or will take them without help.
    fn of_recovering(view: &InstanceView, is_recovering: bool, now: std::time::Instant) -> Option<Self> {
        let budget = view.restart_budget(now);
        let is_nearly_spent = !budget.exit_ages.is_empty() && budget.remaining() <= 1;
        let is_down = is_recovering && view.status != Status::Online;
        if !is_nearly_spent && !is_down {
            return None;
        }
        let error = view.last_error.as_deref().or(view.last_exit.as_deref()).or(view.message.as_deref());
        let error = short(error.filter(|_| is_down).unwrap_or_default());
        let exits = budget.exit_ages.len();
        let message = match is_nearly_spent {
            true if error.is_empty() => format!("{exits} unwanted exits; the next one ends the restarts"),
            true => format!("{exits} unwanted exits; the next one ends the restarts; last: {error}"),
            false => error,
        };
        let action = if view.spec.is_remote() { Remedy::Reconnect } else { Remedy::Restart };
        let urgency = if is_nearly_spent { RECOVERING } else { RECOVERING + 1 };
        Some(Self { urgency, message, step: None, remedy: is_down.then_some(action) })
    }
}

/// Returns a text of a server on one line, and cut.
fn short(text: &str) -> String {
    let text = line(text);
    let end = text.char_indices().nth(MESSAGE_MAX).map_or(text.len(), |(at, _)| at);
    text[..end].to_owned()
}

impl Serialize for InstanceRow {
    /// Writes an array in the order of [`COLUMNS`], without absent values at its end.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let length = match self {
            Self { attention: Some(_), .. } => COLUMNS.len(),
            Self { retry: Some(_), .. } => 9,
            Self { flags: 0, restarts: 0, .. } => 6,
            _ => 8,
        };
        let mut row = serializer.serialize_tuple(length)?;
        row.serialize_element(&self.name)?;
        row.serialize_element(&self.server)?;
        row.serialize_element(&self.team)?;
        row.serialize_element(&self.user)?;
        row.serialize_element(self.status.as_str())?;
        row.serialize_element(&self.since)?;
        if length > 6 {
            row.serialize_element(&self.flags)?;
            row.serialize_element(&self.restarts)?;
        }
        if length > 8 {
            row.serialize_element(&self.retry)?;
        }
        if let Some(Attention { urgency, message, step, remedy }) = &self.attention {
            row.serialize_element(urgency)?;
            row.serialize_element(message)?;
            row.serialize_element(step)?;
            row.serialize_element(remedy)?;
        }
        row.end()
    }
}
