//! `satellite auth`

use std::io::BufRead;
use std::process::Stdio;

use axum::http::{StatusCode, Uri};
use axum::response::{Html, IntoResponse, Response};
use clap::Args;
use mcp_satellite_actors::model::status::Status;
use reqwest::Url;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::control::{in_words, settled};
use super::{BAD_INPUT, DONE, DataDir, FAILED, Failed, Target, complain, printable, say};
use crate::console::api::{AuthBegun, AuthFinish, AuthRequest, AuthRevoked, InstanceStatus, Selector};
use crate::console::client::Client;

/// Where a browser comes back to.
const CALLBACK: &str = "/callback";
/// What the browser shows then.
const GOODBYE: &str =
    "<!doctype html><meta charset=utf-8><title>satellite</title><p>The satellite has it. You can close this page.";

/// Authorize a remote server by OAuth, or take that back.
///
/// Opens the page of the server's authorization server in a browser and waits for it to come back. What is granted is kept
/// in the data directory for its owner only, renewed by itself, and used by this user's instance alone, which goes on at
/// once.
#[derive(Args)]
#[command(after_help = "\
Where there is no browser, or one on another machine only:
  satellite auth notes --no-browser     open the page anywhere; paste the address that it ends at, or the code in it
  satellite auth notes --device         type a short code on any device, if the authorization server knows that

  satellite auth notes --scope notes:write    asks for this, beside what was granted before
  satellite auth notes --revoke               gives it up, here and there

A client that is registered by hand, scopes, and client credentials, which need no person, are configured: oauth = { … }.")]
pub(super) struct Auth {
    #[command(flatten)]
    target: Target,
    /// Ask for this scope; may be given again
    #[arg(long, value_name = "SCOPE")]
    scope: Vec<String>,
    /// Open no browser: print the page, and take what it ends at from stdin
    #[arg(long)]
    no_browser: bool,
    /// By a code that is typed on another device
    #[arg(long, conflicts_with = "no_browser")]
    device: bool,
    /// Give up what was granted
    #[arg(long, conflicts_with_all = ["scope", "no_browser", "device"])]
    revoke: bool,
    /// Do not wait until the server has come to something
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    data_dir: DataDir,
}

impl Auth {
    pub(super) async fn run(self) -> Result<u8, Failed> {
        let client = self.data_dir.client()?;
        let selector = Selector::from(self.target.clone());
        if self.revoke {
            return revoke(&client, &selector).await;
        }
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let redirect_uri = format!("http://{}{CALLBACK}", listener.local_addr()?);
        let request = AuthRequest { selector, redirect_uri, device: self.device, scopes: self.scope.clone() };
        let begun: AuthBegun = client.post("/v1/auth/begin", &request).await?;
        let row = match (begun.flow, begun.page) {
            (Some(flow), Some(page)) if self.device => {
                let page = begun.page_with_code.as_ref().unwrap_or(&page);
                let code = begun.user_code.unwrap_or_default();
                say(&format!(
                    "Open this page on any device:\n  {}\nand type the code {}",
                    printable(page),
                    printable(&code)
                ));
                finish(&client, AuthFinish { flow, redirect: None, code: None }).await?
            }
            (Some(flow), Some(page)) => self.by_page(&client, listener, flow, &page).await?,
            // It was granted to the satellite itself.
            _ => begun.instance,
        };
        let row = if self.no_wait { row } else { settled(&client, row).await? };
        say(&format!("{} is authorized", row.instance));
        if self.no_wait || row.status == Status::Online {
            say(&in_words(&row));
            return Ok(DONE);
        }
        complain(&in_words(&row));
        Ok(FAILED)
    }

