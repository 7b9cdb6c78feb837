//! Requests to the HTTP API, whose answers become updates of the screen.

use std::time::Duration;

use mcp_satellite_actors::model::actor_tree::ActorReport;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_console::feed::{DORMANT, STOPPED};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::v1::{LogEntry, LogPage};
use mcp_satellite_protocol::header::LAST_EVENT_ID;
use mcp_satellite_protocol::sse::{SseDecoder, SseEvent, SseTooLong};
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc;

use crate::cli::{BAD_INPUT, CommandFailure};

/// Pause before a lost stream is opened again.
const RETRY: Duration = Duration::from_secs(1);
/// Time without a tick of the satellite after which a stream counts as lost.
const SILENCE_MAX: Duration = Duration::from_secs(6);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(70);
/// Maximum size of an event: all rows of a satellite.
const FRAME_MAX: usize = 64 * 1024 * 1024;
/// Lines of output that are fetched.
const OUTPUT_LINES: usize = 500;

/// Changes of the screen.
#[derive(Debug)]
pub(super) enum Update {
    /// All instances.
    Reset(Vec<TopRow>),
    /// Changed and removed instances.
    Changes {
        set: Vec<TopRow>,
        gone: Vec<String>,
    },
    /// The satellite is alive.
    Tick {
        calls_in_flight: u64,
    },
    /// The stream was lost; it is opened again.
    Lost(String),
    /// Lines of output, oldest first.
    Output {
        instance: String,
        lines: Vec<LogEntry>,
    },
    Tree(Box<ActorReport>),
    /// The output or the tree cannot be read.
    ViewFailed(String),
    /// Result of a request.
    Notice(String),
}

/// A row of the stream; see [`mcp_satellite_console::feed::COLUMNS`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TopRow {
    pub(super) name: String,
    pub(super) server: String,
    pub(super) team: String,
    pub(super) user: String,
    status: String,
    /// Milliseconds since 1970.
    pub(super) since: i64,
    /// Bits [`DORMANT`] and [`STOPPED`].
    flags: u64,
    pub(super) restarts: u64,
    /// Time of the next attempt, in milliseconds since 1970.
    pub(super) retry: Option<i64>,
    pub(super) message: String,
}

impl TopRow {
    /// Returns `None` if the row has another form: the satellite has another version.
    pub(super) fn parse(row: &Value) -> Option<Self> {
        let text = |at: usize| row.get(at).and_then(Value::as_str).map(ToOwned::to_owned);
        Some(Self {
            name: text(0)?,
            server: text(1)?,
            team: text(2)?,
            user: text(3)?,
            status: text(4)?,
            since: row.get(5)?.as_i64()?,
            flags: row.get(6).and_then(Value::as_u64).unwrap_or_default(),
            restarts: row.get(7).and_then(Value::as_u64).unwrap_or_default(),
            retry: row.get(8).and_then(Value::as_i64),
            message: text(10).unwrap_or_default(),
        })
    }

    /// Returns the status as the console names it: `asleep` and `stopped` are kinds of `online` and `offline`.
    pub(super) fn shown_status(&self) -> &str {
        match self.status.as_str() {
            "online" if self.flags & u64::from(DORMANT) != 0 => "asleep",
            "offline" if self.flags & u64::from(STOPPED) != 0 => "stopped",
            status => status,
        }
    }
}

/// A satellite's HTTP API with a token.
#[derive(Clone)]
pub(super) struct ApiConnection {
    http: reqwest::Client,
    url: String,
}

impl ApiConnection {
    pub(super) fn new(url: &str, token: &str) -> Result<Self, CommandFailure> {
        let invalid = |why: String| CommandFailure::new(BAD_INPUT, why);
        let token = Secret::from(format!("Bearer {token}"));
        let mut value = HeaderValue::from_str(token.expose())
            .map_err(|_| invalid("the token contains characters that cannot be sent".to_owned()))?;
        value.set_sensitive(true);
        let headers = HeaderMap::from_iter([(AUTHORIZATION, value)]);
        mcp_satellite_http::client::install_tls_provider();
        let http = reqwest::Client::builder().default_headers(headers).no_proxy().build();
        let http = http.map_err(|error| invalid(format!("cannot prepare the connection: {error}")))?;
        Ok(Self { http, url: url.trim_end_matches('/').to_owned() })
    }

    /// Sends the instances as they change. A lost stream is opened again, after the last position.
    pub(super) fn follow_instances(&self, updates: mpsc::Sender<Update>) {
        let connection = self.clone();
        drop(tokio::spawn(async move {
            let mut position = None;
            loop {
                let Err(why) = connection.stream(&mut position, &updates).await else { return };
                if updates.send(Update::Lost(why)).await.is_err() {
                    return;
                }
                tokio::time::sleep(RETRY).await;
            }
        }));
    }

