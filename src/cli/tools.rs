//! `satellite tools`

use clap::Args;

use super::table::{new_table, render_table};
use super::{
    CommandFailure, DONE, DataDirArg, ListFilterArgs, print_json, print_styled, print_text, printable, to_json,
};
use crate::console::api::{ConsoleFilter, ToolEntry};

const DESCRIPTION_SHOWN: usize = 80;

#[derive(Debug, Args)]
pub(super) struct ToolsCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
    #[command(flatten)]
    only: ListFilterArgs,
    /// An array of objects, each with the tool's whole definition
    #[arg(long)]
    json: bool,
}

impl ToolsCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let filter = ConsoleFilter::from(self.only);
        let entries: Vec<ToolEntry> = self.data_dir.client()?.get("/v1/tools", &filter).await?;
        if self.json {
            print_json(&to_json(&entries)?);
            return Ok(DONE);
        }
        if entries.is_empty() {
            print_text("no tools are offered: no server is online, or none has any; see `satellite status`");
            return Ok(DONE);
        }
        let mut table = new_table(&["TOOL", "TEAM", "USER", "TOKENS", "DESCRIPTION"]);
        for entry in &entries {
            let definition: serde_json::Value = serde_json::from_str(entry.tool.get()).unwrap_or_default();
            let description = definition.get("description").and_then(serde_json::Value::as_str).unwrap_or_default();
            let first = printable(description.lines().next().unwrap_or_default());
            let first: String = first.chars().take(DESCRIPTION_SHOWN).collect();
            let tool = printable(&entry.tool_path);
            table.add_row([&tool, &entry.team, &entry.user, &entry.tokens.to_string(), &first]);
        }
        let total: usize = entries.iter().map(|entry| entry.tokens).sum();
        print_styled(&format!("{}\n\n{} tools, about {total} tokens", render_table(&table), entries.len()));
        Ok(DONE)
    }
}
