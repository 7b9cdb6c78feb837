//! Handling of rejected tokens: obtain another token, or report that a person must act.

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::secret::{Secret, SecretMask};
use reqwest::Url;
use rmcp::transport::auth::WWWAuthenticateParams;

use super::grants::Grants;
use super::{rules, token};
use crate::{TokenHolder, TokenRefusal, TokenSource};

impl TokenSource for Grants {
    fn token(&self, holder: &TokenHolder) -> Option<Secret> {
        self.state().grant(holder).map(|grant| grant.access_token.clone())
    }

    fn replacement_token(
        &self,
        holder: &TokenHolder,
        refusal: TokenRefusal,
    ) -> BoxFuture<'static, Result<Option<Secret>, FailureKind>> {
        let (grants, holder) = (self.clone(), holder.clone());
        async move {
            match refusal.status {
                403 => grants.handle_forbidden(&holder, &refusal),
                _ => grants.handle_unauthorized(&holder, refusal).await,
            }
        }
        .boxed()
    }
}

impl Grants {
    // A later authorization may include the missing scopes, so they are remembered.
    fn handle_forbidden(&self, holder: &TokenHolder, refusal: &TokenRefusal) -> Result<Option<Secret>, FailureKind> {
        let Some(challenge) = BearerChallenge::read(refusal, &holder.url) else { return Ok(None) };
        if challenge.error.as_deref() != Some("insufficient_scope") {
            return Ok(None);
        }
        let mut state = self.state();
        let plan = state.plan(&holder.id);
        let instance_grant = state.instance_grant(&holder.id);
        // The challenge may echo one of these secrets.
        let grant = instance_grant.grant(holder, &plan);
        let renewed_with = grant.and_then(|grant| grant.refresh_token.as_ref());
        let secrets = [refusal.token.as_ref(), grant.map(|grant| &grant.access_token), renewed_with];
        let mask = SecretMask::new(secrets.into_iter().flatten().map(Secret::expose));
        let required_scopes =
            rules::parse_scopes(challenge.scope.as_deref().unwrap_or_default(), |scope| mask.apply(scope) == scope);
        instance_grant.missing_scopes = rules::union(instance_grant.missing_scopes.iter().chain(&required_scopes));
        instance_grant.missing_scopes.truncate(rules::SCOPES_MAX);
        let scopes = required_scopes.join(" ");
        if refusal.is_first_request {
            // No person can consent for a machine client; the operator sets its scopes in the configuration.
            let hint = if plan.machine { "; add them to `scopes` of `oauth`" } else { "" };
            let why = format!("the authorization lacks the scopes `{scopes}` (HTTP 403){hint}");
            return Err(FailureKind::Ungranted { why });
        }
        Err(FailureKind::InsufficientScope { scopes })
    }

    async fn handle_unauthorized(
        &self,
        holder: &TokenHolder,
        refusal: TokenRefusal,
    ) -> Result<Option<Secret>, FailureKind> {
        let ungranted = |why: &str| FailureKind::Ungranted { why: why.to_owned() };
        let challenge = BearerChallenge::read(&refusal, &holder.url);
        // A person may just be authorizing the instance.
        let joined = self.running_renewal(&holder.id).filter(|(of, _)| of.url == holder.url);
        let renewal = if let Some((_, renewal)) = joined {
            renewal
        } else {
            let mut state = self.state();
            let plan = state.plan(&holder.id);
            let instance_grant = state.instance_grant(&holder.id);
            if challenge.is_some() {
                instance_grant.challenge.clone_from(&refusal.challenge);
            }
            match instance_grant.grant(holder, &plan) {
                Some(grant) if refusal.token.as_ref() != Some(&grant.access_token) && !refusal.is_retry => {
                    return Ok(Some(grant.access_token.clone()));
                }
                Some(_) if refusal.is_retry => {
                    let why = "the server rejects a token that was issued a moment ago (HTTP 401)";
                    return Err(ungranted(why));
                }
                None if !plan.machine && challenge.is_none() => return Ok(None),
                None if !plan.machine => return Err(ungranted("authorization required (HTTP 401)")),
                Some(_) | None => {}
            }
            drop(state);
            self.renew(holder)
        };
        renewal.await.map(Some).map_err(|error| {
            if token::is_final(&error) {
                ungranted(&format!("the authorization is no longer valid: {error}"))
            } else {
                FailureKind::NotRenewed(error.to_string())
            }
        })
    }
}

// Parameters of `WWW-Authenticate: Bearer`.
struct BearerChallenge {
    scope: Option<String>,
    error: Option<String>,
}

impl BearerChallenge {
    fn read(refusal: &TokenRefusal, url: &str) -> Option<Self> {
        let text = refusal.challenge.as_deref()?;
        let is_bearer = text.split([',', ' ']).any(|word| word.eq_ignore_ascii_case("bearer"));
        let url = Url::parse(url).ok().filter(|_| is_bearer)?;
        let read = WWWAuthenticateParams::parse(text, &url);
        Some(Self { scope: read.scope, error: read.error })
    }
}
