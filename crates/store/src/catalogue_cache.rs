//! Cache of the catalogues (tools, resources, prompts) of stdio servers that may sleep, kept over restarts of the
//! satellite: one row per server configuration in the state database. The catalogue of a lazy server is stored as soon
//! as it is discovered, that of another server when it goes dormant.
//!
//! The name of a row is a keyed hash of everything that defines the server (`identity`), secret values included: a
//! changed value gives another name, a changed policy does not. The key is random and never leaves the data directory,
//! so nobody can find out a short secret from a name by trying. Memos (`memos`) contain such names, too. A row that
//! cannot be used is ignored: the satellite then starts the server to discover its catalogue.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::catalogue::{self, Catalogue, Tool};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::snapshot::Snapshot;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime};
use ring::rand::SystemRandom;
use ring::{hmac, rand};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::identity;
use crate::state::{StateDb, StateKey, StateTable};

const FORM: u32 = 2;
// Pause after a snapshot change, so that several changes are stored together.
const SETTLE: Duration = Duration::from_millis(500);
const KEY_BYTES: usize = 32;

#[derive(Serialize, Deserialize)]
struct CachedCatalogue {
    form: u32,
    name: String,
    tools: Vec<Box<RawValue>>,
    resources: Vec<Box<RawValue>>,
    resource_templates: Vec<Box<RawValue>>,
    prompts: Vec<Box<RawValue>>,
}

pub struct CatalogueCache {
    database: StateDb,
    key: hmac::Key,
    slots: Mutex<HashMap<InstanceId, CacheSlot>>,
}

struct CacheSlot {
    /// Name of the configuration to keep. An instance may still run with an earlier configuration.
    name: String,
    last: Option<Arc<Catalogue>>,
    /// True if the last write failed. The write is repeated with the next snapshot and the failure is logged once.
    failed: bool,
}

