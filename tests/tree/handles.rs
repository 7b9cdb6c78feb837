//! The embedding API: its errors, its handles, the end of a runtime, and functions of the host as servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mcp_satellite::connect::sim::{SimConnector, SimPlan, SimScript};
use mcp_satellite::{
    Functions, Instance, InstanceError, InstanceHandle, Remedy, Runtime, RuntimeEnd, RuntimeStartError, ShutdownReport,
};
use mcp_satellite_actors::RuntimePart;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use mcp_satellite_actors::model::ids::RunNumber;
use mcp_satellite_actors::model::policy::{BatchPolicy, Policy};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::seam::Connectors;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use serde_json::{Value, json};
use tokio::time::{Duration, sleep, timeout};

use testkit::fleet::seconds;

const LONG: Duration = Duration::from_secs(3600);

/// Starts a runtime whose simulated servers behave as their commands say.
async fn start() -> Runtime {
    Runtime::builder(SimConnector::with_plan(plan)).start().await.unwrap()
}

fn plan(spec: &InstanceSpec, _run: RunNumber) -> SimPlan {
    let ServerTarget::Stdio { command, .. } = &spec.target else { return SimScript::default().into() };
    match command.as_str() {
        "missing" => SimPlan::with_open_error("cannot start `missing`: not found"),
        "stubborn" => SimScript { sigterm_delay: Some(seconds(5.0)), ignore_eof: true, ..SimScript::default() }.into(),
        _ => SimScript::default().into(),
    }
}

async fn online(runtime: &Runtime, command: &str) -> InstanceHandle {
    let server = runtime.install(Instance::stdio(command)).await.unwrap();
    assert_eq!(server.ready().await.unwrap().status, Status::Online);
    server
}

