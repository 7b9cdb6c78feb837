//! Looks at the configuration's files while the satellite runs, so that what is written there is taken on.
//!
//! What they hold decides, never their times or which file it is: a few kilobytes are read each second, and no editor,
//! symbolic link or clock can hide a change or make one up. What a look sees changed counts when the next one sees the
//! same, because nobody can tell a file that is half written from one that is whole. A file that is gone or empty is
//! given more time.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::secret::Secret;
use tokio::time::{Interval, MissedTickBehavior, interval_at};

use crate::config::{Held, Unread};

/// The time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// A file that gives no text counts when so many looks after the first have seen it so.
const GONE_LOOKS: u32 = 4;
/// What was refused is tried again after so many looks: what it refers to may be there by now.
const AGAIN_LOOKS: u32 = 5;
/// Files that so many looks in a row have each seen changed are complained of.
const RESTLESS_LOOKS: u32 = 30;

/// What the configuration's files held when they were read, of those that were named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Texts {
    /// Of `--config`.
    pub(crate) config: Option<Held>,
    /// Of `--mcp-json`.
    pub(crate) mcp_json: Option<Held>,
}

impl Texts {
    /// These, with a file that is empty now and was not before like one that cannot be read: an editor that has no room
    /// to write leaves such a file, and it would be the end of every server.
    fn after(mut self, before: &Self) -> Self {
        for (now, before) in [(&mut self.config, &before.config), (&mut self.mcp_json, &before.mcp_json)] {
            let is_empty = |held: &Held| held.as_ref().is_ok_and(is_blank);
            if now.as_ref().is_some_and(is_empty) && !before.as_ref().is_some_and(is_empty) {
                *now = Some(Err(Unread {
                    message: "the configuration is empty".to_owned(),
                    hint: "write it again; if nothing is to run any more, say so with a reload (SIGHUP)",
                }));
            }
        }
        self
    }

    fn are_all_there(&self) -> bool {
        [&self.config, &self.mcp_json].into_iter().flatten().all(Result::is_ok)
    }
}

fn is_blank(text: &Secret) -> bool {
    text.expose().trim().is_empty()
}

/// See the module.
pub(crate) struct Watch {
    read: Arc<dyn Fn() -> Texts + Send + Sync>,
    ticks: Interval,
    /// Whether the configuration wants to be watched.
    pub(crate) is_on: bool,
    eye: Eye,
}

impl Watch {
    /// For files that `read` reads, and that held `known` when the configuration that runs was made of them.
    pub(crate) fn new(read: Arc<dyn Fn() -> Texts + Send + Sync>, known: Texts, is_on: bool) -> Self {
        let mut ticks = interval_at(tokio::time::Instant::now() + INTERVAL, INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { read, ticks, is_on, eye: Eye::new(known) }
    }

    /// What the files hold when that is to be taken on. Nothing is lost if this is dropped and called again.
    pub(crate) async fn changed(&mut self) -> Texts {
        loop {
            self.ticks.tick().await;
            if !self.is_on {
                continue;
            }
            let read = Arc::clone(&self.read);
            // An error says that it panicked: the next look is another one.
            let Ok(now) = tokio::task::spawn_blocking(move || read()).await else { continue };
            if let Some(texts) = self.eye.look(now) {
                return texts;
            }
        }
    }

    /// What the files hold now, at rest or not.
    pub(crate) fn read(&self) -> Texts {
        (self.read)()
    }

    /// Why these were refused, if they are what was tried last: the same reason again is no news.
    pub(crate) fn refusal(&self, texts: &Texts) -> Option<String> {
        self.eye.refusal(texts)
    }

    /// These were tried, because a look or a person said so, and were `refused` for this reason or taken on.
    pub(crate) fn tried(&mut self, texts: Texts, refused: Option<String>) {
        self.eye.tried(texts, refused);
    }
}

/// What was seen, and what follows from it.
struct Eye {
    /// What was tried last, good or not.
    known: Texts,
    /// Why that was refused.
    refused: Option<String>,
    /// So many looks ago.
    since: u32,
    /// What the last look saw.
    seen: Texts,
    /// So many looks before that one saw the same.
    same: u32,
    /// So many looks in a row have each seen something else.
    restless: u32,
}

impl Eye {
    fn new(known: Texts) -> Self {
        Self { seen: known.clone(), known, refused: None, since: 0, same: 0, restless: 0 }
    }

    fn look(&mut self, now: Texts) -> Option<Texts> {
        let now = now.after(&self.known);
        if now == self.seen {
            self.same = self.same.saturating_add(1);
            self.restless = 0;
        } else {
            self.same = 0;
            self.restless = self.restless.saturating_add(1);
            if self.restless == RESTLESS_LOOKS {
                tracing::warn!(
                    "the configuration is being written all the time; it is taken on when it is at rest for a second, or \
                     with a reload (SIGHUP)"
                );
            }
        }
        self.seen = now;
        if self.seen == self.known {
            self.since = self.since.saturating_add(1);
            return (self.refused.is_some() && self.since.is_multiple_of(AGAIN_LOOKS)).then(|| self.known.clone());
        }
        let enough = if self.seen.are_all_there() { 1 } else { GONE_LOOKS };
        (self.same >= enough).then(|| self.seen.clone())
    }

