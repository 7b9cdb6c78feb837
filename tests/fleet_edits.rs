//! A fleet of real processes whose configuration is edited at random, as people and programs edit it. After each edit
//! exactly the instances whose meaning changed have restarted, those that were added or removed have come or gone with
//! their processes, and nobody else has noticed. `FLEET_EDITS` says how many edits, `FLEET_EDITS_SEED` which: a run prints
//! its seed, and the same seed is the same run.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::print_stdout, reason = "the seed of a test that has failed")]

#[path = "cli/support.rs"]
#[allow(dead_code, reason = "what the tests of the command line need beside this")]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use support::{Home, Satellite, pid, seq, wait_for};

/// A fleet has no more instances: two cores run it.
const INSTANCES_MAX: usize = 14;
/// Tokens of users, in the satellite's environment.
const TOKENS: usize = 60;
/// The template that some installations have in common.
const TEMPLATE: &str = "shared";

type Env = BTreeMap<String, String>;

#[derive(Clone)]
struct Fleet {
    template: Env,
    teams: Vec<Team>,
    /// Makes ids, slugs, tokens and values that were never there.
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
    /// By installation.
    tiers: BTreeMap<String, Env>,
}

#[derive(Clone)]
struct Installation {
    id: String,
    /// [`TEMPLATE`], or one of its own.
    server: String,
    seed: usize,
    max_crashes: Option<usize>,
    team_tier: Env,
    /// Users who do not have it.
    without: BTreeSet<String>,
}

/// What is edited. Of each kind there is one at least.
#[derive(Debug, Clone, Copy)]
enum Edit {
    /// Comments, blanks, and the order of everything that has no order.
    Looks,
    UserTier,
    TeamTier,
    Template,
    Arguments,
    TeamPolicy,
    InstallationPolicy,
    AddInstallation,
    RemoveInstallation,
    LeaveOut,
    AddUser,
    RemoveUser,
    RenameUser,
    AddTeam,
    RemoveTeam,
    Token,
    BadToml,
    UnknownKey,
    TwiceTheSameId,
}

const EDITS: [Edit; 19] = [
    Edit::Looks,
    Edit::UserTier,
    Edit::TeamTier,
    Edit::Template,
    Edit::Arguments,
    Edit::TeamPolicy,
    Edit::InstallationPolicy,
    Edit::AddInstallation,
    Edit::RemoveInstallation,
    Edit::LeaveOut,
    Edit::AddUser,
    Edit::RemoveUser,
    Edit::RenameUser,
    Edit::AddTeam,
    Edit::RemoveTeam,
    Edit::Token,
    Edit::BadToml,
    Edit::UnknownKey,
    Edit::TwiceTheSameId,
];

