//! Random edits of the configuration of a fleet of real processes. After each edit, exactly the instances with a
//! changed configuration have restarted, added instances run, removed instances have no process, and all others are
//! unchanged. `FLEET_EDITS` sets the number of edits and `FLEET_EDITS_SEED` the seed, which every run prints; the same
//! seed repeats a run.

#![allow(clippy::print_stdout, reason = "the seed of a test that has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use testkit::home::{Home, Satellite, pid, seq};
use testkit::wait::wait_for;

use crate::SATELLITE;

/// Limit of the fleet, which two cores must be able to run.
const INSTANCES_MAX: usize = 14;
/// Number of tokens in the satellite's environment.
const TOKENS: usize = 60;
/// The template that several installations share.
const TEMPLATE: &str = "shared";

type Env = BTreeMap<String, String>;

#[derive(Clone)]
struct Fleet {
    template: Env,
    teams: Vec<Team>,
    /// Counter for unique ids, slugs, tokens and values.
    serial: usize,
}

#[derive(Clone)]
struct Team {
    id: String,
    slug: String,
    max_crashes: usize,
    users: Vec<User>,
    installations: Vec<Installation>,
}

#[derive(Clone)]
struct User {
    id: String,
    slug: String,
    token: usize,
    /// The user's variables by installation.
    tiers: BTreeMap<String, Env>,
}

#[derive(Clone)]
struct Installation {
    id: String,
    /// [`TEMPLATE`] or a unique slug.
    server: String,
    seed: usize,
    max_crashes: Option<usize>,
    team_tier: Env,
    /// Users that the installation excludes.
    excluded: BTreeSet<String>,
}

/// Kinds of edits.
#[derive(Debug, Clone, Copy)]
enum Edit {
    /// Comments, whitespace and the order of entries.
    Formatting,
    UserTier,
    TeamTier,
    Template,
    Arguments,
    TeamPolicy,
    InstallationPolicy,
    AddInstallation,
    RemoveInstallation,
    ExcludeUser,
    AddUser,
    RemoveUser,
    RenameUser,
    AddTeam,
    RemoveTeam,
    Token,
    BadToml,
    UnknownKey,
    DuplicateId,
}

const EDITS: [Edit; 19] = [
    Edit::Formatting,
    Edit::UserTier,
    Edit::TeamTier,
    Edit::Template,
    Edit::Arguments,
    Edit::TeamPolicy,
    Edit::InstallationPolicy,
    Edit::AddInstallation,
    Edit::RemoveInstallation,
    Edit::ExcludeUser,
    Edit::AddUser,
    Edit::RemoveUser,
    Edit::RenameUser,
    Edit::AddTeam,
    Edit::RemoveTeam,
    Edit::Token,
    Edit::BadToml,
    Edit::UnknownKey,
    Edit::DuplicateId,
];

/// By identity: name, everything that affects the process, and `max_crashes`.
type Identities = BTreeMap<String, (String, String, usize)>;

impl Fleet {
    fn new() -> Self {
        let mut fleet = Self { template: Env::new(), teams: Vec::new(), serial: 0 };
        for (users, installations) in [(2, 3), (1, 2)] {
            let mut team = fleet.new_team();
            for _ in 0..users {
                team.users.push(fleet.new_user());
            }
            for number in 0..installations {
                team.installations.push(fleet.new_installation(number == 0));
            }
            fleet.teams.push(team);
        }
        fleet
    }

    fn next(&mut self) -> usize {
        self.serial += 1;
        self.serial
    }

    fn new_team(&mut self) -> Team {
        let number = self.next();
        let (id, slug) = (format!("team{number}"), format!("t{number}"));
        Team { id, slug, max_crashes: 3, users: Vec::new(), installations: Vec::new() }
    }

    fn new_user(&mut self) -> User {
        let number = self.next();
        User { id: format!("user{number}"), slug: format!("u{number}"), token: number, tiers: BTreeMap::new() }
    }

    fn new_installation(&mut self, is_shared: bool) -> Installation {
        let number = self.next();
        let id = format!("i{number}");
        let server = if is_shared { TEMPLATE.to_owned() } else { format!("s{number}") };
        let (team_tier, excluded) = (Env::new(), BTreeSet::new());
        Installation { id, server, seed: number, max_crashes: None, team_tier, excluded }
    }

