//! Messages between the keeper and the satellite: JSON in datagrams of a Unix socket, with the descriptors that belong to
//! the message.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::signal::Signal;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Signals that the keeper passes on as messages.
pub(super) const PIPED_SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
/// Maximum number of bytes of a message.
const MESSAGE_MAX: usize = 16 * 1024;
/// Maximum number of descriptors of a message.
const DESCRIPTORS_MAX: usize = 8;

/// Message of the satellite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum KeeperRequest {
    /// Settings of the satellite: whether another one follows it after a crash, and the time within which `Alive` must
    /// follow `Ready` and the last `Alive`; absent: no limit.
    Configure { keep_servers: bool, hang_timeout_ms: Option<u64> },
    /// The actors run, and the endpoint is open.
    Ready,
    /// Root and all supervisors have answered.
    Alive,
    /// The satellite ends its servers. The actors end, so nothing must answer any more.
    Stopping,
    /// The satellite is finished with this exit code, and its process ends.
    Done { code: u8 },
    /// The message has one descriptor, which the keeper holds for the next satellite instead of an earlier one of this
    /// name.
    KeepDescriptor { name: DescriptorName },
    /// The keeper closes the descriptor of this name.
    ForgetDescriptor { name: DescriptorName },
}

/// Names of descriptors that the keeper holds for the next satellite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DescriptorName {
    /// The locked file `lock` of the data directory.
    Lock,
    /// The data directory, which is locked as well.
    Directory,
    /// Listening socket of the MCP endpoint.
    Endpoint,
    /// Listening socket of the console.
    Console,
    /// Listening socket of the metrics.
    Metrics,
    /// Listening control socket.
    Control,
}

/// Message of the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum KeeperEvent {
    /// First message to a satellite, with its number below this keeper. `previous`: the satellite that crashed before it.
    Welcome { generation: u32, previous: Option<PreviousGeneration> },
    /// The message has the descriptor of this name.
    Descriptor { name: DescriptorName },
    /// All descriptors that the keeper holds have been sent.
    DescriptorsEnd,
    /// The keeper has received a signal that is for the satellite.
    Signal { number: i32 },
}

/// Satellite that has crashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PreviousGeneration {
    /// Reason of its end, such as `killed by SIGKILL`.
    pub(super) reason: String,
    /// Time for which it was ready.
    pub(super) uptime_ms: u64,
    /// Time since it was last known to work.
    pub(super) down_ms: u64,
}

/// Request of the satellite about the leaders of runs, which are children of the keeper, and about the spawn helper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RunRequest {
    /// The leader of a run is about to be forked. Answered with `Held` or `NotHeld`. The message has three descriptors: the
    /// write end of stdin and the read ends of stdout and stderr.
    Hold { run: u64 },
    /// The leader has executed its program. `start_time` is in clock ticks since boot.
    Started { run: u64, pid: u32, start_time: u64 },
    /// The message has one descriptor: a sealed file that describes the session of the run to the next satellite, instead
    /// of the last one. The keeper does not read it.
    Describe { run: u64 },
    /// The satellite has closed stdin of the server. The keeper does so as well.
    CloseStdin { run: u64 },
    /// The leader has ended and its process tree is empty.
    Reap { run: u64 },
    /// The start has failed, or the satellite is not interested in the leader any more.
    Discard { run: u64 },
    /// The spawn helper was lost. Answered with `Helper` or `NoHelper`.
    NewHelper,
}

/// Message of the keeper about the leaders of runs and the spawn helper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RunEvent {
    /// The leader of the run may be forked: it will not be reaped before the satellite requests it.
    Held {
        run: u64,
    },
    NotHeld {
        run: u64,
        errno: i32,
    },
    /// The leader has ended. Neither code nor signal: its end is unknown.
    Ended {
        run: u64,
        code: Option<i32>,
        signal: Option<i32>,
    },
    /// A new spawn helper. The descriptor is that of its stream.
    Helper {
        pid: u32,
    },
    NoHelper {
        errno: i32,
    },
    /// Number of adopted processes that the keeper has reaped since its start.
    Orphans {
        reaped: u64,
    },
}

