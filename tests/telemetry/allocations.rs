//! Guards against growth of the observed call path: numbers of allocations, which do not depend on the machine.

use std::sync::Arc;
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use jiff::Timestamp;
use mcp_satellite::actors::model::event::EventSubject;
use mcp_satellite::actors::rpc::RpcMessage;
use mcp_satellite::actors::seam::{
    CallEnd, Connectors, NoObserver, ObservedCall, ObservedSide, RuntimeObserver, ToolCallFate, TraceOrigin,
};
use mcp_satellite::actors::{RuntimeOptions, start};
use mcp_satellite::connect::sim::{SimConnector, SimScript};
use mcp_satellite::gateway::answer::CallAnswer;
use mcp_satellite::gateway::audience::GatewayAudience;
use mcp_satellite::gateway::dispatch::EndpointDispatcher;
use mcp_satellite::gateway::handler::EndpointHandler as _;
use mcp_satellite::gateway::request::EndpointRequest;
use mcp_satellite::gateway::sessions::Sessions;
use mcp_satellite_telemetry::{Telemetry, TelemetryOptions};
use testkit::scripted_servers::request;
use testkit::sink::DiscardingSink;
use testkit::spec::{spec_of, stdio};
use tokio::sync::oneshot;

const CALLS: u64 = 500;

fn runtime() -> tokio::runtime::Runtime {
    // One thread, because allocations are counted by thread.
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Telemetry with a receiver, of which no trace is recorded.
fn unsampled() -> Telemetry {
    let options = TelemetryOptions {
        endpoint: Some("http://127.0.0.1:9".to_owned()),
        sample: 0.0,
        payloads: true,
        name: "test".to_owned(),
        instance: "test".to_owned(),
    };
    Telemetry::start(&options, &|_| None).unwrap().0
}

fn observe(telemetry: &Telemetry, side: ObservedSide<'_>, tool: &str, end: CallEnd<'_>) {
    let call = ObservedCall {
        side,
        trace: TraceOrigin::Entry(None),
        method: "tools/call",
        target: Some(tool),
        params: Some("{}"),
        request_id: &7,
        version: Some("2025-11-25"),
        spec: None,
    };
    telemetry.begin_call(&call).unwrap().end(end);
}

#[test]
fn an_unsampled_call_allocates_only_its_record() {
    let runtime = runtime();
    let _context = runtime.enter();
    let telemetry = unsampled();
    let (team, user) = ("acme".into(), "alice".into());
    let server = ObservedSide::Server { team: &team, user: &user, session: Some("0123456789abcdef"), peer: None };
    let subject = EventSubject::from(&spec_of("acme", "a", stdio("files")));
    for side in [server, ObservedSide::Client { attempt: 1 }] {
        let call = || observe(&telemetry, side, "echo", CallEnd::Result("{}"));
        call();
        let info = measure(|| (0..CALLS).for_each(|_| call()));
        assert_eq!((info.count_total, info.count_current), (CALLS, 0), "{info:?}");
    }
    let count = || {
        telemetry.tool_called(&subject, "echo", ToolCallFate::Ok);
        telemetry.bytes_received("stdio", 100);
        telemetry.bytes_sent("stdio", 100);
    };
    count();
    assert_eq!(measure(|| (0..CALLS).for_each(|_| count())).count_total, 0);
}

#[test]
fn names_and_errors_of_clients_do_not_make_the_tables_grow() {
    let runtime = runtime();
    let _context = runtime.enter();
    let telemetry = unsampled();
    let subject = EventSubject::from(&spec_of("acme", "a", stdio("files")));
    let names: Vec<String> = (0..5_000).map(|nth| format!("tool-{nth}")).collect();
    let call_all = || {
        for (code, name) in (0..).zip(&names) {
            let end = CallEnd::Error { code, message: "no".into() };
            observe(&telemetry, ObservedSide::Client { attempt: 1 }, name, end);
            telemetry.tool_called(&subject, name, ToolCallFate::ServerError);
        }
    };
    let first = measure(call_all);
    assert!(first.bytes_current < 1 << 20, "{first:?}");
    let second = measure(call_all);
    assert_eq!(second.bytes_current, 0, "the tables are full: {second:?}");
}

/// Counts the allocations of calls through the endpoint to a simulated server.
fn through_the_endpoint(observer: impl FnOnce() -> Arc<dyn RuntimeObserver>) -> AllocationInfo {
    let runtime = runtime();
    let (dispatcher, session) = runtime.block_on(async {
        let sessions = Arc::new(Sessions::new());
        let audience = Arc::new(GatewayAudience::new(sessions));
        let connectors = Connectors::from(SimConnector::new(SimScript::default()));
        let mut options = RuntimeOptions::new(connectors, Arc::new(DiscardingSink), Arc::new(Timestamp::now));
        (options.audience, options.observer) = (audience.clone(), observer());
        let (handle, _) = start(options).await.unwrap();
        let spec = spec_of("acme", "a", stdio("files"));
        let id = spec.id.clone();
        handle.install(spec).await.unwrap();
        handle.wait_for(&id, |view| view.offered_catalogue().is_some()).await.unwrap();
        let (_cancel, cancellation) = oneshot::channel();
        let message = RpcMessage::parse(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#.into()).unwrap();
        (EndpointDispatcher::new(&handle, audience), request(message, cancellation, None).session)
    });
    let text = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"execute_mcp_tool","arguments":{"tool_path":"files:add","arguments":{"a":1,"b":2}}}}"#;
    let message = RpcMessage::parse(text.into()).unwrap();
    let calls = |number: u64| {
        runtime.block_on(async {
            for _ in 0..number {
                let (_cancel, cancellation) = oneshot::channel();
                let request = EndpointRequest {
                    session: session.clone(),
                    timeout: Some(Duration::from_secs(60)),
                    ..request(message.clone(), cancellation, None)
                };
                let answer = dispatcher.handle_request(request).await;
                let CallAnswer::Message(response) = &answer else { panic!("no response: {answer:?}") };
                assert!(response.outcome().unwrap().contains('3'), "{response:?}");
            }
        });
    };
    calls(20);
    measure(|| calls(CALLS))
}

#[test]
fn observation_of_a_call_through_the_endpoint_allocates_little() {
    let unobserved = through_the_endpoint(|| Arc::new(NoObserver));
    let observed = through_the_endpoint(|| Arc::new(unsampled()));
    let more = observed.count_total.saturating_sub(unobserved.count_total);
    // Two records, the future around the answer, the id of the session and two texts. The other tasks of the thread
    // allocate now and then.
    assert!(more <= 8 * CALLS, "{more} more for {CALLS} calls: {observed:?}, {unobserved:?}");
    assert!(more >= 2 * CALLS, "the calls were not observed: {observed:?}, {unobserved:?}");
}
