//! Configuration from the backend: fetched periodically and on request, applied by differences, and stored for a start
//! without the backend.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::spec::InstanceSpec;
use reqwest::StatusCode;
use reqwest::header::HeaderValue;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::calls::{BackendCallError, ConfigFetch};
use super::contact::RequestPurpose;
use super::key::SatelliteKey;
use super::rules::{InstanceScope, RetryPacer};
use super::{LinkHost, LinkShared, SpecsById};
use crate::wire::SatelliteConfig;
use mcp_satellite_config::{BackendDocument, ConfigErrors};
use mcp_satellite_files::disk::{NotSaved, run_with_timeout};
use mcp_satellite_store::state::{StateDb, StateKey, StateTable};

const FIRST_DELAY: Duration = Duration::from_secs(2);

// Further errors of a configuration are only counted.
const ERRORS_MAX: usize = 5;
// Characters of the hash in messages.
const HASH_SHOWN: usize = 64;

#[derive(Debug, Default)]
pub(super) struct AppliedConfig {
    hash: Option<String>,
    // The `ETag` of the backend.
    etag: Option<HeaderValue>,
    // Last reported error, which is not reported again.
    reported_error: Option<(&'static str, Option<u16>, String)>,
    // Specs before and after the last change.
    before: Option<Arc<SpecsById>>,
    specs: Option<Arc<SpecsById>>,
}

impl AppliedConfig {
    pub(super) fn from_hash(hash: String) -> Self {
        Self { hash: Some(hash), ..Self::default() }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ConfigFetchError {
    #[error(transparent)]
    Call(BackendCallError),
    // 404: the backend may have lost its data, so running servers continue.
    #[error("the backend has no configuration yet; running servers continue: {0}")]
    NotConfigured(BackendCallError),
    #[error("{0}")]
    Invalid(String),
}

impl From<BackendCallError> for ConfigFetchError {
    fn from(error: BackendCallError) -> Self {
        if error.status() == Some(StatusCode::NOT_FOUND) { Self::NotConfigured(error) } else { Self::Call(error) }
    }
}

pub(super) enum ConfigFetchOutcome {
    // The last change, if there was one.
    Unchanged(Option<AppliedSpecsChange>),
    Applied(Arc<SpecsById>),
}

impl ConfigFetchOutcome {
    /// Returns the wanted spec of an instance, if it is known. Without a new configuration, users may have set values
    /// since the last change; a spec that differs from both sides of that change is accepted as it is.
    pub(super) fn target_spec(&self, is: &InstanceSpec) -> Option<&InstanceSpec> {
        match self {
            Self::Applied(specs) => specs.get(&is.id),
            Self::Unchanged(Some(AppliedSpecsChange { before, now })) => {
                before.get(&is.id).filter(|before| *before == is).and_then(|_| now.get(&is.id))
            }
            Self::Unchanged(None) => None,
        }
    }
}

pub(super) struct AppliedSpecsChange {
    before: Arc<SpecsById>,
    now: Arc<SpecsById>,
}

// Never returns.
pub(super) async fn run(link: &LinkShared, fleet: &dyn LinkHost) {
    let mut pacer = RetryPacer::new(FIRST_DELAY, link.plan.backoff_max, link.jitter_rng("configuration"));
    let mut reasons = link.refetch_triggers.subscribe();
    loop {
        let key = link.wait_for_key().await;
        // A request that arrives during the fetch causes another one.
        reasons.borrow_and_update();
        let mut wait = link.plan.config_interval;
        let again_in = |error: &ConfigFetchError| {
            wait = match error {
                ConfigFetchError::NotConfigured(_) => wait,
                ConfigFetchError::Call(error) => pacer.delay_after_failure(error.retry_after()),
                ConfigFetchError::Invalid(_) => pacer.delay_after_failure(None),
            };
            Some(wait)
        };
        if refresh(link, fleet, &key, None, again_in).await.is_ok() {
            pacer.reset();
        }
        tokio::select! {
            () = link.pause_until(Instant::now() + wait) => {}
            () = link.wait_for_new_key(&key) => {}
            // The sender is part of `link`, so this does not fail.
            _ = reasons.changed() => pacer.reset(),
        }
    }
}

/// Fetches the configuration and applies it if it has changed. Errors are logged and reported; `again_in` returns the
/// delay of the next attempt. `expected` is the scope whose removal a command announced.
pub(super) async fn refresh(
    link: &LinkShared,
    fleet: &dyn LinkHost,
    key: &Arc<SatelliteKey>,
    expected: Option<&InstanceScope>,
    again_in: impl FnOnce(&ConfigFetchError) -> Option<Duration> + Send,
) -> Result<ConfigFetchOutcome, ConfigFetchError> {
    // One at a time, so that an older configuration cannot be applied last.
    let mut applied = link.applied_config.lock().await;
    let outcome = fetch_and_apply(link, fleet, key, expected, &mut applied).await;
    match &outcome {
        Ok(_) => {
            link.reachability.record_success(RequestPurpose::Configuration);
            applied.reported_error = None;
        }
        Err(error) => {
            match error {
                ConfigFetchError::Call(error) => link.record_error(RequestPurpose::Configuration, key, error),
                ConfigFetchError::NotConfigured(_) | ConfigFetchError::Invalid(_) => {
                    link.reachability.record_failure(RequestPurpose::Configuration, true, &error.to_string());
                }
            }
            report_error(fleet, &mut applied, error, again_in(error));
        }
    }
    outcome
}

async fn fetch_and_apply(
    link: &LinkShared,
    fleet: &dyn LinkHost,
    key: &Arc<SatelliteKey>,
    expected: Option<&InstanceScope>,
    applied: &mut AppliedConfig,
) -> Result<ConfigFetchOutcome, ConfigFetchError> {
    let started = std::time::Instant::now();
    let known = applied.etag.clone().or_else(|| {
        let hash = applied.hash.as_ref()?;
        HeaderValue::from_str(&format!("\"{hash}\"")).ok()
    });
    let fetched = link.backend.fetch_config(key, known.as_ref()).await?;
    link.mark_key_accepted();
    let unchanged = |applied: &AppliedConfig| {
        let change = applied.before.clone().zip(applied.specs.clone());
        Ok(ConfigFetchOutcome::Unchanged(change.map(|(before, now)| AppliedSpecsChange { before, now })))
    };
    let ConfigFetch::New(config, tag) = fetched else { return unchanged(applied) };
    if applied.hash.as_ref() == Some(&config.hash) {
        applied.etag = tag;
        return unchanged(applied);
    }
    let hash = config.hash.clone();
    let read = tokio::task::spawn_blocking(move || {
        (BackendDocument::new(config.hash.clone(), &config.servers, &config.teams), config)
    });
    let (document, config) = read.await.map_err(|error| ConfigFetchError::Invalid(error.to_string()))?;
    let document = document.map_err(|error| ConfigFetchError::Invalid(error.to_string()))?;
    let specs = fleet.apply_config(document, started, expected).await;
    let specs = specs.map_err(|errors| ConfigFetchError::Invalid(format_errors(&hash, &errors)))?;
    let before = applied.specs.take();
    *applied =
        AppliedConfig { hash: Some(hash.clone()), etag: tag, reported_error: None, before, specs: Some(specs.clone()) };
    link.reachability.set_config_hash(Some(hash));
    let (database, url) = (link.database.clone(), link.plan.url.clone());
    let stored = run_with_timeout(move || store(&database, &url, &config)).await;
    if let Err(error) = stored.unwrap_or(Err(NotSaved::DiskHangs)) {
        tracing::error!(%error, "cannot store the backend's configuration for a start without the backend");
    }
    Ok(ConfigFetchOutcome::Applied(specs))
}

// Reports an error once until it changes.
fn report_error(
    fleet: &dyn LinkHost,
    applied: &mut AppliedConfig,
    error: &ConfigFetchError,
    retry_in: Option<Duration>,
) {
    let (error_type, status_code) = match error {
        // The backend may not have a configuration yet, which is not an error.
        ConfigFetchError::NotConfigured(_) => return,
        ConfigFetchError::Call(error) => (error.kind(), error.status().map(|status| status.as_u16())),
        ConfigFetchError::Invalid(_) => ("invalid", None),
    };
    let report = (error_type, status_code, error.to_string());
    if applied.reported_error.as_ref() == Some(&report) {
        return;
    }
    fleet.runtime().emitter().emit(Event::ConfigError {
        error_type: error_type.to_owned(),
        error_message: report.2.clone(),
        status_code,
        retry_in: retry_in.map(|wait| wait.as_secs()),
    });
    applied.reported_error = Some(report);
}

fn format_errors(hash: &str, errors: &ConfigErrors) -> String {
    let hash: String = hash.chars().take(HASH_SHOWN).filter(|letter| !letter.is_control()).collect();
    let items = errors.items();
    let item =
        |item: &mcp_satellite_config::ConfigErrorItem| format!("line {}: {} ({})", item.line, item.message, item.hint);
    let mut shown: Vec<String> = items.iter().take(ERRORS_MAX).map(item).collect();
    if let Some(more) = items.len().checked_sub(ERRORS_MAX).filter(|more| *more > 0) {
        shown.push(format!("and {more} more"));
    }
    format!("the backend's configuration `{hash}` cannot be used and nothing was changed: {}", shown.join("; "))
}

#[derive(Serialize)]
struct StoredConfigRef<'a> {
    url: &'a str,
    config: &'a SatelliteConfig,
}

#[derive(Deserialize)]
struct StoredConfigBody {
    url: String,
    config: SatelliteConfig,
}

fn store(database: &StateDb, url: &str, config: &SatelliteConfig) -> Result<(), NotSaved> {
    let body = serde_json::to_vec(&StoredConfigRef { url, config });
    let body = body.map_err(|error| NotSaved::Failed(error.to_string()))?;
    database.set(StateTable::BackendDocument, StateKey::BACKEND, Some(body));
    database.save()
}

// Blocks on the file system.
pub(super) fn load(database: &StateDb, url: &str) -> Option<BackendDocument> {
    let unusable = |why: String| tracing::error!(why, "the stored configuration of the backend cannot be used");
    let text = match database.load_row(StateTable::BackendDocument, &StateKey::BACKEND.into()) {
        Ok(text) => text?,
        Err(why) => {
            unusable(why);
            return None;
        }
    };
    // The serde error would contain the value, which may be a secret.
    let Ok(StoredConfigBody { url: of, config }) = serde_json::from_slice(&text) else {
        unusable("it is damaged".to_owned());
        return None;
    };
    if of != url {
        tracing::warn!(of, "the configuration in the data directory belongs to another backend and is not used");
        return None;
    }
    BackendDocument::new(config.hash.clone(), &config.servers, &config.teams)
        .map_err(|error| unusable(error.to_string()))
        .ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use mcp_satellite_files::data_dir::{DataDir, private_tempdir};

    use super::*;

    #[test]
    fn the_last_configuration_is_stored_per_backend() {
        let home = private_tempdir();
        let database = StateDb::open(&DataDir::open(home.path()).unwrap()).unwrap();
        let config = SatelliteConfig { hash: "h1".to_owned(), ..SatelliteConfig::default() };
        assert_eq!(load(&database, "https://a"), None);
        store(&database, "https://a", &config).unwrap();
        assert_eq!(load(&database, "https://a").unwrap().hash, "h1");
        assert_eq!(load(&database, "https://b"), None);
        let damaged = b"{\"url\": \"https://a\", \"config\": {\"hash\": 7}}".to_vec();
        database.set(StateTable::BackendDocument, StateKey::BACKEND, Some(damaged));
        assert_eq!(load(&database, "https://a"), None);
    }
}
