//! `/metrics` of the built binary.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;
use serde_json::json;
use testkit::process::send;
use testkit::wait::{wait_for, wait_until};

use crate::fixture::{Traced, exchange, sample};
use crate::receiver::{Answering, Receiver};

#[test]
fn calls_starts_exits_and_recoveries_are_counted() {
    let traced = Traced::new("", "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    client.call("echo", &json!({"text": "a"}));
    client.call("tool_error", &json!({"message": "x"}));
    client.call("fail", &json!({"message": "x"}));
    client.call("unknown", &json!({}));
    let text = traced.scrape();
    for (start, wanted) in [
        ("satellite_instances{team=\"acme\",status=\"online\",transport=\"stdio\"}", 1.0),
        ("satellite_starts_total{team=\"acme\",transport=\"stdio\"}", 1.0),
        ("satellite_start_seconds_count{transport=\"stdio\"}", 1.0),
        ("satellite_calls_total{server=\"files\",tool=\"echo\",fate=\"ok\"}", 1.0),
        ("satellite_calls_total{server=\"files\",tool=\"tool_error\",fate=\"tool_error\"}", 1.0),
        ("satellite_calls_total{server=\"files\",tool=\"fail\",fate=\"server_error\"}", 1.0),
        ("satellite_calls_in_flight{team=\"acme\"}", 0.0),
        ("satellite_start_permits{pool=\"process\",state=\"waiting\"}", 0.0),
        ("satellite_sessions", 1.0),
        ("satellite_process_trees_omitted", 0.0),
    ] {
        assert!((sample(&text, start) - wanted).abs() < 0.1, "{start}: {}\n{text}", sample(&text, start));
    }
    // The processes are measured every ten seconds.
    wait_until("a sample of the processes", || traced.scrape().contains("\nsatellite_process_tree_memory_bytes{"));
    let text = traced.scrape();
    for start in [
        "satellite_events_total{result=\"emitted\"}",
        "satellite_journal_bytes",
        "satellite_process_memory_bytes",
        "satellite_process_open_files",
        "satellite_process_tree_memory_bytes{",
        "mcp_server_operation_duration_seconds_count{",
        "mcp_client_operation_duration_seconds_count{",
    ] {
        assert!(
            sample(&text, start.trim_end_matches('{')) > 0.0 || text.contains(&format!("\n{start}")),
            "{start}\n{text}"
        );
    }
    assert!(text.ends_with("# EOF\n"));

    let pid = traced.home.wait_online("files")["pid"].as_i64().unwrap();
    send(i32::try_from(pid).unwrap(), Signal::SIGKILL);
    wait_until("the recovery", || traced.sample("satellite_recovery_seconds_count{transport=\"stdio\"}") > 0.0);
    let text = traced.scrape();
    assert!(sample(&text, "satellite_exits_total{team=\"acme\",cause=\"exited\"}") > 0.0, "{text}");
    assert!(text.contains("satellite_restart_budget_remaining{team=\"acme\",instance="), "{text}");
    client.end_session();
    wait_until("the end of the session", || traced.scrape().contains("\nmcp_server_session_duration_seconds_count{"));
}

#[test]
fn a_second_scraper_gets_the_same_text() {
    let traced = Traced::new("", "");
    let (_satellite, _client) = traced.run();
    // A pause of a loaded machine may separate one pair of scrapes, but not all.
    wait_until("two equal scrapes", || traced.scrape() == traced.scrape());
    let first = traced.scrape();
    wait_until("a later scrape", || traced.scrape() != first);
}

#[test]
fn an_exemplar_names_the_trace_of_a_recorded_call() {
    let receiver = Receiver::start(Answering::Ok);
    let traced = Traced::new(&format!("endpoint = \"http://{}\"\nsample = 0", receiver.address), "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let parent = format!("00-{trace}-b7ad6b7169203331-01");
    let params = json!({"name": "echo", "arguments": {"text": "a"}, "_meta": {"traceparent": parent}});
    client.request("tools/call", &params);
    for _ in 0..3 {
        client.call("echo", &json!({"text": "not recorded"}));
    }
    let text = traced.scrape();
    for side in ["server", "client"] {
        let start = format!("mcp_{side}_operation_duration_seconds_bucket{{");
        let mut lines = text.lines().filter(|line| line.starts_with(&start));
        assert!(lines.any(|line| line.contains(&format!("# {{trace_id=\"{trace}\",span_id=\""))), "{text}");
    }
}

#[test]
fn only_this_machine_reads_the_metrics() {
    let traced = Traced::new("", "");
    let (_satellite, _client) = traced.run();
    let status = |start: &str, headers: &str| exchange(&traced.metrics_address, start, headers, "").status;
    assert_eq!(status("GET /metrics", "Host: localhost\r\n"), 200);
    assert_eq!(status("GET /metrics", "Host: rebound.example\r\n"), 403);
    assert_eq!(status("GET /", ""), 404);
    assert_eq!(status("POST /metrics", ""), 405);
}

#[test]
fn names_of_tools_do_not_make_the_text_grow() {
    let traced = Traced::new("", "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    for nth in 0..200 {
        client.call(&format!("made-up-{nth}"), &json!({}));
        client.request(&format!("made/up-{nth}"), &json!({}));
    }
    let text = traced.scrape();
    let count = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(count("satellite_calls_total{"), 51, "{text}");
    assert!(
        text.contains("satellite_calls_total{server=\"files\",tool=\"_other\",fate=\"server_error\"} 150"),
        "{text}"
    );
    let operations = count("mcp_server_operation_duration_seconds_count{");
    assert!((50..=200).contains(&operations), "{operations}");
    assert!(!text.contains("made/up"), "{text}");
}

#[test]
fn requests_and_bytes_of_clients_and_servers_are_counted() {
    let traced = Traced::new("", "");
    let (_satellite, mut client) = traced.run();
    client.initialize();
    let text = "x".repeat(20_000);
    client.call("echo", &json!({"text": text}));
    assert_eq!(exchange(&client.address, "POST /i/files/mcp", "", "{}").status, 401);
    let of = |route: &str, code: &str| format!("satellite_http_requests_total{{route=\"{route}\",code=\"{code}\"}}");
    let scraped = traced.scrape();
    assert!((sample(&scraped, &of("instance", "2xx")) - 2.0).abs() < 0.1, "{scraped}");
    assert!((sample(&scraped, &of("instance", "4xx")) - 1.0).abs() < 0.1, "{scraped}");
    for start in [
        "satellite_http_bytes_total{direction=\"received\"}",
        "satellite_http_bytes_total{direction=\"sent\"}",
        "satellite_server_bytes_total{transport=\"stdio\",direction=\"received\"}",
        "satellite_server_bytes_total{transport=\"stdio\",direction=\"sent\"}",
    ] {
        // The tool repeats its text in two members of its result.
        let bytes = sample(&scraped, start);
        assert!((20_000.0..100_000.0).contains(&bytes), "{start}: {bytes}\n{scraped}");
    }
}

#[test]
fn actors_and_waiting_work_are_shown_from_the_last_probe() {
    let traced = Traced::new("", "");
    let (_satellite, _client) = traced.run();
    let kinds = ["root", "registry", "batcher", "team", "worker"];
    let answered = |text: &str| {
        kinds.iter().all(|kind| sample(text, &format!("satellite_actor_response_seconds{{kind=\"{kind}\"}}")) > 0.0)
    };
    // The first scrape starts the first probe.
    wait_until("the answers", || answered(&traced.scrape()));
    let text = traced.scrape();
    for kind in kinds {
        let start = format!("satellite_actors_unanswered{{kind=\"{kind}\"}} 0");
        assert!(text.lines().any(|line| line == start), "{start}\n{text}");
    }
    assert!(text.lines().any(|line| line == "satellite_calls_waiting 0"), "{text}");
}

#[test]
fn an_orphan_is_counted() {
    let mut traced = Traced::new("", "");
    let script = format!("(sleep 0.1 &); exec {} sim-server", traced.home.binary.display());
    traced.append(&format!(
        "[[teams.installations]]\nid = \"leaves\"\nserver = \"leaves\"\ncommand = \"sh\"\nargs = [\"-c\", \"{script}\"]\n"
    ));
    let (_satellite, _client) = traced.run();
    traced.home.wait_online("leaves");
    wait_until("the orphan", || traced.sample("satellite_orphans_ended_total{how=\"reaped\"}") > 0.0);
}

/// Returns the names of the families in the documentation, without the suffixes of samples.
fn documented() -> BTreeSet<String> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
    let is_name = |text: &&str| {
        (text.starts_with("satellite_") || text.starts_with("mcp_"))
            && text.bytes().all(|letter| letter == b'_' || letter.is_ascii_lowercase())
    };
    let family = |name: &str| {
        let name = name.strip_suffix("_total").or_else(|| name.strip_suffix("_info")).unwrap_or(name);
        name.to_owned()
    };
    text.split('`').filter(is_name).map(family).collect()
}

#[test]
fn the_documentation_lists_exactly_the_metrics() {
    let receiver = Receiver::start(Answering::Ok);
    let mut traced = Traced::new(&format!("endpoint = \"http://{}\"", receiver.address), "");
    traced.append("[events]\nsink = \"file\"\n");
    let (_satellite, _client) = traced.run();
    // They depend on a backend and on the kernel.
    let absent = [
        "satellite_backend_connected",
        "satellite_backend_last_contact_seconds",
        "satellite_machine_memory_available_bytes",
        "satellite_machine_pressure_ratio",
    ];
    let documented = documented();
    let shown = || -> BTreeSet<String> {
        let text = traced.scrape();
        let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        families.map(str::to_owned).chain(absent.map(str::to_owned)).collect()
    };
    // Some are shown from the second scrape on.
    let look = || (shown() == documented).then_some(());
    wait_for("all metrics", look, || format!("{:?}", shown().symmetric_difference(&documented).collect::<Vec<_>>()));
}
