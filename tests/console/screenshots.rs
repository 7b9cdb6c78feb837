//! Pictures of all pages for people to look at: `SCREENSHOTS=DIR cargo test --test console screenshots`, with
//! `SCREENSHOT_FORMAT=png` for viewers that do not know WebP.

use std::fmt::Write as _;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use testkit::home::Home;

use crate::SATELLITE;
use crate::backend::Backend;
use crate::browser::{Browser, Page};
use crate::made_up::MadeUpConsole;
use crate::playground::{call, python_server};
use crate::support::{console_url, log_in, start, wait_live};

const HEIGHT_MAX: u32 = 1400;

fn picture(page: &Page, into: &std::path::Path, name: &str) {
    for (theme, is_dark) in [("light", false), ("dark", true)] {
        for width in [1200, 360] {
            page.set_dark(is_dark);
            page.resize(width, HEIGHT_MAX);
            let format = std::env::var("SCREENSHOT_FORMAT").unwrap_or_else(|_| "webp".to_owned());
            page.screenshot(&into.join(format!("{name}-{theme}-{width}.{format}")), HEIGHT_MAX);
        }
    }
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn screenshots_of_all_pages() {
    let Some(into) = std::env::var_os("SCREENSHOTS").map(PathBuf::from) else { return };
    std::fs::create_dir_all(&into).unwrap();
    let browser = Browser::start();
    let page = browser.page();
    for count in [10, 300, 10_000] {
        let console = MadeUpConsole::start(count);
        page.open(&console.url);
        wait_live(&page);
        picture(&page, &into, &format!("overview-{count}"));
    }
    for count in [10, 300, 10_000] {
        remote_servers(&page, &into, count);
    }
    let home = Home::new(SATELLITE);
    let notes = "SIM \"--all-tools\", \"--resources\", \"3\", \"--prompts\", \"2\", \"--stderr-text\", \"an error occurred\", \
                 \"--stderr-lines-per-second\", \"3\"";
    let servers = [
        ("tools", python_server()),
        ("typo", "command = \"npxx-no-such-command\"".to_owned()),
        ("notes", notes.to_owned()),
        ("crashy", "SIM \"--exit-after\", \"2s\", \"--exit-code\", \"3\"".to_owned()),
    ];
    let servers: Vec<(&str, &str)> = servers.iter().map(|(slug, lines)| (*slug, lines.as_str())).collect();
    let (satellite, url) = start(&home, "[policy.restart]\ndelays = [\"20s\"]", &servers);
    home.wait_online("tools");
    home.wait_row("crashy", "a delay", |row| row["next_retry_ms"].is_number());
    home.wait_online("notes");
    home.satellite(&["call", "notes", "add", r#"{"a": 1, "b": 2}"#]).exits(0);
    page.open(&format!("{url}login"));
    picture(&page, &into, "login");
    log_in(&page, &home, &url);
    wait_live(&page);
    picture(&page, &into, "overview-real");
    for name in [
        "instances",
        "instances/notes",
        "instances/crashy",
        "calls",
        "tree",
        "events",
        "clients",
        "fleet",
        "playground/tools",
    ] {
        page.open(&format!("{url}{name}"));
        wait_live(&page);
        if name == "instances/notes" {
            page.wait("the output", "document.querySelectorAll('#output > *').length > 5");
        }
        if name == "playground/tools" {
            call(&page, "paint", "");
            page.wait("the result", "document.querySelector('#progress').textContent.includes('Answered')");
        }
        picture(&page, &into, &name.replace('/', "-"));
    }
    satellite.terminate().exits(0);
    fleet_of_a_backend(&page, &into);
}

/// Takes pictures of the pages of a satellite with so many remote servers; one in ten does not answer.
fn remote_servers(page: &Page, into: &std::path::Path, count: usize) {
    let home = Home::new(SATELLITE);
    let mut server = home.start(home.command(&["sim-server", "--http", "127.0.0.1:0"]));
    let printed = server.wait_stdout(|text| text.contains("/mcp"));
    let url = printed.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
    let mut config = "[gateway]\nlisten = \"127.0.0.1:0\"\n[console]\nenabled = true\n".to_owned();
    let (users, servers) = if count == 10 { (1, 10) } else { (5, 20) };
    for team in 0..(count / (users * servers)) {
        let users: Vec<_> = (0..users).map(|user| format!("{{ id = \"u{user}\", slug = \"u{user}\" }}")).collect();
        let users = users.join(", ");
        write!(config, "[[teams]]\nid = \"t{team}\"\nslug = \"team-{team}\"\nusers = [{users}]\n").unwrap();
        for nth in 0..servers {
            let url = if nth == 7 { "http://127.0.0.1:9/mcp" } else { url };
            write!(
                config,
                "[[teams.installations]]\nid = \"i{team}-{nth}\"\nserver = \"server-{nth}\"\ntransport = \"http\"\nurl = \
                 \"{url}\"\n"
            )
            .unwrap();
        }
    }
    let config = home.write("satellite.toml", &config);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let console = console_url(&satellite);
    log_in(page, &home, &console);
    let online = count - count / servers;
    page.wait("the instances", &format!("document.querySelectorAll('.grid i.online').length === {online}"));
    for name in ["instances", "tree", "calls", "events", "clients", "fleet"] {
        page.open(&format!("{console}{name}"));
        wait_live(page);
        picture(page, into, &format!("{name}-{count}"));
    }
    // The satellite's end is checked for processes of the home that are left.
    server.signal(Signal::SIGKILL);
    server.finish();
    satellite.terminate().exits(0);
}

/// Takes pictures of a backend with three satellites, one of which has ended.
fn fleet_of_a_backend(page: &Page, into: &std::path::Path) {
    let homes = [Home::new(SATELLITE), Home::new(SATELLITE), Home::new(SATELLITE)];
    let backend = Backend::start(&homes[0]);
    backend.configure(&homes[0], &["notes", "files", "browser"]);
    let names = ["satellite-berlin-1", "satellite-berlin-2", "satellite-lisbon-1"];
    let mut satellites: Vec<_> = homes.iter().zip(names).map(|(home, name)| backend.satellite(home, name)).collect();
    for home in &homes {
        home.wait_all_online();
    }
    let url = backend.console();
    backend.log_in(page);
    page.wait("the instances", "document.querySelectorAll('.grid i.online').length === 9");
    satellites.pop().unwrap().terminate().exits(0);
    page.wait("the ended satellite", "document.querySelectorAll('.grid i.offline').length === 3");
    let instance = "instances/satellite-berlin-1%3Anotes-acme-alice-notes";
    for (path, name) in
        [("", "overview"), ("fleet", "fleet"), ("fleet/satellite-berlin-1", "satellite"), (instance, "instance")]
    {
        page.open(&format!("{url}{path}"));
        wait_live(page);
        picture(page, into, &format!("backend-{name}"));
    }
    // The servers of all satellites have the mark of the first home, whose satellite therefore ends last.
    while let Some(satellite) = satellites.pop() {
        satellite.terminate().exits(0);
    }
}
