//! The stdio connector with real processes and signals: starts, ends, and no processes left behind.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mcp_satellite::connect::isolation::{Isolation, OperatingMode};
use mcp_satellite::connect::process::{CgroupMode, OrphanCounts, raise_descriptor_limit};
use mcp_satellite::connect::stdio::{StdioConnector, StdioOptions};
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::spec::{
    ConfigTier, ConfigValue, InstanceConfig, InstanceSpec, RemoteTransport, ServerTarget,
};
use mcp_satellite_actors::seam::{OpenError, ProcessConnector, ProcessEnd, ProcessLink};
use nix::libc::{SIGKILL, SIGTERM};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use testkit::wait::GIVE_UP;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::time::{sleep, timeout};

struct Started {
    link: ProcessLink,
    lines: BufReader<Box<dyn tokio::io::AsyncRead + Send + Unpin>>,
}

impl Started {
    async fn line(&mut self) -> String {
        let mut line = String::new();
        timeout(GIVE_UP, self.lines.read_line(&mut line)).await.unwrap().unwrap();
        line.trim_end().to_owned()
    }

    async fn number(&mut self) -> u32 {
        self.line().await.parse().unwrap()
    }

    fn pid(&self) -> u32 {
        self.link.process.pid().unwrap()
    }

    async fn ended(&mut self) -> ProcessEnd {
        timeout(GIVE_UP, self.link.process.wait()).await.unwrap()
    }

    async fn gone(&mut self) {
        timeout(GIVE_UP, self.link.process.wait_all()).await.unwrap();
    }
}

fn config(command: &str, args: &[&str], env: &[(&str, &str)], cwd: Option<&str>) -> Arc<InstanceSpec> {
    let layer = ConfigTier {
        args: args.iter().map(|arg| (*arg).into()).collect(),
        env: env.iter().map(|(name, value)| ((*name).to_owned(), ConfigValue::secret(*value))).collect(),
        ..ConfigTier::default()
    };
    spec(ServerTarget::Stdio { command: command.into(), cwd: cwd.map(Into::into) }, layer)
}

fn spec(target: ServerTarget, server_tier: ConfigTier) -> Arc<InstanceSpec> {
    let config = InstanceConfig { server_tier, ..testkit::spec::config(target, Policy::default()) };
    Arc::new(config.merge())
}

async fn open(spec: Arc<InstanceSpec>) -> Result<Started, OpenError> {
    open_with(&StdioConnector::new(vec!["CARGO_PKG_NAME".into()]).unwrap(), spec).await
}

async fn open_with(connector: &StdioConnector, spec: Arc<InstanceSpec>) -> Result<Started, OpenError> {
    let mut link = timeout(GIVE_UP, connector.open(spec, RunNumber(1))).await.unwrap()?;
    let reader = std::mem::replace(&mut link.reader, Box::new(tokio::io::empty()));
    Ok(Started { link, lines: BufReader::new(reader) })
}

async fn start(command: &str, args: &[&str]) -> Started {
    open(config(command, args, &[], None)).await.unwrap()
}

async fn sh(script: &str) -> Started {
    start("/bin/sh", &["-c", script]).await
}

/// Returns the error of a start that must fail.
async fn open_error(spec: Arc<InstanceSpec>) -> String {
    open(spec).await.err().unwrap().to_string()
}

/// Returns the state of a process from `/proc/PID/stat`, or `None` after it is reaped.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat[stat.rfind(')')? + 1..].trim_start().chars().next()
}

fn is_alive(pid: u32) -> bool {
    !matches!(state(pid), None | Some('Z' | 'X'))
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(GIVE_UP, waiting).await.is_ok(), "gave up waiting until {what}");
}

/// Returns a command that runs a test of this file in its own process. The process ignores SIGUSR2;
/// `IN_A_PROCESS_OF_ITS_OWN` contains the name of a file.
fn in_a_process_of_its_own(test: &str, file: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "trap '' USR2; exec \"$0\" --exact \"$1\""]).arg(std::env::current_exe().unwrap()).arg(test);
    command.env("IN_A_PROCESS_OF_ITS_OWN", file).stdout(Stdio::null());
    command
}

