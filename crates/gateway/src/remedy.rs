//! Commands that carry out a remedy, shown to people at a terminal.

use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::spec::InstanceSpec;

/// Returns the command for a remedy in backquotes. `name` is the full name of the instance; `missing` contains the keys
/// of the values that its user must set.
pub fn command(remedy: Remedy, name: &str, missing: &[String]) -> String {
    match remedy {
        Remedy::Restart => format!("`satellite restart {name}`"),
        Remedy::Start => format!("`satellite start {name}`"),
        // A file is missing or unusable, as the status message says.
        Remedy::Configure if missing.is_empty() => "`satellite reload`".to_owned(),
        Remedy::Configure => format!("`satellite configure {name} {}`", missing.join(" ")),
        Remedy::Authorize => format!("`satellite auth {name}`"),
        Remedy::Reconnect => format!("`satellite reconnect {name}`"),
        Remedy::ReadLogs => format!("`satellite logs {name}`"),
    }
}

/// Returns the next step as a short sentence for a table or the end of a message.
pub fn next_step(remedy: Remedy, spec: &InstanceSpec) -> String {
    let command = command(remedy, &spec.name, &spec.missing);
    match remedy {
        Remedy::Authorize => format!("{command} if it takes OAuth, else other credentials in the configuration"),
        Remedy::Restart | Remedy::Start | Remedy::Configure | Remedy::Reconnect | Remedy::ReadLogs => command,
    }
}
