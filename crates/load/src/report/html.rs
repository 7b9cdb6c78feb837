//! HTML report: one self-contained file with the verdict, eight headline figures, plots and all tables.

use std::fmt::Write;

use mcp_satellite_actors::model::status::Status;

use super::plots::{self, Colour, PlotCurve, PlotResult, PlotUnit, PlotWidth, TimeAxis};
use super::tables::{HeadlineFigure, ReportTable, headline, headlines, tables};
use super::verdict;
use crate::measure::Latency;
use crate::scenario::fault_name;
use crate::types::{RunFindings, RunSample};

// Maximum points of a curve; a screen cannot show more.
const POINTS_MAX: usize = 600;
// Maximum marks on a time axis; more frequent faults are not worth a mark.
const MARKS_MAX: usize = 24;

const STYLE: &str = include_str!("page.css");

const GREEN: Colour = (0x37, 0xb2, 0x4d);
const RED: Colour = (0xf0, 0x3e, 0x3e);
const BLUE: Colour = (0x33, 0x9a, 0xf0);
const ORANGE: Colour = (0xf7, 0x67, 0x07);
const VIOLET: Colour = (0x97, 0x75, 0xfa);
const TEAL: Colour = (0x0c, 0xa6, 0x78);

/// Renders the results as an HTML page.
pub fn html(findings: &RunFindings) -> String {
    let mut page = HtmlPage(String::new());
    page.head(findings);
    page.tiles(&headlines(findings));
    page.plots(findings);
    for table in tables(findings) {
        page.table(&table);
    }
    page.foot(findings);
    page.0
}

struct HtmlPage(String);

// Writing to a `String` cannot fail.
macro_rules! put {
    ($page:expr, $($what:tt)*) => {{ let _ = write!($page.0, $($what)*); }};
}

