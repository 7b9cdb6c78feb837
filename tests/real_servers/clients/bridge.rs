//! Real clients use real servers, which `satellite import` has read from a client's file, through `satellite stdio`.

use std::fs;
use std::process::Stdio;

use serde_json::{Value, json};
use testkit::home::{Home, Satellite};
use testkit::installed::installed;
use testkit::wait::{GIVE_UP, wait_for};

use super::support::{SATELLITE, Steps, lines_of};
use super::{
    Client, EVERYTHING, Endpoint, check_inspector_with, check_meta_tools, check_server_everything,
    check_steps_of_both_eras, inspect, inspector,
};

const CONFIGURATION: &str = "\
[gateway]
listen = \"127.0.0.1:0\"

[[teams]]
id = \"local\"
slug = \"local\"
users = [{ id = \"me\", slug = \"me\" }]
";

/// A user with the servers of npm and `PyPI` in Cursor's file, imported into the configuration of the satellite.
fn imported_home() -> Home {
    let (everything, python) = (installed("node", EVERYTHING), installed("python3", "venv/bin/python"));
    let mut home = Home::new(SATELLITE);
    let user = home.path().display().to_string();
    home.env.push(("HOME".to_owned(), user));
    let servers = json!({"mcpServers": {
        "everything": {"command": "node", "args": [everything]},
        "time": {"command": python, "args": ["-m", "mcp_server_time"], "env": {"TZ": "UTC"}},
    }});
    fs::create_dir_all(home.path().join(".cursor")).unwrap();
    fs::write(home.path().join(".cursor/mcp.json"), servers.to_string()).unwrap();
    fs::create_dir_all(home.path().join("config/mcp-satellite")).unwrap();
    home.write("config/mcp-satellite/satellite.toml", CONFIGURATION);
    let imported = home.bare(&["import", "cursor", "--yes", "--json"]).exits(0).json();
    let outcomes: Vec<_> = imported["servers"].as_array().unwrap().iter().map(|row| &row["outcome"]).collect();
    assert_eq!(outcomes, ["added", "added"], "{imported:#}");
    home
}

fn run(home: &Home) -> Satellite<'_> {
    let config = home.path().join("config/mcp-satellite/satellite.toml");
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let rows = home.wait_all_online();
    assert_eq!(rows.len(), 2, "{rows:#?}");
    satellite
}

/// Returns the command of the bridge.
fn bridge<'a>(home: &'a Home, args: &[&'a str]) -> Vec<&'a str> {
    [&[SATELLITE, "stdio", "--no-start", "--data-dir", home.data_dir().to_str().unwrap()], args].concat()
}

fn target(home: &Home, args: &[&str]) -> String {
    json!(bridge(home, args)).to_string()
}

/// Runs all steps of a client through the bridge.
fn check_client(client: Client) {
    let home = imported_home();
    let satellite = run(&home);
    let (instance, tools) = (target(&home, &["--server", "everything"]), target(&home, &[]));
    let endpoint = Endpoint { instance, tools: Some(tools), token: None, _server: () };
    check_server_everything(client, &endpoint);
    check_meta_tools(client, &endpoint);
    let steps = client.run_steps(&target(&home, &["--server", "time"]), "time", None);
    steps.assert_text("time", "Asia/Tokyo");
    satellite.terminate().exits(0);
}

/// Kills the satellite during a call of a client, and starts it again.
fn check_restart(client: Client) {
    let home = imported_home();
    let satellite = run(&home);
    let mut command = client.command();
    command.args([&target(&home, &["--server", "everything"]), "restart"]).env_remove("MCP_TOKEN");
    let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = lines_of(process.stdout.take().unwrap());
    let mut steps = Steps(Vec::new());
    let mut read_to = |step: &str| {
        while steps.0.last().is_none_or(|last: &Value| last["step"] != step) {
            let Ok(line) = lines.recv_timeout(GIVE_UP) else { panic!("no step `{step}` in {:#?}", steps.0) };
            steps.0.push(serde_json::from_str(&line).unwrap());
        }
    };
    read_to("called");
    satellite.kill();
    read_to("lost");
    let satellite = run(&home);
    read_to("end");
    assert!(process.wait().unwrap().success());
    let lost = steps.of("lost");
    assert_eq!((&lost["code"], &lost["data"]["fate"]), (&json!(-32000), &json!("maybe_executed")), "{lost:#}");
    assert!(lost["message"].as_str().unwrap().contains("check before you call again"), "{lost:#}");
    steps.assert_text("again", "The sum of 2 and 40 is 42.");
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_python_client_can_use_imported_servers_through_the_bridge() {
    check_client(Client::Python);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_typescript_client_can_use_imported_servers_through_the_bridge() {
    check_client(Client::TypeScript);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn a_stateless_client_can_use_imported_servers_through_the_bridge() {
    let home = imported_home();
    let satellite = run(&home);
    let client = Client::PythonStateless;
    for (args, face) in [(&["--server", "everything"][..], "both"), (&["--flat"], "flat")] {
        let steps = client.run_steps(&target(&home, args), face, None);
        assert_eq!(steps.of("connect")["version"], "2026-07-28");
        check_steps_of_both_eras(&steps, client.name());
    }
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_python_client_survives_a_restart_of_the_satellite() {
    check_restart(Client::Python);
}

#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_typescript_client_survives_a_restart_of_the_satellite() {
    check_restart(Client::TypeScript);
}

/// Returns true if a client has an open tool call.
fn is_calling(home: &Home) -> bool {
    let clients = home.satellite(&["clients", "--json"]).exits(0).json();
    clients.as_array().unwrap().iter().any(|client| client["tool_calls"] == 1)
}

/// The inspector opens a new session for each call, so it starts the bridge for each.
#[test]
#[cfg_attr(no_real_servers, ignore = "needs real MCP servers; install them with .ci/install-servers")]
fn the_inspector_can_use_imported_servers_through_the_bridge() {
    let home = imported_home();
    let satellite = run(&home);
    let file = home.path().join("inspector.json");
    let entry = |args| json!({"command": SATELLITE, "args": bridge(&home, args)[1..]});
    let entries = json!({"everything": entry(&["--server", "everything"]), "time": entry(&["--server", "time"])});
    fs::write(&file, json!({"mcpServers": entries}).to_string()).unwrap();
    let target = |name| ["--config", file.to_str().unwrap(), "--server", name];
    check_inspector_with(&target("everything"));
    let call = ["--method", "tools/call", "--tool-name"];
    let long = ["trigger-long-running-operation", "--tool-arg", "duration=0.4", "steps=4"];
    let called = inspect(&target("everything"), &[&call[..], &long].concat());
    assert!(called["content"][0]["text"].as_str().unwrap().contains("completed"), "{called:#}");
    let prompt = ["--method", "prompts/get", "--prompt-name", "args-prompt", "--prompt-args", "city=Paris"];
    let prompt = inspect(&target("everything"), &prompt);
    assert_eq!(prompt["messages"][0]["content"]["text"], "What's weather in Paris?", "{prompt:#}");
    let time = ["get_current_time", "--tool-arg", "timezone=Asia/Tokyo"];
    let time = inspect(&target("time"), &[&call[..], &time].concat());
    assert!(time["content"][0]["text"].as_str().unwrap().contains("Asia/Tokyo"), "{time:#}");

    // A call that is open while the satellite ends fails with its fate, and the next call uses the next satellite.
    let endless = ["trigger-long-running-operation", "--tool-arg", "duration=600", "steps=6000"];
    let mut endless = inspector(&target("everything"), &[&call[..], &endless].concat());
    let endless = endless.0.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the call", || is_calling(&home).then_some(()), || format!("{:#?}", home.rows()));
    satellite.kill();
    let failed = endless.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&[failed.stdout, failed.stderr].concat()).into_owned();
    assert!(!failed.status.success() && said.contains("check before you call again"), "{said}");
    let satellite = run(&home);
    check_inspector_with(&target("everything"));
    satellite.terminate().exits(0);
}
