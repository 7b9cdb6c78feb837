//! Launcher for bubblewrap. bubblewrap adds two processes; the second one is the first process of the PID namespace and
//! reaps there.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::sandbox_spec::{MountKind, SandboxCommand, SandboxLauncher, SandboxSpec, SandboxUser, SandboxedCommand};
use crate::process::OPTIONS_FILE_FD;
use mcp_satellite_actors::model::settings::SANDBOX_USER;

const OWN_MESSAGES: [&str; 2] = ["bwrap: ", "setpriv: "];

// Prefix under which a variable passes `setpriv`.
const DEFERRED: &str = "MCP_SATELLITE_DEFERRED_";
// Variables that the loader or the C library of any program reads: glibc and musl.
const C_LIBRARY_PREFIXES: [&str; 6] = ["GLIBC_", "LC_", "LD_", "MALLOC_", "MUSL_", "RESOLV_"];
const C_LIBRARY_VARIABLES: [&str; 12] = [
    "GCONV_PATH",
    "GETCONF_DIR",
    "HOSTALIASES",
    "LANGUAGE",
    "LOCALDOMAIN",
    "LOCALE_ARCHIVE",
    "LOCPATH",
    "NIS_PATH",
    "NLSPATH",
    "OUTPUT_CHARSET",
    "POSIXLY_CORRECT",
    "RES_OPTIONS",
];

pub(super) struct Bubblewrap {
    pub(super) path: PathBuf,
    pub(super) setpriv: PathBuf,
}

impl SandboxLauncher for Bubblewrap {
    fn name(&self) -> &'static str {
        "bubblewrap"
    }

    fn depth(&self) -> usize {
        2
    }

    fn own_failure_predicate(&self) -> fn(Option<i32>, &str) -> bool {
        |code, stderr| {
            code.is_some_and(|code| code != 0)
                && stderr.lines().any(|line| OWN_MESSAGES.iter().any(|own| line.starts_with(own)))
        }
    }

    fn wrap(&self, sandbox: &SandboxSpec, server: SandboxedCommand<'_>) -> SandboxCommand {
        let mut line: Vec<OsString> = Vec::new();
        let mut add =
            |words: &[&dyn AsRef<OsStr>]| line.extend(words.iter().map(|word| word.as_ref().to_owned()));
        add(&[&"--unshare-pid", &"--unshare-uts", &"--unshare-ipc", &"--unshare-cgroup-try", &"--die-with-parent"]);
        if !sandbox.network {
            add(&[&"--unshare-net"]);
        }
        add(&[&"--hostname", &sandbox.hostname]);
        add(&[&"--proc", &"/proc", &"--remount-ro", &"/proc"]);
        // bubblewrap cannot limit the number of files. They use kernel memory, which a cgroup counts if there is one.
        add(&[&"--perms", &"1777", &"--size", &sandbox.tmp_size.to_string(), &"--tmpfs", &"/tmp"]);
        for directory in sandbox.directories().iter().filter(|directory| *directory != Path::new("/tmp")) {
            // With the default mode only root could enter them.
            add(&[&"--perms", &"0755", &"--dir", directory]);
        }
        for mount in &sandbox.mounts {
            let how = match mount.kind {
                MountKind::ReadOnly => "--ro-bind",
                MountKind::Writable => "--bind",
                MountKind::Device => "--dev-bind",
            };
            add(&[&how, &mount.source, &mount.target]);
        }
        add(&[&"--remount-ro", &"/", &"--chdir", &sandbox.directory]);
        let id = SANDBOX_USER.to_string();
        let mut after: Vec<OsString> = ["--args", &OPTIONS_FILE_FD.to_string(), "--"].map(OsString::from).to_vec();
        let mut environment = server.environment.clone();
        match sandbox.identity {
            // bubblewrap runs as root of its namespace; `setpriv` drops all capabilities before the server starts.
            SandboxUser::Outside => {
                for capability in ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"] {
                    add(&[&"--cap-add", &capability]);
                }
                after.push(self.setpriv.clone().into());
                let drops = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"];
                after.extend(["--reuid", &id, "--regid", &id].into_iter().chain(drops).map(OsString::from));
                after.extend(defer_c_library_variables(&mut environment));
            }
            SandboxUser::Inside { .. } => {
                add(&[&"--unshare-user", &"--uid", &id, &"--gid", &id, &"--cap-drop", &"ALL"]);
            }
        }
        // bubblewrap starts without variables and adds these for the server only.
        for (name, value) in &environment {
            add(&[&"--setenv", name, value]);
        }
        after.push(server.program.into());
        after.extend(server.args);
        // A server can read the argument list of its PID namespace's first process, and these options contain paths of
        // the machine.
        let options_file = line.iter().flat_map(|word| [word.as_encoded_bytes(), b"\0"].concat()).collect();
        SandboxCommand { command: self.path.clone(), args: after, options_file }
    }
}

