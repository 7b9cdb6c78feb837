//! The supported clients.

/// An MCP client whose configuration can be imported and edited.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    strum::EnumIter,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::Display,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Client {
    /// Claude Code of Anthropic.
    ClaudeCode,
    /// Claude Desktop of Anthropic.
    ClaudeDesktop,
    /// The editor Cursor.
    Cursor,
    /// Visual Studio Code.
    #[strum(serialize = "vscode")]
    VsCode,
    /// The editor Windsurf.
    Windsurf,
    /// The VS Code extension Cline.
    Cline,
    /// The VS Code extension Roo Code.
    RooCode,
    /// The extension Continue.
    Continue,
    /// The editor Zed.
    Zed,
    /// Codex of `OpenAI`.
    Codex,
    /// Gemini CLI of Google.
    #[strum(serialize = "gemini")]
    GeminiCli,
    /// Goose of Block.
    Goose,
    /// The client opencode.
    #[strum(serialize = "opencode")]
    OpenCode,
    /// LM Studio.
    #[strum(serialize = "lmstudio")]
    LmStudio,
    /// Amazon Q Developer CLI.
    AmazonQ,
    /// Junie of `JetBrains`.
    Junie,
}
