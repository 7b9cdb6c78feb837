//! A compact text of what was read, for comparison with a file.
#![expect(clippy::unwrap_used, reason = "writing to a string does not fail")]

use std::fmt::Write;
use std::path::Path;

use mcp_satellite_clients::{ClientFile, ClientServers, OAuthHints, ServerTransport, TemplatePart, TextTemplate};

pub(crate) fn file(path: &Path, file: &ClientFile, servers: &ClientServers) -> String {
    let mut out = String::new();
    let project = if file.from_project { " from a project" } else { "" };
    writeln!(out, "== {} ({}, {:?}{project})", path.display(), file.format, file.scope).unwrap();
    for input in &servers.inputs {
        let default = input.default.as_ref().map(|text| format!(" default={:?}", text.expose()));
        let secret = if input.password { " password" } else { "" };
        let description = input.description.as_deref().unwrap_or_default();
        let kind = format!("{:?}", input.kind);
        writeln!(out, "input {} {kind} {description:?}{secret}{}", input.id, default.unwrap_or_default()).unwrap();
    }
    for server in &servers.servers {
        let state = if server.enabled { "" } else { " (disabled)" };
        let scope = if server.scope == file.scope { String::new() } else { format!(" {:?}", server.scope) };
        writeln!(out, "server {}{scope}{state}", server.name).unwrap();
        transport(&mut out, &server.transport);
        if let Some(allowed) = &server.tools.allowed {
            writeln!(out, "    only tools {allowed:?}").unwrap();
        }
        if !server.tools.denied.is_empty() {
            writeln!(out, "    without tools {:?}", server.tools.denied).unwrap();
        }
        for (what, timeout) in [("startup", server.timeouts.startup), ("call", server.timeouts.call)] {
            if let Some(timeout) = timeout {
                writeln!(out, "    {what} timeout {timeout:?}").unwrap();
            }
        }
        for note in &server.notes {
            writeln!(out, "    note: {note}").unwrap();
        }
    }
    for server in &servers.unreadable {
        writeln!(out, "unreadable {}: {}", server.name, server.reason).unwrap();
    }
    for note in &servers.notes {
        writeln!(out, "note: {note}").unwrap();
    }
    out
}

fn transport(out: &mut String, transport: &ServerTransport) {
    match transport {
        ServerTransport::Stdio { command, args, env, cwd, env_file } => {
            let args: Vec<_> = args.iter().map(template).collect();
            writeln!(out, "    stdio {} {args:?}", template(command)).unwrap();
            for (name, value) in env {
                writeln!(out, "    env {name}={}", template(value)).unwrap();
            }
            for (what, value) in [("cwd", cwd), ("env file", env_file)] {
                if let Some(value) = value {
                    writeln!(out, "    {what} {}", template(value)).unwrap();
                }
            }
        }
        ServerTransport::Http { url, kind, headers, bearer_token_env, env_headers, oauth } => {
            writeln!(out, "    http {kind} {}", template(url)).unwrap();
            for (name, value) in headers {
                writeln!(out, "    header {name}: {}", template(value)).unwrap();
            }
            if let Some(variable) = bearer_token_env {
                writeln!(out, "    bearer token of {variable}").unwrap();
            }
            for (name, variable) in env_headers {
                writeln!(out, "    header {name} of {variable}").unwrap();
            }
            if let Some(hints) = oauth {
                oauth_hints(out, hints);
            }
        }
    }
}

fn oauth_hints(out: &mut String, hints: &OAuthHints) {
    writeln!(out, "    oauth disabled={} scopes={:?}", hints.disabled, hints.scopes).unwrap();
    for (what, value) in [("client_id", &hints.client_id), ("client_secret", &hints.client_secret)] {
        if let Some(value) = value {
            writeln!(out, "      {what} {}", template(value)).unwrap();
        }
    }
    let urls = [
        ("resource", &hints.resource),
        ("authorization", &hints.authorization_url),
        ("token", &hints.token_url),
        ("metadata", &hints.metadata_url),
        ("redirect", &hints.redirect_uri),
    ];
    for (what, url) in urls {
        if let Some(url) = url {
            writeln!(out, "      {what} {url}").unwrap();
        }
    }
}

/// Variables are in `«»`.
pub(crate) fn template(template: &TextTemplate) -> String {
    let part = |part: &TemplatePart| match part {
        TemplatePart::Literal(text) => text.expose().to_owned(),
        TemplatePart::Variable { name, default: None } => format!("«{name}»"),
        TemplatePart::Variable { name, default: Some(default) } => format!("«{name}|{}»", default.expose()),
        TemplatePart::Input { id } => format!("«input {id}»"),
        TemplatePart::Home => "«home»".to_owned(),
        TemplatePart::Workspace => "«workspace»".to_owned(),
        TemplatePart::File { path } => format!("«file {path}»"),
        TemplatePart::Secret { name } => format!("«secret {name}»"),
        TemplatePart::Unknown(text) => format!("«unknown {}»", text.expose()),
    };
    template.parts.iter().map(part).collect()
}
