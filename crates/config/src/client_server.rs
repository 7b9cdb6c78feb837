//! The servers of MCP clients in the syntax of the satellite's configuration.

use std::path::{Path, PathBuf};

use mcp_satellite_clients::{
    Client, ClientInput, ClientScope, ClientServer, HiddenText, HttpProtocol, ImportNote, InputKind, OAuthHints,
    ServerTransport, TemplatePart, TextTemplate, ToolSelection, looks_secret, secret_args,
};
use mcp_satellite_model::spec::is_reserved_header;

use super::secrets::{SecretReference, parse_reference, split_argument};
use super::template::{escape, is_public_variable, is_value_key};

/// A server of a client in the syntax of the satellite's configuration. There is no `Debug`, because texts can be secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ServerDraft {
    /// Id of the installation.
    pub id: String,
    /// `stdio`, `http` or `sse`.
    pub transport: &'static str,
    pub command: Option<String>,
    pub args: Vec<String>,
    pub env: Vec<(String, String)>,
    pub cwd: Option<String>,
    pub env_file: Option<String>,
    pub url: Option<String>,
    pub headers: Vec<(String, String)>,
    pub oauth_client_id: Option<String>,
    pub oauth_scopes: Vec<String>,
    /// True if the arguments contain a secret or a variable.
    pub secret_args: bool,
    pub allow_tools: Option<Vec<String>>,
    pub deny_tools: Vec<String>,
    pub values: Vec<UserValueDraft>,
    /// Settings that are not taken over, and changes.
    pub notes: Vec<String>,
}

/// A value that a client asks its user for.
#[derive(Clone, PartialEq, Eq)]
pub struct UserValueDraft {
    pub key: String,
    pub description: Option<String>,
    pub is_secret: bool,
    pub default: Option<String>,
}

/// The place of a client's server: what its file and its machine contribute.
pub struct DraftContext<'a> {
    pub client: Client,
    /// The home directory; `None` keeps the variable.
    pub home: Option<&'a Path>,
    /// The directory of `${workspaceFolder}`.
    pub workspace: PathBuf,
    /// The directory to which paths of files are relative, if the configuration is in another one.
    pub folder: Option<&'a Path>,
    /// The directory of files that are relative to the configuration, not to `folder`; empty if there is none.
    pub moved_files: &'a str,
    pub inputs: &'a [ClientInput],
    /// True if the texts `env:NAME` and `file:PATH` are references. They are literals in files of most clients.
    pub accepts_references: bool,
}

/// Directories of a project in which clients keep their files.
const SETTINGS_FOLDERS: [&str; 9] =
    [".amazonq", ".codex", ".continue", ".cursor", ".gemini", ".junie", ".roo", ".vscode", ".zed"];

/// Returns the directory of `${workspaceFolder}` for a file: its directory, or the parent of `.vscode` and the like.
pub fn workspace_of(file: &Path) -> PathBuf {
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let folder = file.parent().unwrap_or(Path::new("/"));
    let is_settings_folder = SETTINGS_FOLDERS.iter().any(|name| folder.ends_with(name));
    match folder.parent() {
        Some(parent) if is_settings_folder => parent.to_owned(),
        _ => folder.to_owned(),
    }
}

/// Returns the id for a name: runs of other characters become a hyphen.
pub fn normalize_id(name: &str) -> String {
    let mut id = String::new();
    for c in name.trim().chars() {
        if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') {
            id.push(c);
        } else if !id.ends_with('-') {
            id.push('-');
        }
        if id.len() == 64 {
            break;
        }
    }
    let id = id.trim_matches(['-', '.']);
    if id.is_empty() { "server".to_owned() } else { id.to_owned() }
}

