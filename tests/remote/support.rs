//! A runtime with remote instances, its events, and the assertion that a shutdown leaves no connection.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use mcp_satellite::connect::remote::RemoteConnector;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::exit::{CallError, RuntimeEnd};
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::remote::ConnectionState;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{
    ConfigValue as Configured, InstanceConfig, InstanceSpec, RemoteTransport, ServerTarget,
};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::{InstallOutcome, RuntimeHandle, ShutdownReport, start};
use serde_json::{Value, json};
use testkit::sink::{RecordingSink, real_time_options};
use testkit::spec::{config, remote};
use testkit::wait::{GIVE_UP, with_limit};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::peer::Peer;

/// A delay that is longer than any test.
pub(crate) const NEVER: Duration = Duration::from_secs(30 * 60);

/// One runtime with remote instances.
pub(crate) struct Fleet {
    pub(crate) runtime: RuntimeHandle,
    sink: RecordingSink,
    join: JoinHandle<RuntimeEnd>,
}

impl Fleet {
    pub(crate) async fn start() -> Self {
        let sink = RecordingSink::new();
        let options = real_time_options(RemoteConnector::new().unwrap(), &sink);
        let (runtime, join) = start(options).await.unwrap();
        Self { runtime, sink, join }
    }

    /// Installs an instance without waiting until it is online.
    pub(crate) async fn install(&self, remote: Remote) -> Instance {
        let spec = remote.spec();
        let id = spec.id.clone();
        assert_eq!(self.runtime.install(spec).await.unwrap(), InstallOutcome::New);
        Instance { runtime: self.runtime.clone(), sink: self.sink.clone(), id }
    }

    /// Installs an instance and waits until it is online.
    pub(crate) async fn online(&self, remote: Remote) -> Instance {
        let instance = self.install(remote).await;
        instance.online().await;
        instance
    }

    /// Shuts down. Asserts that no connection to these peers is left and that no peer saw two attempts at once.
    pub(crate) async fn finish(self, peers: &[&Peer]) {
        self.finish_with_overlaps(peers).await;
        for peer in peers {
            peer.log(|log| assert!(log.initializing_max <= 1, "two attempts at once"));
        }
    }

    /// Shuts down. Allows overlapping attempts: a peer may notice late that a client has given up.
    pub(crate) async fn finish_with_overlaps(self, peers: &[&Peer]) {
        let report = with_limit("the shutdown", self.runtime.shutdown()).await;
        assert_eq!(report, ShutdownReport { events_lost: 0, in_time: true });
        with_limit("the runtime's end", self.join).await.unwrap();
        for peer in peers {
            peer.until("all connections are closed", |log| log.connections == 0).await;
        }
    }
}

/// The configuration of a remote instance. Its policies do nothing by themselves during a test; a test enables what it
/// needs.
#[derive(Clone)]
pub(crate) struct Remote {
    config: InstanceConfig,
}

impl Remote {
    /// Uses streamable HTTP.
    pub(crate) fn http(url: impl Into<String>) -> Self {
        Self::new(RemoteTransport::Http, &url.into())
    }

    /// Uses the older HTTP+SSE.
    pub(crate) fn sse(url: impl Into<String>) -> Self {
        Self::new(RemoteTransport::Sse, &url.into())
    }

    fn new(transport: RemoteTransport, url: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mut policy = Policy::default();
        policy.reconnect.backoff_min = NEVER;
        policy.reconnect.backoff_max = NEVER;
        policy.reconnect.jitter_percent = 0;
        policy.health.interval = NEVER;
        policy.retry.delays = vec![Duration::from_millis(10), Duration::from_millis(20)];
        policy.remote.connect_timeout = GIVE_UP;
        policy.remote.header_timeout = GIVE_UP;
        policy.remote.close_timeout = GIVE_UP;
        policy.session.handshake_timeout = GIVE_UP;
        policy.session.request_timeout = GIVE_UP;
        policy.session.list_changed_debounce = Duration::from_millis(50);
        let config = InstanceConfig {
            installation: format!("abc{}", COUNT.fetch_add(1, Ordering::Relaxed)).into(),
            server: "peer".into(),
            ..config(remote(transport, url), policy)
        };
        Self { config }
    }

    pub(crate) fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(Arc::make_mut(&mut self.config.policy));
        self
    }

    /// Reconnects by itself after short delays.
    pub(crate) fn persistent(self) -> Self {
        self.policy(|policy| {
            policy.reconnect.backoff_min = Duration::from_millis(50);
            policy.reconnect.backoff_max = Duration::from_millis(200);
        })
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.config.user_tier.headers.insert(name.to_owned(), Configured::secret(value));
        self
    }

    pub(crate) fn query(mut self, name: &str, value: &str) -> Self {
        self.config.user_tier.query.insert(name.to_owned(), Configured::secret(value));
        self
    }

    pub(crate) fn health_url(mut self, address: String) -> Self {
        if let ServerTarget::Remote { health_url, .. } = &mut self.config.target {
            *health_url = Some(address);
        }
        self
    }

    pub(crate) fn spec(&self) -> InstanceSpec {
        self.config.clone().merge()
    }
}

