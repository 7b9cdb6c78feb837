//! Service manager (systemd) that started this program: notifications, watchdog interval and passed sockets.
//!
//! The manager accepts notifications from the main process only, which is the keeper. The satellite sends its messages
//! to the keeper, which passes them on. So the servers, which have the same user and control group, cannot report a
//! state of the satellite (`NotifyAccess=main`).

use std::ffi::OsString;
use std::fmt::Write;
use std::io;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

pub use sd_notify::NotifyState;

const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";
/// Maximum number of bytes of a message.
const MESSAGE_MAX: usize = 4096;

/// Service manager as the satellite sees it. Without a service manager, all fields are `None`.
#[derive(Debug, Default)]
pub struct ServiceManager {
    keeper: Option<UnixDatagram>,
    /// Interval within which the manager expects [`NotifyState::Watchdog`].
    pub watchdog: Option<Duration>,
    /// Listening socket that the manager has passed.
    pub listener: Option<TcpListener>,
}

/// Passes notifications from the satellite to the service manager, in the keeper.
#[derive(Debug)]
pub(crate) struct NotificationRelay {
    satellite: UnixDatagram,
    socket: UnixDatagram,
    manager: SocketAddr,
}

impl ServiceManager {
    /// Returns true if the manager waits for notifications.
    pub fn is_notified(&self) -> bool {
        self.keeper.is_some()
    }

    /// Reports states to the manager. A message that cannot be sent at once is dropped: the keeper has ended, or the
    /// manager does not read.
    pub fn notify(&self, states: &[NotifyState<'_>]) {
        let Some(keeper) = &self.keeper else { return };
        let mut message = String::new();
        for state in states {
            // Writing to a string does not fail.
            let _ = writeln!(message, "{state}");
        }
        if let Err(error) = keeper.send(message.as_bytes()) {
            tracing::debug!(%error, "cannot notify the service manager");
        }
    }

    /// Reports that a reload begins. [`NotifyState::Ready`] reports its end.
    pub fn notify_reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.notify(&[NotifyState::Reloading, now]),
            Err(_) => self.notify(&[NotifyState::Reloading]),
        }
    }
}

impl NotificationRelay {
    pub(crate) fn descriptor(&self) -> &UnixDatagram {
        &self.satellite
    }

    /// Reports a state of the keeper's own to the manager. Never blocks.
    pub(crate) fn notify(&self, state: &NotifyState<'_>) {
        // A manager that does not read loses the message.
        let _ = self.socket.send_to_addr(format!("{state}\n").as_bytes(), &self.manager);
    }

    /// Passes on the messages that have arrived. Never blocks.
    pub(crate) fn relay(&self) {
        let mut message = [0; MESSAGE_MAX];
        while let Ok(length @ 1..) = self.satellite.recv(&mut message) {
            // A manager that does not read loses messages; the watchdog and the status are sent again.
            let _ = self.socket.send_to_addr(&message[..length], &self.manager);
        }
    }
}

/// Reads what the service manager has passed in the environment, and removes it there: servers must not notify the
/// manager. Must be called while the process has one thread.
///
/// # Errors
/// A passed socket cannot be used.
pub(crate) fn from_environment() -> io::Result<(ServiceManager, Option<NotificationRelay>)> {
    let path = std::env::var_os(NOTIFY_SOCKET).filter(|path| !path.is_empty());
    #[expect(unsafe_code, reason = "there is no safe way to change the environment")]
    // SAFETY: this process has one thread.
    let (sockets, watchdog) = unsafe {
        std::env::remove_var(NOTIFY_SOCKET);
        std::env::remove_var(LISTEN_FDNAMES);
        (sd_notify::listen_fds_and_unset_env(), sd_notify::watchdog_enabled_and_unset_env())
    };
    let listener = sockets.and_then(|sockets| passed_listener(&sockets.collect::<Vec<_>>()));
    let listener = listener.map_err(|error| {
        io::Error::other(format!("cannot use the sockets that the service manager passed: {error}"))
    })?;
    let (keeper, relay) = match path.map(open_relay).transpose() {
        Ok(opened) => opened.unzip(),
        Err(error) => {
            // No log is open yet.
            let _ = io::Write::write_fmt(
                &mut io::stderr(),
                format_args!("satellite: cannot notify the service manager: {error}\n"),
            );
            (None, None)
        }
    };
    Ok((ServiceManager { keeper, watchdog, listener }, relay))
}

fn passed_listener(sockets: &[RawFd]) -> io::Result<Option<TcpListener>> {
    let [socket] = sockets else {
        let count = sockets.len();
        return if count == 0 {
            Ok(None)
        } else {
            Err(io::Error::other(format!("there are {count}, but only one can be used")))
        };
    };
    #[expect(unsafe_code, reason = "a passed descriptor has no owner")]
    // SAFETY: the service manager has opened this descriptor for this program, and nothing else uses it yet.
    let socket = unsafe { OwnedFd::from_raw_fd(*socket) };
    if !rustix::net::sockopt::socket_acceptconn(&socket)? {
        return Err(io::Error::other(
            "the socket does not listen; set ListenStream= in the socket unit, and Accept=no",
        ));
    }
    let listener = TcpListener::from(socket);
    listener.local_addr().map_err(|_| {
        io::Error::other("the socket is not a TCP socket; set ListenStream= to an IP address and a port")
    })?;
    listener.set_nonblocking(true)?;
    Ok(Some(listener))
}

fn open_relay(path: OsString) -> io::Result<(UnixDatagram, NotificationRelay)> {
    let manager = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(path)?,
    };
    let (keeper, satellite) = UnixDatagram::pair()?;
    let socket = UnixDatagram::unbound()?;
    for socket in [&keeper, &satellite, &socket] {
        socket.set_nonblocking(true)?;
    }
    Ok((keeper, NotificationRelay { satellite, socket, manager }))
}
