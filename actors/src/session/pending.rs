//! Requests that await a response, with their purpose and deadline.

use std::collections::{BTreeSet, HashMap};

use tokio::time::{Duration, Instant};

use super::rounds::InputRounds;
use crate::audience::CallOrigin;
use crate::calls::{CallTicket, OutboundRequest};
use crate::model::exit::{CallError, CallFate};
use crate::model::failure::{ExchangeFailure, FailureKind};

/// Purpose of a request. In `Caller`, `door` is the id that the call got on admission, and `through` is true for a call
/// written in the stateless era, whose result only its client interprets; `behalf` is set if a client of the host made
/// the call. `Listen` opens the stream of server notifications; `Discover` asks a server with sessions for the
/// stateless era.
pub(super) enum PendingPurpose {
    Caller {
        ticket: CallTicket,
        admitted_id: u64,
        started: Instant,
        timeout: Duration,
        repeatable: bool,
        passthrough: bool,
        client_call: Option<Box<RelayedCallOrigin>>,
    },
    Handshake,
    List,
    Check,
    Listen,
    Discover,
}

/// Client call behind a request, with the client's own progress token as JSON text.
pub(super) struct RelayedCallOrigin {
    pub(super) origin: CallOrigin,
    pub(super) token: Option<Box<str>>,
}

pub(super) struct PendingRequest {
    pub(super) purpose: PendingPurpose,
    pub(super) deadline: Instant,
    /// Byte offset of the request in all output ever queued; `None` while it waits for its turn.
    pub(super) output_offset: Option<u64>,
    /// True if a failed attempt may have reached the server.
    pub(super) may_have_reached: bool,
    pub(super) attempts: u32,
    pub(super) request: Option<OutboundRequest>,
    pub(super) rounds: Option<Box<InputRounds>>,
}

impl PendingRequest {
    pub(super) fn new(purpose: PendingPurpose, deadline: Instant) -> Self {
        Self {
            purpose,
            deadline,
            output_offset: None,
            may_have_reached: false,
            attempts: 0,
            request: None,
            rounds: None,
        }
    }

    pub(super) fn record_failure(&mut self, failure: &ExchangeFailure) {
        // A server that refused the request (rate limit, authorization, size, format or an expired session) did not
        // execute it, unless the response had begun.
        self.output_offset = None;
        self.may_have_reached |= failure.answering
            || failure.sent
                && !matches!(
                    failure.kind,
                    FailureKind::Throttled { .. }
                        | FailureKind::Unauthorized { .. }
                        | FailureKind::Forbidden { .. }
                        | FailureKind::Ungranted { .. }
                        | FailureKind::InsufficientScope { .. }
                        | FailureKind::NotRenewed(_)
                        | FailureKind::SessionExpired { .. }
                        | FailureKind::Status { status: 413 | 414 | 415 | 422 | 431, .. }
                );
    }

    pub(super) fn fail(self, error: CallError) {
        if let PendingPurpose::Caller { ticket, .. } = self.purpose {
            ticket.fail(error);
        }
    }

    pub(super) fn is_passthrough(&self) -> bool {
        matches!(self.purpose, PendingPurpose::Caller { passthrough: true, .. })
    }

    pub(super) fn is_sessionless(&self) -> bool {
        // These requests belong to no session, even if there is one.
        self.is_passthrough() || matches!(self.purpose, PendingPurpose::Listen | PendingPurpose::Discover)
    }

    pub(super) fn was_sent(&self) -> bool {
        self.may_have_reached || self.output_offset.is_some()
    }
}

/// Unanswered requests. Dropping it fails every remaining call with its fate.
#[derive(Default)]
pub(super) struct PendingRequests {
    pub(super) pending: HashMap<u64, PendingRequest>,
    pub(super) deadlines: BTreeSet<(Instant, u64)>,
    pub(super) written: u64,
}

impl PendingRequests {
    pub(super) fn insert(&mut self, id: u64, pending: PendingRequest) {
        self.deadlines.insert((pending.deadline, id));
        self.pending.insert(id, pending);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<PendingRequest> {
        let pending = self.pending.remove(&id)?;
        self.deadlines.remove(&(pending.deadline, id));
        if self.pending.is_empty() {
            // Capacity for four entries takes more than a kilobyte, and most instances are idle.
            self.pending = HashMap::new();
        }
        Some(pending)
    }

    pub(super) fn remove_caller(&mut self, door: u64) -> Option<(u64, PendingRequest)> {
        // `door` is the id of the call on admission; a repeated call has another id since then.
        let is_it = |pending: &PendingRequest| matches!(pending.purpose, PendingPurpose::Caller { admitted_id: its, .. } if its == door);
        let id = if self.pending.contains_key(&door) {
            door
        } else {
            *self.pending.iter().find(|(_, pending)| is_it(pending))?.0
        };
        Some((id, self.remove(id)?))
    }

    pub(super) fn may_have_reached_server(&self, pending: &PendingRequest) -> bool {
        may_have_reached_server(pending, self.written)
    }

    pub(super) fn extend(&mut self, id: u64, now: Instant, cap: Duration) {
        // The call's own timeout may exceed the hard cap.
        let Some(pending) = self.pending.get_mut(&id) else { return };
        let PendingPurpose::Caller { started, timeout, .. } = &pending.purpose else { return };
        let deadline = (now + *timeout).min(*started + cap.max(*timeout));
        self.deadlines.remove(&(pending.deadline, id));
        pending.deadline = deadline;
        self.deadlines.insert((deadline, id));
    }

    pub(super) fn retain_callers(&mut self) {
        self.pending.retain(|_, pending| matches!(pending.purpose, PendingPurpose::Caller { .. }));
    }

    pub(super) fn forget_handshakes(&mut self) {
        // The server was opened in the other era.
        let Self { pending, deadlines, .. } = self;
        pending.retain(|id, pending| {
            let is_kept = !matches!(pending.purpose, PendingPurpose::Handshake);
            if !is_kept {
                deadlines.remove(&(pending.deadline, *id));
            }
            is_kept
        });
    }

    pub(super) fn callers_below(&self, end: u64) -> usize {
        let callers =
            self.pending.iter().filter(|(_, pending)| matches!(pending.purpose, PendingPurpose::Caller { .. }));
        callers.filter(|(id, _)| **id < end).count()
    }

    pub(super) fn fail_all(&mut self, reason: &str) {
        self.deadlines.clear();
        // Settled in call order, so that the outcomes of an instance's calls have a deterministic order.
        let mut pending: Vec<_> = self.pending.drain().collect();
        pending.sort_unstable_by_key(|(id, _)| *id);
        for (_, pending) in pending {
            let fate = if may_have_reached_server(&pending, self.written) {
                CallFate::MaybeExecuted
            } else {
                CallFate::NotSent
            };
            if let PendingPurpose::Caller { mut ticket, .. } = pending.purpose {
                ticket.fate = fate;
                ticket.fail(CallError::Terminated { fate, reason: reason.to_owned() });
            }
        }
    }
}

fn may_have_reached_server(pending: &PendingRequest, written: u64) -> bool {
    pending.may_have_reached || pending.output_offset.is_some_and(|at| at < written)
}

impl Drop for PendingRequests {
    fn drop(&mut self) {
        self.fail_all("the run ended");
    }
}
