//! Detection of the era of a server, message by message, over a pipe in paused time.

use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::spec::ProcessLifetime;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use super::support::ScriptedServer;

pub(crate) const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
const INFO: &str = "io.modelcontextprotocol/clientInfo";

/// Returns the result of `server/discover` with these capabilities.
pub(crate) fn discover_result(capabilities: &Value) -> String {
    json!({
        "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": capabilities,
        "ttlMs": 5, "cacheScope": "private",
        "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "played", "version": "2"}},
    })
    .to_string()
}

/// Starts a stateless server and answers `server/discover`.
pub(crate) async fn started_stateless(capabilities: &Value) -> ScriptedServer {
    let mut server =
        ScriptedServer::started(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless))
            .await;
    answer_discover(&mut server, capabilities).await;
    server
}

/// Starts a stateless server and brings it online.
pub(crate) async fn online_stateless(capabilities: &Value) -> ScriptedServer {
    let mut server =
        ScriptedServer::started(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless))
            .await;
    bring_online(&mut server, capabilities).await;
    server
}

async fn answer_discover(server: &mut ScriptedServer, capabilities: &Value) {
    let discover = server.receive().await;
    assert_eq!(discover["method"], "server/discover");
    assert_envelope(&discover);
    server.respond(&discover, &discover_result(capabilities)).await;
    server.until_session_started().await;
}

async fn bring_online(server: &mut ScriptedServer, capabilities: &Value) {
    answer_discover(server, capabilities).await;
    let list = server.receive().await;
    assert_envelope(&list);
    server.respond_with_tools(&list).await;
    server.until_online().await;
}

fn assert_envelope(request: &Value) {
    let meta = &request["params"]["_meta"];
    assert_eq!(meta[VERSION], "2026-07-28", "{request}");
    assert!(meta[CAPABILITIES]["elicitation"].is_object() && meta[INFO]["name"] == "mcp-satellite", "{request}");
}

async fn receive_initialize(server: &mut ScriptedServer) -> Value {
    let initialize = server.receive().await;
    assert_eq!(initialize["method"], "initialize");
    assert_eq!(initialize["params"]["_meta"], Value::Null);
    initialize
}

