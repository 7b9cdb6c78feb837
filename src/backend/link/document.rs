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

use super::calls::{CallError, Fetched};
use super::contact::Matter;
use super::key::Key;
use super::rules::{Backoff, Scope};
use super::{Fleet, Shared, Specs};
use crate::backend::wire::Config;
use crate::config::{ConfigErrors, Document};
use crate::data_dir::DataDir;
use crate::disk::in_time;

/// Name of the stored configuration in the data directory.
pub const CONFIG_FILE: &str = "backend-config.json";

// A response has at most 16 MiB, and is stored with indentation.
const STORED_MAX: u64 = 256 << 20;

const FIRST_DELAY: Duration = Duration::from_secs(2);

// Further errors of a configuration are only counted.
const ERRORS_MAX: usize = 5;
// Characters of the hash in messages.
const HASH_SHOWN: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Taken {
    hash: Option<String>,
    // The `ETag` of the backend.
    tag: Option<HeaderValue>,
    // Last reported error, which is not reported again.
    told: Option<(&'static str, Option<u16>, String)>,
    // Specs before and after the last change.
    before: Option<Arc<Specs>>,
    specs: Option<Arc<Specs>>,
}

impl Taken {
    pub(super) fn of(hash: String) -> Self {
        Self { hash: Some(hash), ..Self::default() }
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error(transparent)]
    Call(CallError),
    // 404: the backend may have lost its data, so running servers continue.
    #[error("the backend has no configuration yet, and what runs goes on: {0}")]
    NoneYet(CallError),
    #[error("{0}")]
    Invalid(String),
}

impl From<CallError> for Trouble {
    fn from(error: CallError) -> Self {
        if error.status() == Some(StatusCode::NOT_FOUND) { Self::NoneYet(error) } else { Self::Call(error) }
    }
}

pub(super) enum Look {
    // The last change, if there was one.
    Unchanged(Option<Change>),
    TakenOn(Arc<Specs>),
}

impl Look {
    /// Returns the wanted spec of an instance, if it is known. Without a new configuration, users may have set values
    /// since the last change; a spec that differs from both sides of that change is accepted as it is.
    pub(super) fn wanted(&self, is: &InstanceSpec) -> Option<&InstanceSpec> {
        match self {
            Self::TakenOn(specs) => specs.get(&is.id),
            Self::Unchanged(Some(Change { before, now })) => {
                before.get(&is.id).filter(|before| *before == is).and_then(|_| now.get(&is.id))
            }
            Self::Unchanged(None) => None,
        }
    }
}

pub(super) struct Change {
    before: Arc<Specs>,
    now: Arc<Specs>,
}

// Never returns.
pub(super) async fn run(link: &Shared, fleet: &dyn Fleet) {
    let mut backoff = Backoff::new(FIRST_DELAY, link.plan.backoff_max, link.dice("configuration"));
    let mut reasons = link.reasons.subscribe();
    loop {
        let key = link.key().await;
        // A request that arrives during the fetch causes another one.
        reasons.borrow_and_update();
        let mut wait = link.plan.config_interval;
        let again_in = |trouble: &Trouble| {
            wait = match trouble {
                Trouble::NoneYet(_) => wait,
                Trouble::Call(error) => backoff.failed(error.retry_after()),
                Trouble::Invalid(_) => backoff.failed(None),
            };
            Some(wait)
        };
        if look(link, fleet, &key, None, again_in).await.is_ok() {
            backoff.succeeded();
        }
        tokio::select! {
            () = link.pause_until(Instant::now() + wait) => {}
            () = link.another_key(&key) => {}
            // The sender is part of `link`, so this does not fail.
            _ = reasons.changed() => backoff.succeeded(),
        }
    }
}

/// Fetches the configuration and applies it if it has changed. Errors are logged and reported; `again_in` returns the
/// delay of the next attempt. `expected` is the scope whose removal a command announced.
pub(super) async fn look(
    link: &Shared,
    fleet: &dyn Fleet,
    key: &Arc<Key>,
    expected: Option<&Scope>,
    again_in: impl FnOnce(&Trouble) -> Option<Duration> + Send,
) -> Result<Look, Trouble> {
    // One at a time, so that an older configuration cannot be applied last.
    let mut taken = link.taken.lock().await;
    let looked = take_on(link, fleet, key, expected, &mut taken).await;
    match &looked {
        Ok(_) => {
            link.contact.went_well(Matter::Configuration);
            taken.told = None;
        }
        Err(trouble) => {
            match trouble {
                Trouble::Call(error) => link.missed(Matter::Configuration, key, error),
                Trouble::NoneYet(_) | Trouble::Invalid(_) => {
                    link.contact.went_wrong(Matter::Configuration, true, &trouble.to_string());
                }
            }
            tell(fleet, &mut taken, trouble, again_in(trouble));
        }
    }
    looked
}

async fn take_on(
    link: &Shared,
    fleet: &dyn Fleet,
    key: &Arc<Key>,
    expected: Option<&Scope>,
    taken: &mut Taken,
) -> Result<Look, Trouble> {
    let started = std::time::Instant::now();
    let known = taken.tag.clone().or_else(|| {
        let hash = taken.hash.as_ref()?;
        HeaderValue::from_str(&format!("\"{hash}\"")).ok()
    });
    let fetched = link.backend.config(key, known.as_ref()).await?;
    link.prove();
    let unchanged = |taken: &Taken| {
        let change = taken.before.clone().zip(taken.specs.clone());
        Ok(Look::Unchanged(change.map(|(before, now)| Change { before, now })))
    };
    let Fetched::New(config, tag) = fetched else { return unchanged(taken) };
    if taken.hash.as_ref() == Some(&config.hash) {
        taken.tag = tag;
        return unchanged(taken);
    }
    let hash = config.hash.clone();
    let read = tokio::task::spawn_blocking(move || (Document::of(&config), config));
    let (document, config) = read.await.map_err(|error| Trouble::Invalid(error.to_string()))?;
    let document = document.map_err(|error| Trouble::Invalid(error.to_string()))?;
    let specs = fleet.take_on(document, started, expected).await;
    let specs = specs.map_err(|errors| Trouble::Invalid(in_a_line(&hash, &errors)))?;
    let before = taken.specs.take();
    *taken = Taken { hash: Some(hash.clone()), tag, told: None, before, specs: Some(specs.clone()) };
    link.contact.took_on(Some(hash));
    let (data_dir, url) = (link.data_dir.clone(), link.plan.url.clone());
    let stored = in_time(move || store(&data_dir, &url, &config)).await;
    if let Err(error) = stored.unwrap_or_else(|| Err(std::io::Error::other("the disk does not answer"))) {
        tracing::error!(%error, "the backend's configuration cannot be kept for a start without it");
    }
    Ok(Look::TakenOn(specs))
}

// Reports an error once until it changes.
fn tell(fleet: &dyn Fleet, taken: &mut Taken, trouble: &Trouble, retry_in: Option<Duration>) {
    let (error_type, status_code) = match trouble {
        // The backend may not have a configuration yet, which is not an error.
        Trouble::NoneYet(_) => return,
        Trouble::Call(error) => (error.kind(), error.status().map(|status| status.as_u16())),
        Trouble::Invalid(_) => ("invalid", None),
    };
    let told = (error_type, status_code, trouble.to_string());
    if taken.told.as_ref() == Some(&told) {
        return;
    }
    fleet.runtime().emitter().emit(Event::ConfigError {
        error_type: error_type.to_owned(),
        error_message: told.2.clone(),
        status_code,
        retry_in: retry_in.map(|wait| wait.as_secs()),
    });
    taken.told = Some(told);
}

fn in_a_line(hash: &str, errors: &ConfigErrors) -> String {
    let hash: String = hash.chars().take(HASH_SHOWN).filter(|letter| !letter.is_control()).collect();
    let items = errors.items();
    let item = |item: &crate::config::Item| format!("line {}: {} ({})", item.line, item.message, item.hint);
    let mut told: Vec<String> = items.iter().take(ERRORS_MAX).map(item).collect();
    if let Some(more) = items.len().checked_sub(ERRORS_MAX).filter(|more| *more > 0) {
        told.push(format!("and {more} more"));
    }
    format!("the backend's configuration `{hash}` cannot be used and nothing was changed: {}", told.join("; "))
}

#[derive(Serialize)]
struct Storing<'a> {
    url: &'a str,
    config: &'a Config,
}

