//! Texts with variables of the clients, such as `Bearer ${env:TOKEN}`.

use crate::hidden::HiddenText;

/// A text as a list of parts. An empty list is the empty text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextTemplate {
    /// The parts in order. Two literals never follow each other.
    pub parts: Vec<TemplatePart>,
}

/// A part of a [`TextTemplate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplatePart {
    /// Plain text.
    Literal(HiddenText),
    /// An environment variable of the client.
    Variable {
        /// Name of the variable.
        name: String,
        /// Value if the variable is missing or empty.
        default: Option<HiddenText>,
    },
    /// A value that the client asks the user for, see [`ClientInput`](crate::ClientInput).
    Input {
        /// Id of the input.
        id: String,
    },
    /// The user's home directory.
    Home,
    /// The root of the project.
    Workspace,
    /// The contents of a file.
    File {
        /// The path as it is written, after `./` if it begins with a name. It is relative to the directory of the client's
        /// file.
        path: String,
    },
    /// A value in the client's own secret store.
    Secret {
        /// Name of the secret.
        name: String,
    },
    /// An expression that is not understood, with its delimiters.
    Unknown(HiddenText),
}

impl TextTemplate {
    /// Makes a template without variables.
    pub fn literal(text: impl Into<String>) -> Self {
        let text = HiddenText::new(text);
        Self { parts: if text.is_empty() { Vec::new() } else { vec![TemplatePart::Literal(text)] } }
    }

    /// Makes a template of one part.
    pub fn part(part: TemplatePart) -> Self {
        Self { parts: vec![part] }
    }

    /// Returns the text if it has no variables.
    pub fn as_literal(&self) -> Option<&str> {
        match self.parts.as_slice() {
            [] => Some(""),
            [TemplatePart::Literal(text)] => Some(text.expose()),
            _ => None,
        }
    }

    /// Returns the literal text at the beginning, which is empty if the text begins with a variable.
    pub fn literal_prefix(&self) -> &str {
        if let Some(TemplatePart::Literal(text)) = self.parts.first() { text.expose() } else { "" }
    }

    /// Returns the expressions that are not understood.
    pub fn unknown(&self) -> impl Iterator<Item = &HiddenText> {
        self.parts.iter().filter_map(|part| if let TemplatePart::Unknown(text) = part { Some(text) } else { None })
    }
}

/// The variable syntax of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TemplateSyntax {
    /// `${VAR}`, `${env:VAR}`, `${VAR:-default}`, `${input:ID}` and the variables of VS Code.
    pub(crate) braces: bool,
    /// Variables as `$VAR`.
    pub(crate) bare: bool,
    /// `{env:VAR}` and `{file:PATH}`.
    pub(crate) opencode: bool,
    /// `${{ secrets.NAME }}` and `${{ inputs.NAME }}`.
    pub(crate) double_braces: bool,
    /// Files as `${file:PATH}`.
    pub(crate) files: bool,
}

impl TemplateSyntax {
    /// No variables.
    pub(crate) const NONE: Self =
        Self { braces: false, bare: false, opencode: false, double_braces: false, files: false };
    /// The variables that are recognized in the file of every JSON client.
    pub(crate) const BRACES: Self = Self { braces: true, ..Self::NONE };

    /// Splits `text` into its parts, in linear time.
    pub(crate) fn parse(self, text: &str) -> TextTemplate {
        let mut template = TextTemplate::default();
        let mut literal = String::new();
        let mut at = 0;
        // Position of the first closing brace at or after `at`.
        let mut close = text.find('}');
        while let Some(start) = text[at..].find(['$', '{']).map(|offset| at + offset) {
            literal.push_str(&text[at..start]);
            if close.is_some_and(|close| close < start) {
                close = text[start..].find('}').map(|offset| start + offset);
            }
            at = match self.expression(&text[start..], close.map(|close| close - start)) {
                Some((TemplatePart::Literal(text), length)) => {
                    literal.push_str(text.expose());
                    start + length
                }
                Some((part, length)) => {
                    flush(&mut template, &mut literal);
                    template.parts.push(part);
                    start + length
                }
                None => {
                    literal.push_str(&text[start..=start]);
                    start + 1
                }
            };
        }
        literal.push_str(&text[at..]);
        flush(&mut template, &mut literal);
        template
    }

