//! Registration of the satellite with a single-use token, repeated if the backend rejects its key.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::secret::Secret;
use tokio::time::Instant;

use super::calls::BackendCallError;
use super::contact::RequestPurpose;
use super::key::{self, SatelliteKey, StoredKey};
use super::rules::RetryPacer;
use super::{LinkShared, metrics};
use crate::wire::{Registration, RegistrationResponse};
use mcp_satellite_files::disk::{NotSaved, run_with_timeout};

const FIRST_DELAY: Duration = Duration::from_secs(2);
// A shorter key could be guessed.
const API_KEY_MIN: usize = 16;

const NO_TOKEN: &str = "there is neither a key in the data directory nor a `token` in [backend]: create a registration \
                        token at the backend, set token = \"env:NAME\" or \"file:PATH\", and reload (SIGHUP) or \
                        restart";
const REFUSED: &str = "; a registration token works once: create a new one at the backend, set it as `token` in \
                       [backend], and reload (SIGHUP) or restart";

// Never returns.
pub(super) async fn run(link: &LinkShared) {
    let mut pacer = RetryPacer::new(FIRST_DELAY, link.plan.backoff_max, link.jitter_rng("registration"));
    let mut keys = link.key.subscribe();
    let mut tokens = link.token.subscribe();
    let mut is_key_loaded = false;
    loop {
        if !std::mem::replace(&mut is_key_loaded, true) {
            load_stored_key(link).await;
        }
        // The sender is part of `link`, so this does not end.
        if keys.wait_for(Option::is_none).await.is_err() {
            return;
        }
        let refused = link.take_rejected_key();
        if link.is_key_accepted() {
            // The key has worked, so this backend does not reject every key that it issues.
            pacer.reset();
        } else if let Some((at, _)) = &refused {
            tokio::select! {
                () = link.pause_until(*at + pacer.delay_after_failure(None)) => {}
                _ = tokens.changed() => pacer.reset(),
            }
        }
        loop {
            let token = tokens.borrow_and_update().clone();
            let (answered, why, wait) = match register(link, token.as_ref()).await {
                Ok(()) => break,
                Err(RegistrationError::NoToken) => (false, NO_TOKEN.to_owned(), None),
                Err(RegistrationError::Local(why)) => (false, why, None),
                Err(RegistrationError::Backend(error)) => {
                    let hint = if error
                        .status()
                        .is_some_and(|status| matches!(status.as_u16(), 400 | 401 | 403 | 404 | 409 | 410 | 422))
                    {
                        REFUSED
                    } else {
                        ""
                    };
                    (error.status().is_some(), format!("{error}{hint}"), error.retry_after())
                }
            };
            link.reachability.record_failure(RequestPurpose::Registration, answered, &why);
            let wait = pacer.delay_after_failure(wait);
            let next = Instant::now() + wait;
            link.reachability.record_poll(crate::wire::PollingMode::default(), true, next);
            tokio::select! {
                () = link.pause_until(next) => {}
                // Another token may work: retry at once.
                _ = tokens.changed() => {
                    pacer.reset();
                    continue;
                }
            }
            if let Some((_, key)) = &refused
                && is_key_valid_again(link, key).await
            {
                tracing::info!(satellite_id = key.satellite_id, "the backend accepts the key again");
                link.reachability.record_success(RequestPurpose::Registration);
                link.set_key(SatelliteKey::clone(key));
                break;
            }
        }
    }
}

/// Checks whether a rejected key is accepted again: something in front of the backend may have rejected it. Delivered
/// commands come again with the next poll.
async fn is_key_valid_again(link: &LinkShared, key: &SatelliteKey) -> bool {
    link.backend.poll_commands(key, None, 1, Duration::ZERO).await.is_ok()
}

async fn load_stored_key(link: &LinkShared) {
    if link.key.borrow().is_some() {
        return;
    }
    let (database, url) = (link.database.clone(), link.plan.url.clone());
    let Ok(stored_key) = tokio::task::spawn_blocking(move || key::load(&database, &url)).await else { return };
    match stored_key {
        StoredKey::Missing => {}
        StoredKey::Key(key) => link.set_key(key),
        StoredKey::OtherBackend { url } => {
            tracing::warn!(of = url, "the key in the data directory belongs to another backend and is not used");
        }
        StoredKey::Damaged(why) => tracing::error!(why, "the key in the data directory cannot be used"),
    }
}

enum RegistrationError {
    NoToken,
    Local(String),
    Backend(BackendCallError),
}

async fn register(link: &LinkShared, token: Option<&Secret>) -> Result<(), RegistrationError> {
    let token = token.ok_or(RegistrationError::NoToken)?;
    let database = link.database.clone();
    // A rejected key stays stored until another one replaces it.
    let ready = tokio::task::spawn_blocking(move || database.check_writable());
    let unkept = |error: &dyn std::fmt::Display| {
        let dir = link.data_dir.display();
        RegistrationError::Local(format!(
            "cannot store a key in `{dir}`, so the single-use token was not sent: {error}"
        ))
    };
    ready.await.map_err(|error| unkept(&error))?.map_err(|error| unkept(&error))?;
    let system = tokio::task::spawn_blocking(metrics::system_info).await.unwrap_or_default();
    let body = Registration {
        name: link.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        capabilities: ["stdio", "http", "sse"].map(str::to_owned).to_vec(),
        system,
    };
    let RegistrationResponse { satellite_id, api_key } =
        link.backend.register(token, &body).await.map_err(RegistrationError::Backend)?;
    if !key::is_id(&satellite_id) || !key::is_sendable(&api_key) || api_key.len() < API_KEY_MIN {
        let reason = "the id or the key cannot be used".to_owned();
        return Err(RegistrationError::Backend(BackendCallError::Malformed { to: link.plan.url.clone(), reason }));
    }
    let key = SatelliteKey { url: link.plan.url.clone(), satellite_id, secret: api_key.into() };
    let (database, stored_key) = (link.database.clone(), key.clone());
    let stored = run_with_timeout(move || key::store(&database, &stored_key)).await;
    if let Err(error) = stored.unwrap_or(Err(NotSaved::DiskHangs)) {
        tracing::error!(%error, "cannot store the key of the backend; it is used until the satellite ends, and the \
                                 next start needs another registration token");
    }
    tracing::info!(satellite_id = key.satellite_id, url = key.url, "registered with the backend");
    link.reachability.record_success(RequestPurpose::Registration);
    link.set_key(key);
    Ok(())
}

impl LinkShared {
    fn set_key(&self, key: SatelliteKey) {
        self.key_accepted.store(false, std::sync::atomic::Ordering::Relaxed);
        self.key.send_replace(Some(Arc::new(key)));
    }

    // A newer key stays in use.
    pub(super) fn reject_key(&self, refused: &Arc<SatelliteKey>) {
        let is_current = |key: &Option<Arc<SatelliteKey>>| key.as_ref().is_some_and(|key| Arc::ptr_eq(key, refused));
        let forgotten = self.key.send_if_modified(|key| {
            let current = is_current(key);
            if current {
                *key = None;
            }
            current
        });
        if forgotten {
            tracing::warn!(satellite_id = refused.satellite_id, "the backend rejected the key; registering again");
            *self.rejected_key.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
                Some((Instant::now(), refused.clone()));
        }
    }

    pub(super) fn mark_key_accepted(&self) {
        self.key_accepted.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn is_key_accepted(&self) -> bool {
        self.key_accepted.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn take_rejected_key(&self) -> Option<(Instant, Arc<SatelliteKey>)> {
        self.rejected_key.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
    }
}
