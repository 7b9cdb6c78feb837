//! Edits of realistic files of each client, of random files, and of broken files.

use std::{fmt::Write, path::Path};

use proptest::{collection::vec, option, prelude::*, sample::select};
use strum::IntoEnumIterator;

use super::*;
use crate::locations::{ClientVariables, Machine};
use crate::node::{self, NodeKey};

const BRIDGE: &str = "/usr/local/bin/satellite";
const URL: &str = "http://127.0.0.1:7400/mcp";

fn bridge() -> SatelliteEntry {
    SatelliteEntry::bridge(BRIDGE)
}

/// A realistic file of each client.
fn fixture(client: Client) -> &'static str {
    match client {
        Client::ClaudeCode => include_str!("../../tests/edit/claude-code.json"),
        Client::ClaudeDesktop => include_str!("../../tests/edit/claude-desktop.json"),
        Client::Cursor => include_str!("../../tests/edit/cursor.json"),
        Client::VsCode => include_str!("../../tests/edit/vscode.json"),
        Client::Windsurf => include_str!("../../tests/edit/windsurf.json"),
        Client::Cline => include_str!("../../tests/edit/cline.json"),
        Client::RooCode => include_str!("../../tests/edit/roo-code.json"),
        Client::Continue => include_str!("../../tests/edit/continue.yaml"),
        Client::Zed => include_str!("../../tests/edit/zed.json"),
        Client::Codex => include_str!("../../tests/edit/codex.toml"),
        Client::GeminiCli => include_str!("../../tests/edit/gemini.json"),
        Client::Goose => include_str!("../../tests/edit/goose.yaml"),
        Client::OpenCode => include_str!("../../tests/edit/opencode.json"),
        Client::LmStudio => include_str!("../../tests/edit/lmstudio.json"),
        Client::AmazonQ => include_str!("../../tests/edit/amazon-q.json"),
        Client::Junie => include_str!("../../tests/edit/junie.json"),
    }
}

fn names_in(client: Client, file: &[u8]) -> Vec<String> {
    server_names(client, Some(file)).unwrap()
}

/// The value of a file, for comparison.
fn value(client: Client, file: &[u8]) -> ConfigNode {
    let config = ClientConfig::read(client, Some(file)).unwrap();
    comparable(config.tree, config.section)
}

fn without_whitespace(text: &[u8]) -> Vec<u8> {
    text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect()
}

/// Whether `text` contains all bytes of `part` in their order.
fn contains_in_order(text: &[u8], part: &[u8]) -> bool {
    let mut text = text.iter();
    part.iter().all(|byte| text.any(|other| other == byte))
}

/// Whether a line of the text ends with `\n` instead of `\r\n`.
fn has_bare_newline(text: &[u8]) -> bool {
    text.split_inclusive(|byte| *byte == b'\n').any(|line| line.ends_with(b"\n") && !line.ends_with(b"\r\n"))
}

fn connected(client: Client, before: &[u8], replaced: &[&str]) -> (Vec<u8>, ConnectRecord) {
    let after = replace_servers(client, Some(before), &bridge(), replaced).unwrap();
    let replaced = replaced.iter().map(|name| (*name).to_owned()).collect();
    let record =
        ConnectRecord::new(client, "f".into(), &bridge(), Some(("backup".to_owned(), before)), &after, replaced);
    (after, record)
}

fn all_entries(client: Client) -> Vec<SatelliteEntry> {
    let http = |token| SatelliteEntry::Http { url: URL.to_owned(), token };
    let entry = |form: &EntryForm| match form {
        EntryForm::Stdio => bridge(),
        EntryForm::HttpEnvironment => http(TokenReference::Environment(TOKEN_VARIABLE.to_owned())),
        EntryForm::HttpFile => http(TokenReference::File("/home/ann/.local/share/satellite/token".to_owned())),
    };
    supported_forms(client).iter().map(entry).collect()
}

#[test]
fn each_supported_entry_is_added_found_and_removed() {
    for client in Client::iter() {
        let before = fixture(client).as_bytes();
        for entry in all_entries(client) {
            let after = add_entry(client, Some(before), &entry).unwrap();
            assert_eq!(
                entry_state(client, Some(&after), None),
                Ok(EntryState::Connected { form: entry.form() }),
                "{client}"
            );
            assert_eq!(
                add_entry(client, Some(&after), &entry).unwrap(),
                after,
                "{client}: a second connect changes nothing"
            );
            let bridge_instead = add_entry(client, Some(&after), &bridge()).unwrap();
            assert_eq!(value(client, &bridge_instead), value(client, &connected(client, before, &[]).0), "{client}");
            let removed = remove_entry(client, &after, None).unwrap();
            assert_eq!(value(client, &removed), value(client, before), "{client}");
            assert_eq!(entry_state(client, Some(&removed), None), Ok(EntryState::NotConnected));
            if !matches!(client, Client::GeminiCli | Client::RooCode) {
                // Gemini's file has no servers, and the servers of Roo Code are an object on two lines.
                assert_eq!(removed, before, "{client}");
            }
        }
    }
}

#[test]
fn a_missing_or_empty_file_becomes_a_new_one() {
    for client in Client::iter() {
        let after = add_entry(client, None, &bridge()).unwrap();
        for empty in ["", "\n", "\u{feff}"] {
            let after = add_entry(client, Some(empty.as_bytes()), &bridge()).unwrap();
            assert_eq!(names_in(client, &after), [ENTRY_NAME], "{client}");
        }
        let record = ConnectRecord::new(client, "f".into(), &bridge(), None, &after, Vec::new());
        assert_eq!(disconnect(&record, Some(&after), None), Ok(Undo::Delete));
        assert_eq!(disconnect(&record, None, None), Ok(Undo::NothingToDo));
    }
    let text = String::from_utf8(add_entry(Client::Continue, None, &bridge()).unwrap()).unwrap();
    assert_eq!(
        text,
        "name: satellite\nversion: 0.0.1\nschema: v1\nmcpServers:\n  - name: satellite\n    type: stdio\n    \
         command: /usr/local/bin/satellite\n    args:\n      - stdio\n"
    );
}

