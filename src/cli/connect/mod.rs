//! `satellite connect`: adds the entry `satellite` to the configuration of an MCP client.

mod entry;
pub(super) mod list;
pub(super) mod machine;
mod preview;
mod records;
mod replace;

use std::path::{Path, PathBuf};

use clap::Args;
use mcp_satellite_clients::{
    Client, ConnectRecord, ContentHash, EditError, EntryState, SatelliteEntry, Undo, UndoRemainder, add_entry,
    disconnect, entry_state, entry_warnings, remove_entry, replace_servers, server_names,
};
use mcp_satellite_files::known_dirs::{DataDirLocation, recorded_dirs};
use mcp_satellite_files::replace_file::{EditedFile, FileEditError};

use self::entry::EntryArgs;
use self::machine::{client_parser, default_file, file_with_servers, user_machine};
use self::preview::preview;
use self::records::{ConnectRecords, StoredConnection, backup_name, record_name};
use self::replace::{ReplaceArgs, ServerReplacement};
use super::args::DataDirArg;
use super::confirm::confirm;
use super::exit::{BAD_INPUT, CommandFailure, DONE, FAILED};
use super::print::{print_error, print_text};

/// Connect an MCP client: add one entry `satellite` to its configuration.
///
/// The command shows the change, asks, keeps a backup in the data directory, and writes the file as a whole. Format,
/// comments and order of the file remain. `satellite disconnect` restores the file. With --replace, the client's own servers
/// move into the satellite's configuration.
///
/// The entry starts `satellite stdio`, the bridge to the satellite, which reads the token itself. No token is written into
/// the client's file.
#[derive(Debug, Args)]
#[command(after_help = "\
  satellite connect --list                 the clients on this machine and how they are connected
  satellite connect cursor                 show the change, ask, and write it
  satellite connect cursor --replace       also move the client's own servers to the satellite
  satellite connect vscode --file .vscode/mcp.json
  satellite connect zed --print            print the entry only, to paste it")]
pub(super) struct ConnectCommand {
    /// Client to connect
    #[arg(value_name = "CLIENT", value_parser = client_parser(), required_unless_present = "list")]
    client: Option<Client>,
    /// Write the change without asking
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    entry: EntryArgs,
    #[command(flatten)]
    replace: ReplaceArgs,
    /// Configuration file of the client [default: its file for all projects of this user]
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// List the clients and how they are connected
    #[arg(long, conflicts_with_all = ["client", "yes", "http", "user", "server", "flat", "replace", "file", "print"])]
    list: bool,
    /// With --list: an array of objects, for scripts
    #[arg(long, requires = "list")]
    json: bool,
    /// Print a file that contains only the entry, to paste it by hand
    #[arg(long, conflicts_with_all = ["yes", "file", "replace"])]
    print: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl ConnectCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let machine = user_machine()?;
        let Some(client) = self.client else {
            return list::run(&machine, &self.data_dir, self.json).await;
        };
        let data_dir = self.data_dir.find()?;
        let entry = self.entry.build(client, &data_dir).await?;
        if self.print {
            let file =
                add_entry(client, None, &entry).map_err(|error| CommandFailure::new(FAILED, error.to_string()))?;
            print_text(String::from_utf8_lossy(&file).trim_end());
            return Ok(DONE);
        }
        let path = match self.file {
            Some(named) => std::path::absolute(named)?,
            None if self.replace.replace => file_with_servers(client, &machine)?,
            None => default_file(client, &machine),
        };
        let file = EditedFile::open(&path)?;
        let warnings = entry_warnings(client, &path, file.contents(), entry.form());
        for warning in warnings.map_err(|error| edit_failure(client, &path, &error))? {
            print_error(&format!("warning: {warning}"));
        }
        let replacement = match file.contents().filter(|_| self.replace.replace) {
            Some(contents) => Some(self.replace.plan(client, &path, contents, &machine)?),
            None => None,
        };
        let names = replacement.iter().flat_map(|replacement| &replacement.names).map(String::as_str);
        let after = replace_servers(client, file.contents(), &entry, &names.collect::<Vec<_>>())
            .map_err(|error| edit_failure(client, &path, &error))?;
        if file.contents() == Some(&after[..]) {
            print_text(&format!("{client} is connected already; nothing was changed in {}", path.display()));
            return Ok(DONE);
        }
        file.check_writable()?;
        if let Some(replacement) = &replacement {
            replacement.print_preview()?;
        }
        print_text(&preview(client, &path, file.contents(), Some(&after), Some(&entry)));
        let changes = if replacement.is_some() { "these changes" } else { "this change" };
        if !confirm(&format!("connect {client} by {changes}?"), self.yes)? {
            return Err(CommandFailure::new(FAILED, "nothing was changed"));
        }
        let location = self.data_dir.location();
        let is_trusted = location.is_trusted || data_dir != location.path;
        let records = DataDirLocation { path: data_dir, is_trusted }.create_or_open();
        let records = records.and_then(|data_dir| ConnectRecords::create(&data_dir)).map_err(|error| {
            CommandFailure::new(FAILED, format!("cannot use the data directory: {error}; nothing was changed"))
        })?;
        let earlier = find_connection(client, &self.data_dir, Some(&path))?;
        let edit = ClientEdit { client, path: &path, file: &file, after: &after, replacement: replacement.as_ref() };
        edit.write(&records, earlier, &entry)?;
        print_text(&format!(
            "connected {client}: {}\n  restart the client if it is running; `satellite disconnect {client}` restores the file",
            path.display()
        ));
        if let Some(replacement) = &replacement {
            replacement.print_result();
        }
        Ok(DONE)
    }
}

