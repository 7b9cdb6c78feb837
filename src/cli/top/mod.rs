//! `satellite top`: the instances of a satellite in a terminal, over its HTTP API.

mod connection;
mod lines;
mod screen;

use std::io::{IsTerminal as _, stdout};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use self::connection::{ApiConnection, Update};
use self::screen::{Screen, ScreenRequest};
use super::{BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED};
use crate::console::api::{ConsoleFilter, StatusReply};
use crate::console::client::ConsoleClient;
use mcp_satellite_console::access::OWNER_TOKEN_FILE;

/// Updates that wait for the screen.
const UPDATES_MAX: usize = 64;
/// Pause between two pictures, for the ages on the screen.
const REDRAW: Duration = Duration::from_secs(1);
/// Time to wait for a key before the reader of keys looks whether the program ends.
const KEY_PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
#[command(after_help = "\
Keys:
  up, down, PgUp, PgDn, Home, End   select an instance or scroll
  /                                 filter by name, team, user or status; Esc clears the filter
  Enter                             output of the selected instance
  t                                 tree of actors
  r                                 restart the selected instance, after a confirmation
  q, Esc                            back, or end")]
pub(super) struct TopCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
    /// URL of another satellite's HTTP API, without a path; needs --token-file
    #[arg(long, value_name = "URL", requires = "token_file")]
    url: Option<String>,
    /// File with a token of the HTTP API [default: the owner's token in the data directory]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TopCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        if !stdout().is_terminal() {
            let why = "`satellite top` needs a terminal; `satellite status` prints the same instances";
            return Err(CommandFailure::new(BAD_INPUT, why));
        }
        let connection = self.connect().await?;
        let (updates, received) = mpsc::channel(UPDATES_MAX);
        connection.follow_instances(updates.clone());
        let terminal = ratatui::try_init()
            .map_err(|error| CommandFailure::new(FAILED, format!("cannot use the terminal: {error}")))?;
        let ended = show(terminal, &connection, updates, received).await;
        // Also shows the cursor and leaves the alternate screen.
        ratatui::restore();
        ended.map(|()| DONE)
    }

    async fn connect(&self) -> Result<ApiConnection, CommandFailure> {
        let read = |file: &PathBuf| {
            std::fs::read_to_string(file).map_err(|error| {
                CommandFailure::new(BAD_INPUT, format!("cannot read the token in `{}`: {error}", file.display()))
            })
        };
        if let (Some(url), Some(file)) = (&self.url, &self.token_file) {
            return ApiConnection::new(url, read(file)?.trim());
        }
        let directory = self.data_dir.find()?;
        let client = ConsoleClient::new(&directory)?;
        let StatusReply { satellite, .. } = client.get("/v1/status", &ConsoleFilter::default()).await?;
        let Some(url) = satellite.console_url else {
            let off = "the HTTP API is off; add a table [console] to the configuration and run `satellite reload`";
            let why = satellite.console_problem.unwrap_or_else(|| off.to_owned());
            return Err(CommandFailure::new(FAILED, why));
        };
        let file = self.token_file.clone().unwrap_or_else(|| directory.join(OWNER_TOKEN_FILE));
        ApiConnection::new(&url, read(&file)?.trim())
    }
}

/// Shows updates and handles keys until the user or a signal ends the program.
async fn show(
    mut terminal: ratatui::DefaultTerminal,
    connection: &ApiConnection,
    updates: mpsc::Sender<Update>,
    mut received: mpsc::Receiver<Update>,
) -> Result<(), CommandFailure> {
    let failed = |error: std::io::Error| CommandFailure::new(FAILED, format!("cannot use the terminal: {error}"));
    let (keys_sender, mut keys) = mpsc::channel(UPDATES_MAX);
    // Reads block, so they have a thread, which ends when the receiver is gone.
    std::thread::spawn(move || {
        while !keys_sender.is_closed() {
            match event::poll(KEY_PAUSE) {
                Ok(false) => {}
                Ok(true) => match event::read() {
                    // An error means that the program ends.
                    Ok(read) => drop(keys_sender.blocking_send(read)),
                    Err(_) => return,
                },
                Err(_) => return,
            }
        }
    });
    let mut signals = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()]
        .into_iter()
        .map(signal)
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    let mut redraw = tokio::time::interval(REDRAW);
    let mut screen = Screen::default();
    loop {
        terminal.draw(|frame| screen.draw(frame)).map_err(failed)?;
        let signalled = futures::future::select_all(signals.iter_mut().map(|signal| Box::pin(signal.recv())));
        let request = tokio::select! {
            _ = signalled => return Ok(()),
            Some(update) = received.recv() => {
                screen.apply(update);
                // One picture for all updates that have arrived.
                while let Ok(update) = received.try_recv() {
                    screen.apply(update);
                }
                ScreenRequest::None
            }
            key = keys.recv() => match key {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => screen.handle_key(key),
                Some(_) => ScreenRequest::None,
                // The terminal is gone.
                None => return Ok(()),
            },
            _ = redraw.tick() => screen.refresh_request(),
        };
        match request {
            ScreenRequest::None => {}
            ScreenRequest::Quit => return Ok(()),
            ScreenRequest::Restart(instance) => connection.restart(&instance, updates.clone()),
            ScreenRequest::Output(instance) => connection.fetch_output(&instance, updates.clone()),
            ScreenRequest::Tree => connection.fetch_tree(updates.clone()),
        }
    }
}