/// Translates a server of a client. The error is the reason why it cannot be used. It contains no value.
pub fn draft_server(server: &ClientServer, context: &DraftContext<'_>) -> Result<ServerDraft, String> {
    let has_workspace = matches!(server.scope, ClientScope::Project | ClientScope::Local(_));
    let mut writer = DraftWriter { context, has_workspace, draft: ServerDraft::default() };
    writer.draft.id = normalize_id(&server.name);
    match &server.transport {
        ServerTransport::Stdio { command, args, env, cwd, env_file } => {
            writer.draft.transport = "stdio";
            let secrets = secret_args(args);
            writer.draft.command = Some(writer.text("command", command)?);
            for (index, arg) in args.iter().enumerate() {
                let is_secret = secrets.iter().any(|secret| secret.index == index);
                let arg = writer.argument(arg, is_secret)?;
                writer.draft.args.push(arg);
            }
            for (name, value) in env {
                let value = writer.value(&format!("env.{name}"), value)?;
                writer.draft.env.push((name.clone(), value));
            }
            if let Some(cwd) = cwd {
                let path = writer.text("cwd", cwd)?;
                writer.draft.cwd = Some(writer.working_directory(&path));
            }
            if let Some(file) = env_file {
                let path = writer.text("envFile", file)?;
                writer.draft.env_file = Some(writer.path_in(context.folder, &path, escape));
            }
        }
        ServerTransport::Http { url, kind, headers, bearer_token_env, env_headers, oauth } => {
            let written = writer.text("url", url)?;
            let path = written.split(['?', '#']).next().unwrap_or_default();
            let is_sse = path.trim_end_matches('/').ends_with("/sse");
            writer.draft.transport = match kind {
                HttpProtocol::Sse => "sse",
                HttpProtocol::Unspecified if is_sse => "sse",
                HttpProtocol::Streamable | HttpProtocol::Unspecified => "http",
            };
            writer.draft.url = Some(written);
            writer.headers(headers, bearer_token_env.as_deref(), env_headers)?;
            if let Some(hints) = oauth {
                writer.oauth(hints);
            }
        }
    }
    writer.tools(&server.tools);
    writer.note_settings(server);
    Ok(writer.draft)
}

struct DraftWriter<'a> {
    context: &'a DraftContext<'a>,
    /// False if the file applies to all projects, so that the workspace is a guess.
    has_workspace: bool,
    draft: ServerDraft,
}

