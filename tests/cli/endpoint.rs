//! The MCP endpoint of `satellite run`: address, authentication, reload and shutdown.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use serde_json::json;
use testkit::home::{Home, Satellite};
use testkit::wait::wait_for;

use super::mcp::Client;
use super::reload::reload;
use crate::SATELLITE;

/// The default address, which only one process of the machine can bind.
const DEFAULT_ADDRESS: &str = "127.0.0.1:7300";

/// The URL in the greeting.
#[track_caller]
fn endpoint_url(satellite: &Satellite<'_>) -> String {
    let greeted = satellite.process.wait_stdout(|text| text.contains("MCP: "));
    greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

/// Writes a configuration with the section `gateway`, one server `notes` and the user Alice with `tokens`, one file
/// each.
fn config(home: &Home, gateway: &str, tokens: &[&str]) -> PathBuf {
    let mut text = format!("{gateway}\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n[[teams.users]]\nid = \"u\"\n");
    let files = tokens.iter().map(|token| {
        fs::write(home.path().join(token), format!("{token}-of-alice-that-is-long\n")).unwrap();
        format!("\"file:{}\"", home.path().join(token).display())
    });
    let files = files.collect::<Vec<_>>().join(", ");
    write!(text, "slug = \"alice\"\ntokens = [{files}]\n").unwrap();
    text.push_str("[[teams.installations]]\nid = \"notes\"\nserver = \"notes\"\nSIM \"--call-delay\", \"300ms\"\n");
    home.write("satellite.toml", &text)
}

fn token(name: &str) -> String {
    format!("{name}-of-alice-that-is-long")
}

#[test]
fn a_client_of_an_mcp_json_connects_with_the_generated_token() {
    let home = Home::new(SATELLITE);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"files": {"command": "SATELLITE", "args": ["SIM"]}}}"#);
    // The test occupies the default port.
    let occupied = wait_for("the default port to be free", || TcpListener::bind(DEFAULT_ADDRESS).ok(), String::new);
    let satellite = home.run(&["--mcp-json", mcp_json.to_str().unwrap()]);
    let url = endpoint_url(&satellite);
    assert!(url.starts_with("http://127.0.0.1:") && !url.contains(DEFAULT_ADDRESS), "{url}");
    assert!(satellite.log().iter().any(|line| line["message"].as_str().unwrap().contains("is taken")));
    drop(occupied);

    let file = home.data_dir().canonicalize().unwrap().join("token");
    assert!(
        satellite.wait_start_message().contains(&format!("token in {}\n", file.display())),
        "{}",
        satellite.wait_start_message()
    );
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let token = fs::read_to_string(&file).unwrap();
    assert!(
        !satellite.wait_start_message().contains(token.trim()) && !satellite.process.stderr().contains(token.trim())
    );

    let unknown = Client::new(&url, None).initialize();
    assert_eq!(unknown.status, 401);
    assert_eq!(unknown.header("www-authenticate"), Some("Bearer"));

    home.wait_all_online();
    let mut client = Client::new(&url, Some(&token));
    assert_eq!(client.initialize().json()["result"]["serverInfo"]["name"], "mcp-satellite");
    let answer = client.call("execute_mcp_tool", &json!({"tool_path": "files:echo", "arguments": {"text": "hi"}}));
    assert_eq!(answer["result"]["structuredContent"], json!({"text": "hi"}), "{answer:#}");
    let mut direct = Client::new(&url, Some(&token)).at("/i/files/mcp");
    assert_eq!(direct.initialize().status, 200);
    let answer = direct.call("echo", &json!({"text": "ho"}));
    assert_eq!(answer["result"]["structuredContent"], json!({"text": "ho"}), "{answer:#}");

    let status = home.satellite(&["status"]).exits(0).stdout;
    assert!(status.contains(&format!("MCP: {url}")) && status.contains("2 clients"), "{status}");
    let clients = home.satellite(&["clients", "--json"]).exits(0).json();
    let listed: Vec<_> = clients.as_array().unwrap().iter().map(|one| (&one["client"], &one["endpoint"])).collect();
    let (name, tools, direct) = (json!("small"), json!("tools"), json!("files"));
    assert!(
        listed.len() == 2 && listed.contains(&(&name, &tools)) && listed.contains(&(&name, &direct)),
        "{clients:#}"
    );
    let table = home.satellite(&["clients"]).exits(0).stdout;
    assert!(table.contains("small 1") && table.contains("2025-11-25"), "{table}");
    let connected = home.wait_event(0, "mcp.client.connected", |_| true);
    assert_eq!(connected["data"]["client_type"], "small/1", "{connected:#}");
    assert_eq!(home.wait_event(0, "mcp.tool.executed", |_| true)["data"]["tool_name"], "echo");
    satellite.terminate().exits(0);
    let ended = home.events().into_iter().filter(|event| event["type"] == "mcp.client.disconnected");
    assert!(ended.clone().all(|event| event["data"]["reason"] == "drained") && ended.count() == 2);
}

