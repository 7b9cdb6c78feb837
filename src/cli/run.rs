//! `satellite run`: runs a satellite in the foreground.

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use clap::{Args, ValueEnum};
use futures::future::OptionFuture;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use mcp_satellite_actors::model::status::Status;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tracing_subscriber::EnvFilter;

use super::check::{ConfigSources, PlanError};
use super::service_notifications::{StatusText, report_alive};
use super::{BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED, log_writer, try_print};
use crate::active_configuration::{AcceptedReload, RejectedReload, ReloadRequest};
use crate::config::{Plan, SinkPlan, listen_address};
use crate::connect::process::signals::is_ignored;
use crate::satellite::RunningSatellite;
use crate::satellite::lock::DataDirLockError;
use crate::satellite::start::{InheritedState, StartError};
use crate::watch::{ConfigTexts, ConfigWatch};
use mcp_satellite_files::known_dirs::DataDirLocation;
use mcp_satellite_process::keeper::KeeperLink;
use mcp_satellite_process::service_manager::NotifyState;

/// Default log filter. ractor and rmcp log much that does not matter to an operator, and rmcp logs payloads.
const QUIET: &str = "info,ractor=warn,rmcp=warn,hyper=warn,reqwest=warn";

#[derive(Debug, Clone, Args)]
pub(super) struct RunCommand {
    #[command(flatten)]
    sources: ConfigSources,
    /// Address of the MCP endpoint, such as 127.0.0.1:7300 or localhost:7300; :7300 means this machine only. Overrides
    /// `listen` of the configuration
    #[arg(long, value_name = "ADDR", value_parser = listen_address)]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    data_dir: DataDirArg,
    #[command(flatten)]
    log: LogArgs,
    /// Become the leader of a session of its own. Set by commands that start a satellite in the background
    #[arg(long, hide = true)]
    detached: bool,
}

#[derive(Debug, Clone, Args)]
pub(super) struct LogArgs {
    /// Format of the log on stderr [default: human on a terminal, json elsewhere]; RUST_LOG filters it
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum LogFormat {
    /// For people
    Human,
    /// JSON, one object per line
    Json,
}

impl LogArgs {
    pub(super) fn init(&self) {
        let terminal = std::io::stderr().is_terminal();
        let format = self.log_format.unwrap_or(if terminal { LogFormat::Human } else { LogFormat::Json });
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(QUIET));
        // If the thread cannot be started, the caller's thread writes each line.
        let _ = log_writer::start(|line| {
            let _ = suspend_progress_bar(|| std::io::stderr().write_all(line));
        });
        let builder =
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| StderrWriter).log_internal_errors(false);
        // An error means that the embedding program has installed a subscriber already, which is kept.
        let _ = match format {
            LogFormat::Human => builder.with_ansi(terminal).with_target(false).try_init(),
            LogFormat::Json => builder.json().flatten_event(true).try_init(),
        };
    }
}

static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// True while a progress bar is drawn. Otherwise no lock is taken and the terminal is not touched.
static DRAWN: AtomicBool = AtomicBool::new(false);

pub(super) fn suspend_progress_bar<T>(print: impl FnOnce() -> T) -> T {
    if DRAWN.load(Ordering::Acquire) { BARS.suspend(print) } else { print() }
}

/// Log output on stderr with the progress bar hidden meanwhile. The log writer thread prints, because stderr may be a
/// file on a hanging disk; a line that cannot be written is lost, and supervision continues.
struct StderrWriter;

