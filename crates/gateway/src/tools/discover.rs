//! The tool `discover_mcp_tools`: searches the caller's tools and returns what a model needs to call them.

use std::sync::Arc;
use std::time::Instant;

use mcp_satellite_actors::model::catalogue::Tool;
use serde::Serialize;
use serde_json::value::RawValue;

use super::arguments::MetaToolArguments;
use super::caller::CallerSnapshot;
use super::raw::{map_string, members, raw_value};
use super::resources::{UI, qualify_uri};
use super::result::structured_result;
use crate::refusal::CallRefusal;
use crate::search::{CatalogueIndexes, SearchedServer, ToolHit, search};

const QUERY_MAX: usize = 512;
const LIMIT_MAX: usize = 50;
const LIMIT: usize = 10;

#[derive(Serialize)]
struct DiscoveryResult<'a> {
    tools: Vec<DiscoveredTool<'a>>,
    total_found: usize,
    search_time_ms: f64,
}

#[derive(Serialize)]
struct DiscoveredTool<'a> {
    tool_path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a RawValue>,
    input_schema: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_schema: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<&'a RawValue>,
    server_name: &'a str,
    transport: &'static str,
    relevance_score: f64,
    #[serde(rename = "_meta", skip_serializing_if = "Option::is_none")]
    meta: Option<Box<RawValue>>,
}

pub(super) async fn discover(
    caller: &CallerSnapshot,
    indexes: &Arc<CatalogueIndexes>,
    arguments: Option<&str>,
) -> Result<String, CallRefusal> {
    let started = Instant::now();
    let arguments = MetaToolArguments::read(arguments, &["query", "limit"])?;
    let query = arguments.text("query")?;
    if query.chars().nth(QUERY_MAX).is_some() {
        return Err(CallRefusal::bad_input(format!("`query` must have at most {QUERY_MAX} characters")));
    }
    let range = format!("a whole number from 1 to {LIMIT_MAX}");
    let limit = arguments.optional::<usize>("limit", &range)?.unwrap_or(LIMIT);
    if !(1..=LIMIT_MAX).contains(&limit) {
        return Err(CallRefusal::bad_input(format!("`limit` must be {range}")));
    }

    let offered = caller.offered_catalogues();
    let catalogues = offered.servers().map(|(_, _, catalogue)| catalogue.clone()).collect();
    let indexes = indexes.get_or_create_all(catalogues).await;
    let offered: Vec<_> = offered.servers().collect();
    let labels = offered.iter().map(|(label, _, _)| *label);
    let servers: Vec<_> = labels.zip(indexes).map(|(label, index)| SearchedServer { label, index }).collect();
    let hits = search(&query, &servers, limit);
    let anything = raw_value(r#"{"type":"object"}"#.to_owned());
    let offer = |hit: &ToolHit| {
        let (label, spec, catalogue) = offered[hit.server_index];
        DiscoveredTool::new(label, spec.transport(), &catalogue.tools[hit.tool], hit.score, &anything)
    };
    let tools = hits.best.iter().map(offer).collect();
    let search_time_ms = started.elapsed().as_micros() as f64 / 1000.0;
    Ok(structured_result(&DiscoveryResult { tools, total_found: hits.total, search_time_ms }))
}

impl<'a> DiscoveredTool<'a> {
    fn new(label: &'a str, transport: &'static str, tool: &'a Tool, score: f32, anything: &'a RawValue) -> Self {
        let known = members(tool.raw.get()).unwrap_or_default();
        let part = |name: &str| known.get(name).copied().filter(|value| value.get() != "null");
        let meta = |meta: &RawValue| raw_value(map_string(meta.get(), &UI[1..], |uri| qualify_uri(label, uri)));
        Self {
            tool_path: format!("{label}:{}", tool.name),
            description: part("description"),
            input_schema: part("inputSchema").unwrap_or(anything),
            output_schema: part("outputSchema"),
            annotations: part("annotations"),
            server_name: label,
            transport,
            relevance_score: (f64::from(score) * 1000.0).round() / 1000.0,
            meta: part("_meta").map(meta),
        }
    }
}