#[test]
fn a_configuration_without_gateway_opens_no_endpoint() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    assert!(!satellite.wait_start_message().contains("MCP: "));
    assert!(!home.satellite(&["status"]).exits(0).stdout.contains("MCP: "));
    assert!(!home.data_dir().join("token").exists());
    satellite.terminate().exits(0);
}

#[test]
fn an_address_in_use_is_an_error_before_any_server_starts() {
    let home = Home::new(SATELLITE);
    let occupied = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let config = config(&home, "", &["first"]);
    let outcome = home.satellite(&["run", "--config", config.to_str().unwrap(), "--listen", &address]).exits(1);
    assert!(outcome.stderr.contains(&address) && outcome.stderr.contains("--listen"), "{outcome:#?}");
    assert!(home.satellite(&["events", "--json"]).stdout.is_empty(), "events were written before the error");
}

#[test]
fn an_unusable_certificate_is_an_error_before_any_server_starts() {
    let home = Home::new(SATELLITE);
    home.write("no.pem", "this is no certificate");
    let tls = "[gateway]\nlisten = \"127.0.0.1:0\"\ntls = { cert = \"no.pem\", key = \"no.pem\" }";
    let config = config(&home, tls, &["first"]);
    let outcome = home.satellite(&["run", "--config", config.to_str().unwrap()]).exits(2);
    assert!(outcome.stderr.contains("cannot use the file of `cert`"), "{outcome:#?}");
    assert!(home.satellite(&["events", "--json"]).stdout.is_empty(), "events were written before the error");
}

#[test]
fn a_reload_ends_only_the_sessions_of_removed_tokens() {
    const LISTEN: &str = "[gateway]\nlisten = \"127.0.0.1:0\"";
    let home = Home::new(SATELLITE);
    let file = config(&home, LISTEN, &["first", "second"]);
    let mut satellite = home.run(&["--config", file.to_str().unwrap()]);
    home.wait_all_online();
    let url = endpoint_url(&satellite);
    let mut clients = ["first", "second"].map(|name| Client::new(&url, Some(&token(name))));
    assert_eq!(clients.each_mut().map(|client| client.initialize().status), [200, 200]);
    config(&home, LISTEN, &["second", "third"]);
    reload(&home, &mut satellite);
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    assert_eq!(clients.each_ref().map(|client| client.post(&ping).unwrap().status), [401, 200]);
    let ended = home.wait_event(0, "mcp.client.disconnected", |_| true);
    assert_eq!(ended["data"]["reason"], "revoked", "{ended:#}");
    let mut third = Client::new(&url, Some(&token("third")));
    assert_eq!(third.initialize().status, 200);
    satellite.terminate().exits(0);
}

#[test]
fn a_changed_token_file_takes_effect_without_a_reload() {
    let home = Home::new(SATELLITE);
    let file = config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"", &["first"]);
    let satellite = home.run(&["--config", file.to_str().unwrap()]);
    let url = endpoint_url(&satellite);
    let mut client = Client::new(&url, Some(&token("first")));
    assert_eq!(client.initialize().status, 200);
    fs::write(home.path().join("first"), "another-token-of-alice-that-is-long\n").unwrap();
    let mut other = Client::new(&url, Some("another-token-of-alice-that-is-long"));
    wait_for(
        "the new token to be accepted",
        || (other.initialize().status == 200).then_some(()),
        || satellite.process.stderr(),
    );
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    assert_eq!(client.post(&ping).unwrap().status, 401);
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_revokes_tokens_even_if_the_generated_token_is_unreadable() {
    let home = Home::new(SATELLITE);
    let file = config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"", &["first", "second"]);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"files": {"command": "SATELLITE", "args": ["SIM"]}}}"#);
    let args = ["--config", file.to_str().unwrap(), "--mcp-json", mcp_json.to_str().unwrap()];
    let mut satellite = home.run(&args);
    let url = endpoint_url(&satellite);
    let client = |token: &str| Client::new(&url, Some(token)).initialize().status;
    let kept = fs::read_to_string(home.data_dir().join("token")).unwrap();
    assert_eq!([client(&token("first")), client(&token("second")), client(&kept)], [200; 3]);
    config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"", &["second"]);
    fs::write(home.data_dir().join("token"), "").unwrap();
    reload(&home, &mut satellite);
    assert_eq!([client(&token("first")), client(&token("second")), client(&kept)], [401, 200, 401]);
    satellite.process.wait_stderr(|log| log.contains("requests with it are rejected"));
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_switches_the_endpoint_off_and_on_again() {
    let home = Home::new(SATELLITE);
    let file = config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"", &["first"]);
    let mut satellite = home.run(&["--config", file.to_str().unwrap()]);
    let url = endpoint_url(&satellite);
    config(&home, "[gateway]\nlisten = \"off\"", &["first"]);
    reload(&home, &mut satellite);
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    let closed = Client::new(&url, Some(&token("first")));
    assert!(closed.post(&ping).is_err());
    assert!(!home.satellite(&["status"]).exits(0).stdout.contains("MCP: "));
    let place = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    config(&home, &format!("[gateway]\nlisten = \"{place}\""), &["first"]);
    reload(&home, &mut satellite);
    assert_eq!(Client::new(&format!("http://{place}/mcp"), Some(&token("first"))).initialize().status, 200);
    satellite.terminate().exits(0);
}

