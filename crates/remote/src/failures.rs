//! Classification of errors by type, never by text. No message contains an address's query, a header or a token.

use std::error::Error;
use std::io;
use std::time::Duration;

use jiff::Timestamp;
use mcp_satellite_actors::model::failure::{ExchangeFailure, FailureKind};
use mcp_satellite_actors::model::secret::MASKED;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode, Url};

use super::access::ServerAccess;
use mcp_satellite_http::client::parse_retry_after;

// Maximum number of characters of a foreign text in a message.
const TEXT_MAX: usize = 200;
const CONTENT_TYPE_MAX: usize = 64;

pub(super) fn failure_from_error(error: &reqwest::Error, access: &ServerAccess) -> ExchangeFailure {
    let connecting = error.is_connect();
    let kind = if error.is_builder() {
        FailureKind::BadAddress("no HTTP request can be built for it".to_owned())
    } else if error.is_dns() {
        FailureKind::Dns
    } else if connecting && error.is_timeout() {
        FailureKind::ConnectTimeout(access.policy.remote.connect_timeout)
    } else {
        cause(error, connecting, access)
    };
    ExchangeFailure { kind, sent: !(connecting || error.is_builder()), answering: false }
}

fn cause(error: &reqwest::Error, connecting: bool, access: &ServerAccess) -> FailureKind {
    let mut last: &(dyn Error + 'static) = error;
    loop {
        if let Some(error) = last.downcast_ref::<rustls::Error>() {
            return FailureKind::Tls(mask_line(&error.to_string(), access));
        }
        let io = last.downcast_ref::<io::Error>();
        if connecting && io.is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            return FailureKind::Refused;
        }
        // The error inside an `io::Error` is not its `source()`, which is the source of the inner error.
        let inner = io.and_then(io::Error::get_ref).map(|inner| inner as &(dyn Error + 'static));
        match inner.or_else(|| last.source()) {
            Some(next) => last = next,
            None => break,
        }
    }
    FailureKind::Broken(match last.downcast_ref::<io::Error>() {
        Some(error) if error.raw_os_error().is_some() => error.kind().to_string(),
        // The text of this error would contain the whole address.
        _ if last.is::<reqwest::Error>() => "the HTTP exchange failed".to_owned(),
        _ => mask_line(&last.to_string(), access),
    })
}

pub(super) fn failure_from_status(response: &Response, access: &ServerAccess) -> FailureKind {
    let headers = response.headers();
    let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    // A client needs the whole challenge, so it is masked and not shortened.
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
                to: to.map(|to| mask_line(&redact_url(&to, access.url()), access)),
            }
        }
        status => FailureKind::from_status(status.as_u16()),
    }
}

pub(super) fn unexpected_content_type(content_type: Option<&HeaderValue>, access: &ServerAccess) -> FailureKind {
    let text = content_type.and_then(|value| value.to_str().ok()).map(|text| mask_line(text, access));
    let media_type = text.as_deref().and_then(|text| text.split(';').next()).map(str::trim);
    let media_type = media_type.filter(|media_type| !media_type.is_empty());
    FailureKind::NotMcp { content_type: media_type.map(|shown| shown.chars().take(CONTENT_TYPE_MAX).collect()) }
}

pub(super) fn mask_line(text: &str, access: &ServerAccess) -> String {
    one_line(&access.mask.apply(text))
}

pub(super) fn one_line(text: &str) -> String {
    let clean = |character: char| if character.is_control() { ' ' } else { character };
    text.chars().take(TEXT_MAX).map(clean).collect()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER).and_then(|value| parse_retry_after(value.to_str().ok()?, Timestamp::now()))
}

/// Returns the `WWW-Authenticate` challenges, unmasked.
pub(super) fn challenge(headers: &HeaderMap) -> Option<String> {
    let challenges: Vec<_> = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok()).collect();
    (!challenges.is_empty()).then(|| challenges.join(", "))
}

/// Formats an address without credentials and parameters. Many hosted servers have the credential in the path, so parts
/// of the configured path that may be one are masked.
fn redact_url(url: &Url, configured: &Url) -> String {
    let origin = url.origin().ascii_serialization();
    if url.path() == configured.path() {
        return origin;
    }
    let hidden = |segment| {
        let is_configured = configured.path().split('/').any(|part| part == segment);
        if is_likely_secret(segment, is_configured) { MASKED } else { segment }
    };
    let path: Vec<_> = url.path().split('/').map(hidden).collect();
    format!("{origin}{}", path.join("/"))
}

/// Returns true if a part of a path is treated as a secret. False positives do no harm: the operator knows the address.
fn is_likely_secret(segment: &str, is_configured: bool) -> bool {
    let word = |byte: u8| !byte.is_ascii_digit() && !byte.is_ascii_uppercase();
    segment.len() >= 32 || segment.len() >= 8 && (is_configured || !segment.bytes().all(word))
}
