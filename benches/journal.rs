//! Throughput of the journal: events appended directly and emitted through the runtime, compared with the same events
//! as lines of a file; delivery of a backlog to the reference backend; the time to open a journal of a million events;
//! and the CPU time of the events of a call.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite::backend::server::{BackendServer, BackendSettings};
use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite::delivery::Delivery;
use mcp_satellite::journal::{self, Journal, JournalLimits, JournalSink, StoredEventQuery};
use mcp_satellite::sink::http::HttpSink;
use mcp_satellite_actors::EventSender;
use mcp_satellite_actors::model::event::{Envelope, Event, EventSubject};
use mcp_satellite_actors::model::policy::{BatchPolicy, Policy};
use mcp_satellite_actors::model::secret::{Secret, SecretMask};
use mcp_satellite_actors::rules::request_log::{LoggedCall, LoggedPayload, RequestLog};
use mcp_satellite_actors::seam::{SinkAnswer, SinkBatch};

use common::{BenchReport, CpuClock, format_duration, format_number, median, quantile, spec, start};

/// An unoptimized run only checks that the bench works.
const EVENTS: u64 = if cfg!(debug_assertions) { 20_000 } else { 1_000_000 };

const DELIVERED: u64 = EVENTS / 10;

/// Largest batch of the batcher.
const BATCH: u64 = 2_000;

/// One of this many emits is timed, because reading the clock costs as much as an emit.
const TIMED: u64 = 16;

fn main() {
    let mut report = BenchReport::new(
        "journal",
        ["path", "events/s", "ratio to file", "MB per million events", "emit p50", "emit p99"],
    );
    common::tokio_runtime().block_on(measure(&mut report));
    report.goal("CPU of emitting, batching and storing the events of a call", 2.5, "µs", cost_of_calls());
    report.publish();
}

fn subject() -> Arc<EventSubject> {
    Arc::new(EventSubject::from(&spec(0, 1, 1, &["simulated".to_owned()], &Arc::new(Policy::default()))))
}

fn event(of: &Arc<EventSubject>) -> Event {
    Event::ToolExecuted {
        of: Arc::clone(of),
        tool_name: "echo".to_owned(),
        duration_ms: 1,
        success: true,
        error_message: None,
    }
}

/// Returns the next 100,000 events in batches of `size`, made before the measurement. All events at once would need too
/// much memory.
fn batches(from: u64, size: u64, of: &Arc<EventSubject>) -> Vec<Arc<SinkBatch>> {
    let envelope = |seq| Envelope { seq, timestamp: Timestamp::now(), event: event(of) };
    let firsts = (from..from + 50 * BATCH).step_by(usize::try_from(size).unwrap());
    firsts
        .map(|first| Arc::new(SinkBatch { id: first, events: (first..first + size).map(envelope).collect() }))
        .take_while(|batch| batch.id <= EVENTS)
        .collect()
}

fn limits() -> JournalLimits {
    JournalLimits { size_max: 1 << 40, ..JournalLimits::default() }
}

async fn measure(report: &mut BenchReport) {
    let home = tempfile::tempdir().unwrap();
    let subject = subject();
    let (took, bytes) = write_lines(&home.path().join("lines"), &subject);
    let baseline = took;
    let mut row = |name: &str, took: Duration, bytes: u64, emits: Option<(Duration, Duration)>| {
        report.row([
            name.to_owned(),
            format_number(EVENTS as f64 / took.as_secs_f64()),
            format!("{:.2}", baseline.as_secs_f64() / took.as_secs_f64()),
            format_number(bytes as f64 / EVENTS as f64),
            emits.map_or("-".to_owned(), |(median, _)| format_duration(median)),
            emits.map_or("-".to_owned(), |(_, p99)| format_duration(p99)),
        ]);
    };
    row("baseline: lines of a file", took, bytes, None);
    for size in [BATCH, 100] {
        let data_dir = home.path().join(size.to_string());
        let (took, bytes) = append_batches(&data_dir, size, &subject).await;
        row(&format!("journal, batches of {size}"), took, bytes, None);
    }
    let data_dir = home.path().join("emitted");
    let (took, bytes, emits) = emit_to_journal(&data_dir, &subject).await;
    row("emitter to journal", took, bytes, Some(emits));

    let took = deliver_backlog(home.path(), &subject).await;
    report.row([
        "backlog to backend".to_owned(),
        format_number(DELIVERED as f64 / took.as_secs_f64()),
        format!("{:.2}", DELIVERED as f64 / EVENTS as f64 * baseline.as_secs_f64() / took.as_secs_f64()),
        "-".to_owned(),
        "-".to_owned(),
        "-".to_owned(),
    ]);

    let opened = opening_time(&data_dir).await;
    let read = Instant::now();
    let count = journal::read(&data_dir, StoredEventQuery::default()).unwrap().count() as u64;
    assert!(count >= EVENTS, "only {count} events are stored");
    let read = read.elapsed();
    let per_event = |took: Duration| took.as_secs_f64() * 1e6 / EVENTS as f64;
    report.goal("time per event, emitter to disk", 10.0, "µs", per_event(took));
    report.goal("emit p50", 1.0, "µs", emits.0.as_secs_f64() * 1e6);
    report.goal(&format!("opening a journal of {} events", format_number(EVENTS as f64)), 100.0, "ms", opened);
    report.goal("reading one event", 10.0, "µs", per_event(read));
}

