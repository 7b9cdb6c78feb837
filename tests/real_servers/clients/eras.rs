//! Both eras of the protocol on both sides. The clients and servers use the last Python SDK with sessions only (`Old`)
//! and the one that speaks both eras and prefers the new one (`New`); another client uses the TypeScript SDK of both
//! eras. Every client gets the same results from every server, directly and through the endpoint.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::installed::{directory, installed};
use testkit::port::free_port;
use testkit::wait::{GIVE_UP, wait_until};

use super::support::{Running, Steps, lines_of, script};
use super::{EVERYTHING, NODE};

const OLD_VERSION: &str = "2025-11-25";
const NEW_VERSION: &str = "2026-07-28";

/// A Python SDK.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Sdk {
    Old,
    New,
}

impl Sdk {
    const BOTH: [Self; 2] = [Self::Old, Self::New];

    fn name(self) -> &'static str {
        match self {
            Self::Old => "old",
            Self::New => "new",
        }
    }

    fn python(self) -> String {
        let venv = if self == Self::Old { "venv-old" } else { "venv" };
        installed("python3", &format!("{venv}/bin/python"))
    }

    /// Returns the command line of a program with this SDK; `directory` is one below `tests`.
    fn command_line(self, directory: &str) -> Vec<String> {
        let script = script(&format!("{directory}/eras_{}.py", self.name()));
        vec![self.python(), "-B".to_owned(), script.to_str().unwrap().to_owned()]
    }

    fn command(self, directory: &str) -> Command {
        let words = self.command_line(directory);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    /// Starts the server of this SDK over HTTP.
    fn start_server(self, port: u16, flags: &[&str]) -> Running {
        Running::server(self.command("servers").arg(port.to_string()).args(flags), port)
    }
}

#[derive(Debug, Clone, Copy)]
enum Client {
    Python(Sdk),
    /// With the SDK of both eras.
    TypeScript,
}

impl Client {
    const ALL: [Self; 3] = [Self::Python(Sdk::Old), Self::Python(Sdk::New), Self::TypeScript];

    fn name(self) -> &'static str {
        match self {
            Self::Python(sdk) => sdk.name(),
            Self::TypeScript => "ts",
        }
    }

    fn command(self) -> Command {
        let mut command = match self {
            Self::Python(sdk) => sdk.command("real_servers/clients"),
            Self::TypeScript => {
                installed("node", "clients/node_modules/@modelcontextprotocol/client/dist/index.mjs");
                let mut command = Command::new(installed("node", NODE));
                command
                    .arg(script("real_servers/clients/eras_new.mjs"))
                    .env("MCP_CLIENTS_DIR", directory().join("clients"));
                command
            }
        };
        command.stdin(Stdio::null());
        command
    }

    /// The version that it negotiates with a peer that speaks both eras.
    fn version(self) -> &'static str {
        match self {
            Self::Python(Sdk::Old) => OLD_VERSION,
            Self::Python(Sdk::New) | Self::TypeScript => NEW_VERSION,
        }
    }

    /// Runs all steps of the client against a server and checks the results and the version.
    fn check_all(self, url: &str, version: &str) {
        // The name of a tool that only this client makes the server add.
        let name = format!("grown_by_{}", self.name());
        let steps = Steps::run(self.command().args([url, "auto", &name]));
        assert_eq!(
            Value::from(steps.0),
            json!([
                {"step": "connect", "server": "eras", "version": version},
                {"step": "list", "tools": ["add", "ask", "work", "grow"]},
                {"step": "call", "said": [false, "42"]},
                {"step": "ask", "said": [false, "Hello, Ada!"]},
                {"step": "read", "said": "Nothing."},
                {"step": "prompt", "said": "Please review:\n\n1 + 1"},
                {"step": "work", "said": [false, "3 steps done."], "progress": [[1, 3], [2, 3], [3, 3]]},
                {"step": "fail", "failed": true, "says": true},
                {"step": "miss", "found": false},
                {"step": "grow", "heard": true, "listed": true, "said": [false, name]},
            ]),
            "{self:?} at {url}"
        );
    }
}

