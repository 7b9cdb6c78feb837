//! `satellite console`

use std::io;
use std::path::Path;

use clap::Args;
use reqwest::Url;

use super::open_browser::open_browser;
use super::{CommandFailure, DONE, DataDirArg, FAILED, print_text};
use crate::console::api::LoginLink;
use crate::console::client::ConsoleClient;
use crate::data_dir::DataDir;

/// File in the data directory that takes the browser to the login.
const LOGIN_PAGE: &str = "console-login.html";

#[derive(Debug, Args)]
pub(super) struct ConsoleCommand {
    #[command(flatten)]
    data_dir: DataDirArg,
    /// Print the link only, and open no browser
    #[arg(long)]
    no_browser: bool,
}

impl ConsoleCommand {
    pub(super) async fn run(self) -> Result<u8, CommandFailure> {
        let directory = self.data_dir.find()?;
        let client = ConsoleClient::new(&directory)?;
        let LoginLink { url } = client.post("/v1/login-link", &()).await?;
        if !self.no_browser {
            let written = write_page(&directory, &url);
            let page = written
                .map_err(|error| CommandFailure::new(FAILED, format!("cannot write `{LOGIN_PAGE}`: {error}")))?;
            if open_browser(&page) {
                print_text("the browser shows the console");
                return Ok(DONE);
            }
        }
        print_text(&format!("{url}\n  the link logs in once, within a minute"));
        Ok(DONE)
    }
}

/// Writes a page that only the owner can read and that opens `url`. Returns the URL of the page. Every process of this
/// machine could read the code of `url` in the arguments of the browser.
fn write_page(directory: &Path, url: &str) -> io::Result<String> {
    let data_dir = DataDir::open(directory)?;
    let page = format!("<!doctype html>\n<meta http-equiv=\"refresh\" content=\"0; url={url}\">\n");
    data_dir.replace(LOGIN_PAGE, page.as_bytes())?;
    let file = directory.canonicalize()?.join(LOGIN_PAGE);
    let page = Url::from_file_path(&file).map_err(|()| io::Error::other("the path cannot be written as a URL"))?;
    Ok(page.into())
}
