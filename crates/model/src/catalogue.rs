//! Tools, resources and prompts of a server. Definitions are kept as sent, including `_meta` and unknown fields.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use mcp_satellite_protocol::method;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::byte_budget::ByteShare;

/// Tools, resources and prompts of a server, in the order of its lists.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// Tools of the server.
    pub tools: Vec<Tool>,
    /// Resources, by `uri`.
    pub resources: Vec<CatalogueEntry>,
    /// Resource templates, by `uriTemplate`.
    pub resource_templates: Vec<CatalogueEntry>,
    /// Prompts, by `name`.
    pub prompts: Vec<CatalogueEntry>,
    /// Lists that could not be read. Their entries here are older than the rest, or incomplete.
    pub unreadable: Vec<ListKind>,
    /// Index of the tools by name, built at the first lookup.
    pub by_name: ToolIndex,
    /// Memory used by the lists.
    pub memory: ListMemory,
}

/// Shares of the memory budget for lists, one for each list read from a server. A share is released when the last
/// catalogue that contains the list is dropped.
#[derive(Debug, Clone, Default)]
pub struct ListMemory([Option<Arc<ByteShare>>; 4]);

impl ListMemory {
    /// Keeps the memory of a list counted for as long as the catalogue exists.
    pub fn set_share(&mut self, list: ListKind, share: ByteShare) {
        self.0[list as usize] = Some(Arc::new(share));
    }
}

/// Positions of tools, ordered by name. Built at the first lookup, so that no call searches a thousand tools.
#[derive(Debug, Default)]
pub struct ToolIndex(OnceLock<Box<[u32]>>);

impl Clone for ToolIndex {
    // The tools of a copy may be changed.
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// Lists of a server, in the order in which they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListKind {
    /// The result of `tools/list`.
    Tools,
    /// The result of `resources/list`.
    Resources,
    /// The result of `resources/templates/list`.
    ResourceTemplates,
    /// The result of `prompts/list`.
    Prompts,
}

impl ListKind {
    /// Returns the protocol's method that lists the entries.
    pub fn method(self) -> &'static str {
        match self {
            Self::Tools => method::TOOLS_LIST,
            Self::Resources => method::RESOURCES_LIST,
            Self::ResourceTemplates => method::RESOURCE_TEMPLATES_LIST,
            Self::Prompts => method::PROMPTS_LIST,
        }
    }

    /// Returns the field of the result that contains the list, and the field that identifies an entry.
    pub fn fields(self) -> (&'static str, &'static str) {
        match self {
            Self::Tools => ("tools", "name"),
            Self::Resources => ("resources", "uri"),
            Self::ResourceTemplates => ("resourceTemplates", "uriTemplate"),
            Self::Prompts => ("prompts", "name"),
        }
    }
}

/// Counters of changes, one for each aspect that clients can be notified of. A reader that compares two values sees
/// every change, even if it missed notifications between them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Changes of the capabilities.
    pub capabilities: u64,
    /// Changes of the tools.
    pub tools: u64,
    /// Changes of the resources and resource templates.
    pub resources: u64,
    /// Changes of the prompts.
    pub prompts: u64,
}

/// Part of a catalogue that a server may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CatalogueAspect {
    /// Capabilities of the server.
    Capabilities,
    /// Tools of the server.
    Tools,
    /// Resources and resource templates of the server.
    Resources,
    /// Prompts of the server.
    Prompts,
}

impl Revisions {
    /// Counts the differences between the catalogue `before` and the catalogue `now`. Without a catalogue before, every
    /// list counts as changed.
    pub fn count_changes(&mut self, before: Option<&Catalogue>, now: &Catalogue) {
        let same =
            |of: fn(&Catalogue) -> &[CatalogueEntry]| before.is_some_and(|before| same_entries(of(before), of(now)));
        let tools = |before: &Catalogue| before.tools.iter().map(Tool::text).eq(now.tools.iter().map(Tool::text));
        self.tools += u64::from(!before.is_some_and(tools));
        self.resources += u64::from(!same(|of| &of.resources) || !same(|of| &of.resource_templates));
        self.prompts += u64::from(!same(|of| &of.prompts));
    }

    /// Returns the aspects that have changed since `before`.
    pub fn changes_since(&self, before: &Self) -> Vec<CatalogueAspect> {
        let all = [
            (CatalogueAspect::Capabilities, self.capabilities != before.capabilities),
            (CatalogueAspect::Tools, self.tools != before.tools),
            (CatalogueAspect::Resources, self.resources != before.resources),
            (CatalogueAspect::Prompts, self.prompts != before.prompts),
        ];
        all.into_iter().filter(|(_, changed)| *changed).map(|(aspect, _)| aspect).collect()
    }
}

