//! `satellite check`

use std::path::PathBuf;

use clap::Args;

use super::{BAD_INPUT, DONE, Failed, complain, say};
use crate::config::{self, ConfigErrors, Plan};

/// The files that say what to run.
#[derive(Debug, Clone, Args)]
pub(super) struct Sources {
    /// The satellite's own configuration (TOML)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Servers as Claude, Cursor and VS Code configure them: {"mcpServers": {…}}
    #[arg(long, value_name = "FILE")]
    mcp_json: Option<PathBuf>,
}

impl Sources {
    /// The plan of all files together; every error of every file at once.
    pub(super) fn load(&self) -> Result<Plan, Failed> {
        let refused = |errors: ConfigErrors| Failed::new(BAD_INPUT, rendered(&errors));
        let toml = self.config.as_deref().map(config::load);
        // The satellite's own file says what the servers of the other one are held to, too.
        let base = toml.as_ref().and_then(|plan| plan.as_ref().ok()).map(|plan| plan.base.clone()).unwrap_or_default();
        let json = self.mcp_json.as_deref().map(|file| config::load_mcp_json(file, &base));
        match (toml, json) {
            (None, None) => Err(Failed::new(
                BAD_INPUT,
                "nothing to run: give --config FILE, --mcp-json FILE or both; `satellite demo` needs neither",
            )),
            (Some(plan), None) | (None, Some(plan)) => plan.map_err(refused),
            (Some(Ok(one)), Some(Ok(other))) => one.merge(other).map_err(refused),
            (Some(Err(one)), Some(Err(other))) => Err(refused(one.and(other))),
            (Some(Err(errors)), Some(Ok(_))) | (Some(Ok(_)), Some(Err(errors))) => Err(refused(errors)),
        }
    }
}

fn rendered(errors: &ConfigErrors) -> String {
    let mut text = String::new();
    let handler = miette::MietteHandlerOpts::new().width(110).build();
    let report = Rendered(errors, &handler);
    std::fmt::Write::write_fmt(&mut text, format_args!("{report:?}")).ok();
    text
}

/// miette draws through `Debug`.
struct Rendered<'a>(&'a ConfigErrors, &'a miette::MietteHandler);

impl std::fmt::Debug for Rendered<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        miette::ReportHandler::debug(self.1, self.0, f)
    }
}

#[derive(Debug, Args)]
pub(super) struct Check {
    #[command(flatten)]
    sources: Sources,
}

impl Check {
    pub(super) fn run(self) -> Result<u8, Failed> {
        let plan = self.sources.load()?;
        for warning in &plan.warnings {
            complain(&format!("warning: {warning}"));
        }
        say(&format!(
            "the configuration is good: {} teams, {} users, {} servers to run",
            plan.teams,
            plan.users,
            plan.instances.len()
        ));
        Ok(DONE)
    }
}
