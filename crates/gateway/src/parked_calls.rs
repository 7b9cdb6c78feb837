//! Stateless calls that wait for an answer of their client. The response lists the questions and contains a
//! `requestState`. The client repeats its request with the answers and that state, which leads to the waiting call. A
//! state is valid once, for the same user, endpoint and request; other uses find no call, and the client does not learn
//! the reason.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_protocol::rpc::RpcMessage;
use ring::digest::{Context, SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq as _;
use tokio::time::{Duration, Instant};

use super::access::User;
use super::endpoint_id::EndpointId;
use super::era::can_require_input;
use super::sessions::{parse_key, split_key};
use super::tools::raw::JsonMembers;

// Maximum number of waiting calls, per user and in total.
pub(crate) const PER_USER_MAX: usize = 32;
pub(crate) const TOTAL_MAX: usize = 1024;
// Divisors of the body budgets (per user and in total) that give the share of waiting calls. A waiting call costs its
// client no connection, so other requests need the larger part.
const PER_USER_DIVISOR: usize = 16;
const TOTAL_DIVISOR: usize = 4;
// Maximum time that a call waits for its client.
pub(crate) const PARKED_TIME_MAX: Duration = Duration::from_secs(5 * 60);

#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ParkedRequestIdentity {
    team: TeamId,
    user: UserId,
    endpoint: EndpointId,
    method: Box<str>,
    // Digest of the params without `_meta`, `inputResponses` and `requestState`.
    params: [u8; 32],
}

impl ParkedRequestIdentity {
    pub(crate) fn new(user: &User, endpoint: &EndpointId, message: &RpcMessage) -> Self {
        let mut digest = Context::new(&SHA256);
        // Requests with other methods are never parked.
        let params = message.params().filter(|_| message.method().is_some_and(can_require_input));
        let params = params.and_then(JsonMembers::read).unwrap_or_default();
        let mut same: Vec<(&str, &str)> =
            params.iter().filter(|(name, _)| !matches!(*name, "_meta" | "inputResponses" | "requestState")).collect();
        same.sort_unstable();
        for part in same.into_iter().flat_map(|(name, value)| [name, value]) {
            digest.update(&part.len().to_le_bytes());
            digest.update(part.as_bytes());
        }
        let mut params = [0; 32];
        params.copy_from_slice(digest.finish().as_ref());
        let method = message.method().unwrap_or_default().into();
        Self { team: user.team.clone(), user: user.user.clone(), endpoint: endpoint.clone(), method, params }
    }

    fn is_same_user(&self, other: &Self) -> bool {
        self.team == other.team && self.user == other.user
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ParkedLimits {
    per_user: usize,
    total: usize,
}

impl ParkedLimits {
    pub(crate) fn from_budgets(user_bytes: usize, total_bytes: usize) -> Self {
        Self { per_user: user_bytes / PER_USER_DIVISOR, total: total_bytes / TOTAL_DIVISOR }
    }
}

pub(crate) struct ParkedCalls<T> {
    random: SystemRandom,
    table: Mutex<HashMap<u64, ParkedCall<T>>>,
}

struct ParkedCall<T> {
    secret: [u8; 16],
    identity: ParkedRequestIdentity,
    bytes: usize,
    expires_at: Instant,
    call: T,
}

impl<T> Default for ParkedCalls<T> {
    fn default() -> Self {
        Self { random: SystemRandom::new(), table: Mutex::default() }
    }
}

impl<T> fmt::Debug for ParkedCalls<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Parked({})", self.table().len())
    }
}

impl<T> ParkedCalls<T> {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, ParkedCall<T>>> {
        // No call under the lock can leave the value half changed, so a poisoned lock is still usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of stored calls.
    pub(crate) fn len(&self) -> usize {
        self.table().len()
    }

    /// Stores a call with a body of `bytes`. Returns the `requestState`, or the call if there is no capacity.
    pub(crate) fn put(
        &self,
        bound: ParkedRequestIdentity,
        bytes: usize,
        limits: ParkedLimits,
        now: Instant,
        what: T,
    ) -> Result<String, T> {
        let mut key = [0; 24];
        let mut table = self.table();
        let (mut user_calls, mut user_bytes, mut total_bytes) = (0, bytes, bytes);
        for entry in table.values() {
            total_bytes += entry.bytes;
            if entry.identity.is_same_user(&bound) {
                user_calls += 1;
                user_bytes += entry.bytes;
            }
        }
        let is_crowded = user_calls >= PER_USER_MAX || table.len() >= TOTAL_MAX;
        if is_crowded || user_bytes > limits.per_user || total_bytes > limits.total {
            return Err(what);
        }
        let (number, secret) = loop {
            if self.random.fill(&mut key).is_err() {
                return Err(what);
            }
            let (number, secret) = split_key(&key);
            if !table.contains_key(&number) {
                break (number, secret);
            }
        };
        table.insert(
            number,
            ParkedCall { secret, identity: bound, bytes, expires_at: now + PARKED_TIME_MAX, call: what },
        );
        Ok(format!("{number:016x}{:032x}", u128::from_be_bytes(secret)))
    }

    /// Removes and returns the call of a state; `None` if the state does not belong to this request.
    pub(crate) fn take(&self, state: &str, identity: &ParkedRequestIdentity, now: Instant) -> Option<T> {
        let (number, secret) = parse_key(state)?;
        let mut table = self.table();
        let entry = table.get(&number)?;
        let is_it = bool::from(secret.ct_eq(&entry.secret)) && entry.identity == *identity && now < entry.expires_at;
        is_it.then(|| table.remove(&number).map(|entry| entry.call)).flatten()
    }

