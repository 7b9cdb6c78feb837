//! Certificates and proxies that a connector takes from the machine and its environment.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::spec::{RemoteTransport, ServerTarget};
use mcp_satellite_actors::seam::{LineEvent, LineOutput};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use testkit::process::ignored_test_command;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::peer::Peer;
use super::support::{TestLine, spec};

/// The variables that a child must not inherit.
const NAMES: [&str; 10] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
];

/// Runs an ignored test of this binary in a child process with these variables.
async fn in_child(test: &'static str, variables: &[(&str, &str)]) {
    let mut command = ignored_test_command(module_path!(), test);
    for name in NAMES {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).env("REMOTE_LINE_CHILD", "1");
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
}

fn is_child() -> bool {
    std::env::var_os("REMOTE_LINE_CHILD").is_some()
}

fn tls_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/remote/line/tls").join(name)
}

/// Starts a server for `localhost` with a certificate of the test authority and returns its port. It responds to
/// request 1.
async fn secure_server() -> u16 {
    let chain = CertificateDer::pem_file_iter(tls_file("server.pem")).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(tls_file("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let acceptor = TlsAcceptor::from(Arc::new(config.with_single_cert(chain, key).unwrap()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut request = Vec::new();
            while !request.ends_with(b"}") {
                stream.read_buf(&mut request).await.unwrap();
            }
            let body = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: ";
            stream.write_all(format!("{head}{}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
        }
    });
    port
}

#[tokio::test]
async fn a_certificate_of_an_unknown_authority_is_rejected() {
    let port = secure_server().await;
    let mut line = TestLine::new(spec(&format!("https://localhost:{port}/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(!failure.sent);
    assert_eq!(failure.to_string(), "no secure connection: invalid peer certificate: UnknownIssuer");
}

#[tokio::test]
async fn ssl_cert_file_sets_the_trusted_authorities() {
    let ca = tls_file("ca.pem");
    in_child("child_with_its_own_authority", &[("SSL_CERT_FILE", ca.to_str().unwrap())]).await;
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_with_its_own_authority() {
    if !is_child() {
        return;
    }
    let port = secure_server().await;
    let mut line = TestLine::new(spec(&format!("https://localhost:{port}/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    assert_eq!(line.message().await["id"], 1);
    let mut line = TestLine::new(spec(&format!("https://127.0.0.1:{port}/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(matches!(&failure.kind, FailureKind::Tls(why) if why.contains("not valid for name")), "{failure:?}");
}

#[tokio::test]
async fn without_ca_certificates_plain_http_servers_are_reachable() {
    in_child("child_without_certificates", &[("SSL_CERT_FILE", "/nowhere/at/all.pem")]).await;
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_without_certificates() {
    if !is_child() {
        return;
    }
    let mut peer = Peer::new().await;
    let mut line = TestLine::new(spec(&peer.url("/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    line.next_request(&mut peer).await.result().await;
    assert_eq!(line.message().await["id"], 1);
    let mut line = TestLine::new(spec("https://localhost:9/mcp", RemoteTransport::Http));
    line.request(1, "initialize");
    let why = "this machine has no CA certificates; install them, or set SSL_CERT_FILE";
    let none = FailureKind::Tls(why.to_owned());
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(none));
}

#[tokio::test]
async fn the_proxies_of_the_environment_apply_to_remote_servers_but_not_to_loopback() {
    let mut proxy = Peer::new().await;
    let address = proxy.url("");
    let variables = [("HTTP_PROXY", address.as_str()), ("HTTPS_PROXY", &address), ("NO_PROXY", "direct.invalid")];
    let child = in_child("child_behind_a_proxy", &variables);
    let proxied = async {
        let request = proxy.next().await;
        assert_eq!(request.line(), "POST http://far.invalid/mcp");
        request.result().await;
        let request = proxy.next().await;
        assert_eq!(request.line(), "CONNECT far.invalid:443");
        request.answer(407, &[], "").await;
        let request = proxy.next().await;
        assert_eq!(request.line(), "GET http://far.invalid/health");
        request.answer(204, &[], "").await;
    };
    tokio::join!(child, proxied);
    assert!(!proxy.has_request());
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_behind_a_proxy() {
    if !is_child() {
        return;
    }
    let mut line = TestLine::new(spec("http://far.invalid/mcp", RemoteTransport::Http));
    line.request(1, "initialize");
    assert_eq!(line.message().await["id"], 1);
    let mut line = TestLine::new(spec("https://far.invalid/mcp", RemoteTransport::Http));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(matches!(failure.kind, FailureKind::Broken(_)) && !failure.sent, "{failure:?}");
    let mut peer = Peer::new().await;
    for url in [peer.url("/mcp"), peer.url("/mcp").replace("127.0.0.1", "localhost")] {
        let mut line = TestLine::new(spec(&url, RemoteTransport::Http));
        line.request(1, "initialize");
        line.next_request(&mut peer).await.result().await;
        assert_eq!(line.message().await["id"], 1);
    }
    // The proxy for a health_url depends on the health_url alone.
    let far = "http://far.invalid/health".to_owned();
    for (url, checked) in [("http://far.invalid/mcp".to_owned(), peer.url("/health")), (peer.url("/mcp"), far)] {
        let mut spec = spec(&url, RemoteTransport::Http);
        if let ServerTarget::Remote { health_url, .. } = &mut spec.target {
            *health_url = Some(checked.clone());
        }
        let mut line = TestLine::new(spec);
        line.send(LineOutput::Probe { id: 1 });
        if checked.contains("127.0.0.1") {
            let request = line.next_request(&mut peer).await;
            assert_eq!(request.line(), "GET /health");
            request.answer(204, &[], "").await;
        }
        assert!(matches!(line.next().await, LineEvent::Probed { id: 1 }), "{checked}");
    }
    let unknown = format!("http://{}.direct.invalid/mcp", "x".repeat(64));
    let mut line = TestLine::new(spec(&unknown, RemoteTransport::Http));
    line.request(1, "initialize");
    assert_eq!(line.failed(1).await.kind, FailureKind::Dns);
}
