//! Latency of tool discovery with 10,000 tools in 100 servers, in process and over HTTP. The queries are the labelled
//! ones of `tests/fixtures/search` and a misspelling of each. The first query is measured separately, because it reads
//! all catalogues.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite::config::{EndpointAuth, GatewayPlan, GatewayUser};
use mcp_satellite::gateway::access::Access;
use mcp_satellite::gateway::audience::GatewayAudience;
use mcp_satellite::gateway::dispatch::EndpointDispatcher;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite::gateway::{self, Gateway, GatewaySettings};
use serde_json::{Value, json};
use testkit::scripted_servers::{Lists, ScriptedServers};

use crate::common::{self, BenchReport, format_duration, quantile};
use crate::endpoint::http::McpClient;

const SERVERS: usize = 100;
const TOOLS_OF_EACH: usize = 100;
const ROUNDS: usize = 20;

fn fixture(name: &str) -> String {
    std::fs::read_to_string(format!("{}/tests/fixtures/search/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Returns servers with the tools of the fixture's servers and variants of them with other names and descriptions.
fn servers() -> Vec<(String, String, Lists)> {
    let known: BTreeMap<String, Vec<Value>> = serde_json::from_str(&fixture("tools.json")).unwrap();
    let known: Vec<_> = known.into_iter().collect();
    let names = known.iter().flat_map(|(_, tools)| tools).map(|tool| tool["name"].as_str().unwrap());
    let words: Vec<&str> = names.flat_map(|name| name.split(['_', '-'])).collect();
    let text = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
    let server = |nth: usize| {
        let (name, tools) = &known[nth % known.len()];
        let tool = |at: usize| {
            let (tool, word) = (&tools[at % tools.len()], words[(nth * 31 + at * 7) % words.len()]);
            let (name, description) = (tool["name"].as_str().unwrap(), tool["description"].as_str().unwrap());
            let (name, description) = if at < tools.len() {
                (name.to_owned(), description.to_owned())
            } else {
                (format!("{name}_{word}_{at}"), format!("{description} For {word}."))
            };
            json!({"name": name, "description": description, "inputSchema": tool["inputSchema"]})
        };
        let tools: Vec<Value> = (0..TOOLS_OF_EACH).map(tool).collect();
        let lists = Lists { tools: text(Value::from(tools).to_string()), ..Lists::default() };
        (format!("{name}-{nth}"), format!("i{nth}"), lists)
    };
    (0..SERVERS).map(server).collect()
}

fn misspelled(query: &str) -> String {
    let longest = query.split(' ').max_by_key(|word| word.len()).unwrap();
    let mut letters: Vec<char> = longest.chars().collect();
    let at = (1..letters.len() - 1).find(|at| letters[*at] != letters[*at + 1]).unwrap_or(0);
    letters.swap(at, at + 1);
    query.replacen(longest, &letters.into_iter().collect::<String>(), 1)
}

fn queries() -> Vec<String> {
    let text = fixture("queries.toml");
    let lines = text.lines().filter_map(|line| line.strip_prefix("text = ")).map(|line| line.trim_matches('"'));
    lines.flat_map(|query| [query.to_owned(), misspelled(query)]).collect()
}

async fn open() -> (ScriptedServers, Gateway, SocketAddr) {
    let servers = servers();
    let servers: Vec<_> = servers.iter().map(|(name, id, lists)| (name.as_str(), id.as_str(), *lists)).collect();
    let sessions = Arc::new(Sessions::new());
    let audience = Arc::new(GatewayAudience::new(sessions.clone()));
    let servers = ScriptedServers::before(audience.clone(), &servers).await;
    let user = GatewayUser {
        team: "acme".into(),
        team_slug: "acme".into(),
        user: "alice".into(),
        slug: "alice".into(),
        tokens: Vec::new(),
        has_stored_token: false,
        flat: false,
    };
    let mut plan = GatewayPlan { auth: EndpointAuth::None(None), users: vec![user], ..GatewayPlan::default() };
    plan.limits.requests_per_second = 0;
    let listener = gateway::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let settings = GatewaySettings::new("bench", &plan, address);
    let access = Arc::new(Access::new(&plan).unwrap());
    let dispatcher = Arc::new(EndpointDispatcher::new(&servers.runtime, audience));
    let gateway = Gateway::start(listener, settings, access, dispatcher, sessions, Box::new(drop)).unwrap();
    (servers, gateway, address)
}

/// Returns the CPU time that this thread has used so far.
fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap()
}

/// Returns the duration of the first query, and the CPU time of its longest poll.
async fn first_query() -> (Duration, Duration) {
    let (servers, _gateway, _) = open().await;
    let query = async {
        let began = Instant::now();
        servers.call_text("discover_mcp_tools", r#"{"query":"read a file"}"#).await;
        began.elapsed()
    };
    let mut query = std::pin::pin!(query);
    let (mut longest, mut last) = (Duration::ZERO, thread_cpu_time());
    loop {
        let took = tokio::select! {
            biased;
            took = &mut query => Some(took),
            () = tokio::task::yield_now() => None,
        };
        let now = thread_cpu_time();
        (longest, last) = (longest.max(now.saturating_sub(last)), now);
        if let Some(took) = took {
            return (took, longest);
        }
    }
}

async fn later_queries() -> (Vec<Duration>, Vec<Duration>) {
    let (servers, _gateway, address) = open().await;
    // The requests of this client block the thread. The gateway runs on other threads.
    let mut client = McpClient::open_session(address, "/mcp");
    let (mut in_process, mut over_http) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for query in queries() {
            let arguments = json!({"query": query}).to_string();
            let began = Instant::now();
            servers.call_text("discover_mcp_tools", &arguments).await;
            in_process.push(began.elapsed());
            let params = json!({"name": "discover_mcp_tools", "arguments": {"query": query}});
            let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
            let began = Instant::now();
            client.request(&request.as_str().into());
            over_http.push(began.elapsed());
        }
    }
    (in_process, over_http)
}

pub(crate) fn measure() {
    let one_thread = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, longest) = one_thread.block_on(first_query());
    let (in_process, over_http) = common::tokio_runtime().block_on(later_queries());
    let mut report = BenchReport::new("discovery", ["10,000 tools in 100 servers", "queries", "p50", "p99", "max"]);
    for (name, times) in [("in process", &in_process), ("over HTTP", &over_http)] {
        let at = |fraction| format_duration(quantile(times.iter().copied(), fraction));
        report.row([name.to_owned(), times.len().to_string(), at(0.5), at(0.99), at(1.0)]);
    }
    let none = || "-".to_owned();
    report.row(["first query".to_owned(), "1".to_owned(), format_duration(first), none(), none()]);
    report.row(["first query, longest poll".to_owned(), "1".to_owned(), format_duration(longest), none(), none()]);
    let p99_ms = |times: &[Duration]| quantile(times.iter().copied(), 0.99).as_secs_f64() * 1000.0;
    report.goal("p99, in process", 5.0, "ms", p99_ms(&in_process));
    report.goal("p99, over HTTP", 5.0, "ms", p99_ms(&over_http));
    report.goal("first query, longest poll", 5.0, "ms", longest.as_secs_f64() * 1000.0);
    report.publish();
}
