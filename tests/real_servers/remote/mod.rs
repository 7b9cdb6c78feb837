//! Real remote servers in their own processes: connected, listed, called, killed with SIGKILL, started again on the
//! same port, and called again without help.
//!
//! The tests assert no durations and do not sleep: they wait for states.
//!
//! The responses of the servers, observed with curl:
//!
//! | | server-everything (TypeScript SDK) | Python SDK 2.3, fastmcp 4.1 |
//! | --- | --- | --- |
//! | a POST is answered by | a stream that begins with an event that has an id and empty data | a stream; JSON with `json_response` |
//! | a POST, GET or DELETE with an unknown session | 400, a JSON-RPC error *without* an id | 404, a JSON-RPC error with `"id":null` |
//! | a request without a session | 400, `"id":null` | 400, `"id":null`, and the id of a session in the header |
//! | DELETE of a session | 200; after it 400 | 200; after it 404 |
//! | GET | a stream, silent until the first message | the same |
//! | a new session | `tools/list_changed` right after `initialized` | nothing; forgotten after 30 idle minutes |
//! | an idle connection | is closed after 5 s | is closed after 5 s |
//! | over HTTP+SSE, a POST with an unknown session | is never answered | |

mod listed;
mod loss;
mod servers;
mod support;
