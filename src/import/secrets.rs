//! Secrets in clear text of a client's server, moved to files beside the configuration.

use std::path::Path;

use mcp_satellite_clients::{
    ClientServer, HiddenText, ServerTransport, TemplatePart, TextTemplate, looks_secret, secret_args, secret_in_arg,
    template_has_secret,
};

use mcp_satellite_files::replace_file::{EditedFile, FileEditError};

use crate::config::normalize_id;

/// The directory of the secrets, relative to the one of the configuration.
pub(crate) const SECRETS_FOLDER: &str = "secrets";

/// A secret that an import moves to a file.
pub(crate) struct MovedSecret {
    /// Path, relative to the directory of the configuration.
    pub(crate) path: String,
    pub(crate) text: HiddenText,
    /// The place of the secret in the server, such as `env.API_KEY`.
    pub(crate) place: String,
    /// The file, which does not exist or contains the secret.
    file: EditedFile,
}

impl MovedSecret {
    /// Writes the file. Returns false if an earlier import has written it.
    pub(crate) fn write(&self) -> Result<bool, FileEditError> {
        match self.file.contents() {
            Some(_) => Ok(false),
            None => self.file.replace(file_text(&self.text).as_bytes()).map(|()| true),
        }
    }
}

/// Returns the contents of a file. The end of the last line is no part of the secret when it is read.
fn file_text(secret: &HiddenText) -> String {
    let text = secret.expose();
    let end = if text.ends_with('\n') { "\n" } else { "" };
    format!("{text}{end}")
}

/// Replaces the secrets of `server` by references to files in `folder`, whose names begin with `id`. Returns the secrets,
/// and notes. A file that exists is used only if it contains the same secret, and one of the secrets `taken` never. The
/// error is the reason why there is no file.
pub(crate) fn move_secrets(
    server: &mut ClientServer,
    id: &str,
    folder: &Path,
    taken: &[MovedSecret],
) -> Result<(Vec<MovedSecret>, Vec<String>), String> {
    let mut mover = SecretMover { id, folder, taken, moved: Vec::new(), notes: Vec::new(), failure: None };
    match &mut server.transport {
        ServerTransport::Stdio { command, args, env, cwd, env_file } => {
            mover.arguments(args);
            for (name, value) in env {
                mover.named(&format!("env.{name}"), name, value);
            }
            for (place, text) in [("command", Some(command)), ("cwd", cwd.as_mut()), ("envFile", env_file.as_mut())] {
                if let Some(text) = text {
                    mover.defaults(place, text);
                }
            }
        }
        ServerTransport::Http { url, headers, .. } => {
            mover.url(url);
            for (name, value) in headers {
                mover.named(&format!("headers.{name}"), name, value);
            }
        }
    }
    match mover.failure {
        Some(failure) => Err(failure),
        None => Ok((mover.moved, mover.notes)),
    }
}

struct SecretMover<'a> {
    id: &'a str,
    /// The directory of the configuration.
    folder: &'a Path,
    taken: &'a [MovedSecret],
    moved: Vec<MovedSecret>,
    notes: Vec<String>,
    /// The first secret without a file.
    failure: Option<String>,
}

impl SecretMover<'_> {
    /// Moves the value of a variable or a header.
    fn named(&mut self, place: &str, name: &str, value: &mut TextTemplate) {
        self.defaults(place, value);
        if !template_has_secret(name, value) {
            return;
        }
        if let Some(text) = value.as_literal() {
            let text = HiddenText::new(text);
            *value = TextTemplate::part(self.file(place, text));
            return;
        }
        for part in &mut value.parts {
            if let TemplatePart::Literal(text) = part
                && template_has_secret("", &TextTemplate::literal(text.expose()))
            {
                *part = self.file(place, text.clone());
            }
        }
    }

    fn arguments(&mut self, args: &mut [TextTemplate]) {
        // From the last to the first, because a moved secret adds parts.
        for secret in secret_args(args).into_iter().rev() {
            let place = format!("args.{}", secret.index + 1);
            self.cut(&place, &mut args[secret.index], secret.part, secret.range);
        }
        for (index, arg) in args.iter_mut().enumerate() {
            self.defaults(&format!("args.{}", index + 1), arg);
        }
    }

    fn url(&mut self, url: &mut TextTemplate) {
        self.defaults("url", url);
        for part in (0..url.parts.len()).rev() {
            let TemplatePart::Literal(text) = &url.parts[part] else { continue };
            if let Some(range) = secret_in_arg(None, text.expose()) {
                self.cut("url", url, part, range);
            }
        }
    }

    fn cut(&mut self, place: &str, template: &mut TextTemplate, part: usize, range: std::ops::Range<usize>) {
        let Some(TemplatePart::Literal(text)) = template.parts.get(part) else { return };
        let text = text.expose();
        let (before, secret, after) = (&text[..range.start], &text[range.clone()], &text[range.end..]);
        let literal = |text: &str| (!text.is_empty()).then(|| TemplatePart::Literal(HiddenText::new(text)));
        let (before, after, secret) = (literal(before), literal(after), HiddenText::new(secret));
        let file = self.file(place, secret);
        template.parts.splice(part..=part, before.into_iter().chain([file]).chain(after));
    }

    /// Removes defaults of variables that are secrets: the configuration cannot refer to a file there.
    fn defaults(&mut self, place: &str, template: &mut TextTemplate) {
        for part in &mut template.parts {
            if let TemplatePart::Variable { name, default } = part
                && default.as_ref().is_some_and(|text| looks_secret(name, text.expose()))
            {
                *default = None;
                self.notes.push(format!("the default of `${{{name}}}` in `{place}` is a secret and is not imported"));
            }
        }
    }

    fn file(&mut self, place: &str, text: HiddenText) -> TemplatePart {
        let name =
            normalize_id(place.rsplit_once('.').filter(|_| !place.starts_with("args")).map_or(place, |(_, name)| name));
        let first = format!("{SECRETS_FOLDER}/{}.{name}", self.id);
        let numbered = (2..).map(|number| format!("{first}-{number}"));
        for path in std::iter::once(first.clone()).chain(numbered) {
            if self.taken.iter().chain(&self.moved).any(|other| other.path == path) {
                continue;
            }
            let contents = file_text(&text);
            match EditedFile::open(&self.folder.join(&path)) {
                Ok(file) if file.contents().is_none_or(|found| found == contents.as_bytes() && file.is_private()) => {
                    self.moved.push(MovedSecret { path: path.clone(), text, place: place.to_owned(), file });
                    return TemplatePart::File { path };
                }
                Err(error @ FileEditError::Io { .. }) => {
                    self.failure.get_or_insert(format!("there is no file for the secret in `{place}`: {error}"));
                    break;
                }
                // Somebody else's file.
                Ok(_) | Err(_) => {}
            }
        }
        TemplatePart::File { path: first }
    }
}
