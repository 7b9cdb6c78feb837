//! Command queue of each satellite. Polls deliver the most urgent commands first, until their results arrive.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use jiff::{SignedDuration, Timestamp};
use rusqlite::{OptionalExtension as _, Row, Transaction, params};
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::{Duration, Instant, sleep_until};

use super::BackendState;
use super::access::{AdminAccess, AuthenticatedSatellite, PathParams, QueryParams, find_id};
use super::api::{CommandList, CommandRecordView, CommandRequest, CommandStage};
use super::body::{self, SMALL_MAX};
use super::clock::{timestamp_from_millis, timestamp_to_millis};
use super::decode::decode;
use super::keys;
use super::refusal::ApiError;
use super::schema::MessageSchema;
use crate::wire::{
    BackendCommand, CommandOutcome, CommandPriority, CommandResult, CommandTarget, ConfigureEvent, ConfigurePayload,
    EmptyResponse, HealthCheckPayload, PollCommands, PollingMode,
};

// Default number of commands per poll.
const LIMIT: usize = 10;
const LIMIT_MAX: usize = 100;
// Default number of commands in an administrator's list.
const LIST: usize = 100;
const LIST_MAX: usize = 1000;
// Per satellite.
const WAITING_MAX: usize = 10_000;

// In seconds.
const HOLD_MAX: u64 = 25;

// Deliverable commands of satellite `?1` at time `?2`. A command that was sent before it expired is delivered again for
// seven days (in milliseconds): the satellite may have executed it, and reports the result or `expired`.
const OPEN: &str = "satellite = ?1 AND finished_at IS NULL
    AND (expires_at IS NULL OR expires_at > ?2 OR (times_sent > 0 AND expires_at > ?2 - 604800000))";

// Last arrival or end of a command of one priority: the first row of an index, however many commands there are.
pub(super) const LAST: &str = "SELECT coalesce(finished_at, created_at) FROM commands
    WHERE satellite = ?1 AND priority = ?2 ORDER BY coalesce(finished_at, created_at) DESC LIMIT 1";

// Further urgent commands are likely for some time after one, so polls stay frequent.
const IMMEDIATE_AFTER: SignedDuration = SignedDuration::from_secs(60);
const HIGH_AFTER: SignedDuration = SignedDuration::from_mins(5);
// Without commands for this long, polls become rare.
const IDLE_AFTER: SignedDuration = SignedDuration::from_hours(1);

#[derive(Debug, Deserialize)]
pub(super) struct PollQuery {
    last_poll: Option<Timestamp>,
    limit: Option<usize>,
    // Seconds for which the poll may be held until a command arrives, at most `HOLD_MAX`.
    #[serde(default)]
    wait: u64,
}

pub(super) async fn poll(
    State(app): State<Arc<BackendState>>,
    AuthenticatedSatellite { id }: AuthenticatedSatellite,
    QueryParams(PollQuery { last_poll, limit, wait }): QueryParams<PollQuery>,
) -> Result<Json<PollCommands>, ApiError> {
    let limit = limit.unwrap_or(LIMIT);
    if !(1..=LIMIT_MAX).contains(&limit) {
        return Err(ApiError::bad_request(format!("limit must be from 1 to {LIMIT_MAX}")));
    }
    tracing::trace!(satellite = id, ?last_poll, limit, wait, "a satellite polls");
    // Subscribed before the first query, so that no command is missed between query and wait.
    let mut queued = app.queue_signal.subscribe();
    let until = Instant::now() + Duration::from_secs(wait.min(HOLD_MAX));
    let hold_permit = app.hold_permits.try_acquire();
    let (commands, polling_mode, now) = loop {
        let now = app.now();
        let (commands, mode) = deliver_pending(&app, &id, limit, now).await?;
        if !commands.is_empty() || hold_permit.is_err() {
            break (commands, mode, now);
        }
        let another = tokio::select! {
            changed = queued.changed() => changed.is_ok(),
            () = app.ending.cancelled() => false,
            () = sleep_until(until) => false,
        };
        if !another {
            break (commands, mode, app.now());
        }
    };
    let next_poll_interval = Some(app.settings.poll_interval.unwrap_or_else(|| interval_seconds(polling_mode)));
    Ok(Json(PollCommands { commands, polling_mode, next_poll_interval, server_time: Some(now) }))
}

