//! The file, stdout and HTTP sinks with real files, a real pipe and a real HTTP server.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use jiff::Timestamp;
use mcp_satellite::data_dir::private_tempdir;
use mcp_satellite::sink::file::FileSink;
use mcp_satellite::sink::stdout::StdoutSink;
use mcp_satellite_actors::model::event::Envelope;
use mcp_satellite_actors::seam::{EventSink, SinkAnswer, SinkBatch};
use rustix::process::{Resource, Rlimit, setrlimit};
use tempfile::TempDir;
use testkit::process::{ignored_test, ignored_test_command};

use super::journal::support::{assert_unavailable, event_at, range};

const LARGE: u64 = 1 << 30;

fn event(seq: u64) -> Envelope {
    event_at(seq, Timestamp::from_millisecond(1_780_000_000_123).unwrap())
}

fn batch(seqs: std::ops::RangeInclusive<u64>) -> Arc<SinkBatch> {
    Arc::new(SinkBatch { id: *seqs.start(), events: seqs.map(event).collect() })
}

fn current(dir: &TempDir) -> PathBuf {
    dir.path().join("events.jsonl")
}

fn full_files(dir: &TempDir) -> Vec<PathBuf> {
    let mut paths: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| *path != current(dir));
    paths.sort();
    paths
}

fn append(path: &Path, text: &str) {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

fn line(seq: u64) -> String {
    serde_json::to_string(&event(seq)).unwrap() + "\n"
}

/// The seqs in a file. Panics if a line is incomplete.
fn seqs_in(path: &Path) -> Vec<u64> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "{} ends in the middle of a line", path.display());
    text.lines().map(|line| serde_json::from_str::<Envelope>(line).unwrap().seq).collect()
}

/// The seqs in all files, oldest file first.
fn stored(dir: &TempDir) -> Vec<u64> {
    let full = full_files(dir).into_iter().filter(|path| path.is_file());
    full.chain([current(dir)]).filter(|path| path.exists()).flat_map(|path| seqs_in(&path)).collect()
}

mod file {
    use super::*;

