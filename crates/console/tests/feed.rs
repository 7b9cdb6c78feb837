//! The stream of instances: what a watcher has after its frames is what the satellite has.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_console::feed::{
    FeedPosition, FeedScope, InstanceFeeds, InstanceRow, RowChanges, RowSource, StreamLimits,
};
use mcp_satellite_console::principal::{Entrance, Principal};
use proptest::prelude::*;
use serde_json::Value;
use tokio::sync::watch;

type State = (u64, BTreeMap<Arc<str>, InstanceRow>);

/// Rows that the test changes.
struct MadeUpRows {
    published: watch::Receiver<State>,
    position: State,
    answers: Arc<AtomicBool>,
}

impl RowSource for MadeUpRows {
    fn revision(&self) -> u64 {
        self.position.0
    }

    fn rows(&self) -> Vec<InstanceRow> {
        self.position.1.values().cloned().collect()
    }

    fn take_changes(&mut self) -> RowChanges {
        let earlier = std::mem::replace(&mut self.position, self.published.borrow_and_update().clone());
        let set = self.position.1.iter().filter(|(name, row)| earlier.1.get(*name) != Some(row));
        let gone = earlier.1.keys().filter(|name| !self.position.1.contains_key(*name));
        RowChanges { set: set.map(|(_, row)| row.clone()).collect(), gone: gone.cloned().collect() }
    }

    async fn changed(&mut self) -> bool {
        self.published.changed().await.is_ok()
    }

    fn calls_in_flight(&self) -> usize {
        0
    }

    async fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }
}

fn row(name: &str, version: u64) -> InstanceRow {
    InstanceRow {
        name: name.into(),
        server: "files".to_owned(),
        team: "acme".to_owned(),
        user: "ann".to_owned(),
        status: Status::ALL[usize::try_from(version).unwrap() % Status::ALL.len()],
        since: i64::try_from(version).unwrap(),
        flags: u8::from(version.is_multiple_of(3)),
        restarts: version % 5,
        retry: version.is_multiple_of(4).then_some(7),
        attention: None,
    }
}

struct WatchedSatellite {
    state: watch::Sender<State>,
    answers: Arc<AtomicBool>,
    feeds: InstanceFeeds<MadeUpRows>,
}

impl WatchedSatellite {
    fn new(boot: &str) -> Self {
        let (state, published) = watch::channel((1, BTreeMap::new()));
        let answers = Arc::new(AtomicBool::new(true));
        let feed_answers = answers.clone();
        let open = move |_: &FeedScope| {
            let mut published = published.clone();
            let position = published.borrow_and_update().clone();
            MadeUpRows { published, position, answers: feed_answers.clone() }
        };
        Self { state, answers, feeds: InstanceFeeds::new(boot, open) }
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<Arc<str>, InstanceRow>)) {
        self.state.send_modify(|(revision, rows)| {
            *revision += 1;
            change(rows);
        });
    }

    fn put(&self, nth: usize, version: u64) {
        let name = format!("files-acme-ann-{nth}");
        self.change(|rows| drop(rows.insert(name.as_str().into(), row(&name, version))));
    }

    fn expected(&self) -> (u64, BTreeMap<String, Value>) {
        let (revision, rows) = self.state.borrow().clone();
        (revision, rows.into_iter().map(|(name, row)| (name.to_string(), serde_json::to_value(row).unwrap())).collect())
    }

    async fn watch(&self, last: Option<FeedPosition>) -> Watcher {
        let frames = self.feeds.watch(&FeedScope::default(), last, false).await.unwrap();
        Watcher { frames: Box::pin(frames), rows: BTreeMap::new(), position: None, resets: 0, deltas: 0 }
    }
}

/// A browser: applies frames as the script of the console does.
struct Watcher {
    frames: Pin<Box<dyn Stream<Item = std::io::Result<Bytes>> + Send>>,
    rows: BTreeMap<String, Value>,
    position: Option<FeedPosition>,
    resets: usize,
    deltas: usize,
}

impl Watcher {
    fn revision(&self) -> u64 {
        self.position.as_ref().map_or(0, |position| position.revision)
    }

