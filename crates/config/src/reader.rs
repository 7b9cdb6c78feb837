//! Reads tables and continues after errors. A value of the wrong type and an unknown key are errors. TOML and JSON are
//! both read from the tree of `toml_span`, in which each key and value contains its place.

use mcp_satellite_model::policy::{DURATION_MAX, SandboxBind};
use mcp_satellite_model::variables::{is_never_passed, permissible_variables};
use std::path::{Component, Path};
use std::time::Duration;

use toml_span::value::{Key, Table, Value, ValueInner};
use toml_span::{Span, Spanned};

use super::errors::ConfigFindings;

/// A value as typed. `Unreadable` values have been reported already and must not be reported as missing.
#[derive(Default)]
pub enum ParsedValue<T> {
    #[default]
    Absent,
    Invalid,
    Present(Spanned<T>),
}

impl<T> ParsedValue<T> {
    pub fn get(&self) -> Option<&Spanned<T>> {
        match self {
            Self::Present(value) => Some(value),
            Self::Absent | Self::Invalid => None,
        }
    }

    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

pub type SpannedText = Spanned<String>;

/// Maximum of all counts: larger numbers are typing errors, and some would overflow later.
const COUNT_MAX: i64 = 1 << 40;

pub struct TableReader<'f, 'de> {
    pub at: Span,
    pub findings: &'f mut ConfigFindings,
    table: Table<'de>,
    description: String,
    known: Vec<&'static str>,
}

impl<'f, 'de> TableReader<'f, 'de> {
    pub fn open(mut value: Value<'de>, at: Span, what: String, findings: &'f mut ConfigFindings) -> Option<Self> {
        match value.take() {
            ValueInner::Table(table) => Some(Self { at, findings, table, description: what, known: Vec::new() }),
            other => {
                report_wrong_kind(
                    findings,
                    value.span,
                    &what,
                    "a table",
                    &other,
                    "write it as a table: { key = value }",
                );
                None
            }
        }
    }

    /// Reports each key that was not read as an error.
    pub fn close(self) {
        let Self { findings, table, description: what, known, .. } = self;
        for key in table.into_keys() {
            let hint = match nearest(&key.name, &known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known keys: {}", known.join(", ")),
            };
            findings.error(key.span, format!("unknown key `{}` in {what}", key.name), hint);
        }
    }

    pub fn rest(self) -> (impl Iterator<Item = Key<'de>>, &'f mut ConfigFindings) {
        (self.table.into_keys(), self.findings)
    }

