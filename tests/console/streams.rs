//! The stream of a page: what is shown while it is cut, and after it continues.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use nix::sys::signal::Signal;
use testkit::home::Home;
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;
use crate::browser::{Browser, Page};
use crate::support::{grid, log_in, start, wait_live};

const NOTES: &str = "notes-acme-alice-notes";

/// Asserts that a page of all events shows each of them once.
#[track_caller]
fn assert_gapless(page: &Page) {
    let seqs =
        page.eval("[...document.querySelectorAll('#events li')].map((item) => Number(item.dataset.seq)).reverse()");
    let seqs: Vec<u64> = seqs.as_array().unwrap().iter().map(|seq| seq.as_u64().unwrap()).collect();
    assert!(seqs.iter().copied().eq(1..=*seqs.last().unwrap()), "events are missing or repeated: {seqs:?}");
}

/// A connection between browser and satellite that the test can cut.
struct Cable {
    port: u16,
    is_cut: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (is_cut, open) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<TcpStream>>>::default());
        let (cut, all) = (is_cut.clone(), open.clone());
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Some(server) = (!cut.load(Ordering::SeqCst)).then(|| TcpStream::connect(&target).ok()).flatten()
                else {
                    continue;
                };
                all.lock().unwrap().extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                for (mut from, mut to) in [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
                {
                    thread::spawn(move || {
                        let mut buffer = [0; 16 * 1024];
                        while let Ok(read @ 1..) = from.read(&mut buffer) {
                            if to.write_all(&buffer[..read]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { port, is_cut, open }
    }

    fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        self.is_cut.store(false, Ordering::SeqCst);
    }
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_page_whose_stream_is_cut_turns_grey_and_continues_without_a_gap() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM"), ("files", "SIM")]);
    home.wait_all_online();
    let address = url.trim_start_matches("http://").split('/').next().unwrap().to_owned();
    let cable = Cable::to(address.clone());
    let url = url.replace(&address, &format!("127.0.0.1:{}", cable.port));
    let browser = Browser::start();
    let (overview, events) = (browser.page(), browser.page());
    log_in(&overview, &home, &url);
    log_in(&events, &home, &url);
    events.open(&format!("{url}events?since=0"));
    for page in [&overview, &events] {
        wait_live(page);
        page.eval("window.same = true");
    }
    events.wait("the first events", "document.querySelectorAll('#events li').length > 5");
    for _ in 0..3 {
        cable.cut();
        for page in [&overview, &events] {
            page.wait(
                "the grey page",
                "document.body.classList.contains('stale') && !document.querySelector('#stale').hidden",
            );
            assert_ne!(page.text("#link"), "live");
        }
        home.satellite(&["stop", "notes"]).exits(0);
        home.satellite(&["restart", "files"]).exits(0);
        home.satellite(&["start", "notes"]).exits(0);
        home.wait_all_online();
        home.satellite(&["stop", "files"]).exits(0);
        cable.mend();
        for page in [&overview, &events] {
            wait_live(page);
            assert_eq!(page.eval("document.body.classList.contains('stale')"), false);
        }
        let is_shown = || (grid(&overview)["files-acme-alice-files"] == "stopped").then_some(());
        wait_for("the stop on the page", is_shown, || format!("{:?}", grid(&overview)));
        home.satellite(&["start", "files"]).exits(0);
        home.wait_all_online();
    }
    let last = home.events().last().unwrap()["seq"].as_u64().unwrap();
    events.wait("the last event", &format!("Number(document.querySelector('#events li').dataset.seq) >= {last}"));
    assert_gapless(&events);
    for page in [&overview, &events] {
        assert_eq!(page.eval("window.same"), true, "the page was loaded again");
        page.assert_clean();
    }
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_satellite_that_does_not_answer_turns_the_page_grey_although_the_connection_is_open() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM")]);
    home.wait_all_online();
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    send(satellite.pid(), Signal::SIGSTOP);
    page.wait("the grey page", "document.body.classList.contains('stale')");
    assert!(page.text("#stale").contains("Nothing has arrived for 5 s"), "{}", page.text("#stale"));
    send(satellite.pid(), Signal::SIGCONT);
    wait_live(&page);
    page.assert_clean();
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_page_says_that_the_satellite_was_restarted() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM")]);
    home.wait_all_online();
    let address = url.trim_start_matches("http://").split('/').next().unwrap().to_owned();
    let browser = Browser::start();
    let page = browser.page();
    log_in(&page, &home, &url);
    wait_live(&page);
    page.eval("window.before = true");
    satellite.terminate().exits(0);
    page.wait("the grey page", "document.body.classList.contains('stale')");
    let config = std::fs::read_to_string(home.path().join("satellite.toml")).unwrap();
    std::fs::write(home.path().join("satellite.toml"), config.replace("127.0.0.1:0", &address)).unwrap();
    let satellite = home.run(&["--config", home.path().join("satellite.toml").to_str().unwrap()]);
    // The login ended with the satellite.
    page.wait("the login page", "document.querySelector('#login')");
    log_in(&page, &home, &url);
    wait_live(&page);
    satellite.terminate().exits(0);
}

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn eight_pages_of_one_browser_are_live_and_continue_when_pages_are_closed() {
    let home = Home::new(SATELLITE);
    let (satellite, url) = start(&home, "", &[("notes", "SIM"), ("files", "SIM")]);
    home.wait_all_online();
    let browser = Browser::start();
    let first = browser.page();
    log_in(&first, &home, &url);
    let mut pages = vec![("clients", first)];
    for name in ["tree", "calls", "instances", "instances/notes", "instances/files", "events?since=0", ""] {
        pages.push((name, pages[0].1.sibling()));
    }
    for (name, page) in &pages {
        page.open(&format!("{url}{name}"));
        wait_live(page);
        page.eval("window.same = true");
    }
    // The pages that were opened first have the streams.
    let mut last = 0;
    for close in [0, 2] {
        for (_, page) in pages.drain(..close) {
            page.close();
        }
        home.satellite(&["stop", "notes"]).exits(0);
        home.satellite(&["restart", "files"]).exits(0);
        let stopped = home.wait_event(last, "mcp.server.stopped", |event| event["data"]["process_id"] == NOTES);
        last = stopped["seq"].as_u64().unwrap();
        for (name, page) in &pages {
            let shown = match *name {
                "" => format!(
                    "[...document.querySelectorAll('.grid i')].some((cell) => cell.row.name === {NOTES:?} && cell.className === 'stopped')"
                ),
                "instances/notes" => "document.querySelector('#state .status').textContent === 'stopped'".to_owned(),
                "instances" => "document.querySelector('#instances').textContent.includes('stopped')".to_owned(),
                "events?since=0" => format!("document.querySelector('#events li')?.dataset.seq >= {last}"),
                _ => "true".to_owned(),
            };
            page.wait(&format!("the stop on {name}"), &shown);
            wait_live(page);
        }
        home.satellite(&["start", "notes"]).exits(0);
        home.wait_all_online();
        for (name, page) in &pages {
            if *name == "instances/notes" {
                page.wait("the start", "document.querySelector('#state .status').textContent === 'online'");
            }
        }
    }
    last = home.events().last().unwrap()["seq"].as_u64().unwrap();
    for (name, page) in &pages {
        if *name == "events?since=0" {
            page.wait("the last event", &format!("document.querySelector('#events li').dataset.seq >= {last}"));
            assert_gapless(page);
        }
        assert_eq!(page.eval("window.same"), true, "{name} was loaded again");
        page.assert_clean();
    }
    satellite.terminate().exits(0);
}