    #[tokio::test]
    async fn events_are_stored_one_per_line_and_read_back_unchanged() {
        let dir = private_tempdir();
        let (sink, next_seq) = FileSink::open(dir.path().join("new"), LARGE, 1).unwrap();
        assert_eq!(next_seq, 1);
        assert_eq!(sink.send(batch(1..=3)).await, SinkAnswer::Accepted);
        let text = fs::read_to_string(dir.path().join("new/events.jsonl")).unwrap();
        let back: Vec<Envelope> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(back, range(1..=3).into_iter().map(event).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_full_file_is_rotated_without_splitting_a_batch() {
        let dir = private_tempdir();
        let (sink, _) = FileSink::open(dir.path(), 3 * line(1).len() as u64 + 20, 2).unwrap();
        for seq in (1..=20).step_by(2) {
            assert_eq!(sink.send(batch(seq..=seq + 1)).await, SinkAnswer::Accepted);
        }
        let full = full_files(&dir);
        assert_eq!(full.len(), 2, "number of kept files");
        for path in full.iter().chain([&current(&dir)]) {
            assert_eq!(seqs_in(path).len(), 2, "a batch was split between files");
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(stored(&dir), range(15..=20));
    }

    #[tokio::test]
    async fn a_batch_larger_than_the_file_size_is_stored() {
        let dir = private_tempdir();
        let (sink, _) = FileSink::open(dir.path(), 1, 10).unwrap();
        assert_eq!(sink.send(batch(1..=5)).await, SinkAnswer::Accepted);
        assert_eq!(sink.send(batch(6..=10)).await, SinkAnswer::Accepted);
        assert_eq!(full_files(&dir).len(), 1);
        assert_eq!(stored(&dir), range(1..=10));
    }

    #[tokio::test]
    async fn the_next_seq_continues_after_a_restart_even_without_a_current_file() {
        let dir = private_tempdir();
        let (sink, _) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        assert_eq!(sink.send(batch(1..=7)).await, SinkAnswer::Accepted);
        drop(sink);
        assert_eq!(FileSink::open(dir.path(), LARGE, 5).unwrap().1, 8);

        fs::rename(current(&dir), dir.path().join("events.00000000000000000001.jsonl")).unwrap();
        let (sink, next_seq) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        assert_eq!(next_seq, 8);
        assert_eq!(sink.send(batch(8..=9)).await, SinkAnswer::Accepted);
        assert_eq!(stored(&dir), range(1..=9));
    }

    #[tokio::test]
    async fn an_incomplete_last_line_is_removed() {
        let dir = private_tempdir();
        append(&current(&dir), &format!("{}{}{}", line(1), line(2), &line(3)[..40]));
        let (sink, next_seq) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        assert_eq!(next_seq, 3);
        assert_eq!(sink.send(batch(3..=4)).await, SinkAnswer::Accepted);
        assert_eq!(seqs_in(&current(&dir)), range(1..=4));
    }

    #[tokio::test]
    async fn a_last_line_without_a_newline_is_kept() {
        let dir = private_tempdir();
        append(&current(&dir), &format!("{}{}", line(1), line(2).trim_end()));
        let (sink, next_seq) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        assert_eq!(next_seq, 3);
        assert_eq!(sink.send(batch(3..=3)).await, SinkAnswer::Accepted);
        assert_eq!(seqs_in(&current(&dir)), range(1..=3));
    }

    #[tokio::test]
    async fn a_damaged_line_hides_neither_the_last_seq_nor_its_neighbours() {
        let dir = private_tempdir();
        append(&current(&dir), &format!("{}{}\0\0 not an event\n", line(1), line(2)));
        let (sink, next_seq) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        assert_eq!(next_seq, 3);
        assert_eq!(sink.send(batch(3..=3)).await, SinkAnswer::Accepted);
        let text = fs::read_to_string(current(&dir)).unwrap();
        let seqs = text.lines().filter_map(|line| serde_json::from_str::<Envelope>(line).ok()).map(|event| event.seq);
        assert_eq!(seqs.collect::<Vec<_>>(), range(1..=3));
    }

    #[tokio::test]
    async fn a_repeated_batch_is_not_stored_twice() {
        let dir = private_tempdir();
        let (sink, _) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        for _ in 0..3 {
            assert_eq!(sink.send(batch(1..=3)).await, SinkAnswer::Accepted);
        }
        assert_eq!(sink.send(batch(2..=5)).await, SinkAnswer::Accepted);
        assert_eq!(seqs_in(&current(&dir)), range(1..=5));
    }

    #[tokio::test]
    async fn a_write_error_is_reported_and_the_next_attempt_succeeds() {
        let dir = private_tempdir();
        let (sink, _) = FileSink::open(dir.path(), LARGE, 5).unwrap();
        assert_eq!(sink.send(batch(1..=2)).await, SinkAnswer::Accepted);
        fs::remove_file(current(&dir)).unwrap();
        fs::create_dir(current(&dir)).unwrap();
        let reason = assert_unavailable(sink.send(batch(3..=4)).await);
        assert!(reason.starts_with(&format!("cannot write {}: ", current(&dir).display())), "{reason}");

        fs::remove_dir(current(&dir)).unwrap();
        assert_eq!(sink.send(batch(3..=4)).await, SinkAnswer::Accepted);
        assert_eq!(seqs_in(&current(&dir)), range(3..=4), "accepted events were written again");
    }

    #[test]
    fn an_open_error_states_the_cause() {
        let dir = private_tempdir();
        File::create(dir.path().join("file")).unwrap();
        let error = FileSink::open(dir.path().join("file/journal"), LARGE, 5).unwrap_err().to_string();
        assert!(error.starts_with("cannot create "), "{error}");

        symlink("/dev/full", current(&dir)).unwrap();
        let error = FileSink::open(dir.path(), LARGE, 5).unwrap_err().to_string();
        assert!(error.contains("events.jsonl` is a symbolic link") && error.contains("rm '"), "{error}");
    }

    /// A file size limit simulates a full disk: both cut a write in the middle of a line. The limit applies to the
    /// whole process, so the test runs in a child that ignores SIGXFSZ.
    #[test]
    fn a_batch_cut_by_a_full_disk_is_completed_without_repeated_lines() {
        let dir = private_tempdir();
        let mut command = Command::new("sh");
        command.args(["-c", r#"trap "" XFSZ; exec "$0" "$@""#]).arg(std::env::current_exe().unwrap());
        command.args(ignored_test(module_path!(), "child_on_a_full_disk")).env("SINKS_DIR", dir.path());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(seqs_in(&current(&dir)), range(1..=22));
    }

    #[tokio::test]
    #[ignore = "the child process of the test above"]
    async fn child_on_a_full_disk() {
        let Some(dir) = std::env::var_os("SINKS_DIR").map(PathBuf::from) else { return };
        let (sink, _) = FileSink::open(&dir, LARGE, 5).unwrap();
        assert_eq!(sink.send(batch(1..=2)).await, SinkAnswer::Accepted);

        let limit = 10 * line(1).len() as u64;
        setrlimit(Resource::Fsize, Rlimit { current: Some(limit), maximum: None }).unwrap();
        for _ in 0..3 {
            let reason = assert_unavailable(sink.send(batch(3..=22)).await);
            assert!(reason.starts_with("cannot write ") && reason.contains("File too large"), "{reason}");
            let left = fs::read_to_string(dir.join("events.jsonl")).unwrap();
            assert!(left.lines().count() > 2 && !left.ends_with('\n'), "the write was not cut within a line");
        }
        setrlimit(Resource::Fsize, Rlimit { current: None, maximum: None }).unwrap();
        assert_eq!(sink.send(batch(3..=22)).await, SinkAnswer::Accepted);
    }
}

mod stdout {
    use super::*;

    #[test]
    fn a_slow_reader_of_stdout_blocks_no_async_thread() {
        let dir = private_tempdir();
        let mut child = ignored_test_command(module_path!(), "child_with_a_slow_reader")
            .env("SINKS_DIR", dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The pipe is not read until the child's only async thread reports that the full pipe does not block it.
        let continued =
            BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap).any(|line| line == "going on");
        assert!(continued);
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "{text}");
        let events = text.lines().filter(|line| line.starts_with("{\"seq\""));
        let seqs: Vec<_> = events.map(|line| serde_json::from_str::<Envelope>(line).unwrap().seq).collect();
        assert_eq!(seqs, range(1..=3000), "events of the repeated batch were written twice");
    }

    #[tokio::test]
    #[ignore = "the child process of the test above"]
    async fn child_with_a_slow_reader() {
        if std::env::var_os("SINKS_DIR").is_none() {
            return;
        }
        std::io::stdout().write_all(b"\n").unwrap();
        let sink = StdoutSink::new().unwrap();
        // Many times the capacity of a pipe.
        let (answer, ()) = tokio::join!(sink.send(batch(1..=2999)), async {
            std::io::stderr().write_all(b"going on\n").unwrap();
        });
        assert_eq!(answer, SinkAnswer::Accepted);
        assert_eq!(sink.send(batch(1..=3000)).await, SinkAnswer::Accepted);
    }
}

mod http {
    use std::collections::BTreeMap;
    use std::future::{Future, pending};
    use std::sync::Mutex;
    use std::time::Duration;

    use axum::Router;
    use axum::body::{Body, to_bytes};
    use axum::extract::Request;
    use axum::http::StatusCode;
    use axum::response::{IntoResponse, Response};
    use futures::StreamExt;
    use futures::stream;
    use mcp_satellite::sink::http::{HttpSink, HttpSinkError};
    use mcp_satellite_actors::model::secret::Secret;
    use serde_json::{Value, json};
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    const TOKEN: &str = "t0ken-value";

    /// Starts a server that answers every request with `answer` and returns its address.
    async fn serve<F: Future<Output = Response> + Send>(
        answer: impl Fn(Request) -> F + Clone + Send + Sync + 'static,
    ) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        address.to_string()
    }

    fn sink(address: &str) -> HttpSink {
        let url = format!("http://user:passw0rd%2Din-url@{address}/api/events?key=key-in-query");
        HttpSink::new(&url, Some(&Secret::from(TOKEN))).unwrap()
    }

    fn without_secrets(text: &str) -> String {
        for secret in [TOKEN, "passw0rd", "key-in-query"] {
            assert!(!text.contains(secret), "`{secret}` is shown in {text}");
        }
        text.to_owned()
    }

    async fn answer_to(status: u16, headers: &[(&'static str, &str)], body: impl ToString) -> SinkAnswer {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        let (parts, ()) = response.body(()).unwrap().into_parts();
        let body = body.to_string();
        let address = serve(move |request| {
            let (parts, body) = (parts.clone(), body.clone());
            async move {
                to_bytes(request.into_body(), usize::MAX).await.unwrap();
                Response::from_parts(parts, body.into())
            }
        });
        let answer = sink(&address.await).send(batch(1..=3)).await;
        without_secrets(&format!("{answer:?}"));
        answer
    }

    #[tokio::test]
    async fn a_batch_is_posted_with_its_idempotency_key_and_token() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (log, statuses) = (seen.clone(), [503, 200]);
        let address = serve(move |request| {
            let log = log.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body: Value = serde_json::from_slice(&to_bytes(body, usize::MAX).await.unwrap()).unwrap();
                let mut log = log.lock().unwrap();
                log.push((parts, body));
                StatusCode::from_u16(statuses[log.len() - 1]).unwrap().into_response()
            }
        });
        let sink = sink(&address.await);
        assert!(
            assert_unavailable(sink.send(batch(7..=9)).await).ends_with("/api/events answered 503 Service Unavailable")
        );
        assert_eq!(sink.send(batch(7..=9)).await, SinkAnswer::Accepted);
        let seen = seen.lock().unwrap();
        for (parts, body) in seen.iter() {
            assert_eq!(parts.method, "POST");
            assert_eq!(parts.uri, "/api/events?key=key-in-query");
            assert_eq!(parts.headers["idempotency-key"], "7", "the key must be the same for each attempt");
            assert_eq!(parts.headers["content-type"], "application/json");
            let authorization: Vec<_> = parts.headers.get_all("authorization").iter().collect();
            assert_eq!(authorization, ["Bearer t0ken-value"]);
            assert_eq!(*body, json!({ "events": batch(7..=9).events }));
        }
    }

    #[tokio::test]
    async fn a_2xx_accepts_all_events_except_those_in_its_report() {
        let report = |failed: u64, failures: Value| json!({ "success": failed == 0, "processed": 3 - failed, "failed": failed, "event_ids": [], "failures": failures });
        assert_eq!(answer_to(200, &[], report(0, json!([]))).await, SinkAnswer::Accepted);
        let failures = json!([
            { "index": 1, "type": "mcp.tool.executed", "error": format!("bad {TOKEN}\nfor key-in-query") },
            { "index": 2, "type": "mcp.tool.executed" },
            { "index": 3, "error": "there is no such event" },
            { "error": "which?" },
        ]);
        let partial = vec![(1, "bad [secret] for [secret]".into()), (2, "rejected without a reason".into())];
        assert_eq!(answer_to(200, &[], report(2, failures)).await, SinkAnswer::Partial(partial));
        for body in ["", "<html>welcome</html>", "[1, 2]", "{\"failed\": \"none\"}", "\u{0}"] {
            assert_eq!(answer_to(200, &[], body).await, SinkAnswer::Accepted, "{body}");
        }
        assert_eq!(answer_to(202, &[], "").await, SinkAnswer::Accepted);
        assert_eq!(answer_to(204, &[], "").await, SinkAnswer::Accepted);
    }

    #[tokio::test]
    async fn a_400_or_422_is_invalid_and_names_the_reported_event() {
        for status in [400, 422] {
            let body = json!({ "failures": [{ "index": 2, "type": "x", "error": "no such type" }] });
            assert_eq!(answer_to(status, &[], body).await, SinkAnswer::Invalid(Some(2), "no such type".into()));
            let body = json!({ "index": 0, "error": format!("not with {TOKEN}") });
            assert_eq!(answer_to(status, &[], body).await, SinkAnswer::Invalid(Some(0), "not with [secret]".into()));
            let body = json!({ "index": 3, "message": "beyond the batch" });
            assert_eq!(answer_to(status, &[], body).await, SinkAnswer::Invalid(None, "beyond the batch".into()));
        }
        assert_eq!(answer_to(400, &[], "what?").await, SinkAnswer::Invalid(None, "answered 400 Bad Request".into()));
    }

    #[tokio::test]
    async fn other_error_statuses_map_to_their_answers() {
        assert_eq!(answer_to(413, &[], "").await, SinkAnswer::TooLarge);
        assert_eq!(answer_to(401, &[], "").await, SinkAnswer::Unauthorized);
        assert_eq!(answer_to(403, &[], "").await, SinkAnswer::Unauthorized);
        for status in [404, 405, 409, 500, 502, 503] {
            let reason = assert_unavailable(answer_to(status, &[], TOKEN).await);
            assert!(reason.contains(&format!("answered {status}")), "{reason}");
        }
    }

    #[tokio::test]
    async fn a_429_returns_the_delay_of_retry_after() {
        assert_eq!(answer_to(429, &[], "").await, SinkAnswer::Throttled(None));
        assert_eq!(answer_to(429, &[("retry-after", "later")], "").await, SinkAnswer::Throttled(None));
        let seconds = answer_to(429, &[("retry-after", "17")], "").await;
        assert_eq!(seconds, SinkAnswer::Throttled(Some(Duration::from_secs(17))));
        let past = answer_to(429, &[("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT")], "").await;
        assert_eq!(past, SinkAnswer::Throttled(Some(Duration::ZERO)));
        let future = answer_to(429, &[("retry-after", "Tue, 31 Dec 2999 23:59:59 GMT")], "").await;
        assert_eq!(
            future,
            SinkAnswer::Throttled(Some(Duration::from_secs(3600))),
            "the delay must be limited to an hour"
        );
    }

    #[tokio::test]
    async fn a_redirect_is_not_followed() {
        let seen = Arc::new(Mutex::new(BTreeMap::<String, u32>::new()));
        let log = seen.clone();
        let address = serve(move |request: Request| {
            *log.lock().unwrap().entry(request.uri().path().to_owned()).or_default() += 1;
            async { (StatusCode::FOUND, [("location", "/elsewhere")]).into_response() }
        });
        let reason = assert_unavailable(sink(&address.await).send(batch(1..=1)).await);
        assert!(reason.ends_with("answered 302 Found"), "{reason}");
        assert_eq!(*seen.lock().unwrap(), BTreeMap::from([("/api/events".into(), 1)]));
    }

    #[tokio::test]
    async fn a_server_that_hangs_before_or_within_its_response_times_out() {
        let timeout = Duration::from_millis(100);
        let silent = serve(|_| pending()).await;
        let stuck = serve(|_| async { Response::new(Body::from_stream(stream::pending::<Result<String, String>>())) });
        for address in [silent, stuck.await] {
            let reason = assert_unavailable(sink(&address).with_timeout(timeout).send(batch(1..=1)).await);
            assert_eq!(without_secrets(&reason), format!("http://{address}/api/events did not answer within 100ms"));
        }
    }

    #[tokio::test]
    async fn an_endless_response_is_not_read_completely() {
        let report = json!({ "failed": 1, "failures": [{ "index": 0, "error": "x" }] }).to_string();
        for (status, expected) in
            [(200, SinkAnswer::Accepted), (400, SinkAnswer::Invalid(None, "answered 400 Bad Request".into()))]
        {
            let report = report.clone();
            let address = serve(move |_| {
                let spaces = stream::repeat(" ".repeat(1000));
                let body = stream::iter([report.clone()]).chain(spaces).map(Ok::<_, String>);
                async move { (StatusCode::from_u16(status).unwrap(), Body::from_stream(body)).into_response() }
            });
            assert_eq!(sink(&address.await).send(batch(1..=1)).await, expected);
        }
    }

    #[tokio::test]
    async fn an_unreachable_or_non_http_server_is_unavailable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let peer = tokio::spawn(async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 16]).await.unwrap();
            stream.write_all(b"220 mail.example ESMTP\r\n").await.unwrap();
        });
        let reason = assert_unavailable(sink(&address).send(batch(1..=1)).await);
        assert!(
            without_secrets(&reason)
                .starts_with(&format!("cannot complete the request to http://{address}/api/events: ")),
            "{reason}"
        );
        peer.await.unwrap();

