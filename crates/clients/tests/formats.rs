//! Details of the clients' formats: one file, and what is read from it.

mod render;

use std::path::Path;

use mcp_satellite_clients::{Client, ClientFile, read};

/// Reads `text` as a file of the client and returns the result as text, without its first line.
fn read_as(client: Client, name: &str, text: &str) -> String {
    let file = ClientFile::named(client, name);
    let servers = read(&file, text.as_bytes()).unwrap_or_else(|error| panic!("{client}: {error}"));
    let shown = render::file(Path::new(name), &file, &servers);
    shown.split_once('\n').map(|(_, rest)| rest.to_owned()).unwrap_or_default()
}

/// Returns a file of the client with one server `s`.
fn file_with(client: Client, entry: &str) -> (&'static str, String) {
    match client {
        Client::Goose => ("config.yaml", format!("extensions:\n  s: {entry}\n")),
        Client::Continue => ("config.yaml", format!("mcpServers:\n  - {entry}\n")),
        Client::Zed => ("settings.json", format!(r#"{{"context_servers": {{"s": {entry}}}}}"#)),
        Client::OpenCode => ("opencode.json", format!(r#"{{"mcp": {{"s": {entry}}}}}"#)),
        Client::VsCode => ("mcp.json", format!(r#"{{"servers": {{"s": {entry}}}}}"#)),
        _ => ("mcp.json", format!(r#"{{"mcpServers": {{"s": {entry}}}}}"#)),
    }
}

fn check(client: Client, entry: &str, expected: &[&str]) {
    let (name, text) = file_with(client, entry);
    let shown = read_as(client, name, &text);
    let lines: Vec<&str> = shown.lines().map(str::trim).collect();
    assert_eq!(lines, expected, "{client}: {entry}");
}

#[test]
fn timeouts_have_the_units_of_their_client() {
    for (client, entry, timeouts) in [
        (Client::Zed, r#"{"command": "x", "timeout": 90}"#, &["call timeout 90s"][..]),
        (Client::OpenCode, r#"{"command": ["x"], "timeout": 5000}"#, &["call timeout 5s"]),
        (
            Client::OpenCode,
            r#"{"command": ["x"], "timeout": {"startup": 2000, "catalog": 10, "execution": 3000}}"#,
            &["startup timeout 2s", "call timeout 3s", "note: `timeout.catalog` (timeout of lists) is not imported"],
        ),
        (
            Client::AmazonQ,
            r#"{"command": "x", "initializationTimeout": 60000, "timeout": 1000}"#,
            &["startup timeout 60s", "call timeout 1s"],
        ),
    ] {
        check(client, entry, &[&["server s", "stdio x []"], timeouts].concat());
    }
}

#[test]
fn only_the_variables_that_a_client_expands_are_variables() {
    let literal =
        |key: &str| format!("note: `{key}`: imported as plain text, because the client does not expand `${{…}}`");
    let (arg, brace) = (literal("args"), r#"stdio x ["${KEY}"]"#);
    let entry = r#"{"command": "x", "args": ["${KEY}"]}"#;
    for client in [Client::ClaudeDesktop, Client::Zed, Client::LmStudio, Client::Junie] {
        check(client, entry, &["server s", brace, &arg]);
    }
    for client in
        [Client::ClaudeCode, Client::Cursor, Client::Cline, Client::RooCode, Client::AmazonQ, Client::GeminiCli]
    {
        check(client, entry, &["server s", r#"stdio x ["«KEY»"]"#]);
    }
    check(
        Client::OpenCode,
        r#"{"command": ["x"], "environment": {"A": "${KEY}", "B": "{env:KEY}", "C": "{file:/k}"}}"#,
        &["server s", "stdio x []", "env A=${KEY}", "env B=«KEY»", "env C=«file /k»", &literal("environment.A")],
    );
    check(
        Client::Continue,
        "{name: s, command: x, env: {A: '${KEY}', B: '${{ secrets.K }}', C: '${{ inputs.K }}'}}",
        &["server s", "stdio x []", "env A=${KEY}", "env B=«secret K»", "env C=«input K»", &literal("env.A")],
    );
    // Continue converts the files of other clients.
    let copied =
        read_as(Client::Continue, "/h/.continue/mcpServers/copied.json", &file_with(Client::ClaudeCode, entry).1);
    assert!(copied.contains("«KEY»"), "{copied}");
    // Predefined variables of editors that have no counterpart are no environment variables.
    for client in [Client::Cursor, Client::VsCode] {
        check(
            client,
            r#"{"command": "x", "args": ["${workspaceFolderBasename}", "${cwd}"]}"#,
            &["server s", r#"stdio x ["«unknown ${workspaceFolderBasename}»", "«unknown ${cwd}»"]"#],
        );
    }
}

#[test]
fn keys_of_one_client_are_understood() {
    let tokens = "note: `oauth` (tokens of the client; log in again with `satellite auth`) is not imported";
    let sent = "http unspecified https://a.example";
    for (client, entry, expected) in [
        (
            Client::Cline,
            r#"{"transport": {"type": "stdio", "command": "x"}, "metadata": {"a": 1}, "remoteConfigured": true}"#,
            &[
                "server s",
                "stdio x []",
                "note: `metadata` (data of the client about the server) is not imported",
                "note: `remoteConfigured` (origin in the organization's configuration) is not imported",
            ][..],
        ),
        (
            Client::Cline,
            r#"{"type": "streamableHttp", "url": "https://a.example", "oauth": {"tokens": {"access_token": "PLANTED"}},
                "oauthClient": {"clientId": "id", "clientSecret": "secret"}}"#,
            &[
                "server s",
                "http streamable https://a.example",
                "oauth disabled=false scopes=[]",
                "client_id id",
                "client_secret secret",
                tokens,
            ],
        ),
        (
            Client::OpenCode,
            r#"{"type": "remote", "url": "https://a.example", "codemode": true, "oauth": {"callback_port": 1}}"#,
            &[
                "server s",
                sent,
                "note: `oauth.callback_port` (port of the OAuth redirect) is not imported",
                "note: `codemode` (use of the tools from code of the model) is not imported",
            ],
        ),
        (
            Client::Continue,
            "{name: s, command: x, sourceSlug: a/b}",
            &["server s", "stdio x []", "note: `sourceSlug` (origin in the hub of the client) is not imported"],
        ),
        (
            Client::AmazonQ,
            r#"{"type": "registry"}"#,
            &["unreadable s: the server comes from the organization's registry; add it by its `url`"],
        ),
        (Client::AmazonQ, r#"{"type": "http", "url": "https://a.example"}"#, &["server s", sent]),
        (Client::Zed, r#"{"url": "https://a.example"}"#, &["server s", "http streamable https://a.example"]),
        (
            Client::Goose,
            "{enabled: true, type: streamable_http, uri: 'http://localhost/mcp', socket: /run/s}",
            &["unreadable s: HTTP over a Unix socket is not supported; let the server listen on a port"],
        ),
        (Client::Goose, "{enabled: true, type: stdio, cmd: x}", &["server s", "stdio x []"]),
        (
            Client::Goose,
            "{type: stdio, cmd: x}",
            &[
                "server s (disabled)",
                "stdio x []",
                "note: `enabled`: missing; Goose does not use an extension without it",
            ],
        ),
    ] {
        check(client, entry, expected);
    }
}

#[test]
fn tables_of_several_versions_are_merged_as_the_client_does() {
    let entry = |url: &str| format!(r#"{{"type": "remote", "url": "https://{url}.example"}}"#);
    let (one, two) = (entry("one"), entry("two"));
    for (client, name, text, expected) in [
        (
            Client::OpenCode,
            "opencode.json",
            format!(
                r#"{{"mcp": {{"a": {one}, "b": {one}, "timeout": {{"startup": 1}}, "servers": {{"b": {two}, "c": {two}}}}}}}"#
            ),
            "server a\nhttp unspecified https://one.example\nserver b\nhttp unspecified https://two.example\n\
             server c\nhttp unspecified https://two.example\n\
             unreadable b: the name occurs again later in the file; the last server of a name applies\n\
             note: `mcp.timeout` (timeouts of all servers) is not imported",
        ),
        (
            Client::OpenCode,
            "opencode.json",
            format!(r#"{{"mcp": {{"servers": {one}, "timeout": {two}}}}}"#),
            "server servers\nhttp unspecified https://one.example\nserver timeout\nhttp unspecified https://two.example",
        ),
        (
            Client::Continue,
            "/h/.continue/config.json",
            format!(
                r#"{{"mcpServers": {{"a": {one}}}, "experimental": {{"modelContextProtocolServers": [
                    {{"name": "b", "transport": {{"type": "stdio", "command": "x"}}}}]}}}}"#
            ),
            "server b\nstdio x []\nnote: `mcpServers`: not imported, because Continue does not read it in config.json; move \
             it to `mcpServers/NAME.json`",
        ),
        (
            Client::Continue,
            "/h/.continue/config.json",
            format!(r#"{{"mcpServers": {{"a": {one}}}}}"#),
            "note: `mcpServers`: not imported, because Continue does not read it in config.json; move it to \
             `mcpServers/NAME.json`",
        ),
    ] {
        let shown = read_as(client, name, &text);
        let lines: Vec<&str> = shown.lines().map(str::trim).collect();
        assert_eq!(lines.join("\n"), expected, "{client}: {text}");
    }
}
