//! Free ports for real servers.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a port that stays free while a server is away. It is outside the kernel's range of client ports: another
/// process could take such a port, and a client that connects to it could even connect to itself.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // A port of a server that is away looks free to other test processes, so each process has ports of its own.
    let first = std::process::id() % 1_250 * 16;
    let candidates = (0..20_000).map(|_| (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000);
    let mut candidates = candidates.map(|offset| 10_240 + u16::try_from(offset).unwrap());
    let is_free = |port: &u16| TcpListener::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    candidates.find(is_free).unwrap()
}
