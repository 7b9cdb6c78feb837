//! `satellite load`

use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Args;
use comfy_table::CellAlignment;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::check::render_errors;
use super::run::SignalCount;
use super::table::{new_table, render_table};
use super::{
    BAD_INPUT, CommandFailure, DONE, FAILED, LAST_TASKS, print_error, print_styled, print_styled_error, print_text,
    shell_word,
};
use crate::connect::process::raise_descriptor_limit;
use crate::load::random::RunSeed;
use crate::load::report::{self, ReportTable, TerminalProgress, headline, tables, verdict};
use crate::load::scenario::{self, SHIPPED, Scenario, ScenarioErrors, ScenarioOverrides};
use crate::load::setup::RunSetup;
use crate::load::types::{RunFindings, ServerEnvironment};
use crate::load::{self, LoadError};
use mcp_satellite_process::keeper::KeeperLink;

/// Exit code if the result is unknown or could not be written.
const RESULT_UNKNOWN: u8 = 4;
const INTERRUPTED: u8 = 130;
/// Time between the second signal and the exit. Processes that are left then are ended by the kernel.
const SECOND_SIGNAL_GRACE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Exit codes: 0 every guarantee held, 1 a guarantee was violated, 2 bad input, 4 the run or its \
results failed, 130 ended early.
Ctrl-C or SIGTERM ends the load: the servers recover, and the results are checked and printed. \
A second signal ends the run at once.
The same scenario and seed result in the same calls and faults. A run prints the command that repeats it.")]
pub(super) struct LoadCommand {
    /// Name of a built-in scenario (see --list), or path of a scenario file
    #[arg(long, value_name = "NAME|FILE", default_value = "mixed")]
    scenario: String,
    /// Number of servers [default: that of the scenario]
    #[arg(long, value_name = "N")]
    instances: Option<usize>,
    /// Number of teams [default: that of the scenario]
    #[arg(long, value_name = "T")]
    teams: Option<usize>,
    /// Duration of the load in seconds [default: that of the scenario]
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// Seed of all random choices [default: drawn and printed]
    #[arg(long, value_name = "K")]
    seed: Option<u64>,
    /// Run the servers as child processes instead of simulating them in this process
    #[arg(long)]
    real: bool,
    /// Send calls through the MCP endpoint, over HTTP
    #[arg(long)]
    gateway: bool,
    /// Run on one thread with a simulated clock that skips idle time: an hour in seconds
    #[arg(long, conflicts_with_all = ["real", "gateway"])]
    virtual_time: bool,
    /// Print the findings as one JSON object, and nothing else on stdout
    #[arg(long)]
    json: bool,
    /// Also write a self-contained HTML page with plots
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Also write every event, one per line, to compare two runs
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// List the built-in scenarios and exit
    #[arg(long, exclusive = true)]
    list: bool,
    /// Print a built-in scenario, as a template for your own
    #[arg(long, value_name = "NAME", exclusive = true)]
    print_scenario: Option<String>,
}

impl From<ScenarioErrors> for CommandFailure {
    fn from(errors: ScenarioErrors) -> Self {
        Self::from_styled(BAD_INPUT, render_errors(&errors))
    }
}

impl From<LoadError> for CommandFailure {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Scenario(errors) => errors.into(),
            other => {
                let causes = std::iter::successors(std::error::Error::source(&other), |error| error.source());
                let text = causes.fold(other.to_string(), |text, cause| format!("{text}: {cause}"));
                Self::new(RESULT_UNKNOWN, text)
            }
        }
    }
}

impl LoadCommand {
    /// Returns true if the run starts processes and must therefore run below the keeper.
    pub(super) fn is_real(&self) -> bool {
        self.real && !self.list && self.print_scenario.is_none()
    }

