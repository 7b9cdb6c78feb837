//! Handle to one instance: its state, its calls and its commands.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mcp_satellite_actors::model::exit::{CallError, CallFate, refusal_message};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_actors::{ControlError, ReconnectOutcome, RuntimeHandle};
use serde_json::Value;
use serde_json::value::to_raw_value;

use crate::functions::FunctionServers;

/// Errors of an instance: of its installation, its commands and its calls.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InstanceError {
    /// The description of the instance is invalid. Nothing was installed.
    #[error("invalid `{field}` of instance `{instance}`: {problem}")]
    Invalid {
        /// Name of the instance.
        instance: String,
        /// Setter of [`Instance`](crate::Instance) with the wrong value, `command` or `url` for those of the
        /// constructors, or the field of the policy: `session.terminate_grace`.
        field: &'static str,
        /// Problem with the value.
        problem: String,
    },
    /// The instance is not installed any more, or the runtime has ended.
    #[error("the instance is gone: it was removed, or its runtime has ended")]
    Gone,
    /// The instance does not take calls or cannot carry out a command, and waiting does not help. During a shutdown of
    /// the runtime without a remedy.
    #[error("{message}")]
    Refused {
        /// Status of the instance.
        status: Status,
        /// Next step, if a person or the host can do something.
        remedy: Option<Remedy>,
        /// Name and status of the instance with the cause, or the failed command with the cause.
        message: String,
    },
    /// Another command undid this one before it was complete.
    #[error("another command superseded this one")]
    Superseded,
    /// The call has no result for another reason; [`CallError::fate`] shows whether it may have been executed.
    #[error(transparent)]
    Call(CallError),
}

/// Handle to an instance. It is cheap to clone and does not keep the instance installed.
///
/// ```
/// use mcp_satellite_embed::{Instance, InstanceError, Remedy, Runtime};
/// use mcp_satellite_sim::{SimConnector, SimScript};
/// use serde_json::json;
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let runtime = Runtime::builder(SimConnector::new(SimScript::default())).start().await?;
/// let server = runtime.install(Instance::stdio("simulated")).await?;
/// println!("{} is {}", server.id(), server.ready().await?.status);
/// let result = server.call("echo", json!({ "text": "hello" })).timeout(Duration::from_secs(5)).await?;
/// assert!(!result.is_error());
///
/// server.stop().await?;
/// let refused = server.call("echo", json!({})).await;
/// assert!(matches!(refused, Err(InstanceError::Refused { remedy: Some(Remedy::Start), .. })));
///
/// server.remove().await?;
/// assert!(matches!(server.status(), Err(InstanceError::Gone)));
/// # runtime.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct InstanceHandle {
    runtime: RuntimeHandle,
    functions: FunctionServers,
    id: InstanceId,
}

impl InstanceHandle {
    pub(crate) fn new(runtime: RuntimeHandle, functions: FunctionServers, id: InstanceId) -> Self {
        Self { runtime, functions, id }
    }

    /// Returns the identity of the instance: team, user and name.
    pub fn id(&self) -> &InstanceId {
        &self.id
    }

    /// Waits until the instance takes calls, and returns its state. A sleeping instance is ready: a call wakes it.
    ///
    /// There is no timeout: a server that fails is restarted until its budget is exhausted, and an unreachable one may
    /// return at any time. Use `tokio::time::timeout` for a limit.
    ///
    /// # Errors
    ///
    /// Returns `Refused` if the instance does not become ready by itself: it failed permanently, was stopped, lacks
    /// values or authorization, or answers incorrectly. Returns `Gone` if it was removed, or the runtime has ended.
    pub async fn ready(&self) -> Result<Arc<InstanceView>, InstanceError> {
        let settled = |view: &InstanceView| view.status == Status::Online || needs_help(view);
        let view = self.runtime.wait_for(&self.id, settled).await.ok_or(InstanceError::Gone)?;
        // The last snapshot of an ended runtime still contains its instances.
        if self.has_ended() {
            return Err(InstanceError::Gone);
        }
        if view.status == Status::Online { Ok(view) } else { Err(refused(&view)) }
    }

    /// Calls a tool, and starts the server first if necessary. The call is sent when the returned value is awaited.
    /// `arguments` is a JSON object, or null for none.
    pub fn call(&self, tool: impl Into<String>, arguments: Value) -> ToolCall {
        ToolCall { instance: self.clone(), tool: tool.into(), arguments, timeout: None }
    }

    /// Returns the last published state. Never blocks.
    ///
    /// # Errors
    ///
    /// Returns `Gone` if the instance is not installed, or the runtime has ended.
    pub fn status(&self) -> Result<Arc<InstanceView>, InstanceError> {
        let snapshot = self.runtime.snapshot();
        let view = snapshot.get(&self.id).filter(|_| snapshot.end().is_none());
        view.cloned().ok_or(InstanceError::Gone)
    }

    /// Sets the instance to run. Returns when the start is under way.
    ///
    /// # Errors
    ///
    /// Returns `Refused` if it cannot be started, and `Gone` if it is not installed.
    pub async fn start(&self) -> Result<(), InstanceError> {
        self.runtime.start(&self.id).await.map_err(|error| self.control_error(error))
    }

    /// Stops the instance until the next start. Returns when its process is gone.
    ///
    /// # Errors
    ///
    /// Returns `Superseded` if another command undoes the stop, and `Gone` if the instance is not installed.
    pub async fn stop(&self) -> Result<(), InstanceError> {
        self.runtime.stop(&self.id).await.map_err(|error| self.control_error(error))
    }

