//! Rules about the documents: links, sizes, and coverage of configuration, events, messages and commands.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::{SOURCES, files, root, shown};

/// A Markdown file with its headings and links.
struct Document {
    text: String,
    anchors: BTreeSet<String>,
    links: Vec<String>,
}

impl Document {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap();
        let (mut anchors, mut links) = (BTreeSet::new(), Vec::new());
        let mut heading: Option<String> = None;
        for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let name = anchor(&heading.take().unwrap());
                    let repeated = (1..).map(|count| format!("{name}-{count}"));
                    let free = std::iter::once(name.clone()).chain(repeated).find(|name| !anchors.contains(name));
                    anchors.insert(free.unwrap());
                }
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    links.push(dest_url.to_string());
                }
                _ => {}
            }
        }
        Self { text, anchors, links }
    }
}

/// Returns the anchor that mdBook and GitHub give to a heading.
fn anchor(heading: &str) -> String {
    let kept = |letter: char| match letter {
        ' ' => Some('-'),
        letter if letter.is_alphanumeric() || letter == '-' || letter == '_' => Some(letter.to_ascii_lowercase()),
        _ => None,
    };
    heading.chars().filter_map(kept).collect()
}

/// Returns all documents of the repository by path.
fn documents() -> BTreeMap<PathBuf, Document> {
    let at_root = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let at_root = at_root.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let all = at_root.chain(files("docs", "md"));
    all.map(|path| (path.clone(), Document::read(&path))).collect()
}

fn page(name: &str) -> String {
    fs::read_to_string(root().join("docs").join(name)).unwrap()
}

#[test]
fn links_between_documents_have_targets() {
    let documents = documents();
    let mut broken = Vec::new();
    for (path, document) in &documents {
        for link in document.links.iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (file, fragment) = link.split_once('#').map_or((link.as_str(), None), |(file, to)| (file, Some(to)));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            let Ok(target) = target.canonicalize() else {
                broken.push(format!("{}: {link}: no such file", shown(path)));
                continue;
            };
            let has_anchor = |name: &str| match documents.get(&target) {
                Some(document) => document.anchors.contains(name),
                None => true,
            };
            if fragment.is_some_and(|name| !has_anchor(name)) {
                broken.push(format!("{}: {link}: no such heading", shown(path)));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Paths in backquotes; a path in a table may be relative to the section's directory, which is not checked.
#[test]
fn paths_in_the_documents_for_developers_exist() {
    const DIRECTORIES: [&str; 8] = ["src/", "actors/", "crates/", "tests/", "benches/", "examples/", "docs/", ".ci/"];
    let mut missing = Vec::new();
    for name in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root().join(name)).unwrap();
        let spans = Parser::new_ext(&text, Options::ENABLE_TABLES).filter_map(|event| match event {
            Event::Code(code) => Some(code.to_string()),
            _ => None,
        });
        let is_path = |code: &String| {
            let plain = |letter: char| letter.is_alphanumeric() || "/._-".contains(letter);
            DIRECTORIES.iter().any(|directory| code.starts_with(directory)) && code.chars().all(plain)
        };
        let places = spans.filter(is_path).filter(|code| !code.contains("NAME"));
        missing.extend(places.filter(|code| !root().join(code).exists()).map(|code| format!("{name}: {code}")));
    }
    assert!(missing.is_empty(), "no such file:\n{}", missing.join("\n"));
}

#[test]
fn the_manual_lists_each_of_its_pages() {
    let summary = Document::read(&root().join("docs/SUMMARY.md"));
    let listed: BTreeSet<_> = summary.links.iter().map(|link| root().join("docs").join(link)).collect();
    let pages: BTreeSet<_> = files("docs", "md").into_iter().filter(|path| !path.ends_with("SUMMARY.md")).collect();
    assert_eq!(listed, pages);
}

#[test]
fn documents_stay_within_their_length_limits() {
    for (name, lines_max, bytes_max) in [("README.md", 250, 14 * 1024), ("ARCHITECTURE.md", 350, 40 * 1024)] {
        let text = fs::read_to_string(root().join(name)).unwrap();
        let (lines, bytes) = (text.lines().count(), text.len());
        assert!(lines <= lines_max && bytes <= bytes_max, "{name}: {lines} lines, {bytes} bytes");
    }
    let mut too_wide = Vec::new();
    for (path, document) in documents().iter().filter(|(path, _)| path.starts_with(root().join("docs"))) {
        for (at, line) in document.text.lines().enumerate() {
            if line.starts_with('|') && line.chars().count() > 220 {
                too_wide.push(format!("{}:{}: {} characters", shown(path), at + 1, line.chars().count()));
            }
        }
    }
    assert!(too_wide.is_empty(), "lines of tables need scrolling:\n{}", too_wide.join("\n"));
}

fn configuration_keys() -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    for path in files("crates/config/src", "rs") {
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        for (before, after) in code.match_indices("(\"").map(|(at, _)| code.split_at(at)) {
            let method = before.rsplit(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap();
            let on_fields =
                before.ends_with(&format!("fields.{method}")) || before.ends_with(&format!("table.{method}"));
            let key = after[2..].split('"').next().unwrap();
            if on_fields && method != "has" {
                keys.insert(key.to_owned());
            }
        }
        // The keys of a policy are the fields of its `section!`.
        for section in code.split("section!(").skip(1) {
            let fields = section.split("\n);").next().unwrap().lines();
            let fields = fields.filter(|line| line.contains(" = ") && !line.trim_start().starts_with('/'));
            keys.extend(fields.filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())));
        }
    }
    keys
}