fn same_entries(one: &[CatalogueEntry], other: &[CatalogueEntry]) -> bool {
    one.iter().map(|entry| entry.raw.get()).eq(other.iter().map(|entry| entry.raw.get()))
}

/// A resource, resource template or prompt.
#[derive(Debug, Clone)]
pub struct CatalogueEntry {
    /// Identifier of the entry: its `uri`, `uriTemplate` or `name`.
    pub key: Box<str>,
    /// Complete definition, as sent.
    pub raw: Box<RawValue>,
}

/// A tool of a server.
#[derive(Debug, Clone)]
pub struct Tool {
    /// Name of the tool on its server.
    pub name: Box<str>,
    /// Complete definition, as sent.
    pub raw: Box<RawValue>,
    /// Estimated tokens in a model's context: characters of name, description and input schema, divided by 4.
    pub tokens: usize,
    /// True if the tool is annotated as read-only or idempotent. Then a call that may have been executed may be
    /// repeated.
    pub repeatable: bool,
}

#[derive(Deserialize)]
struct ToolFields {
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default, rename = "inputSchema")]
    input_schema: Option<Box<RawValue>>,
    #[serde(default)]
    annotations: Option<Annotations>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Annotations {
    read_only_hint: Option<bool>,
    idempotent_hint: Option<bool>,
}

impl Tool {
    /// Parses the fields that the satellite uses and keeps the complete definition.
    ///
    /// # Errors
    /// Fails if the definition has no name.
    pub fn parse(raw: Box<RawValue>) -> Result<Self, serde_json::Error> {
        let known: ToolFields = serde_json::from_str(raw.get())?;
        let annotations = known.annotations.unwrap_or_default();
        let characters = known.name.chars().count()
            + known.description.map_or(0, |text| text.chars().count())
            + known.input_schema.map_or(0, |schema| schema.get().chars().count());
        Ok(Self {
            name: known.name.into(),
            raw,
            tokens: characters / 4,
            repeatable: annotations.read_only_hint == Some(true) || annotations.idempotent_hint == Some(true),
        })
    }

    fn text(&self) -> &str {
        self.raw.get()
    }
}

impl CatalogueEntry {
    /// Parses a definition whose identifier is in its field `key`.
    ///
    /// # Errors
    /// Fails if the definition has no such field, or if it is not a string.
    pub fn parse(raw: Box<RawValue>, key: &str) -> Result<Self, String> {
        let fields: BTreeMap<Cow<'_, str>, &RawValue> =
            serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
        let text = fields.get(key).ok_or_else(|| format!("`{key}` is missing"))?;
        let text: String = serde_json::from_str(text.get()).map_err(|error| format!("`{key}` is invalid: {error}"))?;
        Ok(Self { key: text.into(), raw })
    }
}

/// Difference between two catalogues. A tool whose definition changed is in both lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolDifference {
    /// Names of tools that are new or changed.
    pub added: Vec<String>,
    /// Names of tools that are removed or changed.
    pub removed: Vec<String>,
}

impl ToolDifference {
    /// Returns true if the catalogues do not differ.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty()
    }
}

impl Catalogue {
    /// Returns the estimated tokens of all tools.
    pub fn total_tokens(&self) -> usize {
        self.tools.iter().map(|tool| tool.tokens).sum()
    }

    /// Returns the tool with this name.
    pub fn tool(&self, name: &str) -> Option<&Tool> {
        let name_at = |at: u32| self.tools.get(at as usize).map(|tool| &*tool.name);
        let order = self.by_name.0.get_or_init(|| {
            let mut order: Vec<u32> = (0..).take(self.tools.len()).collect();
            // The sort is stable: of two tools with the same name the first is used.
            order.sort_by(|one, other| name_at(*one).cmp(&name_at(*other)));
            order.into()
        });
        let at = order.get(order.partition_point(|at| name_at(*at) < Some(name)))?;
        self.tools.get(*at as usize).filter(|tool| *tool.name == *name)
    }

    /// Returns this catalogue, with each list that could not be read replaced by the list of `before`. Only the server
    /// can remove entries, not a failed read.
    #[must_use]
    pub fn with_unreadable_from(&self, before: &Self) -> Self {
        let mut whole = self.clone();
        for list in &self.unreadable {
            let (old, new) = match list {
                // A catalogue without a list of tools is never created.
                ListKind::Tools => continue,
                ListKind::Resources => (&before.resources, &mut whole.resources),
                ListKind::ResourceTemplates => (&before.resource_templates, &mut whole.resource_templates),
                ListKind::Prompts => (&before.prompts, &mut whole.prompts),
            };
            // Without an older list, the pages that were read are kept.
            if !old.is_empty() {
                new.clone_from(old);
                whole.memory.0[*list as usize].clone_from(&before.memory.0[*list as usize]);
            }
        }
        whole
    }

