//! Checks the `Host` and `Origin` headers before any other part of a request. A web page in the user's browser can
//! reach loopback through its own host name (DNS rebinding), but it cannot forge these headers.

use axum::http::{HeaderMap, HeaderName, Uri, header};

pub type GuardError = &'static str;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginGuard {
    /// True if loopback names are allowed under any port: the endpoint listens on loopback.
    pub loopback: bool,
    /// Other allowed hosts, with or without a port; without, any port is allowed.
    pub hosts: Vec<String>,
    /// Other allowed origins: `scheme://host[:port]`, with `:*` for any port.
    pub origins: Vec<String>,
}

impl OriginGuard {
    /// Checks the hosts and the origin of a request. Returns the host.
    pub fn check<'a>(&self, headers: &'a HeaderMap, uri: &Uri) -> Result<&'a str, GuardError> {
        let (host, several) = first_value(headers, &header::HOST);
        self.check_host(host, several)?;
        // A host in the request line takes precedence over the header (RFC 9112, 3.2.2).
        if let Some(authority) = uri.authority() {
            self.check_host(Some(authority.as_str()), false)?;
        }
        let (origin, several) = first_value(headers, &header::ORIGIN);
        self.check_origin(origin, several)?;
        Ok(host.unwrap_or_default())
    }

    /// `several` is true if the request has more than one `Host` header.
    pub fn check_host(&self, host: Option<&str>, several: bool) -> Result<(), GuardError> {
        let Some(host) = host.filter(|_| !several) else { return Err("a request needs exactly one Host header") };
        let Some((name, port)) = split(host) else { return Err("the Host header is malformed") };
        let listed = |known: &String| {
            split(known)
                .is_some_and(|(known, its)| known.eq_ignore_ascii_case(name) && its.is_none_or(|its| Some(its) == port))
        };
        if (self.loopback && is_loopback(name)) || self.hosts.iter().any(listed) {
            Ok(())
        } else {
            Err("this Host is not allowed; add it to `hosts` in [gateway]")
        }
    }

    /// A request without an `Origin` header does not come from a browser and is allowed.
    pub fn check_origin(&self, origin: Option<&str>, several: bool) -> Result<(), GuardError> {
        const NO: GuardError = "this Origin is not allowed; add it to `origins` in [gateway]";
        if several {
            return Err(NO);
        }
        let Some(origin) = origin else { return Ok(()) };
        let (scheme, rest) = origin.split_once("://").ok_or(NO)?;
        let (name, port) = split(rest).ok_or(NO)?;
        let listed = |known: &String| {
            let Some((its_scheme, rest)) = known.split_once("://") else { return false };
            let (any_port, rest) = rest.strip_suffix(":*").map_or((false, rest), |rest| (true, rest));
            let same = |(its, its_port): (&str, Option<u16>)| {
                its.eq_ignore_ascii_case(name)
                    && (any_port || port_or_default(its_port, its_scheme) == port_or_default(port, scheme))
            };
            its_scheme.eq_ignore_ascii_case(scheme) && split(rest).is_some_and(same)
        };
        let is_web = scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
        if (self.loopback && is_web && is_loopback(name)) || self.origins.iter().any(listed) { Ok(()) } else { Err(NO) }
    }
}

/// Returns the first value of a header as text, and true if there are several. A value that is not text becomes NUL,
/// which no check accepts.
pub(crate) fn first_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> (Option<&'a str>, bool) {
    let mut values = headers.get_all(name).iter();
    let first = values.next().map(|value| value.to_str().unwrap_or("\u{0}"));
    (first, values.next().is_some())
}

fn port_or_default(port: Option<u16>, scheme: &str) -> Option<u16> {
    port.or_else(|| if scheme.eq_ignore_ascii_case("https") { Some(443) } else { Some(80) })
}

fn split(host: &str) -> Option<(&str, Option<u16>)> {
    let is_invalid_char = |c: char| !c.is_ascii_graphic() || matches!(c, '/' | '@' | '?' | '#' | '\\' | ',');
    if host.is_empty() || host.contains(is_invalid_char) {
        return None;
    }
    let (name, port) = if let Some(end) = host.find(']').filter(|_| host.starts_with('[')) {
        let (name, rest) = host.split_at(end + 1);
        match rest.strip_prefix(':') {
            Some(port) => (name, Some(port)),
            None if rest.is_empty() => (name, None),
            None => return None,
        }
    } else {
        match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        }
    };
    if name.is_empty() {
        return None;
    }
    match port {
        None => Some((name, None)),
        // Rust also parses `+80`.
        Some(port) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some((name, Some(port.parse().ok()?)))
        }
        Some(_) => None,
    }
}

fn is_loopback(name: &str) -> bool {
    // Only the usual spellings: 127.0.0.1 has many others, and a resolver accepts them all.
    name.eq_ignore_ascii_case("localhost") || matches!(name, "127.0.0.1" | "[::1]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> OriginGuard {
        let hosts = vec!["mcp.example.com".to_owned(), "other.example.com:8443".to_owned()];
        let origins = vec!["https://app.example.com".to_owned(), "http://dev.example.com:*".to_owned()];
        OriginGuard { loopback: true, hosts, origins }
    }

    #[test]
    fn only_known_hosts_are_accepted() {
        for host in [
            "localhost",
            "LOCALHOST:7300",
            "127.0.0.1",
            "127.0.0.1:1",
            "[::1]",
            "[::1]:7300",
            "mcp.example.com",
            "MCP.example.com:7300",
            "other.example.com:8443",
        ] {
            assert_eq!(guard().check_host(Some(host), false), Ok(()), "{host}");
        }
        for host in [
            "evil.example.com",
            "localhost.evil.com",
            "127.0.0.1.evil.com",
            "evil.com:7300",
            "other.example.com",
            "other.example.com:8444",
            "",
            ":7300",
            "localhost:",
            "localhost:x",
            "localhost:+80",
            "localhost:70000",
            "[::1",
            "[::1]x",
            "[::2]",
            "user@localhost",
            "localhost/x",
            "localhost, localhost",
            "local host",
            "127.1",
            "0.0.0.0",
            "localhost.",
        ] {
            assert!(guard().check_host(Some(host), false).is_err(), "{host}");
        }
        assert!(guard().check_host(Some("localhost"), true).is_err());
        assert!(guard().check_host(None, false).is_err());
        assert!(OriginGuard { loopback: false, ..guard() }.check_host(Some("localhost"), false).is_err());
    }

    #[test]
    fn only_listed_or_loopback_origins_are_accepted() {
        for origin in [
            "http://localhost",
            "http://localhost:5173",
            "https://127.0.0.1:1",
            "http://[::1]:8",
            "https://app.example.com",
            "https://app.example.com:443",
            "http://dev.example.com:3000",
            "HTTP://DEV.example.com",
        ] {
            assert_eq!(guard().check_origin(Some(origin), false), Ok(()), "{origin}");
        }
        for origin in [
            "null",
            "",
            "http://evil.example.com",
            "http://app.example.com",
            "https://app.example.com:444",
            "https://dev.example.com",
            "http://localhost.evil.com",
            "file://",
            "chrome-extension://localhost",
            "http://localhost/",
            "http://evil.com@localhost",
            "localhost",
        ] {
            assert!(guard().check_origin(Some(origin), false).is_err(), "{origin}");
        }
        assert_eq!(guard().check_origin(None, false), Ok(()));
        assert!(guard().check_origin(Some("http://localhost"), true).is_err());
        assert!(OriginGuard { loopback: false, ..guard() }.check_origin(Some("http://localhost"), false).is_err());
    }
}
