//! Probe of each server: what would prevent it from starting.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt;
use mcp_satellite_actors::model::policy::RemotePolicy;
use mcp_satellite_actors::model::spec::{InstanceConfig, InstanceSpec, ServerTarget, ValuePart};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_http::client::{is_tls, root_cause};
use nix::unistd::{AccessFlags, access};
use reqwest::Url;
use tokio::time::timeout;

use super::finding::{DoctorFinding, FindingState};
use crate::cli::args::shell_word;
use crate::cli::check::missing_program;
use crate::config::Plan;
use crate::connect::remote::HttpClients;
use crate::console::api::{InstanceStatus, StatusReply};

/// Time for one remote server to answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(8);
const REQUESTS_MAX: usize = 16;
/// Number of servers up to which those without a problem have a line each.
const LISTED_MAX: usize = 20;
/// Names that are suggested for a missing executable.
const NEAREST_MAX: usize = 3;
const SECRET_ARGS: &str = "a secret in `args` is visible to every process on this machine";

/// Reports each server of the plan and of the running satellite.
pub(super) async fn probe(plan: Option<&Plan>, status: Option<&StatusReply>) -> Vec<DoctorFinding> {
    let rows = status.map(|status| &status.instances[..]).unwrap_or_default();
    let rows: BTreeMap<&str, &InstanceStatus> = rows.iter().map(|row| (row.instance.as_str(), row)).collect();
    let configs = plan.map(|plan| &plan.instances[..]).unwrap_or_default();
    let unreachable = unreachable_origins(configs).await;
    let mut findings = Vec::new();
    let mut described = BTreeSet::new();
    for config in configs {
        let spec = config.clone().merge();
        described.insert(spec.name.to_string());
        let row = rows.get(&*spec.name).copied();
        let problem = plan.and_then(|plan| configured_problem(plan, config, &spec, &unreachable, row.is_some()));
        let finding = match (problem, row) {
            (Some(problem), _) => problem,
            (None, Some(row)) => describe_row(row),
            (None, None) => DoctorFinding::ok("server", &*spec.name, "nothing prevents its start"),
        };
        if !has_secret_args(config) {
            findings.push(finding);
            continue;
        }
        let mut message = SECRET_ARGS.to_owned();
        if finding.state == FindingState::Ok {
            message = format!("{}, but {message}", finding.message);
        } else {
            findings.push(finding);
        }
        let next = "if the server reads the secret from a variable, set it in `env` and remove `secret_args`";
        findings.push(DoctorFinding::warning("server", &*spec.name, message).next(next));
    }
    findings.extend(rows.values().filter(|row| !described.contains(&row.instance)).map(|row| describe_row(row)));
    if findings.len() > LISTED_MAX {
        let is_problem = |finding: &DoctorFinding| finding.next_step.is_some();
        let count = findings.len();
        findings.retain(is_problem);
        let fine = count - findings.len();
        findings.insert(0, DoctorFinding::ok("server", "server", format!("{fine} of {count} servers have no problem")));
    }
    findings
}

/// Returns true if an argument contains a secret.
fn has_secret_args(config: &InstanceConfig) -> bool {
    let is_secret = |part: &ValuePart| match part {
        ValuePart::Literal(_) => false,
        ValuePart::Hidden(_) | ValuePart::Unavailable(_) => true,
        ValuePart::UserValue(key) => config.inputs.declared.get(key).is_none_or(|value| !value.is_public),
    };
    let mut args = [&config.server_tier, &config.team_tier, &config.user_tier].into_iter().flat_map(|tier| &tier.args);
    args.any(|arg| arg.secret || arg.template.iter().flat_map(|template| &template.parts).any(is_secret))
}

/// Returns the problem of a server that its configuration and this machine show. A running satellite has the values of
/// `satellite configure`, and its status tells about them.
fn configured_problem(
    plan: &Plan,
    config: &InstanceConfig,
    spec: &InstanceSpec,
    unreachable: &HashMap<String, OriginProblem>,
    is_running: bool,
) -> Option<DoctorFinding> {
    let error = |message: &str| DoctorFinding::error("server", &*spec.name, spec.mask.apply(message));
    match &spec.target {
        ServerTarget::Stdio { command, .. } => {
            if let Some(problem) = missing_program(plan, config) {
                let nearest = nearest_programs(command, spec);
                let next = match nearest.as_slice() {
                    [] => format!("install `{command}`, or correct `command` and `cwd`"),
                    names => format!(
                        "install `{command}`, or correct `command`; the nearest names in PATH are {}",
                        names.join(", ")
                    ),
                };
                return Some(error(&problem).next(spec.mask.apply(&next)));
            }
        }
        ServerTarget::Remote { url, .. } => {
            if let Some(OriginProblem { message, next_step }) =
                origin(url).and_then(|url| unreachable.get(url.as_str()))
            {
                return Some(error(message).next(*next_step));
            }
        }
    }
    if is_running || spec.missing.is_empty() {
        return None;
    }
    let keys: Vec<&str> = spec.missing.iter().map(String::as_str).collect();
    let message =
        format!("it needs {} from its user, unless `satellite configure` has set this before", keys.join(", "));
    let keys: Vec<String> = keys.into_iter().map(shell_word).collect();
    let next = format!("start the satellite, then run `satellite configure {} {}`", spec.name, keys.join(" "));
    Some(DoctorFinding::warning("server", &*spec.name, message).next(next))
}

