//! The escape program reports an escape where one is possible: otherwise its reports from a sandbox prove nothing. Here
//! only the machine itself limits the program, and the tests determine those limits independently of the program.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{Pid, geteuid};
use serde_json::{Value, json};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The uid and gid of a user that is not root.
const NOBODY: u32 = 65534;

fn program() -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_satellite")).with_file_name("examples").join("escape");
    let profile = if cfg!(debug_assertions) { "" } else { " --release" };
    assert!(path.exists(), "{} is not there: cargo build --example escape{profile}", path.display());
    path
}

/// A process of a test that is killed when this is dropped.
struct KilledOnDrop(Child);

impl KilledOnDrop {
    fn sleeping(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn bystander() -> Self {
        Self::sleeping(Command::new("sleep").arg("1000"))
    }

    fn stat(&self, field: usize) -> String {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        stat.rsplit_once(')').unwrap().1.split_whitespace().nth(field).unwrap().to_owned()
    }

    fn start_time(&self) -> u64 {
        self.stat(19).parse().unwrap()
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The escape program after the handshake.
struct Escape {
    process: KilledOnDrop,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Escape {
    fn start() -> Self {
        Self::run(&mut Command::new(program()))
    }

    /// Starts the program after a shell script, which for example sets limits with `ulimit`.
    fn after(script: &str) -> Self {
        Self::with(script, &[])
    }

    fn with(script: &str, args: &[&str]) -> Self {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{script} && exec \"$@\"")).arg("sh").arg(program()).args(args);
        Self::run(&mut command)
    }

    fn run(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut escape = Self { process: KilledOnDrop(child), input, output };
        let client = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "0"}});
        assert_eq!(escape.request("initialize", &client)["serverInfo"]["name"], "escape");
        escape.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        escape
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input.as_ref().unwrap(), "{message}").unwrap();
    }

    fn request(&mut self, method: &str, params: &Value) -> Value {
        self.send(&json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}));
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let mut response: Value = serde_json::from_str(&line).unwrap();
        response["result"].take()
    }

    fn call(&mut self, tool: &str, arguments: &Value) -> Value {
        self.request("tools/call", &json!({"name": tool, "arguments": arguments}))
    }

    fn facts(&mut self) -> Value {
        self.call("facts", &json!({}))["structuredContent"].take()
    }

    /// Runs an attempt. Returns whether the program escaped, and the detail.
    #[track_caller]
    fn attempt(&mut self, what: &str, mut arguments: Value) -> (bool, String) {
        arguments["what"] = what.into();
        let result = self.call("attempt", &arguments);
        let outcome = &result["structuredContent"];
        assert_eq!(outcome["what"], what, "{result}");
        // The text content is for clients without structured content.
        assert_eq!(serde_json::from_str::<Value>(result["content"][0]["text"].as_str().unwrap()).unwrap(), *outcome);
        (outcome["escaped"].as_bool().unwrap(), outcome["detail"].as_str().unwrap().to_owned())
    }

    #[track_caller]
    fn escapes(&mut self, what: &str, arguments: Value) -> String {
        let (escaped, detail) = self.attempt(what, arguments);
        assert!(escaped, "{what}: {detail}");
        detail
    }

    #[track_caller]
    fn is_held(&mut self, what: &str, arguments: Value) -> String {
        let (escaped, detail) = self.attempt(what, arguments);
        assert!(!escaped, "{what}: {detail}");
        detail
    }

    /// Repeats an attempt until it is held: a child of another test has a copy of a closed descriptor until its exec.
    #[track_caller]
    fn wait_until_held(&mut self, what: &str, arguments: &Value) {
        while self.attempt(what, arguments.clone()).0 {
            std::thread::yield_now();
        }
    }

    fn end_input(&mut self) {
        self.input = None;
    }

    /// Closes stdin and waits until the program has read its end: it has ended or waits for something else then.
    fn end_input_and_settle(&mut self) {
        self.end_input();
        let path = format!("/proc/{}/syscall", self.process.0.id());
        loop {
            // An error means that the process has ended or that the kernel has no such file.
            let Ok(call) = fs::read_to_string(&path) else { return };
            let number = call.split(' ').next().unwrap().parse::<i64>();
            // A number is the system call in which the process waits. There is none if the process runs or has ended.
            if number.is_ok_and(|number| number != libc::SYS_read) || self.process.stat(0) == "Z" {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn ended(&mut self) -> ExitStatus {
        self.end_input();
        self.process.0.wait().unwrap()
    }
}

fn folder() -> (TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap().to_owned();
    (folder, path)
}

#[track_caller]
fn assert_empty(folder: &TempDir) {
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "the directory is not empty");
}

/// Returns whether this process has a capability, by its number in capabilities(7).
fn can(capability: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() >> capability & 1 == 1
}

const CAP_SETUID: u32 = 7;
const CAP_NET_RAW: u32 = 13;
const CAP_SYS_CHROOT: u32 = 18;
const CAP_SYS_ADMIN: u32 = 21;

/// Returns whether a command of the system succeeds.
fn works<S: AsRef<OsStr>>(command: &[S]) -> bool {
    let quiet = |program| {
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    quiet(&command[0]).args(&command[1..]).status().is_ok_and(|status| status.success())
}

fn mounts() -> String {
    fs::read_to_string("/proc/self/mountinfo").unwrap()
}

#[test]
fn reading_a_file_or_directory_is_an_escape() {
    let (folder, path) = folder();
    let file = folder.path().join("secret");
    fs::write(&file, "the secret").unwrap();
    let mut escape = Escape::start();
    let detail = escape.escapes("read_file", json!({"path": file}));
    assert!(detail.contains("10 bytes") && !detail.contains("the secret"), "{detail}");
    assert!(escape.escapes("read_file", json!({"path": path})).contains("1 entries"));
    assert!(escape.is_held("read_file", json!({"path": folder.path().join("none")})).contains("ENOENT"));
}

#[test]
fn reading_the_environment_of_a_process_is_an_escape_and_shows_no_value() {
    let bystander = KilledOnDrop::sleeping(Command::new("sleep").arg("1000").env("ESCAPE_TEST", "needle-4711"));
    let pid = bystander.0.id();
    let mut escape = Escape::start();
    let detail = escape.escapes("read_environ", json!({"pid": pid, "needle": "needle-4711"}));
    assert!(detail.contains("ESCAPE_TEST") && !detail.contains("needle-4711"), "{detail}");
    escape.escapes("read_environ", json!({"pid": pid}));
    escape.is_held("read_environ", json!({"pid": pid, "needle": "needle-4712"}));
    let own = escape.process.0.id();
    escape.is_held("read_environ", json!({"pid": own}));
}

#[test]
fn writing_a_file_is_an_escape_and_leaves_it_unchanged() {
    let (folder, path) = folder();
    let mut escape = Escape::start();
    escape.escapes("write_file", json!({"path": path}));
    escape.escapes("write_file", json!({"path": folder.path().join("new")}));
    assert_empty(&folder);

    let file = folder.path().join("file");
    fs::write(&file, "as it was").unwrap();
    escape.escapes("write_file", json!({"path": file}));
    assert_eq!(fs::read_to_string(&file).unwrap(), "as it was");
    assert!(escape.is_held("write_file", json!({"path": folder.path().join("none/new")})).contains("ENOENT"));
}

#[test]
fn an_inherited_descriptor_is_an_escape() {
    let detail = Escape::after("exec 9</").escapes("descriptors", json!({}));
    assert!(detail.contains("9: SUCCEEDED, /"), "{detail}");
}

#[test]
fn seeing_other_processes_is_an_escape() {
    let bystander = KilledOnDrop::bystander();
    let (pid, start_time) = (bystander.0.id(), bystander.start_time());
    let mut escape = Escape::start();
    escape.escapes("see_processes", json!({}));
    escape.escapes("see_processes", json!({"pid": std::process::id()}));
    escape.escapes("see_processes", json!({"pid": pid, "start_time": start_time}));
    // In another namespace the pid may be that of another process.
    escape.is_held("see_processes", json!({"pid": pid, "start_time": start_time + 1}));
    drop(bystander);
    escape.is_held("see_processes", json!({"pid": pid, "start_time": start_time}));
}

#[test]
fn signalling_a_process_is_an_escape_and_does_not_end_it() {
    let mut bystander = KilledOnDrop::bystander();
    let (pid, start_time) = (bystander.0.id(), bystander.start_time());
    let mut escape = Escape::start();
    escape.escapes("signal", json!({}));
    let detail = escape.escapes("signal", json!({"pid": pid}));
    assert!(detail.contains("SIGCONT): SUCCEEDED"), "{detail}");
    assert!(bystander.0.try_wait().unwrap().is_none());
    escape.is_held("signal", json!({"pid": pid, "start_time": start_time + 1}));
}

#[test]
fn tracing_a_process_is_an_escape_and_detaches_again() {
    let bystander = KilledOnDrop::bystander();
    let restricted = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() != "0");
    let mut escape = Escape::start();
    let (escaped, detail) = escape.attempt("ptrace", json!({"pid": bystander.0.id()}));
    assert_eq!(escaped, !restricted || geteuid().is_root(), "{detail}");
    let status = fs::read_to_string(format!("/proc/{}/status", bystander.0.id())).unwrap();
    assert!(status.lines().any(|line| line == "TracerPid:\t0"), "{status}");
    // The process is neither stopped nor traced; it may be about to sleep.
    assert!(["S", "R", "D"].contains(&bystander.stat(0).as_str()), "{}", bystander.stat(0));
}

#[test]
fn more_children_than_the_limit_are_an_escape_and_none_is_left() {
    let mut escape = Escape::start();
    assert_eq!(escape.escapes("fork", json!({"count": 20})), "20 children");
    escape.escapes("fork", json!({"count": 20, "limit": 19}));
    escape.is_held("fork", json!({"count": 20, "limit": 20}));
    let facts = escape.facts();
    let left = facts["processes"].as_array().unwrap().iter().filter(|process| process["ppid"] == facts["pid"]).count();
    assert_eq!(left, 0, "{facts}");
}

#[test]
fn becoming_root_is_an_escape() {
    let mut escape = Escape::start();
    let (escaped, detail) = escape.attempt("setuid", json!({}));
    assert_eq!(escaped, can(CAP_SETUID), "{detail}");
    assert_eq!(escape.facts()["euid"], geteuid().as_raw());
}

#[test]
fn running_a_setuid_root_program_is_an_escape() {
    let folder = tempfile::tempdir().unwrap();
    if statvfs(folder.path()).unwrap().flags().contains(FsFlags::ST_NOSUID) || !geteuid().is_root() {
        // Without root the test cannot create a setuid program, but the system has some.
        let path = Path::new("/usr/bin/su");
        let set = path.metadata().is_ok_and(|metadata| metadata.mode() & 0o4000 != 0 && metadata.uid() == 0);
        let (escaped, detail) = Escape::start().attempt("setuid_binary", json!({"path": path}));
        assert_eq!(escaped, set || geteuid().is_root(), "{detail}");
        return;
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Copied by another process: a child of another test could inherit a descriptor of the copy, and executing it would
    // fail with ETXTBSY.
    let copy = |name, mode| {
        let path = folder.path().join(name);
        let copied = Command::new("install").args(["-m", mode]).arg(program()).arg(&path).status().unwrap();
        assert!(copied.success());
        path
    };
    let (plain, set) = (copy("plain", "755"), copy("set", "4755"));
    let mut escape = Escape::run(Command::new(&plain).uid(NOBODY).gid(NOBODY).current_dir("/"));
    let detail = escape.escapes("setuid_binary", json!({"path": set, "args": ["--identity"]}));
    assert!(detail.contains(&format!("Uid {NOBODY} 0 0 0")), "{detail}");
    escape.is_held("setuid_binary", json!({"path": plain, "args": ["--identity"]}));
    escape.is_held("setuid", json!({}));
}

#[test]
fn administrator_operations_are_escapes_and_change_nothing() {
    let (folder, path) = folder();
    let before = (mounts(), fs::read_to_string("/proc/sys/kernel/hostname").unwrap());
    let mut escape = Escape::start();
    let expected = [
        ("set_hostname", can(CAP_SYS_ADMIN)),
        ("chroot", can(CAP_SYS_CHROOT)),
        ("raw_socket", can(CAP_NET_RAW)),
        ("unshare", works(&["unshare", "--user", "true"]) || works(&["unshare", "--mount", "true"])),
        ("remount", works(&["unshare", "--mount", "true"])),
        (
            "mount",
            works(&["unshare", "--mount", "mount", "-t", "tmpfs", "none", &path])
                || works(&["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", &path]),
        ),
    ];
    for (what, allowed) in expected {
        let (escaped, detail) = escape.attempt(what, json!({}));
        assert_eq!(escaped, allowed, "{what}: {detail}");
    }
    assert_eq!((mounts(), fs::read_to_string("/proc/sys/kernel/hostname").unwrap()), before);
    let facts = escape.facts();
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    assert_eq!(facts["namespaces"]["mnt"], own.to_str().unwrap(), "the program changed its mount namespace");
    drop(folder);
}

#[test]
fn joining_the_namespace_of_another_process_is_an_escape() {
    let mut escape = Escape::start();
    let bystander = KilledOnDrop::bystander();
    escape.is_held("setns", json!({"pid": bystander.0.id()}));
    if !works(&["unshare", "--uts", "true"]) {
        return;
    }
    let other = KilledOnDrop::sleeping(Command::new("unshare").args(["--uts", "sleep", "1000"]));
    let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/uts")).unwrap();
    while of(other.0.id()) == of(std::process::id()) {
        std::thread::yield_now();
    }
    escape.escapes("setns", json!({"pid": other.0.id()}));
}

#[test]
fn opening_kernel_files_for_writing_is_an_escape() {
    let mut escape = Escape::start();
    let writable = |path: &str| OpenOptions::new().append(true).open(path).is_ok();
    if writable("/proc/sys/kernel/hostname") {
        escape.escapes("sysctl_write", json!({}));
    }
    if writable("/sys/fs/cgroup/cgroup.procs") || writable("/sys/fs/cgroup/unified/cgroup.procs") {
        let before = fs::read_to_string(format!("/proc/{}/cgroup", escape.process.0.id())).unwrap();
        escape.escapes("cgroup_escape", json!({}));
        assert_eq!(fs::read_to_string(format!("/proc/{}/cgroup", escape.process.0.id())).unwrap(), before);
    }
    if File::open("/dev/ptmx").is_ok() || File::open("/dev/kmsg").is_ok() {
        escape.escapes("device", json!({}));
    }
}

#[test]
fn only_exceeding_a_limit_is_an_escape() {
    let (folder, path) = folder();
    let mut free = Escape::start();
    free.escapes("big_file", json!({"bytes": 3 * MIB, "path": path}));
    free.escapes("fill_tmp", json!({"bytes": 20 * MIB, "path": path}));
    free.escapes("memory", json!({"bytes": 64 * MIB}));
    assert_eq!(free.escapes("many_files", json!({"count": 2000, "path": path})), "2000 files");
    free.escapes("open_files", json!({"count": 40}));
    // A shell counts sizes of files in blocks of 512 bytes and memory in KiB.
    let mut limited = Escape::after("ulimit -f 4096 && ulimit -n 32 && ulimit -v 50000");
    let detail = limited.is_held("big_file", json!({"bytes": 3 * MIB, "path": path}));
    assert_eq!(detail, format!("{} bytes, then EFBIG", 2 * MIB));
    assert!(limited.is_held("fill_tmp", json!({"bytes": 20 * MIB, "path": path})).contains("EFBIG"));
    assert!(limited.is_held("memory", json!({"bytes": 64 * MIB})).contains("ENOMEM"));
    assert!(limited.is_held("open_files", json!({"count": 40})).contains("EMFILE"));
    assert_empty(&folder);
    // The program raises its limits only in a child, so its own limits stay.
    let (raised, detail) = limited.attempt("raise_limits", json!({}));
    assert_eq!(raised, can(24), "{detail}");
    assert_eq!(limited.facts()["rlimits"]["max_open_files"]["hard"], 32);
}

#[test]
fn the_program_rejects_amounts_that_would_harm_the_machine() {
    let mut escape = Escape::start();
    for (what, number) in [
        ("fork", "count"),
        ("many_files", "count"),
        ("fill_tmp", "bytes"),
        ("big_file", "bytes"),
        ("memory", "bytes"),
        ("open_files", "count"),
    ] {
        let result = escape.call("attempt", &json!({"what": what, number: 1_u64 << 40}));
        assert_eq!(result["isError"], true, "{result}");
    }
}

#[test]
fn reaching_or_opening_a_socket_is_an_escape() {
    let mut escape = Escape::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    escape.escapes("network", json!({"address": address}));
    escape.is_held("listen", json!({"address": address}));
    drop(listener);
    escape.wait_until_held("network", &json!({"address": address}));
    escape.escapes("listen", json!({"address": "127.0.0.1:0"}));

    let name = format!("escape-test-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    escape.escapes("unix_socket", json!({"path": format!("@{name}")}));
    drop(listener);
    escape.wait_until_held("unix_socket", &json!({"path": format!("@{name}")}));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    escape.escapes("unix_socket", json!({"path": path}));
}

#[test]
fn vsock_and_io_uring_are_escapes_if_the_kernel_supports_them() {
    let mut escape = Escape::start();
    #[expect(unsafe_code, reason = "no library has a wrapper of the second one")]
    // SAFETY: the first opens a descriptor. The second reads and writes a structure of 120 bytes that outlives the
    // call.
    let [vsock, ring] = unsafe {
        let mut parameters = [0_u32; 30];
        [
            i64::from(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)),
            libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()),
        ]
    };
    for (what, own) in [("vsock", vsock), ("io_uring", ring)] {
        let (escaped, detail) = escape.attempt(what, json!({}));
        assert_eq!(escaped, own >= 0, "{what}: {detail}");
    }
}

#[test]
fn finding_a_key_is_an_escape() {
    let mut escape = Escape::start();
    let name = format!("escape-test-{}", std::process::id());
    escape.is_held("keyring", json!({"needle": name}));
    // The kernel may have no keyrings, or the filter of a container may forbid them.
    if escape.attempt("plant_key", json!({"name": name})).0 {
        escape.escapes("keyring", json!({"needle": name}));
        escape.escapes("keyring", json!({}));
    }
}

#[test]
fn facts_contain_names_and_numbers_and_no_values() {
    let mut escape = Escape::run(Command::new(program()).env("ESCAPE_TEST", "value-4711"));
    let facts = escape.facts();
    let names = facts["environment"].as_array().unwrap();
    assert!(names.contains(&json!("ESCAPE_TEST")) && !facts.to_string().contains("value-4711"), "{facts}");
    assert_eq!(facts["pid"], escape.process.0.id());
    assert_eq!(facts["ppid"], std::process::id());
    assert_eq!(facts["uid"], nix::unistd::getuid().as_raw());
    assert_eq!(facts["status"]["NoNewPrivs"].as_str().map(str::len), Some(1));
    assert_eq!(facts["stdin_is_tty"], false);
    assert!(facts["mounts"].as_array().unwrap().iter().any(|mount| mount["point"] == "/"), "{facts}");
    assert!(facts["processes"].as_array().unwrap().iter().any(|process| process["pid"] == facts["pid"]), "{facts}");
}

#[test]
fn an_invalid_attempt_is_an_error_and_not_held() {
    let mut escape = Escape::start();
    for arguments in
        [json!({}), json!({"what": "nothing"}), json!({"what": "fork"}), json!({"what": "signal", "pid": 0})]
    {
        let result = escape.call("attempt", &arguments);
        assert!(result["isError"] == true && result.get("structuredContent").is_none(), "{arguments}: {result}");
    }
}

#[test]
fn every_attempt_is_tested_here() {
    let tools = Escape::start().request("tools/list", &json!({}));
    let names = tools["tools"][0]["inputSchema"]["properties"]["what"]["enum"].as_array().unwrap().clone();
    assert!(names.len() >= 30);
    for name in names {
        let quoted = format!("\"{}\",", name.as_str().unwrap());
        assert!(include_str!("escape_program.rs").contains(&quoted), "{name} is not tested here");
    }
}

#[test]
fn the_sigterm_handler_runs_although_stdin_is_closed() {
    let (folder, home) = folder();
    let mut escape = Escape::run(Command::new(program()).args(["--on-term", "ended"]).env("HOME", home));
    escape.end_input_and_settle();
    kill(Pid::from_raw(escape.process.0.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(escape.ended().code(), Some(0));
    assert_eq!(fs::read_to_string(folder.path().join("ended")).unwrap(), "handled\n");
}

#[test]
fn without_a_handler_sigterm_ends_the_program_and_closed_stdin_does_not() {
    let mut escape = Escape::run(Command::new(program()).arg("--no-term-handler"));
    escape.end_input_and_settle();
    kill(Pid::from_raw(escape.process.0.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(escape.ended().signal(), Some(Signal::SIGTERM as i32));
    let mut plain = Escape::start();
    assert_eq!(plain.ended().code(), Some(0));
}

#[test]
fn each_limit_ends_the_program_in_its_own_way_after_initialization() {
    let (folder, home) = folder();
    let memory = Escape::with("ulimit -c 0 && ulimit -v 50000", &["--crash", "memory"]).ended();
    assert_eq!(memory.signal(), Some(Signal::SIGABRT as i32));
    let script = format!("export HOME='{home}' && ulimit -c 0 && ulimit -f 100");
    let size = Escape::with(&script, &["--crash", "file-size"]).ended();
    assert_eq!(size.signal(), Some(Signal::SIGXFSZ as i32));
    // Only the soft limit is set: at the hard limit the kernel sends SIGKILL instead of SIGXCPU.
    let cpu = Escape::with("ulimit -c 0 && ulimit -S -t 1", &["--crash", "cpu"]).ended();
    assert_eq!(cpu.signal(), Some(Signal::SIGXCPU as i32));
    drop(folder);
}
