//! `satellite check`

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anstream::{AutoStream, ColorChoice};
use clap::Args;
use mcp_satellite_actors::model::spec::{InstanceConfig, InstanceSpec, ServerTarget};

use super::{BAD_INPUT, CommandFailure, DONE, FAILED, print_error, print_text};
use crate::config::Profile;
use crate::config::{self, ConfigErrors, EndpointAuth, GatewayPlan, ListenSetting, Plan};
use crate::connect::isolation::{Isolation, SandboxFinding, find_program};
use crate::connect::process::CgroupMode;
use crate::connect::stdio::{StdioConnector, StdioOptions};
use crate::data_dir::DataDir;
use crate::watch::ConfigTexts;
use mcp_satellite_files::user_dirs;

/// Configuration files.
#[derive(Debug, Clone, Args)]
pub(super) struct ConfigSources {
    /// The satellite's own configuration (TOML) [default without --mcp-json:
    /// $XDG_CONFIG_HOME/mcp-satellite/satellite.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Servers as Claude, Cursor and VS Code configure them: {"mcpServers": {…}}
    #[arg(long, value_name = "FILE")]
    mcp_json: Option<PathBuf>,
}

pub(super) enum PlanError {
    NoSource,
    Config(ConfigErrors),
}

impl PlanError {
    pub(super) fn to_single_line(&self) -> String {
        match self {
            Self::NoSource => NO_SOURCE.to_owned(),
            Self::Config(errors) => errors.to_single_line(),
        }
    }
}

impl From<PlanError> for CommandFailure {
    fn from(refused: PlanError) -> Self {
        match refused {
            PlanError::NoSource => Self::new(BAD_INPUT, NO_SOURCE),
            PlanError::Config(errors) => Self::from_styled(BAD_INPUT, render_errors(&errors)),
        }
    }
}

const NO_SOURCE: &str = "no configuration is named, and there is none at $XDG_CONFIG_HOME/mcp-satellite/satellite.toml: give \
                         --config FILE, --mcp-json FILE or both (`satellite demo` needs neither)";
const CONFIG_FILE: &str = "satellite.toml";

impl ConfigSources {
    /// Loads all files into one plan, or returns all errors of all files. `listen` overrides the address of the MCP
    /// endpoint.
    pub(super) fn load(&self, listen: Option<SocketAddr>) -> Result<Plan, PlanError> {
        self.plan(&self.read(), listen)
    }

    /// Returns the user's configuration file if no file is named and it exists.
    pub(super) fn or_user_default(self) -> Self {
        let file = user_dirs::config_dir().map(|dir| dir.join(CONFIG_FILE)).filter(|file| file.exists());
        if self.has_any() { self } else { Self { config: file, mcp_json: None } }
    }

    pub(super) fn has_any(&self) -> bool {
        self.config.is_some() || self.mcp_json.is_some()
    }

    pub(super) fn read(&self) -> ConfigTexts {
        ConfigTexts {
            config: self.config.as_deref().map(config::read_content),
            mcp_json: self.mcp_json.as_deref().map(config::read_content),
        }
    }

    /// Makes a plan as [`Self::load`] does, from texts that were read before.
    pub(super) fn plan(&self, texts: &ConfigTexts, listen: Option<SocketAddr>) -> Result<Plan, PlanError> {
        let toml = self.config.as_deref().zip(texts.config.as_ref());
        let toml = toml.map(|(file, held)| config::load_from_content(file, held));
        // The base settings of the satellite's own file also apply to the servers of `mcp.json`.
        let base = toml.as_ref().and_then(|plan| plan.as_ref().ok()).map(|plan| plan.base.clone()).unwrap_or_default();
        let json = self.mcp_json.as_deref().zip(texts.mcp_json.as_ref());
        let json = json.map(|(file, held)| config::load_mcp_json_from_content(file, held, &base));
        let plan = match (toml, json) {
            (None, None) => return Err(PlanError::NoSource),
            (Some(plan), None) | (None, Some(plan)) => plan,
            (Some(Ok(one)), Some(Ok(other))) => one.merge(other),
            (Some(Err(one)), Some(Err(other))) => Err(one.merge(other)),
            (Some(Err(errors)), Some(Ok(_))) | (Some(Ok(_)), Some(Err(errors))) => Err(errors),
        };
        let plan = plan.and_then(|plan| match listen {
            Some(address) => plan.with_listen_address(address),
            None => Ok(plan),
        });
        plan.and_then(Plan::finalize).map_err(PlanError::Config)
    }
}