impl DraftWriter<'_> {
    fn note(&mut self, note: impl Into<String>) {
        self.draft.notes.push(note.into());
    }

    fn argument(&mut self, template: &TextTemplate, is_secret: bool) -> Result<String, String> {
        let text = self.text("args", template)?;
        let is_literal = template.as_literal().is_some();
        let (text, is_reference) = match split_argument(&text) {
            Some((prefix, reference)) if self.context.accepts_references && is_literal => {
                (format!("{prefix}{}", variable_of(&reference)), true)
            }
            Some((prefix, _)) => (format!("{prefix}{}", self.no_reference(&text[prefix.len()..])), false),
            None => (text, false),
        };
        let is_public = |part: &TemplatePart| match part {
            TemplatePart::Variable { name, .. } => is_public_variable(name),
            TemplatePart::Input { id } => {
                let key = value_key(id);
                self.draft.values.iter().any(|value| value.key == key && !value.is_secret)
            }
            TemplatePart::File { .. } | TemplatePart::Secret { .. } => false,
            TemplatePart::Literal(_) | TemplatePart::Home | TemplatePart::Workspace | TemplatePart::Unknown(_) => true,
        };
        let is_secret = is_secret || is_reference || !template.parts.iter().all(is_public);
        if is_secret && !self.draft.secret_args {
            self.draft.secret_args = true;
            self.note("`args` contains a secret or a variable, which every process on the machine can read");
        }
        Ok(text)
    }

    /// Writes the value of an environment variable or a header.
    fn value(&mut self, key: &str, template: &TextTemplate) -> Result<String, String> {
        let text = self.text(key, template)?;
        let (scheme, rest) = match text.split_once(' ') {
            Some((scheme, rest)) if parse_reference(rest).is_some() => (format!("{scheme} "), rest),
            _ => (String::new(), text.as_str()),
        };
        let is_literal = template.as_literal().is_some();
        Ok(match parse_reference(rest) {
            Some(reference) if self.context.accepts_references && is_literal => {
                format!("{scheme}{}", variable_of(&reference))
            }
            Some(_) => format!("{scheme}{}", self.no_reference(rest)),
            None => text,
        })
    }

    /// Writes a text that begins with `env:` or `file:` and is no reference in the client, such as `file:./dev.db`. The
    /// beginning becomes a value with a default.
    fn no_reference(&mut self, text: &str) -> String {
        let begin = if text.starts_with("env:") { "env:" } else { "file:" };
        let description = format!("the text `{begin}`, which begins no reference here");
        let key = format!("text-{}", begin.trim_end_matches(':'));
        let key = self.declare(&key, Some(description), false, Some(begin.to_owned()));
        format!("${{value:{key}}}{}", &text[begin.len()..])
    }

    /// Writes a text with its variables.
    fn text(&mut self, key: &str, template: &TextTemplate) -> Result<String, String> {
        let mut text = String::new();
        for part in &template.parts {
            // `$${` would be an escaped `${`.
            let dollars = text.len() - text.trim_end_matches('$').len();
            if dollars > 0 {
                text.truncate(text.len() - dollars);
                let description = Some("the text `$`, which begins no variable here".to_owned());
                let key = self.declare("text-dollar", description, false, Some("$".to_owned()));
                text.push_str(&format!("${{value:{key}}}").repeat(dollars));
            }
            match part {
                TemplatePart::Literal(literal) => text.push_str(&escape(literal.expose())),
                TemplatePart::Variable { name, default: None } => text.extend(["${env:", name, "}"]),
                TemplatePart::Variable { name, default: Some(default) } => {
                    text.extend(["${env:", name, ":-", default.expose(), "}"]);
                }
                TemplatePart::Home => match self.context.home {
                    Some(home) => text.push_str(&escape(&home.display().to_string())),
                    None => text.push_str("${env:HOME}"),
                },
                TemplatePart::Workspace => {
                    let workspace = self.context.workspace.display().to_string();
                    if !self.has_workspace {
                        self.note(format!("`{key}`: `${{workspaceFolder}}` is replaced by `{workspace}`; correct it"));
                    }
                    text.push_str(&escape(&workspace));
                }
                TemplatePart::File { path } => {
                    let path = if self.is_moved(path) {
                        path.clone()
                    } else {
                        self.path_in(self.context.folder, path, str::to_owned)
                    };
                    if path.contains('}') {
                        return Err(format!("the path of the file in `{key}` contains a brace; rename the file"));
                    }
                    text.extend(["${file:", &path, "}"]);
                }
                TemplatePart::Input { id } => {
                    let key = self.input(id);
                    text.extend(["${value:", &key, "}"]);
                }
                TemplatePart::Secret { name } => {
                    let description = format!("secret `{name}` of {}", self.context.client);
                    let key = self.declare(name, Some(description), true, None);
                    text.extend(["${value:", &key, "}"]);
                }
                TemplatePart::Unknown(unknown) => {
                    return Err(format!(
                        "`{key}` contains {}, which is not supported",
                        shown_variable(unknown.expose())
                    ));
                }
            }
        }
        Ok(text)
    }

    /// Returns the path of a working directory, which is relative to the workspace.
    fn working_directory(&mut self, path: &str) -> String {
        let context = self.context;
        let complete = self.path_in(Some(&context.workspace), path, escape);
        if !self.has_workspace && !path.starts_with('~') && complete != path {
            self.note(format!("`cwd`: the relative path is replaced by `{complete}`; correct it"));
        }
        complete
    }

    /// Returns a path that is relative to `folder`, or to the home directory if it begins with `~/`. `escape` is applied to
    /// the directory.
    fn path_in(&self, folder: Option<&Path>, path: &str, escape: fn(&str) -> String) -> String {
        let below_home = path.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'));
        let (folder, rest) = match (below_home, self.context.home) {
            (Some(rest), Some(home)) => (home, rest.trim_start_matches('/')),
            // A path that begins with a variable is complete.
            _ if path.starts_with(['/', '$', '~']) => return path.to_owned(),
            _ => match folder {
                Some(folder) => (folder, path.strip_prefix("./").unwrap_or(path)),
                None => return path.to_owned(),
            },
        };
        let folder = escape(&folder.display().to_string());
        if matches!(rest, "" | ".") { folder } else { format!("{}/{rest}", folder.trim_end_matches('/')) }
    }

    /// Returns true for the file of a moved secret. A relative path of the client never begins with `secrets/`, because
    /// the reader of the client's file writes `./` before it.
    fn is_moved(&self, path: &str) -> bool {
        let folder = self.context.moved_files;
        !folder.is_empty() && path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
    }

    /// Declares the value of an input and returns its key.
    fn input(&mut self, id: &str) -> String {
        let Some(input) = self.context.inputs.iter().find(|input| input.id == id) else {
            return self.declare(id, None, true, None);
        };
        match &input.kind {
            InputKind::Prompt => {}
            InputKind::Choice(options) => {
                let options = options.iter().map(HiddenText::expose).filter(|option| !looks_secret(id, option));
                let options = options.map(|option| format!("`{option}`")).collect::<Vec<_>>().join(", ");
                self.note(format!("the client offers these values for `{id}`: {options}"));
            }
            InputKind::Command(command) => {
                let client = self.context.client;
                self.note(format!("the value `{id}` comes from the command `{command}` of {client}; give it yourself"));
            }
            InputKind::Other(kind) => {
                self.note(format!("the input `{id}` has the type `{kind}`; give its value yourself"));
            }
        }
        let default = input.default.as_ref().map(|default| default.expose().to_owned());
        let is_secret = input.password || default.as_ref().is_some_and(|default| looks_secret(id, default));
        self.declare(id, input.description.clone(), is_secret, default)
    }

    fn declare(&mut self, id: &str, description: Option<String>, is_secret: bool, default: Option<String>) -> String {
        let key = value_key(id);
        if !self.draft.values.iter().any(|value| value.key == key) {
            self.draft.values.push(UserValueDraft { key: key.clone(), description, is_secret, default });
        }
        key
    }

    fn headers(
        &mut self,
        headers: &[(String, TextTemplate)],
        bearer_token_env: Option<&str>,
        env_headers: &[(String, String)],
    ) -> Result<(), String> {
        for (name, value) in headers {
            let value = self.value(&format!("headers.{name}"), value)?;
            self.draft.headers.push((name.clone(), value));
        }
        let from_variables = env_headers.iter().map(|(name, variable)| (name.clone(), format!("${{env:{variable}}}")));
        self.draft.headers.extend(from_variables);
        if let Some(variable) = bearer_token_env {
            if self.has_authorization() {
                self.note("the bearer token is not used, because the server has a header `Authorization`");
            } else {
                let value = format!("Bearer ${{env:{variable}}}");
                self.draft.headers.push(("Authorization".to_owned(), value));
            }
        }
        let (reserved, kept) =
            std::mem::take(&mut self.draft.headers).into_iter().partition(|(name, _)| is_reserved_header(name));
        self.draft.headers = kept;
        let reserved: Vec<(String, String)> = reserved;
        for (name, _) in reserved {
            self.note(format!("the header `{name}` is not used: the satellite sets it"));
        }
        Ok(())
    }

    fn has_authorization(&self) -> bool {
        self.draft.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("authorization"))
    }

    fn oauth(&mut self, hints: &OAuthHints) {
        let OAuthHints { disabled, client_id, client_secret, scopes, resource, .. } = hints;
        if *disabled || self.has_authorization() {
            if client_id.is_some() || !scopes.is_empty() {
                self.note("the OAuth settings are not used, because the server does not use OAuth");
            }
            return;
        }
        match client_id.as_ref().map(TextTemplate::as_literal) {
            Some(Some(id)) => self.draft.oauth_client_id = Some(id.to_owned()),
            Some(None) => self.note("the OAuth client id contains a variable; set `client_id` under `oauth`"),
            None => {}
        }
        self.draft.oauth_scopes.clone_from(scopes);
        if client_secret.is_some() {
            self.note("the OAuth client secret is not used; set `client_secret` and `issuer` under `oauth`");
        }
        let addresses = [
            ("resource", resource),
            ("authorization URL", &hints.authorization_url),
            ("token URL", &hints.token_url),
            ("metadata URL", &hints.metadata_url),
            ("redirect URI", &hints.redirect_uri),
        ];
        for (what, _) in addresses.into_iter().filter(|(_, address)| address.is_some()) {
            self.note(format!("the OAuth {what} is not used: the satellite finds it out"));
        }
    }

    fn tools(&mut self, tools: &ToolSelection) {
        // Some clients accept `server/tool`, `tool*` and `tool(arguments)`.
        let is_pattern = |name: &&String| name.contains(['*', '?', '/', '(']);
        if let Some(pattern) = tools.allowed.iter().flatten().chain(&tools.denied).find(is_pattern) {
            return self.note(format!("the selection of tools is not used, because `{pattern}` is no name of a tool"));
        }
        self.draft.allow_tools.clone_from(&tools.allowed);
        self.draft.deny_tools.clone_from(&tools.denied);
    }

    fn note_settings(&mut self, server: &ClientServer) {
        for note in &server.notes {
            self.note(match note {
                ImportNote::UnknownKey(key) => format!("`{key}` is not used"),
                ImportNote::NoCounterpart { key, meaning } => format!("`{key}` ({meaning}) is not used"),
                ImportNote::Adjusted { key, change } => format!("`{key}`: {change}"),
            });
        }
        let timeouts = [("start", server.timeouts.startup), ("call", server.timeouts.call)];
        for (what, timeout) in timeouts {
            if let Some(timeout) = timeout {
                let timeout = humantime::format_duration(timeout);
                self.note(format!("the {what} timeout of {timeout} is not used: the policies of the satellite apply"));
            }
        }
    }
}

