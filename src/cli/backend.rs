//! `satellite backend`

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use clap::Args;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::run::LogArgs;
use super::{BAD_INPUT, CommandFailure, DONE, FAILED, location, print_error, shell_word, try_print};
use crate::backend::server::{BackendOpenError, BackendServer, BackendSettings};
use crate::backend_console;
use crate::config::listen_address;

#[derive(Debug, Args)]
#[command(after_long_help = "\
DIR contains the reports of satellites, their configuration, and three files for you:
  admin-token           logs in to the console at /console/ and authorizes requests to /api/admin; to replace it, remove the file and start again
  admin.curl            passes the token to `curl --config DIR/admin.curl`, hidden from the process list
  registration-token    registers one satellite within a day; a used one is replaced at the next start

The backend serves plain HTTP. On a network that others can read, put a proxy with TLS in front of it.")]
pub(super) struct BackendCliCommand {
    /// Address on which satellites reach the backend
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7400", value_parser = listen_address)]
    listen: SocketAddr,
    /// Directory of all its data [default: .satellite-backend]
    #[arg(long, value_name = "DIR", env = "SATELLITE_BACKEND_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Make satellites poll this often, instead of every 2, 10, 30 or 60 s
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    poll_interval: Option<f64>,
    /// Host name under which browsers reach the console, such as that of a proxy; repeat it for several
    #[arg(long, value_name = "HOST")]
    console_host: Vec<String>,
    #[command(flatten)]
    log: LogArgs,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if (0.05..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("give 0.05 to 3600 seconds".to_owned()) }
}

impl BackendCliCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        self.log.init();
        let mut signals = BackendSignals::new()?;
        let listener = TcpListener::bind(self.listen).map_err(|error| {
            let (at, taken) = (self.listen, error.kind() == ErrorKind::AddrInUse);
            let hint = if taken { "; another process listens there: choose another --listen" } else { "" };
            CommandFailure::new(if taken { BAD_INPUT } else { FAILED }, format!("cannot listen at {at}: {error}{hint}"))
        })?;
        let location = location(self.data_dir.as_deref(), ".satellite-backend");
        let opened = location.create_or_open().map_err(|error| {
            let shown = location.path.display();
            CommandFailure::new(FAILED, format!("cannot use the data directory `{shown}`: {error}"))
        })?;
        let settings = BackendSettings { poll_interval: self.poll_interval, ..BackendSettings::new(opened.path()) };
        let backend = BackendServer::open(settings).await.map_err(|error| {
            let code = if matches!(error, BackendOpenError::InUse(_)) { BAD_INPUT } else { FAILED };
            CommandFailure::new(code, error.to_string())
        })?;
        let (data_dir, curl, token) =
            (backend.data_dir().to_owned(), backend.curl_file(), backend.registration_token_file());
        let _console = backend_console::attach(&backend, listener.local_addr()?, self.console_host)?;
        let mut serving = backend.serve(listener)?;
        let address = serving.address();
        if !address.ip().is_loopback() {
            print_error(&format!(
                "WARNING: {address} can be reached from other machines, and all traffic, keys included, is not \
                 encrypted: put a proxy with TLS in front of the backend and let it listen on 127.0.0.1"
            ));
            tracing::warn!(%address, "the backend listens on the network without TLS");
        }
        tracing::info!(%address, data_dir = %data_dir.display(), "the backend is running");
        try_print(&start_message(address, &data_dir, &curl, &token));
        tokio::select! {
            error = serving.wait_ended() => {
                return Err(CommandFailure::new(FAILED, format!("the backend ended unexpectedly: {error}")));
            }
            () = signals.wait_end() => {}
        }
        tracing::info!("shutting down: completing the requests in progress");
        tokio::select! {
            () = serving.shut_down() => Ok(DONE),
            () = signals.wait_end() => Err(CommandFailure::new(FAILED, "ended at once by a second signal")),
        }
    }
}

fn start_message(address: SocketAddr, data_dir: &Path, curl: &Path, token: &Path) -> String {
    let host = if address.ip().is_unspecified() { "THIS-MACHINE".to_owned() } else { address.ip().to_string() };
    let host = if address.is_ipv6() && !address.ip().is_unspecified() { format!("[{host}]") } else { host };
    let url = format!("http://{host}:{}", address.port());
    let token = format!("file:{}", token.display()).replace('\\', r"\\").replace('"', "\\\"");
    let curl = format!("curl -sS --config {}", shell_word(&curl.to_string_lossy()));
    format!(
        "\
backend is running: {url}, data in {}

Configuration of the first satellite (the token is valid once, within a day):
  [backend]
  url = \"{url}\"
  token = \"{token}\"

Create a token for another satellite:
  {curl} '{url}/api/admin/registration-tokens' -d '{{}}'

Set the configuration of the satellites (servers and teams, as in a configuration file, as JSON):
  {curl} '{url}/api/admin/config' -X PUT --data-binary @config.json

Open the console in a browser and log in with the token in {}:
  {url}/console/

Show the satellites, their instances and events:
  {curl} '{url}/api/admin/satellites'
  {curl} '{url}/api/admin/instances'
  {curl} '{url}/api/admin/events?limit=20'
  {curl} -N '{url}/api/admin/instances/stream'
",
        data_dir.display(),
        data_dir.join("admin-token").display()
    )
}

struct BackendSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl BackendSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn wait_end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
