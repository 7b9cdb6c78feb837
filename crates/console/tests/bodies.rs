//! Bodies of changes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io;
use std::sync::{Arc, Mutex};

use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use bytes::Bytes;
use futures::StreamExt as _;
use mcp_satellite_actors::byte_budget::ByteBudget;
use mcp_satellite_actors::model::event::{ActionOutcome, Event, EventSubject};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_config::Role;
use mcp_satellite_console::access::{AccessSettings, ConsoleAccess};
use mcp_satellite_console::changes::ApiChange;
use mcp_satellite_console::principal::Principal;
use mcp_satellite_console::routes::{ApiServer, NoInput, Routes};
use mcp_satellite_gateway::guard::OriginGuard;
use mcp_satellite_gateway::pages::{PageConnection, answer};
use serde_json::Value;

const TOKEN: &str = "owner-token-0123456789abcdef";

struct RecordingServer {
    access: ConsoleAccess,
    bodies: Arc<ByteBudget>,
    recorded: Mutex<Vec<Event>>,
}

impl ApiServer for RecordingServer {
    fn access(&self) -> &ConsoleAccess {
        &self.access
    }

    fn record(&self, event: Event) {
        self.recorded.lock().unwrap().push(event);
    }

    fn body_budget(&self) -> &Arc<ByteBudget> {
        &self.bodies
    }

    fn target(&self, _: &Principal, _: &str) -> Option<Arc<EventSubject>> {
        None
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_in_time_is_answered_and_recorded() {
    let access = ConsoleAccess::new().unwrap();
    let token = Secret::from(TOKEN.to_owned());
    access.apply(&AccessSettings { is_on: true, owner_token: Some(&token), ..AccessSettings::default() });
    let server = Arc::new(RecordingServer { access, bodies: ByteBudget::new(0), recorded: Mutex::default() });
    let mut routes = Routes::new(server.clone());
    let stop = ApiChange::post("/v1/stop", Role::Operator, "stop", "Stops an instance");
    routes.change(stop, |_, _, _: NoInput| async { Ok(Vec::<String>::new()) });
    let pages = routes.finish();
    let begin = futures::stream::iter([Ok::<_, io::Error>(Bytes::from_static(b"{"))]);
    let request = Request::post("/v1/stop")
        .header(header::HOST, "localhost:7300")
        .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from_stream(begin.chain(futures::stream::pending())))
        .unwrap();
    let guard = OriginGuard { loopback: true, hosts: Vec::new(), origins: Vec::new() };
    let connection = PageConnection::unlimited("127.0.0.1:1".parse().unwrap());
    let response = answer(&pages, &guard, connection, request).await;
    assert_eq!(response.status(), 408);
    let problem: Value = serde_json::from_slice(&to_bytes(response.into_body(), 10_000).await.unwrap()).unwrap();
    assert_eq!(problem["kind"], "body_timed_out", "{problem:#}");
    let recorded = server.recorded.lock().unwrap();
    let [Event::ControlAction { action, outcome, reason, .. }] = &recorded[..] else { panic!("{recorded:?}") };
    assert_eq!((&**action, *outcome), ("stop", ActionOutcome::Refused));
    assert!(reason.as_ref().unwrap().contains("did not arrive in time"), "{reason:?}");
}
