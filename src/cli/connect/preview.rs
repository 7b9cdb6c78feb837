//! The preview of a changed client's file.

use std::path::Path;

use mcp_satellite_clients::{Client, ClientFile, SatelliteEntry, add_entry};

use crate::cli::file_diff::render_diff;

/// Returns the difference between two versions of a client's file. Values other than those of `entry` are hidden.
pub(super) fn preview(
    client: Client,
    path: &Path,
    before: Option<&[u8]>,
    after: Option<&[u8]>,
    entry: Option<&SatelliteEntry>,
) -> String {
    let entry = entry.map(|entry| add_entry(client, None, entry).unwrap_or_default()).unwrap_or_default();
    render_diff(path, ClientFile::named(client, "").format, before, after, &String::from_utf8_lossy(&entry))
}
