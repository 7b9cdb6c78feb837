//! Script of a simulated server: its behaviour as data. The default is a healthy server with three tools.

use std::time::Duration;

use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::seam::ProcessEnd;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

/// Behaviour of a simulated server. Each field is a flag of `satellite sim-server` with the same name in hyphens, except
/// where noted; durations are written `500ms`, `2s`, `1m30s`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct SimScript {
    /// Name in `serverInfo`
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().name))]
    pub name: String,
    /// Version in `serverInfo` (the flag is `--server-version`)
    #[cfg_attr(feature = "cli", arg(long = "server-version", id = "server_version", value_name = "VERSION", default_value_t = Self::default().version))]
    pub version: String,
    /// Protocol version of the response to `initialize` [default: the requested version if it is supported]
    #[cfg_attr(feature = "cli", arg(long))]
    pub protocol_version: Option<String>,
    /// Supported eras of the protocol
    #[cfg_attr(feature = "cli", arg(long, value_enum, default_value_t = SpokenEras::Sessions))]
    pub speaks: SpokenEras,
    /// Number of listed tools: `echo`, `add`, `sleep`, then `tool_4`, `tool_5` …
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().tools))]
    pub tools: usize,
    /// Also list the special tools `big`, `fail`, `tool_error`, `crash`, `env`, `huge` and `received`. They can be called
    /// without this flag, too. The tool `ask` is never listed: without a session it sends its client `rounds` requests
    /// of the method `method`
    #[cfg_attr(feature = "cli", arg(long))]
    pub all_tools: bool,
    /// Number of listed resources; with 0 the server has no resources capability
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub resources: usize,
    /// Number of listed resource templates
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub resource_templates: usize,
    /// Number of listed prompts; with 0 the server has no prompts capability
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub prompts: usize,
    /// Number of entries on a page of a list; 0 means all
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub page_size: usize,
    /// Answer `resources/list` with a JSON-RPC error in spite of the resources capability
    #[cfg_attr(feature = "cli", arg(long))]
    pub resources_error: bool,
    /// Offer no tools capability and reject the methods of tools
    #[cfg_attr(feature = "cli", arg(long))]
    pub no_tools_capability: bool,
    /// Seed of all random numbers
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub seed: u64,
    /// Maximum random deviation of each delay and lifetime, as a fraction from 0 to 1
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0.0))]
    pub jitter: f64,

    /// Delay between the start and the first read
    #[cfg_attr(feature = "cli", arg(long, value_parser = duration, default_value = "0s"))]
    #[serde(with = "jiff::fmt::serde::unsigned_duration::friendly::compact::required")]
    pub start_delay: Duration,
    /// Delay of the response to `initialize`
    #[cfg_attr(feature = "cli", arg(long, value_parser = duration, default_value = "0s"))]
    #[serde(with = "jiff::fmt::serde::unsigned_duration::friendly::compact::required")]
    pub handshake_delay: Duration,
    /// Never answer `initialize`
    #[cfg_attr(feature = "cli", arg(long))]
    pub handshake_never: bool,
    /// Answer `initialize` with a JSON-RPC error that has this message
    #[cfg_attr(feature = "cli", arg(long))]
    pub handshake_error: Option<String>,
    /// Code of the error of `--handshake-error`, and of the error of `initialize` from a server without sessions
    #[cfg_attr(feature = "cli", arg(long, allow_negative_numbers = true))]
    pub handshake_code: Option<i64>,
    /// Exit after an error response to `initialize`, with `exit_signal` or `exit_code`
    #[cfg_attr(feature = "cli", arg(long))]
    pub exit_on_refusal: bool,
    /// Never answer `server/discover`
    #[cfg_attr(feature = "cli", arg(long))]
    pub discover_never: bool,

    /// Exit this long after `notifications/initialized`, with `exit_signal` or `exit_code`
    #[cfg_attr(feature = "cli", arg(long, value_parser = duration))]
    #[serde(with = "jiff::fmt::serde::unsigned_duration::friendly::compact::optional")]
    pub exit_after: Option<Duration>,
    /// Exit at the start, before the first read
    #[cfg_attr(feature = "cli", arg(long))]
    pub exit_before_handshake: bool,
    /// Exit instead of answering the tool call with this number, counted from 1
    #[cfg_attr(feature = "cli", arg(long))]
    pub exit_on_call: Option<u64>,
    /// Exit code of an exit by this script and after a handled SIGTERM
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub exit_code: i32,
    /// Signal that ends the server in an exit by this script, instead of an exit code
    #[cfg_attr(feature = "cli", arg(long))]
    pub exit_signal: Option<i32>,

    /// Delay of the response to every tool call
    #[cfg_attr(feature = "cli", arg(long, value_parser = duration, default_value = "0s"))]
    #[serde(with = "jiff::fmt::serde::unsigned_duration::friendly::compact::required")]
    pub call_delay: Duration,
    /// Hang at the tool call after this many: the server reads and answers nothing from then on
    #[cfg_attr(feature = "cli", arg(long))]
    pub hang_after: Option<u64>,
    /// Never answer tool calls; answer all other requests
    #[cfg_attr(feature = "cli", arg(long))]
    pub hang_calls: bool,

    /// Handle SIGTERM and the end of stdin: exit with `exit_code` after this delay
    #[cfg_attr(feature = "cli", arg(long, value_parser = duration))]
    #[serde(with = "jiff::fmt::serde::unsigned_duration::friendly::compact::optional")]
    pub sigterm_delay: Option<Duration>,
    /// Ignore SIGTERM
    #[cfg_attr(feature = "cli", arg(long))]
    pub ignore_sigterm: bool,
    /// Ignore the end of stdin instead of exiting with code 0
    #[cfg_attr(feature = "cli", arg(long))]
    pub ignore_eof: bool,

    /// Number of bytes allocated and kept by every tool call
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub grow_per_call: usize,
    /// Limit of the kept bytes: beyond it the server is killed by SIGKILL, as by the kernel; 0 means no limit
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub memory_max: usize,

    /// Number of lines per second on stderr
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub stderr_lines_per_second: u32,
    /// Number of bytes per second on stderr, in lines of 1 KiB; lines that are not read in time are left out
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub stderr_bytes_per_second: u64,
    /// Number of bytes on stderr at the start, before anything else
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub stderr_burst_bytes: usize,
    /// Text of the lines on stderr; without a rate it is printed once at the start. `{env:NAME}` is replaced by that
    /// variable
    #[cfg_attr(feature = "cli", arg(long))]
    pub stderr_text: Option<String>,
    /// Number of lines before each response that are not JSON, or JSON but not JSON-RPC
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub garbage_lines: usize,
    /// Number of such lines on stdout at the start
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub stdout_garbage_at_start: usize,
    /// Number of stray responses before each response: this many to an earlier request, and this many to a request that
    /// was never made
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub stray_answers: usize,
    /// Length in bytes of the line with which the tool `huge` responds
    #[cfg_attr(feature = "cli", arg(long, default_value_t = Self::default().huge_line_bytes))]
    pub huge_line_bytes: usize,

    /// Add a tool and send `notifications/tools/list_changed` this long after `initialized`
    #[cfg_attr(feature = "cli", arg(long, value_parser = duration))]
    #[serde(with = "jiff::fmt::serde::unsigned_duration::friendly::compact::optional")]
    pub list_changed_after: Option<Duration>,
    /// Answer `tools/list` with a JSON-RPC error
    #[cfg_attr(feature = "cli", arg(long))]
    pub list_error: bool,
    /// Number of `tools/list` requests, from the first, that are answered with an error
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 0))]
    pub list_error_times: u64,

    /// Start a child process that outlives the server
    #[cfg_attr(feature = "cli", arg(long, value_enum))]
    pub grandchild: Option<Grandchild>,
}

