//! The simulated server, driven by hand-written lines over its link, with a paused clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite::connect::sim::{Grandchild, SimConnector, SimPlan, SimScript};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::{ProcessConnector, ProcessEnd, ServerProcess};
use serde_json::{Value, json};
use testkit::spec::stdio;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::{Instant, timeout};

/// Longer than any step of a test. With the paused clock it takes no time.
const LONG: Duration = Duration::from_secs(24 * 3600);

fn spec() -> Arc<InstanceSpec> {
    let env = BTreeMap::from([("API_KEY".to_owned(), "hush-hush".into())]);
    Arc::new(InstanceSpec { env, ..testkit::spec::spec(stdio("files")) })
}

struct Client {
    reader: BufReader<Box<dyn AsyncRead + Send + Unpin>>,
    writer: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    process: Box<dyn ServerProcess>,
    guard: Box<dyn Send>,
}

impl Client {
    async fn open(connector: &SimConnector, run: u64) -> Self {
        let link = connector.open(spec(), RunNumber(run)).await.unwrap();
        Self {
            reader: BufReader::new(link.reader),
            writer: Some(link.writer),
            stderr: link.stderr,
            process: link.process,
            guard: link.guard,
        }
    }

    async fn with_script(script: SimScript) -> Self {
        Self::open(&SimConnector::new(script), 1).await
    }

    /// Opens a server and performs the handshake.
    async fn ready(script: SimScript) -> Self {
        let mut client = Self::with_script(script).await;
        client.handshake().await;
        client
    }

    async fn handshake(&mut self) -> Value {
        let params =
            json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}});
        self.send(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})).await;
        let answer = self.line().await;
        self.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        answer
    }

    async fn send(&mut self, message: &Value) {
        self.writer.as_mut().unwrap().write_all(format!("{message}\n").as_bytes()).await.unwrap();
    }

    async fn request(&mut self, id: u64, method: &str, params: Value) {
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})).await;
    }

    async fn call(&mut self, id: u64, tool: &str, arguments: Value) {
        self.request(id, "tools/call", json!({"name": tool, "arguments": arguments})).await;
    }

    async fn text(&mut self) -> String {
        let mut line = String::new();
        timeout(LONG, self.reader.read_line(&mut line)).await.unwrap().unwrap();
        line
    }

    async fn line(&mut self) -> Value {
        serde_json::from_str(&self.text().await).unwrap()
    }

    /// Calls a tool and returns the response.
    async fn result(&mut self, tool: &str, arguments: Value) -> Value {
        self.call(99, tool, arguments).await;
        let answer = self.line().await;
        assert_eq!(answer["id"], 99);
        answer
    }

    async fn is_silent(&mut self) -> bool {
        timeout(LONG, self.reader.fill_buf()).await.is_err()
    }

    async fn ended(&mut self) -> ProcessEnd {
        timeout(LONG, self.process.wait()).await.unwrap()
    }
}

fn code(code: i32) -> ProcessEnd {
    ProcessEnd { code: Some(code), signal: None }
}

fn signal(signal: i32) -> ProcessEnd {
    ProcessEnd { code: None, signal: Some(signal) }
}

