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

pub(crate) fn page_size(limit: Option<usize>) -> Result<usize, Problem> {
    let limit = limit.unwrap_or(PAGE_DEFAULT);
    let why = || Problem::new("bad_input", format!("`limit` must be between 1 and {PAGE_MAX}"));
    (1..=PAGE_MAX).contains(&limit).then_some(limit).ok_or_else(why)
}

/// Position of an instance in a list: the key of the order, and the name.
pub(crate) type Place = (String, String);

/// A page of a sorted list.
pub(crate) struct SortedPage<T> {
    /// Number of items on all pages.
    pub(crate) total: usize,
    pub(crate) items: Vec<T>,
    /// Value of `cursor` for the next page.
    pub(crate) next: Option<String>,
}

/// Sorts items by their places and returns those after `cursor`.
pub(crate) fn sorted_page<T>(
    mut found: Vec<(Place, T)>,
    descending: bool,
    cursor: Option<&str>,
    limit: Option<usize>,
) -> Result<SortedPage<T>, Problem> {
    let limit = page_size(limit)?;
    let after = cursor.map(read_cursor).transpose()?;
    found.sort_by(|(one, _), (other, _)| if descending { other.cmp(one) } else { one.cmp(other) });
    let total = found.len();
    let is_after =
        |place: &Place| after.as_ref().is_none_or(|after| if descending { place < after } else { place > after });
    let mut rest = found.into_iter().filter(|(place, _)| is_after(place)).peekable();
    let page: Vec<_> = rest.by_ref().take(limit).collect();
    let next = page.last().filter(|_| rest.peek().is_some()).map(|((key, name), _)| format!("{key}:{name}"));
    Ok(SortedPage { total, items: page.into_iter().map(|(_, item)| item).collect(), next })
}

fn read_cursor(cursor: &str) -> Result<Place, Problem> {
    let (key, name) = cursor
        .split_once(':')
        .ok_or_else(|| Problem::new("bad_input", "`cursor` is not the `next` of a previous page"))?;
    Ok((key.to_owned(), name.to_owned()))
}

/// Returns the text of a header; `None` if it is absent or empty.
pub(crate) fn header_text<'a>(context: &'a RequestContext, name: &str) -> Option<&'a str> {
    context.headers.get(name)?.to_str().ok().filter(|text| !text.is_empty())
}

pub(super) fn problem(failure: Box<RequestFailure>) -> Problem {
    (*failure).into()
}
