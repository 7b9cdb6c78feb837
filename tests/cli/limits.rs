//! Servers and clients that exhaust descriptors or memory: the satellite and other servers keep working.

use std::fs;
use std::net::TcpStream;

use nix::sys::signal::Signal;
use testkit::home::{Home, pid};
use testkit::process::send;

use super::mcp::Client;
use crate::SATELLITE;

const TOKEN: &str = "a-token-of-alice-that-is-long";

/// Starts every program of this home under a `ulimit`.
fn limit(home: &mut Home, limit: &str) {
    home.started_by = ["bash", "-c", &format!("ulimit {limit}; exec \"$@\""), "bash"].map(str::to_owned).to_vec();
}

/// Writes a configuration with settings of `[gateway]`, the user Alice and one server `notes` with `flags`.
fn configured(home: &Home, gateway: &str, flags: &str) -> String {
    fs::write(home.path().join("token"), TOKEN).unwrap();
    let file = home.path().join("token").display().to_string();
    let text = format!(
        "[gateway]\nlisten = \"127.0.0.1:0\"\n{gateway}\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\
         [[teams.users]]\nid = \"u\"\nslug = \"alice\"\ntoken = \"file:{file}\"\n\
         [[teams.installations]]\nid = \"notes\"\nserver = \"notes\"\nSIM{flags}\n"
    );
    home.write("satellite.toml", &text).display().to_string()
}

#[test]
fn idle_connections_leave_descriptors_for_restarts_and_clients() {
    let mut home = Home::new(SATELLITE);
    limit(&mut home, "-n 256");
    // With these limits, only the reserve of descriptors protects the satellite from the connections.
    let config = configured(&home, "header_timeout = \"1h\"\nunauthenticated_max = 4096", "");
    let satellite = home.run(&["--config", &config]);
    let greeted = satellite.process.wait_stdout(|text| text.contains("MCP: "));
    let url = greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let address = url.strip_prefix("http://").unwrap().strip_suffix("/mcp").unwrap();
    let before = home.wait_online("notes");
    let idle: Vec<TcpStream> = (0..400).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut client = Client::new(&url, Some(TOKEN));
    assert_eq!(client.initialize().status, 200);
    send(pid(&before), Signal::SIGKILL);
    home.wait_row("notes", "restarted", |row| row["status"] == "online" && row["pid"] != before["pid"]);
    let warned = |text: &str| text.contains("too many connections without a valid token");
    assert!(satellite.log().iter().any(|line| warned(line["message"].as_str().unwrap())));
    drop(idle);
    satellite.terminate().exits(0);
}

/// Answers `tools/list` with endless pages of 8 MiB.
const ENDLESS_PAGES: &str = r#"
import json, sys
page = 0
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        result = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "endless", "version": "1"}}
    elif request.get("method") == "tools/list":
        page += 1
        schema = {"type": "object", "description": "x" * (8 << 20)}
        result = {"tools": [{"name": f"tool{page}", "inputSchema": schema}], "nextCursor": str(page)}
    elif "id" in request:
        result = {}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"#;

#[test]
fn large_tool_lists_do_not_exhaust_a_limited_address_space() {
    let mut home = Home::new(SATELLITE);
    limit(&mut home, "-v 2500000");
    fs::write(home.path().join("endless.py"), ENDLESS_PAGES).unwrap();
    let script = home.path().join("endless.py").display().to_string();
    let mut config = configured(&home, "", "");
    let text = fs::read_to_string(&config).unwrap();
    // The limits allow lists that are together far larger than the address space.
    let endless = |nth: u32| {
        format!(
            "[[teams.installations]]\nid = \"endless{nth}\"\nserver = \"endless{nth}\"\ncommand = \"python3\"\n\
             args = [{script:?}]\npolicy = {{ session = {{ list_bytes_max = \"2GiB\" }} }}\n"
        )
    };
    let text = text + &(0..4).map(endless).collect::<String>();
    config = home.write("satellite.toml", &text).display().to_string();
    let satellite = home.run(&["--config", &config]);
    home.wait_online("notes");
    for nth in 0..4 {
        let row = home.wait_status(&format!("endless{nth}"), "error");
        assert!(row.to_string().contains("memory"), "{row:#}");
    }
    let row = home.wait_online("notes");
    assert_eq!(row["restarts"], 0, "{row:#}");
    satellite.terminate().exits(0);
}

#[test]
fn a_server_with_an_endless_tool_list_fails_and_others_stay_online() {
    let home = Home::new(SATELLITE);
    let endless: &[&str] = &["--tools", "100000", "--page-size", "4000"];
    let config = home.servers("satellite.toml", &[("endless", endless), ("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let row = home.wait_status("endless", "error");
    assert!(row.to_string().contains("tools/list has more than 10000 entries (`list_entries_max`)"), "{row:#}");
    home.wait_online("notes");
    satellite.terminate().exits(0);
}
