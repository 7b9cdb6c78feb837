//! What a server offers, kept as it was sent: every field, `_meta` and unknown ones too.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::byte_budget::ByteShare;

/// What a server offers, in the order in which it lists it.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// The tools.
    pub tools: Vec<Tool>,
    /// The resources, by `uri`.
    pub resources: Vec<Entry>,
    /// The resource templates, by `uriTemplate`.
    pub resource_templates: Vec<Entry>,
    /// The prompts, by `name`.
    pub prompts: Vec<Entry>,
    /// The lists that could not be read: what is here of them is older than the rest, or not all.
    pub unread: Vec<List>,
    /// Where each tool stands, once somebody has asked for one.
    pub by_name: ByName,
    /// The memory that the lists take.
    pub memory: ListMemory,
}

/// Shares of the memory for lists, one for each list that was read from a server: free when the last catalogue with this
/// list is dropped.
#[derive(Debug, Clone, Default)]
pub struct ListMemory([Option<Arc<ByteShare>>; 4]);

impl ListMemory {
    /// Adds the share of a list.
    pub(crate) fn count(&mut self, list: List, share: ByteShare) {
        self.0[list as usize] = Some(Arc::new(share));
    }
}

/// Positions of tools, ordered by their names: made when a tool is first looked for, so that no call goes through a
/// thousand of them.
#[derive(Debug, Default)]
pub struct ByName(OnceLock<Box<[u32]>>);

impl Clone for ByName {
    /// A copy may be given other tools.
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// What there are lists of, in the order in which they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    /// `tools/list`
    Tools,
    /// `resources/list`
    Resources,
    /// `resources/templates/list`
    ResourceTemplates,
    /// `prompts/list`
    Prompts,
}

impl List {
    /// The method that reads it.
    pub(crate) fn method(self) -> &'static str {
        match self {
            Self::Tools => "tools/list",
            Self::Resources => "resources/list",
            Self::ResourceTemplates => "resources/templates/list",
            Self::Prompts => "prompts/list",
        }
    }

    /// The name of the list in an answer, and of what its entries are known by.
    pub(crate) fn fields(self) -> (&'static str, &'static str) {
        match self {
            Self::Tools => ("tools", "name"),
            Self::Resources => ("resources", "uri"),
            Self::ResourceTemplates => ("resourceTemplates", "uriTemplate"),
            Self::Prompts => ("prompts", "name"),
        }
    }
}

/// How often each thing that a client can be told to read again has changed. Whoever has seen one number knows by another
/// that there is something new, whatever was missed between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Of what the server says that it can do.
    pub capabilities: u64,
    /// Of its tools.
    pub tools: u64,
    /// Of its resources and resource templates.
    pub resources: u64,
    /// Of its prompts.
    pub prompts: u64,
}

/// One of the things that change by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    /// What the server says that it can do.
    Capabilities,
    /// Its tools.
    Tools,
    /// Its resources and resource templates.
    Resources,
    /// Its prompts.
    Prompts,
}

impl Revisions {
    /// The lists have been read, and were so `before`; none is the same as nothing that is known.
    pub fn read(&mut self, before: Option<&Catalogue>, now: &Catalogue) {
        let same = |of: fn(&Catalogue) -> &[Entry]| before.is_some_and(|before| same_entries(of(before), of(now)));
        let tools = |before: &Catalogue| before.tools.iter().map(Tool::text).eq(now.tools.iter().map(Tool::text));
        self.tools += u64::from(!before.is_some_and(tools));
        self.resources += u64::from(!same(|of| &of.resources) || !same(|of| &of.resource_templates));
        self.prompts += u64::from(!same(|of| &of.prompts));
    }

    /// What has changed since then.
    pub fn since(&self, before: &Self) -> Vec<Aspect> {
        let all = [
            (Aspect::Capabilities, self.capabilities != before.capabilities),
            (Aspect::Tools, self.tools != before.tools),
            (Aspect::Resources, self.resources != before.resources),
            (Aspect::Prompts, self.prompts != before.prompts),
        ];
        all.into_iter().filter(|(_, changed)| *changed).map(|(aspect, _)| aspect).collect()
    }
}

fn same_entries(one: &[Entry], other: &[Entry]) -> bool {
    one.iter().map(|entry| entry.raw.get()).eq(other.iter().map(|entry| entry.raw.get()))
}

/// One resource, resource template or prompt.
#[derive(Debug, Clone)]
pub struct Entry {
    /// By what its server knows it.
    pub key: Box<str>,
    /// The whole definition, as sent.
    pub raw: Box<RawValue>,
}

/// One tool.
#[derive(Debug, Clone)]
pub struct Tool {
    /// The name by which its server knows it.
    pub name: Box<str>,
    /// The whole definition, as sent.
    pub raw: Box<RawValue>,
    /// Estimated tokens in a model's context: characters of name, description and input schema, divided by 4.
    pub tokens: usize,
    /// Annotated read-only or idempotent: a call that may have been carried out may be repeated.
    pub repeatable: bool,
}

