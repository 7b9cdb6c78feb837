//! The entry that connects a client: the bridge, or the endpoint with a reference to the token.

use std::path::Path;

use clap::Args;
use mcp_satellite_clients::{Client, EntryForm, SatelliteEntry, TOKEN_VARIABLE, TokenReference, supported_forms};
use mcp_satellite_files::user_dirs;

use crate::cli::args::shell_word;
use crate::cli::exit::{BAD_INPUT, CommandFailure, FAILED};
use crate::cli::installed_binary::installed_binary;
use crate::cli::print::print_error;
use crate::console::api::{ConsoleFilter, EndpointStatus, StatusReply};
use crate::console::client::ConsoleClient;

/// Options of the entry.
#[derive(Debug, Args)]
pub(super) struct EntryArgs {
    /// Connect to the endpoint of the running satellite over HTTP. The entry refers to the token by an environment variable
    /// or by a file, whichever the client supports
    #[arg(long)]
    http: bool,
    /// Act as this user (slugs or ids) [default: the only user, or the one whose token the satellite stores]
    #[arg(long, value_name = "TEAM/USER", conflicts_with = "http")]
    user: Option<String>,
    /// Connect to one server only, by the name that `satellite status` shows
    #[arg(long, value_name = "NAME", conflicts_with = "flat")]
    server: Option<String>,
    /// Offer the tools of all servers under their own names
    #[arg(long, conflicts_with = "http")]
    flat: bool,
}

impl EntryArgs {
    /// Returns the entry for `client`, and prints warnings about it.
    pub(super) async fn build(&self, client: Client, data_dir: &Path) -> Result<SatelliteEntry, CommandFailure> {
        if self.http {
            return self.http_entry(client, data_dir).await;
        }
        let command = installed_binary()?;
        let command = command.to_str().ok_or_else(|| {
            let message =
                format!("cannot write the entry: the path `{}` is not UTF-8; move the executable", command.display());
            CommandFailure::new(FAILED, message)
        })?;
        let mut args = vec!["stdio".to_owned()];
        let mut add = |option: &str, value: &str| args.extend([option.to_owned(), value.to_owned()]);
        if let Some(server) = &self.server {
            add("--server", server);
        }
        if let Some(user) = &self.user {
            add("--user", user);
        }
        let directory = std::path::absolute(data_dir)?;
        if !is_default(&directory) {
            add("--data-dir", &directory.to_string_lossy());
        }
        if self.flat {
            args.push("--flat".to_owned());
        }
        Ok(SatelliteEntry::Stdio { command: command.to_owned(), args })
    }

    async fn http_entry(&self, client: Client, data_dir: &Path) -> Result<SatelliteEntry, CommandFailure> {
        let forms = supported_forms(client);
        let bad = |message: String| CommandFailure::new(BAD_INPUT, message);
        if forms.iter().all(|form| *form == EntryForm::Stdio) {
            let why = "the client replaces no reference to a token in headers";
            return Err(bad(format!("cannot connect {client} over HTTP: {why}; connect it without --http")));
        }
        let status: StatusReply = ConsoleClient::new(data_dir)?.get("/v1/status", &ConsoleFilter::default()).await?;
        let Some(EndpointStatus { url, auth, token_file, .. }) = status.satellite.endpoint else {
            let why = "the satellite has no MCP endpoint";
            return Err(bad(format!("cannot connect {client} over HTTP: {why}; add [gateway] to its configuration")));
        };
        if auth == "none" {
            let why = "the endpoint uses no token";
            return Err(bad(format!("cannot connect {client} over HTTP: {why}; connect it without --http")));
        }
        let url = match &self.server {
            Some(server) => format!("{}/i/{server}/mcp", url.strip_suffix("/mcp").unwrap_or(&url)),
            None => url,
        };
        let token = match token_file {
            Some(file) if forms.contains(&EntryForm::HttpFile) => TokenReference::File(file),
            file if forms.contains(&EntryForm::HttpEnvironment) => {
                let value = file.map_or_else(|| "TOKEN".to_owned(), |file| format!("\"$(cat {})\"", shell_word(&file)));
                print_error(&format!(
                    "the entry refers to the environment variable {TOKEN_VARIABLE}; set it where {client} is started: \
                     export {TOKEN_VARIABLE}={value}"
                ));
                TokenReference::Environment(TOKEN_VARIABLE.to_owned())
            }
            _ => {
                let why = "the satellite stores no token for its users";
                return Err(bad(format!("cannot connect {client} over HTTP: {why}; connect it without --http")));
            }
        };
        Ok(SatelliteEntry::Http { url, token })
    }
}

/// Returns true if a command without `--data-dir` finds this directory from everywhere.
fn is_default(directory: &Path) -> bool {
    std::env::var_os("SATELLITE_DATA_DIR").is_none()
        && user_dirs::data_dir().is_some_and(|default| default == directory)
}
