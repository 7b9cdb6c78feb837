//! `satellite import`

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::Args;
use mcp_satellite_clients::{Client, ClientFile, FileFormat, Machine, describe_file, existing_files};
use serde::Serialize;

use super::confirm::confirm;
use super::connect::machine::user_machine;
use super::file_diff::render_diff;
use super::{BAD_INPUT, CommandFailure, DONE, FAILED, print_error, print_json, print_text, printable, to_json};
use crate::import::{FileImport, Import, ImportError, ImportOutcome, ServerImport};
use mcp_satellite_files::user_dirs;

/// Arguments of `satellite import`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without an argument, lists the files of all clients with their servers, and changes nothing:
  satellite import
  satellite import cursor --dry-run
  satellite import claude-code vscode
  satellite import project/.mcp.json

The configuration is edited: comments and order remain. Secrets in clear text move to files in secrets/ beside it.

Clients: claude-code, claude-desktop, cursor, vscode, windsurf, cline, roo-code, continue, zed, codex, gemini, goose, \
opencode, lmstudio, amazon-q, junie.

The servers of a project's file are imported only if the file is named, or after a question for each command; --yes does \
not answer it.")]
pub(super) struct ImportCommand {
    /// Client, or path of a client's configuration file
    #[arg(value_name = "CLIENT|FILE")]
    sources: Vec<String>,
    /// Configuration to edit [default: ~/.config/mcp-satellite/satellite.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Show the changes and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Write without a question
    #[arg(long)]
    yes: bool,
    /// Print {"config": path, "written": bool, "files": [{client, file, notes}], "servers": [{client, file, name, id,
    /// outcome, target, reason, notes, secrets}]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ImportReport<'a> {
    config: &'a Path,
    written: bool,
    files: &'a [FileImport],
    servers: &'a [ServerImport],
}

impl From<ImportError> for CommandFailure {
    fn from(error: ImportError) -> Self {
        let code = match &error {
            ImportError::Read { .. }
            | ImportError::OtherOwner { .. }
            | ImportError::Client(_)
            | ImportError::Configuration { .. } => BAD_INPUT,
            ImportError::SecretsFolder(_) | ImportError::Edit(_) => FAILED,
        };
        Self::new(code, error.to_string())
    }
}

impl ImportCommand {
    pub(super) fn run(self) -> Result<u8, CommandFailure> {
        // The current directory is the project, unless it is the home directory.
        let user = user_machine()?;
        let project = std::env::current_dir().ok().filter(|current| *current != user.home);
        let machine = Machine { project, ..user };
        let config = match &self.config {
            Some(path) => std::path::absolute(path)?,
            None => default_configuration(&machine),
        };
        let lists_only = self.sources.is_empty();
        let files = self.files(&machine)?;
        let mut import = match Import::new(&config, &machine.home) {
            Err(error) if lists_only => {
                print_error(&error.to_string());
                Import::preview(&config, &machine.home)
            }
            import => import?,
        };
        let can_ask = std::io::stdin().is_terminal() && !lists_only && !self.dry_run && !self.json;
        let mut unreadable = false;
        for (file, is_named) in &files {
            let mut confirm = |server: &ServerImport| can_ask.then(|| confirm_server(server));
            match import.add_file(file, *is_named, &mut confirm) {
                Ok(()) => {}
                Err(error) if *is_named => return Err(error.into()),
                Err(error) => {
                    print_error(&error.to_string());
                    unreadable = true;
                }
            }
        }
        let writes = !lists_only && !self.dry_run && import.has_changes();
        if !self.json {
            if files.is_empty() {
                print_text("no configuration of an MCP client was found");
            }
            print_servers(&import, lists_only || self.dry_run);
            if !lists_only && import.has_changes() {
                print_changes(&import, &config)?;
            }
        }
        let mut written = false;
        if writes {
            if self.json && !self.yes {
                return Err(CommandFailure::new(BAD_INPUT, "nothing was changed: add --yes or --dry-run to --json"));
            }
            if !confirm("write these changes?", self.yes)? {
                return Err(CommandFailure::new(FAILED, "nothing was changed"));
            }
            import.write()?;
            written = true;
        }
        if self.json {
            print_json(&to_json(&ImportReport {
                config: &config,
                written,
                files: &import.files,
                servers: &import.servers,
            })?);
        } else if written {
            print_written(&config);
        } else if lists_only {
            print_text("next: `satellite import CLIENT --dry-run`");
        } else if !import.has_changes() {
            print_text("nothing to change");
        }
        Ok(if unreadable && !lists_only { FAILED } else { DONE })
    }

