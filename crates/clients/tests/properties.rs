//! Random configurations of every format are read as the servers from which they were written, and random changes of the
//! fixtures cause no panic.
#![expect(clippy::unwrap_used, reason = "helpers of tests outside of test functions")]

use std::path::Path;

use mcp_satellite_clients::{
    Client, ClientFile, ClientServer, ClientVariables, ConnectRecord, ENTRY_NAME, HiddenText, HttpProtocol, Machine,
    SatelliteEntry, ServerTransport, TemplatePart, TextTemplate, Undo, disconnect, existing_files, looks_secret, read,
    replace_servers, secret_args, server_names,
};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use strum::IntoEnumIterator;

/// A server as it was generated.
#[derive(Debug, Clone)]
struct Generated {
    command: Option<String>,
    url: String,
    args: Vec<Vec<Piece>>,
    env: Vec<(String, Vec<Piece>)>,
    headers: Vec<(String, Vec<Piece>)>,
    is_sse: bool,
    is_enabled: bool,
    denied: Vec<String>,
}

/// A part of a text.
#[derive(Debug, Clone)]
enum Piece {
    Literal(String),
    Variable(String),
    Default(String, String),
    Home,
    Workspace,
    Input(String),
}

fn piece() -> impl Strategy<Value = Piece> {
    prop_oneof![
        4 => "[a-zA-Z0-9 ./:@=,#\"'\\\\é😀&*|>%!?-]{1,10}".prop_map(Piece::Literal),
        1 => "V[A-Z0-9_]{0,6}".prop_map(Piece::Variable),
        1 => ("V[A-Z0-9_]{0,6}", "[a-z0-9:/. -]{0,8}").prop_map(|(name, default)| Piece::Default(name, default)),
        1 => Just(Piece::Home),
        1 => Just(Piece::Workspace),
        1 => "[a-z-]{1,6}".prop_map(Piece::Input),
    ]
}

fn server() -> impl Strategy<Value = Generated> {
    let text = || vec(piece(), 0..4);
    (
        proptest::option::of("[a-z/][a-z/.-]{0,12}"),
        "https?://[a-z]{1,8}\\.example/[a-z]{0,8}",
        vec(text(), 0..4),
        btree_map("[A-Z][A-Z_]{0,8}", text(), 0..4),
        btree_map("X-[A-Za-z-]{1,8}", text(), 0..3),
        any::<bool>(),
        any::<bool>(),
        vec("[a-z_]{1,8}", 0..3),
    )
        .prop_map(|(command, url, args, env, headers, is_sse, is_enabled, denied)| Generated {
            command,
            url,
            args,
            env: env.into_iter().collect(),
            headers: headers.into_iter().collect(),
            is_sse,
            is_enabled,
            denied,
        })
}

/// Returns true if the client replaces the piece by a value. Continue is represented by a file in YAML.
fn is_expanded(client: Client, piece: &Piece) -> bool {
    match client {
        Client::Codex | Client::Goose | Client::ClaudeDesktop | Client::Zed | Client::LmStudio | Client::Junie => false,
        Client::OpenCode => matches!(piece, Piece::Variable(_)),
        Client::Continue => matches!(piece, Piece::Input(_)),
        _ => true,
    }
}

/// Writes a piece in the syntax of the client.
fn write_piece(client: Client, piece: &Piece) -> String {
    match piece {
        Piece::Literal(literal) => literal.clone(),
        Piece::Variable(name) if client == Client::OpenCode => format!("{{env:{name}}}"),
        Piece::Variable(name) => format!("${{env:{name}}}"),
        Piece::Default(name, default) => format!("${{{name}:-{default}}}"),
        Piece::Home => "${userHome}".to_owned(),
        Piece::Workspace => "${workspaceFolder}".to_owned(),
        Piece::Input(id) if client == Client::Continue => format!("${{{{ inputs.{id} }}}}"),
        Piece::Input(id) => format!("${{input:{id}}}"),
    }
}

fn write_text(client: Client, pieces: &[Piece]) -> String {
    pieces.iter().map(|piece| write_piece(client, piece)).collect()
}

