//! The login: a form for a token. The script fills it with the code of a login link.

use axum::http::Uri;
use maud::{Markup, html};
use mcp_satellite_actors::model::secret::Secret;
use serde::Deserialize;

use super::layout::{ConsoleSite, bare_page};
use super::root_of;
use crate::problem::Problem;

/// First segments of the pages to which a login may lead.
const PAGES: [&str; 7] = ["instances", "calls", "events", "clients", "tree", "fleet", "playground"];

/// Returns the page that follows a login, relative to `/console/`: that of the query `next`, if the console has it.
/// Anything else could lead to another site.
pub fn page_after_login(uri: &Uri) -> String {
    #[derive(Deserialize)]
    struct LoginQuery {
        next: String,
    }
    let next = serde_urlencoded::from_str(uri.query().unwrap_or_default()).map(|query: LoginQuery| query.next);
    let is_page = |next: &String| {
        next.split(['/', '?']).next().is_some_and(|first| PAGES.contains(&first))
            && next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\')
            && !next.contains("..")
    };
    format!("./{}", next.ok().filter(is_page).unwrap_or_default())
}

/// Returns the login page at `uri`, with the reason why the last attempt failed.
pub fn login_page(site: ConsoleSite, uri: &Uri, failure: Option<&str>) -> Markup {
    let root = root_of(uri.path());
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let content = html! {
        h1 { "Log in" }
        @if let Some(failure) = failure { p.error role="alert" { (failure) } }
        form #login method="post" action={ (root) "login" (query) } {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::login_link;

    #[test]
    fn a_login_leads_back_to_a_page_of_the_console_only() {
        let uri: Uri = "/prefix/console/instances/a%20b?tab=1&x=%2F".parse().unwrap();
        let link = login_link(&uri);
        assert_eq!(link, "../login?next=instances%2Fa%2520b%3Ftab%3D1%26x%3D%252F");
        let login: Uri = format!("/prefix/console/{}", link.trim_start_matches("../")).parse().unwrap();
        assert_eq!(page_after_login(&login), "./instances/a%20b?tab=1&x=%2F");
        assert_eq!(login_link(&"/console/".parse().unwrap()), "login");
        for bad in [
            "",
            "login",
            "//evil.example",
            "https:evil.example",
            "instances/../../v1",
            "events%0d%0aX:1",
            "fleet%5C%5Cevil",
        ] {
            assert_eq!(page_after_login(&format!("/console/login?next={bad}").parse().unwrap()), "./", "{bad}");
        }
        assert_eq!(page_after_login(&"/console/login".parse().unwrap()), "./");
    }
}