/// By identity: the name, all that makes a difference to its process, and a number of its policy.
type Meanings = BTreeMap<String, (String, String, usize)>;

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
        let (team_tier, without) = (Env::new(), BTreeSet::new());
        Installation { id, server, seed: number, max_crashes: None, team_tier, without }
    }

    fn meanings(&self) -> Meanings {
        let mut meanings = Meanings::new();
        for team in &self.teams {
            for installation in &team.installations {
                for user in team.users.iter().filter(|user| !installation.without.contains(&user.id)) {
                    let Installation { id, server, seed, max_crashes, team_tier, .. } = installation;
                    let mut env = if server == TEMPLATE { self.template.clone() } else { Env::new() };
                    env.extend(team_tier.clone());
                    env.extend(user.tiers.get(id).cloned().unwrap_or_default());
                    let name = format!("{server}-{}-{}-{id}", team.slug, user.slug);
                    let meaning = format!("{name} {env:?} {seed}");
                    let policy = max_crashes.unwrap_or(team.max_crashes);
                    meanings.insert(format!("{}/{}/{id}", team.id, user.id), (name, meaning, policy));
                }
            }
        }
        meanings
    }

    /// Makes an edit where there is something to make it of; what it came to.
    fn edit(&mut self, edit: Edit, random: &mut StdRng) -> Option<String> {
        let fresh = self.next();
        let room = self.meanings().len() < INSTANCES_MAX - 3;
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
                let said = new_team.id.clone();
                let (users, installations) = (vec![user], vec![installation]);
                teams.push(Team { users, installations, ..new_team });
                said
            });
        }
        let several = teams.len() > 1;
        let team = teams.get_mut(at)?;
        let said = team.id.clone();
        let one_of = |length: usize, random: &mut StdRng| (length > 0).then(|| random.random_range(0..length));
        match edit {
            Edit::UserTier => {
                let of = one_of(team.users.len(), random)?;
                let installation = team.installations.get(one_of(team.installations.len(), random)?)?.clone();
                let user = &mut team.users[of];
                if installation.without.contains(&user.id) {
                    return None;
                }
                user.tiers
                    .entry(installation.id.clone())
                    .or_default()
                    .insert("USER_TIER".to_owned(), fresh.to_string());
                Some(format!("{said}/{}/{}", user.id, installation.id))
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
                Some(format!("{said}/*/{}", installation.id))
            }
            Edit::TeamPolicy => {
                team.max_crashes += 1;
                Some(said)
            }
            Edit::AddInstallation => room.then(|| {
                let said = format!("{said}/*/{}", installation.id);
                team.installations.push(installation);
                said
            }),
            Edit::RemoveInstallation => {
                let of = one_of(team.installations.len().saturating_sub(1), random)?;
                let removed = team.installations.remove(of).id;
                team.users.iter_mut().for_each(|user| drop(user.tiers.remove(&removed)));
                Some(format!("{said}/*/{removed}"))
            }
            Edit::LeaveOut => {
                // One at least keeps it, and who loses it has no tier of it.
                let of = one_of(team.users.len().saturating_sub(1), random)?;
                let installation = one_of(team.installations.len(), random)?;
                let (user, installation) = (&mut team.users[of], &mut team.installations[installation]);
                user.tiers.remove(&installation.id);
                installation.without.insert(user.id.clone());
                Some(format!("{said}/{}/{}", user.id, installation.id))
            }
            Edit::AddUser => room.then(|| {
                let said = format!("{said}/{}", user.id);
                team.users.push(user);
                said
            }),
            Edit::RemoveUser => {
                // The last one in the list is left out of nothing.
                let of = one_of(team.users.len().saturating_sub(1), random)?;
                let removed = team.users.remove(of).id;
                for installation in &mut team.installations {
                    installation.without.remove(&removed);
                }
                Some(format!("{said}/{removed}"))
            }
            Edit::RenameUser | Edit::Token => {
                let of = one_of(team.users.len(), random)?;
                let user = &mut team.users[of];
                match edit {
                    Edit::Token => user.token = fresh,
                    _ => user.slug = format!("u{fresh}"),
                }
                Some(format!("{said}/{}", user.id))
            }
            Edit::RemoveTeam => several.then(|| teams.remove(at).id),
            Edit::Looks | Edit::BadToml | Edit::UnknownKey | Edit::TwiceTheSameId => Some(String::new()),
            Edit::Template | Edit::AddTeam => None,
        }
    }

    /// The file, with everything in an order of its own that means nothing.
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
            for Installation { id, server, seed, max_crashes, team_tier, without } in &team.installations {
                let mut users: Vec<_> = team.users.iter().filter(|user| !without.contains(&user.id)).collect();
                shuffle(&mut users, random);
                let users: Vec<_> = users.iter().map(|user| format!("\"{}\"", user.id)).collect();
                let users =
                    if without.is_empty() { String::new() } else { format!("users = [{}]\n", users.join(", ")) };
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

/// The fleet as it runs.
struct Scene<'a> {
    home: &'a Home,
    satellite: Satellite<'a>,
    config: PathBuf,
    random: StdRng,
    /// Events up to here were looked at.
    seen: u64,
    /// What runs, by name.
    rows: BTreeMap<String, Value>,
    meanings: Meanings,
}

