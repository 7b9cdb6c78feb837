//! The screen: a table of instances, the output of one, or the tree of actors.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use jiff::Timestamp;
use mcp_satellite_actors::model::actor_tree::ActorReport;
use mcp_satellite_console::v1::LogEntry;
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Table, TableState};

use super::connection::{TopRow, Update};
use crate::cli::printable;

/// Rows that PgUp and PgDn move.
const PAGE: usize = 20;

/// Requests of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ScreenRequest {
    None,
    Quit,
    Restart(String),
    Output(String),
    Tree,
}

#[derive(Default)]
pub(super) struct Screen {
    rows: BTreeMap<String, TopRow>,
    calls_in_flight: u64,
    /// Reason why nothing is received, and since when.
    lost: Option<(String, Instant)>,
    view: View,
    table: TableState,
    filter: String,
    /// True while the filter is typed.
    is_typing: bool,
    /// Instance whose restart waits for a confirmation.
    confirmed: Option<String>,
    notice: String,
    /// First line of the output or the tree that is shown.
    scroll: usize,
}

#[derive(Default)]
enum View {
    #[default]
    Instances,
    Output {
        instance: String,
        lines: Vec<LogEntry>,
    },
    Tree(Box<ActorReport>),
}

impl Screen {
    pub(super) fn apply(&mut self, update: Update) {
        match update {
            Update::Reset(rows) => {
                self.lost = None;
                self.rows = rows.into_iter().map(|row| (row.name.clone(), row)).collect();
            }
            Update::Changes { set, gone } => {
                self.lost = None;
                self.rows.extend(set.into_iter().map(|row| (row.name.clone(), row)));
                for name in &gone {
                    self.rows.remove(name);
                }
            }
            Update::Tick { calls_in_flight } => (self.lost, self.calls_in_flight) = (None, calls_in_flight),
            Update::Lost(why) => {
                let since = self.lost.take().map_or_else(Instant::now, |(_, since)| since);
                self.lost = Some((why, since));
            }
            Update::Output { instance, lines } => {
                self.scroll = lines.len();
                self.view = View::Output { instance, lines };
            }
            Update::Tree(tree) => (self.view, self.scroll) = (View::Tree(tree), 0),
            Update::Notice(notice) => self.notice = notice,
        }
        let shown = self.shown().len();
        if self.table.selected().is_none_or(|selected| selected >= shown) {
            self.table.select(shown.checked_sub(1).map(|last| self.table.selected().unwrap_or(0).min(last)));
        }
    }

