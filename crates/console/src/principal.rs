//! Whoever sends a request: its role, the instances that it sees, and the way on which it came.

use std::net::IpAddr;

use mcp_satellite_actors::model::event::ActionActor;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_config::{Role, RoleAccess};

use crate::api::ConsoleFilter;

/// An authenticated client of the API, the console or the control socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    pub kind: PrincipalKind,
    /// Name of the token, or `TEAM/USER`.
    pub name: Option<String>,
    pub access: RoleAccess,
    /// Team that it sees, by id or slug; `None` is all teams.
    pub team: Option<String>,
    pub entrance: Entrance,
    pub address: Option<IpAddr>,
}

#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PrincipalKind {
    /// The owner of the data directory.
    Owner,
    /// A token of `[[console.tokens]]`.
    Token,
    /// A user of the configuration, with its MCP token.
    User { team: TeamId, user: UserId },
    /// A client on this machine without authentication.
    Anonymous,
}

/// Ways into the satellite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Entrance {
    /// The control socket.
    Socket,
    /// The HTTP API, with a token.
    Http,
    /// The console, with the cookie of a login.
    Console,
    /// The control plane's MCP server.
    Mcp,
}

impl Principal {
    /// Returns the owner, with all permissions.
    pub fn owner(entrance: Entrance) -> Self {
        Self {
            kind: PrincipalKind::Owner,
            name: None,
            access: RoleAccess { role: Role::Admin, reads_calls: true, acts_as: true },
            team: None,
            entrance,
            address: None,
        }
    }

    /// Returns true if the instance is in the team of this principal. Other instances are reported as missing.
    pub fn sees(&self, spec: &InstanceSpec) -> bool {
        ConsoleFilter { team: self.team.clone(), user: None }.matches(spec)
    }

    /// Returns true if it may read arguments, results and server logs of this instance.
    pub fn reads_calls_of(&self, spec: &InstanceSpec) -> bool {
        self.access.reads_calls || self.is_user_of(spec)
    }

    /// Returns true if it may call tools in the name of the instance's user.
    pub fn acts_for(&self, spec: &InstanceSpec) -> bool {
        self.access.acts_as || self.is_user_of(spec)
    }

    pub fn is_user_of(&self, spec: &InstanceSpec) -> bool {
        matches!(&self.kind, PrincipalKind::User { team, user } if *team == spec.id.team && *user == spec.id.user)
    }

    /// Describes the principal in an event.
    pub fn as_actor(&self) -> ActionActor {
        let text = |name: &'static str| name.to_owned();
        ActionActor {
            kind: text((&self.kind).into()),
            name: self.name.clone(),
            role: Some(text(self.access.role.into())),
            via: text(self.entrance.into()),
            address: self.address.map(|address| address.to_canonical().to_string()),
        }
    }
}