#[derive(Deserialize)]
struct Known {
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
    /// Reads what the satellite needs of a definition and keeps the whole; an error for one without a name.
    pub fn parse(raw: Box<RawValue>) -> Result<Self, serde_json::Error> {
        let known: Known = serde_json::from_str(raw.get())?;
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

impl Entry {
    /// Keeps a definition as it was sent, under the text of its field `key`; why not, where it has none.
    pub fn parse(raw: Box<RawValue>, key: &str) -> Result<Self, String> {
        let fields: BTreeMap<Cow<'_, str>, &RawValue> =
            serde_json::from_str(raw.get()).map_err(|error| error.to_string())?;
        let text = fields.get(key).ok_or_else(|| format!("it has no `{key}`"))?;
        let text: String = serde_json::from_str(text.get()).map_err(|error| format!("its `{key}` is {error}"))?;
        Ok(Self { key: text.into(), raw })
    }
}

/// How one catalogue differs from the one before it. A tool whose definition changed is in both lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Difference {
    /// Names that are new or newly defined.
    pub added: Vec<String>,
    /// Names that are gone or whose old definition is gone.
    pub removed: Vec<String>,
}

impl Difference {
    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty()
    }
}

impl Catalogue {
    /// Estimated tokens of all tools.
    pub fn total_tokens(&self) -> usize {
        self.tools.iter().map(|tool| tool.tokens).sum()
    }

    /// A tool by the name its server gives it.
    pub fn tool(&self, name: &str) -> Option<&Tool> {
        let name_at = |at: u32| self.tools.get(at as usize).map(|tool| &*tool.name);
        let order = self.by_name.0.get_or_init(|| {
            let mut order: Vec<u32> = (0..).take(self.tools.len()).collect();
            // Of two of one name the first stays the first, and is meant.
            order.sort_by(|one, other| name_at(*one).cmp(&name_at(*other)));
            order.into()
        });
        let at = order.get(order.partition_point(|at| name_at(*at) < Some(name)))?;
        self.tools.get(*at as usize).filter(|tool| *tool.name == *name)
    }

    /// This catalogue, with what was known before in the place of each list that could not be read: what a server has is
    /// taken back by the server alone.
    #[must_use]
    pub fn kept_from(&self, before: &Self) -> Self {
        let mut whole = self.clone();
        for list in &self.unread {
            let (old, new) = match list {
                // Without its tools there is no catalogue.
                List::Tools => continue,
                List::Resources => (&before.resources, &mut whole.resources),
                List::ResourceTemplates => (&before.resource_templates, &mut whole.resource_templates),
                List::Prompts => (&before.prompts, &mut whole.prompts),
            };
            // Some pages of it may have been read: they are better than nothing.
            if !old.is_empty() {
                new.clone_from(old);
                whole.memory.0[*list as usize].clone_from(&before.memory.0[*list as usize]);
            }
        }
        whole
    }

    /// What this catalogue has and `before` had not, and the reverse.
    pub fn difference(&self, before: &Self) -> Difference {
        let index = |catalogue: &Self| -> BTreeMap<String, String> {
            catalogue.tools.iter().map(|tool| (tool.name.to_string(), tool.raw.get().to_owned())).collect()
        };
        let (old, new) = (index(before), index(self));
        let missing_in = |from: &BTreeMap<String, String>, other: &BTreeMap<String, String>| {
            from.iter().filter(|(name, raw)| other.get(*name) != Some(*raw)).map(|(name, _)| name.clone()).collect()
        };
        Difference { added: missing_in(&new, &old), removed: missing_in(&old, &new) }
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
    fn a_definition_is_kept_as_it_was_sent_unknown_fields_and_all() {
        let sent = r#"{"_meta": {"a":1},"name":"read",  "x-unknown":[null]}"#;
        assert_eq!(tool(sent).raw.get(), sent);
    }

    #[test]
    fn a_tool_is_estimated_at_a_quarter_of_its_characters() {
        // 4 + 5 + 17 characters, of which one takes two bytes.
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
    fn a_tool_is_found_by_its_name_and_of_two_of_one_name_the_first() {
        let many = catalogue(&[r#"{"name":"b"}"#, r#"{"name":"a","n":1}"#, r#"{"name":"c"}"#, r#"{"name":"a","n":2}"#]);
        let text = |name: &str| many.tool(name).map(Tool::text);
        assert_eq!(text("a"), Some(r#"{"name":"a","n":1}"#));
        assert_eq!((text("b"), text("c")), (Some(r#"{"name":"b"}"#), Some(r#"{"name":"c"}"#)));
        assert_eq!([text(""), text("aa"), text("d"), catalogue(&[]).tool("a").map(Tool::text)], [None; 4]);
        // What was looked for in the one is not taken for the place in its copy.
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
    fn a_tool_that_is_defined_anew_is_removed_and_added() {
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