impl HtmlPage {
    fn head(&mut self, findings: &RunFindings) {
        let title = escaped(&headline(findings));
        let class = if findings.violations_in_all == 0 { "verdict" } else { "verdict violated" };
        put!(self, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
        put!(self, "<meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n");
        put!(self, "<style>\n{STYLE}</style>\n</head>\n<body>\n");
        put!(self, "<header class=\"{class}\">\n<h1>{}</h1>\n<p>{title}</p>\n", escaped(&verdict(findings)));
        put!(self, "<p class=\"faint\">{}</p>\n", escaped(&findings.about));
        put!(self, "<p class=\"faint\">repeat: <code>{}</code></p>\n</header>\n", escaped(&findings.repeat));
    }

    fn tiles(&mut self, tiles: &[HeadlineFigure]) {
        put!(self, "<div class=\"tiles\">\n");
        for HeadlineFigure { name, value, caption, bad } in tiles {
            let class = if *bad { "tile bad" } else { "tile" };
            let (value, caption) = (escaped(value), escaped(caption));
            put!(self, "<div class=\"{class}\"><span class=\"faint\">{name}</span><b>{value}</b>");
            put!(self, "<span class=\"faint\">{caption}</span></div>\n");
        }
        put!(self, "</div>\n");
    }

    fn plots(&mut self, findings: &RunFindings) {
        put!(self, "<div class=\"plots\">\n");
        self.plots_over_time(findings);
        let calls = &findings.calls;
        let mut latencies =
            vec![("before the faults", GREEN, &calls.quiet), ("during the faults", ORANGE, &calls.storm)];
        if !calls.neighbours.is_empty() {
            latencies.push(("to other teams, after a large fault", BLUE, &calls.neighbours));
        }
        latencies.retain(|(_, _, latency)| !latency.is_empty());
        let legend: Vec<_> = latencies.iter().map(|(name, colour, _)| (*name, *colour)).collect();
        let drawn: Vec<_> = latencies.iter().map(|(_, colour, latency)| (*colour, *latency)).collect();
        if !drawn.is_empty() {
            self.plot(PlotWidth::Half, "Duration of calls", &legend, plots::histogram(PlotWidth::Half, &drawn));
        }
        if !findings.online.is_empty() {
            let online = plots::histogram(PlotWidth::Half, &[(GREEN, &findings.online)]);
            self.plot(PlotWidth::Half, "Time from installation to online", &[], online);
        }
        let waits = [
            ("supervisors", VIOLET, &findings.supervisors),
            ("root supervisor and registry", TEAL, &findings.registry),
        ];
        if waits.iter().all(|(_, _, latency)| !latency.is_empty()) {
            let legend = waits.map(|(name, colour, _)| (name, colour));
            let drawn = plots::histogram(PlotWidth::Half, &waits.map(|(_, colour, latency)| (colour, latency)));
            self.plot(PlotWidth::Half, "Response times of the runtime", &legend, drawn);
        }
        self.recoveries(findings);
        put!(self, "</div>\n");
    }

    fn recoveries(&mut self, findings: &RunFindings) {
        let mut recoveries: Vec<_> = findings.recoveries.iter().filter(|(_, latency)| !latency.is_empty()).collect();
        if recoveries.is_empty() {
            return;
        }
        let mut all = Latency::default();
        for (_, latency) in &recoveries {
            all.merge(latency);
        }
        let histogram = plots::histogram(PlotWidth::Half, &[(VIOLET, &all)]);
        self.plot(PlotWidth::Half, "Recovery time: from a fault or its end until online", &[], histogram);
        recoveries.sort_by_key(|(_, latency)| latency.quantile(0.5));
        let rows: Vec<_> = recoveries
            .into_iter()
            .map(|(kind, latency)| (format!("{} ({})", fault_name(*kind), latency.len()), VIOLET, latency))
            .collect();
        let spans = plots::spans(PlotWidth::Full, &rows);
        self.plot(PlotWidth::Full, "Recovery time by kind of fault: 50 %, 90 %, longest", &[], spans);
    }

    fn plots_over_time(&mut self, findings: &RunFindings) {
        let samples = &findings.samples;
        if samples.len() < 2 {
            return;
        }
        let buckets: Vec<&[RunSample]> = samples.chunks(samples.len().div_ceil(POINTS_MAX)).collect();
        let seconds: Vec<f64> = buckets.iter().map(|bucket| bucket[0].at_ms as f64 / 1e3).collect();
        let marks: Vec<(f64, String)> =
            findings.marks.iter().take(MARKS_MAX).map(|(at_ms, name)| (*at_ms as f64 / 1e3, name.clone())).collect();
        let times = TimeAxis { seconds: &seconds, marks: &marks };
        let bare = TimeAxis { seconds: &seconds, marks: &[] };

        let layers = statuses(&buckets);
        self.plot(
            PlotWidth::Full,
            "Servers by status",
            &legend(&layers),
            plots::stack(PlotWidth::Full, &times, &layers),
        );
        // Skip the start of the fleet: instances that were never online are not missing.
        let up = buckets.iter().position(|bucket| bucket[0].at_ms as f64 > findings.all_online_ms).unwrap_or(0);
        let mut failing = statuses(&buckets[up..]);
        failing.retain(|layer| !ONLINE_LAYERS.contains(&layer.name.as_str()));
        if !failing.is_empty() {
            let times = TimeAxis { seconds: &seconds[up..], marks: &[] };
            let drawn = plots::stack(PlotWidth::Full, &times, &failing);
            self.plot(PlotWidth::Full, "Servers that cannot be called, by status", &legend(&failing), drawn);
        }

        let of = |value: fn(&RunSample) -> f64| -> Vec<f64> {
            buckets.iter().map(|bucket| bucket.iter().map(value).fold(0.0, f64::max)).collect()
        };
        let one = |colour, values| [PlotCurve { name: String::new(), colour, values }];
        let calls = rates(&seconds, &buckets);
        let drawn = plots::lines(PlotWidth::Full, &times, &calls, PlotUnit::Count);
        self.plot(PlotWidth::Full, "Calls completed per second", &legend(&calls), drawn);
        let memory = plots::lines(PlotWidth::Half, &bare, &one(BLUE, of(|sample| sample.rss as f64)), PlotUnit::Bytes);
        self.plot(PlotWidth::Half, "Memory of this process", &[], memory);
        // Virtual runs open no descriptors.
        if findings.mode != "virtual" {
            let descriptors = one(TEAL, of(|sample| f64::from(sample.descriptors)));
            let drawn = plots::lines(PlotWidth::Half, &bare, &descriptors, PlotUnit::Count);
            self.plot(PlotWidth::Half, "Open descriptors", &[], drawn);
        }
        let backlog = one(ORANGE, of(|sample| sample.backlog as f64));
        let drawn = plots::lines(PlotWidth::Half, &bare, &backlog, PlotUnit::Count);
        self.plot(PlotWidth::Half, "Events waiting for the sink", &[], drawn);
        if samples.iter().any(|sample| sample.lag_us > 0) {
            let lag = one(VIOLET, of(|sample| sample.lag_us as f64));
            let drawn = plots::lines(PlotWidth::Half, &bare, &lag, PlotUnit::Microseconds);
            self.plot(PlotWidth::Half, "Response time of the registry", &[], drawn);
        }
    }

    fn plot(&mut self, width: PlotWidth, title: &str, legend: &[(&str, Colour)], drawn: PlotResult) {
        let class = if width == PlotWidth::Full { " class=\"full\"" } else { "" };
        put!(self, "<figure{class}>\n<h2>{title}</h2>\n");
        if !legend.is_empty() {
            put!(self, "<div class=\"legend\">");
            for (name, colour) in legend {
                put!(self, "<span><i style=\"background:{}\"></i>{name}</span>", plots::hex(*colour));
            }
            put!(self, "</div>\n");
        }
        match drawn {
            Ok(svg) => self.0.push_str(&svg),
            Err(error) => put!(self, "<p class=\"faint\">this plot could not be drawn: {}</p>\n", escaped(&error)),
        }
        put!(self, "</figure>\n");
    }

    fn table(&mut self, ReportTable { title, head, rows }: &ReportTable) {
        // A table with long cells contains text, which is aligned to the left.
        let numbers = rows.iter().flatten().all(|cell| cell.len() < 32);
        let class = if numbers { "" } else { " class=\"words\"" };
        put!(self, "<section>\n<h2>{title}</h2>\n<table{class}>\n");
        if head.iter().any(|title| !title.is_empty()) {
            self.row("th", head.iter().copied());
        }
        for row in rows {
            self.row("td", row.iter().map(String::as_str));
        }
        put!(self, "</table>\n</section>\n");
    }

    fn row<'a>(&mut self, tag: &str, cells: impl Iterator<Item = &'a str>) {
        put!(self, "<tr>");
        for cell in cells {
            put!(self, "<{tag}>{}</{tag}>", escaped(cell));
        }
        put!(self, "</tr>\n");
    }

