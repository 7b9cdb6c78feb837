//! Calls through the runtime's handle, as an embedding program makes them.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::runtime::RuntimeHandle;
use serde::Deserialize;
use serde_json::value::to_raw_value;

use super::LoadCaller;
use crate::types::{CallOutcome, PlannedCall};

pub(crate) struct RuntimeCaller {
    pub runtime: RuntimeHandle,
    pub ids: Arc<[InstanceId]>,
}

impl LoadCaller for RuntimeCaller {
    fn call<'a>(&'a self, call: &'a PlannedCall) -> BoxFuture<'a, CallOutcome> {
        async move {
            let Some(id) = self.ids.get(call.nth.0 as usize) else {
                return CallOutcome::Failed { fate: None, why: "there is no such instance".to_owned() };
            };
            let after_ms = u64::try_from(call.after.as_millis()).unwrap_or(u64::MAX);
            let arguments = to_raw_value(&serde_json::json!({ "text": call.token, "after_ms": after_ms })).ok();
            match self.runtime.call(id, "echo", arguments, Some(call.timeout)).await {
                Ok(result) => parse_echo(result.get()),
                Err(error @ CallError::Server { .. }) => CallOutcome::ServerError(error.to_string()),
                Err(error) => CallOutcome::Failed { fate: error.fate().map(fate_name), why: error.to_string() },
            }
        }
        .boxed()
    }
}

fn fate_name(fate: mcp_satellite_actors::model::exit::CallFate) -> String {
    use mcp_satellite_actors::model::exit::CallFate;
    match fate {
        CallFate::NotSent => "not_sent",
        CallFate::MaybeExecuted => "maybe_executed",
        CallFate::TimedOut => "timed_out",
    }
    .to_owned()
}

/// Converts a result of the tool `echo`. The tool encodes its text as JSON, here a string.
pub(super) fn parse_echo(result: &str) -> CallOutcome {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct EchoResult {
        content: Vec<EchoContent>,
        #[serde(default)]
        is_error: bool,
    }
    #[derive(Deserialize)]
    struct EchoContent {
        text: String,
    }
    let Ok(EchoResult { content, is_error }) = serde_json::from_str(result) else {
        return CallOutcome::Text(result.to_owned());
    };
    let text = content.into_iter().next().map(|content| content.text).unwrap_or_default();
    if is_error {
        return CallOutcome::ServerError(text);
    }
    CallOutcome::Text(serde_json::from_str(&text).unwrap_or(text))
}
