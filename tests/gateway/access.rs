//! Authentication and limits over HTTP: the discovery of the authorization server, and responses to users over a
//! limit.

use mcp_satellite::config::{EndpointAuth, GatewayLimits, GatewayPlan};
use serde_json::{Value, json};

use super::client::{Answer, Client, initialize, notification, request};
use super::fake::{FakeEndpoint, HandlerEvent, plan};

const METADATA: &str = "/.well-known/oauth-protected-resource";

fn parameter<'a>(challenge: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = challenge.split_once(&format!("{name}=\""))?;
    rest.split('"').next()
}

#[tokio::test]
async fn a_401_response_points_to_the_resource_metadata() {
    let endpoint =
        FakeEndpoint::new(|settings| settings.authorization_servers = vec!["https://login.example.com".to_owned()]);
    let mut client = Client::connect(endpoint.address).await;
    for (token, error) in [(None, None), (Some("wrong"), Some("invalid_token"))] {
        for path in ["/mcp", "/i/alices/mcp", "/i/nothing/mcp"] {
            (client.path, client.token) = (path.to_owned(), token.map(str::to_owned));
            for method in ["POST", "GET", "DELETE"] {
                let answer = client.ask(method, &[], if method == "POST" { "{}" } else { "" }).await;
                assert_eq!(answer.head.status, 401, "{method} {path}");
                let challenge = answer.head.header("www-authenticate").unwrap();
                assert!(challenge.starts_with("Bearer "), "{challenge}");
                assert_eq!(parameter(challenge, "error"), error, "{challenge}");
                // A client without prior knowledge follows the URL of the challenge.
                let url = parameter(challenge, "resource_metadata").unwrap();
                assert_eq!(url, format!("http://localhost{METADATA}{path}"));
                let mut follower = Client::connect(endpoint.address).await;
                (follower.token, follower.path) = (None, url["http://localhost".len()..].to_owned());
                let answer = follower.ask("GET", &[], "").await;
                assert_eq!(answer.head.header("content-type"), Some("application/json"));
                let expected = json!({
                    "resource": format!("http://localhost{path}"),
                    "bearer_methods_supported": ["header"],
                    "resource_name": "test",
                    "authorization_servers": ["https://login.example.com"],
                });
                assert_eq!((answer.head.status, answer.json()), (200, expected));
            }
        }
    }
}

#[tokio::test]
async fn resource_metadata_contains_the_public_url() {
    let endpoint = FakeEndpoint::new(|settings| {
        settings.public_url = Some("https://mcp.example.com/base".to_owned());
        settings.authorization_servers = vec!["https://login.example.com".to_owned()];
    });
    let mut client = Client::connect(endpoint.address).await;
    client.token = None;
    let challenge = client.post(&initialize("2025-11-25")).await.head;
    let url = parameter(challenge.header("www-authenticate").unwrap(), "resource_metadata").unwrap().to_owned();
    assert_eq!(url, format!("https://mcp.example.com{METADATA}/base/mcp"));
    // With the prefix `/base`, and without it as forwarded by a proxy that removes it.
    for path in ["/base/mcp", "/mcp"] {
        client.path = format!("{METADATA}{path}");
        let document = client.ask("GET", &[], "").await.json();
        assert_eq!(document["resource"], "https://mcp.example.com/base/mcp", "{path}");
    }
    client.path = format!("{METADATA}/based/mcp");
    let document = client.ask("GET", &[], "").await.json();
    assert_eq!(document["resource"], "https://mcp.example.com/base/based/mcp");
    client.path = METADATA.to_owned();
    let document = client.ask("GET", &[], "").await.json();
    assert_eq!(document["resource"], "https://mcp.example.com/base");
    assert_eq!(document["authorization_servers"], json!(["https://login.example.com"]));
    let answer = client.ask("POST", &[], "{}").await;
    assert_eq!((answer.head.status, answer.head.header("allow")), (405, Some("GET")));
    client.path = format!("{METADATA}x");
    assert_eq!(client.ask("GET", &[], "").await.head.status, 404);
}

