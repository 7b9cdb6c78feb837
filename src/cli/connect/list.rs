//! `satellite connect --list`

use std::fmt::Write as _;
use std::time::Duration;

use mcp_satellite_clients::{Client, EntryForm, EntryState, Machine, entry_state, supported_forms};
use mcp_satellite_files::replace_file::EditedFile;
use serde::Serialize;
use strum::IntoEnumIterator;
use tokio::time::timeout;

use super::machine::{default_file, is_found};
use crate::cli::args::DataDirArg;
use crate::cli::exit::{CommandFailure, DONE};
use crate::cli::print::{print_text, to_json};
use crate::cli::table::{new_table, render_table};
use crate::console::api::{ConsoleFilter, StatusReply};
use crate::console::client::ConsoleClient;

/// Time for the running satellite to name its endpoint.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// A client and how it is connected.
#[derive(Debug, Serialize)]
pub(crate) struct ClientConnection {
    pub(crate) client: String,
    /// True if the client has a configuration or a directory for one.
    pub(crate) found: bool,
    pub(crate) state: ConnectionKind,
    /// Kind of the entry.
    pub(crate) form: Option<&'static str>,
    /// File that `satellite connect` changes.
    pub(crate) file: String,
    /// Reason why the state is unknown.
    pub(crate) error: Option<String>,
    /// Kinds of entries that the client supports.
    supported: Vec<&'static str>,
}

/// State of a client's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ConnectionKind {
    NotConnected,
    Connected,
    /// The file has an entry `satellite` that somebody else wrote.
    ForeignEntry,
    Unknown,
}

pub(super) async fn run(machine: &Machine, data_dir: &DataDirArg, json: bool) -> Result<u8, CommandFailure> {
    let clients = client_connections(machine, endpoint_url(data_dir).await.as_deref());
    if json {
        print_text(&to_json(&clients)?);
        return Ok(DONE);
    }
    let mut table = new_table(&["CLIENT", "STATE", "FILE"]);
    for ClientConnection { client, found, state, form, file, error, .. } in &clients {
        let state = match (state, form, error) {
            (ConnectionKind::Connected, Some(form), _) => format!("connected ({form})"),
            (ConnectionKind::ForeignEntry, ..) => "has another entry `satellite`".to_owned(),
            (_, _, Some(_)) => "cannot be read".to_owned(),
            _ if *found => "not connected".to_owned(),
            _ => "not found".to_owned(),
        };
        table.add_row([client.clone(), state, file.clone()]);
    }
    let mut text = render_table(&table);
    for ClientConnection { client, error, .. } in &clients {
        if let Some(error) = error {
            let _ = write!(text, "\n{client}: {error}");
        }
    }
    print_text(&text);
    Ok(DONE)
}

/// Returns the endpoint of the running satellite, which identifies HTTP entries.
async fn endpoint_url(data_dir: &DataDirArg) -> Option<String> {
    let client = ConsoleClient::new(&data_dir.resolve().ok()?).ok()?;
    let status = timeout(STATUS_TIMEOUT, client.get::<StatusReply>("/v1/status", &ConsoleFilter::default())).await;
    Some(status.ok()?.ok()?.satellite.endpoint?.url)
}

/// Returns all clients and how they are connected. `url` is the satellite's endpoint, if it is known.
pub(crate) fn client_connections(machine: &Machine, url: Option<&str>) -> Vec<ClientConnection> {
    let describe = |client: Client| {
        let file = default_file(client, machine);
        let state = EditedFile::open(&file)
            .map_err(|error| error.to_string())
            .and_then(|opened| entry_state(client, opened.contents(), url).map_err(|error| error.to_string()));
        let (state, form, error) = match state {
            Ok(EntryState::NotConnected) => (ConnectionKind::NotConnected, None, None),
            Ok(EntryState::Connected { form }) => (ConnectionKind::Connected, Some(form_name(form)), None),
            Ok(EntryState::ForeignEntry) => (ConnectionKind::ForeignEntry, None, None),
            Err(error) => (ConnectionKind::Unknown, None, Some(error)),
        };
        ClientConnection {
            client: client.to_string(),
            found: is_found(client, machine),
            state,
            form,
            file: file.display().to_string(),
            error,
            supported: supported_forms(client).iter().map(|form| form_name(*form)).collect(),
        }
    };
    Client::iter().map(describe).collect()
}

fn form_name(form: EntryForm) -> &'static str {
    match form {
        EntryForm::Stdio => "stdio",
        EntryForm::HttpEnvironment => "http, token in an environment variable",
        EntryForm::HttpFile => "http, token in a file",
    }
}
