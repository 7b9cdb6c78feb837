//! Probe of the MCP clients of this user: how they are connected.

use std::path::Path;

use mcp_satellite_clients::{Client, ClientFile, ENTRY_NAME, Machine, ServerTransport, read};

use mcp_satellite_files::replace_file::read_file;

use super::finding::DoctorFinding;
use crate::cli::connect::list::{ClientConnection, ConnectionKind, client_connections};

/// Reports each client that has a configuration. `url` is the satellite's endpoint, if it is known.
pub(super) fn probe(machine: &Machine, url: Option<&str>) -> Vec<DoctorFinding> {
    let found = client_connections(machine, url).into_iter().filter(|client| client.found);
    let findings: Vec<DoctorFinding> = found.map(describe).collect();
    if findings.is_empty() {
        return vec![DoctorFinding::ok("client", "client", "no MCP client has a configuration on this machine")];
    }
    findings
}

fn describe(connection: ClientConnection) -> DoctorFinding {
    let ClientConnection { client, state, form, file, error, .. } = connection;
    let connect = format!("satellite connect {client}");
    match (state, error) {
        (ConnectionKind::Connected, _) => match missing_command(&client, Path::new(&file)) {
            Some(command) => {
                let message = format!("connected in {file}, but the entry starts `{command}`, which does not exist");
                DoctorFinding::error("client", client, message).next(format!("run `{connect}`"))
            }
            None => DoctorFinding::ok("client", client, format!("connected ({}) in {file}", form.unwrap_or_default())),
        },
        (ConnectionKind::NotConnected, _) => {
            DoctorFinding::ok("client", client, format!("not connected; its file is {file}"))
                .next(format!("run `{connect}`"))
        }
        (ConnectionKind::ForeignEntry, _) => {
            let message = format!("{file} has an entry `{ENTRY_NAME}` that does not start this satellite");
            DoctorFinding::warning("client", client, message).next(format!("rename that entry, then run `{connect}`"))
        }
        (ConnectionKind::Unknown, error) => DoctorFinding::warning("client", client, error.unwrap_or_default())
            .next("correct the file as the message says"),
    }
}

/// Returns the command of the entry if it does not exist.
fn missing_command(client: &str, path: &Path) -> Option<String> {
    let client: Client = client.parse().ok()?;
    let servers = read(&ClientFile::named(client, path), &read_file(path).ok()?.0).ok()?;
    let entry = servers.servers.into_iter().find(|server| server.name == ENTRY_NAME)?;
    let ServerTransport::Stdio { command, .. } = entry.transport else { return None };
    let command = command.as_literal()?.to_owned();
    (!Path::new(&command).exists()).then_some(command)
}