async fn deliver_pending(
    app: &BackendState,
    id: &str,
    limit: usize,
    now: Timestamp,
) -> Result<(Vec<BackendCommand>, PollingMode), ApiError> {
    let id = id.to_owned();
    app.database
        .run(move |db| {
            let select = format!("SELECT * FROM commands WHERE {OPEN} ORDER BY priority, number LIMIT ?3");
            let mut select = db.prepare_cached(&select)?;
            let waiting = select.query_map(params![id, timestamp_to_millis(now), i64::try_from(limit).unwrap_or(i64::MAX)], CommandRow::from_row)?;
            let waiting = waiting.collect::<Result<Vec<_>, _>>()?;
            let mut sent = db.prepare_cached(
                "UPDATE commands SET times_sent = times_sent + 1, first_sent_at = coalesce(first_sent_at, ?2) WHERE number = ?1",
            )?;
            for command in &waiting {
                sent.execute(params![command.number, timestamp_to_millis(now)])?;
            }
            let mode = polling_mode(db, &id, waiting.first().map(|command| command.priority), now)?;
            Ok((waiting.into_iter().map(CommandRow::into_command).collect::<Result<_, _>>()?, mode))
        })
        .await
}

fn polling_mode(
    db: &Transaction<'_>,
    satellite: &str,
    waiting: Option<i64>,
    now: Timestamp,
) -> Result<PollingMode, ApiError> {
    let last_of = |priority: i64| -> Result<Option<i64>, ApiError> {
        let mut last = db.prepare_cached(LAST)?;
        let mut latest = None;
        for priority in 0..=priority {
            latest = latest.max(last.query_row(params![satellite, priority], |row| row.get(0)).optional()?);
        }
        Ok(latest)
    };
    let since = |at: Option<i64>| at.map_or(SignedDuration::MAX, |at| now.duration_since(timestamp_from_millis(at)));
    if waiting == Some(priority_to_number(CommandPriority::Immediate))
        || since(last_of(priority_to_number(CommandPriority::Immediate))?) < IMMEDIATE_AFTER
    {
        return Ok(PollingMode::Immediate);
    }
    if waiting == Some(priority_to_number(CommandPriority::High))
        || since(last_of(priority_to_number(CommandPriority::High))?) < HIGH_AFTER
    {
        return Ok(PollingMode::High);
    }
    let registered_at =
        db.query_row("SELECT registered_at FROM satellites WHERE id = ?1", [satellite], |row| row.get(0))?;
    let idle_time = since(Some(registered_at)).min(since(last_of(priority_to_number(CommandPriority::Low))?));
    Ok(if waiting.is_some() || idle_time < IDLE_AFTER { PollingMode::Normal } else { PollingMode::Idle })
}

fn interval_seconds(mode: PollingMode) -> f64 {
    match mode {
        PollingMode::Immediate => 2.0,
        PollingMode::High => 10.0,
        PollingMode::Normal => 30.0,
        PollingMode::Idle => 60.0,
    }
}

pub(super) async fn receive_result(
    State(app): State<Arc<BackendState>>,
    AuthenticatedSatellite { id }: AuthenticatedSatellite,
    names: PathParams,
    body: Body,
) -> Result<Json<EmptyResponse>, ApiError> {
    let result: CommandResult = body::read_validated(body, LARGE_RESULT_MAX, MessageSchema::CommandResult).await?;
    let (now, command) = (app.now(), names.get("command"));
    app.database
        .run(move |db| {
            // Only the first result counts. A repeated one means that the response was lost.
            let text = serde_json::to_string(&result)?;
            let updated = db.execute(
                "UPDATE commands SET result = ?3, finished_at = ?4 WHERE satellite = ?1 AND id = ?2 AND finished_at IS NULL",
                params![id, command, text, timestamp_to_millis(now)],
            )?;
            let known = "SELECT 1 FROM commands WHERE satellite = ?1 AND id = ?2";
            if updated == 0 && !db.prepare_cached(known)?.exists(params![id, command])? {
                return Err(ApiError::not_found("command"));
            }
            if updated > 0 {
                tracing::info!(satellite = id, command, status = ?result.status, "result of a command received");
            }
            Ok(())
        })
        .await?;
    Ok(Json(EmptyResponse { success: true }))
}

// A result lists all instances of its target.
const LARGE_RESULT_MAX: usize = 4 * 1024 * 1024;

pub(super) async fn queue(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
    body: Body,
) -> Result<(StatusCode, Json<CommandRecordView>), ApiError> {
    let requested: CommandRequest = body::read_validated(body, SMALL_MAX, MessageSchema::CommandRequest).await?;
    let (command, new) = queue_command(&app, names.get("satellite"), requested).await?;
    Ok((if new { StatusCode::CREATED } else { StatusCode::OK }, Json(command)))
}

