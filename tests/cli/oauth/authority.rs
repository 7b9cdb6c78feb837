//! A minimal authorization server: it registers clients, authorizes without a login, and issues, expires, rotates and
//! revokes tokens. A reused refresh token revokes the whole authorization, as OAuth 2.1 requires. Wire types and PKCE
//! come from the crate `oauth2`.
//!
//! No crate provides all of this: `oxide-auth` has neither registration, revocation, devices, resource indicators nor
//! `iss`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::extract::{Json, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use oauth2::basic::{BasicErrorResponse, BasicErrorResponseType, BasicTokenResponse, BasicTokenType};
use oauth2::{AccessToken, EmptyExtraTokenFields, PkceCodeChallenge, PkceCodeVerifier, RefreshToken, Scope};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::served::TestServer;

/// An authorization server that runs until it is dropped. It can be stopped in between.
pub(crate) struct Authority {
    pub(crate) shared: Arc<AuthorityShared>,
    server: Mutex<TestServer>,
}

/// The state of the authorization server. It outlives a stop.
pub(crate) struct AuthorityShared {
    state: Mutex<AuthorityState>,
    /// Whether the token endpoint answers.
    answers: watch::Sender<bool>,
}

pub(crate) struct AuthorityState {
    /// URL of the authorization server.
    pub(crate) url: String,
    /// URL of the protected server, for which tokens are issued.
    pub(crate) resource: String,
    pub(crate) behavior: Behavior,
    clients: HashMap<String, Option<String>>,
    codes: HashMap<String, Code>,
    devices: HashMap<String, Device>,
    access: HashMap<String, Access>,
    refresh: HashMap<String, Refresh>,
    /// Number of token requests by grant type.
    pub(crate) token_requests: BTreeMap<String, u32>,
    /// The requested scopes of each authorization.
    pub(crate) scopes_asked: Vec<String>,
    pub(crate) revoked: Vec<String>,
    /// All values that must not leak.
    pub(crate) secrets: Vec<String>,
    serial: u32,
}

#[derive(Clone)]
pub(crate) struct Behavior {
    /// Lifetime of an access token in seconds.
    pub(crate) lifetime: u64,
    pub(crate) registers: bool,
    /// The issuer in its metadata.
    pub(crate) issuer: Option<String>,
    /// The `iss` parameter of its redirects.
    pub(crate) iss: Option<String>,
    /// The audience of its tokens, instead of the requested one.
    pub(crate) audience: Option<String>,
}

struct Code {
    client: String,
    challenge: String,
    redirect_uri: String,
    scopes: String,
    resource: String,
}

struct Device {
    scopes: String,
    resource: String,
    client: String,
    typed: bool,
}

#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) subject: String,
    pub(crate) scopes: String,
    pub(crate) audience: String,
    until: Instant,
}

#[derive(Clone)]
struct Refresh {
    subject: String,
    client: String,
    scopes: String,
    audience: String,
    spent: bool,
}

impl Authority {
    pub(crate) fn start() -> Self {
        let behavior = Behavior { lifetime: 3600, registers: true, issuer: None, iss: None, audience: None };
        let state = AuthorityState {
            url: String::new(),
            resource: String::new(),
            behavior,
            clients: HashMap::new(),
            codes: HashMap::new(),
            devices: HashMap::new(),
            access: HashMap::new(),
            refresh: HashMap::new(),
            token_requests: BTreeMap::new(),
            scopes_asked: Vec::new(),
            revoked: Vec::new(),
            secrets: Vec::new(),
            serial: 0,
        };
        let shared = Arc::new(AuthorityShared { state: Mutex::new(state), answers: watch::channel(true).0 });
        let router = axum::Router::new()
            .route("/.well-known/oauth-authorization-server", get(metadata))
            .route("/register", post(register))
            .route("/authorize", get(authorize))
            .route("/device_authorization", post(device))
            .route("/token", post(token))
            .route("/revoke", post(revoke))
            .with_state(Arc::clone(&shared));
        let server = TestServer::start(router);
        shared.state().url = server.url("");
        Self { shared, server: Mutex::new(server) }
    }

