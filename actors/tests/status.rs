//! The twelve statuses: the complete transition table as a snapshot, and checks against the specification.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeSet;
use std::fmt::Write as _;

use mcp_satellite_actors::model::status::{Status, StatusCause, next};

/// Returns the column head of a status.
fn short(status: Status) -> &'static str {
    match status {
        Status::AwaitingUserConfig => "await",
        Status::Provisioning => "prov",
        Status::CommandReceived => "taken",
        Status::Connecting => "conn",
        Status::DiscoveringTools => "disc",
        Status::SyncingTools => "sync",
        Status::Online => "ONLINE",
        Status::Restarting => "restart",
        Status::Offline => "offline",
        Status::Error => "error",
        Status::RequiresReauth => "reauth",
        Status::PermanentlyFailed => "FAILED",
    }
}

fn heads(first: &str) -> String {
    row(first, Status::ALL.iter().map(|status| short(*status).to_owned()))
}

fn row(first: &str, cells: impl Iterator<Item = String>) -> String {
    let line = cells.fold(format!("{first:<20} "), |line, cell| format!("{line}{cell:<8}"));
    format!("{}\n", line.trim_end())
}

/// Returns the causes that change `status`, with the new status.
fn transitions(status: Status) -> Vec<(StatusCause, Status)> {
    let out = StatusCause::ALL.iter().copied().filter_map(|cause| Some((cause, next(status, cause)?)));
    out.filter(|(_, to)| *to != status).collect()
}

/// Returns the minimum number of transitions between two statuses, or `None` if there is no path.
fn steps(from: Status, to: Status) -> Option<usize> {
    let (mut seen, mut edge) = (BTreeSet::from([from]), BTreeSet::from([from]));
    for steps in 1..=Status::ALL.len() {
        edge = edge.iter().flat_map(|status| transitions(*status)).map(|(_, next)| next).collect();
        if edge.contains(&to) {
            return Some(steps);
        }
        edge.retain(|status| seen.insert(*status));
    }
    None
}

#[test]
fn the_status_table_is_as_in_the_snapshot() {
    let mut text = heads("cause \\ status");
    for &cause in StatusCause::ALL {
        let cells = Status::ALL.iter().map(|status| next(*status, cause).map_or("-", short).to_owned());
        text += &row(&format!("{cause:?}"), cells);
    }
    text += "\nsteps from the row to the column, each a cause that is accepted\n";
    text += &heads("from \\ to");
    for &from in Status::ALL {
        let cells = Status::ALL.iter().map(|to| steps(from, *to).map_or("-".to_owned(), |steps| steps.to_string()));
        text += &row(from.as_str(), cells);
    }
    text += "\n";
    for &status in Status::ALL {
        let _ = writeln!(text, "{:<8}{status}", short(status));
    }
    insta::assert_snapshot!(text);
}

