//! Configurations: a shared one for all satellites, which a satellite's own configuration replaces.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use ring::hmac;
use rusqlite::{OptionalExtension as _, Transaction, params};

use super::BackendState;
use super::access::{AdminAccess, AuthenticatedSatellite, PathParams, find_id};
use super::api::{ConfigUpdate, ConfigUpdateResult};
use super::body::{self, LARGE_MAX};
use super::clock::timestamp_to_millis;
use super::refusal::ApiError;
use super::schema::MessageSchema;
use super::{commands, keys};
use crate::wire::SatelliteConfig;

// Scope of the shared configuration.
const ALL_SATELLITES: &str = "";

pub(super) async fn fetch(
    State(app): State<Arc<BackendState>>,
    AuthenticatedSatellite { id }: AuthenticatedSatellite,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let config = app.database.run(move |db| effective_config(db, &id)?.ok_or_else(missing_config_error)).await?;
    let tag = format!("\"{}\"", config.hash);
    let known = headers.get_all(header::IF_NONE_MATCH).iter().any(|value| etag_matches(value, &config.hash));
    let mut response = if known { StatusCode::NOT_MODIFIED.into_response() } else { Json(config).into_response() };
    // The hash consists of hexadecimal digits, so this does not fail.
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    Ok(response)
}

// Accepts the hash with or without quotes.
fn etag_matches(value: &HeaderValue, hash: &str) -> bool {
    let tags = value.to_str().unwrap_or_default().split(',');
    tags.map(|tag| tag.trim().trim_start_matches("W/").trim_matches('"')).any(|tag| tag == "*" || tag == hash)
}

pub(super) fn effective_config(db: &Transaction<'_>, satellite: &str) -> Result<Option<SatelliteConfig>, ApiError> {
    let own = stored_config(db, satellite)?;
    Ok(if own.is_some() { own } else { stored_config(db, ALL_SATELLITES)? })
}

// Not an empty configuration: if the backend has lost its data, an empty one would stop all servers of the fleet.
fn missing_config_error() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "there is no configuration for this satellite yet")
}

fn stored_config(db: &Transaction<'_>, scope: &str) -> Result<Option<SatelliteConfig>, ApiError> {
    let mut select = db.prepare_cached("SELECT body FROM configs WHERE scope = ?1")?;
    let body: Option<String> = select.query_row([scope], |row| row.get(0)).optional()?;
    Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
}

// Adds the hash: an HMAC with a secret key, because short credentials could be guessed from a plain digest.
fn add_hash(db: &Transaction<'_>, update: ConfigUpdate) -> Result<SatelliteConfig, ApiError> {
    let key: Vec<u8> =
        db.prepare_cached("SELECT value FROM keys WHERE name = 'config'")?.query_row([], |row| row.get(0))?;
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), &serde_json::to_vec(&update)?);
    let ConfigUpdate { servers, teams } = update;
    Ok(SatelliteConfig { hash: keys::hexadecimal(tag.as_ref()), servers, teams })
}

pub(super) async fn show_shared(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
) -> Result<Json<SatelliteConfig>, ApiError> {
    // No satellite has an empty id, so this returns the shared configuration.
    let none = || ApiError::new(StatusCode::NOT_FOUND, "there is no configuration for all satellites yet");
    app.database.run(move |db| effective_config(db, ALL_SATELLITES)?.ok_or_else(none)).await.map(Json)
}

pub(super) async fn show(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<SatelliteConfig>, ApiError> {
    let config = app.database.run(move |db| {
        let satellite = find_id(db, &names.get("satellite"))?;
        effective_config(db, &satellite)?.ok_or_else(missing_config_error)
    });
    config.await.map(Json)
}

pub(super) async fn put_shared(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    body: Body,
) -> Result<Json<ConfigUpdateResult>, ApiError> {
    let update: ConfigUpdate = body::read_validated(body, LARGE_MAX, MessageSchema::ConfigUpdate).await?;
    let now = app.now();
    let stored = app.database.run(move |db| {
        let (before, config) = (effective_config(db, ALL_SATELLITES)?, add_hash(db, update)?);
        store_config(db, ALL_SATELLITES, &config, now)?;
        let all = "SELECT id FROM satellites WHERE id NOT IN (SELECT scope FROM configs) ORDER BY name";
        let all = db.prepare(all)?.query_map([], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
        queue_configure_if_changed(db, all, before.as_ref(), config, now)
    });
    let stored = stored.await?;
    app.notify_command_queued();
    tracing::info!(
        hash = stored.hash,
        changed = stored.changed,
        notified = stored.notified.len(),
        "configuration for all satellites stored"
    );
    Ok(Json(stored))
}

pub(super) async fn put(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
    body: Body,
) -> Result<Json<ConfigUpdateResult>, ApiError> {
    let update: ConfigUpdate = body::read_validated(body, LARGE_MAX, MessageSchema::ConfigUpdate).await?;
    let now = app.now();
    let stored = app.database.run(move |db| {
        let satellite = find_id(db, &names.get("satellite"))?;
        let (before, config) = (effective_config(db, &satellite)?, add_hash(db, update)?);
        store_config(db, &satellite, &config, now)?;
        queue_configure_if_changed(db, vec![satellite], before.as_ref(), config, now)
    });
    let stored = stored.await?;
    app.notify_command_queued();
    tracing::info!(hash = stored.hash, changed = stored.changed, notified = ?stored.notified, "configuration of a satellite stored");
    Ok(Json(stored))
}

pub(super) async fn delete_own(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<ConfigUpdateResult>, ApiError> {
    let now = app.now();
    let stored = app.database.run(move |db| {
        let satellite = find_id(db, &names.get("satellite"))?;
        let Some(config) = stored_config(db, ALL_SATELLITES)? else {
            let why = "there is no configuration for all satellites that could replace this one; put one first";
            return Err(ApiError::new(StatusCode::CONFLICT, why));
        };
        let before = effective_config(db, &satellite)?;
        db.execute("DELETE FROM configs WHERE scope = ?1", [&satellite])?;
        queue_configure_if_changed(db, vec![satellite], before.as_ref(), config, now)
    });
    let stored = stored.await?;
    app.notify_command_queued();
    Ok(Json(stored))
}

fn store_config(db: &Transaction<'_>, scope: &str, config: &SatelliteConfig, now: Timestamp) -> Result<(), ApiError> {
    db.execute(
        "INSERT INTO configs (scope, hash, body, updated_at) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (scope) DO UPDATE SET hash = excluded.hash, body = excluded.body, updated_at = excluded.updated_at",
        params![scope, config.hash, serde_json::to_string(config)?, timestamp_to_millis(now)],
    )?;
    Ok(())
}

fn queue_configure_if_changed(
    db: &Transaction<'_>,
    satellites: Vec<String>,
    before: Option<&SatelliteConfig>,
    config: SatelliteConfig,
    now: Timestamp,
) -> Result<ConfigUpdateResult, ApiError> {
    let changed = before.is_none_or(|before| before.hash != config.hash);
    let notified = if changed { satellites } else { Vec::new() };
    for satellite in &notified {
        commands::queue_configure(db, satellite, now)?;
    }
    Ok(ConfigUpdateResult { hash: config.hash, changed, notified })
}