    /// Returns the tools added and removed since `before`.
    pub fn difference(&self, before: &Self) -> ToolDifference {
        let index = |catalogue: &Self| -> BTreeMap<String, String> {
            catalogue.tools.iter().map(|tool| (tool.name.to_string(), tool.raw.get().to_owned())).collect()
        };
        let (old, new) = (index(before), index(self));
        let missing_in = |from: &BTreeMap<String, String>, other: &BTreeMap<String, String>| {
            from.iter().filter(|(name, raw)| other.get(*name) != Some(*raw)).map(|(name, _)| name.clone()).collect()
        };
        ToolDifference { added: missing_in(&new, &old), removed: missing_in(&old, &new) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    fn tool(definition: &str) -> Tool {
        Tool::parse(RawValue::from_string(definition.to_owned()).unwrap()).unwrap()
    }

    fn catalogue(definitions: &[&str]) -> Catalogue {
        Catalogue { tools: definitions.iter().map(|definition| tool(definition)).collect(), ..Catalogue::default() }
    }

    #[test]
    fn a_definition_is_kept_unchanged_with_unknown_fields() {
        let sent = r#"{"_meta": {"a":1},"name":"read",  "x-unknown":[null]}"#;
        assert_eq!(tool(sent).raw.get(), sent);
    }

    #[test]
    fn the_tokens_of_a_tool_are_a_quarter_of_its_characters() {
        // 4 + 5 + 17 characters, one of which has two bytes.
        let read = tool(r#"{"name":"read","description":"Füße.","inputSchema":{"type":"object"}}"#);
        assert_eq!(read.tokens, 6);
        assert_eq!(catalogue(&[r#"{"name":"12345678"}"#, r#"{"name":"1234"}"#]).total_tokens(), 3);
    }

    #[test]
    fn only_a_tool_annotated_read_only_or_idempotent_may_be_repeated() {
        let annotated = |annotations: &str| tool(&format!(r#"{{"name":"t","annotations":{annotations}}}"#)).repeatable;
        assert!(annotated(r#"{"readOnlyHint":true}"#));
        assert!(annotated(r#"{"idempotentHint":true,"readOnlyHint":false}"#));
        assert!(!annotated(r#"{"readOnlyHint":false,"destructiveHint":false}"#));
        assert!(!tool(r#"{"name":"t"}"#).repeatable);
    }

    #[test]
    fn a_tool_is_found_by_name_and_the_first_of_duplicates_is_returned() {
        let many = catalogue(&[r#"{"name":"b"}"#, r#"{"name":"a","n":1}"#, r#"{"name":"c"}"#, r#"{"name":"a","n":2}"#]);
        let text = |name: &str| many.tool(name).map(Tool::text);
        assert_eq!(text("a"), Some(r#"{"name":"a","n":1}"#));
        assert_eq!((text("b"), text("c")), (Some(r#"{"name":"b"}"#), Some(r#"{"name":"c"}"#)));
        assert_eq!([text(""), text("aa"), text("d"), catalogue(&[]).tool("a").map(Tool::text)], [None; 4]);
        // The copy does not use the index of the original.
        let mut fewer = many.clone();
        fewer.tools.remove(0);
        assert_eq!(fewer.tool("c").map(Tool::text), Some(r#"{"name":"c"}"#));
    }

    #[test]
    fn a_definition_without_a_name_is_an_error() {
        let raw = RawValue::from_string(r#"{"description":"nameless"}"#.to_owned()).unwrap();
        assert!(Tool::parse(raw).is_err());
    }

    #[test]
    fn a_changed_definition_counts_as_removed_and_added() {
        let before = catalogue(&[r#"{"name":"same"}"#, r#"{"name":"old"}"#, r#"{"name":"changed"}"#]);
        let after = catalogue(&[r#"{"name":"changed","title":"!"}"#, r#"{"name":"new"}"#, r#"{"name":"same"}"#]);
        let difference = after.difference(&before);
        assert_eq!(
            (difference.added, difference.removed),
            (vec!["changed".to_owned(), "new".to_owned()], vec!["changed".to_owned(), "old".to_owned()],)
        );
        assert!(after.difference(&after).is_empty());
    }
}
