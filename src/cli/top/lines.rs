//! Lines of the output and of the tree, and texts of the table's cells.

use mcp_satellite_actors::model::actor_tree::ActorReport;
use mcp_satellite_console::v1::LogEntry;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph};

use crate::cli::printable;

pub(super) fn draw_lines(frame: &mut Frame<'_>, area: Rect, title: String, lines: Vec<Line<'_>>, scroll: &mut usize) {
    let height = usize::from(area.height.saturating_sub(2));
    // The last line stays at the bottom.
    *scroll = (*scroll).min(lines.len().saturating_sub(height));
    let first = u16::try_from(*scroll).unwrap_or(u16::MAX);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)).scroll((first, 0)), area);
}

pub(super) fn output_line(entry: &LogEntry) -> Line<'static> {
    let level = serde_json::to_value(entry.line.level).unwrap_or_default();
    let style = match level.as_str() {
        Some("error") => Style::new().fg(Color::Red),
        Some("warn") => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    Line::styled(format!("{:.3} {}", entry.line.timestamp, printable(&entry.line.message)), style)
}

pub(super) fn add_actor(report: &ActorReport, depth: usize, lines: &mut Vec<Line<'static>>) {
    let answered = match report.answered_ms {
        Some(answered) => format!("answered in {answered:.1} ms"),
        None => "does not answer".to_owned(),
    };
    let kind = serde_json::to_value(report.kind).unwrap_or_default();
    let kind = kind.as_str().unwrap_or_default().to_owned();
    let name = if report.name == kind { String::new() } else { format!(" {}", printable(&report.name)) };
    let backlog = report.backlog.map(|backlog| format!(", backlog {backlog}")).unwrap_or_default();
    let permits: Vec<String> = report.permits.iter().map(|permits| format!(", {permits}")).collect();
    let permits = permits.concat();
    let indent = "  ".repeat(depth);
    let text = format!("{indent}{kind}{name}: {answered}, {} restarts{backlog}{permits}", report.restarts);
    let style = if report.answered_ms.is_some() { Style::new() } else { Style::new().fg(Color::Red) };
    lines.push(Line::styled(text, style));
    report.children.iter().for_each(|child| add_actor(child, depth + 1, lines));
}

pub(super) fn color(status: &str) -> Style {
    Style::new().fg(match status {
        "online" => Color::Green,
        "error" | "permanently_failed" => Color::Red,
        "requires_reauth" | "awaiting_user_config" => Color::Magenta,
        "offline" | "stopped" => Color::DarkGray,
        "asleep" => Color::Cyan,
        _ => Color::Yellow,
    })
}

/// Returns a duration with its largest unit, at most five characters.
pub(super) fn age(milliseconds: i64) -> String {
    let seconds = milliseconds.max(0) / 1000;
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds / 60),
        6000..=359_999 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}
