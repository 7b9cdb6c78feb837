//! The language of the code: names of types, and the first words of doc comments.

use std::collections::BTreeMap;
use std::fs;

use crate::{SOURCES, files, shown};

/// Names of the one-actor-per-file pattern, which each actor has.
const ACTOR_NAMES: [&str; 3] = ["Msg", "State", "Args"];
// Code whose types no other program imports: only the rule for doc comments applies.
const TESTS: [&str; 4] = ["actors/tests", "tests", "benches", "examples"];
const HEADLESS: [&str; 6] = ["What", "Who", "Whose", "Of", "It", "That which"];

/// Returns the lines of the code below the directories, with their places.
fn lines(directories: impl IntoIterator<Item = &'static str>) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    for path in directories.into_iter().flat_map(|directory| files(directory, "rs")) {
        for (at, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            lines.push((format!("{}:{}", shown(&path), at + 1), line.to_owned()));
        }
    }
    lines
}

/// Returns the visibility and the name of the type that a line declares.
fn declared(line: &str) -> Option<(bool, &str)> {
    let line = line.trim_start();
    let (is_public, line) = match line.strip_prefix("pub") {
        Some(rest) => {
            (true, rest.strip_prefix('(').and_then(|rest| rest.split_once(") ")).map_or(rest, |(_, rest)| rest))
        }
        None => (false, line),
    };
    let (keyword, rest) = line.trim_start().split_once(' ')?;
    if !["struct", "enum", "trait", "union"].contains(&keyword) {
        return None;
    }
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
    rest[..end].starts_with(|letter: char| letter.is_ascii_uppercase()).then_some((is_public, &rest[..end]))
}

#[test]
fn public_type_names_are_unique() {
    let mut declarations: BTreeMap<String, Vec<(bool, String)>> = BTreeMap::new();
    for (place, line) in lines(SOURCES) {
        if let Some((is_public, name)) = declared(&line) {
            declarations.entry(name.to_owned()).or_default().push((is_public, place));
        }
    }
    let mut repeated = Vec::new();
    for (name, places) in &declarations {
        let is_public = places.iter().any(|(is_public, _)| *is_public);
        if is_public && places.len() > 1 && !ACTOR_NAMES.contains(&name.as_str()) {
            let places: Vec<_> = places.iter().map(|(_, place)| place.as_str()).collect();
            repeated.push(format!("{name}: {}", places.join(", ")));
        }
    }
    assert!(declarations.len() > 500, "the search found only {} types", declarations.len());
    assert!(repeated.is_empty(), "declared more than once:\n{}", repeated.join("\n"));
}

#[test]
fn doc_comments_do_not_begin_with_a_headless_word() {
    let mut wrong = Vec::new();
    let mut in_comment = false;
    for (place, line) in lines(SOURCES.into_iter().chain(TESTS)) {
        let text = line.trim_start();
        let comment = text.strip_prefix("///").or_else(|| text.strip_prefix("//!"));
        if let Some(text) = comment.map(str::trim).filter(|_| !in_comment) {
            let is_headless = HEADLESS.iter().any(|word| {
                text.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|letter: char| letter.is_alphanumeric()))
            });
            let is_example = text.starts_with("```") || text.starts_with('#');
            if is_headless || (text.split_whitespace().count() < 2 && !is_example) {
                wrong.push(format!("{place}: {text}"));
            }
        }
        in_comment = comment.is_some();
    }
    assert!(wrong.is_empty(), "doc comments of one word or without a head:\n{}", wrong.join("\n"));
}

#[test]
fn type_declarations_are_parsed() {
    assert_eq!(declared("    pub(crate) struct Name<T> {"), Some((true, "Name")));
    assert_eq!(declared("pub enum Name {"), Some((true, "Name")));
    assert_eq!(declared("struct Name;"), Some((false, "Name")));
    assert_eq!(declared("    structure Name;"), None);
}
