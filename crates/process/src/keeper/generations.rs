//! Loop of the keeper: it watches one satellite after the other. Decisions are made in `rules`; this file carries them
//! out.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::Pid;
use rustix::fs::{FlockOperation, flock};

use super::children::KeeperChildren;
use super::inherited::{InheritedRuns, KeeperIdentity};
use super::link::milliseconds;
use super::messages::{
    DescriptorName, KeeperEvent, KeeperRequest, KeeperSocket, PIPED_SIGNALS, PreviousGeneration, SatelliteMessage,
};
use super::orphans::end_orphans;
use super::rules::{GenerationEnd, KeeperEffect, KeeperRules, ProcessExit, SatellitePhase};
use crate::process::{ForkedHelper, LeftoverCgroups};
use crate::program_pages::ProgramPages;
use crate::service_manager::{NotificationRelay, NotifyState};

/// Time within which a second signal of the same process belongs to the same request to end.
const REPEATED: Duration = Duration::from_millis(5);
/// Addition to a wait, so that its deadline has passed afterwards.
const ROUNDING: Duration = Duration::from_millis(2);
/// Number of notifications of the watchdog within its interval.
const NOTIFICATIONS: u32 = 4;
/// Signals that end a satellite which does not crash.
const END_SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT];

/// Signal that asks the satellite for something.
#[derive(Clone, Copy)]
struct Request {
    signal: Signal,
    sender: u32,
    at: Instant,
}

impl Request {
    /// Returns true if both signals are one request to end: `timeout` signals its child, and then its process group.
    fn repeats(&self, last: &Self) -> bool {
        self.signal != Signal::SIGHUP
            && (self.signal, self.sender) == (last.signal, last.sender)
            && self.at.duration_since(last.at) < REPEATED
    }
}

/// Watchdog of the service manager.
struct WatchdogTimer {
    interval: Duration,
    next: Instant,
}

/// State of the keeper over all generations.
pub(super) struct GenerationLoop {
    rules: KeeperRules,
    children: KeeperChildren,
    signals: SignalFd,
    relay: Option<NotificationRelay>,
    watchdog: Option<WatchdogTimer>,
    /// Descriptors for the next satellite.
    held: BTreeMap<DescriptorName, OwnedFd>,
    last_request: Option<Request>,
    /// Satellites that were killed and do not end.
    stuck: Vec<Pid>,
    // An error costs some memory and nothing else.
    pages: io::Result<ProgramPages>,
}

impl GenerationLoop {
    /// `watchdog` is the interval of the service manager.
    ///
    /// # Errors
    /// The description of this process cannot be read, or the system has no random numbers.
    pub(super) fn new(
        signals: SignalFd,
        relay: Option<NotificationRelay>,
        watchdog: Option<Duration>,
    ) -> io::Result<Self> {
        let watchdog = watchdog.map(|interval| WatchdogTimer { interval, next: Instant::now() });
        Ok(Self {
            rules: KeeperRules::new(),
            children: KeeperChildren::new()?,
            signals,
            relay,
            watchdog,
            held: BTreeMap::new(),
            last_request: None,
            stuck: Vec::new(),
            pages: ProgramPages::find(),
        })
    }

    /// Returns the identity of this keeper for the next satellite.
    pub(super) fn identity(&self) -> KeeperIdentity {
        self.children.identity()
    }

    /// Returns what a satellite that was just forked inherits, and closes everything else.
    pub(super) fn into_inherited(self) -> InheritedRuns {
        self.children.into_inherited()
    }

    /// Forks the spawn helper of the next satellite.
    pub(super) fn fork_helper(&mut self) -> io::Result<ForkedHelper> {
        self.children.fork_helper()
    }

    /// Opens the connection to the next satellite: the end of the keeper, and that of the satellite, which has received the
    /// first messages.
    pub(super) fn open_connection(&self) -> io::Result<(KeeperSocket, KeeperSocket)> {
        let (socket, below) = KeeperSocket::pair()?;
        let now = Instant::now();
        let previous = self.rules.previous().map(|previous| PreviousGeneration {
            reason: previous.end.reason(),
            uptime_ms: milliseconds(previous.uptime),
            down_ms: milliseconds(now.saturating_duration_since(previous.lost_at)),
        });
        socket.send(&KeeperEvent::Welcome { generation: self.rules.generation(), previous })?;
        for (name, descriptor) in &self.held {
            socket.send_with(&KeeperEvent::Descriptor { name: *name }, &[descriptor.as_fd()])?;
        }
        socket.send(&KeeperEvent::DescriptorsEnd)?;
        Ok((socket, below))
    }

