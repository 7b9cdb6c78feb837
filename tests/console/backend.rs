//! The console of `satellite backend`, and the page of the fleet, with real satellites.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::home::{Home, Running, Satellite, pid};
use testkit::port::free_port;
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;
use crate::browser::{Browser, Page};
use crate::support::{console_url, grid, log_in, log_in_with, wait_live};

/// A running `satellite backend`, killed when dropped.
pub(crate) struct Backend {
    process: Option<Running>,
    address: String,
    data: PathBuf,
}

impl Backend {
    pub(crate) fn start(home: &Home) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let mut backend = Self { process: None, address, data: home.path().join("backend") };
        backend.restart(home);
        backend
    }

    fn restart(&mut self, home: &Home) {
        let data = self.data.display().to_string();
        let args = ["backend", "--listen", &self.address, "--data-dir", &data, "--poll-interval", "0.1"];
        let process = home.start(home.command(&args));
        process.wait_stdout(|text| text.contains("/instances/stream"));
        self.process = Some(process);
    }

    fn pid(&self) -> i32 {
        self.process.as_ref().unwrap().pid()
    }

    pub(crate) fn console(&self) -> String {
        format!("http://{}/console/", self.address)
    }

    fn admin_token(&self) -> String {
        fs::read_to_string(self.data.join("admin-token")).unwrap().trim().to_owned()
    }

    pub(crate) fn log_in(&self, page: &Page) {
        log_in_with(page, &self.admin_token(), &self.console());
    }

    fn admin(&self, method: &str, path: &str, body: &Value) -> Value {
        let (address, token, body) = (&self.address, self.admin_token(), body.to_string());
        let mut stream = TcpStream::connect(address).unwrap();
        write!(
            stream,
            "{method} /api/admin/{path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nContent-Length: \
             {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 20"), "{method} {path}: {answer}");
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap_or_default()
    }

    /// Configures one team with alice and these simulated servers for all satellites.
    pub(crate) fn configure(&self, home: &Home, servers: &[&str]) {
        let installation = |id: &&str| json!({"id": id, "server": id, "command": SATELLITE, "args": ["sim-server", "--name", home.mark()]});
        let installations: Vec<_> = servers.iter().map(installation).collect();
        let users = [json!({"id": "user_alice", "slug": "alice"})];
        let team = json!({"id": "team_acme", "slug": "acme", "users": users, "installations": installations});
        self.admin("PUT", "config", &json!({"teams": [team]}));
    }

    /// Starts a satellite of this backend with a console of its own.
    pub(crate) fn satellite<'a>(&self, home: &'a Home, name: &str) -> Satellite<'a> {
        let made = self.admin("POST", "registration-tokens", &json!({"name": name}));
        home.write("registration-token", made["token"].as_str().unwrap());
        let mut text = format!("[satellite]\nname = \"{name}\"\n[events]\ninterval = \"50ms\"\n");
        write!(
            text,
            "[backend]\nurl = \"http://{}\"\ntoken = \"file:registration-token\"\nheartbeat_interval = \"500ms\"\n\
             backoff_max = \"500ms\"\n[policy.restart]\ndelays = [\"5s\"]\n[gateway]\nlisten = \"127.0.0.1:0\"\n\
             [console]\nenabled = true\n",
            self.address
        )
        .unwrap();
        let config = home.write("satellite.toml", &text);
        home.run(&["--config", config.to_str().unwrap()])
    }
}

const NOTES: &str = "satellite-0001:notes-acme-alice-notes";

