//! Rejected clients and invalid requests: the responses, and that they reveal nothing else.

use serde_json::{Value, json};

use super::client::{Answer, Client, initialize, notification, request};
use super::fake::{FakeEndpoint, HandlerEvent};

/// Method, headers, body; status, id.
type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str, u16, Value);

async fn endpoint_with_session() -> (FakeEndpoint, Client) {
    let endpoint = FakeEndpoint::new(|_| {});
    let client = Client::initialized(endpoint.address, "2025-11-25").await;
    (endpoint, client)
}

/// Everything in a response that a client can observe.
fn visible(answer: &Answer) -> (u16, Vec<(String, String)>, String) {
    let headers = answer.head.headers.iter().filter(|(name, _)| name != "date").cloned().collect();
    (answer.head.status, headers, answer.body.clone())
}

#[tokio::test]
async fn requests_of_a_session_are_answered_with_their_ids() {
    let (mut endpoint, mut client) = endpoint_with_session().await;
    for id in [json!(1), json!("x"), json!(-7)] {
        let answer = client.post(&request(id.clone(), "echo", json!({"a": [1, null]}))).await;
        assert_eq!(answer.head.status, 200);
        assert_eq!(answer.head.header("content-type"), Some("application/json"));
        assert_eq!(answer.json(), json!({"jsonrpc": "2.0", "id": id, "result": {"a": [1, null]}}));
    }
    let answer = client.post(&notification("notifications/initialized", json!({}))).await;
    assert_eq!((answer.head.status, answer.body.as_str()), (202, ""));
    endpoint.wait_for(HandlerEvent::Notification("notifications/initialized".into())).await;
    let answer = client.ask("DELETE", &[], "").await;
    assert_eq!(answer.head.status, 204);
    endpoint.wait_for(HandlerEvent::SessionEnded("closed")).await;
    assert_eq!(client.post(&request(2, "echo", json!(0))).await.head.status, 404);
    let kinds: Vec<_> = std::iter::from_fn(|| endpoint.events.try_recv().ok()).map(|event| event.kind()).collect();
    assert_eq!(kinds, ["mcp.client.connected", "mcp.client.disconnected"]);
}

#[tokio::test]
async fn responses_without_a_token_reveal_no_names() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    client.token = None;
    let mut seen = Vec::new();
    for path in ["/mcp", "/i/alices/mcp", "/i/nothing/mcp"] {
        client.path = path.to_owned();
        let answer = client.post(&initialize("2025-11-25")).await;
        // No authorization server is configured, so the challenge names no metadata.
        assert_eq!(answer.head.header("www-authenticate"), Some("Bearer"));
        assert_eq!(answer.head.status, 401);
        seen.push(answer.body);
    }
    assert!(seen.iter().all(|body| *body == seen[0]));
    client.path = "/i/nothing/mcp".to_owned();
    client.token = Some("wrong".to_owned());
    let answer = client.post(&initialize("2025-11-25")).await;
    assert_eq!(answer.head.status, 401);
    assert_eq!(answer.head.header("www-authenticate"), Some(r#"Bearer error="invalid_token""#));
    client.path = "/.well-known/oauth-protected-resource/i/nothing/mcp".to_owned();
    let answer = client.ask("GET", &[], "").await;
    assert_eq!(answer.head.status, 404);
}

#[tokio::test]
async fn a_stolen_session_id_is_useless_to_another_user_or_path() {
    let (endpoint, mut alice) = endpoint_with_session().await;
    let session = alice.session.clone().unwrap();
    let mut never = Client::connect(endpoint.address).await;
    never.session = Some("0".repeat(48));
    let echo = request(1, "echo", json!("x")).to_string();
    let nothing = never.ask("POST", &[], &echo).await;
    assert_eq!(nothing.head.status, 404);
    let instance = |name: &str| format!("/i/{name}/mcp");
    for (token, path, session) in [
        ("bob-token", "/mcp".to_owned(), session.clone()),
        ("alice-token", "/mcp?mode=flat".to_owned(), session.clone()),
        ("alice-token", instance("alices"), session.clone()),
        ("alice-token", instance("shared"), session.clone()),
        ("bob-token", instance("shared"), session.clone()),
        ("alice-token", "/mcp".to_owned(), session[..16].to_owned()),
        ("alice-token", "/mcp".to_owned(), format!("{}{}", &session[..16], "0".repeat(32))),
    ] {
        for (method, body) in [("POST", echo.as_str()), ("GET", ""), ("DELETE", "")] {
            let mut attacker = Client::connect(endpoint.address).await;
            (attacker.token, attacker.path, attacker.session) =
                (Some(token.to_owned()), path.clone(), Some(session.clone()));
            let answer = attacker.ask(method, &[], body).await;
            assert_eq!(answer.head.status, 404, "{method} {path}");
            if method == "POST" {
                assert_eq!(visible(&answer), visible(&nothing), "{path}");
            }
        }
    }
    let mut at_instance = Client::connect(endpoint.address).await;
    at_instance.path = instance("alices");
    at_instance.open_session("2025-11-25").await;
    for path in [instance("shared"), instance("nothing"), "/mcp".to_owned()] {
        at_instance.path = path;
        let answer = at_instance.ask("POST", &[], &echo).await;
        assert_eq!(visible(&answer), visible(&nothing), "{}", at_instance.path);
    }
    // Another token of the same user works.
    alice.token = Some("alice-other-token".to_owned());
    assert_eq!(alice.ask("POST", &[], &echo).await.head.status, 200);
}

#[tokio::test]
async fn the_instance_of_another_user_looks_nonexistent() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    let mut answers = Vec::new();
    for name in ["bobs", "nothing"] {
        client.path = format!("/i/{name}/mcp");
        answers.push(visible(&client.post(&initialize("2025-11-25")).await));
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0].0, 404);
    client.path = "/i/alices/mcp".to_owned();
    assert_eq!(client.post(&initialize("2025-11-25")).await.head.status, 200);
}

