//! The tools `list_mcp_resources` and `read_mcp_resource`: the resources of the caller's servers, addressed as
//! `server|uri`.

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::catalogue::CatalogueEntry;
use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage, member};
use serde::Serialize;
use serde_json::value::RawValue;

use super::arguments::MetaToolArguments;
use super::caller::{CallerSnapshot, OfferedCatalogues};
use super::execute::MetaToolTarget;
use super::raw::{Members, json_string, map_string, members, raw_value};
use super::result::{structured_result, structured_result_with};
use crate::answer::CallAnswer;
use crate::refusal::CallRefusal;

// Path of the member in which a tool or resource names the resource of its user interface.
pub(crate) const UI: [&str; 3] = ["_meta", "ui", "resourceUri"];

// Separator between server and URI.
pub(crate) const SEPARATOR: char = '|';

/// Returns a definition for the list of all servers: as its server wrote it, but with qualified URIs in the member
/// `key` and in the path `UI`.
pub(crate) fn qualify_definition(label: &str, raw: &str, key: &str) -> String {
    let qualify = |uri: &str| qualify_uri(label, uri);
    map_string(&map_string(raw, &[key], qualify), &UI, qualify)
}

#[derive(Serialize)]
struct Resources {
    resources: Vec<Box<RawValue>>,
    resource_templates: Vec<Box<RawValue>>,
}

pub(crate) fn qualify_uri(label: &str, uri: &str) -> String {
    format!("{label}{SEPARATOR}{uri}")
}

/// Answers `list_mcp_resources`. Runs on a blocking thread, because the list may be long.
pub(super) async fn list(caller: &CallerSnapshot, arguments: Option<&str>) -> Result<String, CallRefusal> {
    MetaToolArguments::read(arguments, &[])?;
    let offered = caller.offered_catalogues();
    let written = tokio::task::spawn_blocking(move || structured_result(&Resources::from_catalogues(&offered))).await;
    written.map_err(|_| CallRefusal::closing())
}

impl Resources {
    fn from_catalogues(offered: &OfferedCatalogues) -> Self {
        let mut all = Self { resources: Vec::new(), resource_templates: Vec::new() };
        for (label, _, catalogue) in offered.servers() {
            let entry = |entry: &CatalogueEntry, key: &str| raw_value(qualify_definition(label, entry.raw.get(), key));
            all.resources.extend(catalogue.resources.iter().map(|resource| entry(resource, "uri")));
            all.resource_templates
                .extend(catalogue.resource_templates.iter().map(|template| entry(template, "uriTemplate")));
        }
        all
    }
}

/// Returns the request of `read_mcp_resource` to a server. `params` are those of the client's request.
pub(super) fn resource_request<'a>(
    runtime: &RuntimeHandle,
    caller: &'a CallerSnapshot,
    arguments: Option<&str>,
    params: &Members<'_>,
) -> Result<(MetaToolTarget<'a>, RpcMessage), CallRefusal> {
    let address = MetaToolArguments::read(arguments, &["uri"])?.text("uri")?;
    let (view, label, uri) = caller.split_server(&address, SEPARATOR, "server|uri")?;
    let target = MetaToolTarget::resource(view, label);
    let uri = json_string(uri);
    let message = target.message(runtime, method::RESOURCES_READ, [("uri", &*uri)].into_iter(), params)?;
    Ok((target, message))
}

/// Converts the answer of a server to the result of `read_mcp_resource`. Contents are not cached.
pub(super) fn to_resource_result(answer: CallAnswer) -> Result<CallAnswer, CallRefusal> {
    let answer = match answer {
        CallAnswer::Message(answer) => answer,
        // A server of the session era asks no question in its result.
        CallAnswer::CompletedResult(result) => return contents_result(&result).map(CallAnswer::Result),
        answer => return Ok(answer),
    };
    let outcome = answer.outcome().unwrap_or_default();
    match answer.kind() {
        // The client has to answer a question and then repeats its request.
        MessageKind::Result if is_question(outcome) => Ok(CallAnswer::Message(answer)),
        MessageKind::Result => contents_result(outcome).map(CallAnswer::Result),
        MessageKind::Error | MessageKind::Request | MessageKind::Notification => Err(server_error(outcome)),
    }
}

fn contents_result(result: &str) -> Result<String, CallRefusal> {
    #[derive(Serialize)]
    struct Contents<'a> {
        contents: Vec<&'a RawValue>,
    }
    #[derive(Serialize)]
    struct Block<'a> {
        r#type: &'static str,
        resource: &'a RawValue,
    }
    let found = members(result).and_then(|members| members.get("contents").copied());
    let contents: Option<Vec<&RawValue>> = found.and_then(|contents| serde_json::from_str(contents.get()).ok());
    let Some(contents) = contents else {
        return Err(CallRefusal::new("server_error", "the server's answer has no `contents`"));
    };
    let blocks: Vec<Block<'_>> = contents.iter().map(|resource| Block { r#type: "resource", resource }).collect();
    Ok(structured_result_with(&blocks, &Contents { contents }))
}

fn is_question(result: &str) -> bool {
    member(result, "resultType").is_some_and(|kind| kind == r#""input_required""#)
}

fn server_error(error: &str) -> CallRefusal {
    let error = members(error).unwrap_or_default();
    let message = error.get("message").and_then(|message| serde_json::from_str::<String>(message.get()).ok());
    let code = error.get("code").map_or("", |code| code.get());
    CallRefusal::new("server_error", format!("server error {code}: {}", message.unwrap_or_default()))
}
