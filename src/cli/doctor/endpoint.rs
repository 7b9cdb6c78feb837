//! Probe of the MCP endpoint: a session of a client that lists the tools and calls one.

use std::path::Path;
use std::time::Duration;

use mcp_satellite_http::client::{client, is_tls, root_cause};
use mcp_satellite_protocol::era::NEWEST_SESSION_VERSION;
use mcp_satellite_protocol::{header, method};
use reqwest::{Client, Response, StatusCode, Url};
use serde_json::{Value, json};

use super::finding::DoctorFinding;
use crate::console::api::{EndpointAccess, EndpointAccessQuery, EndpointStatus, StatusReply};
use crate::console::client::{ClientError, ConsoleClient};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Tool of the endpoint that changes nothing. Users with flat tools do not have it.
const CALLED_TOOL: &str = "list_servers";
const LOG: &str = "read the log of the satellite, then run `satellite status`";

/// Opens a session on the endpoint of the running satellite, lists its tools, calls one, and ends the session.
pub(super) async fn probe(data_dir: &Path, status: Option<&StatusReply>) -> Vec<DoctorFinding> {
    let Some(status) = status else {
        let finding = DoctorFinding::ok("endpoint", "endpoint", "no satellite is running, so no call was made");
        return vec![finding.next("start one with `satellite run`")];
    };
    let Some(endpoint) = &status.satellite.endpoint else {
        let finding = DoctorFinding::ok("endpoint", "endpoint", "the satellite has none, so no client can connect");
        return vec![finding.next("add [gateway] to the configuration")];
    };
    let user = status.instances.first().map(|row| format!("{}/{}", row.team, row.user));
    vec![match request_token(data_dir, user).await {
        Ok(token) => test(endpoint, token.as_deref()).await,
        Err(error) => DoctorFinding::error("endpoint", "endpoint", format!("cannot get a token: {error}")).next(LOG),
    }]
}

/// Returns a token that the satellite grants over its control socket, as `satellite stdio` does; `None` without
/// authentication. If there are several users, the token is one of `user`, and `None` without a name.
async fn request_token(data_dir: &Path, user: Option<String>) -> Result<Option<String>, ClientError> {
    let client = ConsoleClient::new(data_dir)?;
    let request = async |user| client.post::<EndpointAccess>("/v1/endpoint", &EndpointAccessQuery { user }).await;
    let access = match request(None).await {
        Err(ClientError::Refused(failure)) if failure.kind == "ambiguous" => match user {
            Some(user) => request(Some(user)).await?,
            None => return Ok(None),
        },
        access => access?,
    };
    Ok(access.token)
}

async fn test(EndpointStatus { url, auth, .. }: &EndpointStatus, token: Option<&str>) -> DoctorFinding {
    let failed = |error: &reqwest::Error| {
        let cause = root_cause(error).unwrap_or_else(|| "the HTTP exchange failed".to_owned());
        let finding = |message| DoctorFinding::error("endpoint", "endpoint", message);
        if is_tls(error) {
            finding(format!("{url}: the TLS connection failed: {cause}")).next("use a certificate that clients trust")
        } else {
            finding(format!("cannot connect to {url}: {cause}")).next(LOG)
        }
    };
    let client = match Url::parse(url).map_err(|error| error.to_string()) {
        Ok(address) => match client(&address) {
            Ok(client) => client,
            Err(error) => return failed(&error),
        },
        Err(error) => {
            return DoctorFinding::error("endpoint", "endpoint", format!("{url} is not a URL: {error}"))
                .next("check `public_url`");
        }
    };
    let session = ProbeSession { client, url, token };
    match session.run().await {
        Ok(SessionOutcome::Answered { tools, has_called }) => {
            let call = if has_called { format!(", and answered a call of `{CALLED_TOOL}`") } else { String::new() };
            let message = format!("{url} opened a session and listed {tools} tools{call}");
            DoctorFinding::ok("endpoint", "endpoint", message)
        }
        Ok(SessionOutcome::Rejected { status: StatusCode::UNAUTHORIZED, .. }) if token.is_none() && auth != "none" => {
            let message = format!("{url} answers; no call was made, because none of the users has a server");
            DoctorFinding::ok("endpoint", "endpoint", message).next("add a server to the configuration")
        }
        Ok(SessionOutcome::Rejected { request, status }) => {
            let message = format!("{url} answered `{request}` with HTTP status {status}");
            DoctorFinding::error("endpoint", "endpoint", message).next(LOG)
        }
        Err(error) => failed(&error),
    }
}

