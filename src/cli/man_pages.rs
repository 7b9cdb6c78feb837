//! `satellite man-pages`

use std::path::PathBuf;

use clap::{Args, Command};

use super::{CommandFailure, DONE, FAILED};

#[derive(Debug, Args)]
pub(super) struct ManPagesCommand {
    /// Directory of the pages, created if it does not exist, such as ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl ManPagesCommand {
    pub(super) fn run(self, command: Command) -> Result<u8, CommandFailure> {
        let written =
            std::fs::create_dir_all(&self.directory).and_then(|()| clap_mangen::generate_to(command, &self.directory));
        written.map_err(|error| {
            CommandFailure::new(FAILED, format!("cannot write man pages to `{}`: {error}", self.directory.display()))
        })?;
        Ok(DONE)
    }
}
