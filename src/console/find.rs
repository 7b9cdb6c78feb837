//! Which instance a name means. Names are looked up, never parsed; what belongs to another team or user does not exist.

use mcp_satellite_actors::model::spec::InstanceSpec;

use super::api::{Failure, Filter, Selector};

/// The one of `all` that is meant.
pub(crate) fn find<'a, T>(
    all: &'a [T],
    spec_of: impl Fn(&T) -> &InstanceSpec,
    selector: &Selector,
) -> Result<&'a T, Box<Failure>> {
    let filter = Filter { team: selector.team.clone(), user: selector.user.clone() };
    let named = |one: &&T| *spec_of(one).name == *selector.server;
    let slugged = |one: &&T| spec_of(one).server.as_str() == selector.server;
    let own = || all.iter().filter(|one| filter.admits(spec_of(one)));
    if let Some(one) = own().find(named) {
        return Ok(one);
    }
    let matching: Vec<_> = own().filter(slugged).collect();
    match matching.as_slice() {
        [one] => Ok(one),
        [] => {
            if all.iter().any(|one| named(&one) || slugged(&one)) {
                tracing::warn!(
                    server = selector.server,
                    team = selector.team,
                    user = selector.user,
                    "a request named an instance of another team or user; it was answered as not found"
                );
            }
            let message = format!("no server `{}`; `satellite status` lists those that there are", selector.server);
            Err(Failure::new("not_found", message).into())
        }
        several => {
            let full: Vec<String> = several.iter().map(|one| format!("  {}", spec_of(one).name)).collect();
            let message = format!(
                "`{}` names {} servers; use --team, --user or one of the full names:\n{}",
                selector.server,
                several.len(),
                full.join("\n")
            );
            Err(Failure::new("ambiguous", message).into())
        }
    }
}