    pub(crate) fn stop(&self) {
        self.server.lock().unwrap().stop();
    }

    pub(crate) fn restart(&self) {
        self.server.lock().unwrap().listen();
    }

    /// Registers a client manually.
    pub(crate) fn add_client(&self, id: &str, secret: &str) {
        let mut state = self.shared.state();
        state.clients.insert(id.to_owned(), Some(secret.to_owned()));
        state.secrets.push(secret.to_owned());
    }

    pub(crate) fn configure(&self, change: impl FnOnce(&mut Behavior)) {
        change(&mut self.shared.state().behavior);
    }

    /// Makes the token endpoint delay its responses, or answer again.
    pub(crate) fn set_token_endpoint_answers(&self, answers: bool) {
        self.shared.answers.send_replace(answers);
    }

    pub(crate) fn token_requests(&self, grant: &str) -> u32 {
        self.shared.state().token_requests.get(grant).copied().unwrap_or_default()
    }

    /// Expires every access token before its announced end.
    pub(crate) fn expire_access_tokens(&self) {
        self.shared.state().expire_access();
    }

    /// Revokes all tokens.
    pub(crate) fn revoke_all(&self) {
        let mut state = self.shared.state();
        state.access.clear();
        state.refresh.clear();
    }

    /// Confirms a device, as a person does who types its code.
    pub(crate) fn type_code(&self, user_code: &str) {
        let code = user_code.replace("TYPE-", "planted-");
        self.shared.state().devices.get_mut(&code).unwrap().typed = true;
    }
}

impl AuthorityShared {
    pub(crate) fn state(&self) -> MutexGuard<'_, AuthorityState> {
        self.state.lock().unwrap()
    }

    /// The access of a token at `resource`, if it is valid.
    pub(crate) fn access(&self, token: &str, resource: &str) -> Option<Access> {
        let state = self.state();
        let access = state.access.get(token)?;
        (Instant::now() < access.until && access.audience == resource).then(|| access.clone())
    }
}

impl AuthorityState {
    pub(crate) fn expire_access(&mut self) {
        self.access.clear();
    }

    /// Extends the life of all access tokens by an hour beyond their announced end.
    pub(crate) fn extend_access_tokens(&mut self) {
        self.access.values_mut().for_each(|access| access.until += Duration::from_secs(3600));
    }

    fn secret(&mut self, kind: &str) -> String {
        self.serial += 1;
        let secret = format!("planted-{kind}-{:04}-{:x}", self.serial, std::process::id());
        self.secrets.push(secret.clone());
        secret
    }

    fn issue(&mut self, of: &Refresh, renewable: bool) -> BasicTokenResponse {
        let lifetime = Duration::from_secs(self.behavior.lifetime);
        let access = self.secret("access");
        let audience = self.behavior.audience.clone().unwrap_or_else(|| of.audience.clone());
        let until = Instant::now() + lifetime;
        let (subject, scopes) = (of.subject.clone(), of.scopes.clone());
        self.access.insert(access.clone(), Access { subject, scopes, audience, until });
        let mut response =
            BasicTokenResponse::new(AccessToken::new(access), BasicTokenType::Bearer, EmptyExtraTokenFields {});
        response.set_expires_in(Some(&lifetime));
        response.set_scopes(Some(of.scopes.split_whitespace().map(|scope| Scope::new(scope.to_owned())).collect()));
        if renewable {
            let refresh = self.secret("refresh");
            self.refresh.insert(refresh.clone(), of.clone());
            response.set_refresh_token(Some(RefreshToken::new(refresh)));
        }
        response
    }

    /// The authenticated client of a request.
    fn client(&self, headers: &HeaderMap, form: &HashMap<String, String>) -> Option<String> {
        let basic = headers.get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Basic "));
        let (id, secret) = match basic {
            Some(basic) => {
                let pair = decode(basic);
                let (id, secret) = pair.split_once(':')?;
                (id.to_owned(), Some(secret.to_owned()))
            }
            None => (form.get("client_id")?.clone(), form.get("client_secret").cloned()),
        };
        (*self.clients.get(&id)? == secret).then_some(id)
    }
}

