//! The playground: every kind of argument and result, progress, cancel, questions of servers.

use serde_json::Value;
use testkit::home::Home;

use crate::SATELLITE;
use crate::browser::{Browser, Page};
use crate::support::{log_in, start};

/// The lines of the server of `server.py`.
pub(crate) fn python_server() -> String {
    format!("command = \"python3\"\nargs = [\"{}/tests/console/server.py\"]", env!("CARGO_MANIFEST_DIR"))
}

/// Selects a tool and presses the button after `fill` has run.
#[track_caller]
pub(crate) fn call(page: &Page, tool: &str, fill: &str) {
    let select = format!(
        "{{ const select = document.querySelector('#tool'); select.value = [...select.options].findIndex((option) => \
         option.textContent === {tool:?}); select.dispatchEvent(new Event('change')); \
         const field = (name) => [...document.querySelectorAll('#arguments label')].find((label) => \
         label.querySelector('span').textContent.startsWith(name)).querySelector('input, select, textarea'); {fill}; \
         document.querySelector('#call').click() }}"
    );
    page.eval(&select);
}

#[track_caller]
fn wait_progress(page: &Page, text: &str) {
    page.wait(text, &format!("document.querySelector('#progress').textContent.includes({text:?})"));
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn tools_are_called_with_progress_cancel_and_questions() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("tools", &python_server())]);
    home.wait_online("tools");
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    page.open(&format!("{url}playground/tools?tool=paint"));
    page.wait("the selected tool", "document.querySelector('#tool').selectedOptions[0]?.textContent === 'paint'");

    call(&page, "paint", "");
    wait_progress(&page, "Answered");
    assert_eq!(page.eval("document.querySelector('#result img').naturalWidth"), 10);
    assert!(
        page.text("#result").contains("\"a\": [\n") && page.text("#result").contains("plain"),
        "{}",
        page.text("#result")
    );

    let fill = "field('word').value = 'hi'; field('count').value = 3; field('flag').value = 'true'; \
                field('color').value = 1; field('list').value = '[1]'; field('deep').value = '{\"a\": null}'";
    call(&page, "types", fill);
    wait_progress(&page, "Answered");
    let result: Value = serde_json::from_str(&page.text("#result")).unwrap();
    let expected =
        serde_json::json!({"word": "hi", "count": 3, "flag": true, "color": "green", "list": [1], "deep": {"a": null}});
    assert_eq!(result, expected);

    call(&page, "slow", "field('steps').value = 4");
    wait_progress(&page, "Answered");
    assert!(page.text("#messages").contains("step 3"));

    call(&page, "slow", "field('steps').value = 100000");
    wait_progress(&page, "step");
    page.click("#cancel");
    wait_progress(&page, "cancelled");
    home.wait_event(0, "mcp.server.logs", |event| event["data"].to_string().contains("cancelled"));

    call(&page, "ask", "");
    page.wait("the question", "document.querySelector('#question form input')");
    page.eval(
        "{ const [name, age] = document.querySelectorAll('#question input'); name.value = 'Ann'; age.value = 7; \
         document.querySelector('#question form').requestSubmit() }",
    );
    wait_progress(&page, "Answered");
    let answer: Value = serde_json::from_str(&page.text("#result")).unwrap();
    assert_eq!(answer, serde_json::json!({"action": "accept", "content": {"age": 7, "name": "Ann"}}));

    call(&page, "think", "");
    page.wait("the request for an answer", "document.querySelector('#question textarea')");
    page.eval("{ document.querySelector('#question textarea').value = 'four'; document.querySelector('#question form').requestSubmit() }");
    wait_progress(&page, "Answered");
    assert!(page.text("#result").contains("four"));

    home.wait_event(0, "control.action", |event| event["data"]["action"] == "open_session");
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_login_without_the_grant_cannot_open_the_playground() {
    let home = Home::new(SATELLITE);
    let token = "an-operator-token-that-is-long-enough-1";
    let file = home.path().join("operator");
    std::fs::write(&file, token).unwrap();
    testkit::home::make_private(&file);
    let tokens =
        format!("[[console.tokens]]\nname = \"desk\"\ntoken = \"file:{}\"\nrole = \"operator\"\n", file.display());
    let (satellite, url) = start(&home, "", &[("tools", &format!("{}\n{tokens}", python_server()))]);
    home.wait_online("tools");
    let browser = Browser::start();
    let page = browser.page();
    page.open(&url);
    page.eval(&format!(
        "document.querySelector('#token').value = {token:?}; document.querySelector('#login').submit()"
    ));
    page.wait("the overview", "document.body.dataset.page === 'overview'");
    page.open(&format!("{url}playground/tools"));
    assert!(page.text("main").contains("act_as"), "{}", page.text("main"));
    page.open(&format!("{url}instances/tools"));
    assert!(page.text("main").contains("calls:read"), "{}", page.text("main"));
    page.assert_clean();
    satellite.terminate().exits(0);
}