fn describe_row(row: &InstanceStatus) -> DoctorFinding {
    let message = match &row.status_message {
        Some(why) => format!("{}: {why}", row.status),
        None => row.status.to_string(),
    };
    let next = row.next_step.clone().unwrap_or_else(|| format!("read `satellite logs {}`", row.instance));
    match row.status {
        Status::Online => DoctorFinding::ok("server", &row.instance, message),
        Status::PermanentlyFailed | Status::RequiresReauth | Status::Error => {
            DoctorFinding::error("server", &row.instance, message).next(next)
        }
        Status::AwaitingUserConfig
        | Status::Offline
        | Status::Provisioning
        | Status::CommandReceived
        | Status::Connecting
        | Status::DiscoveringTools
        | Status::SyncingTools
        | Status::Restarting => DoctorFinding::warning("server", &row.instance, message).next(next),
    }
}

/// Returns the executables in the server's `PATH` whose names are most similar.
fn nearest_programs(command: &str, spec: &InstanceSpec) -> Vec<String> {
    if command.contains('/') {
        return Vec::new();
    }
    let path = spec.env.get("PATH").map(|path| OsString::from(path.expose())).or_else(|| std::env::var_os("PATH"));
    let path = path.unwrap_or_default();
    let distance_max = 2.max(command.chars().count() / 3);
    let mut nearest = BTreeSet::new();
    for entry in std::env::split_paths(&path).filter_map(|directory| directory.read_dir().ok()).flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let distance = strsim::damerau_levenshtein(command, &name);
        if distance <= distance_max && is_executable(&entry.path()) {
            nearest.insert((distance, name));
        }
    }
    nearest.into_iter().take(NEAREST_MAX).map(|(_, name)| format!("`{name}`")).collect()
}

fn is_executable(path: &PathBuf) -> bool {
    path.is_file() && access(path, AccessFlags::X_OK).is_ok()
}

/// Reason why no request reaches an origin.
struct OriginProblem {
    message: String,
    next_step: &'static str,
}

/// Sends a request without credentials to the origin of each remote server. Any response shows that it is reachable.
async fn unreachable_origins(configs: &[InstanceConfig]) -> HashMap<String, OriginProblem> {
    let urls = configs.iter().filter_map(|config| match &config.target {
        ServerTarget::Remote { url, .. } => origin(url),
        ServerTarget::Stdio { .. } => None,
    });
    let origins: BTreeSet<Url> = urls.collect();
    if origins.is_empty() {
        return HashMap::new();
    }
    let clients = match HttpClients::new() {
        Ok(clients) => clients,
        Err(error) => {
            let problem =
                |url: Url| (url.into(), OriginProblem::new(&format!("cannot send HTTP requests: {error}"), REACH));
            return origins.into_iter().map(problem).collect();
        }
    };
    let requests = origins.into_iter().map(|url| {
        let clients = &clients;
        async move { Some((url.to_string(), request_problem(clients, &url).await?)) }
    });
    futures::stream::iter(requests).buffer_unordered(REQUESTS_MAX).filter_map(std::future::ready).collect().await
}

const REACH: &str = "check `url`, the network, the firewall and the proxy";

impl OriginProblem {
    fn new(message: &str, next_step: &'static str) -> Self {
        Self { message: message.to_owned(), next_step }
    }
}

async fn request_problem(clients: &HttpClients, url: &Url) -> Option<OriginProblem> {
    let host = url.host_str().unwrap_or_default();
    if url.scheme() == "https" && !clients.has_roots() {
        let next = "install the package ca-certificates, or set SSL_CERT_FILE";
        return Some(OriginProblem::new("this machine has no CA certificates, so no TLS server can be verified", next));
    }
    let failed = |error: &reqwest::Error| {
        let cause = root_cause(error).unwrap_or_else(|| "the HTTP exchange failed".to_owned());
        if error.is_dns() {
            let next = "correct the host name in `url`, or the name resolution of this machine";
            OriginProblem::new(&format!("the name `{host}` cannot be resolved"), next)
        } else if is_tls(error) {
            let next = "use the host name of the certificate, or set SSL_CERT_FILE to a file with its CA";
            OriginProblem::new(&format!("the TLS connection to `{host}` failed: {cause}"), next)
        } else {
            OriginProblem::new(&format!("cannot connect to `{host}`: {cause}"), REACH)
        }
    };
    let client = match clients.client_for_url(url, &RemotePolicy::default()) {
        Ok(client) => client,
        Err(error) => return Some(failed(&error)),
    };
    match timeout(REQUEST_TIMEOUT, client.head(url.clone()).send()).await {
        Ok(Ok(_)) => None,
        // A server that accepts the connection and rejects HEAD in an unusual way is reachable.
        Ok(Err(error)) => (error.is_connect() || error.is_dns()).then(|| failed(&error)),
        Err(_) => {
            let message = format!("no answer from `{host}` within {} s", REQUEST_TIMEOUT.as_secs());
            Some(OriginProblem::new(&message, REACH))
        }
    }
}

/// Returns the origin of a URL as a URL. Path, query and user may contain secrets.
fn origin(url: &str) -> Option<Url> {
    let url = Url::parse(url).ok()?;
    Url::parse(&url.origin().ascii_serialization()).ok()
}
