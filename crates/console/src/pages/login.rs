//! The login: a form for a token. The script fills it with the code of a login link.

use maud::{Markup, html};
use mcp_satellite_actors::model::secret::Secret;
use serde::Deserialize;

use super::layout::{ConsoleSite, bare_page};
use crate::problem::Problem;

/// Returns the login page, with the reason why the last attempt failed.
pub fn login_page(site: ConsoleSite, root: &str, failure: Option<&str>) -> Markup {
    let content = html! {
        h1 { "Log in" }
        @if let Some(failure) = failure { p.error role="alert" { (failure) } }
        form #login method="post" action={ (root) "login" } {
            label for="token" { @if site == ConsoleSite::Backend { "Admin token" } @else { "Console token" } }
            input #token name="token" type="password" autocomplete="current-password" required autofocus;
            button type="submit" { "Log in" }
        }
        @if site == ConsoleSite::Backend {
            p { "The token is in the file " code { "admin-token" } " of the backend's data directory." }
        } @else {
            p { "On the satellite's machine, " code { "satellite console" } " opens this page with a link that logs in by itself." }
            p { "The owner's token is in the file " code { "console-token" } " of the data directory." }
        }
    };
    bare_page(root, "login", "Log in", &content)
}

/// Returns the token or code of a sent form.
///
/// # Errors
/// The body is not that of the login form.
pub fn read_login_form(body: &[u8]) -> Result<Secret, Problem> {
    #[derive(Deserialize)]
    struct LoginForm {
        token: String,
    }
    let form: LoginForm = serde_urlencoded::from_bytes(body)
        .map_err(|error| Problem::new("bad_input", format!("cannot read the form: {error}")))?;
    Ok(form.token.trim().to_owned().into())
}