/// Any message of the satellite.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum SatelliteMessage {
    Lifecycle(KeeperRequest),
    Run(RunRequest),
}

/// Any message of the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum KeeperMessage {
    Lifecycle(KeeperEvent),
    Run(RunEvent),
}

/// One end of the connection between keeper and satellite. It keeps the boundaries of messages, and its other end is
/// closed when that process has ended.
#[derive(Debug)]
pub(super) struct KeeperSocket(OwnedFd);

impl KeeperSocket {
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(one), Self(other)))
    }

    /// Sends a message without waiting.
    ///
    /// # Errors
    /// The other process has ended, or too many messages wait for it.
    pub(super) fn send(&self, message: &impl Serialize) -> io::Result<()> {
        self.send_with(message, &[])
    }

    /// Sends a message with at most eight descriptors, without waiting. The receiver gets duplicates of them.
    ///
    /// # Errors
    /// The other process has ended, or too many messages wait for it.
    pub(super) fn send_with(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.write(message, descriptors, SendFlags::DONTWAIT)
    }

    /// Sends a message with at most eight descriptors. Waits while too many messages wait for the other process.
    ///
    /// # Errors
    /// The other process has ended, or too many descriptors are on their way.
    pub(super) fn send_patiently(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.write(message, descriptors, SendFlags::empty())
    }

    fn write(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut passed = SendAncillaryBuffer::new(&mut space);
        // The buffer may have room for one more, depending on its alignment.
        let is_too_long = descriptors.len() > DESCRIPTORS_MAX;
        if !descriptors.is_empty() && (is_too_long || !passed.push(SendAncillaryMessage::ScmRights(descriptors))) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message has too many descriptors"));
        }
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&text)], &mut passed, flags | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return Ok(sent.map(drop)?),
            }
        }
    }

    /// Waits for a message. Returns `None` after the other end was closed. If not all descriptors of the message fit into the
    /// limit of this process, the message has none.
    ///
    /// # Errors
    /// The message is not valid (`InvalidData`).
    pub(super) fn receive<M: DeserializeOwned>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        self.read(RecvFlags::empty())
    }

    /// Returns a message that has arrived. Never waits.
    ///
    /// # Errors
    /// As [`receive`](Self::receive), or there is no message (`WouldBlock`).
    pub(super) fn try_receive<M: DeserializeOwned>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        self.read(RecvFlags::DONTWAIT)
    }

    fn read<M: DeserializeOwned>(&self, flags: RecvFlags) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let mut text = vec![0; MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut passed = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut text)], &mut passed, flags | RecvFlags::CMSG_CLOEXEC) {
                // A reset is reported once: the other process has ended with unread messages. Its own ones follow.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                read => break read?,
            }
        };
        // Received before any error returns, so that an invalid message leaves no descriptor open.
        let mut descriptors: Vec<OwnedFd> = passed
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        if received.bytes == 0 {
            return Ok(None);
        }
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        if received.flags.contains(ReturnFlags::CTRUNC) {
            descriptors.clear();
        }
        serde_json::from_slice(&text[..received.bytes]).map(|message| Some((message, descriptors))).map_err(invalid)
    }
}

