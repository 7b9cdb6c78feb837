//! To become somebody else, root above all.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Gid, Pid, Uid, setgid, setgroups, setresuid};

use crate::arguments::Arguments;
use crate::outcome::{Outcome, Steps, in_child, name};
use crate::procfs;

/// Those that a distribution has. Without arguments and input they print something, wait, or start a shell that waits.
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

/// How long a started program is looked at. It has its privileges from its first instruction on, or never.
const LOOK: Duration = Duration::from_millis(200);

pub(crate) fn setuid(_: &Arguments) -> Result<Outcome, String> {
    let root = Uid::from_raw(0);
    Ok(in_child(|steps| {
        steps.done("setgroups(0)", setgroups(&[Gid::from_raw(0)]));
        steps.done("setgid(0)", setgid(Gid::from_raw(0)));
        steps.done("setresuid(0, 0, 0)", setresuid(root, root, root));
    })
    .into())
}

/// Runs a program that has the setuid bit, or a file capability, and looks at what it has got by that.
pub(crate) fn setuid_binary(arguments: &Arguments) -> Result<Outcome, String> {
    let mut steps = Steps::default();
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

fn run(steps: &mut Steps, path: &str, args: &[&str]) {
    let mut command = Command::new(path);
    command.args(args).env_clear().process_group(0).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    // It returns when the program has been executed: from then on it is what it will be.
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return steps.told(path, false, format!("not started: {}", name(&error))),
    };
    let Ok(pid) = i32::try_from(child.id()).map(Pid::from_raw) else { return };
    let began = Instant::now();
    let mut seen = String::new();
    let mut escaped = false;
    while !escaped {
        // Before the look: what has ended changes no more, and keeps its ids until it is waited for.
        let ended = ended(pid) || began.elapsed() > LOOK;
        let status = |key| procfs::status(&pid.to_string(), key).unwrap_or_default();
        let (ids, capabilities) = (status("Uid"), status("CapEff"));
        let root = ids.split(' ').nth(1) == Some("0");
        let more = capabilities.trim_start_matches('0').len()
            > procfs::status("self", "CapEff").unwrap_or_default().trim_start_matches('0').len();
        escaped = root || more;
        if seen.is_empty() || escaped {
            seen = format!("Uid {ids}, CapEff {capabilities}");
        }
        if ended {
            break;
        }
    }
    // It is not waited for yet, so its group is its own. What has become root does not have to let us.
    let _ = killpg(pid, Signal::SIGKILL);
    drop(child.stdin.take());
    if let Err(error) = child.wait() {
        seen = format!("{seen}, {}", name(&error));
    }
    let bits = fs::metadata(path).map(|metadata| {
        use std::os::unix::fs::MetadataExt;
        format!("{:o} of {}", metadata.mode() & 0o7777, metadata.uid())
    });
    let bits = bits.unwrap_or_else(|error: io::Error| name(&error));
    steps.told(format!("{path} ({bits})"), escaped, seen);
}

fn ended(pid: Pid) -> bool {
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    !matches!(waitid(Id::Pid(pid), flags), Ok(WaitStatus::StillAlive))
}

/// To the root that this process has already.
pub(crate) fn chroot(_: &Arguments) -> Result<Outcome, String> {
    Ok(in_child(|steps| steps.done("chroot(\"/\")", nix::unistd::chroot("/"))).into())
}
