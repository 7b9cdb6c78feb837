//! `satellite token`

use std::io::IsTerminal;

use clap::Args;

use super::{CommandFailure, DONE, print_error, print_text};
use crate::config::TokenHash;
use crate::gateway::access::new_token;

// Two lines: the token for the client, and its digest for the configuration.
#[derive(Debug, Args)]
pub(super) struct TokenCommand {}

impl TokenCommand {
    pub(super) fn run(self) -> Result<u8, CommandFailure> {
        let Self {} = self;
        let token = new_token()?;
        print_text(&format!("{}\n{}", token.expose(), TokenHash::from_token(token.expose())));
        if std::io::stdout().is_terminal() {
            print_error(
                "the first line is the token for the client, shown only once; the second belongs to the user in the \
                 configuration: token = \"sha256:…\"",
            );
        }
        Ok(DONE)
    }
}