    pub(super) fn handle_key(&mut self, key: KeyEvent) -> ScreenRequest {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return ScreenRequest::Quit;
        }
        if let Some(instance) = self.confirmed.take() {
            self.notice.clear();
            return if key.code == KeyCode::Char('y') { ScreenRequest::Restart(instance) } else { ScreenRequest::None };
        }
        if self.is_typing {
            match key.code {
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => (self.is_typing, self.filter) = (false, String::new()),
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(letter) => self.filter.push(letter),
                _ => {}
            }
            self.table.select(Some(0));
            return ScreenRequest::None;
        }
        match key.code {
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1),
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1),
            KeyCode::PageUp => self.move_by(-PAGE.cast_signed()),
            KeyCode::PageDown => self.move_by(PAGE.cast_signed()),
            KeyCode::Home => self.move_by(isize::MIN),
            KeyCode::End => self.move_by(isize::MAX),
            KeyCode::Char('/') => (self.view, self.is_typing) = (View::Instances, true),
            KeyCode::Char('t') => return ScreenRequest::Tree,
            KeyCode::Enter => return self.selected().map_or(ScreenRequest::None, ScreenRequest::Output),
            KeyCode::Char('r') => {
                if let Some(instance) = self.selected() {
                    self.notice = format!("restart {instance}? y/n");
                    self.confirmed = Some(instance);
                }
            }
            KeyCode::Char('q') | KeyCode::Esc => match self.view {
                View::Instances if !self.filter.is_empty() && key.code == KeyCode::Esc => self.filter.clear(),
                View::Instances => return ScreenRequest::Quit,
                View::Output { .. } | View::Tree(_) => self.view = View::Instances,
            },
            _ => {}
        }
        ScreenRequest::None
    }

    fn move_by(&mut self, lines: isize) {
        match &self.view {
            View::Instances => {
                let last = self.shown().len().saturating_sub(1);
                let selected = self.table.selected().unwrap_or(0).saturating_add_signed(lines).min(last);
                self.table.select(Some(selected));
            }
            View::Output { lines: all, .. } => {
                self.scroll = self.scroll.saturating_add_signed(lines).min(all.len());
            }
            View::Tree(_) => self.scroll = self.scroll.saturating_add_signed(lines).min(self.rows.len() + PAGE),
        }
    }

    /// Returns the instance that the keys act on.
    fn selected(&self) -> Option<String> {
        match &self.view {
            View::Instances => self.shown().get(self.table.selected()?).map(|row| row.name.clone()),
            View::Output { instance, .. } => Some(instance.clone()),
            View::Tree(_) => None,
        }
    }

    fn shown(&self) -> Vec<&TopRow> {
        let filter = self.filter.to_lowercase();
        let matches = |row: &&TopRow| {
            filter.is_empty() || row.name.to_lowercase().contains(&filter) || row.status.contains(&filter)
        };
        self.rows.values().filter(matches).collect()
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let areas = Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]);
        let [head, body, foot] = areas.areas(frame.area());
        frame.render_widget(self.head(), head);
        match &self.view {
            View::Instances => self.draw_instances(frame, body),
            View::Output { instance, lines } => {
                let shown: Vec<Line<'_>> = lines.iter().map(output_line).collect();
                let title = format!(" output of {instance} ");
                draw_lines(frame, body, title, shown, &mut self.scroll);
            }
            View::Tree(tree) => {
                let mut shown = Vec::new();
                add_actor(tree, 0, &mut shown);
                draw_lines(frame, body, " tree of actors ".to_owned(), shown, &mut self.scroll);
            }
        }
        frame.render_widget(self.foot(), foot);
    }

    fn head(&self) -> Line<'_> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for row in self.rows.values() {
            *counts.entry(&row.status).or_default() += 1;
        }
        let teams: BTreeSet<&str> = self.rows.values().map(|row| row.team.as_str()).collect();
        let mut spans = vec![Span::raw(format!(
            "{} instances of {} teams, {} calls in flight  ",
            self.rows.len(),
            teams.len(),
            self.calls_in_flight
        ))];
        spans.extend(
            counts.into_iter().map(|(status, count)| Span::styled(format!("{count} {status}  "), color(status))),
        );
        Line::from(spans)
    }

    fn foot(&self) -> Line<'_> {
        if let Some((why, since)) = &self.lost {
            let text = format!("no contact for {} s: {}", since.elapsed().as_secs(), printable(why));
            return Line::styled(text, Style::new().fg(Color::Red).add_modifier(Modifier::BOLD));
        }
        if self.is_typing {
            return Line::raw(format!("filter: {}_", printable(&self.filter)));
        }
        if !self.notice.is_empty() {
            return Line::styled(printable(&self.notice), Style::new().fg(Color::Yellow));
        }
        let filter = if self.filter.is_empty() { String::new() } else { format!("filter {:?}  ", self.filter) };
        Line::raw(format!("{filter}/ filter  Enter output  t tree  r restart  q quit"))
    }

    fn draw_instances(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let now = Timestamp::now().as_millisecond();
        let is_old = self.lost.is_some();
        let row = |row: &TopRow| {
            let retry = row.retry.map(|at| format!("in {}", age(at - now))).unwrap_or_default();
            let cells = [
                Cell::from(printable(&row.server)),
                Cell::from(printable(&row.team)),
                Cell::from(printable(&row.user)),
                Cell::from(row.status.clone()).style(color(&row.status)),
                Cell::from(age(now - row.since)),
                Cell::from(row.restarts.to_string()),
                Cell::from(retry),
                Cell::from(printable(&row.message)),
            ];
            Row::new(cells)
        };
        let rows: Vec<Row<'_>> = self.shown().into_iter().map(row).collect();
        let widths = [
            Constraint::Fill(2),
            Constraint::Fill(1),
            Constraint::Fill(1),
            Constraint::Length(20),
            Constraint::Length(6),
            Constraint::Length(8),
            Constraint::Length(8),
            Constraint::Fill(4),
        ];
        let header = ["SERVER", "TEAM", "USER", "STATUS", "SINCE", "RESTARTS", "NEXT", "REASON"];
        let style = if is_old { Style::new().add_modifier(Modifier::DIM) } else { Style::new() };
        let table = Table::new(rows, widths)
            .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
            .style(style)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut self.table);
    }
}

fn draw_lines(frame: &mut Frame<'_>, area: Rect, title: String, lines: Vec<Line<'_>>, scroll: &mut usize) {
    let height = usize::from(area.height.saturating_sub(2));
    // The last line stays at the bottom.
    *scroll = (*scroll).min(lines.len().saturating_sub(height));
    let first = u16::try_from(*scroll).unwrap_or(u16::MAX);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(title)).scroll((first, 0)), area);
}

fn output_line(entry: &LogEntry) -> Line<'static> {
    let level = serde_json::to_value(entry.line.level).unwrap_or_default();
    let style = match level.as_str() {
        Some("error") => Style::new().fg(Color::Red),
        Some("warn") => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    Line::styled(format!("{:.3} {}", entry.line.timestamp, printable(&entry.line.message)), style)
}

