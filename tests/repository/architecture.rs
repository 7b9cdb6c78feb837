//! Rules about the code. The compiler proves the boundary between `actors` and the outside world as long as
//! `actors/Cargo.toml` depends on nothing that touches it; the tests here read the rest.

use std::fs;
use std::path::PathBuf;

use crate::{files, root, shown};

struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// Returns the lines of code with their numbers, without comments and without items that only tests compile.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut in_test_item = false;
        let numbered = self.text.lines().enumerate().map(|(at, line)| (at + 1, line));
        numbered.filter(move |(_, line)| {
            in_test_item |= line.starts_with("#[cfg(test)]");
            if in_test_item {
                // An item at the left margin ends with a brace or a semicolon there.
                let at_margin = !line.starts_with([' ', '#', '/']);
                in_test_item = !(at_margin && (line.starts_with('}') || line.ends_with([';', '}'])));
                return false;
            }
            !line.trim_start().starts_with("//")
        })
    }
}

#[test]
fn only_items_that_tests_compile_are_left_out() {
    let text = "\
fn before() {}
#[cfg(test)]
use something::Else;
fn between() {}
#[cfg(test)]
mod tests {
    fn inside() {}
}
#[cfg(test)]
#[path = \"other.rs\"]
mod other;
// A comment.
fn after() {}
";
    let source = Source { path: PathBuf::new(), text: text.to_owned() };
    let code: Vec<_> = source.code().map(|(at, line)| (at, line.trim())).collect();
    assert_eq!(code, [(1, "fn before() {}"), (4, "fn between() {}"), (13, "fn after() {}")]);
}

/// Returns every Rust file below a directory of the repository.
fn sources(directory: &str) -> Vec<Source> {
    files(directory, "rs").into_iter().map(|path| Source { text: fs::read_to_string(&path).unwrap(), path }).collect()
}

/// Returns the occurrences of the words in code, as `path:line: word`.
fn places(sources: &[Source], words: &[&str]) -> Vec<String> {
    let mut places = Vec::new();
    for source in sources {
        for (at, line) in source.code() {
            for word in words.iter().filter(|word| line.contains(**word)) {
                places.push(format!("{}:{at}: {word}", shown(&source.path)));
            }
        }
    }
    places
}

fn nowhere(sources: &[Source], words: &[&str], why: &str) {
    let found = places(sources, words);
    assert!(found.is_empty(), "{why}\n{}", found.join("\n"));
}

/// Returns all Rust files of the repository except this one, which contains the forbidden words.
fn everything() -> Vec<Source> {
    let folders = ["src", "crates", "tests", "benches", "examples", "actors/src", "actors/tests", "actors/benches"];
    let there = folders.into_iter().filter(|folder| root().join(folder).is_dir());
    there.flat_map(sources).filter(|source| !source.path.ends_with(file!())).collect()
}

#[test]
fn rules_and_model_look_at_no_clock_and_touch_no_world() {
    let pure: Vec<Source> = ["actors/src/rules", "crates/model/src"].into_iter().flat_map(sources).collect();
    nowhere(&pure, &["Instant::now", "SystemTime", "Timestamp::now", ".elapsed("], "time is an argument");
    nowhere(&pure, &["rand::", "rng(", "getrandom"], "randomness is an argument");
    nowhere(&pure, &["tokio::", "ractor::", "async fn", "async move", "async {"], "a rule runs without a runtime");
    nowhere(&pure, &["std::fs", "std::net", "std::process", "std::thread", "std::env", "std::io"], "no I/O in rules");
    nowhere(&pure, &["tracing::"], "a rule answers; its actor logs");
}

#[test]
fn actors_have_no_wall_clock_and_no_world() {
    let actors = sources("actors/src");
    let world = ["std::fs", "std::net", "std::process", "std::env", "tokio::net", "tokio::fs", "tokio::process"];
    nowhere(&actors, &world, "the world begins behind the traits of `seam`");
    nowhere(&actors, &["thread::spawn", "thread::sleep", "thread::scope", "thread::Builder"], "work is tasks");
    nowhere(&actors, &["SystemTime", "Timestamp::now"], "the wall clock is the host's");
    nowhere(
        &actors,
        &["std::time::Instant::now", "Instant::now().elapsed"],
        "the clock is tokio's, which tests can pause",
    );
}

#[test]
fn the_actors_name_no_command_of_the_command_line() {
    nowhere(&sources("actors/src"), &["`satellite "], "the next step is a `Remedy`, which each interface phrases");
}

