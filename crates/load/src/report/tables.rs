//! Tables and headline figures of a run, shared by the terminal and the HTML report.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::measure::{Latency, format_bytes, format_duration, format_number};
use crate::scenario::fault_name;
use crate::types::{FaultKind, FaultOutcomes, InvariantCoverage, InvariantViolation, RunFindings};

/// Table of a report. All columns except the first contain numbers, unless a cell is a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportTable {
    pub title: &'static str,
    /// Column titles; all may be empty.
    pub head: Vec<&'static str>,
    /// Rows, each with one cell per column.
    pub rows: Vec<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeadlineFigure {
    pub name: &'static str,
    pub value: String,
    pub caption: String,
    // True if the value indicates a problem by itself.
    pub bad: bool,
}

/// Returns the first line of every report: the scenario and its size.
pub fn headline(findings: &RunFindings) -> String {
    let through = if findings.gateway { " through the MCP endpoint" } else { "" };
    format!(
        "{} · seed {} · {} {} servers in {} teams{through} · {} of run time in {} of real time",
        findings.scenario,
        findings.seed,
        format_count(findings.instances as u64),
        findings.mode,
        findings.teams,
        format_seconds(findings.seconds),
        format_seconds(findings.took_seconds),
    )
}

pub(super) fn headlines(findings: &RunFindings) -> [HeadlineFigure; 8] {
    let RunFindings { calls, events, left, .. } = findings;
    let at = |latency: &Latency, share| {
        if latency.is_empty() { "–".to_owned() } else { format_duration(latency.quantile(share)) }
    };
    // Recovery times differ by kind of fault, so an overall percentile would be meaningless.
    let worst = findings.recoveries.iter().filter(|(_, latency)| !latency.is_empty());
    let worst = worst.max_by_key(|(_, latency)| latency.quantile(0.99));
    let injected: u64 = findings.injected.values().sum();
    let left_over = left.servers + left.tasks + left.descriptors + left.processes;
    let plain = |name, value, caption| HeadlineFigure { name, value, caption, bad: false };
    let share = calls.failed as f64 * 100.0 / (calls.answered + calls.failed).max(1) as f64;
    [
        plain(
            "all online in",
            // A start without delays takes no virtual time.
            if findings.all_online_ms > 0.0 {
                format_duration(Duration::from_secs_f64(findings.all_online_ms / 1e3))
            } else {
                "–".to_owned()
            },
            format!("half of the servers in {}", at(&findings.online, 0.5)),
        ),
        plain(
            "memory per server",
            format_bytes(findings.bytes_each),
            format!("{} after the faults", format_bytes(findings.bytes_each_after)),
        ),
        plain(
            "calls answered",
            format_count(calls.answered),
            format!("{}/s; {} failed ({share:.1} %)", format_number(calls.per_second), format_count(calls.failed)),
        ),
        plain("call, 99 %", at(&calls.quiet, 0.99), format!("{} during the faults", at(&calls.storm, 0.99))),
        plain("faults", format_count(injected), format!("of {} kinds", findings.injected.len())),
        plain(
            "slowest recovery, 99 %",
            worst.map_or_else(|| "–".to_owned(), |(_, latency)| at(latency, 0.99)),
            worst
                .map(|(kind, latency)| format!("{}: half within {}", fault_name(*kind), at(latency, 0.5)))
                .unwrap_or_default(),
        ),
        HeadlineFigure {
            name: "events lost",
            value: format_count(events.lost),
            caption: format!(
                "of {}; {} dropped and reported",
                format_count(events.emitted),
                format_count(events.dropped)
            ),
            bad: events.lost > 0,
        },
        HeadlineFigure {
            name: "left over",
            value: format_count(left_over as u64),
            caption: format!(
                "{} servers, {} tasks, {} descriptors, {} processes",
                left.servers, left.tasks, left.descriptors, left.processes
            ),
            bad: left_over > 0,
        },
    ]
}

/// Returns all tables that have rows.
pub fn tables(findings: &RunFindings) -> Vec<ReportTable> {
    let mut tables = vec![invariants(findings), numbers(findings), durations(findings), faults(findings)];
    if !findings.violations.is_empty() {
        tables.insert(0, violations(findings));
    }
    tables.retain(|table| !table.rows.is_empty());
    tables
}