#[test]
fn the_first_path_is_the_one_of_the_current_version() {
    let machine = Machine {
        home: "/h".into(),
        config_home: "/h/.config".into(),
        project: None,
        variables: ClientVariables::default(),
    };
    let paths = |client| connect_paths(client, &machine);
    for client in Client::iter() {
        assert!(paths(client).iter().all(|path| path.starts_with("/h")), "{client}");
    }
    for (client, current, older) in [
        (Client::VsCode, ".config/Code/User/mcp.json", None),
        (Client::Windsurf, ".config/devin/mcp_config.json", Some(".codeium/windsurf/mcp_config.json")),
        (
            Client::Cline,
            ".cline/data/settings/cline_mcp_settings.json",
            Some(".config/Code/User/globalStorage/saoudrizwan.claude-dev/settings/cline_mcp_settings.json"),
        ),
        (Client::Zed, ".config/zed/settings.json", Some(".var/app/dev.zed.Zed/config/zed/settings.json")),
        (Client::OpenCode, ".config/opencode/opencode.json", Some(".config/opencode/opencode.jsonc")),
    ] {
        let expected: Vec<_> = std::iter::once(current).chain(older).map(|path| Path::new("/h").join(path)).collect();
        assert_eq!(paths(client), expected, "{client}");
    }
}

#[test]
fn the_token_is_only_referred_to() {
    for client in Client::iter() {
        for entry in all_entries(client) {
            let text = String::from_utf8(add_entry(client, None, &entry).unwrap()).unwrap();
            match entry.form() {
                EntryForm::Stdio => assert!(text.contains(BRIDGE) && !text.contains("Authorization"), "{text}"),
                EntryForm::HttpEnvironment => assert!(text.contains(TOKEN_VARIABLE), "{text}"),
                EntryForm::HttpFile => assert!(text.contains("file:/home/ann/.local/share/satellite/token}"), "{text}"),
            }
        }
    }
    let environment = |name: &str| TokenReference::Environment(name.to_owned());
    for (url, token) in [
        ("http://127.0.0.1:7400/mcp?token=abc", environment(TOKEN_VARIABLE)),
        ("http://user:abc@127.0.0.1:7400/mcp", environment(TOKEN_VARIABLE)),
        (URL, environment("eyJhbGciOi.J9")),
        (URL, environment("")),
    ] {
        let entry = SatelliteEntry::Http { url: url.to_owned(), token };
        assert!(matches!(add_entry(Client::Cursor, None, &entry), Err(EditError::InvalidEntry { .. })), "{url}");
    }
    for command in ["satellite", "./satellite", "/usr/bin/node"] {
        let entry = SatelliteEntry::bridge(command);
        assert!(matches!(add_entry(Client::Cursor, None, &entry), Err(EditError::InvalidEntry { .. })), "{command}");
    }
}

#[test]
fn an_http_entry_needs_a_client_that_supports_the_reference() {
    let entry =
        SatelliteEntry::Http { url: URL.to_owned(), token: TokenReference::Environment(TOKEN_VARIABLE.to_owned()) };
    for client in [Client::ClaudeDesktop, Client::Zed, Client::LmStudio, Client::Junie] {
        let error = add_entry(client, None, &entry).unwrap_err();
        assert_eq!(error, EditError::UnsupportedForm { client, form: EntryForm::HttpEnvironment });
    }
}

#[test]
fn an_entry_of_somebody_else_is_never_changed() {
    let foreign = br#"{ "mcpServers": { "satellite": { "command": "node", "args": ["orbit.js"] } } }"#;
    let error = Err(EditError::ForeignEntry { key: "mcpServers" });
    assert_eq!(add_entry(Client::Cursor, Some(foreign), &bridge()), error);
    assert_eq!(remove_entry(Client::Cursor, foreign, None), error);
    assert_eq!(entry_state(Client::Cursor, Some(foreign), None), Ok(EntryState::ForeignEntry));
    let replaced = replace_servers(Client::Cursor, Some(foreign), &bridge(), &["satellite"]).unwrap();
    assert_eq!(
        entry_state(Client::Cursor, Some(&replaced), None),
        Ok(EntryState::Connected { form: EntryForm::Stdio })
    );
    let moved = br#"{ "mcpServers": { "satellite": { "url": "http://127.0.0.1:7400/mcp" } } }"#;
    let entry = &all_entries(Client::Cursor)[1];
    assert!(add_entry(Client::Cursor, Some(moved), entry).is_ok(), "an entry with the same URL is ours");
    assert_eq!(add_entry(Client::Cursor, Some(moved), &bridge()), error);
}

#[test]
fn options_that_the_client_added_to_our_entry_remain() {
    let before = br#"{"mcpServers": {"satellite": {"type": "stdio", "command": "/old/satellite", "args": ["stdio"],
        "disabled": true, "autoApprove": ["search"], "timeout": 600}}}"#;
    let after = add_entry(Client::Cline, Some(before), &bridge()).unwrap();
    let config = ClientConfig::read(Client::Cline, Some(&after)).unwrap();
    let entry = config.server(ENTRY_NAME).unwrap().unwrap();
    assert_eq!(entry.get("autoApprove"), Some(&ConfigNode::List(vec![node::text("search")])));
    assert_eq!(entry.get("timeout"), Some(&ConfigNode::Literal("600".to_owned())));
    assert_eq!(entry.get("disabled"), Some(&ConfigNode::Bool(false)));
    assert_eq!(entry.get("command"), Some(&node::text(BRIDGE)));
}

