//! `satellite down`

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use clap::Args;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{CommandFailure, DONE, DataDirArg, print_text};
use crate::connect::process::ProcessStat;
use crate::console::api::{ConsoleFilter, ShutdownReply, StatusReply};
use crate::console::client::{ClientError, ConsoleClient};
use mcp_satellite_process::keeper;

const POLL: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(super) struct DownCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl DownCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let client = self.data_dir.client()?;
        let ShutdownReply { pid } = client.post("/v1/down", &()).await?;
        // The keeper ends after the satellite.
        let last = ProcessStat::read(pid).filter(|_| !keeper::is_orphan(pid)).map_or(pid, |stat| stat.parent);
        let process = i32::try_from(last).ok().and_then(Pid::from_raw);
        match process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok()) {
            Some(process) => {
                tokio::task::spawn_blocking(move || wait_for_end(&process)).await.map_err(io::Error::other)??;
            }
            None => wait_unreachable(&client).await?,
        }
        print_text("the satellite has ended");
        Ok(DONE)
    }
}

/// Blocks until the process has ended, which makes its descriptor readable.
fn wait_for_end(process: &OwnedFd) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(()),
        }
    }
}

async fn wait_unreachable(client: &ConsoleClient) -> Result<(), CommandFailure> {
    loop {
        match client.get::<StatusReply>("/v1/status", &ConsoleFilter::default()).await {
            Err(ClientError::NotRunning { .. }) => return Ok(()),
            Err(error @ ClientError::Unsafe(_)) => return Err(error.into()),
            Err(ClientError::Refused(_) | ClientError::ConnectionLost(_)) | Ok(_) => tokio::time::sleep(POLL).await,
        }
    }
}
