//! Arguments that several commands have.

use std::path::{Path, PathBuf};
use std::sync::Once;

use clap::Args;

use super::exit::{CommandFailure, NO_SATELLITE};
use super::print::print_error;
use crate::console::api::ConsoleFilter;
use crate::console::client::{ClientError, ConsoleClient};
pub(super) use crate::console::client_entries::shell_word;
use crate::console::is_running;
use crate::data_dir::DataDir;
use mcp_satellite_files::known_dirs::{DataDirLocation, recorded_dirs};
use mcp_satellite_files::user_dirs;

/// Location of a satellite's data and its control socket.
#[derive(Debug, Clone, Args)]
pub(super) struct DataDirArg {
    /// Directory of the satellite's data and control socket [default: $XDG_DATA_HOME/mcp-satellite, or ./.satellite if a
    /// satellite of this user created it]
    #[arg(long, value_name = "DIR", env = "SATELLITE_DATA_DIR")]
    pub(super) data_dir: Option<PathBuf>,
}

/// Default directory of earlier versions, which takes precedence where a satellite has created it.
const LOCAL_DATA_DIR: &str = ".satellite";
pub(super) const DEMO_DATA_DIR: &str = ".satellite-demo";

impl DataDirArg {
    pub(super) fn location(&self) -> DataDirLocation {
        match &self.data_dir {
            Some(named) => DataDirLocation { path: named.clone(), is_trusted: true },
            None => default_location(),
        }
    }

    /// Returns true if this is the default directory in the user's home.
    pub(super) fn is_user_default(&self) -> bool {
        self.data_dir.is_none() && user_dirs::data_dir().is_some_and(|default| default == self.location().path)
    }

    pub(super) fn client(&self) -> Result<ConsoleClient, CommandFailure> {
        Ok(ConsoleClient::new(&self.find()?)?)
    }

    /// Returns the data directory of the running satellite, and prints a note if it is not the default one.
    pub(super) fn find(&self) -> Result<PathBuf, CommandFailure> {
        let found = self.resolve()?;
        let default = self.location().path;
        if found != default {
            let (default, found) = (default.display(), found.display());
            print_error(&format!("no satellite is running on `{default}`; using the one on `{found}`"));
        }
        Ok(found)
    }

    /// Returns the named data directory, or else the first default one on which a satellite is running, or else that of
    /// the only running satellite of this user.
    pub(super) fn resolve(&self) -> Result<PathBuf, CommandFailure> {
        let here = self.location();
        if self.data_dir.is_some() {
            return Ok(here.path);
        }
        for location in std::iter::once(here.clone()).chain(user_location()) {
            match location.open_existing() {
                Ok(directory) if is_running(&directory) => return Ok(location.path),
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(ClientError::Unsafe(error).into());
                }
                Ok(_) | Err(_) => {}
            }
        }
        let mut running = recorded_dirs();
        running.retain(|path| DataDir::open(path).is_ok_and(|directory| is_running(&directory)));
        // The demo in this directory is found even if the record of data directories cannot be written.
        if let Ok(demo) = location(None, DEMO_DATA_DIR).open_existing()
            && is_running(&demo)
            && !running.iter().any(|path| path == demo.path())
        {
            running.push(demo.path().to_owned());
        }
        match running.as_slice() {
            [] => Ok(here.path),
            [only] => Ok(only.clone()),
            several => {
                let several: Vec<String> = several.iter().map(|path| format!("`{}`", path.display())).collect();
                let message = format!(
                    "no satellite is running on `{}`, and several are running elsewhere: {}; name one with --data-dir",
                    here.path.display(),
                    several.join(", ")
                );
                Err(CommandFailure::new(NO_SATELLITE, message))
            }
        }
    }

    /// Returns the flag that commands in another terminal need to find this directory.
    pub(super) fn flag(&self) -> String {
        match &self.data_dir {
            Some(dir) if user_dirs::data_dir().is_none_or(|default| default != *dir) => flag(dir),
            Some(_) | None => String::new(),
        }
    }
}

/// Returns the location of a named directory, or else a default one below the current directory.
pub(super) fn location(named: Option<&Path>, default: &str) -> DataDirLocation {
    DataDirLocation { path: named.unwrap_or(Path::new(default)).to_owned(), is_trusted: named.is_some() }
}

/// Returns the user's data directory, or the one below the current directory if a satellite has created it. The latter
/// may have come with a repository.
fn default_location() -> DataDirLocation {
    static IGNORED: Once = Once::new();
    let local = location(None, LOCAL_DATA_DIR);
    let Some(user) = user_location() else { return local };
    if !local.path.is_symlink() && !local.path.exists() {
        return user;
    }
    if local.was_created_here() {
        return local;
    }
    IGNORED.call_once(|| {
        print_error(&format!(
            "warning: `./{LOCAL_DATA_DIR}` is ignored, because no satellite of this user created it on this machine; if it \
             is yours, name it: --data-dir ./{LOCAL_DATA_DIR}"
        ));
    });
    user
}

fn user_location() -> Option<DataDirLocation> {
    user_dirs::data_dir().map(|path| DataDirLocation { path, is_trusted: true })
}

pub(super) fn flag(data_dir: &Path) -> String {
    format!(" --data-dir {}", shell_word(&data_dir.to_string_lossy()))
}

/// Selection of one instance.
#[derive(Debug, Clone, Args)]
pub(super) struct InstanceArg {
    /// A server's slug where it is unique, else its full name: SERVER-TEAM-USER-INSTALLATION (in `status --json`)
    pub(super) server: String,
    /// Only servers of this team (slug or id)
    #[arg(long, value_name = "TEAM")]
    pub(super) team: Option<String>,
    /// Only servers of this user (slug or id)
    #[arg(long, value_name = "USER")]
    pub(super) user: Option<String>,
}

/// Filter for lists of instances.
#[derive(Debug, Clone, Args)]
pub(super) struct ListFilterArgs {
    /// Only this team (slug or id)
    #[arg(long, value_name = "TEAM")]
    pub(super) team: Option<String>,
    /// Only this user (slug or id)
    #[arg(long, value_name = "USER")]
    pub(super) user: Option<String>,
}

impl From<ListFilterArgs> for ConsoleFilter {
    fn from(only: ListFilterArgs) -> Self {
        Self { team: only.team, user: only.user }
    }
}
