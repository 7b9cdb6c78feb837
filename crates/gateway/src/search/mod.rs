//! Finds tools by a few words, misspelled ones too. Each catalogue has an index, created at the first search and kept
//! as long as the catalogue: a changed catalogue is indexed anew, the others are not.
//!
//! ```text
//! score = 0.40 · name + 0.35 · description + 0.25 · server
//! each part = Σ weight · similarity of the most similar word / Σ weight, over the words of the query
//! ```
//!
//! A word that matches fewer of the caller's tools has a larger weight. Misspellings are considered only for a word
//! that matches no tool as written.
//!
//! `strsim` compares words; the index is our own. Search engines need about 70 crates and a writer for each index, or
//! find no misspelled words.

mod text;

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use mcp_satellite_actors::model::catalogue::{Catalogue, Tool};
use serde_json::value::RawValue;

use self::text::{Word, WordShape, misspelling_similarity, normalize, word_similarity};

const NAME: f32 = 0.40;
const DESCRIPTION: f32 = 0.35;
const SERVER: f32 = 0.25;
// Part of the name's score that does not depend on how many of its words the query contains.
const NAME_BASE: f32 = 0.85;
// Minimum score of a hit.
const SCORE_MIN: f32 = 0.05;
// Maximum part of a description that is indexed, in bytes.
const DESCRIPTION_MAX: usize = 8 * 1024;
const WORDS_MAX: usize = 24;
// Maximum number of corrections that are tried for a misspelled word.
const CORRECTIONS_MAX: usize = 16;
// Number of indexed tools at which all indexes are dropped, to be created again on demand.
const INDEXED_TOOLS_MAX: usize = 200_000;

#[derive(Debug)]
pub struct CatalogueIndex {
    // Sorted by text.
    terms: Vec<Term>,
    tools: Vec<IndexedTool>,
}

#[derive(Debug)]
struct Term {
    text: Box<str>,
    shape: WordShape,
    in_names: Box<[u32]>,
    in_descriptions: Box<[u32]>,
}

#[derive(Debug)]
struct IndexedTool {
    name: Box<str>,
    // Letters and digits of the name.
    normalized: Box<str>,
    word_count: usize,
}

impl CatalogueIndex {
    pub fn new(catalogue: &Catalogue) -> Self {
        let mut places: HashMap<String, (Vec<u32>, Vec<u32>)> = HashMap::new();
        let mut tools = Vec::with_capacity(catalogue.tools.len());
        for (tool, at) in catalogue.tools.iter().zip(0u32..) {
            let mut enter = |word: &Word<'_>, in_name: bool| {
                for text in word.texts() {
                    if !places.contains_key(text) {
                        places.insert(text.to_owned(), Default::default());
                    }
                    let Some((names, descriptions)) = places.get_mut(text) else { continue };
                    let list = if in_name { names } else { descriptions };
                    if list.last() != Some(&at) {
                        list.push(at);
                    }
                }
            };
            let mut word_count = 0;
            for word in text::words(&tool.name) {
                word_count += word.parts.len().max(1);
                enter(&word, true);
            }
            for word in text::words(&description(tool)) {
                enter(&word, false);
            }
            tools.push(IndexedTool { name: tool.name.clone(), normalized: normalize(&tool.name).into(), word_count });
        }
        let term = |(text, (names, descriptions)): (String, (Vec<u32>, Vec<u32>))| Term {
            shape: WordShape::new(&text),
            text: text.into(),
            in_names: names.into(),
            in_descriptions: descriptions.into(),
        };
        let mut terms: Vec<Term> = places.into_iter().map(term).collect();
        terms.sort_unstable_by(|one, other| one.text.cmp(&other.text));
        Self { terms, tools }
    }

    fn find_related(&self, query: &str, report: &mut dyn FnMut(&Term, f32)) {
        // All similar words share this prefix, the shortest that a stem or prefix match requires.
        let letters = query.chars().count();
        let shared = text::min_prefix_len(letters).min(letters).min(5);
        let start: String = query.chars().take(shared).collect();
        let from = self.terms.partition_point(|term| *term.text < *start);
        for term in self.terms[from..].iter().take_while(|term| term.text.starts_with(&start)) {
            let near = word_similarity(query, &term.text);
            if near > 0.0 {
                report(term, near);
            }
        }
    }

    fn find_misspelled(&self, query: (&str, WordShape), report: &mut dyn FnMut(&Term, f32)) {
        for term in &self.terms {
            let near = misspelling_similarity(query, (&term.text, term.shape));
            if near > 0.0 {
                report(term, near);
            }
        }
    }
}

