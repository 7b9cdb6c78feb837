//! A person's authorization of one instance, in two steps: begun, which says where the person is to go, and finished with
//! what the person comes back with. Whoever asks is told nothing that could be used without this satellite: verifiers
//! and codes of devices stay here.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use reqwest::Url;

use super::discovery::{self, Page};
use super::grant::{Authority, Client, Grant};
use super::keeper::{Grants, granted};
use super::token::{self, Ask, Device, Issued};
use super::{Trouble, rules};
use crate::connect::remote::Holder;

/// A person who has gone for longer does not come back.
const PATIENCE: Duration = Duration::from_secs(15 * 60);
/// So many people are waited for at once; the one who went first is given up for another.
const FLOWS_MAX: usize = 64;
/// An authorization server that wants to be asked less often says so in steps of this.
const SLOW_DOWN: Duration = Duration::from_secs(5);
/// One that cannot be reached is asked no less often than this.
const AWAY_MAX: Duration = Duration::from_secs(30);

/// How an instance is to be authorized.
pub(crate) struct Wanted {
    /// Where a person's browser is sent back to.
    pub(crate) redirect_uri: String,
    /// By a code that is typed on another device.
    pub(crate) device: bool,
    /// What to ask for; else what is configured, or what its server says.
    pub(crate) scopes: Vec<String>,
}

/// Where a person is to go.
pub(crate) enum Begun {
    /// To a page, by a browser that comes back to the `redirect_uri`.
    Page { flow: u64, url: String },
    /// To a page, on any device, with a code.
    Device(OnDevice),
    /// Nowhere: it was granted to the satellite itself.
    Granted,
}

/// What a person types where.
pub(crate) struct OnDevice {
    pub(crate) flow: u64,
    pub(crate) user_code: String,
    pub(crate) page: String,
    pub(crate) page_with_code: Option<String>,
    pub(crate) expires_in: Duration,
}

/// What a person comes back with.
pub(crate) enum Answered {
    /// The whole address that the browser was sent back to.
    Redirect(Secret),
    /// The code in it.
    Code(Secret),
    /// Nothing: a device does the rest.
    Nothing,
}

/// Those that have begun.
#[derive(Default)]
pub(super) struct Flows {
    under_way: HashMap<u64, Flow>,
    last: u64,
}

#[derive(Clone)]
struct Flow {
    holder: Holder,
    authority: Authority,
    client: Client,
    /// Whether the client's secret is kept with the grant: the configuration has it, or nobody else.
    registered: bool,
    resource: String,
    scopes: Vec<String>,
    until: Instant,
    way: Back,
}

/// How a person comes back.
#[derive(Clone)]
enum Back {
    Browser { state: Secret, verifier: Secret, redirect_uri: String, issuer: Option<String>, issuer_is_said: bool },
    Device { code: Secret, interval: Duration },
}

impl Flows {
    fn insert(&mut self, flow: Flow) -> u64 {
        let now = Instant::now();
        self.under_way.retain(|_, flow| now < flow.until);
        if self.under_way.len() >= FLOWS_MAX
            && let Some(first) = self.under_way.keys().min().copied()
        {
            self.under_way.remove(&first);
        }
        self.last += 1;
        self.under_way.insert(self.last, flow);
        self.last
    }

    fn get(&self, flow: u64) -> Result<Flow, Trouble> {
        let known = self.under_way.get(&flow).filter(|flow| Instant::now() < flow.until);
        known.cloned().ok_or_else(|| Trouble::Unusable("that took too long, or is over; begin again".to_owned()))
    }

    fn remove(&mut self, flow: u64) {
        self.under_way.remove(&flow);
    }
}

