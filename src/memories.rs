//! What instances have come to, kept in the journal over restarts of the satellite, each with the name of the
//! configuration that it came to it with.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::memo::StoredMemo;
use mcp_satellite_actors::model::spec::InstanceSpec;
use mcp_satellite_actors::seam::Memory;

use crate::catalogue_cache::CatalogueCache;
use crate::journal::Journal;

/// The memory of a satellite.
pub(crate) struct Memories {
    journal: Journal,
    /// Knows what a configuration is called. Without it none can be told from another, and nothing but a stop is remembered.
    catalogues: Option<Arc<CatalogueCache>>,
    /// Of the last satellite, and not asked for yet.
    unclaimed: Mutex<HashMap<InstanceId, String>>,
}

impl Memories {
    pub(crate) fn new(journal: Journal, catalogues: Option<Arc<CatalogueCache>>) -> Self {
        let unclaimed = Mutex::new(journal.memos().clone());
        Self { journal, catalogues, unclaimed }
    }

    /// What the last satellite knew of these, which are all that are configured: each is told once, and the others are
    /// forgotten. Another configuration has a clean slate, but for what a person wants.
    pub(crate) fn recall(&self, specs: &[InstanceSpec]) -> HashMap<InstanceId, StoredMemo> {
        let mut unclaimed = self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner);
        if unclaimed.is_empty() || specs.is_empty() {
            return HashMap::new(); // Nothing is configured yet: a backend may still have to tell what is.
        }
        let mut recalled = HashMap::new();
        for spec in specs {
            let Some(text) = unclaimed.remove(&spec.id) else { continue };
            let stored: StoredMemo = match serde_json::from_str(&text) {
                Ok(stored) => stored,
                Err(error) => {
                    tracing::warn!(installation_name = %spec.name, %error, "what it had come to cannot be read; it begins anew");
                    self.journal.forget(&spec.id);
                    continue;
                }
            };
            let config = self.configuration(spec);
            if config.is_some() && stored.config == config {
                recalled.insert(spec.id.clone(), stored);
                continue;
            }
            let stored = stored.for_another_configuration();
            if stored == StoredMemo::default() {
                self.journal.forget(&spec.id);
            } else {
                self.keep(spec, stored.clone());
                recalled.insert(spec.id.clone(), stored);
            }
        }
        for (id, _) in unclaimed.drain() {
            self.journal.forget(&id);
        }
        recalled
    }

    fn configuration(&self, spec: &InstanceSpec) -> Option<String> {
        self.catalogues.as_ref().map(|catalogues| catalogues.name(spec))
    }

    fn keep(&self, spec: &InstanceSpec, memo: StoredMemo) {
        let memo = StoredMemo { config: self.configuration(spec), ..memo };
        match serde_json::to_string(&memo) {
            Ok(text) => self.journal.remember(&spec.id, text),
            Err(error) => {
                tracing::error!(installation_name = %spec.name, %error, "cannot write down what it has come to");
            }
        }
    }
}

impl Memory for Memories {
    fn remember(&self, spec: &Arc<InstanceSpec>, memo: StoredMemo) {
        self.keep(spec, memo);
    }

    fn forget(&self, id: &InstanceId) {
        self.journal.forget(id);
    }
}
