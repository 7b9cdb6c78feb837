//! Sandboxes for servers. A `SandboxLauncher` translates a `SandboxSpec` into the command line of a sandbox tool. A
//! sandbox tool counts as usable after a successful trial run, not because its file exists.

mod bubblewrap;
mod nsjail;
mod sandbox_spec;
mod uids;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::IsolationPolicy;
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::settings::SANDBOX_USER;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite_actors::model::variables::VariableScope;
use mcp_satellite_actors::seam::ProcessLink;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access, getegid, geteuid};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

use self::bubblewrap::Bubblewrap;
use self::nsjail::Nsjail;
use self::sandbox_spec::{HOME, SandboxLauncher, SandboxMount, SandboxSpec, SandboxUser, SandboxedCommand};
use self::uids::{TeamUids, TeamUser};
use super::environment::{SANDBOX_PATH, environment, sandbox_environment};
use super::process::{
    CgroupControllers, CgroupLimits, Confinement, LaunchSpec, ProcessLauncher, ResourceLimits, ServerLabel,
    is_machine_fault,
};
use mcp_satellite_files::data_dir::DataDir;

// Subdirectory of the data directory with one home for each instance.
const HOMES: &str = "homes";
// Prefix of homes that were set aside. No home of an instance begins with a dot: `home_name` escapes it.
const SET_ASIDE: &str = ".erased-";
const TRIAL_STDERR_MAX: u64 = 1024;
const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);
// Time after which failed trials are repeated, if no sandbox works.
const TRIAL_RETRY_DELAY: Duration = Duration::from_secs(30);

pub use mcp_satellite_actors::model::settings::{Isolation, OperatingMode, UidRange};

/// Result of the trial run of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxFinding {
    pub sandbox: &'static str,
    /// Path of the tool, or the reason why it cannot be used.
    pub usable: Result<PathBuf, String>,
}

/// Names of all sandboxes.
pub(super) const SANDBOXES: [&str; 2] = ["nsjail", "bubblewrap"];

pub(super) struct LaunchFactory {
    isolation: Isolation,
    strictness: OperatingMode,
    data_dir: Option<DataDir>,
    findings: tokio::sync::Mutex<Option<Arc<SandboxFindings>>>,
    // User ids of teams, if each team has its own for servers without a sandbox.
    uids: Option<TeamUids>,
    // Paths of commands as first resolved, in production.
    resolved: Mutex<HashMap<String, PathBuf>>,
}

struct SandboxFindings {
    findings: Vec<SandboxFinding>,
    best: Option<Arc<dyn SandboxLauncher>>,
    is_machine_fault: bool,
    at: Instant,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct PrepareError {
    pub(super) reason: String,
    pub(super) is_machine_fault: bool,
}

impl From<String> for PrepareError {
    fn from(reason: String) -> Self {
        Self { reason, is_machine_fault: false }
    }
}

impl PrepareError {
    fn from_io_error(what: &str, error: &io::Error) -> Self {
        Self { reason: format!("{what}: {}", describe_error(error)), is_machine_fault: is_machine_fault(error) }
    }
}

pub(super) struct PreparedLaunch {
    pub(super) launch: LaunchSpec,
    pub(super) identity: String,
}

impl LaunchFactory {
    /// Fails if teams are to have their own user ids and cannot.
    pub(super) fn new(
        isolation: Isolation,
        strictness: OperatingMode,
        data_dir: Option<DataDir>,
        uid_range: Option<UidRange>,
    ) -> io::Result<Self> {
        let uids = match (uid_range, &data_dir) {
            (Some(range), Some(data_dir)) => Some(TeamUids::open(range, data_dir)?),
            (Some(_), None) => return Err(io::Error::other("uid_range needs a data directory: set `data_dir`")),
            (None, _) => None,
        };
        let (found, resolved) = (tokio::sync::Mutex::default(), Mutex::default());
        Ok(Self { isolation, strictness, data_dir, findings: found, uids, resolved })
    }

    /// Returns the settings of the satellite that apply to each process, for a comparison with those of another satellite.
    pub(super) fn describe_settings(&self) -> String {
        let own_users = if self.uids.is_some() { "users of teams" } else { "one user" };
        format!("{:?}, {:?}, {own_users}", self.isolation, self.strictness)
    }

