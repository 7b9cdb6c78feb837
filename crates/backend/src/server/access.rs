//! Authentication: a satellite by its API key, an administrator by the admin token. A satellite has access only to its
//! own paths; others are answered with 404.
//!
//! The caller is authenticated before the body is read. Credentials are compared in constant time.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use mcp_satellite_actors::model::secret::Secret;
use rusqlite::{OptionalExtension as _, Transaction};
use serde::de::DeserializeOwned;

use super::BackendState;
use super::keys;
use super::refusal::ApiError;
use mcp_satellite_config::TokenHash;

/// Returns the id of the satellite with this id or name.
pub(super) fn find_id(db: &Transaction<'_>, name: &str) -> Result<String, ApiError> {
    let mut select =
        db.prepare_cached("SELECT id FROM satellites WHERE id = ?1 OR name = ?1 ORDER BY id <> ?1 LIMIT 1")?;
    select.query_row([name], |row| row.get(0)).optional()?.ok_or_else(|| ApiError::not_found("satellite"))
}

pub(super) fn bearer_token(headers: &HeaderMap) -> Result<Secret, ApiError> {
    let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let (scheme, token) = header.and_then(|header| header.split_once(' ')).unwrap_or_default();
    if !scheme.eq_ignore_ascii_case("bearer") || token.trim().is_empty() {
        return Err(ApiError::unauthorized("a bearer token is required: Authorization: Bearer TOKEN"));
    }
    Ok(token.trim().into())
}

// Authenticated satellite whose id is the one in the path.
#[derive(Debug, Clone)]
pub(super) struct AuthenticatedSatellite {
    pub(super) id: String,
}

impl FromRequestParts<Arc<BackendState>> for AuthenticatedSatellite {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<BackendState>) -> Result<Self, ApiError> {
        let hash = TokenHash::from_token(bearer_token(&parts.headers)?.expose());
        let found = app.database.run(move |db| {
            let mut select = db.prepare_cached("SELECT id, key_hash FROM satellites WHERE key_hash = ?1")?;
            let found = select.query_row([hash.0], |row| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?)));
            Ok(found.optional()?)
        });
        let Some((id, _)) = found.await?.filter(|(_, stored)| keys::is_same_hash(&hash, stored)) else {
            tracing::warn!(path = parts.uri.path(), "request with an invalid API key rejected");
            return Err(ApiError::unauthorized("this API key is not valid; register again with a new token"));
        };
        let PathParams(names) = PathParams::from_request_parts(parts, app).await?;
        if names.get("satellite") != Some(&id) {
            tracing::warn!(
                satellite = id,
                path = parts.uri.path(),
                "request of a satellite for a path of another one rejected"
            );
            return Err(ApiError::not_found("satellite for this API key"));
        }
        app.record_contact(&id);
        Ok(Self { id })
    }
}

// Proof that the request carries the admin token.
#[derive(Debug)]
pub(super) struct AdminAccess;

impl FromRequestParts<Arc<BackendState>> for AdminAccess {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<BackendState>) -> Result<Self, ApiError> {
        if keys::is_same_hash(&TokenHash::from_token(bearer_token(&parts.headers)?.expose()), &app.admin.0) {
            return Ok(Self);
        }
        tracing::warn!(path = parts.uri.path(), "request with an invalid admin token rejected");
        Err(ApiError::unauthorized(
            "this admin token is not valid; the file admin-token of the data directory contains the valid one",
        ))
    }
}

// Parameters of the path.
#[derive(Debug)]
pub(super) struct PathParams(HashMap<String, String>);

impl PathParams {
    // Empty if the route has no such parameter.
    pub(super) fn get(&self, name: &str) -> String {
        self.0.get(name).cloned().unwrap_or_default()
    }
}

impl FromRequestParts<Arc<BackendState>> for PathParams {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<BackendState>) -> Result<Self, ApiError> {
        let names = Path::<HashMap<String, String>>::from_request_parts(parts, app).await;
        names.map(|Path(names)| Self(names)).map_err(|_| ApiError::not_found("path"))
    }
}

// Parameters of the query string.
#[derive(Debug)]
pub(super) struct QueryParams<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<BackendState>> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<BackendState>) -> Result<Self, ApiError> {
        let query = Query::<T>::from_request_parts(parts, app).await;
        query.map(|Query(query)| Self(query)).map_err(|error| ApiError::bad_request(error.body_text()))
    }
}
