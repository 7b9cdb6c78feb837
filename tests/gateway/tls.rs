//! The endpoint over TLS: requests, renewal of the certificate, and switching TLS on and off.

use std::net::SocketAddr;
use std::sync::Arc;

use mcp_satellite::config::TlsFiles;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tempfile::TempDir;
use testkit::certificate::write_pair;
use tokio::net::TcpStream;
use tokio::time::Duration;
use tokio_rustls::TlsConnector;

use super::client::{Client, initialize, request};
use super::fake::{FakeEndpoint, HandlerEvent};

/// The files of a self-signed certificate and its key.
struct CertificateFiles {
    dir: TempDir,
    certificate: CertificateDer<'static>,
}

impl CertificateFiles {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let certificate = write_pair(dir.path());
        Self { dir, certificate }
    }

    fn files(&self) -> TlsFiles {
        TlsFiles { cert: self.dir.path().join("cert.pem"), key: self.dir.path().join("key.pem") }
    }

    /// Replaces both files.
    fn renew(&mut self) {
        self.certificate = write_pair(self.dir.path());
    }

    /// Connects a client that trusts only this certificate. `None` if the endpoint has another one, or no TLS.
    async fn connect(&self, address: SocketAddr) -> Option<Client> {
        self.connect_with_alpn(address, &["h2", "http/1.1"]).await
    }

    async fn connect_with_alpn(&self, address: SocketAddr, protocols: &[&str]) -> Option<Client> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        let tcp = TcpStream::connect(address).await.unwrap();
        let own = tcp.local_addr().unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let io = TlsConnector::from(Arc::new(config)).connect(name, tcp).await.ok()?;
        assert_eq!(io.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        Some(Client::over(Box::new(io), address, own))
    }
}

fn tls_endpoint(pair: &CertificateFiles) -> FakeEndpoint {
    FakeEndpoint::new(|settings| settings.tls = Some(pair.files()))
}

/// Whether the endpoint answers without TLS.
async fn answers_without_tls(address: SocketAddr) -> bool {
    let mut plain = Client::connect(address).await;
    plain.send("POST", &[], &initialize("2025-11-25").to_string()).await;
    String::from_utf8_lossy(&plain.read_until_closed().await).contains("HTTP/")
}

#[tokio::test]
async fn a_tls_client_gets_responses_and_streams() {
    let pair = CertificateFiles::new();
    let endpoint = tls_endpoint(&pair);
    let mut client = pair.connect(endpoint.address).await.unwrap();
    client.token = None;
    let challenge = client.post(&initialize("2025-11-25")).await.head;
    assert_eq!((challenge.status, challenge.header("www-authenticate")), (401, Some("Bearer")));
    client.token = Some("alice-token".to_owned());
    client.open_session("2025-11-25").await;
    assert_eq!(client.echo().await, 200);
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().data, "");
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
    assert!(pair.connect_with_alpn(endpoint.address, &["h2"]).await.is_none(), "only HTTP/1.1 is offered");
    assert!(!answers_without_tls(endpoint.address).await);
    assert!(CertificateFiles::new().connect(endpoint.address).await.is_none());
}

#[tokio::test]
async fn a_reload_renews_the_certificate_and_rejects_a_bad_one() {
    let mut pair = CertificateFiles::new();
    let endpoint = tls_endpoint(&pair);
    let mut client = pair.connect(endpoint.address).await.unwrap();
    client.open_session("2025-11-25").await;
    let old = pair.certificate.clone();
    pair.renew();
    assert!(pair.connect(endpoint.address).await.is_none(), "not reloaded yet");
    let reload = || endpoint.reload(|settings| settings.tls = Some(pair.files()), None);
    reload().unwrap();
    assert!(pair.connect(endpoint.address).await.is_some());
    assert_eq!(client.echo().await, 200, "open connections stay open");

    // A key of another certificate, no key, no certificate, a missing file.
    let other = CertificateFiles::new();
    for (cert, key) in [
        (pair.files().cert, other.files().key),
        (pair.files().cert, pair.files().cert),
        (pair.files().key, pair.files().key),
        (pair.files().cert, "/nothing/there".into()),
    ] {
        let files = TlsFiles { cert, key };
        let settings = files.clone();
        let error = endpoint.reload(|settings| settings.tls = Some(files), None).unwrap_err().to_string();
        let named = [settings.cert, settings.key].iter().any(|file| error.contains(&*file.to_string_lossy()));
        assert!(named, "{error}");
        assert!(pair.connect(endpoint.address).await.is_some());
    }
    let former = CertificateFiles { certificate: old, dir: TempDir::new().unwrap() };
    assert!(former.connect(endpoint.address).await.is_none());
}

