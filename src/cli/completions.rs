//! `satellite completions`

use clap::{Args, Command};
use clap_complete::Shell;

use super::DONE;

#[derive(Debug, Args)]
pub(super) struct CompletionsCommand {
    /// The shell: source the output from its start-up file
    shell: Shell,
}

impl CompletionsCommand {
    pub(super) fn run(self, command: &mut Command) -> u8 {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, command, "satellite", &mut script);
        super::print_styled(&String::from_utf8_lossy(&script));
        DONE
    }
}
