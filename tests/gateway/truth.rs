//! What a client of `/i/{instance}/mcp` is told in each status of the instance: what has happened, and what to do about it.
//! What is not the caller's own does not exist.

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
use super::whole::{Attached, Server, Whole, hello};

/// Beyond the life of this test.
const LONG: Duration = Duration::from_secs(3600);
const CALL_TIMEOUT: Duration = Duration::from_millis(300);

async fn begin() -> Whole {
    Whole::begin_with(|settings| settings.limits.request_timeout = Some(CALL_TIMEOUT)).await
}

/// What `initialize` is answered.
async fn greeted(whole: &Whole, name: &str) -> Value {
    whole.connect(name).await.post(&hello(json!({}))).await.json()
}

async fn called(client: &mut Attached) -> Value {
    client.call(3, "tools/call", json!({"name": "echo", "arguments": {"text": "x"}})).await
}

/// A refusal of ours: a status, what has happened, and the next step, in words and as data. A call of a tool is answered
/// with a tool's error, which a model is shown, and anything else with an error of JSON-RPC.
fn refused(answer: &Value, kind: &str, status: Value, happened: &str, next_step: &str) {
    let (error, result) = (&answer["error"], &answer["result"]);
    let (message, data) = if result["isError"] == true {
        (&result["content"][0]["text"], &result["_meta"]["mcp-satellite/error"])
    } else {
        assert_eq!(error["code"], -32000, "{answer}");
        (&error["message"], &error["data"])
    };
    assert_eq!((&data["kind"], &data["status"]), (&json!(kind), &status), "{answer}");
    let message = message.as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(message.contains(happened) && message.ends_with(next_step), "{message}");
    assert_eq!(data["next_step"], next_step);
}

/// What a caller is told to do who has nothing but this server.
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
async fn a_server_that_is_there_answers_and_one_that_sleeps_is_there() {
    let whole = begin().await;
    whole.online(Server::sim("awake", &[])).await;
    let id = whole.install(Server::sim("asleep", &[]).keep(ProcessLifetime::Lazy)).await;
    whole.until(&id, |view| view.status == Status::Online && view.dormant && view.pid.is_none()).await;
    for name in ["awake", "asleep"] {
        assert_eq!(greeted(&whole, name).await["result"]["serverInfo"]["name"], "sim-server");
        let mut client = whole.client(name, json!({})).await;
        assert_eq!(called(&mut client).await["result"]["content"][0]["text"], r#""x""#);
    }
    whole.end().await;
}

#[tokio::test]
async fn a_server_on_its_way_is_waited_for_as_long_as_the_call_may_take() {
    let whole = begin().await;
    let id = whole.install(Server::sim("slow", &["--handshake-delay", "200ms"])).await;
    assert_ne!(whole.runtime.status(&id).unwrap().status, Status::Online);
    assert_eq!(greeted(&whole, "slow").await["result"]["serverInfo"]["name"], "sim-server");

    let restarts = |policy: &mut mcp_satellite::actors::model::policy::Policy| policy.restart.delays = vec![LONG];
    let id = whole.online(Server::sim("crashed", &[]).policy(restarts)).await;
    let mut client = whole.client("crashed", json!({})).await;
    let pid = whole.runtime.status(&id).unwrap().pid.unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL).unwrap();
    whole.until(&id, |view| view.status == Status::Connecting).await;
    let error = CallError::TimedOut { after: CALL_TIMEOUT, fate: CallFate::NotSent };
    let answer = called(&mut client).await;
    let next = next_step(&error, Status::Connecting, "crashed");
    refused(&answer, "timed_out", json!("connecting"), &error.to_string(), &next);
    assert_eq!(answer["result"]["_meta"]["mcp-satellite/error"]["fate"], "not_sent");
    // What it says of itself is known, so a client may come and wait.
    assert_eq!(greeted(&whole, "crashed").await["result"]["serverInfo"]["name"], "sim-server");
    whole.end().await;
}

