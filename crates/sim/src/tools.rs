//! Lists of a simulated server: its tools, and resources and prompts that can only be listed.

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};
use mcp_satellite_protocol::method;

use super::script::SimScript;

const ECHO: &str = r#"{"name":"echo","description":"Returns the given text","inputSchema":{"type":"object","properties":{"text":{},"after_ms":{"type":"integer"}}}}"#;
const ADD: &str = r#"{"name":"add","description":"Adds two numbers","inputSchema":{"type":"object","properties":{"a":{"type":"number"},"b":{"type":"number"}},"required":["a","b"]},"annotations":{"readOnlyHint":true,"idempotentHint":true}}"#;
const SLEEP: &str = r#"{"name":"sleep","description":"Returns after a delay, with progress notifications","inputSchema":{"type":"object","properties":{"ms":{"type":"integer"},"progress_every_ms":{"type":"integer"},"ignore_cancel":{"type":"boolean"}},"required":["ms"]}}"#;

// Tools that are listed only with `all_tools`.
const SPECIAL_TOOLS: [&str; 7] = [
    r#"{"name":"big","description":"Returns a text of this many bytes","inputSchema":{"type":"object","properties":{"bytes":{"type":"integer"}},"required":["bytes"]}}"#,
    r#"{"name":"fail","description":"Returns a JSON-RPC error","inputSchema":{"type":"object","properties":{"message":{"type":"string"}}}}"#,
    r#"{"name":"tool_error","description":"Returns a tool result that is an error","inputSchema":{"type":"object","properties":{"message":{"type":"string"}}}}"#,
    r#"{"name":"crash","description":"Ends the server without an answer","inputSchema":{"type":"object","properties":{"code":{"type":"integer"},"signal":{"type":"integer"}}}}"#,
    r#"{"name":"env","description":"Returns the value of an environment variable","inputSchema":{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}}"#,
    r#"{"name":"huge","description":"Returns one very long line","inputSchema":{"type":"object"}}"#,
    r#"{"name":"received","description":"Returns the calls, pings and cancellations received so far","inputSchema":{"type":"object"}}"#,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SimListKind {
    Tools,
    Resources,
    ResourceTemplates,
    Prompts,
}

impl SimListKind {
    pub(super) fn from_method(method: &str, script: &SimScript) -> Option<Self> {
        let (of, has_it) = match method {
            method::TOOLS_LIST => (Self::Tools, !script.no_tools_capability),
            method::RESOURCES_LIST => (Self::Resources, has_resources(script)),
            method::RESOURCE_TEMPLATES_LIST => (Self::ResourceTemplates, has_resources(script)),
            method::PROMPTS_LIST => (Self::Prompts, script.prompts > 0),
            _ => return None,
        };
        has_it.then_some(of)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tools => "tools",
            Self::Resources => "resources",
            Self::ResourceTemplates => "resourceTemplates",
            Self::Prompts => "prompts",
        }
    }

    pub(super) fn count(self, script: &SimScript, more: usize) -> usize {
        match self {
            Self::Tools => count(script, more),
            Self::Resources => script.resources,
            Self::ResourceTemplates => script.resource_templates,
            Self::Prompts => script.prompts,
        }
    }

    pub(super) fn entry(self, script: &SimScript, more: usize, index: usize) -> Cow<'static, str> {
        let number = index + 1;
        match self {
            Self::Tools => definition(script, more, index),
            Self::Resources => format!(r#"{{"uri":"sim://resource/{number}","name":"Resource {number}"}}"#).into(),
            Self::ResourceTemplates => {
                format!(r#"{{"uriTemplate":"sim://template/{number}/{{name}}","name":"Template {number}"}}"#).into()
            }
            Self::Prompts => format!(r#"{{"name":"prompt_{number}"}}"#).into(),
        }
    }
}

fn has_resources(script: &SimScript) -> bool {
    script.resources + script.resource_templates > 0 || script.resources_error
}

pub(super) fn put_capabilities(line: &mut BytesMut, script: &SimScript) {
    const CHANGES: &str = r#"":{"listChanged":true}"#;
    let all =
        [("tools", !script.no_tools_capability), ("resources", has_resources(script)), ("prompts", script.prompts > 0)];
    line.put_u8(b'{');
    for (nth, (name, _)) in all.iter().filter(|(_, has_it)| *has_it).enumerate() {
        line.put_slice(if nth > 0 { b",\"" } else { b"\"" });
        line.put_slice(name.as_bytes());
        line.put_slice(CHANGES.as_bytes());
    }
    line.put_u8(b'}');
}

pub(super) fn count(script: &SimScript, more: usize) -> usize {
    script.tools + more + if script.all_tools { SPECIAL_TOOLS.len() } else { 0 }
}

pub(super) fn definition(script: &SimScript, more: usize, index: usize) -> Cow<'static, str> {
    match (index, index.checked_sub(script.tools + more)) {
        (_, Some(special)) => SPECIAL_TOOLS.get(special).copied().unwrap_or_default().into(),
        (0, None) => ECHO.into(),
        (1, None) => ADD.into(),
        (2, None) => SLEEP.into(),
        (index, None) => format!(
            r#"{{"name":"tool_{0}","description":"Tool number {0}","inputSchema":{{"type":"object"}}}}"#,
            index + 1
        )
        .into(),
    }
}

pub(super) fn is_numbered(script: &SimScript, more: usize, name: &str) -> bool {
    let number = name.strip_prefix("tool_").and_then(|number| number.parse::<usize>().ok());
    number.is_some_and(|number| (4..=script.tools + more).contains(&number))
}
