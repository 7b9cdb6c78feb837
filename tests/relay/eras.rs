//! How it is found out which era of the protocol a server speaks, message by message, over a pipe and in paused time.

use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::spec::ProcessLifetime;
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use crate::support::Play;

pub(crate) const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
const CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
const INFO: &str = "io.modelcontextprotocol/clientInfo";

/// What a server without sessions says of itself, with what it tells by itself.
pub(crate) fn discovered(capabilities: &Value) -> String {
    json!({
        "resultType": "complete", "supportedVersions": ["2026-07-28"], "capabilities": capabilities,
        "ttlMs": 5, "cacheScope": "private",
        "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "played", "version": "2"}},
    })
    .to_string()
}

/// A server without sessions that has said what it is.
pub(crate) async fn begun(capabilities: &Value) -> Play {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless)).await;
    begins(&mut play, capabilities).await;
    play
}

/// And is online.
pub(crate) async fn stateless(capabilities: &Value) -> Play {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless)).await;
    comes_up(&mut play, capabilities).await;
    play
}

async fn begins(play: &mut Play, capabilities: &Value) {
    let discover = play.hears().await;
    assert_eq!(discover["method"], "server/discover");
    assert_envelope(&discover);
    play.answers(&discover, &discovered(capabilities)).await;
    play.begins().await;
}

async fn comes_up(play: &mut Play, capabilities: &Value) {
    begins(play, capabilities).await;
    let list = play.hears().await;
    assert_envelope(&list);
    play.lists(&list).await;
    play.is_online().await;
}

fn assert_envelope(request: &Value) {
    let meta = &request["params"]["_meta"];
    assert_eq!(meta[VERSION], "2026-07-28", "{request}");
    assert!(meta[CAPABILITIES]["elicitation"].is_object() && meta[INFO]["name"] == "mcp-satellite", "{request}");
}

async fn initialize(play: &mut Play) -> Value {
    let initialize = play.hears().await;
    assert_eq!(initialize["method"], "initialize");
    assert_eq!(initialize["params"]["_meta"], Value::Null);
    initialize
}