    fn identities(&self) -> Identities {
        let mut identities = Identities::new();
        for team in &self.teams {
            for installation in &team.installations {
                for user in team.users.iter().filter(|user| !installation.excluded.contains(&user.id)) {
                    let Installation { id, server, seed, max_crashes, team_tier, .. } = installation;
                    let mut env = if server == TEMPLATE { self.template.clone() } else { Env::new() };
                    env.extend(team_tier.clone());
                    env.extend(user.tiers.get(id).cloned().unwrap_or_default());
                    let name = format!("{server}-{}-{}-{id}", team.slug, user.slug);
                    let identity = format!("{name} {env:?} {seed}");
                    let policy = max_crashes.unwrap_or(team.max_crashes);
                    identities.insert(format!("{}/{}/{id}", team.id, user.id), (name, identity, policy));
                }
            }
        }
        identities
    }

    /// Applies an edit and returns its target, or `None` if the fleet has no suitable target.
    fn edit(&mut self, edit: Edit, random: &mut StdRng) -> Option<String> {
        let fresh = self.next();
        let room = self.identities().len() < INSTANCES_MAX - 3;
        let at = random.random_range(0..self.teams.len().max(1));
        let is_shared = random.random_bool(0.5);
        let (user, installation) = (self.clone().new_user(), self.clone().new_installation(is_shared));
        let new_team = self.clone().new_team();
        self.serial += 1;
        let Self { template, teams, .. } = self;
        if let Edit::Template = edit {
            template.insert("TEMPLATE".to_owned(), fresh.to_string());
            return Some("the template".to_owned());
        }
        if let Edit::AddTeam = edit {
            return room.then(|| {
                let target = new_team.id.clone();
                let (users, installations) = (vec![user], vec![installation]);
                teams.push(Team { users, installations, ..new_team });
                target
            });
        }
        let several = teams.len() > 1;
        let team = teams.get_mut(at)?;
        let target = team.id.clone();
        let one_of = |length: usize, random: &mut StdRng| (length > 0).then(|| random.random_range(0..length));
        match edit {
            Edit::UserTier => {
                let of = one_of(team.users.len(), random)?;
                let installation = team.installations.get(one_of(team.installations.len(), random)?)?.clone();
                let user = &mut team.users[of];
                if installation.excluded.contains(&user.id) {
                    return None;
                }
                user.tiers
                    .entry(installation.id.clone())
                    .or_default()
                    .insert("USER_TIER".to_owned(), fresh.to_string());
                Some(format!("{target}/{}/{}", user.id, installation.id))
            }
            Edit::TeamTier | Edit::Arguments | Edit::InstallationPolicy => {
                let of = one_of(team.installations.len(), random)?;
                let installation = &mut team.installations[of];
                match edit {
                    Edit::TeamTier => {
                        installation.team_tier.insert("TEAM_TIER".to_owned(), fresh.to_string());
                    }
                    Edit::Arguments => installation.seed = fresh,
                    _ => installation.max_crashes = Some(installation.max_crashes.unwrap_or(3) + 1),
                }
                Some(format!("{target}/*/{}", installation.id))
            }
            Edit::TeamPolicy => {
                team.max_crashes += 1;
                Some(target)
            }
            Edit::AddInstallation => room.then(|| {
                let target = format!("{target}/*/{}", installation.id);
                team.installations.push(installation);
                target
            }),
            Edit::RemoveInstallation => {
                let of = one_of(team.installations.len().saturating_sub(1), random)?;
                let removed = team.installations.remove(of).id;
                team.users.iter_mut().for_each(|user| drop(user.tiers.remove(&removed)));
                Some(format!("{target}/*/{removed}"))
            }
            Edit::ExcludeUser => {
                // The last user keeps the installation, so at least one has it; an excluded user must not configure it.
                let of = one_of(team.users.len().saturating_sub(1), random)?;
                let installation = one_of(team.installations.len(), random)?;
                let (user, installation) = (&mut team.users[of], &mut team.installations[installation]);
                user.tiers.remove(&installation.id);
                installation.excluded.insert(user.id.clone());
                Some(format!("{target}/{}/{}", user.id, installation.id))
            }
            Edit::AddUser => room.then(|| {
                let target = format!("{target}/{}", user.id);
                team.users.push(user);
                target
            }),
            Edit::RemoveUser => {
                // The last user is never excluded, so every installation keeps a user.
                let of = one_of(team.users.len().saturating_sub(1), random)?;
                let removed = team.users.remove(of).id;
                for installation in &mut team.installations {
                    installation.excluded.remove(&removed);
                }
                Some(format!("{target}/{removed}"))
            }
            Edit::RenameUser | Edit::Token => {
                let of = one_of(team.users.len(), random)?;
                let user = &mut team.users[of];
                match edit {
                    Edit::Token => user.token = fresh,
                    _ => user.slug = format!("u{fresh}"),
                }
                Some(format!("{target}/{}", user.id))
            }
            Edit::RemoveTeam => several.then(|| teams.remove(at).id),
            Edit::Formatting | Edit::BadToml | Edit::UnknownKey | Edit::DuplicateId => Some(String::new()),
            Edit::Template | Edit::AddTeam => None,
        }
    }

