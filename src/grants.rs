//! Storage of OAuth grants in the state database.

use std::io;
use std::sync::Arc;

use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_remote::HttpClients;
use mcp_satellite_remote::oauth::{GrantStore, Grants};
use mcp_satellite_store::state::{StateDb, StateKey, StateTable};

/// Loads the stored grants. Blocks on the disk.
pub(crate) fn open(database: &StateDb, clients: Arc<HttpClients>) -> Grants {
    Grants::open(Arc::new(GrantTable(database.clone())), clients)
}

struct GrantTable(StateDb);

impl GrantTable {
    fn set(&self, id: &InstanceId, grant: Option<Vec<u8>>) -> io::Result<()> {
        self.0.set(StateTable::Grants, id.clone(), grant);
        self.0.save().map_err(io::Error::other)
    }
}

impl GrantStore for GrantTable {
    fn load(&self) -> Result<Vec<(InstanceId, Vec<u8>)>, String> {
        let of_instance = |(key, grant)| match key {
            StateKey::Instance(id) => Some((id, grant)),
            StateKey::Name(_) => None,
        };
        Ok(self.0.load(StateTable::Grants)?.into_iter().filter_map(of_instance).collect())
    }

    fn save(&self, id: &InstanceId, grant: Vec<u8>) -> io::Result<()> {
        self.set(id, Some(grant))
    }

    fn delete(&self, id: &InstanceId) -> io::Result<()> {
        self.set(id, None)
    }
}