/// Returns the template that is expected for the text.
fn expected_text(client: Client, pieces: &[Piece]) -> TextTemplate {
    let mut template = TextTemplate::default();
    for piece in pieces {
        let part = match piece {
            Piece::Variable(name) if is_expanded(client, piece) => {
                TemplatePart::Variable { name: name.clone(), default: None }
            }
            Piece::Default(name, default) if is_expanded(client, piece) => {
                TemplatePart::Variable { name: name.clone(), default: Some(HiddenText::new(default.as_str())) }
            }
            Piece::Home if is_expanded(client, piece) => TemplatePart::Home,
            Piece::Workspace if is_expanded(client, piece) => TemplatePart::Workspace,
            Piece::Input(id) if is_expanded(client, piece) => TemplatePart::Input { id: id.clone() },
            literal => {
                let text = write_piece(client, literal);
                if let Some(TemplatePart::Literal(last)) = template.parts.last_mut() {
                    *last = HiddenText::new(format!("{}{text}", last.expose()));
                    continue;
                }
                TemplatePart::Literal(HiddenText::new(text))
            }
        };
        template.parts.push(part);
    }
    template
}

/// Returns the entry of the server in the client's file.
fn entry(client: Client, server: &Generated) -> Value {
    let texts = |pairs: &[(String, Vec<Piece>)]| {
        Value::Object(pairs.iter().map(|(name, text)| (name.clone(), write_text(client, text).into())).collect())
    };
    let args: Vec<String> = server.args.iter().map(|text| write_text(client, text)).collect();
    let mut entry = match (&server.command, client) {
        (Some(command), Client::OpenCode) => {
            let words: Vec<_> = std::iter::once(command).chain(&args).collect();
            json!({"type": "local", "command": words, "environment": texts(&server.env)})
        }
        (Some(command), Client::Goose) => {
            json!({"type": "stdio", "cmd": command, "args": args, "envs": texts(&server.env)})
        }
        (Some(command), _) => json!({"command": command, "args": args, "env": texts(&server.env)}),
        (None, Client::Codex) => json!({"url": server.url, "http_headers": texts(&server.headers)}),
        (None, Client::Goose) => {
            let kind = if server.is_sse { "sse" } else { "streamable_http" };
            json!({"type": kind, "uri": server.url, "headers": {}})
        }
        (None, Client::OpenCode) => json!({"type": "remote", "url": server.url, "headers": texts(&server.headers)}),
        (None, Client::Windsurf) => json!({"serverUrl": server.url, "headers": texts(&server.headers)}),
        (None, Client::Continue) => {
            let kind = if server.is_sse { "sse" } else { "streamable-http" };
            json!({"type": kind, "url": server.url, "requestOptions": {"headers": texts(&server.headers)}})
        }
        (None, _) => {
            let kind = if server.is_sse { "sse" } else { "http" };
            json!({"type": kind, "url": server.url, "headers": texts(&server.headers)})
        }
    };
    if matches!(client, Client::Codex | Client::Goose | Client::OpenCode | Client::Zed) {
        entry["enabled"] = server.is_enabled.into();
    } else {
        entry["disabled"] = (!server.is_enabled).into();
    }
    let denied = if client == Client::Codex { "disabled_tools" } else { "disabledTools" };
    entry[denied] = server.denied.clone().into();
    entry
}

fn expected_transport(client: Client, server: &Generated) -> ServerTransport {
    let texts = |pairs: &[(String, Vec<Piece>)]| {
        pairs.iter().map(|(name, text)| (name.clone(), expected_text(client, text))).collect()
    };
    match &server.command {
        Some(command) => ServerTransport::Stdio {
            command: TextTemplate::literal(command.as_str()),
            args: server.args.iter().map(|text| expected_text(client, text)).collect(),
            env: texts(&server.env),
            cwd: None,
            env_file: None,
        },
        None => ServerTransport::Http {
            url: TextTemplate::literal(server.url.as_str()),
            kind: match client {
                Client::Codex => HttpProtocol::Streamable,
                Client::OpenCode | Client::Windsurf => HttpProtocol::Unspecified,
                _ if server.is_sse => HttpProtocol::Sse,
                Client::AmazonQ => HttpProtocol::Unspecified,
                _ => HttpProtocol::Streamable,
            },
            headers: if client == Client::Goose { Vec::new() } else { texts(&server.headers) },
            bearer_token_env: None,
            env_headers: Vec::new(),
            oauth: None,
        },
    }
}

