//! `satellite auth`

mod browser;
mod executor;

use clap::Args;
use mcp_satellite_actors::model::status::Status;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use self::browser::{BrowserResponse, CALLBACK, listen_for_redirect, read_pasted};
use self::executor::AuthBackend;
use super::check::ConfigSources;
use super::control::{status_sentence, wait_settled};
use super::open_browser::open_browser;
use super::{BAD_INPUT, CommandFailure, DONE, DataDirArg, FAILED, InstanceArg, print_error, print_text, printable};
use crate::console::api::{AuthFinishRequest, AuthFlow, AuthRequest, AuthRevokeResult, InstanceSelector};
use crate::console::client::ConsoleClient;

/// Authorize a remote server by OAuth, or revoke the authorization.
///
/// Opens the page of the authorization server in a browser and waits for the redirect. The authorization is stored in
/// the data directory for its owner only, renewed automatically, and used by this user's instance only, which continues
/// at once.
#[derive(Args)]
#[command(after_help = "\
Without a browser on this machine:
  satellite auth notes --no-browser     open the page anywhere; paste the final address, or the code in it
  satellite auth notes --device         type a short code on any device, if the authorization server supports it

  satellite auth notes --scope notes:write    request this scope in addition to those granted before
  satellite auth notes --revoke               revoke the authorization here and at the authorization server

Configure a client that is registered by hand, scopes, and client credentials (no person needed) with oauth = { … }.")]
pub(super) struct AuthCommand {
    #[command(flatten)]
    target: InstanceArg,
    /// Request this scope; may be repeated
    #[arg(long, value_name = "SCOPE")]
    scope: Vec<String>,
    /// Open no browser: print the page's address, and read the address that it redirects to from stdin
    #[arg(long)]
    no_browser: bool,
    /// Authorize with a code that is typed on another device
    #[arg(long, conflicts_with = "no_browser")]
    device: bool,
    /// Revoke the authorization
    #[arg(long, conflicts_with_all = ["scope", "no_browser", "device"])]
    revoke: bool,
    /// Do not wait until the server is connected or has failed
    #[arg(long)]
    no_wait: bool,
    /// Configuration to use if no satellite is running
    #[command(flatten)]
    sources: ConfigSources,
    #[command(flatten)]
    data_dir: DataDirArg,
}

impl AuthCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let location = self.data_dir.location();
        // If configuration files are given, only a satellite on this data directory is used, not one elsewhere.
        let client =
            if self.sources.has_any() { ConsoleClient::new(&location.path)? } else { self.data_dir.client()? };
        let backend = AuthBackend::open(client, &self.sources, &location).await?;
        let selector = InstanceSelector::from(self.target.clone());
        if self.revoke {
            return revoke(&backend, &selector).await;
        }
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let redirect_uri = format!("http://{}{CALLBACK}", listener.local_addr()?);
        let request = AuthRequest { selector, redirect_uri, device: self.device, scopes: self.scope.clone() };
        let AuthFlow { instance, flow, page, page_with_code, user_code, .. } = backend.begin(request).await?;
        match (flow, page, user_code) {
            (Some(flow), Some(page), Some(code)) => {
                let page = page_with_code.unwrap_or(page);
                print_text(&format!(
                    "Open this page on any device:\n  {}\nand type the code {}",
                    printable(&page),
                    printable(&code)
                ));
                backend.finish(AuthFinishRequest { flow, redirect: None, code: None }).await?;
            }
            (Some(flow), Some(page), None) => self.authorize_in_browser(&backend, listener, flow, &page).await?,
            // The satellite was authorized by client credentials, without a person.
            _ => {}
        }
        print_text(&format!("{instance} is authorized"));
        let (Some(row), Some(client)) = (backend.instance_status(&instance).await?, backend.client()) else {
            return Ok(DONE);
        };
        let row = if self.no_wait { row } else { wait_settled(client, row).await? };
        if self.no_wait || row.status == Status::Online {
            print_text(&status_sentence(&row));
            return Ok(DONE);
        }
        print_error(&status_sentence(&row));
        Ok(FAILED)
    }

    async fn authorize_in_browser(
        &self,
        backend: &AuthBackend,
        listener: TcpListener,
        flow: u64,
        page: &str,
    ) -> Result<(), CommandFailure> {
        let (sender, mut redirects) = mpsc::channel(1);
        let _listening = listen_for_redirect(listener, page, sender.clone());
        let opened = !self.no_browser && open_browser(page);
        let how = if opened { "A browser opens this page" } else { "Open this page in a browser" };
        print_text(&format!("{how}:\n  {}", printable(page)));
        if !opened {
            print_text("then paste the final address of the browser, or the code in it:");
            read_pasted(sender);
        }
        let (redirect, code) = match redirects.recv().await {
            Some(BrowserResponse::Redirect(url)) => (Some(url), None),
            Some(BrowserResponse::Pasted(text)) if text.contains("://") => (Some(text), None),
            Some(BrowserResponse::Pasted(text)) => (None, Some(text)),
            None => {
                return Err(CommandFailure::new(
                    BAD_INPUT,
                    "no address or code received; nothing was authorized; run the command again",
                ));
            }
        };
        backend.finish(AuthFinishRequest { flow, redirect, code }).await
    }
}

async fn revoke(backend: &AuthBackend, selector: &InstanceSelector) -> Result<u8, CommandFailure> {
    let AuthRevokeResult { instance, had_grant, notification_error } = backend.revoke(selector).await?;
    let any_more = if had_grant { " any more" } else { "" };
    print_text(&format!("{instance} has no authorization{any_more}"));
    if let Some(row) = backend.instance_status(&instance).await?.filter(|_| had_grant) {
        print_text(&status_sentence(&row));
    }
    match notification_error {
        None => Ok(DONE),
        Some(why) => {
            print_error(&format!(
                "authorization removed here, but not revoked at the authorization server: {}",
                printable(&why)
            ));
            Ok(FAILED)
        }
    }
}
