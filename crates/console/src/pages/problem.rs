//! Errors as pages.

use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
use maud::html;

use super::layout::{bare_page, with_commands};
use super::{html_response, login_link, root_of, shown};
use crate::problem::Problem;

/// Returns the page about a problem; without a valid login, the way to the login page.
pub fn problem_response(problem: &Problem, uri: &Uri) -> Response {
    let root = root_of(uri.path());
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if status == StatusCode::UNAUTHORIZED {
        let mut response = html_response(StatusCode::SEE_OTHER, html! {});
        let target = HeaderValue::try_from(login_link(uri));
        response.headers_mut().insert(header::LOCATION, target.unwrap_or(HeaderValue::from_static("login")));
        return response;
    }
    let content = html! {
        h1 { (problem.title) }
        p { (shown(&problem.detail)) }
        @if let Some(step) = &problem.details.next_step { p { "Next step: " (with_commands(step)) } }
        p { a href={ (root) "./" } { "Overview" } " · " a href={ (root) "login" } { "Log in with another token" } }
    };
    html_response(status, bare_page(root, "problem", &problem.title, &content))
}