pub(super) fn render_errors(errors: &ConfigErrors) -> String {
    errors.render(AutoStream::choice(&std::io::stderr()) != ColorChoice::Never)
}

#[derive(Debug, Args)]
pub(super) struct CheckCommand {
    #[command(flatten)]
    sources: ConfigSources,
    /// Exit with code 1 if there is a warning
    #[arg(long)]
    strict: bool,
}

impl CheckCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let plan = self.sources.clone().or_user_default().load(None)?;
        let missing = missing_program_warnings(&plan);
        let (problems, awaited) = incomplete_servers(&plan);
        let warnings = plan.warnings.iter().chain(&problems).chain(&missing);
        for warning in warnings.clone() {
            print_error(&format!("warning: {warning}"));
        }
        let is_good_enough = !self.strict || warnings.count() == 0;
        let count = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let remote =
            plan.instances.iter().filter(|instance| matches!(instance.target, ServerTarget::Remote { .. })).count();
        let remotes = if remote > 0 { format!(", {remote} of them remote") } else { String::new() };
        print_text(&format!(
            "the configuration is good: {}, {}, {} to run{remotes}",
            count(plan.teams, "team"),
            count(plan.users, "user"),
            count(plan.instances.len(), "server")
        ));
        for line in &awaited {
            print_text(line);
        }
        print_text(&describe_endpoint(&plan.gateway));
        Ok(if report_machine(&plan).await? && is_good_enough { DONE } else { FAILED })
    }
}

fn describe_endpoint(plan: &GatewayPlan) -> String {
    let Some(address) = plan.address() else {
        let why =
            if plan.listen == ListenSetting::Off { "switched off" } else { "not configured; add [gateway] for one" };
        return format!("the MCP endpoint is {why}");
    };
    let who = match (&plan.auth, plan.single_user()) {
        (EndpointAuth::None(_), Ok(user)) => {
            format!("every process on this machine acts as {}/{}", user.team_slug, user.slug)
        }
        (EndpointAuth::None(_), Err(why)) => why,
        (EndpointAuth::Bearer, _) => {
            let count = plan.users_with_token().count();
            let kept = plan.users.iter().find(|user| user.has_stored_token).map(|user| {
                format!("; `satellite run` keeps the token of {}/{} in its data directory", user.team_slug, user.slug)
            });
            format!("{count} of {} users have a token{}", plan.users.len(), kept.unwrap_or_default())
        }
    };
    format!("the MCP endpoint is {}: {who}", plan.url(address))
}

/// Returns a warning for each server that cannot start, and a line for each one that waits for values of its user. Values
/// that were given with `satellite configure` are not known here.
fn incomplete_servers(plan: &Plan) -> (Vec<String>, Vec<String>) {
    let (mut problems, mut awaited) = (Vec::new(), Vec::new());
    for config in &plan.instances {
        let InstanceSpec { name, missing, problems: reasons, mask, .. } = config.clone().merge();
        problems.extend(reasons.iter().map(|reason| mask.apply(&format!("`{name}` cannot start: {reason}"))));
        if !missing.is_empty() {
            let keys = missing.join(" ");
            awaited.push(format!("`{name}` waits for values of its user: `satellite configure {name} {keys}`"));
        }
    }
    (problems, awaited)
}

