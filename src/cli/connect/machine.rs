//! The directories of this user and the client's files in them.

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use mcp_satellite_clients::{Client, ClientVariables, EntryState, Machine, connect_paths, entry_state, existing_files};
use nix::unistd::{User, geteuid};
use strum::IntoEnumIterator;

use crate::cli::exit::{BAD_INPUT, CommandFailure};
use mcp_satellite_files::replace_file::EditedFile;

/// Returns the directories in which the clients of this user keep their files. This is the only place that reads the
/// environment variables of the clients.
pub(crate) fn user_machine() -> Result<Machine, CommandFailure> {
    let named = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let user = || User::from_uid(geteuid()).ok().flatten().map(|user| user.dir).filter(|dir| dir.is_absolute());
    let home = named("HOME").or_else(user).ok_or_else(|| {
        CommandFailure::new(
            BAD_INPUT,
            "cannot find the files of the clients: this user has no home directory; set HOME",
        )
    })?;
    let config_home = named("XDG_CONFIG_HOME").unwrap_or_else(|| home.join(".config"));
    Ok(Machine { home, config_home, project: None, variables: ClientVariables::read(named) })
}

/// Returns the file of the client that connect edits: the first that exists, or else the one to create, in the first
/// directory that exists.
pub(crate) fn default_file(client: Client, machine: &Machine) -> PathBuf {
    let paths = connect_paths(client, machine);
    if let Some(existing) = paths.iter().find(|path| path.symlink_metadata().is_ok()) {
        return existing.clone();
    }
    let is_connected = |path: &PathBuf| {
        let state = EditedFile::open(path).ok().map(|file| entry_state(client, file.contents(), None));
        matches!(state, Some(Ok(EntryState::Connected { .. })))
    };
    let replaced = continue_configuration(client, machine).filter(is_connected);
    let is_in_directory = |path: &&PathBuf| path.parent().is_some_and(Path::is_dir);
    replaced.or_else(|| paths.iter().find(is_in_directory).or(paths.first()).cloned()).unwrap_or_default()
}

/// Returns the file of the user's own servers, which `connect --replace` edits. It is the file that connect edits, except for
/// Continue, whose entry has a file of its own.
pub(super) fn file_with_servers(client: Client, machine: &Machine) -> Result<PathBuf, CommandFailure> {
    let default = default_file(client, machine);
    let Some(own) = continue_configuration(client, machine).filter(|own| *own != default) else { return Ok(default) };
    if default.exists() {
        let message =
            format!("{client} is connected by `{}`; run `satellite disconnect {client}` first", default.display());
        return Err(CommandFailure::new(BAD_INPUT, message));
    }
    Ok(own)
}

fn continue_configuration(client: Client, machine: &Machine) -> Option<PathBuf> {
    let paths = ["config.yaml", "config.yml"].map(|name| machine.continue_dir().join(name));
    paths.into_iter().find(|path| client == Client::Continue && path.exists())
}

/// Returns true if the client has a configuration, or a directory of its own for one.
pub(crate) fn is_found(client: Client, machine: &Machine) -> bool {
    let is_own = |directory: &Path| directory != machine.home && directory != machine.config_home && directory.is_dir();
    existing_files(machine).iter().any(|file| file.client == client)
        || default_file(client, machine).parent().is_some_and(is_own)
}

/// Parses the name of a client.
pub(super) fn client_parser() -> impl TypedValueParser<Value = Client> {
    let names = Client::iter().map(<&'static str>::from).collect::<Vec<_>>();
    PossibleValuesParser::new(names).try_map(|name| name.parse::<Client>())
}
