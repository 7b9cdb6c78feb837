//! Reports of a run: progress display, tables, JSON and an HTML page with plots.

mod html;
mod live;
mod plots;
#[cfg(test)]
pub mod sample_results;
mod tables;

use std::collections::BTreeMap;

pub use html::html;
pub use live::TerminalProgress;
pub use tables::{ReportTable, headline, tables};

use super::scenario::fault_name;
use super::types::{Invariant, RunFindings};

/// Serializes the results as one JSON object on one line.
///
/// # Errors
///
/// Fails if the serialization fails.
pub fn json(findings: &RunFindings) -> Result<String, serde_json::Error> {
    serde_json::to_string(findings)
}

/// Returns a verdict in one line, with the invariants that were violated or not checked.
pub fn verdict(findings: &RunFindings) -> String {
    let so_far = if findings.stopped { " so far" } else { "" };
    if findings.violations_in_all == 0 {
        let unchecked = findings.checked.iter().filter(|checked| checked.not_checked.is_some());
        let unchecked: Vec<_> = unchecked.map(|checked| describe_invariant(checked.invariant)).collect();
        let never: Vec<_> = findings.never_injected.iter().map(|kind| fault_name(*kind)).collect();
        let but = |what: &str, of: &[&str]| match of {
            [] => String::new(),
            of => format!("; {what}: {}", of.join(", ")),
        };
        let (unchecked, never) = (but("not checked", &unchecked), but("faults that never occurred", &never));
        return format!("HELD{so_far}: every guarantee that was checked held{unchecked}{never}");
    }
    let mut violated: BTreeMap<Invariant, u64> = BTreeMap::new();
    for violation in &findings.violations {
        *violated.entry(violation.invariant).or_default() += 1;
    }
    let guarantees: Vec<&str> = violated.keys().map(|invariant| describe_invariant(*invariant)).collect();
    let times = match findings.violations_in_all {
        1 => "once".to_owned(),
        times => format!("{times} times in all"),
    };
    format!("VIOLATED{so_far}, {times}: {}", guarantees.join("; "))
}

/// Returns the description of an invariant for reports.
pub fn describe_invariant(invariant: Invariant) -> &'static str {
    match invariant {
        Invariant::OwnAnswer => "each caller gets its own response, once",
        Invariant::OnlineIsCallable => "an online server can be called",
        Invariant::RestartBudget => "no server is restarted beyond its budget",
        Invariant::LegalTransitions => "statuses change by legal transitions, in order",
        Invariant::NoGap => "events are numbered without a gap",
        Invariant::NothingLeft => "nothing is left at the end",
        Invariant::MemoryBack => "memory is back after the faults",
        Invariant::Recovery => "a victim of a fault recovers in time",
        Invariant::Neighbours => "other teams do not notice a fault",
        Invariant::Flat => "memory and descriptors do not grow over time",
    }
}

#[cfg(test)]
mod tests {
    use super::sample_results::{findings_with_violations, findings_without_violations};
    use super::*;
    use crate::types::{FaultKind, InvariantCoverage};

    #[test]
    fn the_verdict_names_the_violated_invariants_in_one_line() {
        assert_eq!(verdict(&findings_without_violations()), "HELD: every guarantee that was checked held");
        assert_eq!(
            verdict(&findings_with_violations()),
            "VIOLATED, 12 times in all: each caller gets its own response, once; events are numbered without a gap",
        );
        let partly = RunFindings {
            checked: vec![
                InvariantCoverage { invariant: Invariant::NoGap, checks: 9, unit: "events", not_checked: None },
                InvariantCoverage {
                    invariant: Invariant::Flat,
                    checks: 3,
                    unit: "samples",
                    not_checked: Some("too short".to_owned()),
                },
            ],
            never_injected: vec![FaultKind::Huge, FaultKind::Exit0],
            ..findings_without_violations()
        };
        let but =
            "; not checked: memory and descriptors do not grow over time; faults that never occurred: huge, exit_0";
        assert_eq!(verdict(&partly), format!("HELD: every guarantee that was checked held{but}"));
        let early = |findings| verdict(&RunFindings { stopped: true, ..findings });
        assert_eq!(early(findings_without_violations()), "HELD so far: every guarantee that was checked held");
        assert!(early(findings_with_violations()).starts_with("VIOLATED so far, 12 times in all: "));
    }

    #[test]
    fn findings_are_serialized_as_one_json_object() {
        let json: serde_json::Value = serde_json::from_str(&json(&findings_with_violations()).unwrap()).unwrap();
        assert_eq!(json["violations"][0]["invariant"], "own_answer");
        assert_eq!(json["recoveries"]["exit_0"]["n"], 60);
        assert!(json["calls"]["quiet"]["p99"].as_f64().unwrap() > 0.0);
        assert_eq!(json["seed"], 42);
    }
}