fn numbers(findings: &RunFindings) -> ReportTable {
    let RunFindings { calls, events, .. } = findings;
    let mut rows: Vec<Vec<String>> =
        headlines(findings).into_iter().map(|one| vec![one.name.to_owned(), one.value, one.caption]).collect();
    let mut row = |name: &str, value: String, note: String| rows.push(vec![name.to_owned(), value, note]);
    row(
        "calls planned",
        format_count(calls.planned),
        format!("{} shed: too many were in flight", format_count(calls.shed)),
    );
    for (fate, failed) in &calls.by_fate {
        row(&format!("calls failed: {fate}"), format_count(*failed), String::new());
    }
    row("events accepted", format_count(events.sent), format!("{} rejected by the sink", format_count(events.failed)));
    row("failed permanently", format_count(findings.permanently_failed), String::new());
    row("restarted by hand", format_count(findings.manual_restarts), "10 s after a permanent failure".to_owned());
    let cpu = format_duration(Duration::from_secs_f64(findings.cpu_seconds.max(0.0)));
    let children = findings.children_cpu_ms.map(|cpu| {
        format!("servers until they were online: {}", format_duration(Duration::from_secs_f64(cpu.max(0.0) / 1e3)))
    });
    row("CPU of this process", cpu, children.unwrap_or_default());
    ReportTable { title: "figures", head: vec!["", "", ""], rows }
}

fn durations(findings: &RunFindings) -> ReportTable {
    let calls = &findings.calls;
    let rows = [
        ("until online".to_owned(), None, &findings.online),
        ("call, before the faults".to_owned(), Some(calls.quiet_failed), &calls.quiet),
        ("call, during the faults".to_owned(), Some(calls.storm_failed), &calls.storm),
        ("call to another team, after a large fault".to_owned(), Some(calls.neighbours_failed), &calls.neighbours),
        ("a supervisor's answer".to_owned(), None, &findings.supervisors),
        ("the registry's answer".to_owned(), None, &findings.registry),
    ];
    let recoveries =
        findings.recoveries.iter().map(|(kind, latency)| (format!("recovery: {}", fault_name(*kind)), None, latency));
    let all = rows.into_iter().chain(recoveries);
    let all = all.filter(|(_, failed, latency)| !latency.is_empty() || failed.is_some_and(|failed| failed > 0));
    let row = |(name, failed, latency): (String, Option<u64>, &Latency)| {
        let at = [0.0, 0.5, 0.9, 0.99, 0.999, 1.0]
            .map(|share| if latency.is_empty() { "–".to_owned() } else { format_duration(latency.quantile(share)) });
        // Failed calls are not part of the latencies.
        let failed = failed.map_or_else(|| "–".to_owned(), format_count);
        [name, format_count(latency.len()), failed].into_iter().chain(at).collect()
    };
    let head = vec!["measurement", "n", "failed", "shortest", "50 %", "90 %", "99 %", "99.9 %", "longest"];
    ReportTable { title: "durations", head, rows: all.map(row).collect() }
}

fn faults(findings: &RunFindings) -> ReportTable {
    let mut kinds: Vec<_> = findings.injected.keys().chain(findings.impossible.keys()).copied().collect();
    kinds.sort_unstable();
    kinds.dedup();
    let row = |kind: FaultKind| {
        let of = |all: &BTreeMap<FaultKind, u64>| format_count(all.get(&kind).copied().unwrap_or_default());
        let mut row = vec![fault_name(kind).to_owned(), of(&findings.injected), of(&findings.impossible)];
        // Faults of the satellite itself have no victims that recover.
        row.extend(match findings.outcomes.get(&kind) {
            Some(FaultOutcomes { recovered, unharmed, failed_permanently, not_recovered }) => {
                [recovered, unharmed, failed_permanently, not_recovered].map(|n| format_count(*n))
            }
            None => [(); 4].map(|()| "–".to_owned()),
        });
        row
    };
    ReportTable {
        title: "faults",
        head: vec!["fault", "injected", "no victim", "recovered", "unharmed", "failed permanently", "not recovered"],
        rows: kinds.into_iter().map(row).collect(),
    }
}

fn invariants(findings: &RunFindings) -> ReportTable {
    let row = |InvariantCoverage { invariant, checks, unit, not_checked }: &InvariantCoverage| {
        let violated = findings.violations.iter().filter(|violation| violation.invariant == *invariant).count();
        let what = match (violated, not_checked) {
            (0, None) => "held".to_owned(),
            (0, Some(why)) => format!("not checked: {why}"),
            _ => "violated".to_owned(),
        };
        vec![super::describe_invariant(*invariant).to_owned(), format!("{} {unit}", format_count(*checks)), what]
    };
    ReportTable {
        title: "guarantees",
        head: vec!["guarantee", "checks", "result"],
        rows: findings.checked.iter().map(row).collect(),
    }
}

