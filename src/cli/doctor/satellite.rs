//! Probes of the satellite itself: versions, data directory, configuration.

use std::path::Path;

use nix::sys::statvfs::statvfs;

use super::finding::DoctorFinding;
use crate::config::Plan;
use crate::console::api::StatusReply;
use crate::console::client::ClientError;
use crate::data_dir::DataDir;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Free bytes below which the journal may fill the disk soon.
const DISK_LOW: u64 = 1 << 30;
/// Free bytes below which the satellite cannot work reliably.
const DISK_EMPTY: u64 = 64 << 20;

/// Compares the version of this program with the running satellite.
pub(super) fn versions(status: Option<&Result<StatusReply, ClientError>>) -> Vec<DoctorFinding> {
    let version = format!("version {VERSION}");
    let finding = match status {
        Some(Ok(StatusReply { satellite, .. })) if satellite.version == VERSION => {
            DoctorFinding::ok("satellite", "version", format!("{version}, running with pid {}", satellite.pid))
        }
        Some(Ok(StatusReply { satellite, .. })) => {
            let message = format!("this program has {version}, the running satellite {}", satellite.version);
            DoctorFinding::warning("satellite", "version", message).next("restart the satellite to run the new version")
        }
        Some(Err(ClientError::NotRunning { .. })) => {
            DoctorFinding::ok("satellite", "version", format!("{version}; no satellite is running"))
        }
        Some(Err(_)) | None => DoctorFinding::ok("satellite", "version", version),
    };
    vec![finding]
}

/// Checks owner, permissions and free space of the data directory.
pub(super) fn data_directory(path: &Path) -> Vec<DoctorFinding> {
    let shown = path.display();
    let subject = "data directory";
    let opened = DataDir::open(path).and_then(|directory| directory.inspect());
    let finding = match opened {
        Ok(()) => DoctorFinding::ok("satellite", subject, format!("{shown}: private to this user")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            DoctorFinding::ok("satellite", subject, format!("{shown} does not exist; the first start creates it"))
        }
        Err(error) => DoctorFinding::error("satellite", subject, format!("{shown} cannot be used: {error}"))
            .next("repair it as the message says"),
    };
    std::iter::once(finding).chain(free_space(path)).collect()
}

fn free_space(path: &Path) -> Option<DoctorFinding> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|directory| directory.is_dir())?;
    let disk = statvfs(existing).ok()?;
    let free = disk.blocks_available().saturating_mul(disk.fragment_size());
    let message = format!("{:.1} GB free at {}", free as f64 / 1e9, existing.display());
    let next = "free space on the disk, or name another --data-dir";
    Some(match free {
        ..DISK_EMPTY => DoctorFinding::error("satellite", "disk", message).next(next),
        DISK_EMPTY..DISK_LOW => DoctorFinding::warning("satellite", "disk", message).next(next),
        _ => DoctorFinding::ok("satellite", "disk", message),
    })
}

/// Returns the size and the warnings of a valid configuration.
pub(super) fn configuration(plan: &Plan) -> Vec<DoctorFinding> {
    let size = format!("valid; teams: {}, users: {}, servers: {}", plan.teams, plan.users, plan.instances.len());
    let valid = DoctorFinding::ok("configuration", "configuration", size);
    let warning = |text: &String| {
        DoctorFinding::warning("configuration", "configuration", text).next("change the setting that the message names")
    };
    std::iter::once(valid).chain(plan.warnings.iter().map(warning)).collect()
}

/// Describes the configuration if no file is named.
pub(super) fn no_configuration(status: Option<&StatusReply>) -> DoctorFinding {
    match status {
        Some(status) => {
            let size = format!("in use: {} servers", status.instances.len());
            DoctorFinding::ok("configuration", "configuration", size)
        }
        None => DoctorFinding::ok("configuration", "configuration", "no file is named, so no server was examined")
            .next("add --config FILE or --mcp-json FILE to examine the servers"),
    }
}

/// Reports files that the running satellite has rejected.
pub(super) fn rejected_configuration(status: &StatusReply) -> Option<DoctorFinding> {
    let rejected = status.satellite.rejected_configuration.as_ref()?;
    let finding = DoctorFinding::error("configuration", "changed files", rejected.to_string());
    Some(finding.next("correct the files; `satellite check --config FILE` shows the places"))
}