#[tokio::test(start_paused = true)]
async fn an_invalid_instance_is_refused_with_the_name_of_its_field() {
    let runtime = start().await;
    let mut policy = Policy::default();
    policy.session.terminate_grace = Duration::MAX;
    let cases = [
        (Instance::stdio(""), "command"),
        (Instance::stdio("a\0b"), "command"),
        (Instance::remote("example.com"), "url"),
        (Instance::remote("https://:80/mcp"), "url"),
        (Instance::remote("https://example.com/mcp?key=1"), "url"),
        (Instance::remote("https://me:s3cret@example.com/mcp"), "url"),
        (Instance::stdio("a").named(""), "named"),
        (Instance::stdio("a").team(""), "team"),
        (Instance::stdio("a").user(""), "user"),
        (Instance::stdio("a").args(["a\0b"]), "args"),
        (Instance::stdio("a").env("A=B", ""), "env"),
        (Instance::stdio("a").secret_env("LD_PRELOAD", "x"), "env"),
        (Instance::stdio("a").header("X-Key", "1"), "header"),
        (Instance::remote("https://example.com").header("Host", "x"), "header"),
        (Instance::remote("https://example.com").cwd("/"), "cwd"),
        (Instance::functions("a", Functions::new()).args(["x"]), "args"),
        (Instance::stdio("a").policy(policy), "session.terminate_grace"),
    ];
    for (instance, wrong) in cases {
        let error = runtime.install(instance).await.unwrap_err();
        assert!(matches!(&error, InstanceError::Invalid { field, .. } if *field == wrong), "{wrong}: {error:?}");
        assert!(error.to_string().contains(&format!("`{wrong}`")), "{error}");
    }
    assert!(runtime.handle().snapshot().is_empty(), "nothing was installed");
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn an_instance_has_defaults_for_its_name_and_contains_its_settings() {
    let runtime = start().await;
    let files = Instance::stdio("/usr/bin/files").args(["-y", "x"]).env("A", "1").secret_env("B", "s3cret");
    let files = runtime.install(files).await.unwrap();
    assert_eq!(files.id().to_string(), "default/default/files");
    let spec = &files.ready().await.unwrap().spec;
    let args: Vec<_> = spec.args.iter().map(Secret::expose).collect();
    assert_eq!((args, spec.env["A"].expose()), (vec!["-y", "x"], "1"));
    assert_eq!(spec.mask.apply("it is s3cret"), "it is [secret]");

    let remote = Instance::remote("https://example.com:8080/mcp").team("acme").user("alice");
    let remote = runtime.install(remote.secret_header("X-Key", "k3y-123").query("a", "b")).await.unwrap();
    assert_eq!(remote.id().to_string(), "acme/alice/example.com");
    let spec = &remote.ready().await.unwrap().spec;
    assert_eq!((spec.headers["X-Key"].expose(), spec.query["a"].expose()), ("k3y-123", "b"));
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn ready_returns_an_error_for_a_server_that_needs_a_person() {
    let runtime = start().await;
    let failed = runtime.install(Instance::stdio("missing")).await.unwrap();
    let error = timeout(LONG, failed.ready()).await.unwrap().unwrap_err();
    let expected = |error: &InstanceError, status, next| match error {
        InstanceError::Refused { status: is, remedy, message } => {
            assert_eq!((*is, *remedy), (status, Some(next)), "{message}");
            assert!(message.contains(status.as_str()), "{message}");
        }
        error => panic!("{error:?}"),
    };
    expected(&error, Status::PermanentlyFailed, Remedy::Restart);
    assert!(error.to_string().contains("cannot start `missing`: not found"), "{error}");
    expected(&failed.call("echo", json!({})).await.unwrap_err(), Status::PermanentlyFailed, Remedy::Restart);

    let stopped = online(&runtime, "works").await;
    stopped.stop().await.unwrap();
    expected(&stopped.ready().await.unwrap_err(), Status::Offline, Remedy::Start);
    stopped.start().await.unwrap();
    assert_eq!(stopped.ready().await.unwrap().status, Status::Online);

    // Another configuration clears the failure, and `ready` does not return the failure of the old one.
    let fixed = runtime.install(Instance::stdio("works").named("missing")).await.unwrap();
    assert_eq!(fixed.id(), failed.id());
    assert_eq!(failed.ready().await.unwrap().status, Status::Online);
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_whose_transport_has_no_connector_fails() {
    let runtime = Runtime::builder(Connectors::default()).start().await.unwrap();
    let server = runtime.install(Instance::stdio("npx")).await.unwrap();
    let error = timeout(LONG, server.ready()).await.unwrap().unwrap_err();
    assert!(matches!(error, InstanceError::Refused { status: Status::PermanentlyFailed, .. }), "{error:?}");
    assert!(error.to_string().contains("this runtime has no connector for processes"), "{error}");
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_handle_to_a_removed_instance_is_gone() {
    let runtime = start().await;
    let server = online(&runtime, "works").await;
    let waiting = runtime.install(Instance::stdio("missing")).await.unwrap();
    let (waited, removed) = futures::join!(waiting.ready(), waiting.remove());
    assert_eq!((waited.unwrap_err(), removed), (InstanceError::Gone, Ok(())));
    server.remove().await.unwrap();
    assert_gone(&server).await;
    runtime.shutdown().await;
}

async fn assert_gone(server: &InstanceHandle) {
    assert_eq!(server.status().unwrap_err(), InstanceError::Gone);
    assert_eq!(server.ready().await.unwrap_err(), InstanceError::Gone);
    assert_eq!(server.call("echo", json!({})).await, Err(InstanceError::Gone));
    assert_eq!(server.start().await, Err(InstanceError::Gone));
    assert_eq!(server.stop().await, Err(InstanceError::Gone));
    assert_eq!(server.restart().await, Err(InstanceError::Gone));
    assert_eq!(server.reconnect().await, Err(InstanceError::Gone));
    assert_eq!(server.remove().await, Err(InstanceError::Gone));
}

#[tokio::test(start_paused = true)]
async fn a_start_during_a_stop_supersedes_the_stop_of_a_handle() {
    let runtime = start().await;
    let server = online(&runtime, "stubborn").await;
    let start = async {
        sleep(seconds(1.0)).await;
        server.start().await
    };
    assert_eq!(futures::join!(server.stop(), start), (Err(InstanceError::Superseded), Ok(())));
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_call_returns_its_result_or_ends_at_its_timeout() {
    let runtime = start().await;
    let server = online(&runtime, "works").await;
    let result = server.call("echo", json!({ "text": "hello" })).await.unwrap();
    assert_eq!((result.text().as_str(), result.is_error()), ("\"hello\"", false));
    assert_eq!(result.structured(), Some(&json!({ "text": "hello" })));
    assert_eq!(result.json()["content"][0]["type"], "text");
    let list = server.call("echo", json!([1])).await.unwrap_err();
    assert!(matches!(list, InstanceError::Call(CallError::BadInput(_))), "{list:?}");
    let late = server.call("sleep", json!({ "ms": 20_000 })).timeout(seconds(2.0)).await;
    let expected = CallError::TimedOut { after: seconds(2.0), fate: CallFate::TimedOut };
    assert_eq!(late, Err(InstanceError::Call(expected)));
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_shutdown_returns_the_same_report() {
    let runtime = start().await;
    let server = online(&runtime, "works").await;
    let report = ShutdownReport { events_lost: 0, in_time: true };
    assert_eq!(futures::join!(runtime.shutdown(), runtime.shutdown()), (report, report));
    assert_eq!(runtime.shutdown().await, report);
    assert_eq!(runtime.closed().await, RuntimeEnd::ShutDown { events_lost: 0, in_time: true });
    assert_gone(&server).await;
    assert_eq!(runtime.install(Instance::stdio("works")).await.unwrap_err(), InstanceError::Gone);
}

/// An actor of a host without other duties.
struct IdleActor;

impl Actor for IdleActor {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn closed_distinguishes_a_kill_from_a_failure() {
    let killed = start().await;
    let server = online(&killed, "works").await;
    killed.kill();
    assert_eq!(killed.closed().await, RuntimeEnd::Killed);
    assert!(!killed.shutdown().await.in_time);
    assert_gone(&server).await;

    let (host, _) = Actor::spawn(None, IdleActor, ()).await.unwrap();
    let under = Runtime::builder(SimConnector::with_plan(plan)).start_under(host.get_cell()).await.unwrap();
    online(&under, "works").await;
    host.kill();
    assert_eq!(under.closed().await, RuntimeEnd::Killed);

    let failed = start().await;
    failed.handle().panic(RuntimePart::Root);
    assert!(matches!(failed.closed().await, RuntimeEnd::Failed(why) if why.contains("asked to panic")));
}

#[tokio::test(start_paused = true)]
async fn a_runtime_with_an_invalid_policy_does_not_start() {
    let batch = BatchPolicy { queue_max: usize::MAX, ..BatchPolicy::default() };
    let error = Runtime::builder(Connectors::default()).batch(batch).start().await.unwrap_err();
    assert!(matches!(&error, RuntimeStartError::Policy(_)), "{error:?}");
    assert!(error.to_string().contains("queue_max"), "{error}");
}

/// Counts the running functions: dropped with the future of a function.
struct RunningFunction(Arc<AtomicUsize>);

impl RunningFunction {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}

impl Drop for RunningFunction {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Installs functions that count how many of them run.
async fn functions(runtime: &Runtime) -> (InstanceHandle, Arc<AtomicUsize>) {
    let running = Arc::<AtomicUsize>::default();
    let count = running.clone();
    let schema = json!({ "type": "object", "description": "A tool" });
    let functions = Functions::new()
        .tool("shout", schema.clone(), |arguments: Value| async move {
            Ok(arguments["text"].as_str().ok_or("`text` is missing")?.to_uppercase().into())
        })
        .tool("panic", schema.clone(), |arguments: Value| async move { Ok(arguments["text"].as_str().unwrap().into()) })
        .tool("slow", schema, move |_| {
            let running = RunningFunction::new(&count);
            async move {
                sleep(seconds(5.0)).await;
                drop(running);
                Ok(json!({ "done": true }))
            }
        });
    let server = runtime.install(Instance::functions("functions", functions)).await.unwrap();
    server.ready().await.unwrap();
    (server, running)
}

#[tokio::test(start_paused = true)]
async fn functions_of_the_host_are_the_tools_of_a_server() {
    let runtime = Runtime::builder(Connectors::default()).start().await.unwrap();
    let (server, _) = functions(&runtime).await;
    let view = server.status().unwrap();
    let names: Vec<_> = view.catalogue.as_ref().unwrap().tools.iter().map(|tool| tool.name.to_string()).collect();
    assert_eq!(names, ["panic", "shout", "slow"]);
    assert_eq!(server.call("shout", json!({ "text": "hello" })).await.unwrap().text(), "HELLO");
    let failed = server.call("shout", Value::Null).await.unwrap();
    assert_eq!((failed.is_error(), failed.text().as_str()), (true, "`text` is missing"));
    let slow = server.call("slow", json!({})).await.unwrap();
    assert_eq!((slow.structured(), slow.text().as_str()), (Some(&json!({ "done": true })), r#"{"done":true}"#));
    let unknown = server.call("whisper", json!({})).await.unwrap_err();
    assert!(matches!(unknown, InstanceError::Call(CallError::Server { code: -32602, .. })), "{unknown:?}");

    let other = Functions::new().tool("shout", json!({ "type": "object" }), |_| async { Ok("ANYTHING".into()) });
    let replaced = runtime.install(Instance::functions("functions", other)).await.unwrap();
    assert_eq!(replaced.call("shout", json!({})).await.unwrap().text(), "ANYTHING");
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn functions_that_are_installed_again_during_their_removal_stay() {
    let runtime = Runtime::builder(Connectors::default()).start().await.unwrap();
    let functions = Functions::new().tool("hello", json!({ "type": "object" }), |_| async { Ok("HELLO".into()) });
    let server = runtime.install(Instance::functions("hello", functions.clone())).await.unwrap();
    server.ready().await.unwrap();
    let again = runtime.install(Instance::functions("hello", functions));
    let (removed, again) = futures::join!(server.remove(), again);
    removed.unwrap();
    assert_eq!(again.unwrap().call("hello", json!({})).await.unwrap().text(), "HELLO");
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_result_is_not_reported_as_a_call_that_was_not_sent() {
    let runtime = Runtime::builder(Connectors::default()).start().await.unwrap();
    // serde_json reads at most 128 levels.
    let functions = Functions::new().tool("deep", json!({ "type": "object" }), |_| async {
        Ok((0..200).fold(json!(1), |inner, _| json!({ "inner": inner })))
    });
    let server = runtime.install(Instance::functions("deep", functions)).await.unwrap();
    let error = server.call("deep", json!({})).await.unwrap_err();
    let is_executed = matches!(error, InstanceError::Call(CallError::Terminated { fate: CallFate::MaybeExecuted, .. }));
    assert!(is_executed, "{error:?}");
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_function_fails_only_its_call() {
    let runtime = Runtime::builder(Connectors::default()).start().await.unwrap();
    let (server, _) = functions(&runtime).await;
    let (slow, panicked) =
        futures::join!(server.call("slow", json!({})).into_future(), server.call("panic", json!({})).into_future());
    let error = panicked.unwrap_err();
    assert!(matches!(error, InstanceError::Call(CallError::Server { code: -32603, .. })), "{error:?}");
    assert!(error.to_string().contains("the function `panic` panicked"), "{error}");
    assert!(!slow.unwrap().is_error(), "the call beside it is not affected");
    assert_eq!(server.status().unwrap().restarts, 0);
    runtime.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_and_a_stop_drop_the_function() {
    let runtime = Runtime::builder(Connectors::default()).start().await.unwrap();
    let (server, running) = functions(&runtime).await;
    let late = server.call("slow", json!({})).timeout(seconds(1.0)).await;
    assert!(matches!(late, Err(InstanceError::Call(CallError::TimedOut { .. }))), "{late:?}");
    let cancelled = async {
        while running.load(Ordering::Relaxed) > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(timeout(seconds(2.0), cancelled).await.is_ok(), "the cancellation drops the function");

    let stop = async {
        sleep(seconds(1.0)).await;
        assert_eq!(running.load(Ordering::Relaxed), 1);
        server.stop().await.unwrap();
        assert_eq!(running.load(Ordering::Relaxed), 0);
    };
    let (stopped, ()) = futures::join!(server.call("slow", json!({})).into_future(), stop);
    assert!(stopped.is_err(), "{stopped:?}");
    server.start().await.unwrap();
    assert_eq!(server.call("shout", json!({ "text": "again" })).await.unwrap().text(), "AGAIN");
    runtime.shutdown().await;
}
