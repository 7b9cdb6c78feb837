//! Handlers of `satellite auth` on the control socket.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Json, State};
use mcp_satellite_actors::ControlError;
use mcp_satellite_actors::model::snapshot::InstanceView;

use super::api::{AuthFinishRequest, AuthFlow, AuthRequest, AuthRevokeResult, InstanceSelector, RequestFailure};
use super::server::ConsoleResult;
use super::state::ConsoleState;
use mcp_satellite_remote::oauth::{FlowCompletion, FlowRequest, FlowStart, OAuthError};

pub(super) async fn begin(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<AuthRequest>,
) -> ConsoleResult<AuthFlow> {
    let AuthRequest { selector, redirect_uri, device, scopes, .. } = request;
    let begin = move |console: Arc<ConsoleState>, view: Arc<InstanceView>| async move {
        let spec = &view.spec;
        let started = console.grants.begin_flow(spec, FlowRequest { redirect_uri, device, scopes }).await;
        let failed = |error| format!("cannot authorize `{}`: {error}", spec.name);
        let started = started.map_err(|error| RequestFailure::new("authorization", failed(error)))?;
        console.runtime.sync_snapshot().await;
        Ok(flow_reply(&spec.name, started))
    };
    Ok(Json(console.run_action("auth_begin", &selector, begin).await?))
}

pub(super) async fn finish(
    State(console): State<Arc<ConsoleState>>,
    Json(request): Json<AuthFinishRequest>,
) -> ConsoleResult<()> {
    let finish = async {
        let finished = console.grants.finish_flow(request.flow, flow_completion(request)).await;
        finished.map_err(|error| RequestFailure::new("authorization", error.to_string()))?;
        // The new token may have changed the status; the next snapshot must show it.
        console.runtime.sync_snapshot().await;
        Ok(())
    };
    Ok(Json(console.record_action("auth_finish", None, finish).await?))
}

pub(super) async fn revoke(
    State(console): State<Arc<ConsoleState>>,
    Json(selector): Json<InstanceSelector>,
) -> ConsoleResult<AuthRevokeResult> {
    let revoke = |console: Arc<ConsoleState>, view: Arc<InstanceView>| async move {
        let spec = &view.spec;
        let revoked = revoke_reply(&spec.name, console.grants.revoke_grant(&spec.id).await);
        if revoked.had_grant {
            // A connection that used the revoked token must end. The reconnect attempt sets the new status.
            match console.runtime.reconnect(&spec.id).await {
                // A stopped instance has no connection.
                Ok(_) | Err(ControlError::Refused { .. } | ControlError::Superseded) => {}
                Err(error) => return Err(RequestFailure::from(error).into()),
            }
        }
        Ok(revoked)
    };
    Ok(Json(console.run_action("auth_revoke", &selector, revoke).await?))
}

pub(crate) fn flow_reply(instance: &str, started: FlowStart) -> AuthFlow {
    let (mut flow, mut page, mut page_with_code, mut user_code, mut expires_in) = (None, None, None, None, None);
    match started {
        FlowStart::Granted => {}
        FlowStart::Page { flow: number, url } => (flow, page) = (Some(number), Some(url)),
        FlowStart::Device(device) => {
            (flow, page, page_with_code) = (Some(device.flow), Some(device.page), device.page_with_code);
            (user_code, expires_in) = (Some(device.user_code), Some(device.expires_in));
        }
    }
    let expires_in_seconds = expires_in.as_ref().map(Duration::as_secs);
    AuthFlow { instance: instance.to_owned(), flow, page, page_with_code, user_code, expires_in_seconds }
}

pub(crate) fn revoke_reply(instance: &str, revoked: Result<bool, OAuthError>) -> AuthRevokeResult {
    let (had_grant, notification_error) = match revoked {
        Ok(had_grant) => (had_grant, None),
        Err(error) => (true, Some(error.to_string())),
    };
    AuthRevokeResult { instance: instance.to_owned(), had_grant, notification_error }
}

pub(crate) fn flow_completion(finish: AuthFinishRequest) -> FlowCompletion {
    match (finish.redirect, finish.code) {
        (Some(redirect), _) => FlowCompletion::Redirect(redirect.into()),
        (None, Some(code)) => FlowCompletion::Code(code.into()),
        (None, None) => FlowCompletion::Poll,
    }
}
