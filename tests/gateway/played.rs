//! The endpoint in front of servers that are played in this process: each lists what a test says.

use std::net::SocketAddr;
use std::sync::Arc;

use mcp_satellite::config::GatewayLimits;
use mcp_satellite::gateway::access::Access;
use mcp_satellite::gateway::behind::EndpointDispatcher;
use mcp_satellite::gateway::room::GatewayAudience;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite::gateway::{self, Gateway, GatewaySettings};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::client::{Client, notification, request};
use super::fake;
use super::house::{GIVE_UP, House, Lists};

/// What a server that matters to nobody lists.
pub(crate) const PLAIN: Lists =
    Lists { tools: r#"[{"name":"read","x":1e400}]"#, resources: "", templates: "", prompts: "" };

/// Alice's servers of acme behind an endpoint, and Bob's one that is called `secret`.
pub(crate) struct Played {
    pub house: House,
    pub gateway: Gateway,
    pub address: SocketAddr,
}

impl Played {
    pub(crate) async fn with(servers: &[(&str, &str, Lists)]) -> Self {
        Self::limited(servers, |_| {}).await
    }

    /// The same, with other limits.
    pub(crate) async fn limited(servers: &[(&str, &str, Lists)], set: impl FnOnce(&mut GatewayLimits)) -> Self {
        let sessions = Arc::new(Sessions::new());
        let rooms = Arc::new(GatewayAudience::new(sessions.clone()));
        let house = House::before(rooms.clone(), servers).await;
        let mut plan = fake::plan();
        plan.users.iter_mut().for_each(|user| user.team = "acme".into());
        set(&mut plan.limits);
        let listener = gateway::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let settings = GatewaySettings::new("test", &plan, address);
        let access = Arc::new(Access::new(&plan).unwrap());
        let faces = Arc::new(EndpointDispatcher::new(&house.runtime, rooms));
        let gateway = Gateway::start(listener, settings, access, faces, sessions, Box::new(drop)).unwrap();
        Self { house, gateway, address }
    }

    /// A client of Alice's at this path, which answers sampling.
    pub(crate) async fn client(&self, path: &str) -> Caller {
        Caller::connect(self.address, path, "alice-token").await
    }

    pub(crate) async fn end(self) {
        self.gateway.drain().await;
        self.house.end().await;
    }
}

/// A client that asks one thing after another.
pub(crate) struct Caller {
    pub client: Client,
    /// What it was told in `initialize`.
    pub welcome: Value,
    asked: u64,
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
        Self { client, welcome, asked: 0 }
    }

    /// A request under the next id, to be sent.
    pub(crate) fn next(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        request(self.asked, method, params)
    }

    /// The whole answer to a request, as text: it may hold what no value of ours can.
    pub(crate) async fn text(&mut self, method: &str, params: &str) -> String {
        self.asked += 1;
        let id = self.asked;
        let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#);
        let answer = self.client.ask("POST", &[], &body).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
        answer.body
    }

    pub(crate) async fn asks(&mut self, method: &str, params: Value) -> Value {
        let answer: Value = serde_json::from_str(&self.text(method, &params.to_string()).await).unwrap();
        assert_eq!(answer["id"], self.asked, "{answer}");
        answer
    }

    /// The result of a tool.
    pub(crate) async fn calls(&mut self, tool: &str, arguments: Value) -> Value {
        let answer = self.asks("tools/call", json!({"name": tool, "arguments": arguments})).await;
        assert!(answer["result"].is_object(), "{answer}");
        answer["result"].clone()
    }

    /// What a tool that fails says to a model, and what it says to a program.
    pub(crate) async fn fails(&mut self, tool: &str, arguments: Value) -> (String, Value) {
        let result = self.calls(tool, arguments).await;
        assert_eq!(result["isError"], true, "{result}");
        let text = result["content"][0]["text"].as_str().unwrap().to_owned();
        (text, result["_meta"]["mcp-satellite/error"].clone())
    }

    /// The names in a list.
    pub(crate) async fn names(&mut self, method: &str, list: &str, key: &str) -> Vec<String> {
        let body = self.text(method, "{}").await;
        // A definition may hold what no value can: names are read alone.
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

    /// The methods that are heard on a GET, until this one.
    pub(crate) async fn hears_until(&mut self, method: &str) -> Vec<String> {
        let mut heard = Vec::new();
        loop {
            let event = timeout(GIVE_UP, self.client.event()).await.unwrap().expect("the stream ended");
            if event.data.is_empty() {
                continue;
            }
            let said = event.json()["method"].as_str().unwrap().to_owned();
            heard.push(said);
            if heard.last().is_some_and(|last| last == method) {
                return heard;
            }
        }
    }

    /// The same session over another connection, whose GET is open.
    pub(crate) async fn listening(&self) -> Self {
        let mut client = self.client.again().await;
        client.path.clone_from(&self.client.path);
        client.open("GET", &[], "").await;
        Self { client, welcome: Value::Null, asked: 0 }
    }
}
