//! Values that users have set with `satellite configure`. They are stored in the state database and override the user's
//! tier when a plan is turned into instances. A value that the configuration does not require is not passed on. The
//! values of a removed installation or user are erased after the retention (`erasures`).
//!
//! All values are secrets, whatever they contain. They leave this module only inside a secret [`ConfigValue`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, InstanceSpec, ServerTarget, is_reserved_header,
};
use mcp_satellite_actors::model::variables::is_code_variable;
use serde::{Deserialize, Serialize};

use crate::state::{DATABASE, StateDb, StateKey, StateTable};
use mcp_satellite_files::disk::NotSaved;

/// Upper limit for the length of a value, in bytes. Linux limits an environment variable to twice this.
const VALUE_MAX: usize = 64 << 10;

/// Configurations that require values from their users.
pub type RequiringInstances = HashMap<InstanceId, InstanceConfig>;

/// Values of one instance. A key is stored as it was typed, with its target: `NAME`, `query:NAME` or `header:NAME`.
type InstanceValues = BTreeMap<String, Secret>;
type StoredValues = HashMap<InstanceId, InstanceValues>;

pub struct UserValues {
    database: StateDb,
    /// Not locked while waiting for the disk.
    state: Mutex<UserValuesState>,
}

struct UserValuesState {
    stored: StoredValues,
    /// Reason why the stored values cannot be used. They are then not changed either, so that they are not lost.
    unusable: Option<String>,
}

#[derive(Default)]
pub struct ValueChange {
    pub set: BTreeMap<String, Secret>,
    pub unset: Vec<String>,
}

/// A value that a user must provide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct RequiredValue {
    /// Name of the value.
    pub key: String,
    /// Meaning of the value, as the configuration describes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Source of the value; `null` if it is missing.
    pub given_by: Option<RequiredValueSource>,
}

/// Source of a user's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RequiredValueSource {
    /// `satellite configure`.
    Configure,
    /// The user's tier of the configuration.
    File,
    /// The default in the configuration.
    Default,
}

/// Errors of a rejected change. They contain no value, and no key that is not required: that may be a value in the
/// wrong position.
#[derive(Debug, thiserror::Error)]
pub enum ValueError {
    #[error("{0}")]
    BadInput(String),
    #[error("cannot store the value: {0}")]
    Storage(String),
}

impl UserValues {
    /// Loads the stored values. If they cannot be read, logs the error and starts without values.
    pub fn open(database: &StateDb) -> Self {
        let state = UserValuesState::read(database);
        if let Some(why) = &state.unusable {
            tracing::error!(why, "cannot read the values of users; servers wait for them");
        }
        Self { database: database.clone(), state: Mutex::new(state) }
    }

    /// Changes the values of an instance in memory. The next save of the database stores them.
    fn set_values(&self, state: &mut UserValuesState, id: InstanceId, given: InstanceValues) {
        let texts: BTreeMap<&str, &str> = given.iter().map(|(key, text)| (key.as_str(), text.expose())).collect();
        let body = (!texts.is_empty()).then(|| serde_json::json!(texts).to_string().into_bytes());
        self.database.set(StateTable::UserValues, id.clone(), body);
        if given.is_empty() {
            state.stored.remove(&id);
        } else {
            state.stored.insert(id, given);
        }
    }

    /// Merges the configurations with the stored values. Returns the resulting instances, and the configurations that
    /// require values from their users.
    pub fn merge(&self, configs: impl IntoIterator<Item = InstanceConfig>) -> (RequiringInstances, Vec<InstanceSpec>) {
        let state = self.state();
        let mut asked = RequiringInstances::new();
        let spec = |config: InstanceConfig| {
            if config.user_required.is_empty() && config.value_keys().is_empty() {
                return config.merge();
            }
            let id = instance_id(&config);
            let spec = build_spec(config.clone(), state.stored.get(&id));
            asked.insert(id, config);
            spec
        };
        let specs = configs.into_iter().map(spec).collect();
        (asked, specs)
    }

    pub fn instances(&self) -> BTreeSet<InstanceId> {
        self.state().stored.keys().cloned().collect()
    }

