//! `/mcp?mode=flat` over HTTP: the tools of all servers in one list, and the notifications of its changes.

use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use testkit::scripted_servers::{GIVE_UP, Lists, id};
use tokio::time::{Duration, Instant};

use super::client::StatelessClient;
use super::scripted::{Caller, PLAIN, ScriptedEndpoint};

const FLAT: &str = "/mcp?mode=flat";
const TOOLS: &str = "notifications/tools/list_changed";
const RESOURCES: &str = "notifications/resources/list_changed";
const PROMPTS: &str = "notifications/prompts/list_changed";

/// Shorter outages send no notification.
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

async fn restart(endpoint: &ScriptedEndpoint, installation: &str) {
    let before = endpoint.servers.runtime.status(&id(installation)).unwrap().restarts;
    endpoint.servers.runtime.restart(&id(installation)).await.unwrap();
    endpoint.servers.wait_until(installation, |view| view.status == Status::Online && view.restarts > before).await;
}

#[tokio::test]
async fn lists_contain_all_items_unchanged_except_for_their_names() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES), ("git", "b", PLAIN)]).await;
    let mut caller = endpoint.client(FLAT).await;
    let changes = json!({"listChanged": true});
    let capabilities = json!({"tools": changes, "prompts": changes, "resources": changes, "completions": {}});
    assert_eq!(caller.welcome["capabilities"], capabilities);
    let tools = caller.request_text("tools/list", "{}").await;
    assert_eq!(
        tools,
        r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"files__hang"},{"name":"files__read","x":1e400},{"name":"git__read","x":1e400}]}}"#
    );
    assert_eq!(caller.names("prompts/list", "prompts", "name").await, ["files__ask"]);
    assert_eq!(caller.names("resources/list", "resources", "uri").await, ["files|file:///a"]);
    let templates = caller.names("resources/templates/list", "resourceTemplates", "uriTemplate").await;
    assert_eq!(templates, ["files|file:///{path}"]);
    assert_eq!(caller.request("ping", json!({})).await["result"], json!({}));
    for method in ["logging/setLevel", "resources/subscribe", "tasks/list"] {
        assert_eq!(caller.request(method, json!({"uri": "files|file:///a"})).await["error"]["code"], -32601);
    }
    endpoint.end().await;
}

#[tokio::test]
async fn a_request_reaches_its_server_with_only_the_name_replaced() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES)]).await;
    let mut caller = endpoint.client(FLAT).await;
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
        let answer = caller.request_text(method, sent).await;
        let (_, result) = answer.split_once(r#""result":"#).unwrap_or_else(|| panic!("{answer}"));
        assert_eq!(result.strip_suffix('}').unwrap(), received);
    }
    endpoint.end().await;
}

