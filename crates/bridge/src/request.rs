//! One request of the client, from its arrival to its answer.
//!
//! A request that the satellite has surely not executed is repeated until [`WAIT_MAX`] has passed since its arrival: the
//! satellite is not connected, its session is lost, or it is busy. Any other request without an answer fails with its
//! fate; only requests that change nothing are repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, StatusCode};
use mcp_satellite_model::exit::{CallError, CallFate};
use mcp_satellite_protocol::body::is_session_not_found;
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::error_code::{HEADER_MISMATCH, INTERNAL_ERROR};
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, member, members};
use mcp_satellite_protocol::sse::SseDecoder;
use mcp_satellite_protocol::{meta, method};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::bridge::BridgeState;
use super::failure::{error_response, with_error};
use super::headers::{LAST_EVENT_ID, stateless_version};
use super::http::SatelliteResponse;
use super::input::LINE_MAX;
use super::link::{Link, read_own_answer};
use super::output::BufferPermit;

/// Time for which a request waits for a satellite.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(30);
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Deadline of a subscription that was open once: the satellite may be away for long.
const SUBSCRIPTION_WAIT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Maximum number of times that the satellite may reject the token of one request.
const REJECTIONS_MAX: u32 = 3;
const PAGES_MAX: usize = 100;

/// State of a request that the client can cancel.
pub(crate) struct OpenRequest {
    pub era: Era,
    /// Ends the request without an answer.
    pub withdrawn: CancellationToken,
    /// True if the satellite may have received the request.
    pub is_sent: AtomicBool,
    /// True if the client waits for no answer.
    pub is_cancelled: AtomicBool,
}

impl OpenRequest {
    pub(crate) fn new(era: Era) -> Self {
        let (is_sent, is_cancelled) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { era, withdrawn: CancellationToken::new(), is_sent, is_cancelled }
    }
}

/// Outcome of one attempt.
enum RequestAttempt {
    /// The client has its answer, or waits for none.
    Done,
    /// Not executed, because the connection or the session does not exist any more.
    NotSent(String),
    /// Not executed, because the satellite is busy. Contains the error response for the client.
    Busy(String),
    /// Not executed, because the headers did not repeat the marked arguments, which are known now.
    HeadersMissing,
    /// Sent, and no answer arrived.
    Cut(String),
}

pub(crate) struct ClientRequest {
    bridge: Arc<BridgeState>,
    message: RpcMessage,
    /// Protocol version of a request without a session.
    version: Option<String>,
    open: Arc<OpenRequest>,
    /// True after the subscription was acknowledged to the client.
    is_subscribed: AtomicBool,
}

impl ClientRequest {
    pub(crate) fn new(bridge: Arc<BridgeState>, message: RpcMessage) -> Self {
        let version = stateless_version(&message).or_else(|| {
            let is_discovery = message.method() == Some(method::DISCOVER);
            is_discovery.then(|| mcp_satellite_protocol::era::STATELESS_VERSION.to_owned())
        });
        let era = if version.is_some() { Era::Stateless } else { Era::Sessions };
        Self { bridge, message, version, open: Arc::new(OpenRequest::new(era)), is_subscribed: AtomicBool::new(false) }
    }

    pub(crate) fn open(&self) -> &Arc<OpenRequest> {
        &self.open
    }

    pub(crate) fn id(&self) -> &str {
        self.message.id().unwrap_or("null")
    }

    pub(crate) fn method(&self) -> &str {
        self.message.method().unwrap_or_default()
    }

    pub(crate) fn opens_session(&self) -> bool {
        self.open.era == Era::Sessions && self.method() == method::INITIALIZE
    }

    pub(crate) fn is_subscription(&self) -> bool {
        self.open.era == Era::Stateless && self.method() == method::LISTEN
    }

    /// Returns true if repeating the request has no effect that the first one had not.
    fn is_repeatable(&self) -> bool {
        matches!(
            self.method(),
            method::INITIALIZE
                | method::DISCOVER
                | method::PING
                | method::LISTEN
                | method::TOOLS_LIST
                | method::PROMPTS_LIST
                | method::RESOURCES_LIST
                | method::RESOURCE_TEMPLATES_LIST
                | method::SET_LOG_LEVEL
        )
    }