#[test]
#[cfg_attr(no_console_tools, ignore = "needs Chromium and axe-core; install them with .ci/install-console-tools")]
fn a_backend_shows_the_servers_of_two_satellites_and_who_is_connected() {
    let (home, other_home) = (Home::new(SATELLITE), Home::new(SATELLITE));
    let mut backend = Backend::start(&home);
    backend.configure(&home, &["notes", "files"]);
    let one = backend.satellite(&home, "satellite-0001");
    let other = backend.satellite(&other_home, "satellite-0002");
    home.wait_all_online();
    other_home.wait_all_online();
    let row = home.wait_online("notes");

    let browser = Browser::start();
    let overview = browser.page();
    backend.log_in(&overview);
    wait_live(&overview);
    let all_online =
        || (grid(&overview).len() == 4 && grid(&overview).values().all(|class| class == "online")).then_some(());
    wait_for("four servers on the page", all_online, || format!("{:?}", grid(&overview)));
    // A reload would hide a missed change.
    overview.eval(&format!(
        "window.same = true; window.changes = []; const cell = [...document.querySelectorAll('.grid i')].find((cell) => \
         cell.row.name === '{NOTES}'); new MutationObserver(() => changes.push(cell.className)).observe(cell, \
         {{attributes: true, attributeFilter: ['class']}})"
    ));
    send(pid(&row), Signal::SIGKILL);
    overview.wait("the lost server", "changes.some((status) => status === 'connecting')");
    overview.wait("the restarted server", "changes.at(-1) === 'online'");

    // A button works at the satellite, and the page shows the result.
    let instance = overview.sibling();
    instance.open(&format!("{}instances/{}", backend.console(), NOTES.replace(':', "%3A")));
    wait_live(&instance);
    instance.eval("window.confirm = () => true");
    instance.click("[data-action=stop]");
    instance.wait("the result", "document.querySelector('#commands tbody tr')?.textContent.includes('completed')");
    instance.wait("the stop", "document.querySelector('#state .status').textContent === 'stopped'");
    instance.wait("the event", "document.querySelector('#events li')?.textContent.includes('server.')");
    home.wait_row("notes", "the stop", |row| row["want"] == "stopped");
    overview.wait("the stop on the overview", "changes.at(-1) === 'stopped'");

    // A satellite that ends, on the pages of the backend and of the other satellite.
    let fleet = overview.sibling();
    fleet.open(&format!("{}fleet", backend.console()));
    wait_live(&fleet);
    assert!(fleet.text("#fleet").contains("2 satellites, 2 connected"), "{}", fleet.text("#fleet"));
    let own = browser.page();
    log_in(&own, &home, &console_url(&one));
    own.open(&format!("{}fleet", console_url(&one)));
    wait_live(&own);
    own.wait("the fleet", "document.querySelector('#fleet').textContent.includes('2 satellites, 2 connected')");
    assert!(own.text("#fleet").contains("satellite-0001 this satellite"), "{}", own.text("#fleet"));
    other.terminate().exits(0);
    for page in [&fleet, &own] {
        page.wait(
            "the end of a satellite",
            "document.querySelector('#fleet').textContent.includes('2 satellites, 1 connected')",
        );
        let rows =
            page.eval("[...document.querySelectorAll('#fleet tbody tr')].map((row) => row.cells[1].textContent)");
        assert_eq!(rows, json!(["connected", "not connected"]));
    }
    let are_offline = || {
        let shown = grid(&overview);
        let lost = shown.iter().filter(|(name, _)| name.starts_with("satellite-0002:"));
        (lost.clone().count() == 2 && lost.into_iter().all(|(_, class)| class == "offline")).then_some(())
    };
    wait_for("the servers of the ended satellite", are_offline, || format!("{:?}", grid(&overview)));
    assert_eq!(overview.eval("window.same"), true);

    // A backend that does not answer turns its pages grey, and they continue with it.
    send(backend.pid(), Signal::SIGSTOP);
    overview.wait("the grey page", "document.body.classList.contains('stale')");
    send(backend.pid(), Signal::SIGCONT);
    wait_live(&overview);
    assert_eq!(overview.eval("window.same"), true);

    // Without the backend its pages turn grey, and the satellite says that it cannot reach the backend.
    backend.process = None;
    for page in [&overview, &fleet] {
        page.wait("the grey page", "document.body.classList.contains('stale')");
    }
    own.wait("the failure", "document.querySelector('#fleet').textContent.includes('cannot reach')");
    assert_eq!(own.text("#link"), "live");
    backend.restart(&home);
    own.wait("the fleet", "document.querySelector('#fleet').textContent.includes('satellite-0002')");
    // The login ended with the backend.
    overview.open(&backend.console());
    assert_eq!(overview.text("h1"), "Log in");
    for page in [&instance, &own] {
        page.assert_clean();
    }
    one.terminate().exits(0);
}
