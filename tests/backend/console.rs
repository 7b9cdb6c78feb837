//! The console of a backend over HTTP: logins, pages, commands, streams, and hostile text.

use futures::StreamExt as _;
use jiff::SignedDuration;
use mcp_satellite::backend::server::schema::MessageSchema;
use reqwest::header::{CONTENT_TYPE, COOKIE, HOST, LOCATION, ORIGIN, SET_COOKIE};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};
use testkit::wait::{GIVE_UP, until};
use tokio::time::timeout;

use super::support::{Satellite, TestBackend, heartbeat, status};

const INSTANCE: &str = "files-acme-alice-abc123";

/// A browser that does not follow redirects.
struct ConsoleBrowser {
    client: Client,
    url: String,
    /// Cookie of a login.
    cookie: Option<String>,
}

impl ConsoleBrowser {
    fn new(backend: &TestBackend) -> Self {
        super::support::client();
        let client = Client::builder().no_proxy().timeout(GIVE_UP).redirect(reqwest::redirect::Policy::none());
        Self { client: client.build().unwrap(), url: backend.url().to_owned(), cookie: None }
    }

    async fn logged_in(backend: &TestBackend) -> Self {
        let mut browser = Self::new(backend);
        let answer = browser.log_in(&backend.file("admin-token"), backend.url()).await;
        assert_eq!(answer.status(), 303);
        let cookie = answer.headers()[SET_COOKIE].to_str().unwrap().to_owned();
        assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
        browser.cookie = Some(cookie.split(';').next().unwrap().to_owned());
        browser
    }

    async fn log_in(&self, token: &str, origin: &str) -> Response {
        let form = self.client.post(format!("{}/console/login", self.url)).header(ORIGIN, origin);
        let form = form.header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        form.body(format!("token={token}")).send().await.unwrap()
    }

    fn get(&self, path: &str) -> RequestBuilder {
        let request = self.client.get(format!("{}{path}", self.url));
        match &self.cookie {
            Some(cookie) => request.header(COOKIE, cookie),
            None => request,
        }
    }

