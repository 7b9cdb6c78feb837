//! The instructions of an endpoint in front of several servers: its own and those of the servers, each under its
//! server's name and within limits, because a client puts all of them into its context.

use std::fmt::Write as _;

use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;

use super::tools::CallerSnapshot;

// Maximum number of characters for one server.
const EACH_MAX: usize = 1_000;
// Maximum number of characters for all servers.
const ALL_MAX: usize = 8_000;

pub(super) fn aggregate_instructions(own: &str, caller: &CallerSnapshot) -> String {
    let servers = caller.servers().filter(|(_, view)| view.status == Status::Online);
    join_instructions(own, servers.filter_map(|(label, view)| Some((label, server_instructions(view)?))))
}

fn server_instructions(view: &InstanceView) -> Option<String> {
    let text = view.server.as_ref()?.instructions.as_deref()?;
    let text = view.spec.mask.apply(text.trim());
    (!text.is_empty()).then_some(text)
}

fn join_instructions<'a>(own: &str, servers: impl Iterator<Item = (&'a str, String)>) -> String {
    let (mut text, mut left, mut dropped) = (own.to_owned(), ALL_MAX, 0);
    for (label, instructions) in servers {
        let count = instructions.chars().count();
        if count.min(EACH_MAX) > left {
            dropped += 1;
            continue;
        }
        left -= count.min(EACH_MAX);
        let cut: String = instructions.chars().take(EACH_MAX).collect();
        let mark = if count > EACH_MAX { "…" } else { "" };
        let _ = write!(text, "\n\nInstructions of the server `{label}`:\n{cut}{mark}");
    }
    if dropped > 0 {
        let _ = write!(text, "\n\nThe instructions of {dropped} more servers are left out.");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_instructions_are_joined_under_their_names_within_limits() {
        let join = |servers: &[(&'static str, usize)]| {
            join_instructions("Own.", servers.iter().map(|(label, count)| (*label, "ä".repeat(*count))))
        };
        assert_eq!(join(&[]), "Own.");
        let text = join(&[("files", 3), ("mail", EACH_MAX + 1)]);
        assert!(
            text.starts_with("Own.\n\nInstructions of the server `files`:\näää\n\nInstructions of the server `mail`:")
        );
        assert!(text.ends_with("ä…") && text.matches('ä').count() == EACH_MAX + 3);
        let text = join(&[("one", EACH_MAX); 10]);
        assert_eq!(text.matches('ä').count(), ALL_MAX);
        assert!(text.ends_with("\n\nThe instructions of 2 more servers are left out."), "{text}");
    }
}
