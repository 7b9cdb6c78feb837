//! `satellite load`

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use comfy_table::CellAlignment;
use tokio::signal::unix::{SignalKind, signal};

use super::check::rendered as drawn;
use super::table::{rendered, table};
use super::{BAD_INPUT, DONE, FAILED, Failed, LAST_TASKS, complain, say, shell_word};
use crate::connect::process::raise_descriptor_limit;
use crate::load::chance::Seed;
use crate::load::report::{self, Live, Table, headline, tables, verdict};
use crate::load::scenario::{self, Overrides, SHIPPED, Scenario, ScenarioErrors};
use crate::load::types::{Findings, Mode, Setup};
use crate::load::{self, LoadError};
use crate::reaper::Below;

/// Ended by SIGINT or SIGTERM, as shells count it.
const INTERRUPTED: u8 = 130;
/// What our own parts say when a scenario has them panic. That is no news.
const ON_PURPOSE: &str = "asked to panic";

#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 every promise was kept, 1 one was broken, 2 bad input.
The same scenario and seed give the same calls and faults; a run prints the command that repeats it.")]
pub(super) struct Load {
    /// One that is built in (see --list), or a file of one's own
    #[arg(long, value_name = "NAME|FILE", default_value = "mixed")]
    scenario: String,
    /// How many servers, instead of as many as the scenario says
    #[arg(long, value_name = "N")]
    instances: Option<usize>,
    /// In how many teams
    #[arg(long, value_name = "T")]
    teams: Option<usize>,
    /// How long the fleet is under load
    #[arg(long, value_name = "S")]
    seconds: Option<u64>,
    /// What everything is drawn from; without it one is drawn, and printed
    #[arg(long, value_name = "K")]
    seed: Option<u64>,
    /// Child processes instead of servers that are simulated in this process
    #[arg(long)]
    real: bool,
    /// Calls go through the MCP endpoint, over HTTP
    #[arg(long)]
    gateway: bool,
    /// On one thread, in time that passes as soon as everybody waits: an hour in seconds
    #[arg(long, conflicts_with_all = ["real", "gateway"])]
    virtual_time: bool,
    /// What was found as one JSON object, and nothing else on stdout
    #[arg(long)]
    json: bool,
    /// Also a page with plots, in one file that needs nothing else
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Also every event, a line each, to compare two runs
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// List the scenarios that are built in, and run none
    #[arg(long, exclusive = true)]
    list: bool,
    /// Print one of them, to begin one's own with
    #[arg(long, value_name = "NAME", exclusive = true)]
    print_scenario: Option<String>,
}

impl From<ScenarioErrors> for Failed {
    fn from(errors: ScenarioErrors) -> Self {
        Self::new(BAD_INPUT, drawn(&errors))
    }
}

impl From<LoadError> for Failed {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Scenario(errors) => errors.into(),
            other => {
                let causes = std::iter::successors(std::error::Error::source(&other), |error| error.source());
                let text = causes.fold(other.to_string(), |text, cause| format!("{text}: {cause}"));
                Self::new(FAILED, text)
            }
        }
    }
}

impl Load {
    /// Whether it starts processes, and so belongs below the reaper.
    pub(super) fn is_real(&self) -> bool {
        self.real && !self.list && self.print_scenario.is_none()
    }

    pub(super) fn run(self, below: Option<Below>) -> Result<u8, Failed> {
        if self.list {
            say(&list()?);
            return Ok(DONE);
        }
        if let Some(name) = &self.print_scenario {
            say(shipped(name)?.trim_end());
            return Ok(DONE);
        }
        let scenario = self.scenario()?;
        let seed = Seed(self.seed.unwrap_or_else(drawn_seed));
        let repeat = self.repeat(&scenario, seed);
        // A run of half an hour must not end in a file that cannot be written.
        let mut page = self.report.as_deref().map(create).transpose()?;
        self.trace.as_deref().map(create).transpose()?;
        complain(&format!("{}, seed {}", scenario.name, seed.0));

        let findings = self.findings(scenario, seed, repeat.clone(), below)?;
        let Some(findings) = findings else {
            complain(&format!("interrupted\nrepeat: {repeat}"));
            return Ok(INTERRUPTED);
        };
        if let (Some(page), Some(path)) = (&mut page, &self.report) {
            page.write_all(report::html(&findings).as_bytes()).map_err(|error| cannot_write(path, &error))?;
        }
        if self.json {
            say(&report::json(&findings).map_err(|error| Failed::new(FAILED, format!("cannot write JSON: {error}")))?);
        } else {
            say(&told(&findings));
        }
        if findings.violations_in_all == 0 {
            return Ok(DONE);
        }
        if self.json {
            complain(&verdict(&findings));
        }
        // The last line, as it is typed.
        let _ = writeln!(std::io::stderr().lock(), "repeat: {repeat}");
        Ok(FAILED)
    }

    fn mode(&self) -> Mode {
        match (self.real, self.virtual_time) {
            (true, _) => Mode::Real,
            (false, true) => Mode::Virtual,
            (false, false) => Mode::Simulated,
        }
    }