/// Writes the whole file and returns its name and its text.
fn write_file(client: Client, servers: &[(String, Generated)], is_pretty: bool) -> (&'static str, String) {
    let entries: Map<_, _> = servers.iter().map(|(name, server)| (name.clone(), entry(client, server))).collect();
    let json_text = |value: &Value| {
        let text = if is_pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
        let text = text.unwrap();
        if is_pretty { format!("\u{FEFF}// comment\n{text} /* end */\n").replace('\n', "\r\n") } else { text }
    };
    match client {
        Client::Codex => {
            let mut document = toml_edit::DocumentMut::new();
            document["mcp_servers"] = toml_edit::table();
            for (name, entry) in &entries {
                let table = to_toml(entry).as_inline_table().unwrap().clone();
                document["mcp_servers"][name] =
                    if is_pretty { table.into_table().into() } else { toml_edit::Value::from(table).into() };
            }
            ("config.toml", document.to_string())
        }
        Client::Goose => ("config.yaml", yaml_serde::to_string(&json!({"extensions": entries})).unwrap()),
        Client::Continue => {
            let mut list = Vec::new();
            for (name, mut entry) in entries {
                entry["name"] = name.into();
                list.push(entry);
            }
            ("config.yaml", yaml_serde::to_string(&json!({"name": "x", "mcpServers": list})).unwrap())
        }
        Client::VsCode => ("mcp.json", json_text(&json!({"servers": entries}))),
        Client::Zed => ("settings.json", json_text(&json!({"theme": "x", "context_servers": entries}))),
        Client::OpenCode => ("opencode.json", json_text(&json!({"mcp": entries}))),
        _ => ("mcp.json", json_text(&json!({"mcpServers": entries}))),
    }
}

