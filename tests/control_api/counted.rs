//! Logins, streams, requests and changes in the metrics.

use serde_json::json;
use testkit::wait::wait_until;

use super::fixture::{ALICES, Fixture, OPERATOR, VIEWER};

impl Fixture {
    /// Returns the value of a sample; 0 if there is none.
    #[track_caller]
    fn sample(&self, start: &str) -> f64 {
        let text = self.with(VIEWER).get("/metrics").body;
        let line = text.lines().find_map(|line| line.strip_prefix(start)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// Waits until the sample has this value: a text is used for one second.
    #[track_caller]
    fn wait_sample(&self, start: &str, value: f64) {
        wait_until(start, || (self.sample(start) - value).abs() < 0.1);
    }
}

#[test]
fn logins_streams_requests_and_changes_are_counted() {
    let fixture = Fixture::new("");
    let _satellite = fixture.start();
    fixture.wait_sample("satellite_console_logins", 0.0);
    let _browser = fixture.logged_in(OPERATOR);
    fixture.wait_sample("satellite_console_logins", 1.0);

    let stream = fixture.with(VIEWER).events("/v1/events/stream");
    fixture.wait_sample("satellite_console_streams", 1.0);
    drop(stream);
    fixture.wait_sample("satellite_console_streams", 0.0);

    let path = format!("/v1/instances/{ALICES}/restart");
    fixture.with(OPERATOR).post(&path, &json!({})).ok();
    for _ in 0..3 {
        fixture.with(VIEWER).post(&path, &json!({})).problem(403, "forbidden");
    }
    let of = |outcome: &str| format!("satellite_control_actions_total{{action=\"restart\",outcome=\"{outcome}\"}}");
    fixture.wait_sample(&of("succeeded"), 1.0);
    // Each refusal is counted, although equal ones share an event.
    fixture.wait_sample(&of("refused"), 3.0);
    assert!(fixture.sample("satellite_http_requests_total{route=\"api\",code=\"4xx\"}") >= 3.0);
    assert!(fixture.sample("satellite_http_requests_total{route=\"console\",code=\"3xx\"}") >= 1.0);
}