#[test]
fn replaced_servers_return_even_if_the_file_was_changed() {
    for client in Client::iter() {
        let before = fixture(client).as_bytes();
        let names = names_in(client, before);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (after, record) = connected(client, before, &names);
        assert_eq!(names_in(client, &after), [ENTRY_NAME], "{client}");
        assert_eq!(disconnect(&record, Some(&after), Some(before)), Ok(Undo::Restore(before.to_vec())));
        let changed = [&after[..], b"\n"].concat();
        let undo = disconnect(&record, Some(&changed), Some(before)).unwrap();
        let Undo::RemoveOnly { contents, reason: UndoRemainder::FileChanged, returned, missing } = undo else {
            panic!("{client}: {undo:?}")
        };
        assert_eq!(value(client, &contents), value(client, before), "{client}");
        assert_eq!((returned, missing), (record.replaced.clone(), Vec::new()));
        let undo = disconnect(&record, Some(&after), Some(b"damaged")).unwrap();
        let Undo::RemoveOnly { reason: UndoRemainder::BackupUnusable, missing, .. } = undo else {
            panic!("{client}: {undo:?}")
        };
        assert_eq!(missing, record.replaced, "{client}");
    }
    let error = replace_servers(Client::Cursor, None, &bridge(), &["absent"]);
    assert_eq!(error, Err(EditError::MissingServer { name: "absent".to_owned() }));
}

#[test]
fn an_entry_with_another_token_reference_is_recognized_by_its_endpoint() {
    let before = fixture(Client::OpenCode).as_bytes();
    let entry = SatelliteEntry::Http { url: URL.to_owned(), token: TokenReference::File("/srv/token".to_owned()) };
    let after = add_entry(Client::OpenCode, Some(before), &entry).unwrap();
    assert_eq!(entry_state(Client::OpenCode, Some(&after), None), Ok(EntryState::ForeignEntry));
    let state = entry_state(Client::OpenCode, Some(&after), Some(URL));
    assert_eq!(state, Ok(EntryState::Connected { form: EntryForm::HttpFile }));
    let before_edit = Some(("backup".to_owned(), before));
    let record = ConnectRecord::new(Client::OpenCode, "f".into(), &entry, before_edit, &after, Vec::new());
    let changed = [&after[..], b"// changed\n"].concat();
    let undo = disconnect(&record, Some(&changed), Some(before)).unwrap();
    let Undo::RemoveOnly { contents, .. } = undo else { panic!("{undo:?}") };
    assert_eq!(contents, [before, b"// changed\n"].concat());
}