    /// Answers the request. Ends without an answer if the client withdraws it.
    pub(crate) async fn run(self) {
        tokio::select! {
            () = self.open.withdrawn.cancelled() => {}
            () = self.answer() => {}
        }
    }

    async fn answer(&self) {
        let control = &self.bridge.control;
        let mut deadline = Instant::now() + WAIT_MAX;
        let (mut pause, mut rejections) = (RETRY_PAUSE_MIN, 0);
        loop {
            let link = match control.wait_up(deadline).await {
                Ok(link) => link,
                Err(why) => {
                    let reason = format!("no satellite within {} s: {why}", WAIT_MAX.as_secs());
                    return self.fail(CallFate::NotSent, reason).await;
                }
            };
            if self.open.era == Era::Sessions {
                control.record(&self.message);
            }
            self.open.is_sent.store(true, Ordering::Release);
            match self.attempt(&link).await {
                RequestAttempt::Done => return,
                RequestAttempt::NotSent(why) => {
                    self.open.is_sent.store(false, Ordering::Release);
                    control.report_lost(link.generation, &why);
                    if self.open.is_cancelled.load(Ordering::Acquire) {
                        return;
                    }
                    rejections += 1;
                    if Instant::now() >= deadline {
                        return self.fail(CallFate::NotSent, why).await;
                    }
                    if rejections > REJECTIONS_MAX {
                        sleep(pause).await;
                        pause = (2 * pause).min(RETRY_PAUSE_MAX);
                    }
                }
                RequestAttempt::HeadersMissing => {}
                RequestAttempt::Busy(_) if self.open.is_cancelled.load(Ordering::Acquire) => return,
                RequestAttempt::Busy(response) => {
                    self.open.is_sent.store(false, Ordering::Release);
                    if Instant::now() + pause >= deadline {
                        return self.bridge.output.write(&response).await;
                    }
                    sleep(pause).await;
                    pause = (2 * pause).min(RETRY_PAUSE_MAX);
                }
                RequestAttempt::Cut(_) if self.open.is_cancelled.load(Ordering::Acquire) => return,
                RequestAttempt::Cut(why) => {
                    if self.is_subscribed.load(Ordering::Acquire) {
                        deadline = Instant::now() + SUBSCRIPTION_WAIT_MAX;
                    } else if !self.is_repeatable() || Instant::now() >= deadline {
                        let reason = format!("lost the connection to the satellite: {why}");
                        return self.fail(CallFate::MaybeExecuted, reason).await;
                    }
                    sleep(pause).await;
                    pause = (2 * pause).min(RETRY_PAUSE_MAX);
                }
            }
        }
    }

    async fn attempt(&self, link: &Link) -> RequestAttempt {
        let headers = match &self.version {
            Some(version) => self.bridge.marks.headers(&self.message, version),
            None if self.opens_session() => HeaderMap::new(),
            None => link.headers(),
        };
        let body = self.message.text().as_bytes().clone();
        let response = match link.http.post(self.bridge.control.path(), headers, body).await {
            Ok(response) => response,
            Err(error) if error.sent => return RequestAttempt::Cut(error.why),
            Err(error) => return RequestAttempt::NotSent(error.why),
        };
        if !response.status.is_success() {
            return self.handle_refusal(link, response).await;
        }
        if self.opens_session() {
            return self.handle_initialized(link, response).await;
        }
        if response.is_stream() {
            return self.follow(link, response).await;
        }
        match self.read_body(response).await {
            Ok(text) if text.is_empty() => RequestAttempt::Cut("the response is empty".to_owned()),
            Ok(_) => RequestAttempt::Done,
            Err(why) => RequestAttempt::Cut(why),
        }
    }

    async fn handle_initialized(&self, link: &Link, response: SatelliteResponse) -> RequestAttempt {
        let headers = response.headers.clone();
        let answer = match read_own_answer(response).await.map(RpcMessage::parse) {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return RequestAttempt::Cut(error.to_string()),
            Err(why) => return RequestAttempt::Cut(why),
        };
        if let Some(link) = self.bridge.control.adopt_session(link, &self.message, &headers, &answer) {
            self.bridge.listen(link);
        }
        self.bridge.output.write(answer.text()).await;
        RequestAttempt::Done
    }