impl CatalogueCache {
    pub fn open(database: &StateDb) -> Result<Self, String> {
        let found = database.load_row(StateTable::Keys, &StateKey::CATALOGUES.into())?;
        let key = if let Some(key) = found.filter(|key| key.len() == KEY_BYTES) {
            key
        } else {
            // A new key changes every name: no cached catalogue is used, and of the memos only a stop still holds.
            let key: [u8; KEY_BYTES] = rand::generate(&SystemRandom::new())
                .map_err(|_| "cannot obtain random numbers from the system".to_owned())?
                .expose();
            database.set(StateTable::Keys, StateKey::CATALOGUES, Some(key.to_vec()));
            database.save().map_err(|error| error.to_string())?;
            key.to_vec()
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        Ok(Self { database: database.clone(), key, slots: Mutex::default() })
    }

    /// Sets the instances whose catalogues are kept and removes the cached catalogues of all others. Returns the cached
    /// catalogues of these instances.
    pub fn track_all(&self, specs: &[InstanceSpec]) -> HashMap<InstanceId, Arc<Catalogue>> {
        // Locked from here on, so that no catalogue is stored that is then removed as unknown.
        let mut kept = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let sleepers = || specs.iter().filter(|spec| can_sleep(spec));
        let known: HashMap<_, _> = sleepers().filter_map(|spec| Some((spec.id.clone(), self.read(spec)?))).collect();
        let keep = |spec: &InstanceSpec| {
            let (name, last) = (self.name(spec), known.get(&spec.id).cloned());
            (spec.id.clone(), CacheSlot { name, last, failed: false })
        };
        *kept = sleepers().map(keep).collect();
        self.remove_all_but(&kept.values().map(|kept| kept.name.as_str()).collect());
        known
    }

    pub fn track(&self, spec: &InstanceSpec) {
        if !can_sleep(spec) {
            return;
        }
        let mut kept = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let name = self.name(spec);
        if kept.get(&spec.id).is_some_and(|kept| kept.name == name) {
            return;
        }
        if let Some(before) = kept.insert(spec.id.clone(), CacheSlot { name, last: None, failed: false }) {
            // Written with the next save.
            self.database.set(StateTable::Catalogues, before.name.as_str(), None);
        }
    }

    /// Stores newly discovered catalogues until the runtime has ended.
    pub async fn watch(self: Arc<Self>, runtime: RuntimeHandle) {
        let mut snapshots = runtime.watch();
        while snapshots.changed().await.is_ok() {
            tokio::time::sleep(SETTLE).await;
            let snapshot = snapshots.borrow_and_update().clone();
            let this = self.clone();
            // An error means that the thread panicked: a catalogue that was not stored is discovered again.
            let _ = tokio::task::spawn_blocking(move || this.store(&snapshot)).await;
        }
    }

    pub fn store(&self, snapshot: &Snapshot) {
        let mut kept = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stored = Vec::new();
        for (id, slot) in kept.iter_mut() {
            let Some(view) = snapshot.get(id) else { continue };
            let Some(now) = &view.catalogue else { continue };
            if view.spec.lifetime != ProcessLifetime::Lazy && !view.dormant {
                continue; // The next satellite starts and discovers this server anyway.
            }
            let is_known = slot.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, now));
            if is_known || self.name(&view.spec) != slot.name {
                continue;
            }
            self.set(&slot.name, now);
            stored.push((slot, view, now));
        }
        if stored.is_empty() {
            return;
        }
        let saved = self.database.save();
        for (slot, view, now) in stored {
            match &saved {
                Ok(()) => (slot.last, slot.failed) = (Some(now.clone()), false),
                Err(error) => {
                    if !std::mem::replace(&mut slot.failed, true) {
                        tracing::warn!(
                            instance = %view.spec.name, %error,
                            "cannot cache the catalogue of a server; trying again"
                        );
                    }
                }
            }
        }
    }

    fn read(&self, spec: &InstanceSpec) -> Option<Arc<Catalogue>> {
        let name = self.name(spec);
        let stored = self.database.load_row(StateTable::Catalogues, &name.as_str().into());
        match stored.and_then(|bytes| bytes.map(|bytes| parse(&name, &bytes)).transpose()) {
            Ok(catalogue) => catalogue.map(Arc::new),
            Err(error) => {
                tracing::warn!(instance = %spec.name, error, "cannot use a cached catalogue; starting the server");
                None
            }
        }
    }

    /// Sets the catalogue of a configuration, which the next save of the database stores.
    fn set(&self, name: &str, catalogue: &Catalogue) {
        let of_kind = |entries: &[catalogue::CatalogueEntry]| entries.iter().map(|entry| entry.raw.clone()).collect();
        let cached = CachedCatalogue {
            form: FORM,
            name: name.to_owned(),
            tools: catalogue.tools.iter().map(|tool| tool.raw.clone()).collect(),
            resources: of_kind(&catalogue.resources),
            resource_templates: of_kind(&catalogue.resource_templates),
            prompts: of_kind(&catalogue.prompts),
        };
        match serde_json::to_vec(&cached) {
            Ok(bytes) => self.database.set(StateTable::Catalogues, name, Some(bytes)),
            Err(error) => tracing::error!(%error, "cannot write a catalogue as JSON"),
        }
    }

    fn remove_all_but(&self, wanted: &HashSet<&str>) {
        let Ok(stored) = self.database.keys(StateTable::Catalogues) else { return };
        let is_unused = |key: &StateKey| matches!(key, StateKey::Name(name) if !wanted.contains(&**name));
        let unused: Vec<_> = stored.into_iter().filter(is_unused).collect();
        if unused.is_empty() {
            return;
        }
        for key in unused {
            self.database.set(StateTable::Catalogues, key, None);
        }
        if let Err(error) = self.database.save() {
            tracing::warn!(%error, "cannot remove an unused cached catalogue");
        }
    }

    /// Returns the keyed hash of what defines the server of this instance, in hexadecimal.
    pub fn name(&self, spec: &InstanceSpec) -> String {
        let mut name = String::new();
        for byte in hmac::sign(&self.key, &identity::server_identity(spec)).as_ref() {
            // Writing to a string cannot fail.
            let _ = write!(name, "{byte:02x}");
        }
        name
    }
}

