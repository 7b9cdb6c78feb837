//! Ten thousand instances on one page.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use mcp_satellite_actors::model::status::Status;
use testkit::wait::wait_until;

use crate::browser::{Browser, Page};
use crate::made_up::MadeUpConsole;
use crate::support::wait_live;

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn ten_thousand_instances_are_shown_found_and_kept_up_to_date() {
    let console = MadeUpConsole::start(10_000);
    let browser = Browser::start();
    let page = browser.page();
    // The first load starts the browser's processes.
    page.open(&console.url);
    page.open(&console.url);
    wait_live(&page);
    let usable = page.eval("performance.getEntriesByName('usable')[0].startTime").as_f64().unwrap();
    let timing = "JSON.stringify(performance.getEntriesByType('navigation')[0], ['responseEnd', 'domInteractive', 'loadEventEnd'])";
    println!("10,000 instances: usable after {usable:.0} ms; {}", page.eval(timing));
    assert_eq!(page.eval("document.querySelectorAll('.grid i').length"), 10_000);
    assert_eq!(page.text("#total"), "10000");

    let since = Instant::now();
    console.set_status(0..10_000, Status::Connecting);
    page.wait("all cells", "document.querySelectorAll('.grid i.connecting').length === 10000");
    println!("10,000 changes at once were on the page after {:?}", since.elapsed());
    for nth in 0..100 {
        console.set_status((0..100).map(|step| (nth * 100 + step) % 10_000), Status::Online);
    }
    page.wait("all cells", "document.querySelectorAll('.grid i.online').length === 10000");
    page.wait("the counts", "document.querySelector('#counts').textContent.includes('10000 online')");

    page.eval("{ const filter = document.querySelector('#filter'); filter.value = 'slack-blue-user-3'; filter.dispatchEvent(new Event('input')) }");
    page.wait("the found instances", "document.querySelectorAll('#found a').length > 0");
    assert!(page.text("#found a").starts_with("slack-blue-user-3"));
    page.assert_clean();
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn the_overview_finds_words_and_keeps_its_order() {
    let console = MadeUpConsole::start(300);
    let browser = Browser::start();
    let page = browser.page();
    page.open(&console.url);
    wait_live(&page);
    assert_eq!(page.eval("document.querySelector('.who a').getAttribute('href')"), "login");
    let order = "[...document.querySelectorAll('#counts .dot')].map((dot) => dot.className.replace('dot ', ''))";
    let before = page.eval(order);
    let is_inside = "[...document.querySelectorAll('#attention li')].every((item) => \
                     item.children[0].getBoundingClientRect().right <= item.children[1].getBoundingClientRect().left)";
    assert_eq!(page.eval(&format!("document.querySelectorAll('#attention li').length > 0 && {is_inside}")), true);
    let online =
        page.eval("Number(document.querySelector('.grid i.online').row.name.split('-').pop())").as_u64().unwrap();
    console.set_status(std::iter::once(usize::try_from(online).unwrap()), Status::Online);
    page.wait("the change", "document.querySelector('#revision').textContent === 'revision 2'");
    assert_eq!(page.eval(order), before);

    // The grid of a team is one line: there is nothing above and below.
    page.resize(1400, 900);
    page.eval("document.querySelector('.grid').focus()");
    for key in ["ArrowRight", "ArrowDown", "ArrowUp"] {
        page.press(key);
        let at = "[...document.querySelector('.grid').children].indexOf(document.querySelector('i.at'))";
        assert_eq!(page.eval(at), 1, "{key}");
    }
    let find = |text: &str| {
        page.eval(&format!(
            "{{ const filter = document.querySelector('#filter'); filter.value = {text:?}; filter.dispatchEvent(new Event('input')) }}"
        ));
    };
    find("user-3 slack");
    assert!(page.text("#found a").starts_with("slack-"), "{}", page.text("#found"));
    find("user-3 nothing");
    assert_eq!(page.text("#found"), "No instance matches.");
    find("");
    assert_eq!(page.text("#found"), "");
    page.assert_clean();
}

/// Reads a stream until the console ends.
fn watch(url: &str) {
    let address = url.trim_start_matches("http://").split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /v1/instances/stream HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    let (first, begun) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(1..) = stream.read(&mut buffer) {
            let _ = first.send(());
        }
    });
    begun.recv().unwrap();
}

