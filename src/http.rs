//! What all HTTP clients of ours share.

use std::net::IpAddr;
use std::time::Duration;

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::Url;

/// How we introduce ourselves.
pub(crate) const USER_AGENT: &str = concat!("mcp-satellite/", env!("CARGO_PKG_VERSION"));

/// The longest pause that a server can ask for: a wrong clock or one zero too many must not silence us for good.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// The process has one provider of cryptography. If a host has chosen another one, that is as good.
#[cfg(feature = "cli")]
pub(crate) fn install_tls_provider() {
    rustls::crypto::ring::default_provider().install_default().ok();
}

/// A proxy's loopback is not ours, so what is on ours is not asked of a proxy.
pub(crate) fn is_loopback(url: &Url) -> bool {
    let Some(host) = url.host_str() else { return false };
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// A client for one place. Redirects are answers, never followed: what they point at was not configured.
#[cfg(feature = "cli")]
pub(crate) fn client(url: &Url) -> reqwest::Result<reqwest::Client> {
    install_tls_provider();
    let mut builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).user_agent(USER_AGENT);
    if url.scheme() == "http" {
        // A machine without CA certificates can send to a server that needs none.
        builder = builder.tls_certs_only([]);
    }
    if is_loopback(url) {
        builder = builder.no_proxy();
    }
    builder.build()
}

/// Why an exchange failed, by its root: the error's own text would show the whole URL. None if nothing but that is known.
#[cfg(feature = "cli")]
pub(crate) fn root_of(error: &reqwest::Error) -> Option<String> {
    let mut root: &dyn std::error::Error = error;
    while let Some(source) = root.source() {
        root = source;
    }
    (!root.is::<reqwest::Error>()).then(|| root.to_string())
}

/// The pause that `Retry-After` asks for, in seconds or as a date.
pub(crate) fn pause(value: &str, now: Timestamp) -> Option<Duration> {
    let asked = if let Ok(seconds) = value.trim().parse() {
        Duration::from_secs(seconds)
    } else {
        let until = rfc2822::DateTimeParser::new().parse_timestamp(value.trim()).ok()?;
        Duration::try_from(until.duration_since(now)).unwrap_or(Duration::ZERO)
    };
    Some(asked.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_read_as_seconds_or_as_a_date_and_has_a_limit() {
        let now = Timestamp::from_second(1_445_412_420).unwrap_or_default();
        let seconds = |value| pause(value, now).map(|pause| pause.as_secs());
        assert_eq!(seconds("120"), Some(120));
        assert_eq!(seconds("Wed, 21 Oct 2015 07:28:00 GMT"), Some(60));
        assert_eq!(seconds("Wed, 21 Oct 2015 07:00:00 GMT"), Some(0));
        assert_eq!(seconds("99999999999"), Some(3600));
        assert_eq!(seconds("Tue, 31 Dec 2999 23:59:59 GMT"), Some(3600));
        assert_eq!(seconds("-5"), None);
        assert_eq!(seconds("soon"), None);
    }
}
