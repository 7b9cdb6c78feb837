//! Nothing is lost or changed between client and server. Random JSON goes both ways in every kind of message, over real
//! HTTP on one side and a real pipe on the other, and is compared as text. Only the id, the progress token and the id
//! in a cancellation may differ.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::json;
use testkit::wait::GIVE_UP;
use tokio::time::timeout;

use super::whole_satellite::{DONE, Server, SessionClient, TestSatellite, say};

/// Member names with a meaning in JSON-RPC or for a relay.
const KNOWN: [&str; 9] =
    ["jsonrpc", "id", "method", "params", "result", "error", "_meta", "progressToken", "requestId"];

fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        "-?[1-9][0-9]{0,59}",
        "-?0\\.[0-9]{1,30}",
        Just("0".to_owned()),
        Just("-0".to_owned()),
        Just("1e400".to_owned()),
        Just("-1E+400".to_owned()),
        Just("1.50e-0".to_owned()),
        Just("18446744073709551616".to_owned()),
        Just("9007199254740993".to_owned()),
    ]
}

/// A string literal with escapes, complete and broken surrogate pairs, and non-Latin characters.
fn string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[a-zA-Z0-9 _.:/{}\\[\\],-]{1,6}",
        "[¡-ÿЀ-ӿ一-丿😀-😏]{1,4}",
        Just("\\ud83d\\ude00".to_owned()),
        Just("\\ud800".to_owned()),
        Just("\\uDFFF".to_owned()),
        Just("\\u0000".to_owned()),
        Just("\\u0041".to_owned()),
        Just("\\n\\r\\t\\b\\f\\/\\\\\\\"".to_owned()),
        Just("\u{2028}\u{feff}".to_owned()),
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

fn space() -> impl Strategy<Value = &'static str> {
    prop_oneof![8 => Just(""), 1 => Just(" "), 1 => Just("\t"), 1 => Just("\r\n"), 1 => Just("\n  ")]
}

/// A string literal that does not decode to a known name.
fn name() -> impl Strategy<Value = String> {
    string().prop_filter("a known name", |name| {
        serde_json::from_str::<String>(name).map_or(true, |name| !KNOWN.contains(&name.as_str()))
    })
}

fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("false".to_owned()),
        number(),
        string(),
        (100_usize..300).prop_map(|depth| format!("{}null{}", "[".repeat(depth), "]".repeat(depth))),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        let item =
            (space(), inner.clone(), space()).prop_map(|(before, value, after)| [before, &value, after].concat());
        let member = (space(), string(), space(), inner, space())
            .prop_map(|(before, name, between, value, after)| format!("{before}{name}{between}:{value}{after}"));
        prop_oneof![
            prop::collection::vec(item, 0..5).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec(member, 0..5).prop_map(|members| format!("{{{}}}", members.join(","))),
        ]
    })
}

/// Unknown members of one object.
fn unknown() -> impl Strategy<Value = Vec<String>> {
    let member = (space(), name(), value(), space())
        .prop_map(|(before, name, value, after)| format!("{before}{name}:{value}{after}"));
    prop::collection::vec(member, 0..3)
}

/// An object with these members and unknown ones, in any order.
fn object(known: Vec<String>) -> impl Strategy<Value = String> {
    unknown()
        .prop_map(move |unknown| unknown.into_iter().chain(known.clone()).collect::<Vec<_>>())
        .prop_shuffle()
        .prop_map(|members| format!("{{{}}}", members.join(",")))
}

/// Placeholders for an id and a token in a message.
const ID: &str = "\u{1}ID\u{1}";
const TOKEN: &str = "\u{1}TOKEN\u{1}";

/// Any valid id.
fn id() -> impl Strategy<Value = String> {
    prop_oneof!["[1-9][0-9]{0,59}", "-[1-9][0-9]{0,4}", "\"[a-z0-9-]{0,12}\"", Just("\"\\ud83d\\ude00\"".to_owned())]
}

