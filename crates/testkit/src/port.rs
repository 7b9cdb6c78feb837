//! Free ports for real servers.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a port that stays free while a server is away. It is outside the kernel's range of client ports: another
/// process could take such a port, and a client that connects to it could even connect to itself.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 9_000).unwrap();
    let candidates = (0..20_000).map(|_| 10_240 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000);
    let is_free = |port: &u16| TcpListener::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    candidates.into_iter().find(is_free).unwrap()
}
