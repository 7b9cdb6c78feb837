//! Requests that await a response, with their purpose and deadline.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_model::failure::{ExchangeFailure, FailureKind};

use crate::call::{CallTicket, ClientFacts, OutboundRequest, UnansweredCall, UnansweredCalls};
use crate::interface::RequestSpan;
use crate::origin::CallOrigin;
use crate::state::InputRounds;

/// Purpose of a request.
pub enum PendingPurpose {
    /// A call.
    Caller {
        /// Permit and response channel.
        ticket: CallTicket,
        /// Id of the call on admission.
        admitted_id: u64,
        /// Time of the admission.
        started: Instant,
        /// Time for the response without progress.
        timeout: Duration,
        /// True if the call may be sent again although the server may have executed it.
        repeatable: bool,
        /// True for a call written in the stateless era, whose result only its client interprets.
        passthrough: bool,
        /// Call of a client of the host, if one made the call.
        client_call: Option<Box<RelayedCallOrigin>>,
    },
    /// First request of an era.
    Handshake,
    /// Page of a list.
    List,
    /// Health check.
    Check,
    /// Check of a session that continues.
    Resume,
    /// Stream of server notifications.
    Listen,
    /// Question whether a server with sessions supports the stateless era too.
    Discover,
}

/// Client call behind a request, with the client's own progress token as JSON text.
pub struct RelayedCallOrigin {
    pub(crate) origin: CallOrigin,
    pub(crate) token: Option<Box<str>>,
}

/// Request of a call that was written.
pub(crate) enum SentRequest {
    /// The request may be sent again.
    Repeatable(OutboundRequest),
    /// The request is not sent again, and has no content any more.
    Final(OutboundRequest),
}

impl SentRequest {
    fn request(&self) -> &OutboundRequest {
        let (Self::Repeatable(request) | Self::Final(request)) = self;
        request
    }
}

/// Request without a response.
pub struct PendingRequest {
    /// Purpose of the request.
    pub purpose: PendingPurpose,
    /// Time at which the request times out.
    pub deadline: Instant,
    /// Byte offset of the request in all output ever queued; `None` while it waits for its turn.
    pub output_offset: Option<u64>,
    /// True if a failed attempt may have reached the server.
    pub may_have_reached: bool,
    /// Number of attempts.
    pub attempts: u32,
    /// `None` for a request of the satellite itself, and while the request waits for its turn.
    pub(crate) sent: Option<SentRequest>,
    pub(crate) rounds: Option<Box<InputRounds>>,
    pub(crate) span: Option<Box<dyn RequestSpan>>,
}

impl PendingRequest {
    /// Creates a request that has not been sent.
    pub fn new(purpose: PendingPurpose, deadline: Instant) -> Self {
        Self {
            purpose,
            deadline,
            output_offset: None,
            may_have_reached: false,
            attempts: 0,
            sent: None,
            rounds: None,
            span: None,
        }
    }

    /// Reports the failure of a request of the satellite, if it is observed.
    pub fn fail_span(&mut self, error: impl FnOnce() -> CallError) {
        if let Some(span) = self.span.take() {
            span.end(Err(&error()));
        }
    }

    /// Records a failed attempt.
    pub fn record_failure(&mut self, failure: &ExchangeFailure) {
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

    pub(crate) fn fail(self, error: CallError) {
        if let PendingPurpose::Caller { ticket, .. } = self.purpose {
            ticket.fail(error);
        }
    }

    /// Returns true for a call written in the stateless era, whose result only its client interprets.
    pub fn is_passthrough(&self) -> bool {
        matches!(self.purpose, PendingPurpose::Caller { passthrough: true, .. })
    }

    pub(crate) fn is_sessionless(&self) -> bool {
        // These requests belong to no session, even if there is one.
        self.is_passthrough() || matches!(self.purpose, PendingPurpose::Listen | PendingPurpose::Discover)
    }

    pub(crate) fn was_sent(&self) -> bool {
        self.may_have_reached || self.output_offset.is_some()
    }
}

/// Unanswered requests. Dropping it fails every remaining call with its fate.
#[derive(Default)]
pub struct PendingRequests {
    /// The requests, by id.
    pub pending: HashMap<u64, PendingRequest>,
    /// Number of bytes that the transport has written, of all output ever queued.
    pub written: u64,
    pub(crate) deadlines: BTreeSet<(Instant, u64)>,
    /// Requests waiting for room, in order; some may already be cancelled.
    pub(crate) unsent: VecDeque<(u64, OutboundRequest)>,
}

impl PendingRequests {
    /// Adds a request.
    pub fn insert(&mut self, id: u64, pending: PendingRequest) {
        self.deadlines.insert((pending.deadline, id));
        self.pending.insert(id, pending);
    }