    pub(super) async fn findings(&self, processes: &ProcessLauncher) -> Vec<SandboxFinding> {
        self.cached_findings(processes).await.findings.clone()
    }

    pub(super) async fn prepare(
        self: Arc<Self>,
        spec: Arc<InstanceSpec>,
        withheld: Vec<String>,
        processes: &ProcessLauncher,
    ) -> Result<PreparedLaunch, PrepareError> {
        let launcher = match (self.isolation, self.strictness) {
            (Isolation::None, _) | (Isolation::Auto, OperatingMode::Development) => None,
            (Isolation::Auto, OperatingMode::Production) | (Isolation::Nsjail | Isolation::Bubblewrap, _) => {
                let found = self.cached_findings(processes).await;
                let refusal = || PrepareError {
                    reason: self.no_sandbox_message(&found.findings),
                    is_machine_fault: found.is_machine_fault,
                };
                Some(found.best.clone().ok_or_else(refusal)?)
            }
        };
        let controllers = processes.controllers();
        // Resolving a path may block on a file system that does not respond; other teams must not wait for it.
        let preparing = tokio::task::spawn_blocking(move || match launcher {
            None => self.prepare_unsandboxed(&spec, &withheld),
            Some(launcher) => self.prepare_sandboxed(&spec, &*launcher, controllers),
        });
        preparing.await.map_err(|error| error.to_string())?
    }

    fn prepare_unsandboxed(&self, spec: &InstanceSpec, withheld: &[String]) -> Result<PreparedLaunch, PrepareError> {
        let (command, cwd) = stdio_target(spec)?;
        let user = self.uids.as_ref().map(|uids| uids.ensure_user(&spec.id.team)).transpose()?;
        let scope = self.variable_scope(spec, false);
        let environment = match &user {
            Some(TeamUser { home, .. }) => environment(environment_for_user(home), withheld, &spec.env, scope),
            None => environment(std::env::vars_os(), withheld, &spec.env, scope),
        };
        let environment = environment.map_err(|invalid| invalid.to_string())?;
        let id = user.as_ref().map(|user| user.id);
        let identity = id.map_or_else(|| format!("{}:{}", geteuid(), getegid()), |id| format!("{id}:{id}"));
        let directory = cwd.map(PathBuf::from).or_else(|| Some(user?.home));
        let command = match self.strictness {
            OperatingMode::Development => command.into(),
            // Not the PATH from the configuration: it would defeat the allow-list of commands.
            OperatingMode::Production => self.resolve_once(command)?.into_os_string(),
        };
        let launch = LaunchSpec {
            instance: spec.name.to_string(),
            command,
            args: expose_all(&spec.args),
            options_file: Vec::new(),
            environment,
            directory,
            user: id,
            confinement: None,
            cgroup_limits: CgroupLimits::default(),
        };
        Ok(PreparedLaunch { launch, identity })
    }

    fn prepare_sandboxed(
        &self,
        spec: &InstanceSpec,
        launcher: &dyn SandboxLauncher,
        controllers: CgroupControllers,
    ) -> Result<PreparedLaunch, PrepareError> {
        let (command, cwd) = stdio_target(spec)?;
        let policy = &spec.policy.isolation;
        let scope = self.variable_scope(spec, true);
        let environment = sandbox_environment(HOME, std::env::var_os("LANG"), &spec.env, scope);
        let environment = environment.map_err(|invalid| invalid.to_string())?;
        let search_path = environment.get(OsStr::new("PATH")).map(OsString::as_os_str);
        let program = match self.strictness {
            OperatingMode::Development => resolve(command, search_path)?,
            OperatingMode::Production => self.resolve_once(command)?,
        };
        let home = self.ensure_home(&home_name(&spec.id))?;
        let mut sandbox = SandboxSpec::new(policy, spec.id.team.as_str(), &home, sandbox_user());
        sandbox.mount_program(&program);
        if let Some(cwd) = cwd {
            if !sandbox.has_directory(Path::new(cwd)) {
                return Err(
                    format!("the working directory `{cwd}` is not visible in the sandbox: {ADD_BIND_HINT}").into()
                );
            }
            sandbox.directory = cwd.into();
        }
        for SandboxMount { source, .. } in &sandbox.mounts {
            match source.metadata() {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let source = source.display();
                    let reason =
                        format!("cannot bind `{source}` into the sandbox: it does not exist; {CHECK_BINDS_HINT}");
                    return Err(reason.into());
                }
                Err(error) => {
                    let what = format!("cannot bind `{}` into the sandbox", source.display());
                    return Err(PrepareError::from_io_error(&what, &error));
                }
            }
        }
        if let Some(objection) = launcher.unsupported_reason(&sandbox) {
            return Err(objection.into());
        }
        let server = SandboxedCommand { program: &program, args: expose_all(&spec.args), environment: &environment };
        let wrapped = launcher.wrap(&sandbox, server);
        let (limits, cgroup_limits) = limits(policy, launcher.depth(), sandbox.identity, controllers);
        let launch = LaunchSpec {
            instance: spec.name.to_string(),
            command: wrapped.command.into(),
            args: wrapped.args,
            options_file: wrapped.options_file,
            environment: BTreeMap::new(),
            directory: None,
            user: None,
            confinement: Some(confinement(launcher, sandbox.identity, limits)),
            cgroup_limits,
        };
        Ok(PreparedLaunch { launch, identity: format_user(sandbox.identity) })
    }

