//! Canonical forms of a server's configuration, and hashes of them that are the same in every build and release.
//!
//! A form is JSON with its fields in a fixed order. It contains only those settings of a policy that differ from their
//! defaults, so a release that adds a field changes no hash. Rename a field of a policy only together with `FORM`.

use std::collections::BTreeMap;
use std::fmt;

use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::policy::{IsolationPolicy, Policy, ToolFilter};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use ring::digest::{SHA256, digest};
use serde::Serialize;
use serde_json::Value;
use url::Url;

/// Version of the forms. Another version changes every hash.
const FORM: u32 = 1;

/// Settings with which a process is started or a connection is opened. Contains secrets.
#[derive(Serialize)]
struct ServerForm<'a> {
    form: u32,
    team: &'a str,
    user: &'a str,
    installation: &'a str,
    target: TargetForm<'a>,
    args: Vec<&'a str>,
    env: BTreeMap<&'a str, &'a str>,
    headers: BTreeMap<&'a str, &'a str>,
    query: BTreeMap<&'a str, &'a str>,
    protocol: Option<Era>,
    isolation: BTreeMap<String, Value>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tools: BTreeMap<String, Value>,
}

/// Settings of an instance without values that may be secret.
#[derive(Serialize)]
struct PublicInstanceForm<'a> {
    form: u32,
    team: &'a str,
    user: &'a str,
    installation: &'a str,
    name: &'a str,
    target: TargetForm<'a>,
    args: usize,
    env: Vec<&'a str>,
    headers: Vec<&'a str>,
    query: Vec<&'a str>,
    missing: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    problems: &'a [String],
    keep: ProcessLifetime,
    on_update: UpdateMethod,
    request_logging: bool,
    policy: BTreeMap<String, Value>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case", tag = "transport")]
enum TargetForm<'a> {
    Stdio { command: &'a str, cwd: Option<&'a str> },
    Http { url: &'a str },
    Sse { url: &'a str },
}

/// Hash that tells two configurations apart in events and logs. The same configuration has the same hash in every
/// release. It is the sum of the hashes of the instances, so that one of them can be replaced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConfigHash(u64);

impl ConfigHash {
    pub fn from_specs(specs: &[InstanceSpec]) -> Self {
        Self(specs.iter().fold(0, |sum, spec| sum.wrapping_add(public_hash(spec))))
    }

    #[must_use]
    pub fn exchange(self, before: &InstanceSpec, after: &InstanceSpec) -> Self {
        let (before, after) = (public_hash(before), public_hash(after));
        Self(self.0.wrapping_sub(before).wrapping_add(after))
    }
}

impl fmt::Display for ConfigHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Returns the canonical form of the settings that define a server: its owner and what its process or connection is
/// started with. A changed policy does not change it. Contains secrets: use it for keyed hashes only.
pub(crate) fn server_identity(spec: &InstanceSpec) -> Vec<u8> {
    fn exposed(values: &BTreeMap<String, Secret>) -> BTreeMap<&str, &str> {
        values.iter().map(|(name, value)| (name.as_str(), value.expose())).collect()
    }
    let InstanceSpec { id, target, args, env, headers, query, policy, .. } = spec;
    let target = match target {
        ServerTarget::Stdio { command, cwd } => TargetForm::Stdio { command, cwd: cwd.as_deref() },
        ServerTarget::Remote { transport: RemoteTransport::Http, url, health_url: _ } => TargetForm::Http { url },
        ServerTarget::Remote { transport: RemoteTransport::Sse, url, health_url: _ } => TargetForm::Sse { url },
    };
    to_bytes(&ServerForm {
        form: FORM,
        team: id.team.as_str(),
        user: id.user.as_str(),
        installation: id.installation.as_str(),
        target,
        args: args.iter().map(Secret::expose).collect(),
        env: exposed(env),
        headers: exposed(headers),
        query: exposed(query),
        protocol: policy.session.protocol,
        isolation: differences(&policy.isolation, &IsolationPolicy::default()),
        tools: differences(&policy.session.tools, &ToolFilter::default()),
    })
}

/// Returns a hash of the configuration of an instance. The hash is shown to others and a short secret could be guessed
/// from it, so it covers no value of an environment variable, header, query parameter or argument, and only the origin
/// of a URL.
fn public_hash(spec: &InstanceSpec) -> u64 {
    fn names(values: &BTreeMap<String, Secret>) -> Vec<&str> {
        values.keys().map(String::as_str).collect()
    }
    let origin = match &spec.target {
        ServerTarget::Remote { url, .. } => {
            Url::parse(url).map(|url| url.origin().ascii_serialization()).unwrap_or_default()
        }
        ServerTarget::Stdio { .. } => String::new(),
    };
    let target = match &spec.target {
        ServerTarget::Stdio { command, cwd } => TargetForm::Stdio { command, cwd: cwd.as_deref() },
        ServerTarget::Remote { transport: RemoteTransport::Http, .. } => TargetForm::Http { url: &origin },
        ServerTarget::Remote { transport: RemoteTransport::Sse, .. } => TargetForm::Sse { url: &origin },
    };
    let form = to_bytes(&PublicInstanceForm {
        form: FORM,
        team: spec.id.team.as_str(),
        user: spec.id.user.as_str(),
        installation: spec.id.installation.as_str(),
        name: &spec.name,
        target,
        args: spec.args.len(),
        env: names(&spec.env),
        headers: names(&spec.headers),
        query: names(&spec.query),
        missing: &spec.missing,
        problems: &spec.problems,
        keep: spec.lifetime,
        on_update: spec.update_method,
        request_logging: spec.request_logging,
        policy: differences(&*spec.policy, &Policy::default()),
    });
    let hash = digest(&SHA256, &form);
    let first = hash.as_ref().first_chunk().copied().unwrap_or_default();
    u64::from_be_bytes(first)
}

/// A form has string keys only, so serializing it cannot fail.
fn to_bytes(form: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(form).unwrap_or_default()
}

fn differences<T: Serialize>(policy: &T, default: &T) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    let value = |policy: &T| serde_json::to_value(policy).unwrap_or_default();
    flatten(String::new(), &value(policy), Some(&value(default)), &mut found);
    found
}

