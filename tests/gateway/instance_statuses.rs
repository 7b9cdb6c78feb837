//! Responses of `/i/{instance}/mcp` in each status of the instance: the reason of a failure and the next step.
//! Instances of other users look nonexistent.

use mcp_satellite::actors::model::exit::{CallError, CallFate};
use mcp_satellite::actors::model::policy::ReconnectPolicy;
use mcp_satellite::actors::model::remedy::Remedy;
use mcp_satellite::actors::model::spec::ProcessLifetime;
use mcp_satellite::actors::model::status::Status;
use mcp_satellite::gateway::refusal::{CallRefusal, CallTarget};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::Duration;

use super::client::request;
use super::whole_satellite::{Server, SessionClient, TestSatellite, initialize_request};

/// Longer than the test runs.
const LONG: Duration = Duration::from_secs(3600);
const CALL_TIMEOUT: Duration = Duration::from_millis(300);

async fn start() -> TestSatellite {
    TestSatellite::start_with(|settings| settings.limits.request_timeout = Some(CALL_TIMEOUT)).await
}

/// Sends `initialize` and returns the response.
async fn initialize(satellite: &TestSatellite, name: &str) -> Value {
    satellite.connect(name).await.post(&initialize_request(json!({}))).await.json()
}

async fn call_echo(client: &mut SessionClient) -> Value {
    client.call(3, "tools/call", json!({"name": "echo", "arguments": {"text": "x"}})).await
}

/// Asserts that the endpoint rejected a request with this kind, status, reason and next step, in words and as data. A
/// tool call gets a tool error, which a model sees; other requests get a JSON-RPC error.
fn assert_rejected(answer: &Value, kind: &str, status: Value, reason: &str, next_step: &str) {
    let (error, result) = (&answer["error"], &answer["result"]);
    let (message, data) = if result["isError"] == true {
        (&result["content"][0]["text"], &result["_meta"]["mcp-satellite/error"])
    } else {
        assert_eq!(error["code"], -32000, "{answer}");
        (&error["message"], &error["data"])
    };
    assert_eq!((&data["kind"], &data["status"]), (&json!(kind), &status), "{answer}");
    let message = message.as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(message.contains(reason) && message.ends_with(next_step), "{message}");
    assert_eq!(data["next_step"], next_step);
}

/// The next step for a client of a single instance.
fn next_step(error: &CallError, status: Status, name: &str) -> String {
    let full = format!("{name}-acme-alice-{name}");
    let missing = ["API_KEY".to_owned()];
    let target = CallTarget { label: None, name: &full, missing: &missing };
    CallRefusal::from_call_error(error, Some(status), &target).next_step.unwrap()
}

fn next_step_in(status: Status, name: &str) -> String {
    let remedy = Remedy::for_status(status, status == Status::Offline, false);
    next_step(&CallError::Refused { status, message: String::new(), remedy }, status, name)
}

#[tokio::test]
async fn online_and_dormant_servers_answer() {
    let satellite = start().await;
    satellite.online(Server::sim("awake", &[])).await;
    let id = satellite.install(Server::sim("asleep", &[]).lifetime(ProcessLifetime::Lazy)).await;
    satellite.wait_until(&id, |view| view.status == Status::Online && view.dormant && view.pid.is_none()).await;
    for name in ["awake", "asleep"] {
        assert_eq!(initialize(&satellite, name).await["result"]["serverInfo"]["name"], "sim-server");
        let mut client = satellite.client(name, json!({})).await;
        assert_eq!(call_echo(&mut client).await["result"]["content"][0]["text"], r#""x""#);
    }
    satellite.end().await;
}

#[tokio::test]
async fn a_call_waits_for_a_starting_server_until_its_timeout() {
    let satellite = start().await;
    let id = satellite.install(Server::sim("slow", &["--handshake-delay", "200ms"])).await;
    assert_ne!(satellite.runtime.status(&id).unwrap().status, Status::Online);
    assert_eq!(initialize(&satellite, "slow").await["result"]["serverInfo"]["name"], "sim-server");

    let restarts = |policy: &mut mcp_satellite::actors::model::policy::Policy| policy.restart.delays = vec![LONG];
    let id = satellite.online(Server::sim("crashed", &[]).policy(restarts)).await;
    let mut client = satellite.client("crashed", json!({})).await;
    let pid = satellite.runtime.status(&id).unwrap().pid.unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL).unwrap();
    satellite.wait_until(&id, |view| view.status == Status::Connecting).await;
    let error = CallError::TimedOut { after: CALL_TIMEOUT, fate: CallFate::NotSent };
    let answer = call_echo(&mut client).await;
    let next = next_step(&error, Status::Connecting, "crashed");
    assert_rejected(&answer, "timed_out", json!("connecting"), &error.to_string(), &next);
    assert_eq!(answer["result"]["_meta"]["mcp-satellite/error"]["fate"], "not_sent");
    // The server's `initialize` result is known, so a client can connect and wait.
    assert_eq!(initialize(&satellite, "crashed").await["result"]["serverInfo"]["name"], "sim-server");
    satellite.end().await;
}

