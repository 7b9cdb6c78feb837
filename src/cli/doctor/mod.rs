//! `satellite doctor`: probes of the satellite, its configuration, the machine, the clients and each server.

mod clients;
mod endpoint;
mod finding;
mod machine;
mod ports;
mod satellite;
mod servers;
mod tools;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::timeout;

use self::finding::{DoctorFinding, FindingState, probe, probe_blocking, render};
use super::args::DataDirArg;
use super::check::{ConfigSources, PlanError};
use super::connect::machine::user_machine;
use super::exit::{CommandFailure, DONE, FAILED};
use super::print::{print_styled, print_text, to_json};
use crate::config::Plan;
use crate::console::api::{ConsoleFilter, StatusReply};
use crate::console::client::{ClientError, ConsoleClient};
use mcp_satellite_files::user_dirs;

/// Time limit of a probe that asks the satellite or the machine only.
const LOCAL: Duration = Duration::from_secs(5);
/// Time limit of the trials of sandboxes, of which each has a limit of its own.
const TRIALS: Duration = Duration::from_secs(25);
/// Time limit of all requests to remote servers.
const NETWORK: Duration = Duration::from_secs(20);

/// Find out what is wrong, and the next step.
///
/// Each line is ok, a warning or an error. The exit code is 1 if there is an error. The command works with and without a
/// running satellite, changes nothing, and prints no secret. It examines the servers of the configuration before they
/// are started: that of --config and --mcp-json, else that of the user.
#[derive(Debug, Args)]
pub(super) struct DoctorCommand {
    #[command(flatten)]
    sources: ConfigSources,
    #[command(flatten)]
    data_dir: DataDirArg,
    /// Print {"errors", "warnings", "findings": [{section, subject, state, message, next_step}]}
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DoctorReport {
    errors: usize,
    warnings: usize,
    findings: Vec<DoctorFinding>,
}

/// Facts that several probes use.
struct DoctorSubject {
    /// Data directory of the running satellite, or the one that a start would use.
    data_dir: PathBuf,
    /// Status of the running satellite; `None` if none is running.
    status: Option<StatusReply>,
    plan: Option<Plan>,
}

impl DoctorCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let (subject, mut findings) = self.examine_subject().await;
        let plan = subject.plan.as_ref();
        let status = subject.status.as_ref();
        let url = status.and_then(|status| Some(status.satellite.endpoint.as_ref()?.url.clone()));
        let probed_ports = ports::probed_ports(plan, url.as_deref());
        let satellite_pid = status.map(|status| status.satellite.pid);
        let is_address_fixed = plan.is_some_and(ports::has_fixed_address);
        let data_dir = subject.data_dir.clone();
        let needs_cgroups = plan.map(|plan| plan.cgroups).unwrap_or_default();
        let all = futures::join!(
            probe_blocking("satellite", LOCAL, move || satellite::data_directory(&data_dir)),
            probe_blocking("machine", LOCAL, move || ports::probe(&probed_ports, satellite_pid, is_address_fixed)),
            probe("machine", TRIALS, machine::containment(needs_cgroups, plan)),
            probe_blocking("machine", LOCAL, || vec![machine::descriptors()]),
            probe("tool", LOCAL * 2, tools::probe()),
            probe_blocking("client", LOCAL, move || match user_machine() {
                Ok(machine) => clients::probe(&machine, url.as_deref()),
                Err(failure) => vec![DoctorFinding::warning("client", "client", failure.message)],
            }),
            probe("server", NETWORK, servers::probe(plan, status)),
            probe("endpoint", NETWORK, endpoint::probe(&subject.data_dir, status)),
        );
        findings.extend([all.0, all.1, all.2, all.3, all.4, all.5, all.6, all.7].into_iter().flatten());
        let count = |state| findings.iter().filter(|finding| finding.state == state).count();
        let (errors, warnings) = (count(FindingState::Error), count(FindingState::Warning));
        if self.json {
            print_text(&to_json(&DoctorReport { errors, warnings, findings })?);
        } else {
            print_styled(&format!("{}\n\nerrors: {errors}, warnings: {warnings}", render(&findings)));
        }
        Ok(if errors > 0 { FAILED } else { DONE })
    }

    async fn examine_subject(&self) -> (DoctorSubject, Vec<DoctorFinding>) {
        let mut findings = Vec::new();
        let data_dir = match self.data_dir.resolve() {
            Ok(path) => path,
            Err(failure) => {
                let finding = DoctorFinding::error("satellite", "data directory", failure.message);
                findings
                    .push(finding.next("name the data directory with --data-dir, or repair it as the message says"));
                self.data_dir.location().path
            }
        };
        let request =
            async { ConsoleClient::new(&data_dir)?.get::<StatusReply>("/v1/status", &ConsoleFilter::default()).await };
        let status = timeout(LOCAL, request).await;
        findings.extend(satellite::versions(status.as_ref().ok()));
        let status = match status {
            Ok(Ok(status)) => Some(status),
            Ok(Err(ClientError::NotRunning { .. })) => None,
            Ok(Err(error)) => {
                let finding = DoctorFinding::error("satellite", "control socket", error.to_string());
                findings.push(finding.next("repair it as the message says, or restart the satellite"));
                None
            }
            Err(_) => {
                let message = format!("the running satellite has not answered for {} s", LOCAL.as_secs());
                let finding = DoctorFinding::error("satellite", "control socket", message);
                findings.push(finding.next("read its log, then end it with `satellite down` or kill it"));
                None
            }
        };
        // The user's configuration is that of a satellite on the default directory, and of one that is not started yet.
        let is_users = user_dirs::data_dir().is_some_and(|default| default == data_dir);
        let sources = self.sources.clone();
        let sources = if is_users || status.is_none() { sources.or_user_default() } else { sources };
        let plan = match sources.load(None) {
            Ok(plan) => {
                findings.extend(satellite::configuration(&plan));
                Some(plan)
            }
            Err(PlanError::NoSource) => {
                findings.push(satellite::no_configuration(status.as_ref()));
                None
            }
            Err(error @ PlanError::Config(_)) => {
                let finding = DoctorFinding::error("configuration", "configuration", error.to_single_line());
                findings.push(finding.next("run `satellite check` with the same files for the places"));
                None
            }
        };
        findings.extend(status.as_ref().and_then(satellite::rejected_configuration));
        (DoctorSubject { data_dir, status, plan }, findings)
    }
}
