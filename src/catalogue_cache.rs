//! Cache of the catalogues (tools, resources, prompts) of stdio servers that may sleep, kept over restarts of the
//! satellite: one file per server configuration in `DIR/catalogues/`. The catalogue of a lazy server is stored as soon
//! as it is discovered, that of another server when it goes dormant.
//!
//! The file name is a keyed hash of everything that defines the server (`identity`), secret values included: a changed
//! value gives another name, a changed policy does not. The key is random and never leaves the data directory, so
//! nobody can find out a short secret from a name by trying. The key is stored beside the cache (`DIR/catalogues.key`),
//! because memos (`memories`) with such a name outlive the cache. A file that cannot be used is ignored: the satellite
//! then starts the server to discover its catalogue.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::io::ErrorKind;
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

use crate::data_dir::{DataDir, is_hex};
use crate::identity;

const FORM: u32 = 2;
const FILE_MAX: u64 = 256 << 20;
// Pause after a snapshot change, so that several changes are stored together.
const SETTLE: Duration = Duration::from_millis(500);
const KEY: &str = "catalogues.key";
/// File name of the key inside the cache directory, as written by earlier releases.
const KEY_IN_CACHE: &str = "key";
const KEY_BYTES: usize = 32;
const NAME_LEN: usize = 64;

#[derive(Serialize, Deserialize)]
struct CachedCatalogue {
    form: u32,
    name: String,
    tools: Vec<Box<RawValue>>,
    resources: Vec<Box<RawValue>>,
    resource_templates: Vec<Box<RawValue>>,
    prompts: Vec<Box<RawValue>>,
}

pub(crate) struct CatalogueCache {
    directory: DataDir,
    key: hmac::Key,
    slots: Mutex<HashMap<InstanceId, CacheSlot>>,
}

struct CacheSlot {
    /// File name for the configuration to keep. An instance may still run with an earlier configuration.
    name: String,
    last: Option<Arc<Catalogue>>,
    /// True if the last write failed. The write is repeated with the next snapshot and the failure is logged once.
    failed: bool,
}

impl CatalogueCache {
    pub(crate) fn open(data_dir: &DataDir) -> std::io::Result<Self> {
        let directory = data_dir.create_or_open_subdirectory("catalogues")?;
        let usable = |read: &std::io::Result<Vec<u8>>| read.as_ref().is_ok_and(|key| key.len() == KEY_BYTES);
        let (found, before) = (read(data_dir, KEY), read(&directory, KEY_IN_CACHE));
        let key = match (found, before) {
            (Ok(key), _) if key.len() == KEY_BYTES => key,
            (Err(error), before) if error.kind() == ErrorKind::NotFound && usable(&before) => {
                let key = before?;
                data_dir.replace(KEY, &key)?;
                key
            }
            // A new key changes every name: no cached catalogue is used, and of the memos only a stop still holds.
            (unusable, _) => {
                if let Some(why) = key_error(&unusable) {
                    tracing::warn!(why, "cannot use the key of the cached catalogues; created a new one");
                }
                let key: [u8; KEY_BYTES] = rand::generate(&SystemRandom::new())
                    .map_err(|_| std::io::Error::other("cannot obtain random numbers from the system"))?
                    .expose();
                data_dir.replace(KEY, &key)?;
                key.to_vec()
            }
        };
        Ok(Self { directory, key: hmac::Key::new(hmac::HMAC_SHA256, &key), slots: Mutex::default() })
    }

