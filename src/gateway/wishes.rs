//! The log levels and subscriptions that the clients of one instance requested, and those that its server has
//! confirmed. The clients share the server's one session: each client has its own log level and subscriptions, and the
//! server gets the lowest level and all subscriptions. Pure: no clock, no socket.

use std::collections::{BTreeMap, BTreeSet};

use mcp_satellite_actors::model::ids::Run;
use mcp_satellite_actors::rpc::{Kind, Message, member};
use serde::Deserialize;
use serde::de::DeserializeOwned;

// Maximum subscriptions of one client. They are kept and repeated to every run of the server.
pub(super) const SUBSCRIPTIONS_MAX: usize = 1024;
// Maximum length of a subscribed URI in bytes.
pub(super) const URI_BYTES_MAX: usize = 8 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Debug,
    Info,
    Notice,
    Warning,
    Error,
    Critical,
    Alert,
    Emergency,
}

impl Level {
    /// Returns the level in the params of `logging/setLevel` or of a log notification; `None` if it is unknown.
    pub(super) fn of(message: &Message) -> Option<Self> {
        param(message, "level")
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Notice => "notice",
            Self::Warning => "warning",
            Self::Error => "error",
            Self::Critical => "critical",
            Self::Alert => "alert",
            Self::Emergency => "emergency",
        }
    }
}

pub(super) fn uri_of(message: &Message) -> Option<String> {
    param(message, "uri")
}

/// Returns true if a subscription to `of` includes `uri`, because they are equal or `uri` is a part of it.
pub(super) fn covers(of: &str, uri: &str) -> bool {
    uri.strip_prefix(of).is_some_and(|rest| rest.is_empty() || of.ends_with('/') || rest.starts_with(['/', '?', '#']))
}