#[test]
fn both_tables_of_opencode_are_edited() {
    let ours = r#"{"type": "local", "command": ["/old/satellite", "stdio"], "enabled": true}"#;
    let text = |mcp: &str| format!(r#"{{"$schema": "x", "mcp": {mcp}}}"#);
    let github = r#""github": {"type": "local", "command": ["gh-mcp"]}"#;
    // The file, its servers, and the file after `connect --replace` with all of them.
    for (mcp, names, after) in [
        (format!("{{{github}}}"), vec!["github"], "{OURS}".to_owned()),
        (format!(r#"{{"servers": {{{github}}}}}"#), vec!["github"], r#"{"servers": {}, OURS}"#.to_owned()),
        (
            format!(r#"{{"timeout": {{"catalog": 9}}, "a": {{"type": "remote"}}, "servers": {{{github}}}}}"#),
            vec!["a", "github"],
            r#"{"timeout": {"catalog": 9}, "servers": {}, OURS}"#.to_owned(),
        ),
        // Our own entry stays in its table.
        (
            format!(r#"{{"servers": {{{github}, "satellite": {ours}}}}}"#),
            vec!["github", "satellite"],
            r#"{"servers": {OURS}}"#.to_owned(),
        ),
        // Servers of version 1 that have the names of the tables.
        (
            r#"{"servers": {"type": "local", "command": ["x"]}, "timeout": {"type": "remote", "url": "y"}}"#.to_owned(),
            vec!["servers", "timeout"],
            "{OURS}".to_owned(),
        ),
    ] {
        let before = text(&mcp);
        assert_eq!(names_in(Client::OpenCode, before.as_bytes()), names, "{before}");
        let (edited, record) = connected(Client::OpenCode, before.as_bytes(), &names);
        let new = ours.replace("/old/satellite", BRIDGE);
        let after = text(&after.replace("OURS", &format!(r#""satellite": {new}"#)));
        assert_eq!(value(Client::OpenCode, &edited), value(Client::OpenCode, after.as_bytes()), "{before}");
        // The servers return to their own tables, also if somebody else changed the file.
        for current in [Some([&edited[..], b"\n"].concat()), None] {
            let undo = disconnect(&record, current.as_deref(), Some(before.as_bytes())).unwrap();
            let Undo::RemoveOnly { contents, missing, .. } = undo else { panic!("{before}: {undo:?}") };
            assert_eq!(missing, Vec::<String>::new(), "{before}");
            let servers = |text: &[u8]| {
                let config = ClientConfig::read(Client::OpenCode, Some(text)).unwrap();
                let server = |name: &&str| (config.table_of(name), config.server(name).unwrap().cloned());
                names.iter().filter(|name| **name != ENTRY_NAME).map(server).collect::<Vec<_>>()
            };
            assert_eq!(servers(&contents), servers(before.as_bytes()), "{before}");
        }
    }
    let twice = text(&format!(r#"{{{github}, "servers": {{{github}}}}}"#));
    let error = replace_servers(Client::OpenCode, Some(twice.as_bytes()), &bridge(), &["github"]);
    assert_eq!(error, Err(EditError::DuplicateKey { key: "github".to_owned() }));
}

#[test]
fn entries_in_the_shapes_of_other_versions_are_ours() {
    let stdio = EntryForm::Stdio;
    for (client, entry, form) in [
        (Client::Cline, r#"{"transport": {"type": "stdio", "command": "/bin/satellite", "args": ["stdio"]}}"#, stdio),
        (
            Client::Cline,
            r#"{"transport": {"type": "streamableHttp", "url": "http://127.0.0.1:7400/mcp"}, "metadata": {}}"#,
            EntryForm::HttpEnvironment,
        ),
        (Client::Cline, r#"{"transport": "stdio", "command": "/bin/satellite", "args": ["stdio"]}"#, stdio),
        (
            Client::GeminiCli,
            r#"{"httpUrl": "http://x/mcp", "headers": {"Authorization": "Bearer ${SATELLITE_TOKEN}"}}"#,
            EntryForm::HttpEnvironment,
        ),
    ] {
        let file = format!(r#"{{"mcpServers": {{"satellite": {entry}}}}}"#);
        let state = entry_state(client, Some(file.as_bytes()), Some(URL));
        assert_eq!(state, Ok(EntryState::Connected { form }), "{entry}");
        let http = &all_entries(client)[1];
        let after = add_entry(client, Some(file.as_bytes()), http).unwrap();
        let text = String::from_utf8_lossy(&after);
        assert!(!text.contains("transport") && !text.contains("httpUrl") && text.contains(URL), "{text}");
    }
}

#[test]
fn a_bridge_keeps_its_environment_and_its_directory() {
    let bridge_of = |options: &str| format!(r#""command": "/old/satellite", "args": ["stdio"]{options}"#);
    let table = |client, entry: &str| match client {
        Client::VsCode => format!(r#"{{"servers": {{"satellite": {entry}}}}}"#),
        Client::OpenCode => format!(r#"{{"mcp": {{"satellite": {entry}}}}}"#),
        _ => format!(r#"{{"mcpServers": {{"satellite": {entry}}}}}"#),
    };
    for (client, entry, kept) in [
        (Client::Cursor, format!("{{{}}}", bridge_of(r#", "env": {"A": "b"}, "cwd": "/w""#)), vec!["cwd", "env"]),
        (Client::VsCode, format!("{{{}}}", bridge_of(r#", "envFile": "/w/.env""#)), vec!["envFile"]),
        (
            Client::OpenCode,
            r#"{"type": "local", "command": ["/old/satellite", "stdio"], "environment": {"A": "b"}, "cwd": "/w"}"#
                .to_owned(),
            vec!["cwd", "environment"],
        ),
        (
            Client::Cline,
            format!(r#"{{"transport": {{"type": "stdio", {}}}}}"#, bridge_of(r#", "env": {"A": "b"}"#)),
            vec!["env"],
        ),
    ] {
        let before = table(client, &entry);
        let after = add_entry(client, Some(before.as_bytes()), &bridge()).unwrap();
        let server = |text: &[u8]| {
            let config = ClientConfig::read(client, Some(text)).unwrap();
            config.server(ENTRY_NAME).unwrap().unwrap().clone()
        };
        let (old, new) = (server(before.as_bytes()), server(&after));
        for key in &kept {
            assert_eq!(new.get(key), transport_of(&old).get(key), "{client}: {key}");
            assert!(new.get(key).is_some(), "{client}: {key}");
        }
        assert!(String::from_utf8(after.clone()).unwrap().contains(BRIDGE), "{client}");
        // An entry over HTTP has no process.
        let http = &all_entries(client)[1];
        let http = server(&add_entry(client, Some(&after), http).unwrap());
        assert!(PROCESS_KEYS.iter().all(|key| http.get(key).is_none()), "{client}");
    }
}

#[test]
fn a_new_configuration_of_opencode_has_its_schema() {
    for file in [None, Some(&b"\n"[..])] {
        let text = String::from_utf8(add_entry(Client::OpenCode, file, &bridge()).unwrap()).unwrap();
        let start = "{\n  \"$schema\": \"https://opencode.ai/config.json\",\n  \"mcp\": {\n    \"satellite\": {";
        assert!(text.trim_start().starts_with(start), "{text}");
    }
}

#[test]
fn entries_that_may_not_work_have_a_warning() {
    use EntryForm::{HttpEnvironment, HttpFile, Stdio};
    let devin = "/h/.config/devin/mcp_config.json";
    for (client, path, file, form, warning) in [
        (Client::Cline, "/h/x.json", None, HttpEnvironment, "command line"),
        (Client::Cline, "/h/x.json", None, Stdio, ""),
        (Client::AmazonQ, "/h/x.json", None, HttpEnvironment, "IDE plugins"),
        (Client::GeminiCli, "/h/x.json", None, HttpEnvironment, ".env"),
        (Client::GeminiCli, "/h/x.json", None, Stdio, ""),
        (Client::OpenCode, "/h/x.json", Some(r#"{"mcp": {}}"#), HttpFile, "$schema"),
        (Client::OpenCode, "/h/x.json", Some("// only a comment"), HttpEnvironment, "$schema"),
        (Client::OpenCode, "/h/x.json", Some(r#"{"$schema": "x"}"#), HttpFile, ""),
        (Client::OpenCode, "/h/x.json", Some(r#"{"mcp": {}}"#), Stdio, ""),
        (Client::OpenCode, "/h/x.json", None, HttpFile, ""),
        (Client::Windsurf, "/h/.codeium/windsurf/mcp_config.json", None, HttpFile, ""),
        (Client::Windsurf, devin, None, Stdio, ""),
    ] {
        let warnings = entry_warnings(client, Path::new(path), file.map(str::as_bytes), form).unwrap();
        assert_eq!(warnings.is_empty(), warning.is_empty(), "{client} {form}: {warnings:?}");
        assert!(warnings.concat().contains(warning), "{client} {form}: {warnings:?}");
    }
    for path in [devin, "/p/.devin/mcp_config.local.json"] {
        let error = entry_warnings(Client::Windsurf, Path::new(path), None, HttpFile);
        assert_eq!(error, Err(EditError::UnsupportedForm { client: Client::Windsurf, form: HttpFile }));
    }
}

#[test]
fn an_http_entry_of_gemini_has_a_url_with_a_type() {
    let text =
        String::from_utf8(add_entry(Client::GeminiCli, None, &all_entries(Client::GeminiCli)[1]).unwrap()).unwrap();
    assert!(text.contains(&format!(r#""url": "{URL}""#)) && text.contains(r#""type": "http""#), "{text}");
    assert!(!text.contains("httpUrl"), "{text}");
}

#[test]
fn a_record_survives_its_file() {
    let (_, record) = connected(Client::VsCode, fixture(Client::VsCode).as_bytes(), &["perplexity"]);
    let json = serde_json::to_string(&record).unwrap();
    assert!(json.contains(r#""client":"vscode""#), "{json}");
    assert_eq!(serde_json::from_str::<ConnectRecord>(&json).unwrap(), record);
    assert!(serde_json::from_str::<ConnectRecord>(&json.replace("vscode", "emacs")).is_err());
}

#[test]
fn styles_of_json_are_followed() {
    let entry = r#"{"command": "/usr/local/bin/satellite", "args": ["stdio"]}"#;
    let compact = entry.replace(": ", ":").replace(", ", ",");
    for (before, after) in [
        (r#"{"mcpServers": {"a": {}}}"#, format!(r#"{{"mcpServers": {{"a": {{}}, "satellite": {entry}}}}}"#)),
        (r#"{"mcpServers": {"a": {}, }}"#, format!(r#"{{"mcpServers": {{"a": {{}}, "satellite": {entry}, }}}}"#)),
        (r#"{"mcpServers":{}}"#, format!(r#"{{"mcpServers":{{"satellite":{compact}}}}}"#)),
        (r#"{"mcpServers":null}"#, format!(r#"{{"mcpServers":{{"satellite":{compact}}}}}"#)),
        (r#"{"a":1 /* b */}"#, format!(r#"{{"a":1,"mcpServers":{{"satellite":{compact}}} /* b */}}"#)),
    ] {
        let edited = add_entry(Client::Cursor, Some(before.as_bytes()), &bridge()).unwrap();
        assert_eq!(String::from_utf8(edited).unwrap(), after);
    }
    let lines = "{\r\n\t\"mcpServers\": {\r\n\t\t\"satellite\": {\r\n\t\t\t\"command\": \"/usr/local/bin/satellite\",\r\n\t\t\t\"args\": [\"stdio\"]\r\n\t\t}\r\n\t}\r\n}";
    for before in
        ["{\r\n\t\"mcpServers\": {}\r\n}", "{\r\n\t\"mcpServers\": {\r\n\t}\r\n}", "{\r\n\t\"mcpServers\": null\r\n}"]
    {
        let edited = add_entry(Client::Cursor, Some(before.as_bytes()), &bridge()).unwrap();
        assert_eq!(String::from_utf8(edited).unwrap(), lines);
    }
}

#[test]
fn notations_of_json_are_removed_without_traces() {
    let ours = format!(r#""satellite": {{"command": "{BRIDGE}", "args": ["stdio"]}}"#);
    for (before, after) in [
        (r#"{"mcpServers": {OURS, "a": {}}}"#, r#"{"mcpServers": {"a": {}}}"#),
        (r#"{"mcpServers": {"a": {}, OURS}}"#, r#"{"mcpServers": {"a": {}}}"#),
        (r#"{"mcpServers": {"a": {}, OURS, "b": {}}}"#, r#"{"mcpServers": {"a": {}, "b": {}}}"#),
        (
            r#"{"mcpServers": {"a": {}, /* c */ OURS /* d */ , "b": {}}}"#,
            r#"{"mcpServers": {"a": {}, /* c */ /* d */  "b": {}}}"#,
        ),
        ("{\"mcpServers\": {\n  \"a\": {} // c\n  , OURS\n}}", "{\"mcpServers\": {\n  \"a\": {} // c\n  \n}}"),
        ("{\"mcpServers\": {\n  // c\n  OURS, // d\n}}", "{\"mcpServers\": {\n  // c\n}}"),
        (
            "{\"mcpServers\": {\n  \"a\": {}, // c\n  // d\n  OURS\n}}",
            "{\"mcpServers\": {\n  \"a\": {} // c\n  // d\n}}",
        ),
    ] {
        let edited = remove_entry(Client::Cursor, before.replace("OURS", &ours).as_bytes(), None).unwrap();
        assert_eq!(String::from_utf8(edited).unwrap(), after, "{before}");
    }
}

#[test]
fn all_notations_of_toml_are_edited() {
    let ours = r#"command = "/usr/bin/satellite"
args = ["stdio"]
"#;
    let inline = r#"{ command = "/usr/bin/satellite", args = ["stdio"] }"#;
    let dotted = "satellite.command = \"/usr/bin/satellite\" # c\nmcp_servers.satellite.args = [\n  \"stdio\",\n]\n";
    for (with, without) in [
        (format!("[mcp_servers.satellite]\n{ours}"), String::new()),
        (format!("a = 1\n\n[mcp_servers.satellite]\n{ours}\n# b\n[b]\n"), "a = 1\n\n# b\n[b]\n".to_owned()),
        (
            format!("[mcp_servers]\n[mcp_servers.satellite]\n{ours}[mcp_servers.satellite.tools.x]\ny = 1\n[b]\n"),
            "[mcp_servers]\n[b]\n".to_owned(),
        ),
        (
            format!("[mcp_servers]\r\nsatellite = {inline} # c\r\na.url = \"b\"\r\n"),
            "[mcp_servers]\r\na.url = \"b\"\r\n".to_owned(),
        ),
        (format!("mcp_servers.{dotted}mcp_servers.a.url = \"b\""), "mcp_servers.a.url = \"b\"".to_owned()),
        (format!("mcp_servers = {{ satellite = {inline} }}\n"), "mcp_servers = {}\n".to_owned()),
        (format!("mcp_servers = {{ a = {{}}, satellite = {inline} }}\n"), "mcp_servers = { a = {} }\n".to_owned()),
        (format!("mcp_servers = {{ satellite = {inline}, a = {{}} }}\n"), "mcp_servers = { a = {} }\n".to_owned()),
    ] {
        let removed = remove_entry(Client::Codex, with.as_bytes(), None).unwrap();
        assert_eq!(String::from_utf8(removed).unwrap(), without, "{with}");
        let added =
            add_entry(Client::Codex, Some(without.as_bytes()), &SatelliteEntry::bridge("/usr/bin/satellite")).unwrap();
        let state = entry_state(Client::Codex, Some(&added), None);
        assert_eq!(state, Ok(EntryState::Connected { form: EntryForm::Stdio }), "{without}");
        if with.starts_with("mcp_servers = {") && with.ends_with(" } }\n") {
            assert_eq!(String::from_utf8(added).unwrap(), with);
        }
    }
}

#[test]
fn notations_of_yaml_are_edited_or_reported() {
    for text in [
        "extensions:\n",
        "extensions: {} # none\nGOOSE_MODE: auto\n",
        "extensions: null",
        "'extensions' :\r\n  a:\r\n    type: builtin\r\n",
        "---\nextensions:\n      a: {type: builtin}\n# end\n",
        "GOOSE_MODE: auto\nextensions:\n  a:\n    text: |+\n      kept\n\n\nlast: 1\n",
        "# only a comment\n",
    ] {
        let added = add_entry(Client::Goose, Some(text.as_bytes()), &bridge()).unwrap();
        assert!(contains_in_order(
            &added,
            &without_whitespace(text.replace("{} #", "#").replace(" null", "").as_bytes())
        ));
        let removed = remove_entry(Client::Goose, &added, None).unwrap();
        assert_eq!(value(Client::Goose, &removed), value(Client::Goose, text.as_bytes()), "{text}");
    }
    for text in [
        "extensions: {a: {type: builtin}}\n",
        "extensions: &x\n  a: 1\n",
        "{extensions: {}}\n",
        "text: |\n  no newline",
    ] {
        match add_entry(Client::Goose, Some(text.as_bytes()), &bridge()) {
            Err(EditError::EditByHand { instruction }) => {
                assert!(instruction.contains("cmd: /usr/local/bin/satellite"));
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    for text in ["mcpServers:\n- name: a\n  command: b\n", "mcpServers: []\n", "mcpServers:\n    -\n      name: a\n"] {
        let added = add_entry(Client::Continue, Some(text.as_bytes()), &bridge()).unwrap();
        let removed = remove_entry(Client::Continue, &added, None).unwrap();
        assert_eq!(String::from_utf8(removed).unwrap(), text);
    }
}

#[test]
fn broken_files_cause_an_error_and_no_panic() {
    for client in Client::iter() {
        let key = section(client).key;
        let text = fixture(client);
        for end in 0..text.len() {
            if let Some(part) = text.get(..end)
                && let Ok(after) = add_entry(client, Some(part.as_bytes()), &bridge())
            {
                assert!(names_in(client, &after).contains(&ENTRY_NAME.to_owned()), "{client} {part}");
            }
        }
        let (array, wrong, twice) = match section(client).format {
            FileFormat::Json => {
                ("[]".to_owned(), format!(r#"{{"{key}": "x"}}"#), format!(r#"{{"{key}": {{}}, "{key}": {{}}}}"#))
            }
            FileFormat::Toml => ("[[".to_owned(), format!("{key} = 1"), format!("[{key}]\n[{key}]\n")),
            FileFormat::Yaml => {
                ("- a\n".to_owned(), format!("{key}: x\n"), format!("{key}:\n  a: 1\n{key}:\n  b: 1\n"))
            }
        };
        let error = |text: &str| add_entry(client, Some(text.as_bytes()), &bridge()).unwrap_err();
        assert!(matches!(error(&array), EditError::WrongRoot { .. } | EditError::Syntax { .. }), "{client}");
        assert!(matches!(error(&wrong), EditError::WrongServers { .. }), "{client}");
        assert!(matches!(error(&twice), EditError::DuplicateKey { .. } | EditError::Syntax { .. }), "{client}");
        assert_eq!(add_entry(client, Some(b"{\xff}"), &bridge()), Err(EditError::NotUtf8));
        assert_eq!(add_entry(client, Some(b"\xff\xfe{\0}\0"), &bridge()), Err(EditError::NotUtf8));
    }
    let wrong = br#"{"mcpServers": {"a": {}, "a": {}, "satellite": {}, "satellite": {}}}"#;
    let error = add_entry(Client::Cursor, Some(wrong), &bridge());
    assert_eq!(error, Err(EditError::DuplicateKey { key: "satellite".to_owned() }));
}

#[test]
fn messages_contain_no_value_of_the_file() {
    for (client, text) in [
        (Client::Cursor, "{\"mcpServers\": {\"a\": {\"env\": {\"KEY\": \"hunter2\" \"x\"}}}}"),
        (Client::Cursor, "{\"KEY\": hunter2}"),
        (Client::Codex, "key = \"hunter2\" hunter2\n"),
        (Client::Codex, "key = hunter2\n"),
        (Client::Goose, "key: \"hunter2\nother: hunter2: hunter2"),
        (Client::Goose, "key: *hunter2\n"),
        (Client::Goose, "extensions: hunter2\n"),
    ] {
        let error = add_entry(client, Some(text.as_bytes()), &bridge()).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
    }
}

#[test]
fn deep_and_large_files_end_in_a_result() {
    let deep = |open: &str, close: &str| format!("{}{}", open.repeat(100_000), close.repeat(100_000));
    for (client, text) in [
        (Client::Cursor, deep("[", "]")),
        (Client::Cursor, deep("{\"a\":", "}")),
        (Client::Codex, format!("a = {}", deep("[", "]"))),
        (Client::Codex, format!("a = {}", deep("{a=", "}"))),
        (Client::Codex, format!("[{}a]", "a.".repeat(100_000))),
        (Client::Codex, format!("{}a = 1", "a.".repeat(100_000))),
        // libyaml needs quadratic time for nested flow collections.
        (Client::Goose, deep("[", "]")[90_000..110_000].to_owned()),
        (Client::Goose, "- ".repeat(100_000)),
    ] {
        assert!(add_entry(client, Some(text.as_bytes()), &bridge()).is_err(), "{client}");
    }
    let nested = format!(r#"{{"a": {}{}, "mcpServers": {{}}}}"#, "[".repeat(400), "]".repeat(400));
    assert!(add_entry(Client::Cursor, Some(nested.as_bytes()), &bridge()).is_ok());
    let large: Vec<_> = (0..60_000).map(|number| format!("\"k{number}\": [1, 2, \"three\"]")).collect();
    let large = format!("{{\n  {},\n  \"blob\": \"{}\"\n}}\n", large.join(",\n  "), "x".repeat(8 << 20));
    let after = add_entry(Client::ClaudeCode, Some(large.as_bytes()), &bridge()).unwrap();
    assert_eq!(after.len() - large.len(), 140);
    let large = format!("blob: \"{}\"\nextensions:\n  a:\n    type: builtin\n", "x".repeat(10 << 20));
    assert!(add_entry(Client::Goose, Some(large.as_bytes()), &bridge()).is_ok());
    let large = format!("blob = \"{}\"\n[mcp_servers.a]\nurl = \"b\"\n", "x".repeat(10 << 20));
    assert!(add_entry(Client::Codex, Some(large.as_bytes()), &bridge()).is_ok());
}

/// The style of a random file.
#[derive(Debug, Clone)]
struct FileStyle {
    unit: &'static str,
    has_byte_order_mark: bool,
    is_crlf: bool,
    ends_with_newline: bool,
    /// Decides for each place, in turn, on a comment, a blank line or a trailing comma.
    choices: Vec<u8>,
}

fn style() -> impl Strategy<Value = FileStyle> {
    (select(vec!["", "  ", "    ", "\t"]), any::<[bool; 3]>(), vec(0..8_u8, 24)).prop_map(|(unit, flags, choices)| {
        let [has_byte_order_mark, is_crlf, ends_with_newline] = flags;
        FileStyle { unit, has_byte_order_mark, is_crlf, ends_with_newline, choices }
    })
}

fn scalar() -> impl Strategy<Value = ConfigNode> {
    prop_oneof![
        any::<bool>().prop_map(ConfigNode::Bool),
        (0..10_000_i32).prop_map(|number| ConfigNode::Literal(number.to_string())),
        select(vec![
            "",
            "npx",
            "-y",
            "a: b",
            "# no",
            "// no",
            "{",
            "}",
            "\"",
            "\\",
            "’ü😀",
            "a\nb",
            "true",
            "${X}",
            " x "
        ])
        .prop_map(node::text),
    ]
}

fn key() -> impl Strategy<Value = String> {
    select(vec!["a", "b-c", "d_e", "F", "9", "g.h", "i j", "ü", "with \"quotes\"", "//", "#x"]).prop_map(str::to_owned)
}

/// A map without duplicate keys.
fn object(values: impl Strategy<Value = ConfigNode>, most: usize) -> impl Strategy<Value = ConfigNode> {
    vec((key(), values), 0..most).prop_map(|mut entries| {
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        entries.dedup_by(|one, other| one.0 == other.0);
        ConfigNode::Map(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
    })
}

fn any_value() -> impl Strategy<Value = ConfigNode> {
    scalar().prop_recursive(3, 16, 4, |inner| {
        prop_oneof![object(inner.clone(), 4), vec(scalar(), 0..4).prop_map(ConfigNode::List)]
    })
}

/// A configuration: some keys, and among them the servers.
fn config() -> impl Strategy<Value = (ConfigNode, Option<ConfigNode>, usize)> {
    (object(any_value(), 5), option::of(object(object(any_value(), 4), 4)), 0..5_usize)
}

struct RandomText {
    style: FileStyle,
    next: usize,
    text: String,
}

impl RandomText {
    fn write(
        client: Client,
        (root, servers, position): (ConfigNode, Option<ConfigNode>, usize),
        style: FileStyle,
    ) -> Vec<u8> {
        let section = section(client);
        let ConfigNode::Map(mut entries) = root else { unreachable!() };
        if let Some(servers) = servers {
            let servers = match servers {
                ConfigNode::Map(servers) if section.is_list => ConfigNode::List(
                    servers
                        .into_iter()
                        .map(|(name, server)| {
                            let ConfigNode::Map(mut fields) = server else { unreachable!() };
                            fields.insert(0, ("name".into(), node::text(name.name)));
                            ConfigNode::Map(fields)
                        })
                        .collect(),
                ),
                servers => servers,
            };
            entries.insert(position.min(entries.len()), (section.key.into(), servers));
        }
        let mut text = Self { style, next: 0, text: String::new() };
        match section.format {
            FileFormat::Json => {
                text.comment("");
                text.json(&ConfigNode::Map(entries), "");
                text.comment("");
            }
            FileFormat::Toml => text.toml(entries),
            FileFormat::Yaml => text.yaml(&entries, true),
        }
        let RandomText { style, mut text, .. } = text;
        let text = if style.ends_with_newline || section.format == FileFormat::Yaml {
            text.push('\n');
            text
        } else {
            text.trim_end().to_owned()
        };
        let text = if style.is_crlf { text.replace('\n', "\r\n") } else { text };
        let mark = if style.has_byte_order_mark { BYTE_ORDER_MARK } else { "" };
        format!("{mark}{text}").into_bytes()
    }

    fn choice(&mut self) -> u8 {
        self.next += 1;
        self.style.choices[self.next % self.style.choices.len()]
    }

    fn line(&mut self, indent: &str) {
        if !self.style.unit.is_empty() {
            self.text.push('\n');
            self.text.push_str(indent);
        }
    }

    fn comment(&mut self, indent: &str) {
        match (self.choice(), self.style.unit.is_empty()) {
            (0, false) => {
                self.text.push_str(" // a comment, with \"quotes\" and {");
                self.line(indent);
            }
            (1, _) => self.text.push_str(" /* \"x\": 1, } */ "),
            (2, false) => {
                self.line("");
                self.line(indent);
            }
            _ => {}
        }
    }

    fn json(&mut self, value: &ConfigNode, indent: &str) {
        let inner = format!("{indent}{}", self.style.unit);
        let elements: Vec<(Option<&str>, &ConfigNode)> = match value {
            ConfigNode::Map(entries) => entries.iter().map(|(key, value)| (Some(key.as_str()), value)).collect(),
            ConfigNode::List(items) => items.iter().map(|item| (None, item)).collect(),
            other => return self.text.push_str(&json::snippet(other)),
        };
        let (open, close) = if matches!(value, ConfigNode::Map(_)) { ('{', '}') } else { ('[', ']') };
        self.text.push(open);
        let count = elements.len();
        for (index, (key, value)) in elements.into_iter().enumerate() {
            self.line(&inner);
            self.comment(&inner);
            if let Some(key) = key {
                let colon = if self.choice() == 3 { " : " } else { ":" };
                self.text += &json::quote(key);
                self.text += colon;
            }
            self.json(value, &inner);
            let is_last = index + 1 == count;
            if !is_last || self.choice() == 4 {
                self.text.push(',');
            }
            self.comment(&inner);
        }
        if count > 0 || self.choice() == 5 {
            self.line(indent);
        }
        self.text.push(close);
    }

    fn toml(&mut self, entries: Vec<(NodeKey, ConfigNode)>) {
        let (tables, scalars): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|(_, value)| matches!(value, ConfigNode::Map(_)));
        for (key, value) in scalars {
            self.toml_line(&key, &value);
        }
        for (key, value) in tables {
            let ConfigNode::Map(entries) = value else { unreachable!() };
            for (name, value) in entries {
                match value {
                    ConfigNode::Map(fields) => {
                        writeln!(self.text, "[{}.{}]", json::quote(&key), json::quote(&name)).unwrap();
                        for (key, value) in &fields {
                            self.toml_line(key, value);
                        }
                    }
                    value => {
                        // Each scalar goes into a table of its own, whose key is made unique by the name.
                        writeln!(self.text, "[{}]", json::quote(&format!("{} {}", *key, *name))).unwrap();
                        self.toml_line("value", &value);
                    }
                }
            }
        }
    }

    fn toml_line(&mut self, key: &str, value: &ConfigNode) {
        let table = ConfigNode::Map(vec![(key.into(), value.clone())]);
        let snippet = toml::snippet("x", "y", &table);
        if self.choice() == 0 {
            self.text.push_str("# [mcp_servers.satellite]\n\n");
        }
        self.text.push_str(snippet.split_once('\n').unwrap().1.trim_end());
        let end = if self.choice() == 1 { "  # a comment\n" } else { "\n" };
        self.text.push_str(end);
    }

    fn yaml(&mut self, entries: &[(NodeKey, ConfigNode)], is_root: bool) {
        for (key, value) in entries {
            match self.choice() {
                0 => self.text.push_str("# a comment: {\n"),
                1 => self.text.push('\n'),
                _ => {}
            }
            self.text += &json::quote(key);
            self.text.push(':');
            match value {
                ConfigNode::Map(entries) if !entries.is_empty() && is_root => {
                    self.text.push('\n');
                    let mut inner = Self { style: self.style.clone(), next: self.next, text: String::new() };
                    inner.yaml(entries, false);
                    let width = if self.style.unit.len() == 4 { 4 } else { 2 };
                    for line in inner.text.lines() {
                        let indent = if line.is_empty() { "" } else { &"    "[..width] };
                        writeln!(self.text, "{indent}{line}").unwrap();
                    }
                }
                value => {
                    let lines = yaml::snippet("x", Some("z"), value);
                    self.text += lines.strip_prefix("x:\n  z:").unwrap();
                }
            }
        }
    }
}

fn any_client() -> impl Strategy<Value = Client> {
    select(Client::iter().collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn connect_and_disconnect_restore_every_byte((client, config, style) in (any_client(), config(), style())) {
        let before = RandomText::write(client, config, style);
        let names = names_in(client, &before);
        let (after, record) = connected(client, &before, &[]);
        prop_assert_eq!(disconnect(&record, Some(&after), Some(&before)), Ok(Undo::Restore(before.clone())));

        // The other servers and all other bytes remain.
        let mut expected = names.clone();
        expected.push(ENTRY_NAME.to_owned());
        prop_assert_eq!(names_in(client, &after), expected);
        if !names.is_empty() {
            prop_assert!(contains_in_order(&after, &before), "{}", String::from_utf8_lossy(&after));
        }

        if before.contains(&b'\n') && !has_bare_newline(&before) {
            prop_assert!(!has_bare_newline(&after), "{}", String::from_utf8_lossy(&after));
        }

        // Somebody else changes the file: only our entry is removed.
        let changed = [&after[..], b"\n"].concat();
        let undo = disconnect(&record, Some(&changed), Some(&before)).unwrap();
        let Undo::RemoveOnly { contents, .. } = undo else { panic!("{undo:?}") };
        prop_assert_eq!(value(client, &contents), value(client, &before));

        // All servers are replaced, and return after a change.
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (after, record) = connected(client, &before, &names);
        prop_assert_eq!(names_in(client, &after), [ENTRY_NAME]);
        prop_assert_eq!(disconnect(&record, Some(&after), Some(&before)), Ok(Undo::Restore(before.clone())));
        let undo = disconnect(&record, Some(&[&after[..], b"\n"].concat()), Some(&before)).unwrap();
        let Undo::RemoveOnly { contents, missing, .. } = undo else { panic!("{undo:?}") };
        prop_assert_eq!(value(client, &contents), value(client, &before));
        prop_assert!(missing.is_empty());
    }

    #[test]
    fn arbitrary_text_causes_no_panic(client in any_client(), text in "[\\[\\]{}:,\"'#/*\\-a=.|&\\\\ \n\r\t~]{0,40}") {
        let _ = add_entry(client, Some(text.as_bytes()), &bridge());
        let key = section(client).key;
        for text in [format!("{key}: {text}"), format!("{{\"{key}\": {text}}}"), format!("{key} = {text}"), format!("{text}\n[{key}]\n{text}")] {
            if let Ok(after) = add_entry(client, Some(text.as_bytes()), &bridge()) {
                prop_assert!(remove_entry(client, &after, None).is_ok() || section(client).format == FileFormat::Yaml);
            }
        }
    }
}
