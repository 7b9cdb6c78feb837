//! Counters of HTTP requests and of the bytes of their connections.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;

use super::metadata;

/// Kind of a path. Clients choose paths, so they are not counted one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// Path of all servers of a user, `/mcp`.
    AllServers,
    /// Path of one server, `/i/{server}/mcp`, whether the server exists or not.
    Instance,
    /// A document for clients without a token.
    Metadata,
    /// The control API, the metrics and the health checks.
    Api,
    /// A page of the console.
    Console,
    /// Any other path.
    Other,
}

const ROUTES: [&str; 6] = ["mcp", "instance", "metadata", "api", "console", "other"];
const CODES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

impl RouteKind {
    pub(crate) fn of_path(path: &str) -> Self {
        match path {
            "/mcp" => Self::AllServers,
            "/metrics" | "/healthz" | "/readyz" | "/openapi.json" => Self::Api,
            _ if path.starts_with("/i/") => Self::Instance,
            _ if path.starts_with("/v1/") => Self::Api,
            _ if path.starts_with("/console/") => Self::Console,
            _ if path.starts_with(metadata::PATH) => Self::Metadata,
            _ => Self::Other,
        }
    }
}

/// Numbers of HTTP requests and bytes of all listeners of clients.
#[derive(Debug, Default)]
pub struct HttpTraffic {
    // By route and by class of the status.
    requests: [[AtomicU64; CODES.len()]; ROUTES.len()],
    received: AtomicU64,
    sent: AtomicU64,
}

impl HttpTraffic {
    pub(crate) fn count_request(&self, route: RouteKind, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, CODES.len()) - 1;
        self.requests[route as usize][class].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the kind of route, the class of the status, such as `2xx`, and the number of requests. Combinations
    /// without a request are left out.
    pub fn requests(&self) -> Vec<(&'static str, &'static str, u64)> {
        let of_route = |(route, counts): (&'static str, &[AtomicU64; CODES.len()])| {
            let counts = CODES.iter().zip(counts).map(|(code, count)| (route, *code, count.load(Ordering::Relaxed)));
            counts.filter(|(_, _, count)| *count > 0).collect::<Vec<_>>()
        };
        ROUTES.into_iter().zip(&self.requests).flat_map(of_route).collect()
    }

    /// Returns the bytes that were read from the connections and written to them, with headers and TLS.
    pub fn bytes(&self) -> (u64, u64) {
        (self.received.load(Ordering::Relaxed), self.sent.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_kind_of_route_and_class_of_status() {
        let traffic = HttpTraffic::default();
        for (path, status) in [
            ("/mcp", 200),
            ("/mcp", 204),
            ("/i/files/mcp", 404),
            ("/i/other/mcp", 404),
            ("/.well-known/oauth-protected-resource/mcp", 200),
            ("/v1/instances", 503),
            ("/metrics", 200),
            ("/console/", 303),
            ("/made-up", 404),
            ("/v1made-up", 404),
        ] {
            traffic.count_request(RouteKind::of_path(path), StatusCode::from_u16(status).unwrap_or_default());
        }
        let wanted = [
            ("mcp", "2xx", 2),
            ("instance", "4xx", 2),
            ("metadata", "2xx", 1),
            ("api", "2xx", 1),
            ("api", "5xx", 1),
            ("console", "3xx", 1),
            ("other", "4xx", 2),
        ];
        assert_eq!(traffic.requests(), wanted);
    }
}
