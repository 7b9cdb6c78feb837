//! axe-core finds no violation on any page, light and dark, narrow and wide.

use std::fs;

use serde_json::Value;
use testkit::home::Home;

use crate::backend::Backend;
use crate::browser::{Browser, Page};
use crate::made_up::MadeUpConsole;
use crate::playground::python_server;
use crate::support::{log_in, start, wait_live};
use crate::{SATELLITE, tools};

#[track_caller]
fn check(page: &Page, name: &str, axe: &str) {
    for (is_dark, width) in [(false, 360), (false, 1000), (true, 360), (true, 1000)] {
        page.set_dark(is_dark);
        page.resize(width, 900);
        page.eval(axe);
        let found = page.eval(
            "axe.run({resultTypes: ['violations']}).then(({violations}) => violations.map(({id, nodes}) => \
             [id, nodes.length, nodes[0].html.slice(0, 200), nodes[0].failureSummary.slice(0, 300)]))",
        );
        assert_eq!(found, Value::Array(Vec::new()), "{name}, dark {is_dark}, {width} pixels");
        let overflow = page.eval("document.documentElement.scrollWidth - window.innerWidth");
        assert!(overflow.as_i64().unwrap() <= 0, "{name} is {overflow} pixels wider than {width}");
    }
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn no_page_has_an_accessibility_violation() {
    let axe = fs::read_to_string(tools().join("node_modules/axe-core/axe.min.js")).unwrap();
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(
        &home,
        "",
        &[
            ("tools", &python_server()),
            ("typo", "command = \"npxx-no-such-command\""),
            (
                "notes",
                "SIM \"--resources\", \"3\", \"--stderr-text\", \"an error occurred\", \"--stderr-lines-per-second\", \"9\"",
            ),
        ],
    );
    home.wait_status("typo", "permanently_failed");
    home.wait_online("tools");
    home.wait_online("notes");
    home.satellite(&["call", "notes", "add", r#"{"a": 1, "b": 2}"#]).exits(0);
    let browser = Browser::start();
    let page = browser.page();
    page.open(&format!("{url}login"));
    check(&page, "login", &axe);
    log_in(&page, &home, &url);
    let pages = [
        "",
        "instances",
        "calls",
        "tree",
        "instances/tools",
        "instances/typo",
        "instances/notes",
        "events",
        "clients",
        "fleet",
        "playground/tools",
        "nowhere",
    ];
    for name in pages {
        page.open(&format!("{url}{name}"));
        if name != "nowhere" {
            wait_live(&page);
        }
        check(&page, name, &axe);
    }
    satellite.terminate().exits(0);
    let (home, other_home) = (Home::new(SATELLITE), Home::new(SATELLITE));
    let backend = Backend::start(&home);
    backend.configure(&home, &["notes"]);
    let satellites = [backend.satellite(&home, "satellite-0001"), backend.satellite(&other_home, "satellite-0002")];
    home.wait_all_online();
    let url = backend.console();
    page.open(&format!("{url}login"));
    check(&page, "login at a backend", &axe);
    backend.log_in(&page);
    page.wait("the instances", "document.querySelectorAll('.grid i').length === 2");
    for name in [
        "",
        "instances",
        "instances/satellite-0001%3Anotes-acme-alice-notes",
        "calls",
        "events",
        "fleet",
        "fleet/satellite-0001",
    ] {
        page.open(&format!("{url}{name}"));
        wait_live(&page);
        check(&page, &format!("{name} of a backend"), &axe);
    }
    // The servers of both have the mark of the first home, whose satellite therefore ends last.
    for satellite in satellites.into_iter().rev() {
        satellite.terminate().exits(0);
    }
    let console = MadeUpConsole::start(300);
    page.open(&console.url);
    wait_live(&page);
    check(&page, "300 instances", &axe);
}
