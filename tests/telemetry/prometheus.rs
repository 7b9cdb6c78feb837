//! A real Prometheus scrapes a satellite and evaluates every expression of `dist/`.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::port::free_port;
use testkit::process::send;
use testkit::wait::{wait_for, wait_until};
use url::form_urlencoded::byte_serialize;

use crate::fixture::Traced;
use crate::receiver::{Answering, Receiver};

fn tool(name: &str) -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/console-tools");
    std::env::var_os("MCP_CONSOLE_DIR").map_or_else(default, PathBuf::from).join("bin").join(name)
}

fn dist(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dist").join(name)
}

struct Prometheus {
    process: Child,
    address: String,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Prometheus {
    fn start(directory: &Path, target: &str) -> Self {
        let config = directory.join("prometheus.yml");
        let text = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [\"{}\"]\nscrape_configs:\n  \
             - job_name: satellite\n    static_configs: [{{ targets: [\"{target}\"] }}]\n",
            dist("prometheus-alerts.yml").display()
        );
        std::fs::write(&config, text).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let process = Command::new(tool("prometheus"))
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("tsdb").display()))
            .arg(format!("--web.listen-address={address}"))
            .args(["--enable-feature=exemplar-storage", "--log.level=error"])
            .stdin(Stdio::null())
            .spawn();
        let prometheus = Self { process: process.unwrap(), address };
        wait_until("Prometheus", || prometheus.try_get("/-/ready").is_some_and(|text| text.contains("Ready")));
        prometheus
    }

    fn try_get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        // With HTTP/1.0 the response is not chunked.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n", self.address).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text.split_once("\r\n\r\n")?.1.to_owned())
    }

    #[track_caller]
    fn get(&self, path: &str) -> Value {
        serde_json::from_str(&self.try_get(path).unwrap()).unwrap()
    }

    /// Evaluates an expression and returns its series.
    #[track_caller]
    fn query(&self, expression: &str) -> Vec<Value> {
        let encoded: String = byte_serialize(expression.as_bytes()).collect();
        let answer = self.get(&format!("/api/v1/query?query={encoded}"));
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().unwrap().clone()
    }
}

/// The expressions of the dashboard, with the variables of Grafana replaced.
fn dashboard_expressions() -> Vec<String> {
    let text = std::fs::read_to_string(dist("grafana-satellite.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    targets.map(|target| target["expr"].as_str().unwrap().replace("$__rate_interval", "1m")).collect()
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Prometheus; install it with .ci/install-console-tools")]
fn prometheus_evaluates_every_expression_of_the_dashboard_and_the_alerts() {
    let checked = Command::new(tool("promtool")).args(["check", "rules"]).arg(dist("prometheus-alerts.yml")).output();
    let checked = checked.unwrap();
    assert!(checked.status.success(), "{checked:?}");

    let receiver = Receiver::start(Answering::Ok);
    let mut traced = Traced::new(&format!("endpoint = \"http://{}\"\nsample = 1.0", receiver.address), "");
    traced.append("[events]\nsink = \"file\"\n[policy.restart]\nmax_crashes = 10\ndelays = [\"10ms\"]\n");
    let (_satellite, mut client) = traced.run();
    let prometheus = Prometheus::start(traced.home.path(), &traced.metrics_address);
    // A rate needs the counter at two moments.
    let mut traffic = || {
        client.initialize();
        client.call("echo", &json!({"text": "a"}));
        client.call("fail", &json!({"message": "x"}));
        client.end_session();
        traced.home.satellite(&["restart", "files"]).exits(0);
        let pid = traced.home.wait_online("files")["pid"].as_i64().unwrap();
        let before = traced.sample("satellite_recovery_seconds_count{transport=\"stdio\"}");
        send(i32::try_from(pid).unwrap(), Signal::SIGKILL);
        wait_until("the recovery", || traced.sample("satellite_recovery_seconds_count{transport=\"stdio\"}") > before);
    };
    traffic();
    wait_until("a scrape", || !prometheus.query("satellite_calls_total").is_empty());
    traffic();

    let expressions = dashboard_expressions();
    assert!(expressions.len() > 40, "{expressions:?}");
    for expression in &expressions {
        // An expression without samples returns no series; a quantile of no observation is not a number.
        let has_value = |series: &Value| series["value"][1].as_str().is_some_and(|value| value != "NaN");
        let look = || prometheus.query(expression).iter().any(has_value).then_some(());
        wait_for(expression, look, || format!("{:?}\n{}", prometheus.query(expression), traced.scrape()));
    }
    let rules =
        || prometheus.get("/api/v1/rules")["data"]["groups"][0]["rules"].as_array().cloned().unwrap_or_default();
    wait_until("the evaluation of the rules", || {
        !rules().is_empty() && rules().iter().all(|rule| rule["health"] != "unknown")
    });
    for rule in rules() {
        assert_eq!(rule["health"], "ok", "{rule}");
        prometheus.query(rule["query"].as_str().unwrap());
    }
    let targets = prometheus.get("/api/v1/targets");
    let target = &targets["data"]["activeTargets"][0];
    assert_eq!((&target["health"], &target["lastError"]), (&json!("up"), &json!("")), "{target}");
    let exemplars = || {
        let path = "/api/v1/query_exemplars?query=mcp_server_operation_duration_seconds_bucket&start=0&end=99999999999";
        prometheus.get(path)["data"].as_array().cloned().unwrap_or_default()
    };
    wait_until("an exemplar", || {
        exemplars()
            .iter()
            .any(|series| series["exemplars"][0]["labels"]["trace_id"].as_str().is_some_and(|id| id.len() == 32))
    });
}