    /// Watches a satellite until it ends. Ends all processes below the keeper and returns its exit code, or keeps the servers
    /// and returns `None` when another satellite is to start.
    pub(super) fn supervise(&mut self, satellite: Pid, socket: KeeperSocket) -> Option<ExitCode> {
        self.children.set_satellite(satellite);
        let exit = self.watch(satellite, socket);
        self.rules.satellite_ended(Instant::now(), exit);
        if exit.is_none() {
            self.stuck.push(satellite);
        }
        self.pause()
    }

    /// Handles a failed fork as `supervise` handles the end of a satellite.
    ///
    /// # Errors
    /// There was no satellite before.
    pub(super) fn handle_failed_fork(&mut self, error: io::Error) -> io::Result<Option<ExitCode>> {
        if self.rules.generation() == 1 {
            return Err(error);
        }
        self.rules.fork_failed(Instant::now(), error.raw_os_error().unwrap_or_default());
        Ok(self.pause())
    }

    /// Watches a satellite. Returns its end, or `None` if it does not end.
    fn watch(&mut self, satellite: Pid, socket: KeeperSocket) -> Option<ProcessExit> {
        // Dropped when the satellite has closed its end.
        let mut socket = Some(socket);
        loop {
            match self.rules.expire(Instant::now()) {
                // The process is not reaped yet, so its id is not reused. Its end is reported by SIGCHLD.
                Some(KeeperEffect::Kill) => drop(kill(satellite, Signal::SIGKILL)),
                Some(KeeperEffect::Abandon) => return None,
                // It follows a pause only.
                Some(KeeperEffect::Start) | None => {}
            }
            self.children.expire(Instant::now());
            if let Some(socket) = &socket {
                self.children.send(socket);
            }
            self.wait(socket.as_ref());
            socket = socket.filter(|socket| self.receive_requests(socket));
            if let Some(exit) = self.handle_signals(Some((satellite, socket.as_ref()))) {
                // The last messages may have arrived after the others were read.
                if let Some(socket) = socket {
                    self.receive_requests(&socket);
                }
                return Some(exit);
            }
        }
    }

    /// Waits until the next satellite starts. If there is none, ends all processes and returns the exit code.
    fn pause(&mut self) -> Option<ExitCode> {
        if !matches!(self.rules.phase(), SatellitePhase::Ended { .. }) {
            if let Some(relay) = &self.relay {
                relay.notify(&NotifyState::Status("the satellite has crashed and is started again"));
            }
            self.children.end_generation(&LeftoverCgroups::of_keeper(), &self.stuck);
        }
        loop {
            if let SatellitePhase::Ended { end, crashes } = self.rules.phase() {
                // No process serves the sockets any more.
                self.held.retain(|name, _| matches!(name, DescriptorName::Lock | DescriptorName::Directory));
                let ended = end_orphans(&LeftoverCgroups::of_keeper(), &self.stuck);
                self.children.clear();
                self.unlock();
                if let Some(why) = describe_end(end, crashes) {
                    let remaining = format!("the keeper ended {ended} remaining processes");
                    let _ = writeln!(io::stderr(), "satellite: {why}; {remaining}");
                }
                return Some(ExitCode::from(end.exit_code()));
            }
            if self.rules.expire(Instant::now()) == Some(KeeperEffect::Start) {
                return None;
            }
            self.children.expire(Instant::now());
            self.wait(None);
            self.handle_signals(None);
        }
    }

    /// Unlocks the data directory. A satellite that hangs in the kernel would otherwise keep it locked.
    fn unlock(&mut self) {
        for name in [DescriptorName::Lock, DescriptorName::Directory] {
            if let Some(locked) = self.held.remove(&name) {
                let _ = flock(&locked, FlockOperation::Unlock);
            }
        }
    }