/// Compares with the column "who leaves it" of the specification.
#[test]
fn each_status_is_left_only_by_the_specified_causes() {
    use StatusCause::{
        Accepted, Attempt, AuthRefused, BudgetSpent, ConfigChanged, ConfigMissing, Configured, CredentialsChanged,
        Discovered, Ended, Failed, Initialized, Lost, Requested, Restored, Stopped, Synced,
    };
    let by =
        |status| -> BTreeSet<String> { transitions(status).iter().map(|(cause, _)| format!("{cause:?}")).collect() };
    let only =
        |causes: &[StatusCause]| -> BTreeSet<String> { causes.iter().map(|cause| format!("{cause:?}")).collect() };

    assert_eq!(by(Status::AwaitingUserConfig), only(&[Configured, Stopped]));
    assert_eq!(by(Status::Provisioning), only(&[Accepted, Restored, Failed, Stopped, ConfigMissing]));
    assert_eq!(by(Status::CommandReceived), only(&[Attempt, ConfigChanged, Failed, Stopped, ConfigMissing]));
    assert_eq!(
        by(Status::Online),
        only(&[ConfigChanged, Ended, BudgetSpent, Lost, Failed, AuthRefused, Stopped, ConfigMissing, Requested])
    );
    // A stopped instance and one that reconnects share this status; `want` tells them apart.
    assert_eq!(by(Status::Offline), only(&[Attempt, ConfigChanged, Failed, AuthRefused, ConfigMissing, Requested]));
    assert_eq!(
        by(Status::RequiresReauth),
        only(&[CredentialsChanged, ConfigChanged, Stopped, ConfigMissing, Requested])
    );
    assert_eq!(by(Status::PermanentlyFailed), only(&[Requested, ConfigChanged, Stopped, ConfigMissing]));

    assert_eq!(next(Status::AwaitingUserConfig, Configured), Some(Status::Provisioning));
    assert_eq!(next(Status::Provisioning, Accepted), Some(Status::CommandReceived));
    assert_eq!(next(Status::CommandReceived, Attempt), Some(Status::Connecting));
    assert_eq!(next(Status::Connecting, Initialized), Some(Status::DiscoveringTools));
    assert_eq!(next(Status::DiscoveringTools, Discovered), Some(Status::SyncingTools));
    assert_eq!(next(Status::DiscoveringTools, Synced), Some(Status::Online));
    assert_eq!(next(Status::SyncingTools, Synced), Some(Status::Online));
    assert_eq!(next(Status::Restarting, Attempt), Some(Status::Connecting));
    assert_eq!(next(Status::Offline, Attempt), Some(Status::Connecting));
    assert_eq!(next(Status::Offline, ConfigChanged), Some(Status::Restarting));
    assert_eq!(next(Status::RequiresReauth, CredentialsChanged), Some(Status::Connecting));
    assert_eq!(next(Status::PermanentlyFailed, Requested), Some(Status::Connecting));
    assert_eq!(next(Status::PermanentlyFailed, ConfigChanged), Some(Status::Restarting));
}

#[test]
fn a_start_in_progress_can_fail_in_every_way() {
    let ends =
        [Status::Offline, Status::Error, Status::RequiresReauth, Status::PermanentlyFailed, Status::AwaitingUserConfig];
    for from in [Status::Connecting, Status::DiscoveringTools, Status::SyncingTools, Status::Restarting] {
        for to in ends {
            assert_eq!(steps(from, to), Some(1), "{from} → {to}");
        }
    }
}

#[test]
fn a_stop_and_a_missing_value_are_accepted_in_every_status() {
    for &status in Status::ALL {
        assert_eq!(next(status, StatusCause::Stopped), Some(Status::Offline));
        assert_eq!(next(status, StatusCause::ConfigMissing), Some(Status::AwaitingUserConfig));
    }
}

#[test]
fn only_a_synced_or_restored_catalogue_leads_to_online() {
    for &status in Status::ALL {
        for (cause, to) in transitions(status) {
            let has_one = matches!(cause, StatusCause::Synced | StatusCause::Restored);
            assert!(to != Status::Online || has_one, "{status} by {cause:?}");
        }
    }
}

#[test]
fn every_status_can_reach_online_and_only_configuring_leads_to_provisioning() {
    for &status in Status::ALL {
        assert!(steps(status, Status::Online).is_some(), "{status} is a dead end");
        for (cause, to) in transitions(status) {
            assert!(to != Status::Provisioning || cause == StatusCause::Configured, "{status} by {cause:?}");
        }
    }
    for &cause in StatusCause::ALL {
        assert!(Status::ALL.iter().any(|status| next(*status, cause).is_some()), "{cause:?} is never accepted");
    }
}

#[test]
fn every_status_has_its_specified_wire_name() {
    let names: BTreeSet<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
    assert_eq!(names.len(), Status::ALL.len());
    for &status in Status::ALL {
        let json = serde_json::to_value(status).unwrap();
        assert_eq!(json, status.as_str());
        assert_eq!(serde_json::from_value::<Status>(json).unwrap(), status);
    }
    let transitional = Status::ALL.iter().copied().filter(|status| status.is_transitional()).map(Status::as_str);
    let transitional: Vec<&str> = transitional.collect();
    let expected =
        ["provisioning", "command_received", "connecting", "discovering_tools", "syncing_tools", "restarting"];
    assert_eq!(transitional, expected);
}