#[test]
fn a_reload_moves_the_endpoint_and_its_sessions_to_a_free_address() {
    let home = Home::new(SATELLITE);
    let file = config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"", &["first"]);
    let mut satellite = home.run(&["--config", file.to_str().unwrap()]);
    let before = endpoint_url(&satellite);
    let mut client = Client::new(&before, Some(&token("first")));
    assert_eq!(client.initialize().status, 200);
    let place = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = place.local_addr().unwrap();
    config(&home, &format!("[gateway]\nlisten = \"{address}\""), &["first"]);
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    reload(&home, &mut satellite);
    assert_eq!(client.post(&ping).unwrap().status, 200, "the endpoint moved to an address in use");
    assert!(home.satellite(&["status"]).exits(0).stdout.contains(&before));
    drop(place);
    reload(&home, &mut satellite);
    assert!(client.post(&ping).is_err());
    assert_eq!(
        client.to(&address.to_string()).post(&ping).unwrap().status,
        200,
        "the session did not survive the move"
    );
    assert!(home.satellite(&["status"]).exits(0).stdout.contains(&format!("http://{address}/mcp")));
    satellite.terminate().exits(0);
}

#[test]
fn a_removed_server_ends_its_sessions() {
    const LISTEN: &str = "[gateway]\nlisten = \"127.0.0.1:0\"";
    let home = Home::new(SATELLITE);
    let file = config(&home, LISTEN, &["first"]);
    let mut satellite = home.run(&["--config", file.to_str().unwrap()]);
    home.wait_all_online();
    let mut client = Client::new(&endpoint_url(&satellite), Some(&token("first"))).at("/i/notes/mcp");
    assert_eq!(client.initialize().status, 200);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.split("[[teams.installations]]").next().unwrap()).unwrap();
    reload(&home, &mut satellite);
    assert_eq!(home.wait_event(0, "mcp.client.disconnected", |_| true)["data"]["reason"], "removed");
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    assert_eq!(client.post(&ping).unwrap().status, 404);
    satellite.terminate().exits(0);
}

#[test]
fn a_call_in_flight_at_shutdown_receives_its_result() {
    let home = Home::new(SATELLITE);
    let file = config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"\ndrain_timeout = \"60s\"", &["first"]);
    // Long enough to be seen in the status on a busy machine.
    let text = fs::read_to_string(&file).unwrap().replace("300ms", "5s");
    fs::write(&file, text).unwrap();
    let mut satellite = home.run(&["--config", file.to_str().unwrap()]);
    home.wait_all_online();
    let mut client = Client::new(&endpoint_url(&satellite), Some(&token("first"))).at("/i/notes/mcp");
    client.initialize();
    let calling = std::thread::spawn(move || client.call("echo", &json!({"text": "last"})));
    wait_for("the call to be in flight", || (home.row("notes")?["calls_in_flight"] == 1).then_some(()), String::new);
    satellite.signal(Signal::SIGTERM);
    let answer = calling.join().unwrap();
    assert_eq!(answer["result"]["structuredContent"], json!({"text": "last"}), "{answer:#}");
    satellite.ended().exits(0);
}

#[test]
fn a_denied_tool_is_neither_listed_nor_called_anywhere() {
    let home = Home::new(SATELLITE);
    let mut config = config(&home, "[gateway]\nlisten = \"127.0.0.1:0\"", &["first"]);
    let text = fs::read_to_string(&config).unwrap() + "deny_tools = [\"add\"]\n";
    config = home.write("satellite.toml", &text);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    let url = endpoint_url(&satellite);
    let tools = |client: &Client| -> Vec<String> {
        let list = client.post(&json!({"jsonrpc": "2.0", "id": 7, "method": "tools/list"})).unwrap().json();
        let tools = list["result"]["tools"].as_array().unwrap();
        tools.iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
    };
    let mut direct = Client::new(&url, Some(&token("first"))).at("/i/notes/mcp");
    direct.initialize();
    assert!(tools(&direct).contains(&"echo".to_owned()) && !tools(&direct).contains(&"add".to_owned()));
    let refused = direct.call("add", &json!({"a": 1, "b": 2}));
    assert!(refused.to_string().contains("tool `add` not found"), "{refused}");
    let refused = home.satellite(&["call", "notes", "add", r#"{"a": 1, "b": 2}"#]);
    assert!(refused.code != Some(0) && refused.stderr.contains("tool `add` not found"), "{refused:?}");
    let listed = home.satellite(&["tools"]).exits(0).stdout;
    assert!(listed.contains("echo") && !listed.contains("add"), "{listed}");

    // The other way around, by a reload.
    home.write("satellite.toml", &text.replace("deny_tools = [\"add\"]", "allow_tools = [\"add\", \"missing\"]"));
    home.satellite(&["reload"]).exits(0);
    home.wait_online("notes");
    let mut direct = Client::new(&url, Some(&token("first"))).at("/i/notes/mcp");
    direct.initialize();
    assert_eq!(tools(&direct), ["add"]);
    satellite.terminate().exits(0);
}
