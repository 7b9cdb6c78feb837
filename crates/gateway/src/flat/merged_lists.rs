//! The merged lists of all servers of a caller, in pages. Entries are ordered by server and the server's own name, so a
//! change of the lists between two pages neither repeats nor leaves out an entry that did not change.

use std::collections::HashMap;
use std::sync::Arc;

use mcp_satellite_actors::model::catalogue::{Catalogue, ListKind};
use mcp_satellite_actors::model::ids::InstanceId;

use super::list_cursor::ListPosition;
use super::merged_names::MergedNames;
use super::server_section::{LISTS, ServerSection};
use crate::tools::raw::json_string;
use crate::tools::{CallerSnapshot, OfferedCatalogues};

/// Limits of a page. An entry that exceeds the limit of bytes alone has its own page.
#[derive(Debug, Clone, Copy)]
pub struct PageLimits {
    pub entries: usize,
    /// Size of the definitions.
    pub bytes: usize,
}

/// Limits of the endpoint. Many clients read the first page only, so a page has room for every ordinary list; and a
/// whole response fits in the events that a stream keeps for a client that returns.
pub const PAGE_LIMITS: PageLimits = PageLimits { entries: 1000, bytes: 1_000_000 };

#[derive(Debug)]
pub struct MergedLists {
    offered: OfferedCatalogues,
    // Sorted by installation.
    sections: Vec<Arc<ServerSection>>,
    // Per `ListKind`. Unchanged names are shared with the previous lists.
    names: [Arc<MergedNames>; 4],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListPage {
    /// Result of the list request.
    pub text: String,
    /// Position of the next page, if there is one.
    pub next: Option<ListPosition>,
}

impl MergedLists {
    /// Builds the lists. The parts of unchanged servers are those of `previous`. The first lists take time, so this
    /// belongs on a blocking thread.
    pub fn new(offered: OfferedCatalogues, previous: Option<&Self>) -> Self {
        let servers = offered.servers().map(|(label, spec, catalogue)| (label, &spec.id, catalogue));
        let sections = merge_sections(servers, previous.map_or(&[], |previous| &previous.sections));
        let names = LISTS.map(|list| {
            let names = merge_names(&sections, list);
            let same = previous.map(|previous| previous.names(list)).filter(|previous| ***previous == names);
            same.cloned().unwrap_or_else(|| Arc::new(names))
        });
        Self { offered, sections, names }
    }

    pub fn is_current_for(&self, caller: &CallerSnapshot) -> bool {
        self.offered.is_current_for(caller)
    }

    pub fn names(&self, list: ListKind) -> &Arc<MergedNames> {
        &self.names[list as usize]
    }

