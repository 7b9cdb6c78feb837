//! The search for tools, measured: on the tools of sixteen servers, with sixty queries and what each of them means.
#![cfg(feature = "cli")]
#![allow(clippy::print_stdout, reason = "the numbers are what it is about")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use mcp_satellite::gateway::search::{CatalogueIndex, CatalogueIndexes, SearchedServer, search};
use mcp_satellite_actors::model::catalogue::{Catalogue, Tool};
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Debug)]
struct Query {
    kind: String,
    text: String,
    wants: Vec<String>,
}

fn fixture(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/search").join(name)).unwrap()
}

fn tool(definition: String) -> Tool {
    Tool::parse(RawValue::from_string(definition).unwrap()).unwrap()
}

fn servers() -> BTreeMap<String, Arc<Catalogue>> {
    let tools: BTreeMap<String, Vec<Box<RawValue>>> = serde_json::from_str(&fixture("tools.json")).unwrap();
    let catalogue = |tools: Vec<Box<RawValue>>| {
        let tools = tools.into_iter().map(|raw| Tool::parse(raw).unwrap()).collect();
        Arc::new(Catalogue { tools, ..Catalogue::default() })
    };
    tools.into_iter().map(|(server, tools)| (server, catalogue(tools))).collect()
}

fn queries() -> Vec<Query> {
    let text = fixture("queries.toml");
    let file = toml_span::parse(&text).unwrap();
    let read = |value: &toml_span::Value<'_>| {
        let text = |name: &str| value.pointer(name).unwrap().as_str().unwrap().to_owned();
        let wants = value.pointer("/wants").unwrap().as_array().unwrap();
        let wants = wants.iter().map(|want| want.as_str().unwrap().to_owned()).collect();
        Query { kind: text("/kind"), text: text("/text"), wants }
    };
    file.pointer("/query").unwrap().as_array().unwrap().iter().map(read).collect()
}

fn shelves(servers: &BTreeMap<String, Arc<Catalogue>>) -> Vec<SearchedServer<'_>> {
    servers
        .iter()
        .map(|(label, catalogue)| SearchedServer { label, index: Arc::new(CatalogueIndex::new(catalogue)) })
        .collect()
}