/// Queues a command for the satellite with this id or name. The boolean is false if the command was known.
pub(super) async fn queue_command(
    app: &BackendState,
    satellite: String,
    requested: CommandRequest,
) -> Result<(CommandRecordView, bool), ApiError> {
    check_payload(&requested)?;
    let now = app.now();
    let later =
        requested.expires_in_seconds.and_then(|seconds| i64::try_from(seconds).ok()).map(SignedDuration::from_secs);
    let later = later.map(|later| now.saturating_add(later).unwrap_or(Timestamp::MAX));
    let expires_at = match (later, requested.expires_at) {
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request(
                "expires_in_seconds and expires_at exclude each other; give only one of them",
            ));
        }
        (one, other) => one.or(other),
    };
    let (id, is_given) = match requested.id {
        Some(id) => (id, true),
        None => (keys::generate_id("cmd-")?, false),
    };
    let command = BackendCommand {
        id,
        command_type: requested.command_type,
        priority: requested.priority,
        payload: requested.payload,
        expires_at,
    };
    let queued = app
        .database
        .run(move |db| {
            let satellite = find_id(db, &satellite)?;
            if is_given && let Some(stored) = find_command(db, &satellite, &command.id)? {
                return Ok((stored.into_view(now)?, false));
            }
            insert(db, &satellite, &command, now, false)?;
            let stored = find_command(db, &satellite, &command.id)?.ok_or_else(|| ApiError::not_found("command"))?;
            tracing::info!(satellite, command = command.id, kind = command.command_type, "a command was queued");
            Ok((stored.into_view(now)?, true))
        })
        .await?;
    app.notify_command_queued();
    Ok(queued)
}

/// Rejects payloads that the satellite would answer with a failure.
fn check_payload(requested: &CommandRequest) -> Result<(), ApiError> {
    let payload = Value::Object(requested.payload.clone());
    let target = || decode::<CommandTarget>(&payload).map(drop);
    let (form, checked) = match &*requested.command_type {
        "configure" => (MessageSchema::Configure, decode::<ConfigurePayload>(&payload).map(drop)),
        "restart" | "spawn" | "kill" => (MessageSchema::Target, target()),
        // The target first: an error in flattened members has no place of its own.
        "health_check" => {
            (MessageSchema::HealthCheck, target().and_then(|()| decode::<HealthCheckPayload>(&payload).map(drop)))
        }
        _ => return Ok(()),
    };
    checked.map_err(|invalid| ApiError::bad_request(format!("{} (schemas/{})", invalid.below("/payload"), form.file())))
}

#[derive(Debug, Deserialize)]
pub(super) struct CommandListQuery {
    limit: Option<usize>,
}

pub(super) async fn list(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
    QueryParams(CommandListQuery { limit }): QueryParams<CommandListQuery>,
) -> Result<Json<CommandList>, ApiError> {
    let commands = read_last(&app, names.get("satellite"), limit.unwrap_or(LIST)).await?;
    Ok(Json(CommandList { commands }))
}

/// Returns the last commands of the satellite with this id or name, latest first.
pub(super) async fn read_last(
    app: &BackendState,
    satellite: String,
    limit: usize,
) -> Result<Vec<CommandRecordView>, ApiError> {
    let limit = i64::try_from(limit.clamp(1, LIST_MAX)).unwrap_or(i64::MAX);
    let now = app.now();
    let commands = app.database.run(move |db| {
        let satellite = find_id(db, &satellite)?;
        let mut select =
            db.prepare_cached("SELECT * FROM commands WHERE satellite = ?1 ORDER BY number DESC LIMIT ?2")?;
        let found =
            select.query_map(params![satellite, limit], CommandRow::from_row)?.collect::<Result<Vec<_>, _>>()?;
        found.into_iter().map(|command| command.into_view(now)).collect::<Result<_, _>>()
    });
    commands.await
}