impl Grants {
    /// Begins to authorize an instance, or does it where no person is needed.
    pub(crate) async fn begin_flow(&self, spec: &InstanceSpec, wanted: Wanted) -> Result<Begun, Trouble> {
        let holder = Holder::of(spec).ok_or_else(|| {
            let why = "it is no remote server, or has a credential of its own in the configuration";
            Trouble::Unusable(why.to_owned())
        })?;
        let (plan, challenge, before) = {
            let mut state = self.state();
            let plan = state.plan(&holder.id);
            let held = state.held(&holder.id);
            let granted = held.grant(&holder, &plan).map(|grant| grant.scopes.clone()).unwrap_or_default();
            let before = rules::union(granted.iter().chain(&held.lacking));
            (plan, held.challenge.clone(), before)
        };
        if plan.machine {
            self.renew(&holder).await?;
            return Ok(Begun::Granted);
        }
        let way = self.way(&holder.url)?;
        let mut found = discovery::discover(&way, &holder.url, challenge.as_deref()).await?;
        found.is_as_planned(&plan)?;
        let asked = if wanted.scopes.is_empty() { &plan.scopes } else { &wanted.scopes };
        let scopes = found.scopes(asked, &before).await;
        let client = found.client(&plan, &wanted.redirect_uri, &scopes).await?;
        let authority = found.authority.clone();
        let flow = |resource, until, way| Flow {
            holder: holder.clone(),
            authority: authority.clone(),
            client: client.clone(),
            registered: plan.client_id.is_none(),
            resource,
            scopes: scopes.clone(),
            until,
            way,
        };
        if wanted.device {
            let Some(url) = found.device_endpoint() else {
                let why = "its authorization server knows no devices; leave out --device";
                return Err(Trouble::Unusable(why.to_owned()));
            };
            let device = token::device(&way, &url, &authority, &client, &found.resource, &scopes).await?;
            let Device { code, user_code, verification_uri, verification_uri_complete, expires_in, interval } = device;
            let until = Instant::now() + expires_in.min(PATIENCE);
            let flow = flow(found.resource, until, Back::Device { code, interval });
            let flow = self.state().flows.insert(flow);
            return Ok(Begun::Device(OnDevice {
                flow,
                user_code,
                page: verification_uri,
                page_with_code: verification_uri_complete,
                expires_in,
            }));
        }
        let (issuer, issuer_is_said) = found.expected_issuer();
        let page = found.page(&client, &wanted.redirect_uri, &scopes).await?;
        let Page { url, state, verifier, resource } = page;
        let redirect_uri = wanted.redirect_uri;
        let back = Back::Browser { state, verifier, redirect_uri, issuer, issuer_is_said };
        let flow = flow(resource, Instant::now() + PATIENCE, back);
        let flow = self.state().flows.insert(flow);
        Ok(Begun::Page { flow, url })
    }

    /// Finishes it: when this returns the grant is kept and used. Whose it is.
    pub(crate) async fn finish_flow(&self, number: u64, answered: Answered) -> Result<InstanceId, Trouble> {
        let flow = self.state().flows.get(number)?;
        let code = match (&flow.way, answered) {
            // What does not belong to it does not end it either: whoever sends it is not the one who is waited for.
            (Back::Browser { state, issuer, issuer_is_said, .. }, Answered::Redirect(url)) => {
                came_back(&url, state, issuer.as_deref(), *issuer_is_said)?
            }
            (Back::Browser { .. }, Answered::Code(code)) => code,
            (Back::Device { code, .. }, Answered::Nothing) => code.clone(),
            (Back::Browser { .. } | Back::Device { .. }, _) => {
                return Err(Trouble::Unusable("that is not how it was begun".to_owned()));
            }
        };
        let (grants, holder) = (self.clone(), flow.holder.clone());
        let renewal = match flow.way.clone() {
            Back::Browser { verifier, redirect_uri, .. } => {
                // The code works once.
                self.state().flows.remove(number);
                let exchange = async move {
                    let ask = Ask::Code { code: &code, verifier: &verifier, redirect_uri: &redirect_uri };
                    let issued = grants.issued(&flow, ask).await?;
                    grants.adopt(flow.granted(issued), None).await
                };
                self.begin_after(&holder, exchange).await
            }
            Back::Device { interval, .. } => {
                let issued = self.issued_to_device(number, &flow, &code, interval).await?;
                self.state().flows.remove(number);
                let adoption = async move { grants.adopt(flow.granted(issued), None).await };
                self.begin_after(&holder, adoption).await
            }
        };
        renewal.await.map(|_| holder.id)
    }