#[tokio::test]
async fn a_foreign_host_or_origin_gets_403() {
    let (endpoint, mut client) = endpoint_with_session().await;
    let echo = request(1, "echo", json!("x")).to_string();
    for (headers, status) in [
        (&[("host", "evil.example.com")][..], 403),
        (&[("host", "localhost"), ("host", "localhost")], 400),
        (&[("origin", "http://evil.example.com")], 403),
        (&[("origin", "null")], 403),
        (&[("origin", "http://localhost:6274")], 200),
        (&[("host", "127.0.0.1:1")], 200),
    ] {
        let answer = client.ask("POST", headers, &echo).await;
        // Either hyper or the endpoint rejects two Host headers.
        assert!(
            answer.head.status == status || (status == 400 && answer.head.status == 403),
            "{headers:?}: {answer:?}"
        );
        client = client.second_connection().await;
    }
    drop(endpoint);
}

#[tokio::test]
async fn a_host_in_the_request_line_is_checked_like_the_host_header() {
    let (endpoint, mut client) = endpoint_with_session().await;
    let echo = request(1, "echo", json!("x")).to_string();
    let path = client.path.clone();
    for (target, status) in [
        ("http://evil.example.com", 403),
        ("http://user@localhost", 403),
        ("http://localhost", 200),
        ("http://127.0.0.1:1", 200),
    ] {
        client.path = format!("{target}{path}");
        let answer = client.ask("POST", &[], &echo).await;
        assert_eq!(answer.head.status, status, "{target}: {answer:?}");
        client = client.second_connection().await;
    }
    drop(endpoint);
}

