//! An authorization server as small as a real one can be: it registers clients, authorizes whoever comes (nobody has to
//! log in), and issues, expires, rotates and revokes tokens. A refresh token that comes twice ends the whole
//! authorization, as OAuth 2.1 wants it. Its wire types and PKCE are the crate `oauth2`'s.
//!
//! It is ours because no crate is all of it: `oxide-auth` knows neither registration, revocation, devices, resource
//! indicators nor `iss`, so its endpoints would have been this again, beside its own types.

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

use super::served::Served;

/// One that runs until it is dropped, and can be away in between.
pub(crate) struct Authority {
    pub(crate) knows: Arc<Knows>,
    served: Mutex<Served>,
}

/// What it is like and what it knows. It outlives the server.
pub(crate) struct Knows {
    state: Mutex<Known>,
    /// Whether its token endpoint answers.
    answers: watch::Sender<bool>,
}

pub(crate) struct Known {
    /// Its address.
    pub(crate) url: String,
    /// The protected server's, for which tokens are issued.
    pub(crate) resource: String,
    pub(crate) manner: Manner,
    clients: HashMap<String, Option<String>>,
    codes: HashMap<String, Code>,
    devices: HashMap<String, Device>,
    access: HashMap<String, Access>,
    refresh: HashMap<String, Refresh>,
    /// How often each kind of grant was asked for.
    pub(crate) asked: BTreeMap<String, u32>,
    /// The scopes that each authorization asked for.
    pub(crate) scopes_asked: Vec<String>,
    pub(crate) revoked: Vec<String>,
    /// All that must not be seen anywhere.
    pub(crate) secrets: Vec<String>,
    serial: u32,
}

/// How it behaves.
#[derive(Clone)]
pub(crate) struct Manner {
    /// Of an access token, in seconds.
    pub(crate) lifetime: u64,
    pub(crate) registers: bool,
    /// Who its metadata says it is.
    pub(crate) issuer: Option<String>,
    /// Who it says it is where it sends a browser back.
    pub(crate) iss: Option<String>,
    /// What its tokens are for, whatever was asked.
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
        let manner = Manner { lifetime: 3600, registers: true, issuer: None, iss: None, audience: None };
        let state = Known {
            url: String::new(),
            resource: String::new(),
            manner,
            clients: HashMap::new(),
            codes: HashMap::new(),
            devices: HashMap::new(),
            access: HashMap::new(),
            refresh: HashMap::new(),
            asked: BTreeMap::new(),
            scopes_asked: Vec::new(),
            revoked: Vec::new(),
            secrets: Vec::new(),
            serial: 0,
        };
        let knows = Arc::new(Knows { state: Mutex::new(state), answers: watch::channel(true).0 });
        let router = axum::Router::new()
            .route("/.well-known/oauth-authorization-server", get(metadata))
            .route("/register", post(register))
            .route("/authorize", get(authorize))
            .route("/device_authorization", post(device))
            .route("/token", post(token))
            .route("/revoke", post(revoke))
            .with_state(Arc::clone(&knows));
        let served = Served::start(router);
        knows.state().url = served.url("");
        Self { knows, served: Mutex::new(served) }
    }

    pub(crate) fn go_away(&self) {
        self.served.lock().unwrap().end();
    }

    pub(crate) fn come_back(&self) {
        self.served.lock().unwrap().begin();
    }

    /// A client that is registered by hand.
    pub(crate) fn know_client(&self, id: &str, secret: &str) {
        let mut state = self.knows.state();
        state.clients.insert(id.to_owned(), Some(secret.to_owned()));
        state.secrets.push(secret.to_owned());
    }

    pub(crate) fn behave(&self, change: impl FnOnce(&mut Manner)) {
        change(&mut self.knows.state().manner);
    }

    /// Has its token endpoint keep everybody waiting, or answer them.
    pub(crate) fn answer_tokens(&self, answers: bool) {
        self.knows.answers.send_replace(answers);
    }

    /// How often a token was asked for with this kind of grant.
    pub(crate) fn asked(&self, grant: &str) -> u32 {
        self.knows.state().asked.get(grant).copied().unwrap_or_default()
    }

    /// Every access token is dead from now on, whatever was said of its lifetime.
    pub(crate) fn kill_access_tokens(&self) {
        self.knows.state().kill_access();
    }

    /// Everything that was granted is taken back.
    pub(crate) fn forget_all(&self) {
        let mut state = self.knows.state();
        state.access.clear();
        state.refresh.clear();
    }

    /// Somebody types the code that was shown.
    pub(crate) fn type_code(&self, user_code: &str) {
        let code = user_code.replace("TYPE-", "planted-");
        self.knows.state().devices.get_mut(&code).unwrap().typed = true;
    }
}