fn param<T: DeserializeOwned>(message: &Message, name: &str) -> Option<T> {
    serde_json::from_str(member(message.params()?, name)?).ok()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wish {
    Level(Level),
    Subscribe(String),
    Unsubscribe(String),
}

impl Wish {
    /// Reads a request; `None` for other methods. Malformed params are left to the server to reject.
    pub(super) fn of(message: &Message) -> Option<Self> {
        if message.kind() != Kind::Request {
            return None;
        }
        match message.method()? {
            "logging/setLevel" => Level::of(message).map(Self::Level),
            "resources/subscribe" => uri_of(message).map(Self::Subscribe),
            "resources/unsubscribe" => uri_of(message).map(Self::Unsubscribe),
            _ => None,
        }
    }

    pub(super) fn method(&self) -> &'static str {
        match self {
            Self::Level(_) => "logging/setLevel",
            Self::Subscribe(_) => "resources/subscribe",
            Self::Unsubscribe(_) => "resources/unsubscribe",
        }
    }

    pub(super) fn params(&self) -> serde_json::Value {
        match self {
            Self::Level(level) => serde_json::json!({ "level": level.as_str() }),
            Self::Subscribe(uri) | Self::Unsubscribe(uri) => serde_json::json!({ "uri": uri }),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Made {
    // The server does so already for another client, so no request is necessary.
    Granted,
    // The client's own request must be sent to the server, and its outcome reported.
    Asked(Asked),
    Refused(TooMuch),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooMuch {
    #[error("this client has {SUBSCRIPTIONS_MAX} subscriptions, and may not have more: unsubscribe from one first")]
    Subscriptions,
    #[error("the uri of a subscription may have {URI_BYTES_MAX} bytes, and this one has more")]
    Uri,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    client: u64,
    wish: Wish,
    // The client's level before the request, restored if the request fails.
    before: Option<Level>,
    // The run that accepted calls when the request was sent.
    run: Option<Run>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    // The server confirmed it. The value is the run that accepted calls at that time.
    Done(Option<Run>),
    Refused,
    // No answer, so the server may or may not have processed the request.
    Unknown,
}

#[derive(Debug, Default)]
struct Subscription {
    clients: BTreeSet<u64>,
    asking: usize,
}

#[derive(Debug, Default)]
struct Told {
    run: Option<Run>,
    level: Option<Level>,
    uris: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub(super) struct Wishes {
    levels: BTreeMap<u64, Level>,
    subscriptions: BTreeMap<String, Subscription>,
    counts: BTreeMap<u64, usize>,
    told: Told,
}

impl Wishes {
    /// Records a wish. `run` is the run that accepts calls now.
    pub(super) fn make(&mut self, client: u64, wish: &Wish, run: Option<Run>) -> Made {
        self.reaches(run);
        let mut before = None;
        let granted = match wish {
            Wish::Level(level) => {
                before = self.levels.insert(client, *level);
                let others = self.levels.iter().filter(|(other, _)| **other != client);
                let lowest = others.map(|(_, level)| *level).min();
                lowest.is_some_and(|lowest| lowest <= *level && self.told.level.is_some_and(|told| told <= lowest))
            }
            Wish::Subscribe(uri) => {
                if let Some(too_much) = self.too_much(client, uri) {
                    return Made::Refused(too_much);
                }
                let subscription = self.subscriptions.entry(uri.clone()).or_default();
                let others = subscription.clients.iter().any(|other| *other != client);
                if subscription.clients.insert(client) {
                    *self.counts.entry(client).or_default() += 1;
                }
                others && self.told.uris.contains(uri)
            }
            Wish::Unsubscribe(uri) => {
                self.lets_go(client, uri);
                self.wants(uri)
            }
        };
        if granted {
            return Made::Granted;
        }
        if let Wish::Subscribe(uri) = wish
            && let Some(subscription) = self.subscriptions.get_mut(uri)
        {
            subscription.asking += 1;
        }
        Made::Asked(Asked { client, wish: wish.clone(), before, run })
    }

    pub(super) fn came(&mut self, asked: Asked, outcome: Outcome) {
        let Asked { client, wish, before, run } = asked;
        if let Wish::Subscribe(uri) = &wish
            && let Some(subscription) = self.subscriptions.get_mut(uri)
        {
            subscription.asking -= 1;
            self.tidy(uri);
        }
        let told = |this: &mut Self, now: Option<Run>| {
            this.reaches(now);
            // If the run has changed, it is unknown which run received the request.
            now.is_some() && now == run
        };
        match (outcome, wish) {
            (Outcome::Done(now), Wish::Level(level)) => {
                if told(self, now) {
                    self.told.level = Some(level);
                }
            }
            (Outcome::Done(now), Wish::Subscribe(uri)) => {
                if told(self, now) {
                    self.told.uris.insert(uri);
                }
            }
            (Outcome::Done(now), Wish::Unsubscribe(uri)) => {
                self.reaches(now);
                self.told.uris.remove(&uri);
            }
            (Outcome::Refused | Outcome::Unknown, Wish::Level(level)) => {
                if self.levels.get(&client) == Some(&level) {
                    match before {
                        Some(before) => self.levels.insert(client, before),
                        None => self.levels.remove(&client),
                    };
                }
                // The server's level is now unknown.
                if outcome == Outcome::Unknown && self.told.run == run {
                    self.told.level = None;
                }
            }
            (Outcome::Refused, Wish::Subscribe(uri)) => self.lets_go(client, &uri),
            (Outcome::Unknown, Wish::Subscribe(uri)) => {
                self.lets_go(client, &uri);
                // Counts as subscribed, so that the next `owed` unsubscribes from it.
                if self.told.run == run && run.is_some() {
                    self.told.uris.insert(uri);
                }
            }
            // The server still counts as subscribed.
            (Outcome::Refused | Outcome::Unknown, Wish::Unsubscribe(_)) => {}
        }
    }

    pub(super) fn forget(&mut self, client: u64) {
        self.levels.remove(&client);
        let uris: Vec<String> = self.subscriptions.keys().cloned().collect();
        for uri in uris {
            self.lets_go(client, &uri);
        }
    }

    /// Records the run that accepts calls now. A new run has received no settings yet.
    pub(super) fn reaches(&mut self, run: Option<Run>) {
        if run.is_some() && self.told.run != run {
            self.told = Told { run, ..Told::default() };
        }
    }

    pub(super) fn ended(&mut self, run: Run) {
        if self.told.run == Some(run) {
            self.told = Told::default();
        }
    }

    /// Returns the next request that the satellite itself must send to the server, and records it as sent.
    pub(super) fn owed(&mut self) -> Option<Wish> {
        let lowest = self.levels.values().min().copied();
        if let Some(level) = lowest.filter(|level| self.told.level != Some(*level)) {
            self.told.level = Some(level);
            return Some(Wish::Level(level));
        }
        if let Some(uri) = self.told.uris.iter().find(|uri| !self.wants(uri)).cloned() {
            self.told.uris.remove(&uri);
            return Some(Wish::Unsubscribe(uri));
        }
        // A client's own request for this resource is on its way.
        let missing = |(uri, of): &(&String, &Subscription)| of.asking == 0 && !self.told.uris.contains(*uri);
        let uri = self.subscriptions.iter().find(missing).map(|(uri, _)| uri.clone())?;
        self.told.uris.insert(uri.clone());
        Some(Wish::Subscribe(uri))
    }

    /// Records that a request from `owed` did not reach this run, so that it is returned again.
    pub(super) fn was_not_told(&mut self, wish: &Wish, run: Run) {
        if self.told.run != Some(run) {
            return;
        }
        match wish {
            // Another level may have been sent meanwhile.
            Wish::Level(level) => self.told.level = self.told.level.filter(|told| told != level),
            Wish::Subscribe(uri) => {
                self.told.uris.remove(uri);
            }
            Wish::Unsubscribe(uri) => {
                self.told.uris.insert(uri.clone());
            }
        }
    }

    /// Records an unsubscription that the satellite sent. A client may have subscribed before it took effect, so the
    /// server no longer counts as subscribed.
    pub(super) fn took_back(&mut self, uri: &str) {
        self.told.uris.remove(uri);
    }

    pub(super) fn are_waiting(&self) -> bool {
        self.subscriptions.values().any(|subscription| !subscription.clients.is_empty())
    }

    /// Returns true if a client receives log messages of this level. A client without a level receives all.
    pub(super) fn hears(&self, client: u64, level: Option<Level>) -> bool {
        match (self.levels.get(&client), level) {
            (Some(from), Some(level)) => *from <= level,
            (None, _) | (_, None) => true,
        }
    }

    pub(super) fn subscribers(&self, uri: &str) -> BTreeSet<u64> {
        let subscriptions = self.subscriptions.iter().filter(|(of, _)| covers(of, uri));
        subscriptions.flat_map(|(_, subscription)| subscription.clients.iter().copied()).collect()
    }

    /// Sets the level of a stateless client. The server receives it through `owed`, not through a client's request.
    pub(super) fn hear_from(&mut self, client: u64, level: Level) {
        self.levels.insert(client, level);
    }

    fn wants(&self, uri: &str) -> bool {
        self.subscriptions.get(uri).is_some_and(|subscription| !subscription.clients.is_empty())
    }

    fn too_much(&self, client: u64, uri: &str) -> Option<TooMuch> {
        if uri.len() > URI_BYTES_MAX {
            return Some(TooMuch::Uri);
        }
        let has = |of: &Subscription| of.clients.contains(&client);
        let is_full = self.counts.get(&client).is_some_and(|count| *count >= SUBSCRIPTIONS_MAX);
        (is_full && !self.subscriptions.get(uri).is_some_and(has)).then_some(TooMuch::Subscriptions)
    }

    fn lets_go(&mut self, client: u64, uri: &str) {
        let Some(subscription) = self.subscriptions.get_mut(uri) else { return };
        if subscription.clients.remove(&client)
            && let Some(count) = self.counts.get_mut(&client)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&client);
            }
        }
        self.tidy(uri);
    }

    fn tidy(&mut self, uri: &str) {
        if self.subscriptions.get(uri).is_some_and(|of| of.clients.is_empty() && of.asking == 0) {
            self.subscriptions.remove(uri);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Option<Run> = Some(Run(1));
    const TWO: Option<Run> = Some(Run(2));

    fn subscribe(uri: &str) -> Wish {
        Wish::Subscribe(uri.to_owned())
    }

    fn unsubscribe(uri: &str) -> Wish {
        Wish::Unsubscribe(uri.to_owned())
    }

    fn asked(wishes: &mut Wishes, client: u64, wish: &Wish, run: Option<Run>) -> Asked {
        match wishes.make(client, wish, run) {
            Made::Asked(asked) => asked,
            other => panic!("{wish:?} of {client} does not reach the server: {other:?}"),
        }
    }

    fn done(wishes: &mut Wishes, client: u64, wish: &Wish, run: Option<Run>) {
        let asked = asked(wishes, client, wish, run);
        wishes.came(asked, Outcome::Done(run));
    }

    fn all_owed(wishes: &mut Wishes) -> Vec<Wish> {
        std::iter::from_fn(|| wishes.owed()).collect()
    }

    #[test]
    fn the_server_is_subscribed_to_by_the_first_and_let_go_by_the_last() {
        let mut wishes = Wishes::default();
        done(&mut wishes, 1, &subscribe("a"), ONE);
        assert_eq!(wishes.make(2, &subscribe("a"), ONE), Made::Granted);
        // A repeated subscription is answered by the server, as if this client were alone.
        done(&mut wishes, 3, &subscribe("b"), ONE);
        done(&mut wishes, 3, &subscribe("b"), ONE);
        assert_eq!(wishes.subscribers("a"), [1, 2].into());
        assert_eq!(wishes.make(1, &unsubscribe("a"), ONE), Made::Granted);
        assert!(wishes.are_waiting());
        done(&mut wishes, 2, &unsubscribe("a"), ONE);
        assert_eq!(all_owed(&mut wishes), []);
        wishes.forget(3);
        assert_eq!(all_owed(&mut wishes), [unsubscribe("b")]);
        assert!(!wishes.are_waiting());
    }

    #[test]
    fn a_subscription_covers_what_is_below_it_and_not_what_is_beside_it() {
        let mut wishes = Wishes::default();
        done(&mut wishes, 1, &subscribe("file:///a"), ONE);
        done(&mut wishes, 2, &subscribe("file:///"), ONE);
        for (uri, subscribers) in [
            ("file:///a", vec![1, 2]),
            ("file:///a/b", vec![1, 2]),
            ("file:///a?q", vec![1, 2]),
            ("file:///ab", vec![2]),
            ("file:/", vec![]),
        ] {
            assert_eq!(wishes.subscribers(uri), subscribers.into_iter().collect(), "{uri}");
        }
    }

    #[test]
    fn another_run_is_told_everything_again_but_what_a_client_tells_it_just_now() {
        let mut wishes = Wishes::default();
        done(&mut wishes, 1, &subscribe("a"), ONE);
        done(&mut wishes, 1, &Wish::Level(Level::Info), ONE);
        wishes.ended(Run(1));
        let asking = asked(&mut wishes, 2, &subscribe("b"), None);
        // There is no run, so the first request starts one.
        let again = asked(&mut wishes, 2, &subscribe("a"), None);
        wishes.reaches(TWO);
        assert_eq!(all_owed(&mut wishes), [Wish::Level(Level::Info)]);
        wishes.came(again, Outcome::Done(TWO));
        // It is unknown which run received it, so this run gets it, perhaps twice.
        assert_eq!(all_owed(&mut wishes), [subscribe("a")]);
        wishes.came(asking, Outcome::Refused);
        assert_eq!(all_owed(&mut wishes), []);
        assert_eq!(wishes.subscribers("b"), [].into());
        // An outdated end of a run changes nothing.
        wishes.ended(Run(1));
        assert_eq!(all_owed(&mut wishes), []);
    }

    #[test]
    fn what_may_have_been_carried_out_for_nobody_is_taken_back() {
        let mut wishes = Wishes::default();
        let asking = asked(&mut wishes, 1, &subscribe("a"), ONE);
        wishes.forget(1);
        wishes.came(asking, Outcome::Unknown);
        assert_eq!(all_owed(&mut wishes), [unsubscribe("a")]);

        // A client that left before the answer.
        let asking = asked(&mut wishes, 1, &subscribe("a"), ONE);
        wishes.forget(1);
        wishes.came(asking, Outcome::Done(ONE));
        assert_eq!(all_owed(&mut wishes), [unsubscribe("a")]);

        // A client that subscribes while the unsubscription is on its way may have been first.
        done(&mut wishes, 2, &subscribe("a"), ONE);
        wishes.took_back("a");
        assert_eq!(all_owed(&mut wishes), [subscribe("a")]);
    }

    #[test]
    fn what_did_not_reach_the_server_is_owed_again() {
        let mut wishes = Wishes::default();
        done(&mut wishes, 1, &subscribe("a"), ONE);
        done(&mut wishes, 2, &subscribe("b"), ONE);
        done(&mut wishes, 2, &Wish::Level(Level::Error), ONE);
        wishes.forget(1);
        wishes.reaches(TWO);
        wishes.reaches(ONE);
        for owed in [Wish::Level(Level::Error), subscribe("b")] {
            for _ in 0..2 {
                assert_eq!(wishes.owed().as_ref(), Some(&owed));
                wishes.was_not_told(&owed, Run(1));
            }
            assert_eq!(wishes.owed(), Some(owed));
        }
        wishes.forget(2);
        assert_eq!(wishes.owed(), Some(unsubscribe("b")));
        wishes.was_not_told(&unsubscribe("b"), Run(1));
        assert_eq!(all_owed(&mut wishes), [unsubscribe("b")]);
        // Another run does not have this subscription.
        wishes.was_not_told(&unsubscribe("b"), Run(2));
        assert_eq!(all_owed(&mut wishes), []);
    }

    #[test]
    fn the_server_logs_as_much_as_the_client_that_wants_most_and_each_hears_its_own() {
        let mut wishes = Wishes::default();
        let asking = asked(&mut wishes, 1, &Wish::Level(Level::Error), ONE);
        // A request that is still on its way may be refused, so the second client's request is sent, too.
        let other = asked(&mut wishes, 3, &Wish::Level(Level::Error), ONE);
        for asked in [asking, other] {
            wishes.came(asked, Outcome::Done(ONE));
        }
        done(&mut wishes, 2, &Wish::Level(Level::Debug), ONE);
        assert_eq!(wishes.make(3, &Wish::Level(Level::Info), ONE), Made::Granted);
        assert_eq!(all_owed(&mut wishes), []);
        let hears = |wishes: &Wishes, level| (1..=4).filter(|client| wishes.hears(*client, level)).collect::<Vec<_>>();
        assert_eq!(hears(&wishes, Some(Level::Debug)), [2, 4]);
        assert_eq!(hears(&wishes, Some(Level::Info)), [2, 3, 4]);
        assert_eq!(hears(&wishes, Some(Level::Emergency)), [1, 2, 3, 4]);
        assert_eq!(hears(&wishes, None), [1, 2, 3, 4]);
        // The client with the lowest level raises it: the other levels count at once.
        assert_eq!(wishes.make(2, &Wish::Level(Level::Alert), ONE), Made::Granted);
        assert_eq!(all_owed(&mut wishes), [Wish::Level(Level::Info)]);
        wishes.forget(3);
        assert_eq!(all_owed(&mut wishes), [Wish::Level(Level::Error)]);
        // A refused level does not count.
        let asking = asked(&mut wishes, 2, &Wish::Level(Level::Debug), ONE);
        wishes.came(asking, Outcome::Refused);
        assert_eq!(hears(&wishes, Some(Level::Error)), [1, 3, 4]);
        assert_eq!(all_owed(&mut wishes), []);
    }

    #[test]
    fn a_request_says_what_it_wishes_or_is_the_servers_to_refuse() {
        let wish = |text: &str| Message::read(text.to_owned().into()).ok().as_ref().and_then(Wish::of);
        let request = |method: &str, params: &str| {
            wish(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#))
        };
        assert_eq!(request("logging/setLevel", r#"{"level":"notice","x":1e400}"#), Some(Wish::Level(Level::Notice)));
        assert_eq!(request("logging/setLevel", r#"{"level":"loud"}"#), None);
        assert_eq!(request("resources/subscribe", r#"{"uri":"\u0061"}"#), Some(subscribe("a")));
        assert_eq!(request("resources/unsubscribe", r#"{"uri":"a"}"#), Some(unsubscribe("a")));
        assert_eq!(request("resources/read", r#"{"uri":"a"}"#), None);
        assert_eq!(wish(r#"{"jsonrpc":"2.0","method":"resources/subscribe","params":{"uri":"a"}}"#), None);
        for wish in [Wish::Level(Level::Critical), subscribe("a"), unsubscribe("a")] {
            assert_eq!(request(wish.method(), &wish.params().to_string()), Some(wish));
        }
    }
}