/// Eras of the protocol that a server supports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum SpokenEras {
    /// Up to 2025-11-25: a session begins with `initialize`.
    #[default]
    Sessions,
    /// 2026-07-28: every request is stateless.
    Stateless,
    /// Both; on stdio the first request selects the era.
    Both,
}

/// Process that a server starts and leaves behind. In the simulation `gone()` counts it until it receives a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Grandchild {
    /// Ends by the SIGTERM to its group.
    Plain,
    /// Ignores SIGTERM.
    IgnoreTerm,
    /// In its own session, beyond the signals to the group.
    Setsid,
    /// Orphan from the start: its parent has exited. Ignores SIGTERM.
    DoubleFork,
    /// Orphan in its own session, like a daemon. Ignores SIGTERM.
    Daemon,
}

impl Default for SimScript {
    fn default() -> Self {
        Self {
            name: "sim-server".to_owned(),
            version: "1.0.0".to_owned(),
            protocol_version: None,
            speaks: SpokenEras::Sessions,
            tools: 3,
            all_tools: false,
            resources: 0,
            resource_templates: 0,
            prompts: 0,
            page_size: 0,
            resources_error: false,
            no_tools_capability: false,
            seed: 0,
            jitter: 0.0,
            start_delay: Duration::ZERO,
            handshake_delay: Duration::ZERO,
            handshake_never: false,
            handshake_error: None,
            handshake_code: None,
            exit_on_refusal: false,
            discover_never: false,
            exit_after: None,
            exit_before_handshake: false,
            exit_on_call: None,
            exit_code: 0,
            exit_signal: None,
            call_delay: Duration::ZERO,
            hang_after: None,
            hang_calls: false,
            sigterm_delay: None,
            ignore_sigterm: false,
            ignore_eof: false,
            grow_per_call: 0,
            memory_max: 0,
            stderr_lines_per_second: 0,
            stderr_bytes_per_second: 0,
            stderr_burst_bytes: 0,
            stderr_text: None,
            garbage_lines: 0,
            stdout_garbage_at_start: 0,
            stray_answers: 0,
            // One MiB over the satellite's default limit of a line.
            huge_line_bytes: 17 * 1024 * 1024,
            list_changed_after: None,
            list_error: false,
            list_error_times: 0,
            grandchild: None,
        }
    }
}