    /// The configuration file, with all unordered parts shuffled.
    fn text(&self, random: &mut StdRng) -> String {
        let mut blocks = vec!["[gateway]\nlisten = \"127.0.0.1:0\"\n".to_owned()];
        let env = |env: &Env, random: &mut StdRng| {
            let mut pairs: Vec<_> = env.iter().map(|(key, value)| format!("{key} = \"{value}\"")).collect();
            shuffle(&mut pairs, random);
            format!("env = {{ {} }}\n", pairs.join(", "))
        };
        blocks.push(format!("[servers.{TEMPLATE}]\n{}SIM\n", env(&self.template, random)));
        for team in &self.teams {
            let Team { id, slug, max_crashes, .. } = team;
            let mut text = format!(
                "[[teams]]\nslug = \"{slug}\"\nid = \"{id}\"\n[teams.policy.restart]\nmax_crashes = {max_crashes}\n"
            );
            let mut parts = Vec::new();
            for User { id, slug, token, tiers } in &team.users {
                let mut part =
                    format!("[[teams.users]]\nid = \"{id}\"\nslug = \"{slug}\"\ntoken = \"env:TOKEN_{token}\"\n");
                for (installation, tier) in tiers {
                    write!(part, "[teams.users.servers.{installation}]\n{}", env(tier, random)).unwrap();
                }
                parts.push(part);
            }
            for Installation { id, server, seed, max_crashes, team_tier, excluded } in &team.installations {
                let mut users: Vec<_> = team.users.iter().filter(|user| !excluded.contains(&user.id)).collect();
                shuffle(&mut users, random);
                let users: Vec<_> = users.iter().map(|user| format!("\"{}\"", user.id)).collect();
                let users =
                    if excluded.is_empty() { String::new() } else { format!("users = [{}]\n", users.join(", ")) };
                let command = if server == TEMPLATE {
                    format!("args = [\"--seed\", \"{seed}\"]\n")
                } else {
                    format!("SIM \"--seed\", \"{seed}\"\n")
                };
                let mut part =
                    format!("[[teams.installations]]\nid = \"{id}\"\nserver = \"{server}\"\n{users}{command}");
                write!(part, "[teams.installations.team]\n{}", env(team_tier, random)).unwrap();
                if let Some(max_crashes) = max_crashes {
                    write!(part, "[teams.installations.policy.restart]\nmax_crashes = {max_crashes}\n").unwrap();
                }
                parts.push(part);
            }
            shuffle(&mut parts, random);
            text.push_str(&parts.concat());
            blocks.push(text);
        }
        shuffle(&mut blocks, random);
        let blank = ["", "\n", "# a comment, or not\n", "\n\n   \n# é\n"];
        blocks.iter().fold(String::new(), |text, block| text + blank[random.random_range(0..blank.len())] + block)
    }
}

fn shuffle<T>(items: &mut [T], random: &mut StdRng) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.random_range(0..=last));
    }
}

struct RunningFleet<'a> {
    home: &'a Home,
    satellite: Satellite<'a>,
    config: PathBuf,
    random: StdRng,
    /// Seq of the last checked event.
    seen: u64,
    /// Rows of `status` by name.
    rows: BTreeMap<String, Value>,
    identities: Identities,
}