    async fn page(&self, path: &str) -> String {
        let answer = self.get(&format!("/console/{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        answer.text().await.unwrap()
    }

    /// Waits until a page contains the text.
    async fn page_with(&self, path: &str, text: &str) -> String {
        // An instance has no page until the console has read its first report.
        let page = async || self.get(&format!("/console/{path}")).send().await.unwrap().text().await.unwrap();
        until(&format!("{path} contains {text}"), page, |page| page.contains(text)).await
    }

    /// Sends a change as the script of a page does.
    async fn change(&self, path: &str, csrf_token: Option<&str>, origin: &str) -> Response {
        let request = self.client.post(format!("{}/v1/{path}", self.url)).header(ORIGIN, origin).json(&json!({}));
        let request = request.header(COOKIE, self.cookie.clone().unwrap_or_default());
        match csrf_token {
            Some(token) => request.header("X-CSRF-Token", token),
            None => request,
        }
        .send()
        .await
        .unwrap()
    }

    async fn csrf_token(&self) -> String {
        let page = self.page("fleet").await;
        page.split("name=\"csrf\" content=\"").nth(1).unwrap().split('"').next().unwrap().to_owned()
    }
}

/// Event with the recorded calls of an instance: the tool of each, and whether it was answered.
fn requests(seq: u64, instance: &str, calls: &[(&str, bool)]) -> Value {
    let request = |(tool, success): &(&str, bool)| {
        json!({"tool_name": tool, "tool_params": {"text": format!("argument of {tool}")},
            "tool_response": {"content": []}, "response_time_ms": 3, "success": success,
            "error_message": (!success).then_some("no time left"), "fate": (!success).then_some("timed_out"),
            "client": "my-editor", "timestamp": "2026-11-21T06:33:00Z"})
    };
    let mut event = status(seq, instance, "online");
    event["type"] = "mcp.request.logs".into();
    let data = event["data"].as_object_mut().unwrap();
    data.retain(|name, _| {
        ["installation_id", "team_id", "user_id", "process_id", "server_slug"].contains(&name.as_str())
    });
    data.insert("requests".to_owned(), calls.iter().map(request).collect());
    event
}

async fn report(backend: &TestBackend, satellite: &Satellite, events: &[Value]) {
    let key = events[0]["seq"].to_string();
    backend.send(satellite, &key, events).await.is(200, MessageSchema::EventBatchResult);
}

#[tokio::test]
async fn nobody_reads_a_page_without_the_admin_token() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    report(&backend, &satellite, &[status(1, INSTANCE, "online")]).await;
    let nobody = ConsoleBrowser::new(&backend);
    for path in ["", "instances", "instances/first-satellite:x", "events", "calls", "fleet", "fleet/first-satellite"] {
        let answer = nobody.get(&format!("/console/{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 303, "{path}");
        let login = if path.is_empty() {
            "login".to_owned()
        } else {
            format!("login?next={}", path.replace('/', "%2F").replace(':', "%3A"))
        };
        assert!(answer.headers()[LOCATION].to_str().unwrap().ends_with(&login));
        assert!(!answer.text().await.unwrap().contains("first-satellite"));
    }
    for path in ["fleet", "calls", "instances/stream", "events/stream"] {
        let answer = nobody.get(&format!("/v1/{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 401, "{path}");
        let answer = nobody.get(&format!("/v1/{path}")).bearer_auth(&satellite.key).send().await.unwrap();
        assert_eq!(answer.status(), 401, "{path}");
    }
    assert!(nobody.page("login").await.contains("admin-token"));
    let token = backend.file("admin-token");
    assert_eq!(nobody.log_in(&satellite.key, backend.url()).await.status(), 401);
    assert_eq!(nobody.log_in(&token, "http://elsewhere.example.com").await.status(), 403);
    let browser = ConsoleBrowser::logged_in(&backend).await;
    assert!(browser.page("fleet").await.contains("first-satellite"));
    // A script uses the token itself.
    let fleet = nobody.get("/v1/fleet").bearer_auth(&token).send().await.unwrap();
    assert_eq!(fleet.status(), 200);
    let fleet: Value = fleet.json().await.unwrap();
    assert_eq!(fleet["satellites"][0]["instances"], json!({"online": 1}));
    assert_eq!(fleet["satellites"][0]["details"]["config_is_current"], Value::Null);
}

#[tokio::test]
async fn a_host_that_was_not_given_is_refused() {
    let backend = TestBackend::new().await;
    let browser = ConsoleBrowser::logged_in(&backend).await;
    for (host, allowed) in [("fleet.example.com", true), ("rebound.example.com", false), ("localhost:1", true)] {
        let answer = browser.get("/console/login").header(HOST, host).send().await.unwrap();
        assert_eq!(answer.status(), if allowed { 200 } else { 403 }, "{host}");
    }
    let answer = browser.get("/console/login").header(ORIGIN, "https://rebound.example.com").send().await.unwrap();
    assert_eq!(answer.status(), 403);
    assert!(answer.text().await.unwrap().contains("--console-host"));
    // Satellites are not browsers: their requests are not checked.
    let health = browser.get("/health").header(HOST, "rebound.example.com").send().await.unwrap();
    assert_eq!(health.status(), 200);
}

#[tokio::test]
async fn the_pages_show_what_satellites_report() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    backend.put_empty_config().await;
    // Both have an instance of the same name.
    report(&backend, &one, &[status(1, INSTANCE, "online")]).await;
    report(&backend, &other, &[status(1, INSTANCE, "permanently_failed"), status(2, "web-acme-bob-x", "online")]).await;
    backend.send_heartbeat(&other, &heartbeat(backend.now())).await.is(200, MessageSchema::EmptyResponse);
    let browser = ConsoleBrowser::logged_in(&backend).await;
    let overview = browser.page_with("", "second-satellite:web-acme-bob-x").await;
    for text in [format!("first-satellite:{INSTANCE}"), format!("second-satellite:{INSTANCE}")] {
        assert!(overview.contains(&text), "{overview}");
    }
    for missing in ["href=\"tree\"", "href=\"clients\""] {
        assert!(!overview.contains(missing), "{missing}");
    }
    let table = browser.page("instances?status=online").await;
    assert!(table.contains("web-acme-bob-x") && !table.contains(&format!("second-satellite:{INSTANCE}")));
    assert!(!table.contains("Restarts"), "a backend does not know them");
    let first = browser.page("instances?limit=1&sort=status").await;
    let next = first.split("href=\"instances?").nth(1).unwrap().split('"').next().unwrap().replace("&amp;", "&");
    let second = browser.page(&format!("instances?{next}&limit=1")).await;
    assert_ne!(first.split("<tbody").nth(1).unwrap(), second.split("<tbody").nth(1).unwrap());
    let instance = browser.page(&format!("instances/second-satellite%3A{INSTANCE}")).await;
    for text in ["permanently failed", "fleet/second-satellite", "server.status_changed", "No command was queued"] {
        assert!(instance.contains(text), "{text}: {instance}");
    }
    assert!(!instance.contains("web-acme-bob-x"), "events of another instance");
    let fleet = browser.page("fleet").await;
    for text in ["2 satellites, 2 connected", "0.2.0", "not current", "x86_64"] {
        assert!(fleet.contains(text), "{text}: {fleet}");
    }
    let satellite = browser.page("fleet/second-satellite").await;
    assert!(satellite.contains("12 %") && satellite.contains("Events to send"), "{satellite}");
    assert_eq!(browser.get("/console/fleet/nobody").send().await.unwrap().status(), 404);
    assert_eq!(browser.get("/console/instances/nobody").send().await.unwrap().status(), 404);

    // Events: all, of a satellite, of a type, of an instance, by pages.
    let events = browser.page("events").await;
    assert_eq!(events.matches("<li data-seq").count(), 3, "{events}");
    let of_one = browser.page("events?satellite=first-satellite").await;
    assert_eq!(of_one.matches("<li data-seq").count(), 1);
    let of_instance = browser.page("events?instance=second-satellite%3Aweb-acme-bob-x").await;
    assert_eq!(of_instance.matches("<li data-seq").count(), 1);
    let none = browser.page("events?types=mcp.server.crashed").await;
    assert!(none.matches("<li data-seq").count() == 0 && none.contains("No stored event matches."), "{none}");
    let none = browser.page("events?satellite=&types=&instance=second-satellite%3Ano-such").await;
    assert!(none.contains("No event of this instance is stored."), "{none}");
    let before = browser.page("events?before=3").await;
    assert_eq!(before.matches("<li data-seq").count(), 2);
    let lines = browser.get("/v1/events/stream?since=1").send().await.unwrap().text().await.unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = lines.iter().map(|event| json!([event["seq"], event["data"]["process_id"]])).collect();
    assert_eq!(
        seen,
        [json!([2, format!("second-satellite:{INSTANCE}")]), json!([3, "second-satellite:web-acme-bob-x"])]
    );
    assert_eq!(lines[0]["data"]["satellite"], "second-satellite");
}

#[tokio::test]
async fn the_page_of_calls_shows_those_that_satellites_have_delivered() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    report(&backend, &one, &[requests(1, INSTANCE, &[("read", true), ("write", false)])]).await;
    report(&backend, &one, &[status(2, INSTANCE, "online")]).await;
    report(&backend, &other, &[requests(1, INSTANCE, &[("search", true)])]).await;
    let browser = ConsoleBrowser::logged_in(&backend).await;
    let page = browser.page("calls").await;
    for text in ["argument of write", "argument of search", "failed: no time left", "my-editor", "data-through=\"3\""] {
        assert!(page.contains(text), "{text}: {page}");
    }
    assert!(page.contains(&format!("instances/second-satellite%3A{INSTANCE}")), "{page}");
    assert!(
        !page.contains("Repeat and compare") && page.contains("repeated at the console of its satellite"),
        "{page}"
    );
    assert!(browser.page("").await.contains("href=\"calls\""));

    let api = async |query: &str| browser.get(&format!("/v1/calls{query}")).send().await.unwrap();
    let tools = async |query: &str| {
        let calls: Value = api(query).await.json().await.unwrap();
        let calls = calls["calls"].as_array().unwrap().clone();
        calls.iter().map(|call| call["tool_name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(tools("").await, ["search", "write", "read"], "the newest is first");
    for (query, expected) in [
        ("?satellite=first-satellite", vec!["write", "read"]),
        ("?success=false&client=my-editor", vec!["write"]),
        ("?fate=timed_out", vec!["write"]),
        ("?tool=search", vec!["search"]),
        ("?team=team_acme&user=user_alice&limit=2", vec!["search", "write"]),
        ("?team=nobody", vec![]),
        ("?since=2026-11-21T06:33:01Z", vec![]),
    ] {
        assert_eq!(tools(query).await, expected, "{query}");
    }
    assert_eq!(tools(&format!("?instance=second-satellite:{INSTANCE}")).await, ["search"]);
    for (query, status) in [("?limit=0", 400), ("?cursor=x", 400), ("?what=1", 400), ("?satellite=nobody", 404)] {
        assert_eq!(api(query).await.status(), status, "{query}");
    }
    // Pages contain each call once, also if an event has several calls.
    let (mut seen, mut path) = (Vec::new(), "?limit=1".to_owned());
    loop {
        let page: Value = api(&path).await.json().await.unwrap();
        seen.extend(page["calls"].as_array().unwrap().iter().map(|call| call["tool_name"].clone()));
        let Some(next) = page["next"].as_str() else { break };
        path = format!("?limit=1&cursor={next}");
    }
    assert_eq!(seen, ["search", "write", "read"]);
    // The form sends its empty fields too.
    let failed = browser.page("calls?satellite=first-satellite&tool=&success=false&team=").await;
    assert!(failed.contains("argument of write") && !failed.contains("argument of read"), "{failed}");
}

#[tokio::test]
async fn a_satellite_that_is_silent_makes_its_instances_offline() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    report(&backend, &one, &[status(1, INSTANCE, "online")]).await;
    report(&backend, &other, &[status(1, INSTANCE, "online")]).await;
    let browser = ConsoleBrowser::logged_in(&backend).await;
    let path = format!("instances/first-satellite%3A{INSTANCE}");
    browser.page_with(&path, "<span class=\"status online\">").await;
    backend.advance_clock(SignedDuration::from_secs(91));
    backend.poll(&other).await;
    let page = browser.page_with(&path, "<span class=\"status offline\">").await;
    assert!(page.contains("not connected; last reported: online"), "{page}");
    let table = browser.page("instances?status=online").await;
    assert!(table.contains("second-satellite:") && !table.contains("first-satellite:"), "{table}");
    assert!(browser.page("").await.contains("The satellite first-satellite is not connected"));
    assert!(browser.page("fleet").await.contains("2 satellites, 1 connected"));
    assert!(!browser.page("").await.contains(">logs<"), "a backend has no output");
    backend.poll(&one).await;
    browser.page_with(&path, "<span class=\"status online\">").await;
}

#[tokio::test]
async fn a_button_queues_a_command_for_one_instance_and_shows_its_result() {
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    report(&backend, &satellite, &[status(1, INSTANCE, "online")]).await;
    let browser = ConsoleBrowser::logged_in(&backend).await;
    let (name, own) = (format!("first-satellite%3A{INSTANCE}"), backend.url().to_owned());
    browser.page_with("instances", INSTANCE).await;
    let token = browser.csrf_token().await;
    let path = format!("instances/{name}/restart");
    for (csrf_token, origin) in [(None, own.as_str()), (Some("0000"), &own), (Some(&*token), "http://localhost:1")] {
        assert_eq!(browser.change(&path, csrf_token, origin).await.status(), 403, "{csrf_token:?} {origin}");
    }
    assert!(backend.pending_commands(&satellite).await.is_empty());
    let answer = browser.change(&path, Some(&token), &own).await;
    assert_eq!(answer.status(), 200);
    let queued: Value = answer.json().await.unwrap();
    assert_eq!((&queued["status"], &queued["satellite"]), (&json!("queued"), &json!("first-satellite")));
    let polled = backend.poll(&satellite).await;
    let command = &polled["commands"][0];
    assert_eq!(command["command_type"], "restart");
    let target = json!({"installation_id": "abc123", "team_id": "team_acme", "user_id": "user_alice"});
    assert_eq!((&command["payload"], &command["priority"]), (&target, &json!("immediate")));
    assert!(command["expires_at"].is_string(), "a forgotten command must not be executed hours later");
    let page = browser.page(&format!("instances/{name}")).await;
    assert!(page.contains("sent to the satellite"), "{page}");
    let id = queued["id"].as_str().unwrap();
    backend.result(&satellite, id, "completed").await.is(200, MessageSchema::EmptyResponse);
    let page = browser.page(&format!("instances/{name}")).await;
    assert!(page.contains("completed") && page.contains("after 5 ms"), "{page}");
    for (action, kind) in [("stop", "kill"), ("start", "spawn")] {
        let answer = browser.change(&format!("instances/{name}/{action}"), Some(&token), &own).await;
        assert_eq!(answer.status(), 200);
        let polled = backend.poll(&satellite).await;
        let kinds: Vec<_> = polled["commands"].as_array().unwrap().iter().map(|one| &one["command_type"]).collect();
        assert!(kinds.contains(&&json!(kind)), "{kinds:?}");
    }
    assert_eq!(browser.change("instances/nobody/stop", Some(&token), &own).await.status(), 404);
}

#[tokio::test]
async fn a_stream_continues_with_the_changes_of_all_satellites() {
    let backend = TestBackend::new().await;
    let (one, other) = (backend.satellite("first-satellite").await, backend.satellite("second-satellite").await);
    report(&backend, &one, &[status(1, INSTANCE, "online")]).await;
    let browser = ConsoleBrowser::logged_in(&backend).await;
    browser.page_with("instances", INSTANCE).await;
    let answer = browser.get("/v1/instances/stream?events=true&since=0").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut chunks = answer.bytes_stream();
    let mut text = String::new();
    let mut wait_for = async |wanted: &str| {
        while !text.contains(wanted) {
            let chunk = timeout(GIVE_UP, chunks.next()).await.unwrap().unwrap().unwrap();
            text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        std::mem::take(&mut text)
    };
    let begin = wait_for("event: tick").await;
    assert!(begin.contains("event: reset") && begin.contains(&format!("first-satellite:{INSTANCE}")), "{begin}");
    report(&backend, &other, &[status(1, INSTANCE, "error")]).await;
    wait_for(&format!("\"set\":[[\"second-satellite:{INSTANCE}\"")).await;
    backend
        .admin(reqwest::Method::DELETE, "satellites/first-satellite")
        .send()
        .await
        .is(200, MessageSchema::EmptyResponse);
    wait_for(&format!("\"gone\":[\"first-satellite:{INSTANCE}\"]")).await;
    report(&backend, &other, &[status(2, INSTANCE, "online")]).await;
    // One of many tabs fetches what is new instead.
    let fetched = browser.get("/v1/instances/stream?once=true&events=true&since=2").send().await.unwrap();
    let fetched = fetched.text().await.unwrap();
    for part in ["event: reset", "event: tick", "\"seq\":3"] {
        assert!(fetched.contains(part), "{part}: {fetched}");
    }
    assert!(!fetched.contains("\"seq\":2"), "{fetched}");
    let events = wait_for("\"seq\":3").await;
    assert!(events.contains("mcp.server.status_changed") && events.contains("\"satellite\":\"second-satellite\""));
}

#[tokio::test]
async fn hostile_text_of_satellites_is_shown_as_text() {
    const EVIL: &str = "</script><script>alert(1)</script>\u{1b}[31m\u{202e}";
    let backend = TestBackend::new().await;
    let satellite = backend.satellite("first-satellite").await;
    let mut evil = status(1, EVIL, "error");
    evil["data"]["team_id"] = EVIL.into();
    evil["data"]["user_id"] = EVIL.into();
    evil["data"]["server_slug"] = EVIL.into();
    evil["data"]["status_message"] = format!("{EVIL}{}", "x".repeat(1_000_000)).into();
    let long = status(2, &format!("{EVIL}{}", "n".repeat(1_000_000)), "online");
    let called = requests(3, EVIL, &[(EVIL, true)]);
    report(&backend, &satellite, &[evil, long, called]).await;
    let mut beat = heartbeat(backend.now());
    beat["version"] = EVIL.into();
    beat["counts"] = json!({EVIL: 1});
    backend.send_heartbeat(&satellite, &beat).await.is(200, MessageSchema::EmptyResponse);
    let browser = ConsoleBrowser::logged_in(&backend).await;
    browser.page_with("", "first-satellite:").await;
    let table = browser.page("instances?status=error").await;
    let instance = table.split("href=\"instances/first-satellite").nth(1).unwrap().split('"').next().unwrap();
    let instance = format!("instances/first-satellite{instance}");
    for path in ["", "instances", "events", "calls", "fleet", "fleet/first-satellite", &instance] {
        let page = browser.page(path).await;
        assert!(page.contains("alert(1)"), "{path} does not show it");
        assert!(!page.contains("<script>alert"), "{path}");
        assert!(!page.contains('\u{1b}') && !page.contains("\u{202e}"), "{path}: control characters");
        assert!(page.len() < 200_000, "{path}: {} bytes", page.len());
    }
}