#[tokio::test]
async fn a_token_is_accepted_only_in_one_authorization_header() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    client.token = None;
    let echo = request(7, "echo", json!("x")).to_string();
    for (headers, status) in [
        (&[("authorization", "Bearer alice-token")][..], 200),
        (&[("authorization", "bearer alice-other-token")], 200),
        (&[("authorization", "Bearer alice-token"), ("authorization", "Bearer alice-token")], 401),
        (&[("authorization", "Bearer alice-token"), ("authorization", "Bearer bob-token")], 401),
        (&[("authorization", "Basic alice-token")], 401),
        (&[("authorization", "Bearer")], 401),
        (&[("authorization", "alice-token")], 401),
        (&[("cookie", "token=alice-token")], 401),
        (&[("x-api-key", "alice-token")], 401),
    ] {
        assert_eq!(client.ask("POST", headers, &echo).await.head.status, status, "{headers:?}");
    }
    // URLs end up in logs: a token in the query is rejected even beside a valid header, and is not echoed.
    for header in [&[][..], &[("authorization", "Bearer alice-token")]] {
        client.path = "/mcp?mode=tools&access_token=alice-token".to_owned();
        let answer = client.ask("POST", header, &echo).await;
        assert_eq!(answer.head.status, 400);
        assert!(answer.body.contains("header") && !answer.body.contains("alice-token"), "{answer:?}");
    }
}

#[tokio::test]
async fn many_wrong_tokens_get_429_and_a_valid_token_still_works() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    client.token = Some("wrong".to_owned());
    let mut answer = client.ask("GET", &[], "").await;
    while answer.head.status == 401 {
        answer = client.ask("GET", &[], "").await;
    }
    assert_eq!((answer.head.status, answer.head.header("retry-after")), (429, Some("1")));
    assert_eq!(answer.json()["error"]["message"], "too many requests with a wrong token; wait a moment");
    assert_eq!(Client::initialized(endpoint.address, "2025-11-25").await.echo().await, 200);
}

#[tokio::test]
async fn a_401_is_sent_before_the_body_and_the_connection_stays_usable() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    client.token = None;
    let mut other = Client::initialized(endpoint.address, "2025-11-25").await;
    let message = initialize("2025-11-25").to_string();
    client.send("POST", &[("content-length", &message.len().to_string())], &message[..1]).await;
    // The response to another client proves that the head has been read.
    assert_eq!(other.echo().await, 200);
    client.send_raw(&message.as_bytes()[1..]).await;
    let head = client.head().await;
    assert_eq!(head.status, 401);
    client.body(&head).await;
    client.token = Some("alice-token".to_owned());
    client.open_session("2025-11-25").await;
    // The endpoint does not wait for a body that never arrives.
    client.token = None;
    client.send("POST", &[("content-length", "1000")], "{").await;
    assert_eq!(client.head().await.status, 401);
}

fn limited(limits: GatewayLimits) -> FakeEndpoint {
    FakeEndpoint::with(GatewayPlan { limits, ..plan() }, |_| {})
}

#[tokio::test]
async fn a_user_over_the_request_rate_gets_429_with_retry_after() {
    // A burst of two, then one per second.
    let endpoint = limited(GatewayLimits { requests_per_second: 1, burst: 2, ..GatewayLimits::default() });
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut refused = client.post(&request(7, "echo", json!("x"))).await;
    while refused.head.status == 200 {
        refused = client.post(&request(7, "echo", json!("x"))).await;
    }
    assert_eq!((refused.head.status, refused.head.header("retry-after")), (429, Some("1")));
    let error = &refused.json()["error"];
    assert_eq!(
        (&refused.json()["id"], &error["data"]["kind"], &error["data"]["limit"]),
        (&json!(7), &json!("rate_limited"), &json!(1))
    );
    assert!(error["data"]["retry_after_ms"].as_u64().is_some_and(|ms| ms <= 1000), "{error}");
    let message = error["message"].as_str().unwrap();
    let pause = message.strip_prefix("this user sends more than 1 requests per second; retry in ").unwrap();
    // A pause of nearly a second is rounded to one.
    assert!(pause.starts_with("0.") || pause == "1.000 s", "{message}");
    // The limit is per user: it covers Alice's other sessions, tokens and methods, but not Bob.
    let mut other = client.second_connection().await;
    other.token = Some("alice-other-token".to_owned());
    let statuses = [other.post(&initialize("2025-11-25")).await, other.ask("GET", &[], "").await];
    assert!(statuses.iter().any(|answer| answer.head.status == 429), "{statuses:?}");
    let mut bob = client.second_connection().await;
    (bob.token, bob.session) = (Some("bob-token".to_owned()), None);
    bob.open_session("2025-11-25").await;
}

