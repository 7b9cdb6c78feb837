//! Attribution of unsolicited server messages to clients. Over HTTP a message belongs to the stream on which it
//! arrives. Over a pipe the client is certain only if no two clients have calls in flight.

use crate::audience::{Cause, Origin};

/// Returns the cause of a message. `of` is the call on whose stream the message arrived, with its client if it has one.
/// `in_flight` are all unanswered calls.
pub fn cause(of: Option<Option<Origin>>, in_flight: impl IntoIterator<Item = Option<Origin>>) -> Cause {
    match of {
        Some(Some(origin)) => return Cause::Call(origin),
        Some(None) => return Cause::Stranger,
        None => {}
    }
    let (mut strangers, mut calls, mut clients) = (false, Vec::new(), Vec::new());
    for origin in in_flight {
        match origin {
            Some(origin) => {
                calls.push(origin);
                if !clients.contains(&origin.client) {
                    clients.push(origin.client);
                }
            }
            None => strangers = true,
        }
    }
    match (&calls[..], &clients[..], strangers) {
        ([], [], false) => Cause::Nobody,
        ([], [], true) => Cause::Stranger,
        ([call], _, false) => Cause::Call(*call),
        (_, [client], false) => Cause::Client(*client),
        (_, clients, strangers) => Cause::Several(clients.len() + usize::from(strangers)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(client: u64, call: u64) -> Origin {
        Origin { client, call }
    }

    #[test]
    fn a_server_speaks_for_whom_it_can_only_mean() {
        let call = origin(1, 1);
        for (of, in_flight, expected) in [
            (None, vec![], Cause::Nobody),
            (None, vec![None], Cause::Stranger),
            (None, vec![None, None], Cause::Stranger),
            (None, vec![Some(origin(1, 1))], Cause::Call(call)),
            (None, vec![Some(origin(1, 1)), Some(origin(1, 2))], Cause::Client(1)),
            (None, vec![Some(origin(1, 1)), Some(origin(2, 2))], Cause::Several(2)),
            (None, vec![Some(origin(1, 1)), Some(origin(1, 2)), Some(origin(2, 3))], Cause::Several(2)),
            (None, vec![Some(origin(1, 1)), None], Cause::Several(2)),
            (Some(Some(origin(1, 1))), vec![Some(origin(1, 1)), Some(origin(2, 2)), None], Cause::Call(call)),
            (Some(None), vec![Some(origin(1, 1)), None], Cause::Stranger),
        ] {
            assert_eq!(cause(of, in_flight.clone()), expected, "on the stream of {of:?}, with {in_flight:?}");
        }
    }
}
