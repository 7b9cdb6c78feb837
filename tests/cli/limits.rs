//! Servers and clients that use up what the satellite has: what it keeps for itself and for everybody else.

use std::fs;
use std::net::TcpStream;

use nix::sys::signal::Signal;

use super::mcp::Client;
use super::support::{Home, pid, send};

const TOKEN: &str = "a-token-of-alice-that-is-long";

/// Starts everything in this home under a limit of the shell.
fn limit(home: &mut Home, limit: &str) {
    home.started_by = ["bash", "-c", &format!("ulimit {limit}; exec \"$@\""), "bash"].map(str::to_owned).to_vec();
}

/// A configuration with this `[gateway]`, Alice and one server `notes` with these flags.
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
fn idle_connections_leave_descriptors_to_restarts_to_status_and_to_clients() {
    let mut home = Home::new();
    limit(&mut home, "-n 256");
    // Nothing but the reserve of descriptors stands between these connections and the satellite.
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

#[test]
fn a_server_with_an_endless_list_is_not_used_and_the_others_are() {
    let home = Home::new();
    let endless: &[&str] = &["--tools", "100000", "--page-size", "4000"];
    let config = home.servers("satellite.toml", &[("endless", endless), ("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let row = home.wait_status("endless", "error");
    assert!(row.to_string().contains("tools/list has more than 10000 entries (`list_entries_max`)"), "{row:#}");
    home.wait_online("notes");
    satellite.terminate().exits(0);
}
