//! The endpoint over TLS: the same as without, only so, and with a certificate that can be renewed.

use std::net::SocketAddr;
use std::sync::Arc;

use mcp_satellite::config::TlsFiles;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::time::Duration;
use tokio_rustls::TlsConnector;

use super::client::{Client, initialize, request};
use super::fake::{Seen, Stage};
use super::pair::write_pair;

/// A certificate that nobody has signed, and its key, in files.
struct Pair {
    dir: TempDir,
    certificate: CertificateDer<'static>,
}

impl Pair {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let certificate = write_pair(dir.path());
        Self { dir, certificate }
    }

    fn files(&self) -> TlsFiles {
        TlsFiles { cert: self.dir.path().join("cert.pem"), key: self.dir.path().join("key.pem") }
    }

    /// Others take the place of both.
    fn renew(&mut self) {
        self.certificate = write_pair(self.dir.path());
    }

    /// A client that trusts this certificate and nothing else; none if another is shown, or if there is no TLS.
    async fn connect(&self, address: SocketAddr) -> Option<Client> {
        self.speaking(address, &["h2", "http/1.1"]).await
    }

    async fn speaking(&self, address: SocketAddr, protocols: &[&str]) -> Option<Client> {
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

fn stage(pair: &Pair) -> Stage {
    Stage::new(|settings| settings.tls = Some(pair.files()))
}

/// Whether there is an answer in the clear.
async fn answers_in_the_clear(address: SocketAddr) -> bool {
    let mut plain = Client::connect(address).await;
    plain.send("POST", &[], &initialize("2025-11-25").to_string()).await;
    String::from_utf8_lossy(&plain.rest().await).contains("HTTP/")
}

#[tokio::test]
async fn over_tls_a_client_is_answered_and_hears_streams() {
    let pair = Pair::new();
    let stage = stage(&pair);
    let mut client = pair.connect(stage.address).await.unwrap();
    client.token = None;
    let challenge = client.post(&initialize("2025-11-25")).await.head;
    assert_eq!((challenge.status, challenge.header("www-authenticate")), (401, Some("Bearer")));
    client.token = Some("alice-token".to_owned());
    client.begin("2025-11-25").await;
    assert_eq!(client.echo().await, 200);
    client.open("POST", &[], &request(5, "chat", json!("x")).to_string()).await;
    assert_eq!(client.event().await.unwrap().data, "");
    assert_eq!(client.event().await.unwrap().json()["params"], "first");
    assert_eq!(client.event().await.unwrap().json()["result"], "x");
    assert_eq!(client.event().await, None);
    assert!(pair.speaking(stage.address, &["h2"]).await.is_none(), "HTTP/1.1 is all that is spoken");
    assert!(!answers_in_the_clear(stage.address).await);
    assert!(Pair::new().connect(stage.address).await.is_none());
}

#[tokio::test]
async fn a_certificate_is_renewed_by_a_reload_and_a_bad_one_changes_nothing() {
    let mut pair = Pair::new();
    let stage = stage(&pair);
    let mut client = pair.connect(stage.address).await.unwrap();
    client.begin("2025-11-25").await;
    let old = pair.certificate.clone();
    pair.renew();
    assert!(pair.connect(stage.address).await.is_none(), "nobody has said that there is another");
    let reload = || stage.reload(|settings| settings.tls = Some(pair.files()), None);
    reload().unwrap();
    assert!(pair.connect(stage.address).await.is_some());
    assert_eq!(client.echo().await, 200, "who is connected stays so");

    // A key of another certificate, no key, no certificate, no file.
    let other = Pair::new();
    for (cert, key) in [
        (pair.files().cert, other.files().key),
        (pair.files().cert, pair.files().cert),
        (pair.files().key, pair.files().key),
        (pair.files().cert, "/nothing/there".into()),
    ] {
        let files = TlsFiles { cert, key };
        let settings = files.clone();
        let error = stage.reload(|settings| settings.tls = Some(files), None).unwrap_err().to_string();
        let named = [settings.cert, settings.key].iter().any(|file| error.contains(&*file.to_string_lossy()));
        assert!(named, "{error}");
        assert!(pair.connect(stage.address).await.is_some());
    }
    let former = Pair { certificate: old, dir: TempDir::new().unwrap() };
    assert!(former.connect(stage.address).await.is_none());
}

#[tokio::test]
async fn tls_is_switched_on_and_off_by_a_reload_and_sessions_outlive_it() {
    let pair = Pair::new();
    let mut stage = Stage::new(|_| {});
    let mut plain = Client::initialized(stage.address, "2025-11-25").await;
    let mut asks = plain.again().await;
    asks.send("POST", &[], &request(5, "hold", json!("x")).to_string()).await;
    stage.saw(Seen::Asked("hold".into())).await;
    let on = |settings: &mut mcp_satellite::gateway::GatewaySettings| {
        (settings.tls, settings.limits.drain_timeout) = (Some(pair.files()), Duration::from_secs(60));
    };
    let bad = || TlsFiles { cert: "/nothing/there".into(), key: "/nothing/there".into() };
    stage.reload(|settings| settings.tls = Some(bad()), None).unwrap_err();
    assert_eq!(plain.echo().await, 200, "nobody is sent away for what cannot be had");
    stage.reload(on, None).unwrap();
    assert_eq!(stage.gateway.address(), stage.address);
    assert!(plain.try_head().await.is_none(), "nothing more is said in the clear");
    assert!(!answers_in_the_clear(stage.address).await);
    let mut secret = pair.connect(stage.address).await.unwrap();
    secret.session.clone_from(&plain.session);
    assert_eq!(secret.echo().await, 200);
    // But for what was asked before.
    stage.release.add_permits(1);
    assert_eq!(asks.head().await.status, 200);

    stage.reload(|settings| settings.tls = Some(bad()), None).unwrap_err();
    assert!(pair.connect(stage.address).await.is_some());
    stage.reload(|_| {}, None).unwrap();
    assert!(pair.connect(stage.address).await.is_none());
    let mut plain = plain.again().await;
    assert_eq!(plain.echo().await, 200);
}

#[tokio::test]
async fn with_a_bad_certificate_nothing_moves_and_nothing_is_said_in_the_clear() {
    let pair = Pair::new();
    let bad = || Some(TlsFiles { cert: pair.files().cert, key: "/nothing/there".into() });
    let reload = |stage: &Stage, tls: Option<TlsFiles>| {
        let elsewhere = stage.elsewhere();
        let wanted = elsewhere.local_addr().unwrap();
        let error = stage.reload(
            |settings| {
                settings.tls = tls;
                settings.guard.loopback = false;
            },
            Some(elsewhere),
        );
        (wanted, error)
    };

    // What was in the clear stays where it was asked for.
    let plain = Stage::new(|_| {});
    let (wanted, error) = reload(&plain, bad());
    error.unwrap_err();
    assert_eq!(plain.gateway.address(), plain.address);
    assert!(Client::try_connect(wanted).await.is_err(), "nobody is there");
    Client::initialized(plain.address, "2025-11-25").await;

    // What was secret stays so.
    let secret = stage(&pair);
    let (wanted, error) = reload(&secret, bad());
    error.unwrap_err();
    assert_eq!((secret.gateway.address(), secret.gateway.tls()), (secret.address, Some(pair.files())));
    assert!(Client::try_connect(wanted).await.is_err(), "nobody is there");
    assert!(!answers_in_the_clear(secret.address).await);
    pair.connect(secret.address).await.unwrap().begin("2025-11-25").await;
}