    pub fn contains_key(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    pub fn take(&mut self, key: &'static str) -> Option<(Key<'de>, Value<'de>)> {
        self.known.push(key);
        self.table.remove_entry(key)
    }

    fn read_as<T>(
        &mut self,
        key: &'static str,
        wanted: &str,
        hint: &str,
        read: impl FnOnce(&ValueInner<'de>) -> Option<T>,
    ) -> ParsedValue<T> {
        let Some((_, mut value)) = self.take(key) else { return ParsedValue::Absent };
        let inner = value.take();
        if let Some(read) = read(&inner) {
            return ParsedValue::Present(Spanned::with_span(read, value.span));
        }
        report_wrong_kind(self.findings, value.span, &format!("`{key}`"), wanted, &inner, hint);
        ParsedValue::Invalid
    }

    pub fn text(&mut self, key: &'static str) -> ParsedValue<String> {
        self.read_as(key, "a string", "put it in quotes", |value| value.as_str().map(str::to_owned))
    }

    pub fn flag(&mut self, key: &'static str) -> ParsedValue<bool> {
        self.read_as(key, "true or false", "write true or false, without quotes", ValueInner::as_bool)
    }

    pub fn count<const LEAST: i64, T: TryFrom<i64>>(&mut self, key: &'static str) -> Option<T> {
        self.count_with_hint::<LEAST, T>(key, &format!("give at least {LEAST}"))
    }

    /// Reads a whole number of at least 1, or `"off"`, which returns 0.
    pub fn count_or_off<T: TryFrom<i64> + Default>(&mut self, key: &'static str) -> Option<T> {
        match self.read_off(key) {
            Some(is_off) => is_off.then(T::default),
            None => self.count_with_hint::<1, T>(key, "give at least 1, or \"off\" for no limit"),
        }
    }

    fn count_with_hint<const LEAST: i64, T: TryFrom<i64>>(&mut self, key: &'static str, hint: &str) -> Option<T> {
        let ParsedValue::Present(number) =
            self.read_as(key, "a whole number", "write it without quotes", ValueInner::as_integer)
        else {
            return None;
        };
        let most = COUNT_MAX;
        match T::try_from(number.value) {
            Ok(fits) if (LEAST..=most).contains(&number.value) => Some(fits),
            _ if number.value < LEAST => {
                let message = format!("`{key}` is {}, which is too small", number.value);
                self.findings.error(number.span, message, hint);
                None
            }
            _ => {
                self.findings.error(number.span, format!("`{key}` is too large"), "leave it out for the default");
                None
            }
        }
    }

    pub fn number(&mut self, key: &'static str) -> ParsedValue<f64> {
        self.read_as(key, "a number", "write it without quotes", |value| match value {
            ValueInner::Integer(whole) => Some(*whole as f64),
            ValueInner::Float(number) => Some(*number),
            _ => None,
        })
    }

    pub fn percent(&mut self, key: &'static str) -> Option<u8> {
        let at = self.table.get(key).map(|value| value.span);
        let read = self.count::<0, i64>(key)?;
        let percent = u8::try_from(read).ok().filter(|percent| *percent <= 100);
        if percent.is_none() {
            let message = format!("`{key}` is {read}, which is more than 100 percent");
            self.findings.error(at.unwrap_or(self.at), message, "give a number from 0 to 100");
        }
        percent
    }

    pub fn duration(&mut self, key: &'static str) -> Option<Duration> {
        let typed = self.read_as(key, "a duration", "write it as \"5m\", \"1h 30m\" or \"250ms\"", |value| {
            value.as_str().map(str::to_owned)
        });
        duration(self.findings, key, typed.get()?)
    }

    pub fn positive(&mut self, key: &'static str) -> Option<Duration> {
        self.positive_with_hint(key, "give a time, such as \"1s\"")
    }

    /// Reads a duration greater than zero, or `"off"`, which returns `off`.
    pub fn positive_or_off(&mut self, key: &'static str, off: Duration) -> Option<Duration> {
        match self.read_off(key) {
            Some(is_off) => is_off.then_some(off),
            None => self.positive_with_hint(key, "give a time, such as \"3m\", or \"off\" for never"),
        }
    }

    /// Reads a duration of at least `min`, or `"off"`, which returns `off`.
    pub fn at_least_or_off(&mut self, key: &'static str, min: Duration, off: Duration) -> Option<Duration> {
        let at = self.span_of(key);
        let read = self.positive_or_off(key, off)?;
        if read < min {
            let min = humantime::format_duration(min);
            let message = format!("`{key}` must be at least {min}");
            self.findings.error(at.unwrap_or(self.at), message, "give a longer time, or \"off\" for never");
            return None;
        }
        Some(read)
    }

    fn positive_with_hint(&mut self, key: &'static str, hint: &str) -> Option<Duration> {
        let at = self.span_of(key);
        let read = self.duration(key)?;
        if read.is_zero() {
            let message = format!("`{key}` must not be zero");
            self.findings.error(at.unwrap_or(self.at), message, hint);
            return None;
        }
        Some(read)
    }

    pub fn durations(&mut self, key: &'static str) -> Option<Vec<Duration>> {
        let at = self.table.get(key).map(|value| value.span)?;
        let typed = self.texts(key)?;
        if typed.is_empty() {
            self.findings.error(at, format!("`{key}` is empty"), "give at least one, such as [\"1s\"]");
            return None;
        }
        let read: Vec<_> = typed.iter().filter_map(|text| duration(self.findings, key, text)).collect();
        (read.len() == typed.len()).then_some(read)
    }

    pub fn bytes(&mut self, key: &'static str) -> ParsedValue<u64> {
        let hint = "write it as \"64MiB\", or as a number of bytes";
        let read = self.read_as(key, "a size", hint, |value| match value {
            ValueInner::Integer(bytes) => Some(u64::try_from(*bytes).ok()),
            ValueInner::String(text) => Some(size(text)),
            _ => None,
        });
        let read = match read {
            ParsedValue::Present(read) => read,
            ParsedValue::Absent => return ParsedValue::Absent,
            ParsedValue::Invalid => return ParsedValue::Invalid,
        };
        if let Some(bytes) = read.value.filter(|bytes| *bytes <= COUNT_MAX.unsigned_abs()) {
            return ParsedValue::Present(Spanned::with_span(bytes, read.span));
        }
        self.findings.error(read.span, format!("`{key}` is not a size"), hint);
        ParsedValue::Invalid
    }

    pub fn span_of(&self, key: &'static str) -> Option<Span> {
        self.table.get(key).map(|value| value.span)
    }

    /// Returns `Some(true)` for `"off"`, the only word for "no limit" and "never", and `None` for a value of another
    /// kind. Other such words are errors and return `Some(false)`.
    fn read_off(&mut self, key: &'static str) -> Option<bool> {
        let value = self.table.get(key)?;
        let (word, at) = (value.as_str()?.to_owned(), value.span);
        if word == "off" {
            self.take(key);
            return Some(true);
        }
        if !["unlimited", "never", "none", "infinite", "disabled"].contains(&word.as_str()) {
            return None;
        }
        self.take(key);
        self.findings.error(at, format!("`{word}` is not a valid value for `{key}`"), "write \"off\"");
        Some(false)
    }

    pub fn limit<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Self, &'static str) -> Option<T>,
    ) -> Option<ParsedLimit<T>> {
        match self.read_off(key) {
            Some(is_off) => is_off.then_some(ParsedLimit::None),
            None => read(self, key).map(ParsedLimit::Value),
        }
    }

    pub fn read_choice<T: Clone>(&mut self, key: &'static str, words: &[(&str, T)]) -> Option<T> {
        let typed = self.text(key);
        let word = typed.get()?;
        if let Some((_, replacement)) = words.iter().find(|(known, _)| *known == word.value) {
            return Some(replacement.clone());
        }
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        let message = format!("`{}` is not a valid value for `{key}`", word.value);
        self.findings.error(word.span, message, format!("use one of \"{}\"", known.join("\", \"")));
        None
    }

    /// Reads the bind mounts of a sandbox: `"/path"` or `"/path:/target"`, optionally followed by `:rw`.
    pub fn binds(&mut self, key: &'static str) -> Option<Vec<SandboxBind>> {
        let typed = self.texts(key)?;
        let mut binds = Vec::new();
        for text in typed {
            let (paths, writable) = match text.value.strip_suffix(":rw") {
                Some(paths) => (paths, true),
                None => (text.value.strip_suffix(":ro").unwrap_or(&text.value), false),
            };
            let (source, target) = paths.split_once(':').unwrap_or((paths, paths));
            let plain = |path: &str| {
                let mut parts = Path::new(path).components();
                let below_the_root = parts.next() == Some(Component::RootDir) && parts.clone().next().is_some();
                below_the_root && parts.all(|part| matches!(part, Component::Normal(_))) && !path.contains([':', '\0'])
            };
            if plain(source) && plain(target) {
                binds.push(SandboxBind { source: source.into(), target: target.into(), writable });
            } else {
                let hint =
                    "write \"/path\", \"/path:/seen/as\" or \"/path:rw\", with absolute paths, one for each entry";
                self.findings.error(text.span, format!("`{}` is not a valid bind", text.value), hint);
            }
        }
        Some(binds)
    }

    /// Reads names of variables that make a program load or run other code and that a policy can permit.
    pub fn code_variables(&mut self, key: &'static str) -> Option<Vec<String>> {
        let typed = self.texts(key)?;
        for text in typed.iter().filter(|text| permissible_variables().all(|name| name != text.value)) {
            let name = &text.value;
            let (message, hint) = if is_never_passed(name) {
                (format!("`{name}` cannot be permitted: it is never passed on to a server"), "remove it".to_owned())
            } else {
                let known: Vec<&str> = permissible_variables().collect();
                let message = format!("`{name}` in `{key}` is not a variable that needs permission");
                (message, format!("remove it; these need permission: {}", known.join(", ")))
            };
            self.findings.error(text.span, message, hint);
        }
        Some(typed.into_iter().map(|text| text.value).collect())
    }

    pub fn texts(&mut self, key: &'static str) -> Option<Vec<SpannedText>> {
        let (_, mut value) = self.take(key)?;
        let hint = "write it as a list: [\"one\", \"two\"]";
        match value.take() {
            ValueInner::Array(items) => {
                let each = items.into_iter().filter_map(|mut item| match item.take() {
                    ValueInner::String(text) => Some(Spanned::with_span(text.into_owned(), item.span)),
                    other => {
                        let what = format!("an entry of `{key}`");
                        report_wrong_kind(self.findings, item.span, &what, "a string", &other, "put it in quotes");
                        None
                    }
                });
                Some(each.collect())
            }
            other => {
                report_wrong_kind(self.findings, value.span, &format!("`{key}`"), "a list of strings", &other, hint);
                None
            }
        }
    }

    pub fn text_map(&mut self, key: &'static str) -> Vec<(SpannedText, SpannedText)> {
        let Some((_, mut value)) = self.take(key) else { return Vec::new() };
        let table = match value.take() {
            ValueInner::Table(table) => table,
            other => {
                let hint = "write it as a table: { NAME = \"value\" }";
                report_wrong_kind(self.findings, value.span, &format!("`{key}`"), "a table of strings", &other, hint);
                return Vec::new();
            }
        };
        let mut entries = Vec::new();
        for (name, mut value) in table {
            let name = Spanned::with_span(name.name.into_owned(), name.span);
            match value.take() {
                ValueInner::String(text) => entries.push((name, Spanned::with_span(text.into_owned(), value.span))),
                other => {
                    let what = format!("`{}` in `{key}`", name.value);
                    report_wrong_kind(self.findings, value.span, &what, "a string", &other, "put it in quotes");
                }
            }
        }
        entries.sort_by_key(|(name, _)| name.span.start);
        entries
    }

    pub fn section<T: Default>(&mut self, key: &'static str, read: impl FnOnce(&mut TableReader<'_, 'de>) -> T) -> T {
        let Some((name, value)) = self.take(key) else { return T::default() };
        read_table(value, name.span, format!("`{key}`"), self.findings, read).unwrap_or_default()
    }

    pub fn list<T>(&mut self, key: &'static str, mut read: impl FnMut(&mut TableReader<'_, 'de>) -> T) -> Vec<T> {
        let Some((_, mut value)) = self.take(key) else { return Vec::new() };
        match value.take() {
            ValueInner::Array(items) => {
                let one = |item: Value<'de>| {
                    let at = item.span;
                    read_table(item, at, format!("an entry of `{key}`"), self.findings, &mut read)
                };
                items.into_iter().filter_map(one).collect()
            }
            other => {
                let hint = format!("write each as a table of its own under [[{key}]]");
                report_wrong_kind(self.findings, value.span, &format!("`{key}`"), "a list of tables", &other, &hint);
                Vec::new()
            }
        }
    }

