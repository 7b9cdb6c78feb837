//! An endpoint in front of scripted servers in this process: each lists what a test gives it.

use std::net::SocketAddr;
use std::sync::Arc;

use mcp_satellite::config::GatewayLimits;
use mcp_satellite::gateway::access::Access;
use mcp_satellite::gateway::audience::GatewayAudience;
use mcp_satellite::gateway::dispatch::EndpointDispatcher;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite::gateway::{self, Gateway, GatewaySettings};
use serde_json::{Value, json};
use testkit::scripted_servers::{GIVE_UP, Lists, ScriptedServers};
use tokio::time::timeout;

use super::client::{Client, notification, request};
use super::fake;

/// The lists of a server whose content does not matter.
pub(crate) const PLAIN: Lists =
    Lists { tools: r#"[{"name":"read","x":1e400}]"#, resources: "", templates: "", prompts: "" };

/// An endpoint in front of servers of Alice in the team acme, and of Bob's server `secret`.
pub(crate) struct ScriptedEndpoint {
    pub servers: ScriptedServers,
    pub gateway: Gateway,
    pub address: SocketAddr,
}

impl ScriptedEndpoint {
    pub(crate) async fn with(servers: &[(&str, &str, Lists)]) -> Self {
        Self::limited(servers, |_| {}).await
    }

    /// As `with`, with other limits.
    pub(crate) async fn limited(servers: &[(&str, &str, Lists)], set: impl FnOnce(&mut GatewayLimits)) -> Self {
        let sessions = Arc::new(Sessions::new());
        let audience = Arc::new(GatewayAudience::new(sessions.clone()));
        let servers = ScriptedServers::before(audience.clone(), servers).await;
        let mut plan = fake::plan();
        plan.users.iter_mut().for_each(|user| user.team = "acme".into());
        set(&mut plan.limits);
        let listener = gateway::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let settings = GatewaySettings::new("test", &plan, address);
        let access = Arc::new(Access::new(&plan).unwrap());
        let dispatcher = Arc::new(EndpointDispatcher::new(&servers.runtime, audience));
        let gateway = Gateway::start(listener, settings, access, dispatcher, sessions, Box::new(drop)).unwrap();
        Self { servers, gateway, address }
    }

    /// Connects a client of Alice, with the capability `sampling`, to this path.
    pub(crate) async fn client(&self, path: &str) -> Caller {
        Caller::connect(self.address, path, "alice-token").await
    }

    pub(crate) async fn end(self) {
        self.gateway.drain().await;
        self.servers.end().await;
    }
}

/// A client that sends one request at a time.
pub(crate) struct Caller {
    pub client: Client,
    /// The result of `initialize`.
    pub welcome: Value,
    last_id: u64,
}

impl Caller {
    pub(crate) async fn connect(address: SocketAddr, path: &str, token: &str) -> Self {
        let mut client = Client::connect(address).await;
        (client.path, client.token) = (path.to_owned(), Some(token.to_owned()));
        let info = json!({"name": "raw", "version": "1"});
        let params = json!({"protocolVersion": "2025-11-25", "capabilities": {"sampling": {}}, "clientInfo": info});
        let answer = client.post(&request(0, "initialize", params)).await;
        client.session = answer.head.header("mcp-session-id").map(str::to_owned);
        assert!(client.session.is_some(), "{answer:?}");
        let welcome = answer.json()["result"].clone();
        let done = client.post(&notification("notifications/initialized", json!({}))).await;
        assert_eq!(done.head.status, 202);
        Self { client, welcome, last_id: 0 }
    }

    /// Builds a request with the next id.
    pub(crate) fn next(&mut self, method: &str, params: Value) -> Value {
        self.last_id += 1;
        request(self.last_id, method, params)
    }

    /// The body of a response, as text: `Value` cannot represent everything it may contain.
    pub(crate) async fn request_text(&mut self, method: &str, params: &str) -> String {
        self.last_id += 1;
        let id = self.last_id;
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#);
        let answer = self.client.ask("POST", &[], &body).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
        answer.body
    }

    pub(crate) async fn request(&mut self, method: &str, params: Value) -> Value {
        let answer: Value = serde_json::from_str(&self.request_text(method, &params.to_string()).await).unwrap();
        assert_eq!(answer["id"], self.last_id, "{answer}");
        answer
    }

    pub(crate) async fn call_tool(&mut self, tool: &str, arguments: Value) -> Value {
        let answer = self.request("tools/call", json!({"name": tool, "arguments": arguments})).await;
        assert!(answer["result"].is_object(), "{answer}");
        answer["result"].clone()
    }

    /// Calls a tool that must fail: its text for a model and its data for a program.
    pub(crate) async fn call_failing_tool(&mut self, tool: &str, arguments: Value) -> (String, Value) {
        let result = self.call_tool(tool, arguments).await;
        assert_eq!(result["isError"], true, "{result}");
        let text = result["content"][0]["text"].as_str().unwrap().to_owned();
        (text, result["_meta"]["mcp-satellite/error"].clone())
    }

    pub(crate) async fn names(&mut self, method: &str, list: &str, key: &str) -> Vec<String> {
        let body = self.request_text(method, "{}").await;
        // `Value` cannot represent every definition, so the names are read from the text.
        let list_of = format!("\"{list}\":[");
        assert!(body.contains(&list_of), "{body}");
        let (start, mut rest) = (format!("\"{key}\":\""), &body[..]);
        let mut names = Vec::new();
        while let Some(at) = rest.find(&start) {
            rest = &rest[at + start.len()..];
            names.push(rest[..rest.find('"').unwrap()].to_owned());
        }
        names
    }

    /// The methods of the messages on a GET stream, up to this one.
    pub(crate) async fn methods_until(&mut self, method: &str) -> Vec<String> {
        let mut methods = Vec::new();
        loop {
            let event = timeout(GIVE_UP, self.client.event()).await.unwrap().expect("the stream ended");
            if event.data.is_empty() {
                continue;
            }
            let received_method = event.json()["method"].as_str().unwrap().to_owned();
            methods.push(received_method);
            if methods.last().is_some_and(|last| last == method) {
                return methods;
            }
        }
    }

    /// The same session on another connection with an open GET stream.
    pub(crate) async fn listening(&self) -> Self {
        let mut client = self.client.second_connection().await;
        client.path.clone_from(&self.client.path);
        client.open("GET", &[], "").await;
        Self { client, welcome: Value::Null, last_id: 0 }
    }
}
