//! Watches the configuration files while the satellite runs, so that changes are applied.
//!
//! Only the content decides, not the modification time or the inode: the files are small and read every second, so no
//! editor, symbolic link or clock can hide or fake a change. A change counts when the next check finds the same
//! content, because a half-written file looks like a complete one. A missing or empty file must stay so for longer.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::secret::Secret;
use tokio::time::{Interval, MissedTickBehavior, interval_at};

use crate::config::{ConfigFileContent, ConfigFileError};

const INTERVAL: Duration = Duration::from_secs(1);
/// Number of checks, after the first, that must find a file missing or empty before that counts.
const GONE_LOOKS: u32 = 4;
/// Number of checks after which a rejected configuration is tried again: a file that it refers to may exist by now.
const AGAIN_LOOKS: u32 = 5;
/// Number of consecutive checks with different content after which a warning is logged.
const RESTLESS_LOOKS: u32 = 30;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ConfigTexts {
    pub(crate) config: Option<ConfigFileContent>,
    pub(crate) mcp_json: Option<ConfigFileContent>,
}

impl ConfigTexts {
    /// Turns a file that has become empty since `before` into an unreadable one: an editor without disk space leaves
    /// such a file, and applying it would remove every server.
    fn after(mut self, before: &Self) -> Self {
        for (now, before) in [(&mut self.config, &before.config), (&mut self.mcp_json, &before.mcp_json)] {
            let is_empty = |held: &ConfigFileContent| held.as_ref().is_ok_and(is_blank);
            if now.as_ref().is_some_and(is_empty) && !before.as_ref().is_some_and(is_empty) {
                *now = Some(Err(ConfigFileError {
                    message: "the configuration is empty".to_owned(),
                    hint: "write it again; if no server is to run any more, reload (SIGHUP)",
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

pub(crate) struct ConfigWatch {
    read: Arc<dyn Fn() -> ConfigTexts + Send + Sync>,
    ticks: Interval,
    pub(crate) is_on: bool,
    eye: ChangeDetector,
}

impl ConfigWatch {
    /// Watches the files that `read` reads. `known` contains their content when the running configuration was read.
    pub(crate) fn new(read: Arc<dyn Fn() -> ConfigTexts + Send + Sync>, known: ConfigTexts, is_on: bool) -> Self {
        let mut ticks = interval_at(tokio::time::Instant::now() + INTERVAL, INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { read, ticks, is_on, eye: ChangeDetector::new(known) }
    }

    /// Waits for changed content that is to be applied. Cancel-safe: a dropped call loses no change.
    pub(crate) async fn changed(&mut self) -> ConfigTexts {
        loop {
            self.ticks.tick().await;
            if !self.is_on {
                continue;
            }
            let read = Arc::clone(&self.read);
            // An error means that `read` panicked; the next check tries again.
            let Ok(now) = tokio::task::spawn_blocking(move || read()).await else { continue };
            if let Some(texts) = self.eye.look(now) {
                return texts;
            }
        }
    }

    pub(crate) fn read(&self) -> ConfigTexts {
        (self.read)()
    }

    /// Returns why these texts were rejected, if they were tried last: the same reason is not reported again.
    pub(crate) fn refusal(&self, texts: &ConfigTexts) -> Option<String> {
        self.eye.refusal(texts)
    }

    /// Records that these texts were tried, and why they were rejected if they were.
    pub(crate) fn tried(&mut self, texts: ConfigTexts, refused: Option<String>) {
        self.eye.tried(texts, refused);
    }
}

struct ChangeDetector {
    /// Texts that were tried last, applied or rejected.
    known: ConfigTexts,
    refused: Option<String>,
    /// Number of checks since `known` was tried.
    since: u32,
    seen: ConfigTexts,
    /// Number of earlier consecutive checks with the same texts as `seen`.
    same: u32,
    restless: u32,
}

impl ChangeDetector {
    fn new(known: ConfigTexts) -> Self {
        Self { seen: known.clone(), known, refused: None, since: 0, same: 0, restless: 0 }
    }

    fn look(&mut self, now: ConfigTexts) -> Option<ConfigTexts> {
        let now = now.after(&self.known);
        if now == self.seen {
            self.same = self.same.saturating_add(1);
            self.restless = 0;
        } else {
            self.same = 0;
            self.restless = self.restless.saturating_add(1);
            if self.restless == RESTLESS_LOOKS {
                tracing::warn!(
                    "the configuration is being written all the time; it is applied when it is unchanged for a second, \
                     or by a reload (SIGHUP)"
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

    fn refusal(&self, texts: &ConfigTexts) -> Option<String> {
        self.refused.clone().filter(|_| self.known == *texts)
    }

    fn tried(&mut self, texts: ConfigTexts, refused: Option<String>) {
        (self.known, self.refused, self.since) = (texts, refused, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> ConfigTexts {
        ConfigTexts { config: Some(Ok(text.into())), mcp_json: None }
    }

    fn gone() -> ConfigTexts {
        ConfigTexts { config: Some(Err(ConfigFileError { message: "gone".to_owned(), hint: "" })), mcp_json: None }
    }

    /// Returns the outcomes of consecutive checks that find these texts. Every change is accepted.
    fn looks(eye: &mut ChangeDetector, seen: &[ConfigTexts]) -> Vec<Option<String>> {
        let mut look = |now: &ConfigTexts| {
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
        let mut eye = ChangeDetector::new(text("one"));
        let seen = ["one", "two", "two", "two", "thr", "three", "three", "two", "two"].map(text);
        let found: Vec<_> =
            looks(&mut eye, &seen).into_iter().enumerate().filter_map(|(at, found)| Some((at, found?))).collect();
        assert_eq!(found, [(2, "two".to_owned()), (6, "three".to_owned()), (8, "two".to_owned())]);
    }

    #[test]
    fn what_is_back_before_it_counted_was_never_gone() {
        let mut eye = ChangeDetector::new(text("one"));
        for spoiled in [text("half"), text(""), gone()] {
            assert_eq!(looks(&mut eye, &[spoiled, text("one"), text("one")]), [None, None, None]);
        }
        let away = [gone(), gone(), gone(), gone(), text("one")];
        assert_eq!(looks(&mut eye, &away), [const { None }; 5]);
    }

    #[test]
    fn a_file_that_stays_gone_or_empty_counts_in_the_end() {
        for (spoiled, said) in [(gone(), "gone"), (text(" \n"), "the configuration is empty")] {
            let mut eye = ChangeDetector::new(text("one"));
            let found = looks(&mut eye, &vec![spoiled; 8]);
            assert_eq!(found.iter().position(Option::is_some), Some(4), "{found:?}");
            assert_eq!(found.into_iter().flatten().collect::<Vec<_>>(), [said]);
        }
    }

    #[test]
    fn a_person_may_say_that_an_empty_file_is_meant() {
        let mut eye = ChangeDetector::new(text("one"));
        eye.tried(text(""), None);
        assert_eq!(looks(&mut eye, &vec![text(""); 8]), vec![None; 8]);
        assert_eq!(looks(&mut eye, &[text("two"), text("two")]), [None, Some("two".to_owned())]);
    }

    #[test]
    fn what_was_refused_is_told_once_and_tried_again() {
        let mut eye = ChangeDetector::new(text("one"));
        eye.look(text("bad"));
        assert_eq!(eye.look(text("bad")), Some(text("bad")));
        assert_eq!(eye.refusal(&text("bad")), None, "the rejection is new");
        eye.tried(text("bad"), Some("no secret".to_owned()));
        let again = (1..=4).filter_map(|_| eye.look(text("bad"))).count();
        assert_eq!((again, eye.look(text("bad"))), (0, Some(text("bad"))));
        assert_eq!(eye.refusal(&text("bad")).as_deref(), Some("no secret"));
        assert_eq!(eye.refusal(&text("worse")), None, "a rejection of another text is new");
        // The file that it refers to exists now.
        eye.tried(text("bad"), None);
        assert_eq!(eye.refusal(&text("bad")), None);
        assert_eq!((1..=20).filter_map(|_| eye.look(text("bad"))).count(), 0);
    }

    #[test]
    fn what_is_written_all_the_time_is_not_taken_on_before_it_is_at_rest() {
        let mut eye = ChangeDetector::new(text("0"));
        let restless: Vec<ConfigTexts> = (1..=100).map(|number| text(&number.to_string())).collect();
        assert_eq!(looks(&mut eye, &restless), vec![None; 100]);
        assert_eq!(looks(&mut eye, &[text("100")]), [Some("100".to_owned())]);
    }

    #[test]
    fn two_files_that_change_together_are_taken_on_together() {
        let both = |config: &str, mcp_json: &str| ConfigTexts {
            config: Some(Ok(config.into())),
            mcp_json: Some(Ok(mcp_json.into())),
        };
        let mut eye = ChangeDetector::new(both("a", "b"));
        let seen = [both("A", "b"), both("A", "B"), both("A", "B")];
        let found: Vec<_> = seen.iter().map(|now| eye.look(now.clone())).collect();
        assert_eq!(found, [None, None, Some(both("A", "B"))]);
    }
}
