//! The directories of this user that belong to the satellite, by the XDG Base Directory Specification. `None` if the user
//! has no home directory.

use std::path::{Path, PathBuf};

use etcetera::BaseStrategy as _;
use etcetera::base_strategy::Xdg;

const NAME: &str = "mcp-satellite";

/// Returns the default data directory: `$XDG_DATA_HOME/mcp-satellite`.
pub fn data_dir() -> Option<PathBuf> {
    of_satellite(&Xdg::new().ok()?.data_dir())
}

/// Returns the directory of the user's configuration: `$XDG_CONFIG_HOME/mcp-satellite`.
pub fn config_dir() -> Option<PathBuf> {
    of_satellite(&Xdg::new().ok()?.config_dir())
}

/// Returns the directory of the user's systemd units: `$XDG_CONFIG_HOME/systemd/user`.
pub fn unit_dir() -> Option<PathBuf> {
    absolute(Xdg::new().ok()?.config_dir().join("systemd/user"))
}

pub(crate) fn state_dir() -> Option<PathBuf> {
    of_satellite(&Xdg::new().ok()?.state_dir()?)
}

fn of_satellite(home: &Path) -> Option<PathBuf> {
    absolute(home.join(NAME))
}

/// A relative directory would depend on the directory in which a command runs.
fn absolute(path: PathBuf) -> Option<PathBuf> {
    path.is_absolute().then_some(path)
}