/// The change of a client's file, and of the satellite's configuration with `--replace`.
struct ClientEdit<'a> {
    client: Client,
    path: &'a Path,
    file: &'a EditedFile,
    after: &'a [u8],
    replacement: Option<&'a ServerReplacement<'a>>,
}

impl ClientEdit<'_> {
    /// Stores the backup and the record, then writes the satellite's configuration, and the client's file last: a server is
    /// in one of them at any time. If a file cannot be written, the records are as before.
    fn write(
        &self,
        records: &ConnectRecords,
        earlier: Option<(ConnectRecords, StoredConnection)>,
        entry: &SatelliteEntry,
    ) -> Result<(), CommandFailure> {
        let (client, path) = (self.client, self.path);
        let before = self.contents_before(earlier.as_ref())?;
        let named = before.as_deref().map(|before| (backup_name(client, path), before));
        let mut replaced = earlier.as_ref().map(|(_, earlier)| earlier.record.replaced.clone()).unwrap_or_default();
        replaced.extend(self.replacement.iter().flat_map(|replacement| replacement.names.clone()));
        replaced.sort();
        replaced.dedup();
        let known = server_names(client, before.as_deref()).map_err(|error| edit_failure(client, path, &error))?;
        replaced.retain(|name| known.contains(name));
        let record = ConnectRecord::new(client, path.to_owned(), entry, named, self.after, replaced);
        records.store(&StoredConnection { record, backup: before })?;
        let written = self.write_files();
        match (&written, earlier) {
            (Ok(()), Some((others, _))) if others.path() != records.path() => others.remove(client, path)?,
            (Err(_), Some((others, earlier))) if others.path() == records.path() => records.store(&earlier)?,
            (Err(_), _) => records.remove(client, path)?,
            (Ok(()), _) => {}
        }
        written
    }

    fn write_files(&self) -> Result<(), CommandFailure> {
        let Some(replacement) = self.replacement else { return Ok(self.file.replace(self.after)?) };
        self.file.check_unchanged()?;
        replacement.write()?;
        self.file.replace(self.after).map_err(|error| {
            let message = format!("{error} (the satellite's configuration contains the servers already)");
            CommandFailure::new(FAILED, message)
        })
    }

    /// Returns the file as it was before the first connect, as far as it can be restored. `None`: there was no file.
    fn contents_before(
        &self,
        earlier: Option<&(ConnectRecords, StoredConnection)>,
    ) -> Result<Option<Vec<u8>>, CommandFailure> {
        let (client, current) = (self.client, self.file.contents());
        let undo = match earlier {
            Some((_, StoredConnection { record, backup })) => disconnect(record, current, backup.as_deref())
                .map_err(|error| edit_failure(client, self.path, &error))?,
            None => Undo::NothingToDo,
        };
        Ok(match (undo, earlier) {
            (Undo::RemoveOnly { missing, .. }, Some((records, StoredConnection { backup: Some(_), .. })))
                if !missing.is_empty() =>
            {
                let message =
                    format!("cannot connect {client} again: {}", only_in_backup(records, client, self.path, &missing));
                return Err(CommandFailure::new(FAILED, message));
            }
            (Undo::Delete, _) => None,
            (Undo::Restore(contents) | Undo::RemoveOnly { contents, .. }, _) => Some(contents),
            // Without a record, an entry may exist all the same.
            (Undo::NothingToDo, _) => {
                current.map(|current| remove_entry(client, current, None).unwrap_or_else(|_| current.to_vec()))
            }
        })
    }
}

