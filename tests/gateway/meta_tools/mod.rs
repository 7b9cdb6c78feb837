//! The six meta-tools of `/mcp` without HTTP, over a runtime in paused time.

mod statuses;

use std::sync::Arc;

use mcp_satellite::gateway::answer::CallAnswer;
use mcp_satellite::gateway::flat::{MergedLists, PAGE_LIMITS};
use mcp_satellite::gateway::tools::{CallerCache, CallerSnapshot, schema};
use mcp_satellite_actors::model::catalogue::ListKind;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::snapshot::Snapshot;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::RpcMessage;
use serde_json::{Value, json};
use testkit::scripted_servers::{Lists, ScriptedServers, id, spec};
use tokio::sync::oneshot;

const FILES: Lists = Lists {
    tools: r#"[{"name":"read","description":"Reads a file","inputSchema":{"type":"object","x":1},"outputSchema":{"type":"object"},"annotations":{"readOnlyHint":true},"_meta":{"ui":{"resourceUri":"ui://view"},"n":[1]}},{"name":"a:b","description":"Odd"}]"#,
    resources: r#"[{"name":"R", "uri":"file:///a|b","x-unknown":[null],"_meta":{"ui":{"resourceUri":"ui://view"}}}]"#,
    templates: r#"[{"uriTemplate":"file:///{path}","name":"T"}]"#,
    prompts: r#"[{"name":"ask","x":1e400}]"#,
};
const GIT: Lists = Lists {
    tools: r#"[{"name":"log","description":"Shows the commits"},{"name":"hang"},{"name":"refuse"}]"#,
    resources: "",
    templates: "",
    prompts: "",
};
const BROKEN: Lists = Lists { tools: "", resources: "", templates: "", prompts: "" };

async fn servers() -> ScriptedServers {
    ScriptedServers::with(&[("files", "a", FILES), ("git", "b", GIT)]).await
}

fn names(found: &Value, list: &str, name: &str) -> Vec<String> {
    found[list].as_array().unwrap().iter().map(|one| one[name].as_str().unwrap().to_owned()).collect()
}

/// Asserts that a result matches the output schema of the tool.
fn assert_matches_schema(tool: &str, found: &Value) {
    fn check(schema: &Value, value: &Value, at: &str) {
        let known = match schema["type"].as_str().unwrap() {
            "object" => {
                let members = value.as_object().unwrap_or_else(|| panic!("{at} is not an object: {value}"));
                let empty = serde_json::Map::new();
                let properties = schema["properties"].as_object().unwrap_or(&empty);
                for required in schema["required"].as_array().into_iter().flatten() {
                    assert!(members.contains_key(required.as_str().unwrap()), "{at} has no {required}: {value}");
                }
                for (name, member) in members {
                    if let Some(schema) = properties.get(name) {
                        check(schema, member, &format!("{at}.{name}"));
                    }
                }
                true
            }
            "array" => {
                value.as_array().unwrap().iter().for_each(|item| check(&schema["items"], item, at));
                true
            }
            "string" => value.is_string(),
            "number" => value.is_number(),
            "integer" => value.is_u64(),
            "boolean" => value.is_boolean(),
            other => panic!("{other}"),
        };
        assert!(known, "{at} does not match the schema: {value}");
        if let Some(known) = schema["enum"].as_array() {
            assert!(known.contains(value), "{at} does not match the schema: {value}");
        }
    }
    let list: Value = serde_json::from_str(schema::TOOLS).unwrap();
    let tool = list["tools"].as_array().unwrap().iter().find(|one| one["name"] == tool).unwrap();
    check(&tool["outputSchema"], found, "the result");
}

