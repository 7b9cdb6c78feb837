//! Logins of browsers: codes, cookies, and requests of other pages.

use serde_json::json;

use super::client::{ApiClient, ApiResponse};
use super::fixture::{ALICES, Fixture, OPERATOR};

impl Fixture {
    fn login_link(&self) -> String {
        let printed = self.home.satellite(&["console", "--no-browser"]).exits(0).stdout;
        printed.lines().next().unwrap().to_owned()
    }

    /// Logs in with a token or a code.
    fn log_in(&self, token: &str, origin: &str) -> ApiResponse {
        let client = self.client().with_header("Origin", origin);
        let client = client.with_header("Content-Type", "application/x-www-form-urlencoded");
        client.send("POST", "/console/login", Some(&format!("token={token}")))
    }

    fn own_origin(&self) -> String {
        format!("http://{}", self.address)
    }

    #[track_caller]
    pub(crate) fn logged_in(&self, token: &str) -> ApiClient {
        let answered = self.log_in(token, &self.own_origin());
        assert_eq!(answered.status, 303, "{answered:?}");
        let cookie = answered.header("set-cookie").unwrap().to_owned();
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
        let port = self.address.rsplit(':').next().unwrap();
        assert!(cookie.starts_with(&format!("satellite_session_{port}=")), "{cookie}");
        self.client().with_header("Cookie", cookie.split(';').next().unwrap())
    }
}

#[test]
fn a_link_logs_the_owner_in_once() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let link = fixture.login_link();
    let (page, code) = link.split_once('#').unwrap();
    assert_eq!(page, format!("http://{}/console/login", fixture.address));
    let browser = fixture.logged_in(code);
    assert_eq!(browser.get("/v1/instances").ok()["total"], 3);
    assert_eq!(fixture.log_in(code, &fixture.own_origin()).status, 401, "a code is valid once");
    let events = fixture.home.events();
    let logins: Vec<_> = events
        .iter()
        .filter(|event| event["data"]["action"] == "login")
        .map(|event| (&event["data"]["outcome"], &event["data"]["actor"]["kind"]))
        .collect();
    assert_eq!(logins.len(), 2, "{logins:?}");
    assert_eq!(logins[0], (&json!("succeeded"), &json!("owner")));
    assert_eq!(logins[1].0, &json!("refused"));
    assert!(!serde_json::to_string(&events).unwrap().contains(code));
    satellite.terminate().exits(0);
}

#[test]
fn a_change_with_a_cookie_needs_the_token_of_the_page_and_its_origin() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let browser = fixture.logged_in(OPERATOR);
    let path = format!("/v1/instances/{ALICES}/restart");
    let page = browser.get("/console/").body;
    let token = page.split("name=\"csrf\" content=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let own = fixture.own_origin();
    let port = fixture.address.rsplit(':').next().unwrap();
    let localhost = format!("http://localhost:{port}");
    for (origin, csrf, site, status) in [
        (Some(own.as_str()), Some(token.as_str()), None, 200),
        (Some(&own), Some(&token), Some("same-origin"), 200),
        (Some(&own), None, None, 403),
        (Some(&own), Some("0000"), None, 403),
        (None, Some(&token), None, 403),
        (Some("http://127.0.0.1:1"), Some(&token), None, 403),
        (Some(&localhost), Some(&token), None, 403),
        (Some("null"), Some(&token), None, 403),
        (Some(&own), Some(&token), Some("same-site"), 403),
        (Some(&own), Some(&token), Some("cross-site"), 403),
    ] {
        let mut client = browser.clone();
        for (name, value) in [("Origin", origin), ("X-CSRF-Token", csrf), ("Sec-Fetch-Site", site)] {
            client = value.map_or(client.clone(), |value| client.with_header(name, value));
        }
        let answered = client.post(&path, &json!({}));
        assert_eq!(answered.status, status, "{origin:?} {csrf:?} {site:?}: {answered:?}");
    }
    browser.with_header("Sec-Fetch-Site", "cross-site").get("/v1/instances").problem(403, "forbidden");
    // A form of another page can send this media type without asking.
    let form = browser.with_header("Origin", &own).with_header("X-CSRF-Token", &token);
    let form = form.with_header("Content-Type", "text/plain").send("POST", &path, Some("{\"a\": 1}"));
    form.problem(415, "unsupported_media_type");
    satellite.terminate().exits(0);
}

#[test]
fn a_login_ends_with_the_logout_and_with_its_token() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let (one, other) = (fixture.logged_in(OPERATOR), fixture.logged_in(OPERATOR));
    let page = one.get("/console/").body;
    let token = page.split("name=\"csrf\" content=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    let left = one.with_header("Origin", &fixture.own_origin()).with_header("X-CSRF-Token", &token);
    let left = left.with_header("Content-Type", "application/json").send("POST", "/console/logout", None);
    assert!(left.header("set-cookie").unwrap().contains("Max-Age=0"), "{left:?}");
    one.get("/v1/instances").problem(401, "unauthorized");
    other.get("/v1/instances").ok();
    let text = super::fixture::config(&fixture.address, "").replace("\"env:OPERATOR\"", "\"env:OTHER_OPERATOR\"");
    let digest = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
    fixture.home.write("satellite.toml", &text.replace("env:OTHER_OPERATOR", digest));
    fixture.home.satellite(&["reload"]).exits(0);
    other.get("/v1/instances").problem(401, "unauthorized");
    satellite.terminate().exits(0);
}

#[test]
fn a_login_from_another_page_is_refused() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    for origin in ["http://127.0.0.1:1", "https://attacker.example", "null"] {
        let answered = fixture.log_in(OPERATOR, origin);
        assert_eq!(answered.status, 403, "{answered:?}");
        assert_eq!(answered.header("set-cookie"), None);
    }
    satellite.terminate().exits(0);
}
