//! The places of the clients' configuration files on Linux.
//!
//! The home directory, the XDG directory and the project are parameters: the module reads no environment variable and no
//! file. It lists directories only. pkg/client/config.go of stacklok/toolhive confirms most user paths.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::Client;

/// The directories in which the clients keep their files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// The user's home directory.
    pub home: PathBuf,
    /// `$XDG_CONFIG_HOME`, or `~/.config`.
    pub config_home: PathBuf,
    /// The root of the current project, if there is one.
    pub project: Option<PathBuf>,
}

/// A configuration file of a client.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientFile {
    /// The client that reads the file.
    pub client: Client,
    /// The scope of the servers in the file.
    pub scope: ClientScope,
    /// The path of the file.
    pub path: PathBuf,
    /// The format of the file.
    pub format: FileFormat,
    /// True if the file belongs to a project, so that somebody else may have written it.
    pub from_project: bool,
}

/// The scope of a server in its client.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ClientScope {
    /// All projects of the user.
    User,
    /// One project, in a file of the project.
    Project,
    /// One project, in the user's own file (Claude Code).
    Local(PathBuf),
    /// One profile of the client. The name is the directory (VS Code), agent (Amazon Q) or profile (Codex).
    Profile(String),
}

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, strum::Display)]
pub enum FileFormat {
    /// JSON with comments and trailing commas.
    #[strum(to_string = "JSON")]
    Json,
    /// The format TOML.
    #[strum(to_string = "TOML")]
    Toml,
    /// The format YAML.
    #[strum(to_string = "YAML")]
    Yaml,
}

impl FileFormat {
    /// Returns the format by the extension of the path, or `None` for other extensions.
    pub fn from_path(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "json" | "jsonc" => Some(Self::Json),
            "toml" => Some(Self::Toml),
            "yaml" | "yml" => Some(Self::Yaml),
            _ => None,
        }
    }
}

impl ClientFile {
    /// Describes a file that is named by the user and belongs to `client`. The path decides the format; a path without a
    /// known extension has the client's own format.
    pub fn named(client: Client, path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let format = FileFormat::from_path(&path).unwrap_or(match client {
            Client::Codex => FileFormat::Toml,
            Client::Continue | Client::Goose => FileFormat::Yaml,
            _ => FileFormat::Json,
        });
        Self { client, scope: ClientScope::Project, path, format, from_project: true }
    }

    /// Guesses the client of a file that is at none of the known places by its name and its directory. A file of unknown
    /// origin counts as one of Claude Code, whose format most clients share. `None` means that the extension is unknown.
    pub fn guess(path: impl Into<PathBuf>) -> Option<Self> {
        let path = path.into();
        let format = FileFormat::from_path(&path)?;
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let within = |directory: &str| path.components().any(|part| part.as_os_str() == directory);
        let client = match (format, name) {
            (FileFormat::Toml, _) => Client::Codex,
            (FileFormat::Yaml, _) if within("goose") => Client::Goose,
            (FileFormat::Yaml, _) => Client::Continue,
            (_, "claude_desktop_config.json") => Client::ClaudeDesktop,
            (_, "cline_mcp_settings.json") => Client::Cline,
            (_, "mcp_settings.json") => Client::RooCode,
            (_, "mcp_config.json") => Client::Windsurf,
            (_, "opencode.json" | "opencode.jsonc") => Client::OpenCode,
            _ if within(".cursor") => Client::Cursor,
            _ if within(".vscode") || within("Code") => Client::VsCode,
            _ if within(".roo") => Client::RooCode,
            _ if within(".continue") => Client::Continue,
            _ if within(".zed") || within("zed") => Client::Zed,
            _ if within(".gemini") => Client::GeminiCli,
            _ if within(".lmstudio") => Client::LmStudio,
            _ if within(".amazonq") || within("amazonq") => Client::AmazonQ,
            _ if within(".junie") => Client::Junie,
            _ => Client::ClaudeCode,
        };
        Some(Self::named(client, path))
    }
}

/// Describes the file at `path`: one of the known files, or by [`ClientFile::guess`]. `None` means that the extension is
/// unknown.
pub fn describe_file(machine: &Machine, path: &Path) -> Option<ClientFile> {
    let known = candidate_files(machine).into_iter().find(|file| file.path == path);
    known.or_else(|| ClientFile::guess(path))
}

