//! Description of a sandbox: mounts, network, working directory and user of a server. The launchers translate it into
//! command lines.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use mcp_satellite_actors::model::policy::IsolationPolicy;

pub(super) const HOME: &str = "/home/mcp";

const SYSTEM: [&str; 5] = ["/usr", "/lib", "/lib64", "/bin", "/sbin"];

// The parts of `/etc` that programs need: resolver, certificates, users, time, the loader, and Debian's links.
const ETC: [&str; 20] = [
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/gai.conf",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
];

const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/urandom"];

const HOSTNAME_MAX: usize = 64;

pub(super) trait SandboxLauncher: Send + Sync {
    fn name(&self) -> &'static str;
    fn depth(&self) -> usize;
    /// Builds the command that runs a server in `sandbox`. Its arguments come last, so that none is read as an option of
    /// the sandbox. Its variables are in the file of options: the sandbox starts with an empty environment, so that no
    /// variable of a configuration changes the sandbox.
    fn wrap(&self, sandbox: &SandboxSpec, server: SandboxedCommand<'_>) -> SandboxCommand;
    fn own_failure_predicate(&self) -> fn(Option<i32>, &str) -> bool;
    fn unsupported_reason(&self, _sandbox: &SandboxSpec) -> Option<String> {
        None
    }
}

/// Command of a server, as it is executed in the sandbox. Not `Debug`: it contains secrets.
pub(super) struct SandboxedCommand<'a> {
    pub(super) program: &'a Path,
    pub(super) args: Vec<OsString>,
    pub(super) environment: &'a BTreeMap<OsString, OsString>,
}