impl Write for StderrWriter {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if !log_writer::write(line) {
            let _ = suspend_progress_bar(|| std::io::stderr().write_all(line));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl RunCommand {
    /// Leaves the session and the process group of a parent that does not wait for the satellite.
    pub(super) fn detach(&self) {
        if self.detached {
            // The only error means that this process leads a process group, and a session of its own, already.
            let _ = rustix::process::setsid();
        }
    }

    pub(super) async fn run(self, below: KeeperLink) -> Result<u8, CommandFailure> {
        self.log.init();
        let listen = self.listen_address(&below)?;
        let files = ConfigFiles { sources: self.sources.or_user_default(), listen };
        let texts = files.sources.read();
        let plan = files.plan(&texts)?;
        let servers = plan.instances.len();
        let events_on_stdout = plan.sink == SinkPlan::Stdout;
        supervise(plan, &self.data_dir.location(), Some((files, texts)), below, |satellite| {
            let dir = satellite.data_dir().display();
            if events_on_stdout {
                // The reader of stdout expects only events.
                tracing::info!(servers, data_dir = %dir, "satellite is running");
            } else {
                let flag = self.data_dir.flag();
                let endpoint = satellite.endpoint().map(|endpoint| format!("\n  {endpoint}"));
                try_print(&format!(
                    "satellite is running: {servers} servers, data in {dir}\n  satellite status --watch{flag}{}",
                    endpoint.unwrap_or_default()
                ));
            }
        })
        .await
    }
}

impl RunCommand {
    /// Returns the address of the socket that the service manager has passed, else that of `--listen`.
    fn listen_address(&self, below: &KeeperLink) -> Result<Option<SocketAddr>, CommandFailure> {
        let Some(listener) = &below.service_manager.listener else { return Ok(self.listen) };
        let failed = |error| CommandFailure::new(FAILED, format!("cannot use the passed socket: {error}"));
        listener.local_addr().map(Some).map_err(failed)
    }
}

#[derive(Debug, Clone)]
pub(super) struct ConfigFiles {
    sources: ConfigSources,
    listen: Option<SocketAddr>,
}

impl ConfigFiles {
    fn plan(&self, texts: &ConfigTexts) -> Result<Plan, PlanError> {
        self.sources.plan(texts, self.listen)
    }

