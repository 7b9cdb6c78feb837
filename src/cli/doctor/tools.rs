//! Probe of the programs that start MCP servers: their paths and versions.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use futures::future::join_all;
use tokio::process::Command;
use tokio::time::timeout;

use super::finding::DoctorFinding;
use crate::connect::isolation::find_program;

const TOOLS: [&str; 6] = ["node", "npx", "python3", "uv", "uvx", "docker"];
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// Length of a version in characters.
const VERSION_MAX: usize = 80;

/// Reports the path and the version of each program.
pub(super) async fn probe() -> Vec<DoctorFinding> {
    join_all(TOOLS.map(describe)).await
}

async fn describe(tool: &'static str) -> DoctorFinding {
    let Ok(path) = find_program(tool, None, None, false, false) else {
        return DoctorFinding::ok("tool", tool, format!("not found; only servers that start with `{tool}` need it"));
    };
    let shown = path.display();
    match version(&path).await {
        Ok(version) => DoctorFinding::ok("tool", tool, format!("{version} ({shown})")),
        Err(why) => DoctorFinding::warning("tool", tool, format!("`{shown} --version` failed: {why}"))
            .next(format!("run `{tool} --version` in a shell and repair the installation")),
    }
}

async fn version(path: &Path) -> Result<String, String> {
    let mut command = Command::new(path);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let output = match timeout(VERSION_TIMEOUT, command.output()).await {
        Ok(output) => output.map_err(|error| error.to_string())?,
        Err(_) => return Err(format!("no answer within {} s", VERSION_TIMEOUT.as_secs())),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().next() {
        Some(line) if output.status.success() => Ok(line.chars().take(VERSION_MAX).collect()),
        _ => Err(output.status.to_string()),
    }
}