fn value_key(id: &str) -> String {
    if is_value_key(id) { id.to_owned() } else { normalize_id(id) }
}

fn variable_of(reference: &SecretReference<'_>) -> String {
    match reference {
        SecretReference::Env(name) => format!("${{env:{name}}}"),
        SecretReference::File(path) => format!("${{file:{path}}}"),
    }
}

/// Names a variable without a text that could be a value.
fn shown_variable(text: &str) -> String {
    let inner = text.trim_start_matches(['$', '{']).trim_end_matches('}');
    let name = inner.split(':').next().unwrap_or_default();
    let is_name = |text: &str| {
        !text.is_empty() && text.len() <= 40 && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    match (is_name(inner), is_name(name)) {
        (true, _) => format!("the variable `${{{inner}}}`"),
        (false, true) => format!("a variable `${{{name}:…}}`"),
        (false, false) => "a variable".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_ids() {
        for (name, id) in [
            ("My Server", "My-Server"),
            ("@scope/server", "scope-server"),
            (" github.com/a/b ", "github.com-a-b"),
            ("ok_1.2-3", "ok_1.2-3"),
            ("日本", "server"),
            ("..", "server"),
            ("a  /  b", "a-b"),
        ] {
            assert_eq!(normalize_id(name), id);
        }
        assert_eq!(normalize_id(&"x".repeat(100)).len(), 64);
    }

    #[test]
    fn a_workspace_is_the_directory_of_the_file_or_the_parent_of_a_settings_directory() {
        for (file, workspace) in
            [("/a/b/mcp.json", "/a/b"), ("/a/b/.vscode/mcp.json", "/a/b"), ("/a/.b/mcp.json", "/a/.b")]
        {
            assert_eq!(workspace_of(Path::new(file)), Path::new(workspace));
        }
    }

    #[test]
    fn an_unknown_variable_is_named_without_a_possible_value() {
        for (text, shown) in [
            ("${workspaceFolderBasename}", "the variable `${workspaceFolderBasename}`"),
            ("${command:hunter2 hunter2}", "a variable `${command:…}`"),
            ("${hunter2 hunter2}", "a variable"),
        ] {
            assert_eq!(shown_variable(text), shown);
        }
    }
}