/// Renames the variables that the C library of `setpriv` would read while it is privileged. Returns the words of a shell
/// that gives them their names again, without privileges, and then executes the words that follow; none if there is no
/// such variable.
fn defer_c_library_variables(environment: &mut BTreeMap<OsString, OsString>) -> Vec<OsString> {
    let deferred: BTreeMap<OsString, OsString> =
        environment.extract_if(.., |name, _| is_read_by_c_library(name)).collect();
    if deferred.is_empty() {
        return Vec::new();
    }
    let mut script = String::new();
    for (name, value) in deferred {
        // `is_read_by_c_library` accepts only names that a shell can export.
        let name = name.to_string_lossy();
        script.push_str(&format!("export {name}=\"${DEFERRED}{name}\"; unset {DEFERRED}{name}; "));
        environment.insert(format!("{DEFERRED}{name}").into(), value);
    }
    script.push_str("exec \"$@\"");
    ["/bin/sh", "-c", &script, "sh"].map(OsString::from).to_vec()
}

fn is_read_by_c_library(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_plain
        && (C_LIBRARY_VARIABLES.contains(&name) || C_LIBRARY_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setpriv_gets_no_variable_that_its_c_library_reads() {
        let policy = mcp_satellite_actors::model::policy::IsolationPolicy::standard();
        let launcher = Bubblewrap { path: "bwrap".into(), setpriv: "/bin/setpriv".into() };
        let wrap = |identity, names: &[&str]| {
            let sandbox = SandboxSpec::new(&policy, "t", Path::new("/h"), identity);
            let environment = names.iter().map(|name| (name.into(), "hush".into())).collect();
            let server =
                SandboxedCommand { program: Path::new("/srv/x"), args: vec!["-v".into()], environment: &environment };
            let SandboxCommand { args, options_file, .. } = launcher.wrap(&sandbox, server);
            let args = args.join(OsStr::new(" ")).into_string().unwrap();
            assert!(!args.contains("hush"), "{args}");
            let options = String::from_utf8(options_file).unwrap();
            let names = options.split('\0').collect::<Vec<_>>();
            let names = names.windows(2).filter(|words| words[0] == "--setenv").map(|words| words[1].to_owned());
            (args, names.collect::<Vec<_>>())
        };
        let names = ["API_KEY", "GLIBC_TUNABLES", "LD_BIND_NOW", "LD_$(x)", "a-b"];
        let (args, passed) = wrap(SandboxUser::Inside { user: 1, group: 1 }, &names);
        assert_eq!((&*args, passed.len()), ("--args 3 -- /srv/x -v", names.len()));
        let (args, passed) = wrap(SandboxUser::Outside, &names);
        let [one, other] = ["GLIBC_TUNABLES", "LD_BIND_NOW"].map(|name| format!("{DEFERRED}{name}"));
        assert_eq!(passed, ["API_KEY", "LD_$(x)", &one, &other, "a-b"]);
        let script = format!(
            "-- /bin/sh -c export GLIBC_TUNABLES=\"${one}\"; unset {one}; export LD_BIND_NOW=\"${other}\"; unset \
             {other}; exec \"$@\" sh /srv/x -v"
        );
        assert!(args.ends_with(&script), "{args}");
        assert!(wrap(SandboxUser::Outside, &["API_KEY"]).0.ends_with("--no-new-privs -- /srv/x -v"));
    }

    #[test]
    fn a_failure_of_bubblewrap_is_distinguished_from_one_of_the_server() {
        let launcher = Bubblewrap { path: "bwrap".into(), setpriv: "setpriv".into() };
        let is_own = launcher.own_failure_predicate();
        assert!(is_own(Some(1), "bwrap: Creating new namespace failed\n"));
        assert!(is_own(Some(127), "setpriv: failed to execute /x: No such file or directory\n"));
        for (code, stderr) in
            [(Some(1), ""), (Some(139), ""), (Some(1), "Traceback:\n"), (Some(0), "bwrap: "), (None, "")]
        {
            assert!(!is_own(code, stderr), "{code:?} {stderr:?}");
        }
    }
}
