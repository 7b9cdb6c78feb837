//! `satellite stdio`: the bridge for clients that start a command, between a client of this test and a real satellite.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::certificate::write_pair;
use testkit::home::{Home, Satellite};
use testkit::process::send;
use testkit::wait::{GIVE_UP, wait_for};

use crate::SATELLITE;

const VERSION: &str = "2025-11-25";
const MODES: [&[&str]; 4] = [&[], &["--tools"], &["--flat"], &["--server", "notes"]];

/// An MCP client that starts `satellite stdio`.
pub(crate) struct StdioClient {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Lines that arrived before the one that was waited for.
    seen: Vec<String>,
    stderr: PathBuf,
}

impl StdioClient {
    /// Starts the bridge to the satellite on the home's data directory.
    fn start(home: &Home, args: &[&str]) -> Self {
        let data_dir = home.data_dir().to_str().unwrap();
        Self::start_bare(home, &[args, &["--data-dir", data_dir]].concat())
    }

    pub(crate) fn start_bare(home: &Home, args: &[&str]) -> Self {
        let mut command = home.command(&[&["stdio"], args].concat());
        let stderr = tempfile::Builder::new().suffix(".stderr").tempfile_in(home.path()).unwrap().keep().unwrap().1;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(fs::File::create(&stderr).unwrap());
        let mut child = command.spawn().unwrap();
        let (output, (sender, lines)) = (child.stdout.take().unwrap(), channel());
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                if sender.send(line.unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { input: child.stdin.take(), child, lines, seen: Vec::new(), stderr }
    }

    fn stderr(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    fn send(&mut self, message: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(message.as_bytes()).unwrap();
        input.write_all(b"\n").unwrap();
    }

    /// Waits for a line and keeps the others.
    #[track_caller]
    fn wait(&mut self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        if let Some(at) = self.seen.iter().position(|line| wanted(line)) {
            return self.seen.remove(at);
        }
        loop {
            let Ok(line) = self.lines.recv_timeout(GIVE_UP) else {
                panic!("no {what}; stderr:\n{}\nother lines: {:#?}", self.stderr(), self.seen);
            };
            if wanted(&line) {
                return line;
            }
            self.seen.push(line);
        }
    }

    /// Waits for a notification or a request of the server.
    #[track_caller]
    fn wait_method(&mut self, method: &str) -> Value {
        let line = self.wait(method, |line| line.contains(&format!("\"method\":\"{method}\"")));
        serde_json::from_str(&line).unwrap()
    }

    #[track_caller]
    fn answer(&mut self, id: &Value) -> Value {
        let is_answer = |line: &str| {
            let message: Value = serde_json::from_str(line).unwrap();
            message["id"] == *id && message.get("method").is_none()
        };
        serde_json::from_str(&self.wait(&format!("response to {id}"), is_answer)).unwrap()
    }

    #[track_caller]
    fn request(&mut self, id: &Value, method: &str, params: &Value) -> Value {
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string());
        self.answer(id)
    }

    #[track_caller]
    pub(crate) fn initialize(&mut self, capabilities: &Value) -> Value {
        let client = json!({"name": "starter", "version": "1"});
        let params = json!({"protocolVersion": VERSION, "capabilities": capabilities, "clientInfo": client});
        let answer = self.request(&json!("init"), "initialize", &params);
        assert_eq!(answer["result"]["protocolVersion"], VERSION, "{answer:#}");
        self.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
        answer
    }

    /// Opens a session with `mirror`, whose greeting no typed parser reads.
    #[track_caller]
    fn initialize_mirror(&mut self, capabilities: &Value) {
        let client = json!({"name": "starter", "version": "1"});
        let params = json!({"protocolVersion": VERSION, "capabilities": capabilities, "clientInfo": client});
        self.send(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}).to_string());
        let greeting = self.wait("greeting", |line| line.contains("\"name\":\"mirror\""));
        assert!(greeting.contains(r#""x-unknown":"\ud800""#), "{greeting}");
        self.send(r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#);
    }

    #[track_caller]
    pub(crate) fn call(&mut self, id: &Value, tool: &str, arguments: &Value) -> Value {
        self.request(id, "tools/call", &json!({"name": tool, "arguments": arguments}))
    }

    /// Closes stdin and waits for the exit. Returns the exit code and stderr.
    #[track_caller]
    pub(crate) fn close(mut self) -> (Option<i32>, String) {
        drop(self.input.take());
        self.exited()
    }

    #[track_caller]
    fn exited(&mut self) -> (Option<i32>, String) {
        let Self { child, stderr, .. } = self;
        let seen = || fs::read_to_string(stderr).unwrap();
        let status = wait_for("the bridge to exit", || child.try_wait().unwrap(), seen);
        (status.code(), self.stderr())
    }
}

impl Drop for StdioClient {
    fn drop(&mut self) {
        // An error means that the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a configuration with an endpoint on a free port and the user Alice, without any token.
fn config_with(home: &Home, gateway: &str, servers: &[(&str, &str)]) -> String {
    let mut text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n{gateway}\n[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{{ id = \"u\", slug = \"alice\" }}]\n"
    );
    for (name, server) in servers {
        write!(text, "[[teams.installations]]\nid = \"{name}\"\nserver = \"{name}\"\n{server}\n").unwrap();
    }
    home.write("satellite.toml", &text).to_str().unwrap().to_owned()
}

fn config(home: &Home) -> String {
    config_with(home, "", &[("notes", "SIM \"--all-tools\"")])
}

fn run<'a>(home: &'a Home, config: &str) -> Satellite<'a> {
    let satellite = home.run(&["--config", config]);
    home.wait_all_online();
    satellite
}

fn mirror() -> String {
    let path = Path::new(SATELLITE).with_file_name("examples").join("mirror");
    assert!(path.exists(), "{} does not exist: run cargo build --example mirror", path.display());
    format!("command = \"{}\"", path.display())
}

/// Returns the name and the arguments of a call of `echo` in a mode.
#[track_caller]
fn echo(listed: &Value, text: &str) -> (String, Value) {
    let tools = listed["result"]["tools"].as_array().unwrap_or_else(|| panic!("{listed:#}"));
    let names: Vec<&str> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    if let Some(name) = names.iter().find(|name| name.ends_with("echo")) {
        ((*name).to_owned(), json!({"text": text}))
    } else {
        assert!(names.contains(&"execute_mcp_tool"), "{names:?}");
        ("execute_mcp_tool".to_owned(), json!({"tool_path": "notes:echo", "arguments": {"text": text}}))
    }
}

fn stateless(params: &Value) -> Value {
    let mut params = params.clone();
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "starter", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    params
}

#[test]
fn a_client_with_a_session_calls_tools_in_every_mode() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config(&home));
    for mode in MODES {
        let mut client = StdioClient::start(&home, mode);
        client.initialize(&json!({}));
        let listed = client.request(&json!(1), "tools/list", &json!({}));
        let (tool, arguments) = echo(&listed, "hi");
        assert_eq!(tool == "execute_mcp_tool", mode.is_empty() || mode == ["--tools"], "{mode:?}");
        let answer = client.call(&json!("two"), &tool, &arguments);
        assert_eq!(answer["result"]["structuredContent"], json!({"text": "hi"}), "{mode:?} {answer:#}");
        let (code, stderr) = client.close();
        assert_eq!((code, &*stderr), (Some(0), ""), "{mode:?}");
    }
    let closed = home.events().into_iter().filter(|event| event["type"] == "mcp.client.disconnected");
    let reasons: Vec<_> = closed.map(|event| event["data"]["reason"].clone()).collect();
    assert_eq!(reasons, vec![json!("closed"); MODES.len()]);
    satellite.terminate().exits(0);
}

#[test]
fn a_stateless_client_calls_tools_in_every_mode() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config(&home));
    for mode in MODES {
        let mut client = StdioClient::start(&home, mode);
        let found = client.request(&json!(0), "server/discover", &stateless(&json!({})));
        assert!(found["result"]["supportedVersions"].to_string().contains("2026-07-28"), "{found:#}");
        let listed = client.request(&json!(1), "tools/list", &stateless(&json!({})));
        let (tool, arguments) = echo(&listed, "hé");
        let params = stateless(&json!({"name": tool, "arguments": arguments}));
        let answer = client.request(&json!("two"), "tools/call", &params);
        assert_eq!(answer["result"]["structuredContent"], json!({"text": "hé"}), "{mode:?} {answer:#}");
        let (code, stderr) = client.close();
        assert_eq!((code, &*stderr), (Some(0), ""), "{mode:?}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn a_stateless_client_subscribes_and_cancels_with_notifications() {
    let home = Home::new(SATELLITE);
    let config = config(&home);
    let satellite = run(&home, &config);
    let mut client = StdioClient::start(&home, &["--server", "notes"]);
    let filter = stateless(&json!({"notifications": {"toolsListChanged": true}}));
    client
        .send(&json!({"jsonrpc": "2.0", "id": "sub", "method": "subscriptions/listen", "params": filter}).to_string());
    let acknowledged = client.wait_method("notifications/subscriptions/acknowledged");
    assert_eq!(acknowledged["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], "sub", "{acknowledged:#}");

    let sleep = stateless(&json!({"name": "sleep", "arguments": {"ms": 600_000}}));
    client.send(&json!({"jsonrpc": "2.0", "id": "long", "method": "tools/call", "params": sleep}).to_string());
    wait_received(&mut client, "calls", &stateless, |calls| calls == "1");
    client.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"long"}}"#);
    wait_received(&mut client, "cancelled", &stateless, |cancelled| cancelled != "[]");
    assert!(!client.seen.iter().any(|line| line.contains("\"long\"")), "{:#?}", client.seen);

    // The subscription is opened again after a restart, and the client learns that the list may have changed.
    satellite.kill();
    let satellite = run(&home, &config);
    let changed = client.wait_method("notifications/tools/list_changed");
    assert_eq!(changed["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], "sub", "{changed:#}");
    assert!(!client.seen.iter().any(|line| line.contains("acknowledged")), "{:#?}", client.seen);
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

/// Waits until a part of the report of the tool `received` is as wanted.
#[track_caller]
fn wait_received(
    client: &mut StdioClient,
    part: &str,
    params: &impl Fn(&Value) -> Value,
    wanted: impl Fn(&str) -> bool,
) {
    let mut number = 0;
    wait_for(
        part,
        || {
            number += 1;
            let params = params(&json!({"name": "received", "arguments": {}}));
            let answer = client.request(&json!(format!("received-{number}")), "tools/call", &params);
            let report = &answer["result"]["structuredContent"];
            assert!(!report[part].is_null(), "{answer:#}");
            wanted(&report[part].to_string()).then_some(())
        },
        String::new,
    );
}

/// JSON that a typed parser would lose or change: order, numbers out of range, spaces, lone surrogates.
const STRANGE: &str = r#"{ "x":1e400,  "params":{"\ud800":"\udfff","n":123456789012345678901234567890,"z":null},"#;

#[test]
fn the_text_of_messages_passes_unchanged() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config_with(&home, "", &[("mirror", &mirror())]));
    let mut client = StdioClient::start(&home, &["--server", "mirror"]);
    client.initialize_mirror(&json!({}));
    for id in ["7", r#""se\u0076en""#, "-1.50e1"] {
        client.send(&format!(r#"{STRANGE}"id":{id},"method":"x/unknown","jsonrpc":"2.0", "y" : [ ]}}"#));
        let line = client.wait("mirrored request", |line| line.contains("reflected"));
        assert!(
            line.starts_with(&format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"reflected":{STRANGE}"id":"#)),
            "{line}"
        );
        assert!(line.ends_with(r#","method":"x/unknown","jsonrpc":"2.0", "y" : [ ]}}}"#), "{line}");
    }
    let notification = format!(r#"{STRANGE}"jsonrpc":"2.0",  "method":"notifications/x"}}"#);
    client.send(&notification);
    let line = client.wait("mirrored notification", |line| line.contains("notifications/x"));
    assert!(line.contains(&format!(r#"{{"reflected":{notification}}}"#)), "{line}");
    // Notifications and the answer of a call, written by the server.
    let result = format!(r#"{STRANGE}"jsonrpc":"2.0","id":"$id","result":{{  "a":1E+2}}}}"#);
    client.send(&format!(
        r#"{{"jsonrpc":"2.0","id":"say","method":"mirror/say","params":{{"messages":[{notification},{result}]}}}}"#
    ));
    client.wait("notification", |line| line == notification);
    client.wait("answer", |line| line == result.replace("$id", "say"));
    // A line that is no message is answered, and the next one is read.
    client.send("{\"half");
    client.wait("error", |line| line.contains(r#""id":null"#) && line.contains("-32700"));
    client.send(r#"{"jsonrpc":"1.0","id":1,"method":"x"}"#);
    client.wait("error", |line| line.contains(r#""id":null"#) && line.contains("-32600"));
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn requests_of_the_server_are_answered_by_the_client() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config_with(&home, "", &[("mirror", &mirror())]));
    let mut client = StdioClient::start(&home, &["--server", "mirror"]);
    client.initialize_mirror(&json!({"sampling": {}, "elicitation": {}, "roots": {}}));
    for (number, method) in ["sampling/createMessage", "elicitation/create", "roots/list"].into_iter().enumerate() {
        let params = json!({"messages": [
            {"jsonrpc": "2.0", "id": "asked", "method": method, "params": {"message": "?"}},
        ]});
        client.send(&json!({"jsonrpc": "2.0", "id": number, "method": "mirror/say", "params": params}).to_string());
        let asked = client.wait_method(method);
        client.send(&format!(r#"{{"jsonrpc":"2.0","id":{},"result":{{ "told":1e999}}}}"#, asked["id"]));
        let line = client.wait("mirrored answer", |line| line.contains("told"));
        assert!(line.contains(r#""id":"asked","result":{ "told":1e999}"#), "{line}");
        client.send(
            &json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}})
                .to_string(),
        );
    }
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn progress_arrives_before_the_answer_and_a_cancelled_call_has_none() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config(&home));
    let mut client = StdioClient::start(&home, &["--server", "notes"]);
    client.initialize(&json!({}));
    let params =
        json!({"name": "sleep", "arguments": {"ms": 300, "progress_every_ms": 50}, "_meta": {"progressToken": "p"}});
    let answer = client.request(&json!(1), "tools/call", &params);
    assert!(answer["result"].is_object(), "{answer:#}");
    let progress = client.seen.iter().filter(|line| line.contains("notifications/progress"));
    assert!(progress.clone().all(|line| line.contains(r#""progressToken":"p""#)) && progress.count() >= 3);

    client.send(&json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "sleep", "arguments": {"ms": 600_000}}}).to_string());
    let unchanged = |params: &Value| params.clone();
    wait_received(&mut client, "calls", &unchanged, |calls| calls == "2");
    client.send(r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":2,"reason":"enough"}}"#);
    wait_received(&mut client, "cancelled", &unchanged, |cancelled| cancelled != "[]");
    client.call(&json!(3), "echo", &json!({"text": "x"}));
    let has_answer = |line: &String| serde_json::from_str::<Value>(line).unwrap()["id"] == 2;
    assert!(!client.seen.iter().any(has_answer), "{:#?}", client.seen);
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn two_hundred_concurrent_calls_have_their_own_answers() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config(&home));
    let mut client = StdioClient::start(&home, &["--server", "notes"]);
    client.initialize(&json!({}));
    let large = "x".repeat(3 << 20);
    for number in 0..200 {
        // Later calls are answered first.
        let arguments = json!({"text": format!("text {number}"), "after_ms": 400 - 2 * number});
        let params = json!({"name": "echo", "arguments": arguments});
        client.send(&json!({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}).to_string());
    }
    for number in 0..200 {
        let answer = client.answer(&json!(number));
        assert_eq!(answer["result"]["structuredContent"]["text"], format!("text {number}"), "{answer:#}");
    }
    for number in 0..4 {
        let params = json!({"name": "echo", "arguments": {"text": large}});
        client.send(&json!({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}).to_string());
    }
    for number in 0..4 {
        assert!(client.answer(&json!(number))["result"]["structuredContent"]["text"] == *large);
    }
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn the_bridge_survives_a_killed_satellite_and_reports_the_fate_of_calls() {
    let home = Home::new(SATELLITE);
    let config = config(&home);
    let satellite = run(&home, &config);
    let mut client = StdioClient::start(&home, &["--server", "notes"]);
    client.initialize(&json!({}));
    client.send(&json!({"jsonrpc": "2.0", "id": "lost", "method": "tools/call", "params": {"name": "sleep", "arguments": {"ms": 600_000}}}).to_string());
    let unchanged = |params: &Value| params.clone();
    wait_received(&mut client, "calls", &unchanged, |calls| calls == "1");
    satellite.kill();
    let lost = client.answer(&json!("lost"));
    assert_eq!(lost["error"]["data"]["fate"], "maybe_executed", "{lost:#}");
    assert!(lost["error"]["message"].as_str().unwrap().contains("check before you call again"), "{lost:#}");

    // A call without a satellite waits for the next one.
    client.send(&json!({"jsonrpc": "2.0", "id": "waits", "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "late"}}}).to_string());
    wait_for("the report", || client.stderr().contains("lost the connection").then_some(()), || client.stderr());
    let satellite = run(&home, &config);
    let answer = client.answer(&json!("waits"));
    assert_eq!(answer["result"]["structuredContent"]["text"], "late", "{answer:#}");
    client.wait_method("notifications/tools/list_changed");
    assert!(!client.seen.iter().any(|line| line.contains("protocolVersion")), "{:#?}", client.seen);
    let answer = client.call(&json!("new"), "echo", &json!({"text": "again"}));
    assert_eq!(answer["result"]["structuredContent"]["text"], "again", "{answer:#}");
    let (code, stderr) = client.close();
    assert_eq!(code, Some(0));
    assert!(stderr.contains("connected again") && !stderr.contains("sat_"), "{stderr}");
    satellite.terminate().exits(0);
}

#[test]
fn a_stopping_satellite_is_replaced_without_an_error() {
    let home = Home::new(SATELLITE);
    let config = config(&home);
    let satellite = run(&home, &config);
    let mut client = StdioClient::start(&home, &["--flat"]);
    client.initialize(&json!({}));
    let listed = client.request(&json!(1), "tools/list", &json!({}));
    let (tool, arguments) = echo(&listed, "hi");
    satellite.terminate().exits(0);
    client.send(
        &json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": tool, "arguments": arguments}})
            .to_string(),
    );
    let satellite = run(&home, &config);
    assert_eq!(client.answer(&json!(2))["result"]["structuredContent"]["text"], "hi");
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn without_a_satellite_and_with_no_start_the_error_is_clear() {
    let home = Home::new(SATELLITE);
    let mut client = StdioClient::start(&home, &["--no-start"]);
    let (code, stderr) = client.exited();
    assert_eq!(code, Some(3), "{stderr}");
    assert!(stderr.contains("no satellite is running on"), "{stderr}");
    assert!(!home.data_dir().exists());
}

#[test]
fn the_endpoint_and_the_user_must_exist() {
    let home = Home::new(SATELLITE);
    let users = "[{ id = \"a\", slug = \"alice\" }, { id = \"b\", slug = \"bob\" }]";
    let config = config(&home);
    let text = fs::read_to_string(&config).unwrap();
    let several = text.replace("[{ id = \"u\", slug = \"alice\" }]", users);
    fs::write(&config, several).unwrap();
    let satellite = run(&home, &config);
    for (args, expected) in [
        (&["--user", "carol"][..], "there is no user `carol`; the users are: acme/alice, acme/bob"),
        (&["--user", "other/alice"], "there is no user `other/alice`"),
        (&[], "name one with --user: acme/alice, acme/bob"),
        (&["--server", "no/tes"], "`no/tes` is not the name of a server"),
        (&["--flat", "--tools"], "cannot be used with"),
    ] {
        let (code, stderr) = StdioClient::start(&home, args).exited();
        assert!(code == Some(2) && stderr.contains(expected), "{args:?} {code:?} {stderr}");
    }
    for user in ["bob", "acme/bob", "t/b"] {
        let mut client = StdioClient::start(&home, &["--user", user]);
        client.initialize(&json!({}));
        assert_eq!(client.close().0, Some(0));
    }
    let connected = home.wait_event(0, "mcp.client.connected", |_| true);
    assert_eq!(connected["data"]["user_id"], "b", "{connected:#}");
    satellite.terminate().exits(0);

    let none = home.servers("none.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", none.to_str().unwrap()]);
    let (code, stderr) = StdioClient::start(&home, &[]).exited();
    assert!(code == Some(1) && stderr.contains("has no MCP endpoint; add [gateway]"), "{code:?} {stderr}");
    satellite.terminate().exits(0);
}

#[test]
fn the_token_is_neither_in_arguments_nor_in_the_environment_nor_in_messages() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config(&home));
    let mut client = StdioClient::start(&home, &[]);
    client.initialize(&json!({}));
    let process = format!("/proc/{}", client.child.id());
    for file in ["cmdline", "environ"] {
        let bytes = fs::read(format!("{process}/{file}")).unwrap();
        assert!(!String::from_utf8_lossy(&bytes).contains("sat_"), "{file}");
    }
    // The keeper and the spawn helper are for satellites.
    let children = fs::read_to_string(format!("{process}/task/{}/children", client.child.id())).unwrap();
    assert_eq!(children, "");
    send(i32::try_from(client.child.id()).unwrap(), Signal::SIGTERM);
    let (code, stderr) = client.exited();
    assert_eq!((code, &*stderr), (Some(0), ""));
    assert_eq!(home.wait_event(0, "mcp.client.disconnected", |_| true)["data"]["reason"], "closed");
    satellite.terminate().exits(0);
}

#[test]
fn an_endpoint_with_tls_is_reached_by_its_own_certificate() {
    let home = Home::new(SATELLITE);
    write_pair(home.path());
    let tls = "tls = { cert = \"cert.pem\", key = \"key.pem\" }\npublic_url = \"https://mcp.example.com\"";
    let satellite = run(&home, &config_with(&home, tls, &[("notes", "SIM")]));
    let mut client = StdioClient::start(&home, &["--server", "notes"]);
    client.initialize(&json!({}));
    assert!(client.call(&json!(1), "echo", &json!({"text": "x"}))["result"].is_object());
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn a_line_of_ten_megabytes_passes_in_both_directions_and_a_larger_one_is_rejected() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config_with(&home, "", &[("mirror", &mirror())]));
    let mut client = StdioClient::start(&home, &["--server", "mirror"]);
    client.initialize_mirror(&json!({}));
    let text = |length: usize| "é".repeat(length / 2);
    let with_text = |id: u32, length: usize| {
        let text = text(length);
        format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"x/unknown","params":{{"text":"{text}"}}}}"#)
    };
    client.send(&format!("{}\r", with_text(1, 10 << 20)));
    let line = client.wait("large answer", |line| line.contains("reflected"));
    assert!(line.starts_with(r#"{"jsonrpc":"2.0","id":1,"result":{"reflected":"#), "{}", &line[..200]);
    assert!(line.contains(&text(10 << 20)), "{}", line.len());
    // The limit of the endpoint is 16 MiB, and that of the bridge 64 MiB. Later messages are read.
    for (id, length, answered) in [(2, 17 << 20, json!(2)), (3, 65 << 20, Value::Null)] {
        client.send(&with_text(id, length));
        let error = client.answer(&answered);
        assert!(error["error"]["message"].as_str().unwrap().contains("larger than"), "{error:#}");
    }
    client.send(&with_text(4, 10));
    client.wait("answer", |line| line.starts_with(r#"{"jsonrpc":"2.0","id":4,"result""#));
    assert_eq!(client.close().0, Some(0));
    satellite.terminate().exits(0);
}

#[test]
fn open_calls_are_cancelled_when_the_client_ends() {
    let home = Home::new(SATELLITE);
    let satellite = run(&home, &config(&home));
    let mut observer = StdioClient::start(&home, &["--server", "notes"]);
    observer.initialize(&json!({}));
    let unchanged = |params: &Value| params.clone();
    let mut ended = 0;
    for with_session in [true, false] {
        for by_signal in [true, false] {
            let mut client = StdioClient::start(&home, &["--server", "notes"]);
            let mut params = json!({"name": "sleep", "arguments": {"ms": 600_000}});
            if with_session {
                client.initialize(&json!({}));
            } else {
                params = stateless(&params);
            }
            client.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string());
            ended += 1;
            wait_received(&mut observer, "calls", &unchanged, |calls| calls == ended.to_string());
            let (code, stderr) = if by_signal {
                send(i32::try_from(client.child.id()).unwrap(), Signal::SIGTERM);
                client.exited()
            } else {
                client.close()
            };
            assert_eq!((code, &*stderr), (Some(0), ""), "session: {with_session}, signal: {by_signal}");
            let is_cancelled = |cancelled: &str| serde_json::from_str::<Vec<Value>>(cancelled).unwrap().len() == ended;
            wait_received(&mut observer, "cancelled", &unchanged, is_cancelled);
        }
    }
    assert_eq!(observer.close().0, Some(0));
    satellite.terminate().exits(0);
}
