//! A console with made-up instances, which need no processes: as many as a test wants.

use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use axum::routing::get;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::event::{Event, EventSubject};
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_config::{Role, parse};
use mcp_satellite_console::access::{AccessSettings, ConsoleAccess};
use mcp_satellite_console::feed::{
    Attention, DORMANT, FeedPosition, FeedRows, FeedScope, InstanceFeeds, InstanceRow, RowChanges, RowSource, STOPPED,
};
use mcp_satellite_console::pages::{ConsoleSite, LiveQuery, OverviewShape, PageFrame, answer_asset, overview_page};
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::routes::{ApiServer, RequestContext, Routes};
use mcp_satellite_console::sse;
use mcp_satellite_console::v1::InstanceStreamQuery;
use mcp_satellite_gateway::GatewaySettings;
use mcp_satellite_gateway::page_listener::PageListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Revision, and rows with the revisions at which they changed last.
type MadeUpState = (u64, Vec<(u64, InstanceRow)>);

/// A console; dropping it ends it.
pub(crate) struct MadeUpConsole {
    pub(crate) url: String,
    threads: String,
    state: watch::Sender<MadeUpState>,
    /// False for a satellite whose actors do not answer.
    answers: Arc<AtomicBool>,
    /// Numbers of the open streams and of the requests for what is new.
    streams: Arc<MadeUpCounts>,
    _listener: PageListener,
    // Dropped last: the listener needs it.
    _runtime: Runtime,
}

struct MadeUpServer {
    access: ConsoleAccess,
    bodies: Arc<ByteBudget>,
    feeds: InstanceFeeds<MadeUpRows>,
    streams: Arc<MadeUpCounts>,
}

#[derive(Default)]
struct MadeUpCounts {
    open: AtomicUsize,
    fetches: AtomicUsize,
}

impl ApiServer for MadeUpServer {
    fn access(&self) -> &ConsoleAccess {
        &self.access
    }

    fn record(&self, _: Event) {}

    fn target(&self, _: &Principal, _: &str) -> Option<Arc<EventSubject>> {
        None
    }

    fn body_budget(&self) -> &Arc<ByteBudget> {
        &self.bodies
    }
}

/// An open stream of a page.
struct MadeUpStream(Arc<MadeUpCounts>);

impl MadeUpStream {
    fn new(counts: &Arc<MadeUpCounts>) -> Self {
        counts.open.fetch_add(1, Ordering::Relaxed);
        Self(counts.clone())
    }
}

impl Drop for MadeUpStream {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

struct MadeUpRows {
    published: watch::Receiver<MadeUpState>,
    revision: u64,
    has_rows: bool,
    answers: Arc<AtomicBool>,
}

impl RowSource for MadeUpRows {
    fn revision(&self) -> u64 {
        self.revision
    }

    fn rows(&self) -> Vec<InstanceRow> {
        let state = self.published.borrow();
        state.1.iter().filter(|_| self.has_rows).map(|(_, row)| row.clone()).collect()
    }

    fn take_changes(&mut self) -> RowChanges {
        let state = self.published.borrow_and_update();
        let later = state.1.iter().filter(|(revision, _)| self.has_rows && *revision > self.revision);
        let set = later.map(|(_, row)| row.clone()).collect();
        self.revision = state.0;
        RowChanges { set, gone: Vec::new() }
    }

    async fn changed(&mut self) -> bool {
        self.published.changed().await.is_ok()
    }

    fn calls_in_flight(&self) -> usize {
        0
    }

