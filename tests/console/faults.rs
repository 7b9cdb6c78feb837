//! Faults of servers: after each of them the page shows what the journal contains.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use testkit::home::{Home, pid};
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;
use crate::browser::Browser;
use crate::support::{grid, log_in, shows, start, stored_status, wait_live};

const SERVERS: usize = 12;

/// Faults, each with the server that it hits.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Kill(usize),
    Terminate(usize),
    Crash(usize),
    Stop(usize),
    Start(usize),
    Restart(usize),
}

impl Fault {
    fn draw(rng: &mut StdRng) -> Self {
        let nth = rng.random_range(0..SERVERS);
        match rng.random_range(0..6) {
            0 => Self::Kill(nth),
            1 => Self::Terminate(nth),
            2 => Self::Crash(nth),
            3 => Self::Stop(nth),
            4 => Self::Start(nth),
            _ => Self::Restart(nth),
        }
    }

    /// Injects the fault. One that does not fit the state of the server has no effect.
    fn inject(self, home: &Home) {
        let name = |nth: usize| format!("s{nth}-acme-alice-s{nth}");
        let signal = |nth: usize, signal| {
            if let Some(row) = home.row(&format!("s{nth}")).filter(|row| row["pid"].is_number()) {
                send(pid(&row), signal);
            }
        };
        match self {
            Self::Kill(nth) => signal(nth, Signal::SIGKILL),
            Self::Terminate(nth) => signal(nth, Signal::SIGTERM),
            Self::Crash(nth) => drop(home.satellite(&["call", &name(nth), "crash"])),
            Self::Stop(nth) => drop(home.satellite(&["stop", &name(nth)])),
            Self::Start(nth) => drop(home.satellite(&["start", &name(nth)])),
            Self::Restart(nth) => drop(home.satellite(&["restart", &name(nth)])),
        }
    }
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn the_page_shows_what_the_journal_contains_after_each_fault() {
    let count = std::env::var("FAULTS").map_or(50, |count| count.parse().unwrap());
    let seed = std::env::var("FAULT_SEED").map_or(20, |seed| seed.parse().unwrap());
    println!("{count} faults, seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let home = Home::new(SATELLITE);
    let slugs: Vec<String> = (0..SERVERS).map(|nth| format!("s{nth}")).collect();
    let servers: Vec<(&str, &str)> = slugs.iter().map(|slug| (slug.as_str(), "SIM \"--exit-code\", \"3\"")).collect();
    let policy = "[policy.restart]\ndelays = [\"100ms\", \"300ms\"]\nmax_crashes = 4";
    let (satellite, url) = start(&home, policy, &servers);
    home.wait_all_online();
    let browser = Browser::start();
    let (overview, instance) = (browser.page(), browser.page());
    log_in(&overview, &home, &url);
    log_in(&instance, &home, &url);
    instance.open(&format!("{url}instances/s0"));
    wait_live(&overview);
    wait_live(&instance);
    // A reload would hide a missed change.
    overview.eval("window.same = true");
    let mut statuses = BTreeSet::new();
    for nth in 0..count {
        let fault = Fault::draw(&mut rng);
        fault.inject(&home);
        // Both move on meanwhile, so they are compared until they agree. Whatever the page shows last is also stored.
        let mut last = serde_json::Map::new();
        let agree = || {
            let shown = grid(&overview);
            let events = home.events();
            let is_same = shown.len() == SERVERS
                && shown.iter().all(|(name, class)| {
                    stored_status(&events, name).is_some_and(|status| shows(class.as_str().unwrap(), &status))
                });
            last = shown;
            is_same.then_some(())
        };
        wait_for(&format!("page and journal to agree after fault {nth}, {fault:?}"), agree, || {
            format!("{:?}", overview.text("#stale"))
        });
        statuses.extend(last.values().map(|class| class.as_str().unwrap().to_owned()));
    }
    println!("statuses on the page at the comparisons: {statuses:?}");
    // The state at rest, on both pages.
    let settled = |row: &Value| {
        !["connecting", "discovering_tools", "syncing_tools", "restarting", "provisioning", "command_received"]
            .contains(&row["status"].as_str().unwrap())
    };
    wait_for(
        "the servers to settle",
        || home.rows().iter().all(settled).then_some(()),
        || format!("{:?}", home.rows()),
    );
    let rows = home.rows();
    for row in &rows {
        let (name, status) = (row["instance"].as_str().unwrap(), row["status"].as_str().unwrap());
        let agree = || shows(grid(&overview)[name].as_str().unwrap(), status).then_some(());
        wait_for(&format!("the status {status} of {name}"), agree, || format!("{:?}", grid(&overview)));
        assert_eq!(stored_status(&home.events(), name).as_deref(), Some(status));
    }
    let status = rows.iter().find(|row| row["server"] == "s0").unwrap()["status"].as_str().unwrap().replace('_', " ");
    let is_shown = || {
        let text = instance.text("#state .status");
        (text == status || (text == "stopped" && status == "offline")).then_some(())
    };
    wait_for("the status of s0 on its page", is_shown, || instance.text("#state"));
    assert_eq!(overview.eval("window.same"), true);
    overview.assert_clean();
    instance.assert_clean();
    drop(satellite);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_killed_server_is_shown_before_it_is_restarted() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "[policy.restart]\ndelays = [\"1h\"]", &[("notes", "SIM")]);
    let row = home.wait_online("notes");
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    // The page itself records when it changed.
    page.eval(
        "window.changes = []; new MutationObserver(() => changes.push([document.querySelector('.grid i').className, Date.now()]))\
         .observe(document.querySelector('.grid'), {subtree: true, attributes: true, attributeFilter: ['class']})",
    );
    let killed_at = page.eval("Date.now()").as_f64().unwrap();
    send(pid(&row), Signal::SIGKILL);
    page.wait("the lost server", "changes.length >= 1");
    home.satellite(&["restart", "notes"]).exits(0);
    page.wait("the restarted server", "changes.at(-1)[0] === 'online'");
    let changes = page.eval("changes");
    assert_eq!(changes[0][0], "connecting", "{changes}");
    println!("kill -9 was on the page after {:.0} ms", changes[0][1].as_f64().unwrap() - killed_at);
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn an_instance_between_two_attempts_is_listed_with_its_error_and_starts_at_once_on_request() {
    let home = Home::new(SATELLITE);
    let crashy = "SIM \"--exit-after\", \"500ms\", \"--exit-code\", \"3\"";
    let far = format!("transport = \"http\"\nurl = \"http://127.0.0.1:{}/mcp\"", testkit::port::free_port());
    let policy = "[policy.restart]\ndelays = [\"1h\"]\nmax_crashes = 9";
    let (satellite, url) = start(&home, policy, &[("crashy", crashy), ("far", &far), ("fine", "SIM")]);
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    let item = |server: &str| format!("#attention li[data-name={server}-acme-alice-{server}]");
    let (crashy, far) = (item("crashy"), item("far"));
    page.wait("the delay", &format!("document.querySelector('{crashy} .countdown')"));
    let text = page.text(&crashy);
    assert!(text.contains("exited with code 3") && text.contains("Restarts in 5"), "{text}");
    let says = |text: &str| format!("document.querySelector('{far}')?.textContent.includes({text:?})");
    page.wait("the remote server", &format!("{} && {}", says("refused"), says("Connects again in")));
    assert_eq!(page.eval(&format!("document.querySelector('{}')", item("fine"))), Value::Null);
    // The page without its script says the same.
    page.open(&url);
    let text = page.text(&crashy);
    assert!(text.contains("exited with code 3") && text.contains("Restarts in"), "{text}");
    wait_live(&page);
    let before = home.row("crashy").unwrap();
    page.click(&format!("{crashy} [data-action=restart]"));
    home.wait_event(0, "control.action", |event| event["data"]["action"] == "restart");
    home.wait_row("crashy", "another run and its end", |row| {
        row["restarts"].as_u64() > before["restarts"].as_u64() && row["next_retry_ms"].is_number()
    });
    page.wait("the next delay", &format!("document.querySelector('{crashy} .countdown')"));
    page.click(&format!("{far} [data-action=reconnect]"));
    home.wait_event(0, "control.action", |event| event["data"]["action"] == "reconnect");
    page.click(&format!("{crashy} a.button"));
    page.wait("the output", "document.body.dataset.page === 'instance' && location.hash === '#output-title'");
    page.assert_clean();
    satellite.terminate().exits(0);
}
