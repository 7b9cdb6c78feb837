//! Renewal of grants: before a token expires and after a server rejected it, one renewal at a time per instance. The
//! clock only schedules renewals; only the server decides whether a token is valid, so a wrong clock does no harm.
//!
//! A renewal runs in a task of its own, because a refresh token can be used only once: the new tokens are stored before
//! their use and are not lost if the caller goes away.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, ready};
use jiff::Timestamp;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::InstanceSpec;
use reqwest::Url;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::error::OAuthError;
use super::flow::PendingFlows;
use super::grant::{self, Grant, GrantStore, OAuthClient};
use super::http::OAuthHttp;
use super::token::{self, TokenGrant, TokenResponse};
use super::{discovery, rules};
use crate::{HttpClients, TokenHolder};
use mcp_satellite_actors::model::settings::OAuthPlan;
use mcp_satellite_files::disk::run_with_timeout;

// Before the next attempt to store a grant.
const STORE_RETRY_DELAY: Duration = Duration::from_secs(30);
// The runtime applies a new mask quickly; a renewal does not wait for longer.
const MASK_UPDATE_TIMEOUT: Duration = Duration::from_secs(2);
// For running renewals and revocations at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

// Called before a new token is used: with the instance, the previous token and the new one.
pub type TokenListener = Box<dyn Fn(InstanceId, Option<Secret>, Secret) -> BoxFuture<'static, ()> + Send + Sync>;

// Running renewal, shared by all callers that wait for it.
pub(super) type SharedRenewal = Shared<BoxFuture<'static, Result<Secret, OAuthError>>>;

#[derive(Clone)]
pub struct Grants(Arc<GrantsInner>);

struct GrantsInner {
    store: Arc<dyn GrantStore>,
    clients: Arc<HttpClients>,
    state: Mutex<GrantState>,
    token_listener: OnceLock<TokenListener>,
    tasks: TaskTracker,
    // The next due time may have changed.
    changed: Notify,
}

#[derive(Default)]
pub(super) struct GrantState {
    instances: HashMap<InstanceId, InstanceGrant>,
    plans: BTreeMap<InstanceId, Arc<OAuthPlan>>,
    pub(super) flows: PendingFlows,
}

#[derive(Default)]
pub(super) struct InstanceGrant {
    // `None` while the instance is not configured.
    holder: Option<TokenHolder>,
    grant: Option<Arc<Grant>>,
    // With the server that it is for: its result is invalid for another one.
    renewal: Option<(TokenHolder, SharedRenewal)>,
    due: Option<Instant>,
    // The grant is not stored yet: time of the next attempt.
    store_at: Option<Instant>,
    // Failed renewals in a row. Until the time in `away`, its error is returned without another request.
    failures: u32,
    backoff: Option<(Instant, OAuthError)>,
    // Last `WWW-Authenticate` header of the server.
    pub(super) challenge: Option<String>,
    // The authorization plan of the instance's last configuration; `None` while the instance is configured.
    last_plan: Option<Arc<OAuthPlan>>,
    // Scopes for lack of which the server rejected requests.
    pub(super) missing_scopes: Vec<String>,
}

impl InstanceGrant {
    // Grants of instances that are not configured are not renewed.
    fn next_due(&self) -> Option<Instant> {
        let due = self.due.filter(|_| self.holder.is_some());
        [due, self.store_at].into_iter().flatten().min()
    }

    pub(super) fn grant(&self, holder: &TokenHolder, plan: &OAuthPlan) -> Option<&Arc<Grant>> {
        self.grant.as_ref().filter(|grant| grant.is_valid_for(&holder.url, plan))
    }

    // Forgets what is known about the server at the previous address.
    fn reset_server_state(&mut self) {
        (self.failures, self.backoff, self.challenge) = (0, None, None);
        self.missing_scopes.clear();
    }
}

