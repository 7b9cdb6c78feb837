//! `satellite configure`

use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal, Read, Write};
use std::os::fd::AsFd;

use clap::Args;
use mcp_satellite_actors::model::status::Status;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::signal::unix::{SignalKind, signal};

use super::control::{status_sentence, wait_settled, warn_not_durable};
use super::{
    BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED, InstanceArg, print_error, print_json, print_text, to_json,
};
use crate::console::api::{ConfigureRequest, ConfigureResult, RequiredValue, RequiredValueSource};

/// Upper limit for a value from stdin or a file, in bytes. The satellite accepts less.
const READ_MAX: u64 = 1 << 20;

/// Set values that a server's configuration requires from its user (`user_required`, `values`).
///
/// The value is stored in the data directory for its owner only, and the server is restarted with it at once. Without a
/// KEY, lists the required values and whether each is set. A variable in the configuration that is not set is such a value
/// as well.
#[derive(Args)]
#[command(after_help = "\
The value of a KEY alone is read from the terminal, without showing it, or from stdin:
  satellite configure notes API_KEY
  pass show notes | satellite configure notes API_KEY
  satellite configure notes API_KEY=env:NOTES_KEY PEM=file:key.pem
  satellite configure notes API_KEY=sk-1234     visible to every user who lists processes

The command reads env:NAME and file:PATH once and stores their content, without the final line break.

A remote server receives a value as the header KEY, or as the query parameter KEY if its configuration has one; \
header:KEY and query:KEY choose one of them. bearer_token is the token of the header Authorization.")]
pub(super) struct ConfigureCommand {
    #[command(flatten)]
    target: InstanceArg,
    /// KEY, KEY=VALUE, KEY=env:NAME or KEY=file:PATH
    #[arg(value_name = "KEY[=VALUE]")]
    values: Vec<String>,
    /// Remove the value of this key; a value in the configuration applies again
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    /// Do not wait until the server is online or has failed
    #[arg(long)]
    no_wait: bool,
    /// Print {"instance": a row of `status --json`, "required": [{key, description, given_by}]}
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data_dir: DataDirArg,
}

enum TypedValue<'a> {
    Literal(String),
    /// The value must be read from the terminal or stdin. Contains the whole argument.
    Prompt(&'a str),
}

impl ConfigureCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let bad = |why: String| CommandFailure::new(BAD_INPUT, why);
        let mut typed = BTreeMap::new();
        for argument in &self.values {
            let (key, value) = parse_argument(argument)?;
            if typed.insert(key, value).is_some() || self.unset.iter().any(|unset| unset == key) {
                return Err(bad(format!("`{key}` is named twice")));
            }
        }
        let client = self.data_dir.client()?;
        let mut request = ConfigureRequest { selector: self.target.into(), set: BTreeMap::new(), unset: Vec::new() };
        let keys: Vec<&str> = typed
            .values()
            .filter_map(|value| if let TypedValue::Prompt(key) = value { Some(*key) } else { None })
            .collect();
        if !keys.is_empty() {
            // Check the keys first, before a person types a secret in vain.
            let known: ConfigureResult = client.post("/v1/configure", &request).await?;
            reject_unknown(&keys, &known)?;
            let typed_values = prompt_values(&keys, &known.instance.instance).await?;
            typed.extend(keys.into_iter().zip(typed_values.into_iter().map(TypedValue::Literal)));
        }
        let values = typed.into_iter().filter_map(|(key, value)| match value {
            TypedValue::Literal(value) => Some((key.to_owned(), value)),
            TypedValue::Prompt(_) => None,
        });
        request.set = values.collect();
        request.unset = self.unset;
        let is_change = !(request.set.is_empty() && request.unset.is_empty());
        let mut configured: ConfigureResult = client.post("/v1/configure", &request).await?;
        warn_not_durable(configured.not_durable.as_deref());
        if is_change && !self.no_wait {
            configured.instance = wait_settled(&client, configured.instance).await?;
        }
        let row = &configured.instance;
        let came_up = matches!(row.status, Status::Online | Status::AwaitingUserConfig);
        let failed = is_change && !self.no_wait && !came_up && row.status != Status::Offline;
        match (self.json, failed) {
            (true, _) => print_json(&to_json(&configured)?),
            (false, true) => print_error(&status_sentence(row)),
            (false, false) => print_text(&status_sentence(row)),
        }
        if !self.json && !is_change {
            configured.required.iter().for_each(print_required);
            if configured.required.is_empty() {
                print_text("  the configuration requires no value of the user");
            }
        }
        Ok(if failed { FAILED } else { DONE })
    }
}

fn print_required(RequiredValue { key, description, given_by }: &RequiredValue) {
    let by = match given_by {
        Some(RequiredValueSource::Configure) => "given",
        Some(RequiredValueSource::File) => "given in the configuration",
        Some(RequiredValueSource::Default) => "has a default",
        None => "missing",
    };
    let description = description.as_ref().map(|text| format!(" ({text})")).unwrap_or_default();
    print_text(&format!("  {key}: {by}{description}"));
}

