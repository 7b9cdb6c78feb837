//! `satellite down`

use std::time::Duration;

use clap::Args;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{DONE, DataDir, Failed, say};
use crate::connect::process::Stat;
use crate::console::api::{Ending, Filter, StatusReply};
use crate::console::client::{Client, ClientError};
use crate::reaper;

/// Between two questions whether the satellite still answers, where its process cannot be watched.
const POLL: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(super) struct Down {
    #[command(flatten)]
    data_dir: DataDir,
}

impl Down {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        let client = self.data_dir.client()?;
        let Ending { pid } = client.post("/v1/down", &()).await?;
        // The reaper ends last.
        let last = Stat::read(pid).filter(|_| !reaper::is_orphan(pid)).map_or(pid, |stat| stat.parent);
        let process = i32::try_from(last).ok().and_then(Pid::from_raw);
        let watched = process.and_then(|process| pidfd_open(process, PidfdFlags::NONBLOCK).ok());
        match watched.and_then(|watched| AsyncFd::with_interest(watched, Interest::READABLE).ok()) {
            // A process descriptor is readable once the process has ended.
            Some(watched) => drop(watched.readable().await?),
            None => silence(&client).await?,
        }
        say("the satellite has ended");
        Ok(DONE)
    }
}

/// Waits until nobody answers on the control socket.
async fn silence(client: &Client) -> Result<(), Failed> {
    loop {
        match client.get::<StatusReply>("/v1/status", &Filter::default()).await {
            Err(ClientError::NotRunning { .. }) => return Ok(()),
            Err(ClientError::Refused(_) | ClientError::Lost(_)) | Ok(_) => tokio::time::sleep(POLL).await,
        }
    }
}