#[tokio::test]
async fn sessions_survive_switching_tls_on_and_off_by_reload() {
    let pair = CertificateFiles::new();
    let mut endpoint = FakeEndpoint::new(|_| {});
    let mut plain = Client::initialized(endpoint.address, "2025-11-25").await;
    let mut pending = plain.second_connection().await;
    pending.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    endpoint.wait_for(HandlerEvent::Request("hold".into())).await;
    let on = |settings: &mut mcp_satellite::gateway::GatewaySettings| {
        (settings.tls, settings.limits.drain_timeout) = (Some(pair.files()), Duration::from_secs(60));
    };
    let bad = || TlsFiles { cert: "/nothing/there".into(), key: "/nothing/there".into() };
    endpoint.reload(|settings| settings.tls = Some(bad()), None).unwrap_err();
    assert_eq!(plain.echo().await, 200, "a failed reload closes no connection");
    endpoint.reload(on, None).unwrap();
    assert_eq!(endpoint.gateway.address(), endpoint.address);
    assert!(plain.try_head().await.is_none(), "the plain connection is closed");
    assert!(!answers_without_tls(endpoint.address).await);
    let mut encrypted = pair.connect(endpoint.address).await.unwrap();
    encrypted.session.clone_from(&plain.session);
    assert_eq!(encrypted.echo().await, 200);
    // A request from before the reload is still answered.
    endpoint.release.add_permits(1);
    assert_eq!(pending.head().await.status, 200);

    endpoint.reload(|settings| settings.tls = Some(bad()), None).unwrap_err();
    assert!(pair.connect(endpoint.address).await.is_some());
    endpoint.reload(|_| {}, None).unwrap();
    assert!(pair.connect(endpoint.address).await.is_none());
    let mut plain = plain.second_connection().await;
    assert_eq!(plain.echo().await, 200);
}

#[tokio::test]
async fn a_bad_certificate_changes_neither_the_address_nor_the_encryption() {
    let pair = CertificateFiles::new();
    let bad = || Some(TlsFiles { cert: pair.files().cert, key: "/nothing/there".into() });
    let reload = |endpoint: &FakeEndpoint, tls: Option<TlsFiles>| {
        let new_listener = endpoint.bind_other_address();
        let wanted = new_listener.local_addr().unwrap();
        let error = endpoint.reload(
            |settings| {
                settings.tls = tls;
                settings.guard.loopback = false;
            },
            Some(new_listener),
        );
        (wanted, error)
    };

    // The plain endpoint keeps its address.
    let plain = FakeEndpoint::new(|_| {});
    let (wanted, error) = reload(&plain, bad());
    error.unwrap_err();
    assert_eq!(plain.gateway.address(), plain.address);
    assert!(Client::try_connect(wanted).await.is_err(), "the new address is not in use");
    Client::initialized(plain.address, "2025-11-25").await;

    // The TLS endpoint keeps its address and TLS.
    let encrypted = tls_endpoint(&pair);
    let (wanted, error) = reload(&encrypted, bad());
    error.unwrap_err();
    assert_eq!((encrypted.gateway.address(), encrypted.gateway.tls()), (encrypted.address, Some(pair.files())));
    assert!(Client::try_connect(wanted).await.is_err(), "the new address is not in use");
    assert!(!answers_without_tls(encrypted.address).await);
    pair.connect(encrypted.address).await.unwrap().open_session("2025-11-25").await;
}