    fn foot(&mut self, findings: &RunFindings) {
        let machine: Vec<String> = findings.machine.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        let clock = if findings.mode == "virtual" {
            " Time was virtual: durations are simulated and say nothing about this machine."
        } else {
            ""
        };
        put!(self, "<footer class=\"faint\">\n<p>{}.{clock}</p>\n", escaped(&machine.join(" · ")));
        put!(self, "<p>order of events: <code>{}</code></p>\n</footer>\n", escaped(&findings.order));
        put!(self, "</body>\n</html>\n");
    }
}

// Names of the layers with instances that can be called.
const ONLINE_LAYERS: [&str; 2] = ["online", "online, dormant"];

/// Returns a layer for each status that occurred, from healthy at the bottom to failed. Of the samples that share a
/// point, the one with the fewest online instances counts.
fn statuses(buckets: &[&[RunSample]]) -> Vec<PlotCurve> {
    let online = |sample: &RunSample| sample.by_status[status_index(Status::Online)];
    let worst: Vec<&RunSample> =
        buckets.iter().filter_map(|bucket| bucket.iter().min_by_key(|sample| online(sample))).collect();
    // A dormant instance is online, except while it is being stopped: a layer must not become negative.
    let asleep = |sample: &RunSample| sample.dormant.min(online(sample));
    let mut layers = vec![
        PlotCurve {
            name: ONLINE_LAYERS[0].to_owned(),
            colour: colour(Status::Online),
            values: worst.iter().map(|sample| f64::from(online(sample) - asleep(sample))).collect(),
        },
        PlotCurve {
            name: ONLINE_LAYERS[1].to_owned(),
            colour: (0xb2, 0xf2, 0xbb),
            values: worst.iter().map(|sample| f64::from(asleep(sample))).collect(),
        },
    ];
    layers.extend(Status::ALL.iter().copied().filter(|status| *status != Status::Online).map(|status| PlotCurve {
        name: status.as_str().to_owned(),
        colour: colour(status),
        values: worst.iter().map(|sample| f64::from(sample.by_status[status_index(status)])).collect(),
    }));
    layers.retain(|layer| layer.values.iter().any(|value| *value > 0.0));
    layers
}

fn status_index(status: Status) -> usize {
    Status::ALL.iter().position(|one| *one == status).unwrap_or_default()
}

