//! Helpers shared by all HTTP clients of the satellite.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::Url;

pub const USER_AGENT: &str = concat!("mcp-satellite/", env!("CARGO_PKG_VERSION"));

/// Upper limit for the pause of a `Retry-After` header: a wrong clock or one zero too many must not silence a client.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Installs `ring` as the process-wide provider of cryptography, unless the embedding program has installed one.
pub fn install_tls_provider() {
    rustls::crypto::ring::default_provider().install_default().ok();
}

/// Returns true if the host of the URL is this machine. Such a request must not go to a proxy, whose loopback is
/// another.
pub fn is_loopback(url: &Url) -> bool {
    let Some(host) = url.host_str() else { return false };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Creates a client for this URL's origin. Redirects are returned, never followed: their targets were not configured.
pub fn client(url: &Url) -> reqwest::Result<reqwest::Client> {
    client_with_certificates(url, None)
}

/// Creates a client like [`client`] that also accepts certificates of the authorities in `pem`.
pub fn client_with_certificates(url: &Url, pem: Option<&[u8]>) -> reqwest::Result<reqwest::Client> {
    install_tls_provider();
    let mut builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).user_agent(USER_AGENT);
    if url.scheme() == "http" {
        // Without CA certificates, so that a machine that has none can still send to a plain HTTP server.
        builder = builder.tls_certs_only([]);
    }
    if let Some(pem) = pem {
        builder = builder.tls_certs_merge(reqwest::Certificate::from_pem_bundle(pem)?);
    }
    if is_loopback(url) {
        builder = builder.no_proxy();
    }
    builder.build()
}

/// Returns the root cause of a failed exchange: the error's own text would show the whole URL. `None` if there is no
/// other cause.
pub fn root_cause(error: &reqwest::Error) -> Option<String> {
    let mut root: &dyn std::error::Error = error;
    while let Some(source) = root.source() {
        root = source;
    }
    (!root.is::<reqwest::Error>()).then(|| root.to_string())
}

/// Returns true if the TLS handshake failed, for example because of the certificate.
pub fn is_tls(error: &reqwest::Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        if cause.is::<rustls::Error>() {
            return true;
        }
        // The error inside an `io::Error` is not its `source()`, which is the source of the inner error.
        let inner = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = inner.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| cause.source());
    }
    false
}

/// Returns the pause that a `Retry-After` value requests, given in seconds or as a date.
pub fn parse_retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let delay = if let Ok(seconds) = value.trim().parse() {
        Duration::from_secs(seconds)
    } else {
        let until = rfc2822::DateTimeParser::new().parse_timestamp(value.trim()).ok()?;
        Duration::try_from(until.duration_since(now)).unwrap_or(Duration::ZERO)
    };
    Some(delay.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_parsed_as_seconds_or_as_a_date_with_a_limit() {
        let now = Timestamp::from_second(1_445_412_420).unwrap_or_default();
        let seconds = |value| parse_retry_after(value, now).map(|pause| pause.as_secs());
        assert_eq!(seconds("120"), Some(120));
        assert_eq!(seconds("Wed, 21 Oct 2015 07:28:00 GMT"), Some(60));
        assert_eq!(seconds("Wed, 21 Oct 2015 07:00:00 GMT"), Some(0));
        assert_eq!(seconds("99999999999"), Some(3600));
        assert_eq!(seconds("Tue, 31 Dec 2999 23:59:59 GMT"), Some(3600));
        assert_eq!(seconds("-5"), None);
        assert_eq!(seconds("soon"), None);
    }
}
