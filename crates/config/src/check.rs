//! Checks of single values. A check reports an error and returns a harmless value, so the result is valid only if the
//! findings contain no error.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use toml_span::Span;

use super::errors::{ConfigFindings, ConfigText};
use super::gateway::listen_address;
use super::reader::{ParsedValue, SpannedText, nearest};
use super::secrets::SecretSources;

/// Commands that are permitted by default in the production profile.
pub(crate) const ALLOWED: [&str; 8] = ["npx", "node", "uvx", "uv", "python", "python3", "deno", "bun"];

/// Names that must be unique, each with the place of its first use.
#[derive(Default)]
pub(crate) struct UniqueNames(BTreeMap<String, Span>);

impl UniqueNames {
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

pub(crate) struct ConfigCheck<'a, 's> {
    pub(crate) findings: &'a mut ConfigFindings,
    pub(crate) secret_sources: &'a mut SecretSources<'s>,
    source: &'a ConfigText<'a>,
    /// Commands that may be started; `None` permits any.
    pub(crate) allowed: Option<Vec<String>>,
}

impl<'a, 's> ConfigCheck<'a, 's> {
    pub(crate) fn new(
        source: &'a ConfigText<'a>,
        secret_sources: &'a mut SecretSources<'s>,
        allowed: Option<Vec<String>>,
        findings: &'a mut ConfigFindings,
    ) -> Self {
        Self { findings, secret_sources, source, allowed }
    }

    pub(crate) fn restrict_commands(&mut self, more: &[SpannedText]) {
        let more = more.iter().map(|command| command.value.clone());
        self.allowed = Some(ALLOWED.map(str::to_owned).into_iter().chain(more).collect());
    }

    pub(crate) fn satellite_name(&mut self, name: &SpannedText) {
        let good = |letter: char| matches!(letter, 'a'..='z' | '0'..='9' | '-' | '_');
        if !(10..=32).contains(&name.value.len()) || !name.value.chars().all(good) {
            let message = format!("`{}` is not a valid name for a satellite", name.value);
            self.findings.error(name.span, message, "use 10 to 32 characters of a-z, 0-9, - and _");
        }
    }

    /// Returns the value of a keyword: the default if it is absent, `None` after an error.
    pub(crate) fn keyword<T: Copy + Default>(
        &mut self,
        typed: &ParsedValue<String>,
        key: &str,
        words: &[(&str, T)],
    ) -> Option<T> {
        let Some(word) = typed.get() else { return typed.is_absent().then(T::default) };
        if let Some((_, replacement)) = words.iter().find(|(known, _)| *known == word.value) {
            return Some(*replacement);
        }
        let known: Vec<&str> = words.iter().map(|(known, _)| *known).collect();
        let hint = match nearest(&word.value, &known) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!("use one of \"{}\"", known.join("\", \"")),
        };
        self.findings.error(word.span, format!("`{}` is not a valid value for `{key}`", word.value), hint);
        None
    }

    pub(crate) fn address(&mut self, text: &SpannedText) -> Option<SocketAddr> {
        let address = listen_address(&text.value).ok();
        if address.is_none() {
            let message = format!("`{}` is not an address to listen on", text.value);
            self.findings.error(text.span, message, "write an IP address and a port, or localhost: \"127.0.0.1:7300\"");
        }
        address
    }

    /// Checks an id or slug, which becomes part of names, paths and URLs.
    pub(crate) fn slug(&mut self, text: &SpannedText, what: &str) {
        let good = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '_' | '-');
        if !(1..=64).contains(&text.value.len()) || !text.value.chars().all(good) {
            let message = format!("`{}` is not valid as {what}", text.value);
            self.findings.error(text.span, message, "use 1 to 64 characters of A-Z, a-z, 0-9, dot, - and _");
        }
    }

    pub(crate) fn id(
        &mut self,
        typed: &ParsedValue<String>,
        of: &str,
        key: &str,
        at: Span,
        others: &mut UniqueNames,
    ) -> String {
        let Some(text) = typed.get() else {
            if typed.is_absent() {
                self.findings.error(at, format!("{of} has no `{key}`"), format!("add {key} = \"…\""));
            }
            return String::new();
        };
        self.slug(text, &format!("the {key} of {of}"));
        self.check_unique(text, &format!("the {key} `{}` is already in use", text.value), others);
        text.value.clone()
    }

    pub(crate) fn check_unique(&mut self, text: &SpannedText, message: &str, others: &mut UniqueNames) {
        if let Some(first) = others.0.get(&text.value) {
            let (line, ..) = self.source.place(first.start);
            self.findings.error(text.span, message, format!("line {line} uses it; choose another"));
        } else {
            others.0.insert(text.value.clone(), text.span);
        }
    }

    pub(crate) fn url(&mut self, key: &str, text: &SpannedText) -> Option<reqwest::Url> {
        let hint = "write it as \"https://host/path\"";
        let url = match reqwest::Url::parse(&text.value) {
            Ok(url) => url,
            Err(reason) => {
                self.findings.error(text.span, format!("`{key}` is not a URL: {reason}"), hint);
                return None;
            }
        };
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            self.findings.error(text.span, format!("`{key}` is neither http nor https"), hint);
            return None;
        }
        if !url.username().is_empty() || url.password().is_some() {
            let hint = "URLs are shown; pass credentials in a header, such as Authorization = \"env:NAME\"";
            self.findings.error(text.span, format!("`{key}` contains a user name or a password"), hint);
            return None;
        }
        Some(url)
    }
}