impl AsFd for KeeperSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn messages_keep_their_boundaries_and_the_end_is_reported() {
        let (keeper, satellite) = KeeperSocket::pair().unwrap();
        let nothing = keeper.try_receive::<KeeperRequest>().unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        let sent = [
            KeeperRequest::Configure { keep_servers: true, hang_timeout_ms: Some(60_000) },
            KeeperRequest::Alive,
            KeeperRequest::Done { code: 3 },
        ];
        for message in &sent {
            satellite.send(message).unwrap();
        }
        // A message that the satellite does not read any more.
        keeper.send(&KeeperEvent::Signal { number: 15 }).unwrap();
        drop(satellite);
        // What a process has sent arrives after its end.
        for message in sent {
            assert_eq!(keeper.try_receive::<KeeperRequest>().unwrap().unwrap().0, message);
        }
        assert!(keeper.try_receive::<KeeperRequest>().unwrap().is_none());
        assert!(keeper.send(&KeeperEvent::Signal { number: 15 }).is_err());
    }

    #[test]
    fn an_invalid_message_is_an_error_and_the_next_one_is_read() {
        let (keeper, satellite) = KeeperSocket::pair().unwrap();
        satellite.send(&serde_json::json!({"from_a_later_version": {}})).unwrap();
        satellite.send(&"x".repeat(MESSAGE_MAX)).unwrap();
        satellite.send(&KeeperRequest::Alive).unwrap();
        for _ in 0..2 {
            let invalid = keeper.receive::<KeeperRequest>().unwrap_err();
            assert_eq!(invalid.kind(), io::ErrorKind::InvalidData);
        }
        assert_eq!(keeper.receive::<KeeperRequest>().unwrap().unwrap().0, KeeperRequest::Alive);
    }

    #[test]
    fn a_process_that_does_not_read_does_not_block_the_other_one() {
        let (keeper, _satellite) = KeeperSocket::pair().unwrap();
        let full = (0..100_000).find_map(|_| keeper.send(&KeeperEvent::Signal { number: 1 }).err());
        assert_eq!(full.unwrap().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn both_kinds_of_messages_share_a_socket() {
        let (keeper, satellite) = KeeperSocket::pair().unwrap();
        satellite.send(&KeeperRequest::Alive).unwrap();
        satellite.send_patiently(&RunRequest::NewHelper, &[]).unwrap();
        let started = RunRequest::Started { run: 3, pid: 70, start_time: 100 };
        satellite.send_patiently(&started, &[]).unwrap();
        let receive = || keeper.receive::<SatelliteMessage>().unwrap().unwrap().0;
        assert_eq!(receive(), SatelliteMessage::Lifecycle(KeeperRequest::Alive));
        assert_eq!(receive(), SatelliteMessage::Run(RunRequest::NewHelper));
        assert_eq!(receive(), SatelliteMessage::Run(RunRequest::Started { run: 3, pid: 70, start_time: 100 }));
        keeper.send(&KeeperEvent::Signal { number: 15 }).unwrap();
        let ended = RunEvent::Ended { run: 3, code: None, signal: Some(9) };
        keeper.send(&ended).unwrap();
        let receive = || satellite.receive::<KeeperMessage>().unwrap().unwrap().0;
        assert_eq!(receive(), KeeperMessage::Lifecycle(KeeperEvent::Signal { number: 15 }));
        assert_eq!(receive(), KeeperMessage::Run(ended));
    }

    #[test]
    fn descriptors_arrive_with_their_message() {
        let (keeper, satellite) = KeeperSocket::pair().unwrap();
        let (read, mut write) = io::pipe().unwrap();
        satellite.send_with(&KeeperRequest::Alive, &[read.as_fd()]).unwrap();
        satellite.send(&KeeperRequest::Stopping).unwrap();
        drop((read, satellite));
        write.write_all(b"x").unwrap();
        let (message, mut descriptors) = keeper.receive::<KeeperRequest>().unwrap().unwrap();
        assert_eq!((message, descriptors.len()), (KeeperRequest::Alive, 1));
        drop(write);
        let mut text = String::new();
        io::PipeReader::from(descriptors.remove(0)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        let (message, descriptors) = keeper.receive::<KeeperRequest>().unwrap().unwrap();
        assert_eq!((message, descriptors.len()), (KeeperRequest::Stopping, 0));
    }

    #[test]
    fn too_many_descriptors_are_refused() {
        let (keeper, _satellite) = KeeperSocket::pair().unwrap();
        let many = [keeper.as_fd(); DESCRIPTORS_MAX + 1];
        let refused = keeper.send_with(&KeeperRequest::Alive, &many).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
}
