//! Reads the configuration files of all clients in the directories `fixtures/home-*` and compares the result with
//! `fixtures/expected/*.txt`. `UPDATE_EXPECTED=1` writes these files.

mod render;

use std::path::{Path, PathBuf};

use mcp_satellite_clients::{
    Client, ClientScope, ClientVariables, Machine, SatelliteEntry, ServerTransport, TemplatePart, TextTemplate,
    add_entry, candidate_files, connect_paths, describe_file, existing_files, looks_secret, read, secret_args,
    secret_in_arg,
};
use strum::IntoEnumIterator;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn machine(client: Client) -> Machine {
    let home = fixtures().join(format!("home-{client}"));
    Machine {
        config_home: home.join(".config"),
        project: Some(home.join("project")),
        home,
        variables: ClientVariables::default(),
    }
}

#[test]
fn every_client_is_read_as_expected() {
    let mut different = Vec::new();
    for client in Client::iter() {
        let machine = machine(client);
        let files = existing_files(&machine);
        assert!(!files.is_empty(), "{client} has no fixture");
        let mut text = String::new();
        for file in files {
            assert_eq!(file.client, client, "{}", file.path.display());
            let servers = read(&file, &std::fs::read(&file.path).unwrap()).unwrap();
            let path = file.path.strip_prefix(&machine.home).unwrap();
            text.push_str(&render::file(path, &file, &servers));
        }
        let expected = fixtures().join(format!("expected/{client}.txt"));
        if std::env::var_os("UPDATE_EXPECTED").is_some() {
            std::fs::create_dir_all(expected.parent().unwrap()).unwrap();
            std::fs::write(&expected, &text).unwrap();
        } else if std::fs::read_to_string(&expected).unwrap_or_default() != text {
            different.push(format!("{}:\n{text}", expected.display()));
        }
    }
    assert!(different.is_empty(), "set UPDATE_EXPECTED=1 to accept:\n{}", different.join("\n"));
}

#[test]
fn no_error_of_an_edit_contains_a_planted_value() {
    let entry = SatelliteEntry::bridge("/usr/local/bin/satellite");
    let mut errors = 0;
    for client in Client::iter() {
        for file in existing_files(&machine(client)) {
            let text = std::fs::read(&file.path).unwrap();
            for end in (0..text.len()).step_by(11) {
                for damage in ["", "\"", "]", ": :", "\n\t- {"] {
                    let damaged = [&text[..end], damage.as_bytes(), &text[(end + 40).min(text.len())..]].concat();
                    let Err(error) = add_entry(client, Some(&damaged), &entry) else { continue };
                    assert!(!format!("{error} {error:?}").contains("PLANTED"), "{}: {error}", file.path.display());
                    errors += 1;
                }
            }
        }
    }
    assert!(errors > 1000, "only {errors} damaged files were rejected");
}

#[test]
fn no_debug_output_contains_a_planted_value() {
    let mut files = 0;
    for client in Client::iter() {
        for file in existing_files(&machine(client)) {
            let text = std::fs::read(&file.path).unwrap();
            let servers = read(&file, &text).unwrap();
            assert!(!format!("{servers:?} {servers:#?}").contains("PLANTED"), "{}", file.path.display());
            let notes = servers.servers.iter().flat_map(|server| &server.notes).chain(&servers.notes);
            let messages = notes.map(ToString::to_string).chain(servers.unreadable.iter().map(|e| e.reason.clone()));
            assert!(!messages.collect::<String>().contains("PLANTED"), "{}", file.path.display());
            files += 1;
        }
    }
    assert!(files >= 28, "{files} files");
}

