//! Writes the published reports of all benches into `BENCHMARKS.md`, between its markers. Its name makes it the last
//! bench.
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says so by panicking")]

#[expect(dead_code, reason = "each bench uses its part of it")]
mod common;

use common::BenchReport;

fn main() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/BENCHMARKS.md");
    let mut text = std::fs::read_to_string(path).unwrap();
    let reports = BenchReport::all();
    for (name, report) in &reports {
        text = fill(&text, name, &report.text());
    }
    if let Some(latest) = reports.values().map(BenchReport::measured).max_by_key(|measured| measured.at) {
        let machine = latest.machine.iter().map(|(name, value)| format!("- {name}: {value}\n"));
        text = fill(&text, "machine", &machine.collect::<String>());
    }
    std::fs::write(path, text).unwrap();
}

/// Replaces the text between `<!-- name -->` and `<!-- /name -->`.
fn fill(text: &str, name: &str, content: &str) -> String {
    let (open, close) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let (before, rest) = text.split_once(&open).unwrap_or_else(|| panic!("BENCHMARKS.md has no place for {name}"));
    let (_, after) = rest.split_once(&close).unwrap_or_else(|| panic!("the place for {name} does not end"));
    format!("{before}{open}\n{content}\n{close}{after}")
}
