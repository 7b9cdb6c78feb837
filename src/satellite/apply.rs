//! Application of configurations.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{EarlierState, InstallOutcome};
use mcp_satellite_files::disk::run_with_timeout;
use tokio::sync::OwnedMutexGuard;

use super::RunningSatellite;
use super::settings::StartupSettings;
use crate::active_configuration::{AcceptedReload, ActiveConfiguration, ConfigSummary, RejectedReload};
use crate::backend::link::rules::InstanceScope;
use crate::backend::link::{BackendLink, SpecsById};
use crate::config::{ConfigErrors, Plan};
use crate::console::api::{RejectedConfiguration, rfc3339};
use crate::telemetry::withheld_variables;
use mcp_satellite_store::identity::ConfigHash;

/// Number of instances from which on a configuration that removes more than half of them is rejected as a likely
/// mistake.
const REMOVAL_GUARD_MIN: usize = 4;

pub(super) const ACCEPT_HINT: &str = "if this is intended, run `satellite reload --accept`";

pub(super) struct ChangeOrigin {
    pub(super) since: Instant,
    /// Hash of the backend's document.
    pub(super) hash: Option<String>,
}

impl RunningSatellite {
    /// Applies another configuration. Access is changed first, so that no client that loses access sees new instances.
    /// An error means that nothing changed and contains the reason, also that of `files`. If the files conflict with
    /// the backend's document, they wait for another document. A configuration that removes most instances is rejected
    /// unless `accept` is true.
    pub(crate) async fn apply(
        &self,
        files: Result<Plan, String>,
        accept: bool,
    ) -> Result<AcceptedReload, RejectedReload> {
        let outcome = Box::pin(self.try_apply(files, accept)).await;
        let mut rejected = self.console.rejected.lock().unwrap_or_else(PoisonError::into_inner);
        *rejected = outcome.as_ref().err().map(|RejectedReload { message, .. }| {
            let same = rejected.take().filter(|before| before.errors == *message);
            same.unwrap_or_else(|| RejectedConfiguration { since: rfc3339(Timestamp::now()), errors: message.clone() })
        });
        drop(rejected);
        outcome
    }

    async fn try_apply(&self, files: Result<Plan, String>, accept: bool) -> Result<AcceptedReload, RejectedReload> {
        let since = Instant::now();
        let mut applied = self.applied.clone().lock_owned().await;
        applied.waiting = None;
        let files = files?;
        let backend_url = |plan: &Plan| plan.backend.as_ref().map(|backend| backend.url.clone());
        if backend_url(&files) != backend_url(&applied.files) {
            return Err("[backend] has changed; restart the satellite to apply it".to_owned().into());
        }
        let (plan, document) = (files.clone(), applied.document.clone());
        let joining = tokio::task::spawn_blocking(move || match &document {
            Some(document) => plan.with_document(document),
            None => Ok(plan),
        });
        let plan = match joining.await.unwrap_or_else(|error| Err(ConfigErrors::internal_error(&error))) {
            Ok(plan) => plan,
            Err(errors) => {
                applied.waiting = Some(files);
                let errors = errors.to_single_line();
                return Err(format!("the files conflict with the backend's configuration: {errors}").into());
            }
        };
        if accept {
            applied.accepted = applied.rejected.take();
        } else if let Some(message) = self.check_removals(&plan, None) {
            return Err(RejectedReload { error_type: "removes_most", message: format!("{message}; {ACCEPT_HINT}") });
        }
        self.commit_files(files, &mut applied);
        let (servers, teams) = (plan.instances.len(), plan.teams);
        self.apply_plan(plan, applied, ChangeOrigin { since, hash: None }).await;
        // A document that conflicted with the previous files may fit these.
        self.link.iter().for_each(BackendLink::refetch_config);
        let (endpoint_problem, console_problem) = (self.endpoint.problem(), self.http.problem());
        Ok(AcceptedReload { servers, teams, endpoint_problem, console_problem })
    }

    /// Returns an error message if the plan removes more than half of at least [`REMOVAL_GUARD_MIN`] instances. Those
    /// that `expected` admits are not counted, because their removal was requested by name.
    pub(super) fn check_removals(&self, plan: &Plan, expected: Option<&InstanceScope>) -> Option<String> {
        let wanted = plan.ids();
        let installed = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_expected = |id: &InstanceId| {
            expected.is_some_and(|scope| scope.matches(id.installation.as_str(), id.team.as_str(), id.user.as_str()))
        };
        let all = installed.len();
        let removed = installed.iter().filter(|id| !wanted.contains(*id) && !is_expected(id)).count();
        let most = all >= REMOVAL_GUARD_MIN && removed * 2 > all;
        most.then(|| format!("the configuration removes {removed} of {all} servers, so nothing was changed"))
    }

