//! The instances that a caller can see: its own ones in one snapshot. Instances of other users are reported as missing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mcp_satellite_actors::model::catalogue::Catalogue;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_actors::model::spec::InstanceSpec;

use crate::names::{self, NameLookup, ServerNameIndex, ServerNames};
use crate::refusal::CallRefusal;

#[derive(Debug, Clone)]
pub struct CallerSnapshot {
    snapshot: Arc<Snapshot>,
    directory: Arc<Directory>,
}

/// Installed servers of a user and their names. Rebuilt when one is installed, configured or removed; calls only look
/// up names.
#[derive(Debug)]
struct Directory {
    team: TeamId,
    user: UserId,
    // Sorted by installation.
    specs: Vec<Arc<InstanceSpec>>,
    labels: Vec<String>,
    name_index: ServerNameIndex,
}

impl Directory {
    fn new(snapshot: &Snapshot, team: &TeamId, user: &UserId) -> Self {
        let specs: Vec<_> = snapshot.user(team, user).map(|view| view.spec.clone()).collect();
        let names: Vec<ServerNames<'_>> = specs.iter().map(|spec| server_names(spec)).collect();
        let (labels, name_index) = (names::labels(&names), ServerNameIndex::new(&names));
        Self { team: team.clone(), user: user.clone(), specs, labels, name_index }
    }

    fn is_current_for(&self, snapshot: &Snapshot) -> bool {
        let current = snapshot.user(&self.team, &self.user).map(|view| Arc::as_ptr(&view.spec));
        current.eq(self.specs.iter().map(Arc::as_ptr))
    }
}

impl CallerSnapshot {
    pub fn new(snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> Self {
        let directory = Arc::new(Directory::new(&snapshot, team, user));
        Self { snapshot, directory }
    }

    /// Returns the user's servers with their labels, sorted by installation.
    pub fn servers(&self) -> impl Iterator<Item = (&str, &Arc<InstanceView>)> {
        let Directory { labels, specs: own, .. } = &*self.directory;
        labels.iter().zip(own).filter_map(|(label, spec)| Some((&**label, self.snapshot.get(&spec.id)?)))
    }

    pub fn server(&self, name: &str) -> Result<&Arc<InstanceView>, CallRefusal> {
        self.resolve_lookup(self.directory.name_index.find(name), name)
    }

    /// Splits `text` into the server and the rest. `form` describes it in errors: `server:tool` or `server|uri`.
    ///
    /// # Errors
    /// The text has no separator, or its first part names no server or several.
    pub fn split_server<'t>(
        &self,
        text: &'t str,
        separator: char,
        form: &str,
    ) -> Result<(&Arc<InstanceView>, &'t str, &'t str), CallRefusal> {
        let Some((found, label, rest)) = self.directory.name_index.split(text, separator) else {
            return Err(CallRefusal::bad_input(format!("`{text}` is not of the form `{form}`")));
        };
        Ok((self.resolve_lookup(found, label)?, label, rest))
    }

    pub fn offered_catalogues(&self) -> OfferedCatalogues {
        let catalogue = |view: &Arc<InstanceView>| view.offered_catalogue().cloned();
        let catalogues =
            self.directory.specs.iter().map(|spec| self.snapshot.get(&spec.id).and_then(catalogue)).collect();
        OfferedCatalogues { directory: self.directory.clone(), catalogues }
    }

    fn resolve_lookup(&self, found: &NameLookup, name: &str) -> Result<&Arc<InstanceView>, CallRefusal> {
        let Directory { team, user, specs: own, labels, .. } = &*self.directory;
        let not_found = || CallRefusal::not_found("server", name);
        match found {
            NameLookup::One(at) => self.snapshot.get(&own[*at].id).ok_or_else(not_found),
            NameLookup::Several(all) => {
                let labels: Vec<&str> = all.iter().map(|at| &*labels[*at]).collect();
                Err(CallRefusal::ambiguous(name, &labels))
            }
            NameLookup::None => {
                // All instances are compared in any case, so that the response time does not reveal which ones exist.
                let others = self.snapshot.iter().filter(|view| server_names(&view.spec).has_name(name)).count();
                if others > 0 {
                    tracing::warn!(
                        server = name,
                        %team,
                        %user,
                        "a request named an instance of another team or user; it was answered as not found"
                    );
                }
                Err(not_found())
            }
        }
    }
}

/// Catalogues and labels of a caller's servers at one moment. Immutable, so that derived data can be cached with it.
#[derive(Debug, Clone)]
pub struct OfferedCatalogues {
    directory: Arc<Directory>,
    // In the order of the directory; `None` for a server that offers nothing now.
    catalogues: Box<[Option<Arc<Catalogue>>]>,
}

impl OfferedCatalogues {
    /// Returns label, specification and catalogue of each server that offers something now.
    pub fn servers(&self) -> impl Iterator<Item = (&str, &InstanceSpec, &Arc<Catalogue>)> {
        let Directory { labels, specs: own, .. } = &*self.directory;
        let servers = labels.iter().zip(own).zip(&self.catalogues);
        servers.filter_map(|((label, spec), catalogue)| Some((&**label, &**spec, catalogue.as_ref()?)))
    }

    pub fn is_current_for(&self, caller: &CallerSnapshot) -> bool {
        let address = |catalogue: Option<&Arc<Catalogue>>| catalogue.map(Arc::as_ptr);
        let current =
            |spec: &Arc<InstanceSpec>| address(caller.snapshot.get(&spec.id).and_then(|view| view.offered_catalogue()));
        Arc::ptr_eq(&self.directory, &caller.directory)
            && self.directory.specs.iter().map(current).eq(self.catalogues.iter().map(|known| address(known.as_ref())))
    }
}

fn server_names(spec: &InstanceSpec) -> ServerNames<'_> {
    ServerNames { server: spec.server.as_str(), installation: spec.id.installation.as_str(), full: &spec.name }
}

/// Cache of recent callers, so that the cost of a call does not depend on the number of instances.
#[derive(Debug, Default)]
pub struct CallerCache(Mutex<CachedDirectories>);

#[derive(Debug, Default)]
struct CachedDirectories {
    // With the last snapshot for which the directory was valid.
    by_user: HashMap<(TeamId, UserId), (Weak<Snapshot>, Arc<Directory>)>,
    // Size at which users without a current snapshot are removed.
    tidy_at: usize,
}

impl CallerCache {
    pub fn caller(&self, snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> CallerSnapshot {
        let key = (team.clone(), user.clone());
        let known = self.directories().by_user.get(&key).cloned();
        let directory = match known {
            // The weak pointer keeps the allocation, so no other snapshot gets the same address.
            Some((seen, directory)) if seen.as_ptr() == Arc::as_ptr(&snapshot) => {
                return CallerSnapshot { snapshot, directory };
            }
            Some((_, directory)) if directory.is_current_for(&snapshot) => directory,
            Some(_) | None => Arc::new(Directory::new(&snapshot, team, user)),
        };
        let mut known = self.directories();
        known.tidy();
        known.by_user.insert(key, (Arc::downgrade(&snapshot), directory.clone()));
        CallerSnapshot { snapshot, directory }
    }

    pub fn len(&self) -> usize {
        self.directories().by_user.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn directories(&self) -> std::sync::MutexGuard<'_, CachedDirectories> {
        // A panic leaves the map consistent, so a poisoned lock is still usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CachedDirectories {
    fn tidy(&mut self) {
        if self.by_user.len() >= self.tidy_at {
            self.by_user.retain(|_, (seen, _)| seen.strong_count() > 0);
            self.tidy_at = 2 * self.by_user.len() + 64;
        }
    }
}