/// Returns whether the test runs in its own process already. If not, runs it in one.
fn is_alone(test: &str) -> bool {
    let alone = std::env::var_os("IN_A_PROCESS_OF_ITS_OWN").is_some();
    assert!(alone || in_a_process_of_its_own(test, Path::new("")).status().unwrap().success());
    alone
}

#[tokio::test]
async fn the_process_end_contains_the_exit_code() {
    let mut server = sh("exit 7").await;
    assert_eq!(server.ended().await, ProcessEnd { code: Some(7), signal: None });
    server.gone().await;
    assert_eq!(server.ended().await, ProcessEnd { code: Some(7), signal: None });
}

#[tokio::test]
async fn the_process_end_contains_the_signal() {
    assert_eq!(sh("kill -ABRT $$").await.ended().await, ProcessEnd { code: None, signal: Some(6) });
    // A real-time signal: many libraries have no name for it.
    assert_eq!(sh("kill -40 $$").await.ended().await, ProcessEnd { code: None, signal: Some(40) });
}

#[tokio::test]
async fn the_error_names_a_missing_command() {
    let error = open_error(config("no-such-command", &[], &[], None)).await;
    assert_eq!(error, "executable \"no-such-command\" not found in PATH");
}

#[tokio::test]
async fn the_error_names_a_command_that_is_not_executable() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o644)).unwrap();
    let command = file.path().to_str().unwrap();
    let error = open_error(config(command, &[], &[], None)).await;
    assert_eq!(error, format!("cannot start `{command}`: Permission denied"));
}

#[tokio::test]
async fn the_error_distinguishes_a_bad_working_directory_from_a_bad_command() {
    let error = open_error(config("sh", &[], &[], Some("/no/such/place"))).await;
    assert_eq!(error, "cannot start `sh`: working directory `/no/such/place`: No such file or directory");
    let error = open_error(config("sh", &[], &[], Some("/etc/passwd"))).await;
    assert_eq!(error, "cannot start `sh`: working directory `/etc/passwd`: Not a directory");
    let error = open_error(config("no-such-command", &[], &[], Some("/"))).await;
    assert_eq!(error, "executable \"no-such-command\" not found in PATH");
}

#[tokio::test]
async fn an_error_shows_no_argument_and_no_value() {
    for (command, args, env) in [
        ("no-such-command", ["argument-secret"], [("KEY", "value-secret")]),
        ("sh", ["argument-secret\0"], [("KEY", "value-secret")]),
        ("sh", ["argument-secret"], [("KEY", "value-secret\0")]),
        ("sh", ["argument-secret"], [("KEY=name-secret", "x")]),
        ("sh --token=value-secret", ["argument-secret"], [("KEY", "value-secret")]),
    ] {
        let error = open_error(config(command, &args, &env, None)).await;
        let names_command = error.starts_with("cannot start `") || error.starts_with("executable \"");
        assert!(names_command && !error.contains("-secret"), "{error}");
    }
}

#[tokio::test]
async fn the_stdio_connector_rejects_a_remote_server() {
    let target =
        ServerTarget::Remote { transport: RemoteTransport::Http, url: "http://127.0.0.1/".into(), health_url: None };
    assert_eq!(
        open_error(spec(target, ConfigTier::default())).await,
        "remote servers are not served by the stdio connector"
    );
}

#[tokio::test]
async fn arguments_are_passed_unchanged() {
    let args = ["$(id)", "; exit 1", "a b", "", "*", "--", "'\"\\"];
    let mut server = start("printf", &[&["%s\\n"], &args[..]].concat()).await;
    for arg in args {
        assert_eq!(server.line().await, arg);
    }
}

#[tokio::test]
async fn a_server_starts_in_its_working_directory_or_in_the_satellites() {
    let directory = tempfile::tempdir().unwrap().path().canonicalize().unwrap();
    fs::create_dir_all(&directory).unwrap();
    let wanted = directory.to_str().unwrap();
    assert_eq!(open(config("pwd", &[], &[], Some(wanted))).await.unwrap().line().await, wanted);
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!(start("pwd", &[]).await.line().await, std::env::current_dir().unwrap().to_str().unwrap());
}