    /// Handles a response with an HTTP status that is not a success.
    async fn handle_refusal(&self, link: &Link, response: SatelliteResponse) -> RequestAttempt {
        let status = response.status;
        let is_temporary = response.header(&http::header::RETRY_AFTER).is_some();
        let body = read_own_answer(response).await.unwrap_or_default();
        let refusal = RpcMessage::parse(body).ok();
        let error = refusal.as_ref().and_then(RpcMessage::outcome);
        let text = error.and_then(|error| serde_json::from_str::<String>(member(error, "message")?).ok());
        let text = text.unwrap_or_else(|| format!("HTTP status {status}"));
        let code = error.and_then(|error| member(error, "code")?.parse::<i64>().ok());
        let response = match (&refusal, error) {
            (Some(refusal), Some(_)) if refusal.id() == self.message.id() => refusal.text().to_string(),
            (_, Some(error)) => with_error(self.id(), error),
            (_, None) => {
                let message = format!("the satellite answered with HTTP status {status}");
                with_error(self.id(), &serde_json::json!({"code": INTERNAL_ERROR, "message": message}).to_string())
            }
        };
        match status {
            StatusCode::UNAUTHORIZED => return RequestAttempt::NotSent(text),
            StatusCode::NOT_FOUND if link.session.is_some() && is_session_not_found(&text) => {
                return RequestAttempt::NotSent(text);
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE if is_temporary => {
                return RequestAttempt::Busy(response);
            }
            StatusCode::BAD_REQUEST
                if code == Some(HEADER_MISMATCH)
                    && self.method() == method::TOOLS_CALL
                    && self.learn_marks(link).await =>
            {
                return RequestAttempt::HeadersMissing;
            }
            _ => {}
        }
        self.bridge.output.write(&response).await;
        RequestAttempt::Done
    }

    /// Lists the tools on behalf of the client to find the marked arguments. Returns true if the headers of this request
    /// are others now.
    async fn learn_marks(&self, link: &Link) -> bool {
        let Some(version) = &self.version else { return false };
        let before = self.bridge.marks.headers(&self.message, version);
        let own_meta = self.message.params().and_then(|params| member(params, "_meta")).unwrap_or("{}");
        let mut cursor = String::new();
        for _ in 0..PAGES_MAX {
            let list = format!(
                r#"{{"jsonrpc":"2.0","id":0,"method":"{}","params":{{{cursor}"_meta":{own_meta}}}}}"#,
                method::TOOLS_LIST
            );
            let Ok(list) = RpcMessage::parse(list.into()) else { break };
            let headers = self.bridge.marks.headers(&list, version);
            let body = list.text().as_bytes().clone();
            let Ok(response) = link.http.post(self.bridge.control.path(), headers, body).await else { break };
            let Ok(Ok(answer)) = read_own_answer(response).await.map(RpcMessage::parse) else { break };
            let result = answer.outcome().unwrap_or_default();
            self.bridge.marks.learn(result);
            match member(result, "nextCursor") {
                Some(next) if next != "null" => cursor = format!(r#""cursor":{next},"#),
                Some(_) | None => break,
            }
        }
        self.bridge.marks.headers(&self.message, version) != before
    }

    /// Reads a JSON response and passes it to the client. Returns its text.
    async fn read_body(&self, mut response: SatelliteResponse) -> Result<Bytes, String> {
        let output = &self.bridge.output;
        let mut permit = BufferPermit::default();
        permit.reserve(output, response.announced_length().unwrap_or_default()).await;
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| error.why)? {
            if body.len() + chunk.len() > LINE_MAX {
                return Err(format!("the response is larger than {LINE_MAX} bytes"));
            }
            body.extend_from_slice(&chunk);
            permit.reserve(output, body.len()).await;
        }
        let body = body.freeze();
        let text = std::str::from_utf8(&body).map_err(|error| error.to_string())?;
        if !text.is_empty() {
            self.learn_from(text);
            output.write(text).await;
        }
        Ok(body)
    }

    fn learn_from(&self, answer: &str) {
        if self.version.is_some()
            && self.method() == method::TOOLS_LIST
            && let Some(result) = member(answer, "result")
        {
            self.bridge.marks.learn(result);
        }
    }

    /// Passes the messages of a stream to the client, up to the answer. A stream of a session that breaks off is
    /// resumed.
    async fn follow(&self, link: &Link, mut response: SatelliteResponse) -> RequestAttempt {
        let mut last_id: Option<HeaderValue> = None;
        loop {
            let mut events = SseDecoder::new(LINE_MAX);
            let read = self.read_events(link, &mut response, &mut events).await;
            let why = match read {
                Ok(true) => return RequestAttempt::Done,
                Ok(false) if self.open.is_cancelled.load(Ordering::Acquire) => return RequestAttempt::Done,
                Ok(false) => "the stream ended without a response".to_owned(),
                Err(why) => why,
            };
            last_id = events.last_id().and_then(|id| HeaderValue::from_bytes(id).ok()).or(last_id);
            let Some(last_id) = last_id.clone().filter(|_| self.version.is_none()) else {
                return RequestAttempt::Cut(why);
            };
            sleep(RETRY_PAUSE_MIN).await;
            let mut headers = link.headers();
            headers.insert(LAST_EVENT_ID, last_id);
            response = match link.http.get(self.bridge.control.path(), headers).await {
                Ok(resumed) if resumed.status.is_success() && resumed.is_stream() => resumed,
                Ok(_) => return RequestAttempt::Cut(why),
                Err(error) => {
                    if !error.sent {
                        self.bridge.control.report_lost(link.generation, &error.why);
                    }
                    return RequestAttempt::Cut(why);
                }
            };
        }
    }

    /// Returns true if the stream contained the answer.
    async fn read_events(
        &self,
        link: &Link,
        response: &mut SatelliteResponse,
        events: &mut SseDecoder,
    ) -> Result<bool, String> {
        let output = &self.bridge.output;
        let mut permit = BufferPermit::default();
        let mut is_answered = false;
        loop {
            let chunk = match response.chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return Ok(is_answered),
                Err(_) if is_answered => return Ok(true),
                Err(error) => return Err(error.why),
            };
            events.push(chunk);
            let too_long = |_| format!("a message is larger than {LINE_MAX} bytes");
            while let Some(event) = events.next_event().map_err(too_long)? {
                let Ok(message) = RpcMessage::parse(event.data) else {
                    self.bridge.report("a message of the satellite was not valid and is ignored");
                    continue;
                };
                let is_answer = matches!(message.kind(), MessageKind::Result | MessageKind::Error)
                    && message.id() == self.message.id();
                if is_answer {
                    self.learn_from(message.text());
                    is_answered = true;
                }
                let is_repeated = self.is_subscription()
                    && message.method() == Some(method::ACKNOWLEDGED)
                    && self.is_subscribed.swap(true, Ordering::AcqRel);
                if is_repeated {
                    for notification in self.changed_notifications() {
                        output.write(&notification).await;
                    }
                    continue;
                }
                match self.version {
                    Some(_) => output.write(message.text()).await,
                    None => self.bridge.forward(link.session_number(), &message).await,
                }
                permit.release();
            }
            permit.reserve(output, events.buffered()).await;
        }
    }

    /// Returns the notifications of a subscription that was opened again: the selected lists may have changed.
    fn changed_notifications(&self) -> Vec<String> {
        let selected = self.message.params().and_then(|params| members(member(params, "notifications")?));
        let lists = [
            ("toolsListChanged", method::TOOLS_CHANGED),
            ("promptsListChanged", method::PROMPTS_CHANGED),
            ("resourcesListChanged", method::RESOURCES_CHANGED),
        ];
        let is_selected =
            |name: &str| selected.iter().flatten().any(|(selected, value)| selected == name && *value == "true");
        let (key, id) = (meta::SUBSCRIPTION_ID, self.id());
        let selected = lists.into_iter().filter(|(name, _)| is_selected(name));
        let notification =
            |method: &str| format!(r#"{{"jsonrpc":"2.0","method":"{method}","params":{{"_meta":{{"{key}":{id}}}}}}}"#);
        selected.map(|(_, method)| notification(method)).collect()
    }

    async fn fail(&self, fate: CallFate, reason: String) {
        if !self.open.is_cancelled.load(Ordering::Acquire) {
            let error = CallError::Terminated { fate, reason };
            self.bridge.output.write(&error_response(self.id(), self.open.era, &error)).await;
        }
    }
}
