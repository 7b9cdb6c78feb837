//! The control plane as an MCP server: tools that call the handlers of the HTTP API.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use mcp_satellite_console::changes::{OpenChange, invalid_input, run_to_end};
use mcp_satellite_console::mcp_tools::{InstanceInput, LogsInput, ValuesInput, tool_definition};
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::problem::Problem;
use mcp_satellite_console::routes::{ApiServer as _, NoInput, RequestContext, check_role};
use mcp_satellite_console::v1::{ConfigureInput, EventPageQuery, InstanceQuery, LogQuery};
use mcp_satellite_gateway::control_server::ControlTools;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::http_api::{configure, instance, instances, restart};
use super::records::{events, logs};
use super::requests::Api;
use crate::config::Role;
use crate::gateway::access::User;

pub(crate) struct ControlPlane {
    console: Api,
}

impl ControlPlane {
    pub(crate) fn new(console: Api) -> Self {
        Self { console }
    }
}

impl ControlTools for ControlPlane {
    fn admits(&self, user: &User) -> bool {
        self.console.access().mcp_user(&user.team, &user.user).is_some()
    }

    fn definitions(&self) -> String {
        let tools = [
            tool_definition::<InstanceQuery>(
                "list_instances",
                "Lists the MCP servers of the team with their status",
                true,
            ),
            tool_definition::<InstanceInput>("get_status", "Returns status, reason and next step of a server", true),
            tool_definition::<LogsInput>("read_logs", "Returns the newest lines that a server wrote to stderr", true),
            tool_definition::<EventPageQuery>("read_events", "Returns the newest events of the satellite", true),
            tool_definition::<InstanceInput>("restart_instance", "Restarts a server and clears its failures", false),
            tool_definition::<ValuesInput>(
                "configure_instance",
                "Sets or removes values that a server requires",
                false,
            ),
        ];
        json!({ "tools": tools }).to_string()
    }

    fn call(&self, user: Arc<User>, tool: &str, arguments: Value) -> Option<BoxFuture<'static, Result<Value, String>>> {
        let (console, principal) = (self.console.clone(), self.console.access().mcp_user(&user.team, &user.user));
        let Some(who) = principal else {
            return Some(async { Err("your user has no role in [console] any more".to_owned()) }.boxed());
        };
        let answered: BoxFuture<'static, Result<Value, Problem>> = match tool {
            "list_instances" => read(arguments, move |query: InstanceQuery| {
                instances(console, RequestContext::of_instance(who, ""), query)
            }),
            "get_status" => read(arguments, move |input: InstanceInput| {
                instance(console, RequestContext::of_instance(who, &input.instance), NoInput {})
            }),
            "read_logs" => read(arguments, move |input: LogsInput| {
                let LogsInput { instance, limit, q, level } = input;
                let query = LogQuery { limit, q, level, ..LogQuery::default() };
                logs(console, RequestContext::of_instance(who, &instance), query)
            }),
            "read_events" => read(arguments, move |query: EventPageQuery| {
                events(console, RequestContext::of_instance(who, ""), query)
            }),
            "restart_instance" => {
                let change = ToolChange { action: "restart", role: Role::Operator };
                change.run(console, who, arguments, |console, context, InstanceInput { .. }| {
                    restart(console, context, NoInput {})
                })
            }
            "configure_instance" => {
                let change = ToolChange { action: "configure", role: Role::Admin };
                change.run(console, who, arguments, |console, context, ValuesInput { set, unset, .. }| {
                    configure(console, context, ConfigureInput { set, unset })
                })
            }
            _ => return None,
        };
        Some(answered.map(|answered| answered.map_err(|problem| describe(&problem))).boxed())
    }
}

/// Reads the arguments and runs a handler.
fn read<T, R, F>(
    arguments: Value,
    handler: impl FnOnce(T) -> F + Send + 'static,
) -> BoxFuture<'static, Result<Value, Problem>>
where
    T: DeserializeOwned,
    R: Serialize,
    F: Future<Output = Result<R, Problem>> + Send + 'static,
{
    async move {
        let answered = handler(from_value(arguments)?);
        to_value(answered.await?)
    }
    .boxed()
}

fn from_value<T: DeserializeOwned>(arguments: Value) -> Result<T, Problem> {
    serde_json::from_value(arguments).map_err(|error| invalid_input(&error, &error))
}

fn to_value(answer: impl Serialize) -> Result<Value, Problem> {
    serde_json::to_value(answer).map_err(|error| Problem::new("server_error", error.to_string()))
}

/// A change by a tool.
struct ToolChange {
    action: &'static str,
    role: Role,
}

impl ToolChange {
    /// Reads the arguments, runs a handler, and emits an event about the change.
    fn run<T, R, F>(
        self,
        console: Api,
        who: Principal,
        arguments: Value,
        handler: impl FnOnce(Api, RequestContext, T) -> F + Send + 'static,
    ) -> BoxFuture<'static, Result<Value, Problem>>
    where
        T: DeserializeOwned,
        R: Serialize,
        F: Future<Output = Result<R, Problem>> + Send + 'static,
    {
        let Self { action, role } = self;
        let instance = arguments["instance"].as_str().unwrap_or_default().to_owned();
        let (target, actor) = (console.target(&who, &instance), who.as_actor());
        let recorder = console.clone();
        run_to_end(async move {
            let open = OpenChange::new(move |keys, problem| {
                recorder.record_change(action, actor.clone(), target.clone(), keys, problem);
            });
            let context = RequestContext::of_instance(who.clone(), &instance);
            let done = async {
                check_role(&who, role)?;
                let answered = handler(console, context, from_value(arguments)?);
                to_value(answered.await?)
            }
            .await;
            open.finish(Vec::new(), done.as_ref().err().cloned());
            done
        })
        .boxed()
    }
}

fn describe(problem: &Problem) -> String {
    match &problem.details.next_step {
        Some(next_step) => format!("{}; next step: {next_step}", problem.detail),
        None => problem.detail.clone(),
    }
}
