//! `satellite service`: the systemd unit of the user.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use clap::{Args, Subcommand};

use super::installed_binary::installed_binary;
use super::{BAD_INPUT, CommandFailure, DONE, FAILED, print_text};
use mcp_satellite_files::user_dirs;

const UNIT: &str = "mcp-satellite.service";
/// First line of the units that this command writes. It overwrites and removes no others.
const MARK: &str = "# Written by `satellite service install`.";

#[derive(Debug, Args)]
pub(super) struct ServiceCommand {
    #[command(subcommand)]
    verb: ServiceVerb,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum ServiceVerb {
    /// Write the unit, and start the satellite at each login from now on
    Install,
    /// Stop the satellite of the unit, and remove the unit
    Uninstall,
    /// Show whether the unit is installed, enabled and active; exit code 3 if it is not active
    Status,
}

impl ServiceCommand {
    pub(super) fn run(self) -> Result<u8, CommandFailure> {
        match self.verb {
            ServiceVerb::Install => install(),
            ServiceVerb::Uninstall => uninstall(),
            ServiceVerb::Status => status(),
        }
    }
}

/// The unit of this user, which is installed.
pub(super) struct UserService(());

#[expect(clippy::unused_self, reason = "only an installed unit can be started")]
impl UserService {
    /// Returns the unit of this user, if it is installed.
    pub(super) fn find() -> Option<Self> {
        unit_path().ok().filter(|unit| unit.is_file()).map(|_| Self(()))
    }

    /// Returns true if this process can reach the user's service manager.
    pub(super) fn is_usable(&self) -> bool {
        systemctl(&["show-environment"]).is_ok()
    }

    /// Returns an error if the satellite of the unit has failed.
    pub(super) fn check(&self) -> Result<(), CommandFailure> {
        if answer("is-active")? != "failed" {
            return Ok(());
        }
        let message = "the satellite of the systemd unit has failed; see `journalctl --user -u mcp-satellite`";
        Err(CommandFailure::new(FAILED, message))
    }

    pub(super) fn start(&self) -> Result<(), CommandFailure> {
        systemctl(&["start", UNIT]).map(drop)
    }
}

fn unit_path() -> Result<PathBuf, CommandFailure> {
    let dir = user_dirs::unit_dir().ok_or_else(|| CommandFailure::new(FAILED, "this user has no home directory"))?;
    Ok(dir.join(UNIT))
}

/// Runs `systemctl --user`.
fn systemctl(args: &[&str]) -> Result<Output, CommandFailure> {
    let output = Command::new("systemctl").arg("--user").args(args).stdin(Stdio::null()).output();
    let failed = |why: &str| {
        let message = format!("cannot use the service manager of this user: {why}; `satellite up` works without it");
        CommandFailure::new(FAILED, message)
    };
    match output {
        Ok(output) if output.status.success() => Ok(output),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr);
            let why = if why.trim().is_empty() { output.status.to_string() } else { why.trim().to_owned() };
            Err(failed(&format!("`systemctl --user {}` failed: {why}", args.join(" "))))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(failed("`systemctl` is not installed, so this system has no systemd"))
        }
        Err(error) => Err(failed(&format!("cannot run `systemctl`: {error}"))),
    }
}

/// Returns the answer of a command such as `is-active`, which is on stdout also if the command fails.
fn answer(verb: &str) -> io::Result<String> {
    let output = Command::new("systemctl").args(["--user", verb, UNIT]).stdin(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn install() -> Result<u8, CommandFailure> {
    systemctl(&["show-environment"])?;
    let unit = unit_path()?;
    let text = unit_text()?;
    check_ours(&unit)?;
    if let Some(parent) = unit.parent() {
        fs::create_dir_all(parent).map_err(|error| cannot("create", parent, &error))?;
    }
    fs::write(&unit, text).map_err(|error| cannot("write", &unit, &error))?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["enable", UNIT])?;
    print_text(&format!(
        "the unit {} is installed; the satellite starts when you log in\n  satellite up                    start it now\n  \
         loginctl enable-linger          start it with the machine, and keep it when you log out\n  \
         journalctl --user -u mcp-satellite   its log",
        unit.display()
    ));
    Ok(DONE)
}

fn uninstall() -> Result<u8, CommandFailure> {
    let unit = unit_path()?;
    if !unit.exists() {
        print_text("the unit is not installed");
        return Ok(DONE);
    }
    check_ours(&unit)?;
    // Without the service manager the unit does not run, and its file is removed all the same.
    let stopped = systemctl(&["disable", "--now", UNIT]);
    fs::remove_file(&unit).map_err(|error| cannot("remove", &unit, &error))?;
    stopped?;
    systemctl(&["daemon-reload"])?;
    print_text(&format!("the unit {} is removed; the data of the satellite stays", unit.display()));
    Ok(DONE)
}

fn status() -> Result<u8, CommandFailure> {
    let unit = unit_path()?;
    if !unit.exists() {
        print_text("the unit is not installed; `satellite service install` installs it");
        return Ok(super::NO_SATELLITE);
    }
    systemctl(&["show-environment"])?;
    let (enabled, active) = (answer("is-enabled")?, answer("is-active")?);
    print_text(&format!("{}: {enabled}, {active}", unit.display()));
    Ok(if active == "active" { DONE } else { super::NO_SATELLITE })
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> CommandFailure {
    CommandFailure::new(FAILED, format!("cannot {what} {}: {error}", path.display()))
}

fn check_ours(unit: &Path) -> Result<(), CommandFailure> {
    match fs::read_to_string(unit) {
        Ok(text) if text.starts_with(MARK) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(cannot("read", unit, &error)),
        Ok(_) => {
            let message = format!(
                "{} was not written by `satellite service install`; move it away if it is not needed",
                unit.display()
            );
            Err(CommandFailure::new(BAD_INPUT, message))
        }
    }
}

/// Returns the unit for this program and the user's data directory.
fn unit_text() -> Result<String, CommandFailure> {
    let program = installed_binary()?;
    let home = || CommandFailure::new(FAILED, "this user has no home directory");
    let data_dir = user_dirs::data_dir().ok_or_else(home)?;
    let (program, data_dir) = (quoted(&program)?, quoted(&data_dir)?);
    // `mixed`: SIGTERM goes to the satellite only, which then ends each server once.
    Ok(format!(
        "{MARK}
[Unit]
Description=MCP satellite

[Service]
Type=notify
NotifyAccess=main
WatchdogSec=30s
ExecStart={program} run --data-dir {data_dir}
ExecReload={program} reload --data-dir {data_dir}
Restart=on-failure
KillMode=mixed
Delegate=yes

[Install]
WantedBy=default.target
"
    ))
}

/// Quotes a path for a command line of systemd.
fn quoted(path: &Path) -> Result<String, CommandFailure> {
    let bad = || CommandFailure::new(FAILED, format!("a unit cannot contain the path {}", path.display()));
    let text = path.to_str().filter(|text| !text.contains(char::is_control)).ok_or_else(bad)?;
    let escaped = text.replace('\\', r"\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    Ok(format!("\"{escaped}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_for_systemd() {
        let quote = |path: &str| quoted(Path::new(path)).ok();
        assert_eq!(quote("/usr/bin/satellite").as_deref(), Some("\"/usr/bin/satellite\""));
        assert_eq!(quote("/a b/50%/$x/\"q\"\\").as_deref(), Some("\"/a b/50%%/$$x/\\\"q\\\"\\\\\""));
        assert_eq!(quote("/a\nb"), None);
    }
}