/// Command of a sandbox. Not `Debug`: it contains secrets.
pub(super) struct SandboxCommand {
    pub(super) command: PathBuf,
    pub(super) args: Vec<OsString>,
    /// Content of the file that the sandbox reads from `OPTIONS_FILE_FD`.
    pub(super) options_file: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SandboxSpec {
    pub(super) hostname: String,
    /// In mount order: a mount below another comes after it.
    pub(super) mounts: Vec<SandboxMount>,
    pub(super) tmp_size: u64,
    pub(super) network: bool,
    pub(super) directory: PathBuf,
    pub(super) identity: SandboxUser,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SandboxMount {
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) kind: MountKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountKind {
    ReadOnly,
    Writable,
    Device,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SandboxUser {
    /// User `SANDBOX_USER` inside and outside: the satellite is root.
    Outside,
    /// `SANDBOX_USER` inside the user namespace; outside the user of the satellite.
    Inside { user: u32, group: u32 },
}

impl SandboxSpec {
    pub(super) fn new(policy: &IsolationPolicy, team: &str, home: &Path, identity: SandboxUser) -> Self {
        let same = |path: &str, kind| SandboxMount { source: path.into(), target: path.into(), kind };
        let exists = |path: &&&str| Path::new(path).exists();
        let mut mounts: Vec<SandboxMount> =
            SYSTEM.iter().chain(&ETC).filter(exists).map(|path| same(path, MountKind::ReadOnly)).collect();
        mounts.extend(DEVICES.iter().filter(exists).map(|path| same(path, MountKind::Device)));
        mounts.push(SandboxMount { source: home.into(), target: HOME.into(), kind: MountKind::Writable });
        mounts.extend(policy.binds.iter().map(|bind| SandboxMount {
            source: bind.source.clone(),
            target: bind.target.clone(),
            kind: if bind.writable { MountKind::Writable } else { MountKind::ReadOnly },
        }));
        // A mount on a parent directory must not hide one below it. The sort is stable for equal depths.
        mounts.sort_by_key(|mount| mount.target.components().count());
        let mut hostname = format!("mcp-{team}");
        hostname.truncate(hostname.floor_char_boundary(HOSTNAME_MAX));
        let (tmp_size, network) = (policy.tmp_size, policy.network);
        Self { hostname, mounts, tmp_size, network, directory: HOME.into(), identity }
    }

    /// Returns the maximum number of files in `/tmp`: one for each page of its size, at least 1,024. An empty file uses
    /// more than a kilobyte of kernel memory, which the size does not limit.
    pub(super) fn tmp_files(&self) -> u64 {
        const PAGE: u64 = 4096;
        const LEAST: u64 = 1024;
        (self.tmp_size / PAGE).max(LEAST)
    }

    pub(super) fn has_directory(&self, path: &Path) -> bool {
        let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let created = self.directories();
        plain
            && (path == Path::new("/tmp")
                || created.iter().any(|directory| directory == path)
                || self.mounts.iter().any(|mount| {
                    let below = path.strip_prefix(&mount.target);
                    below.is_ok_and(|below| mount.source.join(below).is_dir())
                }))
    }

    pub(super) fn is_visible(&self, path: &Path) -> bool {
        self.mounts.iter().any(|mount| path.starts_with(&mount.target) && mount.source == mount.target)
    }

    /// Mounts a program and the target of its links, read-only: its path in the configuration is the permission.
    pub(super) fn mount_program(&mut self, program: &Path) {
        let real = program.canonicalize().ok();
        for path in [Some(program.to_owned()), real].into_iter().flatten() {
            if !self.is_visible(&path) {
                self.mounts.push(SandboxMount { source: path.clone(), target: path, kind: MountKind::ReadOnly });
            }
        }
    }

    pub(super) fn directories(&self) -> Vec<PathBuf> {
        let mut directories: Vec<PathBuf> = Vec::new();
        for mount in &self.mounts {
            let above: Vec<&Path> = mount.target.ancestors().skip(1).filter(|path| path.parent().is_some()).collect();
            for path in above.into_iter().rev() {
                let covered = self.mounts.iter().any(|mount| path.starts_with(&mount.target));
                if !covered && !directories.iter().any(|known| known == path) {
                    directories.push(path.to_owned());
                }
            }
        }
        directories
    }
}

#[cfg(test)]
mod tests {
    use mcp_satellite_actors::model::policy::SandboxBind;

    use super::*;

    fn sandbox(binds: &[(&str, &str)]) -> SandboxSpec {
        let bind = |(source, target): &(&str, &str)| SandboxBind {
            source: source.into(),
            target: target.into(),
            writable: false,
        };
        let policy = IsolationPolicy { binds: binds.iter().map(bind).collect(), ..IsolationPolicy::standard() };
        SandboxSpec::new(&policy, "team_acme", Path::new("/data/homes/x"), SandboxUser::Outside)
    }

    #[test]
    fn only_the_home_is_writable() {
        let sandbox = sandbox(&[]);
        assert_eq!(sandbox.hostname, "mcp-team_acme");
        let writable: Vec<&Path> = sandbox
            .mounts
            .iter()
            .filter(|mount| mount.kind == MountKind::Writable)
            .map(|mount| &*mount.target)
            .collect();
        assert_eq!(writable, [Path::new(HOME)]);
        assert!(sandbox.is_visible(Path::new("/usr/bin/env")));
        for hidden in ["/etc/shadow", "/root", "/data/homes/x", "/home/mcp", "/etc/ssl/private/key"] {
            assert!(!sandbox.is_visible(Path::new(hidden)), "{hidden}");
        }
    }

    #[test]
    fn a_bind_is_visible_at_its_target() {
        let sandbox = sandbox(&[("/srv/acme", "/data"), ("/opt/tools", "/opt/tools")]);
        assert!(sandbox.is_visible(Path::new("/opt/tools/bin/server")));
        assert!(!sandbox.is_visible(Path::new("/srv/acme")));
        assert!(
            sandbox.has_directory(Path::new("/tmp"))
                && sandbox.has_directory(Path::new("/usr/bin"))
                && !sandbox.has_directory(Path::new("/srv/acme"))
        );
        assert!(!sandbox.has_directory(Path::new("/usr/../root")));
        assert_eq!(sandbox.directories().iter().filter(|path| path.starts_with("/opt")).count(), 1);
    }

    #[test]
    fn directories_are_created_outermost_first_and_not_inside_of_mounts() {
        let sandbox = sandbox(&[("/a/b/c", "/a/b/c"), ("/usr/local/x", "/usr/local/x")]);
        let created: Vec<String> = sandbox.directories().iter().map(|path| path.display().to_string()).collect();
        let below_a: Vec<&str> = created.iter().map(String::as_str).filter(|path| path.starts_with("/a")).collect();
        assert_eq!(below_a, ["/a", "/a/b"]);
        assert!(!created.iter().any(|path| path.starts_with("/usr")), "{created:?}");
    }

    #[test]
    fn a_hostname_is_cut_at_the_limit_of_the_kernel() {
        let sandbox =
            SandboxSpec::new(&IsolationPolicy::standard(), &"t".repeat(100), Path::new("/h"), SandboxUser::Outside);
        assert_eq!(sandbox.hostname.len(), 64);
    }
}
