//! Configurations of instances.

use std::collections::BTreeMap;
use std::sync::Arc;

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::secret::SecretMask;
use mcp_satellite_actors::model::spec::{
    ConfigTier, InstanceConfig, InstanceInputs, InstanceSpec, ProcessLifetime, RemoteTransport, ServerTarget,
    UpdateMethod,
};

pub fn stdio(command: &str) -> ServerTarget {
    ServerTarget::Stdio { command: command.to_owned(), cwd: None }
}

/// Returns the target of a remote server without a `health_url`.
pub fn remote(transport: RemoteTransport, url: &str) -> ServerTarget {
    ServerTarget::Remote { transport, url: url.to_owned(), health_url: None }
}

/// Returns the merged specification of an instance of user alice with default policies.
pub fn spec_of(team: &str, installation: &str, target: ServerTarget) -> InstanceSpec {
    InstanceSpec {
        id: InstanceId::new(team.into(), "alice".into(), installation.into()),
        name: format!("files-{team}-alice-{installation}").into(),
        server: "files".into(),
        team_slug: team.into(),
        user_slug: "alice".into(),
        target,
        args: Vec::new(),
        env: BTreeMap::new(),
        headers: BTreeMap::new(),
        query: BTreeMap::new(),
        missing: Vec::new(),
        problems: Vec::new(),
        lifetime: ProcessLifetime::Listed,
        update_method: UpdateMethod::default(),
        request_logging: true,
        mask: SecretMask::default(),
        policy: Arc::new(Policy::default()),
    }
}

/// Returns the specification of the instance `files-acme-alice-abc123`.
pub fn spec(target: ServerTarget) -> InstanceSpec {
    spec_of("acme", "abc123", target)
}

/// Returns the configuration of the instance `files-acme-alice-abc123` before its tiers are merged, with the policy.
pub fn config(target: ServerTarget, policy: Policy) -> InstanceConfig {
    InstanceConfig {
        team: "team_acme".into(),
        team_slug: "acme".into(),
        user: "user_alice".into(),
        user_slug: "alice".into(),
        installation: "abc123".into(),
        server: "files".into(),
        target,
        server_tier: ConfigTier::default(),
        team_tier: ConfigTier::default(),
        user_tier: ConfigTier::default(),
        user_required: Vec::new(),
        inputs: InstanceInputs::default(),
        lifetime: ProcessLifetime::default(),
        update_method: UpdateMethod::default(),
        request_logging: true,
        policy: Arc::new(policy),
    }
}
