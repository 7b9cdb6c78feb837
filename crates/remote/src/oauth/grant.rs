//! Grants as stored: the tokens of an instance, with the authorization server, the client and the resource.
//!
//! Each grant is a file in `DIR/grants`, readable only by its owner. Its secrets never appear in the journal, in events
//! or in logs.

use std::io;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use serde::{Deserialize, Serialize};

use mcp_satellite_actors::model::settings::OAuthPlan;
use mcp_satellite_files::data_dir::{DataDir, is_hex};

const DIRECTORY: &str = "grants";
// File format. Files of other versions are ignored.
const VERSION: u32 = 1;
const FILE_MAX: u64 = 1 << 20;

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

// File format. No `Debug`, because it contains secrets.
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

#[derive(Debug, Clone)]
pub(super) struct GrantStore {
    data_dir: DataDir,
}

impl GrantStore {
    // Unusable files are logged and left unchanged.
    pub(super) fn open(data_dir: &DataDir) -> io::Result<(Self, Vec<Grant>)> {
        let store = Self { data_dir: data_dir.clone() };
        let mut grants = Vec::new();
        let directory = match store.directory() {
            Ok(directory) => directory,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            Err(error) => {
                // On a full disk, the directory is created with the first stored grant.
                tracing::error!(%error, "cannot create the directory of authorizations");
                return Ok((store, grants));
            }
        };
        for name in directory.names()? {
            if name.strip_suffix(".json").is_none_or(|digits| !is_hex(digits, 32)) {
                continue;
            }
            match Self::load(&directory, &name) {
                Ok(grant) => grants.push(grant),
                Err(why) => {
                    let file = directory.path().join(name);
                    tracing::error!(
                        file = %file.display(),
                        why,
                        "cannot read an authorization; its server must be authorized again"
                    );
                }
            }
        }
        Ok((store, grants))
    }

    fn directory(&self) -> io::Result<DataDir> {
        self.data_dir.create_or_open_subdirectory(DIRECTORY)
    }

    // Errors do not contain the contents of the file.
    fn load(directory: &DataDir, name: &str) -> Result<Grant, String> {
        let bytes = directory.read(name, FILE_MAX).map_err(|error| error.to_string())?.ok_or("the file was removed")?;
        // The serde error would contain the value, which may be a secret.
        let stored: StoredGrant = serde_json::from_slice(&bytes).map_err(|_| "the file is damaged")?;
        if stored.version != VERSION {
            return Err(format!(
                "the file has version {}, and this satellite supports version {VERSION}",
                stored.version
            ));
        }
        let grant = Grant::from(stored);
        // A copy under another name must not become the grant of another instance.
        if file_name(&grant.id) != name {
            return Err("the file belongs to another instance".to_owned());
        }
        Ok(grant)
    }

    // Blocks on the disk.
    pub(super) fn store(&self, grant: &Grant) -> io::Result<()> {
        self.directory()?.replace(&file_name(&grant.id), &serde_json::to_vec_pretty(&StoredGrant::from(grant))?)
    }

    // True if there was a grant.
    pub(super) fn remove(&self, id: &InstanceId) -> io::Result<bool> {
        self.directory()?.remove(&file_name(id))
    }
}

// A digest, because ids may contain any character.
fn file_name(id: &InstanceId) -> String {
    let parts = [id.team.to_string(), id.user.to_string(), id.installation.to_string()];
    let text = serde_json::json!(parts).to_string();
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    let (half, _) = digest.as_ref().split_first_chunk().unwrap_or((&[0; 16], &[]));
    format!("{:032x}.json", u128::from_be_bytes(*half))
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

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
    fn a_grant_is_stored_privately_and_hidden_in_debug_output() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let (store, none) = GrantStore::open(&DataDir::open(home.path()).unwrap()).unwrap();
        assert_eq!(none, []);
        for user in ["alice", "bob"] {
            store.store(&grant(user)).unwrap();
        }
        for entry in std::fs::read_dir(home.path().join(DIRECTORY)).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(home.path().join(DIRECTORY).metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let (_, mut found) = GrantStore::open(&DataDir::open(home.path()).unwrap()).unwrap();
        found.sort_by(|one, other| one.id.user.cmp(&other.id.user));
        assert_eq!(found, [grant("alice"), grant("bob")]);
        assert!(!format!("{found:?}").contains("hush"));
        assert!(store.remove(&grant("alice").id).unwrap() && !store.remove(&grant("alice").id).unwrap());
        assert_eq!(GrantStore::open(&DataDir::open(home.path()).unwrap()).unwrap().1, [grant("bob")]);
    }

    #[test]
    fn a_grant_file_with_a_wrong_name_is_ignored() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let (store, _) = GrantStore::open(&DataDir::open(home.path()).unwrap()).unwrap();
        store.store(&grant("alice")).unwrap();
        let name = |user: &str| file_name(&grant(user).id);
        store.directory().unwrap().rename(&name("alice"), &name("bob")).unwrap();
        store.directory().unwrap().replace(&name("carol"), b"{\"access_token\": \"hush\"}").unwrap();
        assert_eq!(GrantStore::open(&DataDir::open(home.path()).unwrap()).unwrap().1, []);
    }
}
