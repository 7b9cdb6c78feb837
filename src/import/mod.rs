//! Import of the servers of MCP clients into the user's configuration: which servers are added under which names, which
//! are not and why, and the files that result. `toml` edits the configuration, and `secrets` moves secrets out of it.

mod secrets;
mod toml;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mcp_satellite_actors::model::printable;
use mcp_satellite_clients::{
    Client, ClientFile, ClientFileError, ClientInput, ClientScope, ClientServer, ClientServers, HiddenText, ImportNote,
    InputKind, looks_secret, read,
};
use mcp_satellite_files::data_dir::DataDir;
use mcp_satellite_files::replace_file::{EditedFile, FileEditError, FileReadError, read_file};
use serde::Serialize;

use crate::config::{self, DraftContext, ServerDraft, draft_server, normalize_id, workspace_of};

use self::secrets::{MovedSecret, SECRETS_FOLDER, move_secrets};
use self::toml::{EditedConfiguration, NEW_CONFIGURATION, draft_of};

const GITIGNORE: &str = ".gitignore";

/// Reasons why nothing is imported.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    #[error("cannot read `{}`: {source}; check the path and its permissions", path.display())]
    Read { path: PathBuf, source: FileReadError },
    #[error("cannot import `{}`: it belongs to the user {owner}, who may have written commands into it; check it, then run `satellite import {}`", path.display(), path.display())]
    OtherOwner { path: PathBuf, owner: u32 },
    #[error(transparent)]
    Client(#[from] ClientFileError),
    #[error("cannot add servers to `{}`: {reason}", path.display())]
    Configuration { path: PathBuf, reason: String },
    #[error("cannot store secrets: {0}")]
    SecretsFolder(#[from] io::Error),
    #[error(transparent)]
    Edit(#[from] FileEditError),
}

/// A client's file that was read.
#[derive(Debug, Serialize)]
pub(crate) struct FileImport {
    pub(crate) client: String,
    pub(crate) file: PathBuf,
    /// Settings of the file as a whole that are not imported.
    pub(crate) notes: Vec<String>,
}

/// A server of a client's file, and what happens to it.
#[derive(Debug, Serialize)]
pub(crate) struct ServerImport {
    pub(crate) client: String,
    pub(crate) file: PathBuf,
    /// Name in the client.
    pub(crate) name: String,
    /// Id of the installation in the configuration, if it is there.
    pub(crate) id: Option<String>,
    pub(crate) outcome: ImportOutcome,
    /// Command line or URL, without secrets.
    pub(crate) target: Option<String>,
    /// Reason why the server is not imported, or the server that it equals.
    pub(crate) reason: Option<String>,
    /// Settings that are not imported, and changes.
    pub(crate) notes: Vec<String>,
    /// Places of secrets, and the files to which they are moved.
    pub(crate) secrets: BTreeMap<String, String>,
    /// Directory, variables, headers and other settings with which the server is started, for a question to the user.
    #[serde(skip)]
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ImportOutcome {
    Added,
    AlreadyImported,
    NotImported,
}

/// An import that is not written yet.
pub(crate) struct Import<'a> {
    home: &'a Path,
    path: PathBuf,
    /// The file of the configuration. `None`: the configuration is not written.
    file: Option<EditedFile>,
    configuration: EditedConfiguration,
    /// A configuration of the added servers only.
    added: EditedConfiguration,
    secrets: Vec<MovedSecret>,
    pub(crate) files: Vec<FileImport>,
    pub(crate) servers: Vec<ServerImport>,
}

/// The question whether a server of a project's file is imported. `None` means that nobody can answer.
pub(crate) type ConfirmServer<'a> = &'a mut dyn FnMut(&ServerImport) -> Option<bool>;

impl<'a> Import<'a> {
    /// Reads the configuration at `path`, or begins a new one.
    pub(crate) fn new(path: &Path, home: &'a Path) -> Result<Self, ImportError> {
        let failed = |reason| ImportError::Configuration { path: path.to_owned(), reason };
        let file = EditedFile::open(path)?;
        let text = std::str::from_utf8(file.contents().unwrap_or_default())
            .map_err(|_| failed("it is not UTF-8; save it as UTF-8".to_owned()))?;
        let text = if text.trim().is_empty() { NEW_CONFIGURATION } else { text };
        let configuration = EditedConfiguration::parse(text).map_err(failed)?;
        Ok(Self { file: Some(file), configuration, ..Self::preview(path, home) })
    }

    /// Begins an import that shows what a new configuration at `path` would contain. It writes nothing.
    pub(crate) fn preview(path: &Path, home: &'a Path) -> Self {
        Self {
            home,
            path: path.to_owned(),
            file: None,
            configuration: EditedConfiguration::empty(),
            added: EditedConfiguration::empty(),
            secrets: Vec::new(),
            files: Vec::new(),
            servers: Vec::new(),
        }
    }

    /// Adds the servers of a client's file. The servers of a project's file are added only if the file `is_named` or they
    /// are confirmed, because somebody else may have written it. A file of another user than root must be named.
    pub(crate) fn add_file(
        &mut self,
        file: &ClientFile,
        is_named: bool,
        confirm: ConfirmServer<'_>,
    ) -> Result<(), ImportError> {
        let (text, about) =
            read_file(&file.path).map_err(|source| ImportError::Read { path: file.path.clone(), source })?;
        let owner = about.uid();
        if !is_named && owner != 0 && owner != nix::unistd::geteuid().as_raw() {
            return Err(ImportError::OtherOwner { path: file.path.clone(), owner });
        }
        let found = read(file, &text)?;
        self.add_servers(file, &found, file.from_project && !is_named, confirm);
        Ok(())
    }

    /// Adds the servers that were found in a client's file.
    pub(crate) fn add_servers(
        &mut self,
        file: &ClientFile,
        found: &ClientServers,
        needs_confirmation: bool,
        confirm: ConfirmServer<'_>,
    ) {
        self.files.push(FileImport {
            client: file.client.to_string(),
            file: file.path.clone(),
            notes: found.notes.iter().map(ImportNote::to_string).collect(),
        });
        for server in &found.servers {
            let imported = self.server(file, found, server, needs_confirmation, confirm);
            self.servers.push(imported);
        }
        for server in &found.unreadable {
            self.servers.push(not_imported(file, &server.name, server.reason.clone()));
        }
    }

    fn server(
        &mut self,
        file: &ClientFile,
        found: &ClientServers,
        server: &ClientServer,
        needs_confirmation: bool,
        confirm: ConfirmServer<'_>,
    ) -> ServerImport {
        if server.is_satellite {
            return not_imported(file, &server.name, "it connects the client to the satellite".to_owned());
        }
        if !server.enabled {
            return not_imported(file, &server.name, "it is disabled in the client; enable it there first".to_owned());
        }
        let candidate = match self.candidate(file, found, server) {
            Ok(candidate) => candidate,
            Err(reason) => return not_imported(file, &server.name, reason),
        };
        let ServerCandidate { draft, secrets, notes } = candidate;
        let mut import = ServerImport {
            target: Some(shown_target(&draft)),
            settings: shown_settings(&draft),
            notes,
            ..not_imported(file, &server.name, String::new())
        };
        if let Some(id) = self.equal_installation(&draft, &secrets) {
            import.reason = Some(format!("it is in the configuration as `{id}`"));
            (import.id, import.outcome) = (Some(id), ImportOutcome::AlreadyImported);
            (import.target, import.notes) = (None, Vec::new());
            return import;
        }
        match self.check(&draft) {
            Ok(mut warnings) => import.notes.append(&mut warnings),
            Err(reason) => {
                import.reason = Some(reason);
                return import;
            }
        }
        if needs_confirmation {
            import.reason = match confirm(&import) {
                Some(true) => None,
                Some(false) => Some("it was not confirmed".to_owned()),
                None => Some(format!(
                    "a file of a project contains it; check the command, then run `satellite import {}`",
                    file.path.display()
                )),
            };
            if import.reason.is_some() {
                return import;
            }
        }
        let origin = format!("{} ({})", file.client, self.shown_path(&file.path));
        self.configuration.add(&draft, &origin);
        self.added.add(&draft, &origin);
        import.secrets = secrets.iter().map(|secret| (secret.place.clone(), secret.path.clone())).collect();
        (import.id, import.outcome, import.reason) = (Some(draft.id), ImportOutcome::Added, None);
        self.secrets.extend(secrets);
        import
    }

    /// Translates a server, with an id that is free and its secrets moved.
    fn candidate(
        &self,
        file: &ClientFile,
        found: &ClientServers,
        server: &ClientServer,
    ) -> Result<ServerCandidate, String> {
        let id = self.free_id(&server.name, file.client);
        let mut server = server.clone();
        let (secrets, mut notes) = move_secrets(&mut server, &id, self.folder(), &self.secrets)?;
        let inputs: Vec<ClientInput> = found.inputs.iter().map(with_choices).collect();
        let context = DraftContext {
            client: file.client,
            home: Some(self.home),
            workspace: match &server.scope {
                ClientScope::Local(project) => project.clone(),
                ClientScope::User | ClientScope::Project | ClientScope::Profile(_) => workspace_of(&file.path),
            },
            // The secrets are beside the configuration, and every other file is relative to the client's file.
            folder: file.path.parent(),
            moved_files: SECRETS_FOLDER,
            inputs: &inputs,
            accepts_references: false,
        };
        let mut draft = draft_server(&server, &context)?;
        // The clients start such servers in the directory of the project.
        let is_of_project = file.from_project || matches!(server.scope, ClientScope::Local(_));
        if is_of_project && draft.command.is_some() && draft.cwd.is_none() {
            draft.cwd = Some(config::escape_variables(&context.workspace.display().to_string()));
        }
        for value in draft.values.iter_mut().filter(|value| value.is_secret && value.default.is_some()) {
            value.default = None;
            notes.push(format!("the default of the value `{}` is a secret and is not imported", value.key));
        }
        if normalize_id(&server.name) != id {
            notes.push(format!("it gets the id `{id}`, because `{}` is in use", normalize_id(&server.name)));
        } else if server.name != id {
            notes.push(format!("it gets the id `{id}`"));
        }
        draft.id = id;
        notes.append(&mut draft.notes);
        Ok(ServerCandidate { draft, secrets, notes })
    }

    fn free_id(&self, name: &str, client: Client) -> String {
        let id = normalize_id(name);
        let is_used = |id: &str| self.configuration.installations().any(|table| draft_of(table).id == id);
        let with_client = format!("{id}-{client}");
        let numbered = (2..).map(|number| format!("{with_client}-{number}"));
        let mut ids = [id, with_client.clone()].into_iter().chain(numbered);
        ids.find(|id| !is_used(id)).unwrap_or(with_client)
    }

    /// Returns the id of an installation that starts the same server.
    fn equal_installation(&self, draft: &ServerDraft, secrets: &[MovedSecret]) -> Option<String> {
        let of = |secrets: &[MovedSecret], path: &str| {
            secrets.iter().find(|secret| secret.path == path).map(|secret| secret.text.clone())
        };
        let wanted = resolved(draft, &|path| of(secrets, path));
        let stored = |path: &str| of(&self.secrets, path).or_else(|| read_secret(&self.folder().join(path)));
        let mut installations = self.configuration.installations().map(draft_of);
        installations.find(|other| resolved(other, &stored) == wanted).map(|other| other.id)
    }

    /// Checks a server as `satellite check` does, and returns the warnings. The error is the first finding.
    fn check(&self, draft: &ServerDraft) -> Result<Vec<String>, String> {
        let without = self.configuration.sample();
        let mut with = self.configuration.sample();
        with.add(draft, "");
        let known = self.warnings(&without)?;
        let warnings = self.warnings(&with)?;
        Ok(warnings.into_iter().filter(|warning| !known.contains(warning)).collect())
    }

    /// Returns the warnings of a configuration, without their places in it.
    fn warnings(&self, configuration: &EditedConfiguration) -> Result<Vec<String>, String> {
        let name = self.path.display().to_string();
        let plan = config::parse(&name, &configuration.document_text(), &|name| std::env::var(name).ok());
        match plan.and_then(config::Plan::finalize) {
            Ok(plan) => Ok(plan.warnings.iter().map(|warning| without_place(warning, &name)).collect()),
            Err(errors) => {
                let finding = errors.items().into_iter().next();
                Err(finding.map(|item| format!("{}; {}", item.message, item.hint)).unwrap_or_default())
            }
        }
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    fn shown_path(&self, path: &Path) -> String {
        match path.strip_prefix(self.home) {
            Ok(rest) => format!("~/{}", rest.display()),
            Err(_) => path.display().to_string(),
        }
    }

    pub(crate) fn has_changes(&self) -> bool {
        self.servers.iter().any(|server| server.outcome == ImportOutcome::Added)
    }

    /// Returns the configuration before and after the import, and a text that contains all that the import writes.
    pub(crate) fn texts(&self) -> Result<(Option<&[u8]>, String, String), ImportError> {
        let before = self.file.as_ref().and_then(EditedFile::contents);
        Ok((before, self.text_after()?, self.added.document_text()))
    }

    fn text_after(&self) -> Result<String, ImportError> {
        let failed = |reason| ImportError::Configuration { path: self.path.clone(), reason };
        self.configuration.text().map_err(failed)
    }

    /// Writes the files of secrets, and then the configuration. After an error, no file of this import remains.
    pub(crate) fn write(&self) -> Result<(), ImportError> {
        let Some(file) = &self.file else { return Ok(()) };
        let text = self.text_after()?;
        file.check_writable()?;
        let mut written = Vec::new();
        let outcome = self.write_secrets(&mut written).and_then(|()| Ok(file.replace(text.as_bytes())?));
        if outcome.is_err() {
            for file in written {
                // The error of the write is reported.
                let _ = fs::remove_file(file);
            }
        }
        outcome
    }

    fn write_secrets(&self, written: &mut Vec<PathBuf>) -> Result<(), ImportError> {
        if self.secrets.is_empty() {
            return Ok(());
        }
        let (directory, _) = DataDir::create_or_open(&self.folder().join(SECRETS_FOLDER))?;
        // The configuration can be in a repository.
        if directory.stat(GITIGNORE).is_none() {
            directory.replace(GITIGNORE, b"*\n")?;
        }
        for secret in &self.secrets {
            if secret.write()? {
                written.push(self.folder().join(&secret.path));
            }
        }
        Ok(())
    }
}

struct ServerCandidate {
    draft: ServerDraft,
    secrets: Vec<MovedSecret>,
    notes: Vec<String>,
}

fn not_imported(file: &ClientFile, name: &str, reason: String) -> ServerImport {
    ServerImport {
        client: file.client.to_string(),
        file: file.path.clone(),
        name: name.to_owned(),
        id: None,
        outcome: ImportOutcome::NotImported,
        target: None,
        reason: Some(reason),
        notes: Vec::new(),
        secrets: BTreeMap::new(),
        settings: Vec::new(),
    }
}

/// Adds the values that a client offers to the description of an input, which is the question to the user.
fn with_choices(input: &ClientInput) -> ClientInput {
    let InputKind::Choice(options) = &input.kind else { return input.clone() };
    let options = options.iter().map(HiddenText::expose);
    let options: Vec<_> = options.map(|text| if looks_secret(&input.id, text) { "…" } else { text }).collect();
    let options = format!("one of: {}", options.join(", "));
    let description = match &input.description {
        Some(description) => format!("{description} ({options})"),
        None => options,
    };
    ClientInput { description: Some(description), ..input.clone() }
}

/// Removes the place in front of a warning: `FILE:LINE:COLUMN: `.
fn without_place(warning: &str, file: &str) -> String {
    let place = warning.strip_prefix(&*printable::line(file)).and_then(|rest| rest.strip_prefix(':'));
    place.and_then(|place| place.split_once(": ")).map_or(warning, |(_, message)| message).to_owned()
}

/// Returns the command line or the URL. Its secrets have been moved.
fn shown_target(draft: &ServerDraft) -> String {
    let words = draft.command.iter().chain(&draft.url).chain(&draft.args);
    words.map(String::as_str).collect::<Vec<_>>().join(" ")
}

/// Returns the settings that decide what the server does, except the command line. Secrets have been moved.
fn shown_settings(draft: &ServerDraft) -> Vec<String> {
    let mut settings = Vec::new();
    for (key, text) in [("cwd", &draft.cwd), ("env_file", &draft.env_file), ("client_id", &draft.oauth_client_id)] {
        settings.extend(text.iter().map(|text| format!("{key} = {text}")));
    }
    for (key, pairs) in [("env", &draft.env), ("headers", &draft.headers)] {
        settings.extend(pairs.iter().map(|(name, value)| format!("{key}.{name} = {value}")));
    }
    if !draft.oauth_scopes.is_empty() {
        settings.push(format!("scopes = {}", draft.oauth_scopes.join(" ")));
    }
    for value in &draft.values {
        let default = value.default.as_ref().map(|text| format!(" = {text}")).unwrap_or_default();
        settings.push(format!("values.{}{default}", value.key));
    }
    settings
}

fn read_secret(path: &Path) -> Option<HiddenText> {
    let (text, _) = read_file(path).ok()?;
    let text = String::from_utf8(text).ok()?;
    let text = text.strip_suffix('\n').unwrap_or(&text);
    Some(HiddenText::new(text.strip_suffix('\r').unwrap_or(text)))
}

/// Returns what the server is started with: the moved secrets in place, without the keys that do not matter for that.
fn resolved(draft: &ServerDraft, secret: &dyn Fn(&str) -> Option<HiddenText>) -> ServerDraft {
    let begin = format!("${{file:{SECRETS_FOLDER}/");
    let text = |text: &String| {
        let (mut whole, mut rest) = (String::new(), text.as_str());
        while let Some((before, after)) = rest.split_once(&begin) {
            let Some((name, after)) = after.split_once('}') else { break };
            let content = secret(&format!("{SECRETS_FOLDER}/{name}"));
            whole.push_str(before);
            // An unreadable secret equals none.
            whole.push_str(content.as_ref().map_or("\0", HiddenText::expose));
            rest = after;
        }
        whole + rest
    };
    let pairs = |pairs: &[(String, String)]| {
        let mut pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.clone(), text(value))).collect();
        pairs.sort();
        pairs
    };
    ServerDraft {
        transport: draft.transport,
        command: draft.command.as_ref().map(text),
        args: draft.args.iter().map(text).collect(),
        env: pairs(&draft.env),
        cwd: draft.cwd.clone(),
        env_file: draft.env_file.clone(),
        url: draft.url.as_ref().map(text),
        headers: pairs(&draft.headers),
        ..ServerDraft::default()
    }
}
