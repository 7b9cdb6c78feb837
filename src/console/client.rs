//! Client side of the control socket, for the command line.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use reqwest::Url;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::SOCKET;
use super::api::{NOT_ALL_STORED, RequestFailure};
use crate::data_dir::DataDir;

/// Client for the satellite of a data directory.
pub struct ConsoleClient {
    http: reqwest::Client,
    data_dir: PathBuf,
    /// Keeps the descriptor path of the socket valid. `None` if the directory does not exist.
    _directory: Option<DataDir>,
}

/// Reason why a request to the satellite has no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error(
        "no satellite is running on `{data_dir}`; start one with `satellite up` or `satellite run`, or name its --data-dir"
    )]
    NotRunning {
        /// The data directory.
        data_dir: String,
    },
    /// The data directory or its socket is accessible to other users.
    #[error("cannot use the data directory: {0}")]
    Unsafe(#[source] io::Error),
    /// The satellite rejected the request.
    #[error("{}", .0.message)]
    Refused(Box<RequestFailure>),
    /// The connection failed, or the response was invalid.
    #[error("lost the connection to the satellite during the request: {0}")]
    ConnectionLost(String),
}

impl ConsoleClient {
    /// Creates a client for the satellite of `data_dir`. The satellite need not be running.
    ///
    /// # Errors
    /// Returns [`ClientError::Unsafe`] if other users can access the data directory or its socket.
    pub fn new(data_dir: &Path) -> Result<Self, ClientError> {
        let directory = match DataDir::open(data_dir) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => None,
            directory => Some(directory.map_err(ClientError::Unsafe)?),
        };
        // Socket addresses are short (108 bytes on Linux), and a path of any length is reached through the descriptor.
        let socket = directory.as_ref().map_or_else(
            || Ok(data_dir.join(SOCKET)),
            |directory| directory.check_socket(SOCKET).map(|()| directory.descriptor_path(SOCKET)),
        );
        let socket = socket.map_err(ClientError::Unsafe)?;
        mcp_satellite_http::client::install_tls_provider();
        let http = reqwest::Client::builder()
            .unix_socket(socket)
            .no_proxy()
            .tls_certs_only([])
            .build()
            .map_err(|error| ClientError::ConnectionLost(error.to_string()))?;
        Ok(Self { http, data_dir: data_dir.to_owned(), _directory: directory })
    }

    /// Sends a GET request and parses the JSON response.
    ///
    /// # Errors
    /// Returns an error if no satellite is running, it rejects the request, or the connection fails.
    pub async fn get<T: DeserializeOwned>(&self, path: &str, query: &impl Serialize) -> Result<T, ClientError> {
        let response = self.send(self.http.get(url(path, query)?)).await?;
        response.json().await.map_err(|error| ClientError::ConnectionLost(error.to_string()))
    }

    /// Sends a GET request and streams the response as JSON lines.
    ///
    /// # Errors
    /// See [`ConsoleClient::get`].
    pub async fn stream(&self, path: &str, query: &impl Serialize) -> Result<ResponseLines, ClientError> {
        Ok(ResponseLines { response: self.send(self.http.get(url(path, query)?)).await?, buffer: Vec::new() })
    }

    /// Sends a POST request and returns the response body as text.
    ///
    /// # Errors
    /// See [`ConsoleClient::get`].
    pub async fn post_text(&self, path: &str, body: &impl Serialize) -> Result<String, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| ClientError::ConnectionLost(error.to_string()))?;
        let request = self.http.post(url(path, &())?).header("content-type", "application/json").body(body);
        self.send(request).await?.text().await.map_err(|error| ClientError::ConnectionLost(error.to_string()))
    }

    /// Sends a POST request and parses the JSON response.
    ///
    /// # Errors
    /// See [`ConsoleClient::get`].
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let text = self.post_text(path, body).await?;
        serde_json::from_str(&text).map_err(|error| ClientError::ConnectionLost(error.to_string()))
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, ClientError> {
        let response = request.send().await.map_err(|error| {
            if error.is_connect() && is_not_listening(&error) {
                ClientError::NotRunning { data_dir: self.data_dir.display().to_string() }
            } else {
                let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
                ClientError::ConnectionLost(causes.last().map(ToString::to_string).unwrap_or_default())
            }
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let text = response.text().await.map_err(|error| ClientError::ConnectionLost(error.to_string()))?;
        let failure = serde_json::from_str(&text)
            .unwrap_or_else(|_| RequestFailure::new("bad_input", format!("{status}: {text}")));
        Err(ClientError::Refused(Box::new(failure)))
    }
}

/// Builds the URL of a request. Its host is arbitrary because the connection goes to the socket.
fn url(path: &str, query: &impl Serialize) -> Result<Url, ClientError> {
    let fields = serde_json::to_value(query).unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
    let given = fields.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let mut url = Url::parse("http://satellite").map_err(|error| ClientError::ConnectionLost(error.to_string()))?;
    url.set_path(path);
    url.query_pairs_mut().extend_pairs(given.map(|(key, value)| (key, text(value))));
    Ok(url)
}

/// Returns true if the socket does not exist or no process listens on it. Other causes, such as a socket of another
/// user, are reported as they are.
fn is_not_listening(error: &reqwest::Error) -> bool {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    let kinds = causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    kinds.into_iter().all(|kind| matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused))
}

/// Lines of a streamed response.
pub struct ResponseLines {
    response: reqwest::Response,
    buffer: Vec<u8>,
}

impl ResponseLines {
    /// Returns true if events are missing from the response because the disk does not accept them.
    pub fn is_incomplete(&self) -> bool {
        self.response.headers().contains_key(NOT_ALL_STORED)
    }

    /// Returns the next line, or `None` at the end.
    ///
    /// # Errors
    /// Returns an error if the connection breaks before the end of the response.
    pub async fn next(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.buffer) {
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                return Ok(Some(line.into()));
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.buffer.extend_from_slice(&chunk),
                Ok(None) => return Ok(None),
                Err(error) => return Err(io::Error::other(error.without_url())),
            }
        }
    }
}