pub(super) async fn show(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<CommandRecordView>, ApiError> {
    let now = app.now();
    let state = app.database.run(move |db| {
        let satellite = find_id(db, &names.get("satellite"))?;
        let command = find_command(db, &satellite, &names.get("command"))?;
        command.ok_or_else(|| ApiError::not_found("command"))?.into_view(now)
    });
    state.await.map(Json)
}

/// Queues a `configure` command unless an undelivered one is already in the queue.
pub(super) fn queue_configure(db: &Transaction<'_>, satellite: &str, now: Timestamp) -> Result<(), ApiError> {
    let query = "SELECT 1 FROM commands WHERE satellite = ?1 AND by_itself AND times_sent = 0 AND finished_at IS NULL";
    if db.prepare_cached(query)?.exists([satellite])? {
        return Ok(());
    }
    let event = ConfigureEvent::McpInstallationUpdated;
    let payload = ConfigurePayload { event, installation_id: None, team_id: None, user_id: None };
    let Value::Object(payload) = serde_json::to_value(payload)? else { return Ok(()) };
    let (id, command_type) = (keys::generate_id("cfg-")?, "configure".to_owned());
    let command = BackendCommand { id, command_type, priority: CommandPriority::Immediate, payload, expires_at: None };
    insert(db, satellite, &command, now, true)
}

pub(super) fn count_waiting(db: &Transaction<'_>, satellite: &str, now: Timestamp) -> Result<usize, ApiError> {
    let mut select = db.prepare_cached(&format!("SELECT count(*) FROM commands WHERE {OPEN}"))?;
    Ok(select.query_row(params![satellite, timestamp_to_millis(now)], |row| row.get(0))?)
}

fn insert(
    db: &Transaction<'_>,
    satellite: &str,
    command: &BackendCommand,
    now: Timestamp,
    by_itself: bool,
) -> Result<(), ApiError> {
    if count_waiting(db, satellite, now)? >= WAITING_MAX && !by_itself {
        let why = format!("{WAITING_MAX} commands wait for this satellite, the maximum; try again later");
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, why));
    }
    db.execute(
        "INSERT INTO commands (satellite, id, command_type, priority, payload, expires_at, created_at, by_itself)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        params![
            satellite,
            command.id,
            command.command_type,
            priority_to_number(command.priority),
            serde_json::to_string(&command.payload)?,
            command.expires_at.map(timestamp_to_millis),
            timestamp_to_millis(now),
            by_itself
        ],
    )?;
    Ok(())
}

fn priority_to_number(priority: CommandPriority) -> i64 {
    match priority {
        CommandPriority::Immediate => 0,
        CommandPriority::High => 1,
        CommandPriority::Normal => 2,
        CommandPriority::Low => 3,
    }
}

fn priority_from_number(number: i64) -> CommandPriority {
    match number {
        0 => CommandPriority::Immediate,
        1 => CommandPriority::High,
        3 => CommandPriority::Low,
        _ => CommandPriority::Normal,
    }
}

fn find_command(db: &Transaction<'_>, satellite: &str, id: &str) -> Result<Option<CommandRow>, ApiError> {
    let mut select = db.prepare_cached("SELECT * FROM commands WHERE satellite = ?1 AND id = ?2")?;
    Ok(select.query_row(params![satellite, id], CommandRow::from_row).optional()?)
}

struct CommandRow {
    number: i64,
    id: String,
    command_type: String,
    priority: i64,
    payload: String,
    expires_at: Option<i64>,
    created_at: i64,
    first_sent_at: Option<i64>,
    times_sent: i64,
    result: Option<String>,
    finished_at: Option<i64>,
}

impl CommandRow {
    fn from_row(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            number: row.get("number")?,
            id: row.get("id")?,
            command_type: row.get("command_type")?,
            priority: row.get("priority")?,
            payload: row.get("payload")?,
            expires_at: row.get("expires_at")?,
            created_at: row.get("created_at")?,
            first_sent_at: row.get("first_sent_at")?,
            times_sent: row.get("times_sent")?,
            result: row.get("result")?,
            finished_at: row.get("finished_at")?,
        })
    }

    fn into_command(self) -> Result<BackendCommand, ApiError> {
        Ok(BackendCommand {
            payload: serde_json::from_str::<Map<String, Value>>(&self.payload)?,
            id: self.id,
            command_type: self.command_type,
            priority: priority_from_number(self.priority),
            expires_at: self.expires_at.map(timestamp_from_millis),
        })
    }

    fn into_view(self, now: Timestamp) -> Result<CommandRecordView, ApiError> {
        let result = self.result.as_deref().map(serde_json::from_str::<CommandResult>).transpose()?;
        let state = match &result {
            Some(CommandResult { status: CommandOutcome::Completed, .. }) => CommandStage::Completed,
            Some(CommandResult { status: CommandOutcome::Failed, .. }) => CommandStage::Failed,
            Some(CommandResult { status: CommandOutcome::Expired, .. }) => CommandStage::Expired,
            // The satellite may have executed a delivered command, so only its result ends the state.
            None if self.times_sent > 0 => CommandStage::Sent,
            None if self.expires_at.is_some_and(|at| timestamp_from_millis(at) <= now) => CommandStage::Expired,
            None => CommandStage::Queued,
        };
        Ok(CommandRecordView {
            state,
            created_at: timestamp_from_millis(self.created_at),
            times_sent: u64::try_from(self.times_sent).unwrap_or_default(),
            first_sent_at: self.first_sent_at.map(timestamp_from_millis),
            result,
            finished_at: self.finished_at.map(timestamp_from_millis),
            command: self.into_command()?,
        })
    }
}
