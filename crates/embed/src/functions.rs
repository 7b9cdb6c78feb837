//! Servers that are functions of the host. They speak MCP over pipes in memory, so that sessions, supervision and calls
//! work as with a child process.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fmt;
use std::future::{pending, ready};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::model::ids::{InstanceId, RunNumber};
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite_actors::seam::{Connectors, OpenError, ProcessConnector, ProcessEnd, ProcessLink, ServerProcess};
use mcp_satellite_protocol::{error_code, method};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// Capacity of a pipe in bytes.
const PIPE_SIZE: usize = 64 * 1024;
/// Command of servers that consist of functions, before their number. No executable has such a name.
const COMMAND: &str = "functions:";

/// Error of a function. The caller gets its text as the result of the tool, marked as an error.
pub type FunctionError = Box<dyn Error + Send + Sync>;

type HostFunction = Arc<dyn Fn(Value) -> BoxFuture<'static, Result<Value, FunctionError>> + Send + Sync>;

/// Functions of the host that become the tools of one server, see [`Instance::functions`](crate::Instance::functions).
///
/// - Calls run concurrently, each in a task. A function that blocks must use `tokio::task::spawn_blocking`.
/// - A cancelled call, a stop and a restart drop the future of the function. A stop has ended when all are dropped; one
///   that blocks delays it for at most `session.terminate_grace`.
/// - A panic fails only its call, with the JSON-RPC error `INTERNAL_ERROR`. The server and its other calls continue.
///
/// ```
/// use mcp_satellite_embed::Functions;
/// use serde_json::{Value, json};
///
/// let schema = json!({
///     "description": "Counts the letters of a text",
///     "type": "object",
///     "properties": { "text": { "type": "string" } },
///     "required": ["text"],
/// });
/// let functions = Functions::new().tool("count", schema, |arguments: Value| async move {
///     let text = arguments["text"].as_str().ok_or("`text` is missing")?;
///     Ok(json!({ "letters": text.chars().count() }))
/// });
/// ```
#[derive(Clone, Default)]
pub struct Functions {
    tools: BTreeMap<String, (Value, HostFunction)>,
    /// Number of this set: another one is another configuration of its instance.
    number: u64,
}

impl Functions {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tool, or replaces the one of the same name. `schema` is the JSON Schema of the arguments, an object; its
    /// `description` becomes that of the tool.
    ///
    /// The function gets the arguments as an object. It returns a string, which becomes the text of the result, or any
    /// other JSON value, which is sent as text and, if it is an object, as structured content, too.
    #[must_use]
    pub fn tool<F, T>(mut self, name: impl Into<String>, schema: Value, function: F) -> Self
    where
        F: Fn(Value) -> T + Send + Sync + 'static,
        T: Future<Output = Result<Value, FunctionError>> + Send + 'static,
    {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        self.number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        self.tools.insert(name.into(), (schema, Arc::new(move |arguments| function(arguments).boxed())));
        self
    }

    pub(crate) fn command(&self) -> String {
        format!("{COMMAND}{}", self.number)
    }

    fn list(&self) -> Value {
        let tools = self.tools.iter().map(|(name, (schema, _))| {
            let mut tool = json!({ "name": name, "inputSchema": schema });
            if let Some(description) = schema.get("description") {
                tool["description"] = description.clone();
            }
            tool
        });
        json!({ "tools": tools.collect::<Vec<_>>() })
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.tools.keys()).finish()
    }
}

/// Functions of the installed instances of one runtime.
#[derive(Debug, Clone, Default)]
pub(crate) struct FunctionServers(Arc<Mutex<HashMap<InstanceId, Arc<Functions>>>>);

impl FunctionServers {
    fn all(&self) -> MutexGuard<'_, HashMap<InstanceId, Arc<Functions>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, id: &InstanceId) -> Option<Arc<Functions>> {
        self.all().get(id).cloned()
    }

    pub(crate) fn replace(&self, id: &InstanceId, functions: Option<Functions>) {
        // Dropped without the lock: the functions may own anything.
        let _before = match functions {
            Some(functions) => self.all().insert(id.clone(), Arc::new(functions)),
            None => self.all().remove(id),
        };
    }

    /// Removes the functions unless the instance was installed again meanwhile, even with a clone of them.
    pub(crate) fn remove(&self, id: &InstanceId, removed: &Arc<Functions>) {
        let mut all = self.all();
        if all.get(id).is_some_and(|functions| Arc::ptr_eq(functions, removed)) {
            all.remove(id);
        }
    }
}

/// Connector that serves functions, and passes every other instance on.
pub(crate) struct FunctionConnector {
    servers: FunctionServers,
    others: Connectors,
}

impl FunctionConnector {
    pub(crate) fn new(servers: FunctionServers, others: Connectors) -> Self {
        Self { servers, others }
    }
}

impl ProcessConnector for FunctionConnector {
    fn open(&self, spec: Arc<InstanceSpec>, run: RunNumber) -> BoxFuture<'static, Result<ProcessLink, OpenError>> {
        let is_function = matches!(&spec.target, ServerTarget::Stdio { command, .. } if command.starts_with(COMMAND));
        if !is_function {
            return self.others.open(spec, run);
        }
        // Functions must never be taken for a command.
        let functions = self.servers.get(&spec.id).ok_or_else(|| {
            OpenError::Server("the functions of this instance were removed; install it again".to_owned())
        });
        ready(functions.map(start)).boxed()
    }
}