    pub(super) fn run(self, below: Option<KeeperLink>) -> Result<u8, CommandFailure> {
        if self.list {
            print_styled(&list_scenarios()?);
            return Ok(DONE);
        }
        if let Some(name) = &self.print_scenario {
            print_text(built_in_scenario(name)?.trim_end());
            return Ok(DONE);
        }
        let scenario = self.scenario()?;
        let seed = RunSeed(self.seed.unwrap_or_else(random_seed));
        let repeat = self.repeat_command(&scenario, seed);
        // Checked before the run: a long run must not end with a file that cannot be written.
        self.trace.as_deref().map(check_writable).transpose()?;
        let page = self.report.as_deref().map(ReportFile::create).transpose()?;
        if let (Some(trace), Some(page)) = (&self.trace, &page) {
            page.check_differs_from(trace)?;
        }
        print_error(&format!("{}, seed {}", scenario.name, seed.0));

        let findings = match self.run_scenario(scenario, seed, repeat.clone(), below) {
            Ok(Some(findings)) => findings,
            Ok(None) => {
                print_error(&format!("interrupted\nrepeat: {repeat}"));
                return Ok(INTERRUPTED);
            }
            Err(failed) => {
                print_styled_error(&failed.message);
                print_repeat_command(&repeat);
                return Ok(failed.code);
            }
        };
        // Print the essential result first: the reader of stdout may have closed it.
        let is_broken = findings.violations_in_all > 0;
        if is_broken {
            if self.json {
                print_error(&verdict(&findings));
            }
            print_repeat_command(&repeat);
        }
        let mut code = match (is_broken, findings.stopped) {
            (true, _) => FAILED,
            (false, true) => INTERRUPTED,
            (false, false) => DONE,
        };
        for failed in self.write_findings(&findings, page) {
            print_error(&failed);
            code = if code == FAILED { FAILED } else { RESULT_UNKNOWN };
        }
        Ok(code)
    }

    /// Writes the findings to all requested outputs. Returns an error message for each output that failed.
    fn write_findings(&self, findings: &RunFindings, page: Option<ReportFile>) -> Vec<String> {
        let mut failed = Vec::new();
        let text =
            if self.json { report::json(findings).map_err(io::Error::other) } else { Ok(format_findings(findings)) };
        match text.and_then(|text| writeln!(io::stdout().lock(), "{text}")) {
            // A reader that closes the pipe early does not change the exit code.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                failed.push(format!("cannot write to stdout: {error}"));
            }
            _ => {}
        }
        if let Some(page) = page {
            let path = page.path.clone();
            if let Err(error) = page.finish(&report::html(findings)) {
                failed.push(write_failure(&path, &error).message);
            }
        }
        if let (Some(trace), Some(why)) = (&self.trace, &findings.trace_ends_early) {
            failed.push(format!("cannot write all of {}: {why}", trace.display()));
        }
        failed
    }

    fn mode(&self) -> ServerEnvironment {
        match (self.real, self.virtual_time) {
            (true, _) => ServerEnvironment::Real,
            (false, true) => ServerEnvironment::Virtual,
            (false, false) => ServerEnvironment::Simulated,
        }
    }

    fn scenario(&self) -> Result<Scenario, CommandFailure> {
        let duration = self.seconds.map(Duration::from_secs);
        let overrides = ScenarioOverrides { instances: self.instances, teams: self.teams, duration };
        let scenario = scenario::load(&self.scenario)?.with_overrides(overrides)?;
        if self.virtual_time {
            scenario.check_virtual_time()?;
        }
        Ok(scenario)
    }

    /// Returns the command that repeats the run, from the same directory and with an unchanged scenario file.
    fn repeat_command(&self, scenario: &Scenario, seed: RunSeed) -> String {
        let flags = [(self.real, " --real"), (self.gateway, " --gateway"), (self.virtual_time, " --virtual-time")];
        let flags: String = flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag).collect();
        format!(
            "satellite load --scenario {} --instances {} --teams {} --seconds {} --seed {}{flags}",
            shell_word(&self.scenario),
            scenario.fleet.instances,
            scenario.fleet.teams,
            scenario.duration.as_secs(),
            seed.0,
        )
    }

    /// Runs the scenario. Returns `None` if a second signal interrupted it.
    fn run_scenario(
        &self,
        scenario: Scenario,
        seed: RunSeed,
        repeat: String,
        below: Option<KeeperLink>,
    ) -> Result<Option<RunFindings>, CommandFailure> {
        let mode = self.mode();
        if let Err(error) = raise_descriptor_limit() {
            print_error(&format!("cannot raise the limit of open files: {error}"));
        }
        load::silence_deliberate_panics();
        let program = std::env::current_exe().map_err(|error| {
            CommandFailure::new(RESULT_UNKNOWN, format!("cannot find this program's own file: {error}"))
        })?;
        let live = Arc::new(TerminalProgress::new(scenario.duration));
        let setup = RunSetup {
            scenario,
            seed,
            mode,
            gateway: self.gateway,
            program,
            repeat,
            trace: self.trace.clone(),
            hooks: load::TestHooks::default(),
        };
        let at_once = spawn_signal_thread(below, &live)
            .map_err(|error| CommandFailure::new(RESULT_UNKNOWN, format!("cannot listen for signals: {error}")))?;
        let threads = load::build_runtime(mode)?;
        let found = threads.block_on(async {
            tokio::select! {
                biased;
                findings = Box::pin(load::run(setup, &*live)) => findings.map(Some),
                () = at_once.cancelled() => Ok(None),
            }
        });
        live.finish();
        // Servers end with the tasks that own them.
        threads.shutdown_timeout(LAST_TASKS);
        match found {
            Err(LoadError::Stopped) => Ok(None),
            found => Ok(found?),
        }
    }
}

