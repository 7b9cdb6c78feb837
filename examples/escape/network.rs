//! Attempts to reach the network and sockets without files.

use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use crate::arguments::AttemptArguments;
use crate::outcome::{AttemptOutcome, AttemptSteps};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn connect(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let address = arguments.text("address")?;
    let mut steps = AttemptSteps::default();
    match address.to_socket_addrs() {
        Ok(addresses) => {
            for address in addresses {
                steps.done(format!("connect {address}"), TcpStream::connect_timeout(&address, CONNECT_TIMEOUT));
            }
        }
        Err(error) => steps.done(format!("resolve {address}"), Err::<(), _>(error)),
    }
    Ok(steps.into())
}

pub(crate) fn listen(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let address = arguments.text("address")?;
    let mut steps = AttemptSteps::default();
    steps.done(format!("listen {address}"), TcpListener::bind(address));
    Ok(steps.into())
}

/// Connects to a Unix socket. One with a file is hidden with the file; an abstract one (`@name`) only by a network
/// namespace.
pub(crate) fn unix_socket(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let path = arguments.text("path")?;
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(path),
    };
    let mut steps = AttemptSteps::default();
    steps.done(format!("connect {path}"), address.and_then(|address| UnixStream::connect_addr(&address)));
    Ok(steps.into())
}

/// Opens a socket to the hypervisor and other virtual machines.
pub(crate) fn vsock(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mut steps = AttemptSteps::default();
    for (name, kind) in [("stream", SockType::Stream), ("datagram", SockType::Datagram)] {
        steps.done(name, socket(AddressFamily::Vsock, kind, SockFlag::SOCK_CLOEXEC, None));
    }
    Ok(steps.into())
}

pub(crate) fn raw_socket(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let open = |family, protocol| socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol);
    let mut steps = AttemptSteps::default();
    steps.done("raw IP", open(AddressFamily::Inet, SockProtocol::Icmp));
    steps.done("raw IPv6", open(AddressFamily::Inet6, SockProtocol::IcmpV6));
    steps.done("packets", open(AddressFamily::Packet, SockProtocol::EthAll));
    Ok(steps.into())
}
