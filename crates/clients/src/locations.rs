//! The places of the clients' configuration files on Linux.
//!
//! The home directory, the XDG directory, the project and the variables that move files are parameters: the module reads no
//! environment variable and no file. It lists directories only. pkg/client/config.go of stacklok/toolhive confirms most user
//! paths.

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
    /// The directories and files that environment variables name.
    pub variables: ClientVariables,
}

/// The environment variables by which users move the files of a client. `None`: the variable is not set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientVariables {
    /// `CLAUDE_CONFIG_DIR`: directory of `.claude.json` (code.claude.com/docs/en/settings, "Environment variables").
    pub claude_config_dir: Option<PathBuf>,
    /// `CLINE_MCP_SETTINGS_PATH`: file with the servers (cline/cline sdk/packages/shared/src/storage/paths.ts).
    pub cline_mcp_settings_path: Option<PathBuf>,
    /// `CLINE_DATA_DIR`: directory in place of `~/.cline/data` (same source).
    pub cline_data_dir: Option<PathBuf>,
    /// `CLINE_DIR`: directory in place of `~/.cline` (same source).
    pub cline_dir: Option<PathBuf>,
    /// `CODEX_HOME`: directory in place of `~/.codex` (openai/codex docs/config.md).
    pub codex_home: Option<PathBuf>,
    /// `CONTINUE_GLOBAL_DIR`: directory in place of `~/.continue` (continuedev/continue core/util/paths.ts).
    pub continue_global_dir: Option<PathBuf>,
    /// `GEMINI_CLI_HOME`: home directory of Gemini CLI (google-gemini/gemini-cli packages/core/src/utils/paths.ts).
    pub gemini_cli_home: Option<PathBuf>,
    /// `GOOSE_PATH_ROOT`: directory of `config/config.yaml` (block/goose crates/goose/src/config/paths.rs).
    pub goose_path_root: Option<PathBuf>,
    /// `OPENCODE_CONFIG`: file that opencode reads after the user's own (opencode.ai/docs/config, "Custom path").
    pub opencode_config: Option<PathBuf>,
    /// `OPENCODE_CONFIG_DIR`: directory that opencode reads after the user's own (opencode.ai/docs/config, "Custom
    /// directory").
    pub opencode_config_dir: Option<PathBuf>,
}

impl ClientVariables {
    /// Reads the variables by `path_of`, which returns the value of an environment variable if it is an absolute path: the
    /// clients and the satellite have different working directories.
    pub fn read(path_of: impl Fn(&str) -> Option<PathBuf>) -> Self {
        Self {
            claude_config_dir: path_of("CLAUDE_CONFIG_DIR"),
            cline_mcp_settings_path: path_of("CLINE_MCP_SETTINGS_PATH"),
            cline_data_dir: path_of("CLINE_DATA_DIR"),
            cline_dir: path_of("CLINE_DIR"),
            codex_home: path_of("CODEX_HOME"),
            continue_global_dir: path_of("CONTINUE_GLOBAL_DIR"),
            gemini_cli_home: path_of("GEMINI_CLI_HOME"),
            goose_path_root: path_of("GOOSE_PATH_ROOT"),
            opencode_config: path_of("OPENCODE_CONFIG"),
            opencode_config_dir: path_of("OPENCODE_CONFIG_DIR"),
        }
    }
}

impl Machine {
    /// Returns the file with Claude Code's user scope.
    pub(crate) fn claude_json(&self) -> PathBuf {
        self.variables.claude_config_dir.as_ref().unwrap_or(&self.home).join(".claude.json")
    }

    /// Returns the file of Cline's command line and SDK.
    pub(crate) fn cline_settings(&self) -> PathBuf {
        let ClientVariables { cline_mcp_settings_path, cline_data_dir, cline_dir, .. } = &self.variables;
        cline_mcp_settings_path.clone().unwrap_or_else(|| {
            let data = cline_data_dir
                .clone()
                .unwrap_or_else(|| cline_dir.clone().unwrap_or_else(|| self.home.join(".cline")).join("data"));
            data.join("settings/cline_mcp_settings.json")
        })
    }