/// Decodes Base64.
fn decode(text: &str) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = LETTERS.iter().position(|known| *known == letter).unwrap();
        bits = bits << 6 | u32::try_from(value).unwrap();
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).unwrap());
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn error_response(error: BasicErrorResponseType, why: &str) -> Response {
    let error = BasicErrorResponse::new(error, Some(why.to_owned()), None);
    (StatusCode::BAD_REQUEST, Json(error)).into_response()
}

type Parameters = HashMap<String, String>;

fn form(body: &str) -> Parameters {
    url::form_urlencoded::parse(body.as_bytes()).into_owned().collect()
}

async fn metadata(State(shared): State<Arc<AuthorityShared>>) -> Json<Value> {
    let state = shared.state();
    let url = &state.url;
    let mut metadata = json!({
        "issuer": state.behavior.issuer.as_ref().unwrap_or(url),
        "authorization_endpoint": format!("{url}/authorize"),
        "token_endpoint": format!("{url}/token"),
        "revocation_endpoint": format!("{url}/revoke"),
        "device_authorization_endpoint": format!("{url}/device_authorization"),
        "response_types_supported": ["code"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": true,
    });
    if state.behavior.registers {
        metadata["registration_endpoint"] = format!("{url}/register").into();
    }
    Json(metadata)
}

async fn register(
    State(shared): State<Arc<AuthorityShared>>,
    Json(parameters): Json<Value>,
) -> (StatusCode, Json<Value>) {
    let mut state = shared.state();
    state.serial += 1;
    let id = format!("client-{}", state.serial);
    // Like some real servers it issues a secret that was not requested.
    let secret = state.secret("client");
    state.clients.insert(id.clone(), Some(secret.clone()));
    let registered = json!({"client_id": id, "client_secret": secret, "redirect_uris": parameters["redirect_uris"]});
    (StatusCode::CREATED, Json(registered))
}

async fn authorize(State(shared): State<Arc<AuthorityShared>>, Query(parameters): Query<Parameters>) -> Response {
    let mut state = shared.state();
    let parameter = |name: &str| parameters.get(name).cloned().unwrap_or_default();
    if !state.clients.contains_key(&parameter("client_id")) || parameter("code_challenge_method") != "S256" {
        return StatusCode::BAD_REQUEST.into_response();
    }
    let code = state.secret("code");
    state.scopes_asked.push(parameter("scope"));
    let stored_code = Code {
        client: parameter("client_id"),
        challenge: parameter("code_challenge"),
        redirect_uri: parameter("redirect_uri"),
        scopes: parameter("scope"),
        resource: parameter("resource"),
    };
    state.codes.insert(code.clone(), stored_code);
    let iss = state.behavior.iss.clone().unwrap_or_else(|| state.url.clone());
    let mut redirect = reqwest::Url::parse(&parameter("redirect_uri")).unwrap();
    redirect
        .query_pairs_mut()
        .append_pair("code", &code)
        .append_pair("state", &parameter("state"))
        .append_pair("iss", &iss);
    Redirect::to(redirect.as_str()).into_response()
}

async fn device(State(shared): State<Arc<AuthorityShared>>, headers: HeaderMap, body: String) -> Response {
    let parameters = form(&body);
    let mut state = shared.state();
    let Some(client) = state.client(&headers, &parameters) else {
        return error_response(BasicErrorResponseType::InvalidClient, "unknown client");
    };
    let code = state.secret("device");
    let parameter = |name: &str| parameters.get(name).cloned().unwrap_or_default();
    let device = Device { scopes: parameter("scope"), resource: parameter("resource"), client, typed: false };
    state.devices.insert(code.clone(), device);
    // The user code is derived from the device code; only the latter is a secret.
    let user_code = code.replace("planted-", "TYPE-");
    let page = format!("{}/device", state.url);
    let answer = json!({
        "device_code": code, "user_code": user_code, "verification_uri": page,
        "expires_in": 600, "interval": 1,
    });
    Json(answer).into_response()
}

async fn token(State(shared): State<Arc<AuthorityShared>>, headers: HeaderMap, body: String) -> Response {
    let parameters = form(&body);
    let parameter = |name: &str| parameters.get(name).cloned().unwrap_or_default();
    let grant = parameter("grant_type");
    *shared.state().token_requests.entry(grant.clone()).or_default() += 1;
    let mut answers = shared.answers.subscribe();
    answers.wait_for(|answers| *answers).await.unwrap();
    let mut state = shared.state();
    state.secrets.extend(parameters.get("code_verifier").cloned());
    let Some(client) = state.client(&headers, &parameters) else {
        // It echoes the request, as a real server should not.
        let why = format!("not with {parameters:?}");
        return error_response(BasicErrorResponseType::InvalidClient, &why);
    };
    let bad = |why: &str| error_response(BasicErrorResponseType::InvalidGrant, why);
    if parameter("resource") != state.resource {
        return error_response(BasicErrorResponseType::Extension("invalid_target".to_owned()), "another resource");
    }
    state.serial += 1;
    let subject = format!("subject-{}", state.serial);
    let issued = match grant.as_str() {
        "authorization_code" => {
            let Some(code) = state.codes.remove(&parameter("code")) else { return bad("no such code") };
            let verifier = PkceCodeVerifier::new(parameter("code_verifier"));
            if PkceCodeChallenge::from_code_verifier_sha256(&verifier).as_str() != code.challenge
                || code.redirect_uri != parameter("redirect_uri")
                || code.client != client
                || code.resource != parameter("resource")
            {
                return bad("not the client that started");
            }
            let of = Refresh { subject, client, scopes: code.scopes, audience: code.resource, spent: false };
            state.issue(&of, true)
        }
        "refresh_token" => {
            let Some(of) = state.refresh.get(&parameter("refresh_token")).cloned() else {
                return bad(&format!("no such token: {}", parameter("refresh_token")));
            };
            if of.spent {
                state.refresh.retain(|_, other| other.subject != of.subject);
                state.access.retain(|_, other| other.subject != of.subject);
                return bad("that token was used before");
            }
            if of.client != client {
                return bad("another client's");
            }
            state.refresh.get_mut(&parameter("refresh_token")).unwrap().spent = true;
            state.issue(&of, true)
        }
        "client_credentials" => {
            let scopes = parameter("scope");
            let of = Refresh { subject: client.clone(), client, scopes, audience: parameter("resource"), spent: false };
            state.issue(&of, false)
        }
        "urn:ietf:params:oauth:grant-type:device_code" => {
            let Some(device) = state.devices.get(&parameter("device_code")) else { return bad("no such device") };
            if !device.typed {
                let pending = BasicErrorResponseType::Extension("authorization_pending".to_owned());
                return error_response(pending, "not yet");
            }
            let (scopes, audience) = (device.scopes.clone(), device.resource.clone());
            if device.client != client {
                return bad("another client's");
            }
            state.devices.remove(&parameter("device_code"));
            state.issue(&Refresh { subject, client, scopes, audience, spent: false }, true)
        }
        _ => return error_response(BasicErrorResponseType::UnsupportedGrantType, "unknown grant type"),
    };
    Json(issued).into_response()
}

async fn revoke(State(shared): State<Arc<AuthorityShared>>, headers: HeaderMap, body: String) -> Response {
    let parameters = form(&body);
    let mut state = shared.state();
    if state.client(&headers, &parameters).is_none() {
        return error_response(BasicErrorResponseType::InvalidClient, "unknown client");
    }
    let token = parameters.get("token").cloned().unwrap_or_default();
    if let Some(of) = state.refresh.remove(&token) {
        state.access.retain(|_, other| other.subject != of.subject);
    }
    state.access.remove(&token);
    state.revoked.push(token);
    StatusCode::OK.into_response()
}