impl Grants {
    /// Loads the stored grants, so it blocks on the disk.
    pub fn open(store: Arc<dyn GrantStore>, clients: Arc<HttpClients>) -> Self {
        let instances = grant::load_all(&*store).into_iter().map(|grant| {
            let instance_grant = InstanceGrant {
                due: renewal_due(&grant),
                grant: Some(Arc::new(grant.clone())),
                ..InstanceGrant::default()
            };
            (grant.id, instance_grant)
        });
        let state = GrantState { instances: instances.collect(), ..GrantState::default() };
        Self(Arc::new(GrantsInner {
            store,
            clients,
            state: Mutex::new(state),
            token_listener: OnceLock::new(),
            tasks: TaskTracker::new(),
            changed: Notify::new(),
        }))
    }

    pub fn set_token_listener(&self, listener: TokenListener) {
        // There is only one runtime, and it calls this once at its start.
        let _ = self.0.token_listener.set(listener);
    }

    /// Replaces the list of instances and their authorization plans. If the list is `complete`, grants for servers
    /// other than the configured ones are removed and revoked. Grants of removed instances are kept until
    /// [`Self::erase`]. Returns the instances whose plan has changed.
    pub fn set_instances(
        &self,
        specs: &[InstanceSpec],
        plans: BTreeMap<InstanceId, Arc<OAuthPlan>>,
        complete: bool,
    ) -> Vec<InstanceId> {
        let mut state = self.state();
        let known = state.plans.clone();
        let mut holders: HashMap<_, _> =
            specs.iter().filter_map(TokenHolder::from_spec).map(|of| (of.id.clone(), of)).collect();
        let mut removed = Vec::new();
        for (id, instance_grant) in &mut state.instances {
            let previous = std::mem::replace(&mut instance_grant.holder, holders.remove(id));
            if instance_grant.holder.is_none() && previous.is_some() {
                instance_grant.last_plan = known.get(id).cloned();
            }
            if previous
                .is_some_and(|previous| instance_grant.holder.as_ref().is_some_and(|holder| holder.url != previous.url))
            {
                instance_grant.reset_server_state();
            }
            let is_for = |url: &String| instance_grant.grant.as_ref().is_some_and(|grant| grant.url == *url);
            if complete && instance_grant.holder.as_ref().is_some_and(|holder| !is_for(&holder.url)) {
                removed.extend(instance_grant.grant.take());
                instance_grant.due = None;
            }
        }
        for (id, holder) in holders {
            state.instances.entry(id).or_default().holder = Some(holder);
        }
        state.instances.retain(|_, instance_grant| {
            instance_grant.holder.is_some() || instance_grant.grant.is_some() || instance_grant.renewal.is_some()
        });
        let previous = std::mem::replace(&mut state.plans, plans);
        let GrantState { instances, plans, .. } = &*state;
        let changed = instances.keys().filter(|id| previous.get(*id) != plans.get(*id)).cloned().collect();
        let removed: Vec<_> =
            removed.into_iter().map(|grant| (previous.get(&grant.id).cloned().unwrap_or_default(), grant)).collect();
        drop(state);
        self.remove_and_revoke_all(removed);
        self.0.changed.notify_one();
        changed
    }

