//! `satellite clients`

use std::time::Duration;

use clap::Args;
use humantime::format_duration;

use super::table::{new_table, render_table};
use super::{CommandFailure, DONE, DataDirArg, print_text, printable, to_json};
use crate::gateway::clients::ClientStatus;

#[derive(Debug, Args)]
pub(super) struct ClientsCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
    /// An array of objects, for scripts
    #[arg(long)]
    json: bool,
}

impl ClientsCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let clients: Vec<ClientStatus> = self.data_dir.client()?.get("/v1/clients", &()).await?;
        if self.json {
            print_text(&to_json(&clients)?);
        } else if clients.is_empty() {
            print_text("no client is connected");
        } else {
            print_text(&render_clients(&clients));
        }
        Ok(DONE)
    }
}

fn render_clients(clients: &[ClientStatus]) -> String {
    let mut table =
        new_table(&["CLIENT", "TEAM", "USER", "ENDPOINT", "PROTOCOL", "OPEN", "CALLS", "CONNECTED", "IDLE"]);
    for client in clients {
        let since = |seconds| format_duration(Duration::from_secs(seconds)).to_string();
        table.add_row([
            printable(format!("{} {}", client.client, client.client_version).trim()),
            client.team.clone(),
            client.user.clone(),
            client.endpoint.clone(),
            client.protocol.clone(),
            client.open.to_string(),
            client.tool_calls.to_string(),
            since(client.connected_seconds),
            since(client.idle_seconds),
        ]);
    }
    render_table(&table)
}
