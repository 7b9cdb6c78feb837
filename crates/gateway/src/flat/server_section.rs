//! One server's part of the four merged lists. It is created once for each catalogue and shared by all versions of the
//! lists, so a change of one server costs nothing for the others. It contains places in the definitions, not copies.

use std::ops::Range;
use std::sync::Arc;

use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueEntry, ListKind};
use mcp_satellite_actors::model::ids::InstanceId;
use ring::digest::{Context, SHA256};

use super::merged_names::{ListDigest, SectionNames, finish};
use crate::tools::raw::{find_string, json_string};
use crate::tools::resources::{UI, qualify_uri};

/// Lists in the order of their notifications.
pub(super) const LISTS: [ListKind; 4] =
    [ListKind::Tools, ListKind::Resources, ListKind::ResourceTemplates, ListKind::Prompts];

#[derive(Debug)]
pub(super) struct ServerSection {
    pub(super) id: InstanceId,
    label: Box<str>,
    catalogue: Arc<Catalogue>,
    // Per `ListKind`.
    lists: [SectionList; 4],
}

#[derive(Debug)]
struct SectionList {
    // Sorted by the server's own name or URI, so that a position does not depend on the server's order.
    entries: Box<[SectionEntry]>,
    names: Arc<SectionNames>,
    // `None` without entries.
    digest: Option<ListDigest>,
}

#[derive(Debug)]
struct SectionEntry {
    // Position in the server's list.
    at: usize,
    // Places of the strings that are replaced, with their quotes.
    name: Option<Range<usize>>,
    ui: Option<Range<usize>>,
}

impl ServerSection {
    /// Creates the section. Names equal to those of `previous` are shared.
    pub(super) fn new(id: &InstanceId, label: &str, catalogue: &Arc<Catalogue>, previous: Option<&Self>) -> Self {
        let list = |list| {
            let mut order: Vec<usize> = (0..count(catalogue, list)).collect();
            order.sort_by_key(|at| definition(catalogue, list, *at).0);
            // If a server lists a name twice, the first counts: clients reject duplicate names.
            order.dedup_by_key(|at| definition(catalogue, list, *at).0);
            let (_, member) = list.fields();
            let entry = |at: usize| {
                let place =
                    |path: &[&str]| find_string(definition(catalogue, list, at).1, path).map(|(range, _)| range);
                SectionEntry { at, name: place(&[member]), ui: place(&UI) }
            };
            let own = |at: &usize| definition(catalogue, list, *at).0.into();
            let own = if has_addresses(list) { Box::default() } else { order.iter().map(own).collect() };
            let names = SectionNames::new(id, label, own);
            let known = previous.map(|previous| previous.names(list)).filter(|known| ***known == names);
            SectionList {
                entries: order.into_iter().map(entry).collect(),
                names: known.cloned().unwrap_or_else(|| Arc::new(names)),
                digest: None,
            }
        };
        let (label, lists) = (label.into(), LISTS.map(list));
        let mut section = Self { id: id.clone(), label, catalogue: catalogue.clone(), lists };
        for list in LISTS {
            section.lists[list as usize].digest = section.compute_digest(list);
        }
        section
    }

    fn compute_digest(&self, list: ListKind) -> Option<ListDigest> {
        if self.len(list) == 0 {
            return None;
        }
        let (mut digest, mut text) = (Context::new(&SHA256), String::new());
        for entry in 0..self.len(list) {
            text.clear();
            self.write(list, entry, None, &mut text);
            // No definition begins with a comma, so the text of all is unambiguous.
            text.push(',');
            digest.update(text.as_bytes());
        }
        Some(finish(digest))
    }

    pub(super) fn is_current_for(&self, label: &str, catalogue: &Arc<Catalogue>) -> bool {
        *self.label == *label && Arc::ptr_eq(&self.catalogue, catalogue)
    }

    pub(super) fn names(&self, list: ListKind) -> &Arc<SectionNames> {
        &self.lists[list as usize].names
    }

    pub(super) fn digest(&self, list: ListKind) -> Option<ListDigest> {
        self.lists[list as usize].digest
    }

    pub(super) fn len(&self, list: ListKind) -> usize {
        self.lists[list as usize].entries.len()
    }

    pub(super) fn key(&self, list: ListKind, entry: usize) -> &str {
        definition(&self.catalogue, list, self.lists[list as usize].entries[entry].at).0
    }

    /// Returns the number of entries up to and including this key.
    pub(super) fn count_up_to(&self, list: ListKind, key: &str) -> usize {
        self.lists[list as usize].entries.partition_point(|entry| definition(&self.catalogue, list, entry.at).0 <= key)
    }

    /// Appends a definition: as its server wrote it, but with the name or URI of the merged list. `longer` replaces the
    /// shortest name.
    pub(super) fn write(&self, list: ListKind, entry: usize, longer: Option<&str>, text: &mut String) {
        let SectionList { entries, names, .. } = &self.lists[list as usize];
        let SectionEntry { at, name, ui } = &entries[entry];
        let (key, raw) = definition(&self.catalogue, list, *at);
        let qualify = |uri: &str| qualify_uri(&self.label, uri);
        let name = name.as_ref().map(|range| {
            let shortest = || names.shortest(entry).map_or_else(|| qualify(key), str::to_owned);
            (range, longer.map_or_else(shortest, str::to_owned))
        });
        let ui = ui.as_ref().and_then(|range| {
            let uri: String = serde_json::from_str(&raw[range.clone()]).ok()?;
            Some((range, qualify(&uri)))
        });
        let mut replacements: Vec<_> = name.into_iter().chain(ui).collect();
        replacements.sort_unstable_by_key(|(range, _)| range.start);
        let mut written = 0;
        for (range, replacement) in replacements {
            text.push_str(&raw[written..range.start]);
            text.push_str(&json_string(&replacement));
            written = range.end;
        }
        text.push_str(&raw[written..]);
    }
}

fn has_addresses(list: ListKind) -> bool {
    matches!(list, ListKind::Resources | ListKind::ResourceTemplates)
}

/// Returns the key and the text of a definition.
fn definition(catalogue: &Catalogue, list: ListKind, at: usize) -> (&str, &str) {
    fn parts(entry: &CatalogueEntry) -> (&str, &str) {
        (&entry.key, entry.raw.get())
    }
    match list {
        ListKind::Tools => (&catalogue.tools[at].name, catalogue.tools[at].raw.get()),
        ListKind::Resources => parts(&catalogue.resources[at]),
        ListKind::ResourceTemplates => parts(&catalogue.resource_templates[at]),
        ListKind::Prompts => parts(&catalogue.prompts[at]),
    }
}

fn count(catalogue: &Catalogue, list: ListKind) -> usize {
    match list {
        ListKind::Tools => catalogue.tools.len(),
        ListKind::Resources => catalogue.resources.len(),
        ListKind::ResourceTemplates => catalogue.resource_templates.len(),
        ListKind::Prompts => catalogue.prompts.len(),
    }
}