    /// Returns the files to read, and whether each is named by its path.
    fn files(&self, machine: &Machine) -> Result<Vec<(ClientFile, bool)>, CommandFailure> {
        if self.sources.is_empty() {
            return Ok(existing_files(machine).into_iter().map(|file| (file, false)).collect());
        }
        let mut files: Vec<(ClientFile, bool)> = Vec::new();
        for source in &self.sources {
            if let Ok(client) = source.parse::<Client>() {
                let of_client = existing_files(machine).into_iter().filter(|file| file.client == client);
                let before = files.len();
                files.extend(of_client.map(|file| (file, false)));
                if files.len() == before {
                    let message = format!("no configuration of {client} was found; name the file with its path");
                    return Err(CommandFailure::new(BAD_INPUT, message));
                }
                continue;
            }
            let path = std::path::absolute(source)?;
            if !path.is_file() {
                let message =
                    format!("`{source}` is neither a client nor a file; `satellite import` lists the clients");
                return Err(CommandFailure::new(BAD_INPUT, message));
            }
            let file = describe_file(machine, &path).ok_or_else(|| {
                let message =
                    format!("cannot read `{source}`: its name does not end in .json, .jsonc, .toml, .yaml or .yml");
                CommandFailure::new(BAD_INPUT, message)
            })?;
            files.push((file, true));
        }
        Ok(files)
    }
}

/// Returns the path of the configuration that an import edits.
pub(super) fn default_configuration(machine: &Machine) -> PathBuf {
    machine.config_home.join("mcp-satellite/satellite.toml")
}

/// Prints where the servers are now, and the next step.
pub(super) fn print_written(config: &Path) {
    let is_default = user_dirs::config_dir().is_some_and(|default| config.parent() == Some(&*default));
    let next =
        if is_default { "satellite up".to_owned() } else { format!("satellite run --config {}", config.display()) };
    print_text(&format!("written to {}; next: `{next}`; a running satellite applies it itself", config.display()));
}

/// Prints the changes of the configuration.
pub(super) fn print_changes(import: &Import<'_>, config: &Path) -> Result<(), CommandFailure> {
    let (before, after, added) = import.texts()?;
    print_text(&render_diff(config, FileFormat::Toml, before, Some(after.as_bytes()), &added));
    Ok(())
}

/// Prints the notes and the servers of each file, and what happens to them.
pub(super) fn print_servers(import: &Import<'_>, is_preview: bool) {
    for FileImport { client, file, notes } in &import.files {
        print_text(&format!("{} ({client})", file.display()));
        for note in notes {
            print_text(&format!("  note: {}", printable(note)));
        }
        for server in import.servers.iter().filter(|server| server.file == *file && server.client == *client) {
            let verb = match (server.outcome, is_preview) {
                (ImportOutcome::Added, true) => "would be imported",
                (ImportOutcome::Added, false) => "will be imported",
                (ImportOutcome::AlreadyImported, _) => "already imported",
                (ImportOutcome::NotImported, _) => "not imported",
            };
            let reason = server.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            print_text(&format!("  {}  {verb}{reason}", printable(&server.name)));
            if let Some(target) = &server.target {
                print_text(&format!("      {}", printable(target)));
            }
            for (place, path) in &server.secrets {
                print_text(&format!("      the secret in `{}` moves to {path}", printable(place)));
            }
            for note in &server.notes {
                print_text(&format!("      note: {}", printable(note)));
            }
        }
    }
}

/// Asks whether a server of a project's file is imported. Shows all that decides what it does.
fn confirm_server(server: &ServerImport) -> bool {
    print_text(&format!(
        "{} is a file of a project. Its server `{}` starts or connects to:",
        server.file.display(),
        printable(&server.name)
    ));
    let notes = server.notes.iter().map(|note| format!("note: {note}"));
    for line in server.target.iter().chain(&server.settings).cloned().chain(notes) {
        print_text(&format!("  {}", printable(&line)));
    }
    // A terminal that cannot be read permits nothing.
    confirm("import it?", false).unwrap_or(false)
}
