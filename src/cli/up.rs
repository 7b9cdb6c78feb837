//! `satellite up`: starts the user's satellite in the background.

use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, sleep};

use super::background::BackgroundStart;
use super::service::UserService;
use super::{CommandFailure, DONE, DataDirArg, FAILED, print_text};
use crate::console::api::{ConsoleFilter, StatusReply};
use crate::console::client::{ClientError, ConsoleClient};

const START_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(super) struct UpCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
}

enum StartedSatellite {
    Process(BackgroundStart),
    Service(UserService),
}

impl UpCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        if let Some(reply) = self.status().await? {
            print_text(&self.describe("the satellite is running already", &reply));
            return Ok(DONE);
        }
        let service = UserService::find().filter(|_| self.data_dir.is_user_default());
        let (mut started, how) = if let Some(service) = service.filter(UserService::is_usable) {
            service.start()?;
            (StartedSatellite::Service(service), "the satellite is running as a systemd service of this user")
        } else {
            let started = BackgroundStart::begin(&self.data_dir)?;
            (StartedSatellite::Process(started), "the satellite is running in the background")
        };
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(reply) = self.status().await?
                && !reply.satellite.endpoint_opening
            {
                print_text(&self.describe(how, &reply));
                return Ok(DONE);
            }
            match &mut started {
                StartedSatellite::Process(started) => started.check()?,
                StartedSatellite::Service(service) => service.check()?,
            }
            if Instant::now() >= deadline {
                let seconds = START_TIMEOUT.as_secs();
                let next = match &started {
                    StartedSatellite::Process(started) => format!("see {}", started.log_path().display()),
                    StartedSatellite::Service(_) => "see `journalctl --user -u mcp-satellite`".to_owned(),
                };
                return Err(CommandFailure::new(
                    FAILED,
                    format!("the satellite is not ready after {seconds} s; {next}"),
                ));
            }
            sleep(POLL).await;
        }
    }

    /// Returns the status of the satellite on this data directory; `None` if none is running.
    async fn status(&self) -> Result<Option<StatusReply>, CommandFailure> {
        let client = ConsoleClient::new(&self.data_dir.location().path)?;
        match client.get::<StatusReply>("/v1/status", &ConsoleFilter::default()).await {
            Ok(reply) => Ok(Some(reply)),
            // The satellite may be ending.
            Err(ClientError::NotRunning { .. } | ClientError::ConnectionLost(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn describe(&self, what: &str, reply: &StatusReply) -> String {
        let StatusReply { satellite, instances } = reply;
        let flag = self.data_dir.flag();
        let endpoint = satellite
            .endpoint
            .as_ref()
            .map_or_else(|| "no MCP endpoint; add [gateway] to the configuration".to_owned(), ToString::to_string);
        format!(
            "{what}: {} servers, data in {}\n  {endpoint}\n  satellite status --watch{flag}\n  satellite down{flag}",
            instances.len(),
            satellite.data_dir
        )
    }
}