/// An installed instance.
#[derive(Clone)]
pub(crate) struct Instance {
    pub(crate) runtime: RuntimeHandle,
    sink: RecordingSink,
    pub(crate) id: InstanceId,
}

impl Instance {
    /// Returns the published state of the instance.
    pub(crate) fn view(&self) -> Arc<InstanceView> {
        self.runtime.snapshot().get(&self.id).unwrap().clone()
    }

    /// Waits until the instance has the wanted state.
    pub(crate) async fn until(&self, what: &str, wanted: impl FnMut(&InstanceView) -> bool) -> Arc<InstanceView> {
        let Ok(view) = timeout(GIVE_UP, self.runtime.wait_for(&self.id, wanted)).await else {
            panic!("gave up waiting until it is {what}: {:#?}\n{:#?}", self.view(), self.timeline().await)
        };
        view.unwrap()
    }

    pub(crate) async fn status(&self, status: Status) -> Arc<InstanceView> {
        self.until(status.as_str(), |view| view.status == status).await
    }

    /// Waits until the instance is online and accepts calls.
    pub(crate) async fn online(&self) -> Arc<InstanceView> {
        let is_online = |view: &InstanceView| {
            view.status == Status::Online && view.port.is_some() && view.connection == Some(ConnectionState::Connected)
        };
        self.until("online", is_online).await
    }

    /// Calls a tool and returns its result or the error.
    pub(crate) async fn call_within(&self, limit: Option<Duration>, tool: &str) -> Result<Value, CallError> {
        let arguments = serde_json::value::to_raw_value(&json!({"text": "hello"})).unwrap();
        let answer = with_limit(tool, self.runtime.call(&self.id, tool, Some(arguments), limit)).await;
        answer.map(|result| serde_json::from_str(result.get()).unwrap())
    }

    pub(crate) async fn call(&self, tool: &str) -> Result<Value, CallError> {
        self.call_within(None, tool).await
    }

    /// Asserts that a call returns the right result.
    pub(crate) async fn assert_callable(&self) {
        let answer = self.call("echo").await;
        match answer {
            Ok(result) => assert_eq!(result["content"][0]["text"], "hello"),
            Err(error) => panic!("not callable: {error:?}\n{:#?}\n{:#?}", self.view(), self.timeline().await),
        }
    }

    /// Updates the configuration of the instance.
    pub(crate) async fn update(&self, remote: &Remote) -> InstallOutcome {
        self.runtime.update(remote.spec()).await.unwrap()
    }

    /// Returns the events of the instance so far.
    pub(crate) async fn events(&self) -> Vec<Event> {
        self.runtime.flush().await;
        let all = self.sink.events();
        let own = all.iter().filter(|envelope| {
            envelope.event.subject().is_some_and(|subject| subject.installation_id == self.id.installation)
        });
        own.map(|envelope| envelope.event.clone()).collect()
    }

    /// Returns the events of the instance so far, one line each. Events of calls are omitted: their order varies.
    pub(crate) async fn timeline(&self) -> Vec<String> {
        self.events().await.iter().filter_map(event_line).collect()
    }
}

fn event_line(event: &Event) -> Option<String> {
    let mut line = String::new();
    match event {
        Event::StatusChanged { status, .. } => write!(line, "{status}"),
        Event::Started { transport, tool_count, .. } => write!(line, "started ({transport}, {tool_count} tools)"),
        Event::Disconnected { was_intentional: true, .. } => write!(line, "disconnected as asked"),
        Event::Disconnected { was_intentional: false, .. } => write!(line, "disconnected"),
        Event::Reconnecting { attempt, next_retry_ms, .. } => {
            write!(line, "reconnecting ({attempt} in {next_retry_ms} ms)")
        }
        Event::Reconnected { attempts_taken, .. } => write!(line, "reconnected ({attempts_taken})"),
        Event::HealthDegraded { consecutive_failures, last_error, .. } => {
            write!(line, "degraded ({consecutive_failures}: {last_error})")
        }
        Event::HealthRestored { consecutive_failures, .. } => write!(line, "restored ({consecutive_failures})"),
        Event::ToolsDiscovered { tool_count, .. } => write!(line, "discovered {tool_count} tools"),
        Event::ToolsUpdated { added_tools, removed_tools, .. } => {
            write!(line, "updated (+{} -{})", added_tools.join(" +"), removed_tools.join(" -"))
        }
        Event::ToolExecuted { .. } | Event::RequestLogs { .. } => return None,
        other => write!(line, "{}", other.kind()),
    }
    .unwrap();
    Some(line)
}
