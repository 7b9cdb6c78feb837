//! The configuration of the backend: looked at when something says that it has changed, and every so often; taken on by
//! difference; and the last good one kept, for a start without the backend.

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
    /// What it had to run before it was taken on, and since.
    before: Option<Arc<Specs>>,
    specs: Option<Arc<Specs>>,
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
    Call(CallError),
    /// There is none, for example because the backend has lost all that it had: no reason to stop what runs.
    #[error("the backend has no configuration yet, and what runs goes on: {0}")]
    NoneYet(CallError),
    /// It was read, and cannot be used.
    #[error("{0}")]
    Invalid(String),
}

impl From<CallError> for Trouble {
    fn from(error: CallError) -> Self {
        if error.status() == Some(StatusCode::NOT_FOUND) { Self::NoneYet(error) } else { Self::Call(error) }
    }
}

/// What a look has come to.
pub(super) enum Look {
    /// It is what was taken on before.
    Unchanged(Option<Change>),
    /// It is another one, and this is to run now.
    TakenOn(Arc<Specs>),
}

impl Look {
    /// What this instance is to become, where that is known. Where nothing was taken on now, users may have given values
    /// since, so what is neither as before nor as it was to become is as it should be.
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

/// What was to run, and is since what was taken on last.
pub(super) struct Change {
    before: Arc<Specs>,
    now: Arc<Specs>,
}

/// Looks at it now and then. Never ends by itself.
pub(super) async fn run(link: &Shared, fleet: &dyn Fleet) {
    let mut backoff = Backoff::new(FIRST_DELAY, link.plan.backoff_max, link.dice("configuration"));
    let mut reasons = link.reasons.subscribe();
    loop {
        let key = link.key().await;
        // What comes while it is looked at has it looked at once more.
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
            // The sender is in `link`, so this is another one.
            _ = reasons.changed() => backoff.succeeded(),
        }
    }
}

/// Fetches it and takes it on, if it is another than what is applied. What is wrong is shown and told; `again_in` says when
/// it is tried again. `expected` is what is to be removed, where somebody has said so.
pub(super) async fn look(
    link: &Shared,
    fleet: &dyn Fleet,
    key: &Arc<Key>,
    expected: Option<&Scope>,
    again_in: impl FnOnce(&Trouble) -> Option<Duration> + Send,
) -> Result<Look, Trouble> {
    // One after the other, or an older one could be taken on last.
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

/// An event for what is wrong, once as long as it is the same.
fn tell(fleet: &dyn Fleet, taken: &mut Taken, trouble: &Trouble, retry_in: Option<Duration>) {
    let (error_type, status_code) = match trouble {
        // Nothing is wrong as long as nobody has said what is to run.
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

/// The last good one of the backend at `url`. It waits for the file system.
pub(super) fn load(data_dir: &DataDir, url: &str) -> Option<Document> {
    let unusable = |why: String| tracing::error!(why, "the backend's configuration of before cannot be used");
    let text = match data_dir.read(CONFIG_FILE, STORED_MAX) {
        Ok(text) => text?,
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