    /// Returns the directory of Codex.
    pub(crate) fn codex_dir(&self) -> PathBuf {
        self.variables.codex_home.clone().unwrap_or_else(|| self.home.join(".codex"))
    }

    /// Returns the directory of Continue.
    pub fn continue_dir(&self) -> PathBuf {
        self.variables.continue_global_dir.clone().unwrap_or_else(|| self.home.join(".continue"))
    }

    /// Returns the user's settings of Gemini CLI.
    pub(crate) fn gemini_settings(&self) -> PathBuf {
        self.variables.gemini_cli_home.as_ref().unwrap_or(&self.home).join(".gemini/settings.json")
    }

    /// Returns the configuration of Goose.
    pub(crate) fn goose_configuration(&self) -> PathBuf {
        match &self.variables.goose_path_root {
            Some(root) => root.join("config/config.yaml"),
            None => self.config_home.join("goose/config.yaml"),
        }
    }

    /// Returns the settings of Zed, and those of its Flatpak (zed-industries/zed crates/paths/src/paths.rs).
    pub(crate) fn zed_settings(&self) -> [PathBuf; 2] {
        let flatpak = self.home.join(".var/app/dev.zed.Zed/config/zed/settings.json");
        [self.config_home.join("zed/settings.json"), flatpak]
    }

    /// Returns the file of Devin Desktop, the name of Windsurf since June 2026, and the one of Windsurf
    /// (dyoshikawa/rulesync src/features/mcp/devin-mcp.ts; docs.windsurf.com/windsurf/cascade/mcp).
    pub(crate) fn windsurf_files(&self) -> [PathBuf; 2] {
        [self.config_home.join("devin/mcp_config.json"), self.home.join(".codeium/windsurf/mcp_config.json")]
    }
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
            (_, "mcp_config.json" | "mcp_config.local.json") => Client::Windsurf,
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

/// The files of Amazon Q's IDE plugins below their directory, the current one first.
const AMAZON_Q_IDE: [&str; 3] = ["agents/default.json", "personas/default.json", "default.json"];

/// Maximum depth of the subdirectories in a directory of servers, against links that form a circle.
const TREE_DEPTH_MAX: usize = 8;

struct FileList<'a> {
    machine: &'a Machine,
    files: Vec<ClientFile>,
}

