//! Arguments that several commands have.

use std::path::{Path, PathBuf};

use clap::Args;

use super::exit::{CommandFailure, NO_SATELLITE};
use super::print::print_error;
use crate::console::api::ConsoleFilter;
use crate::console::client::{ClientError, ConsoleClient};
use crate::console::is_running;
use crate::data_dir::DataDir;
use mcp_satellite_files::known_dirs::{DataDirLocation, recorded_dirs};

/// Location of a satellite's data and its control socket.
#[derive(Debug, Clone, Args)]
pub(super) struct DataDirArg {
    /// Directory of the satellite's data and control socket [default: .satellite]
    #[arg(long, value_name = "DIR", env = "SATELLITE_DATA_DIR")]
    pub(super) data_dir: Option<PathBuf>,
}

pub(super) const DATA_DIR: &str = ".satellite";
pub(super) const DEMO_DATA_DIR: &str = ".satellite-demo";

impl DataDirArg {
    pub(super) fn location(&self) -> DataDirLocation {
        location(self.data_dir.as_deref(), DATA_DIR)
    }

    pub(super) fn client(&self) -> Result<ConsoleClient, CommandFailure> {
        Ok(ConsoleClient::new(&self.find()?)?)
    }

    /// Returns the data directory of the running satellite, and prints a note if it is not the default one.
    pub(super) fn find(&self) -> Result<PathBuf, CommandFailure> {
        let found = self.resolve()?;
        if self.data_dir.is_none() && found != Path::new(DATA_DIR) {
            let found = found.display();
            print_error(&format!("no satellite is running on `{DATA_DIR}`; using the one on `{found}`"));
        }
        Ok(found)
    }

    /// Returns the named data directory, or else the default one if a satellite is running on it, or else that of the
    /// only running satellite of this user.
    pub(super) fn resolve(&self) -> Result<PathBuf, CommandFailure> {
        let here = self.location();
        if here.is_named {
            return Ok(here.path);
        }
        match here.open_existing() {
            Ok(directory) if is_running(&directory) => return Ok(here.path),
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(ClientError::Unsafe(error).into());
            }
            Ok(_) | Err(_) => {}
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
                    "no satellite is running on `{DATA_DIR}`, and several are running elsewhere: {}; name one with --data-dir",
                    several.join(", ")
                );
                Err(CommandFailure::new(NO_SATELLITE, message))
            }
        }
    }

    /// Returns the flag that commands in another terminal need to find this directory.
    pub(super) fn flag(&self) -> String {
        match &self.data_dir {
            Some(dir) if dir != Path::new(DATA_DIR) => flag(dir),
            Some(_) | None => String::new(),
        }
    }
}

pub(super) fn location(named: Option<&Path>, default: &str) -> DataDirLocation {
    DataDirLocation { path: named.unwrap_or(Path::new(default)).to_owned(), is_named: named.is_some() }
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

pub(super) fn shell_word(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+".contains(&byte);
    if text.bytes().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}