/// Parses an argument. References are resolved here, because they mean the environment and the directory of this shell.
fn parse_argument(argument: &str) -> Result<(&str, TypedValue<'_>), CommandFailure> {
    let bad = |why: String| CommandFailure::new(BAD_INPUT, why);
    let (key, value) = match argument.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (argument, None),
    };
    if key.is_empty() {
        return Err(bad("a value has no KEY: write KEY=VALUE".to_owned()));
    }
    let Some(value) = value else { return Ok((key, TypedValue::Prompt(key))) };
    if let Some(name) = value.strip_prefix("env:") {
        let value = std::env::var(name)
            .map_err(|error| bad(format!("cannot read the environment variable `{name}`: {error}")))?;
        return Ok((key, TypedValue::Literal(value)));
    }
    // A URL such as `file://` is an ordinary value.
    if let Some(path) = value.strip_prefix("file:").filter(|path| !path.starts_with("//")) {
        let cannot = |error: std::io::Error| bad(format!("cannot read the file `{path}`: {error}"));
        let file = std::fs::File::open(path).map_err(cannot)?;
        return Ok((key, TypedValue::Literal(read_limited(file).map_err(cannot)?)));
    }
    Ok((key, TypedValue::Literal(value.to_owned())))
}

fn read_limited(from: impl Read) -> std::io::Result<String> {
    let mut text = String::new();
    from.take(READ_MAX).read_to_string(&mut text)?;
    strip_line_end(&mut text);
    Ok(text)
}

fn strip_line_end(text: &mut String) {
    if text.ends_with('\n') {
        text.truncate(text.len() - 1);
        text.truncate(text.len() - usize::from(text.ends_with('\r')));
    }
}

/// Rejects unknown keys as the satellite would, before a value is typed. The message does not repeat the key, which may
/// be a value in the wrong position.
fn reject_unknown(keys: &[&str], known: &ConfigureResult) -> Result<(), CommandFailure> {
    let is_known = |typed: &str| {
        let name = typed.strip_prefix("query:").or(typed.strip_prefix("header:")).unwrap_or(typed);
        let of = |key: &str| key.eq_ignore_ascii_case(name) || (name == "bearer_token" && key == "Authorization");
        known.required.iter().any(|required| of(&required.key))
    };
    if keys.iter().all(|typed| is_known(typed)) {
        return Ok(());
    }
    let name = &known.instance.instance;
    let keys: Vec<&str> = known.required.iter().map(|required| required.key.as_str()).collect();
    Err(CommandFailure::new(
        BAD_INPUT,
        match keys.as_slice() {
            [] => format!("`{name}`: the configuration requires no value of the user"),
            keys => format!("`{name}`: unknown key; the configuration requires: {}", keys.join(", ")),
        },
    ))
}

async fn prompt_values(keys: &[&str], instance: &str) -> Result<Vec<String>, CommandFailure> {
    let bad = |why: &str| CommandFailure::new(BAD_INPUT, why);
    if !std::io::stdin().is_terminal() {
        if keys.len() > 1 {
            return Err(bad("only one value can be read from stdin; give the others as KEY=env:NAME or KEY=file:PATH"));
        }
        let value = tokio::task::spawn_blocking(|| read_limited(std::io::stdin().lock())).await;
        let value = value.map_err(std::io::Error::other)??;
        return if value.is_empty() { Err(bad("stdin contains no value")) } else { Ok(vec![value]) };
    }
    let mut values = Vec::new();
    // Installed before the first prompt, so that no interrupt is lost.
    let mut interrupts = signal(SignalKind::interrupt())?;
    for key in keys {
        let hidden = EchoGuard::begin()?;
        // An interrupt restores the terminal.
        let _ = write!(std::io::stderr(), "{key} of {instance} (not shown): ");
        let reading = tokio::task::spawn_blocking(|| {
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line).map(|_| line)
        });
        let read = tokio::select! {
            read = reading => read.map_err(std::io::Error::other)?,
            _ = interrupts.recv() => Err(std::io::ErrorKind::Interrupted.into()),
        };
        drop(hidden);
        let _ = writeln!(std::io::stderr());
        let mut line = read.map_err(|error| {
            CommandFailure::new(FAILED, format!("cannot read the value: {error}; nothing was changed"))
        })?;
        strip_line_end(&mut line);
        if line.is_empty() {
            return Err(bad("no value was typed; nothing was changed"));
        }
        values.push(line);
    }
    Ok(values)
}

struct EchoGuard(Termios);

impl EchoGuard {
    fn begin() -> std::io::Result<Self> {
        let stdin = std::io::stdin();
        let before = tcgetattr(stdin.as_fd())?;
        let mut silent = before.clone();
        silent.local_modes -= LocalModes::ECHO;
        tcsetattr(stdin.as_fd(), OptionalActions::Flush, &silent)?;
        Ok(Self(before))
    }
}

impl Drop for EchoGuard {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(std::io::stdin().as_fd(), OptionalActions::Now, &self.0);
    }
}
