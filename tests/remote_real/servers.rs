//! The servers: how each is started, and what it offers.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::spec::RemoteTransport;
use serde_json::{Value, json};

use crate::port::free_port;
use crate::real_servers::installed;
use crate::support::GIVE_UP;

/// A server that can be started here.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) transport: RemoteTransport,
    command: Vec<String>,
    /// Where the port goes: an argument, or `PORT` in the environment.
    port: Port,
    path: &'static str,
    /// What must be among what it offers.
    pub(crate) offers: Offers,
    /// A call that may be repeated, and what it answers.
    pub(crate) repeatable: (&'static str, Value, &'static str),
    /// A call that may not, and what it answers.
    pub(crate) unrepeatable: (&'static str, Value, &'static str),
    /// What it writes when a session is ended by its client.
    pub(crate) farewell: &'static str,
    /// What it answers to a session that it does not know.
    pub(crate) stranger: &'static str,
}

#[derive(Debug, Clone, Copy)]
enum Port {
    Argument,
    Environment,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Offers {
    pub(crate) server: &'static str,
    pub(crate) tool: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) template: &'static str,
    pub(crate) prompt: &'static str,
}

/// Whether a server has a GET stream, by which its loss is noticed when nobody calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    There,
    Missing,
}

/// A file of this repository.
fn ours(file: &str) -> String {
    format!("{}/tests/servers/{file}", env!("CARGO_MANIFEST_DIR"))
}

impl Kind {
    fn everything(transport: RemoteTransport, stream: Stream) -> Self {
        let script = installed("node", "node_modules/@modelcontextprotocol/server-everything/dist/index.js");
        let (name, mode, path) = match transport {
            RemoteTransport::Http => ("everything-http", "streamableHttp", "/mcp"),
            RemoteTransport::Sse => ("everything-sse", "sse", "/sse"),
        };
        let mut command = vec!["node".to_owned()];
        if stream == Stream::Missing {
            command.extend(["--import".to_owned(), ours("without_get.mjs")]);
        }
        command.extend([script, mode.to_owned()]);
        Self {
            name,
            transport,
            command,
            port: Port::Environment,
            path,
            offers: Offers {
                server: "mcp-servers/everything",
                tool: "get-sum",
                resource: "demo://resource/static/document/features.md",
                template: "demo://resource/dynamic/text/{resourceId}",
                prompt: "args-prompt",
            },
            repeatable: ("get-sum", json!({"a": 2, "b": 40}), "The sum of 2 and 40 is 42."),
            unrepeatable: ("toggle-simulated-logging", json!({}), "Started simulated, random-leveled logging"),
            farewell: match transport {
                RemoteTransport::Http => "Received session termination request",
                RemoteTransport::Sse => "Client Disconnected",
            },
            stranger: "(HTTP 400): Bad Request: No valid session ID provided",
        }
    }

    /// server-everything over streamable HTTP.
    pub(crate) fn everything_http(stream: Stream) -> Self {
        Self::everything(RemoteTransport::Http, stream)
    }

    /// server-everything over HTTP+SSE.
    pub(crate) fn everything_sse() -> Self {
        Self::everything(RemoteTransport::Sse, Stream::There)
    }

    fn python(name: &'static str, script: &str, stream: Stream, flags: &[&str]) -> Self {
        let mut command = vec![installed("python3", "venv/bin/python"), "-B".to_owned(), ours(script)];
        command.extend(flags.iter().map(ToString::to_string));
        if stream == Stream::Missing {
            command.push("--no-get".to_owned());
        }
        Self {
            name,
            transport: RemoteTransport::Http,
            command,
            port: Port::Argument,
            path: "/mcp",
            offers: Offers {
                server: name,
                tool: "add",
                resource: "note://today",
                template: "note://{day}",
                prompt: "review",
            },
            repeatable: ("add", json!({"a": 2, "b": 40}), "42"),
            unrepeatable: ("greet", json!({"name": "Ada"}), "Hello, Ada!"),
            farewell: "\"DELETE /mcp HTTP/1.1\" 200",
            stranger: "(HTTP 404): Session not found",
        }
    }

    /// A server made with the Python SDK.
    pub(crate) fn python_sdk(stream: Stream, flags: &[&str]) -> Self {
        Self::python("python-sdk", "python_sdk.py", stream, flags)
    }

    /// A server made with fastmcp.
    pub(crate) fn fastmcp(stream: Stream, flags: &[&str]) -> Self {
        Self::python("fastmcp", "fastmcp_server.py", stream, flags)
    }
}

/// A server's process, or the place where it was.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    port: u16,
    child: Option<Child>,
    log: tempfile::NamedTempFile,
}

impl Server {
    /// Starts it, and waits until it listens.
    pub(crate) fn start(kind: Kind) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut server = Self { kind, port: free_port(), child: None, log };
        server.start_again();
        server
    }

    /// Starts it on the port that it had, and waits until it listens.
    pub(crate) fn start_again(&mut self) {
        assert!(self.child.is_none(), "it runs");
        let log = || File::options().append(true).open(self.log.path()).unwrap();
        let [program, arguments @ ..] = &*self.kind.command else { panic!("a command has a program") };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(log()).stderr(log());
        match self.kind.port {
            Port::Argument => command.arg(self.port.to_string()),
            Port::Environment => command.env("PORT", self.port.to_string()),
        };
        let child = self.child.insert(command.spawn().unwrap());
        let given_up = Instant::now() + GIVE_UP;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            let log = || std::fs::read_to_string(self.log.path()).unwrap_or_default();
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{} ended before it listened: {status}\n{}", self.kind.name, log());
            }
            assert!(Instant::now() < given_up, "{} does not listen:\n{}", self.kind.name, log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// SIGKILL, and gone; and no connection to it is open on our side. A call on one that nobody has looked at yet would be
    /// sent, for all that we know, and not be repeated.
    pub(crate) fn kill(&mut self) {
        self.end();
        let given_up = Instant::now() + GIVE_UP;
        while self.is_connected() {
            assert!(Instant::now() < given_up, "connections to {} are left", self.kind.name);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Whether a connection to it is open on this side: `ESTABLISHED`, or `CLOSE_WAIT` where only the other side is closed.
    fn is_connected(&self) -> bool {
        let to = format!(":{:04X}", self.port);
        let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_ascii_whitespace().skip(2);
            let (remote, state) = (fields.next().unwrap(), fields.next().unwrap());
            remote.ends_with(&to) && ["01", "08"].contains(&state)
        })
    }

    /// Waits until it has written this to its log.
    pub(crate) fn logs(&self, text: &str) {
        let given_up = Instant::now() + GIVE_UP;
        loop {
            let log = std::fs::read_to_string(self.log.path()).unwrap();
            if log.contains(text) {
                return;
            }
            assert!(Instant::now() < given_up, "`{text}` is not in the log of {}:\n{log}", self.kind.name);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}{}", self.port, self.kind.path)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
