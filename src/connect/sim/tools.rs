//! The tools that a simulated server lists.

use std::borrow::Cow;

use super::script::Script;

const ECHO: &str = r#"{"name":"echo","description":"Answers with what it is given","inputSchema":{"type":"object","properties":{"text":{}}}}"#;
const ADD: &str = r#"{"name":"add","description":"Adds two numbers","inputSchema":{"type":"object","properties":{"a":{"type":"number"},"b":{"type":"number"}},"required":["a","b"]},"annotations":{"readOnlyHint":true,"idempotentHint":true}}"#;
const SLEEP: &str = r#"{"name":"sleep","description":"Answers late, with progress on the way","inputSchema":{"type":"object","properties":{"ms":{"type":"integer"},"progress_every_ms":{"type":"integer"},"ignore_cancel":{"type":"boolean"}},"required":["ms"]}}"#;

/// Listed only where the script says so.
const SPECIAL: [&str; 7] = [
    r#"{"name":"big","description":"Answers with a text of so many bytes","inputSchema":{"type":"object","properties":{"bytes":{"type":"integer"}},"required":["bytes"]}}"#,
    r#"{"name":"fail","description":"Answers with a JSON-RPC error","inputSchema":{"type":"object","properties":{"message":{"type":"string"}}}}"#,
    r#"{"name":"tool_error","description":"Answers with a result that is an error","inputSchema":{"type":"object","properties":{"message":{"type":"string"}}}}"#,
    r#"{"name":"crash","description":"Ends the server, unanswered","inputSchema":{"type":"object","properties":{"code":{"type":"integer"},"signal":{"type":"integer"}}}}"#,
    r#"{"name":"env","description":"Answers with the value of an environment variable","inputSchema":{"type":"object","properties":{"name":{"type":"string"}},"required":["name"]}}"#,
    r#"{"name":"huge","description":"Answers with one very long line","inputSchema":{"type":"object"}}"#,
    r#"{"name":"received","description":"Answers with what the server has received so far","inputSchema":{"type":"object"}}"#,
];

/// How many tools a server lists, of the ordinary ones and in all. `more` is what it has gained since it started.
pub(super) fn count(script: &Script, more: usize) -> usize {
    script.tools + more + if script.all_tools { SPECIAL.len() } else { 0 }
}

/// The definition of the tool at `index` in the list, as JSON.
pub(super) fn definition(script: &Script, more: usize, index: usize) -> Cow<'static, str> {
    match (index, index.checked_sub(script.tools + more)) {
        (_, Some(special)) => SPECIAL.get(special).copied().unwrap_or_default().into(),
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

/// Whether `name` is one of the numbered tools that the server has.
pub(super) fn is_numbered(script: &Script, more: usize, name: &str) -> bool {
    let number = name.strip_prefix("tool_").and_then(|number| number.parse::<usize>().ok());
    number.is_some_and(|number| (4..=script.tools + more).contains(&number))
}