    pub fn instances(&self) -> Vec<InstanceId> {
        let state = self.state();
        state
            .instances
            .iter()
            .filter(|(_, instance_grant)| instance_grant.grant.is_some())
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// Removes and revokes the grants of these instances, except those that are configured again.
    pub fn erase(&self, ids: &[InstanceId]) {
        let mut removed = Vec::new();
        {
            let mut state = self.state();
            for id in ids {
                let Some(instance_grant) =
                    state.instances.get_mut(id).filter(|instance_grant| instance_grant.holder.is_none())
                else {
                    continue;
                };
                let plan = instance_grant.last_plan.take().unwrap_or_default();
                removed.extend(instance_grant.grant.take().map(|grant| (plan, grant)));
                instance_grant.due = None;
            }
            state.instances.retain(|_, instance_grant| {
                instance_grant.holder.is_some() || instance_grant.grant.is_some() || instance_grant.renewal.is_some()
            });
        }
        self.remove_and_revoke_all(removed);
    }

    fn remove_and_revoke_all(&self, removed: Vec<(Arc<OAuthPlan>, Arc<Grant>)>) {
        for (plan, grant) in removed {
            let grants = self.clone();
            self.0.tasks.spawn(async move { grants.remove_and_revoke(grant, &plan).await });
        }
    }

    pub fn mask(&self, specs: &mut [InstanceSpec]) {
        let state = self.state();
        for spec in specs {
            let Some(holder) = TokenHolder::from_spec(spec) else { continue };
            if let Some(grant) = state.grant(&holder) {
                spec.mask = spec.mask.with_exchanged(None, grant.access_token.expose());
            }
        }
    }

    // Runs for as long as it is polled.
    pub async fn run(self) {
        loop {
            let changed = self.0.changed.notified();
            let next = self.state().instances.values().filter_map(InstanceGrant::next_due).min();
            match next {
                None => changed.await,
                Some(at) => tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(at.into()) => self.process_due(Instant::now()).await,
                },
            }
        }
    }

    async fn process_due(&self, now: Instant) {
        let (mut renewed, mut to_store) = (Vec::new(), Vec::new());
        for instance_grant in self.state().instances.values_mut() {
            if let Some(holder) = &instance_grant.holder
                && instance_grant.due.take_if(|due| *due <= now).is_some()
            {
                renewed.push(holder.clone());
            }
            if instance_grant.store_at.take_if(|at| *at <= now).is_some() {
                to_store.extend(instance_grant.grant.clone());
            }
        }
        for grant in to_store {
            self.store_grant(&grant).await;
        }
        // Not awaited: each renewal is a task of its own.
        for holder in &renewed {
            drop(self.renew(holder));
        }
    }

