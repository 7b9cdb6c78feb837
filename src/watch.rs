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
const MISSING_CHECKS: u32 = 4;
/// Number of checks after which a rejected configuration is tried again: a file that it refers to may exist by now.
const RETRY_CHECKS: u32 = 5;
/// Number of consecutive checks with different content after which a warning is logged.
const UNSTABLE_CHECKS: u32 = 30;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ConfigTexts {
    pub(crate) config: Option<ConfigFileContent>,
    pub(crate) mcp_json: Option<ConfigFileContent>,
}

impl ConfigTexts {
    /// Turns a file that has become empty since `before` into an unreadable one: an editor without disk space leaves
    /// such a file, and applying it would remove every server.
    fn reject_emptied(mut self, before: &Self) -> Self {
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

    fn is_complete(&self) -> bool {
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
    detector: ChangeDetector,
}

impl ConfigWatch {
    /// Watches the files that `read` reads. `known` contains their content when the running configuration was read.
    pub(crate) fn new(read: Arc<dyn Fn() -> ConfigTexts + Send + Sync>, known: ConfigTexts, is_on: bool) -> Self {
        let mut ticks = interval_at(tokio::time::Instant::now() + INTERVAL, INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { read, ticks, is_on, detector: ChangeDetector::new(known) }
    }

    /// Waits for changed content that is to be applied. Cancel-safe: a dropped call loses no change.
    pub(crate) async fn wait_changed(&mut self) -> ConfigTexts {
        loop {
            self.ticks.tick().await;
            if !self.is_on {
                continue;
            }
            let read = Arc::clone(&self.read);
            // An error means that `read` panicked; the next check tries again.
            let Ok(now) = tokio::task::spawn_blocking(move || read()).await else { continue };
            if let Some(texts) = self.detector.check(now) {
                return texts;
            }
        }
    }

    pub(crate) fn read(&self) -> ConfigTexts {
        (self.read)()
    }

    /// Returns why these texts were rejected, if they were tried last: the same reason is not reported again.
    pub(crate) fn rejection(&self, texts: &ConfigTexts) -> Option<String> {
        self.detector.rejection(texts)
    }

    /// Records that these texts were tried, and why they were rejected if they were.
    pub(crate) fn record_attempt(&mut self, texts: ConfigTexts, refused: Option<String>) {
        self.detector.record_attempt(texts, refused);
    }
}

struct ChangeDetector {
    /// Texts that were tried last, applied or rejected.
    last_tried: ConfigTexts,
    rejection: Option<String>,
    /// Number of checks since `last_tried` was tried.
    checks_since: u32,
    last_seen: ConfigTexts,
    /// Number of earlier consecutive checks with the same texts as `last_seen`.
    unchanged_checks: u32,
    changed_checks: u32,
}

impl ChangeDetector {
    fn new(last_tried: ConfigTexts) -> Self {
        Self {
            last_seen: last_tried.clone(),
            last_tried,
            rejection: None,
            checks_since: 0,
            unchanged_checks: 0,
            changed_checks: 0,
        }
    }

    fn check(&mut self, now: ConfigTexts) -> Option<ConfigTexts> {
        let now = now.reject_emptied(&self.last_tried);
        if now == self.last_seen {
            self.unchanged_checks = self.unchanged_checks.saturating_add(1);
            self.changed_checks = 0;
        } else {
            self.unchanged_checks = 0;
            self.changed_checks = self.changed_checks.saturating_add(1);
            if self.changed_checks == UNSTABLE_CHECKS {
                tracing::warn!(
                    "the configuration is being written all the time; it is applied when it is unchanged for a second, \
                     or by a reload (SIGHUP)"
                );
            }
        }
        self.last_seen = now;
        if self.last_seen == self.last_tried {
            self.checks_since = self.checks_since.saturating_add(1);
            return (self.rejection.is_some() && self.checks_since.is_multiple_of(RETRY_CHECKS))
                .then(|| self.last_tried.clone());
        }
        let enough = if self.last_seen.is_complete() { 1 } else { MISSING_CHECKS };
        (self.unchanged_checks >= enough).then(|| self.last_seen.clone())
    }

    fn rejection(&self, texts: &ConfigTexts) -> Option<String> {
        self.rejection.clone().filter(|_| self.last_tried == *texts)
    }

    fn record_attempt(&mut self, texts: ConfigTexts, refused: Option<String>) {
        (self.last_tried, self.rejection, self.checks_since) = (texts, refused, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> ConfigTexts {
        ConfigTexts { config: Some(Ok(text.into())), mcp_json: None }
    }

    fn missing_texts() -> ConfigTexts {
        ConfigTexts { config: Some(Err(ConfigFileError { message: "gone".to_owned(), hint: "" })), mcp_json: None }
    }

    /// Returns the outcomes of consecutive checks that find these texts. Every change is accepted.
    fn check_all(detector: &mut ChangeDetector, seen: &[ConfigTexts]) -> Vec<Option<String>> {
        let mut look = |now: &ConfigTexts| {
            let found = detector.check(now.clone())?;
            detector.record_attempt(found.clone(), None);
            Some(match found.config? {
                Ok(text) => text.expose().to_owned(),
                Err(why) => why.message,
            })
        };
        seen.iter().map(&mut look).collect()
    }

    #[test]
    fn a_change_is_applied_once_after_two_identical_checks() {
        let mut detector = ChangeDetector::new(text("one"));
        let seen = ["one", "two", "two", "two", "thr", "three", "three", "two", "two"].map(text);
        let found: Vec<_> = check_all(&mut detector, &seen)
            .into_iter()
            .enumerate()
            .filter_map(|(at, found)| Some((at, found?)))
            .collect();
        assert_eq!(found, [(2, "two".to_owned()), (6, "three".to_owned()), (8, "two".to_owned())]);
    }

    #[test]
    fn a_change_that_is_reverted_quickly_is_ignored() {
        let mut detector = ChangeDetector::new(text("one"));
        for spoiled in [text("half"), text(""), missing_texts()] {
            assert_eq!(check_all(&mut detector, &[spoiled, text("one"), text("one")]), [None, None, None]);
        }
        let away = [missing_texts(), missing_texts(), missing_texts(), missing_texts(), text("one")];
        assert_eq!(check_all(&mut detector, &away), [const { None }; 5]);
    }

    #[test]
    fn a_missing_or_empty_file_is_reported_after_several_checks() {
        for (spoiled, expected) in [(missing_texts(), "gone"), (text(" \n"), "the configuration is empty")] {
            let mut detector = ChangeDetector::new(text("one"));
            let found = check_all(&mut detector, &vec![spoiled; 8]);
            assert_eq!(found.iter().position(Option::is_some), Some(4), "{found:?}");
            assert_eq!(found.into_iter().flatten().collect::<Vec<_>>(), [expected]);
        }
    }

    #[test]
    fn an_empty_file_that_was_applied_on_request_is_not_reported() {
        let mut detector = ChangeDetector::new(text("one"));
        detector.record_attempt(text(""), None);
        assert_eq!(check_all(&mut detector, &vec![text(""); 8]), vec![None; 8]);
        assert_eq!(check_all(&mut detector, &[text("two"), text("two")]), [None, Some("two".to_owned())]);
    }

    #[test]
    fn a_rejected_text_is_reported_once_and_tried_again() {
        let mut detector = ChangeDetector::new(text("one"));
        detector.check(text("bad"));
        assert_eq!(detector.check(text("bad")), Some(text("bad")));
        assert_eq!(detector.rejection(&text("bad")), None, "the rejection is new");
        detector.record_attempt(text("bad"), Some("no secret".to_owned()));
        let again = (1..=4).filter_map(|_| detector.check(text("bad"))).count();
        assert_eq!((again, detector.check(text("bad"))), (0, Some(text("bad"))));
        assert_eq!(detector.rejection(&text("bad")).as_deref(), Some("no secret"));
        assert_eq!(detector.rejection(&text("worse")), None, "a rejection of another text is new");
        // The file that it refers to exists now.
        detector.record_attempt(text("bad"), None);
        assert_eq!(detector.rejection(&text("bad")), None);
        assert_eq!((1..=20).filter_map(|_| detector.check(text("bad"))).count(), 0);
    }

    #[test]
    fn a_continuously_changing_file_is_not_applied() {
        let mut detector = ChangeDetector::new(text("0"));
        let restless: Vec<ConfigTexts> = (1..=100).map(|number| text(&number.to_string())).collect();
        assert_eq!(check_all(&mut detector, &restless), vec![None; 100]);
        assert_eq!(check_all(&mut detector, &[text("100")]), [Some("100".to_owned())]);
    }

    #[test]
    fn two_files_that_change_together_are_applied_together() {
        let both = |config: &str, mcp_json: &str| ConfigTexts {
            config: Some(Ok(config.into())),
            mcp_json: Some(Ok(mcp_json.into())),
        };
        let mut detector = ChangeDetector::new(both("a", "b"));
        let seen = [both("A", "b"), both("A", "B"), both("A", "B")];
        let found: Vec<_> = seen.iter().map(|now| detector.check(now.clone())).collect();
        assert_eq!(found, [None, None, Some(both("A", "B"))]);
    }
}
