//! Values that are recognized as secrets, and values that are not.

use mcp_satellite_clients::{
    HiddenText, TemplatePart, TextTemplate, looks_secret, may_be_secret, secret_args, secret_in_arg,
    template_has_secret,
};

#[test]
fn secrets_in_environment_variables_and_headers_are_recognized() {
    let secrets = [
        ("GITHUB_TOKEN", "ghp_16C7e42F292c6912E7710c838347Ae178B4a"),
        ("OPENAI_API_KEY", "sk-proj-Abc123Def456Ghi789"),
        ("apiKey", "4f3c2b1a"),
        ("DB_PASSWORD", "hunter"),
        ("DB_PASSWORD", "1234"),
        ("PGPASSWORD", "correct horse battery staple"),
        ("SECRET", "abc"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("Authorization", "Bearer abcdef"),
        ("Authorization", "Basic dXNlcjpwdw=="),
        ("X-API-Key", "a1b2c3d4e5f60718"),
        ("x-goog-api-key", "AIzaSyA-1234567890abcdefghijk"),
        ("Cookie", "session=4f3c2b1a9d8e7f60"),
        ("DATABASE_URL", "postgres://app:s3cret@db.example.com/app"),
        ("ENDPOINT", "https://mcp.example.com/mcp?api_key=abcdef123"),
        ("SENTRY_DSN", "https://4f3c2b1a9d8e7f604f3c2b1a9d8e7f60@o1.ingest.sentry.io/1"),
        ("ANYTHING", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"),
        ("ANYTHING", "9f86d081884c7d659a2feaa0c55ad015"),
        ("ANYTHING", "xoxb-123456789012-abcdef"),
        ("PRIVATE_KEY", "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----"),
        ("SLACK_USER_AUTH", "xyz-12345678"),
        ("OPENAPI_MCP_HEADERS", r#"{"Authorization": "Bearer ntn_abc", "Notion-Version": "2022-06-28"}"#),
    ];
    for (name, value) in secrets {
        assert!(looks_secret(name, value), "{name}={value}");
    }
}

#[test]
fn secrets_with_short_names_numbers_paths_and_connection_strings_are_recognized() {
    for (name, value) in [
        ("MYSQL_PASS", "hunter"),
        ("smtpPass", "hunter"),
        ("DB_PASS", "1"),
        ("MYSQL_PWD", "hunter"),
        ("DB_PW", "hunter"),
        ("AWS_SECRET_ACCESS_KEY", "/k9xJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE"),
        ("VAULT_SECRET_ID", "a1b2c3d4-5f60-7182-93a4-b5c6d7e8f901"),
        ("TOKEN", "12345678"),
        ("API_KEY", "12345678"),
        ("PIN", "4321"),
        ("STORAGE", "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=Zm9vYmFy1==;EndpointSuffix=core.x.net"),
        ("DB", "Server=db;Password=hunter2"),
        ("DB", "Server=tcp:db,1433;Initial Catalog=x;User ID=sa;Password=hunter2;"),
        ("DB", "host=localhost user=ann password=hunter2"),
        ("DB", "jdbc:postgresql://h/d?password=hunter2"),
        ("DB", "jdbc:sqlserver://h;user=sa;password=hunter2"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x=y,api-key=abc"),
        ("LIST", r#"[{"apiKey": "abc"}]"#),
        ("COMMAND", "npx x --api-key abc"),
    ] {
        assert!(looks_secret(name, value), "{name}={value}");
        assert!(may_be_secret(name, value), "{name}={value}");
    }
    for (name, value) in [
        ("PWD", "/home/ann"),
        ("BYPASS", "proxy"),
        ("MAX_TOKEN", "4096"),
        ("GPIO_PIN", "17"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/ann/google/credentials.json"),
        ("PROJECT_ID", "12345678"),
        ("LABELS", "team=a;stage=b"),
        ("COMMAND", "npx -y some-server --port 8080"),
        ("TITLE", "The token budget: 5 of 10"),
    ] {
        assert!(!looks_secret(name, value), "{name}={value}");
    }
}

#[test]
fn in_doubt_a_value_is_masked() {
    for (name, value) in [
        ("API_KEY", "1"),
        ("github_token", "x"),
        ("DATABASE", "postgres://user:pass@db/acme"),
        ("CALLBACK", "https://example.com/?code=abc"),
        ("X", "Tr0ub4dor&3"),
        ("X", "ghp_0123456789"),
        ("X", "file:///x"),
        ("PRIVATE", "x"),
        ("DB_CONN", "x"),
        ("MYSQL_PWD", "x"),
    ] {
        assert!(may_be_secret(name, value), "{name}={value}");
    }
    for (name, value) in [
        ("LOG_LEVEL", "information"),
        ("PORT", "1234567890"),
        ("RATIO", "0.12345678"),
        ("ROOT", "/srv/acme/files"),
        ("ROOT", "./data/files"),
        ("ENDPOINT", "https://example.com/api"),
        ("MODE", "Fast"),
        ("KEYBOARD", "us"),
    ] {
        assert!(!may_be_secret(name, value), "{name}={value}");
    }
}

#[test]
fn ordinary_values_are_not_secrets() {
    let ordinary = [
        ("PATH", "/usr/local/bin:/usr/bin"),
        ("KEY_FILE", "/home/ann/.ssh/id_ed25519"),
        ("TOKEN_FILE", "token.txt"),
        ("TOKEN_URL", "https://auth.example.com/token"),
        ("LOG_LEVEL", "debug"),
        ("PORT", "8080"),
        ("MAX_TOKENS", "4096"),
        ("AUTH_TYPE", "interactive"),
        ("AUTH", "none"),
        ("USE_TOKEN", "true"),
        ("API_URL", "https://api.example.com/v1?limit=10&format=json"),
        ("REPOSITORY", "https://github.com/modelcontextprotocol/servers.git"),
        ("PACKAGE", "@modelcontextprotocol/server-filesystem@2025.11.25"),
        ("MODEL", "claude-3-5-sonnet-20241022"),
        ("IMAGE", "ghcr.io/github/github-mcp-server:v0.12.1"),
        ("MODULE", "awslabs.aws-documentation-mcp-server@latest"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_PROFILE", "production"),
        ("NODE_OPTIONS", "--max-old-space-size=4096"),
        ("PYTHONPATH", "/home/ann/src"),
        ("TZ", "Europe/Berlin"),
        ("KEYBOARD", "us"),
        ("PROJECT_ID", "3fa85f64-5717-4562-b3fc-2c963f66afa6"),
        ("Content-Type", "application/json"),
        ("X-Team", "acme"),
        ("EMPTY_TOKEN", ""),
        ("LANG", "en_US.UTF-8"),
        ("GIT_REMOTE", "ssh://git@github.com/org/repository"),
        ("EXTRA", "sk-learn-with-extra-models"),
        ("OPTIONS", r#"{"level": "debug", "limit": 10}"#),
    ];
    for (name, value) in ordinary {
        assert!(!looks_secret(name, value), "{name}={value}");
    }
}

#[test]
fn secrets_in_arguments_are_found_with_their_bytes() {
    let found = |previous, arg: &'static str| secret_in_arg(previous, arg).map(|range| &arg[range]);
    assert_eq!(found(Some("--api-key"), "abc123def"), Some("abc123def"));
    assert_eq!(found(Some("--token"), "hunter"), Some("hunter"));
    assert_eq!(found(None, "--token=hunter2"), Some("hunter2"));
    assert_eq!(found(None, "API_KEY=4f3c2b1a9d"), Some("4f3c2b1a9d"));
    assert_eq!(found(Some("--header"), "Authorization: Bearer abc"), Some("abc"));
    assert_eq!(found(Some("--header"), "Authorization:Bearer abc"), Some("abc"));
    assert_eq!(found(None, "Bearer abc123"), Some("abc123"));
    assert_eq!(found(None, "sk-ant-api03-Abcdefgh12345"), Some("sk-ant-api03-Abcdefgh12345"));
    assert_eq!(found(None, "postgresql://ann:pw@localhost/db"), Some("pw"));
    assert_eq!(found(None, "--url=https://x.example.com/?key=abc123DEF"), Some("abc123DEF"));
    assert_eq!(found(None, "https://mcp.example.com/sse?apiKey=abc"), Some("abc"));
    assert_eq!(found(None, "https://x.example.com/?a_token=abc&b=1&key=9f8e7d"), Some("abc&b=1&key=9f8e7d"));
    assert_eq!(found(None, "https://mcp.zapier.com/api/mcp/s/MzA4YjJhNDctNGQ4ZS00/mcp"), Some("MzA4YjJhNDctNGQ4ZS00"));
    assert_eq!(found(None, "--header=Authorization: Bearer abc"), Some("abc"));
    assert_eq!(found(None, "--env=API_KEY=abc123"), Some("abc123"));
    let json = r#"{"exaApiKey":"abc-123","debug":true}"#;
    assert_eq!(found(Some("--config"), json), Some(json));

    // Shell commands and connection strings.
    assert_eq!(found(Some("-c"), "export GITHUB_TOKEN=ghp_x1 && npx x"), Some("ghp_x1"));
    assert_eq!(found(Some("-c"), "npx x --api-key sk-live1"), Some("sk-live1"));
    assert_eq!(found(Some("-c"), "A=1 TOKEN='correct horse' npx x"), Some("correct horse"));
    assert_eq!(found(Some("-c"), "bash -c 'export TOKEN=abc'"), Some("abc"));
    assert_eq!(
        found(Some("-c"), "curl -H \"Authorization: Bearer abc\" x -p --token def"),
        Some("abc\" x -p --token def")
    );
    let escaped = "export TOKEN=a\\ b npx x";
    assert_eq!(found(Some("-c"), escaped), Some(escaped));
    assert_eq!(secret_in_arg(None, "npx abc --token abc"), Some(16..19));
    assert_eq!(found(Some("-e"), "API_KEY=two words"), Some("two words"));
    assert_eq!(found(None, "--connection=Server=db;Password=hunter2"), Some("hunter2"));
    assert_eq!(found(None, "jdbc:postgresql://h/d?password=hunter2"), Some("hunter2"));
    // The rest of a URL after a variable.
    assert_eq!(found(None, ":hunter2@h/d"), Some("hunter2"));
    assert_eq!(found(None, "&apiKey=hunter2"), Some("hunter2"));
    assert_eq!(found(None, "?apiKey=hunter2&x="), Some("hunter2"));

    for (previous, arg) in [
        (Some("-c"), "npx x --token $TOKEN --api-key ${KEY}"),
        (Some("-c"), "cd /srv/app && exec node server.js --port 8080"),
        (None, ":latest"),
        (None, "&limit=10"),
        (None, "-y"),
        (None, "@modelcontextprotocol/server-filesystem"),
        (None, "mcp-server-git"),
        (None, "/home/ann/very/long/path/with/1234567890abcdef1234567890"),
        (Some("--key-file"), "/etc/key.pem"),
        (Some("--port"), "8080"),
        (Some("--token"), "--verbose"),
        (Some("-e"), "API_KEY"),
        (None, "https://mcp.example.com/sse"),
        (None, "--local-timezone=Europe/Berlin"),
        (None, "ghcr.io/github/github-mcp-server:v0.12.1"),
        (None, "localhost:8080"),
        (None, r#"{"root": "/home/ann", "limit": 10, "region": "eu"}"#),
        (Some("--api-key-env"), "MY_KEY_NAME"),
        (None, "--config=production"),
        (None, ""),
    ] {
        assert_eq!(secret_in_arg(previous, arg), None, "{previous:?} {arg}");
    }
}

#[test]
fn a_list_of_arguments_names_index_and_part() {
    let args = ["run", "--token", "abc123", "--api-key=zzz999"].map(TextTemplate::literal);
    let found: Vec<_> =
        secret_args(&args).into_iter().map(|secret| (secret.index, secret.part, secret.range)).collect();
    assert_eq!(found, [(2, 0, 0..6), (3, 0, 10..16)]);
}

#[test]
fn in_a_text_with_variables_only_the_literal_parts_decide() {
    let variable = TemplatePart::Variable { name: "TOKEN".to_owned(), default: None };
    let after =
        |text: &str| TextTemplate { parts: vec![TemplatePart::Literal(HiddenText::new(text)), variable.clone()] };
    assert!(!template_has_secret("Authorization", &after("Bearer ")));
    assert!(!template_has_secret("DATABASE_PASSWORD", &after("prefix-")));
    assert!(!template_has_secret("DATABASE_URL", &after("postgres://app:")));
    let around = |before: &str, after: &str| TextTemplate {
        parts: vec![
            TemplatePart::Literal(HiddenText::new(before)),
            variable.clone(),
            TemplatePart::Literal(HiddenText::new(after)),
        ],
    };
    assert!(template_has_secret("X", &around("postgres://", ":hunter2@h")));
    assert!(template_has_secret("X", &around("https://h/?t=", "&apiKey=hunter2")));
    assert!(!template_has_secret("X", &around("https://h/?t=", "&limit=10")));
    assert!(template_has_secret("X", &after("ghp_16C7e42F292c6912E7710c838347Ae178B4a")));
    assert!(template_has_secret("X-Key", &TextTemplate::literal("a1b2c3d4e5f60718")));
}

#[test]
fn no_input_causes_a_panic() {
    for text in [
        "=",
        ":",
        "://",
        "a://",
        "a://@",
        "a://:@",
        "?",
        "a?=",
        "--=",
        "ä=ö",
        "Bearer ",
        "bearer é",
        "€€€€€€€",
        "a://b?é=é&",
    ] {
        looks_secret(text, text);
        secret_in_arg(Some(text), text);
    }
    for unit in [
        "--a=",
        "a://b?c=",
        "{\"a\":",
        "a:",
        "--a=a://b?c=",
        "{\"a\":\"{",
        "a=b;",
        "a;b=",
        "a b ",
        "'\"",
        "--a=b ",
        "\\ ",
    ] {
        for length in [8000, 2_000_000] {
            let text = unit.repeat(length / unit.len());
            looks_secret("X", &text);
            secret_in_arg(None, &text);
        }
    }
}
