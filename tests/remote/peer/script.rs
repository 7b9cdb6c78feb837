//! What the peer does with a request instead of what it should.

use std::time::Duration;

use super::record::Record;

/// Which requests. What is not said does not matter.
#[derive(Debug, Clone, Default)]
pub(crate) struct When {
    http: Option<&'static str>,
    path: Option<&'static str>,
    rpc: Option<&'static str>,
    tool: Option<&'static str>,
}

impl When {
    /// Every request.
    pub(crate) fn any() -> Self {
        Self::default()
    }

    /// By HTTP method.
    pub(crate) fn http(method: &'static str) -> Self {
        Self { http: Some(method), ..Self::default() }
    }

    /// By path.
    pub(crate) fn path(path: &'static str) -> Self {
        Self { path: Some(path), ..Self::default() }
    }

    /// By the JSON-RPC method in its body.
    pub(crate) fn rpc(method: &'static str) -> Self {
        Self { rpc: Some(method), ..Self::default() }
    }

    /// A call of this tool.
    pub(crate) fn tool(tool: &'static str) -> Self {
        Self { tool: Some(tool), ..Self::rpc("tools/call") }
    }

    fn matches(&self, record: &Record) -> bool {
        self.http.is_none_or(|http| record.http == http)
            && self.path.is_none_or(|path| record.path == path)
            && self.rpc.is_none_or(|rpc| record.rpc.as_deref() == Some(rpc))
            && self.tool.is_none_or(|tool| record.tool.as_deref() == Some(tool))
    }
}

/// What is done.
#[derive(Debug, Clone)]
pub(crate) enum Deed {
    /// This answer, whatever was asked.
    Answer { status: u16, headers: Vec<(&'static str, String)>, body: String },
    /// A JSON-RPC error with the id of the request.
    RpcError { code: i64, message: &'static str },
    /// Reads, and never answers; the connection stays.
    Silence,
    /// Closes the connection without an answer.
    HangUp,
    /// The whole server dies at this moment: every connection closes, nobody listens.
    Die,
    /// The whole server stops at this moment: nothing is read, answered or closed any more.
    Freeze,
    /// Carries the request out, and breaks off in the middle of the answer: of a body whose length was told, or of an
    /// event stream.
    Cut(Answers),
    /// An event stream with nothing in it that can be understood, that ends tidily.
    GarbageSse,
    /// The right answer, a byte at a time.
    Drip { pause: Duration },
    /// An event stream that is alive and never comes to an answer: a comment at a time.
    DripForever { pause: Duration },
    /// A line that does not end.
    EndlessLine(Answers),
    /// Takes the message, and ends every stream tidily.
    EndStreams,
    /// HTTP+SSE: names this address as the endpoint.
    Endpoint(String),
}

/// The two forms of an answer over streamable HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answers {
    Json,
    Sse,
}

impl Deed {
    /// An answer without a body.
    pub(crate) fn status(status: u16) -> Self {
        Self::Answer { status, headers: Vec::new(), body: String::new() }
    }

    /// An answer with a header and no body.
    pub(crate) fn status_with(status: u16, header: &'static str, value: &str) -> Self {
        Self::Answer { status, headers: vec![(header, value.to_owned())], body: String::new() }
    }

    /// What a proxy, a captive portal or a wrong address shows: a page, and success.
    pub(crate) fn html() -> Self {
        Self::Answer {
            status: 200,
            headers: vec![("content-type", "text/html; charset=utf-8".to_owned())],
            body: "<!doctype html><title>Welcome</title>".to_owned(),
        }
    }

    /// The TypeScript SDK's way to say that it does not know a session: 400, and an error that answers nothing.
    pub(crate) fn expired_400() -> Self {
        let body = serde_json::json!({
            "jsonrpc": "2.0",
            "error": {"code": -32000, "message": "Bad Request: No valid session ID provided"},
            "id": null,
        });
        let headers = vec![("content-type", "application/json".to_owned())];
        Self::Answer { status: 400, headers, body: body.to_string() }
    }
}

/// One line of a script. The first that matches and is not used up decides.
#[derive(Debug, Clone)]
pub(super) struct Rule {
    when: When,
    left: Option<usize>,
    deed: Deed,
}

/// What is done instead of the right thing.
#[derive(Debug, Default)]
pub(super) struct Script(Vec<Rule>);

impl Script {
    pub(super) fn push(&mut self, when: When, times: Option<usize>, deed: Deed) {
        self.0.push(Rule { when, left: times, deed });
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn decide(&mut self, record: &Record) -> Option<Deed> {
        let rule = self.0.iter_mut().find(|rule| rule.left != Some(0) && rule.when.matches(record))?;
        rule.left = rule.left.map(|left| left - 1);
        Some(rule.deed.clone())
    }
}
