//! `satellite sim-server`: a scripted MCP server, for tests, the demo and the load harness.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{FAILED, print_error};
use crate::connect::process::raise_descriptor_limit;
use crate::connect::sim::{AnswerFormat, HttpOptions, SimScript, serve_http, serve_stdio};

#[derive(Args)]
pub(super) struct SimServerCommand {
    #[command(flatten)]
    script: SimScript,
    /// File with the script as JSON, instead of the flags of a script
    #[arg(long, value_name = "FILE", hide = true)]
    script_file: Option<PathBuf>,

    /// Address for streamable HTTP instead of stdio. Each session is a separate server. Port 0 selects a free port. The first line
    /// on stdout is `listening on http://ADDRESS/mcp`; GET /stats returns its statistics as JSON
    #[arg(long, value_name = "ADDRESS")]
    http: Option<SocketAddr>,
    /// Path of the HTTP endpoint
    #[arg(long, requires = "http", default_value = "/mcp")]
    path: String,
    /// Format of the response to a POST
    #[arg(long, requires = "http", value_enum, default_value_t)]
    answers: AnswerFormat,
    /// Answer GET with 405 instead of a stream, as many servers do
    #[arg(long, requires = "http")]
    no_get_stream: bool,
}

impl SimServerCommand {
    pub(super) fn run(mut self) -> i32 {
        if let Some(file) = &self.script_file {
            match read_script(file) {
                Ok(script) => self.script = script,
                Err(error) => {
                    print_error(&format!("cannot read {}: {error}", file.display()));
                    return i32::from(FAILED);
                }
            }
        }
        match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(self.serve()),
            Err(error) => {
                print_error(&format!("cannot start the async runtime: {error}"));
                i32::from(FAILED)
            }
        }
    }

    async fn serve(self) -> i32 {
        let Some(address) = self.http else { return serve_stdio(self.script).await };
        // A session may need two connections; if the limit cannot be raised, fewer sessions fit.
        let _ = raise_descriptor_limit();
        let Self { path, answers, no_get_stream, .. } = self;
        let options = HttpOptions { address, path: path.clone(), answers, get_stream: !no_get_stream };
        let listening = |address| {
            // A closed stdout is no reason to exit.
            let _ = writeln!(std::io::stdout().lock(), "listening on http://{address}{path}");
        };
        match serve_http(self.script, options, listening).await {
            Ok(code) => code,
            Err(error) => {
                print_error(&format!("cannot serve HTTP on {address}: {error}"));
                i32::from(FAILED)
            }
        }
    }
}

fn read_script(file: &Path) -> std::io::Result<SimScript> {
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}