impl Knows {
    pub(crate) fn state(&self) -> MutexGuard<'_, Known> {
        self.state.lock().unwrap()
    }

    /// What a token is good for at `resource`, if it is.
    pub(crate) fn access(&self, token: &str, resource: &str) -> Option<Access> {
        let state = self.state();
        let access = state.access.get(token)?;
        (Instant::now() < access.until && access.audience == resource).then(|| access.clone())
    }
}

impl Known {
    pub(crate) fn kill_access(&mut self) {
        self.access.clear();
    }

    /// Its tokens live for an hour, whatever was said of them.
    pub(crate) fn prolong(&mut self) {
        self.access.values_mut().for_each(|access| access.until += Duration::from_secs(3600));
    }

    fn secret(&mut self, kind: &str) -> String {
        self.serial += 1;
        let secret = format!("planted-{kind}-{:04}-{:x}", self.serial, std::process::id());
        self.secrets.push(secret.clone());
        secret
    }

    fn issue(&mut self, of: &Refresh, renewable: bool) -> BasicTokenResponse {
        let lifetime = Duration::from_secs(self.manner.lifetime);
        let access = self.secret("access");
        let audience = self.manner.audience.clone().unwrap_or_else(|| of.audience.clone());
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

    /// Who asks, if that is proven.
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

/// Base64, as far as it is written here.
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

fn refused(error: BasicErrorResponseType, why: &str) -> Response {
    let error = BasicErrorResponse::new(error, Some(why.to_owned()), None);
    (StatusCode::BAD_REQUEST, Json(error)).into_response()
}

type Asked = HashMap<String, String>;

fn form(body: &str) -> Asked {
    url::form_urlencoded::parse(body.as_bytes()).into_owned().collect()
}

async fn metadata(State(knows): State<Arc<Knows>>) -> Json<Value> {
    let state = knows.state();
    let url = &state.url;
    let mut metadata = json!({
        "issuer": state.manner.issuer.as_ref().unwrap_or(url),
        "authorization_endpoint": format!("{url}/authorize"),
        "token_endpoint": format!("{url}/token"),
        "revocation_endpoint": format!("{url}/revoke"),
        "device_authorization_endpoint": format!("{url}/device_authorization"),
        "response_types_supported": ["code"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": true,
    });
    if state.manner.registers {
        metadata["registration_endpoint"] = format!("{url}/register").into();
    }
    Json(metadata)
}

async fn register(State(knows): State<Arc<Knows>>, Json(asked): Json<Value>) -> (StatusCode, Json<Value>) {
    let mut state = knows.state();
    state.serial += 1;
    let id = format!("client-{}", state.serial);
    // It gives a secret although nobody has asked for one, as some do.
    let secret = state.secret("client");
    state.clients.insert(id.clone(), Some(secret.clone()));
    let registered = json!({"client_id": id, "client_secret": secret, "redirect_uris": asked["redirect_uris"]});
    (StatusCode::CREATED, Json(registered))
}

async fn authorize(State(knows): State<Arc<Knows>>, Query(asked): Query<Asked>) -> Response {
    let mut state = knows.state();
    let given = |name: &str| asked.get(name).cloned().unwrap_or_default();
    if !state.clients.contains_key(&given("client_id")) || given("code_challenge_method") != "S256" {
        return StatusCode::BAD_REQUEST.into_response();
    }
    let code = state.secret("code");
    state.scopes_asked.push(given("scope"));
    let kept = Code {
        client: given("client_id"),
        challenge: given("code_challenge"),
        redirect_uri: given("redirect_uri"),
        scopes: given("scope"),
        resource: given("resource"),
    };
    state.codes.insert(code.clone(), kept);
    let iss = state.manner.iss.clone().unwrap_or_else(|| state.url.clone());
    let mut back = reqwest::Url::parse(&given("redirect_uri")).unwrap();
    back.query_pairs_mut().append_pair("code", &code).append_pair("state", &given("state")).append_pair("iss", &iss);
    Redirect::to(back.as_str()).into_response()
}

async fn device(State(knows): State<Arc<Knows>>, headers: HeaderMap, body: String) -> Response {
    let asked = form(&body);
    let mut state = knows.state();
    let Some(client) = state.client(&headers, &asked) else {
        return refused(BasicErrorResponseType::InvalidClient, "who are you?");
    };
    let code = state.secret("device");
    let given = |name: &str| asked.get(name).cloned().unwrap_or_default();
    let device = Device { scopes: given("scope"), resource: given("resource"), client, typed: false };
    state.devices.insert(code.clone(), device);
    // One is found by the other; only the device's is a secret.
    let user_code = code.replace("planted-", "TYPE-");
    let page = format!("{}/device", state.url);
    let answer = json!({
        "device_code": code, "user_code": user_code, "verification_uri": page,
        "expires_in": 600, "interval": 1,
    });
    Json(answer).into_response()
}

async fn token(State(knows): State<Arc<Knows>>, headers: HeaderMap, body: String) -> Response {
    let asked = form(&body);
    let given = |name: &str| asked.get(name).cloned().unwrap_or_default();
    let grant = given("grant_type");
    *knows.state().asked.entry(grant.clone()).or_default() += 1;
    let mut answers = knows.answers.subscribe();
    answers.wait_for(|answers| *answers).await.unwrap();
    let mut state = knows.state();
    state.secrets.extend(asked.get("code_verifier").cloned());
    let Some(client) = state.client(&headers, &asked) else {
        // It echoes what it was given, as it should not.
        let why = format!("not with {asked:?}");
        return refused(BasicErrorResponseType::InvalidClient, &why);
    };
    let bad = |why: &str| refused(BasicErrorResponseType::InvalidGrant, why);
    if given("resource") != state.resource {
        return refused(BasicErrorResponseType::Extension("invalid_target".to_owned()), "another resource");
    }
    state.serial += 1;
    let subject = format!("subject-{}", state.serial);
    let issued = match grant.as_str() {
        "authorization_code" => {
            let Some(code) = state.codes.remove(&given("code")) else { return bad("no such code") };
            let verifier = PkceCodeVerifier::new(given("code_verifier"));
            if PkceCodeChallenge::from_code_verifier_sha256(&verifier).as_str() != code.challenge
                || code.redirect_uri != given("redirect_uri")
                || code.client != client
                || code.resource != given("resource")
            {
                return bad("not who began");
            }
            let of = Refresh { subject, client, scopes: code.scopes, audience: code.resource, spent: false };
            state.issue(&of, true)
        }
        "refresh_token" => {
            let Some(of) = state.refresh.get(&given("refresh_token")).cloned() else {
                return bad(&format!("no such token: {}", given("refresh_token")));
            };
            if of.spent {
                state.refresh.retain(|_, other| other.subject != of.subject);
                state.access.retain(|_, other| other.subject != of.subject);
                return bad("that token was used before");
            }
            if of.client != client {
                return bad("another client's");
            }
            state.refresh.get_mut(&given("refresh_token")).unwrap().spent = true;
            state.issue(&of, true)
        }
        "client_credentials" => {
            let scopes = given("scope");
            let of = Refresh { subject: client.clone(), client, scopes, audience: given("resource"), spent: false };
            state.issue(&of, false)
        }
        "urn:ietf:params:oauth:grant-type:device_code" => {
            let Some(device) = state.devices.get(&given("device_code")) else { return bad("no such device") };
            if !device.typed {
                let pending = BasicErrorResponseType::Extension("authorization_pending".to_owned());
                return refused(pending, "not yet");
            }
            let (scopes, audience) = (device.scopes.clone(), device.resource.clone());
            if device.client != client {
                return bad("another client's");
            }
            state.devices.remove(&given("device_code"));
            state.issue(&Refresh { subject, client, scopes, audience, spent: false }, true)
        }
        _ => return refused(BasicErrorResponseType::UnsupportedGrantType, "what is that?"),
    };
    Json(issued).into_response()
}

async fn revoke(State(knows): State<Arc<Knows>>, headers: HeaderMap, body: String) -> Response {
    let asked = form(&body);
    let mut state = knows.state();
    if state.client(&headers, &asked).is_none() {
        return refused(BasicErrorResponseType::InvalidClient, "who are you?");
    }
    let token = asked.get("token").cloned().unwrap_or_default();
    if let Some(of) = state.refresh.remove(&token) {
        state.access.retain(|_, other| other.subject != of.subject);
    }
    state.access.remove(&token);
    state.revoked.push(token);
    StatusCode::OK.into_response()
}
