//! Results of the six tools: the data as structured content and as text.

use serde::Serialize;
use serde_json::value::RawValue;

use super::raw;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StructuredResult<'a, C: Serialize> {
    content: C,
    structured_content: &'a RawValue,
}

pub(super) fn structured_result(data: &impl Serialize) -> String {
    #[derive(Serialize)]
    struct Text<'a> {
        r#type: &'static str,
        text: &'a str,
    }
    let data = raw::raw_value(raw::to_json(data));
    raw::to_json(&StructuredResult { content: [Text { r#type: "text", text: data.get() }], structured_content: &data })
}

pub(super) fn structured_result_with(content: &impl Serialize, data: &impl Serialize) -> String {
    let data = raw::raw_value(raw::to_json(data));
    raw::to_json(&StructuredResult { content, structured_content: &data })
}