#[tokio::test]
async fn every_tool_name_is_portable_and_unique() {
    let long = Lists {
        tools: r#"[{"name":"tttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttttt"},{"name":"a.b"},{"name":"a b"},{"name":"größe"},{"name":"b__c"}]"#,
        ..PLAIN
    };
    let other = Lists { tools: r#"[{"name":"c"}]"#, ..PLAIN };
    let endpoint = ScriptedEndpoint::with(&[("a", "one", long), ("a__b", "two", other)]).await;
    let mut caller = endpoint.client(FLAT).await;
    let names = tools(&mut caller).await;
    assert_eq!(names.len(), 6);
    let expected = ["a b".into(), "a.b".into(), "b__c".into(), "größe".into(), "t".repeat(70), "c".into()];
    for (name, own) in names.iter().zip(expected) {
        let legal = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        assert!(name.len() <= 64 && name.chars().all(legal), "{name}");
        let result = caller.call_tool(name, json!({})).await;
        assert_eq!(result["x-reflected"]["name"], own, "{name}");
    }
    // The names do not depend on the order of installation.
    let again = ScriptedEndpoint::with(&[("a__b", "two", other), ("a", "one", long)]).await;
    assert_eq!(tools(&mut again.client(FLAT).await).await, names);
    again.end().await;
    endpoint.end().await;
}

/// Lists with this number of tools, named `t0000` and so on, whose descriptions have this length.
fn many_tools(count: usize, description: usize) -> Lists {
    let tool = |at| format!(r#"{{"name":"t{at:04}","description":"{}"}}"#, "d".repeat(description));
    let tools: Vec<String> = (0..count).map(tool).collect();
    Lists { tools: Box::leak(format!("[{}]", tools.join(",")).into_boxed_str()), ..PLAIN }
}

fn page_names(result: &Value) -> Vec<String> {
    result["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_long_list_has_pages_and_the_tools_of_each_page_can_be_called() {
    let small = Lists { tools: r#"[{"name":"read"}]"#, ..PLAIN };
    let lists = [("b", "i1", many_tools(1500, 1)), ("a", "i2", many_tools(800, 1)), ("c", "i3", small)];
    let endpoint = ScriptedEndpoint::with(&lists).await;
    let mut caller = endpoint.client(FLAT).await;
    let mut stateless = StatelessClient::connect(endpoint.address, FLAT).await;
    let (mut names, mut sizes, mut params) = (Vec::new(), Vec::new(), json!({}));
    loop {
        let result = caller.request("tools/list", params.clone()).await["result"].clone();
        // A client of the other era gets the same page for the same cursor.
        let other = stateless.result("tools/list", params).await;
        assert_eq!((&other["tools"], &other["nextCursor"]), (&result["tools"], &result["nextCursor"]));
        assert_eq!(other["resultType"], "complete");
        let page = page_names(&result);
        sizes.push(page.len());
        for name in [page.first().unwrap(), page.last().unwrap()] {
            let own = name.split_once("__").unwrap().1;
            assert_eq!(caller.call_tool(name, json!({})).await["x-reflected"]["name"], own, "{name}");
        }
        names.extend(page);
        let Some(cursor) = result.get("nextCursor") else { break };
        params = json!({"cursor": cursor});
    }
    assert_eq!(sizes, [1000, 1000, 301]);
    let expected = (0..1500).map(|at| format!("b__t{at:04}")).chain((0..800).map(|at| format!("a__t{at:04}")));
    assert_eq!(names, expected.chain(["c__read".to_owned()]).collect::<Vec<_>>());
    endpoint.end().await;
}

#[tokio::test]
async fn a_page_has_at_most_a_million_bytes_unless_one_definition_is_larger() {
    let lists = [("a", "i1", many_tools(4, 400_000)), ("b", "i2", many_tools(1, 1_100_000)), ("c", "i3", PLAIN)];
    let endpoint = ScriptedEndpoint::with(&lists).await;
    let mut caller = endpoint.client(FLAT).await;
    let (mut sizes, mut params) = (Vec::new(), json!({}));
    loop {
        let text = caller.request_text("tools/list", &params.to_string()).await;
        // The only tool of the last page contains a number that `Value` cannot represent.
        let Some((_, cursor)) = text.split_once(r#""nextCursor":""#) else { break };
        sizes.push(text.matches(r#""name":"#).count());
        assert!(text.len() < 1024 * 1024 || sizes.last() == Some(&1));
        params = json!({"cursor": cursor.split_once('"').unwrap().0});
    }
    assert_eq!(sizes, [2, 2, 1]);
    endpoint.end().await;
}

#[tokio::test]
async fn an_invalid_cursor_is_rejected() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", many_tools(1001, 1))]).await;
    let mut caller = endpoint.client(FLAT).await;
    let mut stateless = StatelessClient::connect(endpoint.address, FLAT).await;
    let cursor = caller.request("tools/list", json!({})).await["result"]["nextCursor"].clone();
    let part = &cursor.as_str().unwrap()[1..];
    for list in ["tools/list", "prompts/list", "resources/list", "resources/templates/list"] {
        // A cursor of another list is invalid, too.
        let foreign = if list == "tools/list" { json!("") } else { cursor.clone() };
        for invalid in [foreign, json!("x"), json!(part), json!(7), json!({})] {
            let params = json!({"cursor": invalid});
            let error = caller.request(list, params.clone()).await["error"].clone();
            assert_eq!(error["code"], -32602, "{error}");
            assert!(error["message"].as_str().unwrap().contains("without a cursor"), "{error}");
            assert_eq!(stateless.ask(list, params).await.json()["error"]["code"], -32602);
        }
    }
    assert!(caller.request("tools/list", json!({"cursor": null})).await["result"].is_object());
    endpoint.end().await;
}

#[tokio::test]
async fn a_change_between_two_pages_is_announced_and_moves_no_entry() {
    let before = [("a", "i1", many_tools(1500, 1)), ("b", "i2", many_tools(1000, 1))];
    let endpoint = ScriptedEndpoint::with(&before).await;
    let mut caller = endpoint.client(FLAT).await;
    let mut get = caller.listening().await;
    let first = caller.request("tools/list", json!({})).await["result"].clone();
    // The first server loses most of the first page and the tool at which the page ends.
    endpoint.servers.relist("i1", Lists { tools: r#"[{"name":"t0001"},{"name":"t1200"}]"#, ..PLAIN });
    restart(&endpoint, "i1").await;
    let second = caller.request("tools/list", json!({"cursor": first["nextCursor"]})).await["result"].clone();
    let expected = ["a__t1200".to_owned()].into_iter().chain((0..999).map(|at| format!("b__t{at:04}")));
    assert_eq!(page_names(&second), expected.collect::<Vec<_>>());
    assert_eq!(get.methods_until(TOOLS).await, [TOOLS]);
    let third = caller.request("tools/list", json!({"cursor": second["nextCursor"]})).await["result"].clone();
    assert_eq!((page_names(&third), third.get("nextCursor")), (vec!["b__t0999".to_owned()], None));
    // A tool of the first page that does not exist any more still reaches its server.
    assert_eq!(caller.call_tool("a__t0500", json!({})).await["x-reflected"]["name"], "t0500");
    endpoint.end().await;
}

#[tokio::test]
async fn a_client_is_notified_once_and_only_about_lists_it_has_read() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES), ("git", "b", PLAIN)]).await;
    let mut caller = endpoint.client(FLAT).await;
    tools(&mut caller).await;
    caller.names("prompts/list", "prompts", "name").await;
    let mut get = caller.listening().await;
    // A client that has read no list gets no notification.
    let mut idle = endpoint.client(FLAT).await.listening().await;
    endpoint.servers.runtime.stop(&id("a")).await.unwrap();
    assert_eq!(get.methods_until(PROMPTS).await, [TOOLS, PROMPTS]);
    assert_eq!(tools(&mut caller).await, ["git__read"]);
    // Another change is announced even though no client has read the list since.
    endpoint.servers.runtime.start(&id("a")).await.unwrap();
    assert_eq!(get.methods_until(PROMPTS).await, [TOOLS, PROMPTS]);
    caller.names("resources/list", "resources", "uri").await;
    endpoint.servers.runtime.stop(&id("a")).await.unwrap();
    assert_eq!(get.methods_until(PROMPTS).await, [TOOLS, RESOURCES, PROMPTS]);
    endpoint.end().await;
    assert_eq!(idle.client.event().await.unwrap().data, "");
    assert_eq!(idle.client.event().await, None);
}

#[tokio::test]
async fn a_short_outage_sends_no_list_changed() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES), ("git", "b", PLAIN)]).await;
    let mut caller = endpoint.client(FLAT).await;
    tools(&mut caller).await;
    caller.names("resources/list", "resources", "uri").await;
    let mut get = caller.listening().await;
    let mut other = endpoint.client(FLAT).await;
    let mut is_a_moment = true;
    for _ in 0..3 {
        let began = Instant::now();
        endpoint.servers.runtime.stop(&id("a")).await.unwrap();
        // A list request during the outage does not contain the server.
        assert_eq!(tools(&mut other).await, ["git__read"]);
        endpoint.servers.runtime.start(&id("a")).await.unwrap();
        endpoint.servers.wait_until("a", |view| view.status == Status::Online).await;
        is_a_moment &= began.elapsed() < MOMENT;
        restart(&endpoint, "a").await;
    }
    // Only this last change makes a list differ.
    endpoint.servers.relist("b", Lists { resources: r#"[{"name":"N","uri":"n:1"}]"#, ..PLAIN });
    restart(&endpoint, "b").await;
    let methods = get.methods_until(RESOURCES).await;
    // On a loaded machine the outages may exceed the limit and be announced.
    assert!(methods == [RESOURCES] || !is_a_moment, "{methods:?}");
    assert_eq!(caller.names("resources/list", "resources", "uri").await, ["files|file:///a", "git|n:1"]);
    // A changed definition under the same name is announced too.
    endpoint.servers.relist(
        "b",
        Lists { tools: r#"[{"name":"read","x":2}]"#, resources: r#"[{"name":"N","uri":"n:1"}]"#, ..PLAIN },
    );
    restart(&endpoint, "b").await;
    assert_eq!(get.methods_until(TOOLS).await, [TOOLS]);
    endpoint.end().await;
}

#[tokio::test]
async fn a_listed_name_works_until_the_client_lists_again() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES)]).await;
    let mut caller = endpoint.client(FLAT).await;
    assert_eq!(tools(&mut caller).await, ["files__hang", "files__read"]);
    caller.names("resources/list", "resources", "uri").await;
    // Receives the notifications, which would otherwise precede responses.
    let _get = caller.listening().await;
    // A second server with the same slug changes the prefix of the first one.
    endpoint.servers.add("files", "b", PLAIN).await;
    let other = &mut endpoint.client(FLAT).await;
    assert_eq!(tools(other).await, ["files-a__hang", "files-a__read", "files-b__read"]);
    assert_eq!(caller.call_tool("files__read", json!({})).await["x-reflected"]["name"], "read");
    assert_eq!(caller.call_tool("files-b__read", json!({})).await["x-reflected"]["name"], "read");
    let read = caller.request("resources/read", json!({"uri": "files|file:///odd"})).await;
    assert!(read["result"].is_object() || read["error"].is_null(), "{read}");
    // A client that has never listed the former name cannot use it.
    let (text, error) = other.call_failing_tool("files__read", json!({})).await;
    assert_eq!(text, "there is no tool `files__read`. List the tools again and use a name of that list.");
    assert_eq!(error["kind"], "not_found");
    let read = other.request("resources/read", json!({"uri": "files|file:///a"})).await;
    assert_eq!(read["error"]["message"], "`files` names 2 servers. Use one of `files-a`, `files-b`.");
    // After listing again the former name is gone.
    tools(&mut caller).await;
    assert_eq!(caller.call_failing_tool("files__read", json!({})).await.1["kind"], "not_found");
    endpoint.end().await;
}

