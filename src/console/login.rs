//! Login, logout and assets of the pages, the same at a satellite and at a backend.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::to_bytes;
use axum::extract::{Path, Request};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{MethodRouter, get, post};
use mcp_satellite_console::changes::unknown_actor;
use mcp_satellite_console::pages::{
    ConsoleSite, answer_asset, html_response, login_page, page_after_login, problem_response, read_login_form, root_of,
};
use mcp_satellite_console::principal::Entrance;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{ApiServer, RequestContext, Routes};
use mcp_satellite_gateway::pages::PageConnection;

/// Bytes of a login form.
const FORM_MAX: usize = 4096;
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

/// Adds the login, the logout and the assets.
pub(crate) fn add<S: ApiServer>(routes: &mut Routes<S>, console: &Arc<S>, site: ConsoleSite) {
    routes.open("/console", get(|uri: Uri| async move { Redirect::to(root_of(uri.path())) }));
    routes
        .open("/console/assets/{file}", served(console, |Path(file): Path<String>| async move { answer_asset(&file) }));
    routes.open("/console/login", login_routes(console, site));
    routes.open("/console/logout", logout_route(console));
}

/// Returns the token for changes, which a page of somebody without a login does not get.
pub(super) fn csrf_token<S: ApiServer>(console: &S, context: &RequestContext) -> Option<String> {
    (context.principal.entrance == Entrance::Console).then(|| console.access().csrf_token(&context.headers))?
}

/// Returns a route of a file that needs no login.
fn served<S, F>(console: &Arc<S>, answer: impl Fn(Path<String>) -> F + Clone + Send + Sync + 'static) -> MethodRouter
where
    S: ApiServer,
    F: Future<Output = Result<Response, Problem>> + Send + 'static,
{
    let console = console.clone();
    get(move |connection: Extension<PageConnection>, uri: Uri, path: Path<String>| {
        let (console, answer) = (console.clone(), answer.clone());
        async move {
            if !console.access().is_served(&connection) {
                return Problem::not_found("path", uri.path()).into_response();
            }
            answer(path).await.unwrap_or_else(|problem| problem_response(&problem, &uri))
        }
    })
}

fn login_routes<S: ApiServer>(console: &Arc<S>, site: ConsoleSite) -> MethodRouter {
    let (shown, sent) = (console.clone(), console.clone());
    let form = get(move |connection: Extension<PageConnection>, uri: Uri| {
        let console = shown.clone();
        async move {
            if !console.access().is_served(&connection) {
                return Problem::not_found("path", uri.path()).into_response();
            }
            html_response(StatusCode::OK, login_page(site, &uri, None))
        }
    });
    form.post(move |connection: Extension<PageConnection>, request: Request| {
        let console = sent.clone();
        async move { log_in(&*console, site, &connection, request).await }
    })
}

async fn log_in<S: ApiServer>(
    console: &S,
    site: ConsoleSite,
    connection: &PageConnection,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if !console.access().is_served(connection) {
        return Problem::not_found("path", path).into_response();
    }
    let logged_in = async {
        let too_late = |_| Problem::new("bad_input", "the form did not arrive in time");
        let body = tokio::time::timeout(FORM_TIMEOUT, to_bytes(body, FORM_MAX)).await.map_err(too_late)?;
        let body = body.map_err(|error| Problem::new("bad_input", format!("cannot read the form: {error}")))?;
        let token = read_login_form(&body)?;
        console.access().log_in(&parts.headers, connection, token.expose())
    }
    .await;
    match logged_in {
        Ok(login) => {
            console.record_change("login", login.principal.as_actor(), None, Vec::new(), None);
            let mut response = Redirect::to(&page_after_login(&parts.uri)).into_response();
            if let Ok(cookie) = HeaderValue::try_from(login.set_cookie) {
                response.headers_mut().insert(header::SET_COOKIE, cookie);
            }
            response
        }
        Err(problem) => {
            let actor = unknown_actor(Entrance::Console.into(), Some(connection));
            console.record_change("login", actor, None, Vec::new(), Some(&problem));
            let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::UNAUTHORIZED);
            html_response(status, login_page(site, &parts.uri, Some(&problem.detail)))
        }
    }
}

fn logout_route<S: ApiServer>(console: &Arc<S>) -> MethodRouter {
    let console = console.clone();
    post(move |connection: Extension<PageConnection>, request: Request| {
        let console = console.clone();
        async move {
            let (parts, _) = request.into_parts();
            if !console.access().is_served(&connection) {
                return Problem::not_found("path", parts.uri.path()).into_response();
            }
            let principal = match console.access().authenticate(&parts, &connection, true) {
                Ok(principal) => principal,
                Err(problem) => {
                    let actor = unknown_actor(Entrance::Console.into(), Some(&connection));
                    console.record_change("logout", actor, None, Vec::new(), Some(&problem));
                    return problem.at(parts.uri.path()).into_response();
                }
            };
            let cookie = console.access().log_out(&parts.headers);
            console.record_change("logout", principal.as_actor(), None, Vec::new(), None);
            (StatusCode::NO_CONTENT, [(header::SET_COOKIE, cookie)]).into_response()
        }
    })
}
