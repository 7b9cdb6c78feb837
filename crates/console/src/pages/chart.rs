//! A chart of memory and processor time.

use std::fmt::Write as _;

use maud::{Markup, html};

use crate::v1::{UsageReport, UsageSpan};

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 90.0;

/// Draws memory and CPU of the last hour: one line each, interrupted where the instance had no process. Without a process
/// now there is no current value.
pub(super) fn usage_chart(usage: &UsageReport, is_running: bool) -> Markup {
    let points = &usage.points;
    let minutes = points.len() as u64 * usage.point_seconds / 60;
    let known = || points.iter().flatten();
    let memory_max = known().map(|point| point.rss_bytes as f64).fold(0.0, f64::max);
    let cpu_max = known().filter_map(|point| point.cpu_percent).fold(0.0, f64::max);
    // The current span may have no sample yet.
    let last = points.iter().rev().take(2).flatten().next().filter(|_| is_running);
    let memory = last.map(|last| format!("{:.1} MB", last.rss_bytes as f64 / 1e6));
    let cpu = last.and_then(|last| last.cpu_percent).map(|percent| format!("{percent:.1} % of a core"));
    let none = || if is_running { "not yet known" } else { "none: no process" }.to_owned();
    html! {
        @if known().next().is_some() {
            p { "Memory " b { (memory.unwrap_or_else(none)) } ", at most " (format!("{:.1} MB", memory_max / 1e6)) }
            (line_of(points, "memory", memory_max, |point| Some(point.rss_bytes as f64)))
            p { "CPU " b { (cpu.unwrap_or_else(none)) } ", at most " (format!("{cpu_max:.1} %")) }
            (line_of(points, "cpu", cpu_max, |point| point.cpu_percent))
            p.help { "The last " (minutes) " min, in steps of " (usage.point_seconds) " s." }
        } @else { p { "Nothing was measured in the last hour." } }
    }
}

fn line_of(points: &[Option<UsageSpan>], name: &str, max: f64, value: impl Fn(&UsageSpan) -> Option<f64>) -> Markup {
    let step = WIDTH / (points.len().max(2) - 1) as f64;
    let (mut path, mut is_open) = (String::new(), false);
    for (nth, point) in points.iter().enumerate() {
        let Some(value) = point.as_ref().and_then(&value) else {
            is_open = false;
            continue;
        };
        let (x, y) = (nth as f64 * step, HEIGHT - 4.0 - (HEIGHT - 8.0) * value / max.max(1.0));
        // A point without neighbours is a short line. Writing to a String does not fail.
        let _ = write!(path, "{}{x:.1} {y:.1}", if is_open { "L" } else { "M" });
        if !is_open {
            let _ = write!(path, "h1");
        }
        is_open = true;
    }
    html! {
        svg.chart viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label={ "Course of " (name) } {
            line.axis x1="0" y1=(HEIGHT) x2=(WIDTH) y2=(HEIGHT) {}
            path.(name) d=(path) {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_a_process_has_no_current_values() {
        let idle = UsageSpan { rss_bytes: 5_000_000, cpu_percent: Some(0.0) };
        let mut usage = UsageReport { point_seconds: 10, points: vec![Some(idle), None] };
        let text = usage_chart(&usage, true).into_string();
        assert!(text.contains("<b>5.0 MB</b>") && text.contains("<b>0.0 % of a core</b>, at most 0.0 %"), "{text}");
        let text = usage_chart(&usage, false).into_string();
        assert!(text.contains("<b>none: no process</b>, at most 5.0 MB"), "{text}");
        usage.points.push(None);
        assert!(usage_chart(&usage, true).into_string().contains("Memory <b>not yet known</b>"));
    }
}
