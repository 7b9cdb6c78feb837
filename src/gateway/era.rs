//! The place of the next era of the protocol, which has no sessions and no `initialize`. Until it is served here, a client
//! that asks for it is told so in a way that makes it go on with this one at once.

use mcp_satellite_actors::rpc::Message;

/// Whether a message without a session opens a conversation of the next era. It is answered with HTTP 400 and "method not
/// found" under its own id: any other code makes some clients give up instead of falling back.
pub(crate) fn is_next(message: &Message) -> bool {
    message.method() == Some("server/discover")
}

/// The newest version that is spoken here.
pub(crate) const NEWEST: &str = "2025-11-25";

/// Whether a protocol version in a header is one that is spoken here.
pub(crate) fn is_served(version: &str) -> bool {
    matches!(version, "2024-11-05" | "2025-03-26" | "2025-06-18" | "2025-11-25")
}

/// What is spoken with a client: what both it and the server speak, as old as the older of them. A version that is not
/// known here is offered by nobody else: the server's is spoken.
pub(crate) fn agreed(client: &str, server: &str) -> String {
    if is_served(client) { client.min(server).to_owned() } else { server.to_owned() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn what_the_next_era_begins_with_is_known() {
        let read = |method: &str| Message::read(format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}"}}"#).into());
        assert!(is_next(&read("server/discover").unwrap()));
        assert!(!is_next(&read("initialize").unwrap()));
        assert_eq!(agreed("2025-03-26", "2025-11-25"), "2025-03-26");
        assert_eq!(agreed("2025-11-25", "2025-06-18"), "2025-06-18");
        assert_eq!(agreed("1999-01-01", "2025-06-18"), "2025-06-18");
        assert!(is_served("2025-11-25") && !is_served("2026-07-28") && !is_served(""));
    }
}