    pub async fn shut_down(&self) {
        self.0.tasks.close();
        let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, self.0.tasks.wait()).await;
    }

    pub(super) fn state(&self) -> MutexGuard<'_, GrantState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn oauth_http(&self, url: &str) -> Result<Arc<OAuthHttp>, OAuthError> {
        let url = Url::parse(url)
            .map_err(|error| OAuthError::Unusable(format!("the `url` of the server is not valid: {error}")))?;
        Ok(Arc::new(OAuthHttp::new(Arc::clone(&self.0.clients), &url)))
    }

    // ---- renewal ----

    /// Starts a renewal, or joins a running one.
    pub(super) fn renew(&self, holder: &TokenHolder) -> SharedRenewal {
        let mut state = self.state();
        let plan = state.plan(&holder.id);
        let instance_grant = state.instance_grant(&holder.id);
        if let Some((of, renewal)) = &instance_grant.renewal {
            let (is_for_it, renewal) = (of.url == holder.url, renewal.clone());
            if is_for_it {
                return renewal;
            }
            let (grants, holder) = (self.clone(), holder.clone());
            let after = async move {
                let _ = renewal.await;
                grants.renew(&holder).await
            };
            return after.boxed().shared();
        }
        if let Some((_, error)) = instance_grant.backoff.as_ref().filter(|(retry_at, _)| Instant::now() < *retry_at) {
            return ready(Err(error.clone())).boxed().shared();
        }
        let grant = instance_grant.grant(holder, &plan).cloned();
        let (grants, of) = (self.clone(), holder.clone());
        self.start_renewal(instance_grant, holder, async move {
            let renewed = match &grant {
                _ if plan.machine => grants.request_machine_grant(&of, &plan).await,
                Some(grant) => grants.refresh(grant, &plan).await,
                None => Err(OAuthError::Unusable("no authorization is stored".to_owned())),
            };
            match renewed {
                Ok(renewed) => grants.adopt(renewed, grant.filter(|_| !plan.machine)).await,
                Err(error) => {
                    grants.record_failure(&of, &error);
                    Err(error)
                }
            }
        })
    }

    fn start_renewal(
        &self,
        instance_grant: &mut InstanceGrant,
        holder: &TokenHolder,
        work: impl Future<Output = Result<Secret, OAuthError>> + Send + 'static,
    ) -> SharedRenewal {
        let (grants, id) = (self.clone(), holder.id.clone());
        let task = self.0.tasks.spawn(async move {
            // Ends the renewal, however the task ends.
            let _under_way = RenewalGuard { grants, id };
            work.await
        });
        let fault = |_| {
            Err(OAuthError::Unavailable("an internal error of the satellite interrupted the authorization".to_owned()))
        };
        let renewal = task.map(move |outcome| outcome.unwrap_or_else(fault)).boxed().shared();
        instance_grant.renewal = Some((holder.clone(), renewal.clone()));
        renewal
    }

    /// Calls [`Self::begin`] after the running renewal, whose result would otherwise replace the new one.
    pub(super) async fn start_next_renewal(
        &self,
        holder: &TokenHolder,
        work: impl Future<Output = Result<Secret, OAuthError>> + Send + 'static,
    ) -> SharedRenewal {
        loop {
            let renewal = {
                let mut state = self.state();
                let instance_grant = state.instance_grant(&holder.id);
                match &instance_grant.renewal {
                    Some((_, renewal)) => renewal.clone(),
                    None => return self.start_renewal(instance_grant, holder, work),
                }
            };
            let _ = renewal.await;
        }
    }

    pub(super) fn running_renewal(&self, id: &InstanceId) -> Option<(TokenHolder, SharedRenewal)> {
        self.state().instances.get(id)?.renewal.clone()
    }

    async fn refresh(&self, grant: &Grant, plan: &OAuthPlan) -> Result<Grant, OAuthError> {
        let Some(refresh_token) = &grant.refresh_token else {
            return Err(OAuthError::Unusable("the authorization server has issued no refresh token".to_owned()));
        };
        let (http, client) = (self.oauth_http(&grant.url)?, client_of(grant, plan));
        let ask = TokenGrant::Refresh { token: refresh_token };
        let issued = token::request_token(&http, &grant.authority, &client, &grant.resource, ask).await?;
        let TokenResponse { access_token, refresh_token, lifetime, scopes } = issued;
        Ok(Grant {
            access_token,
            // Without a new refresh token, the old one stays valid.
            refresh_token: refresh_token.or_else(|| grant.refresh_token.clone()),
            lifetime,
            scopes: scopes.unwrap_or_else(|| grant.scopes.clone()),
            received_at: Timestamp::now(),
            ..grant.clone()
        })
    }

    // Client credentials: no person is involved.
    async fn request_machine_grant(&self, holder: &TokenHolder, plan: &OAuthPlan) -> Result<Grant, OAuthError> {
        let challenge =
            self.state().instances.get(&holder.id).and_then(|instance_grant| instance_grant.challenge.clone());
        let http = self.oauth_http(&holder.url)?;
        let found = discovery::discover(&http, &holder.url, challenge.as_deref()).await?;
        found.check_issuer(plan)?;
        let scopes = found.select_scopes(&plan.scopes, &[]).await;
        let client = OAuthClient { id: plan.client_id.clone().unwrap_or_default(), secret: plan.client_secret.clone() };
        let ask = TokenGrant::Machine { scopes: &scopes };
        let issued = token::request_token(&http, &found.authority, &client, &found.resource, ask).await?;
        Ok(new_grant(holder, found.authority, client.without_secret(), found.resource, scopes, issued))
    }

    /// Stores a new grant, masks its token and then uses it. If the server or the client of the instance has changed
    /// meanwhile, or the grant `from` was given up, the new grant is revoked instead.
    pub(super) async fn adopt(&self, grant: Grant, from: Option<Arc<Grant>>) -> Result<Secret, OAuthError> {
        let (id, token, due) = (grant.id.clone(), grant.access_token.clone(), renewal_due(&grant));
        let grant = Arc::new(grant);
        self.store_grant(&grant).await;
        let previous = self
            .state()
            .instances
            .get(&id)
            .and_then(|instance_grant| Some(instance_grant.grant.as_ref()?.access_token.clone()));
        if let Some(listener) = self.0.token_listener.get() {
            // Runs to its end even after the timeout: until then the new token is not masked.
            let notification = self.0.tasks.spawn(listener(id.clone(), previous, token.clone()));
            let _ = tokio::time::timeout(MASK_UPDATE_TIMEOUT, notification).await;
        }
        let (is_wanted, plan) = {
            let mut state = self.state();
            let plan = state.plan(&id);
            let instance_grant = state.instance_grant(&id);
            let is_current =
                from.is_none_or(|from| instance_grant.grant.as_ref().is_some_and(|grant| Arc::ptr_eq(grant, &from)));
            let serves = instance_grant.holder.as_ref().is_some_and(|holder| grant.is_valid_for(&holder.url, &plan));
            let is_wanted = is_current && serves;
            if is_wanted {
                (instance_grant.failures, instance_grant.backoff) = (0, None);
                instance_grant.missing_scopes.clear();
                (instance_grant.grant, instance_grant.due) = (Some(Arc::clone(&grant)), due);
            } else {
                instance_grant.grant.take_if(|of| of.url == grant.url);
            }
            (is_wanted, plan)
        };
        self.0.changed.notify_one();
        if !is_wanted {
            self.remove_and_revoke(grant, &plan).await;
            let why = "the server or the OAuth client has changed in the meantime";
            return Err(OAuthError::Unavailable(why.to_owned()));
        }
        tracing::info!(instance = %id, issuer = grant.authority.issuer, scopes = grant.scopes.join(" "), "authorized");
        Ok(token)
    }

    async fn store_grant(&self, grant: &Arc<Grant>) {
        let (store, stored_grant) = (self.0.store.clone(), Arc::clone(grant));
        // A disk that hangs must not delay a token that is needed now.
        let keeping = run_with_timeout(move || grant::save(&*store, &stored_grant)).await;
        let keeping = keeping.unwrap_or_else(|| Err(io::Error::other("the disk does not answer")));
        let keep_at = keeping.as_ref().err().map(|_| Instant::now() + STORE_RETRY_DELAY);
        if let Err(error) = keeping {
            // The previous token is already spent, so the new one is used although it is not stored.
            tracing::error!(instance = %grant.id, %error, "cannot store an authorization; a restart would lose it");
        }
        self.state().instance_grant(&grant.id).store_at = keep_at;
    }

    fn record_failure(&self, holder: &TokenHolder, error: &OAuthError) {
        let name = &holder.name;
        let mut state = self.state();
        let is_for =
            |instance_grant: &&mut InstanceGrant| instance_grant.holder.as_ref().is_some_and(|of| of.url == holder.url);
        let Some(instance_grant) = state.instances.get_mut(&holder.id).filter(is_for) else { return };
        if token::is_final(error) {
            tracing::warn!(
                instance = %name,
                why = %error,
                "cannot renew an authorization; authorize the server with `satellite auth`"
            );
            return;
        }
        instance_grant.failures += 1;
        let retry_at = Instant::now() + rules::BACKOFF.delay(instance_grant.failures);
        tracing::warn!(instance = %name, why = %error, "cannot renew an authorization now; trying again");
        instance_grant.backoff = Some((retry_at, error.clone()));
        instance_grant.due = instance_grant.grant.is_some().then_some(retry_at);
        drop(state);
        self.0.changed.notify_one();
    }

    // ---- the end of a grant ----

    /// Removes and revokes the grant of an instance. Returns true if there was one, and an error if it could not be
    /// revoked.
    pub async fn revoke_grant(&self, id: &InstanceId) -> Result<bool, OAuthError> {
        while let Some((_, renewal)) = self.running_renewal(id) {
            let _ = renewal.await;
        }
        let (grant, plan) = {
            let mut state = self.state();
            let plan = state.plan(id);
            let Some(instance_grant) = state.instances.get_mut(id) else { return Ok(false) };
            instance_grant.due = None;
            (instance_grant.grant.take(), plan)
        };
        let Some(grant) = grant else { return Ok(false) };
        self.remove(id).await;
        self.revoke(&grant, &plan).await.map(|()| true)
    }

    async fn remove_and_revoke(&self, grant: Arc<Grant>, plan: &OAuthPlan) {
        self.remove(&grant.id).await;
        match self.revoke(&grant, plan).await {
            Ok(()) => tracing::info!(instance = %grant.id, "an authorization that is no longer needed was revoked"),
            Err(error) => {
                tracing::warn!(
                    instance = %grant.id,
                    why = %error,
                    "an authorization was removed and could not be revoked"
                );
            }
        }
    }

    async fn remove(&self, id: &InstanceId) {
        let (store, of) = (self.0.store.clone(), id.clone());
        let removed = run_with_timeout(move || store.delete(&of)).await;
        let removed = removed.unwrap_or_else(|| Err(io::Error::other("the disk does not answer")));
        if let Err(error) = removed {
            tracing::error!(instance = %id, %error, "cannot remove an authorization from the data directory");
        }
    }

    async fn revoke(&self, grant: &Grant, plan: &OAuthPlan) -> Result<(), OAuthError> {
        let (http, client) = (self.oauth_http(&grant.url)?, client_of(grant, plan));
        let tokens = [grant.refresh_token.as_ref(), Some(&grant.access_token)];
        for token in tokens.into_iter().flatten() {
            token::revoke(&http, &grant.authority, &client, token).await?;
        }
        Ok(())
    }
}

