//! The satellite's side of `satellite auth`.

use std::sync::Arc;

use axum::extract::{Json, State};
use mcp_satellite_actors::ControlError;
use mcp_satellite_actors::model::snapshot::InstanceView;

use super::api::{AuthBegun, AuthFinish, AuthRequest, AuthRevoked, Failure, InstanceStatus, Selector};
use super::server::{Answer, Console, resolve, shown};
use crate::oauth::{Answered, Begun, Trouble, Wanted};

pub(super) async fn begin(State(console): State<Arc<Console>>, Json(request): Json<AuthRequest>) -> Answer<AuthBegun> {
    let view = resolve(&console, &request.selector)?;
    let AuthRequest { redirect_uri, device, scopes, .. } = request;
    let wanted = Wanted { redirect_uri, device, scopes };
    let begun = console.grants.begin_flow(&view.spec, wanted).await.map_err(|trouble| unauthorized(&view, &trouble))?;
    console.runtime.see().await;
    let Json(instance) = shown(&console, &view)?;
    let nothing =
        AuthBegun { instance, flow: None, page: None, page_with_code: None, user_code: None, expires_in_seconds: None };
    Ok(Json(match begun {
        Begun::Granted => nothing,
        Begun::Page { flow, url } => AuthBegun { flow: Some(flow), page: Some(url), ..nothing },
        Begun::Device { flow, user_code, page, page_with_code, expires_in } => AuthBegun {
            flow: Some(flow),
            page: Some(page),
            page_with_code,
            user_code: Some(user_code),
            expires_in_seconds: Some(expires_in.as_secs()),
            ..nothing
        },
    }))
}

pub(super) async fn finish(
    State(console): State<Arc<Console>>,
    Json(request): Json<AuthFinish>,
) -> Answer<InstanceStatus> {
    let answered = match (request.redirect, request.code) {
        (Some(redirect), _) => Answered::Redirect(redirect.into()),
        (None, Some(code)) => Answered::Code(code.into()),
        (None, None) => Answered::Nothing,
    };
    let finished = console.grants.finish_flow(request.flow, answered).await;
    let id = finished.map_err(|trouble| Failure::new("authorization", trouble.to_string()))?;
    // It was told of a new token: what that has changed is to be seen.
    console.runtime.see().await;
    let snapshot = console.runtime.snapshot();
    let view = snapshot.get(&id).ok_or(ControlError::NotFound)?;
    shown(&console, view)
}

pub(super) async fn revoke(State(console): State<Arc<Console>>, Json(selector): Json<Selector>) -> Answer<AuthRevoked> {
    let view = resolve(&console, &selector)?;
    let (was_there, not_told) = match console.grants.give_up(&view.spec.id).await {
        Ok(was_there) => (was_there, None),
        Err(trouble) => (true, Some(trouble.to_string())),
    };
    if was_there {
        // A connection that was made with it must not go on; what comes of the attempt is the status.
        console.runtime.reconnect(&view.spec.id).await?;
    }
    let Json(instance) = shown(&console, &view)?;
    Ok(Json(AuthRevoked { instance, was_there, not_told }))
}

fn unauthorized(view: &InstanceView, trouble: &Trouble) -> Failure {
    Failure::new("authorization", format!("cannot authorize `{}`: {trouble}", view.spec.name))
}