/// Waits for signals on a separate thread, because the thread of the run may be busy and its clock may stand still. The
/// first signal makes `live` end the run early; the second cancels the token.
fn spawn_signal_thread(below: Option<KeeperLink>, live: &Arc<TerminalProgress>) -> io::Result<CancellationToken> {
    let signal_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = {
        let _in = signal_runtime.enter();
        LoadSignals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            keeper: below,
            count: SignalCount::default(),
        }
    };
    let (live, at_once) = (Arc::clone(live), CancellationToken::new());
    let token = at_once.clone();
    thread::Builder::new().name("satellite-signals".into()).spawn(move || {
        signal_runtime.block_on(async {
            signals.next().await;
            live.stop();
            signals.next().await;
        });
        token.cancel();
        thread::sleep(SECOND_SIGNAL_GRACE);
        std::process::exit(i32::from(INTERRUPTED));
    })?;
    Ok(at_once)
}

struct LoadSignals {
    interrupt: Signal,
    terminate: Signal,
    keeper: Option<KeeperLink>,
    count: SignalCount,
}

impl LoadSignals {
    async fn next(&mut self) {
        while !self.count.take_new() {
            let through_the_keeper = async {
                match &mut self.keeper {
                    Some(below) => below.signals.recv().await,
                    None => None,
                }
            };
            tokio::select! {
                _ = self.interrupt.recv() => self.count.direct += 1,
                _ = self.terminate.recv() => self.count.direct += 1,
                // SIGHUP means a reload, and a load run has nothing to reload.
                Some(signal) = through_the_keeper => {
                    self.count.forwarded += u64::from(signal != nix::sys::signal::Signal::SIGHUP);
                }
            }
        }
    }
}

fn print_repeat_command(repeat: &str) {
    let _ = writeln!(io::stderr().lock(), "repeat: {repeat}");
}

/// HTML report that replaces an older file only when it is complete.
struct ReportFile {
    path: PathBuf,
    file: File,
    /// Temporary file. `None` for a pipe or a device, which is written directly.
    unfinished: Option<PathBuf>,
}

