//! The quality of the tool search, measured with sixty labelled queries on the tools of sixteen servers.
#![allow(clippy::print_stdout, reason = "the test prints the measured quality")]

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

fn searched_servers(servers: &BTreeMap<String, Arc<Catalogue>>) -> Vec<SearchedServer<'_>> {
    servers
        .iter()
        .map(|(label, catalogue)| SearchedServer { label, index: Arc::new(CatalogueIndex::new(catalogue)) })
        .collect()
}

/// The tool paths that a query finds, best first.
fn found(
    servers: &BTreeMap<String, Arc<Catalogue>>,
    searched_servers: &[SearchedServer<'_>],
    text: &str,
) -> Vec<String> {
    let catalogues: Vec<_> = servers.values().collect();
    let path = |hit: &mcp_satellite::gateway::search::ToolHit| {
        format!("{}:{}", searched_servers[hit.server_index].label, catalogues[hit.server_index].tools[hit.tool].name)
    };
    search(text, searched_servers, 50).best.iter().map(path).collect()
}

/// The baseline: every tool whose path or description contains a needle, ordered by the number of needles, the number
/// of needles in the path, and the length of the path.
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
    fn add_rank(&mut self, rank: Option<usize>) {
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
fn search_ranks_wanted_tools_better_than_substring_matching() {
    let servers = servers();
    let searched_servers = searched_servers(&servers);
    let mut scores = BTreeMap::<(String, &str), Score>::new();
    for query in queries() {
        let text = &*query.text;
        let ours = found(&servers, &searched_servers, text);
        if rank(&ours, &query.wants) != Some(1) {
            println!("{:?}: {:?}", text, ours.iter().take(5).collect::<Vec<_>>());
        }
        let words: Vec<&str> = text.split(' ').collect();
        let methods =
            [("ours", ours), ("substring", by_substring(&servers, &[text])), ("words", by_substring(&servers, &words))];
        for (method, paths) in methods {
            for kind in [&*query.kind, "all"] {
                scores.entry((kind.to_owned(), method)).or_default().add_rank(rank(&paths, &query.wants));
            }
        }
    }
    for ((kind, method), score) in &scores {
        println!("{kind:11} {method:9} MRR {:.3}, recall@5 {:.3}", score.mrr(), score.recall());
    }
    let all = |method| &scores[&("all".to_owned(), method)];
    assert_eq!(all("ours").queries, 60);
    assert!(all("ours").mrr() >= 0.97 && all("ours").recall() >= 0.98, "{:?}", all("ours"));
    // Both baselines: the query as one needle, and each of its words.
    assert!(all("ours").mrr() >= all("substring").mrr() + 0.25, "{:?}", all("substring"));
    assert!(all("ours").mrr() >= all("words").mrr() + 0.20, "{:?}", all("words"));
}

#[test]
fn a_query_with_the_exact_path_ranks_its_tool_first() {
    let servers = servers();
    let searched_servers = searched_servers(&servers);
    for (server, catalogue) in &servers {
        for tool in &catalogue.tools {
            let path = format!("{server}:{}", tool.name);
            assert_eq!(found(&servers, &searched_servers, &path)[0], path);
            let hits = search(&tool.name, &searched_servers, 50);
            assert!((hits.best[0].score - 1.0).abs() < f32::EPSILON, "{path}: {hits:?}");
        }
    }
}

#[test]
fn a_query_without_words_returns_all_tools_in_order() {
    let servers = servers();
    let searched_servers = searched_servers(&servers);
    let all: usize = servers.values().map(|catalogue| catalogue.tools.len()).sum();
    for question in ["", "  ", "* . :"] {
        let hits = search(question, &searched_servers, 3);
        assert_eq!((hits.best.len(), hits.total), (3, all));
        assert_eq!(
            found(&servers, &searched_servers, question)[..3],
            ["calendar:create-event", "calendar:delete-event", "calendar:get-freebusy"]
        );
    }
    assert_eq!(search("zzzzqqqq", &searched_servers, 10).total, 0);
    assert_eq!(search("file", &[], 10).total, 0);
}

#[test]
fn scores_are_between_0_and_1_in_descending_order() {
    let servers = servers();
    let searched_servers = searched_servers(&servers);
    for query in queries() {
        let hits = search(&query.text, &searched_servers, usize::MAX);
        assert!(hits.best.iter().all(|hit| (0.05..=1.0).contains(&hit.score)), "{}", query.text);
        assert!(hits.best.is_sorted_by(|one, other| one.score >= other.score), "{}", query.text);
        // A limit only truncates the hits.
        let few = search(&query.text, &searched_servers, 5);
        assert_eq!((few.total, &few.best[..]), (hits.total, &hits.best[..hits.best.len().min(5)]));
    }
}

#[test]
fn a_catalogue_is_indexed_once_and_its_index_is_dropped_with_it() {
    let (indexes, servers) = (CatalogueIndexes::default(), servers());
    let catalogue = servers["git"].clone();
    assert!(Arc::ptr_eq(&indexes.get_or_create(&catalogue), &indexes.get_or_create(&catalogue)));
    assert_eq!(indexes.len(), 1);
    for _ in 0..2_000 {
        drop(indexes.get_or_create(&Arc::new(Catalogue::clone(&catalogue))));
    }
    assert!(indexes.len() < 200, "{} indexes of dropped catalogues", indexes.len());
}

#[test]
fn ten_thousand_tools_with_long_descriptions_are_searchable() {
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
    let searched_servers = searched_servers(&servers);
    assert_eq!(found(&servers, &searched_servers, "tool 42 of 17")[0], "server-17:tool_42_of_17");
    assert_eq!(search("work", &searched_servers, 10).total, 9_900);
    assert_eq!(search("wrok", &searched_servers, 10).best.len(), 10);
}