#[tokio::test]
async fn a_server_that_only_a_person_can_bring_back_refuses_at_once_and_says_how() {
    let whole = begin().await;
    let id = whole.online(Server::sim("stopped", &[])).await;
    let mut client = whole.client("stopped", json!({})).await;
    whole.runtime.stop(&id).await.unwrap();
    refused(
        &called(&mut client).await,
        "refused",
        json!("offline"),
        "stopped",
        &next_step_in(Status::Offline, "stopped"),
    );

    let id = whole.online(Server::sim("failed", &[]).policy(|policy| policy.restart.max_crashes = 1)).await;
    let mut client = whole.client("failed", json!({})).await;
    let pid = whole.runtime.status(&id).unwrap().pid.unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL).unwrap();
    whole.until(&id, |view| view.status == Status::PermanentlyFailed).await;
    let answer = called(&mut client).await;
    let (failed, next) = (json!("permanently_failed"), next_step_in(Status::PermanentlyFailed, "failed"));
    refused(&answer, "refused", failed.clone(), "Manual restart required", &next);

    // One that was never there has said nothing of itself that a client could be told.
    let id = whole.install(Server::command("never", "/bin/false", &[]).policy(|policy| policy.restart.max_crashes = 1));
    let id = id.await;
    whole.until(&id, |view| view.status == Status::PermanentlyFailed).await;
    let next = next_step_in(Status::PermanentlyFailed, "never");
    refused(&greeted(&whole, "never").await, "refused", failed, "Manual restart required", &next);

    let id = whole.install(Server::sim("unset", &[]).requires("API_KEY")).await;
    whole.until(&id, |view| view.status == Status::AwaitingUserConfig).await;
    let (awaiting, next) = (json!("awaiting_user_config"), next_step_in(Status::AwaitingUserConfig, "unset"));
    refused(&greeted(&whole, "unset").await, "refused", awaiting, "API_KEY", &next);
    whole.end().await;
}

/// The address of a server that answers every request with 401.
async fn unauthorized() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut peer, _)) = listener.accept().await {
            let mut request = [0; 4096];
            // Whatever it is, and whether it is read, it is refused.
            let _ = peer.read(&mut request).await;
            let _ =
                peer.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        }
    });
    url
}

#[tokio::test]
async fn a_remote_server_that_cannot_be_reached_is_tried_and_the_reason_is_told() {
    let whole = begin().await;
    // A port that nobody has any more.
    let nobody = format!("http://{}/mcp", TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap());
    let id = whole.install(Server::remote("away", &nobody)).await;
    whole.until(&id, |view| view.status == Status::Offline).await;
    let answer = greeted(&whole, "away").await;
    let data = &answer["error"]["data"];
    assert_eq!((&data["kind"], &data["status"]), (&json!("reconnecting"), &json!("reconnecting")), "{answer}");
    assert!(data["next_retry_ms"].is_u64() && data["last_attempt"].is_string() && data["last_error"].is_string());
    assert!(answer["error"]["message"].as_str().unwrap().ends_with(data["next_step"].as_str().unwrap()));

    let once = ReconnectPolicy { attempts_max: Some(1), ..ReconnectPolicy::bounded() };
    let id = whole.install(Server::remote("given-up", &nobody).policy(|policy| policy.reconnect = once)).await;
    whole.until(&id, |view| view.status == Status::Error).await;
    let answer = greeted(&whole, "given-up").await;
    assert_eq!(answer["error"]["data"]["kind"], "reconnecting", "{answer}");

    let id = whole.install(Server::remote("locked", &unauthorized().await)).await;
    whole.until(&id, |view| view.status == Status::RequiresReauth).await;
    let next = next_step_in(Status::RequiresReauth, "locked");
    refused(&greeted(&whole, "locked").await, "refused", json!("requires_reauth"), "", &next);
    whole.end().await;
}

#[tokio::test]
async fn an_instance_of_somebody_else_is_one_that_does_not_exist() {
    let whole = begin().await;
    let theirs = whole.online(Server::sim("files", &[]).of("bob")).await;
    whole.online(Server::sim("own", &[])).await;
    let session = whole.client("own", json!({})).await.posts.session;
    let full = whole.runtime.status(&theirs).unwrap().spec.name.clone();
    let call = request(1, "tools/list", json!({})).to_string();
    let hello = hello(json!({})).to_string();
    for (method, body, session, status) in [
        ("POST", hello.as_str(), None, 404),
        // Without a session nothing is looked up at all.
        ("POST", &call, None, 400),
        ("POST", &call, session.clone(), 404),
        ("GET", "", session.clone(), 404),
        ("DELETE", "", session, 404),
    ] {
        let mut answers = Vec::new();
        for name in ["files", &*full, "nothing"] {
            let mut client = whole.connect(name).await;
            client.session.clone_from(&session);
            let mut answer = client.ask(method, &[], body).await;
            answer.head.headers.retain(|(name, _)| name != "date");
            assert_eq!(answer.head.status, status);
            answers.push((answer.head.headers, answer.body));
        }
        assert!(answers.iter().all(|answer| *answer == answers[2]), "{method}: {answers:?}");
    }
    whole.end().await;
}