    pub(super) fn commit_files(&self, files: Plan, applied: &mut ActiveConfiguration) {
        self.update_registration_token(&files);
        applied.files = files;
    }

    pub(super) fn update_registration_token(&self, plan: &Plan) {
        if let (Some(link), Some(backend)) = (&self.link, &plan.backend) {
            link.set_registration_token(backend);
        }
    }

    pub(super) async fn apply_plan(
        &self,
        plan: Plan,
        mut applied: OwnedMutexGuard<ActiveConfiguration>,
        change: ChangeOrigin,
    ) -> SpecsById {
        // The new generation makes a check of credentials that began earlier discard its result: it may contain revoked
        // tokens.
        applied.generation += 1;
        self.endpoint.apply(plan.gateway.clone(), &self.runtime).await;
        self.http.apply(&plan.name, &plan.console, &plan.gateway, &self.endpoint).await;
        self.install(plan, applied, change).await
    }

    /// Changes the instances to those of `plan`; unchanged ones are not touched. `applied` is locked until all
    /// instances are installed, but not while removed ones shut down.
    pub(super) async fn install(
        &self,
        plan: Plan,
        mut applied: OwnedMutexGuard<ActiveConfiguration>,
        change: ChangeOrigin,
    ) -> SpecsById {
        self.warn_about(&plan);
        self.console.members.set(&plan.gateway.users);
        self.connector.withhold(plan.secret_variables.into_iter().chain(withheld_variables()));
        let (requiring, mut specs) = self.users.values.merge(plan.instances);
        let servers: HashSet<_> = specs.iter().map(|spec| (&spec.id.team, &spec.id.installation)).collect();
        let (server_count, teams_count) = (servers.len(), plan.teams);
        let summary = ConfigSummary { config_hash: ConfigHash::from_specs(&specs), server_count, teams_count };
        let specs_by_id: SpecsById = specs.iter().map(|spec| (spec.id.clone(), spec.clone())).collect();
        let wanted: HashSet<InstanceId> = specs_by_id.keys().cloned().collect();
        // Before the backend has sent a document, the known instances are incomplete.
        let is_complete = applied.files.backend.is_none() || applied.document.is_some();
        // At the start a plan without any instance is more likely a mistake.
        let erases_removed = is_complete && !(applied.generation == 0 && wanted.is_empty());
        if erases_removed {
            self.schedule_erasure(wanted.clone(), plan.retention).await;
        }
        let changed_oauth = self.users.grants.set_instances(&specs, plan.oauth, erases_removed);
        self.users.grants.mask(&mut specs);
        let previous =
            std::mem::replace(&mut *self.installed.lock().unwrap_or_else(PoisonError::into_inner), wanted.clone());
        let earlier = self.load_earlier_states(&specs, applied.generation == 0, is_complete).await;
        // New instances do not wait for the grace period of removed ones, nor do removed ones wait for each other.
        let removals = previous.difference(&wanted).map(|id| self.uninstall_instance(id));
        let installs = async {
            (applied.origin, applied.summary, applied.requiring) = (plan.origin, summary, requiring);
            let changed = self.install_instances(specs, earlier).await;
            drop(applied);
            changed
        };
        let (removed, changed) = futures::join!(futures::future::join_all(removals), installs);
        // Without retention the data is erased before the change is reported.
        self.users.eraser.erase_due().await;
        // Wait until all instances can be found by name before the change is reported.
        for id in &wanted {
            self.runtime.wait_for(id, |_| true).await;
        }
        // Also wait for the changed instances.
        self.runtime.sync_snapshot().await;
        self.retry_authorization(changed_oauth);
        self.report_applied(summary, change, changed || removed.contains(&true));
        specs_by_id
    }

    fn warn_about(&self, plan: &Plan) {
        for warning in &plan.warnings {
            tracing::warn!(%warning, "the configuration has a warning");
        }
        if StartupSettings::from_plan(plan) != self.settings {
            tracing::warn!(
                "[satellite], [backend], [journal], [events], [telemetry], [policy.team], [policy.memory] or \
                 [policy.start] has changed; restart the satellite to apply it"
            );
        }
    }

