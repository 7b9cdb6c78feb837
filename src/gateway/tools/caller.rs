//! What a caller sees: its own instances in one snapshot. What is another user's does not exist.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mcp_satellite_actors::model::catalogue::Catalogue;
use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_actors::model::spec::InstanceSpec;

use crate::gateway::names::{self, Found, Names, Register};
use crate::gateway::refusal::Refusal;

/// Somebody who asks, and when.
#[derive(Debug, Clone)]
pub struct Caller {
    snapshot: Arc<Snapshot>,
    directory: Arc<Directory>,
}

/// What is installed for a user, and by what names. Calls look things up in it; it is made anew when something is
/// installed, configured or taken away.
#[derive(Debug)]
struct Directory {
    team: TeamId,
    user: UserId,
    /// Ordered by installation.
    own: Vec<Arc<InstanceSpec>>,
    /// What each of them is called in lists.
    labels: Vec<String>,
    register: Register,
}

impl Directory {
    fn new(snapshot: &Snapshot, team: &TeamId, user: &UserId) -> Self {
        let own: Vec<_> = snapshot.user(team, user).map(|view| view.spec.clone()).collect();
        let names: Vec<Names<'_>> = own.iter().map(|spec| named(spec)).collect();
        let (labels, register) = (names::labels(&names), Register::of(&names));
        Self { team: team.clone(), user: user.clone(), own, labels, register }
    }

    /// Whether it is what it would be if it was made now.
    fn is_of(&self, snapshot: &Snapshot) -> bool {
        let now = snapshot.user(&self.team, &self.user).map(|view| Arc::as_ptr(&view.spec));
        now.eq(self.own.iter().map(Arc::as_ptr))
    }
}

impl Caller {
    /// This user of this team, with what is there now.
    pub fn new(snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> Self {
        let directory = Arc::new(Directory::new(&snapshot, team, user));
        Self { snapshot, directory }
    }

    /// Its servers, ordered by their installations, each with what it is called.
    pub fn servers(&self) -> impl Iterator<Item = (&str, &Arc<InstanceView>)> {
        let Directory { labels, own, .. } = &*self.directory;
        labels.iter().zip(own).filter_map(|(label, spec)| Some((&**label, self.snapshot.get(&spec.id)?)))
    }

    /// The server of this name.
    pub fn server(&self, name: &str) -> Result<&Arc<InstanceView>, Refusal> {
        self.taken(self.directory.register.find(name), name)
    }

    /// The server and what of it `text` means, which is written as `form`: `server:tool` or `server|uri`.
    pub fn part<'t>(
        &self,
        text: &'t str,
        separator: char,
        form: &str,
    ) -> Result<(&Arc<InstanceView>, &'t str, &'t str), Refusal> {
        let Some((found, label, rest)) = self.directory.register.split(text, separator) else {
            return Err(Refusal::bad_input(format!("`{text}` is not of the form `{form}`")));
        };
        Ok((self.taken(found, label)?, label, rest))
    }

    /// What it is offered now.
    pub fn offered(&self) -> Offered {
        let catalogue = |view: &Arc<InstanceView>| view.offered().cloned();
        let catalogues =
            self.directory.own.iter().map(|spec| self.snapshot.get(&spec.id).and_then(catalogue)).collect();
        Offered { directory: self.directory.clone(), catalogues }
    }

    fn taken(&self, found: &Found, name: &str) -> Result<&Arc<InstanceView>, Refusal> {
        let Directory { team, user, own, labels, .. } = &*self.directory;
        let not_found = || Refusal::not_found("server", name);
        match found {
            Found::One(at) => self.snapshot.get(&own[*at].id).ok_or_else(not_found),
            Found::Several(all) => {
                let labels: Vec<&str> = all.iter().map(|at| &*labels[*at]).collect();
                Err(Refusal::ambiguous(name, &labels))
            }
            Found::None => {
                // All are looked at, whether one is found or not: how long it takes tells nobody what there is.
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

/// What somebody is offered, and by what names. Nothing that is made of it changes before it does.
#[derive(Debug, Clone)]
pub struct Offered {
    directory: Arc<Directory>,
    /// Of each of its servers, if it is there.
    catalogues: Box<[Option<Arc<Catalogue>>]>,
}

impl Offered {
    /// Each server that is there, with what it is called and what it has.
    pub fn each(&self) -> impl Iterator<Item = (&str, &InstanceSpec, &Arc<Catalogue>)> {
        let Directory { labels, own, .. } = &*self.directory;
        let servers = labels.iter().zip(own).zip(&self.catalogues);
        servers.filter_map(|((label, spec), catalogue)| Some((&**label, &**spec, catalogue.as_ref()?)))
    }

    /// Whether it is what this caller is offered.
    pub fn is_of(&self, caller: &Caller) -> bool {
        let address = |catalogue: Option<&Arc<Catalogue>>| catalogue.map(Arc::as_ptr);
        let now = |spec: &Arc<InstanceSpec>| address(caller.snapshot.get(&spec.id).and_then(|view| view.offered()));
        Arc::ptr_eq(&self.directory, &caller.directory)
            && self.directory.own.iter().map(now).eq(self.catalogues.iter().map(|known| address(known.as_ref())))
    }
}

fn named(spec: &InstanceSpec) -> Names<'_> {
    Names { server: spec.server.as_str(), installation: spec.id.installation.as_str(), full: &spec.name }
}

/// The callers of late, so that a call costs the same however much is installed.
#[derive(Debug, Default)]
pub struct Callers(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// With the snapshot in which each was last seen to be true.
    by_user: HashMap<(TeamId, UserId), (Weak<Snapshot>, Arc<Directory>)>,
    /// At this many those are forgotten who have not asked of late.
    tidy_at: usize,
}

impl Callers {
    /// This user of this team, with what is there now.
    pub fn of(&self, snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> Caller {
        let key = (team.clone(), user.clone());
        let known = self.known().by_user.get(&key).cloned();
        let directory = match known {
            // An address is not given to another snapshot as long as it is held here.
            Some((seen, directory)) if seen.as_ptr() == Arc::as_ptr(&snapshot) => {
                return Caller { snapshot, directory };
            }
            Some((_, directory)) if directory.is_of(&snapshot) => directory,
            Some(_) | None => Arc::new(Directory::new(&snapshot, team, user)),
        };
        let mut known = self.known();
        known.tidy();
        known.by_user.insert(key, (Arc::downgrade(&snapshot), directory.clone()));
        Caller { snapshot, directory }
    }

    /// How many are known.
    pub fn len(&self) -> usize {
        self.known().by_user.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        // Whoever panicked with it in hand has left a map that is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn tidy(&mut self) {
        if self.by_user.len() >= self.tidy_at {
            self.by_user.retain(|_, (seen, _)| seen.strong_count() > 0);
            self.tidy_at = 2 * self.by_user.len() + 64;
        }
    }
}
