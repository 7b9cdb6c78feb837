//! The document that a backend provides in place of `[[teams]]` and `[servers]`. It passes the same checks as a file.

use mcp_satellite_model::secret::Secret;
use serde::Serialize;

use super::errors::ConfigErrors;
use super::parse::parse_document;
use super::plan::{Plan, PlanRestrictions};

/// Name of the document in errors. It is not a path, so nothing in the document is relative to a folder.
const NAME: &str = "the backend's configuration";

/// The configuration that a backend provides. It contains secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendDocument {
    pub hash: String,
    /// JSON with one key per line, so that errors have useful places.
    text: Secret,
}

impl BackendDocument {
    pub fn new(hash: String, servers: &impl Serialize, teams: &impl Serialize) -> serde_json::Result<Self> {
        #[derive(Serialize)]
        struct BackendDocumentJson<'a, S, T> {
            servers: &'a S,
            teams: &'a T,
        }
        let text = serde_json::to_string_pretty(&BackendDocumentJson { servers, teams })?;
        Ok(Self { hash, text: text.into() })
    }

    /// Validates the document under the restrictions of `base`.
    ///
    /// # Errors
    /// Returns all errors of the document. References to the satellite's environment and files are errors: a backend
    /// must not read them.
    pub fn plan(&self, base: &PlanRestrictions) -> Result<Plan, ConfigErrors> {
        parse_document(NAME, self.text.expose(), base)
    }
}

impl Plan {
    /// Adds the instances that the backend configures, under the restrictions of this plan.
    ///
    /// # Errors
    /// Returns an error if the document is invalid or conflicts with this plan.
    pub fn with_document(self, document: &BackendDocument) -> Result<Self, ConfigErrors> {
        let plan = document.plan(&self.base)?;
        self.join(plan).finalize()
    }
}
