//! The real servers: their commands and their catalogues.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::spec::RemoteTransport;
use serde_json::{Value, json};
use testkit::installed::installed;
use testkit::port::free_port;
use testkit::wait::GIVE_UP;

/// A server to start.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) transport: RemoteTransport,
    command: Vec<String>,
    /// How the port is passed: as an argument or as `PORT` in the environment.
    port: Port,
    path: &'static str,
    /// Entries that the catalogue must contain.
    pub(crate) offers: Offers,
    /// A repeatable call and its result.
    pub(crate) repeatable: (&'static str, Value, &'static str),
    /// An unrepeatable call and the start of its result.
    pub(crate) unrepeatable: (&'static str, Value, &'static str),
    /// The server's log line when the client ends a session.
    pub(crate) session_end_log: &'static str,
    /// The error for an unknown session.
    pub(crate) unknown_session: &'static str,
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

/// Whether a server has a GET stream, which detects its loss without a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Present,
    Missing,
}

/// Returns the path of a file in `tests/servers`.
fn test_file(file: &str) -> String {
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
            command.extend(["--import".to_owned(), test_file("without_get.mjs")]);
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
            session_end_log: match transport {
                RemoteTransport::Http => "Received session termination request",
                RemoteTransport::Sse => "Client Disconnected",
            },
            unknown_session: "(HTTP 400): Bad Request: No valid session ID provided",
        }
    }

    /// Returns server-everything over streamable HTTP.
    pub(crate) fn everything_http(stream: Stream) -> Self {
        Self::everything(RemoteTransport::Http, stream)
    }

    /// Returns server-everything over HTTP+SSE.
    pub(crate) fn everything_sse() -> Self {
        Self::everything(RemoteTransport::Sse, Stream::Present)
    }

    fn python(name: &'static str, script: &str, stream: Stream, flags: &[&str]) -> Self {
        let mut command = vec![installed("python3", "venv/bin/python"), "-B".to_owned(), test_file(script)];
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
            session_end_log: "\"DELETE /mcp HTTP/1.1\" 200",
            unknown_session: "(HTTP 404): Session not found",
        }
    }

    pub(crate) fn python_sdk(stream: Stream, flags: &[&str]) -> Self {
        Self::python("python-sdk", "python_sdk.py", stream, flags)
    }

    /// Returns a server of fastmcp.
    pub(crate) fn fastmcp(stream: Stream, flags: &[&str]) -> Self {
        Self::python("fastmcp", "fastmcp_server.py", stream, flags)
    }
}

/// A server with its port; the process may have ended.
pub(crate) struct Server {
    pub(crate) kind: Kind,
    port: u16,
    child: Option<Child>,
    log: tempfile::NamedTempFile,
}

impl Server {
    /// Starts a server and waits until it listens.
    pub(crate) fn start(kind: Kind) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut server = Self { kind, port: free_port(), child: None, log };
        server.start_again();
        server
    }

    /// Starts the server again on the same port and waits until it listens.
    pub(crate) fn start_again(&mut self) {
        assert!(self.child.is_none(), "the server already runs");
        let log = || File::options().append(true).open(self.log.path()).unwrap();
        let [program, arguments @ ..] = &*self.kind.command else { panic!("the command is empty") };
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

    /// Kills the server and waits until no connection to it is open on this side. A call on such a connection would
    /// count as sent and would not be repeated.
    pub(crate) fn kill(&mut self) {
        self.end();
        let given_up = Instant::now() + GIVE_UP;
        while self.is_connected() {
            assert!(Instant::now() < given_up, "connections to {} are still open", self.kind.name);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Returns whether a connection to the server is `ESTABLISHED` or in `CLOSE_WAIT` on this side.
    fn is_connected(&self) -> bool {
        let to = format!(":{:04X}", self.port);
        let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        table.lines().skip(1).any(|line| {
            let mut fields = line.split_ascii_whitespace().skip(2);
            let (remote, state) = (fields.next().unwrap(), fields.next().unwrap());
            remote.ends_with(&to) && ["01", "08"].contains(&state)
        })
    }

    /// Waits until the server's log contains a text.
    pub(crate) fn wait_log(&self, text: &str) {
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