    fn variable_scope<'a>(&self, spec: &'a InstanceSpec, in_sandbox: bool) -> VariableScope<'a> {
        let is_production = self.strictness == OperatingMode::Production;
        VariableScope { is_production, in_sandbox, allow_env: &spec.policy.isolation.allow_env }
    }

    /// Resolves a command to an absolute path once and keeps the result, so that a file put into a directory of `PATH`
    /// later is not started under an allowed name.
    fn resolve_once(&self, command: &str) -> Result<PathBuf, String> {
        self.resolve_once_by(command, &production_search_path())
    }

    fn resolve_once_by(&self, command: &str, path: &OsStr) -> Result<PathBuf, String> {
        let known = || self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(resolved) = known().get(command) {
            return Ok(resolved.clone());
        }
        let resolved = resolve(command, Some(path))?;
        // With concurrent calls the first result is kept.
        Ok(known().entry(command.to_owned()).or_insert(resolved).clone())
    }

    pub(super) fn homes(&self) -> Vec<InstanceId> {
        let names = self.home_names().map(|(_, names)| names).unwrap_or_default();
        names.iter().filter_map(|name| parse_home_name(name)).collect()
    }

    pub(super) fn set_aside_home(&self, id: &InstanceId) -> io::Result<()> {
        let Some(data_dir) = &self.data_dir else { return Ok(()) };
        let homes = match data_dir.open_subdirectory(HOMES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            homes => homes?,
        };
        let mut number = 0_u64;
        while homes.stat(format!("{SET_ASIDE}{number}")).is_some() {
            number += 1;
        }
        match homes.rename(&home_name(id), &format!("{SET_ASIDE}{number}")) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub(super) fn erase_set_aside_homes(&self) {
        let Some((homes, names)) = self.home_names() else { return };
        for name in names.iter().filter(|name| name.starts_with(SET_ASIDE)) {
            if let Err(error) = homes.remove_tree(name) {
                tracing::warn!(%error, "cannot erase the home of a removed instance; the next start tries again");
            }
        }
    }

    fn home_names(&self) -> Option<(DataDir, Vec<String>)> {
        let homes = self.data_dir.as_ref()?.open_subdirectory(HOMES).ok()?;
        let names = homes.names().ok()?;
        Some((homes, names))
    }

    fn ensure_home(&self, instance: &str) -> Result<PathBuf, PrepareError> {
        let data_dir = self.data_dir.as_ref();
        let none = || "a sandboxed server needs a home: set `data_dir` of the connector".to_owned();
        let data_dir = data_dir.ok_or_else(none)?;
        let home = data_dir.path().join(HOMES).join(instance);
        let failed = |error: io::Error| {
            PrepareError::from_io_error(&format!("cannot create its home `{}`", home.display()), &error)
        };
        let homes = data_dir.create_or_open_subdirectory(HOMES).map_err(failed)?;
        let descriptor = homes.foreign_directory(instance).map_err(failed)?;
        let about = fs::File::from(descriptor.try_clone().map_err(failed)?).metadata().map_err(failed)?;
        // After a restart the home exists with the right owner: another `fchown` would block on a disk that hangs.
        if sandbox_user() != SandboxUser::Outside || (about.uid(), about.gid()) == (SANDBOX_USER, SANDBOX_USER) {
            return Ok(home);
        }
        fchown(&descriptor, Some(SANDBOX_USER), Some(SANDBOX_USER)).map_err(failed)?;
        Ok(home)
    }

    fn no_sandbox_message(&self, findings: &[SandboxFinding]) -> String {
        let reasons = findings.iter().filter_map(|finding| {
            let why = finding.usable.as_ref().err()?;
            Some(format!("{}: {why}", finding.sandbox))
        });
        let reasons: Vec<String> = reasons.collect();
        let what = match self.isolation {
            Isolation::Nsjail => "nsjail is configured and does not work here",
            Isolation::Bubblewrap => "bubblewrap is configured and does not work here",
            Isolation::Auto | Isolation::None => "production needs a sandbox and none works here",
        };
        format!(
            "{what} ({}); `satellite check` shows details; isolation = \"none\" under [satellite] starts servers \
             without a sandbox",
            reasons.join("; ")
        )
    }

    async fn cached_findings(&self, processes: &ProcessLauncher) -> Arc<SandboxFindings> {
        let mut known = self.findings.lock().await;
        // A trial may have failed for lack of descriptors, or the tool may be installed only now.
        if let Some(found) =
            known.as_ref().filter(|found| found.best.is_some() || found.at.elapsed() < TRIAL_RETRY_DELAY)
        {
            return Arc::clone(found);
        }
        let candidates = match self.isolation {
            Isolation::Nsjail => vec![nsjail()],
            Isolation::Bubblewrap => vec![bubblewrap()],
            Isolation::Auto | Isolation::None => vec![nsjail(), bubblewrap()],
        };
        let mut found =
            SandboxFindings { findings: Vec::new(), best: None, is_machine_fault: false, at: Instant::now() };
        for (sandbox, candidate) in candidates {
            let usable = match candidate {
                Ok((path, launcher)) => match self.try_sandbox(&*launcher, processes).await {
                    Ok(()) => {
                        found.best.get_or_insert(launcher);
                        Ok(path)
                    }
                    Err(PrepareError { reason, is_machine_fault }) => {
                        found.is_machine_fault |= is_machine_fault;
                        Err(reason)
                    }
                },
                Err(why) => Err(why),
            };
            match &usable {
                Ok(path) => tracing::info!(sandbox, path = %path.display(), "sandbox works"),
                Err(why) => tracing::info!(sandbox, why, "sandbox cannot be used"),
            }
            found.findings.push(SandboxFinding { sandbox, usable });
        }
        found.at = Instant::now();
        Arc::clone(known.insert(Arc::new(found)))
    }

    async fn try_sandbox(
        &self,
        launcher: &dyn SandboxLauncher,
        processes: &ProcessLauncher,
    ) -> Result<(), PrepareError> {
        let policy = IsolationPolicy::standard();
        let home = self.ensure_home(".trial")?;
        let sandbox = SandboxSpec::new(&policy, "trial", &home, sandbox_user());
        // A variable arrives too, by way of the file of options.
        let args = vec!["-c".into(), "echo \"$TRIAL\"; read -r _; exit 7".into()];
        let environment = BTreeMap::from([("TRIAL".into(), "works".into())]);
        let server = SandboxedCommand { program: Path::new("/bin/sh"), args, environment: &environment };
        let wrapped = launcher.wrap(&sandbox, server);
        let (limits, cgroup_limits) = limits(&policy, launcher.depth(), sandbox.identity, processes.controllers());
        let launch = LaunchSpec {
            instance: format!("trial of {}", launcher.name()),
            command: wrapped.command.into(),
            args: wrapped.args,
            options_file: wrapped.options_file,
            environment: BTreeMap::new(),
            directory: None,
            user: None,
            confinement: Some(confinement(launcher, sandbox.identity, limits)),
            cgroup_limits,
        };
        let label = ServerLabel { name: launch.instance.clone(), identity: String::new(), config: None };
        let trial = async {
            let started = processes.launch(launch, label).await;
            let link = started.map_err(|error| PrepareError {
                reason: error.to_string(),
                is_machine_fault: error.is_machine_fault(),
            })?;
            let ProcessLink { reader, writer, stderr, mut process, guard } = link;
            let mut output = String::new();
            BufReader::new(reader).read_line(&mut output).await.map_err(|error| error.to_string())?;
            drop(writer);
            let end = process.wait().await;
            drop(guard);
            if output.trim() == "works" && end.code == Some(7) {
                return Ok(());
            }
            let mut complaint = Vec::new();
            if let Some(stderr) = stderr {
                // Processes that still have it open were killed, so this ends.
                let _ = stderr.take(TRIAL_STDERR_MAX).read_to_end(&mut complaint).await;
            }
            let complaint = String::from_utf8_lossy(&complaint);
            let text: Vec<&str> = complaint.split_whitespace().collect();
            let text = if text.is_empty() { "no output".to_owned() } else { text.join(" ") };
            Err(format!("trial run failed: {text}").into())
        };
        let tried = tokio::time::timeout(TRIAL_TIMEOUT, trial).await;
        let timed_out = || format!("trial run did not end within {} s", TRIAL_TIMEOUT.as_secs());
        tried.unwrap_or_else(|_elapsed| Err(timed_out().into()))
    }
}