fn description(tool: &Tool) -> String {
    let Ok(fields) = serde_json::from_str::<BTreeMap<Cow<'_, str>, &RawValue>>(tool.raw.get()) else {
        return String::new();
    };
    let text = |name: &str| fields.get(name).and_then(|raw| serde_json::from_str::<String>(raw.get()).ok());
    let mut description = text("title").unwrap_or_default();
    description.push('\n');
    description.push_str(&text("description").unwrap_or_default());
    description.truncate(description.floor_char_boundary(DESCRIPTION_MAX));
    description
}

/// Cache of catalogue indexes. An index lives as long as its catalogue.
#[derive(Debug, Default)]
pub struct CatalogueIndexes {
    cache: Mutex<IndexCache>,
    // Held while indexes are created, so that concurrent searches do not create them twice.
    creation_lock: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct IndexCache {
    // By address of the catalogue. The weak pointer keeps the allocation, so no other catalogue gets the same address.
    by_address: HashMap<usize, (Weak<Catalogue>, Arc<CatalogueIndex>)>,
    tools: usize,
    // Number of indexes at which those of dropped catalogues are removed.
    tidy_at: usize,
}

impl CatalogueIndexes {
    pub fn get_or_create(&self, catalogue: &Arc<Catalogue>) -> Arc<CatalogueIndex> {
        if let Some(index) = self.cached(catalogue) {
            return index;
        }
        let index = Arc::new(CatalogueIndex::new(catalogue));
        let mut cache = self.cache();
        cache.tidy();
        cache.tools += index.tools.len();
        cache.by_address.insert(address(catalogue), (Arc::downgrade(catalogue), index.clone()));
        index
    }

    /// Returns the indexes of all `catalogues`. Creates missing ones on a blocking thread, because a thousand tools
    /// take too long for an async task. Returns an empty list if the runtime is shutting down.
    pub async fn get_or_create_all(self: &Arc<Self>, catalogues: Vec<Arc<Catalogue>>) -> Vec<Arc<CatalogueIndex>> {
        let known = |of: &Self| catalogues.iter().map(|catalogue| of.cached(catalogue)).collect::<Option<Vec<_>>>();
        if let Some(all) = known(self) {
            return all;
        }
        let _making = self.creation_lock.lock().await;
        if let Some(all) = known(self) {
            return all;
        }
        let indexes = self.clone();
        let make = move || catalogues.iter().map(|catalogue| indexes.get_or_create(catalogue)).collect();
        // The runtime is shutting down.
        tokio::task::spawn_blocking(make).await.unwrap_or_default()
    }

    fn cached(&self, catalogue: &Arc<Catalogue>) -> Option<Arc<CatalogueIndex>> {
        self.cache().by_address.get(&address(catalogue)).map(|(_, index)| index.clone())
    }