fn violations(findings: &RunFindings) -> ReportTable {
    let row = |violation: &InvariantViolation| {
        vec![
            super::describe_invariant(violation.invariant).to_owned(),
            format_seconds(violation.at_ms as f64 / 1e3),
            violation.instance.clone().unwrap_or_else(|| "–".to_owned()),
            violation.what.clone(),
        ]
    };
    ReportTable {
        title: "guarantees violated",
        head: vec!["guarantee", "at", "instance", "what happened"],
        rows: findings.violations.iter().map(row).collect(),
    }
}

fn format_count(value: u64) -> String {
    let digits = value.to_string();
    let groups: Vec<&str> = {
        let first = digits.len() % 3;
        let (head, tail) = digits.split_at(first);
        let tail = (0..tail.len()).step_by(3).map(|at| &tail[at..at + 3]);
        std::iter::once(head).filter(|head| !head.is_empty()).chain(tail).collect()
    };
    groups.join(",")
}

fn format_seconds(value: f64) -> String {
    format_duration(Duration::from_secs_f64(value.max(0.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::sample_results::{findings_with_violations, findings_without_violations};
    use crate::types::Invariant;

    #[test]
    fn the_headline_describes_the_run() {
        assert_eq!(
            headline(&findings_without_violations()),
            "mixed · seed 42 · 1,000 simulated servers in 50 teams · 60.0 s of run time in 63.2 s of real time"
        );
    }

    #[test]
    fn every_table_has_a_cell_for_each_column() {
        for findings in [findings_without_violations(), findings_with_violations()] {
            for table in tables(&findings) {
                assert!(table.rows.iter().all(|row| row.len() == table.head.len()), "{table:#?}");
            }
        }
        assert_eq!(
            tables(&findings_without_violations()).iter().filter(|table| table.title == "guarantees violated").count(),
            0
        );
        assert_eq!(tables(&findings_with_violations())[0].title, "guarantees violated");
    }

    #[test]
    fn an_unchecked_invariant_is_not_reported_as_held() {
        let checked = |invariant, not_checked: Option<&str>| InvariantCoverage {
            invariant,
            checks: 1200,
            unit: "calls",
            not_checked: not_checked.map(str::to_owned),
        };
        let checked = vec![
            checked(Invariant::NoGap, None),
            checked(Invariant::Flat, Some("too short")),
            checked(Invariant::OwnAnswer, None),
        ];
        let rows = invariants(&RunFindings { checked, ..findings_with_violations() }).rows;
        let cells: Vec<_> = rows.iter().map(|row| (row[1].as_str(), row[2].as_str())).collect();
        assert_eq!(
            cells,
            [("1,200 calls", "violated"), ("1,200 calls", "not checked: too short"), ("1,200 calls", "violated")]
        );
    }

    #[test]
    fn the_fault_table_shows_the_outcomes() {
        let outcome = FaultOutcomes { recovered: 7, unharmed: 1, failed_permanently: 2, not_recovered: 3 };
        let table =
            faults(&RunFindings { outcomes: [(FaultKind::Hang, outcome)].into(), ..findings_without_violations() });
        let hang = table.rows.iter().find(|row| row[0] == "hang").unwrap();
        assert_eq!(hang[3..], ["7", "1", "2", "3"]);
        let panic = table.rows.iter().find(|row| row[0] == "team_panic").unwrap();
        assert_eq!(panic[3..], ["–", "–", "–", "–"]);
    }

    #[test]
    fn lost_events_and_leftovers_are_highlighted() {
        assert!(headlines(&findings_without_violations()).iter().all(|one| !one.bad));
        let bad: Vec<&str> =
            headlines(&findings_with_violations()).iter().filter(|one| one.bad).map(|one| one.name).collect();
        assert_eq!(bad, ["events lost", "left over"]);
    }

    #[test]
    fn counts_have_thousands_separators() {
        assert_eq!(
            [0, 12, 123, 1234, 123_456, 1_234_567].map(format_count),
            ["0", "12", "123", "1,234", "123,456", "1,234,567"]
        );
    }
}
