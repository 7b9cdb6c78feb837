//! The instances that a caller can see: its own ones in one snapshot. Instances of other users are reported as missing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mcp_satellite_actors::model::catalogue::Catalogue;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_actors::model::spec::InstanceSpec;

use crate::names::{self, NameLookup, ServerNameIndex, ServerNames};
use crate::refusal::CallRefusal;

/// A user together with a snapshot.
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
    own: Vec<Arc<InstanceSpec>>,
    labels: Vec<String>,
    register: ServerNameIndex,
}

impl Directory {
    fn new(snapshot: &Snapshot, team: &TeamId, user: &UserId) -> Self {
        let own: Vec<_> = snapshot.user(team, user).map(|view| view.spec.clone()).collect();
        let names: Vec<ServerNames<'_>> = own.iter().map(|spec| named(spec)).collect();
        let (labels, register) = (names::labels(&names), ServerNameIndex::of(&names));
        Self { team: team.clone(), user: user.clone(), own, labels, register }
    }

    fn is_of(&self, snapshot: &Snapshot) -> bool {
        let now = snapshot.user(&self.team, &self.user).map(|view| Arc::as_ptr(&view.spec));
        now.eq(self.own.iter().map(Arc::as_ptr))
    }
}

impl CallerSnapshot {
    /// Creates a caller from a user and a snapshot.
    pub fn new(snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> Self {
        let directory = Arc::new(Directory::new(&snapshot, team, user));
        Self { snapshot, directory }
    }

    /// Returns the user's servers with their labels, sorted by installation.
    pub fn servers(&self) -> impl Iterator<Item = (&str, &Arc<InstanceView>)> {
        let Directory { labels, own, .. } = &*self.directory;
        labels.iter().zip(own).filter_map(|(label, spec)| Some((&**label, self.snapshot.get(&spec.id)?)))
    }

    /// Returns the server of this name.
    ///
    /// # Errors
    /// No server or several servers have this name.
    pub fn server(&self, name: &str) -> Result<&Arc<InstanceView>, CallRefusal> {
        self.taken(self.directory.register.find(name), name)
    }

    /// Splits `text` into the server and the rest. `form` describes it in errors: `server:tool` or `server|uri`.
    ///
    /// # Errors
    /// The text has no separator, or its first part names no server or several.
    pub fn part<'t>(
        &self,
        text: &'t str,
        separator: char,
        form: &str,
    ) -> Result<(&Arc<InstanceView>, &'t str, &'t str), CallRefusal> {
        let Some((found, label, rest)) = self.directory.register.split(text, separator) else {
            return Err(CallRefusal::bad_input(format!("`{text}` is not of the form `{form}`")));
        };
        Ok((self.taken(found, label)?, label, rest))
    }

    /// Returns the catalogues of the user's servers in this snapshot.
    pub fn offered(&self) -> OfferedCatalogues {
        let catalogue = |view: &Arc<InstanceView>| view.offered().cloned();
        let catalogues =
            self.directory.own.iter().map(|spec| self.snapshot.get(&spec.id).and_then(catalogue)).collect();
        OfferedCatalogues { directory: self.directory.clone(), catalogues }
    }

    fn taken(&self, found: &NameLookup, name: &str) -> Result<&Arc<InstanceView>, CallRefusal> {
        let Directory { team, user, own, labels, .. } = &*self.directory;
        let not_found = || CallRefusal::not_found("server", name);
        match found {
            NameLookup::One(at) => self.snapshot.get(&own[*at].id).ok_or_else(not_found),
            NameLookup::Several(all) => {
                let labels: Vec<&str> = all.iter().map(|at| &*labels[*at]).collect();
                Err(CallRefusal::ambiguous(name, &labels))
            }
            NameLookup::None => {
                // All instances are compared in any case, so that the response time does not reveal which ones exist.
                let others = self.snapshot.iter().filter(|view| named(&view.spec).is(name)).count();
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
    pub fn each(&self) -> impl Iterator<Item = (&str, &InstanceSpec, &Arc<Catalogue>)> {
        let Directory { labels, own, .. } = &*self.directory;
        let servers = labels.iter().zip(own).zip(&self.catalogues);
        servers.filter_map(|((label, spec), catalogue)| Some((&**label, &**spec, catalogue.as_ref()?)))
    }

    /// Returns true if the caller's snapshot offers the same.
    pub fn is_of(&self, caller: &CallerSnapshot) -> bool {
        let address = |catalogue: Option<&Arc<Catalogue>>| catalogue.map(Arc::as_ptr);
        let now = |spec: &Arc<InstanceSpec>| address(caller.snapshot.get(&spec.id).and_then(|view| view.offered()));
        Arc::ptr_eq(&self.directory, &caller.directory)
            && self.directory.own.iter().map(now).eq(self.catalogues.iter().map(|known| address(known.as_ref())))
    }
}

fn named(spec: &InstanceSpec) -> ServerNames<'_> {
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
    /// Returns the caller for a user and a snapshot.
    pub fn of(&self, snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> CallerSnapshot {
        let key = (team.clone(), user.clone());
        let known = self.known().by_user.get(&key).cloned();
        let directory = match known {
            // The weak pointer keeps the allocation, so no other snapshot gets the same address.
            Some((seen, directory)) if seen.as_ptr() == Arc::as_ptr(&snapshot) => {
                return CallerSnapshot { snapshot, directory };
            }
            Some((_, directory)) if directory.is_of(&snapshot) => directory,
            Some(_) | None => Arc::new(Directory::new(&snapshot, team, user)),
        };
        let mut known = self.known();
        known.tidy();
        known.by_user.insert(key, (Arc::downgrade(&snapshot), directory.clone()));
        CallerSnapshot { snapshot, directory }
    }

    /// Returns the number of cached users.
    pub fn len(&self) -> usize {
        self.known().by_user.len()
    }

    /// Returns true if no user is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn known(&self) -> std::sync::MutexGuard<'_, CachedDirectories> {
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