/// A session of the probe. `Debug` is not implemented, because it contains the token.
struct ProbeSession<'a> {
    client: Client,
    url: &'a str,
    token: Option<&'a str>,
}

enum SessionOutcome {
    /// Number of tools on the first page, and whether one was called.
    Answered {
        tools: usize,
        has_called: bool,
    },
    Rejected {
        request: &'static str,
        status: StatusCode,
    },
}

impl ProbeSession<'_> {
    async fn run(&self) -> reqwest::Result<SessionOutcome> {
        let client_info = json!({"name": "satellite doctor", "version": env!("CARGO_PKG_VERSION")});
        let params = json!({"protocolVersion": NEWEST_SESSION_VERSION, "capabilities": {}, "clientInfo": client_info});
        let initialize = json!({"jsonrpc": "2.0", "id": 1, "method": method::INITIALIZE, "params": params});
        let opened = self.post(None, &initialize).await?;
        let rejected = |request, response: &Response| SessionOutcome::Rejected { request, status: response.status() };
        let session = opened.headers().get(header::SESSION_ID).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let (true, Some(session)) = (opened.status().is_success(), session) else {
            return Ok(rejected(method::INITIALIZE, &opened));
        };
        let initialized = json!({"jsonrpc": "2.0", "method": method::INITIALIZED});
        self.post(Some(&session), &initialized).await?;
        let outcome = self.list_and_call(&session).await;
        let ended = self.with_token(self.client.delete(self.url)).header(header::SESSION_ID, &session);
        // A session that is not ended expires.
        let _ = ended.timeout(REQUEST_TIMEOUT).send().await;
        outcome
    }

    async fn list_and_call(&self, session: &str) -> reqwest::Result<SessionOutcome> {
        let (status, listed) = self.request(session, method::TOOLS_LIST, &json!({})).await?;
        let Some(tools) = listed.as_ref().and_then(|result| result.get("tools")?.as_array()) else {
            return Ok(SessionOutcome::Rejected { request: method::TOOLS_LIST, status });
        };
        let has_called = tools.iter().any(|tool| tool["name"] == CALLED_TOOL);
        if has_called {
            let params = json!({"name": CALLED_TOOL, "arguments": {}});
            let (status, called) = self.request(session, method::TOOLS_CALL, &params).await?;
            if called.is_none_or(|result| result["isError"] == true) {
                return Ok(SessionOutcome::Rejected { request: method::TOOLS_CALL, status });
            }
        }
        Ok(SessionOutcome::Answered { tools: tools.len(), has_called })
    }

    /// Returns the HTTP status, and the result unless the answer is an error.
    async fn request(
        &self,
        session: &str,
        method: &str,
        params: &Value,
    ) -> reqwest::Result<(StatusCode, Option<Value>)> {
        let request = json!({"jsonrpc": "2.0", "id": 2, "method": method, "params": params});
        let response = self.post(Some(session), &request).await?;
        let status = response.status();
        Ok((status, result_of(&response.text().await?)))
    }

    async fn post(&self, session: Option<&str>, message: &Value) -> reqwest::Result<Response> {
        let mut request = self.with_token(self.client.post(self.url)).timeout(REQUEST_TIMEOUT).json(message);
        request = request.header("accept", "application/json, text/event-stream");
        if let Some(session) = session {
            request =
                request.header(header::SESSION_ID, session).header(header::PROTOCOL_VERSION, NEWEST_SESSION_VERSION);
        }
        request.send().await
    }

    fn with_token(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }
}

/// Returns the result in a response, which is JSON or an event stream.
fn result_of(body: &str) -> Option<Value> {
    let result = |text: &str| serde_json::from_str::<Value>(text).ok()?.get("result").cloned();
    result(body).or_else(|| body.lines().filter_map(|line| line.strip_prefix("data:")).find_map(result))
}
