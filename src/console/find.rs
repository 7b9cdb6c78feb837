//! Finds the instance that a name selects. Names are looked up, never parsed. Instances of another team or user are
//! treated as nonexistent.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use mcp_satellite_actors::model::event::EventSubject;
use mcp_satellite_actors::model::snapshot::Snapshot;
use mcp_satellite_actors::model::spec::InstanceSpec;

use super::api::{ConsoleFilter, InstanceSelector, RequestFailure};
use crate::config::GatewayUser;
use crate::config::reader::nearest;
use crate::journal;

const NAMES_MAX: usize = 10;

/// Users of the configuration. The snapshot lacks those without a server.
#[derive(Debug, Default)]
pub(crate) struct TeamMembers(Mutex<BTreeSet<TeamMember>>);

/// A user and its team, each as `[id, slug]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct TeamMember {
    team: [String; 2],
    user: [String; 2],
}

impl TeamMembers {
    pub(crate) fn set(&self, users: &[GatewayUser]) {
        let member = |user: &GatewayUser| TeamMember {
            team: [user.team.to_string(), user.team_slug.to_string()],
            user: [user.user.to_string(), user.slug.to_string()],
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = users.iter().map(member).collect();
    }

    /// Checks that the team and the user of a filter exist: a mistyped name is an error, not an empty list.
    pub(crate) fn check(&self, filter: &ConsoleFilter, snapshot: &Snapshot) -> Result<(), Box<RequestFailure>> {
        if filter.team.is_none() && filter.user.is_none() {
            return Ok(());
        }
        let mut members = self.all_members(snapshot);
        if let Some(team) = &filter.team {
            let (of_team, others): (BTreeSet<_>, BTreeSet<_>) =
                members.into_iter().partition(|member| member.team.contains(team));
            if of_team.is_empty() {
                return Err(not_found("team", team, others.iter().map(|member| &member.team)).into());
            }
            members = of_team;
        }
        match &filter.user {
            Some(user) if !members.iter().any(|member| member.user.contains(user)) => {
                Err(not_found("user", user, members.iter().map(|member| &member.user)).into())
            }
            Some(_) | None => Ok(()),
        }
    }

    pub(crate) fn team_id(&self, team: &str, snapshot: &Snapshot) -> Option<String> {
        let is_in_team = |member: &TeamMember| member.team.iter().any(|name| name == team);
        self.all_members(snapshot).into_iter().find(is_in_team).map(|TeamMember { team: [id, _], .. }| id)
    }

    /// Returns the ids of the users with this id or slug, in the team with this id or in all teams.
    pub(crate) fn user_ids(&self, team: Option<&str>, user: &str, snapshot: &Snapshot) -> BTreeSet<String> {
        let is_it = |member: &TeamMember| {
            team.is_none_or(|team| member.team[0] == team) && member.user.iter().any(|name| name == user)
        };
        self.all_members(snapshot).into_iter().filter(is_it).map(|TeamMember { user: [id, _], .. }| id).collect()
    }

    fn all_members(&self, snapshot: &Snapshot) -> BTreeSet<TeamMember> {
        let mut members = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        members.extend(snapshot.iter().map(|view| TeamMember {
            team: [view.spec.id.team.to_string(), view.spec.team_slug.to_string()],
            user: [view.spec.id.user.to_string(), view.spec.user_slug.to_string()],
        }));
        members
    }
}

fn not_found<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a [String; 2]>) -> RequestFailure {
    let (ids, slugs): (BTreeSet<&str>, BTreeSet<&str>) = known.map(|[id, slug]| (id.as_str(), slug.as_str())).unzip();
    let near: Vec<&str> = ids.union(&slugs).copied().collect();
    let slugs: Vec<&str> = slugs.into_iter().collect();
    RequestFailure::new("not_found", format!("there is no {what} `{name}`{}", hint(what, name, &near, &slugs)))
}

/// Returns the end of an error message: the nearest of `known`, a known name that ends with `name`, or the first of
/// `listed`.
pub(crate) fn hint(what: &str, name: &str, known: &[&str], listed: &[&str]) -> String {
    let ends = known.iter().copied().find(|known| known.ends_with(&format!(".{name}")));
    match (nearest(name, known).or(ends), listed) {
        (Some(near), _) => format!("; did you mean `{near}`?"),
        (None, []) => format!("; no {what} is configured"),
        (None, _) => {
            let more = if listed.len() > NAMES_MAX { ", …" } else { "" };
            let listed: Vec<&str> = listed.iter().copied().take(NAMES_MAX).collect();
            format!("; use one of: {}{more}", listed.join(", "))
        }
    }
}

/// Returns true if the event is about an instance of the team with this id or slug. Events contain only ids, so a slug
/// is compared with the instance's name, SERVER-TEAM-USER-INSTALLATION.
pub(crate) fn is_of_team(of: &EventSubject, team: &str) -> bool {
    of.team_id.as_str() == team || of.process_id.starts_with(&format!("{}-{team}-", of.server_slug))
}

/// Searches the stored events for the team with this id or slug. Returns its id, or the ids of all teams if there is
/// none.
pub(crate) fn stored_team(directory: &Path, team: &str) -> std::io::Result<Result<String, BTreeSet<String>>> {
    let by_id = journal::StoredEventQuery { team: Some(team.to_owned()), ..journal::StoredEventQuery::default() };
    let mut events = journal::read(directory, journal::StoredEventQuery::default())?;
    let mut ids = BTreeSet::new();
    for envelope in events.by_ref() {
        if by_id.matches(&envelope) {
            return Ok(Ok(team.to_owned()));
        }
        let Some(of) = envelope.event.subject() else { continue };
        if is_of_team(of, team) {
            return Ok(Ok(of.team_id.to_string()));
        }
        if !ids.contains(of.team_id.as_str()) {
            ids.insert(of.team_id.to_string());
        }
    }
    events.take_error().map_or(Ok(Err(ids)), Err)
}

pub(crate) fn find<'a, T>(
    all: &'a [T],
    spec_of: impl Fn(&T) -> &InstanceSpec,
    selector: &InstanceSelector,
) -> Result<&'a T, Box<RequestFailure>> {
    let filter = ConsoleFilter { team: selector.team.clone(), user: selector.user.clone() };
    let named = |one: &&T| *spec_of(one).name == *selector.server;
    let slugged = |one: &&T| spec_of(one).server.as_str() == selector.server;
    let own = || all.iter().filter(|one| filter.matches(spec_of(one)));
    if let Some(one) = own().find(named) {
        return Ok(one);
    }
    let matching: Vec<_> = own().filter(slugged).collect();
    match matching.as_slice() {
        [one] => Ok(one),
        [] => {
            if all.iter().any(|one| named(&one) || slugged(&one)) {
                tracing::warn!(
                    server = selector.server,
                    team = selector.team,
                    user = selector.user,
                    "a request named an instance of another team or user; it was answered as not found"
                );
            }
            let message = format!("no server `{}`; `satellite status` lists all servers", selector.server);
            Err(RequestFailure::new("not_found", message).into())
        }
        several => {
            let full: Vec<String> = several.iter().map(|one| format!("  {}", spec_of(one).name)).collect();
            let message = format!(
                "`{}` names {} servers; use --team, --user or one of the full names:\n{}",
                selector.server,
                several.len(),
                full.join("\n")
            );
            Err(RequestFailure::new("ambiguous", message).into())
        }
    }
}
