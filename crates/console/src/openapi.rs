//! The description of the API in `OpenAPI` 3.1, collected from the types of the handlers.

use axum::http::Method;
use mcp_satellite_config::Role;
use mcp_satellite_gateway::pages::header::{LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::problem::Problem;
use crate::sse;

const VERSION: &str = "3.1.0";
const JSON: &str = "application/json";
const EVENTS: &str = sse::MEDIA_TYPE;

pub(crate) struct ApiDescription {
    paths: Map<String, Value>,
    responses: SchemaGenerator,
    requests: SchemaGenerator,
}

/// One method of one path.
pub(crate) struct ApiOperation<'a> {
    pub(crate) method: &'a Method,
    pub(crate) path: &'a str,
    /// Lowest role; `None` needs no token.
    pub(crate) role: Option<Role>,
    pub(crate) summary: &'a str,
}

/// Returns the content of a response that is text of one of these media types.
pub(crate) fn text_content(media_types: &[&str]) -> Value {
    let content = |media_type: &&str| ((*media_type).to_owned(), json!({ "schema": { "type": "string" } }));
    Value::Object(media_types.iter().map(content).collect())
}

impl Default for ApiDescription {
    fn default() -> Self {
        let settings = SchemaSettings::draft2020_12();
        let responses = settings.clone().for_serialize().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
        });
        let requests = settings.for_deserialize().with(|settings| settings.inline_subschemas = true);
        Self { paths: Map::new(), responses: responses.into_generator(), requests: requests.into_generator() }
    }
}

impl ApiDescription {
    /// Returns the schema of a JSON response.
    pub(crate) fn response<R: JsonSchema>(&mut self) -> Value {
        json!({ JSON: { "schema": self.responses.subschema_for::<R>() } })
    }

    /// Returns the schema of a request body, without the definition of its dialect.
    pub(crate) fn input<T: JsonSchema>(&mut self) -> Value {
        let mut schema = self.requests.subschema_for::<T>().to_value();
        if let Some(object) = schema.as_object_mut() {
            object.remove("$schema");
        }
        schema
    }

    /// Adds header parameters to an operation.
    pub(crate) fn add_headers(&mut self, operation: &ApiOperation<'_>, names: &[&str]) {
        if let Some(parameters) = self.described(operation)["parameters"].as_array_mut() {
            parameters.extend(
                names.iter().map(|name| json!({ "name": name, "in": "header", "schema": { "type": "string" } })),
            );
        }
    }

    /// Sets the response of an operation for a status.
    pub(crate) fn set_response(&mut self, operation: &ApiOperation<'_>, status: &str, summary: &str, content: Value) {
        let mut response = json!({ "description": summary });
        if !content.is_null() {
            response["content"] = content;
        }
        self.described(operation)["responses"][status] = response;
    }

    /// Adds the operations of a path that passes MCP messages on.
    pub(crate) fn add_mcp(&mut self, path: &str, role: Role, summary: &str) {
        let message = json!({ "schema": { "type": ["object", "array"] } });
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let operation = ApiOperation { method: &method, path, role: Some(role), summary };
            let body = (method == Method::POST).then(|| message["schema"].clone());
            let answers = if method == Method::GET {
                text_content(&[EVENTS])
            } else {
                json!({ JSON: message, EVENTS: text_content(&[EVENTS])[EVENTS] })
            };
            self.add(&operation, &Value::Null, body, &answers);
            self.add_headers(&operation, &[SESSION_ID, PROTOCOL_VERSION]);
            // Errors of the endpoint are messages of JSON-RPC.
            self.described(&operation)["responses"]["default"]["content"][JSON] = message.clone();
            match method {
                Method::GET => self.add_headers(&operation, &[LAST_EVENT_ID]),
                Method::POST => self.set_response(&operation, "202", "Accepted, without an answer", Value::Null),
                _ => {
                    if let Some(responses) = self.described(&operation)["responses"].as_object_mut() {
                        responses.remove("200");
                    }
                    self.set_response(&operation, "204", "The session has ended", Value::Null);
                }
            }
        }
    }

    fn described(&mut self, operation: &ApiOperation<'_>) -> &mut Value {
        let methods = self.paths.entry(operation.path.to_owned()).or_insert_with(|| json!({}));
        &mut methods[operation.method.as_str().to_ascii_lowercase()]
    }

    /// Adds an operation. `query` is the schema of an object with a property for each parameter.
    pub(crate) fn add(&mut self, operation: &ApiOperation<'_>, query: &Value, body: Option<Value>, content: &Value) {
        let ApiOperation { path, role, summary, .. } = operation;
        let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let mut parameters: Vec<Value> = names
            .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
            .collect();
        for (name, schema) in query.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let required = query["required"].as_array().is_some_and(|names| names.iter().any(|one| one == name));
            parameters.push(json!({ "name": name, "in": "query", "required": required, "schema": schema }));
        }
        let problem = self.responses.subschema_for::<Problem>();
        let mut described = json!({
            "summary": summary,
            "parameters": parameters,
            "responses": {
                "200": { "description": "Success", "content": content },
                "default": {
                    "description": "Failure",
                    "content": { "application/problem+json": { "schema": problem } },
                },
            },
        });
        match role {
            Some(role) => described["x-role"] = json!(role.to_string()),
            None => described["security"] = json!([]),
        }
        if let Some(schema) = body {
            described["requestBody"] = json!({ "content": { JSON: { "schema": schema } } });
        }
        *self.described(operation) = described;
    }

    pub(crate) fn into_document(mut self) -> Value {
        let schemas = self.responses.take_definitions(true);
        json!({
            "openapi": VERSION,
            "info": {
                "title": "mcp-satellite",
                "version": env!("CARGO_PKG_VERSION"),
                "description": "Control API of an mcp-satellite. Times are RFC 3339, durations end in `_ms` or \
                                `_seconds`, sizes in `_bytes`. `x-role` is the lowest role of an operation.",
            },
            "security": [{ "bearer": [] }],
            "paths": self.paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": { "bearer": { "type": "http", "scheme": "bearer" } },
            },
        })
    }
}
