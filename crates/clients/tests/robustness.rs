//! Unusual, damaged and hostile files.
#![expect(clippy::expect_used, reason = "helpers of tests outside of test functions")]

use std::fmt::Write;
use std::time::Instant;

use mcp_satellite_clients::{
    Client, ClientFile, ClientFileError, ClientServers, FILE_SIZE_MAX, HttpProtocol, ImportNote, ServerTransport, read,
};

fn json(client: Client, text: &str) -> ClientServers {
    read(&ClientFile::named(client, "/home/ann/mcp.json"), text.as_bytes()).expect(text)
}

fn yaml(text: &str) -> ClientServers {
    read(&ClientFile::named(Client::Continue, "/home/ann/config.yaml"), text.as_bytes()).expect(text)
}

fn error(client: Client, path: &str, text: &[u8]) -> ClientFileError {
    read(&ClientFile::named(client, path), text).expect_err("the text is not valid")
}

#[test]
fn bom_crlf_comments_and_trailing_commas_are_accepted() {
    let text = "\u{FEFF}{\r\n  // comment\r\n  \"mcpServers\": {\r\n    \"a\": { \"command\": \"x\", /* y */ },\r\n  },\r\n}\r\n";
    assert_eq!(json(Client::Cursor, text).servers.len(), 1);
    assert_eq!(yaml("\u{FEFF}mcpServers:\r\n  - name: a\r\n    command: x\r\n").servers.len(), 1);
    let file = ClientFile::named(Client::Codex, "config.toml");
    let servers = read(&file, "\u{FEFF}[mcp_servers.a]\r\ncommand = \"x\"\r\n".as_bytes()).expect("valid");
    assert_eq!(servers.servers.len(), 1);
}

