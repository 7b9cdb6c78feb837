//! The fixture of each test: a home directory, an authorization server, a protected server, and a browser.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use mcp_satellite::console::api::{CallRequest, InstanceSelector};
use mcp_satellite::console::client::{ClientError, ConsoleClient};
use reqwest::Url;
use serde_json::Value;
use testkit::home::{Home, Outcome, Running, Satellite};

use super::authority::Authority;
use super::protected::Protected;
use crate::SATELLITE;

pub(crate) struct OauthFixture {
    pub(crate) home: Home,
    pub(crate) authority: Authority,
    pub(crate) server: Protected,
}

/// Reconnects almost at once, so that tests do not wait for the backoff.
const POLICY: &str = "[policy.reconnect]\nbackoff_min = \"50ms\"\nbackoff_max = \"200ms\"\n";

impl OauthFixture {
    pub(crate) fn new() -> Self {
        let mut home = Home::new(SATELLITE);
        let authority = Authority::start();
        let server = Protected::start(&authority.shared);
        // No browser is opened: the URL is printed, and the test acts as the browser.
        home.env.extend(["DISPLAY", "WAYLAND_DISPLAY", "BROWSER"].map(|name| (name.to_owned(), String::new())));
        Self { home, authority, server }
    }

    /// Writes a configuration with the server `files` for these users; `more` is added to the server.
    pub(crate) fn config(&self, users: &[&str], more: &str) -> PathBuf {
        let users: Vec<_> = users.iter().map(|user| format!("{{ id = \"user_{user}\", slug = \"{user}\" }}")).collect();
        let text = format!(
            "{POLICY}[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = [{}]\n\
             [[teams.installations]]\nid = \"f1\"\nserver = \"files\"\ntransport = \"http\"\nurl = \"{}\"\n{more}\n",
            users.join(", "),
            self.server.url()
        );
        self.home.write("satellite.toml", &text)
    }

    /// Starts a satellite with the server `files` for alice.
    pub(crate) fn run(&self, more: &str) -> Satellite<'_> {
        let config = self.config(&["alice"], more);
        self.home.run(&["--config", config.to_str().unwrap()])
    }

    /// Starts a satellite and authorizes its server.
    pub(crate) fn run_authorized(&self) -> Satellite<'_> {
        let satellite = self.run("");
        self.home.wait_status("files", "requires_reauth");
        self.authorize(&[]).exits(0);
        self.home.wait_online("files");
        satellite
    }

    /// Performs an authorization as a person with a browser does.
    #[track_caller]
    pub(crate) fn authorize(&self, more: &[&str]) -> Outcome {
        let auth = self.home.background(&[&["auth", "files"], more].concat());
        visit(&authorization_url(&auth));
        auth.finish()
    }

    /// Calls a tool and returns its text, or the whole output of a failure.
    #[track_caller]
    pub(crate) fn call(&self, tool: &str) -> String {
        let outcome = self.home.satellite(&["call", "files", tool, "--json"]);
        match outcome.code {
            Some(0) => outcome.json()["content"][0]["text"].as_str().unwrap().to_owned(),
            _ => format!("{} {}", outcome.stdout, outcome.stderr),
        }
    }

    pub(crate) fn message(&self) -> String {
        self.home
            .row("files")
            .map(|row| row["status_message"].as_str().unwrap_or_default().to_owned())
            .unwrap_or_default()
    }

    /// The stored grants.
    pub(crate) fn grants(&self) -> Vec<Value> {
        let rows = self.home.stored("grants").into_iter();
        rows.map(|row| serde_json::from_str(row.last().unwrap()).unwrap()).collect()
    }

    /// The only stored grant.
    #[track_caller]
    pub(crate) fn grant(&self) -> Value {
        let mut grants = self.grants();
        assert_eq!(grants.len(), 1);
        grants.remove(0)
    }

    /// Replaces the only stored grant, while no satellite runs.
    #[track_caller]
    pub(crate) fn replace_grant(&self, grant: &Value) {
        let database = rusqlite::Connection::open(self.home.state_database()).unwrap();
        let body = grant.to_string().into_bytes();
        assert_eq!(database.execute("UPDATE grants SET body = ?1", [body]).unwrap(), 1);
    }
}

/// Waits for the authorization URL in the output of `satellite auth`.
#[track_caller]
pub(crate) fn authorization_url(auth: &Running) -> String {
    let stdout = auth.wait_stdout(|text| text.contains("/authorize?") && text.ends_with('\n'));
    stdout.lines().map(str::trim).find(|line| line.starts_with("http")).unwrap().to_owned()
}

/// Opens a page, follows its redirect, and returns the target.
pub(crate) fn visit(page: &str) -> String {
    let redirect = redirect_target(page);
    let (status, _) = http_get(&redirect);
    assert_eq!(status, 200);
    redirect
}

pub(crate) fn redirect_target(page: &str) -> String {
    http_get(page).1.unwrap()
}

/// Gets a page without following redirects: the status and the redirect target.
pub(crate) fn http_get(page: &str) -> (u16, Option<String>) {
    // It fails if a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let asking = async {
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
        let response = client.get(page).send().await.unwrap();
        let to = response.headers().get("location").map(|to| to.to_str().unwrap().to_owned());
        (response.status().as_u16(), to)
    };
    runtime().block_on(asking)
}

pub(crate) fn query_parameter(url: &str, wanted: &str) -> Option<String> {
    let url = Url::parse(url).unwrap();
    url.query_pairs().find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned())
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Calls `whoami` concurrently from one process.
pub(crate) async fn call_at_once(client: &ConsoleClient, calls: usize) -> Vec<Result<Value, ClientError>> {
    let call = |_| async {
        let selector = InstanceSelector { server: "files".to_owned(), team: None, user: None };
        let request = CallRequest { selector, tool: "whoami".to_owned(), arguments: None, timeout_ms: None };
        client.post("/v1/call", &request).await
    };
    futures::future::join_all((0..calls).map(call)).await
}

/// A running command whose stdin is written by the test.
pub(crate) struct InteractiveCommand {
    pub(crate) running: Running,
    pipe: fs::File,
}

impl InteractiveCommand {
    pub(crate) fn start(home: &Home, args: &[&str]) -> Self {
        let path = home.path().join("typed");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // Opened for reading too, so that the open does not wait for the other end.
        let pipe = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut command = home.command(args);
        command.arg("--data-dir").arg(home.data_dir()).stdin(pipe.try_clone().unwrap());
        Self { running: home.start(command), pipe }
    }

    pub(crate) fn type_line(&mut self, line: &str) {
        writeln!(self.pipe, "{line}").unwrap();
    }
}