#[tokio::test]
async fn a_server_inherits_the_environment_without_code_variables_and_withheld_names() {
    async fn environment(env: &[(&str, &str)]) -> BTreeMap<String, String> {
        environment_of(&mut open(config("env", &[], env, None)).await.unwrap()).await
    }
    let seen = environment(&[("GIVEN", "a b"), ("HOME", "/given")]).await;
    assert_eq!(seen.get("GIVEN").map(String::as_str), Some("a b"));
    assert_eq!(seen.get("HOME").map(String::as_str), Some("/given"));
    assert_eq!(seen.get("PATH"), std::env::var("PATH").ok().as_ref());
    // Cargo sets the first three for a test: one is inherited, one is withheld, one makes programs run other code.
    assert_eq!(seen.get("CARGO_MANIFEST_DIR"), std::env::var("CARGO_MANIFEST_DIR").ok().as_ref());
    for absent in ["CARGO_PKG_NAME", "LD_LIBRARY_PATH", "SHELL"] {
        assert_eq!(seen.get(absent), None, "{absent}");
    }
    let seen = environment(&[("CARGO_PKG_NAME", "given")]).await;
    assert_eq!(seen.get("CARGO_PKG_NAME").map(String::as_str), Some("given"));
}

/// Reads the output of a server that prints its environment.
async fn environment_of(server: &mut Started) -> BTreeMap<String, String> {
    let mut text = String::new();
    server.lines.read_to_string(&mut text).await.unwrap();
    text.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

#[tokio::test]
async fn configured_code_variables_reach_a_server_and_need_a_permission_in_production() {
    const PASSED: [&str; 4] = ["LD_LIBRARY_PATH", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH"];
    let names = [&PASSED[..], &["LD_PRELOAD", "LD_AUDIT", "LD_DEBUG", "LD_PROFILE", "BASH_ENV", "ENV"]].concat();
    let given: Vec<_> = names.iter().map(|name| (*name, "/given")).collect();
    let seen = async |strictness, allow_env: &[&str]| {
        let options = StdioOptions { strictness, isolation: Isolation::None, ..StdioOptions::default() };
        let connector = StdioConnector::with_options(options).unwrap();
        let mut spec = Arc::unwrap_or_clone(config("env", &[], &given, None));
        let mut policy = Policy::default();
        policy.isolation.allow_env = allow_env.iter().map(|name| (*name).to_owned()).collect();
        spec.policy = Arc::new(policy);
        let mut server = open_with(&connector, Arc::new(spec)).await.unwrap();
        let seen = environment_of(&mut server).await;
        names.iter().copied().filter(|name| seen.get(*name).is_some_and(|value| value == "/given")).collect::<Vec<_>>()
    };
    assert_eq!(seen(OperatingMode::Development, &[]).await, PASSED);
    assert_eq!(seen(OperatingMode::Production, &[]).await, [""; 0]);
    assert_eq!(seen(OperatingMode::Production, &["LD_PRELOAD", "PYTHONPATH"]).await, ["PYTHONPATH"]);
    assert_eq!(seen(OperatingMode::Production, &PASSED).await, PASSED);
}

#[tokio::test]
async fn all_three_pipes_carry_bytes_and_dropping_the_writer_closes_stdin() {
    let mut server = sh("read -r line; echo out:$line; echo err:$line >&2; cat >/dev/null; exit 3").await;
    server.link.writer.write_all(b"hello\n").await.unwrap();
    assert_eq!(server.line().await, "out:hello");
    let mut lines = BufReader::new(server.link.stderr.take().unwrap());
    let mut line = String::new();
    timeout(GIVE_UP, lines.read_line(&mut line)).await.unwrap().unwrap();
    assert_eq!(line, "err:hello\n");
    assert!(is_alive(server.pid()));

    server.link.writer = Box::new(tokio::io::sink());
    assert_eq!(server.ended().await.code, Some(3));
}

#[tokio::test]
async fn a_child_has_its_own_group_no_new_privileges_and_default_signals() {
    // The parent must ignore a signal: the child must not inherit that.
    if !is_alone("a_child_has_its_own_group_no_new_privileges_and_default_signals") {
        return;
    }
    let mut server = start("cat", &[]).await;
    server.link.writer.write_all(b"executed\n").await.unwrap();
    assert_eq!(server.line().await, "executed");
    let pid = server.pid();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let group = stat[stat.rfind(')').unwrap()..].split(' ').nth(3).unwrap().to_owned();
    assert_eq!(group, pid.to_string());

    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert_eq!(field("NoNewPrivs:"), "1");
    let ignored = u64::from_str_radix(&field("SigIgn:"), 16).unwrap();
    let of_libc = 0b11 << (32 - 1);
    assert_eq!(ignored & !of_libc, 0, "{ignored:x}");
    // The thread that forks blocks all signals.
    assert_eq!(field("SigBlk:"), "0000000000000000");
}

#[tokio::test]
async fn a_child_receives_sigkill_when_its_parent_dies() {
    let script = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)";
    assert_eq!(start("python3", &["-c", script]).await.line().await, SIGKILL.to_string());
}

/// The process that the next test kills. Does nothing in a normal test run.
#[tokio::test]
async fn a_host_process_starts_a_server_and_waits_to_be_killed() {
    let Ok(file) = std::env::var("IN_A_PROCESS_OF_ITS_OWN") else { return };
    let server = start("sleep", &["600"]).await;
    fs::write(&file, format!("{}\n", server.pid())).unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_server_dies_when_its_satellite_is_killed() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let test = "a_host_process_starts_a_server_and_waits_to_be_killed";
    let mut host = in_a_process_of_its_own(test, file.path()).spawn().unwrap();
    let written = || fs::read_to_string(file.path()).unwrap();
    until("the host has started its server", || written().ends_with('\n')).await;
    let server = written().trim().parse().unwrap();
    assert!(is_alive(server));

    host.kill().unwrap();
    host.wait().unwrap();
    until("the server is dead", || !is_alive(server)).await;
}

#[tokio::test]
async fn a_server_outlives_the_thread_that_started_it() {
    let connector = StdioConnector::new(Vec::new()).unwrap();
    let runtime = tokio::runtime::Handle::current();
    let asking = std::thread::spawn(move || runtime.block_on(open_with(&connector, config("cat", &[], &[], None))));
    let mut server = tokio::task::spawn_blocking(|| asking.join().unwrap()).await.unwrap().unwrap();
    server.link.writer.write_all(b"still here\n").await.unwrap();
    assert_eq!(server.line().await, "still here");
}

#[tokio::test]
async fn terminate_signals_the_whole_process_group() {
    let grandchild = "trap 'echo grandchild; exit' TERM; echo $$; while :; do sleep 0.01; done";
    let script = "trap 'wait; echo leader; exit 5' TERM; sh -c \"$0\" & wait";
    let mut server = start("/bin/sh", &["-c", script, grandchild]).await;
    let grandchild = server.number().await;
    server.link.process.terminate();
    assert_eq!(server.line().await, "grandchild");
    assert_eq!(server.line().await, "leader");
    assert_eq!(server.ended().await.code, Some(5));
    server.gone().await;
    assert!(!is_alive(grandchild));
}

#[tokio::test]
async fn wait_all_returns_only_after_a_stubborn_grandchild_is_killed() {
    let mut server = sh("sh -c 'trap \"\" TERM; echo $$; exec sleep 600' & wait").await;
    let grandchild = server.number().await;
    server.link.process.terminate();
    assert_eq!(server.ended().await, ProcessEnd { code: None, signal: Some(SIGTERM) });

    // The leader has ended and stays a zombie, so that the group can still be signalled.
    assert!(timeout(Duration::from_millis(200), server.link.process.wait_all()).await.is_err());
    assert!(is_alive(grandchild));
    assert_eq!(state(server.pid()), Some('Z'));

    server.link.process.kill();
    server.gone().await;
    assert!(!is_alive(grandchild));
    assert_eq!(state(server.pid()), None);
}

#[tokio::test]
async fn wait_all_waits_for_a_grandchild_that_outlives_its_leader() {
    let mut server = sh("exec 3<&0; cat <&3 >/dev/null & echo $!; exit 4").await;
    let grandchild = server.number().await;
    assert_eq!(server.ended().await.code, Some(4));
    assert!(timeout(Duration::from_millis(200), server.link.process.wait_all()).await.is_err());
    assert!(is_alive(grandchild));

    server.link.writer = Box::new(tokio::io::sink());
    server.gone().await;
    assert!(!is_alive(grandchild));
    assert_eq!(state(server.pid()), None);
}

#[tokio::test]
async fn kill_ends_a_stopped_leader() {
    let mut server = sh("echo ready; kill -STOP $$; sleep 600").await;
    server.line().await;
    let pid = server.pid();
    until("the leader is stopped", || state(pid) == Some('T')).await;
    server.link.process.kill();
    assert_eq!(server.ended().await.signal, Some(SIGKILL));
    server.gone().await;
}

#[tokio::test]
async fn no_signal_is_sent_after_all_processes_have_ended() {
    let mut server = sh("exit 0").await;
    server.gone().await;
    server.gone().await;
    server.link.process.terminate();
    server.link.process.kill();
    assert_eq!(server.ended().await.code, Some(0));
    drop(server);
}

#[tokio::test]
async fn dropping_the_guard_kills_leader_and_grandchild_and_leaves_no_zombie() {
    let mut server = sh("trap '' TERM; sleep 600 & echo $!; wait").await;
    let (leader, grandchild) = (server.pid(), server.number().await);
    server.link.guard = Box::new(());
    assert_eq!(server.ended().await.signal, Some(SIGKILL));
    server.gone().await;
    assert!(!is_alive(grandchild));
    assert_eq!(state(leader), None);
}

#[tokio::test]
async fn dropping_the_link_leaves_no_process() {
    let mut server = sh("sleep 600 & echo $!; wait").await;
    let (leader, grandchild) = (server.pid(), server.number().await);
    drop(server);
    until("the leader is reaped", || state(leader).is_none()).await;
    assert!(!is_alive(grandchild));
}

#[test]
fn shutting_down_the_runtime_leaves_no_process() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    runtime.spawn(async move {
        let mut server = sh("sleep 600 & echo $!; wait").await;
        sender.send((server.pid(), server.number().await)).unwrap();
        server.ended().await;
    });
    let (leader, grandchild) = receiver.recv_timeout(GIVE_UP).unwrap();
    drop(runtime);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(until("the leader is reaped", || state(leader).is_none()));
    assert!(!is_alive(grandchild));
}