#[derive(Deserialize)]
struct Stored {
    url: String,
    config: Config,
}

fn store(data_dir: &DataDir, url: &str, config: &Config) -> std::io::Result<()> {
    data_dir.replace(CONFIG_FILE, &serde_json::to_vec_pretty(&Storing { url, config })?)
}

// Blocks on the file system.
pub(super) fn load(data_dir: &DataDir, url: &str) -> Option<Document> {
    let unusable = |why: String| tracing::error!(why, "the backend's configuration of before cannot be used");
    let text = match data_dir.read(CONFIG_FILE, STORED_MAX) {
        Ok(text) => text?,
        Err(error) => {
            unusable(error.to_string());
            return None;
        }
    };
    // The serde error would contain the value, which may be a secret.
    let Ok(Stored { url: of, config }) = serde_json::from_slice(&text) else {
        unusable("the file does not hold what was stored there".to_owned());
        return None;
    };
    if of != url {
        tracing::warn!(of, "the configuration in the data directory is of another backend and is not used");
        return None;
    }
    Document::of(&config).map_err(|error| unusable(error.to_string())).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_last_configuration_is_kept_for_its_owner_only_and_of_its_backend_only() {
        let home = crate::data_dir::private_tempdir();
        let dir = DataDir::open(home.path()).unwrap();
        let config = Config { hash: "h1".to_owned(), ..Config::default() };
        assert_eq!(load(&dir, "https://a"), None);
        store(&dir, "https://a", &config).unwrap();
        let path = dir.path().join(CONFIG_FILE);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(load(&dir, "https://a").unwrap().hash, "h1");
        assert_eq!(load(&dir, "https://b"), None);
        std::fs::write(path, "{\"url\": \"https://a\", \"config\": {\"hash\": 7}}").unwrap();
        assert_eq!(load(&dir, "https://a"), None);
    }
}
