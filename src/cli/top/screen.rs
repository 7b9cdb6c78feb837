//! The screen: a table of instances, the output of one, or the tree of actors. An open output or tree is read again
//! every two seconds, and its title contains its age.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use mcp_satellite_actors::model::actor_tree::ActorReport;
use mcp_satellite_console::v1::LogEntry;
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, Table, TableState};

use super::connection::{TopRow, Update};
use super::lines::{add_actor, age, color, draw_lines, output_line};
use crate::cli::printable;

/// Rows that PgUp and PgDn move.
const PAGE: usize = 20;
/// Age of the output or the tree from which on it is read again.
const VIEW_AGE_MAX: Duration = Duration::from_secs(2);
/// Time for which the result of a request is shown.
const NOTICE_TIME: Duration = Duration::from_secs(8);
/// Columns of a terminal below which the table has no reasons, and below which it has neither restarts nor next attempts.
const COLUMNS_FOR_REASONS: u16 = 80;
const COLUMNS_FOR_ALL: u16 = 120;

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
    /// Time at which something was received.
    received: Option<Instant>,
    /// Reason why nothing is received.
    lost: Option<String>,
    view: View,
    /// Time at which the content of the view was received.
    view_received: Option<Instant>,
    /// True while the content of the view is requested.
    is_fetching: bool,
    table: TableState,
    filter: String,
    /// True while the filter is typed.
    is_typing: bool,
    /// Instance whose restart waits for a confirmation.
    confirmed: Option<String>,
    /// Result of a request, and its time.
    notice: Option<(String, Instant)>,
    /// First line of the output or the tree that is shown.
    scroll: usize,
    /// Lines of the output or the tree that the last picture had space for.
    height: usize,
}

#[derive(Default)]
enum View {
    #[default]
    Instances,
    Output {
        instance: String,
        lines: Vec<LogEntry>,
    },
    Tree(Option<Box<ActorReport>>),
}

impl Screen {
    pub(super) fn apply(&mut self, update: Update) {
        match update {
            Update::Reset(rows) => {
                self.note_contact();
                self.rows = rows.into_iter().map(|row| (row.name.clone(), row)).collect();
            }
            Update::Changes { set, gone } => {
                self.note_contact();
                self.rows.extend(set.into_iter().map(|row| (row.name.clone(), row)));
                for name in &gone {
                    self.rows.remove(name);
                }
            }
            Update::Tick { calls_in_flight } => {
                self.note_contact();
                self.calls_in_flight = calls_in_flight;
            }
            Update::Lost(why) => self.lost = Some(why),
            Update::Output { instance, lines } => {
                self.is_fetching = false;
                // The user may have opened another view since the request.
                if let View::Output { instance: open, lines: before } = &mut self.view
                    && *open == instance
                {
                    // The end of the output stays in view, unless the user has scrolled away from it.
                    if self.scroll + 1 >= before.len().saturating_sub(self.height) {
                        self.scroll = lines.len();
                    }
                    (*before, self.view_received) = (lines, Some(Instant::now()));
                }
            }
            Update::Tree(tree) => {
                self.is_fetching = false;
                if let View::Tree(before) = &mut self.view {
                    (*before, self.view_received) = (Some(tree), Some(Instant::now()));
                }
            }
            Update::ViewFailed(why) => {
                self.is_fetching = false;
                self.notice = Some((why, Instant::now()));
            }
            Update::Notice(notice) => self.notice = Some((notice, Instant::now())),
        }
        let shown = self.shown().len();
        if self.table.selected().is_none_or(|selected| selected >= shown) {
            self.table.select(shown.checked_sub(1).map(|last| self.table.selected().unwrap_or(0).min(last)));
        }
    }

    fn note_contact(&mut self) {
        (self.received, self.lost) = (Some(Instant::now()), None);
    }

    /// Opens a view, which is empty until its content arrives.
    fn open(&mut self, view: View) -> ScreenRequest {
        (self.view, self.view_received, self.scroll) = (view, None, 0);
        self.is_fetching = true;
        self.view_request()
    }

    fn view_request(&self) -> ScreenRequest {
        match &self.view {
            View::Instances => ScreenRequest::None,
            View::Output { instance, .. } => ScreenRequest::Output(instance.clone()),
            View::Tree(_) => ScreenRequest::Tree,
        }
    }

    /// Returns the request for the content of the view if it is old and was not requested.
    pub(super) fn refresh_request(&mut self) -> ScreenRequest {
        let is_old = self.view_received.is_none_or(|received| received.elapsed() >= VIEW_AGE_MAX);
        if self.is_fetching || !is_old {
            return ScreenRequest::None;
        }
        let request = self.view_request();
        self.is_fetching = request != ScreenRequest::None;
        request
    }