#[tokio::test]
async fn a_cancelled_start_leaves_no_process() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("pid");
    let script = "echo $$ >\"$0\"; exec sleep 600";
    let connector = StdioConnector::new(Vec::new()).unwrap();
    // Polls the start a few times and drops it. The number of polls grows until a dropped start has created a process.
    let mut polls = 1;
    let pid = loop {
        let spec = config("/bin/sh", &["-c", script, file.to_str().unwrap()], &[], None);
        let mut opening = connector.open(spec, RunNumber(1));
        let mut waits = true;
        for _ in 0..polls {
            waits = waits && futures::poll!(&mut opening).is_pending();
            sleep(Duration::from_millis(2)).await;
        }
        if waits {
            sleep(Duration::from_millis(200)).await;
        }
        drop(opening);
        let pid = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        let _ = fs::remove_file(&file);
        match pid {
            Some(pid) if waits => break pid,
            // The start completed before it was dropped.
            _ => polls = if waits { polls + 1 } else { 1 },
        }
    };
    until("the process is reaped", || state(pid).is_none()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_concurrent_starts_leave_no_process_and_no_descriptor() {
    fn descriptors() -> usize {
        fs::read_dir("/proc/self/fd").unwrap().count()
    }
    // Other tests open descriptors too.
    if !is_alone("two_hundred_concurrent_starts_leave_no_process_and_no_descriptor") {
        return;
    }
    let connector = StdioConnector::new(Vec::new()).unwrap();
    let before = descriptors();

    let opening = (0..200).map(|_| connector.open(config("sleep", &["600"], &[], None), RunNumber(1)));
    let mut links: Vec<ProcessLink> = futures::future::try_join_all(opening).await.unwrap();
    assert_eq!(descriptors(), before + 200 * 4);
    let pids: BTreeSet<u32> = links.iter().filter_map(|link| link.process.pid()).collect();
    assert_eq!(pids.len(), 200);

    // Half of them are terminated, half are dropped.
    let dropped = links.split_off(100);
    drop(dropped);
    for link in &mut links {
        link.process.terminate();
    }
    timeout(GIVE_UP, futures::future::join_all(links.iter_mut().map(|link| link.process.wait_all()))).await.unwrap();
    drop(links);
    until("all processes are reaped", || pids.iter().all(|pid| state(*pid).is_none())).await;
    until("all descriptors are closed", || descriptors() == before).await;
}

#[tokio::test]
async fn a_child_does_not_inherit_the_raised_descriptor_limit() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
    assert_eq!(raise_descriptor_limit().unwrap(), hard);
    assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    assert_eq!(sh("ulimit -Sn").await.line().await, (hard - 1).to_string());
    assert_eq!(sh("ulimit -Hn").await.line().await, hard.to_string());
}