pub fn describe_user_namespaces() -> String {
    let read_setting = |file: &str| fs::read_to_string(file).ok().map(|text| text.trim().to_owned());
    let mut words = match read_setting("/proc/sys/user/max_user_namespaces").as_deref() {
        None | Some("0") => "user namespaces: switched off (user.max_user_namespaces)".to_owned(),
        Some(most) => format!("user namespaces: up to {most}"),
    };
    for (file, value, meaning) in [
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", ", for root only (kernel.unprivileged_userns_clone = 0)"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            ", for programs that AppArmor trusts (kernel.apparmor_restrict_unprivileged_userns = 1)",
        ),
    ] {
        if read_setting(file).as_deref() == Some(value) {
            words.push_str(meaning);
        }
    }
    words
}

/// Returns a name for the home of an instance: unique, and a single path component for any id.
fn home_name(id: &InstanceId) -> String {
    let part = |id: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        id.bytes()
            .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") })
            .collect::<String>()
    };
    let parts = [id.team.as_str(), id.user.as_str(), id.installation.as_str()].map(part);
    parts.join("+")
}

fn parse_home_name(name: &str) -> Option<InstanceId> {
    let part = |part: &str| {
        let mut bytes = part.bytes();
        let mut text = Vec::new();
        while let Some(byte) = bytes.next() {
            text.push(if byte == b'%' {
                let digits = [bytes.next()?, bytes.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            } else {
                byte
            });
        }
        String::from_utf8(text).ok()
    };
    let parts: Vec<&str> = name.split('+').collect();
    let [team, user, installation] = parts[..] else { return None };
    Some(InstanceId::new(part(team)?.into(), part(user)?.into(), part(installation)?.into()))
}

/// Returns the satellite's environment for another user with this home, without the variables about the satellite's
/// user.
fn environment_for_user(home: &Path) -> impl Iterator<Item = (OsString, OsString)> {
    let is_ours = |name: &OsStr| {
        name.to_str().is_some_and(|name| matches!(name, "USER" | "LOGNAME" | "MAIL") || name.starts_with("XDG_"))
    };
    let others = std::env::vars_os().filter(move |(name, _)| !is_ours(name));
    others.chain([("HOME".into(), home.as_os_str().to_owned())])
}

const CHECK_BINDS_HINT: &str = "check `binds` in [policy.isolation]";
const ADD_BIND_HINT: &str = "add it, or a directory above it, to `binds` in [policy.isolation]";

fn stdio_target(spec: &InstanceSpec) -> Result<(&str, Option<&str>), String> {
    match &spec.target {
        ServerTarget::Stdio { command, cwd } => Ok((command, cwd.as_deref())),
        ServerTarget::Remote { .. } => Err("remote servers are not served by the stdio connector".into()),
    }
}

fn expose_all(args: &[Secret]) -> Vec<OsString> {
    args.iter().map(|arg| arg.expose().into()).collect()
}

fn sandbox_user() -> SandboxUser {
    let (user, group) = (geteuid(), getegid());
    if user.is_root() {
        SandboxUser::Outside
    } else {
        SandboxUser::Inside { user: user.as_raw(), group: group.as_raw() }
    }
}

fn format_user(identity: SandboxUser) -> String {
    match identity {
        SandboxUser::Outside => format!("{SANDBOX_USER}:{SANDBOX_USER}"),
        SandboxUser::Inside { user, group } => {
            format!("{SANDBOX_USER}:{SANDBOX_USER}, outside its user namespace {user}:{group}")
        }
    }
}

fn confinement(launcher: &dyn SandboxLauncher, identity: SandboxUser, limits: ResourceLimits) -> Confinement {
    // As root the sandbox creates no further user namespace.
    let namespaces_below = match identity {
        SandboxUser::Outside => 0,
        SandboxUser::Inside { .. } => 1,
    };
    let is_own_failure = launcher.own_failure_predicate();
    Confinement { sandbox: launcher.name(), depth: launcher.depth(), namespaces_below, limits, is_own_failure }
}

fn limits(
    policy: &IsolationPolicy,
    depth: usize,
    identity: SandboxUser,
    controllers: CgroupControllers,
) -> (ResourceLimits, CgroupLimits) {
    let depth = depth as u64;
    let each = ResourceLimits {
        address_space: policy.memory_max.filter(|_| !controllers.memory),
        cpu_seconds: policy.cpu_time_max.map(|time| time.as_secs().max(1)),
        // As root, the sandbox's own processes belong to another user and do not count; otherwise they do.
        processes: policy.processes_max.filter(|_| !controllers.processes).map(|limit| match identity {
            SandboxUser::Outside => limit,
            SandboxUser::Inside { .. } => limit + depth,
        }),
        open_files: policy.open_files_max,
        file_size: policy.file_size_max,
    };
    let all = CgroupLimits {
        memory_bytes: policy.memory_max.filter(|_| controllers.memory),
        processes: policy.processes_max.filter(|_| controllers.processes).map(|limit| limit + depth),
    };
    (each, all)
}

type Candidate = (&'static str, Result<(PathBuf, Arc<dyn SandboxLauncher>), String>);

fn nsjail() -> Candidate {
    let found =
        find_executable("nsjail").map(|path| (path.clone(), Arc::new(Nsjail { path }) as Arc<dyn SandboxLauncher>));
    (SANDBOXES[0], found)
}

fn bubblewrap() -> Candidate {
    let found = find_executable("bwrap").and_then(|path| {
        let setpriv = resolve("setpriv", Some(OsStr::new(SANDBOX_PATH)))?;
        Ok((path.clone(), Arc::new(Bubblewrap { path, setpriv }) as Arc<dyn SandboxLauncher>))
    });
    (SANDBOXES[1], found)
}

fn production_search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    if !path.is_empty() {
        path.push(":");
    }
    path.push(SANDBOX_PATH);
    path
}

/// Finds the program of a server as a start would. `directory` is the server's working directory, `search_path` its
/// `PATH`.
pub fn find_program(
    command: &str,
    directory: Option<&str>,
    search_path: Option<&Secret>,
    is_production: bool,
    in_sandbox: bool,
) -> Result<PathBuf, String> {
    let search_path = search_path.map(|path| OsString::from(path.expose()));
    let path = match (is_production, in_sandbox) {
        (true, _) => Some(production_search_path()),
        (false, true) => search_path.or_else(|| Some(SANDBOX_PATH.into())),
        (false, false) => search_path.or_else(|| std::env::var_os("PATH")),
    };
    let path = path.as_deref();
    match directory {
        // Without a sandbox a process changes to its directory before it resolves a relative path.
        Some(directory) if !is_production && command.contains('/') => {
            let file = Path::new(directory).join(command);
            resolve(&file.to_string_lossy(), path)
        }
        Some(_) | None if command.contains('/') => resolve(command, path),
        Some(_) | None => resolve(command, path).map_err(|_| "no directory of PATH contains it".to_owned()),
    }
}

fn find_executable(command: &str) -> Result<PathBuf, String> {
    resolve(command, std::env::var_os("PATH").as_deref())
}

fn describe_error(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |number| Errno::from_raw(number).desc().to_owned())
}

