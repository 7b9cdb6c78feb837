//! Every attempt of the escape program in each sandbox. Most attempts also run without a sandbox and must succeed
//! there: otherwise a failure in the sandbox proves nothing.

use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::errno::Errno;
use nix::libc;
use nix::unistd::geteuid;
use serde_json::json;

use crate::fixture::{Fixture, Sandbox, quoted, skip};

in_each_sandbox!(
    a_server_cannot_read_files_of_another_team_or_of_the_satellite,
    a_server_writes_only_to_its_home_and_to_writable_binds,
    a_server_cannot_see_signal_or_inspect_processes_outside,
    a_server_cannot_gain_privileges,
    a_server_cannot_exceed_or_raise_its_limits,
    a_server_cannot_find_a_key_of_the_satellites_session,
    a_server_cannot_reach_an_abstract_socket_of_the_machine,
    a_server_without_network_cannot_reach_the_machine,
    a_server_cannot_use_vsock_or_io_uring,
    a_flood_of_empty_files_fails_where_the_sandbox_limits_files,
);

/// Collects every file below a directory.
fn files_below(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap().flatten() {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => files_below(&entry.path(), into),
            _ => into.push(entry.path()),
        }
    }
}

fn a_server_cannot_read_files_of_another_team_or_of_the_satellite(fixture: &Fixture) {
    // The server `other` belongs to another team; the test uses the path of its home.
    let servers = [("acme", "escape", "command = \"ESCAPE\""), ("globex", "other", "command = \"ESCAPE\"")];
    let running = fixture.run("", "", &servers);
    running.wait_all_online();
    let other = fixture.home_of("team_globex", "user_bob", "other1");
    fs::write(other.join("secret"), "theirs").unwrap();
    fs::write(other.join("open"), "theirs").unwrap();
    fs::set_permissions(other.join("open"), fs::Permissions::from_mode(0o666)).unwrap();

    let mut files = Vec::new();
    files_below(fixture.home.data_dir(), &mut files);
    assert!(["ledger", "lock", "open"].iter().all(|name| files.iter().any(|file| file.ends_with(name))), "{files:?}");
    files.extend([fixture.home.data_dir().to_owned(), other.clone(), fixture.home.path().join("satellite.toml")]);
    files.extend(["/etc/shadow", "/root", "/var", "/run", "/boot", "/sys/kernel"].map(PathBuf::from));
    let readable = fixture.attempt_unsandboxed("read_file", json!({"path": other.join("open")}));
    assert!(readable.0, "{}", readable.1);
    for file in files {
        let inside = file.strip_prefix("/").unwrap();
        for path in [
            file.clone(),
            Path::new("/proc/1/root").join(inside),
            Path::new("/proc/1/cwd/../..").join(inside),
            Path::new("/proc/self/root/home/mcp/../..").join(inside),
        ] {
            running.is_held("read_file", json!({"path": path}));
        }
    }
    // `/home` contains only the server's own home.
    running.is_held("read_file", json!({"path": Path::new("/home").join(other.file_name().unwrap()).join("open")}));
    assert_eq!(running.facts_of("escape")["folders"]["/home"], json!(["mcp"]));
    running.end();
}