#[tokio::test]
async fn a_child_does_not_inherit_a_descriptor_of_the_satellite() {
    let file = tempfile::tempfile().unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let script = format!("test -e /proc/self/fd/{} && echo seen || echo hidden", file.as_raw_fd());
    assert_eq!(sh(&script).await.line().await, "hidden");
}

#[tokio::test]
async fn a_process_tree_lists_each_process_with_its_memory_and_state() {
    for cgroups in [CgroupMode::Auto, CgroupMode::Off] {
        let connector = StdioConnector::with_options(StdioOptions { cgroups, ..StdioOptions::default() }).unwrap();
        let script = "sleep 600 & setsid sleep 600 & exec cat";
        let mut server = open_with(&connector, config("/bin/sh", &["-c", script], &[], None)).await.unwrap();
        let other = open_with(&connector, config("/bin/sh", &["-c", "exec cat"], &[], None)).await.unwrap();
        let pid = server.pid();
        let names = |pid: u32| {
            let tree = connector.process_tree(pid).unwrap();
            let mut names: Vec<String> = tree.processes.into_iter().map(|process| process.name).collect();
            names.sort_unstable();
            names
        };
        until("three processes run", || names(pid) == ["cat", "sleep", "sleep"]).await;
        until("the other server runs", || names(other.pid()) == ["cat"]).await;
        let tree = connector.process_tree(pid).unwrap();
        for process in &tree.processes {
            let parent = if process.pid == pid { process.parent_pid } else { pid };
            assert_eq!((process.parent_pid, process.state), (parent, "sleeping"), "{process:?}");
            assert!(process.rss_bytes > 0, "{process:?}");
        }
        let held_by_cgroup = connector.describe_containment().starts_with("a cgroup");
        assert_eq!((tree.mechanism == "cgroup", tree.cgroup.is_some()), (held_by_cgroup, held_by_cgroup));
        assert_eq!(tree.isolation, "none");
        let usage = connector.usage();
        assert_eq!(usage.len(), 2);
        let largest = tree.processes.iter().map(|process| process.rss_bytes).max().unwrap();
        assert!(usage[&pid].rss_bytes > largest, "{:?} of {tree:?}", usage[&pid]);
        assert!(usage[&other.pid()].rss_bytes < usage[&pid].rss_bytes);
        assert_eq!(connector.process_tree(std::process::id()), None);
        server.link.process.kill();
        server.gone().await;
        drop(server);
        assert_eq!(connector.process_tree(pid), None);
    }
}

