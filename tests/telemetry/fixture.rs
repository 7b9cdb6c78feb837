//! A running satellite with one server, and a small client of its endpoint.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;

use serde_json::{Value, json};
use testkit::home::{Home, Satellite};
use testkit::port::free_port;

use crate::SATELLITE;

/// Token of the user.
pub(crate) const TOKEN: &str = "token-of-alice-that-is-long";

/// Response of an HTTP server.
#[derive(Debug)]
pub(crate) struct HttpResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
    /// Port of the client's end of the connection.
    pub(crate) port: u16,
}

/// Sends a request on a connection of its own.
#[track_caller]
pub(crate) fn exchange(address: &str, start: &str, headers: &str, body: &str) -> HttpResponse {
    let mut stream = TcpStream::connect(address).unwrap();
    let port = stream.local_addr().unwrap().port();
    let host = if headers.contains("Host:") { String::new() } else { format!("Host: {address}\r\n") };
    let length = body.len();
    write!(stream, "{start} HTTP/1.1\r\n{host}Connection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    HttpResponse { status, head: head.to_owned(), body: body.to_owned(), port }
}

/// A home whose satellite has one server, whose input is copied to a file.
pub(crate) struct Traced {
    pub(crate) home: Home,
    pub(crate) metrics_address: String,
    config: PathBuf,
}

impl Traced {
    /// `telemetry` are further lines of `[telemetry]`, `flags` those of the simulated server.
    pub(crate) fn new(telemetry: &str, flags: &str) -> Self {
        let home = Home::new(SATELLITE);
        let metrics_address = format!("127.0.0.1:{}", free_port());
        std::fs::write(home.path().join("token"), TOKEN).unwrap();
        let directory = home.path().display();
        let server = format!(
            "command = \"sh\"\nargs = [\"-c\", \"tee -a {directory}/input | exec SATELLITE sim-server --name {} {flags}\"]",
            home.mark()
        );
        let text = format!(
            "[gateway]\nlisten = \"127.0.0.1:0\"\n[telemetry]\nlisten = \"{metrics_address}\"\n{telemetry}\n[[teams]]\n\
             id = \"acme\"\nslug = \"acme\"\n[[teams.users]]\nid = \"alice\"\nslug = \"alice\"\n\
             token = \"file:{directory}/token\"\n[[teams.installations]]\nid = \"files\"\nserver = \"files\"\n{server}\n"
        );
        let config = home.write("satellite.toml", &text);
        Self { home, metrics_address, config }
    }

    /// Does not copy the input of the server, so that its end is that of the whole process.
    pub(crate) fn without_copy(self) -> Self {
        let text = std::fs::read_to_string(&self.config).unwrap();
        let copy = format!("tee -a {}/input | ", self.home.path().display());
        assert!(text.contains(&copy), "{text}");
        std::fs::write(&self.config, text.replace(&copy, "")).unwrap();
        self
    }

    pub(crate) fn with_env(mut self, variables: &[(&str, &str)]) -> Self {
        self.home.env.extend(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        self
    }

    /// Adds lines to the configuration, which ends with the installation.
    pub(crate) fn append(&mut self, lines: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        std::fs::write(&self.config, text + lines).unwrap();
    }

    /// Starts the satellite and waits for its server.
    #[track_caller]
    pub(crate) fn run(&self) -> (Satellite<'_>, Client) {
        let satellite = self.home.run(&["--config", self.config.to_str().unwrap(), "--log-format", "json"]);
        let greeted = satellite.process.wait_stdout(|text| text.contains("MCP: "));
        let url = greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
        let address = url.strip_prefix("http://").unwrap().split('/').next().unwrap().to_owned();
        self.home.wait_online("files");
        (satellite, Client { address, session: None, id: 0, port: 0 })
    }

    /// Returns the text of `/metrics`.
    #[track_caller]
    pub(crate) fn scrape(&self) -> String {
        let response = exchange(&self.metrics_address, "GET /metrics", "", "");
        assert_eq!(response.status, 200, "{response:?}");
        assert!(
            response.head.to_ascii_lowercase().contains("content-type: application/openmetrics-text; version=1.0.0")
        );
        response.body
    }

    /// Returns the value of a sample; 0 if there is none.
    #[track_caller]
    pub(crate) fn sample(&self, start: &str) -> f64 {
        sample(&self.scrape(), start)
    }

    /// Returns the messages that the server has received.
    pub(crate) fn input(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.home.path().join("input")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Returns the value of the sample whose line begins like this; 0 if there is none.
pub(crate) fn sample(text: &str, start: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(start)?.strip_prefix(' '));
    line.map_or(0.0, |rest| rest.split_whitespace().next().unwrap().parse().unwrap())
}

/// A client of the server's own endpoint.
pub(crate) struct Client {
    pub(crate) address: String,
    session: Option<String>,
    id: u64,
    /// Port of the connection of the last request.
    pub(crate) port: u16,
}

impl Client {
    #[track_caller]
    fn post(&mut self, headers: &str, method: &str, params: &Value) -> HttpResponse {
        self.id += 1;
        let message = json!({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params}).to_string();
        let session =
            self.session.as_ref().map_or_else(String::new, |session| format!("Mcp-Session-Id: {session}\r\n"));
        let headers = format!(
            "Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\n{session}{headers}"
        );
        let response = exchange(&self.address, "POST /i/files/mcp", &headers, &message);
        self.port = response.port;
        response
    }

    /// Begins a session and returns its id.
    #[track_caller]
    pub(crate) fn initialize(&mut self) -> String {
        let params = json!({
            "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "small", "version": "1"}
        });
        let response = self.post("", "initialize", &params);
        assert_eq!(response.status, 200, "{response:?}");
        let is_id = |line: &&str| line.to_ascii_lowercase().starts_with("mcp-session-id:");
        let line = response.head.lines().find(is_id).unwrap();
        let session = line.split_once(':').unwrap().1.trim().to_owned();
        self.session = Some(session.clone());
        session
    }

    /// Ends the session.
    #[track_caller]
    pub(crate) fn end_session(&mut self) {
        let session = self.session.take().unwrap();
        let headers = format!("Authorization: Bearer {TOKEN}\r\nMcp-Session-Id: {session}\r\n");
        assert_eq!(exchange(&self.address, "DELETE /i/files/mcp", &headers, "").status, 204);
    }

    /// Calls a method in the session and returns the response.
    #[track_caller]
    pub(crate) fn request(&mut self, method: &str, params: &Value) -> Value {
        let response = self.post("", method, params);
        serde_json::from_str(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
    }

    /// Calls a tool in the session.
    #[track_caller]
    pub(crate) fn call(&mut self, tool: &str, arguments: &Value) -> Value {
        self.request("tools/call", &json!({"name": tool, "arguments": arguments}))
    }

    /// Calls a tool without a session.
    #[track_caller]
    pub(crate) fn call_stateless(&mut self, tool: &str, arguments: &Value, trace: Option<&str>) -> Value {
        let name = format!("Mcp-Name: {tool}\r\n");
        self.request_stateless("tools/call", &name, json!({"name": tool, "arguments": arguments}), trace)
    }

    /// Sends a request without a session. `headers` are further headers of the method.
    #[track_caller]
    pub(crate) fn request_stateless(
        &mut self,
        method: &str,
        headers: &str,
        mut params: Value,
        trace: Option<&str>,
    ) -> Value {
        let mut meta = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "small", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        if let Some(trace) = trace {
            meta["traceparent"] = trace.into();
        }
        params["_meta"] = meta;
        let headers = format!("Mcp-Protocol-Version: 2026-07-28\r\nMcp-Method: {method}\r\n{headers}");
        let response = self.post(&headers, method, &params);
        serde_json::from_str(&response.body).unwrap_or_else(|error| panic!("{error}: {response:?}"))
    }
}