fn names(list: &Value) -> Vec<&str> {
    list["result"]["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect()
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn the_handshake_returns_the_offered_version_if_it_is_known() {
    let mut client = Client::with_script(SimScript::default()).await;
    for (offered, answered) in [("2024-11-05", "2024-11-05"), ("2026-07-28", "2025-11-25")] {
        client.request(1, "initialize", json!({"protocolVersion": offered})).await;
        let result = &client.line().await["result"];
        assert_eq!(result["protocolVersion"], answered);
        assert_eq!(result["serverInfo"], json!({"name": "sim-server", "version": "1.0.0"}));
        assert_eq!(result["capabilities"]["tools"]["listChanged"], true);
    }
    let script = SimScript { protocol_version: Some("1999-01-01".to_owned()), ..SimScript::default() };
    assert_eq!(Client::with_script(script).await.handshake().await["result"]["protocolVersion"], "1999-01-01");
}

#[tokio::test(start_paused = true)]
async fn a_script_can_delay_reject_or_omit_the_handshake() {
    let start = Instant::now();
    let late = SimScript { start_delay: SECOND, handshake_delay: 2 * SECOND, ..SimScript::default() };
    Client::with_script(late).await.handshake().await;
    assert_eq!(start.elapsed(), 3 * SECOND);

    let refused = SimScript { handshake_error: Some("no licence".to_owned()), ..SimScript::default() };
    assert_eq!(Client::with_script(refused).await.handshake().await["error"]["message"], "no licence");

    let mut never = Client::with_script(SimScript { handshake_never: true, ..SimScript::default() }).await;
    never.request(0, "initialize", json!({})).await;
    assert!(never.is_silent().await);
    never.request(1, "ping", json!({})).await;
    assert_eq!(never.line().await, json!({"jsonrpc": "2.0", "id": 1, "result": {}}));
}

#[tokio::test(start_paused = true)]
async fn the_tool_list_has_pages_and_special_tools_only_on_request() {
    let mut client = Client::ready(SimScript { tools: 5, page_size: 2, ..SimScript::default() }).await;
    let (mut params, mut pages) = (json!({}), Vec::new());
    loop {
        client.request(1, "tools/list", params).await;
        let page = client.line().await;
        pages.push(names(&page).join(" "));
        let Some(cursor) = page["result"].get("nextCursor") else { break };
        params = json!({"cursor": cursor});
    }
    assert_eq!(pages, ["echo add", "sleep tool_4", "tool_5"]);
    assert_eq!(client.result("tool_5", json!({})).await["result"]["content"][0]["text"], "tool_5");
    assert_eq!(client.result("tool_6", json!({})).await["error"]["code"], -32602);

    let mut client = Client::ready(SimScript { tools: 1, all_tools: true, ..SimScript::default() }).await;
    client.request(1, "tools/list", json!({})).await;
    let special = ["echo", "big", "fail", "tool_error", "crash", "env", "huge", "received"];
    assert_eq!(names(&client.line().await), special);

    let mut client = Client::with_script(SimScript { no_tools_capability: true, ..SimScript::default() }).await;
    assert_eq!(client.handshake().await["result"]["capabilities"], json!({}));
    client.request(1, "tools/list", json!({})).await;
    assert_eq!(client.line().await["error"]["code"], -32601);
}

#[tokio::test(start_paused = true)]
async fn each_tool_returns_its_documented_result() {
    let mut client = Client::ready(SimScript::default()).await;
    let echoed = client.result("echo", json!({"text": {"a": [1, "ä\n"]}})).await["result"].clone();
    assert_eq!(echoed["content"][0]["text"], r#"{"a":[1,"ä\n"]}"#);
    assert_eq!(echoed["structuredContent"], json!({"text": {"a": [1, "ä\n"]}}));

    assert_eq!(client.result("add", json!({"a": 2, "b": 3})).await["result"]["content"][0]["text"], "5");
    let real = client.result("add", json!({"a": 0.5, "b": 3})).await;
    assert_eq!(real["result"]["structuredContent"], json!({"result": 3.5}));
    assert_eq!(client.result("add", json!({"a": 2})).await["error"]["code"], -32602);

    let big = client.result("big", json!({"bytes": 100_000})).await;
    assert_eq!(big["result"]["content"][0]["text"].as_str().unwrap().len(), 100_000);
    let failed = client.result("fail", json!({"message": "of course"})).await;
    assert!(failed["error"]["message"].as_str().unwrap().contains("of course"));
    assert_eq!(client.result("tool_error", json!({})).await["result"]["isError"], true);
    let value = client.result("env", json!({"name": "API_KEY"})).await;
    assert_eq!(value["result"]["content"][0]["text"], "hush-hush");
    assert_eq!(client.result("env", json!({"name": "HOME"})).await["result"]["isError"], true);

    client.request(1, "resources/list", json!({})).await;
    assert_eq!(client.line().await["error"]["code"], -32601);
    client.send(&json!([1, 2])).await;
    assert_eq!(client.line().await["error"]["code"], -32700);
}

#[tokio::test(start_paused = true)]
async fn a_huge_line_has_exactly_the_configured_length() {
    let mut client = Client::ready(SimScript { huge_line_bytes: 3_000_000, ..SimScript::default() }).await;
    client.call(1, "big", json!({"bytes": 10})).await;
    client.call(12345, "huge", json!({})).await;
    client.text().await;
    assert_eq!(client.text().await.trim_end().len(), 3_000_000);
}

#[tokio::test(start_paused = true)]
async fn a_sleep_reports_progress_and_does_not_block_other_calls() {
    let mut client = Client::ready(SimScript::default()).await;
    let start = Instant::now();
    let arguments = json!({"ms": 1000, "progress_every_ms": 400});
    let params = json!({"name": "sleep", "arguments": arguments, "_meta": {"progressToken": "t-1"}});
    client.request(1, "tools/call", params).await;
    client.call(2, "sleep", json!({"ms": 500})).await;
    client.call(3, "echo", json!({"text": 1})).await;

    let mut received = Vec::new();
    for _ in 0..5 {
        let line = client.line().await;
        let what = if line["method"] == "notifications/progress" {
            assert_eq!(line["params"]["progressToken"], "t-1");
            format!("{} of {}", line["params"]["progress"], line["params"]["total"])
        } else {
            format!("answer to {}", line["id"])
        };
        received.push(format!("{} ms: {what}", start.elapsed().as_millis()));
    }
    let expected = [
        "0 ms: answer to 3",
        "400 ms: 400 of 1000",
        "500 ms: answer to 2",
        "800 ms: 800 of 1000",
        "1000 ms: answer to 1",
    ];
    assert_eq!(received, expected);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_sleep_is_answered_only_if_it_ignores_the_cancellation() {
    let mut client = Client::ready(SimScript::default()).await;
    client.call(1, "sleep", json!({"ms": 1000})).await;
    client.call(2, "sleep", json!({"ms": 1000, "ignore_cancel": true})).await;
    for id in [1, 2] {
        let params = json!({"requestId": id});
        client.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})).await;
    }
    assert_eq!(client.line().await["id"], 2);
    assert!(client.is_silent().await);
    let received = client.result("received", json!({})).await;
    let expected = json!({"calls": 2, "cancelled": [1, 2], "pings": 0, "initialized": 1});
    assert_eq!(received["result"]["structuredContent"], expected);
}

#[tokio::test(start_paused = true)]
async fn a_crash_has_its_code_or_signal_and_earlier_output_is_still_read() {
    for (arguments, end) in [(json!({"code": 3}), code(3)), (json!({"signal": 11}), signal(11)), (json!({}), code(1))] {
        let mut client = Client::ready(SimScript::default()).await;
        for id in 0..100 {
            client.call(id, "echo", json!({"text": "x".repeat(100)})).await;
        }
        client.call(100, "crash", arguments).await;
        for id in 0..100 {
            assert_eq!(client.line().await["id"], id);
        }
        assert_eq!(client.text().await, "");
        assert_eq!(client.ended().await, end);
        assert_eq!(client.ended().await, end, "the second call of `ended` returns another end");
    }
}

#[tokio::test(start_paused = true)]
async fn a_script_ends_the_server_on_a_call_before_the_handshake_or_later() {
    let mut client = Client::ready(SimScript { exit_on_call: Some(2), exit_code: 4, ..SimScript::default() }).await;
    client.result("echo", json!({})).await;
    client.call(2, "echo", json!({})).await;
    assert_eq!(client.text().await, "");
    assert_eq!(client.ended().await, code(4));

    let script = SimScript { exit_before_handshake: true, exit_signal: Some(6), ..SimScript::default() };
    assert_eq!(Client::with_script(script).await.ended().await, signal(6));

    let mut client = Client::with_script(SimScript { exit_after: Some(SECOND), ..SimScript::default() }).await;
    tokio::time::sleep(5 * SECOND).await;
    client.handshake().await;
    let start = Instant::now();
    assert_eq!(client.ended().await, code(0));
    assert_eq!(start.elapsed(), SECOND, "the lifetime does not start at `initialized`");
}

#[tokio::test(start_paused = true)]
async fn jitter_depends_on_seed_and_run() {
    let lifetime = async |seed, run| {
        let script = SimScript { exit_after: Some(100 * SECOND), jitter: 0.5, seed, ..SimScript::default() };
        let mut client = Client::open(&SimConnector::new(script), run).await;
        client.handshake().await;
        let start = Instant::now();
        client.ended().await;
        start.elapsed()
    };
    let first = lifetime(1, 1).await;
    assert_eq!(first, lifetime(1, 1).await);
    assert_ne!(first, lifetime(1, 2).await);
    assert_ne!(first, lifetime(2, 1).await);
    assert!((50..=150).contains(&first.as_secs()));
}

#[tokio::test(start_paused = true)]
async fn sigterm_ends_the_server_at_once_slowly_or_not_at_all() {
    let mut client = Client::ready(SimScript::default()).await;
    client.process.terminate();
    assert_eq!(client.ended().await, signal(15));
    assert_eq!(client.text().await, "");

    let slow = SimScript { sigterm_delay: Some(3 * SECOND), exit_code: 2, ..SimScript::default() };
    let mut client = Client::ready(slow).await;
    let start = Instant::now();
    client.writer = None;
    client.process.terminate();
    assert_eq!(client.ended().await, code(2));
    assert_eq!(start.elapsed(), 3 * SECOND);

    let mut client = Client::ready(SimScript { ignore_sigterm: true, ..SimScript::default() }).await;
    client.process.terminate();
    client.result("echo", json!({})).await;
    client.process.kill();
    assert_eq!(client.ended().await, signal(9));
    client.process.wait_all().await;
}

#[tokio::test(start_paused = true)]
async fn closing_stdin_ends_the_server_with_code_0_unless_it_ignores_that() {
    let mut client = Client::ready(SimScript { exit_code: 7, ..SimScript::default() }).await;
    client.call(1, "echo", json!({})).await;
    client.writer = None;
    assert_eq!(client.line().await["id"], 1);
    assert_eq!(client.ended().await, code(0));

    let mut client = Client::ready(SimScript { ignore_eof: true, ..SimScript::default() }).await;
    client.writer = None;
    assert!(timeout(LONG, client.process.wait()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_frozen_or_hung_server_does_not_respond_and_ends_by_sigterm() {
    let connector = SimConnector::new(SimScript::default());
    let mut client = Client::open(&connector, 1).await;
    client.handshake().await;
    client.call(1, "sleep", json!({"ms": 10})).await;
    connector.handle(&spec().id).unwrap().freeze();
    client.request(2, "ping", json!({})).await;
    assert!(client.is_silent().await);
    client.process.terminate();
    assert_eq!(client.ended().await, signal(15));

    let mut client = Client::ready(SimScript { hang_after: Some(1), ..SimScript::default() }).await;
    client.result("echo", json!({})).await;
    client.call(1, "echo", json!({})).await;
    client.request(2, "ping", json!({})).await;
    assert!(client.is_silent().await);
    client.process.terminate();
    assert_eq!(client.ended().await, signal(15));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_calls_answers_pings() {
    let mut client = Client::ready(SimScript { hang_calls: true, ..SimScript::default() }).await;
    client.call(1, "echo", json!({})).await;
    client.request(2, "ping", json!({})).await;
    assert_eq!(client.line().await["id"], 2);
    assert!(client.is_silent().await);
    let received = client.result("received", json!({})).await;
    assert_eq!(received["result"]["structuredContent"]["calls"], 1);
    assert_eq!(received["result"]["structuredContent"]["pings"], 1);
}

#[tokio::test(start_paused = true)]
async fn call_delay_delays_every_response() {
    let mut client = Client::ready(SimScript { call_delay: SECOND, ..SimScript::default() }).await;
    let start = Instant::now();
    client.call(1, "echo", json!({})).await;
    client.call(2, "add", json!({"a": 1, "b": 1})).await;
    assert_eq!(client.line().await["id"], 1);
    assert_eq!(client.line().await["id"], 2);
    assert_eq!(start.elapsed(), SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_changed_list_is_announced_and_has_one_more_tool() {
    let mut client = Client::ready(SimScript { list_changed_after: Some(SECOND), ..SimScript::default() }).await;
    let announced = client.line().await;
    assert_eq!(announced, json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}));
    client.request(1, "tools/list", json!({})).await;
    assert_eq!(names(&client.line().await), ["echo", "add", "sleep", "tool_4"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_fails_the_configured_number_of_times() {
    let mut client = Client::ready(SimScript { list_error_times: 2, ..SimScript::default() }).await;
    for failed in [true, true, false] {
        client.request(1, "tools/list", json!({})).await;
        assert_eq!(client.line().await.get("error").is_some(), failed);
    }
    let mut client = Client::ready(SimScript { list_error: true, ..SimScript::default() }).await;
    for _ in 0..3 {
        client.request(1, "tools/list", json!({})).await;
        assert_eq!(client.line().await["error"]["code"], -32603);
    }
}

#[tokio::test(start_paused = true)]
async fn garbage_is_written_at_the_start_and_before_each_response() {
    let script = SimScript { stdout_garbage_at_start: 2, garbage_lines: 3, ..SimScript::default() };
    let mut client = Client::with_script(script).await;
    client.request(1, "ping", json!({})).await;
    for _ in 0..5 {
        let line = client.text().await;
        assert!(!serde_json::from_str::<Value>(&line).is_ok_and(|json| json.get("jsonrpc").is_some()), "{line}");
    }
    assert_eq!(client.line().await["id"], 1);
}

#[tokio::test(start_paused = true)]
async fn an_echo_is_delayed_as_its_caller_requests() {
    let mut client = Client::ready(SimScript { call_delay: SECOND, ..SimScript::default() }).await;
    let start = Instant::now();
    let echoed = client.result("echo", json!({"text": "hi", "after_ms": 1500})).await["result"].clone();
    assert_eq!(echoed["content"][0]["text"], r#""hi""#);
    assert_eq!(start.elapsed(), 5 * SECOND / 2);
}

#[tokio::test(start_paused = true)]
async fn stray_responses_precede_each_response() {
    let mut client = Client::with_script(SimScript { stray_answers: 2, ..SimScript::default() }).await;
    client.request(3, "ping", json!({})).await;
    client.call(7, "echo", json!({"text": "late", "after_ms": 10})).await;
    let mut answered = Vec::new();
    for _ in 0..10 {
        answered.push(client.line().await["id"].as_u64().unwrap_or_default());
    }
    let never = answered[1];
    assert!(never > u64::from(u32::MAX), "{never}");
    assert_eq!(
        answered,
        [0, never, 0, never, 3, 3, never, 3, never, 7],
        "wrong responses, or a response before the first request"
    );
}

#[tokio::test(start_paused = true)]
async fn a_server_that_grows_with_each_call_is_killed_over_its_memory_limit() {
    let script = SimScript { grow_per_call: 1000, memory_max: 2000, ..SimScript::default() };
    let mut client = Client::ready(script).await;
    for text in ["one", "two"] {
        assert_eq!(client.result("echo", json!({"text": text})).await["id"], 99);
    }
    client.call(100, "echo", json!({"text": "three"})).await;
    assert_eq!(client.ended().await, signal(9));
}

#[tokio::test(start_paused = true)]
async fn stderr_has_the_configured_lines_and_blocks_the_server_until_it_is_read() {
    let text = "key {env:API_KEY}, {env:NONE}end".to_owned();
    let mut client = Client::with_script(SimScript { stderr_text: Some(text.clone()), ..SimScript::default() }).await;
    let mut stderr = BufReader::new(client.stderr.take().unwrap()).lines();
    assert_eq!(stderr.next_line().await.unwrap().unwrap(), "key hush-hush, end");

    let script = SimScript { stderr_text: Some(text), stderr_lines_per_second: 250, ..SimScript::default() };
    let mut client = Client::with_script(script).await;
    let mut stderr = BufReader::new(client.stderr.take().unwrap()).lines();
    let start = Instant::now();
    for _ in 0..1000 {
        stderr.next_line().await.unwrap().unwrap();
    }
    assert_eq!(start.elapsed(), 4 * SECOND);

    // A pause of the reader is not made up for later.
    let mut client = Client::with_script(SimScript { stderr_bytes_per_second: 1 << 20, ..SimScript::default() }).await;
    tokio::time::sleep(SECOND).await;
    let mut stderr = client.stderr.take().unwrap();
    let start = Instant::now();
    tokio::io::copy(&mut (&mut stderr).take(4 << 20), &mut tokio::io::sink()).await.unwrap();
    assert!((4 * SECOND).abs_diff(start.elapsed()) < SECOND / 2, "{:?}", start.elapsed());

    let mut client = Client::with_script(SimScript { stderr_burst_bytes: 100_000, ..SimScript::default() }).await;
    client.request(1, "ping", json!({})).await;
    assert!(client.is_silent().await);
    let mut stderr = client.stderr.take().unwrap();
    let reading = tokio::spawn(async move { tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await });
    assert_eq!(client.line().await["id"], 1);
    client.process.kill();
    assert_eq!(reading.await.unwrap().unwrap(), 100_001);
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_stops_the_server_from_reading_and_loses_no_response() {
    let mut client = Client::ready(SimScript::default()).await;
    let mut calls = 0;
    while timeout(SECOND, client.call(calls, "big", json!({"bytes": 10_000}))).await.is_ok() {
        calls += 1;
        assert!(calls < 1000, "the server reads without bound");
    }
    for id in 0..calls {
        assert_eq!(client.line().await["id"], id);
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_the_guard_kills_the_server_and_the_connector_counts_servers() {
    let connector = SimConnector::new(SimScript::default());
    let mut first = Client::open(&connector, 1).await;
    assert_eq!((connector.alive_count(), connector.opened_count(), connector.overlaps()), (1, 1, 0));
    let second = Client::open(&connector, 2).await;
    assert_eq!((connector.alive_count(), connector.opened_count(), connector.overlaps()), (2, 2, 1));
    assert_ne!(first.process.pid(), second.process.pid());

    first.guard = second.guard;
    assert_eq!(connector.alive_count(), 1);
    assert_eq!(first.ended().await, signal(9));
    assert_eq!(first.text().await, "");
    drop(first);
    assert_eq!(connector.alive_count(), 0);
    assert!(connector.handle(&spec().id).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_handle_can_cause_a_storm_of_exits() {
    let connector = SimConnector::new(SimScript::default());
    let mut client = Client::open(&connector, 1).await;
    connector.handle(&spec().id).unwrap().exit(5);
    assert_eq!(client.ended().await, code(5));
    let mut client = Client::open(&connector, 2).await;
    connector.handle(&spec().id).unwrap().signal(11);
    assert_eq!(client.ended().await, signal(11));
    assert_eq!(connector.overlaps(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_grandchild_runs_until_a_signal_reaches_it() {
    for (grandchild, gone_by_sigterm) in
        [(Grandchild::Plain, true), (Grandchild::IgnoreTerm, false), (Grandchild::Setsid, false)]
    {
        let connector = SimConnector::new(SimScript { grandchild: Some(grandchild), ..SimScript::default() });
        let mut client = Client::open(&connector, 1).await;
        client.writer = None;
        assert_eq!(client.ended().await, code(0));
        assert!(timeout(LONG, client.process.wait_all()).await.is_err());
        client.process.terminate();
        assert_eq!(timeout(LONG, client.process.wait_all()).await.is_ok(), gone_by_sigterm);
        assert_eq!(connector.alive_count() == 0, gone_by_sigterm);
        client.process.kill();
        client.process.wait_all().await;
        assert_eq!(client.ended().await, code(0), "the end of the leader changed");
        assert_eq!(connector.alive_count(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn each_run_has_its_own_plan_which_can_fail_the_open() {
    let connector = SimConnector::with_plan(|spec, run| {
        assert_eq!(&*spec.name, "files-acme-alice-abc123");
        match run {
            RunNumber(1) => {
                SimPlan { open_delay: SECOND, ..SimPlan::with_open_error("cannot start `files`: no such file") }
            }
            RunNumber(run) => SimScript {
                exit_before_handshake: true,
                exit_code: i32::try_from(run).unwrap(),
                ..SimScript::default()
            }
            .into(),
        }
    });
    let start = Instant::now();
    let error = connector.open(spec(), RunNumber(1)).await.err().unwrap();
    assert_eq!(error.to_string(), "cannot start `files`: no such file");
    assert_eq!(start.elapsed(), SECOND);
    assert_eq!(connector.opened_count(), 0);
    for run in [2, 3] {
        assert_eq!(Client::open(&connector, run).await.ended().await, code(i32::try_from(run).unwrap()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_of_rmcp_gives_the_same_responses() {
    let script = SimScript { tools: 5, page_size: 4, ..SimScript::default() };
    let mut by_hand = Client::ready(script.clone()).await;
    let connector = SimConnector::with_plan(move |_, _| SimPlan::rmcp(script.clone()));
    let mut by_rmcp = Client::open(&connector, 1).await;
    let response = by_rmcp.handshake().await;
    assert_eq!(response["result"]["protocolVersion"], "2025-11-25");
    assert_eq!(response["result"]["serverInfo"]["name"], "sim-server");

    for (method, params) in [
        ("tools/list", json!({})),
        ("tools/list", json!({"cursor": "4"})),
        ("tools/call", json!({"name": "echo", "arguments": {"text": [1, "two"]}})),
        ("tools/call", json!({"name": "add", "arguments": {"a": 1, "b": 2}})),
        ("tools/call", json!({"name": "sleep", "arguments": {"ms": 1}})),
        ("tools/call", json!({"name": "tool_5", "arguments": {}})),
        ("ping", json!({})),
    ] {
        by_hand.request(1, method, params.clone()).await;
        by_rmcp.request(1, method, params).await;
        assert_eq!(by_hand.line().await, by_rmcp.line().await, "{method}");
    }

    let params =
        json!({"name": "sleep", "arguments": {"ms": 10, "progress_every_ms": 6}, "_meta": {"progressToken": 7}});
    by_rmcp.request(2, "tools/call", params).await;
    assert_eq!(by_rmcp.line().await["params"]["progressToken"], 7);
    assert_eq!(by_rmcp.line().await["id"], 2);

    by_rmcp.process.terminate();
    assert_eq!(by_rmcp.ended().await, signal(15));
    assert_eq!(by_rmcp.text().await, "");
    assert_eq!(connector.alive_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_line_written_in_pieces_is_one_message() {
    let mut client = Client::with_script(SimScript::default()).await;
    let writer = client.writer.as_mut().unwrap();
    for piece in ["{\"jsonrpc\":\"2.0\",", "\"id\":\"a\",\"meth", "od\":\"ping\"}", "\n\n"] {
        writer.write_all(piece.as_bytes()).await.unwrap();
        tokio::time::sleep(SECOND).await;
    }
    assert_eq!(client.line().await["id"], "a");
    let mut rest = Vec::new();
    client.writer = None;
    client.reader.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());
}
