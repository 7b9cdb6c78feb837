//! Launcher for bubblewrap. bubblewrap adds two processes; the second one is the first process of the PID namespace and
//! reaps there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::sandbox_spec::{MountKind, SandboxCommand, SandboxLauncher, SandboxSpec, SandboxUser};
use mcp_satellite_actors::model::settings::SANDBOX_USER;

const OWN_MESSAGES: [&str; 2] = ["bwrap: ", "setpriv: "];

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

    fn wrap(&self, sandbox: &SandboxSpec, program: &Path, args: Vec<OsString>) -> SandboxCommand {
        let mut line: Vec<OsString> = Vec::new();
        let mut add =
            |words: &[&dyn AsRef<std::ffi::OsStr>]| line.extend(words.iter().map(|word| word.as_ref().to_owned()));
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
        let mut after: Vec<OsString> = vec!["--".into()];
        match sandbox.identity {
            // bubblewrap runs as root of its namespace; `setpriv` drops all capabilities before the server starts.
            SandboxUser::Outside => {
                for capability in ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"] {
                    add(&[&"--cap-add", &capability]);
                }
                after.push(self.setpriv.clone().into());
                let drops = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"];
                after.extend(["--reuid", &id, "--regid", &id].into_iter().chain(drops).map(OsString::from));
            }
            SandboxUser::Inside { .. } => {
                add(&[&"--unshare-user", &"--uid", &id, &"--gid", &id, &"--cap-drop", &"ALL"]);
            }
        }
        after.push(program.into());
        after.extend(args);
        // A server can read the argument list of its PID namespace's first process, and these options contain paths of
        // the machine.
        SandboxCommand { command: self.path.clone(), file_args: line, args: after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
