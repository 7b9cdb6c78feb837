//! Attribution of unsolicited server messages to clients. Over HTTP a message belongs to the stream on which it
//! arrives. Over a pipe the client is certain only if no two clients have calls in flight.

/// Client and call that caused a request; the host assigns both numbers and never reuses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallOrigin {
    /// Number of the client.
    pub client: u64,
    /// Number of the call.
    pub call: u64,
}

/// Call or client on whose behalf a server sends a message, as far as known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageCause {
    /// The message belongs to this call.
    Call(CallOrigin),
    /// The message belongs to one of several calls of this client.
    Client(u64),
    /// No call is in flight.
    NoCall,
    /// Only calls that no client of the host made are in flight.
    NoClient,
    /// Calls of this number of clients are in flight, and the server does not name one.
    SeveralClients(usize),
}

/// Returns the cause of a message. `of` is the call on whose stream the message arrived, with its client if it has one.
/// `in_flight` are all unanswered calls.
#[expect(clippy::option_option, reason = "the outer option is the call of the stream, the inner one its client")]
pub(crate) fn message_cause(
    of: Option<Option<CallOrigin>>,
    in_flight: impl IntoIterator<Item = Option<CallOrigin>>,
) -> MessageCause {
    match of {
        Some(Some(origin)) => return MessageCause::Call(origin),
        Some(None) => return MessageCause::NoClient,
        None => {}
    }
    let (mut has_unknown, mut calls, mut clients) = (false, Vec::new(), Vec::new());
    for origin in in_flight {
        match origin {
            Some(origin) => {
                calls.push(origin);
                if !clients.contains(&origin.client) {
                    clients.push(origin.client);
                }
            }
            None => has_unknown = true,
        }
    }
    match (&calls[..], &clients[..], has_unknown) {
        ([], [], false) => MessageCause::NoCall,
        ([], [], true) => MessageCause::NoClient,
        ([call], _, false) => MessageCause::Call(*call),
        (_, [client], false) => MessageCause::Client(*client),
        (_, clients, has_unknown) => MessageCause::SeveralClients(clients.len() + usize::from(has_unknown)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(client: u64, call: u64) -> CallOrigin {
        CallOrigin { client, call }
    }

    #[test]
    fn a_message_is_attributed_to_the_calls_that_can_have_caused_it() {
        let call = origin(1, 1);
        for (of, in_flight, expected) in [
            (None, vec![], MessageCause::NoCall),
            (None, vec![None], MessageCause::NoClient),
            (None, vec![None, None], MessageCause::NoClient),
            (None, vec![Some(origin(1, 1))], MessageCause::Call(call)),
            (None, vec![Some(origin(1, 1)), Some(origin(1, 2))], MessageCause::Client(1)),
            (None, vec![Some(origin(1, 1)), Some(origin(2, 2))], MessageCause::SeveralClients(2)),
            (None, vec![Some(origin(1, 1)), Some(origin(1, 2)), Some(origin(2, 3))], MessageCause::SeveralClients(2)),
            (None, vec![Some(origin(1, 1)), None], MessageCause::SeveralClients(2)),
            (Some(Some(origin(1, 1))), vec![Some(origin(1, 1)), Some(origin(2, 2)), None], MessageCause::Call(call)),
            (Some(None), vec![Some(origin(1, 1)), None], MessageCause::NoClient),
        ] {
            assert_eq!(message_cause(of, in_flight.clone()), expected, "on the stream of {of:?}, with {in_flight:?}");
        }
    }
}