    fn scenario(&self) -> Result<Scenario, Failed> {
        let duration = self.seconds.map(Duration::from_secs);
        let overrides = Overrides { instances: self.instances, teams: self.teams, duration };
        let scenario = scenario::load(&self.scenario)?.with(overrides)?;
        if self.virtual_time {
            scenario.paused()?;
        }
        Ok(scenario)
    }

    /// The command that does the same again, whatever the scenario's file will say then.
    fn repeat(&self, scenario: &Scenario, seed: Seed) -> String {
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

    /// Nothing if somebody has interrupted it.
    fn findings(
        &self,
        scenario: Scenario,
        seed: Seed,
        repeat: String,
        below: Option<Below>,
    ) -> Result<Option<Findings>, Failed> {
        let mode = self.mode();
        if let Err(error) = raise_descriptor_limit() {
            complain(&format!("cannot raise the limit of open files: {error}"));
        }
        keep_quiet_about_panics_on_purpose();
        let program = std::env::current_exe()
            .map_err(|error| Failed::new(FAILED, format!("cannot find this program's own file: {error}")))?;
        let live = Live::new(scenario.duration);
        let setup = Setup {
            scenario,
            seed,
            mode,
            gateway: self.gateway,
            program,
            repeat,
            trace: self.trace.clone(),
            seams: load::Seams::default(),
        };
        let threads = load::threads(mode)?;
        let found = threads.block_on(async {
            let run = Box::pin(load::run(setup, &live));
            // In paused time there is nothing that hears a signal: its default ends the process.
            if mode == Mode::Virtual {
                return run.await.map(Some);
            }
            tokio::select! {
                biased;
                findings = run => findings.map(Some),
                () = interrupted(below) => Ok(None),
            }
        });
        live.finish();
        // Servers end with the tasks that hold them.
        threads.shutdown_timeout(LAST_TASKS);
        Ok(found?)
    }
}

/// By a signal to this process, or through the reaper.
async fn interrupted(below: Option<Below>) {
    let directly = async {
        match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
            (Ok(mut interrupt), Ok(mut terminate)) => {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
            }
            // Then the signal's default ends the process.
            _ => std::future::pending().await,
        }
    };
    let through_the_reaper = async {
        match below {
            Some(mut below) => {
                if below.asked.recv().await.is_none() {
                    std::future::pending::<()>().await;
                }
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = directly => {}
        () = through_the_reaper => {}
    }
}

fn keep_quiet_about_panics_on_purpose() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let payload = panic.payload();
        let text =
            payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        if text != Some(ON_PURPOSE) {
            usual(panic);
        }
    }));
}

/// Short enough to be typed.
fn drawn_seed() -> u64 {
    // The standard library's only randomness.
    RandomState::new().build_hasher().finish() >> 32
}

fn create(path: &Path) -> Result<File, Failed> {
    File::create(path).map_err(|error| Failed { code: BAD_INPUT, ..cannot_write(path, &error) })
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failed {
    Failed::new(FAILED, format!("cannot write {}: {error}", path.display()))
}

fn list() -> Result<String, Failed> {
    let mut table = table(&["SCENARIO", "SERVERS", "TEAMS", "SECONDS", "WHAT HAPPENS"]);
    for (name, _) in SHIPPED {
        let scenario = scenario::load(name)?;
        let numbers = [scenario.fleet.instances, scenario.fleet.teams].map(|number| number.to_string());
        let [instances, teams] = numbers;
        table.add_row([name.to_owned(), instances, teams, scenario.duration.as_secs().to_string(), scenario.about]);
    }
    Ok(rendered(&table))
}

fn shipped(name: &str) -> Result<&'static str, Failed> {
    let found = SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text);
    found.ok_or_else(|| {
        let names = SHIPPED.map(|(name, _)| name).join(", ");
        Failed::new(BAD_INPUT, format!("no scenario `{name}` is built in; there are: {names}"))
    })
}

/// What was run, whether it held, and everything in tables.
fn told(findings: &Findings) -> String {
    let tables: Vec<String> = tables(findings).iter().map(as_text).collect();
    let verdict = verdict(findings);
    let text = format!("{}\n{verdict}\n\n{}", headline(findings), tables.join("\n\n"));
    // Where it broke, that is the last line on stderr.
    if findings.violations_in_all == 0 { format!("{text}\n\nrepeat: {}", findings.repeat) } else { text }
}

fn as_text(Table { title, head, rows }: &Table) -> String {
    let titled: Vec<String> = head
        .iter()
        .enumerate()
        .map(|(at, name)| if at == 0 { title.to_uppercase() } else { name.to_uppercase() })
        .collect();
    let mut table = table(&titled.iter().map(String::as_str).collect::<Vec<_>>());
    for row in rows {
        table.add_row(row);
    }
    // What is no table of numbers reads from the left.
    if rows.iter().flatten().all(|cell| cell.len() < 40) {
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    }
    rendered(&table)
}