    /// Streams until the receiver is gone. An error is the reason why the stream has ended.
    async fn stream(&self, position: &mut Option<String>, updates: &mpsc::Sender<Update>) -> Result<(), String> {
        let mut request =
            self.http.get(format!("{}/v1/instances/stream", self.url)).header(ACCEPT, "text/event-stream");
        if let Some(position) = &position {
            request = request.header(LAST_EVENT_ID, position);
        }
        let mut response = check(request.send().await).await?;
        let mut events = SseDecoder::new(FRAME_MAX);
        loop {
            let chunk = tokio::time::timeout(SILENCE_MAX, response.chunk()).await;
            let chunk = chunk.map_err(|_| "the satellite sends nothing".to_owned())?;
            events.push(chunk.map_err(|error| describe(&error))?.ok_or("the satellite has ended the stream")?);
            while let Some(SseEvent { kind, data }) =
                events.next_event().map_err(|SseTooLong| "an event is too long")?
            {
                if let Some(update) = read_frame(kind.as_deref().unwrap_or_default(), &data)?
                    && updates.send(update).await.is_err()
                {
                    return Ok(());
                }
                if let Some(id) = events.last_id() {
                    *position = Some(String::from_utf8_lossy(id).into_owned());
                }
            }
        }
    }

    pub(super) fn restart(&self, instance: &str, updates: mpsc::Sender<Update>) {
        let url = format!("{}/v1/instances/{instance}/restart", self.url);
        let (request, instance) = (self.http.post(url).timeout(REQUEST_TIMEOUT), instance.to_owned());
        drop(tokio::spawn(async move {
            let notice = match check(request.send().await).await {
                Ok(_) => format!("{instance} restarts"),
                Err(why) => format!("cannot restart {instance}: {why}"),
            };
            // An error means that the program ends.
            let _ = updates.send(Update::Notice(notice)).await;
        }));
    }

    pub(super) fn fetch_output(&self, instance: &str, updates: mpsc::Sender<Update>) {
        let (connection, instance) = (self.clone(), instance.to_owned());
        drop(tokio::spawn(async move {
            let path = format!("/v1/instances/{instance}/logs?limit={OUTPUT_LINES}");
            let update = match connection.get::<LogPage>(&path).await {
                Ok(page) => Update::Output { instance, lines: page.lines.into_iter().rev().collect() },
                Err(why) => Update::ViewFailed(format!("cannot read the output of {instance}: {why}")),
            };
            let _ = updates.send(update).await;
        }));
    }

    pub(super) fn fetch_tree(&self, updates: mpsc::Sender<Update>) {
        let connection = self.clone();
        drop(tokio::spawn(async move {
            let update = match connection.get::<ActorReport>("/v1/tree").await {
                Ok(tree) => Update::Tree(Box::new(tree)),
                Err(why) => Update::ViewFailed(format!("cannot read the tree: {why}")),
            };
            let _ = updates.send(update).await;
        }));
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let request = self.http.get(format!("{}{path}", self.url)).timeout(REQUEST_TIMEOUT);
        check(request.send().await).await?.json().await.map_err(|error| describe(&error))
    }
}

/// Returns the response, or the detail of a problem document.
async fn check(sent: reqwest::Result<reqwest::Response>) -> Result<reqwest::Response, String> {
    let response = sent.map_err(|error| describe(&error))?;
    if response.status().is_success() {
        return Ok(response);
    }
    let status = response.status();
    let text = response.text().await.unwrap_or_default();
    Err(serde_json::from_str::<Problem>(&text).map_or_else(|_| status.to_string(), |problem| problem.detail))
}

fn describe(error: &reqwest::Error) -> String {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}

/// Reads a frame; `None` if the screen does not use it.
fn read_frame(event: &str, data: &[u8]) -> Result<Option<Update>, String> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct FrameData {
        rows: Vec<Value>,
        set: Vec<Value>,
        gone: Vec<String>,
        calls_in_flight: u64,
    }
    let unknown = || "the satellite has another version, whose stream this program cannot read".to_owned();
    let data: FrameData = serde_json::from_slice(data).map_err(|_| unknown())?;
    let rows = |rows: &[Value]| rows.iter().map(TopRow::parse).collect::<Option<Vec<_>>>().ok_or_else(unknown);
    Ok(match event {
        "reset" => Some(Update::Reset(rows(&data.rows)?)),
        "delta" => Some(Update::Changes { set: rows(&data.set)?, gone: data.gone }),
        "tick" => Some(Update::Tick { calls_in_flight: data.calls_in_flight }),
        _ => None,
    })
}
