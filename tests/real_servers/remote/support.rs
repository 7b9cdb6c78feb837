//! One satellite per test, and the events of its instance.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::event::{Envelope, Event};
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::InstanceConfig;
use mcp_satellite_actors::model::status::Status;
use serde_json::Value;
use testkit::sink::{RecordingSink, real_time_options};
use testkit::spec::{config, remote};
use testkit::wait::GIVE_UP;
use tokio::sync::watch;

use super::servers::Server;

/// Runs a test with its own satellite and shuts the satellite down.
pub(crate) fn satellite(test: impl AsyncFnOnce(&Satellite)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let sink = RecordingSink::new();
        let options = real_time_options(RemoteConnector::new().unwrap(), &sink);
        let (handle, _) = mcp_satellite_actors::start(options).await.unwrap();
        let satellite = Satellite { handle, events: sink.watch() };
        test(&satellite).await;
        assert!(satellite.handle.shutdown().await.in_time);
    });
}

pub(crate) struct Satellite {
    pub(crate) handle: RuntimeHandle,
    events: watch::Receiver<Vec<Envelope>>,
}

impl Satellite {
    /// Installs the instance of a test and waits until it is online.
    pub(crate) async fn online(&self, server: &Server, tune: impl FnOnce(&mut Policy)) -> Instance {
        let mut policy = Policy::default();
        policy.reconnect.backoff_min = Duration::from_millis(100);
        policy.reconnect.backoff_max = Duration::from_millis(400);
        policy.retry.delays = vec![Duration::from_millis(50)];
        policy.session.request_timeout = GIVE_UP;
        tune(&mut policy);
        let target = remote(server.kind.transport, &server.url());
        let config = InstanceConfig { server: server.kind.name.into(), ..config(target, policy) };
        let spec = config.merge();
        let id = spec.id.clone();
        self.handle.install(spec).await.unwrap();
        let instance = Instance { handle: self.handle.clone(), events: self.events.clone(), id };
        instance.online().await;
        instance
    }
}

/// The instance of a test.
#[derive(Clone)]
pub(crate) struct Instance {
    pub(crate) handle: RuntimeHandle,
    events: watch::Receiver<Vec<Envelope>>,
    id: InstanceId,
}

impl Instance {
    /// Returns the published state of the instance.
    pub(crate) fn view(&self) -> Arc<InstanceView> {
        self.handle.snapshot().get(&self.id).unwrap().clone()
    }

    /// Waits until the instance has the wanted state.
    pub(crate) async fn until(&self, what: &str, wanted: impl FnMut(&InstanceView) -> bool) -> Arc<InstanceView> {
        let waiting = tokio::time::timeout(GIVE_UP, self.handle.wait_for(&self.id, wanted));
        let Ok(view) = waiting.await else {
            panic!("gave up waiting until it is {what}: {:#?}\n{:#?}", self.view(), self.events_since(0))
        };
        view.unwrap()
    }

    /// Waits until the instance is online and accepts calls.
    pub(crate) async fn online(&self) -> Arc<InstanceView> {
        self.until("online", |view| view.status == Status::Online && view.port.is_some()).await
    }

    /// Waits until the loss of the server is detected.
    pub(crate) async fn offline(&self) -> Arc<InstanceView> {
        self.until("offline", |view| view.status == Status::Offline).await
    }

    /// Flushes all events and returns their number.
    pub(crate) async fn mark(&self) -> usize {
        self.handle.flush().await;
        self.events.borrow().len()
    }

    /// Returns the events since a mark, one line each: statuses with their messages, connections, lists.
    pub(crate) fn events_since(&self, mark: usize) -> Vec<String> {
        self.events.borrow()[mark..].iter().filter_map(|envelope| event_line(&envelope.event)).collect()
    }

    /// Flushes all events and returns those since a mark.
    pub(crate) async fn all_events_since(&self, mark: usize) -> Vec<String> {
        self.handle.flush().await;
        self.events_since(mark)
    }

    /// Waits for an event since a mark whose line starts with `what`.
    pub(crate) async fn wait_event(&self, mark: usize, what: &str) {
        let mut events = self.events.clone();
        let has_event = |events: &Vec<Envelope>| {
            events[mark..].iter().filter_map(|envelope| event_line(&envelope.event)).any(|line| line.starts_with(what))
        };
        let waited = tokio::time::timeout(GIVE_UP, events.wait_for(has_event)).await.is_ok();
        assert!(waited, "no event: {what}; events: {:#?}", self.events_since(mark));
    }

    /// Calls a tool and returns its text or the error.
    pub(crate) async fn call(&self, tool: &str, arguments: &Value) -> Result<String, CallError> {
        let arguments = serde_json::value::to_raw_value(arguments).unwrap();
        let answer = tokio::time::timeout(2 * GIVE_UP, self.handle.call(&self.id, tool, Some(arguments), None)).await;
        let result: Value = serde_json::from_str(answer.unwrap()?.get()).unwrap();
        Ok(result["content"][0]["text"].as_str().unwrap().to_owned())
    }

    /// Asserts that the repeatable call returns its result.
    pub(crate) async fn assert_callable(&self, server: &Server) {
        let (tool, arguments, answer) = &server.kind.repeatable;
        assert_eq!(self.call(tool, arguments).await.as_deref(), Ok(*answer), "{:#?}", self.view());
    }

    pub(crate) async fn reconnect(&self) -> Status {
        self.handle.reconnect(&self.id).await.unwrap().status
    }
}

fn event_line(event: &Event) -> Option<String> {
    Some(match event {
        Event::StatusChanged { status, status_message, .. } => match status_message {
            Some(message) => format!("{status}: {message}"),
            None => status.to_string(),
        },
        Event::Started { tool_count, .. } => format!("started with {tool_count} tools"),
        Event::Disconnected { was_intentional, .. } => {
            format!("disconnected, {}", if *was_intentional { "intended" } else { "not intended" })
        }
        Event::Reconnecting { attempt, .. } => format!("attempt {attempt} is scheduled"),
        Event::Reconnected { attempts_taken, .. } => format!("reconnected at attempt {attempts_taken}"),
        Event::ToolsDiscovered { .. } => "tools discovered".to_owned(),
        Event::ToolsUpdated { added_tools, removed_tools, .. } => {
            format!("tools updated, +{} -{}", added_tools.len(), removed_tools.len())
        }
        _ => return None,
    })
}
