//! Attempts to become another user, especially root.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Gid, Pid, Uid, setgid, setgroups, setresuid};

use crate::arguments::AttemptArguments;
use crate::outcome::{AttemptOutcome, AttemptSteps, in_child, name};
use crate::procfs;

/// Setuid programs of common distributions. Without arguments and input they print something, wait, or start a shell
/// that waits.
const SETUID_PROGRAMS: [&str; 8] = [
    "/usr/bin/su",
    "/usr/bin/mount",
    "/usr/bin/newgrp",
    "/usr/bin/passwd",
    "/usr/bin/chfn",
    "/usr/bin/gpasswd",
    "/usr/bin/sudo",
    "/usr/bin/pkexec",
];

/// Time for which a started program is observed. It has its privileges from its first instruction on, or never.
const LOOK: Duration = Duration::from_millis(200);

pub(crate) fn setuid(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let root = Uid::from_raw(0);
    Ok(in_child(|steps| {
        steps.done("setgroups(0)", setgroups(&[Gid::from_raw(0)]));
        steps.done("setgid(0)", setgid(Gid::from_raw(0)));
        steps.done("setresuid(0, 0, 0)", setresuid(root, root, root));
    })
    .into())
}

/// Runs a program with the setuid bit or a file capability and observes the privileges that it gains.
pub(crate) fn setuid_binary(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mut steps = AttemptSteps::default();
    let args = arguments.texts("args")?;
    if let Some(path) = arguments.optional_text("path")? {
        run(&mut steps, path, &args);
    } else {
        for path in SETUID_PROGRAMS.into_iter().filter(|path| Path::new(path).exists()) {
            run(&mut steps, path, &args);
        }
    }
    Ok(steps.into())
}

struct Privileges {
    ids: String,
    capabilities: String,
}

impl Privileges {
    fn of(pid: &str) -> Self {
        let status = |key| procfs::status(pid, key).unwrap_or_default();
        Self { ids: status("Uid"), capabilities: status("CapEff") }
    }

    /// Returns true if this process is root, or has a capability that `other` lacks.
    fn exceed(&self, other: &Self) -> bool {
        let set = |privileges: &Self| u64::from_str_radix(&privileges.capabilities, 16).unwrap_or_default();
        self.ids.split(' ').nth(1) == Some("0") || set(self) & !set(other) != 0
    }
}

fn run(steps: &mut AttemptSteps, path: &str, args: &[&str]) {
    let mut command = Command::new(path);
    command.args(args).env_clear().process_group(0).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return steps.record(path, false, format!("not started: {}", name(&error))),
    };
    let Ok(pid) = i32::try_from(child.id()).map(Pid::from_raw) else { return };
    let began = Instant::now();
    let own = Privileges::of("self");
    let mut has;
    loop {
        // Checked first: a process that has ended keeps its ids until it is reaped.
        let last = ended(pid) || began.elapsed() > LOOK;
        let now = Privileges::of(&pid.to_string());
        let escaped = now.exceed(&own);
        // `spawn` returns shortly before the new program has its privileges, which the kernel then sets one by one.
        // Read them again.
        has = if escaped { Privileges::of(&pid.to_string()) } else { now };
        if escaped || last {
            break;
        }
    }
    // The child is not reaped yet, so the group id is its own. Signalling a process that became root may fail.
    let _ = killpg(pid, Signal::SIGKILL);
    drop(child.stdin.take());
    let _ = child.wait();
    let bits = fs::metadata(path).map(|metadata| {
        use std::os::unix::fs::MetadataExt;
        format!("{:o} of {}", metadata.mode() & 0o7777, metadata.uid())
    });
    let bits = bits.unwrap_or_else(|error: io::Error| name(&error));
    steps.record(format!("{path} ({bits})"), has.exceed(&own), format!("Uid {}, CapEff {}", has.ids, has.capabilities));
}

fn ended(pid: Pid) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    !matches!(waitid(Id::Pid(pid), flags), Ok(WaitStatus::StillAlive))
}

pub(crate) fn chroot(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    Ok(in_child(|steps| steps.done("chroot(\"/\")", nix::unistd::chroot("/"))).into())
}