/// Skipped where the satellite may not use cgroups.
#[tokio::test]
async fn a_process_that_leaves_its_cgroup_is_found_by_its_mark() {
    let connector = StdioConnector::new(Vec::new()).unwrap();
    if !connector.describe_containment().starts_with("a cgroup") {
        return;
    }
    let script = "root=$(grep -m1 cgroup2 /proc/mounts | cut -d' ' -f2); \
                  setsid sh -c 'echo 0 >\"$0/cgroup.procs\" && echo $$ && exec sleep 3600; echo 0' \"$root\" & wait";
    let mut server = open_with(&connector, config("/bin/sh", &["-c", script], &[], None)).await.unwrap();
    let stray = server.number().await;
    if stray == 0 {
        // The kernel did not allow the process to leave its cgroup.
        return;
    }
    assert!(
        !fs::read_to_string(format!("/proc/{stray}/cgroup")).unwrap().contains("mcp-satellite-"),
        "it is still in its cgroup"
    );
    let killed = OrphanCounts::read().killed;
    server.link.process.kill();
    server.gone().await;
    until("the stray process has ended", || !is_alive(stray)).await;
    // Counted after the signal.
    until("the stray process is counted", || OrphanCounts::read().killed > killed).await;
}

/// Lowers the limit of this process so that it can open no further descriptor. Restores the limit when dropped.
struct NoDescriptors(u64, u64);

