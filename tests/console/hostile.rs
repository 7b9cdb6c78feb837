//! Hostile text in every field: it is shown as text, cut, and without effect.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use testkit::home::Home;

use crate::SATELLITE;
use crate::browser::Browser;
use crate::playground::{call, python_server};
use crate::support::{log_in, start, wait_live};

const EVIL: &str = "<script>alert(1)</script>";

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn hostile_text_of_servers_and_clients_is_shown_harmlessly() {
    let home = Home::new(SATELLITE);
    let crash = "command = \"sh\"\nargs = [\"-c\", \"printf '<script>alert(9)</script>\\\\033[31m\\\\n' >&2; exit 1\"]";
    let (satellite, url) = start(&home, "", &[("tools", &python_server()), ("crash", crash)]);
    home.wait_online("tools");
    home.wait_status("crash", "permanently_failed");
    connect_client(&home, &url);
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    page.wait("the failed server", "document.querySelector('#attention li')");
    assert!(page.text("#attention").contains("<script>alert(9)</script>"), "{}", page.text("#attention"));
    assert_harmless(&page);

    page.open(&format!("{url}instances/tools"));
    wait_live(&page);
    page.wait("the output", "document.querySelector('#output').textContent.includes('alert(1)')");
    page.wait("the timeline", "document.querySelectorAll('#events li').length > 3");
    assert!(page.text("#catalogue").contains(EVIL));
    assert!(page.eval("document.body.textContent.length").as_u64().unwrap() < 300_000, "long text is not cut");
    assert_harmless(&page);

    page.open(&format!("{url}instances/crash"));
    wait_live(&page);
    assert!(page.text("#state").contains("alert(9)"));
    assert_harmless(&page);

    page.open(&format!("{url}clients"));
    page.wait("the client", "document.querySelector('#sessions').textContent.includes('alert(8)')");
    assert_harmless(&page);

    page.open(&format!(
        "{url}events?since=0&instance={}&types=%22%3E%3Cscript%3E",
        "%3Cscript%3Ealert(1)%3C/script%3E"
    ));
    assert_harmless(&page);
    page.open(&format!("{url}instances?q=%22%3E%3Cscript%3Ealert(1)%3C/script%3E"));
    assert_harmless(&page);
    page.open(&format!("{url}instances/%3Cscript%3Ealert(1)%3C%2Fscript%3E"));
    assert!(page.text("main").contains("<script>alert(1)"), "{}", page.text("main"));
    assert_harmless(&page);

    page.open(&format!("{url}playground/tools"));
    call(&page, "evil", "");
    page.wait("the result", "document.querySelector('#progress').textContent.includes('Answered')");
    assert!(page.text("#result").contains(EVIL));
    assert_eq!(page.eval("document.querySelectorAll('#result img, #result a').length"), 0);
    let length = || page.eval("document.body.textContent.length").as_u64().unwrap();
    assert!(length() < 700_000, "long text is not cut: {}", length());
    page.click("#result button");
    assert!(length() > 1_000_000, "the button does not show all text: {}", length());
    call(&page, "ask", "");
    page.wait("the question", "document.querySelector('#question input')");
    assert!(page.text("#question").contains(EVIL));
    assert_harmless(&page);
    satellite.terminate().exits(0);
}

/// Asserts that no text became an element: scripts are only those of the page itself, and nothing was blocked.
#[track_caller]
fn assert_harmless(page: &crate::browser::Page) {
    let scripts =
        page.eval("[...document.scripts].filter((script) => !/^(module|application.json)$/.test(script.type)).length");
    assert_eq!(scripts, 0);
    assert_eq!(page.eval("document.querySelectorAll('[onerror], [onload], a[href^=javascript]').length"), 0);
    let control = "[\\u0000-\\u0008\\u001b\\u0007\\u202e]";
    assert_eq!(page.eval(&format!("new RegExp('{control}').test(document.body.textContent)")), false);
    page.assert_clean();
}

/// Opens a session at the MCP endpoint as a client with a hostile name.
fn connect_client(home: &Home, url: &str) {
    let address = url.trim_start_matches("http://").split('/').next().unwrap();
    let token = std::fs::read_to_string(home.data_dir().join("token")).unwrap();
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"<script>alert(8)</script>","version":"<b>\u0007"}}}"#;
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST /mcp HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\nAccept: \
         application/json, text/event-stream\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        token.trim(),
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