    fn apply(&mut self, frame: &[u8]) {
        let text = std::str::from_utf8(frame).unwrap();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let (event, data): (_, Value) = (field("event: "), serde_json::from_str(field("data: ")).unwrap());
        let key = |row: &Value| (row[0].as_str().unwrap().to_owned(), row.clone());
        match event {
            "reset" => {
                self.resets += 1;
                self.rows = data["rows"].as_array().unwrap().iter().map(key).collect();
            }
            "delta" => {
                self.deltas += 1;
                let revision = self.revision();
                assert!(data["from"].as_u64().unwrap() <= revision, "a delta is missing before {data}");
                if data["revision"].as_u64().unwrap() <= revision {
                    return;
                }
                for name in data["gone"].as_array().unwrap() {
                    self.rows.remove(name.as_str().unwrap());
                }
                self.rows.extend(data["set"].as_array().unwrap().iter().map(key));
            }
            "tick" => {}
            other => panic!("unknown event {other}"),
        }
        self.position = FeedPosition::parse(field("id: "));
    }

    /// Applies frames until the watcher has the present revision.
    async fn follow(&mut self, satellite: &WatchedSatellite) {
        let (revision, rows) = satellite.expected();
        while self.revision() < revision {
            let frame = self.frames.next().await.unwrap().unwrap();
            self.apply(&frame);
        }
        assert_eq!((self.revision(), &self.rows), (revision, &rows));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Put(usize, u64),
    Remove(usize),
    Wait(u64),
    Follow,
    Reconnect,
}

fn a_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..12_usize, 0..100_u64).prop_map(|(nth, version)| Step::Put(nth, version)),
        2 => (0..12_usize).prop_map(Step::Remove),
        3 => (0..700_u64).prop_map(Step::Wait),
        2 => Just(Step::Follow),
        2 => Just(Step::Reconnect),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn a_watcher_has_the_rows_of_the_satellite_also_after_reconnecting(
        steps in proptest::collection::vec(a_step(), 1..80),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let satellite = WatchedSatellite::new("17");
            let mut watcher = satellite.watch(None).await;
            for step in steps {
                match step {
                    Step::Put(nth, version) => satellite.put(nth, version),
                    Step::Remove(nth) => {
                        satellite.change(|rows| drop(rows.remove(format!("files-acme-ann-{nth}").as_str())));
                    }
                    Step::Wait(milliseconds) => {
                        tokio::time::sleep(std::time::Duration::from_millis(milliseconds)).await;
                    }
                    Step::Follow => watcher.follow(&satellite).await,
                    Step::Reconnect => {
                        let position = watcher.position.clone();
                        let mut next = satellite.watch(position.clone()).await;
                        (next.rows, next.position) = (watcher.rows, position);
                        watcher = next;
                    }
                }
            }
            watcher.follow(&satellite).await;
        });
    }
}

#[tokio::test(start_paused = true)]
async fn a_watcher_that_missed_few_changes_gets_only_those() {
    let satellite = WatchedSatellite::new("17");
    satellite.put(1, 1);
    let mut first = satellite.watch(None).await;
    first.follow(&satellite).await;
    let position = first.position.clone();
    for version in 2..12 {
        satellite.put(1, version);
        first.follow(&satellite).await;
    }
    let mut resumed = satellite.watch(position.clone()).await;
    (resumed.position, resumed.rows) = (position, first.rows.clone());
    resumed.follow(&satellite).await;
    assert_eq!((resumed.resets, resumed.deltas), (0, 10));
}