/// Lists the configuration files that exist. Links are followed; directories are left out.
pub fn existing_files(machine: &Machine) -> Vec<ClientFile> {
    candidate_files(machine).into_iter().filter(|file| file.path.is_file()).collect()
}

/// Lists all paths at which the clients look for their configuration, in the order of [`Client`]. Patterns such as
/// `profiles/*/mcp.json` contribute the files that exist.
pub fn candidate_files(machine: &Machine) -> Vec<ClientFile> {
    let mut files = FileList { machine, files: Vec::new() };
    for client in <Client as strum::IntoEnumIterator>::iter() {
        files.add_client(client);
    }
    files.files
}

/// VS Code and the editors derived from it, as directories of the XDG directory.
const EDITORS: [&str; 4] = ["Code", "Code - Insiders", "VSCodium", "Code - OSS"];

struct FileList<'a> {
    machine: &'a Machine,
    files: Vec<ClientFile>,
}

impl FileList<'_> {
    fn add_client(&mut self, client: Client) {
        match client {
            // code.claude.com/docs/en/mcp, "MCP installation scopes": user and local scope are in ~/.claude.json.
            Client::ClaudeCode => {
                self.home(client, ".claude.json");
                self.project(client, ".mcp.json");
            }
            // modelcontextprotocol.io/docs/develop/connect-local-servers; on Linux below the XDG directory of Electron.
            Client::ClaudeDesktop => self.config(client, "Claude/claude_desktop_config.json"),
            // cursor.com/docs/context/mcp, "Configuration locations".
            Client::Cursor => {
                self.home(client, ".cursor/mcp.json");
                self.project(client, ".cursor/mcp.json");
            }
            // code.visualstudio.com/docs/copilot/reference/mcp-configuration: user profile and workspace.
            Client::VsCode => {
                for editor in EDITORS {
                    let user = self.machine.config_home.join(editor).join("User");
                    self.vscode_user(&user);
                }
                // pkg/client/config.go of stacklok/toolhive, `VSCodeServer`.
                let server = self.machine.home.join(".vscode-server/data/User");
                self.vscode_user(&server);
                self.project(client, ".vscode/mcp.json");
            }
            // docs.windsurf.com/windsurf/cascade/mcp and docs.windsurf.com/plugins/cascade/mcp (JetBrains).
            Client::Windsurf => {
                self.home(client, ".codeium/windsurf/mcp_config.json");
                self.home(client, ".codeium/windsurf-next/mcp_config.json");
                self.home(client, ".codeium/mcp_config.json");
            }
            // docs.cline.bot/mcp: an extension of VS Code, and the CLI of Cline.
            Client::Cline => {
                self.extension(client, "saoudrizwan.claude-dev/settings/cline_mcp_settings.json");
                self.home(client, ".cline/data/settings/cline_mcp_settings.json");
            }
            // RooCodeInc/Roo-Code, src/services/mcp/McpHub.ts and src/shared/globalFileNames.ts.
            Client::RooCode => {
                self.extension(client, "rooveterinaryinc.roo-cline/settings/mcp_settings.json");
                self.extension(client, "rooveterinaryinc.roo-cline/settings/cline_mcp_settings.json");
                self.project(client, ".roo/mcp.json");
            }
            // docs.continue.dev/reference and docs.continue.dev/customize/deep-dives/mcp.
            Client::Continue => {
                for name in ["config.yaml", "config.yml", "config.json"] {
                    self.home(client, &format!(".continue/{name}"));
                }
                let user = self.machine.home.join(".continue/mcpServers");
                self.directory(client, &user, &ClientScope::User, "");
                if let Some(project) = &self.machine.project {
                    let servers = project.join(".continue/mcpServers");
                    self.directory(client, &servers, &ClientScope::Project, "");
                }
            }
            // zed.dev/docs/ai/mcp and zed.dev/docs/configuring-zed.
            Client::Zed => {
                self.config(client, "zed/settings.json");
                self.project(client, ".zed/settings.json");
            }
            // developers.openai.com/codex/mcp; `--profile NAME` adds ~/.codex/NAME.config.toml.
            Client::Codex => {
                self.home(client, ".codex/config.toml");
                let directory = self.machine.home.join(".codex");
                self.directory(client, &directory, &ClientScope::User, ".config.toml");
                self.project(client, ".codex/config.toml");
            }
            // google-gemini/gemini-cli, docs/tools/mcp-server.md.
            Client::GeminiCli => {
                self.home(client, ".gemini/settings.json");
                self.project(client, ".gemini/settings.json");
            }
            // block/goose, documentation/docs/guides/config-files.md.
            Client::Goose => self.config(client, "goose/config.yaml"),
            // opencode.ai/docs/config, "Locations".
            Client::OpenCode => {
                for name in ["opencode.json", "opencode.jsonc", "config.json"] {
                    self.config(client, &format!("opencode/{name}"));
                }
                for name in ["opencode.json", "opencode.jsonc", ".opencode/opencode.json", ".opencode/opencode.jsonc"] {
                    self.project(client, name);
                }
            }
            // lmstudio.ai/docs/app/mcp; older versions had their data in ~/.cache/lm-studio.
            Client::LmStudio => {
                self.home(client, ".lmstudio/mcp.json");
                self.home(client, ".cache/lm-studio/mcp.json");
            }
            // aws/amazon-q-developer-cli, crates/chat-cli/src/util/paths.rs; default.json is the file of the IDE plugins.
            Client::AmazonQ => {
                self.home(client, ".aws/amazonq/mcp.json");
                self.home(client, ".aws/amazonq/default.json");
                let agents = self.machine.home.join(".aws/amazonq/cli-agents");
                self.directory(client, &agents, &ClientScope::User, ".json");
                self.project(client, ".amazonq/mcp.json");
                self.project(client, ".amazonq/default.json");
                if let Some(project) = &self.machine.project {
                    let agents = project.join(".amazonq/cli-agents");
                    self.directory(client, &agents, &ClientScope::Project, ".json");
                }
            }
            // junie.jetbrains.com/docs, "MCP": user and project level.
            Client::Junie => {
                self.home(client, ".junie/mcp/mcp.json");
                self.project(client, ".junie/mcp/mcp.json");
            }
        }
    }

    fn home(&mut self, client: Client, path: &str) {
        self.push(client, ClientScope::User, self.machine.home.join(path), false);
    }

    fn config(&mut self, client: Client, path: &str) {
        self.push(client, ClientScope::User, self.machine.config_home.join(path), false);
    }

    fn project(&mut self, client: Client, path: &str) {
        if let Some(project) = &self.machine.project {
            self.push(client, ClientScope::Project, project.join(path), true);
        }
    }

    /// A file in the storage of an extension of VS Code or of an editor derived from it.
    fn extension(&mut self, client: Client, path: &str) {
        for editor in EDITORS.into_iter().chain(["Cursor", "Windsurf"]) {
            self.config(client, &format!("{editor}/User/globalStorage/{path}"));
        }
        self.home(client, &format!(".vscode-server/data/User/globalStorage/{path}"));
    }

    fn vscode_user(&mut self, user: &Path) {
        self.push(Client::VsCode, ClientScope::User, user.join("mcp.json"), false);
        for profile in entries(&user.join("profiles")) {
            let name = profile.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = profile.join("mcp.json");
            if path.is_file() {
                self.push(Client::VsCode, ClientScope::Profile(name), path, false);
            }
        }
    }

    /// The files of a directory whose name ends in `ending`. In the user's scope, the rest of the name is the profile.
    fn directory(&mut self, client: Client, directory: &Path, scope: &ClientScope, ending: &str) {
        for path in entries(directory) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let Some(stem) = name.strip_suffix(ending).filter(|stem| !stem.is_empty()) else { continue };
            if FileFormat::from_path(&path).is_none() || !path.is_file() {
                continue;
            }
            let scope = match scope {
                ClientScope::User if !ending.is_empty() => ClientScope::Profile(stem.to_owned()),
                scope => scope.clone(),
            };
            let from_project = scope == ClientScope::Project;
            self.push(client, scope, path, from_project);
        }
    }

    fn push(&mut self, client: Client, scope: ClientScope, path: PathBuf, from_project: bool) {
        // All paths of this module have a known extension.
        let format = FileFormat::from_path(&path).unwrap_or(FileFormat::Json);
        // The home directory can be the project.
        if !self.files.iter().any(|file| file.client == client && file.path == path) {
            self.files.push(ClientFile { client, scope, path, format, from_project });
        }
    }
}

/// The entries of a directory, sorted; none if the directory cannot be listed.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}
