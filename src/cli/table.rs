//! Tables, aligned and coloured on a terminal and plain otherwise.

use std::io::IsTerminal;

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use mcp_satellite_actors::model::status::Status;

pub(super) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Returns columns and rows of the terminal on stdout; `None` if stdout is no terminal or has no known size.
pub(super) fn terminal_size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then(|| (usize::from(size.ws_col), usize::from(size.ws_row)))
}

pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).force_no_tty().set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(u16::try_from(width).unwrap_or(u16::MAX)).add_row([text]);
    if let Some(column) = table.column_mut(0) {
        column.set_padding((0, 0));
    }
    table.to_string().lines().map(|line| line.trim_end().to_owned()).collect()
}

pub(super) fn new_table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(head.iter().map(|title| Cell::new(title).add_attribute(Attribute::Bold)));
    if is_terminal() {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    } else {
        table.force_no_tty();
        table.set_content_arrangement(ContentArrangement::Disabled);
    }
    table
}

pub(super) fn render_table(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Colours a status: green for callable, red for one that needs a person.
pub(super) fn status_cell(status: Status, text: String) -> Cell {
    let color = match status {
        Status::Online => Color::Green,
        Status::PermanentlyFailed | Status::RequiresReauth | Status::Error => Color::Red,
        Status::AwaitingUserConfig | Status::Offline => Color::Magenta,
        Status::Provisioning
        | Status::CommandReceived
        | Status::Connecting
        | Status::DiscoveringTools
        | Status::SyncingTools
        | Status::Restarting => Color::Yellow,
    };
    Cell::new(text).fg(color)
}
