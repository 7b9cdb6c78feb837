//! Authorization of an instance by a person, in two steps: the first returns the page to open, the second takes the
//! result. Verifiers and device codes never leave the satellite, so nothing that the caller learns can be used
//! elsewhere.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use reqwest::Url;

use super::discovery::{self, AuthorizationPage};
use super::error::OAuthError;
use super::grant::{AuthorizationServer, Grant, OAuthClient};
use super::grants::{Grants, new_grant};
use super::rules;
use super::token::{self, DeviceAuthorization, TokenGrant, TokenResponse};
use crate::TokenHolder;

// Lifetime of an unfinished flow.
const FLOW_LIFETIME: Duration = Duration::from_secs(15 * 60);
// Beyond this number the oldest flow is dropped.
const FLOWS_MAX: usize = 64;
// Increment for each `slow_down` response (RFC 8628).
const SLOW_DOWN: Duration = Duration::from_secs(5);
// Longest poll interval while the authorization server is unreachable.
const UNREACHABLE_INTERVAL_MAX: Duration = Duration::from_secs(30);

pub struct FlowRequest {
    pub redirect_uri: String,
    // True for the device flow, with a code that is typed on another device.
    pub device: bool,
    // Scopes to request; if empty, those of the configuration or of the server.
    pub scopes: Vec<String>,
}

pub enum FlowStart {
    // The person opens `url` in a browser, which is redirected to the `redirect_uri`.
    Page { flow: u64, url: String },
    // The person opens a page on any device and types a code.
    Device(DevicePrompt),
    // No person is needed: the satellite itself received the grant.
    Granted,
}

pub struct DevicePrompt {
    pub flow: u64,
    pub user_code: String,
    pub page: String,
    pub page_with_code: Option<String>,
    pub expires_in: Duration,
}

pub enum FlowCompletion {
    // Whole URL of the redirect.
    Redirect(Secret),
    // Code from that URL.
    Code(Secret),
    // Device flow: the satellite polls for the result.
    Poll,
}

#[derive(Default)]
pub(super) struct PendingFlows {
    flows: HashMap<u64, PendingFlow>,
    last: u64,
}

#[derive(Clone)]
struct PendingFlow {
    holder: TokenHolder,
    authority: AuthorizationServer,
    client: OAuthClient,
    // True if the client was registered dynamically: its secret is then stored with the grant.
    registered: bool,
    resource: String,
    scopes: Vec<String>,
    deadline: Instant,
    return_path: FlowReturn,
}

#[derive(Clone)]
enum FlowReturn {
    Browser { state: Secret, verifier: Secret, redirect_uri: String, issuer: Option<String>, issuer_required: bool },
    Device { code: Secret, interval: Duration },
}

impl PendingFlows {
    fn insert(&mut self, flow: PendingFlow) -> u64 {
        let now = Instant::now();
        self.flows.retain(|_, flow| now < flow.deadline);
        if self.flows.len() >= FLOWS_MAX
            && let Some(first) = self.flows.keys().min().copied()
        {
            self.flows.remove(&first);
        }
        self.last += 1;
        self.flows.insert(self.last, flow);
        self.last
    }

    fn get(&self, flow: u64) -> Result<PendingFlow, OAuthError> {
        let known = self.flows.get(&flow).filter(|flow| Instant::now() < flow.deadline);
        known.cloned().ok_or_else(|| {
            OAuthError::Unusable("the authorization has expired or is completed; start it again".to_owned())
        })
    }

    fn remove(&mut self, flow: u64) {
        self.flows.remove(&flow);
    }
}