impl NoDescriptors {
    fn begin() -> Self {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        // The lowest free number is the count of open descriptors.
        let free = fs::File::open("/dev/null").unwrap().as_raw_fd();
        setrlimit(Resource::RLIMIT_NOFILE, u64::try_from(free).unwrap(), hard).unwrap();
        Self(soft, hard)
    }
}

impl Drop for NoDescriptors {
    fn drop(&mut self) {
        setrlimit(Resource::RLIMIT_NOFILE, self.0, self.1).unwrap();
    }
}

#[tokio::test]
async fn a_lack_of_descriptors_is_a_machine_error_and_a_missing_command_is_not() {
    if !is_alone("a_lack_of_descriptors_is_a_machine_error_and_a_missing_command_is_not") {
        return;
    }
    let connector = StdioConnector::new(Vec::new()).unwrap();
    let short = NoDescriptors::begin();
    let refused = open_with(&connector, config("cat", &[], &[], None)).await.err().unwrap();
    drop(short);
    let OpenError::Machine(reason) = refused else { panic!("attributed to the server: {refused}") };
    assert!(reason.starts_with("cannot start `cat`: Too many open files"), "{reason}");
    let missing = open_with(&connector, config("no-such-command", &[], &[], None)).await.err().unwrap();
    assert!(matches!(missing, OpenError::Server(_)), "{missing}");
    // The same server starts once descriptors are available.
    open_with(&connector, config("cat", &[], &[], None)).await.unwrap();
}

#[tokio::test]
async fn withhold_replaces_the_earlier_names() {
    async fn sees(connector: &StdioConnector) -> [bool; 2] {
        let mut server = open_with(connector, config("env", &[], &[], None)).await.unwrap();
        let mut text = String::new();
        server.lines.read_to_string(&mut text).await.unwrap();
        ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR"]
            .map(|name| text.lines().any(|line| line.starts_with(&format!("{name}="))))
    }
    let connector = StdioConnector::new(vec!["CARGO_PKG_NAME".into()]).unwrap();
    assert_eq!(sees(&connector).await, [false, true]);
    connector.withhold(["CARGO_MANIFEST_DIR".to_owned()]);
    assert_eq!(sees(&connector).await, [true, false]);
    connector.withhold([]);
    assert_eq!(sees(&connector).await, [true, true]);
}

/// A process that is killed when this is dropped.
struct Stray(u32);

impl Drop for Stray {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0.cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
}

#[tokio::test]
async fn a_detached_process_with_an_empty_environment_is_ended() {
    let script = "env -i setsid sh -c 'sleep 600 </dev/null >/dev/null 2>&1 & echo $!'; exec cat";
    let mut server = sh(script).await;
    let stray = Stray(server.number().await);
    assert!(is_alive(stray.0));
    let environment = fs::read(format!("/proc/{}/environ", stray.0)).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("MCP_SATELLITE_RUN"), "it has the environment of the run");
    server.link.process.kill();
    server.gone().await;
    until("the stray process has ended", || !is_alive(stray.0)).await;
}

