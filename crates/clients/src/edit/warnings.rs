//! The reasons why an entry over HTTP may not work in a client's file.

use std::path::Path;

use super::ClientConfig;
use super::entry::EntryForm;
use super::error::EditError;
use crate::Client;

/// Returns the reasons why an entry of this kind may not work in `file` at `path`, as sentences for the user. A missing file
/// is `None`. An error means that the client never replaces the reference in that file.
pub fn entry_warnings(
    client: Client,
    path: &Path,
    file: Option<&[u8]>,
    form: EntryForm,
) -> Result<Vec<&'static str>, EditError> {
    if form == EntryForm::Stdio {
        return Ok(Vec::new());
    }
    let directory = path.parent().and_then(Path::file_name).unwrap_or_default();
    Ok(match client {
        // dyoshikawa/rulesync src/features/mcp/devin-mcp.ts: nothing documents variables in the files of Devin Desktop.
        Client::Windsurf if directory == "devin" || directory == ".devin" => {
            return Err(EditError::UnsupportedForm { client, form });
        }
        // cline/cline apps/vscode/src/utils/envExpansion.ts; the SDK has no such function.
        Client::Cline => vec![
            "only Cline's extension for VS Code replaces `${env:…}`; its command line sends the text as it is, so connect \
             it without --http",
        ],
        // aws/language-servers mcpUtils.ts passes headers on as they are.
        Client::AmazonQ => vec![
            "only the command line of Amazon Q replaces `${env:…}`; its IDE plugins send the text as it is, so connect \
             them without --http",
        ],
        // google-gemini/gemini-cli packages/core/src/services/environmentSanitization.ts: names with TOKEN.
        Client::GeminiCli => vec![
            "Gemini CLI hides variables with TOKEN in their name if they come from its .env file; set the variable in the \
             environment of its process",
        ],
        Client::OpenCode if !has_schema(file) => vec![
            "older versions of opencode write a file without `$schema` again, and the token in clear text into it; add \
             \"$schema\": \"https://opencode.ai/config.json\" to the file, or connect without --http",
        ],
        _ => Vec::new(),
    })
}

/// Returns true for a configuration of opencode with `$schema`, and for one that connect creates with it.
fn has_schema(file: Option<&[u8]>) -> bool {
    ClientConfig::read(Client::OpenCode, file).is_ok_and(|config| config.tree.get("$schema").is_some())
}