    /// Restarts the instance with its failures cleared. Returns when the restart is under way.
    ///
    /// # Errors
    ///
    /// Returns `Refused` if it cannot be restarted, and `Gone` if it is not installed.
    pub async fn restart(&self) -> Result<(), InstanceError> {
        self.runtime.restart(&self.id).await.map_err(|error| self.control_error(error))
    }

    /// Connects to a remote server again, or restarts a process. Returns when the attempt has succeeded or failed.
    ///
    /// # Errors
    ///
    /// Returns `Refused` if there is nothing to reconnect, `Superseded` if the instance is removed meanwhile, and `Gone`
    /// if it is not installed.
    pub async fn reconnect(&self) -> Result<ReconnectOutcome, InstanceError> {
        self.runtime.reconnect(&self.id).await.map_err(|error| self.control_error(error))
    }

    /// Removes the instance. Returns when nothing of it is left.
    ///
    /// # Errors
    ///
    /// Returns `Gone` if it is not installed.
    pub async fn remove(&self) -> Result<(), InstanceError> {
        let functions = self.functions.get(&self.id);
        self.runtime.uninstall(&self.id).await.map_err(|error| self.control_error(error))?;
        // Another instance with the same identity may have been installed meanwhile.
        if let Some(functions) = functions {
            self.functions.remove(&self.id, &functions);
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.runtime.snapshot().end().is_some()
    }

    pub(crate) fn control_error(&self, error: ControlError) -> InstanceError {
        match error {
            ControlError::NotFound | ControlError::Closing => InstanceError::Gone,
            ControlError::Superseded => InstanceError::Superseded,
            ControlError::Refused { message, remedy } => {
                let status = self.status().map_or(Status::Provisioning, |view| view.status);
                InstanceError::Refused { status, remedy, message }
            }
        }
    }

    fn call_error(&self, error: CallError) -> InstanceError {
        match error {
            CallError::NotFound { .. } => InstanceError::Gone,
            CallError::Refused { status, message, remedy } => InstanceError::Refused { status, remedy, message },
            error if error.fate() == Some(CallFate::NotSent) && self.has_ended() => InstanceError::Gone,
            error => InstanceError::Call(error),
        }
    }
}

/// Returns true if the instance does not become ready by itself.
fn needs_help(view: &InstanceView) -> bool {
    // After a rejected rolling update `view.remedy` is set in every status, also while the old run is restarted.
    let is_stopped = view.requested_state == RequestedState::Stopped;
    view.remedy.is_some() && Remedy::for_status(view.status, is_stopped, view.spec.is_remote()).is_some()
}

fn refused(view: &InstanceView) -> InstanceError {
    let why = view.message.as_deref().unwrap_or("it does not take calls");
    let message = refusal_message(&view.spec.name, view.status, why);
    InstanceError::Refused { status: view.status, remedy: view.remedy, message }
}

/// A call of a tool, which is sent when it is awaited.
///
/// A call that certainly did not reach the server is repeated once; one that may have been executed only if the tool is
/// annotated as idempotent or read-only.
#[derive(Debug, Clone)]
#[must_use = "a call is sent when it is awaited"]
pub struct ToolCall {
    instance: InstanceHandle,
    tool: String,
    arguments: Value,
    timeout: Option<Duration>,
}

impl ToolCall {
    /// Sets the limit for the start of the server and the call together. The default is `session.request_timeout` of
    /// the policy. Progress of the server extends the limit, up to the cap of the policy. The maximum is 365 days.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }
}

impl IntoFuture for ToolCall {
    type Output = Result<ToolResult, InstanceError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { instance, tool, arguments, timeout } = self;
        let bad_input = |problem: String| InstanceError::Call(CallError::BadInput(problem));
        // The call was executed, so this error must not invite the host to repeat it.
        let unreadable = |error: serde_json::Error| {
            let reason = format!("the call was executed, but its result is unreadable: {error}");
            InstanceError::Call(CallError::Terminated { fate: CallFate::MaybeExecuted, reason })
        };
        Box::pin(async move {
            let arguments = match &arguments {
                Value::Null => None,
                Value::Object(_) => Some(to_raw_value(&arguments).map_err(|error| bad_input(error.to_string()))?),
                Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                    return Err(bad_input("the arguments of a tool must be a JSON object".to_owned()));
                }
            };
            let result = instance.runtime.call(&instance.id, &tool, arguments, timeout).await;
            let result = result.map_err(|error| instance.call_error(error))?;
            serde_json::from_str(result.get()).map(ToolResult).map_err(unreadable)
        })
    }
}

/// Result of a tool, as its server sent it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolResult(Value);

impl ToolResult {
    /// Returns the whole result: an object with `content` and, depending on the tool, `structuredContent` and `isError`.
    pub fn json(&self) -> &Value {
        &self.0
    }

    /// Returns the text of the result. Several parts are separated by line breaks; images and the like are left out.
    pub fn text(&self) -> String {
        let parts = self.0["content"].as_array().into_iter().flatten();
        let texts: Vec<&str> = parts.filter_map(|part| part["text"].as_str()).collect();
        texts.join("\n")
    }

    /// Returns the structured part of the result, if the tool has one.
    pub fn structured(&self) -> Option<&Value> {
        self.0.get("structuredContent")
    }

    /// Returns true if the tool reports that it failed; the text then contains the reason.
    pub fn is_error(&self) -> bool {
        self.0["isError"] == true
    }
}