        // A bound socket that does not listen refuses connections, and no other program can bind the port.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = socket.local_addr().unwrap().to_string();
        let reason = assert_unavailable(sink(&address).send(batch(1..=1)).await);
        let expected = format!("cannot connect to http://{address}/api/events: Connection refused");
        assert!(without_secrets(&reason).starts_with(&expected), "{reason}");
    }

    #[test]
    fn neither_the_sink_nor_its_errors_contain_secrets() {
        let shown = without_secrets(&format!("{:?}", sink("127.0.0.1:1")));
        assert!(shown.contains("http://127.0.0.1:1/api/events"), "{shown}");
        let token = Secret::from(format!("{TOKEN}\n"));
        let wrong_token = HttpSink::new("http://127.0.0.1:1/", Some(&token)).unwrap_err();
        assert!(matches!(wrong_token, HttpSinkError::Token));
        let wrong_url = HttpSink::new("ftp://user:passw0rd@host/", None).unwrap_err();
        let no_url = HttpSink::new("//user:passw0rd@host:99999/", None).unwrap_err();
        for error in [wrong_token, wrong_url, no_url] {
            without_secrets(&format!("{error} {error:?}"));
        }
    }

    #[test]
    fn an_https_url_is_accepted() {
        HttpSink::new("https://events.example/api", None).unwrap();
    }
}
