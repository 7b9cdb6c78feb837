//! Names of a merged list, with the owner of each. Clients keep the names that they have read, so the names do not
//! refer to catalogues: a client that does not list again keeps no outdated catalogue in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mcp_satellite_actors::model::ids::InstanceId;
use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};

use crate::names::{self, FlatItem, PREFIX_MAX};
use crate::tools::resources::SEPARATOR;

/// Digest of the text of a list, or of one server's part.
pub(super) type ListDigest = [u8; SHA256_OUTPUT_LEN];

/// Names of one server's entries.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SectionNames {
    pub(super) id: InstanceId,
    pub(super) label: Box<str>,
    // Beginning of all names in `shortest`.
    prefix: Box<str>,
    // Sorted. Empty for resources, which are found by the label.
    own: Box<[Box<str>]>,
    // Per own name, the shortest name in the merged list.
    shortest: Box<[Box<str>]>,
    // Positions of `shortest`, sorted by name.
    order: Box<[usize]>,
}

impl SectionNames {
    /// Creates the names for a server's own names, which are sorted and unique.
    pub(super) fn new(id: &InstanceId, label: &str, own: Box<[Box<str>]>) -> Self {
        let shortest: Box<[Box<str>]> =
            own.iter().map(|name| names::shortest_flat_name(label, name).into_boxed_str()).collect();
        let mut order: Box<[usize]> = (0..shortest.len()).collect();
        order.sort_unstable_by(|one, other| shortest[*one].cmp(&shortest[*other]));
        let mut prefix = names::flat_prefix(label);
        prefix.truncate(PREFIX_MAX);
        Self { id: id.clone(), label: label.into(), prefix: prefix.into(), own, shortest, order }
    }

    pub(super) fn shortest(&self, entry: usize) -> Option<&str> {
        self.shortest.get(entry).map(|name| &**name)
    }

    fn items(&self) -> impl Iterator<Item = FlatItem<'_>> {
        let item = |(name, shortest)| FlatItem { label: &self.label, name, shortest };
        self.own.iter().map(|name| &**name).zip(self.shortest.iter().map(|name| &**name)).map(item)
    }

    fn find(&self, name: &str) -> Option<usize> {
        if !name.starts_with(&*self.prefix) {
            return None;
        }
        let at = self.order.partition_point(|entry| *self.shortest[*entry] < *name);
        self.order.get(at).copied().filter(|entry| *self.shortest[*entry] == *name)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct MergedNames {
    servers: Vec<Arc<SectionNames>>,
    // Names of the entries whose shortest names are not unique, by server and entry.
    longer: BTreeMap<(usize, usize), Box<str>>,
    by_longer: HashMap<Box<str>, (usize, usize)>,
    digest: ListDigest,
}

impl MergedNames {
    /// Creates the names for the parts of all servers with their digests.
    pub(super) fn new(servers: Vec<Arc<SectionNames>>, digests: &[Option<ListDigest>]) -> Self {
        let longer = longer_names(&servers);
        let by_longer = longer.iter().map(|(place, name)| (name.clone(), *place)).collect();
        let mut digest = Context::new(&SHA256);
        digests.iter().flatten().for_each(|part| digest.update(part));
        for ((server, entry), name) in &longer {
            for text in [servers[*server].shortest(*entry).unwrap_or_default(), name] {
                digest.update(text.as_bytes());
                digest.update(&[0]);
            }
        }
        Self { servers, longer, by_longer, digest: finish(digest) }
    }

    /// Returns the owner of an item and the owner's name for it.
    pub fn owner(&self, name: &str) -> Option<(&InstanceId, &str)> {
        let place = self.by_longer.get(name).copied().or_else(|| self.find_shortest(name));
        place.map(|(server, entry)| (&self.servers[server].id, &*self.servers[server].own[entry]))
    }

    fn find_shortest(&self, name: &str) -> Option<(usize, usize)> {
        let mut places = self.servers.iter().enumerate().filter_map(|(at, server)| Some((at, server.find(name)?)));
        places.find(|place| !self.longer.contains_key(place))
    }

    /// Splits `server|uri` at the first bar that follows a label. Returns the owner and the rest.
    pub fn split<'t>(&self, address: &'t str) -> Option<(&InstanceId, &'t str)> {
        let rest = |server: &SectionNames| address.strip_prefix(&*server.label)?.strip_prefix(SEPARATOR);
        let found = self.servers.iter().filter_map(|server| Some((&server.id, rest(server)?)));
        found.max_by_key(|(_, rest)| rest.len())
    }

    pub(super) fn longer(&self, server: usize, entry: usize) -> Option<&str> {
        self.longer.get(&(server, entry)).map(|name| &**name)
    }

    pub(super) fn digest(&self) -> &ListDigest {
        &self.digest
    }

    pub fn is_different_from(&self, other: &Self) -> bool {
        self.digest != other.digest
    }
}

pub(super) fn finish(digest: Context) -> ListDigest {
    let mut bytes = [0; SHA256_OUTPUT_LEN];
    bytes.copy_from_slice(digest.finish().as_ref());
    bytes
}

fn longer_names(servers: &[Arc<SectionNames>]) -> BTreeMap<(usize, usize), Box<str>> {
    let items: Vec<FlatItem<'_>> = servers.iter().flat_map(|server| server.items()).collect();
    let mut begin = 0;
    let mut longer = names::longer_flat_names(&items).into_iter().peekable();
    let mut by_place = BTreeMap::new();
    for (at, server) in servers.iter().enumerate() {
        let end = begin + server.own.len();
        while let Some((item, name)) = longer.next_if(|(item, _)| *item < end) {
            by_place.insert((at, item - begin), name.into());
        }
        begin = end;
    }
    by_place
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged_names(labels: &[&str]) -> MergedNames {
        let id = |label: &str| InstanceId::new("acme".into(), "alice".into(), label.into());
        let servers = labels.iter().map(|label| Arc::new(SectionNames::new(&id(label), label, Box::default())));
        MergedNames::new(servers.collect(), &[])
    }

    fn split<'t>(names: &MergedNames, address: &'t str) -> Option<(String, &'t str)> {
        names.split(address).map(|(id, rest)| (id.installation.as_str().to_owned(), rest))
    }

    #[test]
    fn an_address_is_split_after_a_known_label() {
        let names = merged_names(&["git", "a|b"]);
        assert_eq!(split(&names, "git|file:///a|b"), Some(("git".to_owned(), "file:///a|b")));
        assert_eq!(split(&names, "a|b|c"), Some(("a|b".to_owned(), "c")));
        for unknown in ["git", "a|c", "gi|git|x", "|git|x", ""] {
            assert_eq!(split(&names, unknown), None, "{unknown}");
        }
        // The shorter of two labels wins in any order.
        for labels in [["a", "a|b"], ["a|b", "a"]] {
            assert_eq!(split(&merged_names(&labels), "a|b|c"), Some(("a".to_owned(), "b|c")));
        }
    }
}
