//! Executes authorization requests: in the running satellite of a data directory, or in this process if none is
//! running.

use std::sync::Arc;

use mcp_satellite_actors::model::spec::InstanceSpec;

use super::super::check::ConfigSources;
use super::super::{BAD_INPUT, CommandFailure, FAILED};
use crate::connect::remote::HttpClients;
use crate::console::api::{
    AuthFinishRequest, AuthFlow, AuthRequest, AuthRevokeResult, InstanceSelector, InstanceStatus,
};
use crate::console::auth::{flow_completion, flow_reply, revoke_reply};
use crate::console::client::{ClientError, ConsoleClient};
use crate::console::find::find;
use crate::grants;
use crate::satellite::lock::{DataDirLock, DataDirLockError};
use crate::state::StateDb;
use mcp_satellite_files::known_dirs::DataDirLocation;
use mcp_satellite_remote::oauth::{FlowRequest, Grants, OAuthError};
use mcp_satellite_store::values::UserValues;

pub(super) enum AuthBackend {
    Running(ConsoleClient),
    /// No satellite is running; this process has locked the data directory.
    Offline(Box<OfflineAuth>),
}

pub(super) struct OfflineAuth {
    grants: Grants,
    specs: Vec<InstanceSpec>,
    _lock: DataDirLock,
}

impl AuthBackend {
    /// Connects to the satellite that `client` reaches. If none is running and `sources` are given, this process locks
    /// the data directory and does the work.
    pub(super) async fn open(
        client: ConsoleClient,
        sources: &ConfigSources,
        location: &DataDirLocation,
    ) -> Result<Self, CommandFailure> {
        let anything = InstanceSelector { server: String::new(), team: None, user: None };
        match client.post::<InstanceStatus>("/v1/resolve", &anything).await {
            Err(error @ ClientError::NotRunning { .. }) => {
                if !sources.has_any() {
                    let failed = CommandFailure::from(error);
                    let message = format!("{}; or name the configuration with --config FILE", failed.message);
                    return Err(CommandFailure { message, ..failed });
                }
                Ok(Self::Offline(Box::new(OfflineAuth::open(sources, location).await?)))
            }
            // Any other response, such as "not found", means that the satellite is running.
            _ => Ok(Self::Running(client)),
        }
    }

    pub(super) async fn begin(&self, request: AuthRequest) -> Result<AuthFlow, CommandFailure> {
        match self {
            Self::Running(client) => Ok(client.post("/v1/auth/begin", &request).await?),
            Self::Offline(offline) => {
                let spec = offline.find(&request.selector)?;
                let AuthRequest { redirect_uri, device, scopes, .. } = request;
                let flow_request = FlowRequest { redirect_uri, device, scopes };
                let started =
                    offline.grants.begin_flow(spec, flow_request).await.map_err(|error| auth_failure(spec, &error))?;
                Ok(flow_reply(&spec.name, started))
            }
        }
    }

    pub(super) async fn finish(&self, finish: AuthFinishRequest) -> Result<(), CommandFailure> {
        match self {
            Self::Running(client) => Ok(client.post("/v1/auth/finish", &finish).await?),
            Self::Offline(offline) => {
                let finished = offline.grants.finish_flow(finish.flow, flow_completion(finish)).await;
                finished.map(drop).map_err(|error| CommandFailure::new(FAILED, error.to_string()))
            }
        }
    }

    pub(super) async fn revoke(&self, selector: &InstanceSelector) -> Result<AuthRevokeResult, CommandFailure> {
        match self {
            Self::Running(client) => Ok(client.post("/v1/auth/revoke", selector).await?),
            Self::Offline(offline) => {
                let spec = offline.find(selector)?;
                Ok(revoke_reply(&spec.name, offline.grants.revoke_grant(&spec.id).await))
            }
        }
    }

    /// Returns the status of an instance, or `None` if no satellite is running.
    pub(super) async fn instance_status(&self, instance: &str) -> Result<Option<InstanceStatus>, CommandFailure> {
        let Self::Running(client) = self else { return Ok(None) };
        let selector = InstanceSelector { server: instance.to_owned(), team: None, user: None };
        Ok(Some(client.post("/v1/resolve", &selector).await?))
    }

    pub(super) fn client(&self) -> Option<&ConsoleClient> {
        match self {
            Self::Running(client) => Some(client),
            Self::Offline(_) => None,
        }
    }
}

impl OfflineAuth {
    async fn open(sources: &ConfigSources, location: &DataDirLocation) -> Result<Self, CommandFailure> {
        let plan = sources.load(None)?;
        let lock = DataDirLock::acquire(location, None).await.map_err(|error| {
            let code = if matches!(error, DataDirLockError::InUse { .. }) { BAD_INPUT } else { FAILED };
            CommandFailure::new(code, error.to_string())
        })?;
        mcp_satellite_http::client::install_tls_provider();
        let database = StateDb::open(lock.data_dir())?;
        let grants = grants::open(&database, Arc::new(HttpClients::new()?));
        let (_, specs) = UserValues::open(&database).merge(plan.instances);
        // The backend's document is unknown here, so no instance counts as removed.
        grants.set_instances(&specs, plan.oauth, false);
        Ok(Self { grants, specs, _lock: lock })
    }

    fn find(&self, selector: &InstanceSelector) -> Result<&InstanceSpec, CommandFailure> {
        find(&self.specs, |spec| spec, selector).map_err(|failure| ClientError::Refused(failure).into())
    }
}

fn auth_failure(spec: &InstanceSpec, error: &OAuthError) -> CommandFailure {
    CommandFailure::new(FAILED, format!("cannot authorize `{}`: {error}", spec.name))
}
