//! Real MCP servers, as users run them. `.ci/install-servers` installs them; these tests are ignored without them
//! unless `MCP_REAL_SERVERS=required`.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::installed::{directory, installed};
use testkit::wait::until;

use super::support::{Instance, Server, real, text};

fn npm_server(name: &str) -> String {
    installed("node", &format!("node_modules/@modelcontextprotocol/server-{name}/dist/index.js"))
}

fn tools(server: &Instance) -> Vec<String> {
    server.view().offered_catalogue().unwrap().tools.iter().map(|tool| tool.name.to_string()).collect()
}

/// Calls, kills the leader, waits until the server is restarted, and calls again.
async fn assert_restarts_after_a_kill(server: &Instance, call: impl AsyncFn()) {
    call().await;
    let old = server.pid();
    server.signal(Signal::SIGKILL);
    server.online_again(old).await;
    call().await;
    assert_eq!(server.view().restarts, 1);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_everything_is_listed_called_and_restarted_after_a_kill() {
    let path = npm_server("everything");
    real(async |satellite| {
        let server = satellite.online(Server::command("node", &[&path])).await;
        let tools = tools(&server);
        assert!(tools.iter().any(|tool| tool == "get-sum") && tools.iter().any(|tool| tool == "echo"), "{tools:?}");
        assert_restarts_after_a_kill(&server, async || {
            assert_eq!(server.text("get-sum", json!({"a": 2, "b": 40})).await, "The sum of 2 and 40 is 42.");
        })
        .await;
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn progress_extends_the_deadline_of_a_long_operation_of_server_everything() {
    let path = npm_server("everything");
    real(async |satellite| {
        let server = satellite.online(Server::command("node", &[&path])).await;
        let call = server.call_within(
            Some(Duration::from_secs(4)),
            "trigger-long-running-operation",
            json!({"duration": 8, "steps": 16}),
        );
        let expected = "Long running operation completed. Duration: 8 seconds, Steps: 16.";
        assert_eq!(text(&call.await.unwrap()), expected);
    });
}

/// Calls a tool that sends a request to a client, and asserts that the satellite declines the request: there is no
/// client.
fn assert_declined(tool: &str, arguments: Value) {
    let path = npm_server("everything");
    real(async |satellite| {
        let server = satellite.online(Server::command("node", &[&path])).await;
        // The server lists the tool only after `initialized`, with a `list_changed`, if the client has the capability.
        server.until(tool, |view| view.catalogue.as_ref().unwrap().tool(tool).is_some()).await;
        let answer = server.call(tool, arguments).await.unwrap();
        assert_eq!(answer["isError"], true);
        assert!(text(&answer).contains("no client is attached that could answer"), "{answer}");
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_sampling_request_of_server_everything_is_declined_without_blocking() {
    assert_declined("trigger-sampling-request", json!({"prompt": "hello", "maxTokens": 10}));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn an_elicitation_request_of_server_everything_is_declined_without_blocking() {
    assert_declined("trigger-elicitation-request", json!({}));
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_filesystem_in_a_shell_is_listed_called_and_restarted_after_a_kill() {
    let path = npm_server("filesystem");
    real(async |satellite| {
        let directory = satellite.scope.directory().canonicalize().unwrap();
        let (file, root) = (directory.join("note.txt"), directory.to_str().unwrap());
        fs::write(&file, "as it was written").unwrap();
        // The second command prevents the shell from replacing itself by the server.
        let server = Server::command("/bin/sh", &["-c", r#"node "$0" "$1"; exit $?"#, &path, root]);
        let server = satellite.online(server).await;
        assert!(tools(&server).iter().any(|tool| tool == "read_text_file"));
        assert_restarts_after_a_kill(&server, async || {
            assert_eq!(server.text("read_text_file", json!({"path": file})).await, "as it was written");
            let refused = server.call("read_text_file", json!({"path": "/etc/passwd"})).await.unwrap();
            assert_eq!(refused["isError"], true);
        })
        .await;
        assert_eq!(satellite.scope.processes().len(), 2, "not one shell and one server");
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_memory_in_a_package_runner_is_called_and_restarted_after_a_kill() {
    let _ = npm_server("memory");
    real(async |satellite| {
        let memory = satellite.scope.directory().join("memory.jsonl");
        let servers = directory();
        let runner = ["exec", "--offline", "--no-update-notifier", "--", "mcp-server-memory"];
        let server = Server::command("npm", &runner).cwd(servers).env("MEMORY_FILE_PATH", memory.to_str().unwrap());
        let server = satellite.online(server).await;
        let runs = || satellite.scope.processes().iter().map(|process| process.pid).collect::<Vec<_>>();
        let old = runs();
        assert!(old.len() > 1, "the runner has no child: {old:?}");
        let entity = json!({"name": "Ada", "entityType": "person", "observations": ["wrote the first program"]});
        server.call("create_entities", json!({"entities": [entity]})).await.unwrap();
        assert_restarts_after_a_kill(&server, async || {
            let graph = server.call("read_graph", json!({})).await.unwrap();
            assert_eq!(graph["structuredContent"]["entities"], json!([entity]));
        })
        .await;
        until("only new processes run", async || runs(), |new| new.iter().all(|pid| !old.contains(pid))).await;
    });
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn mcp_server_time_is_listed_called_and_restarted_after_a_kill() {
    let path = installed("python3", "venv/bin/mcp-server-time");
    real(async |satellite| {
        let server = satellite.online(Server::command(&path, &["--local-timezone", "UTC"])).await;
        assert_eq!(tools(&server), ["get_current_time", "convert_time"]);
        assert_restarts_after_a_kill(&server, async || {
            let noon = json!({"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kolkata"});
            let text = server.text("convert_time", noon).await;
            assert!(text.contains("T17:30:00+05:30"), "{text}");
        })
        .await;
    });
}
