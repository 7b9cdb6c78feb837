//! Ten thousand instances on one page.

use std::time::Instant;

use mcp_satellite_actors::model::status::Status;

use crate::browser::Browser;
use crate::made_up::MadeUpConsole;
use crate::support::wait_live;

#[test]
#[cfg_attr(no_console, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn ten_thousand_instances_are_shown_found_and_kept_up_to_date() {
    let console = MadeUpConsole::start(10_000);
    let browser = Browser::start();
    let page = browser.page();
    // The first load starts the browser's processes.
    page.open(&console.url);
    page.open(&console.url);
    wait_live(&page);
    let usable = page.eval("performance.getEntriesByName('usable')[0].startTime").as_f64().unwrap();
    println!("10,000 instances: usable after {usable:.0} ms");
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
#[cfg_attr(no_console, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn five_tabs_of_one_browser_are_live_at_once() {
    let console = MadeUpConsole::start(100);
    let browser = Browser::start();
    let first = browser.page();
    let mut pages = vec![first.sibling(), first.sibling(), first.sibling(), first.sibling()];
    pages.push(first);
    for page in &pages {
        page.open(&console.url);
        wait_live(page);
    }
    console.set_status(0..100, Status::Error);
    for page in &pages {
        page.wait("the change", "document.querySelectorAll('.grid i.error').length === 100");
    }
}