impl Scene<'_> {
    fn events(&self) -> Vec<Value> {
        let since = self.seen.to_string();
        self.home.satellite(&["events", "--json", "--since", &since]).exits(0).json_lines()
    }

    /// Writes the file in one of the ways in which files are written, and sometimes says so.
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

    /// Waits until the configuration was taken on or refused, and says which.
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

    /// Holds what there is against what there must be after an edit.
    fn check(&mut self, what: &str, meanings: Meanings, is_good: bool) {
        let outcome = self.outcome(what);
        let kind = if is_good { "config.refreshed" } else { "config.error" };
        assert_eq!(outcome["type"], kind, "{what}: {outcome:#}");
        let before = std::mem::replace(&mut self.meanings, meanings);
        let of = |one: &Meanings, other: &Meanings, same: bool| -> BTreeSet<String> {
            let wanted = |id: &&String| one[*id].1 != other.get(*id).map_or(String::new(), |other| other.1.clone());
            one.keys().filter(|id| other.contains_key(*id) == same).filter(wanted).cloned().collect()
        };
        let (added, removed) = (of(&self.meanings, &before, false), of(&before, &self.meanings, false));
        let changed = of(&self.meanings, &before, true);
        // A number of the policy is applied in place.
        let is_retuned =
            |(id, new): (&String, &(String, String, usize))| before.get(id).is_some_and(|old| old.2 != new.2);
        let retuned = self.meanings.iter().any(is_retuned);
        let any = retuned || !(added.is_empty() && removed.is_empty() && changed.is_empty());
        if is_good {
            assert_eq!(outcome["data"]["change_detected"], any, "{what}: {outcome:#}");
        }

        let name = |id: &String| self.meanings[id].0.clone();
        let old = |id: &String| pid(&self.rows[&before[id].0]);
        // What changed is on its way, and comes back as another process.
        let arrived = || {
            let rows = self.rows();
            let names: BTreeSet<_> = self.meanings.values().map(|(name, ..)| name).collect();
            let online = |row: &Value| row["status"] == "online" && row["pid"].is_u64();
            let all = rows.keys().collect::<BTreeSet<_>>() == names && rows.values().all(online);
            let restarted = || changed.iter().all(|id| pid(&rows[&name(id)]) != old(id));
            (all && restarted()).then_some(rows)
        };
        let rows = wait_for(&format!("the fleet after {what}"), arrived, || format!("{:#?}", self.rows()));
        for id in self.meanings.keys().filter(|id| !added.contains(*id) && !changed.contains(*id)) {
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
        assert_eq!(there, running, "after {what}");

        let events = self.events();
        let told = |kind: &str| -> BTreeSet<String> {
            let of_kind = events.iter().filter(|event| event["type"] == kind).map(|event| &event["data"]);
            of_kind
                .map(|data| {
                    format!("{}/{}/{}", text(&data["team_id"]), text(&data["user_id"]), text(&data["installation_id"]))
                })
                .collect()
        };
        assert_eq!(told("mcp.server.started"), added, "{what}");
        assert_eq!(told("mcp.server.restarted"), changed, "{what}");
        assert_eq!(told("mcp.server.stopped"), removed.union(&changed).cloned().collect(), "{what}");
        let none = BTreeSet::new();
        for kind in ["mcp.server.crashed", "mcp.server.exited", "mcp.server.permanently_failed", "events.dropped"] {
            assert_eq!(told(kind), none, "{what}: {kind}");
        }
        let of_config = events.iter().filter(|event| event["type"].as_str().unwrap().starts_with("config.")).count();
        assert_eq!(of_config, 1, "{what} was told once: {events:#?}");
        self.seen = events.last().map_or(self.seen, seq);
        self.rows = rows;
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Text that cannot be used, made of text that can.
fn spoiled(edit: Edit, text: &str, random: &mut StdRng) -> String {
    match edit {
        Edit::BadToml => {
            let cut = text.rfind('"').unwrap();
            text[..cut].to_owned()
        }
        Edit::UnknownKey => {
            let key = ["slgu", "idd", "installation"][random.random_range(0..3)];
            text.replacen("slug = ", &format!("{key} = \"x\"\nslug = "), 1)
        }
        // The first of the ids is somebody's, and now another one's, too.
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
fn after_each_of_many_edits_exactly_what_changed_its_meaning_has_restarted() {
    let nanoseconds = SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    let seed = number_of("FLEET_EDITS_SEED").unwrap_or(nanoseconds.into());
    let count = usize::try_from(number_of("FLEET_EDITS").unwrap_or(30)).unwrap();
    println!("FLEET_EDITS_SEED={seed} FLEET_EDITS={count}");
    let mut random = StdRng::seed_from_u64(seed);

    let mut home = Home::new();
    // Ids are numbered; each edit takes two numbers at most.
    let tokens = TOKENS + 3 * count;
    home.env.extend((0..tokens).map(|number| (format!("TOKEN_{number}"), format!("sat_token_number_{number}"))));
    let mut fleet = Fleet::new();
    let config = home.write("satellite.toml", &fleet.text(&mut random));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    let (rows, meanings) = (BTreeMap::new(), Meanings::new());
    let mut scene = Scene { home: &home, satellite, config, random, seen: 0, rows, meanings };
    scene.check("the start", fleet.meanings(), true);

    let mut deck = Vec::new();
    let mut done = BTreeMap::<String, usize>::new();
    let mut number = 0;
    while number < count {
        if deck.is_empty() {
            deck = EDITS.to_vec();
            shuffle(&mut deck, &mut scene.random);
        }
        let edit = deck.pop().unwrap();
        let mut edited = fleet.clone();
        let Some(said) = edited.edit(edit, &mut scene.random) else { continue };
        // More than half would be rejected.
        let (before, after) = (fleet.meanings(), edited.meanings());
        if before.keys().filter(|id| !after.contains_key(*id)).count() * 2 > before.len() {
            continue;
        }
        number += 1;
        *done.entry(format!("{edit:?}")).or_default() += 1;
        let what = format!("edit {number} ({edit:?} {said}) of seed {seed}");
        let is_good = !matches!(edit, Edit::BadToml | Edit::UnknownKey | Edit::TwiceTheSameId);
        if is_good {
            let text = edited.text(&mut scene.random);
            scene.write(&text);
            scene.check(&what, edited.meanings(), true);
            fleet = edited;
        } else {
            edited.edit(Edit::Template, &mut scene.random).unwrap();
            let text = edited.text(&mut scene.random);
            let spoiled = spoiled(edit, &text, &mut scene.random);
            scene.write(&spoiled);
            // What is spoiled has a change in it, too, that must not be taken on.
            scene.check(&what, fleet.meanings(), false);
        }
    }
    println!("{done:?}");
    let Scene { satellite, .. } = scene;
    satellite.terminate().exits(0);
}
