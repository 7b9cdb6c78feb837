//! The published schemas: made from the types, kept in `schemas/`, and what every request is held against.

use jsonschema::{ValidationError, Validator};
use mcp_satellite_actors::model::event::Envelope;
use schemars::generate::SchemaSettings;
use schemars::transform::{RecursiveTransform, Transform};
use schemars::{JsonSchema, Schema};
use serde_json::{Value, json};

use super::api;
use crate::backend::wire;

/// How much of a reason is told. One that lists all that would have been right can be long.
const REASON_MAX: usize = 300;

macro_rules! forms {
    ($($(#[$doc:meta])* $form:ident, $name:literal, $type:ty;)*) => {
        /// What can be checked. Each has a file.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Form {
            $($(#[$doc])* $form,)*
        }

        impl Form {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$form,)*];

            /// The name of its file below `schemas/`.
            pub fn file(self) -> &'static str {
                match self {
                    $(Self::$form => concat!($name, ".json"),)*
                }
            }

            /// As it was published.
            pub fn published(self) -> &'static str {
                match self {
                    $(Self::$form => include_str!(concat!("../../../schemas/", $name, ".json")),)*
                }
            }

            /// As its type is now.
            pub fn generated(self) -> String {
                match self {
                    $(Self::$form => text(&of::<$type>()),)*
                }
            }
        }
    };
}

forms! {
    /// A satellite introduces itself.
    Registration, "registration", wire::Registration;
    /// It may come in.
    Registered, "registered", wire::Registered;
    /// What there is to do.
    Commands, "commands", wire::Commands;
    /// The payload of `restart`, `spawn` and `kill`.
    Target, "payload-target", wire::Target;
    /// The payload of `configure`.
    Configure, "payload-configure", wire::Configure;
    /// The payload of `health_check`.
    HealthCheck, "payload-health-check", wire::HealthCheck;
    /// What came of a command.
    CommandResult, "command-result", wire::CommandResult;
    /// The answer where there is nothing to say.
    Received, "received", wire::Received;
    /// What a satellite is to run.
    Config, "config", wire::Config;
    /// Events on their way.
    Events, "events", wire::Events;
    /// One event with its data, by type.
    Event, "event", Envelope;
    /// What became of events.
    EventsTaken, "events-taken", wire::EventsTaken;
    /// The satellite lives.
    Heartbeat, "heartbeat", wire::Heartbeat;
    /// Why not.
    Error, "error", wire::ErrorBody;
    /// A registration token is asked for.
    TokenWanted, "admin-token-wanted", api::TokenWanted;
    /// And made.
    TokenMade, "admin-token-made", api::TokenMade;
    /// A configuration is put.
    ConfigWanted, "admin-config-wanted", api::ConfigWanted;
    /// And kept.
    ConfigKept, "admin-config-kept", api::ConfigKept;
    /// All satellites.
    Satellites, "admin-satellites", api::Satellites;
    /// One.
    Satellite, "admin-satellite", api::Satellite;
    /// A command is queued.
    CommandWanted, "admin-command-wanted", api::CommandWanted;
    /// What has become of it.
    CommandState, "admin-command", api::CommandState;
    /// And of others.
    CommandStates, "admin-commands", api::CommandStates;
    /// Events as they are stored.
    StoredEvents, "admin-events", api::StoredEvents;
    /// How instances are.
    Instances, "admin-instances", api::Instances;
    /// How one is.
    Instance, "admin-instance", api::Instance;
}

fn of<T: JsonSchema>() -> Schema {
    let settings = SchemaSettings::draft2020_12().with_transform(RecursiveTransform(Ranges));
    settings.with_transform(RecursiveTransform(Plain)).into_generator().into_root_schema_for::<T>()
}

/// Descriptions are comments of the code, and its links lead nowhere here.
#[derive(Debug, Clone)]
struct Plain;

