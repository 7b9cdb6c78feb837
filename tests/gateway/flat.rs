//! `/mcp?mode=flat` over HTTP: the tools of all servers in one list, and what a client is told when that changes.

use mcp_satellite_actors::model::status::Status;
use serde_json::json;
use tokio::time::{Duration, Instant};

use super::house::{GIVE_UP, Lists, id};
use super::played::{Caller, PLAIN, Played};

const FLAT: &str = "/mcp?mode=flat";
const TOOLS: &str = "notifications/tools/list_changed";
const RESOURCES: &str = "notifications/resources/list_changed";
const PROMPTS: &str = "notifications/prompts/list_changed";

/// What is over sooner is told to nobody.
const MOMENT: Duration = Duration::from_millis(250);

const FILES: Lists = Lists {
    tools: r#"[{"name":"read","x":1e400},{"name":"hang"}]"#,
    resources: r#"[{"name":"R","uri":"file:///a"}]"#,
    templates: r#"[{"name":"T","uriTemplate":"file:///{path}"}]"#,
    prompts: r#"[{"name":"ask"}]"#,
};

async fn tools(caller: &mut Caller) -> Vec<String> {
    caller.names("tools/list", "tools", "name").await
}

async fn restarted(played: &Played, installation: &str) {
    let before = played.house.runtime.status(&id(installation)).unwrap().restarts;
    played.house.runtime.restart(&id(installation)).await.unwrap();
    played.house.sees(installation, |view| view.status == Status::Online && view.restarts > before).await;
}

#[tokio::test]
async fn everything_is_listed_as_it_is_but_for_its_name() {
    let played = Played::with(&[("files", "a", FILES), ("git", "b", PLAIN)]).await;
    let mut caller = played.client(FLAT).await;
    let changes = json!({"listChanged": true});
    let capabilities = json!({"tools": changes, "prompts": changes, "resources": changes, "completions": {}});
    assert_eq!(caller.welcome["capabilities"], capabilities);
    let tools = caller.text("tools/list", "{}").await;
    assert_eq!(
        tools,
        r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"files__read","x":1e400},{"name":"files__hang"},{"name":"git__read","x":1e400}]}}"#
    );
    assert_eq!(caller.names("prompts/list", "prompts", "name").await, ["files__ask"]);
    assert_eq!(caller.names("resources/list", "resources", "uri").await, ["files|file:///a"]);
    let templates = caller.names("resources/templates/list", "resourceTemplates", "uriTemplate").await;
    assert_eq!(templates, ["files|file:///{path}"]);
    assert_eq!(caller.asks("ping", json!({})).await["result"], json!({}));
    for list in ["tools/list", "prompts/list", "resources/list", "resources/templates/list"] {
        assert_eq!(caller.asks(list, json!({"cursor": "x"})).await["error"]["code"], -32602);
    }
    for method in ["logging/setLevel", "resources/subscribe", "tasks/list"] {
        assert_eq!(caller.asks(method, json!({"uri": "files|file:///a"})).await["error"]["code"], -32601);
    }
    played.end().await;
}

