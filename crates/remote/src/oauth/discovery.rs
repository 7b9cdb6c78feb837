//! Discovery of the authorization server of an MCP server: protected-resource metadata, authorization-server metadata,
//! client registration and the authorization URL. The SDK implements the protocol; this module uses its own HTTP client
//! and restricts the addresses to which tokens, codes and people are sent.

use std::sync::Arc;

use mcp_satellite_actors::model::secret::Secret;
use reqwest::Url;
use rmcp::transport::auth::{
    AuthError, AuthorizationManager, AuthorizationMetadata, AuthorizationMetadataSource, InMemoryStateStore,
    OAuthClientConfig, StateStore,
};

use super::error::OAuthError;
use super::grant::{AuthorizationServer, OAuthClient};
use super::http::OAuthHttp;
use super::rules;
use super::token::one_line;
use mcp_satellite_actors::model::settings::OAuthPlan;

// For dynamic registration.
const CLIENT_NAME: &str = "mcp-satellite";
// Some servers issue a refresh token only for this scope.
const OFFLINE: &str = "offline_access";

pub(super) struct DiscoveredAuthority {
    manager: AuthorizationManager,
    metadata: AuthorizationMetadata,
    pub(super) authority: AuthorizationServer,
    // Resource identifier of the server (RFC 8707).
    pub(super) resource: String,
}

pub(super) struct AuthorizationPage {
    pub(super) url: String,
    pub(super) state: Secret,
    pub(super) verifier: Secret,
    pub(super) resource: String,
}

pub(super) async fn discover(
    http: &Arc<OAuthHttp>,
    url: &str,
    challenge: Option<&str>,
) -> Result<DiscoveredAuthority, OAuthError> {
    let mut manager = AuthorizationManager::new_with_oauth_http_client(url, http.clone())
        .await
        .map_err(|error| OAuthError::Unusable(error.to_string()))?;
    let resolved = manager.resolve_metadata_from_challenge(challenge).await.map_err(|error| match error {
        AuthError::DiscoveryRequestFailed { source, .. } => match source.downcast::<OAuthError>() {
            Ok(error) => *error,
            Err(other) => {
                OAuthError::Unavailable(format!("cannot read the metadata of the authorization server: {other}"))
            }
        },
        // They may be unavailable for a moment, for example during a deployment.
        AuthError::AuthorizationServersUnavailable { .. } => OAuthError::Unavailable(
            "none of the server's authorization servers provides metadata; try again later".to_owned(),
        ),
        error => OAuthError::Unusable(format!("cannot use the authorization server: {error}")),
    })?;
    let metadata = resolved.metadata;
    let extra = |name: &str| metadata.additional_fields.get(name);
    let text = |name: &str| extra(name).and_then(|value| value.as_str()).map(str::to_owned);
    let named = [
        ("the authorization endpoint", Some(&metadata.authorization_endpoint)),
        ("the token endpoint", Some(&metadata.token_endpoint)),
        ("the registration endpoint", metadata.registration_endpoint.as_ref()),
        ("the revocation endpoint", text("revocation_endpoint").as_ref()),
        ("the device endpoint", text("device_authorization_endpoint").as_ref()),
        ("the issuer", metadata.issuer.as_ref()),
    ]
    .map(|(what, url)| (what, url.cloned()));
    for (what, url) in named {
        let Some(url) = url else { continue };
        let url =
            Url::parse(&url).map_err(|error| OAuthError::Unusable(format!("{what} is not a valid URL: {error}")))?;
        http.check_url(what, &url)?;
    }
    let methods = extra("token_endpoint_auth_methods_supported").and_then(|value| value.as_array());
    let takes = |name: &str| methods.is_some_and(|methods| methods.iter().any(|method| method == name));
    let authority = AuthorizationServer {
        issuer: match &metadata.issuer {
            Some(issuer) => issuer.clone(),
            // Without metadata, the origin of the token endpoint identifies the server.
            None => {
                Url::parse(&metadata.token_endpoint).map(|url| url.origin().ascii_serialization()).unwrap_or_default()
            }
        },
        token_endpoint: metadata.token_endpoint.clone(),
        revocation_endpoint: text("revocation_endpoint"),
        secret_in_form: takes("client_secret_post") && !takes("client_secret_basic"),
    };
    let called = http.resource().filter(|_| resolved.source == AuthorizationMetadataSource::ProtectedResourceMetadata);
    manager.set_metadata(metadata.clone());
    Ok(DiscoveredAuthority { manager, metadata, authority, resource: called.unwrap_or_else(|| url.to_owned()) })
}