/// The paths that a query finds, the best first.
fn found(servers: &BTreeMap<String, Arc<Catalogue>>, shelves: &[SearchedServer<'_>], text: &str) -> Vec<String> {
    let catalogues: Vec<_> = servers.values().collect();
    let path = |hit: &mcp_satellite::gateway::search::ToolHit| {
        format!("{}:{}", shelves[hit.server_index].label, catalogues[hit.server_index].tools[hit.tool].name)
    };
    search(text, shelves, 50).best.iter().map(path).collect()
}

/// What is found without a search of our own: every tool whose path or description has the `needles` in it, ordered by
/// how many they are, how many are in the path, and how short that is.
fn by_substring(servers: &BTreeMap<String, Arc<Catalogue>>, needles: &[&str]) -> Vec<String> {
    #[derive(Deserialize)]
    struct Known {
        description: String,
    }
    let needles: Vec<String> = needles.iter().map(|needle| needle.to_lowercase()).collect();
    let mut found = Vec::new();
    for (server, catalogue) in servers {
        for tool in &catalogue.tools {
            let path = format!("{server}:{}", tool.name);
            let description = serde_json::from_str::<Known>(tool.raw.get()).unwrap().description;
            let (path_text, text) = (path.to_lowercase(), format!("{path} {description}").to_lowercase());
            let count = |text: &str| needles.iter().filter(|needle| text.contains(&**needle)).count();
            if count(&text) > 0 {
                found.push((std::cmp::Reverse((count(&text), count(&path_text))), path.len(), path));
            }
        }
    }
    found.sort();
    found.into_iter().map(|(_, _, path)| path).collect()
}

#[derive(Debug, Default)]
struct Score {
    queries: usize,
    reciprocal_ranks: f64,
    in_first_five: usize,
}

impl Score {
    fn take(&mut self, rank: Option<usize>) {
        self.queries += 1;
        self.reciprocal_ranks += rank.map_or(0.0, |rank| 1.0 / rank as f64);
        self.in_first_five += usize::from(rank.is_some_and(|rank| rank <= 5));
    }

    fn mrr(&self) -> f64 {
        self.reciprocal_ranks / self.queries as f64
    }

    fn recall(&self) -> f64 {
        self.in_first_five as f64 / self.queries as f64
    }
}

fn rank(paths: &[String], wants: &[String]) -> Option<usize> {
    paths.iter().position(|path| wants.contains(path)).map(|at| at + 1)
}

#[test]
fn what_people_ask_for_is_found_better_than_by_substring() {
    let servers = servers();
    let shelves = shelves(&servers);
    let mut scores = BTreeMap::<(String, &str), Score>::new();
    for query in queries() {
        let text = &*query.text;
        let ours = found(&servers, &shelves, text);
        if rank(&ours, &query.wants) != Some(1) {
            println!("{:?}: {:?}", text, ours.iter().take(5).collect::<Vec<_>>());
        }
        let words: Vec<&str> = text.split(' ').collect();
        let ways =
            [("ours", ours), ("substring", by_substring(&servers, &[text])), ("words", by_substring(&servers, &words))];
        for (way, paths) in ways {
            for kind in [&*query.kind, "all"] {
                scores.entry((kind.to_owned(), way)).or_default().take(rank(&paths, &query.wants));
            }
        }
    }
    for ((kind, way), score) in &scores {
        println!("{kind:11} {way:9} MRR {:.3}, recall@5 {:.3}", score.mrr(), score.recall());
    }
    let all = |way| &scores[&("all".to_owned(), way)];
    assert_eq!(all("ours").queries, 60);
    assert!(all("ours").mrr() >= 0.97 && all("ours").recall() >= 0.98, "{:?}", all("ours"));
    // The whole question as one text, and, better, each of its words.
    assert!(all("ours").mrr() >= all("substring").mrr() + 0.25, "{:?}", all("substring"));
    assert!(all("ours").mrr() >= all("words").mrr() + 0.20, "{:?}", all("words"));
}

#[test]
fn a_tool_is_found_first_by_its_very_name() {
    let servers = servers();
    let shelves = shelves(&servers);
    for (server, catalogue) in &servers {
        for tool in &catalogue.tools {
            let path = format!("{server}:{}", tool.name);
            assert_eq!(found(&servers, &shelves, &path)[0], path);
            let hits = search(&tool.name, &shelves, 50);
            assert!((hits.best[0].score - 1.0).abs() < f32::EPSILON, "{path}: {hits:?}");
        }
    }
}

#[test]
fn a_question_without_a_word_finds_everything_in_order() {
    let servers = servers();
    let shelves = shelves(&servers);
    let all: usize = servers.values().map(|catalogue| catalogue.tools.len()).sum();
    for question in ["", "  ", "* . :"] {
        let hits = search(question, &shelves, 3);
        assert_eq!((hits.best.len(), hits.total), (3, all));
        assert_eq!(
            found(&servers, &shelves, question)[..3],
            ["calendar:create-event", "calendar:delete-event", "calendar:get-freebusy"]
        );
    }
    assert_eq!(search("zzzzqqqq", &shelves, 10).total, 0);
    assert_eq!(search("file", &[], 10).total, 0);
}

#[test]
fn scores_are_between_0_and_1_and_never_rise() {
    let servers = servers();
    let shelves = shelves(&servers);
    for query in queries() {
        let hits = search(&query.text, &shelves, usize::MAX);
        assert!(hits.best.iter().all(|hit| (0.05..=1.0).contains(&hit.score)), "{}", query.text);
        assert!(hits.best.is_sorted_by(|one, other| one.score >= other.score), "{}", query.text);
        // A limit cuts, and changes nothing else.
        let few = search(&query.text, &shelves, 5);
        assert_eq!((few.total, &few.best[..]), (hits.total, &hits.best[..hits.best.len().min(5)]));
    }
}

#[test]
fn a_catalogue_is_indexed_once_and_its_index_goes_with_it() {
    let (indexes, servers) = (CatalogueIndexes::default(), servers());
    let catalogue = servers["git"].clone();
    assert!(Arc::ptr_eq(&indexes.get_or_create(&catalogue), &indexes.get_or_create(&catalogue)));
    assert_eq!(indexes.len(), 1);
    for _ in 0..2_000 {
        drop(indexes.get_or_create(&Arc::new(Catalogue::clone(&catalogue))));
    }
    assert!(indexes.len() < 200, "{} indexes of catalogues that are gone", indexes.len());
}

#[test]
fn ten_thousand_tools_with_long_descriptions_are_read_once_and_found() {
    let long = "word ".repeat(20_000);
    let servers: BTreeMap<String, Arc<Catalogue>> = (0..100)
        .map(|server| {
            let definition = |at: usize| match at {
                0 => format!(r#"{{"name":"huge_{server}","description":"{long}"}}"#),
                at => format!(
                    r#"{{"name":"tool_{at}_of_{server}","description":"Does the work number {at} of the server {server}, with care."}}"#
                ),
            };
            let tools = (0..100).map(|at| tool(definition(at))).collect();
            (format!("server-{server}"), Arc::new(Catalogue { tools, ..Catalogue::default() }))
        })
        .collect();
    let shelves = shelves(&servers);
    assert_eq!(found(&servers, &shelves, "tool 42 of 17")[0], "server-17:tool_42_of_17");
    assert_eq!(search("work", &shelves, 10).total, 9_900);
    assert_eq!(search("wrok", &shelves, 10).best.len(), 10);
}
