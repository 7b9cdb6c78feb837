//! That nothing is lost or changed between a client and a server, whatever it is: over real HTTP on one side and a real pipe
//! on the other, random JSON goes both ways in every kind of message, and what arrives is compared as text. Other than what
//! was sent may only be the id, the progress token and the id in a cancellation.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::json;
use tokio::time::timeout;

use super::whole::{Attached, DONE, GIVE_UP, Server, Whole, say};

/// Names of members that mean something to JSON-RPC or to a relay.
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

/// A string as it may be spelled: with escapes, whole and broken pairs of surrogates, and what is beyond Latin.
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

/// A name that nobody knows, however it is read.
fn name() -> impl Strategy<Value = String> {
    string().prop_filter("it is known", |name| {
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

/// Members that nobody knows, of one object.
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

/// The places of an id and of a token in a text: they are filled in.
const ID: &str = "\u{1}ID\u{1}";
const TOKEN: &str = "\u{1}TOKEN\u{1}";

/// Any id that a client or a server may take.
fn id() -> impl Strategy<Value = String> {
    prop_oneof!["[1-9][0-9]{0,59}", "-[1-9][0-9]{0,4}", "\"[a-z0-9-]{0,12}\"", Just("\"\\ud83d\\ude00\"".to_owned())]
}

/// A request or, without an id, a notification, with a token or without.
fn call(method: impl Strategy<Value = String>, has_id: bool) -> impl Strategy<Value = String> {
    let token = format!(r#""progressToken":{TOKEN}"#);
    let params = prop_oneof![
        1 => Just(None),
        1 => prop::collection::vec(value(), 0..3).prop_map(|values| Some(format!("[{}]", values.join(",")))),
        4 => object(Vec::new()).prop_map(Some),
        // A notification has no token of its own.
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
fn answer() -> impl Strategy<Value = String> {
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

fn aside_method() -> impl Strategy<Value = String> {
    prop_oneof![
        "notifications/x-[a-z]{1,8}",
        Just("notifications/roots/list_changed".to_owned()),
        Just("notifications/tasks/status".to_owned()),
    ]
}

fn server_aside_method() -> impl Strategy<Value = String> {
    prop_oneof![
        "notifications/x-[a-z]{1,8}",
        Just("notifications/message".to_owned()),
        Just("notifications/resources/updated".to_owned()),
        Just("notifications/tools/list_changed".to_owned()),
        Just("notifications/elicitation/complete".to_owned()),
    ]
}

fn question_method() -> impl Strategy<Value = String> {
    let known = ["sampling/createMessage", "elicitation/create", "roots/list", "tasks/get"];
    prop_oneof!["x/[a-z]{1,8}", prop::sample::select(known.to_vec()).prop_map(str::to_owned)]
}

/// Each kind of message once.
#[derive(Debug, Clone)]
struct Letters {
    id: String,
    request: String,
    aside: String,
    /// What a progress notification or a cancellation has beside what is known of it.
    beside: Vec<String>,
    server_aside: String,
    question: String,
    question_id: String,
    reply: String,
    answer: String,
}

fn letters() -> impl Strategy<Value = Letters> {
    let of_the_server = (call(server_aside_method(), false), call(question_method(), true), id(), answer());
    (id(), call(client_method(), true), call(aside_method(), false), unknown(), of_the_server, answer()).prop_map(
        |(id, request, aside, beside, (server_aside, question, question_id, answer), reply)| Letters {
            id,
            request,
            aside,
            beside,
            server_aside,
            question,
            question_id,
            reply,
            answer,
        },
    )
}

fn filled(text: &str, id: &str, token: &str) -> String {
    text.replace(ID, id).replace(TOKEN, token)
}

/// A line break in a message is space, and may become another.
fn spaced(text: &str) -> String {
    text.replace(['\r', '\n'], " ")
}

/// Whether a text is the one that was sent, but for a number of ours at each of its places: that number, if there was one.
fn same(got: &str, sent: &str) -> Result<Option<String>, TestCaseError> {
    let (mut rest, mut ours) = (got, None);
    let sent = spaced(sent).replace(TOKEN, ID);
    let mut parts = sent.split(ID);
    let first = parts.next().unwrap_or_default();
    let differs = || TestCaseError::fail(format!("\n was sent: {sent}\n  arrived: {got}"));
    rest = rest.strip_prefix(first).ok_or_else(differs)?;
    for part in parts {
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        rest = rest[number.len()..].strip_prefix(part).ok_or_else(differs)?;
        if number.is_empty() || *ours.get_or_insert(number.clone()) != number {
            return Err(differs());
        }
    }
    if rest.is_empty() { Ok(ours) } else { Err(differs()) }
}

/// What the mirror shows of what it got.
fn reflected(told: &str) -> Result<&str, TestCaseError> {
    let (before, after) = (r#"{"jsonrpc":"2.0","method":"notifications/mirrored","params":{"reflected":"#, "}}");
    let inner = told.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    inner.ok_or_else(|| TestCaseError::fail(format!("not mirrored: {told}")))
}

fn equal(got: &str, sent: &str) -> Result<(), TestCaseError> {
    prop_assert_eq!(got, spaced(sent));
    Ok(())
}

async fn deliver(client: &mut Attached, letters: &Letters) -> Result<(), TestCaseError> {
    let Letters { id, request, aside, beside, server_aside, question, question_id, reply, answer } = letters;
    let beside = beside.iter().flat_map(|member| [",", member]).collect::<String>();

    // A request arrives as it is, and its answer, which is the same once more.
    let sent = filled(request, id, "\"its own\"");
    let body = client.ask(&sent).await.body;
    let (before, after) = (format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"reflected":"#), "}}");
    let inner = body.strip_prefix(&before).and_then(|rest| rest.strip_suffix(after));
    let inner = inner.ok_or_else(|| TestCaseError::fail(format!("not its answer: {body}")))?;
    prop_assert!(same(inner, request)?.is_some());

    // And so does a notification, both ways.
    client.tell(aside).await;
    equal(reflected(&client.hears().await)?, aside)?;

    // What a server says on behalf of a call: a notification, progress, an answer.
    let progress = |token: &str| {
        format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":1.50{beside}}}}}"#
        )
    };
    let said = client.say(7, &[server_aside, &progress("\"$token\""), &filled(answer, "\"$id\"", "")]).await;
    prop_assert_eq!(said.len(), 3, "{:?}", said);
    equal(&said[0], server_aside)?;
    equal(&said[1], &progress("7"))?;
    equal(&said[2], &filled(answer, "7", ""))?;

    // What it asks, what the client says of it meanwhile, and what it answers.
    let said = client.say(8, &[&filled(question, question_id, "\"theirs\""), DONE]).await;
    prop_assert_eq!(said.len(), 2, "{:?}", said);
    let ours = same(&said[0], question)?.unwrap();
    if question.contains(TOKEN) {
        client.tell(&progress(&ours)).await;
        equal(reflected(&client.hears().await)?, &progress("\"theirs\""))?;
    }
    client.tell(&filled(reply, &ours, "")).await;
    equal(reflected(&client.hears().await)?, &filled(reply, question_id, ""))?;

    // What it does not want to know any more.
    let cancelled = |id: &str| {
        format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}{beside}}}}}"#)
    };
    let said = client.say(9, &[&filled(question, question_id, "1"), &cancelled(question_id), DONE]).await;
    prop_assert_eq!(said.len(), 3, "{:?}", said);
    let ours = same(&said[0], question)?.unwrap();
    equal(&said[1], &cancelled(&ours))?;

    // And what the client does not.
    let mut other = client.posts.again().await;
    other.send("POST", &[], &say(10, &[server_aside])).await;
    prop_assert!(other.head().await.is_stream());
    // It has arrived, for something was said of it.
    prop_assert_eq!(other.event().await.unwrap().data, "");
    equal(&other.event().await.unwrap().data, server_aside)?;
    client.tell(&cancelled("10")).await;
    prop_assert!(same(reflected(&client.hears().await)?, &cancelled(ID))?.is_some());
    prop_assert_eq!(other.event().await, None);
    Ok(())
}

#[test]
fn whatever_json_it_is_it_arrives_as_it_was_sent_in_every_kind_of_message_both_ways() {
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let (whole, client) = tokio.block_on(async {
        let whole = Whole::begin().await;
        whole.online(Server::mirror("mirror")).await;
        let client = whole.client("mirror", json!({"sampling": {}, "elicitation": {}, "roots": {}})).await;
        (whole, client)
    });
    let client = std::cell::RefCell::new(client);
    let mut runner = TestRunner::new(Config { cases: Config::default().cases.min(10_000), ..Config::default() });
    let outcome = runner.run(&letters(), |letters| {
        let mut client = client.borrow_mut();
        let delivered = tokio.block_on(async { timeout(GIVE_UP, deliver(&mut client, &letters)).await });
        delivered.unwrap_or_else(|_| Err(TestCaseError::fail("something does not arrive")))
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    tokio.block_on(whole.end());
}

#[tokio::test]
async fn what_a_server_says_of_itself_arrives_as_it_was_said_but_for_the_version() {
    let whole = Whole::begin().await;
    whole.online(Server::mirror("mirror")).await;
    let mut client = whole.connect("mirror").await;
    let said = concat!(
        r#"{"protocolVersion":"2025-11-25","capabilities":{"experimental":{"mirror":{}},"x-unknown":[1.0,null]},"#,
        r#""serverInfo":{"name":"mirror","version":"1.0.0","x-big":123456789012345678901234567890},"x-unknown":"\ud800"}"#,
    );
    for (offered, agreed) in [("2025-11-25", "2025-11-25"), ("2025-03-26", "2025-03-26"), ("1999-01-01", "2025-11-25")]
    {
        let answer = client.post(&super::client::initialize(offered)).await;
        let expected = said.replace("2025-11-25", agreed);
        assert_eq!(answer.body, format!(r#"{{"jsonrpc":"2.0","id":0,"result":{expected}}}"#));
    }
    whole.end().await;
}

#[tokio::test]
async fn a_tool_that_was_called_is_told_of_whatever_stands_beside_its_name() {
    let whole = Whole::begin().await;
    whole.online(Server::mirror("mirror")).await;
    let mut client = whole.client("mirror", json!({})).await;
    for params in [r#"{"\ud800":1,"name":"rm"}"#, r#"{"name":"ls","name":"mv"}"#, r#"{"n\u0061me":"cp","x":"\udfff"}"#]
    {
        let answer =
            client.ask(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#)).await;
        assert!(answer.body.contains(params), "{}", answer.body);
    }
    let tools = whole.tools.clone();
    whole.end().await;
    assert_eq!(*tools.lock().unwrap(), ["rm", "mv", "cp"]);
}