impl Grants {
    /// Starts the authorization of an instance. Completes it at once if no person is needed.
    pub async fn begin_flow(&self, spec: &InstanceSpec, wanted: FlowRequest) -> Result<FlowStart, OAuthError> {
        let holder = TokenHolder::from_spec(spec).ok_or_else(|| {
            let why =
                "OAuth needs a remote server without `bearer_token` or `Authorization` header in the configuration";
            OAuthError::Unusable(why.to_owned())
        })?;
        let (plan, challenge, granted_before) = {
            let mut state = self.state();
            let plan = state.plan(&holder.id);
            let instance_grant = state.instance_grant(&holder.id);
            let granted = instance_grant.grant(&holder, &plan).map(|grant| grant.scopes.clone()).unwrap_or_default();
            let granted_before = rules::union(granted.iter().chain(&instance_grant.missing_scopes));
            (plan, instance_grant.challenge.clone(), granted_before)
        };
        if plan.machine {
            self.renew(&holder).await?;
            return Ok(FlowStart::Granted);
        }
        let http = self.oauth_http(&holder.url)?;
        let mut found = discovery::discover(&http, &holder.url, challenge.as_deref()).await?;
        found.check_issuer(&plan)?;
        let requested_scopes = if wanted.scopes.is_empty() { &plan.scopes } else { &wanted.scopes };
        let scopes = found.select_scopes(requested_scopes, &granted_before).await;
        let client = found.obtain_client(&plan, &wanted.redirect_uri, &scopes).await?;
        let authority = found.authority.clone();
        let flow = |resource, deadline, return_path| PendingFlow {
            holder: holder.clone(),
            authority: authority.clone(),
            client: client.clone(),
            registered: plan.client_id.is_none(),
            resource,
            scopes: scopes.clone(),
            deadline,
            return_path,
        };
        if wanted.device {
            let Some(url) = found.device_endpoint() else {
                let why = "the authorization server does not support device codes; omit --device";
                return Err(OAuthError::Unusable(why.to_owned()));
            };
            let device =
                token::request_device_authorization(&http, &url, &authority, &client, &found.resource, &scopes).await?;
            let DeviceAuthorization {
                code,
                user_code,
                verification_uri,
                verification_uri_complete,
                expires_in,
                interval,
            } = device;
            let deadline = Instant::now() + expires_in.min(FLOW_LIFETIME);
            let flow = flow(found.resource, deadline, FlowReturn::Device { code, interval });
            let flow = self.state().flows.insert(flow);
            return Ok(FlowStart::Device(DevicePrompt {
                flow,
                user_code,
                page: verification_uri,
                page_with_code: verification_uri_complete,
                expires_in,
            }));
        }
        let (issuer, issuer_required) = found.expected_issuer();
        let page = found.authorization_page(&client, &wanted.redirect_uri, &scopes).await?;
        let AuthorizationPage { url, state, verifier, resource } = page;
        let redirect_uri = wanted.redirect_uri;
        let back = FlowReturn::Browser { state, verifier, redirect_uri, issuer, issuer_required };
        let flow = flow(resource, Instant::now() + FLOW_LIFETIME, back);
        let flow = self.state().flows.insert(flow);
        Ok(FlowStart::Page { flow, url })
    }

    /// Completes an authorization and returns its instance. The grant is then stored and in use.
    pub async fn finish_flow(&self, number: u64, answered: FlowCompletion) -> Result<InstanceId, OAuthError> {
        let flow = self.state().flows.get(number)?;
        let code = match (&flow.return_path, answered) {
            // A response that does not belong to the flow does not end it: another sender may have sent it.
            (FlowReturn::Browser { state, issuer, issuer_required, .. }, FlowCompletion::Redirect(url)) => {
                parse_redirect(&url, state, issuer.as_deref(), *issuer_required)?
            }
            (FlowReturn::Browser { .. }, FlowCompletion::Code(code)) => code,
            (FlowReturn::Device { code, .. }, FlowCompletion::Poll) => code.clone(),
            (FlowReturn::Browser { .. } | FlowReturn::Device { .. }, _) => {
                return Err(OAuthError::Unusable(
                    "the authorization was started in another way; start it again".to_owned(),
                ));
            }
        };
        let (grants, holder) = (self.clone(), flow.holder.clone());
        let renewal = match flow.return_path.clone() {
            FlowReturn::Browser { verifier, redirect_uri, .. } => {
                // The code can be used only once.
                self.state().flows.remove(number);
                let exchange = async move {
                    let ask = TokenGrant::Code { code: &code, verifier: &verifier, redirect_uri: &redirect_uri };
                    let issued = grants.request_token(&flow, ask).await?;
                    grants.adopt(flow.into_grant(issued), None).await
                };
                self.start_next_renewal(&holder, exchange).await
            }
            FlowReturn::Device { interval, .. } => {
                let issued = self.poll_device_token(number, &flow, &code, interval).await?;
                self.state().flows.remove(number);
                let adoption = async move { grants.adopt(flow.into_grant(issued), None).await };
                self.start_next_renewal(&holder, adoption).await
            }
        };
        renewal.await.map(|_| holder.id)
    }

