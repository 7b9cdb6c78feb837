//! Published schemas: generated from the types and stored in `schemas/`. Tests validate against them every request that a
//! satellite or an administrator sends, and check that the types accept and reject the same values.

use mcp_satellite_actors::model::event::Envelope;
use schemars::generate::SchemaSettings;
use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use super::api;
use crate::wire;

macro_rules! message_schemas {
    ($($(#[$doc:meta])* $variant:ident, $name:literal, $type:ty;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum MessageSchema {
            $($(#[$doc])* $variant,)*
        }

        impl MessageSchema {
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the name of the schema file below `schemas/`.
            pub fn file(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!($name, ".json"),)*
                }
            }

            pub fn generated(self) -> String {
                match self {
                    $(Self::$variant => text(&generate_schema::<$type>()),)*
                }
            }
        }
    };
}

message_schemas! {
    Registration, "registration", wire::Registration;
    RegistrationResponse, "registration-response", wire::RegistrationResponse;
    Commands, "commands", wire::PollCommands;
    /// Payload of `restart`, `spawn` and `kill`.
    Target, "payload-target", wire::CommandTarget;
    Configure, "payload-configure", wire::ConfigurePayload;
    HealthCheck, "payload-health-check", wire::HealthCheckPayload;
    CommandResult, "command-result", wire::CommandResult;
    EmptyResponse, "empty-response", wire::EmptyResponse;
    Config, "config", wire::SatelliteConfig;
    Events, "events", wire::EventBatch;
    Event, "event", Envelope;
    EventBatchResult, "events-response", wire::EventBatchResult;
    Heartbeat, "heartbeat", wire::Heartbeat;
    Fleet, "fleet", wire::FleetList;
    Error, "error", wire::ErrorBody;
    TokenRequest, "admin-token-request", api::TokenRequest;
    IssuedToken, "admin-token", api::IssuedToken;
    ConfigUpdate, "admin-config-update", api::ConfigUpdate;
    ConfigUpdateResult, "admin-config-result", api::ConfigUpdateResult;
    Satellites, "admin-satellites", api::SatelliteList;
    Satellite, "admin-satellite", api::SatelliteView;
    CommandRequest, "admin-command-request", api::CommandRequest;
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
