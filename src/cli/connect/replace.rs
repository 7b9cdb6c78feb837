//! `satellite connect --replace`: the client's own servers move into the configuration of the satellite.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use mcp_satellite_clients::{
    Client, ClientFile, ClientScope, Machine, UnreadableServer, candidate_files, existing_files, read, server_names,
};

use super::edit_failure;
use crate::cli::exit::{CommandFailure, FAILED};
use crate::cli::import::{default_configuration, print_changes, print_servers, print_written};
use crate::cli::print::print_text;
use crate::import::{Import, ImportOutcome};

/// Options of the replacement.
#[derive(Debug, Args)]
pub(super) struct ReplaceArgs {
    /// Also import the client's own servers, as `satellite import` does, and remove them from the client's file. A server
    /// that cannot be imported stays there
    #[arg(long)]
    pub(super) replace: bool,
    /// With --replace: configuration that gets the servers [default: ~/.config/mcp-satellite/satellite.toml]
    #[arg(long, value_name = "FILE", requires = "replace")]
    config: Option<PathBuf>,
}

/// An import of the servers in a client's file that is not written yet.
pub(super) struct ServerReplacement<'a> {
    import: Import<'a>,
    config: PathBuf,
    file: ClientFile,
    /// Names of the servers that the satellite has after the import.
    pub(super) names: Vec<String>,
    /// Other files of the client that contain servers.
    others: Vec<PathBuf>,
}

impl ReplaceArgs {
    /// Plans the import of the servers in the client's file at `path`. The user has named the file, or it belongs to all
    /// projects of the user, so that no server needs a confirmation of its own.
    pub(super) fn plan<'a>(
        &self,
        client: Client,
        path: &Path,
        contents: &[u8],
        machine: &'a Machine,
    ) -> Result<ServerReplacement<'a>, CommandFailure> {
        let known = candidate_files(machine).into_iter().find(|file| file.client == client && file.path == path);
        let file = known.unwrap_or_else(|| ClientFile::named(client, path));
        let mut found = read(&file, contents).map_err(|error| CommandFailure::new(FAILED, error.to_string()))?;
        let editable = server_names(client, Some(contents)).map_err(|error| edit_failure(client, path, &error))?;
        found.servers.retain(|server| !server.is_satellite);
        for server in std::mem::take(&mut found.servers) {
            let place = if matches!(server.scope, ClientScope::Local(_)) {
                "it belongs to one project"
            } else if editable.contains(&server.name) {
                found.servers.push(server);
                continue;
            } else {
                "it is in a part of the file that `satellite connect` does not edit"
            };
            let reason = format!("{place}; `satellite import {client}` imports it");
            found.unreadable.push(UnreadableServer { name: server.name, scope: server.scope, reason, at: server.at });
        }
        let config = self.config.clone().unwrap_or_else(|| default_configuration(machine));
        let mut import = Import::new(&config, &machine.home)?;
        import.add_servers(&file, &found, false, &mut |_| None);
        let imported = import.servers.iter().filter(|server| server.outcome != ImportOutcome::NotImported);
        let names = imported.map(|server| server.name.clone()).collect();
        let has_servers = |file: &ClientFile| {
            let found = fs::read(&file.path).ok().and_then(|text| read(file, &text).ok());
            found.is_some_and(|found| found.servers.iter().any(|server| !server.is_satellite))
        };
        let others = existing_files(machine).into_iter().filter(|other| other.client == client && other.path != path);
        let others = others.filter(has_servers).map(|other| other.path).collect();
        Ok(ServerReplacement { import, config, file, names, others })
    }
}

impl ServerReplacement<'_> {
    /// Prints each server and the changes of the configuration.
    pub(super) fn print_preview(&self) -> Result<(), CommandFailure> {
        print_servers(&self.import, false);
        let staying = self.import.servers.iter().filter(|server| server.outcome == ImportOutcome::NotImported);
        let staying: Vec<&str> = staying.map(|server| &*server.name).collect();
        if !staying.is_empty() {
            print_text(&format!("these servers stay in {}: {}", self.file.path.display(), staying.join(", ")));
        }
        for other in &self.others {
            let (client, other) = (self.file.client, other.display());
            print_text(&format!("the servers in {other} stay there; `satellite connect {client} --file` names a file"));
        }
        if self.import.has_changes() {
            print_changes(&self.import, &self.config)?;
        }
        Ok(())
    }

    /// Writes the satellite's configuration.
    pub(super) fn write(&self) -> Result<(), CommandFailure> {
        if self.import.has_changes() { Ok(self.import.write()?) } else { Ok(()) }
    }

    /// Prints the result of the whole command.
    pub(super) fn print_result(&self) {
        if self.names.is_empty() {
            print_text("  no server was replaced");
            return;
        }
        print_text(&format!("  replaced by the satellite: {}", self.names.join(", ")));
        if self.import.has_changes() {
            print_written(&self.config);
        }
    }
}
