//! Published schemas: generated from the types, stored in `schemas/`, and used to validate every request.

use jsonschema::{ValidationError, Validator};
use mcp_satellite_actors::model::event::Envelope;
use schemars::generate::SchemaSettings;
use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use super::api;
use crate::wire;

// Some validation errors list all allowed values.
const REASON_MAX: usize = 300;

macro_rules! forms {
    ($($(#[$doc:meta])* $form:ident, $name:literal, $type:ty;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum MessageSchema {
            $($(#[$doc])* $form,)*
        }

        impl MessageSchema {
            pub const ALL: &[Self] = &[$(Self::$form,)*];

            /// Returns the name of the schema file below `schemas/`.
            pub fn file(self) -> &'static str {
                match self {
                    $(Self::$form => concat!($name, ".json"),)*
                }
            }

            pub fn published(self) -> &'static str {
                match self {
                    $(Self::$form => include_str!(concat!("../../../schemas/", $name, ".json")),)*
                }
            }

            pub fn generated(self) -> String {
                match self {
                    $(Self::$form => text(&generate_schema::<$type>()),)*
                }
            }
        }
    };
}

forms! {
    Registration, "registration", wire::Registration;
    Registered, "registered", wire::RegistrationResponse;
    Commands, "commands", wire::PollCommands;
    /// Payload of `restart`, `spawn` and `kill`.
    Target, "payload-target", wire::CommandTarget;
    Configure, "payload-configure", wire::ConfigurePayload;
    HealthCheck, "payload-health-check", wire::HealthCheckPayload;
    CommandResult, "command-result", wire::CommandResult;
    Received, "received", wire::EmptyResponse;
    Config, "config", wire::SatelliteConfig;
    Events, "events", wire::EventBatch;
    Event, "event", Envelope;
    EventsTaken, "events-taken", wire::EventBatchResult;
    Heartbeat, "heartbeat", wire::Heartbeat;
    Error, "error", wire::ErrorBody;
    TokenWanted, "admin-token-wanted", api::TokenRequest;
    TokenMade, "admin-token-made", api::IssuedToken;
    ConfigWanted, "admin-config-wanted", api::ConfigUpdate;
    ConfigKept, "admin-config-kept", api::ConfigUpdateResult;
    Satellites, "admin-satellites", api::SatelliteList;
    Satellite, "admin-satellite", api::SatelliteView;
    CommandWanted, "admin-command-wanted", api::CommandRequest;
    CommandState, "admin-command", api::CommandRecordView;
    CommandStates, "admin-commands", api::CommandList;
    StoredEvents, "admin-events", api::StoredEventList;
    Instances, "admin-instances", api::InstanceList;
    Instance, "admin-instance", api::InstanceState;
}

fn generate_schema<T: JsonSchema>() -> Schema {
    let settings = SchemaSettings::draft2020_12().with_transform(RecursiveTransform(IntegerRangeTransform));
    settings.with_transform(RecursiveTransform(DocLinkTransform)).into_generator().into_root_schema_for::<T>()
}

// Replaces doc links in descriptions by plain names: link targets exist only in the code.
#[derive(Debug, Clone)]
struct DocLinkTransform;

impl Transform for DocLinkTransform {
    fn transform(&mut self, schema: &mut Schema) {
        if let Some(Value::String(text)) = schema.get_mut("description") {
            while let Some((before, rest)) = text.split_once("[`")
                && let Some((name, rest)) = rest.split_once("`]")
            {
                // `[name](path)` also has a path.
                let rest = rest.strip_prefix('(').and_then(|path| path.split_once(')')).map_or(rest, |(_, rest)| rest);
                *text = format!("{before}`{name}`{rest}");
            }
        }
    }
}

fn text(schema: &Schema) -> String {
    format!("{schema:#}\n", schema = schema.as_value())
}

// Adds the range of integer formats that do not imply one in JSON Schema.
#[derive(Debug, Clone)]
struct IntegerRangeTransform;

impl Transform for IntegerRangeTransform {
    fn transform(&mut self, schema: &mut Schema) {
        let (min, max) = match schema.get("format").and_then(Value::as_str) {
            Some("uint" | "uint64") => (json!(0), json!(u64::MAX)),
            Some("uint32") => (json!(0), json!(u32::MAX)),
            Some("uint16") => (json!(0), json!(u16::MAX)),
            Some("int32") => (json!(i32::MIN), json!(i32::MAX)),
            _ => return,
        };
        if let Some(object) = schema.as_object_mut() {
            object.entry("minimum").or_insert(min);
            object.entry("maximum").or_insert(max);
        }
    }
}

#[derive(Debug)]
pub struct SchemaValidators {
    // In the order of `MessageSchema::ALL`.
    forms: Vec<Validator>,
    // Validators of the event data by type of event.
    data: Vec<(String, Validator)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaViolation {
    /// JSON pointer to the invalid value; empty for the whole document.
    pub pointer: String,
    /// Description of the violation without the value.
    pub why: String,
}

impl SchemaViolation {
    fn from_error(error: &ValidationError<'_>) -> Self {
        let why = error.masked().to_string().chars().take(REASON_MAX).collect();
        Self { pointer: error.instance_path().as_str().to_owned(), why }
    }

    /// Returns the index of the violation in the array `list`.
    pub(super) fn index(&self, list: &str) -> Option<usize> {
        let mut parts = self.pointer.split('/').skip(1);
        (parts.next()? == list).then(|| parts.next()?.parse().ok())?
    }
}

impl std::fmt::Display for SchemaViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &*self.pointer {
            "" => f.write_str(&self.why),
            place => write!(f, "{place}: {}", self.why),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the schema {file} cannot be used: {why}")]
pub struct PublishedSchemaError {
    file: &'static str,
    why: String,
}

impl SchemaValidators {
    pub fn new() -> Result<Self, PublishedSchemaError> {
        let broken = |form: MessageSchema| {
            move |why: &dyn std::fmt::Display| PublishedSchemaError { file: form.file(), why: why.to_string() }
        };
        let read =
            |form: MessageSchema| serde_json::from_str::<Value>(form.published()).map_err(|why| broken(form)(&why));
        let forms = MessageSchema::ALL.iter().map(|form| validator(&read(*form)?).map_err(|why| broken(*form)(&why)));
        let forms = forms.collect::<Result<_, _>>()?;
        let event = read(MessageSchema::Event)?;
        let types = event["oneOf"].as_array().map_or(&[][..], Vec::as_slice);
        let data = types.iter().filter_map(|of| {
            let kind = of["properties"]["type"]["const"].as_str()?;
            let mut schema = of["properties"]["data"].as_object()?.clone();
            schema.insert("$defs".into(), event["$defs"].clone());
            let data = validator(&Value::Object(schema)).map_err(|why| broken(MessageSchema::Event)(&why));
            Some(data.map(|data| (kind.to_owned(), data)))
        });
        Ok(Self { forms, data: data.collect::<Result<_, _>>()? })
    }

    pub fn check(&self, form: MessageSchema, value: &Value) -> Result<(), SchemaViolation> {
        self.forms[form as usize].validate(value).map_err(|error| SchemaViolation::from_error(&error))
    }

    /// Validates the data of an event of type `kind`.
    ///
    /// # Errors
    ///
    /// Returns the first violation, or an error if the type is unknown.
    pub fn check_event(&self, kind: &str, data: &Value) -> Result<(), SchemaViolation> {
        let Some((_, validator)) = self.data.iter().find(|(name, _)| name == kind) else {
            return Err(SchemaViolation { pointer: String::new(), why: "unknown type of event".to_owned() });
        };
        validator.validate(data).map_err(|error| {
            let SchemaViolation { pointer: place, why } = SchemaViolation::from_error(&error);
            SchemaViolation { pointer: format!("/data{place}"), why }
        })
    }

    pub fn event_types(&self) -> impl Iterator<Item = &str> {
        self.data.iter().map(|(kind, _)| &**kind)
    }
}

fn validator(schema: &Value) -> Result<Validator, String> {
    let options = jsonschema::options().should_validate_formats(true).should_ignore_unknown_formats(true);
    options.build(schema).map_err(|error| error.to_string())
}