/// Describes servers that `connect --replace` removed and that cannot be put back.
fn only_in_backup(records: &ConnectRecords, client: Client, path: &Path, missing: &[String]) -> String {
    let backup = records.path().join(backup_name(client, path));
    let (backup, missing) = (backup.display(), missing.join(", "));
    format!("add these servers by hand, from the backup `{backup}`, or remove it: {missing}")
}

/// Disconnect an MCP client: remove the entry `satellite` from its configuration.
///
/// If nobody else changed the file since `satellite connect`, it is restored byte for byte. Otherwise only the entry is
/// removed and servers that --replace had removed return, and the command says so.
#[derive(Debug, Args)]
pub(super) struct DisconnectCommand {
    /// Client to disconnect
    #[arg(value_name = "CLIENT", value_parser = client_parser())]
    client: Client,
    /// Write the change without asking
    #[arg(long)]
    yes: bool,
    /// Configuration file of the client [default: the file that `satellite connect` changed]
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl DisconnectCommand {
    pub(super) fn run(self) -> Result<u8, CommandFailure> {
        let client = self.client;
        let named = self.file.map(std::path::absolute).transpose()?;
        let found = find_connection(client, &self.data_dir, named.as_deref())?;
        let path = match (named, &found) {
            (Some(path), _) => path,
            (None, Some((_, connection))) => connection.record.path.clone(),
            (None, None) => default_file(client, &user_machine()?),
        };
        let file = EditedFile::open(&path)?;
        let undo = match &found {
            Some((_, connection)) => disconnect(&connection.record, file.contents(), connection.backup.as_deref()),
            None => undo_without_record(client, file.contents()),
        };
        let undo = undo.map_err(|error| edit_failure(client, &path, &error))?;
        let after = match &undo {
            Undo::NothingToDo => {
                if let Some((records, _)) = &found {
                    records.remove(client, &path)?;
                }
                print_text(&format!("{client} is not connected; nothing was changed in {}", path.display()));
                return Ok(DONE);
            }
            Undo::Delete => None,
            Undo::Restore(contents) | Undo::RemoveOnly { contents, .. } => Some(&contents[..]),
        };
        if let (Undo::RemoveOnly { missing, contents, .. }, Some((records, StoredConnection { backup: Some(_), .. }))) =
            (&undo, &found)
            && file.contents() == Some(&contents[..])
        {
            let message = format!("{client} is not connected; {}", only_in_backup(records, client, &path, missing));
            return Err(CommandFailure::new(FAILED, message));
        }
        file.check_writable()?;
        print_text(&preview(client, &path, file.contents(), after, None));
        if !confirm(&format!("disconnect {client} by this change?"), self.yes)? {
            return Err(CommandFailure::new(FAILED, "nothing was changed"));
        }
        match after {
            Some(contents) => file.replace(contents)?,
            None => file.delete()?,
        }
        let shown = path.display();
        let mut keeps_backup = false;
        match &undo {
            Undo::Delete => {
                print_text(&format!("disconnected {client}: deleted {shown}, which `satellite connect` had created"));
            }
            Undo::Restore(_) => print_text(&format!("disconnected {client}: restored {shown} byte for byte")),
            Undo::RemoveOnly { reason, returned, missing, .. } => {
                let reason = match (&found, reason) {
                    (None, UndoRemainder::BackupUnusable) => "there is no record of `satellite connect`".to_owned(),
                    (_, reason) => reason.to_string(),
                };
                let change = if returned.is_empty() {
                    "removed only the entry `satellite` from"
                } else {
                    "removed only the entry `satellite` and put only the replaced servers back in"
                };
                print_text(&format!("disconnected {client}: {change} {shown}, because {reason}"));
                if !returned.is_empty() {
                    print_text(&format!("  the file contains these servers again: {}", returned.join(", ")));
                }
                match &found {
                    Some((records, StoredConnection { backup: Some(_), .. })) if !missing.is_empty() => {
                        keeps_backup = true;
                        print_error(&only_in_backup(records, client, &path, missing));
                    }
                    _ if missing.is_empty() => {}
                    _ => print_error(&format!(
                        "the backup is missing, so only the satellite's configuration contains these servers: {}",
                        missing.join(", ")
                    )),
                }
            }
            Undo::NothingToDo => {}
        }
        if let Some((records, connection)) = &found {
            if !connection.record.replaced.is_empty() {
                print_text("  the satellite's configuration keeps the imported servers");
            }
            if !keeps_backup {
                records.remove(client, &path)?;
            }
        }
        Ok(DONE)
    }
}

/// Finds the record of a connection in the named data directory, or in the default one and all that this user's satellites
/// have used.
fn find_connection(
    client: Client,
    data_dir: &DataDirArg,
    path: Option<&Path>,
) -> Result<Option<(ConnectRecords, StoredConnection)>, CommandFailure> {
    let location = data_dir.location();
    let others = if data_dir.data_dir.is_some() { Vec::new() } else { recorded_dirs() };
    let mut found: Vec<(ConnectRecords, StoredConnection)> = Vec::new();
    let others = others.into_iter().filter(|other| *other != location.path);
    for directory in std::iter::once(location.path.clone()).chain(others) {
        let Some(records) = ConnectRecords::open(&directory) else { continue };
        // A damaged record in another directory belongs to another connection, unless the user names that directory. The
        // record of this file must not be overwritten, because its backup may be the only copy of replaced servers.
        let is_needed = |name: &str| {
            data_dir.data_dir.is_some()
                || directory == location.path && path.is_some_and(|path| name == record_name(client, path))
        };
        let connections = records.connections(client, |name, error| {
            let message =
                format!("cannot read the record `{}`: {error}; move it away", records.path().join(name).display());
            if is_needed(name) {
                return Err(CommandFailure::new(FAILED, message));
            }
            print_error(&format!("warning: {message}"));
            Ok(())
        })?;
        let wanted = connections.into_iter().filter(|one| path.is_none_or(|path| one.record.path == path));
        found.extend(wanted.map(|connection| (records.clone(), connection)));
    }
    let mut files: Vec<PathBuf> = found.iter().map(|(_, connection)| connection.record.path.clone()).collect();
    files.sort();
    files.dedup();
    if files.len() > 1 {
        let files: Vec<String> = files.iter().map(|file| format!("`{}`", file.display())).collect();
        let message = format!("{client} is connected in several files: {}; name one with --file", files.join(", "));
        return Err(CommandFailure::new(BAD_INPUT, message));
    }
    // The same file may have been connected with several data directories: the last edit has the hash of the file.
    let contents = files.first().and_then(|file| EditedFile::open(file).ok()?.contents().map(ContentHash::of));
    let last = found.iter().position(|(_, connection)| Some(&connection.record.after) == contents.as_ref());
    Ok(if found.is_empty() { None } else { Some(found.swap_remove(last.unwrap_or(0))) })
}

/// Removes the entry of a connection without a record, for example one of another machine.
fn undo_without_record(client: Client, current: Option<&[u8]>) -> Result<Undo, EditError> {
    let Some(current) = current else { return Ok(Undo::NothingToDo) };
    if entry_state(client, Some(current), None)? == EntryState::NotConnected {
        return Ok(Undo::NothingToDo);
    }
    let contents = remove_entry(client, current, None)?;
    Ok(Undo::RemoveOnly { contents, reason: UndoRemainder::BackupUnusable, returned: Vec::new(), missing: Vec::new() })
}

fn edit_failure(client: Client, path: &Path, error: &EditError) -> CommandFailure {
    CommandFailure::new(FAILED, format!("{client}, `{}`: {error}", path.display()))
}

impl From<FileEditError> for CommandFailure {
    fn from(error: FileEditError) -> Self {
        Self::new(FAILED, error.to_string())
    }
}