#[test]
fn every_planted_value_is_recognized_as_a_secret() {
    let mut planted = 0;
    for client in Client::iter() {
        for file in existing_files(&machine(client)) {
            let servers = read(&file, &std::fs::read(&file.path).unwrap()).unwrap();
            for server in &servers.servers {
                let at = format!("{client} {}", server.name);
                match &server.transport {
                    ServerTransport::Stdio { args, env, .. } => {
                        for (name, value) in env {
                            planted += check_pair(name, value, &at);
                        }
                        let found = secret_args(args);
                        for (index, arg) in args.iter().enumerate() {
                            if literal(arg).contains("PLANTED") {
                                let secret = found.iter().find(|secret| secret.index == index);
                                let secret = secret.unwrap_or_else(|| panic!("{at}: argument {index}"));
                                assert!(literal(arg)[secret.range.clone()].contains("PLANTED"), "{at}");
                                planted += 1;
                            } else {
                                assert!(found.iter().all(|secret| secret.index != index), "{at}: {}", literal(arg));
                            }
                        }
                    }
                    ServerTransport::Http { url, headers, .. } => {
                        for (name, value) in headers {
                            planted += check_pair(name, value, &at);
                        }
                        if literal(url).contains("PLANTED") {
                            let range = secret_in_arg(None, &literal(url)).unwrap();
                            assert!(literal(url)[range].contains("PLANTED"), "{at}");
                            planted += 1;
                        } else {
                            assert_eq!(secret_in_arg(None, &literal(url)), None, "{at}");
                        }
                    }
                }
            }
        }
    }
    assert!(planted >= 25, "{planted} planted secrets");
}

fn check_pair(name: &str, value: &TextTemplate, at: &str) -> usize {
    let text = literal(value);
    let is_planted = text.contains("PLANTED");
    if value.as_literal().is_some() && (is_planted || !text.contains("Bearer")) {
        // Three values have a name and a look that no rule can recognize.
        let hidden = ["MY_ENV_VAR", "LITERAL", "PLAIN"].contains(&name);
        assert_eq!(looks_secret(name, &text), is_planted && !hidden, "{at}: {name}={text}");
    }
    usize::from(is_planted)
}

fn literal(template: &TextTemplate) -> String {
    let text = |part: &TemplatePart| match part {
        TemplatePart::Literal(text) => text.expose().to_owned(),
        _ => String::new(),
    };
    template.parts.iter().map(text).collect()
}

fn machine_of_ann() -> Machine {
    Machine {
        home: "/home/ann".into(),
        config_home: "/home/ann/.config".into(),
        project: Some("/srv/project".into()),
        variables: ClientVariables::default(),
    }
}

#[test]
fn all_sixteen_clients_have_candidates_and_project_files_are_marked() {
    let machine = machine_of_ann();
    let files = candidate_files(&machine);
    for client in Client::iter() {
        assert!(files.iter().any(|file| file.client == client), "{client}");
    }
    for file in &files {
        assert_eq!(file.from_project, file.path.starts_with("/srv/project"), "{}", file.path.display());
        assert_eq!(file.from_project, file.scope == ClientScope::Project, "{}", file.path.display());
    }
    assert!(existing_files(&machine).is_empty());
    let without = candidate_files(&Machine { project: None, ..machine });
    assert!(without.iter().all(|file| !file.from_project));
}

#[test]
fn a_file_that_a_variable_moved_is_read_and_edited_there() {
    let machine = |set: &str| Machine {
        home: "/home/ann".into(),
        config_home: "/home/ann/.config".into(),
        project: None,
        variables: ClientVariables::read(|name| (name == set).then(|| "/moved".into())),
    };
    // The variable, the client, the moved file, and the file that it replaces.
    for (variable, client, moved, replaced) in [
        ("CLAUDE_CONFIG_DIR", Client::ClaudeCode, "/moved/.claude.json", ".claude.json"),
        ("CLINE_MCP_SETTINGS_PATH", Client::Cline, "/moved", ".cline/data/settings/cline_mcp_settings.json"),
        (
            "CLINE_DATA_DIR",
            Client::Cline,
            "/moved/settings/cline_mcp_settings.json",
            ".cline/data/settings/cline_mcp_settings.json",
        ),
        (
            "CLINE_DIR",
            Client::Cline,
            "/moved/data/settings/cline_mcp_settings.json",
            ".cline/data/settings/cline_mcp_settings.json",
        ),
        ("CODEX_HOME", Client::Codex, "/moved/config.toml", ".codex/config.toml"),
        (
            "CONTINUE_GLOBAL_DIR",
            Client::Continue,
            "/moved/mcpServers/satellite.yaml",
            ".continue/mcpServers/satellite.yaml",
        ),
        ("GEMINI_CLI_HOME", Client::GeminiCli, "/moved/.gemini/settings.json", ".gemini/settings.json"),
        ("GOOSE_PATH_ROOT", Client::Goose, "/moved/config/config.yaml", ".config/goose/config.yaml"),
    ] {
        assert_eq!(connect_paths(client, &machine(variable)), [Path::new(moved)], "{variable}");
        assert_eq!(connect_paths(client, &machine("OTHER"))[0], Path::new("/home/ann").join(replaced), "{variable}");
        let read = if client == Client::Continue { "/moved/config.yaml" } else { moved };
        let files = candidate_files(&machine(variable));
        assert!(files.iter().any(|file| file.client == client && file.path == Path::new(read)), "{variable}");
        let replaced = Path::new("/home/ann").join(replaced);
        assert!(files.iter().all(|file| file.path != replaced), "{variable}");
    }
    // opencode reads these besides its own.
    for (variable, moved) in [("OPENCODE_CONFIG", "/moved"), ("OPENCODE_CONFIG_DIR", "/moved/opencode.jsonc")] {
        let own = Path::new("/home/ann/.config/opencode/opencode.json");
        let paths: Vec<_> = candidate_files(&machine(variable)).into_iter().map(|file| file.path).collect();
        assert!(
            paths.iter().any(|path| path == Path::new(moved)) && paths.iter().any(|path| path == own),
            "{variable}"
        );
        assert_eq!(connect_paths(Client::OpenCode, &machine(variable))[0], own, "{variable}");
    }
}

