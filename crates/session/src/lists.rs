//! Lists of a server, read page by page and one after the other: tools, then resources, resource templates and prompts
//! if the server declares them.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mcp_satellite_model::byte_budget::{ByteBudget, ByteShare};
pub(crate) use mcp_satellite_model::catalogue::ListKind as Kind;
use mcp_satellite_model::catalogue::{Catalogue, CatalogueEntry, Revisions, Tool};
use mcp_satellite_model::policy::SessionPolicy;
use mcp_satellite_protocol::header_params::header_params;
use mcp_satellite_protocol::rpc::member;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(crate) struct OfferedLists {
    #[serde(deserialize_with = "deserialize_presence")]
    pub(crate) tools: bool,
    #[serde(deserialize_with = "deserialize_presence")]
    pub(crate) resources: bool,
    #[serde(deserialize_with = "deserialize_presence")]
    pub(crate) prompts: bool,
}

fn deserialize_presence<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Option::<IgnoredAny>::deserialize(deserializer).map(|there| there.is_some())
}

/// Lists of one server and the current read.
///
/// `reads_by_itself` is true if the session reads them after the handshake. `known` is true once the lists were read in
/// this session, or need not be: the instance is online. `failed` refers to the last read; `failures` counts failed reads
/// in a row while the lists are known. `last_reported` is the last reported catalogue if some of its lists could not be
/// read. `memory` is the budget for the lists of all servers.
pub(crate) struct ServerLists {
    pub(crate) reads_by_itself: bool,
    pub(crate) offers: OfferedLists,
    pub(crate) reading: Option<Box<ListRead>>,
    pub(crate) next_read_at: Option<Instant>,
    pub(crate) failed: bool,
    pub(crate) failures: u32,
    pub(crate) known: bool,
    last_reported: Option<Arc<Catalogue>>,
    pub(crate) memory: Arc<ByteBudget>,
}

impl ServerLists {
    pub(crate) fn new(reads_by_itself: bool, memory: Arc<ByteBudget>) -> Self {
        let offers = OfferedLists::default();
        Self {
            reads_by_itself,
            offers,
            reading: None,
            next_read_at: None,
            failed: false,
            failures: 0,
            known: !reads_by_itself,
            last_reported: None,
            memory,
        }
    }

    pub(crate) fn is_reading_optional_list(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| reading.kind != Kind::Tools)
    }

    pub(crate) fn record_if_changed(&mut self, catalogue: Catalogue) -> Option<Arc<Catalogue>> {
        // A repeated read with the same result and the same unreadable lists is no news.
        if self.last_reported.as_deref().is_some_and(|reported| is_same(reported, &catalogue)) {
            return None;
        }
        let catalogue = Arc::new(catalogue);
        self.last_reported = (!catalogue.unreadable.is_empty()).then(|| catalogue.clone());
        Some(catalogue)
    }

    pub(crate) fn schedule_read(&mut self, at: Instant) {
        self.next_read_at = Some(self.next_read_at.map_or(at, |sooner| sooner.min(at)));
    }
}

fn is_same(one: &Catalogue, other: &Catalogue) -> bool {
    let mut changes = Revisions::default();
    changes.count_changes(Some(one), other);
    changes == Revisions::default() && one.unreadable == other.unreadable
}

/// Progress of one read of all lists. `began_at`, `entries` and `bytes` refer to the current list; the counts include
/// skipped entries. A `strict` read also validates the parameters that a tool wants in headers.
pub(crate) struct ListRead {
    pub(crate) kind: Kind,
    catalogue: Catalogue,
    keys: HashSet<Box<str>>,
    pages: usize,
    cursor: Option<String>,
    pub(crate) began_at: Instant,
    entries: usize,
    bytes: usize,
    share: ByteShare,
    memory: Arc<ByteBudget>,
    unreadable: UnreadableLists,
    strict: bool,
}

/// Unreadable lists: a reason for each entry of `Catalogue::unread`, and the longest pause that the server requested.
#[derive(Default)]
pub(crate) struct UnreadableLists {
    pub(crate) reasons: Vec<String>,
    pub(crate) pause: Duration,
}