#[test]
fn the_package_of_the_actors_depends_on_nothing_that_touches_the_world() {
    let manifest = fs::read_to_string(root().join("actors/Cargo.toml")).unwrap();
    let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
    let (dependencies, _) = dependencies.split_once("\n[").unwrap();
    for line in dependencies.lines().filter(|line| !line.trim().is_empty()) {
        let name = line.split(['.', ' ', '=']).next().unwrap();
        let worldly =
            ["nix", "rustix", "libc", "reqwest", "hyper", "axum", "socket2", "tempfile", "rand", "mcp-satellite"];
        assert!(!worldly.contains(&name), "`actors` depends on `{name}`");
        if name == "tokio" {
            for feature in ["process", "net", "fs", "signal", "io-std", "rt-multi-thread", "full"] {
                assert!(!line.contains(&format!("\"{feature}\"")), "`actors` has tokio's feature `{feature}`");
            }
        }
        if name == "jiff" {
            assert!(!line.contains("\"std\""), "with `std` jiff reads the wall clock");
        }
    }
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let tokio = workspace.lines().find(|line| line.starts_with("tokio = {")).unwrap();
    assert!(tokio.contains("default-features = false") && !tokio.contains("features = ["), "{tokio}");
}

#[test]
fn the_actors_forbid_unsafe_code() {
    let lib = fs::read_to_string(root().join("actors/src/lib.rs")).unwrap();
    assert!(lib.lines().any(|line| line == "#![forbid(unsafe_code)]"));
}

#[test]
fn one_actor_one_file() {
    let mut actors = 0;
    for source in sources("actors/src") {
        let count = source.code().filter(|(_, line)| line.starts_with("impl Actor for ")).count();
        assert!(count <= 1, "{} has {count} actors", source.path.display());
        actors += count;
    }
    assert!(actors >= 5, "the actors are not found any more: {actors}");
}

#[test]
fn actors_cast_and_never_call() {
    let calls = ["call!(", "call_t!(", "forward!(", "ractor::call", "ractor::rpc", "RpcReplyPort", "multi_call"];
    nowhere(&sources("actors/src"), &calls, "an actor that waits for another can wait for ever");
}

#[test]
fn actors_use_no_names_and_groups_that_are_global_to_the_process() {
    nowhere(
        &sources("actors/src"),
        &["ractor::registry", "ractor::pg", "OutputPort", "where_is("],
        "two satellites may share a process",
    );
}

#[test]
fn tasks_are_spawned_in_one_place_only() {
    let others: Vec<Source> =
        sources("actors/src").into_iter().filter(|source| !source.path.ends_with("tasks.rs")).collect();
    nowhere(
        &others,
        &["tokio::spawn", "tokio::task::spawn", "spawn_blocking", "JoinSet"],
        "a task belongs to an actor's state",
    );
}

#[test]
fn nothing_is_ignored_and_nothing_is_left_to_do() {
    let everything = everything();
    nowhere(&everything, &["todo!(", "unimplemented!(", "dbg!(", "FIXME", "XXX"], "nothing is left to do");
    for source in &everything {
        for line in source.text.lines().filter(|line| line.trim_start().starts_with("#[ignore")) {
            // It runs, in the process that the test beside it starts.
            let is_a_child = line.contains("the child process of the test above");
            assert!(is_a_child, "{}: an ignored test proves nothing", source.path.display());
        }
    }
}

#[test]
fn no_profile_aborts_on_panic() {
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let aborts = workspace.lines().any(|line| line.starts_with("panic") && line.contains("abort"));
    assert!(!aborts, "a panic in one worker must not end the others");
}

/// The members of the workspace and the members that they depend on.
const MEMBERS: [(&str, &[&str]); 12] = [
    ("crates/model", &[]),
    ("actors", &["model"]),
    ("crates/files", &[]),
    ("crates/http", &[]),
    ("crates/config", &["http", "model"]),
    ("crates/process", &["actors", "files"]),
    ("crates/remote", &["actors", "files", "http"]),
    ("crates/sim", &["actors"]),
    ("crates/store", &["actors", "files", "http"]),
    ("crates/gateway", &["actors", "config", "files", "http", "process"]),
    ("crates/backend", &["actors", "config", "files", "http", "store"]),
    ("crates/load", &["actors", "config", "gateway", "process", "remote", "sim"]),
];

#[test]
fn members_depend_on_no_other_members_than_these() {
    let members = files("crates", "toml").len() + 1;
    assert_eq!(members, MEMBERS.len(), "each member is in the table");
    for (member, allowed) in MEMBERS {
        let manifest = fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
        let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
        let dependencies = dependencies.split("\n[").next().unwrap();
        let names =
            dependencies.lines().filter_map(|line| line.strip_prefix("mcp-satellite-")?.split([' ', '.']).next());
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        assert_eq!(names, allowed, "{member}");
    }
}