/// A request or, without an id, a notification; some requests have a progress token.
fn call(method: impl Strategy<Value = String>, has_id: bool) -> impl Strategy<Value = String> {
    let token = format!(r#""progressToken":{TOKEN}"#);
    let params = prop_oneof![
        1 => Just(None),
        1 => prop::collection::vec(value(), 0..3).prop_map(|values| Some(format!("[{}]", values.join(",")))),
        4 => object(Vec::new()).prop_map(Some),
        // Only requests have a progress token.
        if has_id { 4 } else { 0 } => object(vec![token])
            .prop_flat_map(|meta| object(vec![format!(r#""_meta":{meta}"#)]))
            .prop_map(Some),
    ];
    (method, params).prop_flat_map(move |(method, params)| {
        let mut members = vec![r#""jsonrpc":"2.0""#.to_owned(), format!(r#""method":"{method}""#)];
        if has_id {
            members.push(format!(r#""id":{ID}"#));
        }
        members.extend(params.map(|params| format!(r#""params":{params}"#)));
        object(members)
    })
}

/// A result or an error.
fn server_response() -> impl Strategy<Value = String> {
    let error = (number(), string())
        .prop_flat_map(|(code, message)| object(vec![format!(r#""code":{code}"#), format!(r#""message":{message}"#)]));
    let outcome = prop_oneof![
        value().prop_map(|value| format!(r#""result":{value}"#)),
        error.prop_map(|error| format!(r#""error":{error}"#)),
    ];
    outcome.prop_flat_map(|outcome| object(vec![r#""jsonrpc":"2.0""#.to_owned(), format!(r#""id":{ID}"#), outcome]))
}

fn client_method() -> impl Strategy<Value = String> {
    let known = [
        "tools/call",
        "resources/list",
        "resources/read",
        "resources/templates/list",
        "resources/subscribe",
        "resources/unsubscribe",
        "prompts/get",
        "completion/complete",
        "logging/setLevel",
        "tasks/result",
    ];
    prop_oneof!["x/[a-z]{1,8}", prop::sample::select(known.to_vec()).prop_map(str::to_owned)]
}

fn client_notification_method() -> impl Strategy<Value = String> {
    prop_oneof![
        "notifications/x-[a-z]{1,8}",
        Just("notifications/roots/list_changed".to_owned()),
        Just("notifications/tasks/status".to_owned()),
    ]
}

fn server_notification_method() -> impl Strategy<Value = String> {
    prop_oneof![
        "notifications/x-[a-z]{1,8}",
        Just("notifications/message".to_owned()),
        Just("notifications/resources/updated".to_owned()),
        Just("notifications/tools/list_changed".to_owned()),
        Just("notifications/elicitation/complete".to_owned()),
    ]
}

fn server_request_method() -> impl Strategy<Value = String> {
    let known = ["sampling/createMessage", "elicitation/create", "roots/list", "tasks/get"];
    prop_oneof!["x/[a-z]{1,8}", prop::sample::select(known.to_vec()).prop_map(str::to_owned)]
}

/// One message of each kind.
#[derive(Debug, Clone)]
struct Messages {
    id: String,
    request: String,
    client_notification: String,
    /// Additional members of progress notifications and cancellations.
    extra_members: Vec<String>,
    server_notification: String,
    server_request: String,
    server_request_id: String,
    client_response: String,
    server_response: String,
}

fn messages() -> impl Strategy<Value = Messages> {
    let from_server =
        (call(server_notification_method(), false), call(server_request_method(), true), id(), server_response());
    (
        id(),
        call(client_method(), true),
        call(client_notification_method(), false),
        unknown(),
        from_server,
        server_response(),
    )
        .prop_map(
            |(
                id,
                request,
                client_notification,
                extra_members,
                (server_notification, server_request, server_request_id, server_response),
                client_response,
            )| Messages {
                id,
                request,
                client_notification,
                extra_members,
                server_notification,
                server_request,
                server_request_id,
                client_response,
                server_response,
            },
        )
}

fn fill_placeholders(text: &str, id: &str, token: &str) -> String {
    text.replace(ID, id).replace(TOKEN, token)
}

/// Replaces line breaks with spaces, as the transport may do.
fn without_line_breaks(text: &str) -> String {
    text.replace(['\r', '\n'], " ")
}

/// Checks that `got` is `sent` with one number at every placeholder, and returns that number.
fn same_except_ids(got: &str, sent: &str) -> Result<Option<String>, TestCaseError> {
    let (mut rest, mut our_id) = (got, None);
    let sent = without_line_breaks(sent).replace(TOKEN, ID);
    let mut parts = sent.split(ID);
    let first = parts.next().unwrap_or_default();
    let differs = || TestCaseError::fail(format!("\n     sent: {sent}\n received: {got}"));
    rest = rest.strip_prefix(first).ok_or_else(differs)?;
    for part in parts {
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        rest = rest[number.len()..].strip_prefix(part).ok_or_else(differs)?;
        if number.is_empty() || *our_id.get_or_insert(number.clone()) != number {
            return Err(differs());
        }
    }
    if rest.is_empty() { Ok(our_id) } else { Err(differs()) }
}

/// The message inside a `notifications/mirrored` of the mirror.
fn reflected(received: &str) -> Result<&str, TestCaseError> {
    let (before, after) = (r#"{"jsonrpc":"2.0","method":"notifications/mirrored","params":{"reflected":"#, "}}");
    let inner = received.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    inner.ok_or_else(|| TestCaseError::fail(format!("not mirrored: {received}")))
}

fn equal(got: &str, sent: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(got, without_line_breaks(sent));
    Ok(())
}

async fn deliver(client: &mut SessionClient, messages: &Messages) -> Result<(), TestCaseError> {
    let Messages {
        id,
        request,
        client_notification,
        extra_members,
        server_notification,
        server_request,
        server_request_id,
        client_response,
        server_response,
    } = messages;
    let extra_members = extra_members.iter().flat_map(|member| [",", member]).collect::<String>();

    // A request, whose response reflects it.
    let sent = fill_placeholders(request, id, "\"its own\"");
    let body = client.ask(&sent).await.body;
    let (before, after) = (format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"reflected":"#), "}}");
    let inner = body.strip_prefix(&before).and_then(|rest| rest.strip_suffix(after));
    let inner = inner.ok_or_else(|| TestCaseError::fail(format!("not the response: {body}")))?;
    prop_assert!(same_except_ids(inner, request)?.is_some());

    // A notification, which is mirrored.
    client.send(client_notification).await;
    equal(reflected(&client.next_message().await)?, client_notification)?;

    // Messages of the server during a call: notification, progress, response.
    let progress = |token: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":1.50{extra_members}}}}}"#
        )
    };
    let received = client
        .say(7, &[server_notification, &progress("\"$token\""), &fill_placeholders(server_response, "\"$id\"", "")])
        .await;
    prop_assert_eq!(received.len(), 3, "{:?}", received);
    equal(&received[0], server_notification)?;
    equal(&received[1], &progress("7"))?;
    equal(&received[2], &fill_placeholders(server_response, "7", ""))?;

    // A request of the server, the progress of the client on it, and the response.
    let received = client.say(8, &[&fill_placeholders(server_request, server_request_id, "\"theirs\""), DONE]).await;
    prop_assert_eq!(received.len(), 2, "{:?}", received);
    let our_id = same_except_ids(&received[0], server_request)?.unwrap();
    if server_request.contains(TOKEN) {
        client.send(&progress(&our_id)).await;
        equal(reflected(&client.next_message().await)?, &progress("\"theirs\""))?;
    }
    client.send(&fill_placeholders(client_response, &our_id, "")).await;
    equal(reflected(&client.next_message().await)?, &fill_placeholders(client_response, server_request_id, ""))?;

    // A cancellation by the server.
    let cancelled = |id: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}{extra_members}}}}}"#
        )
    };
    let received = client
        .say(9, &[&fill_placeholders(server_request, server_request_id, "1"), &cancelled(server_request_id), DONE])
        .await;
    prop_assert_eq!(received.len(), 3, "{:?}", received);
    let our_id = same_except_ids(&received[0], server_request)?.unwrap();
    equal(&received[1], &cancelled(&our_id))?;

    // A cancellation by the client.
    let mut other = client.posts.second_connection().await;
    other.send("POST", &[], &say(10, &[server_notification])).await;
    prop_assert!(other.head().await.is_stream());
    // The notification of the server proves that the request has arrived.
    prop_assert_eq!(other.event().await.unwrap().data, "");
    equal(&other.event().await.unwrap().data, server_notification)?;
    client.send(&cancelled("10")).await;
    prop_assert!(same_except_ids(reflected(&client.next_message().await)?, &cancelled(ID))?.is_some());
    prop_assert_eq!(other.event().await, None);
    Ok(())
}

#[test]
fn any_json_arrives_unchanged_in_every_message_kind_both_ways() {
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let (satellite, client) = tokio.block_on(async {
        let satellite = TestSatellite::start().await;
        satellite.online(Server::mirror("mirror")).await;
        let client = satellite.client("mirror", json!({"sampling": {}, "elicitation": {}, "roots": {}})).await;
        (satellite, client)
    });
    let client = std::cell::RefCell::new(client);
    let mut runner = TestRunner::new(Config { cases: Config::default().cases.min(10_000), ..Config::default() });
    let outcome = runner.run(&messages(), |messages| {
        let mut client = client.borrow_mut();
        let delivered = tokio.block_on(async { timeout(GIVE_UP, deliver(&mut client, &messages)).await });
        delivered.unwrap_or_else(|_| Err(TestCaseError::fail("a message did not arrive in time")))
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    tokio.block_on(satellite.end());
}

#[tokio::test]
async fn the_initialize_result_arrives_unchanged_except_for_the_version() {
    let satellite = TestSatellite::start().await;
    satellite.online(Server::mirror("mirror")).await;
    let mut client = satellite.connect("mirror").await;
    let text = concat!(
        r#"{"protocolVersion":"2025-11-25","capabilities":{"experimental":{"mirror":{}},"x-unknown":[1.0,null]},"#,
        r#""serverInfo":{"name":"mirror","version":"1.0.0","x-big":123456789012345678901234567890},"x-unknown":"\ud800"}"#,
    );
    for (offered, agreed) in [("2025-11-25", "2025-11-25"), ("2025-03-26", "2025-03-26"), ("1999-01-01", "2025-11-25")]
    {
        let server_response = client.post(&super::client::initialize(offered)).await;
        let expected = text.replace("2025-11-25", agreed);
        assert_eq!(server_response.body, format!(r#"{{"jsonrpc":"2.0","id":0,"result":{expected}}}"#));
    }
    satellite.end().await;
}

#[tokio::test]
async fn a_tool_call_is_recorded_despite_unusual_params() {
    let satellite = TestSatellite::start().await;
    satellite.online(Server::mirror("mirror")).await;
    let mut client = satellite.client("mirror", json!({})).await;
    for params in [r#"{"\ud800":1,"name":"rm"}"#, r#"{"name":"ls","name":"mv"}"#, r#"{"n\u0061me":"cp","x":"\udfff"}"#]
    {
        let server_response =
            client.ask(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#)).await;
        assert!(server_response.body.contains(params), "{}", server_response.body);
    }
    let tools = satellite.tools.clone();
    satellite.end().await;
    assert_eq!(*tools.lock().unwrap(), ["rm", "mv", "cp"]);
}