fn start(functions: Arc<Functions>) -> ProcessLink {
    // Two pipes: closing stdin must leave stdout open.
    let (writer, stdin) = duplex(PIPE_SIZE);
    let (stdout, reader) = duplex(PIPE_SIZE);
    let (ended, terminated) = (CancellationToken::new(), CancellationToken::new());
    let stop = terminated.clone();
    // Dropped at the end of the task, also if it is aborted.
    let guard = ended.clone().drop_guard();
    let task = AbortOnDropHandle::new(tokio::spawn(async move {
        let _guard = guard;
        let mut calls = RunningCalls::default();
        tokio::select! {
            () = terminated.cancelled() => {}
            // An error means that the session has dropped its end of a pipe.
            _ = serve(&functions, &mut calls, stdin, stdout) => {}
        }
        // An aborted task ends later if its function is being polled; the server ends after all of them.
        calls.tasks.shutdown().await;
    }));
    ProcessLink {
        reader: Box::new(reader),
        writer: Box::new(writer),
        stderr: None,
        process: Box::new(FunctionProcess { stop, abort: task.abort_handle(), ended }),
        guard: Box::new(task),
    }
}

struct FunctionProcess {
    stop: CancellationToken,
    abort: AbortHandle,
    ended: CancellationToken,
}

impl ServerProcess for FunctionProcess {
    fn pid(&self) -> Option<u32> {
        None
    }

    fn wait(&mut self) -> BoxFuture<'_, ProcessEnd> {
        self.ended.cancelled().map(|()| ProcessEnd { code: Some(0), signal: None }).boxed()
    }

    fn wait_all(&mut self) -> BoxFuture<'_, ()> {
        self.ended.cancelled().boxed()
    }

    fn terminate(&mut self) {
        self.stop.cancel();
    }

    fn kill(&mut self) {
        self.abort.abort();
    }
}

/// Calls in progress: the tasks, and the id of the request and the name of the tool of each.
#[derive(Default)]
struct RunningCalls {
    tasks: JoinSet<Value>,
    requests: HashMap<Id, (Value, String, AbortHandle)>,
}

impl RunningCalls {
    fn start(&mut self, id: Value, tool: &str, function: &HostFunction, arguments: Value) {
        let function = Arc::clone(function);
        let task = self.tasks.spawn(async move { tool_result(function(arguments).await) });
        self.requests.insert(task.id(), (id, tool.to_owned(), task));
    }

    fn cancel(&mut self, id: &Value) {
        if let Some((_, _, task)) = self.requests.values().find(|(request, ..)| request == id) {
            task.abort();
        }
    }

    /// Returns the next response. `None` if that call was cancelled.
    async fn next(&mut self) -> Option<Value> {
        let Some(ended) = self.tasks.join_next_with_id().await else { return pending().await };
        let task = ended.as_ref().map_or_else(JoinError::id, |(task, _)| *task);
        let (id, tool, _) = self.requests.remove(&task)?;
        match ended {
            Ok((_, result)) => Some(response(&id, "result", &result)),
            Err(error) if error.is_panic() => {
                tracing::error!(tool, "a function of the host panicked");
                Some(error_response(&id, error_code::INTERNAL_ERROR, &format!("the function `{tool}` panicked")))
            }
            Err(_cancelled) => None,
        }
    }
}

fn tool_result(result: Result<Value, FunctionError>) -> Value {
    let text = |text: String| json!([{ "type": "text", "text": text }]);
    match result {
        Ok(Value::String(string)) => json!({ "content": text(string) }),
        Ok(value @ Value::Object(_)) => json!({ "content": text(value.to_string()), "structuredContent": value }),
        Ok(value) => json!({ "content": text(value.to_string()) }),
        Err(error) => json!({ "content": text(error.to_string()), "isError": true }),
    }
}

fn response(id: &Value, kind: &str, value: &Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, kind: value })
}

fn error_response(id: &Value, code: i64, message: &str) -> Value {
    response(id, "error", &json!({ "code": code, "message": message }))
}

/// Serves MCP until stdin is closed.
async fn serve(
    functions: &Functions,
    calls: &mut RunningCalls,
    stdin: DuplexStream,
    mut stdout: DuplexStream,
) -> io::Result<()> {
    let mut lines = BufReader::new(stdin).lines();
    loop {
        let answer = tokio::select! {
            answer = calls.next() => answer,
            line = lines.next_line() => match line? {
                Some(line) => serde_json::from_str(&line).ok().and_then(|message| handle(functions, calls, &message)),
                None => return Ok(()),
            },
        };
        if let Some(answer) = answer {
            stdout.write_all(format!("{answer}\n").as_bytes()).await?;
        }
    }
}

/// Handles a message; returns the response unless it is none or follows later.
fn handle(functions: &Functions, calls: &mut RunningCalls, message: &Value) -> Option<Value> {
    let (method, params) = (message["method"].as_str()?, &message["params"]);
    let Some(id) = message.get("id") else {
        if method == method::CANCELLED {
            calls.cancel(&params["requestId"]);
        }
        return None;
    };
    let result = match method {
        method::INITIALIZE => json!({
            "protocolVersion": params["protocolVersion"],
            "capabilities": { "tools": {} },
            "serverInfo": { "name": "functions", "version": env!("CARGO_PKG_VERSION") },
        }),
        method::PING => json!({}),
        method::TOOLS_LIST => functions.list(),
        method::TOOLS_CALL => {
            let name = params["name"].as_str().unwrap_or_default();
            let Some((_, function)) = functions.tools.get(name) else {
                return Some(error_response(id, error_code::INVALID_PARAMS, &format!("unknown tool `{name}`")));
            };
            let arguments = params.get("arguments").cloned().unwrap_or_else(|| json!({}));
            calls.start(id.clone(), name, function, arguments);
            return None;
        }
        other => return Some(error_response(id, error_code::METHOD_NOT_FOUND, &format!("unknown method `{other}`"))),
    };
    Some(response(id, "result", &result))
}
