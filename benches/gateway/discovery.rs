//! Latency of tool discovery and of `tools/list` in flat mode with 10,000 tools in 100 servers.
//!
//! The search is measured in process and over HTTP. The queries are the labelled ones of `tests/fixtures/search` and a
//! misspelling of each. The first query is measured separately, because it reads all catalogues. The list is measured
//! over HTTP: each page, the first page after a change of one server, and the first page of a user.

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
use mcp_satellite_actors::model::status::Status;
use serde_json::{Value, json};
use testkit::scripted_servers::{Lists, ScriptedServers, id};

use crate::common::{self, BenchReport, format_duration, quantile};
use crate::endpoint::http::{McpClient, McpRequest};

const SERVERS: usize = 100;
const TOOLS_OF_EACH: usize = 100;
const ROUNDS: usize = 20;
const LISTINGS: usize = 100;
const CHANGES: usize = 100;

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
        access: None,
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

/// Requests of one kind: the duration and the size of each response.
#[derive(Default)]
struct ListRequests {
    times: Vec<Duration>,
    bytes: Vec<usize>,
}

impl ListRequests {
    /// Requests a page and returns the cursor of the next one.
    fn page(&mut self, client: &mut McpClient, cursor: Option<&str>) -> Option<String> {
        let params = cursor.map_or_else(|| json!({}), |cursor| json!({"cursor": cursor}));
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": params}).to_string();
        let request = McpRequest { body, ..McpRequest::default() };
        let began = Instant::now();
        let response = client.request(&request);
        self.times.push(began.elapsed());
        let (_head, body) = response.split_once("\r\n\r\n").unwrap();
        self.bytes.push(body.len());
        let mut response: Value = serde_json::from_str(body).unwrap();
        assert!(response["result"]["tools"].is_array(), "{response}");
        match response["result"]["nextCursor"].take() {
            Value::String(cursor) => Some(cursor),
            _ => None,
        }
    }

    fn row(&self, report: &mut BenchReport, name: &str) {
        let at = |fraction| format_duration(quantile(self.times.iter().copied(), fraction));
        let largest = self.bytes.iter().max().unwrap() / 1024;
        report.row([
            name.to_owned(),
            self.times.len().to_string(),
            format!("{largest} KiB"),
            at(0.5),
            at(0.99),
            at(1.0),
        ]);
    }
}

struct Listings {
    pages: ListRequests,
    after_changes: ListRequests,
    of_new_users: ListRequests,
    pages_per_list: usize,
}

/// Reads the whole list several times; then only the first page, each time after one server has changed its tools.
async fn listings() -> Listings {
    let (mut pages, mut after_changes) = (ListRequests::default(), ListRequests::default());
    let mut of_new_users = ListRequests::default();
    let mut pages_per_list = 0;
    for _ in 0..5 {
        let (_servers, _gateway, address) = open().await;
        let mut client = McpClient::open_session(address, "/mcp?mode=flat");
        of_new_users.page(&mut client, None);
    }
    let (servers, _gateway, address) = open().await;
    let mut client = McpClient::open_session(address, "/mcp?mode=flat");
    ListRequests::default().page(&mut client, None);
    for _ in 0..LISTINGS {
        pages_per_list = 0;
        let mut cursor = None;
        loop {
            cursor = pages.page(&mut client, cursor.as_deref());
            pages_per_list += 1;
            if cursor.is_none() {
                break;
            }
        }
    }
    let texts = self::servers();
    for change in 0..CHANGES {
        let (installation, lists) = (&texts[change % SERVERS].1, texts[(change + 1) % SERVERS].2);
        let restarts = servers.runtime.status(&id(installation)).unwrap().restarts;
        servers.relist(installation, lists);
        servers.runtime.restart(&id(installation)).await.unwrap();
        servers.wait_until(installation, |view| view.status == Status::Online && view.restarts > restarts).await;
        after_changes.page(&mut client, None);
    }
    Listings { pages, after_changes, of_new_users, pages_per_list }
}

fn measure_lists() {
    let Listings { pages, after_changes, of_new_users, pages_per_list } = common::tokio_runtime().block_on(listings());
    let columns = ["tools/list, 10,000 tools in 100 servers", "requests", "largest", "p50", "p99", "max"];
    let mut report = BenchReport::new("lists", columns);
    pages.row(&mut report, &format!("each of {pages_per_list} pages"));
    after_changes.row(&mut report, "first page after a change of a server");
    of_new_users.row(&mut report, "first page of a user");
    let p99_ms = |requests: &ListRequests| quantile(requests.times.iter().copied(), 0.99).as_secs_f64() * 1000.0;
    report.goal("p99 of a page", 5.0, "ms", p99_ms(&pages));
    report.goal("p99 of the first page after a change", 5.0, "ms", p99_ms(&after_changes));
    report.publish();
}

pub(crate) fn measure() {
    measure_lists();
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
