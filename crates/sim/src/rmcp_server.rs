//! The same tools served by rmcp: the baseline that shows the savings of the hand-written server, and a second
//! implementation of the protocol.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::seam::ProcessEnd;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, JsonObject, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ErrorData, ServerHandler, ServiceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::DuplexStream;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::control::SimProcessState;
use super::script::{RunRng, SimScript};
use super::tools;
use super::wire::{AddArguments, SleepArguments};

pub(super) async fn run(
    stdin: DuplexStream,
    stdout: DuplexStream,
    script: Arc<SimScript>,
    run: RunNumber,
    control: &SimProcessState,
) -> ProcessEnd {
    let mut dice = RunRng::new(script.seed, run);
    let serving = RmcpServer { script: Arc::clone(&script) }.serve((stdin, stdout));
    let running = tokio::select! {
        end = control.wait() => return end,
        serving = serving => match serving {
            Ok(running) => running,
            Err(_) => return ProcessEnd { code: Some(1), signal: None },
        },
    };
    let lifetime = async {
        match script.exit_after {
            Some(lifetime) => sleep(dice.apply_jitter(lifetime, script.jitter)).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        end = control.wait() => end,
        () = control.wait_sigterm() => {
            sleep(script.sigterm_delay.unwrap_or_default()).await;
            ProcessEnd { code: Some(script.exit_code), signal: None }
        }
        () = lifetime => script.end(),
        _ = running.waiting() => ProcessEnd { code: Some(0), signal: None },
    }
}

struct RmcpServer {
    script: Arc<SimScript>,
}

impl ServerHandler for RmcpServer {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_tool_list_changed().build();
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new(self.script.name.clone(), self.script.version.clone()))
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let count = tools::count(&self.script, 0);
        let cursor = request.and_then(|request| request.cursor);
        let first: usize = cursor.as_deref().unwrap_or("0").parse().map_err(invalid)?;
        let page = if self.script.page_size == 0 { count } else { self.script.page_size };
        let last = first.saturating_add(page).min(count);
        let tool = |index| serde_json::from_str::<Tool>(&tools::definition(&self.script, 0, index)).map_err(invalid);
        let mut answer = ListToolsResult::with_all_items((first..last).map(tool).collect::<Result<_, _>>()?);
        answer.next_cursor = (last < count).then(|| last.to_string());
        Ok(answer)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let (text, structured) = match &*request.name {
            "echo" => {
                let text = arguments.get("text").unwrap_or(&Value::Null).to_string();
                (text, Some(Value::Object(arguments)))
            }
            "add" => {
                let sum = parse::<AddArguments>(arguments)?.sum();
                let number: Value = serde_json::from_str(&sum).map_err(invalid)?;
                (sum, Some(json!({ "result": number })))
            }
            "sleep" => {
                let asked = parse::<SleepArguments>(arguments)?;
                (sleep_with_progress(&asked, &context).await?, None)
            }
            name if tools::is_numbered(&self.script, 0, name) => (name.to_owned(), None),
            name => return Err(ErrorData::invalid_params(format!("unknown tool: {name}"), None)),
        };
        let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
        result.structured_content = structured;
        result.is_error = None;
        Ok(result.into())
    }
}

async fn sleep_with_progress(
    arguments: &SleepArguments,
    context: &RequestContext<RoleServer>,
) -> Result<String, ErrorData> {
    let total = Duration::from_millis(arguments.ms);
    let progress = async {
        let (Some(every), Some(token)) = (arguments.progress_every_ms, context.meta.get_progress_token()) else {
            return std::future::pending::<Infallible>().await;
        };
        let mut ticks = interval(Duration::from_millis(every.max(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut done = 0;
        ticks.tick().await;
        loop {
            ticks.tick().await;
            done += every;
            let progress = ProgressNotificationParam::new(token.clone(), done as f64).with_total(arguments.ms as f64);
            if context.peer.notify_progress(progress).await.is_err() {
                return std::future::pending().await;
            }
        }
    };
    let cancelled =
        async { if arguments.ignore_cancel { std::future::pending().await } else { context.ct.cancelled().await } };
    tokio::select! {
        biased;
        () = sleep(total) => Ok(format!("slept {} ms", arguments.ms)),
        never = progress => match never {},
        () = cancelled => Err(ErrorData::internal_error("cancelled", None)),
    }
}

fn parse<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, ErrorData> {
    serde_json::from_value(Value::Object(arguments)).map_err(invalid)
}

fn invalid(error: impl std::fmt::Display) -> ErrorData {
    ErrorData::invalid_params(error.to_string(), None)
}