    async fn request_token(&self, flow: &PendingFlow, ask: TokenGrant<'_>) -> Result<TokenResponse, OAuthError> {
        let http = self.oauth_http(&flow.holder.url)?;
        token::request_token(&http, &flow.authority, &flow.client, &flow.resource, ask).await
    }

    async fn poll_device_token(
        &self,
        number: u64,
        flow: &PendingFlow,
        code: &Secret,
        mut interval: Duration,
    ) -> Result<TokenResponse, OAuthError> {
        loop {
            tokio::time::sleep(interval).await;
            match self.request_token(flow, TokenGrant::Device { code }).await {
                Ok(issued) => return Ok(issued),
                Err(OAuthError::Refused { error, .. }) if error == "authorization_pending" => {}
                Err(OAuthError::Refused { error, .. }) if error == "slow_down" => interval += SLOW_DOWN,
                Err(OAuthError::Unavailable(_)) => interval = (interval * 2).min(UNREACHABLE_INTERVAL_MAX),
                Err(error) => return Err(error),
            }
            // Fails if the flow has expired.
            self.state().flows.get(number)?;
        }
    }
}

impl PendingFlow {
    fn into_grant(self, issued: TokenResponse) -> Grant {
        let Self { holder, authority, client, registered, resource, scopes, .. } = self;
        let client = if registered { client } else { client.without_secret() };
        new_grant(&holder, authority, client, resource, scopes, issued)
    }
}

fn parse_redirect(
    url: &Secret,
    state: &Secret,
    issuer: Option<&str>,
    issuer_required: bool,
) -> Result<Secret, OAuthError> {
    let bad = |why: &str| OAuthError::Unusable(why.to_owned());
    let url =
        Url::parse(url.expose().trim()).map_err(|_| bad("this is not the URL of a redirect; paste the whole URL"))?;
    let parameter =
        |wanted: &str| url.query_pairs().find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned());
    if parameter("state").as_deref() != Some(state.expose()) {
        return Err(bad("this URL belongs to another authorization: its `state` does not match"));
    }
    match (parameter("iss"), issuer) {
        (Some(received), Some(issuer)) if received != issuer => {
            return Err(bad(&format!("the response does not come from the issuer `{issuer}`")));
        }
        (None, _) if issuer_required => return Err(bad("the response does not name its issuer (`iss`)")),
        _ => {}
    }
    if let Some(error) = parameter("error") {
        let message = parameter("error_description").map_or_else(|| error.clone(), |more| format!("{error}: {more}"));
        let message = message.chars().filter(|letter| !letter.is_control()).take(200).collect();
        return Err(OAuthError::Refused { error, message });
    }
    parameter("code").map(Secret::from).ok_or_else(|| bad("this URL contains no code"))
}

impl OAuthClient {
    // Configured secrets are not stored with the grant.
    pub(super) fn without_secret(self) -> Self {
        Self { secret: None, ..self }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    const BACK: &str = "http://127.0.0.1:1/callback";

    #[test]
    fn a_redirect_must_contain_our_state_and_the_requested_issuer() {
        let state = Secret::from("ours");
        let parse = |query: &str, iss_required: bool| {
            parse_redirect(&format!("{BACK}?{query}").into(), &state, Some("https://as.example.com"), iss_required)
        };
        assert_eq!(parse("code=c&state=ours", false).unwrap().expose(), "c");
        assert_eq!(parse("code=c&state=ours&iss=https%3A%2F%2Fas.example.com", true).unwrap().expose(), "c");
        for (query, iss_required, why) in [
            ("code=c&state=theirs", false, "another authorization"),
            ("code=c", false, "another authorization"),
            ("code=c&state=ours&iss=https%3A%2F%2Fevil.example.com", false, "does not come from the issuer"),
            ("code=c&state=ours", true, "does not name its issuer"),
            ("state=ours", false, "no code"),
            ("error=access_denied&error_description=no%0Away&state=ours", false, "access_denied: noway"),
        ] {
            let refused = parse(query, iss_required).unwrap_err().to_string();
            assert!(refused.contains(why), "{query}: {refused}");
        }
    }
}
