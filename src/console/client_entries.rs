//! Commands and entries that connect MCP clients to this satellite.

use std::io;
use std::path::{Path, PathBuf};

use mcp_satellite_clients::{Client, SatelliteEntry, add_entry};
use mcp_satellite_console::pages::ConnectableClient;
use mcp_satellite_files::user_dirs;
use serde_json::json;
use strum::IntoEnumIterator as _;

use crate::connect::isolation::find_program;

/// Returns the path of this program that other programs can store.
///
/// # Errors
///
/// Returns the error of the system if it does not report the path.
pub(crate) fn program_path() -> io::Result<PathBuf> {
    let current = std::env::current_exe()?;
    // The kernel marks the path of a file that was deleted or replaced since the start.
    let current = match current.to_str().and_then(|path| path.strip_suffix(" (deleted)")) {
        Some(path) => PathBuf::from(path),
        None => current,
    };
    // A link such as /usr/local/bin/satellite stays valid after an upgrade.
    let in_path = find_program("satellite", None, None, false, false).ok();
    let is_this = |path: &PathBuf| path.is_absolute() && path.canonicalize().is_ok_and(|found| found == current);
    Ok(in_path.filter(is_this).unwrap_or(current))
}

/// Returns a text as one word of a shell.
pub(crate) fn shell_word(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+".contains(&byte);
    if text.bytes().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// The bridge to the satellite of a data directory.
pub(super) struct BridgeCommand {
    program: String,
    /// The data directory, if a command must name it.
    data_dir: Option<String>,
}

impl BridgeCommand {
    pub(super) fn new(data_dir: &Path) -> Self {
        let default = user_dirs::data_dir().and_then(|default| default.canonicalize().ok());
        let is_default = default.is_some_and(|default| data_dir.canonicalize().is_ok_and(|path| path == default));
        let program = program_path().map_or_else(|_| "satellite".to_owned(), |path| path.display().to_string());
        Self { program, data_dir: (!is_default).then(|| data_dir.display().to_string()) }
    }

    fn args(&self) -> Vec<String> {
        let mut args = vec!["stdio".to_owned()];
        args.extend(self.data_dir.iter().flat_map(|data_dir| ["--data-dir".to_owned(), data_dir.clone()]));
        args
    }

    /// Returns the entry that most clients read.
    pub(super) fn entry(&self) -> String {
        json!({"mcpServers": {"satellite": {"command": self.program, "args": self.args()}}}).to_string()
    }

    /// Returns the command that connects each client, and the file that `satellite connect CLIENT --print` prints.
    pub(super) fn clients(&self) -> Vec<ConnectableClient> {
        let entry = SatelliteEntry::Stdio { command: self.program.clone(), args: self.args() };
        let connectable = |client: Client| {
            let data_dir = self.data_dir.as_deref().map(|path| format!(" --data-dir {}", shell_word(path)));
            ConnectableClient {
                command: format!("satellite connect {client}{}", data_dir.unwrap_or_default()),
                // An entry of our own can be added to a new file of every client.
                file: add_entry(client, None, &entry)
                    .map(|file| String::from_utf8_lossy(&file).trim_end().to_owned())
                    .unwrap_or_default(),
            }
        };
        Client::iter().map(connectable).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_entries_name_a_data_directory_that_is_not_the_default_one() {
        let bridge = BridgeCommand { program: "/opt/satellite".to_owned(), data_dir: Some("/srv/my data".to_owned()) };
        let entry =
            r#"{"mcpServers":{"satellite":{"args":["stdio","--data-dir","/srv/my data"],"command":"/opt/satellite"}}}"#;
        assert_eq!(bridge.entry(), entry);
        for ConnectableClient { command, file } in bridge.clients() {
            assert!(command.ends_with(" --data-dir '/srv/my data'"), "{command}");
            assert!(file.contains("/opt/satellite") && file.contains("/srv/my data"), "{command}: {file}");
        }
        let bridge = BridgeCommand { data_dir: None, ..bridge };
        assert!(bridge.clients().iter().all(|client| !client.command.contains("--data-dir")));
    }
}
