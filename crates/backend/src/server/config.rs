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
use super::access::{AdminAccess, AuthenticatedSatellite, PathParams};
use super::api::{ConfigUpdate, ConfigUpdateResult};
use super::body::{self, LARGE_MAX};
use super::clock::stored;
use super::refusal::ApiError;
use super::schema::MessageSchema;
use super::{commands, keys, satellites};
use crate::wire::SatelliteConfig;

// Scope of the shared configuration.
const FOR_ALL: &str = "";

pub(super) async fn fetch(
    State(app): State<Arc<BackendState>>,
    AuthenticatedSatellite { id }: AuthenticatedSatellite,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let config = app.database.run(move |db| of_satellite(db, &id)?.ok_or_else(none_yet)).await?;
    let tag = format!("\"{}\"", config.hash);
    let known = headers.get_all(header::IF_NONE_MATCH).iter().any(|value| names(value, &config.hash));
    let mut response = if known { StatusCode::NOT_MODIFIED.into_response() } else { Json(config).into_response() };
    // The hash consists of hexadecimal digits, so this does not fail.
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    Ok(response)
}

// Accepts the hash with or without quotes.
fn names(value: &HeaderValue, hash: &str) -> bool {
    let tags = value.to_str().unwrap_or_default().split(',');
    tags.map(|tag| tag.trim().trim_start_matches("W/").trim_matches('"')).any(|tag| tag == "*" || tag == hash)
}

/// Returns the satellite's own configuration, otherwise the shared one.
pub(super) fn of_satellite(db: &Transaction<'_>, satellite: &str) -> Result<Option<SatelliteConfig>, ApiError> {
    let own = kept(db, satellite)?;
    Ok(if own.is_some() { own } else { kept(db, FOR_ALL)? })
}

// Not an empty configuration: if the backend has lost its data, an empty one would stop all servers of the fleet.
fn none_yet() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "there is no configuration for this satellite yet")
}

fn kept(db: &Transaction<'_>, scope: &str) -> Result<Option<SatelliteConfig>, ApiError> {
    let mut select = db.prepare_cached("SELECT body FROM configs WHERE scope = ?1")?;
    let body: Option<String> = select.query_row([scope], |row| row.get(0)).optional()?;
    Ok(body.map(|body| serde_json::from_str(&body)).transpose()?)
}

// Adds the hash: an HMAC with a secret key, because short credentials could be guessed from a plain digest.
fn meant(db: &Transaction<'_>, wanted: ConfigUpdate) -> Result<SatelliteConfig, ApiError> {
    let key: Vec<u8> =
        db.prepare_cached("SELECT value FROM keys WHERE name = 'config'")?.query_row([], |row| row.get(0))?;
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), &serde_json::to_vec(&wanted)?);
    let ConfigUpdate { servers, teams } = wanted;
    Ok(SatelliteConfig { hash: keys::hexadecimal(tag.as_ref()), servers, teams })
}

pub(super) async fn show_for_all(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
) -> Result<Json<SatelliteConfig>, ApiError> {
    // No satellite has an empty id, so this returns the shared configuration.
    let none = || ApiError::new(StatusCode::NOT_FOUND, "there is no configuration for all satellites yet");
    app.database.run(move |db| of_satellite(db, FOR_ALL)?.ok_or_else(none)).await.map(Json)
}

pub(super) async fn show(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<SatelliteConfig>, ApiError> {
    let config = app.database.run(move |db| {
        let satellite = satellites::find(db, &names.of("satellite"))?;
        of_satellite(db, &satellite)?.ok_or_else(none_yet)
    });
    config.await.map(Json)
}

pub(super) async fn put_for_all(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    body: Body,
) -> Result<Json<ConfigUpdateResult>, ApiError> {
    let wanted: ConfigUpdate = body::take(body, LARGE_MAX, MessageSchema::ConfigWanted, &app.schemas).await?;
    let now = app.now();
    let kept = app.database.run(move |db| {
        let (before, config) = (of_satellite(db, FOR_ALL)?, meant(db, wanted)?);
        keep(db, FOR_ALL, &config, now)?;
        let all = "SELECT id FROM satellites WHERE id NOT IN (SELECT scope FROM configs) ORDER BY name";
        let all = db.prepare(all)?.query_map([], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
        tell(db, all, before.as_ref(), config, now)
    });
    let kept = kept.await?;
    app.command_queued();
    tracing::info!(
        hash = kept.hash,
        changed = kept.changed,
        told = kept.told.len(),
        "configuration for all satellites stored"
    );
    Ok(Json(kept))
}

pub(super) async fn put(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
    body: Body,
) -> Result<Json<ConfigUpdateResult>, ApiError> {
    let wanted: ConfigUpdate = body::take(body, LARGE_MAX, MessageSchema::ConfigWanted, &app.schemas).await?;
    let now = app.now();
    let kept = app.database.run(move |db| {
        let satellite = satellites::find(db, &names.of("satellite"))?;
        let (before, config) = (of_satellite(db, &satellite)?, meant(db, wanted)?);
        keep(db, &satellite, &config, now)?;
        tell(db, vec![satellite], before.as_ref(), config, now)
    });
    let kept = kept.await?;
    app.command_queued();
    tracing::info!(hash = kept.hash, changed = kept.changed, told = ?kept.told, "configuration of a satellite stored");
    Ok(Json(kept))
}

pub(super) async fn forget(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    names: PathParams,
) -> Result<Json<ConfigUpdateResult>, ApiError> {
    let now = app.now();
    let kept = app.database.run(move |db| {
        let satellite = satellites::find(db, &names.of("satellite"))?;
        let Some(config) = kept(db, FOR_ALL)? else {
            let why = "there is no configuration for all satellites that could replace this one; put one first";
            return Err(ApiError::new(StatusCode::CONFLICT, why));
        };
        let before = of_satellite(db, &satellite)?;
        db.execute("DELETE FROM configs WHERE scope = ?1", [&satellite])?;
        tell(db, vec![satellite], before.as_ref(), config, now)
    });
    let kept = kept.await?;
    app.command_queued();
    Ok(Json(kept))
}

fn keep(db: &Transaction<'_>, scope: &str, config: &SatelliteConfig, now: Timestamp) -> Result<(), ApiError> {
    db.execute(
        "INSERT INTO configs (scope, hash, body, updated_at) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (scope) DO UPDATE SET hash = excluded.hash, body = excluded.body, updated_at = excluded.updated_at",
        params![scope, config.hash, serde_json::to_string(config)?, stored(now)],
    )?;
    Ok(())
}

fn tell(
    db: &Transaction<'_>,
    satellites: Vec<String>,
    before: Option<&SatelliteConfig>,
    config: SatelliteConfig,
    now: Timestamp,
) -> Result<ConfigUpdateResult, ApiError> {
    let changed = before.is_none_or(|before| before.hash != config.hash);
    let told = if changed { satellites } else { Vec::new() };
    for satellite in &told {
        commands::configure(db, satellite, now)?;
    }
    Ok(ConfigUpdateResult { hash: config.hash, changed, told })
}