#[test]
fn fifty_watchers_of_ten_thousand_instances_cost_less_than_a_core() {
    let console = MadeUpConsole::start(10_000);
    for (watchers, limit) in [(1, 0.5), (50, 1.0)] {
        (0..watchers - usize::from(watchers > 1)).for_each(|_| watch(&console.url));
        let (since, before) = (Instant::now(), console.cpu_seconds());
        // A busy fleet: 100 changes in each tenth of a second.
        for round in 0..30 {
            let status = if round % 2 == 0 { Status::Connecting } else { Status::Online };
            console.set_status((0..100).map(|nth| (round * 331 + nth * 97) % 10_000), status);
            thread::sleep(Duration::from_millis(100));
        }
        let share = (console.cpu_seconds() - before) / since.elapsed().as_secs_f64();
        println!("{watchers} watchers of 1,000 changes/s among 10,000 instances: {:.1} % of a core", share * 100.0);
        // Processor time does not depend on other tests. This is a debug build.
        assert!(share < limit, "{watchers} watchers cost {share} of a core");
    }
}

/// Returns the tabs that have a stream, as the browser names them.
fn streaming_tabs(page: &Page) -> BTreeSet<String> {
    let tabs = page.eval(
        "navigator.locks.query().then(({held}) => \
         held.filter(({name}) => name.startsWith('satellite-stream')).map(({clientId}) => clientId))",
    );
    tabs.as_array().unwrap().iter().map(|tab| tab.as_str().unwrap().to_owned()).collect()
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn ten_tabs_of_one_browser_share_two_streams() {
    let console = MadeUpConsole::start(100);
    let browser = Browser::start();
    let first = browser.page();
    let mut pages: Vec<Page> = (1..10).map(|_| first.sibling()).collect();
    pages.insert(0, first);
    for page in &pages {
        page.open(&console.url);
        wait_live(page);
        page.eval("window.same = true");
    }
    wait_until("two streams", || console.open_streams() == 2);
    let before = streaming_tabs(&pages[9]);
    assert_eq!(before.len(), 2);
    console.set_status(0..100, Status::Error);
    for page in &pages {
        page.wait("the change", "document.querySelectorAll('.grid i.error').length === 100");
    }
    // The first two tabs have the streams.
    for page in pages.drain(..2) {
        page.close();
    }
    console.set_status(0..100, Status::Connecting);
    console.set_status(0..50, Status::Online);
    wait_until("other tabs to take the streams", || {
        let now = streaming_tabs(&pages[7]);
        now.len() == 2 && now.is_disjoint(&before)
    });
    wait_until("two streams", || console.open_streams() == 2);
    let fetches = console.fetches();
    wait_until("the other tabs to fetch what is new", || console.fetches() > fetches + 12);
    for page in &pages {
        page.wait("the changes", "document.querySelectorAll('.grid i.connecting').length === 50 && document.querySelectorAll('.grid i.online').length === 50");
        wait_live(page);
        assert_eq!(page.eval("window.same"), true, "the page was loaded again");
        page.assert_clean();
    }
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn pages_turn_grey_while_the_actors_do_not_answer() {
    let console = MadeUpConsole::start(10);
    let browser = Browser::start();
    let first = browser.page();
    let pages = [first.sibling(), first.sibling(), first];
    for page in &pages {
        page.open(&console.url);
        wait_live(page);
    }
    // Server and connection work, only the actors do not. The third page has no stream.
    console.set_answers(false);
    for page in &pages {
        page.wait("the grey page", "document.body.classList.contains('stale')");
    }
    console.set_answers(true);
    for page in &pages {
        wait_live(page);
        page.assert_clean();
    }
}
