//! Facts about this process and the machine. They contain names and numbers only: no values of environment variables
//! and no contents of files.

use std::collections::BTreeMap;
use std::fs;
use std::io::IsTerminal;

use nix::unistd::{getegid, geteuid, getgid, getgroups, gethostname, getpgrp, getpid, getppid, getsid, getuid};
use serde_json::{Value, json};

use crate::procfs;

const STATUS: [&str; 17] = [
    "Uid",
    "Gid",
    "Groups",
    "NSpid",
    "Threads",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "THP_enabled",
];

pub(crate) fn identity() -> Value {
    json!({
        "uid": getuid().as_raw(),
        "euid": geteuid().as_raw(),
        "gid": getgid().as_raw(),
        "egid": getegid().as_raw(),
        "groups": getgroups().map(|groups| groups.iter().map(|group| group.as_raw()).collect::<Vec<_>>()).ok(),
        "status": STATUS.into_iter().map(|key| (key, procfs::status("self", key))).collect::<BTreeMap<_, _>>(),
    })
}

pub(crate) fn facts() -> Value {
    let mut facts = identity();
    let own = procfs::process(getpid().as_raw());
    let more = json!({
        "hostname": gethostname().ok().and_then(|name| name.into_string().ok()),
        "pid": getpid().as_raw(),
        "ppid": getppid().as_raw(),
        "pgid": getpgrp().as_raw(),
        "sid": getsid(None).map(nix::unistd::Pid::as_raw).ok(),
        "nice": nice(),
        "oom_score_adj": line("/proc/self/oom_score_adj"),
        "stdin_is_tty": std::io::stdin().is_terminal(),
        "controlling_terminal": own.is_some_and(|own| own.terminal != 0),
        "cwd": std::env::current_dir().ok(),
        "umask": procfs::status("self", "Umask"),
        "environment": std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned()).collect::<Vec<_>>(),
        "namespaces": links("/proc/self/ns"),
        "uid_map": line("/proc/self/uid_map"),
        "gid_map": line("/proc/self/gid_map"),
        "setgroups": line("/proc/self/setgroups"),
        "descriptors": procfs::descriptors(),
        "rlimits": rlimits(),
        "cgroup": line("/proc/self/cgroup"),
        "processes": processes(),
        "mounts": mounts(),
        "folders": BTreeMap::from(["/", "/dev", "/etc", "/home", "/tmp", "/sys"].map(|path| (path, entries(path)))),
        "network_interfaces": interfaces(),
        "abstract_sockets": abstract_sockets(),
    });
    if let (Some(facts), Value::Object(more)) = (facts.as_object_mut(), more) {
        facts.extend(more);
    }
    facts
}

fn line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim_end().to_owned())
}

fn entries(path: &str) -> Option<Vec<String>> {
    let names = fs::read_dir(path).ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.collect();
    names.sort();
    Some(names)
}

fn links(folder: &str) -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir(folder) else { return BTreeMap::new() };
    let link = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        Some((entry.file_name().to_string_lossy().into_owned(), target.to_string_lossy().into_owned()))
    };
    entries.flatten().filter_map(link).collect()
}

fn rlimits() -> BTreeMap<String, Value> {
    let table = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = |line: &str| {
        // The columns are as wide as their titles; a name has spaces, a value has none.
        let (name, values) = line.split_at_checked(26)?;
        let mut values = values.split_whitespace();
        let (soft, hard) = (values.next()?, values.next()?);
        let name = name.trim().to_lowercase().replace(' ', "_");
        Some((name, json!({"soft": soft.parse::<u64>().ok(), "hard": hard.parse::<u64>().ok()})))
    };
    table.lines().skip(1).filter_map(limit).collect()
}

fn processes() -> Vec<Value> {
    let seen = procfs::pids().into_iter().filter_map(procfs::process);
    seen.map(|process| {
        let Ok(command_line) = fs::read(format!("/proc/{}/cmdline", process.pid)) else {
            return json!({"pid": process.pid, "ppid": process.parent, "name": process.name});
        };
        let args: Vec<String> =
            command_line.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect();
        json!({"pid": process.pid, "ppid": process.parent, "name": process.name, "args": args})
    })
    .collect()
}

fn mounts() -> Vec<Value> {
    let mount = |mount: procfs::MountInfo| {
        json!({
            "point": mount.point, "root": mount.root, "options": mount.options,
            "kind": mount.kind, "source": mount.source,
        })
    };
    procfs::mounts().into_iter().map(mount).collect()
}

fn interfaces() -> Vec<String> {
    let table = fs::read_to_string("/proc/net/dev").unwrap_or_default();
    table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

/// Returns the abstract sockets of the network namespace, which no mount hides.
fn abstract_sockets() -> Vec<String> {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let named = table.lines().filter_map(|line| line.split_whitespace().nth(7));
    named.filter(|name| name.starts_with('@')).map(str::to_owned).collect()
}

fn nice() -> Option<i32> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(16)?.parse().ok()
}