impl GrantState {
    pub(super) fn plan(&self, id: &InstanceId) -> Arc<OAuthPlan> {
        self.plans.get(id).cloned().unwrap_or_default()
    }

    pub(super) fn grant(&self, holder: &TokenHolder) -> Option<&Arc<Grant>> {
        self.instances.get(&holder.id)?.grant(holder, &self.plan(&holder.id))
    }

    pub(super) fn instance_grant(&mut self, id: &InstanceId) -> &mut InstanceGrant {
        self.instances.entry(id.clone()).or_default()
    }
}

// Guard that clears the running renewal on drop.
struct RenewalGuard {
    grants: Grants,
    id: InstanceId,
}

impl Drop for RenewalGuard {
    fn drop(&mut self) {
        if let Some(instance_grant) = self.grants.state().instances.get_mut(&self.id) {
            instance_grant.renewal = None;
        }
    }
}

// Uses the secret that is configured now.
fn client_of(grant: &Grant, plan: &OAuthPlan) -> OAuthClient {
    let is_for_it = plan.client_id.as_ref() == Some(&grant.client.id) && grant.authority.has_planned_issuer(plan);
    let configured = plan.client_secret.clone().filter(|_| is_for_it);
    OAuthClient { id: grant.client.id.clone(), secret: configured.or_else(|| grant.client.secret.clone()) }
}

pub(super) fn new_grant(
    holder: &TokenHolder,
    authority: grant::AuthorizationServer,
    client: OAuthClient,
    resource: String,
    requested_scopes: Vec<String>,
    issued: TokenResponse,
) -> Grant {
    Grant {
        id: holder.id.clone(),
        url: holder.url.clone(),
        resource,
        authority,
        client,
        scopes: issued.scopes.unwrap_or(requested_scopes),
        access_token: issued.access_token,
        refresh_token: issued.refresh_token,
        received_at: Timestamp::now(),
        lifetime: issued.lifetime,
    }
}

// Without a known lifetime, a token is renewed only after a rejection.
fn renewal_due(grant: &Grant) -> Option<Instant> {
    // Each `RandomState` has other keys, which serve as randomness.
    let chance = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    let after = rules::renewal_age(grant.lifetime?, chance);
    Instant::now().checked_add(rules::time_until_renewal(after, Timestamp::now().duration_since(grant.received_at)))
}