    pub fn len(&self) -> usize {
        self.cache().by_address.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, IndexCache> {
        // A panic leaves the map consistent, so a poisoned lock is still usable.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn address(catalogue: &Arc<Catalogue>) -> usize {
    Arc::as_ptr(catalogue) as usize
}

impl IndexCache {
    fn tidy(&mut self) {
        if self.by_address.len() < self.tidy_at && self.tools < INDEXED_TOOLS_MAX {
            return;
        }
        self.by_address.retain(|_, (catalogue, _)| catalogue.strong_count() > 0);
        self.tools = self.by_address.values().map(|(_, index)| index.tools.len()).sum();
        if self.tools >= INDEXED_TOOLS_MAX {
            self.by_address.clear();
            self.tools = 0;
        }
        self.tidy_at = 2 * self.by_address.len() + 64;
    }
}

#[derive(Debug, Clone)]
pub struct SearchedServer<'a> {
    pub label: &'a str,
    pub index: Arc<CatalogueIndex>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ToolHit {
    /// Position of the server among the shelves.
    pub server_index: usize,
    pub tool: usize,
    pub score: f32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ToolHits {
    /// The best hits, in descending order.
    pub best: Vec<ToolHit>,
    pub total: usize,
}

/// Searches for tools and returns at most `limit` hits. A query without words matches all tools, sorted by path.
pub fn search(question: &str, servers: &[SearchedServer<'_>], limit: usize) -> ToolHits {
    let question = SearchQuery::read(question);
    let mut found = if question.words.is_empty() { all_tools(servers) } else { question.find_hits(servers) };
    let path =
        |hit: &ToolHit| (servers[hit.server_index].label, &*servers[hit.server_index].index.tools[hit.tool].name);
    let shorter = |one: &ToolHit, other: &ToolHit| {
        if question.words.is_empty() { Ordering::Equal } else { path(one).1.len().cmp(&path(other).1.len()) }
    };
    let order = |one: &ToolHit, other: &ToolHit| {
        let by_path = || path(one).cmp(&path(other)).then(one.tool.cmp(&other.tool));
        other.score.total_cmp(&one.score).then_with(|| shorter(one, other)).then_with(by_path)
    };
    let total = found.len();
    if limit < total {
        found.select_nth_unstable_by(limit, order);
        found.truncate(limit);
    }
    found.sort_unstable_by(order);
    ToolHits { best: found, total }
}

fn all_tools(servers: &[SearchedServer<'_>]) -> Vec<ToolHit> {
    let of = |(at, server): (usize, &SearchedServer<'_>)| {
        (0..server.index.tools.len())
            .map(move |tool| ToolHit { server_index: at, tool, score: 0.0 })
            .collect::<Vec<_>>()
    };
    servers.iter().enumerate().flat_map(of).collect()
}

struct SearchQuery {
    // Distinct texts of all words.
    texts: Vec<String>,
    words: Vec<QueryWord>,
    normalized: String,
}

// A word of a query, as positions in `Question::texts`.
struct QueryWord {
    whole: usize,
    parts: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct ToolSimilarity {
    name: f32,
    description: f32,
}

struct ServerSimilarities {
    server_index: usize,
    // Per text of the query.
    server: Vec<f32>,
    // Per tool and text of the query; empty if no tool matches.
    tools: Vec<ToolSimilarity>,
}

impl SearchQuery {
    fn read(text: &str) -> Self {
        let mut text_words: Vec<Word<'_>> = text::words(text).collect();
        if text_words.iter().any(|word| !text::is_stop_word(&word.whole)) {
            text_words.retain(|word| !text::is_stop_word(&word.whole));
        }
        let mut texts: Vec<String> = Vec::new();
        let mut index_of = |text: String| {
            texts.iter().position(|known| *known == text).unwrap_or_else(|| {
                texts.push(text);
                texts.len() - 1
            })
        };
        let mut words: Vec<QueryWord> = Vec::new();
        for word in text_words.into_iter().take(WORDS_MAX) {
            let whole = index_of(word.whole.into_owned());
            let parts = word.parts.into_iter().map(|part| index_of(part.into_owned())).collect();
            if words.iter().all(|known| known.whole != whole) {
                words.push(QueryWord { whole, parts });
            }
        }
        Self { texts, words, normalized: normalize(text) }
    }

    fn find_hits(&self, servers: &[SearchedServer<'_>]) -> Vec<ToolHit> {
        let labels: Vec<Vec<Word<'_>>> = servers.iter().map(|server| text::words(server.label).collect()).collect();
        let mut pages: Vec<ServerSimilarities> = (0..servers.len())
            .map(|server_index| ServerSimilarities {
                server_index,
                server: vec![0.0; self.texts.len()],
                tools: Vec::new(),
            })
            .collect();
        for (at, text) in self.texts.iter().enumerate() {
            let mut known = false;
            for (page, label) in pages.iter_mut().zip(&labels) {
                known |= page.match_text(
                    at,
                    self.texts.len(),
                    &servers[page.server_index].index,
                    label,
                    &mut |index, report| {
                        index.find_related(text, report);
                    },
                    &|word| word_similarity(text, word),
                );
            }
            if known {
                continue;
            }
            for (word, slips) in corrections(text, servers, &labels) {
                for (page, label) in pages.iter_mut().zip(&labels) {
                    page.match_text(
                        at,
                        self.texts.len(),
                        &servers[page.server_index].index,
                        label,
                        &mut |index, report| index.find_related(&word, &mut |term, near| report(term, slips * near)),
                        &|other| slips * word_similarity(&word, other),
                    );
                }
            }
        }
        let weights = self.weights(servers, &pages);
        let mut hits = Vec::new();
        for page in &pages {
            let SearchedServer { label, index } = &servers[page.server_index];
            let label = normalize(label);
            for (tool, indexed) in index.tools.iter().enumerate() {
                let score =
                    if self.is_name_of(&label, indexed) { 1.0 } else { self.score(page, tool, indexed, &weights) };
                if score >= SCORE_MIN {
                    hits.push(ToolHit { server_index: page.server_index, tool, score });
                }
            }
        }
        hits
    }

    fn is_name_of(&self, label: &str, tool: &IndexedTool) -> bool {
        let Some(rest) = self.normalized.strip_suffix(&*tool.normalized) else { return false };
        !tool.normalized.is_empty() && (rest.is_empty() || rest == label)
    }

    /// Returns the weight of each word: the logarithm of its inverse frequency.
    fn weights(&self, servers: &[SearchedServer<'_>], pages: &[ServerSimilarities]) -> Vec<f32> {
        let tools: usize = servers.iter().map(|server| server.index.tools.len()).sum();
        let weight = |word: &QueryWord| {
            let fits = |page: &ServerSimilarities| {
                let tools = servers[page.server_index].index.tools.len();
                if word.similarity(|text| page.server[text]) > 0.0 {
                    return tools;
                }
                let near = |tool: &usize| {
                    let near = |of: fn(&ToolSimilarity) -> f32| {
                        word.similarity(|text| page.similarity(*tool, text, self.texts.len(), of))
                    };
                    near(|near| near.name) > 0.0 || near(|near| near.description) > 0.0
                };
                if page.tools.is_empty() { 0 } else { (0..tools).filter(near).count() }
            };
            // A word without a match counts as if one tool had it.
            let fitting = pages.iter().map(fits).sum::<usize>().max(1) as f32;
            (1.0 + (tools as f32 - fitting + 0.5) / (fitting + 0.5)).ln()
        };
        self.words.iter().map(weight).collect()
    }

    fn score(&self, page: &ServerSimilarities, tool: usize, indexed: &IndexedTool, weights: &[f32]) -> f32 {
        let (mut name, mut description, mut server, mut sum) = (0.0, 0.0, 0.0, 0.0);
        let mut matched_words = 0;
        for (word, weight) in self.words.iter().zip(weights) {
            let near = |of: fn(&ToolSimilarity) -> f32| {
                word.similarity(|text| page.similarity(tool, text, self.texts.len(), of))
            };
            let in_name = near(|near| near.name);
            if in_name > 0.0 {
                matched_words += word.parts.len().max(1);
            }
            name += weight * in_name;
            description += weight * near(|near| near.description);
            server += weight * word.similarity(|text| page.server[text]);
            sum += weight;
        }
        let share = (matched_words as f32 / indexed.word_count.max(1) as f32).min(1.0);
        let name = name * (NAME_BASE + (1.0 - NAME_BASE) * share);
        (NAME * name + DESCRIPTION * description + SERVER * server) / sum
    }
}

fn corrections(text: &str, servers: &[SearchedServer<'_>], labels: &[Vec<Word<'_>>]) -> Vec<(String, f32)> {
    let query = (text, WordShape::new(text));
    let mut words: HashMap<String, f32> = HashMap::new();
    for server in servers {
        server.index.find_misspelled(query, &mut |term, near| {
            words.entry(term.text.to_string()).or_insert(near);
        });
    }
    for word in labels.iter().flatten().flat_map(Word::texts) {
        let near = misspelling_similarity(query, (word, WordShape::new(word)));
        if near > 0.0 {
            words.insert(word.to_owned(), near);
        }
    }
    let mut words: Vec<_> = words.into_iter().collect();
    words.sort_unstable_by(|one, other| other.1.total_cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
    words.truncate(CORRECTIONS_MAX);
    words
}

impl QueryWord {
    fn similarity(&self, text: impl Fn(usize) -> f32) -> f32 {
        let whole = text(self.whole);
        if self.parts.is_empty() {
            return whole;
        }
        let sum: f32 = self.parts.iter().map(|part| text(*part)).sum();
        whole.max(sum / self.parts.len() as f32)
    }
}

type TermLookup<'t> = &'t mut dyn FnMut(&CatalogueIndex, &mut dyn FnMut(&Term, f32));

impl ServerSimilarities {
    fn match_text(
        &mut self,
        text: usize,
        texts: usize,
        index: &CatalogueIndex,
        label: &[Word<'_>],
        terms: TermLookup<'_>,
        nearness: &dyn Fn(&str) -> f32,
    ) -> bool {
        self.server[text] = label.iter().flat_map(Word::texts).map(nearness).fold(0.0, f32::max);
        let mut known = self.server[text] > 0.0;
        let (near, tools) = (&mut self.tools, index.tools.len());
        terms(index, &mut |term, nearness| {
            known = true;
            near.resize(tools * texts, ToolSimilarity::default());
            for tool in &*term.in_names {
                let similarity = &mut near[*tool as usize * texts + text];
                similarity.name = similarity.name.max(nearness);
            }
            for tool in &*term.in_descriptions {
                let similarity = &mut near[*tool as usize * texts + text];
                similarity.description = similarity.description.max(nearness);
            }
        });
        known
    }

    fn similarity(&self, tool: usize, text: usize, texts: usize, of: fn(&ToolSimilarity) -> f32) -> f32 {
        self.tools.get(tool * texts + text).map_or(0.0, of)
    }
}