impl RunningFleet<'_> {
    fn events(&self) -> Vec<Value> {
        let since = self.seen.to_string();
        self.home.satellite(&["events", "--json", "--since", &since]).exits(0).json_lines()
    }

    /// Writes the file in place or atomically, at random, and sometimes sends SIGHUP.
    fn write(&mut self, text: &str) {
        let fresh = self.home.write("fresh.toml", text);
        if self.random.random_bool(0.5) {
            fs::rename(fresh, &self.config).unwrap();
        } else {
            fs::copy(fresh, &self.config).unwrap();
        }
        if self.random.random_bool(0.3) {
            self.satellite.signal(Signal::SIGHUP);
        }
    }

    /// Waits for the `config.` event of an edit.
    fn outcome(&self, what: &str) -> Value {
        let of_config = || {
            let mut events = self.events().into_iter();
            events.find(|event| event["type"].as_str().unwrap().starts_with("config."))
        };
        wait_for(what, of_config, || self.satellite.process.stderr().lines().rev().take(5).collect())
    }

    fn rows(&self) -> BTreeMap<String, Value> {
        let name = |row: &Value| row["instance"].as_str().unwrap().to_owned();
        self.home.rows().into_iter().map(|row| (name(&row), row)).collect()
    }

    /// Checks processes, status and events after an edit.
    fn check(&mut self, what: &str, identities: Identities, is_good: bool) {
        let outcome = self.outcome(what);
        let kind = if is_good { "config.refreshed" } else { "config.error" };
        assert_eq!(outcome["type"], kind, "{what}: {outcome:#}");
        let before = std::mem::replace(&mut self.identities, identities);
        let of = |one: &Identities, other: &Identities, same: bool| -> BTreeSet<String> {
            let wanted = |id: &&String| one[*id].1 != other.get(*id).map_or(String::new(), |other| other.1.clone());
            one.keys().filter(|id| other.contains_key(*id) == same).filter(wanted).cloned().collect()
        };
        let (added, removed) = (of(&self.identities, &before, false), of(&before, &self.identities, false));
        let changed = of(&self.identities, &before, true);
        // A changed `max_crashes` is applied without a restart.
        let is_retuned =
            |(id, new): (&String, &(String, String, usize))| before.get(id).is_some_and(|old| old.2 != new.2);
        let retuned = self.identities.iter().any(is_retuned);
        let any = retuned || !(added.is_empty() && removed.is_empty() && changed.is_empty());
        if is_good {
            assert_eq!(outcome["data"]["change_detected"], any, "{what}: {outcome:#}");
        }

        let name = |id: &String| self.identities[id].0.clone();
        let old = |id: &String| pid(&self.rows[&before[id].0]);
        // Changed instances must run as another process.
        let arrived = || {
            let rows = self.rows();
            let names: BTreeSet<_> = self.identities.values().map(|(name, ..)| name).collect();
            let online = |row: &Value| row["status"] == "online" && row["pid"].is_u64();
            let all = rows.keys().collect::<BTreeSet<_>>() == names && rows.values().all(online);
            let restarted = || changed.iter().all(|id| pid(&rows[&name(id)]) != old(id));
            (all && restarted()).then_some(rows)
        };
        let rows = wait_for(&format!("the fleet after {what}"), arrived, || format!("{:#?}", self.rows()));
        for id in self.identities.keys().filter(|id| !added.contains(*id) && !changed.contains(*id)) {
            let (now, then) = (&rows[&name(id)], &self.rows[&name(id)]);
            let of = |row: &Value| (pid(row), row["restarts"].clone(), row["last_exit"].clone());
            assert_eq!(of(now), of(then), "{what} touched {id}");
        }
        for id in removed.iter().chain(&changed) {
            let gone = || (!Path::new(&format!("/proc/{}", old(id))).exists()).then_some(());
            wait_for(&format!("the end of {id}'s process after {what}"), gone, String::new);
        }
        let mut running: Vec<_> = rows.values().map(pid).collect();
        running.sort_unstable();
        let mut there = self.home.processes();
        there.sort_unstable();
        assert_eq!(there, running, "processes after {what}");

        let events = self.events();
        let instances_of = |kind: &str| -> BTreeSet<String> {
            let of_kind = events.iter().filter(|event| event["type"] == kind).map(|event| &event["data"]);
            of_kind
                .map(|data| {
                    format!("{}/{}/{}", text(&data["team_id"]), text(&data["user_id"]), text(&data["installation_id"]))
                })
                .collect()
        };
        assert_eq!(instances_of("mcp.server.started"), added, "{what}");
        assert_eq!(instances_of("mcp.server.restarted"), changed, "{what}");
        assert_eq!(instances_of("mcp.server.stopped"), removed.union(&changed).cloned().collect(), "{what}");
        let none = BTreeSet::new();
        for kind in ["mcp.server.crashed", "mcp.server.exited", "mcp.server.permanently_failed", "events.dropped"] {
            assert_eq!(instances_of(kind), none, "{what}: {kind}");
        }
        let of_config = events.iter().filter(|event| event["type"].as_str().unwrap().starts_with("config.")).count();
        assert_eq!(of_config, 1, "{what} must cause one config event: {events:#?}");
        self.seen = events.last().map_or(self.seen, seq);
        self.rows = rows;
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Makes a valid configuration invalid.
fn invalid(edit: Edit, text: &str, random: &mut StdRng) -> String {
    match edit {
        Edit::BadToml => {
            let cut = text.rfind('"').unwrap();
            text[..cut].to_owned()
        }
        Edit::UnknownKey => {
            let key = ["slgu", "idd", "installation"][random.random_range(0..3)];
            text.replacen("slug = ", &format!("{key} = \"x\"\nslug = "), 1)
        }
        // Repeats the first team, so that its id is not unique.
        _ => {
            let team = text.split("[[teams]]").nth(1).unwrap();
            format!("{text}\n[[teams]]{}", team.split("[[").next().unwrap())
        }
    }
}

fn number_of(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

#[test]
fn random_edits_restart_exactly_the_changed_instances() {
    let nanoseconds = SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    let seed = number_of("FLEET_EDITS_SEED").unwrap_or(nanoseconds.into());
    let count = usize::try_from(number_of("FLEET_EDITS").unwrap_or(30)).unwrap();
    println!("FLEET_EDITS_SEED={seed} FLEET_EDITS={count}");
    let mut random = StdRng::seed_from_u64(seed);

    let mut home = Home::new(SATELLITE);
    // Each edit uses at most two serial numbers.
    let tokens = TOKENS + 3 * count;
    home.env.extend((0..tokens).map(|number| (format!("TOKEN_{number}"), format!("sat_token_number_{number}"))));
    let mut fleet = Fleet::new();
    let config = home.write("satellite.toml", &fleet.text(&mut random));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    let (rows, identities) = (BTreeMap::new(), Identities::new());
    let mut running_fleet = RunningFleet { home: &home, satellite, config, random, seen: 0, rows, identities };
    running_fleet.check("the start", fleet.identities(), true);

    let mut deck = Vec::new();
    let mut done = BTreeMap::<String, usize>::new();
    let mut number = 0;
    while number < count {
        if deck.is_empty() {
            deck = EDITS.to_vec();
            shuffle(&mut deck, &mut running_fleet.random);
        }
        let edit = deck.pop().unwrap();
        let mut edited = fleet.clone();
        let Some(target) = edited.edit(edit, &mut running_fleet.random) else { continue };
        // The satellite rejects the removal of more than half of the instances.
        let (before, after) = (fleet.identities(), edited.identities());
        if before.keys().filter(|id| !after.contains_key(*id)).count() * 2 > before.len() {
            continue;
        }
        number += 1;
        *done.entry(format!("{edit:?}")).or_default() += 1;
        let what = format!("edit {number} ({edit:?} {target}) of seed {seed}");
        let is_good = !matches!(edit, Edit::BadToml | Edit::UnknownKey | Edit::DuplicateId);
        if is_good {
            let text = edited.text(&mut running_fleet.random);
            running_fleet.write(&text);
            running_fleet.check(&what, edited.identities(), true);
            fleet = edited;
        } else {
            edited.edit(Edit::Template, &mut running_fleet.random).unwrap();
            let text = edited.text(&mut running_fleet.random);
            let invalid = invalid(edit, &text, &mut running_fleet.random);
            running_fleet.write(&invalid);
            // The invalid file also contains a change, which must not be applied.
            running_fleet.check(&what, fleet.identities(), false);
        }
    }
    println!("{done:?}");
    let RunningFleet { satellite, .. } = running_fleet;
    satellite.terminate().exits(0);
}