fn resolve(command: &str, path: Option<&OsStr>) -> Result<PathBuf, String> {
    let executable = |file: &Path| file.is_file() && access(file, AccessFlags::X_OK).is_ok();
    if command.contains('/') {
        let file = std::path::absolute(command).map_err(|error| error.to_string())?;
        return match file.metadata() {
            Ok(_) if executable(&file) => Ok(file),
            Ok(_) => Err("the file is not executable".to_owned()),
            Err(error) => Err(describe_error(&error)),
        };
    }
    let path = path.unwrap_or_default();
    let found = std::env::split_paths(path).map(|directory| directory.join(command)).find(|file| executable(file));
    found.ok_or_else(|| format!("executable `{command}` not found in PATH ({})", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_resolved_by_path_and_in_production_only_once() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (directory.path().join("first"), directory.path().join("second"));
        for place in [&first, &second] {
            fs::create_dir(place).unwrap();
        }
        let tool = |place: &Path| {
            fs::write(place.join("tool"), "").unwrap();
            fs::set_permissions(place.join("tool"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        };
        let path = std::env::join_paths([&first, &second]).unwrap();
        tool(&second);
        let production = LaunchFactory::new(Isolation::None, OperatingMode::Production, None, None).unwrap();
        assert_eq!(production.resolve_once_by("tool", &path), Ok(second.join("tool")));
        assert_eq!(resolve("tool", Some(&path)), Ok(second.join("tool")));
        tool(&first);
        assert_eq!(production.resolve_once_by("tool", &path), Ok(second.join("tool")));
        assert_eq!(resolve("tool", Some(&path)), Ok(first.join("tool")));
        assert!(production.resolve_once_by("missing", &path).unwrap_err().contains("missing"));
    }

    #[test]
    fn the_home_name_of_each_instance_is_unique_and_stays_in_the_directory() {
        let name = |team: &str, user: &str| home_name(&InstanceId::new(team.into(), user.into(), "i".into()));
        assert_eq!(name("team_acme", "alice"), "team_acme+alice+i");
        assert_ne!(name("a-b", "c"), name("a", "b-c"));
        assert_ne!(name("a+b", "c"), name("a", "b+c"));
        assert_eq!(name("..", "/"), "%2e%2e+%2f+i");
        for (team, user) in [("team_acme", "alice"), ("a+b", "ü%"), ("..", "/")] {
            let id = InstanceId::new(team.into(), user.into(), "i".into());
            assert_eq!(parse_home_name(&home_name(&id)), Some(id));
        }
        for other in [".trial", ".erased-1", "a+b", "a+b+c+d", "a+%2+c"] {
            assert_eq!(parse_home_name(other), None, "{other}");
        }
    }

    #[test]
    fn a_removed_home_is_set_aside_at_once_and_erased_without_following_links() {
        let data_dir = mcp_satellite_files::data_dir::private_tempdir();
        let opened = DataDir::open(data_dir.path()).unwrap();
        let launchers = LaunchFactory::new(Isolation::None, OperatingMode::Development, Some(opened), None).unwrap();
        let id = |installation: &str| InstanceId::new("acme".into(), "alice".into(), installation.into());
        assert!(launchers.homes().is_empty());
        let outside = data_dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        for installation in ["a", "b"] {
            let home =
                launchers.ensure_home(&home_name(&id(installation))).unwrap_or_else(|error| panic!("{}", error.reason));
            std::os::unix::fs::symlink(&outside, home.join("link")).unwrap();
        }
        launchers.set_aside_home(&id("a")).unwrap();
        launchers.set_aside_home(&id("a")).unwrap();
        assert_eq!(launchers.homes(), [id("b")]);
        launchers.set_aside_home(&id("b")).unwrap();
        launchers.erase_set_aside_homes();
        assert_eq!(fs::read_dir(data_dir.path().join(HOMES)).unwrap().count(), 0);
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn the_process_limit_includes_the_sandboxs_processes_if_they_count() {
        let policy = IsolationPolicy::strict();
        let inside = SandboxUser::Inside { user: 1000, group: 1000 };
        assert_eq!(limits(&policy, 2, SandboxUser::Outside, CgroupControllers::default()).0.processes, Some(1));
        assert_eq!(limits(&policy, 2, inside, CgroupControllers::default()).0.processes, Some(3));
        let (each, all) = limits(&policy, 1, inside, CgroupControllers { memory: true, processes: true });
        assert_eq!((each.processes, each.address_space), (None, None));
        assert_eq!(all, CgroupLimits { memory_bytes: Some(50 << 20), processes: Some(2) });
    }
}
