//! What a connector takes from the machine and its environment: certificates and proxies.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::spec::{RemoteTransport, ServerTarget};
use mcp_satellite_actors::seam::{LineEvent, LineOutput};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::peer::Peer;
use super::support::{Dialed, spec};

/// The environment of a child that none of the machine's may disturb.
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

/// Runs an ignored test of this binary with these variables.
async fn in_child(test: &'static str, variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    for name in NAMES {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).env("REMOTE_LINE_CHILD", "1");
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{complained}");
}

fn is_child() -> bool {
    std::env::var_os("REMOTE_LINE_CHILD").is_some()
}

fn tls_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/remote_line/tls").join(name)
}

/// A server for `localhost` whose certificate only our test authority vouches for; it answers each request with its id.
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
async fn a_certificate_that_nobody_vouches_for_is_refused() {
    let port = secure_server().await;
    let mut line = Dialed::new(spec(&format!("https://localhost:{port}/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(!failure.sent);
    assert_eq!(failure.to_string(), "no secure connection: invalid peer certificate: UnknownIssuer");
}

#[tokio::test]
async fn certificates_are_those_that_the_environment_names() {
    let ca = tls_file("ca.pem");
    in_child("surroundings::child_with_its_own_authority", &[("SSL_CERT_FILE", ca.to_str().unwrap())]).await;
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_with_its_own_authority() {
    if !is_child() {
        return;
    }
    let port = secure_server().await;
    let mut line = Dialed::new(spec(&format!("https://localhost:{port}/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    assert_eq!(line.message().await["id"], 1);
    let mut line = Dialed::new(spec(&format!("https://127.0.0.1:{port}/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(matches!(&failure.kind, FailureKind::Tls(why) if why.contains("not valid for name")), "{failure:?}");
}

#[tokio::test]
async fn a_machine_without_certificates_reaches_servers_that_need_none() {
    in_child("surroundings::child_without_certificates", &[("SSL_CERT_FILE", "/nowhere/at/all.pem")]).await;
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_without_certificates() {
    if !is_child() {
        return;
    }
    let mut peer = Peer::new().await;
    let mut line = Dialed::new(spec(&peer.url("/mcp"), RemoteTransport::Http));
    line.request(1, "initialize");
    line.asks(&mut peer).await.result().await;
    assert_eq!(line.message().await["id"], 1);
    let mut line = Dialed::new(spec("https://localhost:9/mcp", RemoteTransport::Http));
    line.request(1, "initialize");
    let why = "this machine has no CA certificates; install them, or set SSL_CERT_FILE";
    let none = FailureKind::Tls(why.to_owned());
    assert_eq!(line.failed(1).await, ExchangeFailure::unsent(none));
}

#[tokio::test]
async fn servers_elsewhere_are_reached_through_the_proxies_of_the_environment_and_our_own_are_not() {
    let mut proxy = Peer::new().await;
    let address = proxy.url("");
    let variables = [("HTTP_PROXY", address.as_str()), ("HTTPS_PROXY", &address), ("NO_PROXY", "direct.invalid")];
    let child = in_child("surroundings::child_behind_a_proxy", &variables);
    let proxied = async {
        let asked = proxy.next().await;
        assert_eq!(asked.line(), "POST http://far.invalid/mcp");
        asked.result().await;
        let asked = proxy.next().await;
        assert_eq!(asked.line(), "CONNECT far.invalid:443");
        asked.answer(407, &[], "").await;
        let asked = proxy.next().await;
        assert_eq!(asked.line(), "GET http://far.invalid/health");
        asked.answer(204, &[], "").await;
    };
    tokio::join!(child, proxied);
    assert!(!proxy.was_asked());
}

#[tokio::test]
#[ignore = "the child process of the test above"]
async fn child_behind_a_proxy() {
    if !is_child() {
        return;
    }
    let mut line = Dialed::new(spec("http://far.invalid/mcp", RemoteTransport::Http));
    line.request(1, "initialize");
    assert_eq!(line.message().await["id"], 1);
    let mut line = Dialed::new(spec("https://far.invalid/mcp", RemoteTransport::Http));
    line.request(1, "initialize");
    let failure = line.failed(1).await;
    assert!(matches!(failure.kind, FailureKind::Broken(_)) && !failure.sent, "{failure:?}");
    let mut peer = Peer::new().await;
    for url in [peer.url("/mcp"), peer.url("/mcp").replace("127.0.0.1", "localhost")] {
        let mut line = Dialed::new(spec(&url, RemoteTransport::Http));
        line.request(1, "initialize");
        line.asks(&mut peer).await.result().await;
        assert_eq!(line.message().await["id"], 1);
    }
    // A health_url goes its own way, whatever way the server's is.
    let far = "http://far.invalid/health".to_owned();
    for (url, checked) in [("http://far.invalid/mcp".to_owned(), peer.url("/health")), (peer.url("/mcp"), far)] {
        let mut spec = spec(&url, RemoteTransport::Http);
        if let ServerTarget::Remote { health_url, .. } = &mut spec.target {
            *health_url = Some(checked.clone());
        }
        let mut line = Dialed::new(spec);
        line.send(LineOutput::Probe { id: 1 });
        if checked.contains("127.0.0.1") {
            let asked = line.asks(&mut peer).await;
            assert_eq!(asked.line(), "GET /health");
            asked.answer(204, &[], "").await;
        }
        assert!(matches!(line.next().await, LineEvent::Probed { id: 1 }), "{checked}");
    }
    let unknown = format!("http://{}.direct.invalid/mcp", "x".repeat(64));
    let mut line = Dialed::new(spec(&unknown, RemoteTransport::Http));
    line.request(1, "initialize");
    assert_eq!(line.failed(1).await.kind, FailureKind::Dns);
}
