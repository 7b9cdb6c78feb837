//! Paths of the console, which another crate serves.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use axum::response::Response;
use futures::future::BoxFuture;

/// Answers requests for pages. The first argument is the address of the client.
pub type PageService = Arc<dyn Fn(SocketAddr, Request<Body>) -> BoxFuture<'static, Response> + Send + Sync>;

/// Address of the client, in the extensions of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClientAddress(pub(super) SocketAddr);

/// Returns true if the path is one of a page or of the console's API.
pub(super) fn is_page_path(path: &str) -> bool {
    let is_below = |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    is_below("/console") || is_below("/v1") || path == "/openapi.json"
}