fn add_actor(report: &ActorReport, depth: usize, lines: &mut Vec<Line<'static>>) {
    let answered = match report.answered_ms {
        Some(answered) => format!("answered in {answered:.1} ms"),
        None => "does not answer".to_owned(),
    };
    let kind = serde_json::to_value(report.kind).unwrap_or_default();
    let kind = kind.as_str().unwrap_or_default().to_owned();
    let name = if report.name == kind { String::new() } else { format!(" {}", printable(&report.name)) };
    let backlog = report.backlog.map(|backlog| format!(", backlog {backlog}")).unwrap_or_default();
    let text = format!("{}{kind}{name}: {answered}, {} restarts{backlog}", "  ".repeat(depth), report.restarts);
    let style = if report.answered_ms.is_some() { Style::new() } else { Style::new().fg(Color::Red) };
    lines.push(Line::styled(text, style));
    report.children.iter().for_each(|child| add_actor(child, depth + 1, lines));
}

fn color(status: &str) -> Style {
    Style::new().fg(match status {
        "online" => Color::Green,
        "error" | "permanently_failed" => Color::Red,
        "requires_reauth" | "awaiting_user_config" => Color::Magenta,
        "offline" => Color::DarkGray,
        _ => Color::Yellow,
    })
}

/// Returns a duration with its largest unit, at most five characters.
fn age(milliseconds: i64) -> String {
    let seconds = milliseconds.max(0) / 1000;
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds / 60),
        6000..=359_999 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn row(server: &str, status: &str) -> TopRow {
        let name = format!("{server}-acme-alice-{server}");
        TopRow::parse(&json!([name, server, "acme", "alice", status, 0, 0, 3])).unwrap()
    }

    fn picture(screen: &mut Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(100, 8)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn press(screen: &mut Screen, code: KeyCode) -> ScreenRequest {
        screen.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn changes_are_applied_to_the_rows() {
        let mut screen = Screen::default();
        screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "online")]));
        let gone = vec![row("files", "online").name];
        screen.apply(Update::Changes { set: vec![row("notes", "error"), row("web", "connecting")], gone });
        let shown = picture(&mut screen);
        assert!(shown.contains("notes") && shown.contains("error") && shown.contains("web"), "{shown}");
        assert!(!shown.contains("files"), "{shown}");
    }

    #[test]
    fn a_restart_needs_a_confirmation() {
        let mut screen = Screen::default();
        screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "online")]));
        assert_eq!(press(&mut screen, KeyCode::Down), ScreenRequest::None);
        assert_eq!(press(&mut screen, KeyCode::Char('r')), ScreenRequest::None);
        assert!(picture(&mut screen).contains("restart notes-acme-alice-notes? y/n"));
        assert_eq!(press(&mut screen, KeyCode::Char('n')), ScreenRequest::None);
        press(&mut screen, KeyCode::Char('r'));
        assert_eq!(press(&mut screen, KeyCode::Char('y')), ScreenRequest::Restart("notes-acme-alice-notes".to_owned()));
    }

    #[test]
    fn the_filter_hides_other_instances() {
        let mut screen = Screen::default();
        screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "error")]));
        "/err".chars().for_each(|letter| drop(press(&mut screen, KeyCode::Char(letter))));
        press(&mut screen, KeyCode::Enter);
        assert!(!picture(&mut screen).contains("files"));
        assert_eq!(press(&mut screen, KeyCode::Enter), ScreenRequest::Output("notes-acme-alice-notes".to_owned()));
        assert_eq!(press(&mut screen, KeyCode::Esc), ScreenRequest::None);
        assert!(picture(&mut screen).contains("files"));
        assert_eq!(press(&mut screen, KeyCode::Esc), ScreenRequest::Quit);
    }

    #[test]
    fn a_lost_stream_is_shown_until_it_is_back() {
        let mut screen = Screen::default();
        screen.apply(Update::Reset(vec![row("files", "online")]));
        screen.apply(Update::Lost("connection refused".to_owned()));
        assert!(picture(&mut screen).contains("no contact for 0 s: connection refused"));
        screen.apply(Update::Tick { calls_in_flight: 2 });
        let shown = picture(&mut screen);
        assert!(!shown.contains("no contact") && shown.contains("2 calls in flight"), "{shown}");
    }

    #[test]
    fn control_characters_of_servers_are_not_written() {
        let mut screen = Screen::default();
        let hostile = json!(["n", "\u{1b}[31mred", "acme", "alice", "error", 0, 0, 0, null, 3, "a\u{7}b", null, null]);
        screen.apply(Update::Reset(vec![TopRow::parse(&hostile).unwrap()]));
        let shown = picture(&mut screen);
        assert!(!shown.contains(['\u{1b}', '\u{7}']), "{shown:?}");
    }
}
