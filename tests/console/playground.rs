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

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_form_has_fields_for_every_schema_and_questions_wait_for_each_other() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("tools", &python_server())]);
    home.wait_online("tools");
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    page.open(&format!("{url}playground/tools?tool=paint"));
    page.wait("the selected tool", "document.querySelector('#tool').selectedOptions[0]?.textContent === 'paint'");

    let fill = "field('anything').value = 'hello'; field('maybe').value = 'there'; field('shade').value = 1; \
                field('mixed').value = '7'; field('either').value = '{\"a\": 1}'; field('x').value = 3; \
                field('node').click(); field('name').value = 'leaf'; field('big').value = '9007199254740993'; \
                [...field('colors').options].forEach((option) => (option.selected = true)); window.positive = field('positive'); \
                window.type = (value) => { positive.value = value; positive.dispatchEvent(new Event('input')) }; type('0')";
    call(&page, "forms", fill);
    let message = page.eval("positive.validationMessage");
    assert!(message.as_str().is_some_and(|message| message.contains("greater than 0")), "{message}");
    page.eval("{ type('0.5'); document.querySelector('#call').click() }");
    wait_progress(&page, "Answered");
    let result: Value = serde_json::from_str(&page.text("#result")).unwrap();
    let expected = serde_json::json!({
        "anything": "hello", "maybe": "there", "shade": "green", "mixed": 7, "either": {"a": 1}, "place": {"x": 3},
        "node": {"name": "leaf"}, "colors": ["red", "green"], "big": 9_007_199_254_740_993_u64, "positive": 0.5, "empty": ""
    });
    assert_eq!(result, expected);

    call(&page, "twice", "");
    page.wait(
        "both questions",
        "['one?', 'two?'].every((word) => document.querySelector('#messages').textContent.includes(word))",
    );
    let answer = "{ const word = document.querySelector('#question p').textContent; \
                  const [name, data] = document.querySelectorAll('#question input, #question textarea'); name.value = word; \
                  data.value = DATA; document.querySelector('#question form').requestSubmit(); word }";
    let first = page.eval(&answer.replace("DATA", "'{'"));
    assert!(page.text("#notice").contains("data is not valid JSON"), "{}", page.text("#notice"));
    assert_eq!(page.text("#question p"), first, "the question waits for a valid answer");
    page.eval(&answer.replace("DATA", "''"));
    assert_ne!(page.text("#question p"), first, "the second question follows");
    page.eval(&answer.replace("DATA", "''"));
    wait_progress(&page, "Answered");
    let answers: Value = serde_json::from_str(&page.text("#result")).unwrap();
    for word in ["one?", "two?"] {
        assert_eq!(answers[word]["content"]["name"], word, "{answers}");
    }
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn many_playgrounds_of_a_browser_share_its_connections() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("tools", &python_server())]);
    home.wait_online("tools");
    let browser = Browser::start();
    let first = browser.page();
    log_in(&first, &home, &url);
    let tabs: Vec<Page> = (0..5).map(|_| first.sibling()).collect();
    for tab in &tabs {
        tab.open(&format!("{url}playground/tools?tool=paint"));
        tab.wait("the selected tool", "document.querySelector('#tool').selectedOptions[0]?.textContent === 'paint'");
        call(tab, "paint", "");
        wait_progress(tab, "Answered");
    }
    for tab in tabs {
        tab.assert_clean();
    }
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_stored_call_is_repeated_with_its_own_arguments_and_compared_with_its_own_result() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM \"--all-tools\"")]);
    home.wait_online("notes");
    let long = format!(r#"{{"text": "{}"}}"#, "x".repeat(10_000));
    home.satellite(&["call", "notes", "echo", "{\"text\": \"a\u{202e}b\"}"]).exits(0);
    home.satellite(&["call", "notes", "big", r#"{"bytes": 10000}"#]).exits(0);
    home.satellite(&["call", "notes", "fail", r#"{"message": "disk full"}"#]).exits(1);
    home.satellite(&["call", "notes", "echo", &long]).exits(0);
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    page.open(&format!("{url}calls"));
    page.eval("window.confirm = () => true");
    for (tool, title) in [
        ("echo", "The same result"),
        ("big", "The results cannot be compared: the stored one was cut"),
        ("fail", "The call failed again"),
    ] {
        page.eval(&format!("document.querySelector('[data-repeat={tool}]').click()"));
        let after = format!("document.querySelector('[data-repeat={tool}]').parentNode.querySelector('.after')");
        page.wait("the repeated call", &format!("{after}.textContent"));
        let shown = page.eval(&format!("{after}.textContent"));
        assert!(shown.as_str().unwrap().starts_with(title), "{tool}: {shown}");
    }
    page.open(&format!("{url}calls?tool=echo&team=acme&user=alice"));
    assert!(page.text(".calls").contains("its arguments were cut"), "{}", page.text(".calls"));

    page.open(&format!("{url}clients"));
    let printed = home.satellite(&["connect", "cursor", "--print"]).exits(0).stdout;
    let entries = page.eval("[...document.querySelectorAll('.commands pre')].map((entry) => entry.textContent)");
    assert!(entries.as_array().unwrap().contains(&Value::from(printed.trim_end())), "{printed}: {entries}");
    let data_dir = home.data_dir().display().to_string();
    assert!(page.text(".commands").contains(&format!("satellite connect cursor --data-dir {data_dir}")));
    page.assert_clean();
    satellite.terminate().exits(0);
}