#[tokio::test(start_paused = true)]
async fn a_server_with_sessions_is_told_nothing_that_it_was_not_told_before() {
    // `begin` sees to the rest: initialize, initialized, tools/list.
    let mut play = Play::begin(|_| {}).await;
    let relayed = play.relays(1, 1, r#"{"jsonrpc":"2.0","id":1,"method":"x/next"}"#);
    let next = play.hears().await;
    assert_eq!(next["method"], "x/next");
    play.answers(&next, "{}").await;
    relayed.answered().await.unwrap();
    let known = play.runtime.discover(&play.id, Duration::from_secs(5)).await;
    assert!(known.unwrap().is_none(), "a pipe has one era");
    let view = play.runtime.status(&play.id).unwrap();
    assert_eq!(view.server.as_ref().unwrap().era, Era::Sessions);
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_knows_no_initialize_is_asked_what_it_is() {
    for code in [-32600, -32601, -32602, -32020, -32021, -32022] {
        let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
        let refused = initialize(&mut play).await;
        play.refuses(&refused, code).await;
        comes_up(&mut play, &json!({"tools": {}})).await;
        let server = play.runtime.status(&play.id).unwrap().server.clone().unwrap();
        assert_eq!((server.era, &*server.protocol, &*server.name), (Era::Stateless, "2026-07-28", "played"));
        let told = play.runtime.discover(&play.id, Duration::from_secs(5)).await.unwrap().unwrap();
        assert_eq!(told.handshake_result.get(), discovered(&json!({"tools": {}})), "as it was sent");
        play.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_answers_initialize_with_the_version_without_it_is_asked_too() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let asked = initialize(&mut play).await;
    let answer = r#"{"protocolVersion":"2026-07-28","capabilities":{},"serverInfo":{"name":"a","version":"1"}}"#;
    play.answers(&asked, answer).await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_at_initialize_is_not_taken_for_one_without_it() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32603).await;
    play.opens_again().await;
    // The next start begins as this one did.
    let refused = initialize(&mut play).await;
    let view = play.runtime.status(&play.id).unwrap();
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32603: refused"));
    drop(refused);
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_found_out_is_remembered_and_the_next_start_begins_with_it() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32601).await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    play.restarts().await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    // It was exchanged for one with sessions: that is found out, and remembered as well.
    play.restarts().await;
    let discover = play.hears().await;
    assert_eq!(discover["method"], "server/discover");
    play.refuses(&discover, -32000).await;
    play.greets().await;
    let list = play.hears().await;
    play.lists(&list).await;
    play.is_online().await;
    play.restarts().await;
    play.greets().await;
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_once_it_has_refused_initialize_is_asked_what_it_is_when_it_is_back() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32022).await;
    assert_eq!(play.hears().await["method"], "server/discover");
    play.hangs_up().await;
    play.opens_again().await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_leaves_the_question_unanswered_is_not_waited_for_long() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    let began = Instant::now();
    play.refuses(&refused, -32601).await;
    assert_eq!(play.hears().await["method"], "server/discover");
    let view = play.runtime.wait_for(&play.id, |view| view.last_error.is_some()).await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_secs(2));
    // What it said itself tells more than that it said nothing.
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32601: refused"));
    // It may be slow, so the next start begins with the question; and then there is time for both.
    play.opens_again().await;
    assert_eq!(play.hears().await["method"], "server/discover");
    let began = Instant::now();
    initialize(&mut play).await;
    assert_eq!(began.elapsed(), Duration::from_secs(15));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_that_it_speaks_only_older_versions_gets_a_session() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32601).await;
    let discover = play.hears().await;
    play.answers(&discover, r#"{"supportedVersions":["2025-11-25"],"capabilities":{}}"#).await;
    let view = play.runtime.wait_for(&play.id, |view| view.last_error.is_some()).await.unwrap();
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32601: refused"), "it has none");
    // It is neither, as far as it says: the next start begins as if nothing were known.
    play.opens_again().await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32601).await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    // Where it was remembered as one without, the session is tried.
    play.restarts().await;
    let discover = play.hears().await;
    assert_eq!(discover["method"], "server/discover");
    play.answers(&discover, r#"{"supportedVersions":["2025-11-25"],"capabilities":{}}"#).await;
    play.greets().await;
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_takes_long_to_start_may_answer_the_first_question_after_the_second() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32601).await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    for is_refused_first in [true, false] {
        play.restarts().await;
        let discover = play.hears().await;
        let second = initialize(&mut play).await;
        if is_refused_first {
            play.refuses(&second, -32022).await;
        }
        play.answers(&discover, &discovered(&json!({"tools": {}}))).await;
        if !is_refused_first {
            play.refuses(&second, -32022).await;
        }
        play.begins().await;
        let list = play.hears().await;
        assert_envelope(&list);
        play.lists(&list).await;
        play.is_online().await;
    }
    let view = play.runtime.status(&play.id).unwrap();
    assert_eq!(view.last_error, None, "nothing was charged");
    // One that has become a server with sessions answers the second.
    play.restarts().await;
    let discover = play.hears().await;
    play.greets().await;
    let list = play.hears().await;
    play.refuses(&discover, -32601).await;
    play.lists(&list).await;
    play.is_online().await;
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_the_second_question_and_never_answers_the_first_has_refused() {
    let mut play = Play::open(ProcessLifetime::AlwaysOn, |_| {}).await;
    let refused = initialize(&mut play).await;
    play.refuses(&refused, -32601).await;
    comes_up(&mut play, &json!({"tools": {}})).await;
    play.restarts().await;
    let began = Instant::now();
    assert_eq!(play.hears().await["method"], "server/discover");
    let second = initialize(&mut play).await;
    play.refuses(&second, -32603).await;
    let view = play.runtime.wait_for(&play.id, |view| view.last_error.is_some()).await.unwrap();
    assert_eq!(view.last_error.as_deref(), Some("handshake failed: server error -32603: refused"));
    assert_eq!(began.elapsed(), Duration::from_secs(30));
    play.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_configured_era_is_the_only_one_that_is_tried() {
    for (era, opening) in [(Era::Sessions, "initialize"), (Era::Stateless, "server/discover")] {
        let mut play = Play::open(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(era)).await;
        for _ in 0..2 {
            let asked = play.hears().await;
            assert_eq!(asked["method"], opening);
            play.refuses(&asked, -32601).await;
            play.opens_again().await;
        }
        play.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_none_opens_nothing() {
    for answer in [
        "{}",
        "[]",
        r#"{"supportedVersions":"2026-07-28","capabilities":{}}"#,
        r#"{"supportedVersions":["2026-07-28"]}"#,
        r#"{"supportedVersions":["2026-07-28"],"capabilities":{},"resultType":"input_required"}"#,
        r#"{"supportedVersions":["2027-01-01"],"capabilities":{}}"#,
    ] {
        let mut play =
            Play::open(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless)).await;
        let discover = play.hears().await;
        play.answers(&discover, answer).await;
        let view = play.runtime.wait_for(&play.id, |view| view.last_error.is_some()).await.unwrap();
        assert_ne!(view.status, Status::Online, "{answer}");
        play.end().await;
    }
    // Who it is it need not say, nor say well.
    for meta in ["null", "[1]", r#"{"io.modelcontextprotocol/serverInfo":7}"#] {
        let mut play =
            Play::open(ProcessLifetime::AlwaysOn, |policy| policy.session.protocol = Some(Era::Stateless)).await;
        let discover = play.hears().await;
        let answer = format!(r#"{{"supportedVersions":["2026-07-28"],"capabilities":{{}},"_meta":{meta}}}"#);
        play.answers(&discover, &answer).await;
        play.begins().await;
        play.end().await;
    }
}