#[tokio::test(start_paused = true)]
async fn discovery_returns_a_tool_with_its_schemas_and_annotations() {
    let servers = servers().await;
    let found = servers.call_structured("discover_mcp_tools", r#"{"query":"read fiel"}"#).await;
    assert_matches_schema("discover_mcp_tools", &found);
    let tool = &found["tools"][0];
    assert!(tool["relevance_score"].as_f64().unwrap() > 0.3, "{tool}");
    let mut tool = tool.clone();
    tool.as_object_mut().unwrap().remove("relevance_score");
    assert_eq!(
        tool,
        json!({
            "tool_path": "files:read", "description": "Reads a file", "input_schema": {"type": "object", "x": 1},
            "output_schema": {"type": "object"}, "annotations": {"readOnlyHint": true},
            "server_name": "files", "transport": "stdio",
            "_meta": {"ui": {"resourceUri": "files|ui://view"}, "n": [1]},
        })
    );
    let all = servers.call_structured("discover_mcp_tools", r#"{"query":"","limit":2}"#).await;
    assert_eq!(names(&all, "tools", "tool_path"), ["files:a:b", "files:read"]);
    assert_eq!(all["total_found"], 5);
    assert_eq!(all["tools"][0]["input_schema"], json!({"type": "object"}));
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn only_online_and_dormant_servers_offer_tools_and_resources() {
    let servers = servers().await;
    let paths = async || {
        let found = servers.call_structured("discover_mcp_tools", r#"{"query":""}"#).await;
        let listed = servers.call_structured("list_mcp_resources", "{}").await;
        (names(&found, "tools", "tool_path"), names(&listed, "resources", "uri").len())
    };
    let (all, one) =
        (["files:a:b", "files:read", "git:hang", "git:log", "git:refuse"], ["git:hang", "git:log", "git:refuse"]);
    assert_eq!(paths().await, (all.map(str::to_owned).to_vec(), 1));
    servers.runtime.stop(&id("a")).await.unwrap();
    assert_eq!(paths().await, (one.map(str::to_owned).to_vec(), 0));
    servers.runtime.start(&id("a")).await.unwrap();
    servers.wait_until("a", |view| view.status == Status::Online).await;
    servers.wait_until("a", |view| view.dormant).await;
    assert_eq!(paths().await, (all.map(str::to_owned).to_vec(), 1));
    // A call wakes a dormant server.
    let answer = servers.call_text("execute_mcp_tool", r#"{"tool_path":"files:read"}"#).await;
    assert!(answer.contains("x-reflected"), "{answer}");
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_response_to_a_call_is_unchanged() {
    let servers = servers().await;
    let (_cancel, cancellation) = oneshot::channel();
    let params = r#"{"name":"execute_mcp_tool","arguments":{"arguments":{ "n":1e400,"n":[ ]},"tool_path":"files:a:b"},"_meta":{"progressToken":"p","x":12345678901234567890}}"#;
    let CallAnswer::Message(answer) = servers.call_raw(params, cancellation).await else {
        panic!("no response of the server")
    };
    let told = answer.outcome().unwrap();
    // Only the progress token is replaced.
    let (before, after) = told.split_once(r#""progressToken":"#).unwrap();
    assert_eq!(before, r#"{"content":[],"x-reflected":{"name":"a:b","arguments":{ "n":1e400,"n":[ ]},"_meta":{"#);
    assert!(after.ends_with(r#","x":12345678901234567890}}}"#), "{after}");

    let error = servers.call_text("execute_mcp_tool", r#"{"tool_path":"git:refuse","arguments":{}}"#).await;
    assert_eq!(error, r#"{"jsonrpc":"2.0","id":"c","error":{"code":-32602,"message":"no","data":{"n":1e400}}}"#);
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_returns_without_a_response() {
    let servers = servers().await;
    let (cancel, cancellation) = oneshot::channel();
    let words = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"c"}}"#;
    cancel.send(RpcMessage::parse(words.to_owned().into()).unwrap()).unwrap();
    let params = r#"{"name":"execute_mcp_tool","arguments":{"tool_path":"git:hang"}}"#;
    assert!(matches!(servers.call_raw(params, cancellation).await, CallAnswer::Cancelled));
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn resources_are_listed_unchanged_except_for_their_uris() {
    let servers = servers().await;
    let listed = servers.call_text("list_mcp_resources", "null").await;
    let expected = [
        r#"{"name":"R", "uri":"files|file:///a|b","x-unknown":[null],"_meta":{"ui":{"resourceUri":"files|ui://view"}}}"#,
        r#"{"uriTemplate":"files|file:///{path}","name":"T"}"#,
    ];
    for one in expected {
        assert!(listed.contains(one), "{listed}");
    }
    assert_matches_schema("list_mcp_resources", &servers.call_structured("list_mcp_resources", "{}").await);

    let read = servers.call_text("read_mcp_resource", r#"{"uri":"files|file:///a|b"}"#).await;
    let resource = r#"{"uri":"a:b","text":"t","x":1e400,"params":{"uri":"file:///a|b"}}"#;
    assert_eq!(
        read,
        format!(
            r#"{{"content":[{{"type":"resource","resource":{resource}}}],"structuredContent":{{"contents":[{resource}]}}}}"#
        )
    );
    let (error, _) = servers.call_failing("read_mcp_resource", r#"{"uri":"files|nothing"}"#).await;
    assert_eq!(error["message"], "server error -32002: no such resource");
    let (error, _) = servers.call_failing("read_mcp_resource", r#"{"uri":"files|odd"}"#).await;
    assert_eq!(error["kind"], "server_error");
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_server_of_another_user_looks_nonexistent() {
    let servers = servers().await;
    for (tool, mine, theirs) in [
        ("execute_mcp_tool", r#"{"tool_path":"nobody:hush"}"#, r#"{"tool_path":"secret:hush"}"#),
        ("execute_mcp_tool", r#"{"tool_path":"nobody-acme-bob-s:hush"}"#, r#"{"tool_path":"secret-acme-bob-s:hush"}"#),
        ("read_mcp_resource", r#"{"uri":"nobody|x"}"#, r#"{"uri":"secret|x"}"#),
        ("reconnect_server", r#"{"name":"nobody"}"#, r#"{"name":"secret"}"#),
    ] {
        let (nothing, hidden) = (servers.call_text(tool, mine).await, servers.call_text(tool, theirs).await);
        assert_eq!(nothing.replace("nobody", "secret"), hidden);
        assert!(hidden.contains("there is no server"), "{hidden}");
    }
    let found = servers.call_structured("discover_mcp_tools", r#"{"query":"hush"}"#).await;
    assert_eq!(found["total_found"], 0);
    assert!(!servers.call_text("list_servers", "{}").await.contains("secret"));
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn two_servers_with_one_slug_get_longer_names() {
    let servers = ScriptedServers::with(&[("git", "one", GIT), ("git", "two", GIT)]).await;
    let found = servers.call_structured("discover_mcp_tools", r#"{"query":"log"}"#).await;
    assert_eq!(names(&found, "tools", "tool_path"), ["git-one:log", "git-two:log"]);
    for name in ["git-two", "git-acme-alice-two"] {
        let answer = servers.call_text("execute_mcp_tool", &format!(r#"{{"tool_path":"{name}:log"}}"#)).await;
        assert!(answer.contains(r#""x-reflected":{"name":"log"}"#), "{answer}");
    }
    let (error, text) = servers.call_failing("execute_mcp_tool", r#"{"tool_path":"git:log"}"#).await;
    assert_eq!(error["kind"], "ambiguous");
    assert_eq!(text, "`git` names 2 servers. Use one of `git-one`, `git-two`.");
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_to_an_unavailable_server_returns_the_next_step() {
    let servers = ScriptedServers::with(&[("git", "b", GIT), ("broken", "x", BROKEN)]).await;
    let mut incomplete = spec("mail", "m", "alice");
    incomplete.missing = vec!["API_KEY".to_owned()];
    servers.runtime.install(incomplete).await.unwrap();
    servers.wait_until("m", |view| view.status == Status::AwaitingUserConfig).await;

    let (error, text) = servers.call_failing("execute_mcp_tool", r#"{"tool_path":"mail:send"}"#).await;
    assert_eq!(
        (&error["kind"], &error["status"], &error["fate"]),
        (&json!("refused"), &json!("awaiting_user_config"), &json!("not_sent"))
    );
    assert!(
        text.contains("`satellite configure mail-acme-alice-m API_KEY`")
            && text.ends_with("the user must not send it to you."),
        "{text}"
    );

    let (error, text) = servers.call_failing("execute_mcp_tool", r#"{"tool_path":"broken:x"}"#).await;
    assert_eq!(error["status"], "permanently_failed");
    assert!(text.contains("reconnect_server with name `broken`"), "{text}");

    servers.runtime.stop(&id("b")).await.unwrap();
    let (error, text) = servers.call_failing("read_mcp_resource", r#"{"uri":"git|x"}"#).await;
    assert_eq!(error["status"], "offline");
    assert!(text.contains("`satellite start git-acme-alice-b`"), "{text}");
    servers.runtime.start(&id("b")).await.unwrap();

    let (error, text) = servers.call_failing("execute_mcp_tool", r#"{"tool_path":"git:hang"}"#).await;
    assert_eq!((&error["kind"], &error["fate"]), (&json!("timed_out"), &json!("timed_out")));
    assert!(text.starts_with("no answer within 30 s. The server may still execute the call"), "{text}");
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn errors_name_the_invalid_argument() {
    let servers = servers().await;
    for (tool, arguments, told) in [
        ("discover_mcp_tools", "{}", "`query` is missing"),
        ("discover_mcp_tools", "[]", "the arguments of a tool are a JSON object"),
        ("discover_mcp_tools", r#"{"query":7}"#, "`query` must be a string"),
        ("discover_mcp_tools", r#"{"query":"x","limit":0}"#, "`limit` must be a whole number from 1 to 50"),
        ("discover_mcp_tools", r#"{"query":"x","limit":2.5}"#, "`limit` must be a whole number from 1 to 50"),
        ("discover_mcp_tools", r#"{"query":"x","q":1}"#, "unknown argument `q`: this tool takes `query`, `limit`"),
        ("execute_mcp_tool", r#"{"tool_path":"log"}"#, "`log` is not of the form `server:tool`"),
        ("execute_mcp_tool", r#"{"tool_path":"git:log","arguments":[]}"#, "`arguments` must be an object"),
        ("list_servers", r#"{"a":1}"#, "unknown argument `a`: this tool takes no arguments"),
        ("read_mcp_resource", r#"{"uri":null}"#, "`uri` is missing"),
    ] {
        let (error, text) = servers.call_failing(tool, arguments).await;
        assert_eq!((&error["kind"], &error["message"]), (&json!("bad_input"), &json!(told)), "{tool} {arguments}");
        assert!(text.starts_with(told), "{text}");
    }
    let long = format!(r#"{{"query":"{}"}}"#, "ü".repeat(513));
    assert_eq!(
        servers.call_failing("discover_mcp_tools", &long).await.0["message"],
        "`query` must have at most 512 characters"
    );
    let (_cancel, cancellation) = oneshot::channel();
    let CallAnswer::Error(error) = servers.call_raw(r#"{"name":"log"}"#, cancellation).await else { panic!() };
    assert_eq!(error.code, -32602);
    assert!(error.message.starts_with("unknown tool `log`"), "{}", error.message);
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn list_servers_shows_statuses_and_reconnect_server_restarts() {
    let servers = ScriptedServers::with(&[("git", "b", GIT), ("broken", "x", BROKEN)]).await;
    let told = servers.call_structured("list_servers", "{}").await;
    assert_matches_schema("list_servers", &told);
    let (git, broken) = (&told["servers"][0], &told["servers"][1]);
    assert_eq!(
        (&git["name"], &git["status"], &git["connected"], &git["tool_count"]),
        (&json!("git"), &json!("online"), &json!(true), &json!(3))
    );
    assert!(git["connected_at"].is_string() && git.get("url").is_none() && git.get("last_error").is_none(), "{git}");
    assert_eq!(
        (&broken["name"], &broken["status"], &broken["connected"], &broken["tool_count"]),
        (&json!("broken"), &json!("permanently_failed"), &json!(false), &json!(0))
    );
    assert!(broken["status_message"].is_string() && broken.get("connected_at").is_none(), "{broken}");

    let again = servers.call_structured("reconnect_server", r#"{"name":"git"}"#).await;
    assert_matches_schema("reconnect_server", &again);
    servers.wait_until("b", |view| view.status == Status::Online && view.restarts == 1).await;
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn changes_of_other_users_do_not_invalidate_a_callers_cache() {
    let servers = servers().await;
    let callers = CallerCache::default();
    let caller = || callers.caller(servers.runtime.snapshot(), &"acme".into(), &"alice".into());
    let offered = caller().offered_catalogues();
    servers.runtime.install(spec("other", "o", "bob")).await.unwrap();
    servers.runtime.stop(&InstanceId::new("acme".into(), "bob".into(), "s".into())).await.unwrap();
    assert!(offered.is_current_for(&caller()));
    assert!(!offered.is_current_for(&CallerSnapshot::new(servers.runtime.snapshot(), &"acme".into(), &"alice".into())));
    // Her own changes invalidate it.
    servers.runtime.stop(&id("b")).await.unwrap();
    assert!(!offered.is_current_for(&caller()));
    servers.runtime.start(&id("b")).await.unwrap();
    servers.wait_until("b", |view| view.status == Status::Online).await;
    let offered = caller().offered_catalogues();
    servers.runtime.uninstall(&id("a")).await.unwrap();
    assert!(!offered.is_current_for(&caller()));
    assert_eq!(caller().servers().map(|(label, _)| label.to_owned()).collect::<Vec<_>>(), ["git"]);
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_caller_cache_drops_inactive_callers() {
    let servers = servers().await;
    let callers = CallerCache::default();
    for _ in 0..4 {
        for user in 0..200 {
            callers.caller(servers.runtime.snapshot(), &"acme".into(), &format!("user {user}").into());
        }
        // A new snapshot, which no caller has used yet.
        servers.runtime.stop(&id("b")).await.unwrap();
        servers.runtime.start(&id("b")).await.unwrap();
        servers.wait_until("b", |view| view.status == Status::Online).await;
    }
    for user in 0..500 {
        drop(callers.caller(Arc::new(Snapshot::default()), &"acme".into(), &format!("guest {user}").into()));
    }
    assert!(callers.len() < 500, "{} of 700", callers.len());
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn flat_mode_lists_everything_under_portable_names() {
    let servers = servers().await;
    let flat = servers.flat();
    let tools_text = list_text(&flat, ListKind::Tools);
    let tools: Value = serde_json::from_str(&tools_text).unwrap();
    let all = names(&tools, "tools", "name");
    let odd = &all[0];
    assert!(odd.starts_with("files__a_b_") && odd.len() == 11 + 8, "{odd}");
    assert_eq!(all, [odd, "files__read", "git__hang", "git__log", "git__refuse"]);
    assert_eq!(flat.names(ListKind::Tools).owner(odd), Some((&id("a"), "a:b")));
    assert_eq!(flat.names(ListKind::Tools).owner("git__log"), Some((&id("b"), "log")));
    let tool = |name: &str| flat.names(ListKind::Tools).owner(name);
    assert_eq!((tool("log"), tool("secret__hush")), (None, None));
    let read = r#"{"name":"files__read","description":"Reads a file","inputSchema":{"type":"object","x":1},"outputSchema":{"type":"object"},"annotations":{"readOnlyHint":true},"_meta":{"ui":{"resourceUri":"files|ui://view"},"n":[1]}}"#;
    assert!(tools_text.contains(read), "{tools_text}");
    assert_eq!(list_text(&flat, ListKind::Prompts), r#"{"prompts":[{"name":"files__ask","x":1e400}]}"#);
    assert_eq!(flat.names(ListKind::Prompts).owner("files__ask"), Some((&id("a"), "ask")));
    assert!(
        list_text(&flat, ListKind::Resources).starts_with(r#"{"resources":[{"name":"R", "uri":"files|file:///a|b","#)
    );
    assert_eq!(
        list_text(&flat, ListKind::ResourceTemplates),
        r#"{"resourceTemplates":[{"uriTemplate":"files|file:///{path}","name":"T"}]}"#
    );
    servers.end().await;
}

const LISTS: [ListKind; 4] = [ListKind::Tools, ListKind::Resources, ListKind::ResourceTemplates, ListKind::Prompts];

fn list_text(lists: &MergedLists, list: ListKind) -> String {
    lists.page(list, None, PAGE_LIMITS).text
}

fn differences(one: &MergedLists, other: &MergedLists) -> Vec<ListKind> {
    LISTS.into_iter().filter(|list| one.names(*list).is_different_from(other.names(*list))).collect()
}

#[tokio::test(start_paused = true)]
async fn flat_mode_reports_only_the_lists_that_differ() {
    let servers = servers().await;
    let before = servers.flat();
    servers.runtime.stop(&id("b")).await.unwrap();
    let without = servers.flat();
    assert_eq!(differences(&without, &before), [ListKind::Tools]);
    assert_eq!(without.names(ListKind::Tools).owner("git__log"), None);
    servers.runtime.start(&id("b")).await.unwrap();
    servers.wait_until("b", |view| view.status == Status::Online).await;
    assert_eq!(differences(&servers.flat(), &before), []);
    servers.runtime.stop(&id("a")).await.unwrap();
    assert_eq!(differences(&servers.flat(), &before), LISTS);
    servers.end().await;
}

#[tokio::test(start_paused = true)]
async fn flat_mode_gives_every_tool_a_unique_name() {
    let c = Lists { tools: r#"[{"name":"c"},{"name":"c"}]"#, ..Lists::default() };
    let other = Lists { tools: r#"[{"name":"b__c"}]"#, ..Lists::default() };
    let servers = ScriptedServers::with(&[("a__b", "one", c), ("a", "two", other)]).await;
    let flat = servers.flat();
    let tools: Value = serde_json::from_str(&list_text(&flat, ListKind::Tools)).unwrap();
    let all = names(&tools, "tools", "name");
    let whose: Vec<_> = all.iter().map(|name| flat.names(ListKind::Tools).owner(name).unwrap()).collect();
    assert_eq!(whose, [(&id("one"), "c"), (&id("two"), "b__c")]);
    assert_ne!(all[0], all[1]);
    servers.end().await;
}