#[test]
fn every_configuration_key_is_documented() {
    let keys = configuration_keys();
    assert!(keys.len() > 80, "the search found only {} keys: {keys:?}", keys.len());
    let documents: String = documents().into_values().map(|document| document.text).collect();
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let words: BTreeSet<&str> = documents.split(|letter| !is_word(letter)).collect();
    let missing: Vec<_> = keys.iter().filter(|key| !words.contains(key.as_str())).collect();
    assert!(missing.is_empty(), "not in the manual: {missing:?}");
}

#[test]
fn every_event_is_documented() {
    fn types(value: &serde_json::Value, into: &mut BTreeSet<String>) {
        match value {
            serde_json::Value::Object(members) => members.values().for_each(|value| types(value, into)),
            serde_json::Value::Array(values) => values.iter().for_each(|value| types(value, into)),
            serde_json::Value::String(text) if text.contains('.') && !text.contains(' ') => {
                into.insert(text.clone());
            }
            _ => {}
        }
    }
    let schema = fs::read_to_string(root().join("crates/backend/schemas/event.json")).unwrap();
    let mut known = BTreeSet::new();
    types(&serde_json::from_str(&schema).unwrap(), &mut known);
    known.retain(|name| ["mcp.", "config.", "events."].iter().any(|prefix| name.starts_with(prefix)));
    assert!(known.len() > 20, "{known:?}");
    let page = page("events.md");
    let missing: Vec<_> = known.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "not in docs/events.md: {missing:?}");
}

/// A heading of the page is a message; `…` stands for its variable parts.
#[test]
fn every_message_on_the_troubleshooting_page_exists_in_the_code() {
    let sources = SOURCES.into_iter().flat_map(|directory| files(directory, "rs"));
    let code: String = sources.map(|path| fs::read_to_string(path).unwrap()).collect();
    let code = code.replace("\\\"", "\"");
    let code: Vec<&str> = code.split_whitespace().filter(|word| *word != "\\").collect();
    let code = code.join(" ");
    let page = page("troubleshooting.md");
    let messages: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`')).collect();
    assert!(messages.len() > 20, "{messages:?}");
    let mut missing = Vec::new();
    for message in messages {
        let parts = message.split('…').map(str::trim).filter(|part| part.len() > 3);
        missing.extend(parts.filter(|part| !code.contains(*part)).map(|part| format!("{message}: {part}")));
    }
    assert!(missing.is_empty(), "no such message:\n{}", missing.join("\n"));
}

/// Returns the help of the command line as a page.
fn help_page() -> String {
    let help = |arguments: &[&str]| {
        let satellite = Command::new(env!("CARGO_BIN_EXE_satellite")).args(arguments).env("COLUMNS", "100").output();
        let help = String::from_utf8(satellite.unwrap().stdout).unwrap();
        help.lines().flat_map(|line| [line.trim_end(), "\n"]).collect::<String>()
    };
    let whole = help(&["--help"]);
    let verbs = whole.lines().skip_while(|line| *line != "Commands:").skip(1);
    let verbs = verbs.take_while(|line| !line.is_empty()).filter_map(|line| {
        // A wrapped description is indented deeper.
        let name = line.strip_prefix("  ")?.split(' ').next()?;
        (!name.is_empty() && name != "help").then_some(name)
    });
    let mut page = String::from(
        "# Command line\n\nThis page is the output of `--help`. [Operations](operations.md) describes the commands by task.\n\n\
         <!-- Generated: UPDATE_DOCS=1 cargo test --test repository command_line -->\n\n",
    );
    write!(page, "```text\n{whole}```\n").unwrap();
    for verb in verbs {
        write!(page, "\n## {verb}\n\n```text\n{}```\n", help(&[verb, "--help"])).unwrap();
    }
    page
}

#[test]
fn the_command_line_page_equals_the_help() {
    let wanted = help_page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(root().join("docs/cli.md"), &wanted).unwrap();
    }
    assert!(page("cli.md") == wanted, "run UPDATE_DOCS=1 cargo test --test repository command_line");
}