fn write_lines(path: &Path, of: &Arc<EventSubject>) -> (Duration, u64) {
    let mut file = File::create(path).unwrap();
    let (mut took, mut text) = (Duration::ZERO, Vec::new());
    for from in (1..=EVENTS).step_by(usize::try_from(50 * BATCH).unwrap()) {
        let batches = batches(from, BATCH, of);
        let began = Instant::now();
        for batch in batches {
            text.clear();
            for envelope in &batch.events {
                serde_json::to_writer(&mut text, envelope).unwrap();
                text.push(b'\n');
            }
            file.write_all(&text).unwrap();
        }
        took += began.elapsed();
    }
    (took, file.metadata().unwrap().len())
}

async fn append_batches(data_dir: &Path, size: u64, of: &Arc<EventSubject>) -> (Duration, u64) {
    let journal = Journal::open(data_dir, limits()).unwrap();
    let mut took = Duration::ZERO;
    for from in (1..=EVENTS).step_by(usize::try_from(50 * BATCH).unwrap()) {
        let batches = batches(from, size, of);
        let began = Instant::now();
        for batch in batches {
            assert_eq!(journal.append(batch).await, SinkAnswer::Accepted);
        }
        took += began.elapsed();
    }
    let began = Instant::now();
    journal.close().await;
    (took + began.elapsed(), fs::metadata(journal::database(data_dir)).unwrap().len())
}

/// Emits from one thread, as fast as possible without losing events.
async fn emit_to_journal(data_dir: &Path, of: &Arc<EventSubject>) -> (Duration, u64, (Duration, Duration)) {
    let journal = Journal::open(data_dir, limits()).unwrap();
    let sink = JournalSink::new(journal.clone(), None);
    let runtime = start(SimConnector::new(SimScript::default()), sink, |_| {}).await;
    let (emitter, appended) = (runtime.emitter().clone(), journal.watch_appended());
    let of = Arc::clone(of);
    let began = Instant::now();
    let emits = tokio::task::spawn_blocking(move || {
        let mut emits = Vec::new();
        for nth in 0..EVENTS {
            // Half of the capacity of the queues.
            while nth.is_multiple_of(100) && nth.saturating_sub(*appended.borrow()) > 5_000 {
                std::thread::yield_now();
            }
            let event = event(&of);
            let began = nth.is_multiple_of(TIMED).then(Instant::now);
            emitter.emit(event);
            emits.extend(began.map(|began| began.elapsed()));
        }
        emits
    });
    let emits = emits.await.unwrap();
    journal.wait_stored(EVENTS).await;
    let took = began.elapsed();
    let statistics = runtime.event_statistics();
    assert_eq!((statistics.dropped, statistics.failed), (0, 0));
    runtime.shutdown().await;
    journal.close().await;
    let bytes = fs::metadata(journal::database(data_dir)).unwrap().len();
    (took, bytes, (median(emits.iter().copied()), quantile(emits, 0.99)))
}

