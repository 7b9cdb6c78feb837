//! The configuration of the backend: looked at when something says that it has changed, and every so often; taken on by
//! difference; and the last good one kept, for a start without the backend.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::event::Event;
use reqwest::header::HeaderValue;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::calls::{CallError, Fetched};
use super::contact::Matter;
use super::key::{Key, read_capped, replace};
use super::rules::Backoff;
use super::{Fleet, Shared, Specs};
use crate::backend::wire::Config;
use crate::config::{ConfigErrors, Document};

/// In the data directory.
pub const CONFIG_FILE: &str = "backend-config.json";

/// What was fetched is no longer than 16 MiB, and is written with spaces.
const STORED_MAX: u64 = 256 << 20;

const FIRST_DELAY: Duration = Duration::from_secs(2);

/// So many errors of a configuration are told, and how many more there are.
const ERRORS_MAX: usize = 5;
/// And so much of its name.
const HASH_SHOWN: usize = 64;

/// How far the configuration is.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Of what is applied.
    hash: Option<String>,
    /// The backend's own word for it.
    tag: Option<HeaderValue>,
    /// What was said last of what cannot be used.
    told: Option<(&'static str, Option<u16>, String)>,
}

impl Taken {
    pub(super) fn of(hash: String) -> Self {
        Self { hash: Some(hash), ..Self::default() }
    }
}

/// Why the configuration is not what the backend says.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error(transparent)]
    Call(#[from] CallError),
    /// It was read, and cannot be used.
    #[error("{0}")]
    Invalid(String),
}

/// What a look has come to: what is to run now, where that is another than before.
pub(super) enum Look {
    Unchanged,
    TakenOn(Arc<Specs>),
}

/// Looks at it now and then. Never ends by itself.
pub(super) async fn run(link: &Shared, fleet: &dyn Fleet) {
    let mut backoff = Backoff::new(FIRST_DELAY, link.plan.backoff_max, link.dice("configuration"));
    loop {
        let key = link.key().await;
        let wait = match look(link, fleet, &key).await {
            Ok(_) => {
                backoff.succeeded();
                link.plan.config_interval
            }
            Err(trouble) => {
                let asked = if let Trouble::Call(error) = &trouble { error.retry_after() } else { None };
                let wait = backoff.failed(asked);
                tell(link, fleet, &trouble, wait).await;
                wait
            }
        };
        tokio::select! {
            () = link.pause_until(Instant::now() + wait) => {}
            () = link.another_key(&key) => {}
        }
    }
}

/// Fetches it and takes it on, if it is another than what is applied.
pub(super) async fn look(link: &Shared, fleet: &dyn Fleet, key: &Arc<Key>) -> Result<Look, Trouble> {
    // One after the other, or an older one could be taken on last.
    let mut taken = link.taken.lock().await;
    let started = std::time::Instant::now();
    let known = taken.tag.clone().or_else(|| {
        let hash = taken.hash.as_ref()?;
        HeaderValue::from_str(&format!("\"{hash}\"")).ok()
    });
    let fetched = link.backend.config(key, known.as_ref()).await;
    let fetched = fetched.inspect_err(|error| link.missed(Matter::Configuration, key, error))?;
    link.prove();
    let Fetched::New(config, tag) = fetched else {
        taken.told = None;
        link.contact.went_well(Matter::Configuration);
        return Ok(Look::Unchanged);
    };
    if taken.hash.as_ref() == Some(&config.hash) {
        (taken.tag, taken.told) = (tag, None);
        link.contact.went_well(Matter::Configuration);
        return Ok(Look::Unchanged);
    }
    let hash = config.hash.clone();
    let read = tokio::task::spawn_blocking(move || (Document::of(&config), config));
    let (document, config) = read.await.map_err(|error| Trouble::Invalid(error.to_string()))?;
    let document = document.map_err(|error| Trouble::Invalid(error.to_string()))?;
    let specs = fleet.take_on(document, started).await.map_err(|errors| {
        let why = in_a_line(&hash, &errors);
        link.contact.went_wrong(Matter::Configuration, true, &why);
        Trouble::Invalid(why)
    })?;
    *taken = Taken { hash: Some(hash.clone()), tag, told: None };
    link.contact.took_on(Some(hash));
    link.contact.went_well(Matter::Configuration);
    let (data_dir, url) = (link.data_dir.clone(), link.plan.url.clone());
    let stored = tokio::task::spawn_blocking(move || store(&data_dir, &url, &config)).await;
    if let Err(error) = stored.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
        tracing::error!(%error, "the backend's configuration cannot be kept for a start without it");
    }
    Ok(Look::TakenOn(specs))
}

/// An event for what is wrong, once as long as it is the same.
async fn tell(link: &Shared, fleet: &dyn Fleet, trouble: &Trouble, wait: Duration) {
    let (error_type, status_code) = match trouble {
        Trouble::Call(error) => (error.kind(), error.status().map(|status| status.as_u16())),
        Trouble::Invalid(_) => ("invalid", None),
    };
    let told = (error_type, status_code, trouble.to_string());
    let mut taken = link.taken.lock().await;
    if taken.told.as_ref() == Some(&told) {
        return;
    }
    fleet.runtime().emitter().emit(Event::ConfigError {
        error_type: error_type.to_owned(),
        error_message: told.2.clone(),
        status_code,
        retry_in: Some(wait.as_secs()),
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

fn store(data_dir: &Path, url: &str, config: &Config) -> std::io::Result<()> {
    replace(&data_dir.join(CONFIG_FILE), &serde_json::to_vec_pretty(&Storing { url, config })?)
}

/// The last good one of the backend at `url`. It waits for the file system.
pub(super) fn load(data_dir: &Path, url: &str) -> Option<Document> {
    let unusable = |why: String| tracing::error!(why, "the backend's configuration of before cannot be used");
    let text = match read_capped(&data_dir.join(CONFIG_FILE), STORED_MAX) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            unusable(error.to_string());
            return None;
        }
    };
    // What it says of a value of the wrong type would be the value.
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
        let dir = tempfile::tempdir().unwrap();
        let config = Config { hash: "h1".to_owned(), ..Config::default() };
        assert_eq!(load(dir.path(), "https://a"), None);
        store(dir.path(), "https://a", &config).unwrap();
        let path = dir.path().join(CONFIG_FILE);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(load(dir.path(), "https://a").unwrap().hash, "h1");
        assert_eq!(load(dir.path(), "https://b"), None);
        std::fs::write(path, "{\"url\": \"https://a\", \"config\": {\"hash\": 7}}").unwrap();
        assert_eq!(load(dir.path(), "https://a"), None);
    }
}
