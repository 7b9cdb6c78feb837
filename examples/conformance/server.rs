//! Tools, resources and prompts of the conformance server in both protocol eras. Texts and numbers are those of the
//! suite.

#![expect(deprecated, reason = "what is of 2025-11-25 is deprecated in rmcp")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CompleteRequestParams, CompleteResult, CustomNotification,
    CustomRequest, ErrorData, GetPromptRequestParams, GetPromptResponse, GetPromptResult, Implementation,
    ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, LoggingLevel,
    PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ServerCapabilities,
    ServerConfig, ServerNotification, ServerRequest, SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter,
    UnsubscribeRequestParams,
};
use rmcp::service::{RequestContext, SubscriptionContext};
use rmcp::{RoleServer, ServerHandler};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio::time::sleep;

use crate::rounds::{self, InputAnswers};

const TOOLS: &str = include_str!("tools.json");
const RESOURCES: &str = include_str!("resources.json");
const TEMPLATES: &str = include_str!("templates.json");
const PROMPTS: &str = include_str!("prompts.json");
/// Elicitation schemas by the name of the tool.
const FORMS: &str = include_str!("forms.json");

const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==";
const WAV: &str = "UklGRigAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQQAAAAAAAAA";

const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];
const STEP: Duration = Duration::from_millis(50);

type Context = RequestContext<RoleServer>;

pub(crate) struct ConformanceServer {
    /// Index in [`LEVELS`] of the lowest level that a session receives.
    level: AtomicUsize,
    /// Change notifications for subscribers. Over HTTP each request may have its own server, so they share this
    /// channel.
    changes: broadcast::Sender<ServerNotification>,
}

impl ConformanceServer {
    pub(crate) fn new(changes: broadcast::Sender<ServerNotification>) -> Self {
        Self { level: AtomicUsize::new(0), changes }
    }
}

impl ServerHandler for ConformanceServer {
    fn get_info(&self) -> ServerConfig {
        let mut capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_completions()
            .build();
        capabilities.logging = Some(serde_json::Map::new());
        ServerConfig::new(capabilities)
            .with_server_info(Implementation::new("mcp-satellite-conformance", env!("CARGO_PKG_VERSION")))
    }

    async fn list_tools(&self, _: Option<PaginatedRequestParams>, _: Context) -> Result<ListToolsResult, ErrorData> {
        deserialize(value(TOOLS)?)
    }

