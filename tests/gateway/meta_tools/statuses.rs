//! Calls of servers in each status: the error for a model and the next step.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite::connect::sim::SimScript;
use mcp_satellite::gateway::answer::CallAnswer;
use mcp_satellite::gateway::tools::MetaTools;
use mcp_satellite_actors::model::failure::FailureKind;
use mcp_satellite_actors::model::policy::ReconnectPolicy;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rpc::RpcMessage;
use mcp_satellite_actors::rules::slot::RequestedState;
use serde_json::{Value, json};
use testkit::fleet::{Fleet, Server};
use testkit::scripted_servers;
use tokio::sync::oneshot;

const CALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Calls a meta-tool that must fail: its data for a program and its text for a model.
async fn call_failing(fleet: &Fleet, tool: &str, arguments: Value) -> (Value, String) {
    let tools = MetaTools::new(fleet.runtime.clone(), Arc::default());
    let request = json!({
        "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments},
    });
    let (_cancel, cancellation) = oneshot::channel();
    let message = RpcMessage::parse(request.to_string().into()).unwrap();
    let request = scripted_servers::request(message, cancellation, Some(CALL_TIMEOUT));
    let CallAnswer::Result(result) = tools.call(request).await else { panic!("the server answered: {arguments}") };
    let result: Value = serde_json::from_str(&result).unwrap();
    assert_eq!(result["isError"], true, "{result}");
    let (error, text) = (&result["_meta"]["mcp-satellite/error"], result["content"][0]["text"].as_str().unwrap());
    let next_step = error["next_step"].as_str().unwrap();
    assert!(text.ends_with(next_step), "{text}");
    (error.clone(), text.to_owned())
}

/// Calls a tool of this server, which must fail: kind, status and text of the error.
async fn call_error(fleet: &Fleet, installation: &str) -> (String, String, String) {
    let arguments = json!({"tool_path": format!("files-acme-alice-{installation}:echo"), "arguments": {"text": "a"}});
    let (error, text) = call_failing(fleet, "execute_mcp_tool", arguments).await;
    let word = |name: &str| error[name].as_str().unwrap().to_owned();
    assert_eq!(word("fate"), "not_sent", "{error}");
    (word("kind"), word("status"), text)
}

#[tokio::test(start_paused = true)]
async fn reconnect_server_does_not_start_a_server_that_a_person_stopped() {
    let fleet = Fleet::start().await;
    for server in [Server::remote("afar"), Server::new("here")] {
        let id = fleet.online(server).await;
        let name = fleet.runtime.status(&id).unwrap().spec.name.clone();
        fleet.runtime.stop(&id).await.unwrap();
        fleet.until(&id, Status::Offline).await;
        let (error, text) = call_failing(&fleet, "reconnect_server", json!({"name": name})).await;
        assert_eq!((&error["kind"], &error["status"]), (&json!("refused"), &json!("offline")));
        assert_eq!(
            text,
            format!(
                "`{name}` was stopped by a person; `satellite start {name}` starts it. \
                 Ask the user whether it should run."
            )
        );
        let view = fleet.runtime.status(&id).unwrap();
        assert_eq!((view.requested_state, view.status), (RequestedState::Stopped, Status::Offline));
    }
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_to_an_unavailable_server_returns_its_status_and_the_next_step() {
    let fleet = Fleet::with(|options| options.start_permits = 1).await;
    let bounded = ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::bounded() };
    fleet.add(Server::new("incomplete").missing("KEY")).await;
    let stopped = fleet.online(Server::new("stopped")).await;
    fleet.runtime.stop(&stopped).await.unwrap();
    fleet.until(&stopped, Status::Offline).await;
    let broken = SimScript { exit_before_handshake: true, exit_code: 1, ..SimScript::default() };
    let failed = fleet.add(Server::new("failed").script(broken)).await;
    fleet.until(&failed, Status::PermanentlyFailed).await;

    let unauthorized = || FailureKind::Unauthorized { challenge: None };
    for (installation, policy, failure, status) in [
        (
            "lost",
            ReconnectPolicy { jitter_percent: 0, ..ReconnectPolicy::default() },
            FailureKind::Refused,
            Status::Offline,
        ),
        ("exhausted", bounded, FailureKind::Refused, Status::Error),
        ("refused", ReconnectPolicy::default(), unauthorized(), Status::RequiresReauth),
    ] {
        let id = fleet.online(Server::remote(installation).policy(|all| all.reconnect = policy)).await;
        fleet.remote(&id).kill(failure);
        fleet.remote(&id).report_session_lost(FailureKind::Cut);
        fleet.until(&id, status).await;
    }

    let silent = Server::remote("silent");
    fleet.remote(&silent.spec.id).change(|manner| manner.silent_on = ["tools/list"].into());
    let silent = fleet.add(silent).await;
    fleet.until(&silent, Status::DiscoveringTools).await;

    let stubborn = SimScript { ignore_sigterm: true, ignore_eof: true, ..SimScript::default() };
    let changed = fleet.online(Server::new("changed").script(stubborn.clone())).await;
    fleet.runtime.update(Server::new("changed").script(stubborn).env("A", "b").spec).await.unwrap();
    fleet.until(&changed, Status::Restarting).await;

    // One server holds the only permit, and the other waits for it.
    let mute = SimScript { handshake_never: true, ..SimScript::default() };
    let mute = fleet.add(Server::new("mute").script(mute)).await;
    fleet.until(&mute, Status::Connecting).await;
    let waiting = fleet.add(Server::new("waiting")).await;
    fleet.until(&waiting, Status::CommandReceived).await;

    for (installation, kind, status, part) in [
        ("waiting", "timed_out", "command_received", "which is command_received: call again"),
        ("mute", "timed_out", "connecting", "which is connecting: call again"),
        ("changed", "timed_out", "restarting", "which is restarting: call again"),
        ("silent", "timed_out", "discovering_tools", "which is discovering_tools: call again"),
        (
            "incomplete",
            "refused",
            "awaiting_user_config",
            "Ask the user to run `satellite configure files-acme-alice-incomplete KEY`. The command prompts",
        ),
        ("stopped", "refused", "offline", "`satellite start files-acme-alice-stopped`"),
        ("failed", "refused", "permanently_failed", "Call reconnect_server with name `files-acme-alice-failed`"),
        ("lost", "reconnecting", "reconnecting", "call reconnect_server with name `files-acme-alice-lost`"),
        ("exhausted", "reconnecting", "reconnecting", "The satellite tries again with every call"),
        ("refused", "refused", "requires_reauth", "renew the server's credentials in the configuration"),
    ] {
        let error = call_error(&fleet, installation).await;
        assert_eq!((&*error.0, &*error.1), (kind, status), "{installation}: {}", error.2);
        assert!(error.2.contains(part), "{installation}: {}", error.2);
    }
    fleet.finish().await;
}
