//! Grants as stored: the tokens of an instance, with the authorization server, the client and the resource. The secrets
//! never appear in the journal, in events or in logs.

use std::io;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use serde::{Deserialize, Serialize};

use mcp_satellite_actors::model::settings::OAuthPlan;

// Storage format. Grants of other versions are ignored.
const VERSION: u32 = 1;

/// Private storage of the host for grants. Each method blocks on the disk.
pub trait GrantStore: Send + Sync {
    /// Returns all stored grants.
    ///
    /// # Errors
    ///
    /// Returns the file that cannot be used, with the reason.
    fn load(&self) -> Result<Vec<(InstanceId, Vec<u8>)>, String>;
    fn save(&self, id: &InstanceId, grant: Vec<u8>) -> io::Result<()>;
    fn delete(&self, id: &InstanceId) -> io::Result<()>;
}

// `Secret` hides its value in `Debug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    // Only this instance may use the grant.
    pub(super) id: InstanceId,
    // URL of the server, as configured.
    pub(super) url: String,
    // Identifier that the server uses for itself (RFC 8707).
    pub(super) resource: String,
    pub(super) authority: AuthorizationServer,
    pub(super) client: OAuthClient,
    pub(super) scopes: Vec<String>,
    pub(super) access_token: Secret,
    // Without it, a renewal needs a new authorization.
    pub(super) refresh_token: Option<Secret>,
    pub(super) received_at: Timestamp,
    // Lifetime of the access token, if known.
    pub(super) lifetime: Option<Duration>,
}