    async fn call_tool(&self, request: CallToolRequestParams, context: Context) -> Result<CallToolResponse, ErrorData> {
        let answers = InputAnswers { responses: request.input_responses, state: request.request_state };
        if let Some(asked) = rounds::next(&request.name, &answers, context.client_capabilities().as_ref())? {
            return Ok(asked.into());
        }
        let arguments = Value::Object(request.arguments.unwrap_or_default());
        let blocks = match request.name.as_ref() {
            "test_simple_text" => json!([text("This is a simple text response for testing.")]),
            "test_image_content" => json!([image()]),
            "test_audio_content" => json!([{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]),
            "test_embedded_resource" => {
                json!([embedded("test://embedded-resource", "This is an embedded resource content.")])
            }
            "test_multiple_content_types" => json!([
                text("Multiple content types test:"),
                image(),
                {"type": "resource", "resource": {
                    "uri": "test://mixed-content-resource",
                    "mimeType": "application/json",
                    "text": r#"{"test":"data","value":123}"#,
                }},
            ]),
            "test_tool_with_logging" => self.log(&context).await?,
            "test_tool_with_progress" => progress(&context).await?,
            "test_reconnection" => {
                self.tell(&context, "info", "Reconnection test started").await?;
                sleep(STEP * 2).await;
                json!([text("Reconnection test completed")])
            }
            "test_sampling" => sample(&context, &arguments).await?,
            "test_elicitation" => {
                let (action, filled) = elicit(&context, "test_elicitation", argument(&arguments, "message")?).await?;
                json!([text(&format!("User response: action={action}, content={filled}"))])
            }
            form @ ("test_elicitation_sep1034_defaults" | "test_elicitation_sep1330_enums") => {
                let (action, filled) = elicit(&context, form, "Please fill in the form").await?;
                json!([text(&format!("Elicitation completed: action={action}, content={filled}"))])
            }
            "json_schema_2020_12_tool" | "test_custom_header" => json!([text(&format!("Called with {arguments}"))]),
            "test_logging_tool" => {
                self.tell(&context, "info", "Told where it is asked for").await?;
                json!([text("Told what is asked for")])
            }
            "test_trigger_tool_change" => self.change(&context, "notifications/tools/list_changed").await?,
            "test_trigger_prompt_change" => self.change(&context, "notifications/prompts/list_changed").await?,
            "test_missing_capability" | "test_streaming_elicitation" => json!([text("All that was asked is answered")]),
            name if name.starts_with("test_input_required_result_") => {
                json!([text("All that was asked is answered: state-ok")])
            }
            "test_error_handling" => {
                let why = [text("This tool intentionally returns an error for testing")];
                return deserialize::<CallToolResult>(json!({"content": why, "isError": true})).map(Into::into);
            }
            unknown => return Err(ErrorData::invalid_params(format!("unknown tool: {unknown}"), None)),
        };
        deserialize::<CallToolResult>(json!({"content": blocks})).map(Into::into)
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListResourcesResult, ErrorData> {
        deserialize(value(RESOURCES)?)
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        deserialize(value(TEMPLATES)?)
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: Context,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let uri = request.uri;
        let of_template = uri.strip_prefix("test://template/").and_then(|rest| rest.strip_suffix("/data"));
        let content = match (uri.as_str(), of_template) {
            (_, Some(id)) => {
                let data = json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")});
                json!({"uri": uri, "mimeType": "application/json", "text": data.to_string()})
            }
            ("test://static-text", _) => {
                json!({"uri": uri, "mimeType": "text/plain", "text": "This is the content of the static text resource."})
            }
            ("test://static-binary", _) => json!({"uri": uri, "mimeType": "image/png", "blob": PNG}),
            ("test://watched-resource", _) => {
                json!({"uri": uri, "mimeType": "text/plain", "text": "Watched resource content."})
            }
            _ => return Err(ErrorData::resource_not_found("resource not found", Some(json!({"uri": uri})))),
        };
        deserialize::<ReadResourceResult>(json!({"contents": [content]})).map(Into::into)
    }

    async fn subscribe(&self, _: SubscribeRequestParams, _: Context) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn unsubscribe(&self, _: UnsubscribeRequestParams, _: Context) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListPromptsResult, ErrorData> {
        deserialize(value(PROMPTS)?)
    }

    async fn get_prompt(
        &self,
        request: GetPromptRequestParams,
        context: Context,
    ) -> Result<GetPromptResponse, ErrorData> {
        let answers = InputAnswers { responses: request.input_responses, state: request.request_state };
        if let Some(asked) = rounds::next(&request.name, &answers, context.client_capabilities().as_ref())? {
            return Ok(asked.into());
        }
        let arguments = Value::Object(request.arguments.unwrap_or_default());
        let said = match request.name.as_str() {
            "test_simple_prompt" => vec![text("This is a simple prompt for testing.")],
            "test_prompt_with_arguments" => {
                let (first, second) = (argument(&arguments, "arg1")?, argument(&arguments, "arg2")?);
                vec![text(&format!("Prompt with arguments: arg1='{first}', arg2='{second}'"))]
            }
            "test_prompt_with_embedded_resource" => vec![
                embedded(argument(&arguments, "resourceUri")?, "Embedded resource content for testing."),
                text("Please process the embedded resource above."),
            ],
            "test_prompt_with_image" => vec![image(), text("Please analyze the image above.")],
            "test_input_required_result_prompt" => vec![text("The context is known.")],
            unknown => return Err(ErrorData::invalid_params(format!("unknown prompt: {unknown}"), None)),
        };
        let messages: Vec<_> = said.into_iter().map(|content| json!({"role": "user", "content": content})).collect();
        deserialize::<GetPromptResult>(json!({"messages": messages})).map(Into::into)
    }

    async fn complete(&self, request: CompleteRequestParams, _: Context) -> Result<CompleteResult, ErrorData> {
        let known = ["paris", "park", "party", "test", "testing"];
        let values: Vec<_> = known.into_iter().filter(|value| value.starts_with(&request.argument.value)).collect();
        deserialize(json!({"completion": {"total": values.len(), "values": values, "hasMore": false}}))
    }

    async fn set_level(&self, request: SetLevelRequestParams, _: Context) -> Result<(), ErrorData> {
        self.level.store(place(request.level)?, Ordering::Relaxed);
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.changes.subscribe();
        loop {
            tokio::select! {
                () = context.cancelled() => return Ok(()),
                Ok(change) = changes.recv() => {
                    // An error means that the client did not subscribe to it or is gone.
                    let _ = context.sink().send(change).await;
                }
            }
        }
    }
}

impl ConformanceServer {
    async fn change(&self, context: &Context, method: &str) -> Result<Value, ErrorData> {
        let change: ServerNotification = serde_json::from_value(json!({"method": method})).map_err(internal)?;
        // An error means that there is no subscriber.
        let _ = self.changes.send(change.clone());
        if context.meta.protocol_version().is_none() {
            context.peer.send_notification(change).await.map_err(internal)?;
        }
        Ok(json!([text("Changed")]))
    }

    async fn log(&self, context: &Context) -> Result<Value, ErrorData> {
        self.tell(context, "info", "Tool execution started").await?;
        sleep(STEP).await;
        self.tell(context, "info", "Tool processing data").await?;
        sleep(STEP).await;
        self.tell(context, "info", "Tool execution completed").await?;
        Ok(json!([text("Tool with logging executed successfully")]))
    }

    async fn tell(&self, context: &Context, level: &str, data: &str) -> Result<(), ErrorData> {
        let lowest = if context.meta.protocol_version().is_none() {
            Some(self.level.load(Ordering::Relaxed))
        } else {
            context.meta.log_level().map(place).transpose()?
        };
        let at = LEVELS.iter().position(|known| *known == level);
        if lowest.is_none_or(|lowest| at < Some(lowest)) {
            return Ok(());
        }
        let params = json!({"level": level, "logger": "conformance", "data": data});
        notify(context, "notifications/message", params).await
    }
}

fn place(level: LoggingLevel) -> Result<usize, ErrorData> {
    let name = serde_json::to_value(level).map_err(internal)?;
    LEVELS.iter().position(|level| name == *level).ok_or_else(|| internal("an unknown level"))
}

async fn progress(context: &Context) -> Result<Value, ErrorData> {
    let token = context.meta.get_progress_token();
    for done in [0, 50, 100] {
        if done > 0 {
            sleep(STEP).await;
        }
        if let Some(token) = &token {
            let params = json!({"progressToken": token, "progress": done, "total": 100});
            notify(context, "notifications/progress", params).await?;
        }
    }
    // Over HTTP a notification and the result use different streams, whose order is not defined.
    sleep(STEP).await;
    Ok(json!([text("Tool with progress executed successfully")]))
}

/// Requests sampling without checking the client's capability: behind an endpoint, the endpoint checks it.
async fn sample(context: &Context, arguments: &Value) -> Result<Value, ErrorData> {
    let prompt = text(argument(arguments, "prompt")?);
    let params = json!({"messages": [{"role": "user", "content": prompt}], "maxTokens": 100});
    let answer = ask(context, "sampling/createMessage", params).await?;
    let said = ["/content/text", "/content/0/text"].iter().find_map(|at| answer.pointer(at)?.as_str());
    Ok(json!([text(&format!("LLM response: {}", said.unwrap_or("No response")))]))
}

/// Requests input of the user and returns the action and the content.
async fn elicit(context: &Context, form: &str, message: &str) -> Result<(String, Value), ErrorData> {
    let schema = value(FORMS)?.get_mut(form).map(Value::take).ok_or_else(|| internal("an unknown form"))?;
    let answer = ask(context, "elicitation/create", json!({"message": message, "requestedSchema": schema})).await?;
    let action = answer["action"].as_str().ok_or_else(|| internal("an answer without an action"))?;
    Ok((action.to_owned(), answer.get("content").cloned().unwrap_or_else(|| json!({}))))
}

/// Sends a request as a custom one, which rmcp passes on unchanged.
async fn ask(context: &Context, method: &str, params: Value) -> Result<Value, ErrorData> {
    let request = ServerRequest::CustomRequest(CustomRequest::new(method, Some(params)));
    let answer = context.peer.send_request(request).await.map_err(|error| internal(format!("{method}: {error}")))?;
    serde_json::to_value(answer).map_err(internal)
}

async fn notify(context: &Context, method: &str, params: Value) -> Result<(), ErrorData> {
    let notification = ServerNotification::CustomNotification(CustomNotification::new(method, Some(params)));
    context.peer.send_notification(notification).await.map_err(internal)
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn image() -> Value {
    json!({"type": "image", "data": PNG, "mimeType": "image/png"})
}

fn embedded(uri: &str, text: &str) -> Value {
    json!({"type": "resource", "resource": {"uri": uri, "mimeType": "text/plain", "text": text}})
}

fn argument<'a>(arguments: &'a Value, name: &str) -> Result<&'a str, ErrorData> {
    arguments[name].as_str().ok_or_else(|| ErrorData::invalid_params(format!("`{name}` is missing"), None))
}

pub(crate) fn value(text: &str) -> Result<Value, ErrorData> {
    serde_json::from_str(text).map_err(internal)
}

/// Converts a result to rmcp's type. rmcp omits `resultType` for clients of 2025-11-25.
pub(crate) fn deserialize<T: DeserializeOwned>(mut value: Value) -> Result<T, ErrorData> {
    if let Some(result) = value.as_object_mut() {
        result.entry("resultType").or_insert_with(|| json!("complete"));
    }
    serde_json::from_value(value).map_err(internal)
}

#[expect(clippy::needless_pass_by_value, reason = "as `map_err` gives it")]
pub(crate) fn internal(error: impl ToString) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}