/// Next step after a page: the page at a cursor (JSON text), the end at the limit of pages, or the regular end.
pub(crate) enum PageStep {
    NextPage(String),
    PageLimit(usize),
    End,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PageError {
    Unreadable(String),
    OutOfBounds(String),
}

/// Deserializer of a page: returns at most the given number of entries and whether there are more. It skips the rest
/// unparsed, because many entries from a short text take more memory than the budget counted.
struct PageEntries(usize);

impl<'de> DeserializeSeed<'de> for PageEntries {
    type Value = (Vec<&'de RawValue>, bool);

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for PageEntries {
    type Value = (Vec<&'de RawValue>, bool);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while entries.len() < self.0
            && let Some(entry) = from.next_element()?
        {
            entries.push(entry);
        }
        let mut more = false;
        while from.next_element::<IgnoredAny>()?.is_some() {
            more = true;
        }
        Ok((entries, more))
    }
}

impl ListRead {
    pub(crate) fn new(strict: bool, memory: &Arc<ByteBudget>, now: Instant) -> Self {
        Self {
            kind: Kind::Tools,
            catalogue: Catalogue::default(),
            keys: HashSet::new(),
            pages: 0,
            cursor: None,
            began_at: now,
            entries: 0,
            bytes: 0,
            share: memory.share(),
            memory: memory.clone(),
            unreadable: UnreadableLists::default(),
            strict,
        }
    }

    pub(crate) fn timeout_error(&self, policy: &SessionPolicy, now: Instant) -> Option<PageError> {
        let limit = policy.list_timeout;
        let is_late = now.saturating_duration_since(self.began_at) >= limit;
        is_late.then(|| self.out_of_bounds(&format!("takes longer than {} s (`list_timeout`)", limit.as_secs_f64())))
    }

    fn out_of_bounds(&self, what: &str) -> PageError {
        PageError::OutOfBounds(format!("{} {what}, so it is not used", self.kind.method()))
    }

    pub(crate) fn add_page(
        &mut self,
        answer: &RawValue,
        policy: &SessionPolicy,
        now: Instant,
        mut skipped: impl FnMut(String),
    ) -> Result<PageStep, PageError> {
        let (list, key) = self.kind.fields();
        let method = self.kind.method();
        let no_page = |why: String| PageError::Unreadable(format!("invalid response to {method}: {why}"));
        if let Some(late) = self.timeout_error(policy, now) {
            return Err(late);
        }
        let answer = answer.get();
        self.bytes += answer.len();
        if self.bytes > policy.list_bytes_max {
            return Err(
                self.out_of_bounds(&format!("has more than {} bytes (`list_bytes_max`)", policy.list_bytes_max))
            );
        }
        if !self.share.try_take(answer.len()) {
            return Err(self.out_of_bounds("exceeds the memory for the lists of all servers"));
        }
        let entries = member(answer, list).ok_or_else(|| no_page(format!("`{list}` is missing")))?;
        let room = policy.list_entries_max.saturating_sub(self.entries);
        let (entries, more) = PageEntries(room)
            .deserialize(&mut serde_json::Deserializer::from_str(entries))
            .map_err(|error| no_page(error.to_string()))?;
        if more {
            let limit = policy.list_entries_max;
            return Err(self.out_of_bounds(&format!("has more than {limit} entries (`list_entries_max`)")));
        }
        self.entries += entries.len();
        for raw in entries {
            if let Err(error) = self.add_entry(raw.to_owned(), key, policy) {
                skipped(error);
            }
        }
        self.pages += 1;
        // An empty or repeated cursor would never end the list.
        let cursor = member(answer, "nextCursor").filter(|cursor| !matches!(*cursor, "null" | "\"\""));
        let Some(cursor) = cursor.filter(|cursor| self.cursor.as_deref() != Some(*cursor)) else {
            return Ok(PageStep::End);
        };
        if self.pages >= policy.list_pages_max {
            return Ok(PageStep::PageLimit(self.pages));
        }
        self.cursor = Some(cursor.to_owned());
        Ok(PageStep::NextPage(cursor.to_owned()))
    }

    fn add_entry(&mut self, raw: Box<RawValue>, key: &str, policy: &SessionPolicy) -> Result<(), String> {
        // Of several entries with the same name, the first one counts.
        if self.kind == Kind::Tools {
            let tool = Tool::parse(raw).map_err(|error| error.to_string())?;
            if !policy.tools.permits(&tool.name) {
                return Ok(());
            }
            if self.strict {
                header_params(tool.raw.get()).map_err(|why| format!("the tool `{}`: {why}", tool.name))?;
            }
            if self.keys.insert(tool.name.clone()) {
                self.catalogue.tools.push(tool);
            }
            return Ok(());
        }
        let entry = CatalogueEntry::parse(raw, key)?;
        if self.keys.insert(entry.key.clone()) {
            match self.kind {
                Kind::Resources => self.catalogue.resources.push(entry),
                Kind::ResourceTemplates => self.catalogue.resource_templates.push(entry),
                Kind::Prompts | Kind::Tools => self.catalogue.prompts.push(entry),
            }
        }
        Ok(())
    }

    pub(crate) fn mark_unreadable(&mut self, why: String, pause: Duration) {
        self.catalogue.unreadable.push(self.kind);
        self.unreadable.reasons.push(why);
        self.unreadable.pause = self.unreadable.pause.max(pause);
    }

    pub(crate) fn next_list(
        mut self: Box<Self>,
        offers: OfferedLists,
        now: Instant,
    ) -> Result<Box<Self>, Box<(Catalogue, UnreadableLists)>> {
        // Returns the catalogue and the unreadable lists as `Err` after the last list.
        let share = std::mem::replace(&mut self.share, self.memory.share());
        self.catalogue.memory.set_share(self.kind, share);
        let next = match self.kind {
            Kind::Tools if offers.resources => Kind::Resources,
            Kind::Resources => Kind::ResourceTemplates,
            Kind::Tools | Kind::ResourceTemplates if offers.prompts => Kind::Prompts,
            Kind::Tools | Kind::ResourceTemplates | Kind::Prompts => {
                return Err(Box::new((self.catalogue, self.unreadable)));
            }
        };
        (self.kind, self.pages, self.cursor) = (next, 0, None);
        (self.began_at, self.entries, self.bytes) = (now, 0, 0);
        self.keys.clear();
        Ok(self)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn page(tools: std::ops::Range<usize>, cursor: &str) -> Box<RawValue> {
        let tools: Vec<String> = tools.map(|number| format!(r#"{{"name":"tool-{number}"}}"#)).collect();
        RawValue::from_string(format!(r#"{{"tools":[{}],"nextCursor":"{cursor}"}}"#, tools.join(","))).unwrap()
    }

    fn policy(change: impl FnOnce(&mut SessionPolicy)) -> SessionPolicy {
        let mut policy = SessionPolicy::default();
        change(&mut policy);
        policy
    }

    // Reads pages of ten tools each, one per second, until an error.
    fn error(policy: &SessionPolicy, memory: &Arc<ByteBudget>) -> (usize, String) {
        let began = Instant::now();
        let mut reading = ListRead::new(false, memory, began);
        for number in 0_u32.. {
            let first = 10 * number as usize;
            let page = page(first..first + 10, &number.to_string());
            let now = began + SECOND * number;
            match reading.add_page(&page, policy, now, |why| panic!("{why}")) {
                Ok(PageStep::NextPage(_)) => {}
                Err(PageError::OutOfBounds(why)) => return (reading.catalogue.tools.len(), why),
                Ok(PageStep::PageLimit(_) | PageStep::End) | Err(PageError::Unreadable(_)) => panic!("page {number}"),
            }
        }
        unreachable!("there is always one more page")
    }

    #[test]
    fn a_list_is_bounded_in_entries_bytes_and_time() {
        let memory = ByteBudget::unlimited();
        for (policy, read, why) in [
            (policy(|policy| policy.list_entries_max = 25), 20, "more than 25 entries (`list_entries_max`)"),
            (policy(|policy| policy.list_bytes_max = 1000), 40, "more than 1000 bytes (`list_bytes_max`)"),
            (policy(|policy| policy.list_timeout = SECOND * 3), 30, "takes longer than 3 s (`list_timeout`)"),
        ] {
            let (tools, message) = error(&policy, &memory);
            assert!(message.starts_with("tools/list ") && message.contains(why), "{message}");
            assert_eq!(tools, read, "{message}");
            assert_eq!(memory.used(), 0, "the pages that were read are dropped");
        }
        let policy = policy(|policy| policy.list_entries_max = 10);
        let mut reading = ListRead::new(false, &memory, Instant::now());
        let last = reading.add_page(&page(0..10, ""), &policy, Instant::now(), |why| panic!("{why}"));
        assert!(matches!(last, Ok(PageStep::End)), "exactly the maximum is allowed");
    }

    #[test]
    fn all_lists_share_one_memory_budget_until_they_are_dropped() {
        let memory = ByteBudget::new(600);
        let now = Instant::now();
        let read = || {
            let mut reading = Box::new(ListRead::new(false, &memory, now));
            let next = reading.add_page(&page(0..20, ""), &SessionPolicy::default(), now, |why| panic!("{why}"));
            next.map(|_| reading.next_list(OfferedLists::default(), now).err().unwrap().0)
        };
        let catalogue = read().ok().unwrap();
        let used = memory.used();
        assert!(used > 300, "{used}");
        let error = read().err().unwrap();
        assert!(
            matches!(&error, PageError::OutOfBounds(why) if why.contains("exceeds the memory for the lists")),
            "{error:?}"
        );
        let copy = catalogue.clone();
        drop(catalogue);
        assert_eq!(memory.used(), used);
        drop(copy);
        assert_eq!(memory.used(), 0);
        assert!(read().is_ok());
    }
}