    pub(crate) fn sweep(&self, now: Instant, is_over: impl Fn(&T) -> bool) {
        let mut table = self.table();
        let is_expired = |entry: &ParkedCall<T>| now >= entry.expires_at || is_over(&entry.call);
        let numbers: Vec<u64> =
            table.iter().filter(|(_, entry)| is_expired(entry)).map(|(number, _)| *number).collect();
        let removed: Vec<_> = numbers.into_iter().filter_map(|number| table.remove(&number)).collect();
        drop(table);
        // Dropping a call may call back into this table.
        drop(removed);
    }

    pub(crate) fn clear(&self) {
        let removed = std::mem::take(&mut *self.table());
        drop(removed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::super::sessions::tests::user;
    use super::*;

    fn request(text: &str) -> RpcMessage {
        RpcMessage::parse(format!(r#"{{"jsonrpc":"2.0","id":1,{text}}}"#).into()).unwrap()
    }

    fn identity(name: &str, endpoint: &EndpointId, text: &str) -> ParkedRequestIdentity {
        ParkedRequestIdentity::new(&user(name).user, endpoint, &request(text))
    }

    const ROOM: ParkedLimits = ParkedLimits { per_user: 100, total: 2000 };
    const CALL: &str = r#""method":"tools/call","params":{"name":"a","arguments":{"x":1}}"#;

    #[test]
    fn a_state_is_valid_once_for_the_same_user_and_request() {
        let (parked, now) = (ParkedCalls::default(), Instant::now());
        let alices = identity("alice", &EndpointId::Tools, CALL);
        let state = parked.put(alices.clone(), 1, ROOM, now, "call").unwrap();
        assert_eq!(state.len(), 48);
        for (name, endpoint, text) in [
            ("bob", EndpointId::Tools, CALL),
            ("alice", EndpointId::Flat, CALL),
            ("alice", EndpointId::Tools, r#""method":"tools/call","params":{"name":"a","arguments":{"x":2}}"#),
            ("alice", EndpointId::Tools, r#""method":"tools/call","params":{"name":"b","arguments":{"x":1}}"#),
            ("alice", EndpointId::Tools, r#""method":"prompts/get","params":{"name":"a","arguments":{"x":1}}"#),
        ] {
            assert_eq!(parked.take(&state, &identity(name, &endpoint, text), now), None, "{name} {text}");
        }
        let flipped = format!("{}{}", &state[..47], if state.ends_with('0') { '1' } else { '0' });
        for wrong in [flipped.as_str(), &state[..47], "", "x"] {
            assert_eq!(parked.take(wrong, &alices, now), None);
        }
        // Changed metadata and another order of members do not matter.
        let again = r#""method":"tools/call","params":{"requestState":"s","arguments":{"x":1},"inputResponses":{},"_meta":{},"name":"a"}"#;
        assert_eq!(parked.take(&state, &identity("alice", &EndpointId::Tools, again), now), Some("call"));
        assert_eq!(parked.take(&state, &alices, now), None, "the state was used");
    }

    #[test]
    fn a_parked_call_expires() {
        let (parked, now) = (ParkedCalls::default(), Instant::now());
        let alices = identity("alice", &EndpointId::Tools, CALL);
        let (one, other) = (
            parked.put(alices.clone(), 1, ROOM, now, 1).unwrap(),
            parked.put(alices.clone(), 1, ROOM, now, 2).unwrap(),
        );
        parked.sweep(now + PARKED_TIME_MAX - Duration::from_millis(1), |call| *call == 2);
        assert_eq!(parked.take(&other, &alices, now), None);
        assert_eq!(parked.take(&one, &alices, now + PARKED_TIME_MAX), None, "the state has expired");
        parked.sweep(now + PARKED_TIME_MAX, |_| false);
        assert_eq!(parked.take(&one, &alices, now), None);
        parked.put(alices, 1, ROOM, now, 3).unwrap();
        parked.clear();
        assert!(parked.table().is_empty());
    }

    #[test]
    fn parked_calls_are_limited_per_user_and_in_total() {
        let (parked, now) = (ParkedCalls::default(), Instant::now());
        let put = |name: &str| parked.put(identity(name, &EndpointId::Tools, CALL), 1, ROOM, now, ()).is_ok();
        assert!((0..PER_USER_MAX).all(|_| put("alice")) && !put("alice"));
        let users = TOTAL_MAX / PER_USER_MAX - 1;
        assert!((0..users).all(|user| (0..PER_USER_MAX).all(|_| put(&user.to_string()))));
        assert!(!put("bob"));
    }

    #[test]
    fn the_memory_of_parked_calls_is_limited_per_user_and_in_total() {
        let (parked, now) = (ParkedCalls::default(), Instant::now());
        let limits = ParkedLimits::from_budgets(1600, 1000);
        let put = |name: &str, bytes| parked.put(identity(name, &EndpointId::Tools, CALL), bytes, limits, now, ());
        assert!(put("alice", 101).is_err(), "one call may be too large");
        let state = put("alice", 60).unwrap();
        assert!(put("alice", 41).is_err() && put("alice", 40).is_ok());
        assert!(put("bob", 100).is_ok() && put("carol", 51).is_err() && put("carol", 50).is_ok());
        // A resumed call frees its capacity.
        assert!(parked.take(&state, &identity("alice", &EndpointId::Tools, CALL), now).is_some());
        assert!(put("carol", 50).is_ok() && put("alice", 11).is_err() && put("alice", 10).is_ok());
    }
}