#[test]
fn files_of_other_versions_and_plugins_are_candidates() {
    let files = candidate_files(&machine_of_ann());
    for (client, path) in [
        (Client::AmazonQ, "/home/ann/.aws/amazonq/agents/default.json"),
        (Client::AmazonQ, "/home/ann/.aws/amazonq/personas/default.json"),
        (Client::AmazonQ, "/srv/project/.amazonq/agents/default.json"),
        (Client::Windsurf, "/home/ann/.config/devin/mcp_config.json"),
        (Client::Windsurf, "/home/ann/.codeium/windsurf/mcp_config.json"),
        (Client::Windsurf, "/srv/project/.devin/mcp_config.json"),
        (Client::Windsurf, "/srv/project/.devin/mcp_config.local.json"),
        (Client::Cline, "/home/ann/Documents/Cline/MCP/cline_mcp_settings.json"),
        (Client::Zed, "/home/ann/.var/app/dev.zed.Zed/config/zed/settings.json"),
    ] {
        assert!(files.iter().any(|file| file.client == client && file.path == Path::new(path)), "{path}");
    }
}

#[test]
fn profiles_of_vscode_and_codex_are_found() {
    let scopes = |client| existing_files(&machine(client)).into_iter().map(|file| file.scope).collect::<Vec<_>>();
    assert!(scopes(Client::VsCode).contains(&ClientScope::Profile("-7a1b2c".to_owned())));
    assert!(scopes(Client::Codex).contains(&ClientScope::Profile("work".to_owned())));
    assert!(scopes(Client::AmazonQ).contains(&ClientScope::Profile("dev".to_owned())));
}

#[test]
fn a_file_is_described_by_its_place_or_its_name() {
    let vscode = machine(Client::VsCode);
    let user = vscode.config_home.join("Code/User/mcp.json");
    let described = describe_file(&vscode, &user).unwrap();
    assert_eq!((described.client, described.scope, described.from_project), (Client::VsCode, ClientScope::User, false));
    for (path, client) in [
        ("/tmp/mcp.json", Client::ClaudeCode),
        ("/tmp/claude_desktop_config.json", Client::ClaudeDesktop),
        ("/tmp/x/.cursor/mcp.json", Client::Cursor),
        ("/tmp/x/.vscode/mcp.json", Client::VsCode),
        ("/tmp/config.toml", Client::Codex),
        ("/tmp/goose/config.yaml", Client::Goose),
        ("/tmp/servers.yml", Client::Continue),
        ("/tmp/opencode.jsonc", Client::OpenCode),
        ("/tmp/mcp_config.json", Client::Windsurf),
    ] {
        let file = describe_file(&vscode, Path::new(path)).unwrap();
        assert_eq!((file.client, file.from_project), (client, true), "{path}");
    }
    assert_eq!(describe_file(&vscode, Path::new("/tmp/servers.txt")), None);
}
