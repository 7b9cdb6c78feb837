//! `satellite completions`

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, DONE};

#[derive(Debug, Args)]
pub(super) struct CompletionsCommand {
    /// The shell: source the output from its start-up file
    shell: Shell,
}

impl CompletionsCommand {
    pub(super) fn run(self) -> u8 {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "satellite", &mut script);
        super::print_styled(&String::from_utf8_lossy(&script));
        DONE
    }
}
