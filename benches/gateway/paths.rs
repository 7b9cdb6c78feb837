//! The measured paths: a gateway, and the requests of its clients.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use crate::common::selected;
use crate::endpoint::http::McpRequest;
use crate::endpoint::load::{LoadTarget, NUMBER};
use crate::endpoint::processes::{self, GatewayProcess, MCP_PROXY, SERVER, SatelliteOptions, ServerFleet};
use crate::endpoint::role;
use crate::{floor, sdk};

/// Number of bytes of the arguments of a call.
const ARGUMENTS_LEN: usize = 110;

/// First members of the parameters of a stateless request.
const STATELESS_META: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"bench","version":"0"},"io.modelcontextprotocol/clientCapabilities":{}},"#;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PathKind {
    Floor,
    Instance,
    InstanceWithoutJournal,
    /// Without metrics and traces.
    Unobserved,
    /// With a tenth of the traces exported.
    Traced,
    Execute,
    Flat,
    StatelessInstance,
    StatelessExecute,
    Rmcp,
    McpProxy,
}

impl PathKind {
    const ALL: [Self; 11] = [
        Self::Floor,
        Self::Instance,
        Self::InstanceWithoutJournal,
        Self::Unobserved,
        Self::Traced,
        Self::Execute,
        Self::Flat,
        Self::StatelessInstance,
        Self::StatelessExecute,
        Self::Rmcp,
        Self::McpProxy,
    ];

    /// Name in the variable `BENCH_PATHS`.
    fn key(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Instance => "instance",
            Self::InstanceWithoutJournal => "no-journal",
            Self::Unobserved => "unobserved",
            Self::Traced => "traced",
            Self::Execute => "execute",
            Self::Flat => "flat",
            Self::StatelessInstance => "stateless-instance",
            Self::StatelessExecute => "stateless-execute",
            Self::Rmcp => "rmcp",
            Self::McpProxy => "mcp-proxy",
        }
    }

    /// Name in the tables.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Instance => "`/i/{server}/mcp`",
            Self::InstanceWithoutJournal => "`/i/{server}/mcp`, no journal",
            Self::Unobserved => "`/i/{server}/mcp`, no telemetry",
            Self::Traced => "`/i/{server}/mcp`, 10 % traced",
            Self::Execute => "`execute_mcp_tool`",
            Self::Flat => "flat mode",
            Self::StatelessInstance => "`/i/{server}/mcp`, stateless",
            Self::StatelessExecute => "`execute_mcp_tool`, stateless",
            Self::Rmcp => "rmcp",
            Self::McpProxy => MCP_PROXY,
        }
    }

    /// Starts the gateway. Returns `None` if it is not installed.
    fn start(self) -> Option<GatewayProcess> {
        let satellite = |options| Some(processes::satellite(ServerFleet::ONE, options));
        let with_variable = |name: &str, value: &str| {
            let mut command = Command::new(processes::SATELLITE);
            command.env(name, value);
            Some(processes::satellite_of(command, ServerFleet::ONE, SatelliteOptions::default()))
        };
        match self {
            Self::Floor => Some(processes::gateway(role(floor::ROLE, &[]))),
            Self::Rmcp => Some(processes::gateway(role(sdk::ROLE, &[]))),
            Self::McpProxy => processes::mcp_proxy(ServerFleet::ONE),
            Self::InstanceWithoutJournal => {
                satellite(SatelliteOptions { has_journal: false, ..SatelliteOptions::default() })
            }
            Self::Unobserved => with_variable("OTEL_SDK_DISABLED", "true"),
            Self::Traced => with_variable("OTEL_EXPORTER_OTLP_ENDPOINT", &start_receiver()),
            Self::Instance | Self::Execute | Self::Flat | Self::StatelessInstance | Self::StatelessExecute => {
                satellite(SatelliteOptions::default())
            }
        }
    }

    pub(crate) fn target(self, address: SocketAddr) -> LoadTarget {
        let instance = format!("/i/{SERVER}/mcp");
        let path = match self {
            Self::Instance
            | Self::InstanceWithoutJournal
            | Self::Unobserved
            | Self::Traced
            | Self::StatelessInstance => &instance,
            Self::Execute | Self::StatelessExecute | Self::Rmcp => "/mcp",
            Self::Flat => "/mcp?mode=flat",
            Self::Floor | Self::McpProxy => "/",
        };
        let text = format!("{NUMBER}{}", "x".repeat(ARGUMENTS_LEN - NUMBER.len() - r#"{"text":""}"#.len()));
        LoadTarget {
            address,
            path: path.to_owned(),
            has_session: !self.is_stateless() && self != Self::Floor,
            call: self.call("echo", NUMBER, &format!(r#"{{"text":"{text}"}}"#)),
            reads: self.call("reads", "1", "{}"),
        }
    }

    fn is_stateless(self) -> bool {
        matches!(self, Self::StatelessInstance | Self::StatelessExecute)
    }

    /// Returns the name of the called tool, and the path of the server's tool if the called one executes it.
    fn call_name(self, tool: &str) -> (String, Option<String>) {
        match self {
            Self::Execute | Self::StatelessExecute => ("execute_mcp_tool".to_owned(), Some(format!("{SERVER}:{tool}"))),
            Self::Flat | Self::McpProxy => (format!("{SERVER}__{tool}"), None),
            _ => (tool.to_owned(), None),
        }
    }

    /// Returns the call of a tool of the server.
    fn call(self, tool: &str, id: &str, arguments: &str) -> McpRequest {
        let (name, tool_path) = self.call_name(tool);
        let arguments = match tool_path {
            Some(path) => format!(r#"{{"tool_path":"{path}","arguments":{arguments}}}"#),
            None => arguments.to_owned(),
        };
        let (headers, meta) = if self.is_stateless() {
            let headers = format!("mcp-protocol-version: 2026-07-28\r\nmcp-method: tools/call\r\nmcp-name: {name}\r\n");
            (headers, STATELESS_META)
        } else {
            (String::new(), "")
        };
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{{meta}"name":"{name}","arguments":{arguments}}}}}"#
        );
        McpRequest { headers, body }
    }
}

/// Starts a receiver of telemetry that discards everything, and returns its URL.
fn start_receiver() -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || discard(stream));
        }
    });
    url
}

fn discard(mut stream: TcpStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let (mut length, mut line) = (0, String::new());
        while reader.read_line(&mut line).unwrap_or_default() > 0 && line != "\r\n" {
            let header = line.to_ascii_lowercase();
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            line.clear();
        }
        let mut body = vec![0; length];
        let answered = reader
            .read_exact(&mut body)
            .and_then(|()| stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
        // The satellite has closed the connection.
        if line.is_empty() || answered.is_err() {
            return;
        }
    }
}

pub(crate) struct CallPath {
    pub(crate) kind: PathKind,
    pub(crate) gateway: GatewayProcess,
    pub(crate) target: LoadTarget,
}

/// Starts all gateways, or those of `BENCH_PATHS`, each in its own process.
pub(crate) fn open() -> Vec<CallPath> {
    let names: Option<Vec<String>> = selected("BENCH_PATHS");
    let is_selected = |kind: &PathKind| names.as_ref().is_none_or(|names| names.iter().any(|name| name == kind.key()));
    let open = |kind: PathKind| {
        let gateway = kind.start()?;
        let target = kind.target(gateway.address);
        Some(CallPath { kind, gateway, target })
    };
    PathKind::ALL.into_iter().filter(is_selected).filter_map(open).collect()
}
