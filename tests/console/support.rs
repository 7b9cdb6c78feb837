//! A satellite with a console, and a browser that is logged in.

use std::fmt::Write as _;
use std::fs;

use serde_json::Value;
use testkit::home::{Home, Satellite};

use crate::browser::Page;

/// Configuration of the satellite of a test: servers with their lines, all of one user. A server's `SIM` line starts a
/// simulated one.
pub(crate) fn write_config(home: &Home, before: &str, servers: &[(&str, &str)]) -> String {
    let mut text = format!(
        "{before}\n[gateway]\nlisten = \"127.0.0.1:0\"\n[console]\nenabled = true\n[[teams]]\nid = \"team_acme\"\nslug = \
         \"acme\"\nusers = [{{ id = \"user_alice\", slug = \"alice\" }}]\n"
    );
    for (slug, lines) in servers {
        write!(text, "[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\n{lines}\n").unwrap();
    }
    home.write("satellite.toml", &text).to_str().unwrap().to_owned()
}

/// Starts a satellite and returns it with the URL of its console.
#[track_caller]
pub(crate) fn start<'a>(home: &'a Home, before: &str, servers: &[(&str, &str)]) -> (Satellite<'a>, String) {
    let config = write_config(home, before, servers);
    let satellite = home.run(&["--config", &config]);
    let url = console_url(&satellite);
    (satellite, url)
}

#[track_caller]
pub(crate) fn console_url(satellite: &Satellite<'_>) -> String {
    let greeted = satellite.process.wait_stdout(|text| text.contains("MCP: "));
    let url = greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap();
    url.replace("/mcp", "/console/")
}

/// Logs in with the owner's token, by the form.
#[track_caller]
pub(crate) fn log_in(page: &Page, home: &Home, url: &str) {
    let token = fs::read_to_string(home.data_dir().join("console-token")).unwrap();
    log_in_with(page, token.trim(), url);
}

/// Logs in with a token, by the form.
#[track_caller]
pub(crate) fn log_in_with(page: &Page, token: &str, url: &str) {
    page.open(url);
    page.wait("the login page", "document.querySelector('#login')");
    page.eval(&format!(
        "document.querySelector('#token').value = {token:?}; document.querySelector('#login').submit()"
    ));
    page.wait("the overview", "document.body.dataset.page === 'overview' && document.readyState === 'complete'");
}

/// Waits until the page follows the satellite.
#[track_caller]
pub(crate) fn wait_live(page: &Page) {
    page.wait("the page to be live", "document.querySelector('#link')?.textContent === 'live'");
}

/// Returns the statuses in the grid, by name of the instance.
pub(crate) fn grid(page: &Page) -> serde_json::Map<String, Value> {
    let cells = "Object.fromEntries([...document.querySelectorAll('.grid i')].map((cell) => \
                 [cell.row.name, cell.className.replace(' at', '')]))";
    page.eval(cells).as_object().unwrap().clone()
}

/// Returns the class of a cell for the last status of an instance in the journal.
pub(crate) fn stored_status(events: &[Value], instance: &str) -> Option<String> {
    let is_status =
        |event: &&Value| event["type"] == "mcp.server.status_changed" && event["data"]["process_id"] == instance;
    Some(events.iter().rev().find(is_status)?["data"]["status"].as_str()?.to_owned())
}

/// Returns true if a cell of this class shows the status.
pub(crate) fn shows(class: &str, status: &str) -> bool {
    class == status || (class == "asleep" && status == "online") || (class == "stopped" && status == "offline")
}
