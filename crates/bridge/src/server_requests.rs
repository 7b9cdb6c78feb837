//! Ids of the satellite's requests to the client. Each session numbers its requests from one, and the client may still
//! answer a request of a lost session. So the ids of later sessions contain the number of the session; those of the
//! first pass unchanged.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, join_parts};

/// Maximum number of requests that are remembered until the client answers.
const OPEN_MAX: usize = 1000;

/// Requests that the client has not answered: their ids for the client, and their sessions.
#[derive(Default)]
pub(crate) struct ServerRequests(Mutex<HashMap<String, u64>>);

impl ServerRequests {
    /// Returns the text of a message of the satellite for the client.
    pub(crate) fn text_for_client<'a>(&self, session: u64, message: &'a RpcMessage) -> Cow<'a, str> {
        match (message.kind(), message.method(), message.id(), message.cancelled_id()) {
            (MessageKind::Request, _, Some(id), _) => {
                let id = client_id(session, id);
                let text = if session == 0 { None } else { Some(message.with_id(&id).concat()) };
                let mut open = self.open();
                if open.len() < OPEN_MAX {
                    open.insert(id, session);
                }
                text.map_or(Cow::Borrowed(message.text()), Cow::Owned)
            }
            (MessageKind::Notification, Some(method::CANCELLED), _, Some(id)) if session > 0 => {
                let id = client_id(session, id);
                self.open().remove(&id);
                Cow::Owned(message.with_cancelled_id(&id).concat())
            }
            _ => Cow::Borrowed(message.text()),
        }
    }

    /// Returns the body of a message of the client for the satellite; `None` if it answers a request of another
    /// session.
    pub(crate) fn body_for_satellite(&self, session: u64, message: &RpcMessage) -> Option<Bytes> {
        let (MessageKind::Result | MessageKind::Error, Some(id)) = (message.kind(), message.id()) else {
            return Some(message.text().as_bytes().clone());
        };
        let (own_session, own_id) = satellite_id(id).unwrap_or_else(|| (0, id.to_owned()));
        self.open().remove(&client_id(own_session, &own_id));
        match (own_session == session, session) {
            (true, 0) => Some(message.text().as_bytes().clone()),
            (true, _) => Some(join_parts(&message.with_id(&own_id))),
            (false, _) => None,
        }
    }

    /// Returns cancellations of the requests of all sessions but `session`, which nobody waits for any more.
    pub(crate) fn withdraw_others(&self, session: u64) -> Vec<String> {
        let mut open = self.open();
        let others = open.extract_if(|_, own| *own != session);
        let cancellation = |(id, _): (String, u64)| {
            let method = method::CANCELLED;
            let params = format!(r#"{{"requestId":{id},"reason":"the session of the server has ended"}}"#);
            format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":{params}}}"#)
        };
        others.map(cancellation).collect()
    }

    fn open(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the id that the client sees. Ids are JSON texts.
fn client_id(session: u64, id: &str) -> String {
    if session == 0 { id.to_owned() } else { serde_json::Value::String(format!("session {session}: {id}")).to_string() }
}

/// Returns the session and the id of a request from the id that the client sees; `None` for the first session.
fn satellite_id(id: &str) -> Option<(u64, String)> {
    let text = serde_json::from_str::<String>(id).ok()?;
    let (session, id) = text.strip_prefix("session ")?.split_once(": ")?;
    Some((session.parse().ok()?, id.to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    fn message(text: &str) -> RpcMessage {
        RpcMessage::parse(Bytes::from(text.to_owned())).unwrap()
    }

    #[test]
    fn ids_of_the_first_session_pass_unchanged_and_later_ones_name_their_session() {
        let requests = ServerRequests::default();
        for id in ["1", r#""a\u0062""#] {
            let request = message(&format!(r#"{{ "jsonrpc":"2.0","id":{id},"method":"roots/list"}}"#));
            let answer = format!(r#"{{ "jsonrpc":"2.0","id":{id},"result":{{}}}}"#);
            assert_eq!(requests.text_for_client(0, &request), &**request.text());
            assert_eq!(requests.body_for_satellite(0, &message(&answer)).unwrap(), answer.as_bytes());
            let visible = message(&requests.text_for_client(2, &request));
            assert_ne!(visible.id(), Some(id));
            let visible = message(&format!(r#"{{ "jsonrpc":"2.0","id":{},"result":{{}}}}"#, visible.id().unwrap()));
            assert_eq!(requests.body_for_satellite(2, &visible).unwrap(), answer.as_bytes());
            assert_eq!(requests.body_for_satellite(3, &visible), None);
            assert_eq!(requests.body_for_satellite(2, &message(&answer)), None);
        }
        assert!(requests.withdraw_others(9).is_empty());
    }
}
