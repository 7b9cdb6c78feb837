//! Probe of the endpoint's port: who listens on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use nix::unistd::{Uid, User};
use reqwest::Url;

use super::finding::DoctorFinding;
use crate::config::{LISTEN, ListenSetting, Plan};

/// State of a listening socket in /proc/net/tcp.
const LISTENING: &str = "0A";

/// Returns the ports that clients use, or would use after a start.
pub(super) fn probed_ports(plan: Option<&Plan>, url: Option<&str>) -> BTreeSet<u16> {
    let configured = match plan {
        Some(plan) => plan.gateway.address().map(|address| address.port()),
        None => Some(LISTEN.port()),
    };
    let running = url.and_then(|url| Url::parse(url).ok()?.port());
    // Port 0 means any free port.
    configured.into_iter().chain(running).filter(|port| *port > 0).collect()
}

/// Returns true if the satellite takes no other port than the configured one.
pub(super) fn has_fixed_address(plan: &Plan) -> bool {
    matches!(plan.gateway.listen, ListenSetting::Address(_))
}

/// Reports the process that listens on each port. `satellite` is the process id of the running satellite.
pub(super) fn probe(ports: &BTreeSet<u16>, satellite: Option<u32>, is_address_fixed: bool) -> Vec<DoctorFinding> {
    let sockets: Vec<(u16, u64, u32)> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().filter_map(listening_socket).collect::<Vec<_>>())
        .filter(|(port, ..)| ports.contains(port))
        .collect();
    let owners = if sockets.is_empty() { BTreeMap::new() } else { socket_owners() };
    let describe = |port: &u16| {
        let subject = format!("port {port}");
        let mut users = BTreeSet::new();
        for (_, inode, uid) in sockets.iter().filter(|(used, ..)| used == port) {
            match owners.get(inode) {
                Some(pids) if satellite.is_some_and(|pid| pids.contains(&pid)) => {
                    return DoctorFinding::ok("machine", subject, "used by the running satellite");
                }
                Some(pids) => users.extend(pids.iter().map(|pid| format!("`{}` (pid {pid})", program(*pid)))),
                None => {
                    let user = User::from_uid(Uid::from_raw(*uid)).ok().flatten();
                    users.insert(format!("a process of {}", user.map_or_else(|| uid.to_string(), |user| user.name)));
                }
            }
        }
        if users.is_empty() {
            return DoctorFinding::ok("machine", subject, "free");
        }
        let message = format!("used by {}", users.into_iter().collect::<Vec<_>>().join(", "));
        let next = "stop that process, or set another address with [gateway] listen or --listen";
        if is_address_fixed {
            DoctorFinding::error("machine", subject, format!("{message}; the satellite cannot start")).next(next)
        } else {
            DoctorFinding::warning("machine", subject, format!("{message}; the satellite takes another port"))
                .next(next)
        }
    };
    ports.iter().map(describe).collect()
}

/// Parses a line of /proc/net/tcp: returns port, inode and user of a listening socket.
fn listening_socket(line: &str) -> Option<(u16, u64, u32)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (local, state, uid, inode) = (fields.get(1)?, fields.get(3)?, fields.get(7)?, fields.get(9)?);
    let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
    (*state == LISTENING).then_some((port, inode.parse().ok()?, uid.parse().ok()?))
}

/// Returns the processes of each socket, as far as this user may see them.
fn socket_owners() -> BTreeMap<u64, BTreeSet<u32>> {
    let mut owners = BTreeMap::<u64, BTreeSet<u32>>::new();
    let Ok(processes) = fs::read_dir("/proc") else { return owners };
    for pid in processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for target in descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()) {
            let inode = target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            if let Some(inode) = inode {
                owners.entry(inode).or_default().insert(pid);
            }
        }
    }
    owners
}

fn program(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_are_parsed() {
        let line =
            "   0: 0100007F:1C84 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 123456 1 x";
        assert_eq!(listening_socket(line), Some((7300, 123_456, 1000)));
        assert_eq!(listening_socket(&line.replace(" 0A ", " 01 ")), None);
        assert_eq!(
            listening_socket("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt"),
            None
        );
    }
}
