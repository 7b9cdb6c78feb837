//! The supervision runtime of mcp-satellite: actors and rules, without processes, sockets, files or a wall clock of its
//! own. A host implements the traits of [`seam`] and calls [`runtime`].
//!
//! ```text
//! Root                   desired specs, start permits, shutdown
//! ├── StatusRegistry     status and catalogue of every instance, published as a snapshot
//! ├── EventBatcher       queue → batches → sink
//! └── TeamSupervisor     one per team, with a slot for each instance
//!     ├── StdioWorker    one run of a process
//!     └── RemoteWorker   one connection to a remote server
//! ```

#![forbid(unsafe_code)]

pub mod audience;
mod batcher;
mod calls;
mod logs;
mod probe;
mod registry;
mod remote_worker;
mod root;
pub mod rules;
pub mod runtime;
pub mod seam;
mod session;
/// The published state of all instances.
pub mod snapshot;
mod stdio_worker;
mod tasks;
mod team;
mod team_messages;
mod wire;
mod worker;

pub use batcher::{EventSender, WallClock};
pub use calls::{CallPort, InstanceCounters, KeepAwakeGuard, response_end};
pub use mcp_satellite_model::byte_budget;
pub use mcp_satellite_protocol::rpc;
pub use mcp_satellite_session::{
    CallerRequest, ClientFacts, ClientRelay, UnansweredCall, UnansweredCalls, is_repeatable,
};
pub use root::{EarlierState, InstallOutcome, RuntimePart, ShutdownReport};
pub use runtime::{RuntimeHandle, RuntimeOptions, start, start_linked};
pub use team_messages::{ControlError, InstanceCommand, ReconnectOutcome, UninstallOutcome};

/// Plain data: ids, specifications, policies, statuses, exits, events, secrets, and the published snapshot.
pub mod model {
    pub use mcp_satellite_model::*;

    pub use crate::snapshot;
}
