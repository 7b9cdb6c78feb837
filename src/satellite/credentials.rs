//! Changes of credentials without a reload.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceConfig, InstanceSpec, ServerTarget};
use mcp_satellite_remote::oauth::TokenListener;

use super::RunningSatellite;
use crate::active_configuration::ActiveConfiguration;
use crate::config::Plan;

/// Interval between checks of the files with credentials. A change is read at the check after the one that sees it.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl RunningSatellite {
    /// Watches the files that contain credentials and applies changed ones to remote servers and client tokens. Never
    /// returns.
    pub(crate) async fn watch_credentials(&self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            let (generation, mut origin) = {
                let applied = self.applied.lock().await;
                if !applied.origin.has_secret_files() {
                    continue;
                }
                (applied.generation, applied.origin.clone())
            };
            let polling = tokio::task::spawn_blocking(move || {
                let poll = origin.poll_files();
                (origin, poll)
            });
            // An error means that the task panicked; the next check tries again.
            let Ok((origin, poll)) = polling.await else { continue };
            let mut applied = self.applied.lock().await;
            if applied.generation != generation {
                continue; // A reload has read the files meanwhile.
            }
            applied.origin = origin;
            for (file, why) in poll.unusable {
                let file = file.display();
                tracing::warn!(%file, why, "cannot read a credential again; the previous content stays in use");
            }
            if let Some(plan) = poll.plan {
                self.renew_credentials(plan, &poll.changed, &mut applied).await;
            }
        }
    }

    /// Applies the headers and query parameters of `plan` to remote servers. Changed credentials alone restart no
    /// process; that requires a reload.
    async fn renew_credentials(&self, plan: Plan, files: &[PathBuf], applied: &mut ActiveConfiguration) {
        let since = Instant::now();
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let files = files.join(", ");
        self.update_registration_token(&plan);
        let is_remote = |config: &InstanceConfig| matches!(config.target, ServerTarget::Remote { .. });
        let (requiring, mut specs) = self.users.values.merge(plan.instances.into_iter().filter(is_remote));
        applied.requiring.extend(requiring);
        let changed_oauth = self.users.grants.set_instances(&specs, plan.oauth, false);
        let mut servers = changed_oauth.len();
        self.users.grants.mask(&mut specs);
        self.retry_authorization(changed_oauth);
        for spec in specs {
            let Some(view) = self.runtime.status(&spec.id) else { continue };
            let InstanceSpec { headers, query, mask, .. } = spec;
            let renewed = InstanceSpec { headers, query, mask, ..(*view.spec).clone() };
            if renewed == *view.spec {
                continue;
            }
            match self.runtime.update(renewed).await {
                Ok(_) => servers += 1,
                Err(error) => tracing::error!(instance = %view.spec.name, %error, "cannot renew credentials"),
            }
        }
        let gateway = plan.gateway.clone();
        let is_changed = self.endpoint.apply_users(plan.gateway).await;
        self.http.apply(&plan.name, &plan.console, &gateway, &self.endpoint).await;
        if is_changed {
            tracing::info!(files, "tokens of clients renewed");
        } else if servers == 0 {
            tracing::info!(files, "no remote server uses the changed file; a reload (SIGHUP) applies it");
        }
        if servers > 0 {
            tracing::info!(files, servers, "credentials of remote servers renewed");
            self.runtime.emitter().emit(applied.summary.refreshed_event(since, None, true));
        }
    }
}

/// Returns a callback that makes the runtime mask each new token of an instance in its server's output.
pub(super) fn token_mask_listener(
    runtime: &RuntimeHandle,
    applied: &Arc<tokio::sync::Mutex<ActiveConfiguration>>,
) -> TokenListener {
    let (runtime, applied) = (runtime.clone(), applied.clone());
    Box::new(move |id, before, after| {
        let (runtime, applied) = (runtime.clone(), applied.clone());
        async move {
            let (after, updated) = {
                // Locked, so that an older specification does not follow a configuration change.
                let _applied = applied.lock().await;
                let Some(view) = runtime.status(&id) else { return };
                let mask = view.spec.mask.with_exchanged(before.as_ref().map(Secret::expose), after.expose());
                let after = InstanceSpec { mask, ..(*view.spec).clone() };
                (after.clone(), runtime.update(after).await)
            };
            match updated {
                // Wait until the team has it: until then the server's output is masked with the old token.
                Ok(_) => drop(runtime.wait_for(&id, |view| *view.spec == after).await),
                Err(error) => tracing::error!(instance = %id, %error, "cannot mask a new token in the server's output"),
            }
        }
        .boxed()
    })
}
