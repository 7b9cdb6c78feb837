//! The lists of a server, read page by page and one after the other: tools, and resources, templates and prompts where
//! the server says that it has them.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Duration, Instant};

pub(super) use crate::model::catalogue::List as Kind;
use crate::model::catalogue::{Catalogue, Entry, Revisions, Tool};
use crate::rules::mirror;

/// What a server said that it has.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Offers {
    #[serde(deserialize_with = "is_there")]
    pub(super) tools: bool,
    #[serde(deserialize_with = "is_there")]
    pub(super) resources: bool,
    #[serde(deserialize_with = "is_there")]
    pub(super) prompts: bool,
}

fn is_there<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Option::<serde::de::IgnoredAny>::deserialize(deserializer).map(|there| there.is_some())
}

/// All lists of one server, and the reading of them that is under way.
#[derive(Default)]
pub(super) struct Lists {
    pub(super) offers: Offers,
    pub(super) reading: Option<Box<Reading>>,
    /// When they are read again, because something changed.
    pub(super) again_at: Option<Instant>,
    /// The last reading failed.
    pub(super) failed: bool,
    /// So have so many in a row, since they were known.
    pub(super) failures: u32,
    /// They were read in this session, or need not be: the instance is online.
    pub(super) known: bool,
    /// What was told of them last, where some could not be read.
    told: Option<Arc<Catalogue>>,
}

impl Lists {
    pub(super) fn new(known: bool) -> Self {
        Self { known, ..Self::default() }
    }

    /// What is being read now is something beside the tools.
    pub(super) fn is_beside(&self) -> bool {
        self.reading.as_ref().is_some_and(|reading| reading.kind != Kind::Tools)
    }

    /// What is to be told of a reading: nothing if it could not read any more than the last one, and has read the same.
    pub(super) fn news(&mut self, catalogue: Catalogue) -> Option<Arc<Catalogue>> {
        if self.told.as_deref().is_some_and(|told| is_same(told, &catalogue)) {
            return None;
        }
        let catalogue = Arc::new(catalogue);
        self.told = (!catalogue.unread.is_empty()).then(|| catalogue.clone());
        Some(catalogue)
    }

    /// They are to be read again then, or before.
    pub(super) fn again_by(&mut self, at: Instant) {
        self.again_at = Some(self.again_at.map_or(at, |sooner| sooner.min(at)));
    }
}

fn is_same(one: &Catalogue, other: &Catalogue) -> bool {
    let mut changes = Revisions::default();
    changes.read(Some(one), other);
    changes == Revisions::default() && one.unread == other.unread
}

/// One reading of all lists.
pub(super) struct Reading {
    pub(super) kind: Kind,
    catalogue: Catalogue,
    keys: HashSet<Box<str>>,
    pages: usize,
    cursor: Option<String>,
    unread: Unread,
    /// What a tool's calls must say in headers is looked at, too.
    strict: bool,
}

/// About the lists that could not be read.
#[derive(Default)]
pub(super) struct Unread {
    /// Why, for each of `Catalogue::unread`.
    pub(super) whys: Vec<String>,
    /// How long the server asks to be left alone.
    pub(super) pause: Duration,
}

/// What comes after a page.
pub(super) enum Next {
    /// The page at this cursor, which is JSON.
    Page(String),
    /// The rest is left out: there are more pages than are followed.
    Enough(usize),
    /// That was all.
    End,
}

impl Reading {
    pub(super) fn new(strict: bool) -> Self {
        let (catalogue, keys) = (Catalogue::default(), HashSet::new());
        Self { kind: Kind::Tools, catalogue, keys, pages: 0, cursor: None, unread: Unread::default(), strict }
    }

    /// Takes a page, and says what comes next. Entries that cannot be used are left out and told to `skipped`.
    pub(super) fn page(
        &mut self,
        answer: &RawValue,
        pages_max: usize,
        mut skipped: impl FnMut(String),
    ) -> Result<Next, String> {
        let (list, key) = self.kind.fields();
        let method = self.kind.method();
        let no_page = |why: String| format!("the answer to {method} is not one: {why}");
        let fields: HashMap<Cow<'_, str>, &RawValue> =
            serde_json::from_str(answer.get()).map_err(|error| no_page(error.to_string()))?;
        let entries = fields.get(list).ok_or_else(|| no_page(format!("it has no `{list}`")))?;
        let entries: Vec<Box<RawValue>> =
            serde_json::from_str(entries.get()).map_err(|error| no_page(error.to_string()))?;
        for raw in entries {
            if let Err(error) = self.take(raw, key) {
                skipped(error);
            }
        }
        self.pages += 1;
        // A cursor that is empty or the same again would go on for ever.
        let cursor =
            fields.get("nextCursor").map(|cursor| cursor.get()).filter(|cursor| !matches!(*cursor, "null" | "\"\""));
        let Some(cursor) = cursor.filter(|cursor| self.cursor.as_deref() != Some(*cursor)) else {
            return Ok(Next::End);
        };
        if self.pages >= pages_max {
            return Ok(Next::Enough(self.pages));
        }
        self.cursor = Some(cursor.to_owned());
        Ok(Next::Page(cursor.to_owned()))
    }

    /// The first of a name is the one that is meant.
    fn take(&mut self, raw: Box<RawValue>, key: &str) -> Result<(), String> {
        if self.kind == Kind::Tools {
            let tool = Tool::parse(raw).map_err(|error| error.to_string())?;
            if self.strict {
                mirror::of_tool(tool.raw.get()).map_err(|why| format!("the tool `{}`: {why}", tool.name))?;
            }
            if self.keys.insert(tool.name.clone()) {
                self.catalogue.tools.push(tool);
            }
            return Ok(());
        }
        let entry = Entry::parse(raw, key)?;
        if self.keys.insert(entry.key.clone()) {
            match self.kind {
                Kind::Resources => self.catalogue.resources.push(entry),
                Kind::ResourceTemplates => self.catalogue.resource_templates.push(entry),
                Kind::Prompts | Kind::Tools => self.catalogue.prompts.push(entry),
            }
        }
        Ok(())
    }

    /// The list that is being read cannot be, or not all of it.
    pub(super) fn unread(&mut self, why: String, pause: Duration) {
        self.catalogue.unread.push(self.kind);
        self.unread.whys.push(why);
        self.unread.pause = self.unread.pause.max(pause);
    }

    /// The next list, or all that was read and what is to be said of the rest.
    pub(super) fn next(mut self: Box<Self>, offers: Offers) -> Result<Box<Self>, Box<(Catalogue, Unread)>> {
        let next = match self.kind {
            Kind::Tools if offers.resources => Kind::Resources,
            Kind::Resources => Kind::ResourceTemplates,
            Kind::Tools | Kind::ResourceTemplates if offers.prompts => Kind::Prompts,
            Kind::Tools | Kind::ResourceTemplates | Kind::Prompts => {
                return Err(Box::new((self.catalogue, self.unread)));
            }
        };
        (self.kind, self.pages, self.cursor) = (next, 0, None);
        self.keys.clear();
        Ok(self)
    }
}