    /// Reads the expression with which `text` begins. `close` is the position of the first closing brace. Returns the
    /// part and its length in bytes.
    fn expression(self, text: &str, close: Option<usize>) -> Option<(TemplatePart, usize)> {
        let (open, ending) = match text.as_bytes() {
            [b'$', b'{', b'{', ..] if self.double_braces => (3, "}}"),
            [b'$', b'{', ..] if self.braces => (2, "}"),
            [b'{', ..] if self.opencode && (text.starts_with("{env:") || text.starts_with("{file:")) => (1, "}"),
            [b'$', next, ..] if self.bare && is_name_start(*next) => {
                let name: String = text[1..].chars().take_while(|&c| is_name_char(c)).collect();
                let length = 1 + name.len();
                return Some((variable(&name, None), length));
            }
            _ => return None,
        };
        let end = close.filter(|&close| close >= open && text[close..].starts_with(ending))?;
        let length = end + ending.len();
        let inner = &text[open..end];
        let part = match open {
            3 => double_braces(inner.trim()),
            1 => inner.split_once(':').map(|(kind, value)| match kind {
                "env" if is_name(value) => variable(value, None),
                "file" => file(value),
                _ => unknown(&text[..length]),
            }),
            _ => self.braces(inner),
        };
        Some((part.unwrap_or_else(|| unknown(&text[..length])), length))
    }

    /// Reads the text between `${` and `}`. The variables are those of code.visualstudio.com/docs/reference/variables-reference,
    /// cursor.com/docs/context/mcp and code.claude.com/docs/en/mcp.
    fn braces(self, inner: &str) -> Option<TemplatePart> {
        match inner {
            "userHome" => return Some(TemplatePart::Home),
            "workspaceFolder" | "workspaceRoot" | "CLAUDE_PROJECT_DIR" => return Some(TemplatePart::Workspace),
            // Known to Cursor and VS Code, and not to the satellite.
            "workspaceFolderBasename" | "cwd" => return None,
            "pathSeparator" | "/" => return Some(TemplatePart::Literal(HiddenText::new("/"))),
            _ => {}
        }
        if let Some(id) = inner.strip_prefix("input:") {
            return (!id.is_empty()).then(|| TemplatePart::Input { id: id.to_owned() });
        }
        if let Some(path) = inner.strip_prefix("file:").filter(|_| self.files) {
            return (!path.is_empty()).then(|| file(path));
        }
        let inner = inner.strip_prefix("env:").unwrap_or(inner);
        let (name, default) = match inner.split_once(":-") {
            Some((name, default)) => (name, Some(HiddenText::new(default))),
            None => (inner, None),
        };
        is_name(name).then(|| variable(name, default))
    }
}

/// Reads `secrets.NAME` or `inputs.NAME` of Continue (docs.continue.dev/reference, "mcpServers").
fn double_braces(inner: &str) -> Option<TemplatePart> {
    let (kind, name) = inner.split_once('.')?;
    if name.is_empty() || !name.chars().all(|c| is_name_char(c) || matches!(c, '-' | '.' | '/')) {
        return None;
    }
    match kind {
        "secrets" => Some(TemplatePart::Secret { name: name.to_owned() }),
        "inputs" => Some(TemplatePart::Input { id: name.to_owned() }),
        _ => None,
    }
}

fn variable(name: &str, default: Option<HiddenText>) -> TemplatePart {
    if name == "HOME" { TemplatePart::Home } else { TemplatePart::Variable { name: name.to_owned(), default } }
}

fn file(path: &str) -> TemplatePart {
    let is_marked = path.starts_with(['/', '.', '~', '$']);
    TemplatePart::File { path: if is_marked { path.to_owned() } else { format!("./{path}") } }
}

fn unknown(text: &str) -> TemplatePart {
    TemplatePart::Unknown(HiddenText::new(text))
}

fn flush(template: &mut TextTemplate, literal: &mut String) {
    if !literal.is_empty() {
        template.parts.push(TemplatePart::Literal(HiddenText::new(std::mem::take(literal))));
    }
}

fn is_name_start(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || byte == b'_'
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Returns true for the name of an environment variable.
pub(crate) fn is_name(text: &str) -> bool {
    text.bytes().next().is_some_and(is_name_start) && text.chars().all(is_name_char)
}