fn to_toml(value: &Value) -> toml_edit::Value {
    match value {
        Value::String(text) => text.as_str().into(),
        Value::Bool(flag) => (*flag).into(),
        Value::Array(items) => items.iter().map(to_toml).collect::<toml_edit::Array>().into(),
        Value::Object(fields) => {
            fields.iter().map(|(key, value)| (key.as_str(), to_toml(value))).collect::<toml_edit::InlineTable>().into()
        }
        Value::Null | Value::Number(_) => unreachable!("not generated"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_format_is_read_as_it_was_written(
        servers in btree_map("[a-zA-Z0-9][a-zA-Z0-9 ._/@-]{0,10}", server(), 0..5),
        is_pretty in any::<bool>(),
    ) {
        let servers: Vec<_> = servers.into_iter().map(|(name, server)| (name.trim_end().to_owned(), server)).collect();
        let names: std::collections::HashSet<_> = servers.iter().map(|(name, _)| name).collect();
        prop_assume!(names.len() == servers.len());
        for client in Client::iter() {
            let (name, text) = write_file(client, &servers, is_pretty);
            let found = read(&ClientFile::named(client, name), text.as_bytes());
            let found = found.map_err(|error| TestCaseError::fail(format!("{client}: {error}\n{text}")))?;
            prop_assert!(found.unreadable.is_empty(), "{client}: {:?}\n{text}", found.unreadable);
            prop_assert_eq!(found.servers.len(), servers.len(), "{}\n{}", client, text);
            for (name, server) in &servers {
                let read = found.servers.iter().find(|read| read.name == *name);
                let Some(read) = read else { return Err(TestCaseError::fail(format!("{client}: {name}\n{text}"))) };
                prop_assert!(read.transport == expected_transport(client, server), "{client}: {name}\n{text}");
                prop_assert_eq!(read.enabled, server.is_enabled, "{}\n{}", client, text);
                prop_assert_eq!(&read.tools.denied, &server.denied, "{}\n{}", client, text);
            }
        }
    }

    #[test]
    fn import_then_connect_with_replace_then_disconnect_restores_every_byte(
        servers in btree_map("[a-zA-Z0-9][a-zA-Z0-9._/@-]{0,10}", server(), 0..5),
        is_pretty in any::<bool>(),
    ) {
        let servers: Vec<_> = servers.into_iter().collect();
        let entry = SatelliteEntry::bridge("/usr/bin/satellite");
        for client in Client::iter() {
            let (name, text) = write_file(client, &servers, is_pretty);
            let (file, before) = (ClientFile::named(client, name), text.as_bytes());
            // An import leaves disabled servers out, so they stay.
            let found = read(&file, before).unwrap().servers;
            let (moved, staying): (Vec<_>, Vec<_>) = found.iter().partition(|server| server.enabled);
            let moved: Vec<&str> = moved.iter().map(|server| server.name.as_str()).collect();
            let after = replace_servers(client, Some(before), &entry, &moved)
                .map_err(|error| TestCaseError::fail(format!("{client}: {error}\n{text}")))?;
            let mut expected: Vec<&str> = staying.iter().map(|server| server.name.as_str()).collect();
            expected.push(ENTRY_NAME);
            prop_assert_eq!(server_names(client, Some(&after)).unwrap(), expected, "{}\n{}", client, text);

            let replaced = moved.iter().map(|name| (*name).to_owned()).collect();
            let backup = Some(("backup".to_owned(), before));
            let record = ConnectRecord::new(client, name.into(), &entry, backup, &after, replaced);
            let undo = disconnect(&record, Some(&after), Some(before)).unwrap();
            prop_assert!(undo == Undo::Restore(before.to_vec()), "{client}\n{text}");
            // Before the client's file is written, there is nothing to restore.
            prop_assert!(disconnect(&record, Some(before), Some(before)).unwrap() == Undo::NothingToDo, "{client}\n{text}");

            // Somebody else has changed, emptied or deleted the file: the servers return with all their settings.
            let changed = [&after[..], b"\n"].concat();
            for (current, kept) in [(Some(&changed[..]), &staying[..]), (Some(b""), &[]), (None, &[])] {
                let undo = disconnect(&record, current, Some(before)).unwrap();
                let Undo::RemoveOnly { contents, missing, .. } = undo else {
                    prop_assert!(moved.is_empty(), "{client}: {undo:?}\n{text}");
                    continue;
                };
                prop_assert!(missing.is_empty(), "{client}: {missing:?}\n{text}");
                // The place in the file may differ.
                let sorted = |mut servers: Vec<ClientServer>| {
                    for server in &mut servers {
                        server.at = None;
                    }
                    servers.sort_by(|one, other| one.name.cmp(&other.name));
                    servers
                };
                let wanted = found.iter().filter(|server| server.enabled || kept.contains(server)).cloned().collect();
                let again = read(&file, &contents).unwrap().servers;
                prop_assert!(sorted(again) == sorted(wanted), "{client}: {}\n{text}", String::from_utf8_lossy(&contents));
            }
        }
    }

    #[test]
    fn a_changed_fixture_causes_no_panic(
        at in any::<prop::sample::Index>(),
        length in 0..40_usize,
        inserted in "[\\[\\]{}\":,$\\\\a0 \n#'&*!|>-]{0,6}",
    ) {
        for client in Client::iter() {
            let home = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/home-{client}"));
            let machine = Machine {
                config_home: home.join(".config"),
                project: Some(home.join("project")),
                home,
                variables: ClientVariables::default(),
            };
            for file in existing_files(&machine) {
                let mut bytes = std::fs::read(&file.path).unwrap();
                let start = at.index(bytes.len());
                let end = (start + length).min(bytes.len());
                bytes.splice(start..end, inserted.bytes());
                match read(&file, &bytes) {
                    Ok(found) => {
                        for server in found.servers {
                            if let ServerTransport::Stdio { args, env, .. } = server.transport {
                                secret_args(&args);
                                for (name, value) in env {
                                    looks_secret(&name, value.literal_prefix());
                                }
                            }
                        }
                    }
                    Err(error) => prop_assert!(error.to_string().contains("; "), "{error}"),
                }
            }
        }
    }

    #[test]
    fn any_text_is_parsed_into_parts_that_contain_it(text in "[a${}:\\-. envfil]{0,40}") {
        let quoted = serde_json::to_string(&text).unwrap();
        for client in Client::iter() {
            let file = ClientFile::named(client, "mcp.json");
            let text = format!(r#"{{"mcpServers": {{"a": {{"command": "x", "args": [{quoted}]}}}}}}"#);
            prop_assert_eq!(read(&file, text.as_bytes()).unwrap().servers.len(), 1);
        }
    }
}
