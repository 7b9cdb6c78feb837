//! Parts of the handlers of the HTTP API that several of them use.

use std::sync::Arc;

use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::RequestContext;

use super::api::{InstanceSelector, RequestFailure};
use super::state::ConsoleState;

const PAGE_DEFAULT: usize = 100;
const PAGE_MAX: usize = 1000;

/// State of the handlers.
pub(super) type Api = Arc<ConsoleState>;

/// Finds the instance that the path names among those of the principal's team.
pub(super) fn find(console: &ConsoleState, context: &RequestContext) -> Result<Arc<InstanceView>, Problem> {
    let selector = InstanceSelector::of_team(context.param("instance"), context.principal.team.clone());
    console.resolve(&selector).map_err(problem)
}

pub(super) fn page_size(limit: Option<usize>) -> Result<usize, Problem> {
    let limit = limit.unwrap_or(PAGE_DEFAULT);
    let why = || Problem::new("bad_input", format!("`limit` must be between 1 and {PAGE_MAX}"));
    (1..=PAGE_MAX).contains(&limit).then_some(limit).ok_or_else(why)
}

pub(super) fn header_text<'a>(context: &'a RequestContext, name: &str) -> Option<&'a str> {
    context.headers.get(name)?.to_str().ok()
}

pub(super) fn problem(failure: Box<RequestFailure>) -> Problem {
    (*failure).into()
}