    fn refusal(&self, texts: &Texts) -> Option<String> {
        self.refused.clone().filter(|_| self.known == *texts)
    }

    fn tried(&mut self, texts: Texts, refused: Option<String>) {
        (self.known, self.refused, self.since) = (texts, refused, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Texts {
        Texts { config: Some(Ok(text.into())), mcp_json: None }
    }

    fn gone() -> Texts {
        Texts { config: Some(Err(Unread { message: "gone".to_owned(), hint: "" })), mcp_json: None }
    }

    /// What comes of looks that see this, one after the other: what is taken on is good.
    fn looks(eye: &mut Eye, seen: &[Texts]) -> Vec<Option<String>> {
        let mut look = |now: &Texts| {
            let found = eye.look(now.clone())?;
            eye.tried(found.clone(), None);
            Some(match found.config? {
                Ok(text) => text.expose().to_owned(),
                Err(why) => why.message,
            })
        };
        seen.iter().map(&mut look).collect()
    }

    #[test]
    fn what_changes_is_taken_on_when_two_looks_have_seen_the_same_and_once() {
        let mut eye = Eye::new(text("one"));
        let seen = ["one", "two", "two", "two", "thr", "three", "three", "two", "two"].map(text);
        let found: Vec<_> =
            looks(&mut eye, &seen).into_iter().enumerate().filter_map(|(at, found)| Some((at, found?))).collect();
        assert_eq!(found, [(2, "two".to_owned()), (6, "three".to_owned()), (8, "two".to_owned())]);
    }

    #[test]
    fn what_is_back_before_it_counted_was_never_gone() {
        let mut eye = Eye::new(text("one"));
        for spoiled in [text("half"), text(""), gone()] {
            assert_eq!(looks(&mut eye, &[spoiled, text("one"), text("one")]), [None, None, None]);
        }
        let away = [gone(), gone(), gone(), gone(), text("one")];
        assert_eq!(looks(&mut eye, &away), [const { None }; 5]);
    }

    #[test]
    fn a_file_that_stays_gone_or_empty_counts_in_the_end() {
        for (spoiled, said) in [(gone(), "gone"), (text(" \n"), "the configuration is empty")] {
            let mut eye = Eye::new(text("one"));
            let found = looks(&mut eye, &vec![spoiled; 8]);
            assert_eq!(found.iter().position(Option::is_some), Some(4), "{found:?}");
            assert_eq!(found.into_iter().flatten().collect::<Vec<_>>(), [said]);
        }
    }

    #[test]
    fn a_person_may_say_that_an_empty_file_is_meant() {
        let mut eye = Eye::new(text("one"));
        eye.tried(text(""), None);
        assert_eq!(looks(&mut eye, &vec![text(""); 8]), vec![None; 8]);
        assert_eq!(looks(&mut eye, &[text("two"), text("two")]), [None, Some("two".to_owned())]);
    }

    #[test]
    fn what_was_refused_is_told_once_and_tried_again() {
        let mut eye = Eye::new(text("one"));
        eye.look(text("bad"));
        assert_eq!(eye.look(text("bad")), Some(text("bad")));
        assert_eq!(eye.refusal(&text("bad")), None, "it is news");
        eye.tried(text("bad"), Some("no secret".to_owned()));
        let again = (1..=4).filter_map(|_| eye.look(text("bad"))).count();
        assert_eq!((again, eye.look(text("bad"))), (0, Some(text("bad"))));
        assert_eq!(eye.refusal(&text("bad")).as_deref(), Some("no secret"));
        assert_eq!(eye.refusal(&text("worse")), None, "of another text it is news");
        // What it refers to is there.
        eye.tried(text("bad"), None);
        assert_eq!(eye.refusal(&text("bad")), None);
        assert_eq!((1..=20).filter_map(|_| eye.look(text("bad"))).count(), 0);
    }

    #[test]
    fn what_is_written_all_the_time_is_not_taken_on_before_it_is_at_rest() {
        let mut eye = Eye::new(text("0"));
        let restless: Vec<Texts> = (1..=100).map(|number| text(&number.to_string())).collect();
        assert_eq!(looks(&mut eye, &restless), vec![None; 100]);
        assert_eq!(looks(&mut eye, &[text("100")]), [Some("100".to_owned())]);
    }

    #[test]
    fn two_files_that_change_together_are_taken_on_together() {
        let both = |config: &str, mcp_json: &str| Texts {
            config: Some(Ok(config.into())),
            mcp_json: Some(Ok(mcp_json.into())),
        };
        let mut eye = Eye::new(both("a", "b"));
        let seen = [both("A", "b"), both("A", "B"), both("A", "B")];
        let found: Vec<_> = seen.iter().map(|now| eye.look(now.clone())).collect();
        assert_eq!(found, [None, None, Some(both("A", "B"))]);
    }
}
