//! Requests to an authorization server: token endpoint (RFC 6749), revocation (RFC 7009) and device authorization (RFC
//! 8628).
//!
//! The SDK implements a part of this. Its errors are only text, so an outage looks like a revoked grant; it does not
//! mask secrets that such a text echoes; it logs the authorization code; and its refresh request contains the
//! normalized URL instead of the resource identifier of the server.

use std::time::Duration;

use mcp_satellite_actors::model::secret::{Secret, SecretMask};
use reqwest::header::{ACCEPT, CONTENT_TYPE};
use serde::Deserialize;
use url::form_urlencoded::{Serializer, byte_serialize};

use super::error::OAuthError;
use super::grant::{AuthorizationServer, OAuthClient};
use super::http::{OAuthHttp, OAuthResponse};
use super::rules;

// Characters of an error text from the authorization server.
const ERROR_TEXT_MAX: usize = 200;
pub(super) const DEVICE: &str = "urn:ietf:params:oauth:grant-type:device_code";

// Grant types.
pub(super) enum TokenGrant<'a> {
    Code { code: &'a Secret, verifier: &'a Secret, redirect_uri: &'a str },
    Refresh { token: &'a Secret },
    Machine { scopes: &'a [String] },
    Device { code: &'a Secret },
}

pub(super) struct TokenResponse {
    pub(super) access_token: Secret,
    pub(super) refresh_token: Option<Secret>,
    pub(super) lifetime: Option<Duration>,
    // Present if the granted scopes differ from the requested ones.
    pub(super) scopes: Option<Vec<String>>,
}

pub(super) struct DeviceAuthorization {
    pub(super) code: Secret,
    pub(super) user_code: String,
    pub(super) verification_uri: String,
    pub(super) verification_uri_complete: Option<String>,
    pub(super) expires_in: Duration,
    pub(super) interval: Duration,
}

// Form body with the secrets to mask in the response.
struct OAuthForm {
    fields: Vec<(&'static str, String)>,
    secrets: Vec<Secret>,
}

impl OAuthForm {
    fn new() -> Self {
        Self { fields: Vec::new(), secrets: Vec::new() }
    }

    fn with_field(mut self, name: &'static str, value: &str) -> Self {
        self.fields.push((name, value.to_owned()));
        self
    }

    fn with_secret(mut self, name: &'static str, value: &Secret) -> Self {
        self.secrets.push(value.clone());
        self.with_field(name, value.expose())
    }

    async fn send(
        mut self,
        http: &OAuthHttp,
        endpoint: &str,
        url: &str,
        client: &OAuthClient,
        in_form: bool,
    ) -> Result<OAuthResponse, OAuthError> {
        let mut request = http.post(endpoint, url)?;
        match &client.secret {
            None => self = self.with_field("client_id", &client.id),
            Some(secret) if in_form => {
                self = self.with_field("client_id", &client.id).with_secret("client_secret", secret);
            }
            Some(secret) => {
                self.secrets.push(secret.clone());
                let encoded = |text: &str| byte_serialize(text.as_bytes()).collect::<String>();
                request = request.basic_auth(encoded(&client.id), Some(encoded(secret.expose())));
            }
        }
        let body = Serializer::new(String::new()).extend_pairs(&self.fields).finish();
        let request = request.header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        let answer = http.send(request.header(ACCEPT, "application/json").body(body)).await?;
        self.check_response(answer, endpoint)
    }

    /// Checks the response. OAuth errors may come with a 200. Statuses that are temporary or concern the address are no
    /// statement about the grant, whatever the body contains.
    fn check_response(&self, answer: OAuthResponse, endpoint: &str) -> Result<OAuthResponse, OAuthError> {
        #[derive(Deserialize)]
        struct OAuthErrorBody {
            error: String,
            error_description: Option<String>,
        }
        let refusal = serde_json::from_slice::<OAuthErrorBody>(&answer.body);
        match refusal {
            Ok(OAuthErrorBody { error, error_description })
                if matches!(answer.status.as_u16(), 200 | 400 | 401 | 403) =>
            {
                let mask = SecretMask::new(self.secrets.iter().map(Secret::expose));
                let message = match error_description {
                    Some(description) => format!("{error}: {description}"),
                    None => error.clone(),
                };
                Err(OAuthError::Refused { error: mask.apply(&error), message: one_line(&mask.apply(&message)) })
            }
            _ if answer.status.is_success() => Ok(answer),
            _ => Err(OAuthError::Unavailable(format!("{endpoint} answers with HTTP {}", answer.status.as_u16()))),
        }
    }
}

pub(super) fn one_line(text: &str) -> String {
    let clean = |letter: char| if letter.is_control() { ' ' } else { letter };
    text.chars().take(ERROR_TEXT_MAX).map(clean).collect()
}

pub(super) async fn request_token(
    http: &OAuthHttp,
    authority: &AuthorizationServer,
    client: &OAuthClient,
    resource: &str,
    ask: TokenGrant<'_>,
) -> Result<TokenResponse, OAuthError> {
    let form = OAuthForm::new().with_field("resource", resource);
    let form = match ask {
        TokenGrant::Code { code, verifier, redirect_uri } => form
            .with_field("grant_type", "authorization_code")
            .with_secret("code", code)
            .with_secret("code_verifier", verifier)
            .with_field("redirect_uri", redirect_uri),
        // Without `scope`, the new token has the same scopes as before.
        TokenGrant::Refresh { token } => {
            form.with_field("grant_type", "refresh_token").with_secret("refresh_token", token)
        }
        TokenGrant::Machine { scopes: [] } => form.with_field("grant_type", "client_credentials"),
        TokenGrant::Machine { scopes } => {
            form.with_field("grant_type", "client_credentials").with_field("scope", &scopes.join(" "))
        }
        TokenGrant::Device { code } => form.with_field("grant_type", DEVICE).with_secret("device_code", code),
    };
    let endpoint = "the token endpoint";
    let answer = form.send(http, endpoint, &authority.token_endpoint, client, authority.secret_in_form).await?;
    parse_token_response(&answer.body).map_err(|why| OAuthError::Unavailable(format!("{endpoint} answers with {why}")))
}

fn parse_token_response(body: &[u8]) -> Result<TokenResponse, &'static str> {
    #[derive(Deserialize)]
    struct TokenBody {
        access_token: String,
        token_type: String,
        expires_in: Option<serde_json::Value>,
        refresh_token: Option<String>,
        scope: Option<String>,
    }
    let TokenBody { access_token, token_type, expires_in, refresh_token, scope } =
        serde_json::from_slice(body).map_err(|_| "an invalid token response")?;
    if !token_type.eq_ignore_ascii_case("bearer") {
        return Err("a token that is not a bearer token");
    }
    if access_token.is_empty() || !access_token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("a token with characters that are not allowed in a header");
    }
    // Some servers send the number as a string.
    let seconds = expires_in.and_then(|value| value.as_u64().or_else(|| value.as_str()?.parse().ok()));
    Ok(TokenResponse {
        access_token: access_token.into(),
        refresh_token: refresh_token.filter(|token| !token.is_empty()).map(Secret::from),
        lifetime: seconds.map(Duration::from_secs),
        scopes: scope.map(|scope| scope.split_ascii_whitespace().map(str::to_owned).collect()),
    })
}

// Revoking a refresh token ends the whole grant.
pub(super) async fn revoke(
    http: &OAuthHttp,
    authority: &AuthorizationServer,
    client: &OAuthClient,
    token: &Secret,
) -> Result<(), OAuthError> {
    let Some(url) = &authority.revocation_endpoint else { return Ok(()) };
    let form = OAuthForm::new().with_secret("token", token);
    form.send(http, "the revocation endpoint", url, client, authority.secret_in_form).await.map(drop)
}

pub(super) async fn request_device_authorization(
    http: &OAuthHttp,
    url: &str,
    authority: &AuthorizationServer,
    client: &OAuthClient,
    resource: &str,
    scopes: &[String],
) -> Result<DeviceAuthorization, OAuthError> {
    #[derive(Deserialize)]
    struct DeviceCodeBody {
        device_code: String,
        user_code: String,
        verification_uri: String,
        verification_uri_complete: Option<String>,
        expires_in: u64,
        #[serde(default = "default_interval")]
        interval: u64,
    }
    fn default_interval() -> u64 {
        5
    }
    let endpoint = "the device endpoint";
    let mut form = OAuthForm::new().with_field("resource", resource);
    if !scopes.is_empty() {
        form = form.with_field("scope", &scopes.join(" "));
    }
    let answer = form.send(http, endpoint, url, client, authority.secret_in_form).await?;
    let answered: DeviceCodeBody = serde_json::from_slice(&answer.body)
        .map_err(|_| OAuthError::Unusable(format!("{endpoint} answers without a valid device code")))?;
    let DeviceCodeBody { device_code, user_code, verification_uri, verification_uri_complete, expires_in, interval } =
        answered;
    for uri in [Some(&verification_uri), verification_uri_complete.as_ref()].into_iter().flatten() {
        let url =
            uri.parse().map_err(|_| OAuthError::Unusable(format!("{endpoint} names a page without a valid URL")))?;
        http.check_url("the page for the code", &url)?;
    }
    Ok(DeviceAuthorization {
        code: device_code.into(),
        user_code,
        verification_uri,
        verification_uri_complete,
        expires_in: Duration::from_secs(expires_in),
        interval: Duration::from_secs(interval.max(1)),
    })
}

pub(super) fn is_final(error: &OAuthError) -> bool {
    match error {
        OAuthError::Refused { error, .. } => rules::is_final(error),
        OAuthError::Unusable(_) => true,
        OAuthError::Unavailable(_) => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    #[test]
    fn token_responses_are_parsed_leniently_but_invalid_ones_are_rejected() {
        let read = |body: &str| parse_token_response(body.as_bytes());
        let token =
            read(r#"{"access_token":"a","token_type":"bearer","expires_in":"60","scope":"r w","refresh_token":""}"#)
                .unwrap();
        assert_eq!((token.access_token.expose(), token.lifetime), ("a", Some(Duration::from_secs(60))));
        assert_eq!((token.refresh_token, token.scopes.unwrap().join(",")), (None, "r,w".to_owned()));
        assert!(read(r#"{"access_token":"a","token_type":"mac"}"#).is_err());
        assert!(read(r#"{"access_token":"a\nb","token_type":"Bearer"}"#).is_err());
        assert!(read("<html>").is_err());
    }

    #[test]
    fn echoed_form_values_are_masked_in_errors() {
        let form = OAuthForm::new().with_secret("refresh_token", &"hush-refresh".into());
        let body = r#"{"error":"invalid_grant","error_description":"no such\ntoken: hush-refresh"}"#;
        let answer = OAuthResponse::new(400, body);
        let refused = |answer| form.check_response(answer, "it").err().unwrap();
        let message = refused(answer).to_string();
        assert_eq!(message, "the authorization server rejected the request: invalid_grant: no such token: [secret]");
        // Some servers send errors with a 200. Other statuses do not concern the grant.
        assert!([200, 400, 401].into_iter().all(|status| is_final(&refused(OAuthResponse::new(status, body)))));
        for status in [404, 408, 425, 429, 500, 503] {
            assert!(!is_final(&refused(OAuthResponse::new(status, body))), "{status}");
        }
        assert!(form.check_response(OAuthResponse::new(200, "{}"), "it").is_ok());
    }
}