    pub(super) fn handle_key(&mut self, key: KeyEvent) -> ScreenRequest {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return ScreenRequest::Quit;
        }
        if let Some(instance) = self.confirmed.take() {
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
            KeyCode::Char('t') => return self.open(View::Tree(None)),
            KeyCode::Enter => {
                if let (View::Instances, Some(instance)) = (&self.view, self.selected()) {
                    return self.open(View::Output { instance, lines: Vec::new() });
                }
            }
            KeyCode::Char('r') => self.confirmed = self.selected(),
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
            let text = format!("{} {}", row.name.to_lowercase(), row.shown_status());
            filter.split_whitespace().all(|word| text.contains(word))
        };
        self.rows.values().filter(matches).collect()
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]).areas(frame.area());
        frame.render_widget(self.head(), head);
        let age = self
            .view_received
            .map_or_else(|| "is being read".to_owned(), |at| format!("{} s old", at.elapsed().as_secs()));
        self.height = usize::from(body.height.saturating_sub(2));
        match &self.view {
            View::Instances => self.draw_instances(frame, body),
            View::Output { instance, lines } => {
                let shown: Vec<Line<'_>> = lines.iter().map(output_line).collect();
                draw_lines(frame, body, format!(" output of {instance}, {age} "), shown, &mut self.scroll);
            }
            View::Tree(tree) => {
                let mut shown = Vec::new();
                if let Some(tree) = tree {
                    add_actor(tree, 0, &mut shown);
                }
                draw_lines(frame, body, format!(" tree of actors, {age} "), shown, &mut self.scroll);
            }
        }
        frame.render_widget(self.foot(), foot);
    }

    fn head(&self) -> Line<'_> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for row in self.rows.values() {
            *counts.entry(row.shown_status()).or_default() += 1;
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
        if let Some(why) = &self.lost {
            let time = self.received.map(|at| format!(" for {} s", at.elapsed().as_secs())).unwrap_or_default();
            let text = format!("no contact{time}: {}", printable(why));
            return Line::styled(text, Style::new().fg(Color::Red).add_modifier(Modifier::BOLD));
        }
        if self.is_typing {
            return Line::raw(format!("filter: {}_", printable(&self.filter)));
        }
        let notice = Style::new().fg(Color::Yellow);
        if let Some(instance) = &self.confirmed {
            return Line::styled(format!("restart {}? y/n", printable(instance)), notice);
        }
        if let Some((text, at)) = &self.notice
            && at.elapsed() < NOTICE_TIME
        {
            return Line::styled(printable(text), notice);
        }
        let filter = if self.filter.is_empty() { String::new() } else { format!("filter {:?}  ", self.filter) };
        Line::raw(format!("{filter}/ filter  Enter output  t tree  r restart  q quit"))
    }

    /// Draws the table, and below it the selected instance with its whole reason.
    fn draw_instances(&mut self, frame: &mut Frame<'_>, area: Rect) {
        let [area, detail] = Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(area);
        let now = Timestamp::now().as_millisecond();
        let (has_all, has_reasons) = (area.width >= COLUMNS_FOR_ALL, area.width >= COLUMNS_FOR_REASONS);
        let columns = [
            ("SERVER", Constraint::Fill(3), true),
            ("TEAM", Constraint::Fill(2), true),
            ("USER", Constraint::Fill(2), true),
            ("STATUS", Constraint::Length(20), true),
            ("SINCE", Constraint::Length(6), true),
            ("RESTARTS", Constraint::Length(8), has_all),
            ("NEXT", Constraint::Length(8), has_all),
            ("REASON", Constraint::Fill(if has_all { 6 } else { 3 }), has_reasons),
        ];
        let row = |row: &TopRow| {
            let status = row.shown_status();
            let cells = [
                Cell::from(printable(&row.server)),
                Cell::from(printable(&row.team)),
                Cell::from(printable(&row.user)),
                Cell::from(status.replace('_', " ")).style(color(status)),
                Cell::from(age(now - row.since)),
                Cell::from(row.restarts.to_string()),
                Cell::from(next_attempt(row, now)),
                Cell::from(printable(&row.message)),
            ];
            Row::new(cells.into_iter().zip(columns).filter(|(_, (.., is_shown))| *is_shown).map(|(cell, _)| cell))
        };
        let shown = self.shown();
        let selected = self.table.selected().and_then(|selected| shown.get(selected));
        let detail_line = selected.map(|row| {
            let parts =
                [row.name.clone(), format!("{} restarts", row.restarts), next_attempt(row, now), row.message.clone()];
            let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            Line::styled(printable(&parts.join(" · ")), Style::new().add_modifier(Modifier::DIM))
        });
        let rows: Vec<Row<'_>> = shown.into_iter().map(row).collect();
        let columns = columns.into_iter().filter(|(.., is_shown)| *is_shown);
        let (header, widths): (Vec<_>, Vec<_>) = columns.map(|(name, width, _)| (name, width)).unzip();
        let style = if self.lost.is_some() { Style::new().add_modifier(Modifier::DIM) } else { Style::new() };
        let table = Table::new(rows, widths)
            .header(Row::new(header).style(Style::new().add_modifier(Modifier::BOLD)))
            .style(style)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        frame.render_stateful_widget(table, area, &mut self.table);
        frame.render_widget(detail_line.unwrap_or_default(), detail);
    }
}

fn next_attempt(row: &TopRow, now: i64) -> String {
    row.retry.map(|at| format!("in {}", age(at - now))).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests;