impl SimScript {
    pub(super) fn end(&self) -> ProcessEnd {
        match self.exit_signal {
            Some(signal) => ProcessEnd { code: None, signal: Some(signal) },
            None => ProcessEnd { code: Some(self.exit_code), signal: None },
        }
    }

    /// Returns true if the script writes to stderr. Without, a simulated server has no stderr, so ten thousand save a
    /// pipe each.
    pub(super) fn has_stderr_output(&self) -> bool {
        self.stderr_lines_per_second > 0
            || self.stderr_bytes_per_second > 0
            || self.stderr_burst_bytes > 0
            || self.stderr_text.is_some()
    }
}

/// Random numbers of one run: the same seed and run produce the same sequence.
pub(super) struct RunRng {
    seed: u64,
    run: RunNumber,
    drawn: u64,
}

impl RunRng {
    pub(super) fn new(seed: u64, run: RunNumber) -> Self {
        Self { seed, run, drawn: 0 }
    }

    /// Varies `duration` randomly by up to the fraction `jitter` either way.
    pub(super) fn apply_jitter(&mut self, duration: Duration, jitter: f64) -> Duration {
        if jitter <= 0.0 || duration.is_zero() {
            return duration;
        }
        let jitter = jitter.min(1.0);
        // A generator per draw: ten thousand idle servers keep 24 bytes each, not a generator's state.
        let mut seed = [0; 32];
        for (part, number) in seed.chunks_exact_mut(8).zip([self.seed, self.run.0, self.drawn]) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        self.drawn += 1;
        duration.mul_f64(1.0 + StdRng::from_seed(seed).random_range(-jitter..=jitter))
    }
}

#[cfg(feature = "cli")]
fn duration(text: &str) -> Result<Duration, jiff::Error> {
    jiff::fmt::friendly::SpanParser::new().parse_unsigned_duration(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

    use super::*;

    #[cfg(feature = "cli")]
    fn flags(flags: &[&str]) -> SimScript {
        use clap::{Args, FromArgMatches};
        let command = SimScript::augment_args(clap::Command::new("sim-server").no_binary_name(true));
        SimScript::from_arg_matches(&command.try_get_matches_from(flags).unwrap()).unwrap()
    }

    #[cfg(feature = "cli")]
    #[test]
    fn without_flags_the_script_is_the_default_and_each_flag_sets_its_field() {
        assert_eq!(flags(&[]), SimScript::default());
        let parsed = flags(&[
            "--tools=5",
            "--exit-after=1m30s",
            "--handshake-delay=500ms",
            "--exit-code=3",
            "--ignore-sigterm",
            "--grandchild=ignore-term",
            "--server-version=2",
        ]);
        let expected = SimScript {
            tools: 5,
            exit_after: Some(Duration::from_secs(90)),
            handshake_delay: Duration::from_millis(500),
            exit_code: 3,
            ignore_sigterm: true,
            grandchild: Some(Grandchild::IgnoreTerm),
            version: "2".to_owned(),
            ..SimScript::default()
        };
        assert_eq!(parsed, expected);
    }

    #[test]
    fn a_script_survives_json_and_missing_fields_get_their_defaults() {
        let script = SimScript { exit_after: Some(Duration::from_millis(1500)), ..SimScript::default() };
        let json = serde_json::to_string(&script).unwrap();
        assert_eq!(serde_json::from_str::<SimScript>(&json).unwrap(), script);
        let short = r#"{"exit_after": "1500ms"}"#;
        assert_eq!(serde_json::from_str::<SimScript>(short).unwrap(), script);
        assert!(serde_json::from_str::<SimScript>(r#"{"exitAfter": "1s"}"#).is_err());
    }

    #[test]
    fn only_the_same_seed_and_run_draw_the_same_numbers() {
        let second = Duration::from_secs(1);
        let draw = |seed, run| {
            let mut rng = RunRng::new(seed, RunNumber(run));
            [rng.apply_jitter(second, 0.5), rng.apply_jitter(second, 0.5)]
        };
        assert_eq!(draw(1, 7), draw(1, 7));
        assert_ne!(draw(1, 7), draw(1, 8));
        assert_ne!(draw(1, 7), draw(2, 7));
        let [first, next] = draw(1, 7);
        assert_ne!(first, next);
        assert!((0.5..=1.5).contains(&first.as_secs_f64()));
    }
}
