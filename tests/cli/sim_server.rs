//! `satellite sim-server`: an MCP server over stdin and stdout, tested with hand-written messages.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use crate::SATELLITE;

struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let mut command = Command::new(SATELLITE);
        command.arg("sim-server").args(flags).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.stdin.as_mut().unwrap(), "{message}").unwrap();
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn request(&mut self, message: &Value) -> Value {
        self.send(message);
        self.receive()
    }

    /// Closes stdin and returns the exit code.
    fn close_stdin(&mut self) -> Option<i32> {
        self.stdin = None;
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn initialize() -> Value {
    let client = json!({"name": "by hand", "version": "1"});
    let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
}

#[test]
fn the_server_speaks_mcp_and_exits_at_the_end_of_stdin() {
    let mut server = Server::start(&["--name", "by-hand", "--server-version", "7", "--tools", "2"]);
    let answer = server.request(&initialize());
    assert_eq!(answer["result"]["serverInfo"], json!({"name": "by-hand", "version": "7"}));
    assert_eq!(answer["result"]["protocolVersion"], "2025-11-25");
    server.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
    let answer = server.request(&json!({"jsonrpc": "2.0", "id": "list", "method": "tools/list"}));
    assert_eq!(answer["id"], "list");
    let tools = answer["result"]["tools"].as_array().unwrap();
    assert_eq!(tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect::<Vec<_>>(), ["echo", "add"]);
    let call = json!({"name": "add", "arguments": {"a": 1, "b": 2}});
    let answer = server.request(&json!({"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call}));
    assert_eq!(answer["result"]["structuredContent"]["result"], 3);
    assert_eq!(server.close_stdin(), Some(0));
}

#[test]
fn flags_set_the_scripted_behaviour() {
    let mut server = Server::start(&["--exit-before-handshake", "--exit-code", "9"]);
    assert_eq!(server.child.wait().unwrap().code(), Some(9));

    let mut server = Server::start(&["--stdout-garbage-at-start", "1", "--handshake-error", "not today"]);
    let mut garbage = String::new();
    server.stdout.read_line(&mut garbage).unwrap();
    assert!(serde_json::from_str::<Value>(&garbage).is_err(), "{garbage:?}");
    assert!(server.request(&initialize())["error"]["message"].as_str().unwrap().contains("not today"));
}

#[test]
fn a_script_file_replaces_all_flags() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("script.json");
    std::fs::write(&file, r#"{"name": "filed", "handshake_delay": "1ms"}"#).unwrap();
    let file = file.to_str().unwrap();
    let mut server = Server::start(&["--name", "flagged", "--script-file", file]);
    assert_eq!(server.request(&initialize())["result"]["serverInfo"]["name"], "filed");

    let output = Command::new(SATELLITE).args(["sim-server", "--script-file", "/nowhere.json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot read /nowhere.json: No such file"), "{output:?}");
}