// Green: online; yellow: transitional; red: failed; violet and gray: waiting for a person.
fn colour(status: Status) -> Colour {
    match status {
        Status::Online => GREEN,
        Status::Provisioning => (0xff, 0xec, 0x99),
        Status::CommandReceived => (0xff, 0xe0, 0x66),
        Status::Connecting => (0xfc, 0xc4, 0x19),
        Status::DiscoveringTools => (0xfa, 0xb0, 0x05),
        Status::SyncingTools => (0xf5, 0x9f, 0x00),
        Status::Restarting => (0xfd, 0x7e, 0x14),
        Status::Offline => (0xff, 0x87, 0x87),
        Status::Error => (0xf0, 0x3e, 0x3e),
        Status::PermanentlyFailed => (0xa6, 0x1e, 0x4d),
        Status::RequiresReauth => (0x97, 0x75, 0xfa),
        Status::AwaitingUserConfig => (0xad, 0xb5, 0xbd),
    }
}

fn legend(curves: &[PlotCurve]) -> Vec<(&str, Colour)> {
    curves.iter().map(|curve| (curve.name.as_str(), curve.colour)).collect()
}

fn rates(seconds: &[f64], buckets: &[&[RunSample]]) -> [PlotCurve; 2] {
    let of = |value: fn(&RunSample) -> u64| -> Vec<f64> {
        let at = |nth: usize| buckets[nth].first().map(value).unwrap_or_default();
        let rate = |nth: usize| {
            let (from, to) = (nth.saturating_sub(1), nth.max(1));
            at(to).saturating_sub(at(from)) as f64 / (seconds[to] - seconds[from]).max(1e-3)
        };
        (0..buckets.len()).map(rate).collect()
    };
    [
        PlotCurve { name: "all".to_owned(), colour: GREEN, values: of(|sample| sample.calls) },
        PlotCurve { name: "failed".to_owned(), colour: RED, values: of(|sample| sample.failed) },
    ]
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use std::collections::BTreeMap;

    use crate::report::sample_results::{findings_with_violations, findings_without_violations, samples};
    use crate::types::CallFindings;

    #[test]
    fn the_page_has_no_external_resources() {
        let page = html(&findings_without_violations());
        for foreign in ["http:", "https:", "<script", "<link", "url(", "@import", "src="] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert_eq!(page.matches("<svg ").count(), page.matches("</svg>").count());
        assert_eq!(page.matches("<figure").count(), 12, "number of plots");
        assert!(!page.contains("could not be drawn"));
    }

    #[test]
    fn the_verdict_comes_first() {
        let held = html(&findings_without_violations());
        assert!(held.find("HELD").unwrap() < held.find("class=\"tiles\"").unwrap());
        assert!(!held.contains("guarantees violated") && !held.contains("class=\"verdict violated\""));
        let violated = html(&findings_with_violations());
        assert!(violated.find("VIOLATED, 12 times").unwrap() < violated.find("class=\"tiles\"").unwrap());
        assert!(violated.contains("class=\"verdict violated\"") && violated.contains("guarantees violated"));
        assert!(violated.contains("satellite load --scenario mixed --instances 1000"));
    }

    #[test]
    fn text_of_servers_and_files_is_escaped() {
        let page = html(&findings_with_violations());
        assert!(page.contains("got the answer &lt;b&gt;`2a-3-49`&lt;/b&gt;"));
        assert!(page.contains("in servers &amp; in our own parts"));
    }

    #[test]
    fn a_long_run_does_not_enlarge_the_page() {
        let mut rng = StdRng::seed_from_u64(1);
        let findings = RunFindings { samples: samples(30_000, &mut rng), ..findings_without_violations() };
        let page = html(&findings);
        assert!(page.len() < 500_000, "{} bytes", page.len());
    }

    #[test]
    fn a_run_without_samples_has_a_page() {
        let nothing = RunFindings {
            samples: Vec::new(),
            recoveries: BTreeMap::default(),
            online: Latency::default(),
            calls: CallFindings::default(),
            supervisors: Latency::default(),
            registry: Latency::default(),
            ..findings_without_violations()
        };
        let page = html(&nothing);
        assert!(page.contains("HELD") && !page.contains("<figure"));
    }

    #[test]
    fn the_worst_sample_of_a_group_is_shown() {
        let mut all: Vec<RunSample> =
            (0..10).map(|_| RunSample { by_status: [0; 12], ..RunSample::default() }).collect();
        for sample in &mut all {
            sample.by_status[status_index(Status::Online)] = 5;
        }
        all[3].by_status[status_index(Status::Online)] = 2;
        all[3].by_status[status_index(Status::Error)] = 3;
        let layers = statuses(&[&all]);
        let found: Vec<(&str, f64)> = layers.iter().map(|layer| (layer.name.as_str(), layer.values[0])).collect();
        assert_eq!(found, [("online", 2.0), ("error", 3.0)]);
    }
}
