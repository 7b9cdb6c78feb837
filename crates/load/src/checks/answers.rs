//! Check of [`Invariant::OwnAnswer`]: each caller gets the response to its own call, exactly once. Each call contains a
//! unique token, which the response must repeat.

use std::collections::HashSet;
use std::time::Duration;

use super::violations::FoundViolations;
use crate::types::Invariant;

/// Tokens of the calls of one caller. Each caller has its own instance, so that no lock is needed.
#[derive(Debug, Default)]
pub struct ResponseCheck {
    open: HashSet<Box<str>>,
    repeated: Vec<String>,
}

impl ResponseCheck {
    /// Creates an instance without calls.
    pub fn new() -> Self {
        Self::default()
    }

    pub fn record_call(&mut self, token: &str) {
        if !self.open.insert(token.into()) {
            self.repeated.push(format!("the harness made the call {token} twice"));
        }
    }

    pub fn record_response(&mut self, token: &str, text: &str) {
        self.close_call(token);
        if text != token {
            // A wrong response may have any length.
            let text: String = text.chars().take(60).collect();
            self.repeated.push(format!("the call {token} got the answer `{text}`"));
        }
    }

    /// Records that the call with this token ended with an error.
    pub fn record_error(&mut self, token: &str) {
        self.close_call(token);
    }

    fn close_call(&mut self, token: &str) {
        if !self.open.remove(token) {
            self.repeated.push(format!("the call {token} was answered more than once"));
        }
    }

    pub(super) fn finish(self, violations: &mut FoundViolations) {
        let Self { open, repeated } = self;
        let mut open: Vec<_> = open.into_iter().collect();
        open.sort();
        let never = open.into_iter().map(|token| format!("the call {token} was never answered"));
        for what in repeated.into_iter().chain(never) {
            violations.push(Invariant::OwnAnswer, Duration::ZERO, None, what);
        }
    }
}