    async fn issued(&self, flow: &Flow, ask: Ask<'_>) -> Result<Issued, Trouble> {
        let way = self.way(&flow.holder.url)?;
        token::request(&way, &flow.authority, &flow.client, &flow.resource, ask).await
    }

    /// Asks until the person has typed the code, or it is too late.
    async fn issued_to_device(
        &self,
        number: u64,
        flow: &Flow,
        code: &Secret,
        mut interval: Duration,
    ) -> Result<Issued, Trouble> {
        loop {
            tokio::time::sleep(interval).await;
            match self.issued(flow, Ask::Device { code }).await {
                Ok(issued) => return Ok(issued),
                Err(Trouble::Refused { error, .. }) if error == "authorization_pending" => {}
                Err(Trouble::Refused { error, .. }) if error == "slow_down" => interval += SLOW_DOWN,
                Err(Trouble::Away(_)) => interval = (interval * 2).min(AWAY_MAX),
                Err(trouble) => return Err(trouble),
            }
            // It is over when its time is.
            self.state().flows.get(number)?;
        }
    }
}

impl Flow {
    fn granted(self, issued: Issued) -> Grant {
        let Self { holder, authority, client, registered, resource, scopes, .. } = self;
        let client = if registered { client } else { client.without_secret() };
        granted(&holder, authority, client, resource, scopes, issued)
    }
}

/// The code in an address that a browser was sent back to, if it was by whom it was sent for.
fn came_back(url: &Secret, state: &Secret, issuer: Option<&str>, issuer_is_said: bool) -> Result<Secret, Trouble> {
    let bad = |why: &str| Trouble::Unusable(why.to_owned());
    let url = Url::parse(url.expose().trim()).map_err(|_| bad("that is no address that a browser was sent back to"))?;
    let given = |wanted: &str| url.query_pairs().find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned());
    if given("state").as_deref() != Some(state.expose()) {
        return Err(bad("that address belongs to another authorization: its state is not ours"));
    }
    match (given("iss"), issuer) {
        (Some(said), Some(issuer)) if said != issuer => {
            return Err(bad(&format!("somebody else has answered: not the issuer `{issuer}`")));
        }
        (None, _) if issuer_is_said => return Err(bad("the answer does not say who has given it (iss)")),
        _ => {}
    }
    if let Some(error) = given("error") {
        let said = given("error_description").map_or_else(|| error.clone(), |more| format!("{error}: {more}"));
        let said = said.chars().filter(|letter| !letter.is_control()).take(200).collect();
        return Err(Trouble::Refused { error, said });
    }
    given("code").map(Secret::from).ok_or_else(|| bad("there is no code in that address"))
}

impl Client {
    /// As it is kept where the configuration has its secret.
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
    fn who_comes_back_has_our_state_and_the_issuer_who_was_asked() {
        let state = Secret::from("ours");
        let came = |query: &str, said: bool| {
            came_back(&format!("{BACK}?{query}").into(), &state, Some("https://as.example.com"), said)
        };
        assert_eq!(came("code=c&state=ours", false).unwrap().expose(), "c");
        assert_eq!(came("code=c&state=ours&iss=https%3A%2F%2Fas.example.com", true).unwrap().expose(), "c");
        for (query, said, why) in [
            ("code=c&state=theirs", false, "another authorization"),
            ("code=c", false, "another authorization"),
            ("code=c&state=ours&iss=https%3A%2F%2Fevil.example.com", false, "somebody else"),
            ("code=c&state=ours", true, "does not say who"),
            ("state=ours", false, "no code"),
            ("error=access_denied&error_description=no%0Away&state=ours", false, "access_denied: noway"),
        ] {
            let refused = came(query, said).unwrap_err().to_string();
            assert!(refused.contains(why), "{query}: {refused}");
        }
    }
}