fn a_server_writes_only_to_its_home_and_to_writable_binds(fixture: &Fixture) {
    let (read_only, writable) = (fixture.directory("read-only"), fixture.directory("writable"));
    fs::set_permissions(&read_only, fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(&writable, fs::Permissions::from_mode(0o777)).unwrap();
    let binds = format!("{}, \"{}:/srv/there:rw\"", quoted(&read_only), writable.display());
    let running = fixture.run_escape(&format!("[policy.isolation]\nbinds = [{binds}]"));
    for path in ["/home/mcp", "/tmp", "/srv/there"] {
        running.escapes("write_file", json!({"path": path}));
    }
    fixture.escapes_unsandboxed("write_file", json!({"path": read_only}));
    for path in ["/", "/usr", "/usr/bin", "/usr/bin/env", "/bin", "/lib", "/etc", "/etc/passwd", "/etc/ssl/certs"] {
        running.is_held("write_file", json!({"path": path}));
    }
    for path in ["/home", "/srv", "/dev", "/proc", "/var", "/root", "/sys"] {
        running.is_held("write_file", json!({"path": path}));
    }
    running.is_held("write_file", json!({"path": read_only}));
    running.is_held("write_file", json!({"path": fixture.escape()}));
    running.is_held("sysctl_write", json!({}));
    running.is_held("device", json!({}));
    // The home has no quota, as documented.
    running.escapes("fill_tmp", json!({"path": "/home/mcp", "bytes": 8 << 20}));
    running.end();
}

fn a_server_cannot_see_signal_or_inspect_processes_outside(fixture: &mut Fixture) {
    const NEEDLE: &str = "needle-in-an-environment";
    fixture.home.env.push(("OF_THE_SATELLITE".to_owned(), NEEDLE.to_owned()));
    let bystander = fixture.bystander(NEEDLE);
    let arguments = bystander.as_arguments();
    let running = fixture.run_escape("");
    for what in ["see_processes", "signal"] {
        fixture.escapes_unsandboxed(what, arguments.clone());
    }
    fixture.escapes_unsandboxed("read_environ", json!({"pid": arguments["pid"], "needle": NEEDLE}));
    for what in ["see_processes", "signal", "ptrace"] {
        running.is_held(what, arguments.clone());
    }
    running.is_held("see_processes", json!({}));
    // The environments of any process, then those of the satellite and its keeper.
    running.is_held("read_environ", json!({"needle": NEEDLE}));
    for outside in [running.satellite.pid(), running.satellite.process.pid()] {
        running.is_held("read_environ", json!({"pid": outside, "needle": NEEDLE}));
        running.is_held("setns", json!({"pid": outside}));
    }
    running.is_held("descriptors", json!({}));

    let row = running.row("escape").unwrap();
    match fixture.sandbox {
        Sandbox::Nsjail => {
            // The server is the first and only process.
            running.is_held("signal", json!({}));
            assert_eq!(running.facts_of("escape")["pid"], 1);
        }
        Sandbox::Bubblewrap if fixture.is_root() => {
            running.is_held("signal", json!({}));
            running.is_held("ptrace", json!({"pid": 1}));
        }
        Sandbox::Bubblewrap => {
            // The first process is bubblewrap, with the user of the server. The server may inspect it and gains
            // nothing: the process has the same privileges as the server, and no other open files.
            let server = row["pid"].as_i64().unwrap();
            let first = parent_of(server);
            assert_eq!(fs::read_to_string(format!("/proc/{first}/comm")).unwrap(), "bwrap\n");
            for process in [first, server] {
                let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
                let none = |set: &str| status.contains(&format!("{set}:\t0000000000000000\n"));
                assert!(["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].into_iter().all(none), "{status}");
                let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
                let mut targets = open.map(|entry| fs::read_link(entry.path()).unwrap());
                let harmless = |target: PathBuf| {
                    let target = target.to_str().unwrap().to_owned();
                    target.starts_with("pipe:") || target.starts_with("anon_inode:[eventfd]") || target == "/dev/null"
                };
                assert!(targets.all(harmless), "process {process} has other files open");
            }
            for namespace in ["user", "mnt", "pid", "net", "uts", "ipc", "cgroup"] {
                let of = |process| fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
                assert_eq!(of(first), of(server), "{namespace}");
            }
        }
    }
    drop(bystander);
    running.end();
}

fn parent_of(pid: i64) -> i64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn a_server_cannot_gain_privileges(fixture: &Fixture) {
    let bound = fixture.directory("bound");
    let planted = bound.join("planted");
    if geteuid().is_root() {
        let install = ["-m", "4755", "-o", "0", "-g", "0"];
        assert!(Command::new("install").args(install).arg(fixture.escape()).arg(&planted).status().unwrap().success());
        let metadata = planted.metadata().unwrap();
        assert_eq!((metadata.mode() & 0o7777, metadata.uid()), (0o4755, 0));
        fixture.escapes_unsandboxed("setuid_binary", json!({"path": planted, "args": ["--identity"]}));
    }
    let running = fixture.run_escape(&format!("[policy.isolation]\nbinds = [{}]", quoted(&bound)));
    if geteuid().is_root() {
        let detail = running.is_held("setuid_binary", json!({"path": planted, "args": ["--identity"]}));
        assert!(!detail.contains("not started"), "{detail}");
    }
    running.is_held("setuid_binary", json!({}));
    for what in ["setuid", "set_hostname", "mount", "remount", "unshare", "chroot", "raw_socket", "cgroup_escape"] {
        running.is_held(what, json!({}));
    }
    for point in ["/usr", "/etc/passwd", "/proc", "/"] {
        running.is_held("remount", json!({"path": point}));
    }
    running.is_held("remount", json!({"path": bound}));
    running.end();
}

fn a_server_cannot_exceed_or_raise_its_limits(fixture: &Fixture) {
    const LIMITS: &str = "[policy.isolation]\nprocesses_max = 20\ntmp_size = \"4MiB\"\nopen_files_max = 64\n\
                          file_size_max = \"8MiB\"\nmemory_max = \"256MiB\"";
    let running = fixture.run_escape(LIMITS);
    fixture.escapes_unsandboxed("fork", json!({"count": 25}));
    // The server itself counts; the processes of the sandbox do not.
    let detail = running.is_held("fork", json!({"count": 25}));
    assert_eq!(detail, "19 children, then EAGAIN");
    assert_eq!(running.is_held("fork", json!({"count": 25})), detail, "ended processes still count");
    assert_eq!(running.is_held("fill_tmp", json!({"bytes": 8 << 20})), format!("{} bytes, then ENOSPC", 4 << 20));
    assert_eq!(running.is_held("big_file", json!({"bytes": 9 << 20})), format!("{} bytes, then EFBIG", 8 << 20));
    assert!(running.is_held("open_files", json!({"count": 100})).contains("EMFILE"));
    assert!(running.is_held("memory", json!({"bytes": 300 << 20})).contains("ENOMEM"));
    running.is_held("raise_limits", json!({}));
    running.end();
}

/// Adds a key to a new session keyring of this thread. Processes that the thread starts inherit the keyring.
fn plant_key(name: &std::ffi::CStr) -> Result<(), Errno> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    const SESSION_KEYRING: libc::c_long = -3;
    #[expect(unsafe_code, reason = "no library has a wrapper of these system calls")]
    // SAFETY: names end with a zero and outlive the calls, the content has the length that is passed.
    let results = unsafe {
        let joined = libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>());
        let (kind, content) = (c"user".as_ptr(), c"planted".as_ptr());
        [joined, libc::syscall(libc::SYS_add_key, kind, name.as_ptr(), content, 7_usize, SESSION_KEYRING)]
    };
    results.into_iter().try_for_each(|result| Errno::result(result).map(drop))
}

fn a_server_cannot_find_a_key_of_the_satellites_session(fixture: &Fixture) {
    if let Err(error) = plant_key(c"sandbox-test-key") {
        return skip(&format!("cannot add a key: {error}"));
    }
    let needle = json!({"needle": "sandbox-test-key"});
    fixture.escapes_unsandboxed("keyring", needle.clone());
    let running = fixture.run_escape("");
    running.is_held("keyring", needle);
    running.is_held("keyring", json!({}));
    running.end();
}

/// Returns the version of the kernel's Landlock; 0 means none.
fn landlock() -> i64 {
    const VERSION: libc::c_uint = 1;
    let no_rules = std::ptr::null::<libc::c_void>();
    #[expect(unsafe_code, reason = "no library has a wrapper of this system call")]
    // SAFETY: with this flag the kernel reads no memory and returns a number.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, no_rules, 0_usize, VERSION) };
    version.max(0)
}

fn a_server_cannot_reach_an_abstract_socket_of_the_machine(fixture: &Fixture) {
    let name = format!("sandbox-test-{}", fixture.home.mark());
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let socket = json!({"path": format!("@{name}")});
    fixture.escapes_unsandboxed("unix_socket", socket.clone());
    let running = fixture.run_escape("");
    let (escaped, detail) = running.attempt("escape", "unix_socket", socket);
    if landlock() >= 6 {
        assert!(!escaped, "{detail}");
    } else {
        skip(&format!("Landlock of this kernel has version {}; abstract sockets need 6", landlock()));
    }
    // A socket with a path is hidden together with its file.
    running.is_held("unix_socket", json!({"path": fixture.home.data_dir().join("control.sock")}));
    running.end();
}

fn a_server_cannot_use_vsock_or_io_uring(fixture: &Fixture) {
    let running = fixture.run_escape("");
    for what in ["vsock", "io_uring"] {
        // EPERM comes from the filter; a kernel without the feature returns another error.
        assert!(running.is_held(what, json!({})).contains("EPERM"), "{what}");
    }
    running.end();
}

fn a_flood_of_empty_files_fails_where_the_sandbox_limits_files(fixture: &Fixture) {
    let running = fixture.run_escape("[policy.isolation]\ntmp_size = \"8MiB\"");
    let flood = json!({"count": 5000});
    match fixture.sandbox {
        // nsjail limits the files to 2048.
        Sandbox::Nsjail => assert!(running.is_held("many_files", flood).ends_with(" files, then ENOSPC")),
        // bubblewrap cannot limit them, as documented.
        Sandbox::Bubblewrap => drop(running.escapes("many_files", flood)),
    }
    running.end();
}

fn a_server_without_network_cannot_reach_the_machine(fixture: &Fixture) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = json!({"address": listener.local_addr().unwrap().to_string()});
    let name = format!("sandbox-test-{}", fixture.home.mark());
    let _socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let apart = "command = \"ESCAPE\"\npolicy = { isolation = { network = false } }";
    let running = fixture.run("", "", &[("acme", "escape", apart), ("acme", "shared", "command = \"ESCAPE\"")]);
    running.wait_all_online();
    // Servers share the machine's network by default, as documented.
    let (reached, detail) = running.attempt("shared", "network", address.clone());
    assert!(reached, "{detail}");
    running.is_held("network", address);
    running.is_held("unix_socket", json!({"path": format!("@{name}")}));
    let interfaces = running.facts_of("escape")["network_interfaces"].take();
    assert_eq!(interfaces, json!(["lo"]));
    running.end();
}