/// A satellite without authentication and with these servers: name and further configuration of each.
fn satellite(servers: &[(&str, String)]) -> (Running, String) {
    let head = "[gateway]\nlisten = \"127.0.0.1:0\"\nauth = \"none\"\n\n\
                [policy.reconnect]\nbackoff_min = \"100ms\"\nbackoff_max = \"400ms\"\n\n\
                [[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\n[[teams.users]]\nid = \"user_alice\"\nslug = \"alice\"\n";
    let installation = |(name, rest): &(&str, String)| {
        format!("\n[[teams.installations]]\nid = \"{name}\"\nserver = \"{name}\"\n{rest}\n")
    };
    Running::satellite(&format!("{head}{}", servers.iter().map(installation).collect::<String>()))
}

fn process(words: &[String]) -> String {
    format!("command = {:?}\nargs = {:?}", words[0], &words[1..])
}

fn remote(port: u16) -> String {
    format!("transport = \"http\"\nurl = \"http://127.0.0.1:{port}/mcp\"")
}

/// Checks every client with every server.
fn check_all_pairs(endpoint: &str, servers: &[&str]) {
    for server in servers {
        for client in Client::ALL {
            client.check_all(&endpoint.replace("/mcp", &format!("/i/{server}/mcp")), client.version());
        }
    }
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn clients_of_both_eras_can_use_servers_of_both_eras_directly() {
    for server in Sdk::BOTH {
        let port = free_port();
        let _server = server.start_server(port, &[]);
        for client in Client::ALL {
            let version = if server == Sdk::New { client.version() } else { OLD_VERSION };
            client.check_all(&format!("http://127.0.0.1:{port}/mcp"), version);
        }
    }
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn clients_of_both_eras_can_use_stdio_servers_of_both_eras_through_the_endpoint() {
    let (old, new) = (Sdk::Old.command_line("servers"), Sdk::New.command_line("servers"));
    let pinned = format!("{}\nprotocol = \"{NEW_VERSION}\"", process(&new));
    let (_satellite, endpoint) = satellite(&[("old", process(&old)), ("both", process(&new)), ("new", pinned)]);
    check_all_pairs(&endpoint, &["old", "both", "new"]);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn clients_of_both_eras_can_use_http_servers_of_both_eras_through_the_endpoint() {
    let ports = [(); 3].map(|()| free_port());
    let _old = Sdk::Old.start_server(ports[0], &[]);
    let _both = Sdk::New.start_server(ports[1], &[]);
    let _new = Sdk::New.start_server(ports[2], &["--only-new"]);
    let (_satellite, endpoint) =
        satellite(&[("old", remote(ports[0])), ("both", remote(ports[1])), ("new", remote(ports[2]))]);
    check_all_pairs(&endpoint, &["old", "both", "new"]);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn server_requests_reach_clients_of_both_eras_through_the_combined_views() {
    let (old, new) = (Sdk::Old.command_line("servers"), Sdk::New.command_line("servers"));
    let port = free_port();
    let _both = Sdk::New.start_server(port, &[]);
    let pinned = format!("{}\nprotocol = \"{NEW_VERSION}\"", process(&new));
    let (_satellite, endpoint) = satellite(&[("old", process(&old)), ("new", pinned), ("both", remote(port))]);
    for sdk in Sdk::BOTH {
        for (view, query) in [("tools", ""), ("flat", "?mode=flat")] {
            let url = format!("{endpoint}{query}");
            let mut client = Client::Python(sdk).command();
            let steps = Steps::run(client.args([&url, "auto", view, "old", "new", "both"]));
            let asked = |server| json!({"step": "ask", "server": server, "said": [false, "Hello, Ada!"]});
            assert_eq!(Value::from(steps.0[1..].to_vec()), json!(["old", "new", "both"].map(asked)), "{sdk:?}, {view}");
        }
    }
}

/// A client that stays connected and calls on request.
struct ConnectedClient {
    process: Child,
    steps: mpsc::Receiver<String>,
}

impl ConnectedClient {
    fn connect(sdk: Sdk, url: &str) -> Self {
        let mut command = sdk.command("real_servers/clients");
        let mut process = command.args([url, "auto"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let steps = lines_of(process.stdout.take().unwrap());
        let mut client = Self { process, steps };
        assert_eq!(client.step()["step"], "connect");
        client
    }

    fn step(&mut self) -> Value {
        serde_json::from_str(&self.steps.recv_timeout(GIVE_UP).unwrap()).unwrap()
    }

    fn call(&mut self) -> Value {
        self.process.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.step()
    }

    /// Calls until the result is right: calls fail while the server is down or being replaced.
    fn call_until_answered(&mut self) {
        let answered = json!({"step": "call", "said": [false, "42"]});
        let began = Instant::now();
        loop {
            let result = self.call();
            if result == answered {
                break;
            }
            assert!(began.elapsed() < GIVE_UP, "no right result in time: {result}");
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(self.call(), answered);
    }
}

impl Drop for ConnectedClient {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn clients_of_both_eras_survive_upgrades_and_downgrades_of_a_server() {
    let port = free_port();
    let mut server = Sdk::Old.start_server(port, &[]);
    let (_satellite, endpoint) = satellite(&[("eras", remote(port))]);
    let url = endpoint.replace("/mcp", "/i/eras/mcp");
    let mut clients: Vec<_> = Sdk::BOTH.into_iter().map(|sdk| ConnectedClient::connect(sdk, &url)).collect();
    clients.iter_mut().for_each(ConnectedClient::call_until_answered);
    let after: [(Sdk, &[&str]); 4] =
        [(Sdk::New, &[]), (Sdk::New, &["--only-new"]), (Sdk::Old, &[]), (Sdk::New, &["--only-new"])];
    for (sdk, flags) in after {
        drop(server);
        server = sdk.start_server(port, flags);
        clients.iter_mut().for_each(ConnectedClient::call_until_answered);
    }
}

/// The methods of the messages in a file with one message per line.
fn methods(log: &Path) -> Vec<String> {
    let written = std::fs::read_to_string(log).unwrap_or_default();
    let messages = written.lines().map_while(|line| serde_json::from_str::<Value>(line).ok());
    messages.map(|message| message["method"].as_str().unwrap_or("a response").to_owned()).collect()
}

/// The messages that a server receives until it can be called.
const START: [&str; 6] = [
    "initialize",
    "notifications/initialized",
    "tools/list",
    "resources/list",
    "resources/templates/list",
    "prompts/list",
];

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn stdio_servers_with_sessions_receive_no_messages_of_the_new_era() {
    let (old, new) = (Sdk::Old.command_line("servers"), Sdk::New.command_line("servers"));
    let time = installed("python3", "venv/bin/mcp-server-time");
    let everything = installed("node", EVERYTHING);
    let sum = json!({"a": 2, "b": 40});
    let servers = [
        ("old", old, "add", &sum),
        ("new", new, "add", &sum),
        ("time", vec![time], "get_current_time", &json!({"timezone": "UTC"})),
        ("everything", vec!["node".to_owned(), everything], "get-sum", &sum),
    ];
    let home = tempfile::tempdir().unwrap();
    let log = |name: &str| home.path().join(name);
    let written = servers.each_ref().map(|(name, words, ..)| {
        let command = format!("tee {:?} | exec {}", log(name), words.join(" "));
        (*name, process(&["sh".to_owned(), "-c".to_owned(), command]))
    });
    let (satellite, _) = satellite(&written);
    for (name, _, tool, arguments) in servers {
        satellite.call(name, tool, arguments);
        let is_there = || methods(&log(name)).iter().any(|method| method == "tools/call");
        wait_until("the call is in the log", is_there);
        let seen = methods(&log(name));
        assert_eq!(seen[..START.len()], START, "{name}");
        // It sends `list_changed` right after its start, so the lists are requested again.
        let asked_again = |method: &str| name == "everything" && (START.contains(&method) || method == "a response");
        let after_start: Vec<_> = seen[START.len()..].iter().filter(|method| !asked_again(method)).collect();
        assert_eq!(after_start, ["tools/call"], "{name}");
    }
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_remote_server_with_sessions_receives_no_additional_requests() {
    let port = free_port();
    let server = Sdk::Old.start_server(port, &[]);
    let (satellite, _) = satellite(&[("old", remote(port))]);
    satellite.call("old", "add", &json!({"a": 2, "b": 40}));
    assert_eq!(server.log().matches("\"POST /mcp ").count(), START.len() + 1, "{}", server.log());
}
