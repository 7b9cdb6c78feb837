//! The one thread that finds out when a process group is empty. The kernel does not tell, so it reads `/proc`, once for
//! all who wait, and reaps the leaders of the groups that it finds empty.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use tokio::sync::oneshot;

use super::group::Group;

/// Between two scans at least.
const PAUSE: Duration = Duration::from_millis(20);

/// Between two scans at least this many times what a scan took, so that on a machine with very many processes the
/// thread is mostly idle all the same.
const IDLE_SHARE: u32 = 4;

/// A handle to the thread, which ends with its last handle and the last group it was given.
#[derive(Clone)]
pub(super) struct Scanner(mpsc::Sender<Waiting>);

struct Waiting {
    group: Arc<Group>,
    /// Who wants to know; nobody, where a group is only to be reaped.
    tell: Option<oneshot::Sender<()>>,
}

impl Waiting {
    fn is_given_up(&self) -> bool {
        self.tell.as_ref().is_some_and(oneshot::Sender::is_closed)
    }
}

impl Scanner {
    /// Fails also where `/proc` cannot be read: a group's end could then never be known.
    pub(super) fn start() -> io::Result<Self> {
        live_groups().map_err(|error| io::Error::new(error.kind(), format!("cannot read /proc: {error}")))?;
        let (sender, orders) = mpsc::channel();
        thread::Builder::new().name("satellite-scan".into()).spawn(move || run(&orders))?;
        Ok(Self(sender))
    }

    /// Resolves when the leader has ended and is reaped, and no member of its group is left.
    pub(super) async fn gone(&self, group: &Arc<Group>) {
        if group.is_reaped() {
            return;
        }
        let (tell, told) = oneshot::channel();
        let _ = self.0.send(Waiting { group: Arc::clone(group), tell: Some(tell) });
        // Without a thread there is no telling, so the group is made empty.
        if told.await.is_err() {
            group.kill();
            group.reap();
        }
    }

    /// Has a killed group reaped once it is empty.
    pub(super) fn bury(&self, group: Arc<Group>) {
        let _ = self.0.send(Waiting { group, tell: None });
    }
}

fn run(orders: &mpsc::Receiver<Waiting>) {
    let mut waiting = Vec::new();
    loop {
        if waiting.is_empty() {
            let Ok(first) = orders.recv() else { return };
            waiting.push(first);
        }
        waiting.extend(orders.try_iter());
        waiting.retain(|one| !one.is_given_up());
        let began = Instant::now();
        settle(&mut waiting);
        thread::sleep(PAUSE.max(began.elapsed() * IDLE_SHARE));
    }
}

/// Reaps the groups that are empty and tells who waits for them.
fn settle(waiting: &mut Vec<Waiting>) {
    // Only those whose leader had ended before the scan: after that no member can appear but from another member.
    let (ended, running): (Vec<_>, Vec<_>) = waiting.drain(..).partition(|one| one.group.end().is_some());
    *waiting = running;
    if ended.is_empty() {
        return;
    }
    // A scan that fails for want of descriptors or memory says nothing; the next one may.
    let Ok(live) = live_groups() else { return waiting.extend(ended) };
    for one in ended {
        if live.contains(&one.group.pid()) {
            waiting.push(one);
        } else {
            one.group.reap();
            if let Some(tell) = one.tell {
                let _ = tell.send(());
            }
        }
    }
}

/// The numbers of all process groups with a member that is more than a zombie.
fn live_groups() -> io::Result<HashSet<u32>> {
    let mut groups = HashSet::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        match read_stat(&entry.path()) {
            Ok(stat) => groups.extend(live_group(&stat)),
            Err(error) if is_shortage(&error) => return Err(error),
            // It has ended in the meantime, or it is hidden from us and so none of ours.
            Err(_) => {}
        }
    }
    Ok(groups)
}

fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|raw| shortages.contains(&Errno::from_raw(raw)))
}

fn read_stat(process: &std::path::Path) -> io::Result<Vec<u8>> {
    let mut stat = Vec::with_capacity(512);
    File::open(process.join("stat"))?.read_to_end(&mut stat)?;
    Ok(stat)
}

/// The group of a process that is still alive, from its `/proc/PID/stat`: see proc(5).
fn live_group(stat: &[u8]) -> Option<u32> {
    // The name is in parentheses and may contain anything, parentheses and spaces too.
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = str::from_utf8(&stat[after_name..]).ok()?.split_ascii_whitespace().collect();
    let (state, group, threads) = (*fields.first()?, fields.get(2)?, fields.get(17)?);
    // A process whose first thread has ended is shown as a zombie while its other threads go on.
    let dead = matches!(state, "Z" | "X") && *threads == "1";
    if dead { None } else { group.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(name: &str, state: &str, threads: u32) -> Vec<u8> {
        format!("7 ({name}) {state} 1 42 42 0 -1 0 1 2 3 4 5 6 7 8 20 0 {threads} 0 99 0 0").into_bytes()
    }

    #[test]
    fn a_process_counts_for_its_group_until_it_is_a_zombie() {
        assert_eq!(live_group(&stat("sh", "S", 1)), Some(42));
        assert_eq!(live_group(&stat("sh", "T", 1)), Some(42));
        assert_eq!(live_group(&stat("sh", "Z", 1)), None);
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_is_alive() {
        assert_eq!(live_group(&stat("server", "Z", 2)), Some(42));
    }

    #[test]
    fn a_name_cannot_pose_as_the_fields_after_it() {
        assert_eq!(live_group(&stat("a) Z 1 7 (", "S", 1)), Some(42));
        assert_eq!(live_group(b"7 (torn"), None);
    }

    #[test]
    fn our_own_group_is_alive() {
        let own = nix::unistd::getpgrp().as_raw().unsigned_abs();
        assert!(live_groups().is_ok_and(|groups| groups.contains(&own)));
    }
}