    async fn by_page(
        &self,
        client: &Client,
        listener: TcpListener,
        flow: u64,
        page: &str,
    ) -> Result<InstanceStatus, Failed> {
        let url =
            Url::parse(page).map_err(|error| Failed::new(FAILED, format!("there is no page to open: {error}")))?;
        let state = url.query_pairs().find(|(name, _)| name == "state").map(|(_, state)| state.into_owned());
        let (back, mut came) = mpsc::channel(1);
        let _listening = listen(listener, state, back.clone());
        let opened = !self.no_browser && open(page);
        say(&format!(
            "{}:\n  {page}",
            if opened { "A browser opens this page" } else { "Open this page in a browser" }
        ));
        if self.no_browser || !opened {
            say("and paste here the address that it ends at, or the code in it:");
            read(back);
        }
        let (redirect, code) = match came.recv().await {
            Some(Came::Back(url)) => (Some(url), None),
            Some(Came::Typed(text)) if text.contains("://") => (Some(text), None),
            Some(Came::Typed(text)) => (None, Some(text)),
            None => return Err(Failed::new(BAD_INPUT, "nothing came back; nothing was authorized")),
        };
        finish(client, AuthFinish { flow, redirect, code }).await
    }
}

async fn finish(client: &Client, finish: AuthFinish) -> Result<InstanceStatus, Failed> {
    Ok(client.post("/v1/auth/finish", &finish).await?)
}

async fn revoke(client: &Client, selector: &Selector) -> Result<u8, Failed> {
    let AuthRevoked { instance, was_there, not_told } = client.post("/v1/auth/revoke", selector).await?;
    if !was_there {
        say(&format!("{} has no authorization", instance.instance));
        return Ok(DONE);
    }
    say(&format!("{} has no authorization any more", instance.instance));
    say(&in_words(&instance));
    match not_told {
        None => Ok(DONE),
        Some(why) => {
            complain(&format!("it is forgotten here, and could not be revoked there: {}", printable(&why)));
            Ok(FAILED)
        }
    }
}

/// What comes of a page.
enum Came {
    /// The browser, to this address.
    Back(String),
    /// What somebody has pasted.
    Typed(String),
}

/// Waits for the browser. Whoever else comes, such as a page that guesses our port, does not know the state.
fn listen(listener: TcpListener, state: Option<String>, back: mpsc::Sender<Came>) -> AbortOnDropHandle<()> {
    let port = listener.local_addr().map(|address| address.port()).unwrap_or_default();
    let came = move |uri: Uri| {
        let (state, back) = (state.clone(), back.clone());
        async move {
            let address = format!("http://127.0.0.1:{port}{uri}");
            let said = Url::parse(&address).ok().and_then(|url| {
                url.query_pairs().find(|(name, _)| name == "state").map(|(_, state)| state.into_owned())
            });
            if said.is_none() || said != state {
                return (StatusCode::BAD_REQUEST, "this is not what the satellite waits for\n").into_response();
            }
            // A second time it is the same.
            let _ = back.try_send(Came::Back(address));
            let shown: Response = Html(GOODBYE).into_response();
            shown
        }
    };
    let router = axum::Router::new().route(CALLBACK, axum::routing::get(came));
    AbortOnDropHandle::new(tokio::spawn(async move {
        // If it cannot be served the address can still be pasted.
        let _ = axum::serve(listener, router).await;
    }))
}

/// Takes a line from stdin. Its thread is left behind when the browser comes first.
fn read(back: mpsc::Sender<Came>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let text = line.trim();
            if !text.is_empty() {
                let _ = back.blocking_send(Came::Typed(text.to_owned()));
                return;
            }
        }
    });
}

/// Opens a page where there is somebody to see it. The page's address is no secret: what it leads to is of use to nobody
/// without the satellite that has made it.
fn open(page: &str) -> bool {
    let has = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let chosen = std::env::var("BROWSER").ok().filter(|browser| !browser.is_empty());
    let browser = match chosen {
        Some(browser) => browser,
        None if has("DISPLAY") || has("WAYLAND_DISPLAY") => "xdg-open".to_owned(),
        None => return false,
    };
    let mut command = std::process::Command::new(browser);
    command.arg(page).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().is_ok()
}