impl DiscoveredAuthority {
    // A compromised server may name any authorization server, so a configured client is used only with the configured
    // issuer.
    pub(super) fn check_issuer(&self, plan: &OAuthPlan) -> Result<(), OAuthError> {
        if self.authority.has_planned_issuer(plan) {
            return Ok(());
        }
        let (named, planned) = (one_line(&self.authority.issuer), plan.issuer.as_deref().unwrap_or_default());
        Err(OAuthError::Unusable(format!("the server names the issuer `{named}`, but `{planned}` is configured")))
    }

    fn field(&self, name: &str) -> Option<&serde_json::Value> {
        self.metadata.additional_fields.get(name)
    }

    pub(super) fn device_endpoint(&self) -> Option<String> {
        self.field("device_authorization_endpoint")?.as_str().map(str::to_owned)
    }

    /// Returns the issuer that the redirect must come from, and true if the redirect must name it (RFC 9207).
    pub(super) fn expected_issuer(&self) -> (Option<String>, bool) {
        let declared =
            self.field("authorization_response_iss_parameter_supported").and_then(serde_json::Value::as_bool);
        (self.metadata.issuer.clone(), declared.unwrap_or(false))
    }

    /// Returns the scopes to request: `asked`, otherwise those of the server, and in addition the scopes `before`,
    /// which were granted or lacking before.
    pub(super) async fn select_scopes(&self, configured: &[String], granted: &[String]) -> Vec<String> {
        let requested_scopes =
            if configured.is_empty() { self.manager.select_initial_scopes(&[]).await } else { configured.to_vec() };
        let mut scopes = rules::union(requested_scopes.iter().chain(granted));
        let offers_offline = self.metadata.scopes_supported.iter().flatten().any(|scope| scope == OFFLINE);
        if offers_offline && !scopes.is_empty() && !scopes.iter().any(|scope| scope == OFFLINE) {
            scopes.push(OFFLINE.to_owned());
        }
        scopes
    }

    /// Returns the client: as configured, as described by its metadata document, or as registered now.
    pub(super) async fn obtain_client(
        &mut self,
        plan: &OAuthPlan,
        redirect_uri: &str,
        scopes: &[String],
    ) -> Result<OAuthClient, OAuthError> {
        let takes_documents = self.field("client_id_metadata_document_supported").and_then(serde_json::Value::as_bool);
        let (id, secret) = match (&plan.client_id, &plan.client_metadata_url) {
            (Some(id), _) => (id.clone(), plan.client_secret.clone()),
            (None, Some(url)) if takes_documents == Some(true) => (url.clone(), None),
            (None, _) => {
                let scopes: Vec<&str> = scopes.iter().map(String::as_str).collect();
                let registered = self.manager.register_client(CLIENT_NAME, redirect_uri, &scopes).await;
                let registered = registered.map_err(|error| {
                    OAuthError::Unusable(format!(
                        "cannot register with the authorization server ({}); register a client there by hand and \
                         configure oauth = {{ client_id = \"…\" }}",
                        one_line(&error.to_string())
                    ))
                })?;
                (registered.client_id, registered.client_secret.map(Secret::from))
            }
        };
        Ok(OAuthClient { id, secret })
    }

    pub(super) async fn authorization_page(
        mut self,
        client: &OAuthClient,
        redirect_uri: &str,
        scopes: &[String],
    ) -> Result<AuthorizationPage, OAuthError> {
        let unusable = |error: AuthError| OAuthError::Unusable(format!("cannot use the authorization server: {error}"));
        let states = InMemoryStateStore::new();
        self.manager.set_state_store(states.clone());
        self.manager.configure_client(OAuthClientConfig::new(client.id.clone(), redirect_uri)).map_err(unusable)?;
        let scopes: Vec<&str> = scopes.iter().map(String::as_str).collect();
        let url = self.manager.get_authorization_url(&scopes).await.map_err(unusable)?;
        let parameter = |requested_scopes: &str| {
            let url = Url::parse(&url).ok()?;
            url.query_pairs().find(|(name, _)| name == requested_scopes).map(|(_, value)| value.into_owned())
        };
        let state = parameter("state").unwrap_or_default();
        let stored = states.load(&state).await.map_err(unusable)?;
        let stored = stored
            .ok_or_else(|| OAuthError::Unusable("the OAuth library has no state of the authorization".to_owned()))?;
        let resource = parameter("resource").unwrap_or(self.resource);
        Ok(AuthorizationPage { url, state: state.into(), verifier: stored.pkce_verifier.into(), resource })
    }
}
