//! Validators of the published schemas.

use std::fs;
use std::path::{Path, PathBuf};

use jsonschema::{ValidationError, Validator};
use mcp_satellite::backend::server::schema::MessageSchema;
use serde_json::Value;

pub(crate) fn schema_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/backend/schemas")
}

pub(crate) struct SchemaValidators {
    // In the order of `MessageSchema::ALL`.
    forms: Vec<Validator>,
    // Validators of the event data by type of event.
    data: Vec<(String, Validator)>,
}

#[derive(Debug)]
pub(crate) struct SchemaViolation {
    /// JSON pointer to the invalid value; empty for the whole document.
    pointer: String,
    /// JSON pointer to the violated constraint in the schema.
    pub(crate) constraint: String,
    why: String,
}

impl SchemaViolation {
    fn from_error(error: &ValidationError<'_>) -> Self {
        Self {
            pointer: error.instance_path().as_str().to_owned(),
            constraint: error.schema_path().as_str().to_owned(),
            why: error.masked().to_string(),
        }
    }
}

impl std::fmt::Display for SchemaViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.pointer, self.why)
    }
}

impl SchemaValidators {
    pub(crate) fn new() -> Self {
        let read = |form: MessageSchema| -> Value {
            serde_json::from_str(&fs::read_to_string(schema_dir().join(form.file())).unwrap()).unwrap()
        };
        let event = read(MessageSchema::Event);
        let data = event["oneOf"].as_array().unwrap().iter().map(|of| {
            let mut schema = of["properties"]["data"].as_object().unwrap().clone();
            schema.insert("$defs".into(), event["$defs"].clone());
            (of["properties"]["type"]["const"].as_str().unwrap().to_owned(), validator(&Value::Object(schema)))
        });
        let data = data.collect();
        Self { forms: MessageSchema::ALL.iter().map(|form| validator(&read(*form))).collect(), data }
    }

    pub(crate) fn check(&self, form: MessageSchema, value: &Value) -> Result<(), SchemaViolation> {
        self.forms[form as usize].validate(value).map_err(|error| SchemaViolation::from_error(&error))
    }

    /// Validates the data of an event of type `kind`.
    pub(crate) fn check_event(&self, kind: &str, data: &Value) -> Result<(), SchemaViolation> {
        let (_, validator) = self.data.iter().find(|(name, _)| name == kind).unwrap();
        validator.validate(data).map_err(|error| SchemaViolation::from_error(&error))
    }

    pub(crate) fn event_types(&self) -> usize {
        self.data.len()
    }
}

fn validator(schema: &Value) -> Validator {
    let options = jsonschema::options().should_validate_formats(true).should_ignore_unknown_formats(true);
    options.build(schema).unwrap()
}
