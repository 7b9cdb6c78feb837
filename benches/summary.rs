//! Writes the latest report of each bench into `BENCHMARKS.md`, between the markers of the report, and the plots into
//! `docs/images`. Cargo runs benches by name, so this one runs last.
#![allow(clippy::unwrap_used, reason = "a bench panics on any unexpected error")]

#[expect(dead_code, reason = "each bench uses a part of this module")]
mod common;

use std::path::Path;

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
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/images");
    for file in std::fs::read_dir(common::directory()).into_iter().flatten() {
        let file = file.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "svg") {
            let name = file.file_stem().unwrap().to_str().unwrap();
            text = fill(&text, name, &format!("![{}](docs/images/{name}.svg)\n", name.replace('-', " ")));
            std::fs::create_dir_all(&images).unwrap();
            std::fs::copy(&file, images.join(format!("{name}.svg"))).unwrap();
        }
    }
    std::fs::write(path, text).unwrap();
}

/// Replaces the text between `<!-- name -->` and `<!-- /name -->`.
fn fill(text: &str, name: &str, content: &str) -> String {
    let (open, close) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let (before, rest) =
        text.split_once(&open).unwrap_or_else(|| panic!("BENCHMARKS.md does not contain the marker <!-- {name} -->"));
    let (_, after) =
        rest.split_once(&close).unwrap_or_else(|| panic!("BENCHMARKS.md does not contain the marker <!-- /{name} -->"));
    format!("{before}{open}\n{content}\n{close}{after}")
}
