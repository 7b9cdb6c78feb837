//! Handlers of `satellite auth` on the control socket.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Json, State};
use mcp_satellite_actors::ControlError;

use super::api::{AuthBegun, AuthFinish, AuthRequest, AuthRevoked, Failure, Selector};
use super::server::{Answer, Console, resolve};
use crate::oauth::{Answered, Begun, Trouble, Wanted};

pub(super) async fn begin(State(console): State<Arc<Console>>, Json(request): Json<AuthRequest>) -> Answer<AuthBegun> {
    let spec = Arc::clone(&resolve(&console, &request.selector)?.spec);
    let AuthRequest { redirect_uri, device, scopes, .. } = request;
    let wanted = Wanted { redirect_uri, device, scopes };
    let begun = console.grants.begin_flow(&spec, wanted).await;
    let begun = begun
        .map_err(|trouble| Failure::new("authorization", format!("cannot authorize `{}`: {trouble}", spec.name)))?;
    console.runtime.see().await;
    Ok(Json(AuthBegun::of(&spec.name, begun)))
}

pub(super) async fn finish(State(console): State<Arc<Console>>, Json(request): Json<AuthFinish>) -> Answer<()> {
    let finished = console.grants.finish_flow(request.flow, Answered::from(request)).await;
    finished.map_err(|trouble| Failure::new("authorization", trouble.to_string()))?;
    // The new token may have changed the status; the next snapshot must show it.
    console.runtime.see().await;
    Ok(Json(()))
}

pub(super) async fn revoke(State(console): State<Arc<Console>>, Json(selector): Json<Selector>) -> Answer<AuthRevoked> {
    let spec = Arc::clone(&resolve(&console, &selector)?.spec);
    let revoked = AuthRevoked::of(&spec.name, console.grants.give_up(&spec.id).await);
    if revoked.was_there {
        // A connection that used the revoked token must end. The reconnect attempt sets the new status.
        match console.runtime.reconnect(&spec.id).await {
            // A stopped instance has no connection.
            Ok(_) | Err(ControlError::Refused { .. } | ControlError::Superseded) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Json(revoked))
}

impl AuthBegun {
    pub(crate) fn of(instance: &str, begun: Begun) -> Self {
        let (mut flow, mut page, mut page_with_code, mut user_code, mut expires_in) = (None, None, None, None, None);
        match begun {
            Begun::Granted => {}
            Begun::Page { flow: number, url } => (flow, page) = (Some(number), Some(url)),
            Begun::Device(device) => {
                (flow, page, page_with_code) = (Some(device.flow), Some(device.page), device.page_with_code);
                (user_code, expires_in) = (Some(device.user_code), Some(device.expires_in));
            }
        }
        let expires_in_seconds = expires_in.as_ref().map(Duration::as_secs);
        Self { instance: instance.to_owned(), flow, page, page_with_code, user_code, expires_in_seconds }
    }
}

impl AuthRevoked {
    pub(crate) fn of(instance: &str, given_up: Result<bool, Trouble>) -> Self {
        let (was_there, not_told) = match given_up {
            Ok(was_there) => (was_there, None),
            Err(trouble) => (true, Some(trouble.to_string())),
        };
        Self { instance: instance.to_owned(), was_there, not_told }
    }
}

impl From<AuthFinish> for Answered {
    fn from(finish: AuthFinish) -> Self {
        match (finish.redirect, finish.code) {
            (Some(redirect), _) => Self::Redirect(redirect.into()),
            (None, Some(code)) => Self::Code(code.into()),
            (None, None) => Self::Nothing,
        }
    }
}