#[tokio::test(start_paused = true)]
async fn a_watcher_of_another_process_of_too_long_ago_or_of_the_future_gets_all_rows() {
    let satellite = WatchedSatellite::new("17");
    let mut first = satellite.watch(None).await;
    first.follow(&satellite).await;
    let old = first.position.clone();
    for version in 0..70 {
        satellite.put(1, version);
        first.follow(&satellite).await;
    }
    for position in [old, Some(FeedPosition { boot: "16".into(), revision: 60 }), FeedPosition::parse("17-999999")] {
        let mut watcher = satellite.watch(position).await;
        watcher.follow(&satellite).await;
        assert_eq!(watcher.resets, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn changes_within_a_tenth_of_a_second_are_one_frame_and_all_watchers_share_it() {
    let satellite = WatchedSatellite::new("17");
    let mut watchers = [satellite.watch(None).await, satellite.watch(None).await];
    for watcher in &mut watchers {
        watcher.follow(&satellite).await;
    }
    for nth in 0..500 {
        satellite.put(nth, 1);
    }
    let mut frames = Vec::new();
    for watcher in &mut watchers {
        frames.push(loop {
            let frame = watcher.frames.next().await.unwrap().unwrap();
            watcher.apply(&frame);
            if frame.starts_with(b"event: delta") {
                break frame;
            }
        });
        watcher.follow(&satellite).await;
        assert_eq!(watcher.deltas, 1);
    }
    assert_eq!(frames[0].as_ptr(), frames[1].as_ptr());
}

#[tokio::test(start_paused = true)]
async fn a_page_is_rendered_from_the_revision_from_which_its_stream_continues() {
    let satellite = WatchedSatellite::new("17");
    satellite.put(1, 1);
    let page = satellite.feeds.rows(&FeedScope::default()).await.unwrap();
    satellite.put(2, 1);
    let mut watcher = satellite.watch(Some(page.position.clone())).await;
    let data: Value = serde_json::from_slice(&page.json).unwrap();
    watcher.rows =
        data["rows"].as_array().unwrap().iter().map(|row| (row[0].as_str().unwrap().to_owned(), row.clone())).collect();
    watcher.position = Some(page.position);
    watcher.follow(&satellite).await;
    assert_eq!(watcher.resets, 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_for_what_is_new_ends_at_the_present() {
    let satellite = WatchedSatellite::new("17");
    satellite.put(1, 1);
    let mut watcher = satellite.watch(None).await;
    watcher.follow(&satellite).await;
    satellite.put(1, 2);
    let missed = satellite.feeds.watch(&FeedScope::default(), watcher.position.clone(), true).await.unwrap();
    let missed: Vec<Bytes> = missed.map(Result::unwrap).collect().await;
    assert_eq!(missed.len(), 1, "only a tick: changes are collected for a while");
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    let missed = satellite.feeds.watch(&FeedScope::default(), watcher.position.clone(), true).await.unwrap();
    let missed: Vec<Bytes> = missed.map(Result::unwrap).collect().await;
    assert!(missed.len() == 2 && missed[0].starts_with(b"event: delta") && missed[1].starts_with(b"event: tick"));
    watcher.apply(&missed[0]);
    assert_eq!(watcher.rows, satellite.expected().1);
}

#[tokio::test(start_paused = true)]
async fn a_tick_proves_that_the_satellite_answers() {
    let satellite = WatchedSatellite::new("17");
    let mut watcher = satellite.watch(None).await;
    let minute = std::time::Duration::from_secs(60);
    let ticks = async |watcher: &mut Watcher| {
        let until = tokio::time::Instant::now() + minute;
        let mut ticks = 0;
        while let Ok(frame) = tokio::time::timeout_at(until, watcher.frames.next()).await {
            ticks += usize::from(frame.unwrap().unwrap().starts_with(b"event: tick"));
        }
        ticks
    };
    assert!(ticks(&mut watcher).await >= 29);
    satellite.answers.store(false, Ordering::Relaxed);
    let last = ticks(&mut watcher).await;
    assert!(last <= 1, "{last} ticks");
    // A new watcher gets the rows, and no tick either.
    let mut second = satellite.watch(None).await;
    assert_eq!(ticks(&mut second).await, 0);
    satellite.answers.store(true, Ordering::Relaxed);
    assert!(ticks(&mut watcher).await >= 29);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_computed_while_nobody_watches() {
    let satellite = WatchedSatellite::new("17");
    let mut watcher = satellite.watch(None).await;
    watcher.follow(&satellite).await;
    // The test and the task of the scope hold a receiver each.
    assert_eq!(satellite.state.receiver_count(), 2);
    drop(watcher);
    tokio::time::sleep(std::time::Duration::from_secs(30)).await;
    assert_eq!(satellite.state.receiver_count(), 1);
    let mut again = satellite.watch(None).await;
    satellite.put(1, 1);
    again.follow(&satellite).await;
}

#[test]
fn one_client_cannot_open_all_streams() {
    let limits = StreamLimits::default();
    let owner = Principal::owner(Entrance::Console);
    let named = |name: &str| Principal { name: Some(name.to_owned()), ..owner.clone() };
    let mut open: Vec<_> = (0..64).map(|_| limits.open(&owner).unwrap()).collect();
    assert_eq!(limits.open(&owner).unwrap_err().status, 429);
    open.pop();
    open.push(limits.open(&owner).unwrap());
    for name in ["a", "b", "c"] {
        open.extend((0..64).map(|_| limits.open(&named(name)).unwrap()));
    }
    assert_eq!(limits.open(&named("d")).unwrap_err().status, 429);
    drop(open);
    limits.open(&named("d")).unwrap();
}
