//! Each caller gets its own answer, once. Every call says what no other call says, and the same must come back.

use std::collections::HashSet;
use std::time::Duration;

use super::Broken;
use crate::load::types::Invariant;

/// What one caller asked and got. Each caller has its own, so that nobody waits for a lock.
#[derive(Debug, Default)]
pub struct Answers {
    open: HashSet<Box<str>>,
    wrong: Vec<String>,
}

impl Answers {
    /// A caller that has asked nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A call with this token is made.
    pub fn asked(&mut self, token: &str) {
        if !self.open.insert(token.into()) {
            self.wrong.push(format!("the harness asked {token} twice"));
        }
    }

    /// The call with this token was answered so.
    pub fn answered(&mut self, token: &str, said: &str) {
        self.settled(token);
        if said != token {
            // What came instead may be of any length.
            let said: String = said.chars().take(60).collect();
            self.wrong.push(format!("the call {token} got the answer `{said}`"));
        }
    }

    /// The call with this token ended with an error.
    pub fn failed(&mut self, token: &str) {
        self.settled(token);
    }

    fn settled(&mut self, token: &str) {
        if !self.open.remove(token) {
            self.wrong.push(format!("the call {token} was answered more than once"));
        }
    }

    pub(super) fn settle(self, broken: &mut Broken) {
        let Self { open, wrong } = self;
        let mut open: Vec<_> = open.into_iter().collect();
        open.sort();
        let never = open.into_iter().map(|token| format!("the call {token} was never answered"));
        for what in wrong.into_iter().chain(never) {
            broken.push(Invariant::OwnAnswer, Duration::ZERO, None, what);
        }
    }
}
