//! What a caller sees: its own instances in one snapshot. What is another user's does not exist.

use std::sync::Arc;

use mcp_satellite_actors::model::ids::{TeamId, UserId};
use mcp_satellite_actors::model::snapshot::{InstanceView, Snapshot};
use mcp_satellite_actors::model::spec::InstanceSpec;

use super::trouble::Trouble;
use crate::gateway::names::{self, Found, Names};

/// Somebody who asks, and when.
#[derive(Debug, Clone)]
pub struct Caller {
    snapshot: Arc<Snapshot>,
    own: Vec<Arc<InstanceView>>,
    team: TeamId,
    user: UserId,
}

impl Caller {
    /// This user of this team, with what is there now.
    pub fn new(snapshot: Arc<Snapshot>, team: &TeamId, user: &UserId) -> Self {
        let own = snapshot.user(team, user).cloned().collect();
        Self { snapshot, own, team: team.clone(), user: user.clone() }
    }

    /// Its servers, ordered by their installations, each with what it is called.
    pub fn servers(&self) -> impl Iterator<Item = (String, &Arc<InstanceView>)> {
        let names: Vec<Names<'_>> = self.own.iter().map(|view| named(&view.spec)).collect();
        names::labels(&names).into_iter().zip(&self.own)
    }

    /// The server of this name.
    pub fn server(&self, name: &str) -> Result<&Arc<InstanceView>, Trouble> {
        self.taken(names::find(self.names(), name), name)
    }

    /// The server and what of it `text` means, which is written as `form`: `server:tool` or `server|uri`.
    pub fn part<'t>(
        &self,
        text: &'t str,
        separator: char,
        form: &str,
    ) -> Result<(&Arc<InstanceView>, &'t str, &'t str), Trouble> {
        let Some((found, label, rest)) = names::split(&self.names(), text, separator) else {
            return Err(Trouble::bad_input(format!("`{text}` is not of the form `{form}`")));
        };
        Ok((self.taken(found, label)?, label, rest))
    }

    fn names(&self) -> impl Iterator<Item = Names<'_>> + Clone {
        self.own.iter().map(|view| named(&view.spec))
    }

    fn taken(&self, found: Found, name: &str) -> Result<&Arc<InstanceView>, Trouble> {
        match found {
            Found::One(at) => Ok(&self.own[at]),
            Found::Several(all) => {
                let labels: Vec<String> = self.servers().map(|(label, _)| label).collect();
                let labels: Vec<&str> = all.into_iter().map(|at| &*labels[at]).collect();
                Err(Trouble::ambiguous(name, &labels))
            }
            Found::None => {
                if !matches!(names::find(self.snapshot.iter().map(|view| named(&view.spec)), name), Found::None) {
                    tracing::warn!(
                        server = name,
                        team = %self.team,
                        user = %self.user,
                        "a request named an instance of another team or user; it was answered as not found"
                    );
                }
                Err(Trouble::no_server(name))
            }
        }
    }
}

fn named(spec: &InstanceSpec) -> Names<'_> {
    Names { server: spec.server.as_str(), installation: spec.id.installation.as_str(), full: &spec.name }
}
