//! Changes of users' values (`satellite configure`) in a running satellite: stored first, then applied to the instance.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::{ControlError, InstallOutcome, RuntimeHandle};

use crate::active_configuration::ActiveConfiguration;
use mcp_satellite_store::catalogue_cache::CatalogueCache;
use mcp_satellite_store::state::DATABASE;
use mcp_satellite_store::values::{RequiredValue, UserValues, ValueChange, ValueError};

const STATUS_UPDATE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigureError {
    #[error(transparent)]
    Value(#[from] ValueError),
    #[error(transparent)]
    Control(#[from] ControlError),
}

#[derive(Clone)]
pub(crate) struct ValueConfigurer {
    pub(crate) runtime: RuntimeHandle,
    pub(crate) values: Arc<UserValues>,
    pub(crate) catalogues: Option<Arc<CatalogueCache>>,
    pub(crate) applied: Arc<tokio::sync::Mutex<ActiveConfiguration>>,
}

impl ValueConfigurer {
    /// Applies a change. Returns the required values and their sources, and the reason if the change is not stored yet.
    /// The change completes even if the future is dropped, so that stored values are always applied.
    pub(crate) async fn configure(
        &self,
        id: InstanceId,
        change: ValueChange,
    ) -> Result<(Vec<RequiredValue>, Option<String>), ConfigureError> {
        let this = self.clone();
        let task = tokio::spawn(async move { this.change(id, change).await });
        task.await.unwrap_or_else(|error| Err(ValueError::Storage(error.to_string()).into()))
    }

    async fn change(
        &self,
        id: InstanceId,
        change: ValueChange,
    ) -> Result<(Vec<RequiredValue>, Option<String>), ConfigureError> {
        let started = Instant::now();
        // The lock keeps a reload from changing the configuration meanwhile.
        let mut applied = self.applied.lock().await;
        let Some(config) = applied.requiring.get(&id).cloned() else {
            if change.set.is_empty() && change.unset.is_empty() {
                return Ok((Vec::new(), None));
            }
            return Err(ValueError::BadInput("the configuration requires no value of the user".to_owned()).into());
        };
        let (values, catalogues) = (self.values.clone(), self.catalogues.clone());
        let storing = tokio::task::spawn_blocking(move || {
            let (changed, not_saved) = values.change(&config, &change)?;
            let keys = |keys: Vec<&String>| keys.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            // `UserValues::change` has rejected keys that are not required, so these can be logged.
            let (given, taken_back) = (keys(change.set.keys().collect()), keys(change.unset.iter().collect()));
            Ok::<_, ValueError>((changed, not_saved, given, taken_back, values.required_values(&config)))
        });
        let stored = storing.await.map_err(|error| ValueError::Storage(error.to_string()))?;
        let ((before, after), not_saved, given, taken_back, required) = stored?;
        let not_durable = not_saved.map(|why| format!("`{DATABASE}` is not written: {why}"));
        if before == after {
            return Ok((required, not_durable));
        }
        if let Some(catalogues) = catalogues {
            let spec = after.clone();
            // Not waited for: until it is done, no catalogue is stored under the new configuration.
            drop(tokio::task::spawn_blocking(move || catalogues.track(&spec)));
        }
        let installed = self.runtime.update(after.clone()).await?;
        let config_hash = applied.summary.config_hash.exchange(&before, &after);
        applied.summary.config_hash = config_hash;
        tracing::info!(instance = %after.name, given, taken_back, %config_hash, "applied the values of a user");
        let changed = installed != InstallOutcome::Unchanged;
        self.runtime.emitter().emit(applied.summary.refreshed_event(started, None, changed));
        drop(applied);
        // Wait until the change is visible. An instance with a rolling update runs with its old values until the new
        // process is up.
        let _ =
            tokio::time::timeout(STATUS_UPDATE_TIMEOUT, self.runtime.wait_for(&id, |view| *view.spec == after)).await;
        Ok((required, not_durable))
    }
}
