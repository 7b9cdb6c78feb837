//! A client's view of one merged list: the pages that it has read, and the version that it was notified of.

use std::sync::Arc;

use mcp_satellite_actors::model::ids::InstanceId;

use super::list_cursor::ListPosition;
use super::merged_names::{ListDigest, MergedNames};

// Maximum number of pages whose names stay valid, if the list changes with every page.
const READ_PAGES_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct ClientList {
    known: KnownVersion,
    // Their names stay valid for the client until it reads the list again from its beginning.
    pages: Vec<ReadPages>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum KnownVersion {
    /// The client has never read the list and gets no notification about it.
    #[default]
    None,
    One(ListDigest),
    /// The client has pages of several versions, so it needs a notification whatever the list is now.
    Mixed,
}

/// Consecutive pages of one version of the list.
#[derive(Debug)]
struct ReadPages {
    names: Arc<MergedNames>,
    after: Option<ListPosition>,
    /// Last entry; `None` at the end of the list.
    end: Option<ListPosition>,
}

impl ReadPages {
    fn contains(&self, id: &InstanceId, own_name: &str) -> bool {
        let place = (&id.installation, own_name);
        let reaches = |position: &ListPosition| place <= (&position.installation, &position.key);
        !self.after.as_ref().is_some_and(reaches) && self.end.as_ref().is_none_or(reaches)
    }

    fn contains_server(&self, id: &InstanceId) -> bool {
        let starts_after = self.after.as_ref().is_some_and(|after| after.installation > id.installation);
        !starts_after && self.end.as_ref().is_none_or(|end| id.installation <= end.installation)
    }
}

impl ClientList {
    /// Records that the client has read a page: the entries after `after` up to `end`. Returns true if the client now
    /// has pages of several versions.
    pub(super) fn record_page(
        &mut self,
        names: &Arc<MergedNames>,
        after: Option<ListPosition>,
        end: Option<ListPosition>,
    ) -> bool {
        let this = KnownVersion::One(*names.digest());
        if after.is_none() {
            self.pages.clear();
            self.known = this;
        } else if self.known == KnownVersion::None {
            self.known = this;
        } else if self.known != this {
            self.known = KnownVersion::Mixed;
        }
        match self.pages.last_mut() {
            Some(read) if Arc::ptr_eq(&read.names, names) && read.end == after => read.end = end,
            _ => self.pages.push(ReadPages { names: names.clone(), after, end }),
        }
        if self.pages.len() > READ_PAGES_MAX {
            self.pages.remove(0);
        }
        self.known == KnownVersion::Mixed
    }

    /// Records the version that the client is notified of. Returns true if it needs a notification.
    pub(super) fn announce(&mut self, names: &MergedNames) -> bool {
        let now = KnownVersion::One(*names.digest());
        if self.known == KnownVersion::None || self.known == now {
            return false;
        }
        self.known = now;
        true
    }

    /// Returns the owner of an item that the client has read, and the owner's name for it. Of two versions with this
    /// name, the one read last counts.
    pub(super) fn owner(&self, name: &str) -> Option<(InstanceId, String)> {
        self.pages.iter().rev().find_map(|read| {
            let (id, own_name) = read.names.owner(name)?;
            read.contains(id, own_name).then(|| (id.clone(), own_name.to_owned()))
        })
    }

    /// Splits `server|uri` after a label that the client has read.
    pub(super) fn split(&self, address: &str) -> Option<(InstanceId, String)> {
        self.pages.iter().rev().find_map(|read| {
            let (id, uri) = read.names.split(address)?;
            read.contains_server(id).then(|| (id.clone(), uri.to_owned()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::merged_names::SectionNames;
    use super::*;

    /// The names of servers with one tool each: label and the tool's own name.
    fn names(servers: &[(&str, &str)]) -> Arc<MergedNames> {
        let section = |(at, (label, own)): (usize, &(&str, &str))| {
            let id = InstanceId::new("team".into(), "user".into(), format!("i{at}").into());
            Arc::new(SectionNames::new(&id, label, Box::new([(*own).into()])))
        };
        let digests: Vec<_> =
            servers.iter().map(|(_, own)| Some([own.len().try_into().unwrap_or_default(); 32])).collect();
        Arc::new(MergedNames::new(servers.iter().enumerate().map(section).collect(), &digests))
    }

    fn position(installation: &str, key: &str) -> ListPosition {
        ListPosition { installation: installation.into(), key: key.into() }
    }

    fn owner(list: &ClientList, name: &str) -> Option<(String, String)> {
        list.owner(name).map(|(id, own)| (id.installation.as_str().to_owned(), own))
    }

    #[test]
    fn a_name_belongs_to_the_server_of_the_page_on_which_the_client_read_it() {
        let mut list = ClientList::default();
        // `a__b__c` belongs to the first server in the first version, and to the second server in the second one.
        let (one, two) = (names(&[("a", "b__c"), ("a__b", "x")]), names(&[("a", "a"), ("a__b", "c")]));
        let after = Some(position("i0", "b__c"));
        assert!(!list.record_page(&one, None, after.clone()));
        let of_first = Some(("i0".to_owned(), "b__c".to_owned()));
        assert_eq!((owner(&list, "a__b__c"), owner(&list, "a__b__x")), (of_first.clone(), None));
        assert!(!list.record_page(&one, after.clone(), None));
        assert_eq!(owner(&list, "a__b__x"), Some(("i1".to_owned(), "x".to_owned())));
        // The first page of the first version and the second page of the second version.
        list.record_page(&one, None, after.clone());
        assert!(list.record_page(&two, after.clone(), None), "the pages are of several versions");
        assert_eq!(owner(&list, "a__b__c"), Some(("i1".to_owned(), "c".to_owned())));
        assert_eq!((owner(&list, "a__a"), owner(&list, "a__b__x")), (None, None));
        // Until the client lists again from the beginning.
        assert!(!list.record_page(&two, None, None));
        assert_eq!(owner(&list, "a__a"), Some(("i0".to_owned(), "a".to_owned())));
    }

    #[test]
    fn a_client_with_pages_of_several_versions_is_always_notified() {
        let (one, two) = (names(&[("a", "b")]), names(&[("a", "bb")]));
        let mut list = ClientList::default();
        assert!(!list.announce(&one), "the client has read nothing");
        let after = Some(position("i0", "a"));
        list.record_page(&one, None, after.clone());
        assert!(!list.announce(&one));
        assert!(list.announce(&two));
        assert!(!list.announce(&two), "the client was notified");
        list.record_page(&one, None, after.clone());
        assert!(list.record_page(&two, after, None));
        assert!(list.announce(&one));
        assert!(!list.announce(&one));
    }

    #[test]
    fn the_number_of_recorded_pages_is_bounded() {
        let mut list = ClientList::default();
        list.record_page(&names(&[("a", "b")]), None, Some(position("i0", "a")));
        for _ in 0..2 * READ_PAGES_MAX {
            list.record_page(&names(&[("a", "b")]), Some(position("i0", "a")), None);
        }
        assert_eq!(list.pages.len(), READ_PAGES_MAX);
    }
}