/// Returns a specification for another team.
fn of_team(team: &str, script: &str) -> Arc<InstanceSpec> {
    let mut spec = (*config("/bin/sh", &["-c", script], &[("SECRET", "of-its-team")], None)).clone();
    spec.id = InstanceId::new(team.into(), "user_alice".into(), "abc123".into());
    Arc::new(spec)
}

/// Between fork and exec the child must not take a lock that another thread may have held at the fork.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_start_as_another_user_does_not_deadlock_with_new_threads() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let directory = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap();
    let data_dir = mcp_satellite::data_dir::DataDir::create(&directory.path().join("data")).unwrap();
    let options =
        StdioOptions { data_dir: Some(data_dir), uid_range: "200000-200009".parse().ok(), ..StdioOptions::default() };
    let connector = StdioConnector::with_options(options).unwrap();
    let ending = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ending.load(Ordering::Relaxed) {
                    std::thread::spawn(|| {}).join().unwrap();
                }
            });
        }
        let starts = async {
            for _ in 0..300 {
                let mut server = open_with(&connector, of_team("acme", "id -u")).await?;
                assert_eq!(server.line().await, "200000");
            }
            Ok::<(), OpenError>(())
        };
        let started = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(starts));
        ending.store(true, Ordering::Relaxed);
        started.unwrap();
    });
}

#[tokio::test]
async fn each_team_has_its_own_user_and_reads_no_secret_of_another() {
    const ABOUT: &str = "id -u; id -g; id -G; pwd; echo $HOME; touch here && echo writes; cat";
    let directory = tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o755)).tempdir().unwrap();
    let data_dir = mcp_satellite::data_dir::DataDir::create(&directory.path().join("data")).unwrap();
    let options =
        StdioOptions { data_dir: Some(data_dir), uid_range: "200000-200009".parse().ok(), ..StdioOptions::default() };
    if !nix::unistd::geteuid().is_root() {
        let refused = StdioConnector::with_options(options).err().unwrap().to_string();
        assert!(refused.contains("root"), "{refused}");
        return;
    }
    let connector = StdioConnector::with_options(options.clone()).unwrap();
    let mut acme = open_with(&connector, of_team("acme", ABOUT)).await.unwrap();
    let home = format!("{}/data.homes/200000", directory.path().display());
    for expected in ["200000", "200000", "200000", &home, &home, "writes"] {
        assert_eq!(acme.line().await, expected);
    }
    assert_eq!(acme.link.process.containment().unwrap().identity, "200000:200000");

    let environ = format!("/proc/{}/environ", acme.pid());
    assert!(fs::read_to_string(&environ).unwrap().contains("of-its-team"));
    let looking =
        format!("cat {environ} >/dev/null 2>&1 && echo read || echo held; id -u; ls {home} >/dev/null 2>&1; echo $?");
    let mut globex = open_with(&connector, of_team("globex", &looking)).await.unwrap();
    assert_eq!((globex.line().await, globex.line().await), ("held".to_owned(), "200001".to_owned()));
    assert_ne!(globex.line().await, "0", "globex lists the home of acme");
    let mut same = open_with(&connector, of_team("acme", &looking)).await.unwrap();
    assert_eq!(same.line().await, "read", "a server of the same team cannot read it");

    // After a restart a new team gets a new number, and the other teams keep theirs.
    drop((acme, globex, same, connector));
    let connector = StdioConnector::with_options(options).unwrap();
    for (team, id) in [("initech", "200002"), ("globex", "200001")] {
        assert_eq!(open_with(&connector, of_team(team, "id -u")).await.unwrap().line().await, id);
    }
    // The server changes to its working directory as the team's user.
    let mut spec = (*of_team("acme", "pwd")).clone();
    spec.target = ServerTarget::Stdio {
        command: "pwd".into(),
        cwd: Some(directory.path().join("data").to_str().unwrap().into()),
    };
    fs::set_permissions(directory.path().join("data"), fs::Permissions::from_mode(0o700)).unwrap();
    let refused = open_with(&connector, Arc::new(spec)).await.err().unwrap().to_string();
    assert!(refused.ends_with("data`: Permission denied"), "{refused}");
}
