//! What a session waits for: each request of ours, what it is for, and until when.

use std::collections::{BTreeSet, HashMap};

use tokio::time::{Duration, Instant};

use super::rounds::Rounds;
use crate::audience::Origin;
use crate::calls::{Ticket, Wanted};
use crate::model::exit::{CallError, Fate};
use crate::model::failure::{Failure, FailureKind};

/// What a response is for.
pub(super) enum Purpose {
    Caller {
        ticket: Ticket,
        /// The number that it got at the door.
        door: u64,
        started: Instant,
        timeout: Duration,
        repeatable: bool,
        /// It is written in the stateless era: whatever is answered is for its client to read.
        through: bool,
        /// Where a client of the host has made it.
        behalf: Option<Box<Behalf>>,
    },
    Handshake,
    List,
    /// A look whether anybody is there.
    Check,
    /// The stream of what a server without sessions says by itself.
    Listen,
    /// Whether a server with sessions can do without.
    Discover,
}

/// Whose call it is.
pub(super) struct Behalf {
    pub(super) origin: Origin,
    /// The client's own progress token, as JSON text.
    pub(super) token: Option<Box<str>>,
}

pub(super) struct Pending {
    pub(super) purpose: Purpose,
    pub(super) deadline: Instant,
    /// Where its first byte is in all that was ever queued for writing; `None` while the request waits for its turn.
    pub(super) starts_at: Option<u64>,
    /// An attempt that has failed may have reached the server all the same.
    pub(super) reached: bool,
    /// How often it was sent.
    pub(super) attempts: u32,
    /// What is asked, where it may have to be asked again.
    pub(super) request: Option<Wanted>,
    /// What its server has asked for, if it has.
    pub(super) rounds: Option<Box<Rounds>>,
}

impl Pending {
    pub(super) fn new(purpose: Purpose, deadline: Instant) -> Self {
        Self { purpose, deadline, starts_at: None, reached: false, attempts: 0, request: None, rounds: None }
    }

    /// Records a failed attempt. A server that refused the request (rate limit, authorization, size, format or an
    /// expired session) has not executed it, unless it had begun to respond.
    pub(super) fn failed(&mut self, failure: &Failure) {
        self.starts_at = None;
        self.reached |= failure.answering
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

    /// Its caller has no result.
    pub(super) fn fail(self, error: CallError) {
        if let Purpose::Caller { ticket, .. } = self.purpose {
            ticket.fail(error);
        }
    }

    /// Whether it is written in the stateless era.
    pub(super) fn goes_through(&self) -> bool {
        matches!(self.purpose, Purpose::Caller { through: true, .. })
    }

    /// Whether it belongs to no session, whatever there is one for.
    pub(super) fn is_alone(&self) -> bool {
        self.goes_through() || matches!(self.purpose, Purpose::Listen | Purpose::Discover)
    }

    /// Whether the server knows of it, as far as can be told.
    pub(super) fn was_asked(&self) -> bool {
        self.reached || self.starts_at.is_some()
    }
}

/// The requests that are not answered. Dropped with the session, whoever ends it: each caller then learns its fate.
#[derive(Default)]
pub(super) struct Calls {
    pub(super) pending: HashMap<u64, Pending>,
    pub(super) deadlines: BTreeSet<(Instant, u64)>,
    pub(super) written: u64,
}

impl Calls {
    pub(super) fn insert(&mut self, id: u64, pending: Pending) {
        self.deadlines.insert((pending.deadline, id));
        self.pending.insert(id, pending);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Pending> {
        let pending = self.pending.remove(&id)?;
        self.deadlines.remove(&(pending.deadline, id));
        if self.pending.is_empty() {
            // Room for four is more than a kilobyte, and most instances are idle.
            self.pending = HashMap::new();
        }
        Some(pending)
    }

    /// A caller's, by the number that it got at the door, and the number under which it was sent last.
    pub(super) fn remove_caller(&mut self, door: u64) -> Option<(u64, Pending)> {
        let is_it = |pending: &Pending| matches!(pending.purpose, Purpose::Caller { door: its, .. } if its == door);
        let id = if self.pending.contains_key(&door) {
            door
        } else {
            *self.pending.iter().find(|(_, pending)| is_it(pending))?.0
        };
        Some((id, self.remove(id)?))
    }

    /// Whether the server may have got it, as far as is known now.
    pub(super) fn may_have_got(&self, pending: &Pending) -> bool {
        may_have_got(pending, self.written)
    }

    /// Progress: later, but never beyond the hard cap.
    pub(super) fn extend(&mut self, id: u64, now: Instant, cap: Duration) {
        let Some(pending) = self.pending.get_mut(&id) else { return };
        let Purpose::Caller { started, timeout, .. } = &pending.purpose else { return };
        let deadline = (now + *timeout).min(*started + cap.max(*timeout));
        self.deadlines.remove(&(pending.deadline, id));
        pending.deadline = deadline;
        self.deadlines.insert((deadline, id));
    }

    /// The end has begun: nothing else is waited for any more.
    pub(super) fn retain_callers(&mut self) {
        self.pending.retain(|_, pending| matches!(pending.purpose, Purpose::Caller { .. }));
    }

    /// Nobody waits for the opening of a server any more that was opened otherwise.
    pub(super) fn forget_handshakes(&mut self) {
        let Self { pending, deadlines, .. } = self;
        pending.retain(|id, pending| {
            let is_kept = !matches!(pending.purpose, Purpose::Handshake);
            if !is_kept {
                deadlines.remove(&(pending.deadline, *id));
            }
            is_kept
        });
    }

    /// Calls with numbers below this one.
    pub(super) fn callers_below(&self, end: u64) -> usize {
        let callers = self.pending.iter().filter(|(_, pending)| matches!(pending.purpose, Purpose::Caller { .. }));
        callers.filter(|(id, _)| **id < end).count()
    }

    pub(super) fn settle(&mut self, reason: &str) {
        self.deadlines.clear();
        // In the order in which they were made: what comes of an instance's calls is told in the same order every time.
        let mut pending: Vec<_> = self.pending.drain().collect();
        pending.sort_unstable_by_key(|(id, _)| *id);
        for (_, pending) in pending {
            let fate = if may_have_got(&pending, self.written) { Fate::MaybeExecuted } else { Fate::NotSent };
            if let Purpose::Caller { mut ticket, .. } = pending.purpose {
                ticket.fate = fate;
                ticket.fail(CallError::Terminated { fate, reason: reason.to_owned() });
            }
        }
    }
}

/// Whether the server may have got a request, once so much of all that was queued has been written.
fn may_have_got(pending: &Pending, written: u64) -> bool {
    pending.reached || pending.starts_at.is_some_and(|at| at < written)
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.settle("the run ended");
    }
}
