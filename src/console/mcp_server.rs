//! The control plane as an MCP server: tools that call the handlers of the HTTP API.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
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
            "restart_instance" => read(arguments, move |input: InstanceInput| {
                let context = RequestContext::of_instance(who, &input.instance);
                change(console, context, "restart", Role::Operator, |console, context| {
                    restart(console, context, NoInput {})
                })
            }),
            "configure_instance" => read(arguments, move |input: ValuesInput| {
                let context = RequestContext::of_instance(who, &input.instance);
                let ValuesInput { set, unset, .. } = input;
                change(console, context, "configure", Role::Admin, |console, context| {
                    configure(console, context, ConfigureInput { set, unset })
                })
            }),
            _ => return None,
        };
        Some(answered.map(|answered| answered.map_err(|problem| describe(&problem))).boxed())
    }
}

/// Reads the arguments and runs a handler.
fn read<T, R, F>(arguments: Value, handler: impl FnOnce(T) -> F) -> BoxFuture<'static, Result<Value, Problem>>
where
    T: DeserializeOwned,
    R: Serialize,
    F: Future<Output = Result<R, Problem>> + Send + 'static,
{
    let invalid = |error: serde_json::Error| Problem::new("bad_input", format!("the arguments are not valid: {error}"));
    match serde_json::from_value(arguments) {
        Ok(input) => {
            let answered = handler(input);
            async move { serde_json::to_value(answered.await?).map_err(invalid) }.boxed()
        }
        Err(error) => {
            let problem = invalid(error);
            async move { Err(problem) }.boxed()
        }
    }
}

/// Runs a change and emits an event about it.
async fn change<R, F>(
    console: Api,
    context: RequestContext,
    action: &'static str,
    role: Role,
    run: impl FnOnce(Api, RequestContext) -> F,
) -> Result<R, Problem>
where
    F: Future<Output = Result<R, Problem>>,
{
    let who: Principal = context.principal.clone();
    let target = console.target(&who, context.param("instance"));
    let done = match check_role(&who, role) {
        Ok(()) => run(console.clone(), context).await,
        Err(problem) => Err(problem),
    };
    console.record_change(action, who.as_actor(), target, Vec::new(), done.as_ref().err());
    done
}

fn describe(problem: &Problem) -> String {
    match &problem.details.next_step {
        Some(next_step) => format!("{}; next step: {next_step}", problem.detail),
        None => problem.detail.clone(),
    }
}