impl FileList<'_> {
    fn add_client(&mut self, client: Client) {
        match client {
            // code.claude.com/docs/en/mcp, "MCP installation scopes": user and local scope are in ~/.claude.json.
            Client::ClaudeCode => {
                self.user(client, self.machine.claude_json());
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
            // Also docs.windsurf.com/plugins/cascade/mcp (JetBrains).
            Client::Windsurf => {
                for path in self.machine.windsurf_files() {
                    self.user(client, path);
                }
                self.home(client, ".codeium/windsurf-next/mcp_config.json");
                self.home(client, ".codeium/mcp_config.json");
                self.project(client, ".devin/mcp_config.json");
                self.project(client, ".devin/mcp_config.local.json");
            }
            // docs.cline.bot/mcp: an extension of VS Code, and the CLI of Cline. The oldest versions kept their servers in
            // the user's documents (cline/cline src/core/storage/disk.ts, `ensureMcpServersDirectoryExists`).
            Client::Cline => {
                self.extension(client, "saoudrizwan.claude-dev/settings/cline_mcp_settings.json");
                self.user(client, self.machine.cline_settings());
                self.home(client, "Documents/Cline/MCP/cline_mcp_settings.json");
            }
            // RooCodeInc/Roo-Code, src/services/mcp/McpHub.ts and src/shared/globalFileNames.ts.
            Client::RooCode => {
                self.extension(client, "rooveterinaryinc.roo-cline/settings/mcp_settings.json");
                self.extension(client, "rooveterinaryinc.roo-cline/settings/cline_mcp_settings.json");
                self.project(client, ".roo/mcp.json");
            }
            // docs.continue.dev/reference and docs.continue.dev/customize/deep-dives/mcp. The directories of servers are
            // read with their subdirectories (continuedev/continue core/config/loadLocalAssistants.ts).
            Client::Continue => {
                let user = self.machine.continue_dir();
                for name in ["config.yaml", "config.yml", "config.json"] {
                    self.user(client, user.join(name));
                }
                self.tree(client, &user.join("mcpServers"), &ClientScope::User, TREE_DEPTH_MAX);
                if let Some(project) = &self.machine.project {
                    let servers = project.join(".continue/mcpServers");
                    self.tree(client, &servers, &ClientScope::Project, TREE_DEPTH_MAX);
                }
            }
            // zed.dev/docs/ai/mcp and zed.dev/docs/configuring-zed.
            Client::Zed => {
                for path in self.machine.zed_settings() {
                    self.user(client, path);
                }
                self.project(client, ".zed/settings.json");
            }
            // developers.openai.com/codex/mcp; `--profile NAME` adds ~/.codex/NAME.config.toml.
            Client::Codex => {
                let directory = self.machine.codex_dir();
                self.user(client, directory.join("config.toml"));
                self.directory(client, &directory, &ClientScope::User, ".config.toml");
                self.project(client, ".codex/config.toml");
            }
            // google-gemini/gemini-cli, docs/tools/mcp-server.md.
            Client::GeminiCli => {
                self.user(client, self.machine.gemini_settings());
                self.project(client, ".gemini/settings.json");
            }
            // block/goose, documentation/docs/guides/config-files.md.
            Client::Goose => self.user(client, self.machine.goose_configuration()),
            // opencode.ai/docs/config, "Locations".
            Client::OpenCode => {
                for name in ["opencode.json", "opencode.jsonc", "config.json"] {
                    self.config(client, &format!("opencode/{name}"));
                }
                if let Some(file) = &self.machine.variables.opencode_config {
                    self.user(client, file.clone());
                }
                if let Some(directory) = &self.machine.variables.opencode_config_dir {
                    self.user(client, directory.join("opencode.json"));
                    self.user(client, directory.join("opencode.jsonc"));
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
            // aws/amazon-q-developer-cli, crates/chat-cli/src/util/paths.rs; default.json is the file of the IDE plugins
            // (aws/language-servers, server/aws-lsp-codewhisperer/src/language-server/agenticChat/tools/mcp/mcpUtils.ts),
            // which older plugins kept in `personas`.
            Client::AmazonQ => {
                self.home(client, ".aws/amazonq/mcp.json");
                for name in AMAZON_Q_IDE {
                    self.home(client, &format!(".aws/amazonq/{name}"));
                }
                let agents = self.machine.home.join(".aws/amazonq/cli-agents");
                self.directory(client, &agents, &ClientScope::User, ".json");
                self.project(client, ".amazonq/mcp.json");
                for name in AMAZON_Q_IDE {
                    self.project(client, &format!(".amazonq/{name}"));
                }
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

    fn user(&mut self, client: Client, path: PathBuf) {
        self.push(client, ClientScope::User, path, false);
    }

    fn home(&mut self, client: Client, path: &str) {
        self.user(client, self.machine.home.join(path));
    }

    fn config(&mut self, client: Client, path: &str) {
        self.user(client, self.machine.config_home.join(path));
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

    /// The files of a directory and of its subdirectories.
    fn tree(&mut self, client: Client, directory: &Path, scope: &ClientScope, depth: usize) {
        self.directory(client, directory, scope, "");
        for path in entries(directory) {
            if depth > 0 && path.is_dir() {
                self.tree(client, &path, scope, depth - 1);
            }
        }
    }

    fn push(&mut self, client: Client, scope: ClientScope, path: PathBuf, from_project: bool) {
        // All paths of this module have a known extension, except those of variables.
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