/// Returns a warning for each command or directory that does not exist on this machine, with its installation.
fn missing_program_warnings(plan: &Plan) -> Vec<String> {
    let mut warnings: Vec<String> = Vec::new();
    for config in &plan.instances {
        let Some(problem) = missing_program(plan, config) else { continue };
        let (installation, team) = (&config.installation, &config.team_slug);
        let mask = config.clone().merge().mask;
        let warning = mask.apply(&format!("installation `{installation}` of team `{team}`: {problem}"));
        // Users of an installation share its command; warn once.
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }
    warnings
}

/// Returns the reason why the program of an instance cannot be started on this machine, unmasked.
pub(super) fn missing_program(plan: &Plan, config: &InstanceConfig) -> Option<String> {
    let is_production = plan.profile == Profile::Production;
    let in_sandbox = match plan.isolation {
        Isolation::None => false,
        Isolation::Auto => is_production,
        Isolation::Nsjail | Isolation::Bubblewrap => true,
    };
    let spec = config.clone().merge();
    let ServerTarget::Stdio { command, cwd } = &spec.target else { return None };
    if !spec.is_complete() && !config.inputs.target.is_empty() {
        return None; // The command or the directory is not known yet.
    }
    // A sandbox has its own directories.
    let directory = cwd.as_deref().filter(|_| !in_sandbox);
    match directory.filter(|directory| !Path::new(directory).is_dir()) {
        Some(directory) => Some(format!("directory `{directory}` does not exist; check `cwd`")),
        None => find_program(command, directory, spec.env.get("PATH"), is_production, in_sandbox)
            .err()
            .map(|why| format!("cannot find executable `{command}`: {why}; check `command`")),
    }
}

/// Means of this machine to contain servers, found out by trials.
pub(super) struct ContainmentTrial {
    pub(super) held_by: String,
    pub(super) sandboxes: Vec<SandboxFinding>,
}

impl ContainmentTrial {
    pub(super) async fn run(cgroups: CgroupMode) -> Result<Self, CommandFailure> {
        let home = tempfile::tempdir()?;
        let data_dir = Some(DataDir::create(&home.path().join("data"))?);
        let connector = StdioConnector::with_options(StdioOptions { data_dir, cgroups, ..StdioOptions::default() })?;
        let trial = Self { held_by: connector.describe_containment(), sandboxes: connector.sandboxes().await };
        // Remove what the trials left, even empty cgroups.
        let _ = tokio::task::spawn_blocking(move || connector.kill_all(std::time::Duration::from_secs(1))).await;
        Ok(trial)
    }

    /// Returns true if the plan requires a sandbox that does not work.
    pub(super) fn refuses(&self, plan: &Plan) -> bool {
        let works = |name: &str| self.sandboxes.iter().any(|one| one.sandbox == name && one.usable.is_ok());
        match (plan.isolation, plan.profile) {
            (Isolation::None, _) | (Isolation::Auto, Profile::Development) => false,
            (Isolation::Nsjail, _) => !works("nsjail"),
            (Isolation::Bubblewrap, _) => !works("bubblewrap"),
            (Isolation::Auto, Profile::Production) => self.sandboxes.iter().all(|one| one.usable.is_err()),
        }
    }
}

/// Prints the means of this machine to contain servers. Returns true if servers can start.
async fn report_machine(plan: &Plan) -> Result<bool, CommandFailure> {
    let trial = ContainmentTrial::run(plan.cgroups).await?;
    print_text(&format!("this machine: process trees are held by {}", trial.held_by));
    print_text(&format!("  {}", crate::connect::isolation::describe_user_namespaces()));
    for SandboxFinding { sandbox, usable } in &trial.sandboxes {
        match usable {
            Ok(path) => print_text(&format!("  {sandbox}: works ({})", path.display())),
            Err(why) => print_text(&format!("  {sandbox}: cannot be used: {why}")),
        }
    }
    let refused = trial.refuses(plan);
    let lacks_root = plan.uid_range.is_some() && !nix::unistd::geteuid().is_root();
    if lacks_root {
        print_error("warning: the satellite will not start: `uid_range` needs root");
    }
    if refused {
        print_error("warning: no server will be started on this machine: the configured sandbox does not work here");
    }
    Ok(!refused && !lacks_root)
}