#[tokio::test]
async fn every_batch_message_counts_but_responses_and_cancellations_always_pass() {
    let mut endpoint = limited(GatewayLimits { requests_per_second: 1, burst: 10, ..GatewayLimits::default() });
    let mut client = Client::initialized(endpoint.address, "2025-03-26").await;
    let result = json!({"jsonrpc": "2.0", "id": 1, "result": {}});
    let error = json!({"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "x"}});
    let cancelled = notification("notifications/cancelled", json!({"requestId": 77}));
    let mut batch = vec![result.clone(), error.clone(), cancelled.clone()];
    batch.extend((0..90).map(|id| request(id, "echo", json!("x"))));
    let refused = client.post(&Value::Array(batch)).await;
    assert_eq!((refused.head.status, &refused.json()["error"]["data"]["kind"]), (429, &json!("rate_limited")));
    // Only responses and cancellations of the rejected batch are delivered.
    endpoint.wait_for(HandlerEvent::Notification("notifications/cancelled".into())).await;
    assert!(endpoint.seen.try_recv().is_err());
    let notifications = vec![notification("n", json!({})); 90];
    assert_eq!(client.post(&Value::Array(notifications)).await.head.status, 429);
    for _ in 0..5 {
        for exempt in [&result, &error, &cancelled, &json!([result, error, cancelled])] {
            assert_eq!(client.post(exempt).await.head.status, 202, "{exempt}");
        }
    }
}

#[tokio::test]
async fn a_batch_has_at_most_100_messages_and_opens_no_session() {
    let endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::initialized(endpoint.address, "2025-03-26").await;
    let echoes = |count: usize| (0..count).map(|id| request(id, "echo", json!("x"))).collect::<Value>();
    let answer = client.post(&echoes(100)).await;
    assert_eq!((answer.head.status, answer.json().as_array().map(Vec::len)), (200, Some(100)));
    let answer = client.post(&echoes(101)).await;
    let refused = |answer: &Answer| (answer.head.status, answer.json()["error"]["code"].clone());
    assert_eq!(refused(&answer), (400, json!(-32600)));
    assert!(answer.body.contains("more than 100 messages"), "{answer:?}");
    let unfinished = client.ask("POST", &[], &format!("[{}1", "1,".repeat(200))).await;
    assert_eq!(refused(&unfinished), (400, json!(-32700)));
    for method in ["initialize", "server/discover"] {
        let batch = json!([request(1, "echo", json!("x")), request(2, method, json!({}))]);
        let answer = client.post(&batch).await;
        assert_eq!(refused(&answer), (400, json!(-32600)));
        assert!(answer.body.contains(method), "{answer:?}");
    }
}

#[tokio::test]
async fn a_user_removed_during_initialize_gets_no_session() {
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut client = Client::connect(endpoint.address).await;
    client.send("POST", &[], &initialize("hold").to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("initialize".into())).await;
    let mut without = plan();
    without.users.remove(0);
    endpoint.access.apply(&without);
    endpoint.gateway.end_revoked_sessions();
    endpoint.release.add_permits(1);
    let head = client.head().await;
    assert_eq!((head.status, head.header("mcp-session-id")), (401, None));
    assert_eq!(parameter(head.header("www-authenticate").unwrap(), "error"), Some("invalid_token"));
    assert_eq!(endpoint.gateway.session_count(), 0);
    assert!(endpoint.seen.try_recv().is_err() && endpoint.events.try_recv().is_err(), "the session never started");
}

#[tokio::test]
async fn the_bodies_of_one_user_leave_memory_for_other_users() {
    let limits = GatewayLimits { body_max: 1000, bodies_max: 4000, ..GatewayLimits::default() };
    let mut endpoint = limited(limits);
    let mut alice = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut bob = Client::connect(endpoint.address).await;
    bob.token = Some("bob-token".to_owned());
    bob.open_session("2025-11-25").await;
    let long = |method: &str| request(5, method, json!("x".repeat(700)));
    let mut again = alice.second_connection().await;
    alice.send("POST", &[], &long("hold").to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let refused = again.post(&long("echo")).await.head;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(bob.post(&long("echo")).await.head.status, 200);
    endpoint.release.add_permits(1);
    assert_eq!(alice.head().await.status, 200);
    assert_eq!(again.post(&long("echo")).await.head.status, 200);
}

#[tokio::test]
async fn a_user_with_too_many_calls_gets_429_busy() {
    let mut endpoint = limited(GatewayLimits { calls_per_user_max: 1, ..GatewayLimits::default() });
    let mut client = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut other = client.second_connection().await;
    client.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let refused = other.post(&request(7, "echo", json!("x"))).await;
    assert_eq!((refused.head.status, refused.head.header("retry-after")), (429, Some("1")));
    let expected = json!({
        "jsonrpc": "2.0",
        "id": 7,
        "error": {
            "code": -32000,
            "message": "this user has 1 calls in progress, the maximum; retry when one has been answered",
            "data": {"kind": "busy", "limit": 1, "retry_after_ms": 1000},
        },
    });
    assert_eq!(refused.json(), expected);
    endpoint.release.add_permits(1);
    let head = client.head().await;
    assert!(client.body(&head).await.contains("\"x\""));
    assert_eq!(other.echo().await, 200);
}

#[tokio::test]
async fn without_authentication_proxied_requests_get_403() {
    let endpoint =
        FakeEndpoint::with(GatewayPlan { auth: EndpointAuth::None(Some("acme/bob".to_owned())), ..plan() }, |_| {});
    let mut client = Client::connect(endpoint.address).await;
    client.token = None;
    client.path = "/i/bobs/mcp".to_owned();
    client.open_session("2025-11-25").await;
    assert_eq!(client.echo().await, 200);
    let echo = request(7, "echo", json!("x")).to_string();
    for header in ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"] {
        let answer = client.ask("POST", &[(header, "127.0.0.1")], &echo).await;
        assert_eq!(answer.head.status, 403, "{header}");
        assert_eq!(answer.json()["error"]["message"], "without authentication only clients on this machine are served");
    }
}

#[tokio::test]
async fn dns_rebinding_is_rejected_even_with_a_valid_token() {
    let endpoint = FakeEndpoint::new(|settings| {
        settings.authorization_servers = vec!["https://login.example.com".to_owned()];
        settings.guard.hosts = vec!["mcp.example.com".to_owned()];
        settings.guard.origins = vec!["https://app.example.com".to_owned(), "http://dev.example.com:*".to_owned()];
    });
    let mut alice = Client::initialized(endpoint.address, "2025-11-25").await;
    let hosts = [
        ("localhost", true),
        ("LOCALHOST:7300", true),
        ("127.0.0.1:1", true),
        ("[::1]:7300", true),
        ("mcp.example.com", true),
        ("mcp.example.com:8443", true),
        ("evil.example.com", false),
        ("localhost.evil.com", false),
        ("127.0.0.1.evil.com", false),
        ("mcp.example.com.evil.com", false),
        ("0.0.0.0:7300", false),
        ("169.254.169.254", false),
        ("localhost.", false),
        ("localhost:7300:1", false),
    ];
    let origins = [
        (None, true),
        (Some("http://localhost:5173"), true),
        (Some("http://127.0.0.1"), true),
        (Some("https://app.example.com"), true),
        (Some("http://dev.example.com:3000"), true),
        (Some("null"), false),
        (Some("http://evil.example.com"), false),
        (Some("http://app.example.com"), false),
        (Some("https://app.example.com.evil.com"), false),
        (Some("file://"), false),
    ];
    let echo = request(7, "echo", json!("x")).to_string();
    for (host, may) in hosts {
        for (origin, origin_may) in origins {
            let mut headers = vec![("host", host)];
            headers.extend(origin.map(|origin| ("origin", origin)));
            // The check also covers paths that need no token.
            for (path, method, body) in
                [("/mcp", "POST", echo.as_str()), (METADATA, "GET", ""), ("/elsewhere", "GET", "")]
            {
                alice.path = path.to_owned();
                let answer = alice.ask(method, &headers, body).await;
                let expected = match (may && origin_may, path) {
                    (false, _) => 403,
                    (true, "/elsewhere") => 404,
                    (true, _) => 200,
                };
                assert_eq!(answer.head.status, expected, "{method} {path} {headers:?}: {answer:?}");
                let no_browser_is_invited =
                    answer.head.headers.iter().all(|(name, _)| !name.starts_with("access-control-"));
                assert!(no_browser_is_invited, "{answer:?}");
                if expected == 403 {
                    assert_eq!(answer.json()["id"], Value::Null);
                }
            }
        }
    }
    alice.path = "/mcp".to_owned();
    let preflight = [("origin", "http://evil.example.com"), ("access-control-request-method", "POST")];
    assert_eq!(alice.ask("OPTIONS", &preflight, "").await.head.status, 403);
}
