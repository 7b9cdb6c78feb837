//! An MCP client session with one server, for both eras of the protocol: handshake, requests and their deadlines,
//! lists, and messages between the server and the clients of its host.
//!
//! A session does no I/O and reads no clock. Messages, commands and the time are arguments of [`SessionCore`]; it writes
//! messages to its [`Outlet`] and reports everything else to its [`SessionHost`]. `actors` drives it over pipes and over
//! connections to remote servers.
//!
//! The session reads and writes messages itself instead of using the engine of `rmcp`: a supervisor must determine which
//! call reached the server, why a connection ended and which messages were malformed; it must keep unknown members and
//! prevent caching. `rmcp` provides only the types of the handshake.

#![forbid(unsafe_code)]

mod call;
mod envelope;
pub mod era;
mod gate;
mod handshake;
mod interface;
mod lists;
mod origin;
mod pending;
mod relay;
mod resume;
mod rounds;
mod send;
mod session;
mod state;
mod stateless;

pub use call::{
    AdmittedRequest, CallTicket, CallerRequest, ClientFacts, ClientRelay, DiscoverRequest, OutboundRequest,
    ReplyChannel, SessionCommand, TIMEOUT_MAX, UnansweredCall, UnansweredCalls, is_repeatable,
};
pub use gate::{AdmissionError, CallGate, CallPermit, FIRST_REQUEST_ID};
pub use interface::{
    MessageOutcome, Outlet, OwnRequest, PassedDeadline, RefusedCall, RequestPhase, RequestSpan, SessionEvent,
    SessionHost, SessionOptions,
};
pub use origin::{CallOrigin, MessageCause};
pub use pending::{PendingPurpose, PendingRequest, PendingRequests, RelayedCallOrigin};
pub use resume::RESUME_TIMEOUT;
pub use session::{SessionCore, masked_excerpt};
pub use state::{HandshakeRefusal, ResumedSession};
