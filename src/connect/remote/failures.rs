//! What went wrong, by type and never by text. Nothing that is said here shows an address's query, a header or a token.

use std::error::Error;
use std::io;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::failure::{Failure, FailureKind};
use mcp_satellite_actors::model::secret::MASKED;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode, Url};

use super::access::Access;
use crate::http::pause;

/// How many characters of somebody else's text are told.
const TEXT_MAX: usize = 200;
/// How many of a type of content.
const CONTENT_TYPE_MAX: usize = 64;

/// Why there was no answer, or no more of it.
pub(super) fn of_error(error: &reqwest::Error, access: &Access) -> Failure {
    let connecting = error.is_connect();
    let kind = if error.is_builder() {
        FailureKind::BadAddress("no request can be made for it".to_owned())
    } else if error.is_dns() {
        FailureKind::Dns
    } else if connecting && error.is_timeout() {
        FailureKind::ConnectTimeout(access.policy.remote.connect_timeout)
    } else {
        cause(error, connecting, access)
    };
    Failure { kind, sent: !(connecting || error.is_builder()), answering: false }
}

fn cause(error: &reqwest::Error, connecting: bool, access: &Access) -> FailureKind {
    let mut last: &(dyn Error + 'static) = error;
    loop {
        if let Some(error) = last.downcast_ref::<rustls::Error>() {
            return FailureKind::Tls(told(&error.to_string(), access));
        }
        let io = last.downcast_ref::<io::Error>();
        if connecting && io.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            return FailureKind::Refused;
        }
        // What an `io::Error` was made of is not its source: that would be the source of what it was made of.
        let inner = io.and_then(io::Error::get_ref).map(|inner| inner as &(dyn Error + 'static));
        match inner.or_else(|| last.source()) {
            Some(next) => last = next,
            None => break,
        }
    }
    FailureKind::Broken(match last.downcast_ref::<io::Error>() {
        Some(error) if error.raw_os_error().is_some() => error.kind().to_string(),
        // Its own text would be the whole address.
        _ if last.is::<reqwest::Error>() => "the exchange failed".to_owned(),
        _ => told(&last.to_string(), access),
    })
}

/// Why an answer with this status is none.
pub(super) fn of_status(response: &Response, access: &Access) -> FailureKind {
    let headers = response.headers();
    let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    // A client needs it whole, so it is masked and not cut.
    let challenge = || challenge(headers).map(|text| access.mask.apply(&text));
    match response.status() {
        StatusCode::UNAUTHORIZED => FailureKind::Unauthorized { challenge: challenge() },
        StatusCode::FORBIDDEN => FailureKind::Forbidden { challenge: challenge() },
        StatusCode::TOO_MANY_REQUESTS => FailureKind::Throttled { retry_after: retry_after(headers) },
        status if status.is_server_error() => {
            FailureKind::ServerError { status: status.as_u16(), retry_after: retry_after(headers) }
        }
        status if status.is_redirection() => {
            let to = text(&LOCATION).and_then(|location| access.url().join(location).ok());
            FailureKind::Redirected {
                status: status.as_u16(),
                to: to.map(|to| told(&shown(&to, access.url()), access)),
            }
        }
        status => FailureKind::status(status.as_u16()),
    }
}

/// A success that is no message, and what it says that it is.
pub(super) fn not_mcp(content_type: Option<&HeaderValue>, access: &Access) -> FailureKind {
    let text = content_type.and_then(|value| value.to_str().ok()).map(|text| told(text, access));
    let media_type = text.as_deref().and_then(|text| text.split(';').next()).map(str::trim);
    let media_type = media_type.filter(|media_type| !media_type.is_empty());
    FailureKind::NotMcp { content_type: media_type.map(|shown| shown.chars().take(CONTENT_TYPE_MAX).collect()) }
}

/// A text that somebody else wrote: without our secrets, and fit for one line.
pub(super) fn told(text: &str, access: &Access) -> String {
    one_line(&access.mask.apply(text))
}

/// As much of a text as fits in a line.
pub(super) fn one_line(text: &str) -> String {
    let clean = |character: char| if character.is_control() { ' ' } else { character };
    text.chars().take(TEXT_MAX).map(clean).collect()
}

/// When to come back, if the server says so.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER).and_then(|value| pause(value.to_str().ok()?, Timestamp::now()))
}

/// What a server asks for, as it was sent.
pub(super) fn challenge(headers: &HeaderMap) -> Option<String> {
    let challenges: Vec<_> = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok()).collect();
    (!challenges.is_empty()).then(|| challenges.join(", "))
}

/// An address without credentials and parameters. Many hosted servers have the credential in the path, so nothing is
/// shown of the configured one that may be it.
fn shown(url: &Url, configured: &Url) -> String {
    let origin = url.origin().ascii_serialization();
    if url.path() == configured.path() {
        return origin;
    }
    let hidden = |segment| {
        let is_ours = configured.path().split('/').any(|ours| ours == segment);
        if looks_secret(segment, is_ours) { MASKED } else { segment }
    };
    let path: Vec<_> = url.path().split('/').map(hidden).collect();
    format!("{origin}{}", path.join("/"))
}

/// Whether a part of a path is to be treated as a secret. One too many is no loss: who configures the server knows it.
fn looks_secret(segment: &str, is_ours: bool) -> bool {
    let word = |byte: u8| !byte.is_ascii_digit() && !byte.is_ascii_uppercase();
    segment.len() >= 32 || segment.len() >= 8 && (is_ours || !segment.bytes().all(word))
}
