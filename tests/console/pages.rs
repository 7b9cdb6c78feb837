//! Login, navigation, and what each page shows of a satellite.

use serde_json::json;
use testkit::home::Home;

use crate::SATELLITE;
use crate::browser::Browser;
use crate::support::{log_in, start, wait_live};

const SERVERS: [(&str, &str); 2] = [
    (
        "notes",
        "SIM \"--all-tools\", \"--resources\", \"2\", \"--stderr-text\", \"ready to serve\", \"--stderr-lines-per-second\", \"5\"",
    ),
    ("typo", "command = \"npxx-no-such-command\""),
];

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_browser_without_a_login_sees_the_login_page_and_a_wrong_token_is_refused() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &SERVERS);
    let browser = Browser::start();
    let page = browser.page();
    page.open(&format!("{url}instances/notes"));
    assert_eq!(page.text("h1"), "Log in");
    page.eval("document.querySelector('#token').value = 'wrong'; document.querySelector('#login').submit()");
    page.wait("the refusal", "document.querySelector('[role=alert]')");
    home.wait_event(0, "control.action", |event| {
        event["data"]["action"] == "login" && event["data"]["outcome"] == "refused"
    });
    // The login leads to the page that was asked for.
    let token = std::fs::read_to_string(home.data_dir().join("console-token")).unwrap();
    let token = token.trim();
    let fill = format!("document.querySelector('#token').value = {token:?}; document.querySelector('#login').submit()");
    page.eval(&fill);
    page.wait("the page of the instance", "document.body.dataset.page === 'instance'");
    home.wait_event(0, "control.action", |event| {
        event["data"]["action"] == "login" && event["data"]["outcome"] == "succeeded"
    });
    let other = page.sibling();
    other.open(&format!("{url}instances?status=online"));
    wait_live(&other);
    wait_live(&page);
    page.click("#logout");
    for page in [&page, &other] {
        page.wait("the login page", "document.querySelector('#login')");
    }
    assert!(other.text("#notice").contains("The login has ended"), "{}", other.text("#notice"));
    other.eval(&fill);
    other.wait("the instances", "location.search === '?status=online' && document.body.dataset.page === 'instances'");
    wait_live(&other);
    other.click("#logout");
    other.wait("the login page", "document.querySelector('#login')");
    home.wait_event(0, "control.action", |event| event["data"]["action"] == "logout");
    page.open(&url);
    assert_eq!(page.text("h1"), "Log in");
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn every_page_shows_the_satellite_and_stays_live() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &SERVERS);
    home.wait_online("notes");
    home.wait_status("typo", "permanently_failed");
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    page.wait("the failed server", "document.querySelector('#attention li[data-name=typo-acme-alice-typo]')");
    let item = page.text("#attention li");
    assert!(item.contains("npxx-no-such-command") && item.contains("satellite restart typo-acme-alice-typo"), "{item}");
    // The list stays true also while the focus is in it.
    page.eval("{ const button = document.querySelector('#attention button'); button.focus(); button.click() }");
    page.wait("the restarted server", "!document.querySelector('#attention li .permanently_failed')");
    home.wait_event(0, "control.action", |event| {
        event["data"]["action"] == "restart" && event["data"]["actor"]["via"] == "console"
    });
    page.assert_clean();

    page.open(&format!("{url}instances/notes"));
    wait_live(&page);
    page.wait("the output", "document.querySelector('#output')?.textContent.includes('ready to serve')");
    page.wait("the timeline", "document.querySelector('#events')?.textContent.includes('server.started')");
    assert!(page.text("#catalogue").contains("echo"));
    page.wait("the process", "document.querySelectorAll('#processes tbody tr').length === 1");
    page.wait("the chart", "document.querySelectorAll('#usage svg path').length === 2");
    assert_eq!(page.text("#state .status"), "online");
    page.eval("window.confirm = () => true");
    page.click("[data-action=stop]");
    page.wait("the stop", "document.querySelector('#state .status').textContent === 'stopped'");
    page.click("[data-action=start]");
    page.wait("the start", "document.querySelector('#state .status').textContent === 'online'");
    page.assert_clean();

    page.open(&format!("{url}fleet"));
    wait_live(&page);
    assert!(page.text("#fleet").contains("has no backend"), "{}", page.text("#fleet"));
    page.assert_clean();

    page.open(&format!("{url}events"));
    wait_live(&page);
    page.wait("the events", "document.querySelectorAll('#events li').length > 5");
    let before = page.eval("Number(document.querySelector('#events li').dataset.seq)").as_u64().unwrap();
    home.satellite(&["restart", "notes"]).exits(0);
    page.wait("the restart", &format!("[...document.querySelectorAll('#events li')].some((item) => item.dataset.seq > {before} && item.textContent.includes('restarted'))"));
    page.assert_clean();

    page.open(&format!("{url}events?before={before}&instance=notes-acme-alice-notes"));
    assert!(page.text("#events").contains("server.started") && !page.text("#events").contains("typo"));
    assert!(page.text("main").contains("Newest events"));

    page.open(&format!("{url}tree"));
    wait_live(&page);
    page.wait("the worker", "document.querySelector('#tree').textContent.includes('notes-acme-alice-notes')");
    assert!(page.text("#tree").contains("answered in"), "{}", page.text("#tree"));
    page.assert_clean();

    home.satellite(&["call", "notes", "add", r#"{"a": 1, "b": 2}"#]).exits(0);
    home.satellite(&["call", "notes", "echo", r#"{"text": "hi"}"#]).exits(0);
    page.open(&format!("{url}calls"));
    assert!(page.text(".calls li").contains("notes-acme-alice-notes"), "{}", page.text("main"));
    page.eval("window.asked = []; window.confirm = (question) => { asked.push(question); return true }");
    // `add` says that it is read-only, `echo` does not.
    for (tool, questions) in [("add", 0), ("echo", 1)] {
        page.eval(&format!("document.querySelector('[data-repeat={tool}]').click()"));
        let after = format!("document.querySelector('[data-repeat={tool}]').parentNode.querySelector('.after')");
        page.wait("the repeated call", &format!("{after}.textContent"));
        let shown = page.eval(&format!("{after}.textContent"));
        let before = page.text(".calls .before");
        assert!(shown.as_str().unwrap().starts_with("The same result"), "{tool}: {before}, then {shown}");
        assert_eq!(page.eval("asked.length"), questions, "{tool}");
    }
    page.assert_clean();

    page.open(&format!("{url}instances?status=online"));
    assert!(page.text("#instances").contains("notes-acme-alice-notes"));
    assert!(!page.text("#instances").contains("typo"));
    page.open(&format!("{url}clients"));
    assert!(page.text("main").contains("satellite connect claude-code"));
    assert!(page.text("main").contains("owner (console-token)"));
    page.eval("Object.defineProperty(navigator, 'clipboard', {value: undefined})");
    page.click("[data-copy]");
    page.wait("the failure", "document.querySelector('#notice').textContent.includes('Cannot copy')");
    page.open(&format!("{url}nowhere"));
    assert!(page.text("main").contains("there is no path"), "{}", page.text("main"));
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn the_overview_is_usable_with_keys_only() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM"), ("files", "SIM")]);
    home.wait_all_online();
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    page.press("Tab");
    assert_eq!(page.eval("document.activeElement.className"), json!("skip"));
    let mut stops = Vec::new();
    while page.eval("document.activeElement.className") != json!("grid") {
        page.press("Tab");
        stops.push(page.eval("document.activeElement.outerHTML.slice(0, 60)"));
        assert!(stops.len() < 40, "the grid is not reached: {stops:?}");
    }
    let order = page.eval("[...document.querySelectorAll('.grid i')].map((cell) => cell.row.name)");
    page.press("ArrowRight");
    assert_eq!(page.eval("document.querySelector('i.at').row.name"), order[1]);
    page.press("Enter");
    page.wait("the page of the instance", "document.body.dataset.page === 'instance'");
    assert_eq!(page.text(".full-name"), order[1].as_str().unwrap());
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn every_button_of_an_instance_is_reached_with_keys_and_shows_the_response() {
    let home = Home::new(SATELLITE);
    let far = format!("transport = \"http\"\nurl = \"http://127.0.0.1:{}/mcp\"", testkit::port::free_port());
    let (satellite, url) = start(&home, "", &[("notes", "SIM"), ("far", &far)]);
    home.wait_online("notes");
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    let press = |action: &str| {
        page.eval("document.activeElement.blur()");
        let mut stops = Vec::new();
        while page.eval("document.activeElement.dataset.action ?? ''") != json!(action) {
            page.press("Tab");
            stops.push(page.eval("document.activeElement.outerHTML.slice(0, 60)"));
            assert!(stops.len() < 60, "{action} is not reached: {stops:?}");
        }
        page.press("Enter");
    };
    let wait_response =
        |text: &str| page.wait(text, &format!("document.querySelector('#response').textContent.startsWith({text:?})"));
    page.open(&format!("{url}instances/far"));
    wait_live(&page);
    press("reconnect");
    wait_response("reconnect far-acme-alice-far: failed; ");

    page.open(&format!("{url}instances/notes"));
    wait_live(&page);
    page.eval("window.asked = []; window.confirm = (question) => { asked.push(question); return asked.length !== 1 }");
    press("stop");
    page.wait("the question", "asked.length === 1");
    assert_eq!(home.row("notes").unwrap()["status"], "online", "the person has said no");
    for (action, response) in [("stop", "offline"), ("start", ""), ("restart", "")] {
        press(action);
        wait_response(&format!("{action} notes-acme-alice-notes: {response}"));
        let shown = if action == "stop" { "stopped" } else { "online" };
        page.wait(shown, &format!("document.querySelector('#state .status').textContent === {shown:?}"));
        let is_refused = page.eval("document.querySelector('[data-action=restart]').disabled");
        assert_eq!(is_refused, action == "stop", "a stopped instance refuses a restart");
    }
    press("remove");
    wait_response("remove notes-acme-alice-notes: removed.");
    let question = page.eval("asked.at(-1)");
    assert!(question.as_str().unwrap().contains("until the configuration is applied again"), "{question}");
    page.wait("the removal", "document.querySelector('#state').textContent.includes('was removed')");
    assert!(home.row("notes").is_none());
    let enabled = "document.querySelectorAll('.actions button:enabled').length";
    page.wait("the end of the actions", &format!("{enabled} === 0"));
    assert_eq!(page.eval("document.body.classList.contains('removed')"), true);
    home.satellite(&["reload"]).exits(0);
    page.wait("the return", "document.querySelector('#state .status')?.textContent === 'online'");
    page.wait("the actions", &format!("{enabled} > 0 && !document.body.classList.contains('removed')"));
    page.assert_clean();
    satellite.terminate().exits(0);
}
