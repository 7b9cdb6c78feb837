//! What is done about a server that refuses a token: another one is had, or a person is told what to do.

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::secret::Secret;
use reqwest::Url;
use rmcp::transport::auth::WWWAuthenticateParams;

use super::keeper::Grants;
use super::{rules, token};
use crate::connect::remote::{Holder, Refusal, Tokens};

impl Tokens for Grants {
    fn token(&self, holder: &Holder) -> Option<Secret> {
        self.state().grant(holder).map(|grant| grant.access_token.clone())
    }

    fn another(&self, holder: &Holder, refusal: Refusal) -> BoxFuture<'static, Result<Option<Secret>, FailureKind>> {
        let (grants, holder) = (self.clone(), holder.clone());
        async move {
            match refusal.status {
                403 => grants.forbidden(&holder, &refusal),
                _ => grants.unauthorized(&holder, refusal).await,
            }
        }
        .boxed()
    }
}

impl Grants {
    /// 403: whoever has the wrong scopes may have the right ones. It is remembered for the next authorization.
    fn forbidden(&self, holder: &Holder, refusal: &Refusal) -> Result<Option<Secret>, FailureKind> {
        let Some(challenge) = Challenge::read(refusal, &holder.url) else { return Ok(None) };
        if challenge.error.as_deref() != Some("insufficient_scope") {
            return Ok(None);
        }
        let wanted: Vec<String> =
            challenge.scope.unwrap_or_default().split_ascii_whitespace().map(str::to_owned).collect();
        let mut state = self.state();
        let held = state.held(&holder.id);
        held.lacking = rules::union(held.lacking.iter().chain(&wanted));
        let scopes = wanted.join(" ");
        let mut words = vec![next(holder)];
        words.extend(wanted.iter().map(|scope| format!("--scope {scope}")));
        let next = words.join(" ");
        if refusal.first {
            let why = format!("its authorization lacks the scopes `{scopes}` (HTTP 403)");
            return Err(FailureKind::Ungranted { why, next });
        }
        Err(FailureKind::InsufficientScope { scopes, next })
    }

    async fn unauthorized(&self, holder: &Holder, refusal: Refusal) -> Result<Option<Secret>, FailureKind> {
        let ungranted = |why: &str| FailureKind::Ungranted { why: why.to_owned(), next: next(holder) };
        let challenge = Challenge::read(&refusal, &holder.url);
        // It may be that a person has just authorized it.
        let renewal = if let Some(renewal) = self.under_way(&holder.id) {
            renewal
        } else {
            let mut state = self.state();
            let plan = state.plan(&holder.id);
            let held = state.held(&holder.id);
            if challenge.is_some() {
                held.challenge.clone_from(&refusal.challenge);
            }
            match held.grant(holder, &plan) {
                Some(grant) if refusal.used.as_ref() != Some(&grant.access_token) && !refusal.again => {
                    return Ok(Some(grant.access_token.clone()));
                }
                Some(_) if refusal.again => {
                    let why = "its server does not take the token that was issued for it a moment ago (HTTP 401)";
                    return Err(ungranted(why));
                }
                None if !plan.machine && challenge.is_none() => return Ok(None),
                None if !plan.machine => return Err(ungranted("it has to be authorized (HTTP 401)")),
                Some(_) | None => {}
            }
            drop(state);
            self.renew(holder)
        };
        renewal.await.map(Some).map_err(|trouble| {
            if token::is_final(&trouble) {
                ungranted(&format!("its authorization is not valid any more: {trouble}"))
            } else {
                FailureKind::NotRenewed(trouble.to_string())
            }
        })
    }
}

/// What a server says with `WWW-Authenticate: Bearer`.
struct Challenge {
    scope: Option<String>,
    error: Option<String>,
}

impl Challenge {
    fn read(refusal: &Refusal, url: &str) -> Option<Self> {
        let text = refusal.challenge.as_deref()?;
        let is_bearer = text.split([',', ' ']).any(|word| word.eq_ignore_ascii_case("bearer"));
        let url = Url::parse(url).ok().filter(|_| is_bearer)?;
        let read = WWWAuthenticateParams::parse(text, &url);
        // What is no scope is not told, nor asked for.
        let scope = read.scope.filter(|scope| scope.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' '));
        Some(Self { scope, error: read.error })
    }
}

/// The command that gives it another authorization.
fn next(holder: &Holder) -> String {
    format!("satellite auth {}", holder.name)
}
