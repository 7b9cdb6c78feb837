//! Probes of the machine: containment of processes, sandboxes, descriptors.

use nix::sys::resource::{Resource, getrlimit};

use super::finding::DoctorFinding;
use crate::cli::check::ContainmentTrial;
use crate::config::Plan;
use crate::connect::isolation::{SandboxFinding, describe_user_namespaces};
use crate::connect::process::CgroupMode;

/// Limit of open files that is enough for some hundred servers and clients.
const DESCRIPTORS_LOW: u64 = 4096;
/// Limit of open files below which few servers start.
const DESCRIPTORS_EMPTY: u64 = 256;

/// Tries cgroups and sandboxes.
pub(super) async fn containment(cgroups: CgroupMode, plan: Option<&Plan>) -> Vec<DoctorFinding> {
    let trial = match ContainmentTrial::run(cgroups).await {
        Ok(trial) => trial,
        Err(failure) => {
            let finding = DoctorFinding::error("machine", "process containment", failure.message);
            return vec![finding.next("set cgroups = \"auto\" under [satellite], or give the satellite a cgroup")];
        }
    };
    let held = format!("process trees are held by {}; {}", trial.held_by, describe_user_namespaces());
    let mut findings = vec![DoctorFinding::ok("machine", "process containment", held)];
    for SandboxFinding { sandbox, usable } in &trial.sandboxes {
        findings.push(match usable {
            Ok(path) => DoctorFinding::ok("machine", *sandbox, format!("works ({})", path.display())),
            Err(why) => DoctorFinding::ok("machine", *sandbox, format!("cannot be used: {why}")),
        });
    }
    if plan.is_some_and(|plan| trial.refuses(plan)) {
        let message = "no server will be started: the configured sandbox does not work here";
        let finding = DoctorFinding::error("machine", "sandbox", message);
        findings.push(finding.next("install nsjail or bubblewrap, or set isolation = \"none\" under [satellite]"));
    }
    if plan.is_some_and(|plan| plan.uid_range.is_some()) && !nix::unistd::geteuid().is_root() {
        let finding = DoctorFinding::error("machine", "user ids", "`uid_range` needs a satellite that runs as root");
        findings.push(finding.next("run it as root, or remove `uid_range`"));
    }
    findings
}

/// Checks the limit of open files. The satellite raises its own limit to the hard limit.
pub(super) fn descriptors() -> DoctorFinding {
    let limit = match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((_, hard)) => hard,
        Err(error) => {
            let finding = DoctorFinding::warning("machine", "open files", format!("cannot read the limit: {error}"));
            return finding.next("compare `ulimit -Hn`");
        }
    };
    let message = format!("at most {limit}; a server needs 4 to 6");
    let next = "raise `ulimit -Hn`, or LimitNOFILE= of the unit";
    match limit {
        ..DESCRIPTORS_EMPTY => DoctorFinding::error("machine", "open files", message).next(next),
        DESCRIPTORS_EMPTY..DESCRIPTORS_LOW => DoctorFinding::warning("machine", "open files", message).next(next),
        _ => DoctorFinding::ok("machine", "open files", message),
    }
}