/// Collects each leaf separately: the order of object keys depends on the features of `serde_json`.
fn flatten(path: String, value: &Value, default: Option<&Value>, found: &mut BTreeMap<String, Value>) {
    if default == Some(value) {
        return;
    }
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                flatten(below(key), value, default.and_then(|default| default.get(key)), found);
            }
        }
        Value::Array(items) => {
            found.insert(below("length"), items.len().into());
            for (index, item) in items.iter().enumerate() {
                flatten(below(&index.to_string()), item, None, found);
            }
        }
        leaf => drop(found.insert(path, leaf.clone())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use mcp_satellite_actors::model::spec::{ConfigValue, InstanceConfig};

    use super::*;
    use crate::catalogue_cache::tests::spec;

    fn policy(config: &mut InstanceConfig) -> &mut Policy {
        Arc::make_mut(&mut config.policy)
    }

    #[test]
    fn the_serialized_identity_is_stable_across_releases() {
        let form = String::from_utf8(server_identity(&spec(|config| policy(config).isolation.tmp_size = 7))).unwrap();
        assert_eq!(
            form,
            r#"{"form":1,"team":"team_acme","user":"user_alice","installation":"abc123","target":{"transport":"stdio","command":"files","cwd":null},"args":["a"],"env":{"TOKEN":"1234"},"headers":{},"query":{},"protocol":null,"isolation":{"tmp_size":7}}"#
        );
    }

    #[test]
    fn policy_values_change_the_public_hash_but_not_the_identity() {
        let plain = spec(|_| {});
        let numbers: [fn(&mut InstanceConfig); 3] = [
            |config| policy(config).logs.line_max = 99,
            |config| policy(config).restart.delays = vec![Duration::from_secs(1)],
            |config| config.lifetime = ProcessLifetime::AlwaysOn,
        ];
        for change in numbers {
            let changed = spec(change);
            assert_eq!(server_identity(&changed), server_identity(&plain));
            assert_ne!(public_hash(&changed), public_hash(&plain));
        }
        let others: [fn(&mut InstanceConfig); 3] = [
            |config| policy(config).isolation.network = false,
            |config| policy(config).session.tools.allowed = Some(["echo".to_owned()].into()),
            |config| policy(config).session.protocol = Some(Era::Stateless),
        ];
        for change in others {
            assert_ne!(server_identity(&spec(change)), server_identity(&plain));
        }
    }

    #[test]
    fn differences_list_only_changed_leaves() {
        let mut changed = Policy::default();
        assert!(differences(&changed, &Policy::default()).is_empty());
        changed.restart.max_crashes = 9;
        changed.restart.delays = vec![Duration::from_millis(1)];
        let found = differences(&changed, &Policy::default());
        let paths: Vec<&str> = found.keys().map(String::as_str).collect();
        let delay = ["restart.delays.0.nanos", "restart.delays.0.secs", "restart.delays.length"];
        assert_eq!(paths, [&delay[..], &["restart.max_crashes"]].concat());
    }

    #[test]
    fn the_public_hash_does_not_depend_on_secrets() {
        let token = |token: &'static str| {
            spec(move |config| drop(config.user_tier.env.insert("TOKEN".to_owned(), ConfigValue::secret(token))))
        };
        assert_eq!(public_hash(&token("1234")), public_hash(&token("5678")));
        let at = |url: &'static str| {
            spec(move |config| {
                let (transport, url) = (RemoteTransport::Http, url.to_owned());
                config.target = ServerTarget::Remote { transport, url, health_url: None };
            })
        };
        assert_eq!(public_hash(&at("https://a.example/s/1234")), public_hash(&at("https://a.example/s/5678")));
        assert_ne!(public_hash(&at("https://a.example/s")), public_hash(&at("https://b.example/s")));
    }
}