    pub fn values(&mut self, key: &'static str) -> Vec<(SpannedText, Value<'de>)> {
        let Some((name, value)) = self.take(key) else { return Vec::new() };
        let Some(inner) = TableReader::open(value, name.span, format!("`{key}`"), self.findings) else {
            return Vec::new();
        };
        let text = |name: Key<'de>| Spanned::with_span(name.name.into_owned(), name.span);
        let mut values: Vec<_> = inner.table.into_iter().map(|(name, value)| (text(name), value)).collect();
        values.sort_by_key(|(name, _)| name.span.start);
        values
    }

    pub fn named_tables<T>(
        &mut self,
        key: &'static str,
        mut read: impl FnMut(SpannedText, &mut TableReader<'_, 'de>) -> T,
    ) -> Vec<T> {
        let mut tables = Vec::new();
        for (name, value) in self.values(key) {
            let what = format!("`{key}.{}`", name.value);
            tables.extend(read_table(value, name.span, what, self.findings, |fields| read(name, fields)));
        }
        tables
    }
}

fn read_table<'de, T>(
    value: Value<'de>,
    at: Span,
    what: String,
    findings: &mut ConfigFindings,
    read: impl FnOnce(&mut TableReader<'_, 'de>) -> T,
) -> Option<T> {
    let mut fields = TableReader::open(value, at, what, findings)?;
    let read = read(&mut fields);
    fields.close();
    Some(read)
}