#[tokio::test]
async fn a_request_goes_to_its_server_with_nothing_but_the_name_replaced() {
    let played = Played::with(&[("files", "a", FILES)]).await;
    let mut caller = played.client(FLAT).await;
    for (method, sent, received) in [
        (
            "tools/call",
            r#"{"x":[ 1e400],"name":"files__read","arguments":{"name":"files__read","\ud83d":1}}"#,
            r#"{"content":[],"x-reflected":{"x":[ 1e400],"name":"read","arguments":{"name":"files__read","\ud83d":1}}}"#,
        ),
        (
            "prompts/get",
            r#"{ "name":"files__ask","arguments":{"a":"b"}}"#,
            r#"{"x-reflected":{ "name":"ask","arguments":{"a":"b"}}}"#,
        ),
        (
            "completion/complete",
            r#"{"ref":{"type":"ref/prompt","name":"files__ask","title":"files__ask"},"argument":{"name":"a","value":"files__"}}"#,
            r#"{"x-reflected":{"ref":{"type":"ref/prompt","name":"ask","title":"files__ask"},"argument":{"name":"a","value":"files__"}}}"#,
        ),
        (
            "completion/complete",
            r#"{"ref":{"uri":"files|file:///{path}","type":"ref/resource"},"argument":{"name":"path","value":""}}"#,
            r#"{"x-reflected":{"ref":{"uri":"file:///{path}","type":"ref/resource"},"argument":{"name":"path","value":""}}}"#,
        ),
        (
            "resources/read",
            r#"{"uri":"files|file:///a|b","y":null}"#,
            r#"{"contents":[{"uri":"a:b","text":"t","x":1e400,"params":{"uri":"file:///a|b","y":null}}]}"#,
        ),
    ] {
        let answer = caller.text(method, sent).await;
        let (_, result) = answer.split_once(r#""result":"#).unwrap_or_else(|| panic!("{answer}"));
        assert_eq!(result.strip_suffix('}').unwrap(), received);
    }
    played.end().await;
}

#[tokio::test]
async fn every_name_is_one_that_every_client_takes_and_means_one_tool() {
    let long = Lists {
        tools: r#"[{"name":"tttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttt"},{"name":"a.b"},{"name":"a b"},{"name":"größe"},{"name":"b__c"}]"#,
        ..PLAIN
    };
    let other = Lists { tools: r#"[{"name":"c"}]"#, ..PLAIN };
    let played = Played::with(&[("a", "one", long), ("a__b", "two", other)]).await;
    let mut caller = played.client(FLAT).await;
    let names = tools(&mut caller).await;
    assert_eq!(names.len(), 6);
    let expected = ["t".repeat(70), "a.b".into(), "a b".into(), "größe".into(), "b__c".into(), "c".into()];
    for (name, own) in names.iter().zip(expected) {
        let legal = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        assert!(name.len() <= 64 && name.chars().all(legal), "{name}");
        let result = caller.calls(name, json!({})).await;
        assert_eq!(result["x-reflected"]["name"], own, "{name}");
    }
    // The same again, in another order of coming.
    let again = Played::with(&[("a__b", "two", other), ("a", "one", long)]).await;
    assert_eq!(tools(&mut again.client(FLAT).await).await, names);
    again.end().await;
    played.end().await;
}

#[tokio::test]
async fn a_client_is_told_of_a_change_once_and_only_of_what_it_has_read() {
    let played = Played::with(&[("files", "a", FILES), ("git", "b", PLAIN)]).await;
    let mut caller = played.client(FLAT).await;
    tools(&mut caller).await;
    caller.names("prompts/list", "prompts", "name").await;
    let mut get = caller.listening().await;
    // One that has read nothing is told nothing.
    let mut idle = played.client(FLAT).await.listening().await;
    played.house.runtime.stop(&id("a")).await.unwrap();
    assert_eq!(get.hears_until(PROMPTS).await, [TOOLS, PROMPTS]);
    assert_eq!(tools(&mut caller).await, ["git__read"]);
    // What is other again is told again, though nobody has read it meanwhile.
    played.house.runtime.start(&id("a")).await.unwrap();
    assert_eq!(get.hears_until(PROMPTS).await, [TOOLS, PROMPTS]);
    caller.names("resources/list", "resources", "uri").await;
    played.house.runtime.stop(&id("a")).await.unwrap();
    assert_eq!(get.hears_until(PROMPTS).await, [TOOLS, RESOURCES, PROMPTS]);
    played.end().await;
    assert_eq!(idle.client.event().await.unwrap().data, "");
    assert_eq!(idle.client.event().await, None);
}

#[tokio::test]
async fn a_server_that_is_away_for_a_moment_changes_nothing() {
    let played = Played::with(&[("files", "a", FILES), ("git", "b", PLAIN)]).await;
    let mut caller = played.client(FLAT).await;
    tools(&mut caller).await;
    caller.names("resources/list", "resources", "uri").await;
    let mut get = caller.listening().await;
    let mut other = played.client(FLAT).await;
    let mut is_a_moment = true;
    for _ in 0..3 {
        let began = Instant::now();
        played.house.runtime.stop(&id("a")).await.unwrap();
        // Whoever asks at that moment sees that it is away.
        assert_eq!(tools(&mut other).await, ["git__read"]);
        played.house.runtime.start(&id("a")).await.unwrap();
        played.house.sees("a", |view| view.status == Status::Online).await;
        is_a_moment &= began.elapsed() < MOMENT;
        restarted(&played, "a").await;
    }
    // Of all of this only what is told last is another list.
    played.house.relist("b", Lists { resources: r#"[{"name":"N","uri":"n:1"}]"#, ..PLAIN });
    restarted(&played, "b").await;
    let heard = get.hears_until(RESOURCES).await;
    // On a machine that is busy elsewhere it was away for longer, and that is told.
    assert!(heard == [RESOURCES] || !is_a_moment, "{heard:?}");
    assert_eq!(caller.names("resources/list", "resources", "uri").await, ["files|file:///a", "git|n:1"]);
    // And so is one that describes a tool in other words.
    played.house.relist(
        "b",
        Lists { tools: r#"[{"name":"read","x":2}]"#, resources: r#"[{"name":"N","uri":"n:1"}]"#, ..PLAIN },
    );
    restarted(&played, "b").await;
    assert_eq!(get.hears_until(TOOLS).await, [TOOLS]);
    played.end().await;
}

#[tokio::test]
async fn a_name_that_was_listed_keeps_working_until_others_are_read() {
    let played = Played::with(&[("files", "a", FILES)]).await;
    let mut caller = played.client(FLAT).await;
    assert_eq!(tools(&mut caller).await, ["files__read", "files__hang"]);
    caller.names("resources/list", "resources", "uri").await;
    // What it is told comes here, and not before an answer.
    let _get = caller.listening().await;
    // A second one of the same name changes what the first one is called.
    played.house.add("files", "b", PLAIN).await;
    let other = &mut played.client(FLAT).await;
    assert_eq!(tools(other).await, ["files-a__read", "files-a__hang", "files-b__read"]);
    assert_eq!(caller.calls("files__read", json!({})).await["x-reflected"]["name"], "read");
    assert_eq!(caller.calls("files-b__read", json!({})).await["x-reflected"]["name"], "read");
    let read = caller.asks("resources/read", json!({"uri": "files|file:///odd"})).await;
    assert!(read["result"].is_object() || read["error"].is_null(), "{read}");
    // Who has not read it does not know it.
    let (text, error) = other.fails("files__read", json!({})).await;
    assert_eq!(text, "there is no tool `files__read`. List the tools again and use a name of that list.");
    assert_eq!(error["kind"], "not_found");
    let read = other.asks("resources/read", json!({"uri": "files|file:///a"})).await;
    assert_eq!(read["error"]["message"], "`files` names 2 servers. Use one of `files-a`, `files-b`.");
    // Now it has.
    tools(&mut caller).await;
    assert_eq!(caller.fails("files__read", json!({})).await.1["kind"], "not_found");
    played.end().await;
}

#[tokio::test]
async fn a_name_means_what_it_meant_when_it_was_read_though_another_thing_is_called_so_now() {
    let (b_c, c) = (Lists { tools: r#"[{"name":"b__c"}]"#, ..PLAIN }, Lists { tools: r#"[{"name":"c"}]"#, ..PLAIN });
    let played = Played::with(&[("a", "one", b_c), ("a__b", "two", c), ("files", "old", FILES)]).await;
    let runtime = &played.house.runtime;
    runtime.stop(&id("two")).await.unwrap();
    let mut caller = played.client(FLAT).await;
    assert_eq!(tools(&mut caller).await, ["files__read", "files__hang", "a__b__c"]);
    caller.names("resources/list", "resources", "uri").await;
    // What it is told comes here, and not before an answer.
    let _get = caller.listening().await;
    // The name goes over to the other one, and so does what a third one was called.
    runtime.stop(&id("one")).await.unwrap();
    runtime.start(&id("two")).await.unwrap();
    played.house.sees("two", |view| view.status == Status::Online).await;
    runtime.uninstall(&id("old")).await.unwrap();
    played.house.add("files", "new", FILES).await;
    let (text, error) = caller.fails("a__b__c", json!({})).await;
    assert_eq!(error["status"], "offline");
    assert!(text.contains("`satellite start a-acme-alice-one`"), "{text}");
    let read = caller.asks("resources/read", json!({"uri": "files|file:///a"})).await;
    assert_eq!(read["error"]["data"]["kind"], "not_found", "{read}");
    // Who has read nothing means what there is, and so does who has read it anew.
    let other = &mut played.client(FLAT).await;
    tools(&mut caller).await;
    caller.names("resources/list", "resources", "uri").await;
    for caller in [other, &mut caller] {
        assert_eq!(caller.calls("a__b__c", json!({})).await["x-reflected"]["name"], "c");
        let read = caller.text("resources/read", r#"{"uri":"files|file:///a"}"#).await;
        assert!(read.contains(r#""result":{"contents""#), "{read}");
    }
    played.end().await;
}

#[tokio::test]
async fn a_call_of_what_is_not_there_says_why_and_what_to_do() {
    let broken = Lists { tools: "", ..PLAIN };
    let played = Played::with(&[("files", "a", FILES), ("broken", "b", broken)]).await;
    let mut caller = played.client(FLAT).await;
    assert_eq!(tools(&mut caller).await, ["files__read", "files__hang"]);
    // What it is told comes here, and not before an answer.
    let _get = caller.listening().await;
    played.house.runtime.stop(&id("a")).await.unwrap();
    // Whether it has read that name or not.
    for caller in [&mut caller, &mut played.client(FLAT).await] {
        let (text, error) = caller.fails("files__read", json!({})).await;
        assert_eq!(error["status"], "offline");
        assert!(text.contains("`satellite start files-acme-alice-a`"), "{text}");
        // Nobody knows what it has: its name is known.
        let (text, error) = caller.fails("broken__anything", json!({})).await;
        assert_eq!(error["status"], "permanently_failed", "{text}");
        assert!(text.contains("Ask the user") && text.contains("satellite restart broken-acme-alice-b"), "{text}");
    }
    let prompt = caller.asks("prompts/get", json!({"name": "files__ask"})).await;
    assert_eq!((&prompt["error"]["code"], &prompt["error"]["data"]["status"]), (&json!(-32000), &json!("offline")));
    played.end().await;
}

#[tokio::test]
async fn what_is_anothers_is_what_does_not_exist() {
    let played = Played::with(&[("files", "a", FILES)]).await;
    let mut alice = played.client(FLAT).await;
    for (method, params) in [
        ("tools/call", r#"{"name":"NAME__hush"}"#),
        ("prompts/get", r#"{"name":"NAME__hush"}"#),
        ("resources/read", r#"{"uri":"NAME|x"}"#),
        ("completion/complete", r#"{"ref":{"type":"ref/resource","uri":"NAME|x"},"argument":{"name":"a","value":""}}"#),
    ] {
        let mut said = Vec::new();
        for name in ["secret", "nobody"] {
            let answer = alice.text(method, &params.replace("NAME", name)).await;
            let (_, outcome) = answer.split_once(r#","id":"#).unwrap();
            said.push(outcome.split_once(',').unwrap().1.replace(name, "NAME"));
        }
        assert_eq!(said[0], said[1]);
    }
    assert!(!alice.text("tools/list", "{}").await.contains("hush"));
    let mut bob = Caller::connect(played.address, FLAT, "bob-token").await;
    assert_eq!(tools(&mut bob).await, ["secret__hush"]);
    played.end().await;
}

#[tokio::test]
async fn the_watcher_of_a_user_is_there_as_long_as_the_last_client() {
    let played = Played::with(&[("files", "a", FILES)]).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    // Each has a connection of its own, which is a task as well.
    let open = async || {
        let mut caller = played.client(FLAT).await;
        tools(&mut caller).await;
        caller
    };
    let before = tasks();
    let (mut one, mut two) = (open().await, open().await);
    assert_eq!(tasks(), before + 3, "two connections and one watcher");
    one.client.ask("DELETE", &[], "").await;
    assert_eq!(tasks(), before + 3);
    two.client.ask("DELETE", &[], "").await;
    // An aborted task is gone when it was polled once more.
    let gone = async {
        while tasks() != before + 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, gone).await.unwrap();
    played.end().await;
}
