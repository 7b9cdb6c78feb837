//! Import of the servers of MCP clients into the user's configuration: which servers are added under which names, which
//! are not and why, and the files that result. `toml` edits the configuration, and `secrets` moves secrets out of it.

mod secrets;
mod toml;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use mcp_satellite_clients::{
    Client, ClientFile, ClientFileError, ClientScope, ClientServer, ClientServers, HiddenText, read,
};
use mcp_satellite_files::replace_file::{ReplaceError, replace_file};
use serde::Serialize;

use crate::config::{self, DraftContext, ServerDraft, draft_server, normalize_id, workspace_of};

use self::secrets::{MovedSecret, SECRETS_FOLDER, move_secrets};
use self::toml::{EditedConfiguration, NEW_CONFIGURATION, draft_of};

/// Reasons why nothing is imported.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    #[error("cannot read `{}`: {source}; check the path and its permissions", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot import `{}`: it belongs to the user {owner}, who may have written commands into it; check it, then run `satellite import {}`", path.display(), path.display())]
    OtherOwner { path: PathBuf, owner: u32 },
    #[error(transparent)]
    Client(#[from] ClientFileError),
    #[error("cannot add servers to `{}`: {reason}", path.display())]
    Configuration { path: PathBuf, reason: String },
    #[error("cannot use `{}` for secrets: {reason}", path.display())]
    SecretsFolder { path: PathBuf, reason: String },
    #[error(transparent)]
    Write(#[from] ReplaceError),
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
    before: Option<String>,
    configuration: EditedConfiguration,
    secrets: Vec<MovedSecret>,
    pub(crate) servers: Vec<ServerImport>,
}

/// The question whether a server of a project's file is imported. `None` means that nobody can answer.
pub(crate) type ConfirmServer<'a> = &'a mut dyn FnMut(&ServerImport) -> Option<bool>;

impl<'a> Import<'a> {
    /// Reads the configuration at `path`, or begins a new one.
    pub(crate) fn new(path: &Path, home: &'a Path) -> Result<Self, ImportError> {
        let before = match fs::read_to_string(path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(ImportError::Read { path: path.to_owned(), source }),
        };
        let blank = before.as_ref().is_none_or(|text| text.trim().is_empty());
        let text = if blank { NEW_CONFIGURATION } else { before.as_deref().unwrap_or_default() };
        let configuration = EditedConfiguration::parse(text)
            .map_err(|reason| ImportError::Configuration { path: path.to_owned(), reason })?;
        Ok(Self { home, path: path.to_owned(), before, configuration, secrets: Vec::new(), servers: Vec::new() })
    }

    /// Adds the servers of a client's file. The servers of a project's file are added only if the file `is_named` or they
    /// are confirmed, because somebody else may have written it. A file of another user than root must be named.
    pub(crate) fn add_file(
        &mut self,
        file: &ClientFile,
        is_named: bool,
        confirm: ConfirmServer<'_>,
    ) -> Result<(), ImportError> {
        let failed = |source| ImportError::Read { path: file.path.clone(), source };
        let owner = fs::metadata(&file.path).map_err(failed)?.uid();
        if !is_named && owner != 0 && owner != nix::unistd::geteuid().as_raw() {
            return Err(ImportError::OtherOwner { path: file.path.clone(), owner });
        }
        let found = read(file, &fs::read(&file.path).map_err(failed)?)?;
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
            notes,
            ..not_imported(file, &server.name, String::new())
        };
        if let Some(id) = self.equal_installation(&draft, &secrets) {
            import.reason = Some(format!("it is in the configuration as `{id}`"));
            (import.id, import.outcome) = (Some(id), ImportOutcome::AlreadyImported);
            (import.target, import.notes) = (None, Vec::new());
            return import;
        }
        if let Err(reason) = self.check(&draft) {
            import.reason = Some(reason);
            return import;
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
        self.configuration.add(&draft, &format!("{} ({})", file.client, self.shown_path(&file.path)));
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
        let (secrets, mut notes) = move_secrets(&mut server, &id);
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
            inputs: &found.inputs,
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

    /// Checks a server as `satellite check` does. The error is the first finding.
    fn check(&self, draft: &ServerDraft) -> Result<(), String> {
        let mut sample = self.configuration.sample();
        sample.add(draft, "");
        let name = self.path.display().to_string();
        match config::parse(&name, &sample.text(), &|name| std::env::var(name).ok()) {
            Ok(_) => Ok(()),
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

    /// Returns the configuration before and after the import.
    pub(crate) fn texts(&self) -> (&str, String) {
        (self.before.as_deref().unwrap_or_default(), self.configuration.text())
    }

    /// Writes the files of secrets, and then the configuration. After an error, no file of this import remains.
    pub(crate) fn write(&self) -> Result<(), ImportError> {
        let mut written = Vec::new();
        let outcome = self.write_files(&mut written);
        if outcome.is_err() {
            for file in written {
                // The error of the write is reported.
                let _ = fs::remove_file(file);
            }
        }
        outcome
    }

    fn write_files(&self, written: &mut Vec<PathBuf>) -> Result<(), ImportError> {
        if !self.secrets.is_empty() {
            self.make_secrets_folder()?;
        }
        for secret in &self.secrets {
            let path = self.folder().join(&secret.path);
            let text = secret.text.expose();
            // The end of the last line is no part of a secret that is read.
            let end = if text.ends_with('\n') { "\n" } else { "" };
            let content = format!("{text}{end}").into_bytes();
            match fs::read(&path) {
                // An import that was killed before it wrote the configuration has left its secrets.
                Ok(existing) if existing == content => continue,
                Ok(_) => {
                    let reason = format!("`{}` has another content; remove it if nothing uses it", secret.path);
                    return Err(ImportError::SecretsFolder { path: self.folder().join(SECRETS_FOLDER), reason });
                }
                // A file that cannot be read is an error of the replacement.
                Err(_) => replace_file(&path, None, &content, 0o600)?,
            }
            written.push(path);
        }
        let before = self.before.as_ref().map(String::as_bytes);
        replace_file(&self.path, before, self.configuration.text().as_bytes(), 0o600)?;
        Ok(())
    }

    fn make_secrets_folder(&self) -> Result<(), ImportError> {
        let path = self.folder().join(SECRETS_FOLDER);
        let failed = |reason: String| ImportError::SecretsFolder { path: path.clone(), reason };
        if let Err(error) = fs::DirBuilder::new().mode(0o700).recursive(true).create(&path) {
            return Err(failed(format!("{error}; check the directory")));
        }
        let status = fs::metadata(&path).map_err(|error| failed(error.to_string()))?;
        if status.uid() != nix::unistd::geteuid().as_raw() {
            return Err(failed(format!("it belongs to the user {}; remove it", status.uid())));
        }
        if status.mode() & 0o077 != 0 {
            return Err(failed(format!("others can read it; run `chmod 700 {}`", path.display())));
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
    }
}

/// Returns the command line or the URL. Its secrets have been moved.
fn shown_target(draft: &ServerDraft) -> String {
    let words = draft.command.iter().chain(&draft.url).chain(&draft.args);
    words.map(String::as_str).collect::<Vec<_>>().join(" ")
}

fn read_secret(path: &Path) -> Option<HiddenText> {
    let text = fs::read_to_string(path).ok()?;
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
