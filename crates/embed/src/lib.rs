//! The embedding API of mcp-satellite: a runtime with defaults, instances from a builder, and handles to call them. It is
//! a thin layer over [`mcp_satellite_actors`], which [`Runtime::handle`] returns.
//!
//! A host that depends on this crate alone gets supervision without I/O: its servers are [`Functions`], or started by
//! connectors of its own ([`actors::seam`]). The package `mcp-satellite` re-exports this API and adds connectors to
//! processes and remote servers, and event sinks.
//!
//! ```
//! use mcp_satellite_embed::actors::seam::Connectors;
//! use mcp_satellite_embed::{Functions, Instance, Runtime};
//! use serde_json::{Value, json};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = Runtime::builder(Connectors::default()).start().await?;
//! let schema = json!({ "type": "object", "properties": { "text": { "type": "string" } } });
//! let functions = Functions::new().tool("shout", schema, |arguments: Value| async move {
//!     let text = arguments["text"].as_str().ok_or("`text` is missing")?;
//!     Ok(text.to_uppercase().into())
//! });
//! let server = runtime.install(Instance::functions("text", functions)).await?;
//! let result = server.call("shout", json!({ "text": "hello" })).await?;
//! assert_eq!(result.text(), "HELLO");
//! assert_eq!(runtime.shutdown().await.events_lost, 0);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod functions;
mod handle;
mod instance;
mod runtime;

pub use functions::{FunctionError, Functions};
pub use handle::{InstanceError, InstanceHandle, ToolCall, ToolResult};
pub use instance::Instance;
pub use mcp_satellite_actors as actors;
pub use mcp_satellite_actors::ShutdownReport;
pub use mcp_satellite_actors::model::exit::RuntimeEnd;
pub use mcp_satellite_actors::model::remedy::Remedy;
pub use runtime::{Runtime, RuntimeBuilder, RuntimeStartError};