impl Grant {
    pub(super) fn is_valid_for(&self, url: &str, plan: &OAuthPlan) -> bool {
        self.url == url
            && plan.client_id.as_ref().is_none_or(|id| *id == self.client.id)
            && self.authority.has_planned_issuer(plan)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AuthorizationServer {
    pub(super) issuer: String,
    pub(super) token_endpoint: String,
    pub(super) revocation_endpoint: Option<String>,
    // True if the client secret is sent in the form instead of a header.
    pub(super) secret_in_form: bool,
}

impl AuthorizationServer {
    pub(super) fn has_planned_issuer(&self, plan: &OAuthPlan) -> bool {
        plan.issuer.as_ref().is_none_or(|issuer| *issuer == self.issuer)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OAuthClient {
    pub(super) id: String,
    // Only a secret from dynamic registration; a configured one stays in the configuration.
    pub(super) secret: Option<Secret>,
}

// Storage format. No `Debug`, because it contains secrets.
#[derive(Serialize, Deserialize)]
struct StoredGrant {
    version: u32,
    team: String,
    user: String,
    installation: String,
    url: String,
    resource: String,
    issuer: String,
    token_endpoint: String,
    revocation_endpoint: Option<String>,
    secret_in_form: bool,
    client_id: String,
    client_secret: Option<String>,
    scopes: Vec<String>,
    access_token: String,
    refresh_token: Option<String>,
    received_at: Timestamp,
    expires_in: Option<u64>,
}

impl From<&Grant> for StoredGrant {
    fn from(grant: &Grant) -> Self {
        let Grant { id, url, resource, authority, client, scopes, .. } = grant;
        let text = |secret: &Secret| secret.expose().to_owned();
        Self {
            version: VERSION,
            team: id.team.to_string(),
            user: id.user.to_string(),
            installation: id.installation.to_string(),
            url: url.clone(),
            resource: resource.clone(),
            issuer: authority.issuer.clone(),
            token_endpoint: authority.token_endpoint.clone(),
            revocation_endpoint: authority.revocation_endpoint.clone(),
            secret_in_form: authority.secret_in_form,
            client_id: client.id.clone(),
            client_secret: client.secret.as_ref().map(text),
            scopes: scopes.clone(),
            access_token: text(&grant.access_token),
            refresh_token: grant.refresh_token.as_ref().map(text),
            received_at: grant.received_at,
            expires_in: grant.lifetime.map(|lifetime| lifetime.as_secs()),
        }
    }
}

impl From<StoredGrant> for Grant {
    fn from(stored: StoredGrant) -> Self {
        Self {
            id: InstanceId::new(stored.team.as_str().into(), stored.user.as_str().into(), stored.installation.into()),
            url: stored.url,
            resource: stored.resource,
            authority: AuthorizationServer {
                issuer: stored.issuer,
                token_endpoint: stored.token_endpoint,
                revocation_endpoint: stored.revocation_endpoint,
                secret_in_form: stored.secret_in_form,
            },
            client: OAuthClient { id: stored.client_id, secret: stored.client_secret.map(Secret::from) },
            scopes: stored.scopes,
            access_token: stored.access_token.into(),
            refresh_token: stored.refresh_token.map(Secret::from),
            received_at: stored.received_at,
            lifetime: stored.expires_in.map(Duration::from_secs),
        }
    }
}

// Unusable grants are logged and left unchanged.
pub(super) fn load_all(store: &dyn GrantStore) -> Vec<Grant> {
    let stored = store.load().unwrap_or_else(|why| {
        tracing::error!(
            why,
            "cannot read the authorizations; repair the file, or remove it and authorize the servers again"
        );
        Vec::new()
    });
    let usable = |(id, bytes): (InstanceId, Vec<u8>)| {
        let parsed = parse(&id, &bytes).inspect_err(|why| {
            tracing::error!(instance = %id, why, "cannot read an authorization; its server must be authorized again");
        });
        parsed.ok()
    };
    stored.into_iter().filter_map(usable).collect()
}

// Errors do not contain the stored text.
fn parse(id: &InstanceId, bytes: &[u8]) -> Result<Grant, String> {
    // The serde error would contain the value, which may be a secret.
    let stored: StoredGrant = serde_json::from_slice(bytes).map_err(|_| "it is damaged")?;
    if stored.version != VERSION {
        return Err(format!("it has version {}, and this satellite supports version {VERSION}", stored.version));
    }
    let grant = Grant::from(stored);
    // A copy in another place must not become the grant of another instance.
    if grant.id == *id { Ok(grant) } else { Err("it belongs to another instance".to_owned()) }
}

pub(super) fn save(store: &dyn GrantStore, grant: &Grant) -> io::Result<()> {
    store.save(&grant.id, serde_json::to_vec_pretty(&StoredGrant::from(grant))?)
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct MemoryStore(Mutex<BTreeMap<InstanceId, Vec<u8>>>);

    impl GrantStore for MemoryStore {
        fn load(&self) -> Result<Vec<(InstanceId, Vec<u8>)>, String> {
            Ok(self.0.lock().unwrap().clone().into_iter().collect())
        }

        fn save(&self, id: &InstanceId, grant: Vec<u8>) -> io::Result<()> {
            self.0.lock().unwrap().insert(id.clone(), grant);
            Ok(())
        }

        fn delete(&self, id: &InstanceId) -> io::Result<()> {
            self.0.lock().unwrap().remove(id);
            Ok(())
        }
    }

    pub(crate) fn grant(user: &str) -> Grant {
        Grant {
            id: InstanceId::new("acme".into(), user.into(), "s1".into()),
            url: "https://mcp.example.com/mcp".to_owned(),
            resource: "https://mcp.example.com".to_owned(),
            authority: AuthorizationServer {
                issuer: "https://as.example.com".to_owned(),
                token_endpoint: "https://as.example.com/token".to_owned(),
                revocation_endpoint: None,
                secret_in_form: false,
            },
            client: OAuthClient { id: "satellite".to_owned(), secret: Some("hush-client".into()) },
            scopes: vec!["read".to_owned()],
            access_token: format!("hush-access-{user}").into(),
            refresh_token: Some(format!("hush-refresh-{user}").into()),
            received_at: Timestamp::from_second(1_800_000_000).unwrap(),
            lifetime: Some(Duration::from_secs(3600)),
        }
    }

    #[test]
    fn a_stored_grant_is_loaded_unchanged_and_hidden_in_debug_output() {
        let store = MemoryStore::default();
        assert_eq!(load_all(&store), []);
        for user in ["alice", "bob"] {
            save(&store, &grant(user)).unwrap();
        }
        let found = load_all(&store);
        assert_eq!(found, [grant("alice"), grant("bob")]);
        assert!(!format!("{found:?}").contains("hush"));
        store.delete(&grant("alice").id).unwrap();
        assert_eq!(load_all(&store), [grant("bob")]);
    }

    #[test]
    fn a_grant_of_another_instance_and_a_damaged_one_are_ignored() {
        let store = MemoryStore::default();
        save(&store, &grant("alice")).unwrap();
        let alices = store.0.lock().unwrap().remove(&grant("alice").id).unwrap();
        store.save(&grant("bob").id, alices).unwrap();
        store.save(&grant("carol").id, b"{\"access_token\": \"hush\"}".to_vec()).unwrap();
        assert_eq!(load_all(&store), []);
    }
}
