//! The supervision runtime of mcp-satellite: actors and rules, with no process, socket, file or wall clock of their
//! own. What touches the world comes in through the two traits of [`seam`]; what a host calls is [`runtime`].
//!
//! ```text
//! Root                   desired specs, start permits, the way out
//! ├── StatusRegistry     every instance's status and catalogue, published as a snapshot
//! ├── EventBatcher       queue → batches → sink
//! └── TeamSupervisor     one per team: a slot for each instance
//!     ├── StdioWorker    one incarnation of one process
//!     └── RemoteWorker   one connection to a remote server
//! ```

#![forbid(unsafe_code)]

pub mod audience;
mod batcher;
pub mod byte_budget;
mod calls;
mod logs;
pub mod model;
mod registry;
mod remote_worker;
mod root;
pub mod rpc;
pub mod rules;
pub mod runtime;
pub mod seam;
mod session;
mod stdio_worker;
mod tasks;
mod team;
mod wire;
mod worker;

pub use batcher::{Emitter, WallClock};
pub use calls::{CallPort, ClientFacts, Counters, Held, Relay, Request, is_repeatable};
pub use root::{Farewell, Installed, Known, Part};
pub use runtime::{Options, RuntimeHandle, start, start_linked};
pub use team::{ControlError, Reconnected, Uninstalled, Verb};