    /// Waits for a message, a signal or the next deadline, and passes on messages to the service manager.
    fn wait(&mut self, socket: Option<&KeeperSocket>) {
        let now = Instant::now();
        self.notify_watchdog(now);
        let watchdog = self.watchdog.as_ref().map(|watchdog| watchdog.next);
        let deadlines = [self.rules.deadline(), self.children.deadline(), watchdog];
        let timeout = deadlines.into_iter().flatten().min().map_or(PollTimeout::NONE, |until| {
            PollTimeout::try_from(until.saturating_duration_since(now) + ROUNDING).unwrap_or(PollTimeout::MAX)
        });
        let relay = self.relay.as_ref().map(|relay| relay.descriptor().as_fd());
        let mut awaited: Vec<_> = [Some(self.signals.as_fd()), relay]
            .into_iter()
            .flatten()
            .map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN))
            .collect();
        let is_full = self.children.has_messages();
        let of_socket = if is_full { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN };
        awaited.extend(socket.map(|socket| PollFd::new(socket.as_fd(), of_socket)));
        let _ = self.pages.as_ref().map(ProgramPages::release);
        // An error means that the poll was interrupted; all descriptors are read anyway.
        let _ = poll(&mut awaited, timeout);
        if let Some(relay) = &self.relay {
            relay.relay();
        }
    }

    fn notify_watchdog(&mut self, now: Instant) {
        let Some(watchdog) = self.watchdog.as_mut().filter(|watchdog| watchdog.next <= now) else { return };
        watchdog.next = now + watchdog.interval / NOTIFICATIONS;
        let relay = self.relay.as_ref().filter(|_| self.rules.allows_watchdog(now, watchdog.interval));
        if let Some(relay) = relay {
            relay.notify(&NotifyState::Watchdog);
        }
    }

    /// Reads all messages of the satellite. Returns false if it has closed its end.
    fn receive_requests(&mut self, socket: &KeeperSocket) -> bool {
        loop {
            match socket.try_receive() {
                Ok(Some((SatelliteMessage::Run(request), descriptors))) => {
                    self.children.receive(&request, descriptors);
                }
                Ok(Some((SatelliteMessage::Lifecycle(request), descriptors))) => {
                    self.receive_request(&request, descriptors);
                }
                Ok(None) => return false,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                // A message that the keeper does not understand changes nothing.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Err(_) => return false,
            }
        }
    }

    fn receive_request(&mut self, request: &KeeperRequest, mut descriptors: Vec<OwnedFd>) {
        match request {
            KeeperRequest::KeepDescriptor { name } => {
                self.held.extend(descriptors.pop().map(|descriptor| (*name, descriptor)));
            }
            KeeperRequest::ForgetDescriptor { name } => drop(self.held.remove(name)),
            request => self.rules.receive(Instant::now(), request),
        }
    }

    /// Handles the signals that have arrived: passes them on to the satellite, if one runs. Returns its end if it is
    /// reported.
    fn handle_signals(&mut self, satellite: Option<(Pid, Option<&KeeperSocket>)>) -> Option<ProcessExit> {
        while let Ok(Some(about)) = self.signals.read_signal() {
            let signal = i32::try_from(about.ssi_signo).ok().and_then(|signal| Signal::try_from(signal).ok());
            let Some(signal) = signal else { continue };
            if END_SIGNALS.contains(&signal) {
                self.rules.request_end();
            }
            match (signal, satellite) {
                (Signal::SIGCHLD, _) => {
                    if let Some(exit) = self.children.collect() {
                        return Some(exit);
                    }
                }
                (signal, Some((_, socket))) if PIPED_SIGNALS.contains(&signal) => {
                    let request = Request { signal, sender: about.ssi_pid, at: Instant::now() };
                    if self.last_request.replace(request).is_none_or(|last| !request.repeats(&last))
                        && let Some(socket) = socket
                    {
                        // An error means that the satellite has just ended and is reaped next, or that it is stopped and
                        // hundreds of signals wait for it.
                        let _ = socket.send(&KeeperEvent::Signal { number: signal as i32 });
                    }
                }
                (signal, Some((satellite, _))) => drop(kill(satellite, signal)),
                // The next satellite reads its configuration anyway.
                (_, None) => {}
            }
        }
        None
    }
}

/// Returns the message about the last satellite; `None` if it has ended by itself.
fn describe_end(end: GenerationEnd, crashes: Option<usize>) -> Option<String> {
    let why = match end {
        GenerationEnd::Hung(timeout) => {
            format!("the actors of the satellite did not answer for {timeout:?}, so the keeper killed it")
        }
        GenerationEnd::NotReady(timeout) => {
            format!("the satellite was not ready within {timeout:?}, so the keeper killed it")
        }
        GenerationEnd::Done(_) | GenerationEnd::Exited(_) if crashes.is_none() => return None,
        GenerationEnd::Done(_) | GenerationEnd::Exited(_) => format!("the satellite {}", end.reason()),
        GenerationEnd::Signalled(_) | GenerationEnd::NotForked(_) => format!("the satellite was {}", end.reason()),
    };
    let spent = |crashes| format!("{why}; it has crashed {crashes} times within five minutes and is not started again");
    Some(crashes.map_or_else(|| why.clone(), spent))
}