    /// Returns the page after this position, or the first one.
    pub fn page(&self, list: ListKind, after: Option<&ListPosition>, limits: PageLimits) -> ListPage {
        write_page(&self.sections, self.names(list), list, after, limits)
    }
}

fn merge_sections<'a>(
    servers: impl Iterator<Item = (&'a str, &'a InstanceId, &'a Arc<Catalogue>)>,
    previous: &[Arc<ServerSection>],
) -> Vec<Arc<ServerSection>> {
    let previous: HashMap<&InstanceId, &Arc<ServerSection>> =
        previous.iter().map(|section| (&section.id, section)).collect();
    let section = |(label, id, catalogue)| match previous.get(id) {
        Some(section) if section.is_current_for(label, catalogue) => (*section).clone(),
        former => Arc::new(ServerSection::new(id, label, catalogue, former.map(|former| &***former))),
    };
    servers.map(section).collect()
}

fn merge_names(sections: &[Arc<ServerSection>], list: ListKind) -> MergedNames {
    let digests: Vec<_> = sections.iter().map(|section| section.digest(list)).collect();
    MergedNames::new(sections.iter().map(|section| section.names(list).clone()).collect(), &digests)
}

fn write_page(
    sections: &[Arc<ServerSection>],
    names: &MergedNames,
    list: ListKind,
    after: Option<&ListPosition>,
    limits: PageLimits,
) -> ListPage {
    let mut text = format!("{{\"{}\":[", list.fields().0);
    let begin = text.len();
    let (mut count, mut end, mut is_full) = (0, None, false);
    for (at, entry) in places_after(sections, list, after) {
        let complete = text.len();
        if count > 0 {
            text.push(',');
        }
        sections[at].write(list, entry, names.longer(at, entry), &mut text);
        is_full = count == limits.entries || (count > 0 && text.len() - begin > limits.bytes);
        if is_full {
            text.truncate(complete);
            break;
        }
        (count, end) = (count + 1, Some((at, entry)));
    }
    text.push(']');
    let next = end.filter(|_| is_full).map(|(at, entry)| ListPosition {
        installation: sections[at].id.installation.clone(),
        key: sections[at].key(list, entry).into(),
    });
    if let Some(next) = &next {
        text.push_str(",\"nextCursor\":");
        text.push_str(&json_string(&next.to_cursor(list)));
    }
    text.push('}');
    ListPage { text, next }
}

/// Returns server and entry of all entries after this position.
fn places_after(
    sections: &[Arc<ServerSection>],
    list: ListKind,
    after: Option<&ListPosition>,
) -> impl Iterator<Item = (usize, usize)> {
    let first =
        after.map_or(0, |after| sections.partition_point(|section| section.id.installation < after.installation));
    sections.iter().enumerate().skip(first).flat_map(move |(at, section)| {
        let read = after.filter(|after| section.id.installation == after.installation);
        let begin = read.map_or(0, |after| section.count_up_to(list, &after.key));
        (begin..section.len(list)).map(move |entry| (at, entry))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use mcp_satellite_actors::model::catalogue::Tool;
    use proptest::prelude::*;
    use serde_json::Value;
    use serde_json::value::RawValue;

    use super::*;
    use crate::names::flat_names;

    // Installation and the server's own name.
    type Key = (String, String);
    // Own names of each installation with the version of each definition. A name may be listed twice.
    type Fleet = BTreeMap<&'static str, Vec<(String, u8)>>;

    // Some names of one label equal names of another.
    const LABELS: [(&str, &str); 3] = [("one", "a__b"), ("three", "ü"), ("two", "a")];

    fn fleet() -> impl Strategy<Value = Fleet> {
        let tools = || proptest::collection::vec(("b__c|[a-c]{1,2}|[a-c]\\.[a-c]", 0u8..2), 0..8);
        let server =
            |(installation, _): (&'static str, _)| proptest::option::weighted(0.8, (Just(installation), tools()));
        LABELS.map(server).prop_map(|servers| servers.into_iter().flatten().collect())
    }

    struct Version {
        sections: Vec<Arc<ServerSection>>,
        names: MergedNames,
    }

    impl Version {
        fn new(fleet: &Fleet, previous: Option<&Self>) -> Self {
            let catalogue = |installation: &str, tools: &[(String, u8)]| {
                let tool = |(name, version): &(String, u8)| {
                    let key = [installation, name];
                    let text = serde_json::json!({"key": key, "version": version, "name": name}).to_string();
                    Tool::parse(RawValue::from_string(text).unwrap()).unwrap()
                };
                Arc::new(Catalogue { tools: tools.iter().map(tool).collect(), ..Catalogue::default() })
            };
            let servers: Vec<_> = LABELS
                .into_iter()
                .filter_map(|(installation, label)| {
                    let id = InstanceId::new("team".into(), "user".into(), installation.into());
                    Some((label, id, catalogue(installation, fleet.get(installation)?)))
                })
                .collect();
            let servers = servers.iter().map(|(label, id, catalogue)| (*label, id, catalogue));
            let sections = merge_sections(servers, previous.map_or(&[], |previous| &previous.sections));
            let names = merge_names(&sections, ListKind::Tools);
            Self { sections, names }
        }

        fn page(&self, after: Option<&ListPosition>, limits: PageLimits) -> (Vec<Value>, ListPage) {
            let page = write_page(&self.sections, &self.names, ListKind::Tools, after, limits);
            let mut result: Value = serde_json::from_str(&page.text).unwrap();
            let cursor = result["nextCursor"].as_str().map(|cursor| ListPosition::from_cursor(cursor, ListKind::Tools));
            assert_eq!(cursor.map(Option::unwrap), page.next);
            let Value::Array(tools) = result["tools"].take() else { panic!("{}", page.text) };
            (tools, page)
        }
    }

    fn key(tool: &Value) -> Key {
        serde_json::from_value(tool["key"].clone()).unwrap()
    }

    /// Returns the merged name of each tool, and the version of the definition that counts.
    fn expected_tools(fleet: &Fleet) -> BTreeMap<Key, (String, u8)> {
        let mut first: BTreeMap<Key, u8> = BTreeMap::new();
        for (installation, tools) in fleet {
            for (name, version) in tools {
                first.entry(((*installation).to_owned(), name.clone())).or_insert(*version);
            }
        }
        let label = |installation: &str| LABELS.iter().find(|(known, _)| *known == installation).unwrap().1;
        let pairs: Vec<(&str, &str)> =
            first.keys().map(|(installation, name)| (label(installation), &**name)).collect();
        let names = flat_names(&pairs);
        first.iter().zip(names).map(|((key, version), name)| (key.clone(), (name, *version))).collect()
    }

    proptest! {
        #[test]
        fn pages_repeat_nothing_and_leave_out_nothing_that_does_not_change(
            fleets in proptest::collection::vec(fleet(), 1..6),
            entries in 1usize..6,
            bytes in 1usize..400,
        ) {
            let limits = PageLimits { entries, bytes };
            let mut version: Option<Version> = None;
            let (mut after, mut read, mut versions) = (None, Vec::new(), Vec::new());
            for number in 0.. {
                prop_assert!(number < 100, "the list has no end");
                // The last version stays until the end of the list.
                let fleet = fleets.get(number).unwrap_or(fleets.last().unwrap());
                let current = Version::new(fleet, version.as_ref());
                let expected = expected_tools(fleet);
                let (tools, page) = current.page(after.as_ref(), limits);
                let size: usize = tools.iter().map(|tool| tool.to_string().len() + 1).sum::<usize>().saturating_sub(1);
                prop_assert!(tools.len() <= entries && (size <= bytes || tools.len() == 1), "{}", page.text);
                for tool in &tools {
                    let (key, name) = (key(tool), tool["name"].as_str().unwrap());
                    let (expected_name, expected_version) = &expected[&key];
                    prop_assert_eq!((name, &tool["version"]), (&**expected_name, &Value::from(*expected_version)));
                    let owner = current.names.owner(name).unwrap();
                    prop_assert_eq!((owner.0.installation.as_str(), owner.1), (&*key.0, &*key.1));
                    read.push(key);
                }
                versions.push(expected);
                // A version built from the previous one equals one built from nothing.
                let fresh = Version::new(fleet, None);
                prop_assert_eq!(&fresh.names, &current.names);
                prop_assert_eq!(fresh.page(after.as_ref(), limits).1, page.clone());
                version = Some(current);
                match page.next {
                    Some(next) => after = Some(next),
                    None => break,
                }
            }
            prop_assert!(read.is_sorted_by(|one, other| one < other), "{:?}", read);
            let read: BTreeSet<Key> = read.into_iter().collect();
            for (key, tool) in &versions[0] {
                let is_unchanged = versions.iter().all(|version| version.get(key) == Some(tool));
                prop_assert!(!is_unchanged || read.contains(key), "{:?} is missing", key);
            }
        }
    }

    #[test]
    fn the_parts_of_unchanged_servers_are_shared() {
        let tools = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), 0)).collect();
        let before = Fleet::from([("one", tools(&["a", "b"])), ("two", tools(&["c"]))]);
        let first = Version::new(&before, None);
        // The catalogues of the second version are new, but equal.
        let second = Version::new(&before, Some(&first));
        assert!(!first.names.is_different_from(&second.names));
        for (one, other) in first.sections.iter().zip(&second.sections) {
            assert!(Arc::ptr_eq(one.names(ListKind::Tools), other.names(ListKind::Tools)));
        }
        let after = Fleet::from([("one", tools(&["a", "b"])), ("two", tools(&["d"]))]);
        assert!(Version::new(&after, Some(&first)).names.is_different_from(&first.names));
    }
}
