//! Processes of the machine, and child processes that run one test.

use std::fs;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::wait::wait_for;

/// Returns the pids of all processes.
pub fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns every process with its NUL-separated arguments. A zombie has none.
pub fn processes() -> Vec<(i32, String)> {
    // A process may end between the two reads.
    pids().filter_map(|pid| Some((pid, text(&fs::read(format!("/proc/{pid}/cmdline")).ok()?)))).collect()
}

/// Returns whether an entry of the environment of a process contains this text. A zombie's environment is empty, and
/// that of another user's process is not readable.
pub fn has_in_environment(pid: i32, wanted: &str) -> bool {
    text(&fs::read(format!("/proc/{pid}/environ")).unwrap_or_default()).contains(wanted)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Sends a signal to a process, which may have ended.
pub fn send(pid: i32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Waits until a process is stopped by a signal.
#[track_caller]
pub fn wait_stopped(pid: i32) {
    let stat = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    wait_for("the process to stop", || stat().contains(") T ").then_some(()), stat);
}

/// Returns the arguments with which a test program runs one ignored test of the module, as `module_path!()` names it.
pub fn ignored_test(module: &str, test: &str) -> [String; 4] {
    let module = module.split_once("::").map_or("", |(_, module)| module);
    ["--ignored".to_owned(), "--exact".to_owned(), "--nocapture".to_owned(), format!("{module}::{test}")]
}

pub fn ignored_test_command(module: &str, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(ignored_test(module, test));
    command
}

/// Runs the calling test again in a process of its own, in which it must pass, and returns `false`. In that process,
/// returns `true`. Tests that count the resources of their process thus run beside each other.
pub fn is_own_process() -> bool {
    const OWN_PROCESS: &str = "TESTKIT_OWN_PROCESS";
    let thread = std::thread::current();
    // The test harness names a thread by its test. Without threads, no other test runs beside this one.
    let test = thread.name().filter(|name| *name != "main");
    let Some(test) = test.filter(|_| std::env::var_os(OWN_PROCESS).is_none()) else { return true };
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--include-ignored", "--exact", "--nocapture", test]).env(OWN_PROCESS, "1").output();
    let output = output.unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
    false
}