impl Transform for Plain {
    fn transform(&mut self, schema: &mut Schema) {
        if let Some(Value::String(text)) = schema.get_mut("description") {
            while let Some((before, rest)) = text.split_once("[`")
                && let Some((name, rest)) = rest.split_once("`]")
            {
                // `[name](path)` has a path, too.
                let rest = rest.strip_prefix('(').and_then(|path| path.split_once(')')).map_or(rest, |(_, rest)| rest);
                *text = format!("{before}`{name}`{rest}");
            }
        }
    }
}

fn text(schema: &Schema) -> String {
    format!("{schema:#}\n", schema = schema.as_value())
}

/// Says how large a number may be, where its type has only said which type it is.
#[derive(Debug, Clone)]
struct Ranges;

impl Transform for Ranges {
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

/// All schemas, ready to check with.
#[derive(Debug)]
pub struct Schemas {
    /// In the order of [`Form::ALL`].
    forms: Vec<Validator>,
    /// The data of each type of event.
    data: Vec<(String, Validator)>,
}

/// Where something is not as it should be, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// A JSON pointer; empty for the whole.
    pub place: String,
    /// In words without the value.
    pub why: String,
}

impl Invalid {
    fn of(error: &ValidationError<'_>) -> Self {
        let why = error.masked().to_string().chars().take(REASON_MAX).collect();
        Self { place: error.instance_path().as_str().to_owned(), why }
    }

    /// The place in the list `list` that this is in.
    pub(super) fn index(&self, list: &str) -> Option<usize> {
        let mut parts = self.place.split('/').skip(1);
        (parts.next()? == list).then(|| parts.next()?.parse().ok())?
    }
}

impl std::fmt::Display for Invalid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &*self.place {
            "" => f.write_str(&self.why),
            place => write!(f, "{place}: {}", self.why),
        }
    }
}

/// A published schema that is none.
#[derive(Debug, thiserror::Error)]
#[error("the schema {file} cannot be used: {why}")]
pub struct BrokenSchema {
    file: &'static str,
    why: String,
}

impl Schemas {
    /// Reads what was published.
    pub fn new() -> Result<Self, BrokenSchema> {
        let broken =
            |form: Form| move |why: &dyn std::fmt::Display| BrokenSchema { file: form.file(), why: why.to_string() };
        let read = |form: Form| serde_json::from_str::<Value>(form.published()).map_err(|why| broken(form)(&why));
        let forms = Form::ALL.iter().map(|form| validator(&read(*form)?).map_err(|why| broken(*form)(&why)));
        let forms = forms.collect::<Result<_, _>>()?;
        let event = read(Form::Event)?;
        let types = event["oneOf"].as_array().map_or(&[][..], Vec::as_slice);
        let data = types.iter().filter_map(|of| {
            let kind = of["properties"]["type"]["const"].as_str()?;
            let mut schema = of["properties"]["data"].as_object()?.clone();
            schema.insert("$defs".into(), event["$defs"].clone());
            let data = validator(&Value::Object(schema)).map_err(|why| broken(Form::Event)(&why));
            Some(data.map(|data| (kind.to_owned(), data)))
        });
        Ok(Self { forms, data: data.collect::<Result<_, _>>()? })
    }

    /// Whether `value` has this form; else the first place where it has not.
    pub fn check(&self, form: Form, value: &Value) -> Result<(), Invalid> {
        self.forms[form as usize].validate(value).map_err(|error| Invalid::of(&error))
    }

    /// Whether `data` is what an event of this type holds.
    pub fn check_event(&self, kind: &str, data: &Value) -> Result<(), Invalid> {
        let Some((_, validator)) = self.data.iter().find(|(name, _)| name == kind) else {
            return Err(Invalid { place: String::new(), why: "events of this type are not known".to_owned() });
        };
        validator.validate(data).map_err(|error| {
            let Invalid { place, why } = Invalid::of(&error);
            Invalid { place: format!("/data{place}"), why }
        })
    }

    /// The types of events that are known.
    pub fn event_types(&self) -> impl Iterator<Item = &str> {
        self.data.iter().map(|(kind, _)| &**kind)
    }
}

fn validator(schema: &Value) -> Result<Validator, String> {
    let options = jsonschema::options().should_validate_formats(true).should_ignore_unknown_formats(true);
    options.build(schema).map_err(|error| error.to_string())
}
