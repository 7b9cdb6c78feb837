//! The merged lists of all servers of a caller, with the owner of each item.

use std::collections::HashMap;
use std::sync::Arc;

use mcp_satellite_actors::model::catalogue::{Catalogue, CatalogueEntry};
use mcp_satellite_actors::model::ids::InstanceId;

use crate::names;
use crate::tools::raw::map_string;
use crate::tools::resources::{SEPARATOR, UI, qualify_definition, qualify_uri};
use crate::tools::{CallerSnapshot, OfferedCatalogues};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemKind {
    Tools,
    /// Resources and resource templates.
    Resources,
    Prompts,
}

impl ItemKind {
    /// Kinds in the order of their notifications.
    pub const ALL: [Self; 3] = [Self::Tools, Self::Resources, Self::Prompts];
}

#[derive(Debug)]
pub struct MergedLists {
    offered: OfferedCatalogues,
    // Per `ItemKind`. Unchanged lists are shared with the previous ones.
    lists: [Arc<MergedList>; 3],
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct MergedList {
    // Results of the list requests.
    results: Vec<String>,
    // Owner and original name by merged name. For resources the keys are the labels of the servers.
    owners: HashMap<String, (InstanceId, Box<str>)>,
    // Length of the longest name in bytes: a longer text cannot be a name.
    longest: usize,
}

impl MergedList {
    fn new(results: Vec<String>, owners: HashMap<String, (InstanceId, Box<str>)>) -> Self {
        let longest = owners.keys().map(String::len).max().unwrap_or_default();
        Self { results, owners, longest }
    }

    /// Returns the owner of an item and the owner's name for it.
    pub fn owner(&self, name: &str) -> Option<(&InstanceId, &str)> {
        self.owners.get(name).map(|(id, name)| (id, &**name))
    }

    /// Splits `server|uri` at the first bar that follows a label. Returns the owner and the rest.
    pub fn split<'t>(&self, address: &'t str) -> Option<(&InstanceId, &'t str)> {
        let owner_at = |at: usize| Some((self.owner(&address[..at])?.0, &address[at + SEPARATOR.len_utf8()..]));
        let bars = address.match_indices(SEPARATOR).map(|(at, _)| at);
        bars.take_while(|at| *at <= self.longest).find_map(owner_at)
    }

    pub fn is_different_from(&self, other: &Self) -> bool {
        self.results != other.results
    }
}

impl MergedLists {
    /// Builds the lists. Long lists take time, so this belongs on a blocking thread. Lists equal to those of `previous`
    /// are shared.
    pub fn new(offered: OfferedCatalogues, previous: Option<&Self>) -> Self {
        let lists = ItemKind::ALL.map(|kind| {
            let list = match kind {
                ItemKind::Tools => merge_named_items(&offered, "tools", &|catalogue| {
                    catalogue.tools.iter().map(|tool| (&*tool.name, tool.raw.get())).collect()
                }),
                ItemKind::Prompts => merge_named_items(&offered, "prompts", &|catalogue| {
                    catalogue.prompts.iter().map(|prompt| (&*prompt.key, prompt.raw.get())).collect()
                }),
                ItemKind::Resources => merge_addressed_items(&offered),
            };
            let same = previous.map(|previous| previous.list(kind)).filter(|previous| ***previous == list);
            same.cloned().unwrap_or_else(|| Arc::new(list))
        });
        Self { offered, lists }
    }

    pub fn is_current_for(&self, caller: &CallerSnapshot) -> bool {
        self.offered.is_current_for(caller)
    }

    pub fn list(&self, kind: ItemKind) -> &Arc<MergedList> {
        &self.lists[kind as usize]
    }

    pub fn tools(&self) -> &str {
        &self.list(ItemKind::Tools).results[0]
    }

    pub fn prompts(&self) -> &str {
        &self.list(ItemKind::Prompts).results[0]
    }

    pub fn resources(&self) -> &str {
        &self.list(ItemKind::Resources).results[0]
    }

    pub fn resource_templates(&self) -> &str {
        &self.list(ItemKind::Resources).results[1]
    }
}

/// Merges items with names; the merged names are valid for every client.
fn merge_named_items(
    offered: &OfferedCatalogues,
    list: &str,
    of: &dyn Fn(&Catalogue) -> Vec<(&str, &str)>,
) -> MergedList {
    let mut items = Vec::new();
    for (label, spec, catalogue) in offered.servers() {
        items.extend(of(catalogue).into_iter().map(|(name, raw)| (label, &spec.id, name, raw)));
    }
    let pairs: Vec<(&str, &str)> = items.iter().map(|(label, _, name, _)| (*label, *name)).collect();
    let (mut definitions, mut owners) = (Vec::with_capacity(items.len()), HashMap::with_capacity(items.len()));
    for ((label, id, name, raw), flat) in items.into_iter().zip(names::flat_names(&pairs)) {
        // If a server lists a name twice, the first counts: clients reject duplicate names.
        if owners.contains_key(&flat) {
            continue;
        }
        let renamed = map_string(raw, &["name"], |_| flat.clone());
        definitions.push(map_string(&renamed, &UI, |uri| qualify_uri(label, uri)));
        owners.insert(flat, (id.clone(), name.into()));
    }
    MergedList::new(vec![list_result(list, &definitions)], owners)
}

/// Merges items with addresses, which get the server's label as a prefix.
fn merge_addressed_items(offered: &OfferedCatalogues) -> MergedList {
    let entries = |name: &str, key: &str, of: fn(&Catalogue) -> &[CatalogueEntry]| {
        let mut definitions = Vec::new();
        for (label, _, catalogue) in offered.servers() {
            definitions.extend(of(catalogue).iter().map(|entry| qualify_definition(label, entry.raw.get(), key)));
        }
        list_result(name, &definitions)
    };
    let resources = entries("resources", "uri", |catalogue| &catalogue.resources);
    let templates = entries("resourceTemplates", "uriTemplate", |catalogue| &catalogue.resource_templates);
    let owners = offered.servers().map(|(label, spec, _)| (label.to_owned(), (spec.id.clone(), label.into())));
    MergedList::new(vec![resources, templates], owners.collect())
}

fn list_result(name: &str, definitions: &[String]) -> String {
    format!("{{\"{name}\":[{}]}}", definitions.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged_list(labels: &[&str]) -> MergedList {
        let id = |label: &str| InstanceId::new("acme".into(), "alice".into(), label.into());
        let owners = labels.iter().map(|label| ((*label).to_owned(), (id(label), (*label).into())));
        MergedList::new(Vec::new(), owners.collect())
    }

    fn split<'t>(list: &MergedList, address: &'t str) -> Option<(String, &'t str)> {
        list.split(address).map(|(id, rest)| (id.installation.as_str().to_owned(), rest))
    }

    #[test]
    fn an_address_is_split_after_a_known_label() {
        let list = merged_list(&["git", "a|b"]);
        assert_eq!(split(&list, "git|file:///a|b"), Some(("git".to_owned(), "file:///a|b")));
        assert_eq!(split(&list, "a|b|c"), Some(("a|b".to_owned(), "c")));
        for unknown in ["git", "a|c", "gi|git|x", "|git|x", ""] {
            assert_eq!(split(&list, unknown), None, "{unknown}");
        }
    }

    #[test]
    fn an_address_of_many_bars_is_not_looked_up_at_each_bar() {
        // A lookup at each bar would take hours.
        assert_eq!(split(&merged_list(&["git", "a|b"]), &"|".repeat(4 * 1024 * 1024)), None);
    }
}