    /// Removes a request.
    pub fn remove(&mut self, id: u64) -> Option<PendingRequest> {
        let pending = self.pending.remove(&id)?;
        self.deadlines.remove(&(pending.deadline, id));
        if self.pending.is_empty() {
            // Capacity for four entries takes more than a kilobyte, and most instances are idle.
            self.pending = HashMap::new();
        }
        Some(pending)
    }

    pub(crate) fn remove_caller(&mut self, admitted_id: u64) -> Option<(u64, PendingRequest)> {
        // `admitted_id` is the id of the call on admission; a repeated call has another id since then.
        let is_it = |purpose: &PendingPurpose| matches!(purpose, PendingPurpose::Caller { admitted_id: id, .. } if *id == admitted_id);
        let id = if self.pending.contains_key(&admitted_id) {
            admitted_id
        } else {
            *self.pending.iter().find(|(_, pending)| is_it(&pending.purpose))?.0
        };
        Some((id, self.remove(id)?))
    }

    pub(crate) fn may_have_reached_server(&self, pending: &PendingRequest) -> bool {
        may_have_reached_server(pending, self.written)
    }

    pub(crate) fn extend(&mut self, id: u64, now: Instant, cap: Duration) {
        // The call's own timeout may exceed the hard cap.
        let Some(pending) = self.pending.get_mut(&id) else { return };
        let PendingPurpose::Caller { started, timeout, .. } = &pending.purpose else { return };
        let deadline = (now + *timeout).min(*started + cap.max(*timeout));
        self.deadlines.remove(&(pending.deadline, id));
        pending.deadline = deadline;
        self.deadlines.insert((deadline, id));
    }

    /// Drops all requests but calls.
    pub fn retain_callers(&mut self) {
        self.pending.retain(|_, pending| matches!(pending.purpose, PendingPurpose::Caller { .. }));
    }

    pub(crate) fn forget_handshakes(&mut self) {
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

    /// Returns the unanswered calls, at most `max`.
    pub(crate) fn unanswered_calls(&self, max: usize) -> UnansweredCalls {
        let mut calls: Vec<_> = self
            .pending
            .iter()
            .filter_map(|(id, pending)| match &pending.purpose {
                PendingPurpose::Caller { started, .. } => Some((*started, *id, pending)),
                _ => None,
            })
            .collect();
        let total = calls.len();
        calls.sort_unstable_by_key(|(started, id, _)| Reverse((*started, *id)));
        calls.truncate(max);
        let waiting: HashMap<u64, &OutboundRequest> = self.unsent.iter().map(|(id, request)| (*id, request)).collect();
        let describe = |(since, id, pending): (Instant, u64, &PendingRequest)| {
            let request = pending.sent.as_ref().map(SentRequest::request).or_else(|| waiting.get(&id).copied())?;
            Some(UnansweredCall {
                id,
                method: request.method().to_owned(),
                tool: request.tool().map(str::to_owned),
                client: request.client().and_then(ClientFacts::name),
                since,
            })
        };
        UnansweredCalls { total, newest: calls.into_iter().filter_map(describe).collect() }
    }

    /// Returns the number of calls with an id lower than `end`.
    pub fn callers_below(&self, end: u64) -> usize {
        let callers =
            self.pending.iter().filter(|(_, pending)| matches!(pending.purpose, PendingPurpose::Caller { .. }));
        callers.filter(|(id, _)| **id < end).count()
    }

    pub(crate) fn fail_all(&mut self, reason: &str) {
        self.deadlines.clear();
        // Settled in call order, so that the outcomes of an instance's calls have a deterministic order.
        let mut pending: Vec<_> = self.pending.drain().collect();
        pending.sort_unstable_by_key(|(id, _)| *id);
        for (_, mut pending) in pending {
            let fate = if may_have_reached_server(&pending, self.written) {
                CallFate::MaybeExecuted
            } else {
                CallFate::NotSent
            };
            let error = || CallError::Terminated { fate, reason: reason.to_owned() };
            pending.fail_span(error);
            if let PendingPurpose::Caller { mut ticket, .. } = pending.purpose {
                ticket.fate = fate;
                ticket.fail(error());
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