    async fn schedule_erasure(&self, configured: HashSet<InstanceId>, retention: Duration) {
        let eraser = self.users.eraser.clone();
        // After a timeout the data is listed later.
        let _ = run_with_timeout(move || eraser.set_configured(&configured, retention)).await;
    }

    /// Returns what is stored about earlier runs of the instances. Catalogues are not cached before the configuration
    /// is complete.
    async fn load_earlier_states(
        &self,
        specs: &[InstanceSpec],
        is_start: bool,
        is_complete: bool,
    ) -> HashMap<InstanceId, EarlierState> {
        let specs: Arc<[InstanceSpec]> = specs.into();
        let (store, instances) = (self.storage.memos.clone(), specs.clone());
        // An error means that the task panicked; then no memo is recalled.
        let memos = tokio::task::spawn_blocking(move || store.take_memos(&instances)).await.unwrap_or_default();
        let catalogues = self.storage.catalogues.clone().filter(|_| is_complete);
        let instances = specs.clone();
        let track = move || catalogues.map(|catalogues| catalogues.track_all(&instances)).unwrap_or_default();
        // Without cached catalogues servers are started to be discovered. A start waits for the cache; a reload does
        // not wait for a hanging disk.
        let catalogues =
            if is_start { tokio::task::spawn_blocking(track).await.ok() } else { run_with_timeout(track).await };
        let (mut memos, mut catalogues) = (memos, catalogues.unwrap_or_default());
        let mut earlier = |id: &InstanceId| EarlierState { memo: memos.remove(id), catalogue: catalogues.remove(id) };
        specs.iter().map(|spec| &spec.id).map(|id| (id.clone(), earlier(id))).collect()
    }

    /// Returns true if any instance has changed.
    async fn install_instances(
        &self,
        specs: Vec<InstanceSpec>,
        mut earlier: HashMap<InstanceId, EarlierState>,
    ) -> bool {
        let mut changed = false;
        for spec in specs {
            let name = spec.name.clone();
            let earlier = earlier.remove(&spec.id).unwrap_or_default();
            match self.runtime.install_with_state(spec, earlier).await {
                Ok(installed) => changed |= installed != InstallOutcome::Unchanged,
                Err(error) => tracing::error!(instance = %name, %error, "cannot install an instance"),
            }
        }
        changed
    }

    async fn uninstall_instance(&self, id: &InstanceId) -> bool {
        let removed = self.runtime.uninstall(id).await;
        match &removed {
            Ok(_) => self.endpoint.remove_instance(id),
            Err(error) => tracing::error!(instance = %id, %error, "cannot uninstall an instance"),
        }
        removed.is_ok()
    }

    /// Reconnects those instances that wait for authorization: the way to obtain it has changed.
    pub(super) fn retry_authorization(&self, ids: Vec<InstanceId>) {
        for id in ids {
            if self.runtime.status(&id).is_none_or(|view| view.status != Status::RequiresReauth) {
                continue;
            }
            let runtime = self.runtime.clone();
            // Not awaited: the status of the instance shows the outcome.
            drop(tokio::spawn(async move { runtime.reconnect(&id).await }));
        }
    }

    fn report_applied(&self, summary: ConfigSummary, change: ChangeOrigin, change_detected: bool) {
        let ConfigSummary { config_hash, server_count, teams_count } = summary;
        let config_hash = change.hash.unwrap_or_else(|| config_hash.to_string());
        tracing::info!(config_hash, server_count, teams_count, change_detected, "configuration applied");
        self.runtime.emitter().emit(summary.refreshed_event(change.since, Some(config_hash), change_detected));
    }

    /// Reports a configuration that cannot be used. The current one stays in effect, and a rejected document of the
    /// backend is tried again.
    pub(crate) async fn report_rejection(&self, rejected: RejectedReload) {
        let RejectedReload { error_type, message: errors } = rejected;
        self.link.iter().for_each(BackendLink::refetch_config);
        let config_hash = self.applied.lock().await.summary.config_hash;
        tracing::error!(
            errors,
            %config_hash,
            "configuration rejected; the previous one stays in use"
        );
        self.runtime.emitter().emit(Event::ConfigError {
            error_type: error_type.to_owned(),
            error_message: errors,
            status_code: None,
            retry_in: None,
        });
    }
}
