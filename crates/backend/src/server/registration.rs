//! Registration of satellites with single-use tokens. Each satellite receives an API key of its own.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use jiff::{SignedDuration, Timestamp};
use mcp_satellite_actors::model::secret::Secret;
use rusqlite::{OptionalExtension as _, Transaction, params};

use super::BackendState;
use super::access::{AdminAccess, bearer_token};
use super::api::{IssuedToken, TokenRequest};
use super::body::{self, SMALL_MAX};
use super::clock::timestamp_to_millis;
use super::keys::{self, CredentialKind};
use super::refusal::ApiError;
use super::satellites;
use super::schema::MessageSchema;
use crate::wire::{Registration, RegistrationResponse};
use mcp_satellite_config::TokenHash;

// Default lifetime of an unused token.
pub(super) const TOKEN_AGE_MAX: SignedDuration = SignedDuration::from_hours(24);

const NOT_VALID: &str =
    "this registration token is not valid: it was used, has expired, or never existed; request a new one";

const NAME_TAKEN: &str = "a satellite of this name is connected; choose another name, stop that satellite (a killed one \
    counts as connected for 90 s), or request a token for this name";

pub(super) async fn register(
    State(app): State<Arc<BackendState>>,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<RegistrationResponse>), ApiError> {
    let token = TokenHash::from_token(bearer_token(&headers)?.expose());
    let now = app.now();
    // Without a valid token, a caller learns nothing about the schema.
    app.database
        .run(move |db| if is_valid(db, token, now)? { Ok(()) } else { Err(ApiError::unauthorized(NOT_VALID)) })
        .await?;
    let last_contacts = app.last_contacts();
    let request: Registration = body::read_validated(body, SMALL_MAX, MessageSchema::Registration).await?;
    let (key, new_id) = (keys::generate_credential(CredentialKind::Satellite)?, keys::generate_id("sat-")?);
    let hash = TokenHash::from_token(key.expose());
    let name = request.name.clone();
    let (id, again) = app
        .database
        .run(move |db| {
            // Checked again: another request may have used the token meanwhile.
            if !is_valid(db, token, now)? {
                return Err(ApiError::unauthorized(NOT_VALID));
            }
            let made_for = "SELECT name FROM registration_tokens WHERE hash = ?1";
            let made_for: Option<String> = db.query_row(made_for, [token.0], |row| row.get(0))?;
            match made_for {
                Some(name) if name != request.name => {
                    return Err(ApiError::new(StatusCode::FORBIDDEN, "this registration token is for another name"));
                }
                Some(_) => {}
                // A token for a new satellite must not replace a connected one.
                None if satellites::is_connected(db, &request.name, now, &last_contacts)? => {
                    return Err(ApiError::new(StatusCode::CONFLICT, NAME_TAKEN));
                }
                None => {}
            }
            let known: Option<String> = db
                .query_row("SELECT id FROM satellites WHERE name = ?1", [&request.name], |row| row.get(0))
                .optional()?;
            let again = known.is_some();
            let id = known.unwrap_or(new_id);
            db.execute(
                "INSERT INTO satellites (id, name, key_hash, registration, registered_at) VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (id) DO UPDATE SET
                     key_hash = excluded.key_hash, registration = excluded.registration, registered_at = excluded.registered_at",
                params![id, request.name, hash.0, serde_json::to_string(&request)?, timestamp_to_millis(now)],
            )?;
            db.execute(
                "UPDATE registration_tokens SET used_at = ?2, used_by = ?3 WHERE hash = ?1",
                params![token.0, timestamp_to_millis(now), id],
            )?;
            Ok((id, again))
        })
        .await?;
    app.record_contact(&id);
    tracing::info!(satellite = id, name, again, "a satellite has registered");
    Ok((StatusCode::CREATED, Json(RegistrationResponse { satellite_id: id, api_key: key.expose().to_owned() })))
}

pub(super) async fn make_token(
    _: AdminAccess,
    State(app): State<Arc<BackendState>>,
    body: Body,
) -> Result<(StatusCode, Json<IssuedToken>), ApiError> {
    let request: TokenRequest = body::read_validated(body, SMALL_MAX, MessageSchema::TokenRequest).await?;
    let age = request.expires_in_seconds.and_then(|seconds| i64::try_from(seconds).ok());
    let age = age.map_or(TOKEN_AGE_MAX, SignedDuration::from_secs);
    let now = app.now();
    let (token, expires_at) = app.database.run(move |db| insert_token(db, now, age, &request)).await?;
    tracing::info!(%expires_at, "a registration token was created");
    Ok((StatusCode::CREATED, Json(IssuedToken { token: token.expose().to_owned(), expires_at })))
}

pub(super) fn insert_token(
    db: &Transaction<'_>,
    now: Timestamp,
    age: SignedDuration,
    request: &TokenRequest,
) -> Result<(Secret, Timestamp), ApiError> {
    let token = keys::generate_credential(CredentialKind::Registration)?;
    let expires_at = now.saturating_add(age).unwrap_or(Timestamp::MAX);
    db.execute(
        "INSERT INTO registration_tokens (hash, note, name, created_at, expires_at) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![
            TokenHash::from_token(token.expose()).0,
            request.note,
            request.name,
            timestamp_to_millis(now),
            timestamp_to_millis(expires_at)
        ],
    )?;
    Ok((token, expires_at))
}

pub(super) fn is_valid(db: &Transaction<'_>, token: TokenHash, now: Timestamp) -> Result<bool, ApiError> {
    let stored_hash: Option<Vec<u8>> = db
        .prepare_cached("SELECT hash FROM registration_tokens WHERE hash = ?1 AND used_at IS NULL AND expires_at > ?2")?
        .query_row(params![token.0, timestamp_to_millis(now)], |row| row.get(0))
        .optional()?;
    Ok(stored_hash.is_some_and(|stored_hash| keys::is_same_hash(&token, &stored_hash)))
}