impl ReportFile {
    fn create(path: &Path) -> Result<Self, CommandFailure> {
        let cannot = |error: &io::Error| CommandFailure { code: BAD_INPUT, ..write_failure(path, error) };
        let unfinished = match fs::metadata(path) {
            Ok(found) if !found.is_file() => None,
            // The path may be a link to the file.
            _ => Some(resolve_path(path)),
        };
        let Some(target) = unfinished else {
            let file = OpenOptions::new().write(true).open(path).map_err(|error| cannot(&error))?;
            return Ok(Self { path: path.to_owned(), file, unfinished: None });
        };
        let mut unfinished = target.clone().into_os_string();
        unfinished.push(".tmp");
        let unfinished = PathBuf::from(unfinished);
        let file = File::create(&unfinished).map_err(|error| cannot(&error))?;
        Ok(Self { path: target, file, unfinished: Some(unfinished) })
    }

    fn check_differs_from(&self, trace: &Path) -> Result<(), CommandFailure> {
        let trace = resolve_path(trace);
        let taken = std::iter::once(&self.path).chain(&self.unfinished).any(|path| *path == trace);
        let why = || format!("the trace and the report cannot both be written to {}", trace.display());
        if taken { Err(CommandFailure::new(BAD_INPUT, why())) } else { Ok(()) }
    }

    fn finish(mut self, text: &str) -> io::Result<()> {
        self.file.write_all(text.as_bytes())?;
        if let Some(unfinished) = &self.unfinished {
            fs::rename(unfinished, &self.path)?;
        }
        self.unfinished = None;
        Ok(())
    }
}

impl Drop for ReportFile {
    fn drop(&mut self) {
        if let Some(unfinished) = &self.unfinished {
            // If removing fails, the name shows that the file is temporary.
            let _ = fs::remove_file(unfinished);
        }
    }
}

fn resolve_path(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let new = || Some(fs::canonicalize(parent).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(new).unwrap_or_else(|| path.to_owned())
}

fn random_seed() -> u64 {
    // `RandomState` is the only source of randomness in the standard library.
    RandomState::new().build_hasher().finish() >> 32
}

/// Checks that the file can be written. Its content is kept until the run begins.
fn check_writable(path: &Path) -> Result<(), CommandFailure> {
    let opened = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    opened.map(drop).map_err(|error| CommandFailure { code: BAD_INPUT, ..write_failure(path, &error) })
}

fn write_failure(path: &Path, error: &io::Error) -> CommandFailure {
    CommandFailure::new(FAILED, format!("cannot write {}: {error}", path.display()))
}

fn list_scenarios() -> Result<String, CommandFailure> {
    let mut table = new_table(&["SCENARIO", "SERVERS", "TEAMS", "SECONDS", "WHAT HAPPENS"]);
    for (name, _) in SHIPPED {
        let scenario = scenario::load(name)?;
        let numbers = [scenario.fleet.instances, scenario.fleet.teams].map(|number| number.to_string());
        let [instances, teams] = numbers;
        table.add_row([name.to_owned(), instances, teams, scenario.duration.as_secs().to_string(), scenario.about]);
    }
    Ok(render_table(&table))
}

fn built_in_scenario(name: &str) -> Result<&'static str, CommandFailure> {
    let found = SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text);
    found.ok_or_else(|| {
        let names = SHIPPED.map(|(name, _)| name).join(", ");
        CommandFailure::new(BAD_INPUT, format!("no built-in scenario `{name}`; use one of: {names}"))
    })
}

fn format_findings(findings: &RunFindings) -> String {
    let tables: Vec<String> = tables(findings).iter().map(render_report_table).collect();
    let verdict = verdict(findings);
    format!("{}\n{verdict}\n\n{}\n\nrepeat: {}", headline(findings), tables.join("\n\n"), findings.repeat)
}

fn render_report_table(ReportTable { title, head, rows }: &ReportTable) -> String {
    let titled: Vec<String> = head
        .iter()
        .enumerate()
        .map(|(at, name)| if at == 0 { title.to_uppercase() } else { name.to_uppercase() })
        .collect();
    let mut table = new_table(&titled.iter().map(String::as_str).collect::<Vec<_>>());
    for row in rows {
        table.add_row(row);
    }
    // Align numbers right; long text cells stay aligned left.
    if rows.iter().flatten().all(|cell| cell.len() < 40) {
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    }
    render_table(&table)
}
