//! The frame of a page, the same at a satellite and at a backend.

use mcp_satellite_actors::model::event::rfc3339;
use mcp_satellite_console::pages::{ConsoleSite, PageFrame, describe_principal, root_of};
use mcp_satellite_console::routes::{ApiServer, RequestContext};

use super::login::csrf_token;

/// Returns the frame of a page that shows a revision. `name` is that of the satellite or backend; `boot` identifies its
/// process.
pub(crate) fn page_frame<S: ApiServer>(
    server: &S,
    context: &RequestContext,
    (site, name): (ConsoleSite, &str),
    (boot, revision): (&str, u64),
) -> PageFrame {
    let principal = &context.principal;
    PageFrame {
        root: root_of(context.uri.path()),
        uri: context.uri.clone(),
        site,
        satellite: name.to_owned(),
        principal: describe_principal(principal),
        role: principal.access.role,
        csrf_token: csrf_token(server, context),
        boot: boot.to_owned(),
        revision,
        at: rfc3339(jiff::Timestamp::now()),
    }
}
