//! The search for tools, measured: on the tools of sixteen servers, with sixty queries and what each of them means.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use mcp_satellite::gateway::search::{CatalogueIndex, Indexes, Shelf, search};
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

fn shelves(servers: &BTreeMap<String, Arc<Catalogue>>) -> Vec<Shelf<'_>> {
    servers.iter().map(|(label, catalogue)| Shelf { label, index: Arc::new(CatalogueIndex::new(catalogue)) }).collect()
}

/// The paths that a query finds, the best first.
fn found(servers: &BTreeMap<String, Arc<Catalogue>>, shelves: &[Shelf<'_>], text: &str) -> Vec<String> {
    let catalogues: Vec<_> = servers.values().collect();
    let path = |hit: &mcp_satellite::gateway::search::Hit| {
        format!("{}:{}", shelves[hit.shelf].label, catalogues[hit.shelf].tools[hit.tool].name)
    };
    search(text, shelves, 50).best.iter().map(path).collect()
}

/// What clients without such a tool do: every word stands somewhere in the path or the description, and what has it in
/// its path comes first.
fn by_substring(servers: &BTreeMap<String, Arc<Catalogue>>, text: &str) -> Vec<String> {
    #[derive(Deserialize)]
    struct Known {
        description: String,
    }
    let words: Vec<String> = text.to_lowercase().split(' ').map(str::to_owned).collect();
    let mut found = Vec::new();
    for (server, catalogue) in servers {
        for tool in &catalogue.tools {
            let path = format!("{server}:{}", tool.name);
            let description = serde_json::from_str::<Known>(tool.raw.get()).unwrap().description;
            let (path_text, text) = (path.to_lowercase(), format!("{path} {description}").to_lowercase());
            let in_path = words.iter().filter(|word| path_text.contains(&**word)).count();
            let somewhere = words.iter().filter(|word| text.contains(&**word)).count();
            if somewhere > 0 {
                found.push((std::cmp::Reverse((somewhere, in_path)), path.len(), path));
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
    let (mut ours, mut theirs) = (BTreeMap::<String, Score>::new(), BTreeMap::<String, Score>::new());
    for query in queries() {
        let paths = found(&servers, &shelves, &query.text);
        let (our_rank, their_rank) =
            (rank(&paths, &query.wants), rank(&by_substring(&servers, &query.text), &query.wants));
        if our_rank != Some(1) {
            let first: Vec<_> = paths.iter().take(3).collect();
            println!("{:11} {:45} {our_rank:?} (substring {their_rank:?}) {first:?}", query.kind, query.text);
        }
        for kind in [&query.kind, "all"] {
            ours.entry(kind.to_owned()).or_default().take(our_rank);
            theirs.entry(kind.to_owned()).or_default().take(their_rank);
        }
    }
    for (kind, score) in &ours {
        let other = &theirs[kind];
        println!(
            "{kind:11} {:2} queries: MRR {:.3} (substring {:.3}), recall@5 {:.3} (substring {:.3})",
            score.queries,
            score.mrr(),
            other.mrr(),
            score.recall(),
            other.recall()
        );
    }
    let (ours, theirs) = (&ours["all"], &theirs["all"]);
    assert_eq!(ours.queries, 60);
    assert!(ours.mrr() >= 0.80 && ours.recall() >= 0.90, "{ours:?}");
    assert!(ours.mrr() >= theirs.mrr() + 0.25, "{ours:?} against {theirs:?}");
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
    let (indexes, servers) = (Indexes::default(), servers());
    let catalogue = servers["git"].clone();
    assert!(Arc::ptr_eq(&indexes.of(&catalogue), &indexes.of(&catalogue)));
    assert_eq!(indexes.len(), 1);
    for _ in 0..10_000 {
        drop(indexes.of(&Arc::new(Catalogue::clone(&catalogue))));
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