#[tokio::test(start_paused = true)]
async fn a_server_with_sessions_gets_no_stateless_messages() {
    // `online` checks the rest: initialize, initialized, tools/list.
    let mut server = ScriptedServer::online(|_| {}).await;
    let relayed = server.relay(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/next"}"#);
    let next = server.receive().await;
    assert_eq!(next["method"], "x/next");
    server.respond(&next, "{}").await;
    relayed.response().await.unwrap();
    let known = server.runtime.discover(&server.id, Duration::from_secs(5)).await;
    assert!(known.unwrap().is_none(), "a server on a pipe has one era");
    let view = server.runtime.status(&server.id).unwrap();
    assert_eq!(view.server.as_ref().unwrap().era, Era::Sessions);
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_initialize_is_followed_by_server_discover() {
    for code in [-32600, -32601, -32602, -32020, -32021, -32022] {
        let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
        let refused = receive_initialize(&mut server).await;
        server.reject(&refused, code).await;
        bring_online(&mut server, &json!({"tools": {}})).await;
        let info = server.runtime.status(&server.id).unwrap().server.clone().unwrap();
        assert_eq!((info.era, &*info.protocol, &*info.name), (Era::Stateless, "2026-07-28", "played"));
        let info = server.runtime.discover(&server.id, Duration::from_secs(5)).await.unwrap().unwrap();
        assert_eq!(info.handshake_result.get(), discover_result(&json!({"tools": {}})), "the result is kept unchanged");
        server.shut_down().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_initialize_result_of_the_stateless_version_is_followed_by_server_discover() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let asked = receive_initialize(&mut server).await;
    let answer = r#"{"protocolVersion":"2026-07-28","capabilities":{},"serverInfo":{"name":"a","version":"1"}}"#;
    server.respond(&asked, answer).await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn an_internal_error_at_initialize_is_not_followed_by_server_discover() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32603).await;
    server.until_started_again().await;
    // The next start begins with `initialize`, too.
    let refused = receive_initialize(&mut server).await;
    let view = server.runtime.status(&server.id).unwrap();
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32603: refused"));
    drop(refused);
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn the_next_start_begins_in_the_known_era() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32601).await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    server.restart().await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    // The server is replaced by one with sessions: the new era is detected and remembered.
    server.restart().await;
    let discover = server.receive().await;
    assert_eq!(discover["method"], "server/discover");
    server.reject(&discover, -32000).await;
    server.accept_session().await;
    let list = server.receive().await;
    server.respond_with_tools(&list).await;
    server.until_online().await;
    server.restart().await;
    server.accept_session().await;
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_exits_after_rejecting_initialize_restarts_with_server_discover() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32022).await;
    assert_eq!(server.receive().await["method"], "server/discover");
    server.close_stdout().await;
    server.until_started_again().await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_server_discover_fails_after_two_seconds() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    let began = Instant::now();
    server.reject(&refused, -32601).await;
    assert_eq!(server.receive().await["method"], "server/discover");
    let view = server.runtime.wait_for(&server.id, |view| view.last_error.is_some()).await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    // The error of the server is more informative than the timeout.
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32601: refused"));
    // The server may be slow: the next start begins with `server/discover`, and time is left for both.
    server.until_started_again().await;
    assert_eq!(server.receive().await["method"], "server/discover");
    let began = Instant::now();
    receive_initialize(&mut server).await;
    assert_eq!(began.elapsed(), Duration::from_secs(15));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_lists_only_older_versions_gets_a_session() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32601).await;
    let discover = server.receive().await;
    server.respond(&discover, r#"{"supportedVersions":["2025-11-25"],"capabilities":{}}"#).await;
    let view = server.runtime.wait_for(&server.id, |view| view.last_error.is_some()).await.unwrap();
    assert_eq!(
        view.last_error.as_deref(),
        Some("handshake failed: server error -32601: refused"),
        "the server supports no known version"
    );
    // The server supports neither era according to its responses: the next start begins as if nothing were known.
    server.until_started_again().await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32601).await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    // A server that is remembered as stateless gets `initialize` after this response.
    server.restart().await;
    let discover = server.receive().await;
    assert_eq!(discover["method"], "server/discover");
    server.respond(&discover, r#"{"supportedVersions":["2025-11-25"],"capabilities":{}}"#).await;
    server.accept_session().await;
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_server_may_answer_server_discover_after_initialize() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32601).await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    for is_refused_first in [true, false] {
        server.restart().await;
        let discover = server.receive().await;
        let second = receive_initialize(&mut server).await;
        if is_refused_first {
            server.reject(&second, -32022).await;
        }
        server.respond(&discover, &discover_result(&json!({"tools": {}}))).await;
        if !is_refused_first {
            server.reject(&second, -32022).await;
        }
        server.until_session_started().await;
        let list = server.receive().await;
        assert_envelope(&list);
        server.respond_with_tools(&list).await;
        server.until_online().await;
    }
    let view = server.runtime.status(&server.id).unwrap();
    assert_eq!(view.last_error, None, "no failure is recorded");
    // A server that now has sessions answers the second request.
    server.restart().await;
    let discover = server.receive().await;
    server.accept_session().await;
    let list = server.receive().await;
    server.reject(&discover, -32601).await;
    server.respond_with_tools(&list).await;
    server.until_online().await;
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_initialize_after_an_unanswered_discover_fails_the_handshake() {
    let mut server = ScriptedServer::started(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = receive_initialize(&mut server).await;
    server.reject(&refused, -32601).await;
    bring_online(&mut server, &json!({"tools": {}})).await;
    server.restart().await;
    let began = Instant::now();
    assert_eq!(server.receive().await["method"], "server/discover");
    let second = receive_initialize(&mut server).await;
    server.reject(&second, -32603).await;
    let view = server.runtime.wait_for(&server.id, |view| view.last_error.is_some()).await.unwrap();
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32603: refused"));
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    server.shut_down().await;
}

#[tokio::test(start_paused = true)]
async fn only_the_configured_era_is_tried() {
    for (era, opening) in [(Era::Sessions, "initialize"), (Era::Stateless, "server/discover")] {
        let mut server =
            ScriptedServer::started(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(era)).await;
        for _ in 0..2 {
            let asked = server.receive().await;
            assert_eq!(asked["method"], opening);
            server.reject(&asked, -32601).await;
            server.until_started_again().await;
        }
        server.shut_down().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_malformed_discover_result_fails_the_handshake() {
    for answer in [
        "{}",
        "[]",
        r#"{"supportedVersions":"2026-07-28","capabilities":{}}"#,
        r#"{"supportedVersions":["2026-07-28"]}"#,
        r#"{"supportedVersions":["2026-07-28"],"capabilities":{},"resultType":"input_required"}"#,
        r#"{"supportedVersions":["2027-01-01"],"capabilities":{}}"#,
    ] {
        let mut server =
            ScriptedServer::started(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless))
                .await;
        let discover = server.receive().await;
        server.respond(&discover, answer).await;
        let view = server.runtime.wait_for(&server.id, |view| view.last_error.is_some()).await.unwrap();
        assert_ne!(view.status, Status::Online, "{answer}");
        server.shut_down().await;
    }
    // The server information is optional and may be malformed.
    for meta in ["null", "[1]", r#"{"io.modelcontextprotocol/serverInfo":7}"#] {
        let mut server =
            ScriptedServer::started(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless))
                .await;
        let discover = server.receive().await;
        let answer = format!(r#"{{"supportedVersions":["2026-07-28"],"capabilities":{{}},"_meta":{meta}}}"#);
        server.respond(&discover, &answer).await;
        server.until_session_started().await;
        server.shut_down().await;
    }
}