    fn start_watch(&self, texts: ConfigTexts, plan: &Plan) -> ConfigWatch {
        let sources = self.sources.clone();
        ConfigWatch::new(Arc::new(move || sources.read()), texts, plan.watch)
    }
}

/// Runs a plan until a signal ends it. `files` are the configuration files of the plan with the texts it was made from:
/// they are read again when they change and on SIGHUP. Without files, or if the controlling terminal is gone, SIGHUP
/// ends the satellite. `greet` is called after all instances are installed.
pub(super) async fn supervise(
    plan: Plan,
    location: &DataDirLocation,
    files: Option<(ConfigFiles, ConfigTexts)>,
    below: KeeperLink,
    greet: impl FnOnce(&RunningSatellite),
) -> Result<u8, CommandFailure> {
    let servers = plan.instances.len();
    let hang_timeout = Some(plan.hang_timeout).filter(|timeout| *timeout < Duration::MAX);
    let mut files = files.map(|(files, texts)| {
        let watch = files.start_watch(texts, &plan);
        (files, watch)
    });
    let KeeperLink { signals, mut service_manager, keeper, generation } = below;
    keeper.configure(plan.keep_servers, hang_timeout);
    let inherited = InheritedState { listener: service_manager.listener.take(), keeper: keeper.clone(), generation };
    let mut signals = SatelliteSignals::new(signals)?;
    let satellite = tokio::select! {
        started = Box::pin(RunningSatellite::start(plan, location, inherited)) => started.map_err(|error| {
            let code = if matches!(error, StartError::DataDir(DataDirLockError::InUse { .. })) { BAD_INPUT } else { FAILED };
            CommandFailure::new(code, error.to_string())
        })?,
        // Processes started by then are ended by their guards and by the keeper.
        () = signals.wait_end() => return Err(CommandFailure::new(FAILED, "ended by a signal during the start")),
    };
    let progress = show_progress(&satellite, servers);
    greet(&satellite);
    let mut status_text = StatusText::new(satellite.runtime());
    keeper.report_ready();
    let mut reporting = Box::pin(report_alive(&keeper, hang_timeout, &service_manager, satellite.runtime()));
    let mut credential_watch = Box::pin(satellite.watch_credentials());
    let mut link = Box::pin(satellite.run_link());
    let mut lost_data_dir = Box::pin(satellite.wait_data_dir_lost());
    let mut lost = None;
    // A reload may wait for the grace period of removed servers; signals are handled meanwhile.
    let (mut reloading, mut requested) = (None, None);
    loop {
        if reloading.is_none()
            && let Some(reload) = requested.take()
        {
            match (&mut files, reload) {
                (Some((files, watch)), reload) => {
                    progress.abort();
                    service_manager.notify_reloading();
                    reloading = Some(Box::pin(apply_reload(&satellite, read_again(files, watch, reload))));
                }
                (None, ReloadReason::Requested(request)) => {
                    let why = "cannot reload: this satellite was started without a configuration file";
                    // An error means that the requester does not wait any more.
                    let _ = request.reply.send(Err(why.to_owned().into()));
                }
                (None, ReloadReason::Hangup | ReloadReason::Changed(_)) => break,
            }
        }
        tokio::select! {
            end = satellite.wait_ended() => {
                keeper.report_stopping();
                Box::pin(satellite.kill()).await;
                let why = format!("the runtime ended: {end}; every server was killed; start the satellite again");
                return Err(CommandFailure::new(FAILED, why));
            }
            () = satellite.wait_shutdown_request() => break,
            text = status_text.wait_changed(), if service_manager.is_notified() && reloading.is_none() => {
                // The manager may have missed an earlier message.
                service_manager.notify(&[NotifyState::Ready, NotifyState::Status(text)]);
            }
            () = &mut reporting => {}
            () = &mut credential_watch => {}
            () = &mut link => {}
            () = &mut lost_data_dir => {
                let data_dir = satellite.data_dir().display();
                let message = format!(
                    "the data directory `{data_dir}` was deleted or replaced under the running satellite, which \
                     stopped because another satellite may use the path; start the satellite again"
                );
                tracing::error!(%data_dir, "the data directory was deleted or replaced; the satellite stops");
                lost = Some(CommandFailure::new(FAILED, message));
                break;
            }
            Some(ReloadOutcome { texts, outcome }) = OptionFuture::from(reloading.as_mut()) => {
                reloading = None;
                service_manager.notify(&[NotifyState::Ready]);
                if let Some((_, watch)) = &mut files {
                    watch.is_on = outcome.as_ref().copied().unwrap_or(watch.is_on);
                    watch.record_attempt(texts, outcome.err());
                }
            }
            // Changes during a reload are seen by the first check after it.
            texts = wait_changed(&mut files), if reloading.is_none() => requested = Some(ReloadReason::Changed(texts)),
            request = satellite.next_reload_request(), if requested.is_none() => requested = Some(ReloadReason::Requested(request)),
            request = signals.next() => match request {
                // A second request waits until the first reload is finished.
                SignalRequest::Reload => {
                    // A pending request from `satellite reload` reads the files as well, and its client waits for the
                    // reply.
                    if !matches!(requested, Some(ReloadReason::Requested(_))) {
                        requested = Some(ReloadReason::Hangup);
                    }
                }
                SignalRequest::End => break,
            },
        }
    }
    drop(reloading);
    progress.abort();
    keeper.report_stopping();
    service_manager.notify(&[NotifyState::Stopping, NotifyState::Status("ending the servers")]);
    tracing::info!("shutting down: every server gets its grace; a second signal kills at once");
    tokio::select! {
        report = Box::pin(satellite.shut_down()) => {
            if report.events_lost > 0 {
                tracing::warn!(events = report.events_lost, "events could not be delivered");
            }
            if !report.in_time {
                tracing::warn!("some servers did not end within their grace and were killed");
            }
            lost.map_or(Ok(DONE), Err)
        }
        () = signals.wait_end() => {
            Box::pin(satellite.kill()).await;
            Err(CommandFailure::new(FAILED, "killed by a second signal"))
        }
    }
}

enum ReloadReason {
    Hangup,
    /// `satellite reload`, which waits for the reply.
    Requested(ReloadRequest),
    Changed(ConfigTexts),
}

/// Waits until the files have changed and returns their texts. Never resolves without files.
async fn wait_changed(files: &mut Option<(ConfigFiles, ConfigWatch)>) -> ConfigTexts {
    match files {
        Some((_, watch)) => watch.wait_changed().await,
        None => std::future::pending().await,
    }
}

struct PendingReload {
    texts: ConfigTexts,
    plan: Result<Plan, String>,
    /// Reason of an earlier rejection. A rejection for the same reason is not reported again.
    reported_rejection: Option<String>,
    request: Option<ReloadRequest>,
}

/// Outcome of a reload: whether the files are watched from now on, or why the configuration was rejected.
struct ReloadOutcome {
    texts: ConfigTexts,
    outcome: Result<bool, String>,
}

fn read_again(files: &ConfigFiles, watch: &ConfigWatch, reload: ReloadReason) -> PendingReload {
    let (texts, reported, request) = match reload {
        ReloadReason::Hangup => (watch.read(), None, None),
        ReloadReason::Requested(request) => (watch.read(), None, Some(request)),
        ReloadReason::Changed(texts) => {
            let reported = watch.rejection(&texts);
            (texts, reported, None)
        }
    };
    let plan = files.plan(&texts).map_err(|refused| refused.to_single_line());
    PendingReload { texts, plan, reported_rejection: reported, request }
}

async fn apply_reload(satellite: &RunningSatellite, pending: PendingReload) -> ReloadOutcome {
    let PendingReload { texts, plan, reported_rejection: reported, request } = pending;
    let is_watched = plan.as_ref().is_ok_and(|plan| plan.watch);
    let accept = request.as_ref().is_some_and(|request| request.accept);
    let applied: Result<AcceptedReload, RejectedReload> = Box::pin(satellite.apply(plan, accept)).await;
    if let Err(rejected) = &applied
        && reported.as_ref() != Some(&rejected.message)
    {
        satellite.report_rejection(rejected.clone()).await;
    }
    let outcome = applied.as_ref().map(|_| is_watched).map_err(|rejected| rejected.message.clone());
    if let Some(request) = request {
        // An error means that the requester does not wait any more.
        let _ = request.reply.send(applied);
    }
    ReloadOutcome { texts, outcome }
}

enum SignalRequest {
    End,
    Reload,
}

/// Signals that arrive directly and through the keeper. A signal to the process group arrives both ways but is one
/// request, so the larger of the two counts applies.
struct SatelliteSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    keeper: mpsc::UnboundedReceiver<nix::sys::signal::Signal>,
    end: SignalCount,
    reload: SignalCount,
    /// True if the process had a controlling terminal at the start and SIGHUP was not ignored, as `nohup` does.
    ends_with_terminal: bool,
    /// True after a SIGHUP has reported the loss of the terminal. Shell and kernel may both send one; the second one is
    /// not a second request to end.
    has_lost_terminal: bool,
}

fn has_terminal() -> bool {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
    std::fs::File::options().read(true).custom_flags(flags).open("/dev/tty").is_ok()
}

#[derive(Default)]
pub(super) struct SignalCount {
    pub(super) direct: u64,
    pub(super) forwarded: u64,
    handled: u64,
}

impl SignalCount {
    /// Returns true if there is an unanswered request, and marks it as answered.
    pub(super) fn take_new(&mut self) -> bool {
        let requested = self.direct.max(self.forwarded);
        std::mem::replace(&mut self.handled, requested) < requested
    }
}

impl SatelliteSignals {
    fn new(keeper: mpsc::UnboundedReceiver<nix::sys::signal::Signal>) -> std::io::Result<Self> {
        // Checked first: the handlers installed below hide whether the signal was ignored.
        let ends_with_terminal = !is_ignored(nix::sys::signal::Signal::SIGHUP) && has_terminal();
        Ok(Self {
            ends_with_terminal,
            has_lost_terminal: false,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            keeper,
            end: SignalCount::default(),
            reload: SignalCount::default(),
        })
    }

