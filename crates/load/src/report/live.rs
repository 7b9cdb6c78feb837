//! Progress display: a bar on a terminal, otherwise a line for each phase.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use mcp_satellite_actors::model::status::Status;

use crate::measure::{format_bytes, format_duration};
use crate::types::{ProgressDisplay, RunSample};

/// Progress display on stderr.
pub struct TerminalProgress {
    bar: ProgressBar,
    // Planned duration of the load.
    planned_duration: Duration,
    drawn: bool,
    // True once the bar shows time instead of the number of online servers.
    shows_time: AtomicBool,
    stopped: AtomicBool,
}

impl TerminalProgress {
    /// Creates the display for a run with this planned duration.
    pub fn new(planned_duration: Duration) -> Self {
        let drawn = std::io::stderr().is_terminal();
        let bar = if drawn { ProgressBar::new(0) } else { ProgressBar::hidden() };
        set_style(&bar, "{prefix:14} {bar:30} {pos}/{len} online");
        Self { bar, planned_duration, drawn, shows_time: AtomicBool::new(false), stopped: AtomicBool::new(false) }
    }

    /// Asks the run for an early end.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.print(
            "stopping: no more calls and faults; findings are checked when all servers have recovered. A second signal \
             ends the run at once",
        );
    }

    fn print(&self, text: &str) {
        self.bar.suspend(|| {
            // Ignore errors: stderr is the only output for messages.
            let _ = writeln!(std::io::stderr().lock(), "load: {text}");
        });
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

// The templates are constants; an invalid one would be replaced by the default.
fn set_style(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
}

impl ProgressDisplay for TerminalProgress {
    fn show_phase(&self, name: &'static str) {
        if self.drawn {
            self.bar.set_prefix(name);
        } else {
            self.print(name);
        }
    }

    fn show_online(&self, online: usize, of: usize) {
        self.bar.set_length(of as u64);
        self.bar.set_position(online as u64);
    }

    fn show_sample(&self, sample: &RunSample, injected: u64, violations: u64) {
        if !self.shows_time.swap(true, Ordering::Relaxed) {
            set_style(&self.bar, "{prefix:14} {bar:30} {msg}");
            self.bar.set_length(u64::try_from(self.planned_duration.as_millis()).unwrap_or(u64::MAX));
        }
        self.bar.set_position(sample.at_ms.min(self.bar.length().unwrap_or(u64::MAX)));
        self.bar.set_message(status_line(sample, injected, violations));
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

// Example: `12.3 s · 996 of 1000 online · 4412 calls, 12 failed, 7 under way · 20.1 MiB · 31 faults`
fn status_line(sample: &RunSample, injected: u64, violations: u64) -> String {
    let all: u32 = sample.by_status.iter().sum();
    let online = Status::ALL.iter().zip(sample.by_status).find(|(status, _)| **status == Status::Online);
    let violated = match violations {
        0 => String::new(),
        1 => " · 1 GUARANTEE VIOLATED".to_owned(),
        more => format!(" · {more} GUARANTEES VIOLATED"),
    };
    format!(
        "{} · {} of {all} online · {} calls, {} failed, {} under way · {} · {injected} faults{violated}",
        format_duration(Duration::from_millis(sample.at_ms)),
        online.map_or(0, |(_, online)| online),
        sample.calls,
        sample.failed,
        sample.in_flight,
        format_bytes(sample.rss),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_line_shows_online_servers_and_violations() {
        let mut sample =
            RunSample { at_ms: 12_340, calls: 4412, failed: 12, in_flight: 7, rss: 20 << 20, ..RunSample::default() };
        sample.by_status[6] = 996;
        sample.by_status[3] = 4;
        let usual = "12.3 s · 996 of 1000 online · 4412 calls, 12 failed, 7 under way · 20.0 MiB · 31 faults";
        assert_eq!(status_line(&sample, 31, 0), usual);
        assert_eq!(status_line(&sample, 31, 2), format!("{usual} · 2 GUARANTEES VIOLATED"));
    }
}