#[tokio::test]
async fn a_server_that_needs_a_person_fails_calls_at_once_with_the_next_step() {
    let satellite = start().await;
    let id = satellite.online(Server::sim("stopped", &[])).await;
    let mut client = satellite.client("stopped", json!({})).await;
    satellite.runtime.stop(&id).await.unwrap();
    assert_rejected(
        &call_echo(&mut client).await,
        "refused",
        json!("offline"),
        "stopped",
        &next_step_in(Status::Offline, "stopped"),
    );

    let id = satellite.online(Server::sim("failed", &[]).policy(|policy| policy.restart.max_crashes = 1)).await;
    let mut client = satellite.client("failed", json!({})).await;
    let pid = satellite.runtime.status(&id).unwrap().pid.unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL).unwrap();
    satellite.wait_until(&id, |view| view.status == Status::PermanentlyFailed).await;
    let answer = call_echo(&mut client).await;
    let (failed, next) = (json!("permanently_failed"), next_step_in(Status::PermanentlyFailed, "failed"));
    assert_rejected(&answer, "refused", failed.clone(), "Manual restart required", &next);

    // A server that never started has no `initialize` result.
    let id =
        satellite.install(Server::command("never", "/bin/false", &[]).policy(|policy| policy.restart.max_crashes = 1));
    let id = id.await;
    satellite.wait_until(&id, |view| view.status == Status::PermanentlyFailed).await;
    let next = next_step_in(Status::PermanentlyFailed, "never");
    assert_rejected(&initialize(&satellite, "never").await, "refused", failed, "Manual restart required", &next);

    let id = satellite.install(Server::sim("unset", &[]).requires("API_KEY")).await;
    satellite.wait_until(&id, |view| view.status == Status::AwaitingUserConfig).await;
    let (awaiting, next) = (json!("awaiting_user_config"), next_step_in(Status::AwaitingUserConfig, "unset"));
    assert_rejected(&initialize(&satellite, "unset").await, "refused", awaiting, "API_KEY", &next);
    satellite.end().await;
}

/// The address of a server that answers every request with 401.
async fn unauthorized() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut peer, _)) = listener.accept().await {
            let mut request = [0; 4096];
            // The response does not depend on the request.
            let _ = peer.read(&mut request).await;
            let _ =
                peer.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        }
    });
    url
}

#[tokio::test]
async fn an_unreachable_remote_server_is_retried_and_the_error_is_reported() {
    let satellite = start().await;
    // A port that is closed again.
    let closed_url = format!("http://{}/mcp", TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap());
    let id = satellite.install(Server::remote("away", &closed_url)).await;
    satellite.wait_until(&id, |view| view.status == Status::Offline).await;
    let answer = initialize(&satellite, "away").await;
    let data = &answer["error"]["data"];
    assert_eq!((&data["kind"], &data["status"]), (&json!("reconnecting"), &json!("reconnecting")), "{answer}");
    assert!(data["next_retry_ms"].is_u64() && data["last_attempt"].is_string() && data["last_error"].is_string());
    assert!(answer["error"]["message"].as_str().unwrap().ends_with(data["next_step"].as_str().unwrap()));

    let once = ReconnectPolicy { attempts_max: Some(1), ..ReconnectPolicy::bounded() };
    let id = satellite.install(Server::remote("given-up", &closed_url).policy(|policy| policy.reconnect = once)).await;
    satellite.wait_until(&id, |view| view.status == Status::Error).await;
    let answer = initialize(&satellite, "given-up").await;
    assert_eq!(answer["error"]["data"]["kind"], "reconnecting", "{answer}");

    let id = satellite.install(Server::remote("locked", &unauthorized().await)).await;
    satellite.wait_until(&id, |view| view.status == Status::RequiresReauth).await;
    let next = next_step_in(Status::RequiresReauth, "locked");
    assert_rejected(&initialize(&satellite, "locked").await, "refused", json!("requires_reauth"), "", &next);
    satellite.end().await;
}

#[tokio::test]
async fn the_instance_of_another_user_looks_nonexistent() {
    let satellite = start().await;
    let bobs = satellite.online(Server::sim("files", &[]).for_user("bob")).await;
    satellite.online(Server::sim("own", &[])).await;
    let session = satellite.client("own", json!({})).await.posts.session;
    let full = satellite.runtime.status(&bobs).unwrap().spec.name.clone();
    let call = request(1, "tools/list", json!({})).to_string();
    let initialize_request = initialize_request(json!({})).to_string();
    for (method, body, session, status) in [
        ("POST", initialize_request.as_str(), None, 404),
        // Without a session the instance is not looked up.
        ("POST", &call, None, 400),
        ("POST", &call, session.clone(), 404),
        ("GET", "", session.clone(), 404),
        ("DELETE", "", session, 404),
    ] {
        let mut answers = Vec::new();
        for name in ["files", &*full, "nothing"] {
            let mut client = satellite.connect(name).await;
            client.session.clone_from(&session);
            let mut answer = client.ask(method, &[], body).await;
            answer.head.headers.retain(|(name, _)| name != "date");
            assert_eq!(answer.head.status, status);
            answers.push((answer.head.headers, answer.body));
        }
        assert!(answers.iter().all(|answer| *answer == answers[2]), "{method}: {answers:?}");
    }
    satellite.end().await;
}
