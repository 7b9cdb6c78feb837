//! Parts of the searches for recorded calls and lines that a satellite and a backend share.

use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::event::{EventSubject, RequestLine, rfc3339};
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::v1::{CallConditions, CallEntry};
use mcp_satellite_store::journal::{LinePosition, StoredCallQuery, StoredLineQuery};

/// Time limit of one search. A page then contains what was found, and the position to continue from.
pub(crate) const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the filter for calls of the instances that `lines` selects.
pub(crate) fn stored_calls(lines: StoredLineQuery, conditions: &CallConditions) -> Result<StoredCallQuery, Problem> {
    let CallConditions { tool, success, fate, client, since, until, limit: _, cursor: _ } = conditions.clone();
    let (since, until) = (time("since", since.as_deref())?, time("until", until.as_deref())?);
    Ok(StoredCallQuery { lines: StoredLineQuery { since, until, ..lines }, tool, success, fate, client })
}

/// Returns a call as the API shows it.
pub(crate) fn call_entry(seq: u64, subject: &EventSubject, call: RequestLine) -> CallEntry {
    CallEntry {
        seq,
        instance: subject.process_id.to_string(),
        team_id: subject.team_id.to_string(),
        user_id: subject.user_id.to_string(),
        server: subject.server_slug.to_string(),
        call,
    }
}

pub(super) fn time(name: &str, text: Option<&str>) -> Result<Option<Timestamp>, Problem> {
    let why = || Problem::new("bad_input", format!("`{name}` is not {}", rfc3339::EXPECTED));
    text.map(|text| rfc3339::parse(text).ok_or_else(why)).transpose()
}

pub(crate) fn position_text(LinePosition { seq, returned }: LinePosition) -> String {
    format!("{seq}.{returned}")
}

pub(crate) fn read_position(cursor: &str) -> Result<LinePosition, Problem> {
    let why = || Problem::new("bad_input", "`cursor` is not the `next` of a previous page");
    let (seq, returned) = cursor.split_once('.').ok_or_else(why)?;
    Ok(LinePosition { seq: seq.parse().map_err(|_| why())?, returned: returned.parse().map_err(|_| why())? })
}