    async fn next(&mut self) -> SignalRequest {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => self.end.direct += 1,
                _ = self.interrupt.recv() => self.end.direct += 1,
                _ = self.hangup.recv() => self.reload.direct += 1,
                Some(signal) = self.keeper.recv() => match signal {
                    nix::sys::signal::Signal::SIGHUP => self.reload.forwarded += 1,
                    _ => self.end.forwarded += 1,
                },
            }
            if self.end.take_new() {
                return SignalRequest::End;
            }
            if self.reload.take_new() {
                if !self.ends_with_terminal || has_terminal() {
                    return SignalRequest::Reload;
                }
                if !std::mem::replace(&mut self.has_lost_terminal, true) {
                    tracing::info!("the controlling terminal was closed");
                    return SignalRequest::End;
                }
            }
        }
    }

    async fn wait_end(&mut self) {
        while let SignalRequest::Reload = self.next().await {}
    }
}

fn show_progress(satellite: &RunningSatellite, total: usize) -> tokio::task::JoinHandle<()> {
    let mut watch = satellite.runtime().watch();
    tokio::spawn(async move {
        if total < 2 || !std::io::stderr().is_terminal() {
            return;
        }
        DRAWN.store(true, Ordering::Release);
        let bar = BARS.add(ProgressBar::new(total as u64));
        // The template is constant; if it were invalid, the default style would be used.
        if let Ok(style) = ProgressStyle::with_template("starting {bar:30} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        loop {
            let (settled, failed) = {
                let snapshot = watch.borrow_and_update();
                let settled = snapshot.iter().filter(|view| !view.status.is_transitional()).count();
                let failed = snapshot.iter().filter(|view| view.status == Status::PermanentlyFailed).count();
                (settled, failed)
            };
            bar.set_position(settled as u64);
            if failed > 0 {
                bar.set_message(format!("({failed} failed)"));
            }
            if settled >= total {
                break;
            }
            // Snapshots arrive faster than the bar needs them.
            tokio::time::sleep(Duration::from_millis(100)).await;
            if watch.changed().await.is_err() {
                break;
            }
        }
        bar.finish_and_clear();
        DRAWN.store(false, Ordering::Release);
    })
}
