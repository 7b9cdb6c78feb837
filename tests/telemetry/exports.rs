//! The state of the export in `satellite status`.

use serde_json::{Value, json};
use testkit::wait::wait_until;

use crate::fixture::Traced;
use crate::receiver::{Answering, Receiver};
use crate::traces::recording;

fn telemetry(traced: &Traced) -> Value {
    traced.home.satellite(&["status", "--satellite", "--json"]).exits(0).json()["telemetry"].clone()
}

#[test]
fn a_failing_export_is_reported_without_its_credentials() {
    let receiver = Receiver::start(Answering::Failing);
    let key = "planted-key-6613";
    let url = format!("http://{}/v1/traces", receiver.address);
    let traced = Traced::new("sample = 1.0", "")
        .with_env(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &format!("{url}?api-key={key}")), ("RUST_LOG", "debug")]);
    let (satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    wait_until("the failure", || telemetry(&traced)["traces"]["last_error"].is_string());
    let state = telemetry(&traced);
    assert_eq!(state["traces"]["endpoint"], url);
    assert!(state["traces"]["last_error"].as_str().unwrap().contains("500"), "{state}");
    assert!(state["spans_dropped"].as_u64().unwrap() > 0, "{state}");
    assert!(state["metrics"].is_null(), "{state}");
    let since = state["traces"]["failing_since"].as_str().unwrap();
    let text = traced.home.satellite(&["status"]).exits(0).stdout;
    assert!(text.contains(&format!("traces are not exported to {url} since {since}: ")), "{text}");
    let failed = "satellite_telemetry_exports_total{signal=\"traces\",result=\"failed\"}";
    wait_until("the counted failure", || traced.sample(failed) > 0.0);
    assert!(receiver.received().iter().all(|received| received.path.contains(key)));
    for text in [state.to_string(), text, traced.scrape(), satellite.process.stderr()] {
        assert!(!text.contains(key), "{text}");
    }
}

#[test]
fn a_successful_export_is_counted_and_not_mentioned() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&recording(&receiver), "").with_env(&[("OTEL_METRIC_EXPORT_INTERVAL", "200")]);
    let (_satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    let succeeded = |signal: &str| {
        traced.sample(&format!("satellite_telemetry_exports_total{{signal=\"{signal}\",result=\"succeeded\"}}"))
    };
    wait_until("both exports", || succeeded("traces") > 0.0 && succeeded("metrics") > 0.0);
    let state = telemetry(&traced);
    assert!(state["spans_exported"].as_u64().unwrap() >= 2, "{state}");
    assert_eq!(state["metrics"], json!({"endpoint": format!("http://{}/v1/metrics", receiver.address)}));
    assert!(!traced.home.satellite(&["status"]).exits(0).stdout.contains("not exported"));
}

#[test]
fn without_an_export_there_is_no_state_of_it() {
    let traced = Traced::new("", "");
    let (_satellite, _client) = traced.run();
    assert!(telemetry(&traced).is_null());
}