#[tokio::test]
async fn a_reassigned_name_keeps_its_meaning_until_the_client_lists_again() {
    let (b_c, c) = (Lists { tools: r#"[{"name":"b__c"}]"#, ..PLAIN }, Lists { tools: r#"[{"name":"c"}]"#, ..PLAIN });
    let endpoint = ScriptedEndpoint::with(&[("a", "one", b_c), ("a__b", "two", c), ("files", "old", FILES)]).await;
    let runtime = &endpoint.servers.runtime;
    runtime.stop(&id("two")).await.unwrap();
    let mut caller = endpoint.client(FLAT).await;
    assert_eq!(tools(&mut caller).await, ["files__hang", "files__read", "a__b__c"]);
    caller.names("resources/list", "resources", "uri").await;
    // Receives the notifications, which would otherwise precede responses.
    let _get = caller.listening().await;
    // Other servers take over the tool name `a__b__c` and the prefix `files`.
    runtime.stop(&id("one")).await.unwrap();
    runtime.start(&id("two")).await.unwrap();
    endpoint.servers.wait_until("two", |view| view.status == Status::Online).await;
    runtime.uninstall(&id("old")).await.unwrap();
    endpoint.servers.add("files", "new", FILES).await;
    let (text, error) = caller.call_failing_tool("a__b__c", json!({})).await;
    assert_eq!(error["status"], "offline");
    assert!(text.contains("`satellite start a-acme-alice-one`"), "{text}");
    let read = caller.request("resources/read", json!({"uri": "files|file:///a"})).await;
    assert_eq!(read["error"]["data"]["kind"], "not_found", "{read}");
    // For a client that has listed nothing yet, or has listed again, the names have their new meaning.
    let other = &mut endpoint.client(FLAT).await;
    tools(&mut caller).await;
    caller.names("resources/list", "resources", "uri").await;
    for caller in [other, &mut caller] {
        assert_eq!(caller.call_tool("a__b__c", json!({})).await["x-reflected"]["name"], "c");
        let read = caller.request_text("resources/read", r#"{"uri":"files|file:///a"}"#).await;
        assert!(read.contains(r#""result":{"contents""#), "{read}");
    }
    endpoint.end().await;
}

#[tokio::test]
async fn a_call_to_an_unavailable_server_returns_its_status_and_the_next_step() {
    let broken = Lists { tools: "", ..PLAIN };
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES), ("broken", "b", broken)]).await;
    let mut caller = endpoint.client(FLAT).await;
    assert_eq!(tools(&mut caller).await, ["files__hang", "files__read"]);
    // Receives the notifications, which would otherwise precede responses.
    let _get = caller.listening().await;
    endpoint.servers.runtime.stop(&id("a")).await.unwrap();
    // The error is the same for a client that has listed the name and for one that has not.
    for caller in [&mut caller, &mut endpoint.client(FLAT).await] {
        let (text, error) = caller.call_failing_tool("files__read", json!({})).await;
        assert_eq!(error["status"], "offline");
        assert!(text.contains("`satellite start files-acme-alice-a`"), "{text}");
        // The tools of `broken` are unknown, but its prefix is known.
        let (text, error) = caller.call_failing_tool("broken__anything", json!({})).await;
        assert_eq!(error["status"], "permanently_failed", "{text}");
        assert!(text.contains("Ask the user") && text.contains("satellite restart broken-acme-alice-b"), "{text}");
    }
    let prompt = caller.request("prompts/get", json!({"name": "files__ask"})).await;
    assert_eq!((&prompt["error"]["code"], &prompt["error"]["data"]["status"]), (&json!(-32000), &json!("offline")));
    endpoint.end().await;
}

#[tokio::test]
async fn the_server_of_another_user_looks_nonexistent() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES)]).await;
    let mut alice = endpoint.client(FLAT).await;
    for (method, params) in [
        ("tools/call", r#"{"name":"NAME__hush"}"#),
        ("prompts/get", r#"{"name":"NAME__hush"}"#),
        ("resources/read", r#"{"uri":"NAME|x"}"#),
        ("completion/complete", r#"{"ref":{"type":"ref/resource","uri":"NAME|x"},"argument":{"name":"a","value":""}}"#),
    ] {
        let mut responses = Vec::new();
        for name in ["secret", "nobody"] {
            let answer = alice.request_text(method, &params.replace("NAME", name)).await;
            let (_, outcome) = answer.split_once(r#","id":"#).unwrap();
            responses.push(outcome.split_once(',').unwrap().1.replace(name, "NAME"));
        }
        assert_eq!(responses[0], responses[1]);
    }
    assert!(!alice.request_text("tools/list", "{}").await.contains("hush"));
    let mut bob = Caller::connect(endpoint.address, FLAT, "bob-token").await;
    assert_eq!(tools(&mut bob).await, ["secret__hush"]);
    endpoint.end().await;
}

#[tokio::test]
async fn the_watcher_of_a_user_runs_until_the_last_client_leaves() {
    let endpoint = ScriptedEndpoint::with(&[("files", "a", FILES)]).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    // Each client has a connection, which is one more task.
    let open = async || {
        let mut caller = endpoint.client(FLAT).await;
        tools(&mut caller).await;
        caller
    };
    let before = tasks();
    let (mut one, mut two) = (open().await, open().await);
    assert_eq!(tasks(), before + 3, "two connections and one watcher");
    one.client.ask("DELETE", &[], "").await;
    assert_eq!(tasks(), before + 3);
    two.client.ask("DELETE", &[], "").await;
    // An aborted task disappears after its next poll.
    let removal = async {
        while tasks() != before + 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(GIVE_UP, removal).await.unwrap();
    endpoint.end().await;
}