#[tokio::test]
async fn an_invalid_request_gets_its_status_and_id() {
    let (_stage, mut client) = endpoint_with_session().await;
    let echo = request(7, "echo", json!("x")).to_string();
    let table: &[Case<'_>] = &[
        ("POST", &[("mcp-session-id", "")], &echo, 400, json!(7)),
        ("POST", &[("mcp-protocol-version", "1999-01-01")], &echo, 400, json!(7)),
        ("POST", &[("mcp-protocol-version", "2025-06-18")], &echo, 200, json!(7)),
        ("POST", &[("content-type", "text/plain")], &echo, 415, Value::Null),
        ("POST", &[("content-type", "application/json; charset=utf-8")], &echo, 200, json!(7)),
        ("POST", &[("content-type", "application/json; charset=\"UTF-8\"; x=1")], &echo, 200, json!(7)),
        ("POST", &[("content-type", "application/json; charset=utf-16")], &echo, 415, Value::Null),
        ("POST", &[("content-type", "application/json; Charset=iso-8859-1")], &echo, 415, Value::Null),
        ("POST", &[("content-encoding", "identity")], &echo, 200, json!(7)),
        ("POST", &[("content-encoding", "gzip")], &echo, 415, Value::Null),
        ("POST", &[("content-encoding", "identity, br")], &echo, 415, Value::Null),
        ("POST", &[("accept", "text/html")], &echo, 406, Value::Null),
        ("POST", &[("accept", "")], &echo, 200, json!(7)),
        ("POST", &[("accept", "application/json")], &echo, 200, json!(7)),
        ("POST", &[], "{", 400, Value::Null),
        ("POST", &[], "{}", 400, Value::Null),
        ("POST", &[], "[]", 400, Value::Null),
        ("PUT", &[], &echo, 405, Value::Null),
        ("GET", &[("accept", "application/json")], "", 406, Value::Null),
        ("GET", &[("last-event-id", "9-1")], "", 405, Value::Null),
        ("GET", &[("last-event-id", "x")], "", 405, Value::Null),
    ];
    for (method, headers, body, status, id) in table {
        let mut client = client.second_connection().await;
        let answer = client.ask(method, headers, body).await;
        assert_eq!(
            (answer.head.status, &answer.json()["id"]),
            (*status, id),
            "{method} {headers:?} {body}: {answer:?}"
        );
        assert_eq!(answer.json()["jsonrpc"], "2.0");
        assert_eq!(answer.head.header("allow").is_some(), *status == 405);
    }
    let code = async |body: &str| {
        client.second_connection().await.ask("POST", &[], body).await.json()["error"]["code"].clone()
    };
    assert_eq!((code("{").await, code("{}").await), (json!(-32700), json!(-32600)));
    client.path = "/elsewhere".to_owned();
    assert_eq!(client.post(&json!(1)).await.head.status, 404);
}

#[tokio::test]
async fn server_discover_without_metadata_gets_invalid_params() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    let answer = client.post(&request("d", "server/discover", json!({}))).await;
    assert_eq!(
        (answer.head.status, &answer.json()["error"]["code"], &answer.json()["id"]),
        (400, &json!(-32602), &json!("d"))
    );
}

#[tokio::test]
async fn a_body_over_the_limit_gets_413() {
    let endpoint = FakeEndpoint::new(|settings| settings.limits.body_max = 1000);
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.send("POST", &[("content-length", "1001")], "x").await;
    assert_eq!(client.head().await.status, 413);
    let mut client = client.second_connection().await;
    client.send("POST", &[("transfer-encoding", "chunked"), ("content-type", "application/json")], "").await;
    client.send_raw(format!("1f4\r\n{0}\r\n1f5\r\n{0} \r\n", " ".repeat(500)).as_bytes()).await;
    assert_eq!(client.head().await.status, 413);
}

#[tokio::test]
async fn a_session_over_the_limit_of_its_user_evicts_the_idlest() {
    let mut endpoint = FakeEndpoint::new(|settings| settings.limits.sessions_per_user_max = 2);
    let mut first = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut second = Client::initialized(endpoint.address, "2025-11-25").await;
    let _third = Client::initialized(endpoint.address, "2025-11-25").await;
    endpoint.wait_for(HandlerEvent::SessionEnded("evicted")).await;
    assert_eq!(first.post(&request(1, "echo", json!(1))).await.head.status, 404);
    assert_eq!(second.post(&request(1, "echo", json!(1))).await.head.status, 200);
    assert_eq!(endpoint.gateway.session_count(), 2);
}

#[tokio::test]
async fn an_unavailable_server_gives_no_session() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    let answer = client.post(&initialize("away")).await;
    assert_eq!((answer.head.status, &answer.json()["error"]["code"]), (200, &json!(-32000)));
    assert_eq!(answer.head.header("mcp-session-id"), None);
    assert_eq!(endpoint.gateway.session_count(), 0);
}
