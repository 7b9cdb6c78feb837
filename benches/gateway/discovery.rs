//! Latency of tool discovery with ten thousand tools in a hundred servers. The queries are the labelled ones of
//! `tests/fixtures/search` and a misspelling of each, without HTTP and over it. The first query is measured separately,
//! because it reads all catalogues.

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

use super::client::BenchClient;
use super::common::{self, BenchReport, format_duration, quantile};

const SERVERS: usize = 100;
const TOOLS_OF_EACH: usize = 100;
const ROUNDS: usize = 20;

fn fixture(name: &str) -> String {
    std::fs::read_to_string(format!("{}/tests/fixtures/search/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Returns servers with the tools of the sixteen servers of the fixture, repeated with different purposes.
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

fn misspelled(question: &str) -> String {
    let longest = question.split(' ').max_by_key(|word| word.len()).unwrap();
    let mut letters: Vec<char> = longest.chars().collect();
    let at = (1..letters.len() - 1).find(|at| letters[*at] != letters[*at + 1]).unwrap_or(0);
    letters.swap(at, at + 1);
    question.replacen(longest, &letters.into_iter().collect::<String>(), 1)
}

fn questions() -> Vec<String> {
    let text = fixture("queries.toml");
    let lines = text.lines().filter_map(|line| line.strip_prefix("text = ")).map(|line| line.trim_matches('"'));
    lines.flat_map(|question| [question.to_owned(), misspelled(question)]).collect()
}

async fn open() -> (ScriptedServers, Gateway, SocketAddr) {
    let servers = servers();
    let servers: Vec<_> = servers.iter().map(|(name, id, lists)| (name.as_str(), id.as_str(), *lists)).collect();
    let sessions = Arc::new(Sessions::new());
    let rooms = Arc::new(GatewayAudience::new(sessions.clone()));
    let house = ScriptedServers::before(rooms.clone(), &servers).await;
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
    let faces = Arc::new(EndpointDispatcher::new(&house.runtime, rooms));
    let gateway = Gateway::start(listener, settings, access, faces, sessions, Box::new(drop)).unwrap();
    (house, gateway, address)
}

/// Returns the CPU time of this thread, which other threads do not influence.
fn used() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(spent).unwrap()
}

/// Measures the first query on a single thread: its duration, and the longest time that it blocks the thread.
async fn first() -> (Duration, Duration) {
    let (house, _gateway, _) = open().await;
    let question = async {
        let began = Instant::now();
        house.asks("discover_mcp_tools", r#"{"query":"read a file"}"#).await;
        began.elapsed()
    };
    let mut question = std::pin::pin!(question);
    let (mut longest, mut last) = (Duration::ZERO, used());
    loop {
        let took = tokio::select! {
            biased;
            took = &mut question => Some(took),
            () = tokio::task::yield_now() => None,
        };
        let now = used();
        (longest, last) = (longest.max(now.saturating_sub(last)), now);
        if let Some(took) = took {
            return (took, longest);
        }
    }
}

async fn all() -> (Vec<Duration>, Vec<Duration>) {
    let (house, _gateway, address) = open().await;
    let mut client = BenchClient::open(&format!("http://{address}/mcp"), String::new()).await;
    let (mut inside, mut over_http) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for question in questions() {
            let arguments = json!({"query": question}).to_string();
            let began = Instant::now();
            house.asks("discover_mcp_tools", &arguments).await;
            inside.push(began.elapsed());
            let params = json!({"name": "discover_mcp_tools", "arguments": {"query": question}});
            let request = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
            let began = Instant::now();
            client.ask(&request).await;
            over_http.push(began.elapsed());
        }
    }
    (inside, over_http)
}

pub(crate) fn measure() {
    let one_thread = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, held) = one_thread.block_on(first());
    let (inside, over_http) = common::tokio_runtime().block_on(all());
    let mut report =
        BenchReport::new("discovery", ["10,000 tools in 100 servers", "questions", "median", "99 %", "longest"]);
    for (what, times) in [("without HTTP", &inside), ("over HTTP", &over_http)] {
        let of = |part| format_duration(quantile(times.iter().copied(), part));
        report.row([what.to_owned(), times.len().to_string(), of(0.5), of(0.99), of(1.0)]);
    }
    let none = || "-".to_owned();
    report.row(["the first, for which all is read".to_owned(), "1".to_owned(), format_duration(first), none(), none()]);
    report.row(["and what it held the thread for".to_owned(), "1".to_owned(), format_duration(held), none(), none()]);
    let goal = |times: &[Duration]| quantile(times.iter().copied(), 0.99).as_secs_f64() * 1000.0;
    report.goal("99 % of discovery, without HTTP", 5.0, "ms", goal(&inside));
    report.goal("99 % of discovery, over HTTP", 5.0, "ms", goal(&over_http));
    report.goal("the longest that the first question holds a thread", 5.0, "ms", held.as_secs_f64() * 1000.0);
    report.publish();
}
