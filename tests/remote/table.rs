//! Every misbehaviour at every moment: what the instance is then, what its peer saw, what the caller got, what was told.
//!
//! The clock decides nothing here: the next attempt by itself is an hour away, so that after the one failure the world
//! stands still, and is looked at. Then the peer behaves again, and a call brings the instance back.

use std::fmt::Write;
use std::time::Duration;

use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use serde_json::json;

use super::peer::{Answers, Deed, Expiry, Peer, Record, Seen, When};
use super::support::{Fleet, Instance, Remote};

/// What takes longer than this is given up, in the cases that say so.
const SHORT: Duration = Duration::from_millis(300);

/// A message may be this long, in bytes.
const LONGEST: usize = 64 * 1024;

/// What goes wrong.
enum How {
    /// The peer does this with a request.
    Deed(fn() -> Deed),
    /// It is closed.
    Closed,
    /// It is full.
    Full,
    /// It has forgotten its sessions, and says so in its way.
    Forgotten(Expiry),
    /// It is not to be found at this address.
    At(&'static str),
    /// Its certificate is nobody's.
    SelfSigned,
    /// It speaks no TLS, and is asked to.
    PlainText,
}

/// When it goes wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// At the first connect.
    Connect,
    /// In a call of a tool that may do anything, over a connection that is there.
    Call,
    /// The same of a tool that only reads.
    Read,
}

/// One misbehaviour.
struct Case {
    name: &'static str,
    how: How,
    /// What is special about the instance.
    policy: fn(&mut Policy),
    /// What is special about the peer.
    peer: fn(&Peer),
    /// The status that each moment comes to; none where there is no such moment.
    connect: Option<Status>,
    call: Option<Status>,
    /// Where it differs from `call`.
    read: Option<Status>,
    /// The caller's own deadline.
    deadline: Option<Duration>,
}

impl Case {
    fn new(name: &'static str, how: How, status: Status) -> Self {
        let (policy, peer) = (|_: &mut Policy| (), |_: &Peer| ());
        let (connect, call) = (Some(status), Some(status));
        Self { name, how, policy, peer, connect, call, read: None, deadline: None }
    }

    fn deed(name: &'static str, deed: fn() -> Deed, status: Status) -> Self {
        Self::new(name, How::Deed(deed), status)
    }

    fn policy(self, policy: fn(&mut Policy)) -> Self {
        Self { policy, ..self }
    }

    fn peer(self, peer: fn(&Peer)) -> Self {
        Self { peer, ..self }
    }

    fn at_connect_only(self) -> Self {
        Self { call, ..self }
    }

    fn in_calls_only(self) -> Self {
        Self { connect: None, ..self }
    }

    fn in_calls(self, status: Status) -> Self {
        Self { call: Some(status), ..self }
    }
}