    /// Erases the values of these instances. Returns false, and changes nothing, if that cannot be stored. Waits for
    /// the disk.
    pub fn erase(&self, ids: &[InstanceId]) -> bool {
        let mut state = self.state();
        let erased: Vec<_> = ids.iter().filter_map(|id| Some((id.clone(), state.stored.get(id)?.clone()))).collect();
        if erased.is_empty() {
            return true;
        }
        for (id, _) in &erased {
            self.set_values(&mut state, id.clone(), InstanceValues::new());
        }
        drop(state);
        let Err(error) = self.database.save() else { return true };
        tracing::warn!(%error, "cannot erase the values of users for removed servers");
        let mut state = self.state();
        for (id, given) in erased {
            if !state.stored.contains_key(&id) {
                self.set_values(&mut state, id, given);
            }
        }
        drop(state);
        // The attempt in progress may still erase the values. Its error was logged above.
        let _ = self.database.save();
        false
    }

    pub fn required_values(&self, config: &InstanceConfig) -> Vec<RequiredValue> {
        let state = self.state();
        let stored = state.stored.get(&instance_id(config));
        let by = |name: &String| {
            let is_stored = stored.is_some_and(|given| given.keys().any(|key| is_key_for(config, key, name)));
            let ConfigTier { env, headers, query, .. } = &config.user_tier;
            let in_file = [env, headers, query].iter().any(|tier| tier.contains_key(name));
            let has_default = config.inputs.declared.get(name).is_some_and(|value| value.default.is_some());
            match (is_stored, in_file) {
                (true, _) => Some(RequiredValueSource::Configure),
                (false, true) if config.user_required.contains(name) => Some(RequiredValueSource::File),
                (false, _) => has_default.then_some(RequiredValueSource::Default),
            }
        };
        let required = |name: &String| RequiredValue {
            key: name.clone(),
            description: config.inputs.declared.get(name).and_then(|value| value.description.clone()),
            given_by: by(name),
        };
        accepted_keys(config).into_iter().map(required).collect()
    }