fn can_sleep(spec: &InstanceSpec) -> bool {
    spec.lifetime != ProcessLifetime::AlwaysOn && !spec.is_remote()
}

fn parse(name: &str, bytes: &[u8]) -> Result<Catalogue, String> {
    let entry: CachedCatalogue = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if entry.form != FORM || entry.name != name {
        return Err("it has another format or belongs to another configuration".to_owned());
    }
    let of_kind = |raw: Vec<Box<RawValue>>, key: &str| {
        raw.into_iter().map(|raw| catalogue::CatalogueEntry::parse(raw, key)).collect::<Result<_, _>>()
    };
    let tools = entry.tools.into_iter().map(Tool::parse).collect::<Result<_, _>>();
    Ok(Catalogue {
        tools: tools.map_err(|error| error.to_string())?,
        resources: of_kind(entry.resources, "uri")?,
        resource_templates: of_kind(entry.resource_templates, "uriTemplate")?,
        prompts: of_kind(entry.prompts, "name")?,
        ..Catalogue::default()
    })
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use futures::FutureExt;
    use futures::future::BoxFuture;
    use mcp_satellite_actors::model::spec::{
        ConfigTier, ConfigValue, InstanceConfig, InstanceInputs, ServerTarget, UpdateMethod,
    };
    use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
    use mcp_satellite_actors::{EarlierState, RuntimeOptions};
    use tempfile::TempDir;

    use super::*;
    use mcp_satellite_files::data_dir::{DataDir, private_tempdir};
    use mcp_satellite_sim::{SimConnector, SimScript};

    pub(crate) fn spec(change: impl FnOnce(&mut InstanceConfig)) -> InstanceSpec {
        let mut config = InstanceConfig {
            team: "team_acme".into(),
            team_slug: "acme".into(),
            user: "user_alice".into(),
            user_slug: "alice".into(),
            installation: "abc123".into(),
            server: "files".into(),
            target: ServerTarget::Stdio { command: "files".to_owned(), cwd: None },
            server_tier: ConfigTier { args: vec!["a".into()], ..ConfigTier::default() },
            team_tier: ConfigTier::default(),
            user_tier: ConfigTier::default(),
            user_required: Vec::new(),
            inputs: InstanceInputs::default(),
            lifetime: ProcessLifetime::Lazy,
            update_method: UpdateMethod::default(),
            request_logging: true,
            policy: Arc::default(),
        };
        config.user_tier.env.insert("TOKEN".to_owned(), ConfigValue::secret("1234"));
        change(&mut config);
        config.merge()
    }

    fn entry(raw: &str, key: &str) -> catalogue::CatalogueEntry {
        catalogue::CatalogueEntry::parse(RawValue::from_string(raw.to_owned()).unwrap(), key).unwrap()
    }

    fn catalogue() -> Catalogue {
        let raw = r#"{"name":"read",  "_meta": {"x": [null]}}"#;
        Catalogue {
            tools: vec![Tool::parse(RawValue::from_string(raw.to_owned()).unwrap()).unwrap()],
            resources: vec![entry(r#"{"uri":"file:///a", "_meta": [1]}"#, "uri")],
            resource_templates: vec![entry(r#"{"uriTemplate":"file:///{a}"}"#, "uriTemplate")],
            prompts: vec![entry(r#"{"name":"greet"}"#, "name")],
            ..Catalogue::default()
        }
    }

    fn open(directory: &TempDir) -> CatalogueCache {
        CatalogueCache::open(&StateDb::open(&DataDir::open(directory.path()).unwrap()).unwrap()).unwrap()
    }

    fn cache() -> (TempDir, CatalogueCache) {
        let directory = private_tempdir();
        let cache = open(&directory);
        (directory, cache)
    }

    fn names(cache: &CatalogueCache) -> Vec<String> {
        let keys = cache.database.keys(StateTable::Catalogues).unwrap().into_iter();
        let mut names: Vec<String> = keys
            .filter_map(|key| match key {
                StateKey::Name(name) => Some(name),
                StateKey::Instance(_) => None,
            })
            .collect();
        names.sort();
        names
    }

    fn write(cache: &CatalogueCache, spec: &InstanceSpec) {
        cache.set(&cache.name(spec), &catalogue());
        cache.database.save().unwrap();
    }

    #[test]
    fn a_cached_catalogue_is_read_back_unchanged() {
        let (directory, cache) = cache();
        let spec = spec(|_| {});
        assert!(cache.read(&spec).is_none());
        write(&cache, &spec);
        let next = open(&directory);
        let known = next.track_all(std::slice::from_ref(&spec));
        assert_eq!(known[&spec.id].tools[0].raw.get(), catalogue().tools[0].raw.get());
        let shown = |catalogue: &Catalogue| {
            let Catalogue { resources, resource_templates, prompts, .. } = catalogue;
            let all = [resources, resource_templates, prompts].into_iter().flatten();
            all.map(|entry| format!("{} {}", entry.key, entry.raw)).collect::<Vec<_>>()
        };
        assert_eq!(shown(&known[&spec.id]), shown(&catalogue()));
    }

    #[test]
    fn a_change_of_any_value_changes_the_name() {
        let (_directory, cache) = cache();
        let changed = [
            spec(|_| {}),
            spec(|config| config.server_tier.args = vec!["b".into()]),
            spec(|config| config.server_tier.args = vec!["a".into(), String::new().into()]),
            spec(|config| drop(config.user_tier.env.insert("TOKEN".to_owned(), ConfigValue::secret("1235")))),
            spec(|config| drop(config.user_tier.env.insert("TOKE".to_owned(), ConfigValue::secret("N1234")))),
            spec(|config| config.target = ServerTarget::Stdio { command: "other".to_owned(), cwd: None }),
            spec(|config| config.installation = "abc124".into()),
        ];
        let names: HashSet<String> = changed.iter().map(|spec| cache.name(spec)).collect();
        assert_eq!(names.len(), changed.len());
        assert_eq!(cache.name(&spec(|_| {})), cache.name(&changed[0]));
        let patient = spec(|config| Arc::make_mut(&mut config.policy).session.list_pages_max = 1);
        assert_eq!(cache.name(&patient), cache.name(&changed[0]), "a policy value is not part of the name");
    }

    #[test]
    fn the_name_depends_on_the_key() {
        let ((_first, one), (_second, other)) = (cache(), cache());
        assert_ne!(one.name(&spec(|_| {})), other.name(&spec(|_| {})));
    }

    #[test]
    fn cached_catalogues_contain_no_configuration_values() {
        let (directory, cache) = cache();
        let spec = spec(|config| config.server_tier.args = vec!["hush-argument".into()]);
        write(&cache, &spec);
        assert_eq!(names(&cache).len(), 1);
        let stored = std::fs::read(directory.path().join("state.db")).unwrap();
        assert!(!String::from_utf8_lossy(&stored).contains("hush"));
    }

    #[test]
    fn corrupt_entries_and_entries_of_others_are_not_used() {
        let (_directory, cache) = cache();
        let spec = spec(|_| {});
        write(&cache, &spec);
        let key = StateKey::from(cache.name(&spec).as_str());
        let good = cache.database.load_row(StateTable::Catalogues, &key).unwrap().unwrap();
        let put = |bytes: &[u8]| cache.database.set(StateTable::Catalogues, key.clone(), Some(bytes.to_vec()));
        for bad in [
            &good[..good.len() / 2],
            b"",
            b"[]",
            br#"{"form":2,"name":"other","tools":[],"resources":[],"resource_templates":[],"prompts":[]}"#,
        ] {
            put(bad);
            assert!(cache.read(&spec).is_none(), "{}", String::from_utf8_lossy(bad));
        }
        put(String::from_utf8_lossy(&good).replace(r#""name":"read""#, r#""nomen":"read""#).as_bytes());
        assert!(cache.read(&spec).is_none(), "a tool without a name");
        put(&good);
        assert!(cache.read(&spec).is_some());
    }

    #[test]
    fn outdated_entries_are_removed() {
        let (_directory, cache) = cache();
        let old = spec(|_| {});
        let new = spec(|config| config.server_tier.args = vec!["b".into()]);
        let listed = spec(|config| (config.lifetime, config.installation) = (ProcessLifetime::Listed, "listed".into()));
        let awake = spec(|config| (config.lifetime, config.installation) = (ProcessLifetime::AlwaysOn, "awake".into()));
        for spec in [&old, &new, &listed, &awake] {
            write(&cache, spec);
        }
        let known = cache.track_all(&[new.clone(), listed.clone(), awake]);
        assert_eq!(known.keys().collect::<HashSet<_>>(), HashSet::from([&new.id, &listed.id]));
        let mut left = vec![cache.name(&new), cache.name(&listed)];
        left.sort();
        assert_eq!(names(&cache), left);
    }

    #[tokio::test]
    async fn a_failed_write_is_repeated_with_the_next_snapshot() {
        let (directory, cache) = cache();
        let spec = spec(|_| {});
        cache.track_all(std::slice::from_ref(&spec));
        let stored = || names(&cache).len();
        let runtime = start_dormant(&spec).await;
        let tool = rusqlite::Connection::open(directory.path().join("state.db")).unwrap();
        tool.execute_batch("CREATE TRIGGER full BEFORE INSERT ON catalogues BEGIN SELECT RAISE(ABORT, 'full'); END")
            .unwrap();
        cache.store(&runtime.snapshot());
        tool.execute_batch("DROP TRIGGER full").unwrap();
        assert_eq!(stored(), 0);
        cache.store(&runtime.snapshot());
        assert_eq!(stored(), 1);
        runtime.shutdown().await;
    }

    async fn start_dormant(spec: &InstanceSpec) -> RuntimeHandle {
        struct AcceptingSink;
        impl EventSink for AcceptingSink {
            fn send(&self, _: Arc<SinkBatch>) -> BoxFuture<'static, SinkAnswer> {
                std::future::ready(SinkAnswer::Accepted).boxed()
            }
        }
        let connector = SimConnector::new(SimScript::default());
        let options = RuntimeOptions::new(connector, Arc::new(AcceptingSink), Arc::new(jiff::Timestamp::now));
        let (runtime, _) = mcp_satellite_actors::start(options).await.unwrap();
        let known = EarlierState { catalogue: Some(Arc::new(catalogue())), memo: None };
        runtime.install_with_state(spec.clone(), known).await.unwrap();
        runtime.wait_for(&spec.id, |view| view.dormant).await.unwrap();
        runtime
    }

    #[test]
    fn an_unusable_key_is_replaced_and_the_cache_is_emptied() {
        let (directory, cache) = cache();
        let spec = spec(|_| {});
        write(&cache, &spec);
        cache.database.set(StateTable::Keys, StateKey::CATALOGUES, Some(b"short".to_vec()));
        cache.database.save().unwrap();
        let next = open(&directory);
        assert!(next.track_all(std::slice::from_ref(&spec)).is_empty());
        assert_eq!(names(&next), [""; 0]);
    }

    #[test]
    fn the_name_is_the_same_after_the_cache_is_emptied() {
        let (directory, cache) = cache();
        let name = cache.name(&spec(|_| {}));
        cache.track_all(&[]);
        assert_eq!(open(&directory).name(&spec(|_| {})), name);
    }
}
