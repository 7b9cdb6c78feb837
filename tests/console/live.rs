//! Pages that follow their satellite: none shows an old state or drops an event without saying so.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::home::Home;
use testkit::process::send;
use testkit::wait::wait_until;

use crate::SATELLITE;
use crate::browser::{Browser, Page};
use crate::support::{grid, log_in, log_in_with, start, wait_live};

const TYPO: (&str, &str) = ("typo", "command = \"npxx-no-such-command\"");

/// Returns the number of times that the page was read again.
fn refreshes(page: &Page) -> u64 {
    let count = "performance.getEntriesByType('resource').filter(({name}) => name.includes('live=true')).length";
    page.eval(count).as_u64().unwrap()
}

/// Moves the pointer to the middle of an element and presses or releases its button.
#[track_caller]
fn mouse(page: &Page, kind: &str, selector: &str) {
    let place = page.eval(&format!(
        "(({{x, y, width, height}}) => [x + width / 2, y + height / 2])(document.querySelector('{selector}').getBoundingClientRect())"
    ));
    let event = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
    page.command("Input.dispatchMouseEvent", &event);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn the_overview_keeps_its_buttons_and_shows_new_warnings() {
    let home = Home::new(SATELLITE);
    let token = "a-viewer-token-that-is-long-enough-1";
    let file = home.path().join("viewer");
    std::fs::write(&file, token).unwrap();
    testkit::home::make_private(&file);
    let tokens =
        format!("SIM\n[[console.tokens]]\nname = \"eye\"\ntoken = \"file:{}\"\nrole = \"viewer\"\n", file.display());
    let (satellite, url) = start(&home, "", &[TYPO, ("notes", &tokens)]);
    home.wait_online("notes");
    home.wait_status("typo", "permanently_failed");
    let browser = Browser::start();
    let (page, viewer) = (browser.page(), browser.page());
    log_in(&page, &home, &url);
    log_in_with(&viewer, token, &url);
    for page in [&page, &viewer] {
        wait_live(page);
        page.wait("the failed server", "document.querySelector('#attention li')");
    }
    // A change between press and release must not replace the button.
    let button = "#attention [data-action=restart]";
    mouse(&page, "mousePressed", button);
    home.satellite(&["stop", "notes"]).exits(0);
    for page in [&page, &viewer] {
        page.wait("the stop", "[...document.querySelectorAll('.grid i')].some((cell) => cell.className === 'stopped')");
    }
    mouse(&page, "mouseReleased", button);
    home.wait_event(0, "control.action", |event| {
        event["data"]["action"] == "restart" && event["data"]["actor"]["via"] == "console"
    });
    assert_eq!(viewer.eval("document.querySelectorAll('#attention [data-action]').length"), 0);

    let path = home.path().join("satellite.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, "[[").unwrap();
    send(satellite.pid(), Signal::SIGHUP);
    page.wait("the warning", "document.querySelector('#warnings').textContent.includes('satellite reload')");
    std::fs::write(&path, config).unwrap();
    send(satellite.pid(), Signal::SIGHUP);
    page.wait("the end of the warning", "document.querySelector('#warnings').textContent === ''");
    assert_eq!(grid(&page).len(), 2, "the rows come by the stream");
    page.assert_clean();
    viewer.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn pages_follow_changes_without_waiting_for_their_next_refresh() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM"), ("files", "SIM")]);
    home.wait_all_online();
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    // Without the refreshes at intervals, only a change on the stream can bring the status.
    let source = json!({"source": "window.setInterval = () => 0"});
    let stub = page.command("Page.addScriptToEvaluateOnNewDocument", &source);
    let status =
        "[...document.querySelectorAll('#instances .status, #state .status')].map((status) => status.textContent)";
    for (path, server) in [("instances", "notes"), ("playground/files", "files")] {
        page.open(&format!("{url}{path}"));
        wait_live(&page);
        home.satellite(&["stop", server]).exits(0);
        page.wait(&format!("the stop on {path}"), &format!("{status}.includes('stopped')"));
        page.assert_clean();
    }
    page.command("Page.removeScriptToEvaluateOnNewDocument", &json!({"identifier": stub["identifier"]}));
    home.satellite(&["start", "notes"]).exits(0);
    home.wait_online("notes");

    page.open(&format!("{url}calls?instance=&server=notes"));
    wait_live(&page);
    assert_eq!(page.eval("document.querySelector('#new-calls').hidden"), true);
    home.satellite(&["call", "notes", "add", r#"{"a": 1, "b": 2}"#]).exits(0);
    page.wait("the offer", "!document.querySelector('#new-calls').hidden");
    assert_eq!(page.text("#new-calls"), "1 new call");
    assert_eq!(page.eval("document.querySelectorAll('.calls li').length"), 0);
    page.click("#new-calls a");
    page.wait("the call", "document.querySelectorAll('.calls li').length === 1");

    // The person selects text of parts that stay the same and that change.
    page.open(&format!("{url}instances/notes"));
    wait_live(&page);
    page.eval("getSelection().setBaseAndExtent(document.querySelector('#state'), 0, document.querySelector('#facts dl').lastChild, 1)");
    let before = refreshes(&page);
    home.satellite(&["call", "notes", "add", r#"{"a": 1, "b": 2}"#]).exits(0);
    wait_until("two refreshes", || refreshes(&page) >= before + 2);
    let selected = page.eval("getSelection().toString()");
    assert!(["online", "Transport"].iter().all(|text| selected.as_str().unwrap().contains(text)), "{selected}");
    page.eval("getSelection().removeAllRanges()");
    page.wait("the counted call", "document.querySelector('#facts').textContent.includes('Calls2')");
    page.assert_clean();
    satellite.terminate().exits(0);
}

/// Emits events: stops an instance that is stopped.
#[track_caller]
fn emit_events(page: &Page, count: u32) {
    let emit = format!(
        "(async () => {{ const headers = {{'Content-Type': 'application/json', \
         'X-CSRF-Token': document.querySelector('meta[name=csrf]').content}}; \
         for (let nth = 0; nth < {count}; nth++) {{ \
         const answer = await fetch('../v1/instances/notes/stop', {{method: 'POST', headers, body: '{{}}'}}); \
         if (!answer.ok) return answer.text(); }} }})()"
    );
    assert_eq!(page.eval(&emit), Value::Null);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn events_after_a_number_are_shown_page_by_page() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM")]);
    home.wait_online("notes");
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    home.satellite(&["stop", "notes"]).exits(0);
    emit_events(&page, 250);
    let seqs = |page: &Page| {
        let seqs = page.eval("[...document.querySelectorAll('#events li')].map((item) => Number(item.dataset.seq))");
        seqs.as_array().unwrap().iter().map(|seq| seq.as_u64().unwrap()).collect::<Vec<_>>()
    };
    page.open(&format!("{url}events?since=5"));
    wait_live(&page);
    assert_eq!(seqs(&page), (6..206).rev().collect::<Vec<_>>());
    assert_eq!(page.eval("document.querySelector('#follow')"), Value::Null);
    page.eval("[...document.querySelectorAll('main a')].find((link) => link.textContent === 'Later events').click()");
    page.wait("the later events", "location.search.includes('since=205') && document.querySelector('#follow')");
    wait_live(&page);
    // The page follows, and says when it drops the oldest ones.
    assert_eq!(page.eval("document.querySelector('#older').hidden"), true);
    emit_events(&page, 1000);
    let last = home.events().last().unwrap()["seq"].as_u64().unwrap();
    page.wait("the last event", &format!("document.querySelector('#events li').dataset.seq >= {last}"));
    page.wait("the note", "!document.querySelector('#older').hidden");
    let shown = seqs(&page);
    let oldest = *shown.last().unwrap();
    assert!(shown.len() == 1000 && shown.iter().copied().rev().eq(oldest..=shown[0]), "{shown:?}");
    page.eval("document.querySelector('#older a').click()");
    page.wait("the older events", &format!("document.querySelector('#events li')?.dataset.seq == {}", oldest - 1));
    page.assert_clean();
    satellite.terminate().exits(0);
}