    async fn answers(&self) -> bool {
        self.answers.load(Ordering::Relaxed)
    }
}

const SERVER_NAMES: [&str; 8] = ["files", "github", "notes", "postgres", "browser", "memory", "jira", "slack"];
const TEAM_NAMES: [&str; 6] = ["blue", "design", "platform", "research", "sales", "support"];

/// Returns the instance with this number, in a state that many instances of a healthy fleet have.
fn instance(nth: usize, count: usize, now: i64) -> InstanceRow {
    let team = TEAM_NAMES[nth * TEAM_NAMES.len().min(count.div_ceil(5)) / count];
    let server = SERVER_NAMES[nth % SERVER_NAMES.len()];
    let user = format!("user-{}", nth / SERVER_NAMES.len());
    // Spread over the fleet: neighbours differ.
    let dice = nth.wrapping_mul(7_919) % 997;
    let (status, flags, attention) = match dice {
        0..4 => (
            Status::PermanentlyFailed,
            0,
            Some((1, "Process crashed 5 times in 5 minutes; last: exited with code 1", Some(Remedy::Restart))),
        ),
        4..6 => (Status::RequiresReauth, 0, Some((2, "the server rejected the token", Some(Remedy::Authorize)))),
        6..9 => (Status::Error, 0, Some((3, "the answer to tools/list is not valid", Some(Remedy::ReadLogs)))),
        9..14 => (Status::Offline, 0, Some((4, "connection refused", None))),
        14..18 => (Status::AwaitingUserConfig, 0, Some((5, "API_KEY is missing", Some(Remedy::Configure)))),
        18..30 => (Status::Connecting, 0, None),
        30..60 => (Status::Offline, STOPPED, None),
        60..240 => (Status::Online, DORMANT, None),
        _ => (Status::Online, 0, None),
    };
    let name = format!("{server}-{team}-{user}-{nth}");
    let step = attention.and_then(|(_, _, remedy)| {
        Some(format!(
            "`satellite {} {name}`",
            match remedy? {
                Remedy::Restart => "restart",
                Remedy::Authorize => "auth",
                Remedy::Configure => "configure",
                _ => "logs",
            }
        ))
    });
    InstanceRow {
        name: name.into(),
        server: server.to_owned(),
        team: team.to_owned(),
        user,
        status,
        since: now - 60_000 * i64::try_from(dice + 1).unwrap(),
        flags,
        restarts: u64::from(dice < 60),
        retry: None,
        attention: attention.map(|(urgency, message, remedy)| Attention {
            urgency,
            message: message.to_owned(),
            step,
            remedy,
        }),
    }
}

impl MadeUpConsole {
    pub(crate) fn start(count: usize) -> Self {
        static CONSOLES: AtomicU64 = AtomicU64::new(0);
        // At most 15 characters: the kernel cuts longer names of threads.
        let threads = format!("made-up-{}", CONSOLES.fetch_add(1, Ordering::Relaxed));
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).thread_name(&threads).enable_all().build().unwrap();
        let now = i64::try_from(std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
        let rows = (0..count).map(|nth| (1, instance(nth, count, now))).collect();
        let (state, published) = watch::channel((1, rows));
        let (answers, streams) = (Arc::new(AtomicBool::new(true)), Arc::<MadeUpCounts>::default());
        let feed_answers = answers.clone();
        let open = move |scope: &FeedScope| {
            let mut published = published.clone();
            let revision = published.borrow_and_update().0;
            MadeUpRows { published, revision, has_rows: scope.instance.is_none(), answers: feed_answers.clone() }
        };
        let access = ConsoleAccess::new().unwrap();
        access.apply(&AccessSettings {
            is_on: true,
            has_own_listener: true,
            allows_anonymous: true,
            ..AccessSettings::default()
        });
        let server = Arc::new(MadeUpServer {
            access,
            bodies: ByteBudget::unlimited(),
            feeds: InstanceFeeds::new("1", open),
            streams: streams.clone(),
        });
        let mut routes = Routes::new(server);
        routes.page("/console/", Role::Viewer, overview);
        routes.respond("/v1/instances/stream", Role::Viewer, "Instances", &[sse::MEDIA_TYPE], stream);
        routes.open(
            "/console/assets/{file}",
            get(|axum::extract::Path(file): axum::extract::Path<String>| async move { answer_asset(&file) }),
        );
        let plan = parse("made-up.toml", "[gateway]\nlisten = \"127.0.0.1:0\"\nauth = \"none\"\n", &|_| None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let settings = GatewaySettings::new("made-up", &plan.gateway, listener.local_addr().unwrap());
        let context = runtime.enter();
        let listener = PageListener::start(listener, settings, routes.finish(), &Arc::default()).unwrap();
        let url = format!("http://{}/console/", listener.address());
        drop(context);
        Self { url, threads, state, answers, streams, _listener: listener, _runtime: runtime }
    }

    pub(crate) fn set_answers(&self, answers: bool) {
        self.answers.store(answers, Ordering::Relaxed);
    }

    /// Returns the number of open streams.
    pub(crate) fn open_streams(&self) -> usize {
        self.streams.open.load(Ordering::Relaxed)
    }

    /// Returns the number of requests for what is new.
    pub(crate) fn fetches(&self) -> usize {
        self.streams.fetches.load(Ordering::Relaxed)
    }

    /// Returns the processor time that the console has used, in seconds.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let ticks = fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(|thread| {
            let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.split_once(')')?;
            let fields: Vec<&str> = rest.split_whitespace().collect();
            (name == self.threads).then(|| fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap())
        });
        ticks.sum::<f64>() / 100.0
    }

    /// Sets the status of some instances in one revision.
    pub(crate) fn set_status(&self, which: impl Iterator<Item = usize>, status: Status) {
        self.state.send_modify(|(revision, rows)| {
            *revision += 1;
            for nth in which {
                let (changed, row) = &mut rows[nth];
                *changed = *revision;
                (row.status, row.flags, row.attention) = (status, 0, None);
            }
        });
    }
}

async fn overview(
    server: Arc<MadeUpServer>,
    context: RequestContext,
    query: LiveQuery,
) -> Result<mcp_satellite_console::pages::Markup, mcp_satellite_console::problem::Problem> {
    let rows = if query.live { FeedRows::default() } else { server.feeds.rows(&FeedScope::default()).await? };
    let frame = PageFrame {
        root: "",
        uri: context.uri.clone(),
        site: ConsoleSite::Satellite,
        satellite: "mcp-satellite".to_owned(),
        principal: "owner".to_owned(),
        role: context.principal.access.role,
        csrf_token: None,
        boot: server.feeds.boot().to_owned(),
        revision: rows.position.revision,
        at: mcp_satellite_actors::model::event::rfc3339(now()),
    };
    Ok(overview_page(&OverviewShape { rows, warnings: Vec::new() }, &frame))
}

fn now() -> jiff::Timestamp {
    jiff::Timestamp::now()
}

async fn stream(
    server: Arc<MadeUpServer>,
    _: RequestContext,
    InstanceStreamQuery { stream: query, .. }: InstanceStreamQuery,
) -> Result<axum::response::Response, mcp_satellite_console::problem::Problem> {
    use axum::response::IntoResponse as _;
    let position = query.position.as_deref().and_then(FeedPosition::parse);
    let frames = server.feeds.watch(&FeedScope::default(), position, query.once).await?;
    if query.once {
        server.streams.fetches.fetch_add(1, Ordering::Relaxed);
    }
    let open = (!query.once).then(|| MadeUpStream::new(&server.streams));
    let frames = futures::StreamExt::inspect(frames, move |_| {
        // The stream counts as open until it is dropped.
        let _ = &open;
    });
    let body = axum::body::Body::from_stream(sse::keep_alive(frames));
    Ok(([("content-type", sse::MEDIA_TYPE)], body).into_response())
}