/// Delivers a backlog to the backend until it has acknowledged the last event.
async fn deliver_backlog(home: &Path, of: &Arc<EventSubject>) -> Duration {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (send, receive) = std::sync::mpsc::channel();
    let backend_dir = home.join("backend");
    // The backend gets its own threads, as a separate process would have.
    let backend = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    backend.spawn(async move {
        let backend = BackendServer::open(BackendSettings::new(backend_dir)).await.unwrap();
        let token = fs::read_to_string(backend.registration_token_file()).unwrap();
        let mut serving = backend.serve(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        send.send((serving.address(), token)).unwrap();
        panic!("{}", serving.wait_ended().await);
    });
    let (address, token) = tokio::task::spawn_blocking(move || receive.recv().unwrap()).await.unwrap();
    let url = format!("http://{address}/api/satellites");
    let registration = serde_json::json!({
        "name": "bench", "version": "0.1.0", "capabilities": ["stdio"],
        "system": {"os": "linux", "arch": "x86_64", "cpus": 2, "memory_bytes": 1_u64 << 30},
    });
    let request = reqwest::Client::new().post(format!("{url}/register")).bearer_auth(token.trim()).json(&registration);
    let response = request.send().await.unwrap().error_for_status().unwrap();
    let registered: serde_json::Value = response.json().await.unwrap();
    let (id, key) = (registered["satellite_id"].as_str().unwrap(), registered["api_key"].as_str().unwrap());

    let journal = Journal::open(&home.join("backlog"), limits()).unwrap();
    journal.store_delivery(0, None).await.unwrap();
    for batch in batches(1, BATCH, of).into_iter().take_while(|batch| batch.id <= DELIVERED) {
        assert_eq!(journal.append(batch).await, SinkAnswer::Accepted);
    }
    let key = Secret::from(key.to_owned());
    let sink = HttpSink::new(&format!("{url}/{id}/events"), Some(&key)).unwrap();
    let began = Instant::now();
    let delivery = Delivery::start(journal.clone(), "the backend", Arc::new(sink), &BatchPolicy::default());
    let mut status = delivery.watch();
    status.wait_for(|status| status.settled >= DELIVERED).await.unwrap();
    let took = began.elapsed();
    assert_eq!(delivery.status().sent, DELIVERED);
    delivery.finish(Duration::from_secs(5)).await;
    journal.close().await;
    backend.shutdown_background();
    took
}

async fn opening_time(data_dir: &Path) -> f64 {
    let mut times = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        let journal = Journal::open(data_dir, limits()).unwrap();
        assert!(journal.next_seq() > EVENTS);
        times.push(began.elapsed());
        journal.close().await;
    }
    median(times).as_secs_f64() * 1e3
}

/// Returns the CPU time in microseconds of the events of a call: from their emission until they are stored.
fn cost_of_calls() -> f64 {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (subject, mask) = (subject(), SecretMask::new(["a-secret-of-the-server"]));
    let mut log = RequestLog::new(&BatchPolicy::default());
    let mut call = |nth: u64, emitter: &EventSender| {
        let text = "the quick brown fox jumps over the lazy dog; the quick brown fox";
        let params = format!(r#"{{"text":"{nth:08} {text}"}}"#);
        let response = format!(r#"{{"content":[{{"type":"text","text":"{nth:08} {text}"}}],"isError":false}}"#);
        let logged = LoggedCall {
            subject: Arc::clone(&subject),
            mask: mask.clone(),
            tool: "echo".to_owned(),
            params: Some(LoggedPayload::from_json(&params, 4096, &mask)),
            response: Some(LoggedPayload::from_json(&response, 4096, &mask)),
            duration: Duration::from_micros(nth % 1000),
            error: None,
            fate: None,
            client: Some("claude-code".to_owned()),
            at: Timestamp::now(),
        };
        if let Some(event) = log.add(Instant::now(), logged) {
            emitter.emit(event);
        }
        emitter.emit(event(&subject));
    };
    common::tokio_runtime().block_on(async {
        let journal = Journal::open(home.path(), limits()).unwrap();
        let sink = JournalSink::new(journal.clone(), None);
        let runtime =
            start(SimConnector::new(SimScript::default()), sink, |options| options.batch.batch_max = 2_000).await;
        let (emitter, appended) = (runtime.emitter().clone(), journal.watch_appended());
        let cpu = CpuClock::start();
        for nth in 0..EVENTS {
            while nth.is_multiple_of(1_000) && nth.saturating_sub(*appended.borrow()) > 5_000 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            call(nth, &emitter);
        }
        runtime.flush().await;
        runtime.shutdown().await;
        journal.close().await;
        cpu.elapsed().as_secs_f64() * 1e6 / EVENTS as f64
    })
}
