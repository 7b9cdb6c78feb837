//! Rules about the code. The compiler enforces that `actors` does no I/O as long as `actors/Cargo.toml` has no
//! dependency that does. These tests check the manifest and the rest of the code.

use std::fs;
use std::path::PathBuf;

use crate::{files, root, shown};

pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl Source {
    /// Returns the lines of code with their numbers, without comments and without items that only tests compile.
    pub(crate) fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let (mut in_test_item, mut in_block) = (false, false);
        let numbered = self.text.lines().enumerate().map(|(at, line)| (at + 1, line));
        numbered.filter(move |(_, line)| {
            in_test_item |= line.starts_with("#[cfg(test)]");
            if in_test_item {
                // An item at the left margin ends with a brace or a semicolon there, a block with a brace only.
                let at_margin = !line.starts_with([' ', '#', '/']);
                in_block |= at_margin && line.ends_with('{');
                in_test_item = !(at_margin && (line.starts_with('}') || !in_block && line.ends_with([';', '}'])));
                in_block &= in_test_item;
                return false;
            }
            !line.trim_start().starts_with("//")
        })
    }
}

#[test]
fn test_items_are_excluded_from_the_checked_code() {
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
pub(crate) fn sources(directory: &str) -> Vec<Source> {
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

fn assert_absent(sources: &[Source], words: &[&str], why: &str) {
    let found = places(sources, words);
    assert!(found.is_empty(), "{why}\n{}", found.join("\n"));
}

/// Returns all Rust files of the repository except this one, which contains the forbidden words.
fn all_sources() -> Vec<Source> {
    let folders = ["src", "crates", "tests", "benches", "examples", "actors/src", "actors/tests", "actors/benches"];
    let there = folders.into_iter().filter(|folder| root().join(folder).is_dir());
    there.flat_map(sources).filter(|source| !source.path.ends_with(file!())).collect()
}

#[test]
fn rules_and_model_use_no_clock_no_randomness_and_no_io() {
    let pure: Vec<Source> = ["actors/src/rules", "crates/model/src"].into_iter().flat_map(sources).collect();
    assert_absent(&pure, &["Instant::now", "SystemTime", "Timestamp::now", ".elapsed("], "time is an argument");
    assert_absent(&pure, &["rand::", "rng(", "getrandom"], "randomness is an argument");
    assert_absent(
        &pure,
        &["tokio::", "ractor::", "async fn", "async move", "async {"],
        "a rule runs without a runtime",
    );
    assert_absent(
        &pure,
        &["std::fs", "std::net", "std::process", "std::thread", "std::env", "std::io"],
        "no I/O in rules",
    );
    assert_absent(&pure, &["tracing::"], "rules do not log; their actors do");
}

#[test]
fn actors_use_no_wall_clock_and_no_io() {
    let actors = sources("actors/src");
    let world = ["std::fs", "std::net", "std::process", "std::env", "tokio::net", "tokio::fs", "tokio::process"];
    assert_absent(&actors, &world, "I/O belongs behind the traits of `seam`");
    assert_absent(
        &actors,
        &["thread::spawn", "thread::sleep", "thread::scope", "thread::Builder"],
        "actors use tasks, not threads",
    );
    assert_absent(&actors, &["SystemTime", "Timestamp::now"], "the host provides the wall clock");
    assert_absent(
        &actors,
        &["std::time::Instant::now", "Instant::now().elapsed"],
        "use the clock of tokio, which tests can pause",
    );
}

#[test]
fn actors_mention_no_satellite_commands() {
    assert_absent(&sources("actors/src"), &["`satellite "], "return a `Remedy`, which each interface words itself");
}

#[test]
fn the_actors_package_has_no_dependency_with_io() {
    let manifest = fs::read_to_string(root().join("actors/Cargo.toml")).unwrap();
    let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
    let (dependencies, _) = dependencies.split_once("\n[").unwrap();
    for line in dependencies.lines().filter(|line| !line.trim().is_empty()) {
        let name = line.split(['.', ' ', '=']).next().unwrap();
        let forbidden =
            ["nix", "rustix", "libc", "reqwest", "hyper", "axum", "socket2", "tempfile", "rand", "mcp-satellite"];
        assert!(!forbidden.contains(&name), "`actors` depends on `{name}`");
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
fn each_file_contains_at_most_one_actor() {
    let mut actors = 0;
    for source in sources("actors/src") {
        let count = source.code().filter(|(_, line)| line.starts_with("impl Actor for ")).count();
        assert!(count <= 1, "{} has {count} actors", source.path.display());
        actors += count;
    }
    assert!(actors >= 5, "the search found only {actors} actors");
}

#[test]
fn actors_cast_and_never_call() {
    let calls = ["call!(", "call_t!(", "forward!(", "ractor::call", "ractor::rpc", "RpcReplyPort", "multi_call"];
    assert_absent(&sources("actors/src"), &calls, "an actor that waits for another can wait forever");
}

#[test]
fn actors_use_no_process_wide_names_or_groups() {
    assert_absent(
        &sources("actors/src"),
        &["ractor::registry", "ractor::pg", "OutputPort", "where_is("],
        "two satellites may share a process",
    );
}

#[test]
fn tasks_are_spawned_only_in_the_tasks_module() {
    let others: Vec<Source> =
        sources("actors/src").into_iter().filter(|source| !source.path.ends_with("tasks.rs")).collect();
    assert_absent(
        &others,
        &["tokio::spawn", "tokio::task::spawn", "spawn_blocking", "JoinSet"],
        "tasks belong to the state of an actor",
    );
}

#[test]
fn no_test_is_ignored_and_no_code_is_unfinished() {
    let all_sources = all_sources();
    assert_absent(&all_sources, &["todo!(", "unimplemented!(", "dbg!(", "FIXME", "XXX"], "unfinished code");
    for source in &all_sources {
        for line in source.text.lines().filter(|line| line.trim_start().starts_with("#[ignore")) {
            // Such a test runs in the process that the test above it starts.
            let is_a_child = line.contains("the child process of the test above");
            assert!(is_a_child, "{}: ignored test", source.path.display());
        }
    }
}

#[test]
fn no_profile_aborts_on_panic() {
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let aborts = workspace.lines().any(|line| line.starts_with("panic") && line.contains("abort"));
    assert!(!aborts, "a panic in one worker must not end the others");
}

#[test]
fn session_and_protocol_do_not_wait_and_read_no_clock() {
    let pure: Vec<Source> = ["crates/session/src", "crates/protocol/src"].into_iter().flat_map(sources).collect();
    assert_absent(&pure, &["Instant::now", "SystemTime", ".elapsed("], "time is an argument");
    assert_absent(
        &pure,
        &["tokio::spawn", "tokio::time", ".await", "async fn", "async move"],
        "drivers do the waiting",
    );
}

#[test]
fn error_codes_headers_and_versions_are_defined_only_in_the_protocol_crate() {
    let product = ["src", "crates", "actors/src"].into_iter().flat_map(sources);
    // Tests write out what is sent.
    let others = ["crates/protocol", "crates/testkit"].map(|member| root().join(member));
    let product = product.filter(|source| !others.iter().any(|member| source.path.starts_with(member)));
    let headers = ["mcp-session-id", "mcp-protocol-version", "mcp-method", "mcp-name", "mcp-param-", "last-event-id"];
    let mut found = Vec::new();
    for source in product {
        for (at, line) in source.code() {
            // A message may begin with the name of a header.
            let text = line.to_ascii_lowercase();
            let is_header =
                headers.iter().any(|name| ['"', ':', '{'].iter().any(|end| text.contains(&format!("\"{name}{end}"))));
            let is_code = line.match_indices("-32").any(|(at, _)| {
                let digits = line[at + 1..].bytes().take_while(u8::is_ascii_digit).count();
                digits == 5 && !line[..at].ends_with(|before: char| before.is_ascii_alphanumeric())
            });
            // Versions are also compared, but not defined.
            let is_list = line.matches("\"202").count() > 1;
            if is_header || is_code || is_list {
                found.push(format!("{}:{at}: {}", shown(&source.path), line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "use `mcp_satellite_protocol`\n{}", found.join("\n"));
}

#[test]
fn methods_are_defined_only_in_the_protocol_crate() {
    let groups = [
        "completion",
        "elicitation",
        "logging",
        "notifications",
        "prompts",
        "resources",
        "roots",
        "sampling",
        "server",
        "subscriptions",
        "tasks",
        "tools",
    ];
    let is_name =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphabetic() || b"/_".contains(&byte));
    let is_method = |text: &str| match text.split_once('/') {
        Some((group, name)) => groups.contains(&group) && is_name(name),
        None => ["initialize", "ping"].contains(&text),
    };
    let members = MEMBERS.iter().filter(|(_, dependencies)| dependencies.contains(&"protocol"));
    let product = members.flat_map(|(member, _)| sources(&format!("{member}/src")));
    let mut found = Vec::new();
    for source in product.filter(|source| !source.path.ends_with("tests.rs")) {
        for (at, line) in source.code() {
            let parts: Vec<&str> = line.split('"').collect();
            // The text of a message may contain its method.
            if parts.windows(2).any(|pair| pair[0] != ":" && is_method(pair[1])) {
                found.push(format!("{}:{at}: {}", shown(&source.path), line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "use `mcp_satellite_protocol::method`\n{}", found.join("\n"));
}

/// The members of the workspace and the members that they depend on.
const MEMBERS: [(&str, &[&str]); 20] = [
    ("crates/protocol", &[]),
    ("crates/model", &["protocol"]),
    ("crates/session", &["model", "protocol"]),
    ("actors", &["model", "protocol", "session"]),
    ("crates/embed", &["actors", "protocol"]),
    ("crates/clients", &[]),
    ("crates/files", &[]),
    ("crates/http", &[]),
    ("crates/bridge", &["model", "protocol"]),
    ("crates/config", &["clients", "http", "model"]),
    ("crates/process", &["actors", "files"]),
    ("crates/remote", &["actors", "files", "http", "protocol"]),
    ("crates/sim", &["actors", "protocol"]),
    ("crates/store", &["actors", "files", "http"]),
    ("crates/gateway", &["actors", "config", "files", "http", "process", "protocol"]),
    ("crates/backend", &["actors", "config", "files", "http", "protocol", "store"]),
    ("crates/console", &["actors", "backend", "config", "gateway", "process", "remote", "store"]),
    ("crates/load", &["actors", "config", "gateway", "process", "protocol", "remote", "sim"]),
    ("crates/telemetry", &["actors", "http", "protocol"]),
    ("crates/testkit", &["actors", "config", "gateway", "sim"]),
];

#[test]
fn workspace_members_have_exactly_the_listed_dependencies() {
    let manifests = files("crates", "toml").into_iter().filter(|path| path.ends_with("Cargo.toml"));
    let members = manifests.count() + 1;
    assert_eq!(members, MEMBERS.len(), "`MEMBERS` does not list every member");
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

#[test]
fn the_testkit_is_a_dev_dependency_only() {
    let manifests = MEMBERS.map(|(member, _)| format!("{member}/Cargo.toml"));
    for manifest in manifests.iter().map(String::as_str).chain(["Cargo.toml"]) {
        let text = fs::read_to_string(root().join(manifest)).unwrap();
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let names_it = line.starts_with("testkit") || line.starts_with("mcp-satellite-testkit");
            assert!(!names_it || section == "[dev-dependencies]", "{manifest}: {line}");
        }
    }
    let manifest = fs::read_to_string(root().join("crates/testkit/Cargo.toml")).unwrap();
    assert!(manifest.lines().any(|line| line == "publish = false"));
}