    /// Stores a change completely or not at all, and returns the instance before and after it. Blocks, but not for a
    /// hanging disk: then the change is in effect, and the reason why it is not stored yet is returned, too.
    pub fn change(
        &self,
        config: &InstanceConfig,
        change: &ValueChange,
    ) -> Result<((InstanceSpec, InstanceSpec), Option<NotSaved>), ValueError> {
        if self.state().unusable.is_some() {
            // The file may have been repaired meanwhile. Read without the lock, because the disk may hang.
            let read = UserValuesState::read(&self.database);
            let mut state = self.state();
            if state.unusable.is_some() {
                *state = read;
            }
        }
        let mut state = self.state();
        if let Some(why) = &state.unusable {
            return Err(ValueError::Storage(why.clone()));
        }
        let id = instance_id(config);
        let before = state.stored.get(&id).cloned().unwrap_or_default();
        let mut after = before.clone();
        for typed in &change.unset {
            let ValueKey { name, .. } = ValueKey::parse(config, typed)?;
            after.retain(|key, _| !is_key_for(config, key, &name));
        }
        for (typed, text) in &change.set {
            let key = ValueKey::parse(config, typed)?;
            let text = key.validate(config, text)?;
            after.retain(|other, _| !is_key_for(config, other, &key.name));
            after.insert(key.storage_key(), text);
        }
        let spec = |given: &InstanceValues| build_spec(config.clone(), Some(given));
        let specs = (spec(&before), spec(&after));
        if after == before {
            return Ok((specs, None));
        }
        self.set_values(&mut state, id.clone(), after.clone());
        drop(state);
        match self.database.save() {
            Ok(()) => Ok((specs, None)),
            Err(hangs @ NotSaved::DiskHangs) => Ok((specs, Some(hangs))),
            Err(NotSaved::Failed(why)) => {
                let mut state = self.state();
                // Changes made meanwhile are kept.
                if state.stored.get(&id).cloned().unwrap_or_default() == after {
                    self.set_values(&mut state, id, before);
                }
                Err(ValueError::Storage(why))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, UserValuesState> {
        // A lock holder replaces whole entries, so the state is never half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UserValuesState {
    fn read(database: &StateDb) -> Self {
        match Self::try_read(database) {
            Ok(stored) => Self { stored, unusable: None },
            Err(why) => Self { stored: StoredValues::new(), unusable: Some(why) },
        }
    }

    /// Reads all values. An error message contains nothing of them.
    fn try_read(database: &StateDb) -> Result<StoredValues, String> {
        let mut stored = StoredValues::new();
        for (key, body) in database.load(StateTable::UserValues)? {
            let StateKey::Instance(id) = key else { continue };
            let texts = serde_json::from_slice::<BTreeMap<String, String>>(&body);
            let texts = texts.map_err(|_| format!("the values of {id} in `{DATABASE}` are damaged"))?;
            stored.insert(id, texts.into_iter().map(|(key, text)| (key, text.into())).collect());
        }
        Ok(stored)
    }
}

fn instance_id(config: &InstanceConfig) -> InstanceId {
    InstanceId::new(config.team.clone(), config.user.clone(), config.installation.clone())
}

/// Returns the keys that the user can give: those of `user_required` and those of templates, in alphabetical order.
fn accepted_keys(config: &InstanceConfig) -> BTreeSet<&String> {
    config.user_required.iter().chain(config.value_keys()).collect()
}

fn build_spec(mut config: InstanceConfig, given: Option<&InstanceValues>) -> InstanceSpec {
    for (typed, text) in given.into_iter().flatten() {
        // A value that is no longer required, or that the current target cannot accept, is ignored.
        let Ok(key) = ValueKey::parse(&config, typed) else { continue };
        if key.validate(&config, text).is_err() {
            continue;
        }
        if key.is_for_templates(&config) {
            config.inputs.given.insert(key.name.clone(), text.clone());
        }
        let place = key.target_in(&config);
        let layer = &mut config.user_tier;
        if place == ValueTarget::Template {
            continue;
        }
        for tier in [&mut layer.env, &mut layer.headers, &mut layer.query] {
            tier.remove(&key.name);
        }
        let tier = match place {
            ValueTarget::Env => &mut layer.env,
            ValueTarget::Header => &mut layer.headers,
            ValueTarget::Query | ValueTarget::Template => &mut layer.query,
        };
        tier.insert(key.name, ConfigValue::secret(text.clone()));
    }
    config.merge()
}

fn is_key_for(config: &InstanceConfig, stored: &str, name: &str) -> bool {
    ValueKey::parse(config, stored).is_ok_and(|key| key.name == name)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueTarget {
    Env,
    Header,
    Query,
    /// Templates only.
    Template,
}

struct ValueKey {
    name: String,
    target: Option<ValueTarget>,
    /// True if the value is the token of an `Authorization` header, without its scheme.
    is_bearer: bool,
}

impl ValueKey {
    /// Parses a typed key and returns the required key that it means.
    fn parse(config: &InstanceConfig, typed: &str) -> Result<Self, ValueError> {
        let is_remote = matches!(config.target, ServerTarget::Remote { .. });
        let required = |wanted: &str| {
            let same = |name: &&String| {
                // Header names are case-insensitive.
                **name == wanted || is_remote && name.eq_ignore_ascii_case(wanted)
            };
            config.user_required.iter().find(same).cloned()
        };
        let at = |name: String, place: Option<ValueTarget>| Self { name, target: place, is_bearer: false };
        if let Some(name) = required(typed) {
            return Ok(at(name, None));
        }
        if is_remote {
            for (prefix, place) in [("query:", ValueTarget::Query), ("header:", ValueTarget::Header)] {
                if let Some(name) = typed.strip_prefix(prefix).and_then(&required) {
                    return Ok(at(name, Some(place)));
                }
            }
            // In the configuration `bearer_token` becomes that header as well.
            if let Some(name) = required(AUTHORIZATION.as_str()).filter(|_| typed == "bearer_token") {
                return Ok(Self { name, target: Some(ValueTarget::Header), is_bearer: true });
            }
        }
        let names: Vec<&str> = accepted_keys(config).into_iter().map(String::as_str).collect();
        if names.contains(&typed) {
            return Ok(at(typed.to_owned(), Some(ValueTarget::Template)));
        }
        let message = if names.is_empty() {
            "the configuration requires no value of the user".to_owned()
        } else {
            let or = if required(AUTHORIZATION.as_str()).is_some() && is_remote { " (or bearer_token)" } else { "" };
            format!("unknown key; the configuration requires: {}{or}", names.join(", "))
        };
        Err(ValueError::BadInput(message))
    }

    fn storage_key(&self) -> String {
        match self.target {
            Some(ValueTarget::Query) => format!("query:{}", self.name),
            Some(ValueTarget::Header) => format!("header:{}", self.name),
            Some(ValueTarget::Env | ValueTarget::Template) | None => self.name.clone(),
        }
    }

    /// Returns true if a template of the configuration uses the value under this key.
    fn is_for_templates(&self, config: &InstanceConfig) -> bool {
        matches!(self.target, None | Some(ValueTarget::Template)) && config.value_keys().contains(&self.name)
    }

    /// Returns the target of the value. For a process it is an environment variable. For a remote server it is a
    /// header, unless a lower tier has a query parameter of that name or the name is no valid header name.
    fn target_in(&self, config: &InstanceConfig) -> ValueTarget {
        if self.target == Some(ValueTarget::Template) {
            return ValueTarget::Template;
        }
        let ServerTarget::Remote { .. } = config.target else { return ValueTarget::Env };
        let layers = [&config.server_tier, &config.team_tier, &config.user_tier];
        let in_query = layers.iter().any(|layer| layer.query.contains_key(&self.name));
        let no_header = HeaderName::from_bytes(self.name.as_bytes()).is_err() || is_reserved_header(&self.name);
        self.target.unwrap_or(if in_query || no_header { ValueTarget::Query } else { ValueTarget::Header })
    }

    fn validate(&self, config: &InstanceConfig, text: &Secret) -> Result<Secret, ValueError> {
        let name = &self.name;
        let bad = |why: &str| Err(ValueError::BadInput(format!("the value of `{name}` {why}")));
        if self.target_in(config) == ValueTarget::Env && is_code_variable(name) {
            return Err(ValueError::BadInput(format!(
                "`{name}` cannot be set by a user: it makes the server run other code; set it in the env of the server or \
                 the team in the configuration"
            )));
        }
        let value = text.expose();
        if value.is_empty() {
            return bad("is empty; --unset removes a value");
        }
        if value.len() > VALUE_MAX {
            return bad("is longer than 64 KiB");
        }
        if self.is_bearer && value.to_ascii_lowercase().starts_with("bearer ") {
            return bad("begins with `Bearer`; leave `Bearer` out: the satellite adds it");
        }
        let whole = if self.is_bearer { format!("Bearer {value}").into() } else { text.clone() };
        let header_uses_it = || {
            let tiers = [&config.server_tier, &config.team_tier, &config.user_tier];
            let templates =
                tiers.into_iter().flat_map(|tier| tier.headers.values()).filter_map(|value| value.template.as_ref());
            templates.into_iter().any(|template| template.keys().any(|key| *key == self.name))
        };
        match self.target_in(config) {
            ValueTarget::Env | ValueTarget::Template if value.contains('\0') => bad("contains a zero byte"),
            ValueTarget::Template if header_uses_it() && HeaderValue::from_str(value).is_err() => {
                bad("cannot be sent in a header: it must be one line of printable characters")
            }
            ValueTarget::Header if HeaderValue::from_str(whole.expose()).is_err() => {
                bad("cannot be sent as a header: it must be one line of printable characters")
            }
            ValueTarget::Env | ValueTarget::Header | ValueTarget::Query | ValueTarget::Template => Ok(whole),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use mcp_satellite_actors::model::spec::{
        InstanceInputs, ProcessLifetime, RemoteTransport, UpdateMethod, UserValueSpec, ValuePart, ValueTemplate,
    };
    use mcp_satellite_files::data_dir::{DataDir, private_tempdir};

    use super::*;

    fn config(user: &str, installation: &str) -> InstanceConfig {
        InstanceConfig {
            team: "team \"1\"".into(),
            team_slug: "acme".into(),
            user: user.into(),
            user_slug: user.into(),
            installation: installation.into(),
            server: "notes".into(),
            target: ServerTarget::Stdio { command: "notes".to_owned(), cwd: None },
            server_tier: ConfigTier::default(),
            team_tier: ConfigTier::default(),
            user_tier: ConfigTier::default(),
            user_required: vec!["KEY".to_owned(), "PIN".to_owned()],
            inputs: InstanceInputs::default(),
            lifetime: ProcessLifetime::default(),
            update_method: UpdateMethod::default(),
            request_logging: true,
            policy: Arc::default(),
        }
    }

    fn remote(required: &[&str]) -> InstanceConfig {
        let (transport, url) = (RemoteTransport::Http, "http://127.0.0.1/mcp".to_owned());
        InstanceConfig {
            target: ServerTarget::Remote { transport, url, health_url: None },
            user_required: required.iter().map(ToString::to_string).collect(),
            ..config("alice", "n1")
        }
    }

    fn set<const N: usize>(pairs: [(&str, &str); N]) -> ValueChange {
        ValueChange { set: pairs.map(|(key, text)| (key.to_owned(), text.into())).into(), unset: Vec::new() }
    }

    fn texts(tier: &BTreeMap<String, Secret>) -> Vec<(&str, &str)> {
        tier.iter().map(|(key, text)| (key.as_str(), text.expose())).collect()
    }

    fn open(data_dir: &Path) -> UserValues {
        UserValues::open(&StateDb::open(&DataDir::open(data_dir).unwrap()).unwrap())
    }

    fn merged(values: &UserValues, config: InstanceConfig) -> InstanceSpec {
        values.merge([config]).1.remove(0)
    }

    #[test]
    fn stored_values_are_restored_for_exactly_the_same_ids() {
        let home = private_tempdir();
        let values = open(home.path());
        let (alices, bobs) = (config("alice", "n1"), config("b/o\nb", "n1"));
        values.change(&alices, &set([("KEY", "of \"alice\"\n")])).unwrap();
        values.change(&bobs, &set([("KEY", "of-bob"), ("PIN", "1")])).unwrap();
        for values in [values, open(home.path())] {
            let spec = merged(&values, alices.clone());
            assert_eq!((texts(&spec.env), spec.missing), (vec![("KEY", "of \"alice\"\n")], vec!["PIN".to_owned()]));
            assert_eq!(texts(&merged(&values, bobs.clone()).env), [("KEY", "of-bob"), ("PIN", "1")]);
            assert_eq!(merged(&values, config("alice", "n2")).missing, ["KEY", "PIN"]);
        }
    }

    #[test]
    fn a_change_is_applied_completely_or_not_at_all() {
        let home = private_tempdir();
        let values = open(home.path());
        let config = config("alice", "n1");
        values.change(&config, &set([("KEY", "first")])).unwrap();
        let bad = ValueChange { unset: vec!["KEY".to_owned()], ..set([("PIN", "1"), ("WRONG", "hush")]) };
        let error = values.change(&config, &bad).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hush") && !error.to_string().contains("WRONG"));
        let tool = rusqlite::Connection::open(home.path().join(DATABASE)).unwrap();
        tool.execute_batch("CREATE TRIGGER full BEFORE INSERT ON user_values BEGIN SELECT RAISE(ABORT, 'full'); END")
            .unwrap();
        assert!(matches!(values.change(&config, &set([("PIN", "1")])), Err(ValueError::Storage(_))));
        tool.execute_batch("DROP TRIGGER full").unwrap();
        values.database.save().unwrap();
        for values in [&values, &open(home.path())] {
            let spec = merged(values, config.clone());
            assert_eq!((texts(&spec.env), spec.missing), (vec![("KEY", "first")], vec!["PIN".to_owned()]));
        }
    }

    #[test]
    fn a_variable_that_runs_other_code_is_rejected_for_a_process_only() {
        let home = private_tempdir();
        let values = open(home.path());
        let required = InstanceConfig { user_required: vec!["ENV".to_owned()], ..config("alice", "n1") };
        let refused = values.change(&required, &set([("ENV", "/tmp/rc")])).unwrap_err().to_string();
        assert!(refused.contains("`ENV` cannot be set by a user") && !refused.contains("/tmp/rc"), "{refused}");
        // A header of that name is harmless, and its value does not become a variable when the server does.
        values.change(&remote(&["ENV"]), &set([("ENV", "production")])).unwrap();
        assert_eq!(texts(&merged(&values, remote(&["ENV"])).headers), [("ENV", "production")]);
        let spec = merged(&values, required);
        assert_eq!((spec.env.len(), spec.missing), (0, vec!["ENV".to_owned()]));
    }

    #[test]
    fn a_value_follows_its_server_from_env_to_header_or_query() {
        let home = private_tempdir();
        let values = open(home.path());
        values.change(&config("alice", "n1"), &set([("KEY", "two\nlines"), ("PIN", "1234")])).unwrap();
        // A value that cannot be sent as a header is missing, not sent in part.
        let spec = merged(&values, remote(&["KEY", "PIN"]));
        assert_eq!((texts(&spec.headers), spec.missing), (vec![("PIN", "1234")], vec!["KEY".to_owned()]));
        assert!(spec.env.is_empty());

        let mut in_query = remote(&["PIN"]);
        in_query.server_tier.query.insert("PIN".to_owned(), ConfigValue::plain("0"));
        let spec = merged(&values, in_query.clone());
        assert_eq!((texts(&spec.query), spec.headers.len()), (vec![("PIN", "1234")], 0));
        // An explicit target wins and replaces the value without one.
        values.change(&in_query, &set([("header:PIN", "5678")])).unwrap();
        let spec = merged(&values, in_query);
        assert_eq!((texts(&spec.query), texts(&spec.headers)), (vec![("PIN", "0")], vec![("PIN", "5678")]));
    }

    #[test]
    fn values_for_templates_are_declared_given_and_validated() {
        let home = private_tempdir();
        let values = open(home.path());
        let template = |key: &str| {
            let parts = vec![ValuePart::Literal("Token ".into()), ValuePart::UserValue(key.to_owned())];
            ConfigValue::from_template(ValueTemplate { parts }, true)
        };
        let mut config = remote(&["PIN"]);
        config.server_tier.headers.insert("X-Key".to_owned(), template("API_KEY"));
        let declare = |description: Option<&str>, default: Option<&str>| UserValueSpec {
            description: description.map(str::to_owned),
            is_public: false,
            default: default.map(Into::into),
        };
        config.inputs.declared =
            [("REGION".to_owned(), declare(None, Some("eu"))), ("API_KEY".to_owned(), declare(Some("the key"), None))]
                .into();
        let listed = |values: &UserValues| {
            let required = values.required_values(&config).into_iter();
            required.map(|value| (value.key, value.description, value.given_by)).collect::<Vec<_>>()
        };
        let (key, default) = (Some("the key".to_owned()), Some(RequiredValueSource::Default));
        let row = |key: &str, description: &Option<String>, by| (key.to_owned(), description.clone(), by);
        assert_eq!(
            listed(&values),
            [row("API_KEY", &key, None), row("PIN", &None, None), row("REGION", &None, default)]
        );
        assert_eq!(merged(&values, config.clone()).missing, ["PIN", "API_KEY"]);

        assert!(values.change(&config, &set([("API_KEY", "two\nlines")])).is_err(), "not valid in a header");
        values.change(&config, &set([("API_KEY", "hush-key"), ("PIN", "1234")])).unwrap();
        for values in [&values, &open(home.path())] {
            let spec = merged(values, config.clone());
            assert_eq!(texts(&spec.headers), [("PIN", "1234"), ("X-Key", "Token hush-key")]);
            assert_eq!((spec.is_complete(), spec.mask.apply("hush-key")), (true, "[secret]".to_owned()));
            assert_eq!(listed(values)[0].2, Some(RequiredValueSource::Configure));
        }
    }

    #[test]
    fn a_bearer_token_sets_the_authorization_header() {
        let home = private_tempdir();
        let values = open(home.path());
        let config = remote(&["Authorization"]);
        let ((_, spec), _) = values.change(&config, &set([("bearer_token", "token-1")])).unwrap();
        assert_eq!(texts(&spec.headers), [("Authorization", "Bearer token-1")]);
        assert_eq!(spec.mask.apply("got token-1"), "got [secret]");
        for values in [&values, &open(home.path())] {
            assert_eq!(texts(&merged(values, config.clone()).headers), [("Authorization", "Bearer token-1")]);
        }
        assert!(values.change(&config, &set([("bearer_token", "bearer x")])).is_err());
        let ((_, spec), _) =
            values.change(&config, &ValueChange { unset: vec!["authorization".to_owned()], ..set([]) }).unwrap();
        assert_eq!(spec.missing, ["Authorization"]);
    }

    #[test]
    fn erased_values_are_gone_and_an_unreadable_file_is_not_overwritten() {
        let home = private_tempdir();
        let values = open(home.path());
        let (alices, bobs) = (config("alice", "n1"), config("bob", "n1"));
        for config in [&alices, &bobs] {
            values.change(config, &set([("KEY", "value-1")])).unwrap();
        }
        assert!(values.erase(&[instance_id(&bobs)]));
        let again = open(home.path());
        assert_eq!((merged(&again, alices.clone()).missing.len(), merged(&again, bobs.clone()).missing.len()), (1, 2));

        let file = home.path().join(DATABASE);
        std::fs::write(&file, "not a database, but longer than the header of one would be, which SQLite checks")
            .unwrap();
        let damaged = open(home.path());
        assert!(damaged.erase(&[instance_id(&alices)]), "there is no known value to erase");
        let refused = damaged.change(&bobs, &set([("KEY", "value-2")])).unwrap_err();
        assert!(refused.to_string().contains("state.db` cannot be used"), "{refused}");
        assert!(std::fs::read_to_string(&file).unwrap().starts_with("not a database"));
        // After the file is removed, values can be stored again.
        std::fs::remove_file(file).unwrap();
        damaged.change(&bobs, &set([("KEY", "value-2")])).unwrap();
        assert_eq!(texts(&merged(&open(home.path()), bobs).env), [("KEY", "value-2")]);
    }
}
