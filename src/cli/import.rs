//! `satellite import`

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use mcp_satellite_clients::{Client, ClientFile, Machine, describe_file, existing_files};
use serde::Serialize;
use similar::{ChangeTag, TextDiff};

use super::connect::machine::user_machine;
use super::{BAD_INPUT, CommandFailure, DONE, FAILED, print_error, print_json, print_text, printable, to_json};
use crate::config::mask_text;
use crate::import::{Import, ImportError, ImportOutcome, ServerImport};
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
    /// Print {"config": path, "written": bool, "servers": [{client, file, name, id, outcome, target, reason, notes, secrets}]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ImportReport<'a> {
    config: &'a Path,
    written: bool,
    servers: &'a [ServerImport],
}

impl From<ImportError> for CommandFailure {
    fn from(error: ImportError) -> Self {
        let code = match &error {
            ImportError::Read { .. }
            | ImportError::OtherOwner { .. }
            | ImportError::Client(_)
            | ImportError::Configuration { .. } => BAD_INPUT,
            ImportError::SecretsFolder { .. } | ImportError::Write(_) => FAILED,
        };
        Self::new(code, error.to_string())
    }
}

impl ImportCommand {
    pub(super) fn run(self) -> Result<u8, CommandFailure> {
        // The current directory is the project, unless it is the home directory.
        let machine = user_machine()?;
        let project = std::env::current_dir().ok().filter(|current| *current != machine.home);
        let machine = Machine { project, ..machine };
        let config = self.config.clone().unwrap_or_else(|| default_configuration(&machine));
        let lists_only = self.sources.is_empty();
        let files = self.files(&machine)?;
        let mut import = Import::new(&config, &machine.home)?;
        let can_ask = std::io::stdin().is_terminal() && !lists_only && !self.dry_run && !self.json;
        let mut unreadable = false;
        for (file, is_named) in &files {
            let mut confirm = |server: &ServerImport| can_ask.then(|| ask_for_server(server));
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
            print_servers(&import, files.iter().map(|(file, _)| file), lists_only || self.dry_run);
            if !lists_only && import.has_changes() {
                print_changes(&import, &config);
            }
        }
        let mut written = false;
        if writes {
            if !self.yes && !can_ask {
                return Err(CommandFailure::new(
                    BAD_INPUT,
                    "nothing was written: give --yes, or --dry-run for a preview",
                ));
            }
            if !self.yes && !ask("Write these changes?") {
                print_text("nothing was written");
                return Ok(FAILED);
            }
            import.write()?;
            written = true;
        }
        if self.json {
            print_json(&to_json(&ImportReport { config: &config, written, servers: &import.servers })?);
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

/// Prints the servers of each file, and what happens to them.
pub(super) fn print_servers<'a>(
    import: &Import<'_>,
    files: impl IntoIterator<Item = &'a ClientFile>,
    is_preview: bool,
) {
    for file in files {
        print_text(&format!("{} ({})", file.path.display(), file.client));
        for server in import.servers.iter().filter(|server| server.file == file.path) {
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

/// Prints the changes as a unified diff. An import only adds lines, which contain no secrets. The lines around them are
/// the user's, so they are masked.
pub(super) fn print_changes(import: &Import<'_>, config: &Path) {
    let (before, after) = import.texts();
    let masked = mask_text(before);
    let masked: Vec<&str> = masked.lines().collect();
    let diff = TextDiff::from_lines(before, &after);
    let mut lines = Vec::new();
    for (index, group) in diff.grouped_ops(2).iter().enumerate() {
        if index > 0 {
            lines.push("  …".to_owned());
        }
        for change in group.iter().flat_map(|operation| diff.iter_changes(operation)) {
            let old = change.old_index().and_then(|line| masked.get(line)).copied().unwrap_or_default();
            lines.push(match change.tag() {
                ChangeTag::Insert => format!("+ {}", change.value().trim_end()),
                ChangeTag::Delete => format!("- {old}"),
                ChangeTag::Equal => format!("  {old}"),
            });
        }
    }
    print_text(&format!("changes of {}:\n{}", config.display(), lines.join("\n")));
}

fn ask_for_server(server: &ServerImport) -> bool {
    let target = server.target.as_deref().unwrap_or_default();
    print_text(&format!(
        "{} is a file of a project. Its server `{}` starts:",
        server.file.display(),
        printable(&server.name)
    ));
    print_text(&format!("  {}", printable(target)));
    ask("Import it?")
}

/// Asks at the terminal. Everything but `y` means no.
fn ask(question: &str) -> bool {
    let mut stderr = std::io::stderr().lock();
    let _ = write!(stderr, "{question} [y/N] ");
    let _ = stderr.flush();
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).is_ok() && matches!(line.trim(), "y" | "Y" | "yes")
}
