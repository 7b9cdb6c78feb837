//! Samples for the tests of the slot: an instance, its catalogue, and the exits of its runs.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::catalogue::{Catalogue, Tool};
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::exit::{ExitCause, WorkerExit};
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::policy::{Policy, ReconnectPolicy};
use mcp_satellite_actors::model::remote::ServerInfo;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, InstanceInputs, InstanceSpec, RemoteTransport, ServerTarget, UpdateMethod,
};
use serde_json::value::RawValue;

/// Returns the instance `files-acme-alice-abc123` with defaults, after `change`.
pub(crate) fn spec(change: impl FnOnce(&mut InstanceConfig)) -> Arc<InstanceSpec> {
    let mut config = InstanceConfig {
        team: "team_acme".into(),
        team_slug: "acme".into(),
        user: "user_alice".into(),
        user_slug: "alice".into(),
        installation: "abc123".into(),
        server: "files".into(),
        target: ServerTarget::Stdio { command: "files".to_owned(), cwd: None },
        server_tier: ConfigTier::default(),
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        inputs: InstanceInputs::default(),
        lifetime: mcp_satellite_actors::model::spec::ProcessLifetime::Listed,
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::default(),
    };
    change(&mut config);
    Arc::new(config.merge())
}

/// Requires the value `API_KEY`, which the user has not given.
pub(crate) fn incomplete(config: &mut InstanceConfig) {
    config.user_required = vec!["API_KEY".to_owned()];
}

/// Returns the server information of a handshake.
pub(crate) fn server_info() -> Arc<ServerInfo> {
    Arc::new(ServerInfo {
        era: Era::Sessions,
        name: "files".to_owned(),
        version: "1".to_owned(),
        protocol: "2025-11-25".to_owned(),
        capabilities: RawValue::from_string(r#"{"tools":{}}"#.to_owned()).unwrap(),
        instructions: None,
        handshake_result: RawValue::from_string("{}".to_owned()).unwrap(),
    })
}

/// Makes the server remote.
pub(crate) fn remote(config: &mut InstanceConfig) {
    config.target = ServerTarget::Remote {
        transport: RemoteTransport::Http,
        url: "http://127.0.0.1/mcp".to_owned(),
        health_url: None,
    };
}

/// Makes the server remote, with at most five attempts to reconnect.
pub(crate) fn bounded(config: &mut InstanceConfig) {
    remote(config);
    let reconnect = ReconnectPolicy::bounded();
    config.policy = Arc::new(Policy { reconnect, ..Policy::default() });
}

/// Sets the bearer token for the server.
pub(crate) fn with_token(config: &mut InstanceConfig, token: &str) {
    config.user_tier.headers = [("Authorization".to_owned(), ConfigValue::secret(format!("Bearer {token}")))].into();
}

/// Returns the exit of a connection that failed, or was lost `ran` after its handshake.
pub(crate) fn lost(kind: FailureKind, ran: Option<Duration>) -> WorkerExit {
    WorkerExit { uptime: ran, ..WorkerExit::from_cause(ExitCause::Lost(ExchangeFailure::sent(kind))) }
}

pub(crate) fn catalogue(tool: &str) -> Arc<Catalogue> {
    let raw = RawValue::from_string(format!(r#"{{"name":"{tool}"}}"#)).unwrap();
    Arc::new(Catalogue { tools: vec![Tool::parse(raw).unwrap()], ..Catalogue::default() })
}

/// Returns the exit of a process that ended by itself, `ran` after its handshake.
pub(crate) fn exited(code: i32, ran: Option<Duration>) -> WorkerExit {
    WorkerExit { code: Some(code), uptime: ran, pid: Some(100), ..WorkerExit::from_cause(ExitCause::Exited) }
}

/// Returns the exit of a process that ended on request.
pub(crate) fn stopped() -> WorkerExit {
    WorkerExit { code: Some(0), pid: Some(100), ..WorkerExit::from_cause(ExitCause::Requested) }
}

/// Sets a version of a configuration with rolling updates.
pub(crate) fn rolling(version: u8) -> impl FnOnce(&mut InstanceConfig) {
    move |config| {
        config.update_method = UpdateMethod::Rolling;
        config.team_tier.env = [("VERSION".to_owned(), ConfigValue::plain(version.to_string()))].into();
    }
}
