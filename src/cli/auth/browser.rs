//! Opens the authorization page in a browser and receives its redirect.

use std::io::BufRead;

use axum::http::{StatusCode, Uri};
use axum::response::{Html, IntoResponse};
use reqwest::Url;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

pub(super) const CALLBACK: &str = "/callback";
const COMPLETION_PAGE: &str = "<!doctype html><meta charset=utf-8><title>satellite</title>\
    <p>The satellite received the response. You can close this page.";

pub(super) enum BrowserResponse {
    Redirect(String),
    /// Address or code that was pasted into the terminal.
    Pasted(String),
}

/// Waits for the browser's redirect. A request without the right `state` is rejected, such as one from a page that
/// guesses the port.
pub(super) fn listen_for_redirect(
    listener: TcpListener,
    page: &str,
    sender: mpsc::Sender<BrowserResponse>,
) -> AbortOnDropHandle<()> {
    let port = listener.local_addr().map(|address| address.port()).unwrap_or_default();
    let state = state_of(page);
    let on_redirect = move |uri: Uri| {
        let address = format!("http://127.0.0.1:{port}{uri}");
        let received = state_of(&address);
        let is_it = received.is_some() && received == state;
        if is_it {
            // The channel holds one message: later redirects are the same and are dropped.
            let _ = sender.try_send(BrowserResponse::Redirect(address));
        }
        async move {
            if is_it {
                Html(COMPLETION_PAGE).into_response()
            } else {
                (StatusCode::BAD_REQUEST, "this request does not belong to the authorization in progress\n")
                    .into_response()
            }
        }
    };
    let router = axum::Router::new().route(CALLBACK, axum::routing::get(on_redirect));
    AbortOnDropHandle::new(tokio::spawn(async move {
        // If serving fails, the address can still be pasted.
        let _ = axum::serve(listener, router).await;
    }))
}

fn state_of(address: &str) -> Option<String> {
    let url = Url::parse(address).ok()?;
    url.query_pairs().find(|(name, _)| name == "state").map(|(_, state)| state.into_owned())
}

/// Reads a line from stdin, on a thread that is left behind if the browser answers first.
pub(super) fn read_pasted(sender: mpsc::Sender<BrowserResponse>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let text = line.trim();
            if !text.is_empty() {
                let _ = sender.blocking_send(BrowserResponse::Pasted(text.to_owned()));
                return;
            }
        }
    });
}
