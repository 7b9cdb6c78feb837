//! Launcher for nsjail. nsjail adds one process; the server is the first process of its PID namespace.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::sandbox_spec::{MountKind, SandboxCommand, SandboxLauncher, SandboxSpec, SandboxUser, SandboxedCommand};
use crate::process::OPTIONS_FILE_FD;
use mcp_satellite_actors::model::settings::SANDBOX_USER;

pub(super) struct Nsjail {
    pub(super) path: PathBuf,
}

impl SandboxLauncher for Nsjail {
    fn name(&self) -> &'static str {
        "nsjail"
    }

    fn depth(&self) -> usize {
        1
    }

    fn own_failure_predicate(&self) -> fn(Option<i32>, &str) -> bool {
        // nsjail exits with 255 and prints nothing if the program cannot be executed.
        |code, stderr| {
            code == Some(255) && stderr.lines().all(|line| line.starts_with("[F][") || line.trim().is_empty())
        }
    }

    fn unsupported_reason(&self, sandbox: &SandboxSpec) -> Option<String> {
        let colon = |path: &Path| path.as_os_str().as_encoded_bytes().contains(&b':');
        let mount = sandbox.mounts.iter().find(|mount| colon(&mount.source) || colon(&mount.target))?;
        let path = mount.source.display();
        Some(format!("nsjail cannot mount a path with a colon: `{path}`; rename it, or use bubblewrap"))
    }

    fn wrap(&self, sandbox: &SandboxSpec, server: SandboxedCommand<'_>) -> SandboxCommand {
        let mut line: Vec<OsString> = Vec::new();
        let mut add =
            |words: &[&dyn AsRef<std::ffi::OsStr>]| line.extend(words.iter().map(|word| word.as_ref().to_owned()));
        // nsjail's default limits and niceness are switched off, and its log messages below errors must not appear in
        // the server's stderr.
        add(&[&"--really_quiet"]);
        // Before the other options, because a configuration replaces all options before it.
        add(&[&"--config", &format!("/proc/self/fd/{OPTIONS_FILE_FD}")]);
        add(&[&"--mode", &"o", &"--disable_rlimits", &"--nice_level", &"0", &"--time_limit", &"0", &"--skip_setsid"]);
        if sandbox.network {
            add(&[&"--disable_clone_newnet"]);
        }
        match sandbox.identity {
            SandboxUser::Outside => {
                let id = SANDBOX_USER.to_string();
                add(&[&"--disable_clone_newuser", &"--user", &id, &"--group", &id]);
            }
            // Root of the surrounding namespace is the satellite's user.
            SandboxUser::Inside { .. } => {
                let id = format!("{SANDBOX_USER}:0:1");
                add(&[&"--user", &id, &"--group", &id]);
            }
        }
        add(&[&"--hostname", &sandbox.hostname, &"--cwd", &sandbox.directory]);
        add(&[
            &"--mount",
            &format!("none:/tmp:tmpfs:size={},nr_inodes={},mode=1777", sandbox.tmp_size, sandbox.tmp_files()),
        ]);
        for mount in &sandbox.mounts {
            let how = match mount.kind {
                MountKind::ReadOnly => "--bindmount_ro",
                MountKind::Writable | MountKind::Device => "--bindmount",
            };
            let mut words = mount.source.clone().into_os_string();
            words.push(":");
            words.push(&mount.target);
            add(&[&how, &words]);
        }
        add(&[&"--", &server.program]);
        line.extend(server.args);
        SandboxCommand { command: self.path.clone(), args: line, options_file: configuration(server.environment) }
    }
}

/// Returns a configuration of nsjail, in the text format of protocol buffers, with the variables of a server.
fn configuration(environment: &BTreeMap<OsString, OsString>) -> Vec<u8> {
    // nsjail mounts `/proc` by default, but not with a configuration.
    let mut text = "mount_proc: true\n".to_owned();
    for (name, value) in environment {
        text.push_str("envar: \"");
        // Octal escapes, because a value can contain quotes, line breaks and bytes that are not UTF-8.
        for byte in [name.as_encoded_bytes(), b"=", value.as_encoded_bytes()].concat() {
            let _ = write!(text, "\\{byte:03o}");
        }
        text.push_str("\"\n");
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_contains_each_byte_of_a_variable() {
        let environment = BTreeMap::from([("A".into(), "\"\n".into()), ("B".into(), OsString::new())]);
        let text = String::from_utf8(configuration(&environment)).unwrap();
        assert_eq!(text, "mount_proc: true\nenvar: \"\\101\\075\\042\\012\"\nenvar: \"\\102\\075\"\n");
    }

    #[test]
    fn the_number_of_files_in_tmp_is_limited() {
        let policy = mcp_satellite_actors::model::policy::IsolationPolicy::standard();
        let sandbox = SandboxSpec::new(&policy, "t", Path::new("/h"), SandboxUser::Outside);
        let server =
            SandboxedCommand { program: Path::new("/bin/true"), args: Vec::new(), environment: &BTreeMap::new() };
        let wrapped = Nsjail { path: "nsjail".into() }.wrap(&sandbox, server);
        let options = wrapped.args.iter().filter_map(|word| word.to_str()).find(|word| word.contains("tmpfs"));
        assert_eq!(options, Some("none:/tmp:tmpfs:size=104857600,nr_inodes=25600,mode=1777"));
    }

    #[test]
    fn a_failure_of_nsjail_is_distinguished_from_one_of_the_server() {
        let is_own = Nsjail { path: "nsjail".into() }.own_failure_predicate();
        assert!(is_own(Some(255), ""));
        assert!(is_own(Some(255), "[F][2026-11-21T11:13:54+0000][1] runChild():506 Launching child process failed\n"));
        for (code, stderr) in [(Some(1), ""), (Some(139), ""), (Some(255), "Traceback:\n"), (None, "")] {
            assert!(!is_own(code, stderr), "{code:?} {stderr:?}");
        }
    }
}