#[test]
fn empty_files_have_no_servers_and_a_note() {
    for text in ["", "  \n", "\u{FEFF}", "null", "[]", "3"] {
        let servers = json(Client::VsCode, text);
        assert!(servers.servers.is_empty() && servers.unreadable.is_empty(), "{text:?}");
        assert_eq!(servers.notes.len(), 1, "{text:?}");
    }
    assert!(json(Client::VsCode, "{}").notes.is_empty());
    assert!(json(Client::VsCode, r#"{"servers": {}}"#).notes.is_empty());
    assert!(json(Client::VsCode, r#"{"servers": null}"#).servers.is_empty());
    assert_eq!(json(Client::VsCode, r#"{"servers": [1]}"#).notes.len(), 1);
}

#[test]
fn a_truncated_file_is_an_error_at_its_end() {
    let whole = "{\n  \"mcpServers\": {\n    \"a\": { \"command\": \"x\", \"args\": [\"y\", 1], \"env\": { \"A\": \"b\" } }\n  }\n}";
    for length in 1..whole.len() {
        let error = error(Client::Cursor, "/home/ann/mcp.json", &whole.as_bytes()[..length]);
        let ClientFileError::Truncated { line, .. } = error else { panic!("{length}: {error}") };
        assert_eq!(line, whole[..length].trim_end().matches('\n').count() + 1, "{length}");
        assert!(error.to_string().contains("truncated"), "{error}");
    }
    let toml = "[mcp_servers.a]\ncommand = \"np";
    assert!(matches!(error(Client::Codex, "config.toml", toml.as_bytes()), ClientFileError::Truncated { line: 2, .. }));
    let yaml = "mcpServers:\n  - name: \"a";
    assert!(matches!(error(Client::Continue, "c.yaml", yaml.as_bytes()), ClientFileError::Truncated { .. }));
}

#[test]
fn a_syntax_error_has_a_position_and_no_value() {
    let cases = [
        (
            Client::Cursor,
            "mcp.json",
            "{\n \"mcpServers\": {\n  \"a\": { \"env\": { \"K\": \"PLANTED\" \"L\": 1 } } } }",
            3,
        ),
        (Client::Cursor, "mcp.json", "{\n \"a\": PLANTED\n}", 2),
        (Client::Cursor, "mcp.json", "{\n \"a\": \"PLANTED,\n \"b\": 1\n}", 2),
        (Client::Codex, "config.toml", "[mcp_servers.a]\nenv = { K = PLANTED }\n", 2),
        (Client::Codex, "config.toml", "[a]\nb = \"PLANTED\"\nb = \"PLANTED\"\n", 3),
        (Client::Goose, "config.yaml", "extensions:\n  a: \"PLANTED\n  b: [PLANTED\nc: d\n", 2),
        (Client::Goose, "config.yaml", "extensions:\n\ta: PLANTED\n", 2),
    ];
    for (client, path, text, line) in cases {
        let error = error(client, path, text.as_bytes());
        let message = error.to_string();
        assert!(!message.contains("PLANTED"), "{message}");
        assert!(message.contains(path) && message.contains("line ") && message.contains("; "), "{message}");
        if let ClientFileError::Syntax { line: found, .. } = error {
            assert!(found.abs_diff(line) <= 1, "{message}");
        }
    }
    let error = error(Client::Cursor, "mcp.json", b"{\n  \"a\xFF\": 1}");
    assert!(matches!(error, ClientFileError::NotText { line: 2, column: 5, .. }), "{error}");
}

#[test]
fn ten_megabytes_are_read_and_more_than_sixteen_are_an_error() {
    let mut text = "{\"mcpServers\": {".to_owned();
    let mut count = 0;
    while text.len() < 10_000_000 {
        write!(text, "\"server-{count}\": {{\"command\": \"npx\", \"args\": [\"-y\", \"p{count}\"], \"env\": {{\"A\": \"${{B}}\"}}}},")
            .expect("written");
        count += 1;
    }
    text.push_str("}}");
    let started = Instant::now();
    assert_eq!(json(Client::Cursor, &text).servers.len(), count);
    assert!(started.elapsed().as_secs() < 30, "{:?}", started.elapsed());

    let large = vec![b' '; FILE_SIZE_MAX + 1];
    assert!(
        matches!(error(Client::Cursor, "mcp.json", &large), ClientFileError::TooLarge { bytes, .. } if bytes == large.len())
    );
}

#[test]
fn one_text_with_many_delimiters_is_read_in_linear_time() {
    let started = Instant::now();
    for unit in ["${", "${{", "{env:", "$", "${A}", "a b"] {
        let value = unit.repeat(2_000_000 / unit.len());
        let text = format!(r#"{{"mcpServers": {{"a": {{"command": "x", "args": ["{value}"]}}}}}}"#);
        assert_eq!(json(Client::OpenCode, &text).servers.len(), 1);
    }
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
}

#[test]
fn deep_nesting_is_an_error_and_does_not_overflow_the_stack() {
    let deep = 200_000;
    let cases = [
        (Client::Cursor, "mcp.json", "[".repeat(deep)),
        (Client::Cursor, "mcp.json", "{\"a\":".repeat(deep)),
        (Client::Continue, "c.yaml", "[".repeat(deep)),
        (Client::Continue, "c.yaml", "- ".repeat(deep)),
        (Client::Continue, "c.yaml", "{a: ".repeat(deep)),
        (Client::Continue, "c.yaml", "? ".repeat(deep)),
        (Client::Continue, "c.yaml", (0..2000).fold(String::new(), |text, at| text + &" ".repeat(at) + "a:\n")),
        (Client::Codex, "c.toml", format!("a = {}", "[".repeat(deep))),
        (Client::Codex, "c.toml", format!("a = {}", "{ b = ".repeat(deep))),
        (Client::Codex, "c.toml", format!("{}b = 1", "a.".repeat(deep))),
        (Client::Codex, "c.toml", format!("[{}b]", "a.".repeat(deep))),
        (Client::Codex, "c.toml", format!("x = {{ {}b = 1 }}", "\"a\" . ".repeat(deep))),
    ];
    for (client, path, text) in cases {
        let started = Instant::now();
        let found = error(client, path, text.as_bytes());
        assert!(matches!(found, ClientFileError::TooDeep { .. }), "{path} {}: {found}", &text[..12]);
        assert!(started.elapsed().as_secs() < 10, "{path} {}: {:?}", &text[..12], started.elapsed());
    }
    // Brackets in strings and comments are no nesting.
    let brackets = "[".repeat(5000);
    let text =
        format!("{{ // {brackets}\n /* {brackets} */ \"mcpServers\": {{\"a\": {{\"command\": \"\\\"{brackets}\"}}}}}}");
    assert_eq!(json(Client::Cursor, &text).servers.len(), 1);
}

#[test]
fn aliases_of_yaml_do_not_multiply_without_limit() {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for at in 1..12 {
        let earlier = format!("*a{}, ", at - 1).repeat(9);
        writeln!(text, "a{at}: &a{at} [{}]", earlier.trim_end_matches(", ")).expect("written");
    }
    let found = error(Client::Continue, "c.yaml", text.as_bytes());
    assert!(found.to_string().contains("repetition"), "{found}");
}

#[test]
fn of_duplicate_names_the_last_server_is_imported() {
    let text = r#"{"mcpServers": {"a": {"command": "one"}, "b": {"command": "x"}, "a": {"command": "two"}}}"#;
    let servers = json(Client::Cursor, text);
    let names: Vec<_> = servers.servers.iter().map(|server| server.name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
    let ServerTransport::Stdio { command, .. } = &servers.servers[1].transport else { panic!("not stdio") };
    assert_eq!(command.as_literal(), Some("two"));
    assert_eq!(servers.unreadable.len(), 1);

    let servers = yaml("mcpServers:\n  - {name: a, command: x}\n  - {name: a, command: y}\n");
    assert_eq!((servers.servers.len(), servers.unreadable.len()), (1, 1));

    let text = r#"{"mcpServers": {"a": {"command": "one", "command": "two", "env": {"K": "1", "K": "2"}}}}"#;
    let servers = json(Client::Cursor, text);
    assert_eq!(servers.servers[0].notes.len(), 2);
    // A duplicate key of YAML concerns one server.
    let servers = yaml("mcpServers:\n  - name: a\n    command: x\n    command: y\n");
    assert_eq!(servers.servers.len(), 1);
}

#[test]
fn wrong_types_concern_one_server() {
    let cases = [
        ("1", "a number"),
        ("null", "null"),
        ("[]", "a list"),
        (r#"{"command": 1}"#, "`command` is a number"),
        (r#"{"command": "x", "args": {"a": 1}}"#, "`args` is an object"),
        (r#"{"command": "x", "args": [[1]]}"#, "`args` is a list"),
        (r#"{"command": "x", "env": ["A=B"]}"#, "`env` is a list"),
        (r#"{"command": "x", "env": {"A": {}}}"#, "`env.A` is an object"),
        (r#"{"command": "x", "disabled": 1}"#, "`disabled` is a number"),
        (r#"{"command": "x", "cwd": []}"#, "`cwd` is a list"),
        (r#"{"command": []}"#, "empty list"),
        (r#"{"command": ""}"#, "neither"),
        (r#"{"command": "a 'b"}"#, "quote"),
        (r#"{"url": "ftp://x"}"#, "http"),
        (r#"{"url": "x", "type": "grpc"}"#, "`grpc` is not supported"),
        (r#"{"url": "x", "type": "my secret value"}"#, "with this value is not supported"),
        (r#"{"type": "stdio", "url": "http://x"}"#, "`command` is missing"),
        (r#"{"type": "http", "command": "x"}"#, "`url` is missing"),
        ("{}", "neither"),
    ];
    for (entry, reason) in cases {
        let text = format!(r#"{{"mcpServers": {{"bad": {entry}, "good": {{"command": "x"}}}}}}"#);
        let servers = json(Client::Cursor, &text);
        assert_eq!(servers.servers.len(), 1, "{entry}");
        assert_eq!(servers.unreadable.len(), 1, "{entry}");
        assert!(servers.unreadable[0].reason.contains(reason), "{entry}: {}", servers.unreadable[0].reason);
    }
}

#[test]
fn all_spellings_of_the_transport_are_read() {
    for key in ["type", "transport", "transportType"] {
        for (spelling, kind) in [
            ("http", HttpProtocol::Streamable),
            ("HTTP", HttpProtocol::Streamable),
            ("streamable-http", HttpProtocol::Streamable),
            ("streamableHttp", HttpProtocol::Streamable),
            ("streamable_http", HttpProtocol::Streamable),
            ("sse", HttpProtocol::Sse),
            ("SSE", HttpProtocol::Sse),
            ("remote", HttpProtocol::Unspecified),
        ] {
            let text = format!(r#"{{"mcpServers": {{"a": {{"{key}": "{spelling}", "url": "http://x/mcp"}}}}}}"#);
            let servers = json(Client::Cursor, &text);
            let ServerTransport::Http { kind: found, .. } = servers.servers[0].transport else { panic!("{text}") };
            assert_eq!(found, kind, "{text}");
        }
    }
}

#[test]
fn a_command_with_arguments_in_one_string_is_split_unless_it_is_a_path() {
    let command = |text: &str| {
        let text = format!(r#"{{"mcpServers": {{"a": {{"command": "{text}"}}}}}}"#);
        let servers = json(Client::Cursor, &text);
        let ServerTransport::Stdio { command, args, .. } = &servers.servers[0].transport else { panic!("{text}") };
        let args: Vec<_> = args.iter().map(|arg| arg.as_literal().unwrap_or("?").to_owned()).collect();
        (command.as_literal().unwrap_or("?").to_owned(), args.join("|"))
    };
    let pair = |command: &str, args: &str| (command.to_owned(), args.to_owned());
    assert_eq!(command("npx -y 'my server'"), pair("npx", "-y|my server"));
    assert_eq!(command("/usr/bin/node /srv/x.js"), pair("/usr/bin/node", "/srv/x.js"));
    assert_eq!(command("/opt/My Tools/server"), pair("/opt/My Tools/server", ""));
    assert_eq!(command("uvx  tool --root ${HOME}"), pair("uvx", "tool|--root|?"));
    assert_eq!(command(" npx "), pair("npx", ""));
    let given = json(Client::Cursor, r#"{"mcpServers": {"a": {"command": "my tool", "args": ["x"]}}}"#);
    let ServerTransport::Stdio { command, .. } = &given.servers[0].transport else { panic!("not stdio") };
    assert_eq!(command.as_literal(), Some("my tool"));
    let given = json(Client::Cursor, r#"{"mcpServers": {"a": {"command": "npx -y", "args": ["tool"]}}}"#);
    let ServerTransport::Stdio { command, args, .. } = &given.servers[0].transport else { panic!("not stdio") };
    let args: Vec<_> = args.iter().filter_map(|arg| arg.as_literal()).collect();
    assert_eq!((command.as_literal(), args), (Some("npx"), vec!["-y", "tool"]));
}

#[test]
fn unknown_keys_become_notes() {
    let text = r#"{"mcpServers": {"a": {"command": "x", "new": 1, "oauth": {"x": 1}}}, "extra": 1}"#;
    let servers = json(Client::Cursor, text);
    assert!(servers.servers[0].notes.contains(&ImportNote::UnknownKey("new".to_owned())));
    assert!(servers.servers[0].notes.iter().any(|note| note.to_string().contains("oauth")));
    assert_eq!(servers.notes, [ImportNote::UnknownKey("extra".to_owned())]);
}

#[test]
fn the_table_of_another_client_is_read_when_the_own_one_is_missing() {
    for (client, text) in [
        (Client::ClaudeCode, r#"{"servers": {"a": {"url": "http://x"}}}"#),
        (Client::ClaudeCode, r#"{"context_servers": {"a": {"command": "x"}}}"#),
        (Client::VsCode, r#"{"mcpServers": {"a": {"command": "x"}}}"#),
        (Client::VsCode, r#"{"mcp": {"servers": {"a": {"command": "x"}}}}"#),
        (Client::Cursor, r#"{"a": {"command": "x"}}"#),
        (Client::Cursor, r#"{"mcp": {"a": {"type": "local", "command": ["x"]}}}"#),
        (Client::Continue, r#"{"name": "a", "command": "x"}"#),
        (
            Client::Continue,
            r#"{"experimental": {"modelContextProtocolServers": [{"transport": {"type": "stdio", "command": "x"}}]}}"#,
        ),
    ] {
        assert_eq!(json(client, text).servers.len(), 1, "{client} {text}");
    }
}