fn report_wrong_kind(
    findings: &mut ConfigFindings,
    at: Span,
    what: &str,
    wanted: &str,
    found: &ValueInner<'_>,
    hint: &str,
) {
    let article = if matches!(found, ValueInner::Integer(_) | ValueInner::Array(_)) { "an" } else { "a" };
    // The string itself is not repeated, because it could be a misplaced secret.
    findings.error(at, format!("{what} must be {wanted}, not {article} {}", found.type_str()), hint);
}

fn duration(findings: &mut ConfigFindings, key: &str, text: &SpannedText) -> Option<Duration> {
    match humantime::parse_duration(&text.value) {
        Ok(read) if read <= DURATION_MAX => Some(read),
        Ok(_) => {
            findings.error(text.span, format!("`{key}` is longer than a year"), "give at most \"365d\"");
            None
        }
        Err(_) => {
            let message = format!("`{key}` is not a duration");
            findings.error(text.span, message, "write it as \"5m\", \"1h 30m\" or \"250ms\"");
            None
        }
    }
}

/// Parses `64MiB`, `10 MB` or `4096`: binary and decimal units differ by name.
fn size(text: &str) -> Option<u64> {
    let digits = text.len() - text.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[derive(Debug, Clone, Copy)]
pub enum ParsedLimit<T> {
    None,
    Value(T),
}

impl<T> ParsedLimit<T> {
    pub fn into_option(self) -> Option<T> {
        match self {
            Self::None => None,
            Self::Value(limit) => Some(limit),
        }
    }
}

pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_lowercase();
    let close = |candidate: &str| {
        let edits = strsim::damerau_levenshtein(&word, candidate);
        (edits <= 1 + candidate.chars().count() / 4).then_some(edits)
    };
    known.iter().filter_map(|candidate| Some((close(candidate)?, *candidate))).min().map(|(_, candidate)| candidate)
}