    /// Sets the instances whose catalogues are kept and removes the cached catalogues of all others. Returns the cached
    /// catalogues of these instances.
    pub(crate) fn track_all(&self, specs: &[InstanceSpec]) -> HashMap<InstanceId, Arc<Catalogue>> {
        // Locked from here on, so that no file is written that is then removed as unknown.
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

    pub(crate) fn track(&self, spec: &InstanceSpec) {
        if !can_sleep(spec) {
            return;
        }
        let mut kept = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let name = self.name(spec);
        if kept.get(&spec.id).is_some_and(|kept| kept.name == name) {
            return;
        }
        if let Some(before) = kept.insert(spec.id.clone(), CacheSlot { name, last: None, failed: false }) {
            // If the file cannot be removed now, the next call of `keep` removes it.
            let _ = self.directory.remove(&before.name);
        }
    }

    /// Stores newly discovered catalogues until the runtime has ended.
    pub(crate) async fn watch(self: Arc<Self>, runtime: RuntimeHandle) {
        let mut snapshots = runtime.watch();
        while snapshots.changed().await.is_ok() {
            tokio::time::sleep(SETTLE).await;
            let snapshot = snapshots.borrow_and_update().clone();
            let this = self.clone();
            // An error means that the thread panicked: a catalogue that was not stored is discovered again.
            let _ = tokio::task::spawn_blocking(move || this.store(&snapshot)).await;
        }
    }

    pub(crate) fn store(&self, snapshot: &Snapshot) {
        let mut kept = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, CacheSlot { name, last, failed }) in kept.iter_mut() {
            let Some(view) = snapshot.get(id) else { continue };
            let Some(now) = &view.catalogue else { continue };
            if view.spec.lifetime != ProcessLifetime::Lazy && !view.dormant {
                continue; // The next satellite starts and discovers this server anyway.
            }
            let is_known = last.as_ref().is_some_and(|last| Arc::ptr_eq(last, now));
            if is_known || self.name(&view.spec) != *name {
                continue;
            }
            match self.write(&view.spec, now) {
                Ok(()) => (*last, *failed) = (Some(now.clone()), false),
                Err(error) => {
                    if !std::mem::replace(failed, true) {
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
        let entry = read(&self.directory, &name).and_then(|bytes| {
            let entry: CachedCatalogue = serde_json::from_slice(&bytes)?;
            if entry.form != FORM || entry.name != name {
                return Err(std::io::Error::new(
                    ErrorKind::InvalidData,
                    "the file has another format or belongs to another configuration",
                ));
            }
            let of_kind = |raw: Vec<Box<RawValue>>, key: &str| {
                let entries = raw.into_iter().map(|raw| catalogue::CatalogueEntry::parse(raw, key));
                entries.collect::<Result<_, _>>().map_err(|why| std::io::Error::new(ErrorKind::InvalidData, why))
            };
            Ok(Catalogue {
                tools: entry.tools.into_iter().map(Tool::parse).collect::<Result<_, _>>()?,
                resources: of_kind(entry.resources, "uri")?,
                resource_templates: of_kind(entry.resource_templates, "uriTemplate")?,
                prompts: of_kind(entry.prompts, "name")?,
                ..Catalogue::default()
            })
        });
        match entry {
            Ok(catalogue) => Some(Arc::new(catalogue)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                tracing::warn!(instance = %spec.name, %error, "cannot use a cached catalogue; starting the server");
                None
            }
        }
    }

    fn write(&self, spec: &InstanceSpec, catalogue: &Catalogue) -> std::io::Result<()> {
        let name = self.name(spec);
        let of_kind = |entries: &[catalogue::CatalogueEntry]| entries.iter().map(|entry| entry.raw.clone()).collect();
        let bytes = serde_json::to_vec(&CachedCatalogue {
            form: FORM,
            name: name.clone(),
            tools: catalogue.tools.iter().map(|tool| tool.raw.clone()).collect(),
            resources: of_kind(&catalogue.resources),
            resource_templates: of_kind(&catalogue.resource_templates),
            prompts: of_kind(&catalogue.prompts),
        })?;
        self.directory.replace(&name, &bytes)
    }

    fn remove_all_but(&self, wanted: &HashSet<&str>) {
        let Ok(names) = self.directory.names() else { return };
        // Only files that the satellite has created are removed.
        let is_own = |name: &str| name == KEY_IN_CACHE || is_hex(name.strip_suffix(".new").unwrap_or(name), NAME_LEN);
        for name in names.iter().filter(|name| is_own(name) && !wanted.contains(name.as_str())) {
            if let Err(error) = self.directory.remove(name) {
                tracing::warn!(%error, "cannot remove an unused cached catalogue");
            }
        }
    }

    /// Returns the keyed hash of what defines the server of this instance, in hexadecimal.
    pub(crate) fn name(&self, spec: &InstanceSpec) -> String {
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

fn key_error(read: &std::io::Result<Vec<u8>>) -> Option<String> {
    match read {
        Ok(_) => Some("the file has the wrong length".to_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(error.to_string()),
    }
}

fn read(directory: &DataDir, name: &str) -> std::io::Result<Vec<u8>> {
    directory.read(name, FILE_MAX)?.ok_or_else(|| ErrorKind::NotFound.into())
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::{PermissionsExt, symlink};

    use futures::FutureExt;
    use futures::future::BoxFuture;
    use mcp_satellite_actors::model::spec::{ConfigTier, ConfigValue, InstanceConfig, ServerTarget, UpdateMethod};
    use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
    use mcp_satellite_actors::{EarlierState, RuntimeOptions};
    use tempfile::TempDir;

    use super::*;
    use crate::connect::sim::{SimConnector, SimScript};

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
        CatalogueCache::open(&DataDir::open(directory.path()).unwrap()).unwrap()
    }

    fn cache() -> (TempDir, CatalogueCache) {
        let directory = crate::data_dir::private_tempdir();
        let cache = open(&directory);
        (directory, cache)
    }

    fn files(cache: &CatalogueCache) -> Vec<String> {
        let mut names = cache.directory.names().unwrap();
        names.sort();
        names
    }

    #[test]
    fn a_cached_catalogue_is_read_back_unchanged() {
        let (directory, cache) = cache();
        let spec = spec(|_| {});
        assert!(cache.read(&spec).is_none());
        cache.write(&spec, &catalogue()).unwrap();
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
    fn cached_files_are_private_and_contain_no_configuration_values() {
        let (_directory, cache) = cache();
        let spec = spec(|config| config.server_tier.args = vec!["hush-argument".into()]);
        cache.write(&spec, &catalogue()).unwrap();
        assert_eq!(files(&cache).len(), 1);
        let key = cache.directory.path().with_file_name(KEY);
        for path in files(&cache).iter().map(|name| cache.directory.path().join(name)).chain([key]) {
            let name = path.display().to_string();
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
            let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
            assert!(!text.contains("hush") && !name.contains("hush"));
        }
        assert_eq!(cache.directory.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn corrupt_files_and_files_of_others_are_not_used() {
        let (directory, cache) = cache();
        let spec = spec(|_| {});
        cache.write(&spec, &catalogue()).unwrap();
        let path = cache.directory.path().join(cache.name(&spec));
        let good = std::fs::read(&path).unwrap();
        let put = |bytes: &[u8]| {
            cache.directory.replace(&cache.name(&spec), bytes).unwrap();
        };
        for bad in [
            &good[..good.len() / 2],
            b"",
            b"[]",
            br#"{"form":2,"name":"other","tools":[],"resources":[],"resource_templates":[],"prompts":[]}"#,
        ] {
            put(bad);
            assert!(cache.read(&spec).is_none(), "{}", String::from_utf8_lossy(bad));
        }
        put(&String::from_utf8_lossy(&good).replace(r#""name":"read""#, r#""nomen":"read""#).into_bytes());
        assert!(cache.read(&spec).is_none(), "a tool without a name");
        put(&good);
        assert!(cache.read(&spec).is_some());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        assert!(cache.read(&spec).is_none(), "other users can write the file");
        let elsewhere = directory.path().join("elsewhere");
        std::fs::rename(&path, &elsewhere).unwrap();
        std::fs::set_permissions(&elsewhere, PermissionsExt::from_mode(0o600)).unwrap();
        symlink(&elsewhere, &path).unwrap();
        assert!(cache.read(&spec).is_none(), "a symbolic link is not followed");
    }

    #[test]
    fn outdated_entries_are_removed_and_foreign_files_are_kept() {
        let (_directory, cache) = cache();
        let old = spec(|_| {});
        let new = spec(|config| config.server_tier.args = vec!["b".into()]);
        let listed = spec(|config| (config.lifetime, config.installation) = (ProcessLifetime::Listed, "listed".into()));
        let awake = spec(|config| (config.lifetime, config.installation) = (ProcessLifetime::AlwaysOn, "awake".into()));
        for spec in [&old, &new, &listed, &awake] {
            cache.write(spec, &catalogue()).unwrap();
        }
        let unfinished = format!("{}.new", cache.name(&old));
        for name in [unfinished.as_str(), "notes", "id_ed25519", "id_ed25519.new"] {
            std::fs::write(cache.directory.path().join(name), "half").unwrap();
        }
        let known = cache.track_all(&[new.clone(), listed.clone(), awake]);
        assert_eq!(known.keys().collect::<HashSet<_>>(), HashSet::from([&new.id, &listed.id]));
        let other = ["notes", "id_ed25519", "id_ed25519.new"].map(str::to_owned);
        let mut left = [vec![cache.name(&new), cache.name(&listed)], other.to_vec()].concat();
        left.sort();
        assert_eq!(files(&cache), left);
    }

    #[tokio::test]
    async fn a_failed_write_is_repeated_with_the_next_snapshot() {
        let (_directory, cache) = cache();
        let spec = spec(|_| {});
        cache.track_all(std::slice::from_ref(&spec));
        let name = cache.name(&spec);
        let runtime = start_dormant(&spec).await;
        // A directory with the name of the temporary file makes the write fail.
        let in_the_way = cache.directory.path().join(format!("{name}.new"));
        std::fs::create_dir(&in_the_way).unwrap();
        cache.store(&runtime.snapshot());
        assert!(cache.read(&spec).is_none());
        std::fs::remove_dir(in_the_way).unwrap();
        cache.store(&runtime.snapshot());
        assert!(cache.read(&spec).is_some());
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
        cache.write(&spec, &catalogue()).unwrap();
        std::fs::remove_file(directory.path().join(KEY)).unwrap();
        DataDir::open(directory.path()).unwrap().replace(KEY, b"short").unwrap();
        let next = open(&directory);
        assert!(next.track_all(std::slice::from_ref(&spec)).is_empty());
        assert_eq!(files(&next), [""; 0]);
    }

    #[test]
    fn the_name_is_the_same_after_the_cache_is_deleted() {
        let (directory, cache) = cache();
        let name = cache.name(&spec(|_| {}));
        std::fs::remove_dir_all(cache.directory.path()).unwrap();
        assert_eq!(open(&directory).name(&spec(|_| {})), name);
    }

    #[test]
    fn a_key_in_the_cache_directory_is_moved() {
        let (directory, cache) = cache();
        let spec = spec(|_| {});
        cache.write(&spec, &catalogue()).unwrap();
        std::fs::rename(directory.path().join(KEY), cache.directory.path().join(KEY_IN_CACHE)).unwrap();
        let next = open(&directory);
        assert_eq!(next.track_all(std::slice::from_ref(&spec)).len(), 1);
        assert_eq!(files(&next), [cache.name(&spec)], "the old key file is removed");
        assert_eq!(open(&directory).name(&spec), cache.name(&spec));
    }
}
