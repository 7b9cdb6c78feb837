//! Satellites of the backend, requested when a person looks at them.
//!
//! Failures are not part of the connection's status: an older backend does not know the request. A rejected key is
//! noticed by the next poll or heartbeat.

use std::sync::Arc;
use std::time::Duration;

use reqwest::StatusCode;
use tokio::time::Instant;

use super::calls::{BackendCallError, BackendClient};
use super::key::SatelliteKey;
use crate::wire::FleetList;

// Pages that are refreshed share a response, or an error.
const AGE_MAX: Duration = Duration::from_secs(2);

/// Reason why the satellites of the backend are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    #[error("this satellite is not registered at the backend yet; `satellite status` shows the reason")]
    NotRegistered,
    #[error("the backend does not know this request: {0}; a newer `satellite backend` does")]
    NotSupported(String),
    #[error("{0}; `satellite status` shows the state of the connection")]
    Failed(String),
}

impl From<BackendCallError> for FleetError {
    fn from(error: BackendCallError) -> Self {
        match error.status() {
            Some(StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED) => Self::NotSupported(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

type FleetResult = Result<Arc<FleetList>, FleetError>;

/// The last response. The lock is held during a request, so that there is only one at a time.
#[derive(Debug, Default)]
pub(super) struct FleetCache(tokio::sync::Mutex<Option<(Instant, FleetResult)>>);

impl FleetCache {
    /// Returns the last response, or requests another one.
    pub(super) async fn fetch(&self, backend: &BackendClient, key: Option<Arc<SatelliteKey>>) -> FleetResult {
        let mut last = self.0.lock().await;
        if let Some((at, result)) = &*last
            && at.elapsed() < AGE_MAX
        {
            return result.clone();
        }
        let result = match key {
            Some(key) => backend.fetch_fleet(&key).await.map(Arc::new).map_err(FleetError::from),
            None => Err(FleetError::NotRegistered),
        };
        *last = Some((Instant::now(), result.clone()));
        result
    }
}
