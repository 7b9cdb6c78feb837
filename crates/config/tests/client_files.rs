//! Servers in files of clients: paths, secrets, variables and places.

use std::path::{Path, PathBuf};

use mcp_satellite_clients::{Client, ClientFile, ClientServers, read};
use mcp_satellite_config::{DraftContext, Plan, PlanRestrictions, ServerDraft, draft_server, parse, parse_mcp_json};
use mcp_satellite_model::spec::{InstanceSpec, ServerTarget};

/// Reads the only server of a client's file as `satellite import` does.
fn draft(client: Client, text: &str) -> ServerDraft {
    let file = ClientFile::named(client, "/work/project/.vscode/mcp.json");
    let found = read(&file, text.as_bytes()).unwrap_or_else(|error| panic!("{error}"));
    draft_of(client, &found).unwrap_or_else(|reason| panic!("{text}: {reason}"))
}

fn draft_of(client: Client, found: &ClientServers) -> Result<ServerDraft, String> {
    let context = DraftContext {
        client,
        home: Some(Path::new("/home/ann")),
        workspace: PathBuf::from("/work/project"),
        folder: Some(Path::new("/work/project/.vscode")),
        moved_files: "secrets",
        inputs: &found.inputs,
        accepts_references: false,
    };
    draft_server(&found.servers[0], &context)
}

fn environment(name: &str) -> Option<String> {
    (name == "HOME").then(|| "/home/ann".to_owned())
}

fn mcp_json(name: &str, text: &str) -> Plan {
    parse_mcp_json(name, text, &PlanRestrictions::default(), &environment).unwrap_or_else(|errors| panic!("{errors:?}"))
}

fn spec(plan: &Plan) -> InstanceSpec {
    plan.instances[0].clone().merge()
}

/// Reads a configuration with one installation of these keys.
fn toml(installation: &str) -> Result<Plan, mcp_satellite_config::ConfigErrors> {
    let text = format!(
        "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{{ id = \"u\", slug = \"u\" }}]\n[[teams.installations]]\n\
         id = \"a\"\nserver = \"a\"\n{installation}\n"
    );
    parse("satellite.toml", &text, &environment)
}

#[test]
fn paths_are_relative_to_the_workspace_the_file_or_the_home_directory() {
    let server = |key: &str, path: &str| {
        draft(Client::VsCode, &format!(r#"{{"servers": {{"a": {{"command": "x", "{key}": "{path}"}}}}}}"#))
    };
    for (path, cwd) in [
        ("sub/dir", "/work/project/sub/dir"),
        ("./sub", "/work/project/sub"),
        (".", "/work/project"),
        ("../other", "/work/project/../other"),
        ("/srv", "/srv"),
        ("~", "/home/ann"),
        ("~/x", "/home/ann/x"),
        ("${userHome}/x", "/home/ann/x"),
        ("${ROOT}/x", "${env:ROOT}/x"),
    ] {
        assert_eq!(server("cwd", path).cwd.as_deref(), Some(cwd), "{path}");
    }
    for (path, file) in [
        (".env", "/work/project/.vscode/.env"),
        ("secrets/.env", "/work/project/.vscode/secrets/.env"),
        ("~/.env", "/home/ann/.env"),
        ("/srv/.env", "/srv/.env"),
    ] {
        assert_eq!(server("envFile", path).env_file.as_deref(), Some(file), "{path}");
    }
    for (path, file) in [
        ("secrets/key", "${file:/work/project/.vscode/secrets/key}"),
        ("./key", "${file:/work/project/.vscode/key}"),
        ("~/.secrets/key", "${file:/home/ann/.secrets/key}"),
        ("/srv/key", "${file:/srv/key}"),
    ] {
        let text = format!(r#"{{"mcp": {{"a": {{"command": ["x"], "environment": {{"K": "{{file:{path}}}"}}}}}}}}"#);
        assert_eq!(draft(Client::OpenCode, &text).env[0].1, file, "{path}");
    }
}

#[test]
fn paths_of_an_mcp_json_are_relative_to_its_workspace() {
    let text = r#"{"servers": {"a": {"command": "x", "cwd": "sub", "envFile": "~/none.env"}}}"#;
    let plan = mcp_json("/work/project/.vscode/mcp.json", text);
    let InstanceSpec { target: ServerTarget::Stdio { cwd, .. }, problems, .. } = spec(&plan) else { panic!() };
    assert_eq!(cwd.as_deref(), Some("/work/project/sub"));
    assert!(matches!(&problems[..], [one] if one.contains("`/home/ann/none.env`")), "{problems:?}");
}

#[test]
fn a_default_that_looks_like_a_secret_makes_the_value_a_secret() {
    for (id, default, is_secret) in [
        ("region", "eu", false),
        ("api-key", "4f3c2b1a9d", true),
        ("x", "ghp_16C7e42F292c6912E7710c838347Ae178B4a", true),
    ] {
        let text = format!(
            r#"{{"inputs": [{{"type": "promptString", "id": "{id}", "default": "{default}"}}],
                "servers": {{"a": {{"command": "x", "args": ["${{input:{id}}}"]}}}}}}"#
        );
        let draft = draft(Client::VsCode, &text);
        assert_eq!((draft.values[0].is_secret, draft.secret_args), (is_secret, is_secret), "{id}");
    }
    let text = r#"{"inputs": [{"type": "pickString", "id": "region", "options": ["eu", "us"]}],
        "servers": {"a": {"command": "x", "args": ["${input:region}"]}}}"#;
    assert_eq!(draft(Client::VsCode, text).notes, ["the client offers these values for `region`: `eu`, `us`"]);
}

#[test]
fn a_dollar_before_a_variable_does_not_escape_it() {
    for (written, text) in [
        ("$${TOKEN}", "$<token>"),
        ("a$$${TOKEN}", "a$$<token>"),
        ("$${userHome}", "$/home/ann"),
        ("$${TOKEN}$", "$<token>$"),
        ("cost: $5", "cost: $5"),
    ] {
        let json = format!(r#"{{"mcpServers": {{"a": {{"command": "x", "env": {{"A": "{written}"}}}}}}}}"#);
        let variable = |name: &str| (name == "TOKEN").then(|| "<token>".to_owned()).or_else(|| environment(name));
        let plan = parse_mcp_json("mcp.json", &json, &PlanRestrictions::default(), &variable).unwrap();
        let spec = spec(&plan);
        assert_eq!((spec.env["A"].expose(), spec.missing.len()), (text, 0), "{written}");
    }
}

#[test]
fn a_variable_that_runs_other_code_contains_no_value_of_the_user() {
    for (value, is_valid) in [
        ("${env:NODE_OPTIONS}", false),
        ("--max-old-space-size=${value:SIZE}", false),
        ("${env:NODE_OPTIONS:-}", true),
        ("${env:HOME}/x", true),
    ] {
        let outcome = toml(&format!("command = \"x\"\nenv = {{ NODE_OPTIONS = \"{value}\" }}"));
        let errors = outcome.map(|_| ()).map_err(|errors| errors.items());
        match errors {
            Ok(()) => assert!(is_valid, "{value}"),
            Err(items) => {
                assert!(!is_valid && items.len() == 1, "{value}: {items:?}");
                assert!(items[0].message.contains("a variable that makes a server run other code"), "{items:?}");
            }
        }
    }
    toml("command = \"x\"\nenv = { LEVEL = \"${value:LEVEL}\" }").unwrap();
    let text = r#"{"mcpServers": {"a": {"command": "x", "env": {"NODE_OPTIONS": "${NODE_OPTIONS}"}}}}"#;
    let plan = mcp_json("mcp.json", text);
    assert!(plan.instances.is_empty() && plan.warnings[0].contains("`a` is left out"), "{:?}", plan.warnings);
}

#[test]
fn literal_secrets_in_an_argument_with_variables_are_masked() {
    for (args, shown) in [
        (r#""--api-key", "${env:API_KEY:-sk-live-Abc123Def456}""#, "--api-key [secret]"),
        (r#""--api-key", "${env:X:-hunter22}-${env:HOME}""#, "--api-key [secret]-/home/ann"),
        (r#""--db=postgres://u:hunter22@h/${env:HOME}""#, "--db=postgres://u:[secret]@h//home/ann"),
        (r#""-c", "export TOKEN=hunter22; npx x ${env:HOME}""#, "-c export TOKEN=[secret] npx x /home/ann"),
        (r#""-c", "npx x --api-key hunter22 -y""#, "-c npx x --api-key [secret] -y"),
        (r#""--dir", "${env:DIR:-/srv/data}""#, "--dir /srv/data"),
    ] {
        let plan = toml(&format!("command = \"x\"\nsecret_args = true\nargs = [{args}]")).unwrap();
        let spec = spec(&plan);
        let line: Vec<_> = spec.args.iter().map(mcp_satellite_model::secret::Secret::expose).collect();
        assert_eq!(spec.mask.apply(&line.join(" ")), shown, "{args}");
    }
    let default = "command = \"x\"\nargs = [\"${env:API_KEY:-sk-live-Abc123Def456}\"]";
    assert_eq!(toml(default).unwrap_err().items()[0].message, "`args` refers to a secret");
}

#[test]
fn own_keys_and_places_are_read_from_every_file_that_the_clients_accept() {
    let files = [
        // A tab in a string, which `serde_json` rejects.
        (
            "mcp.json",
            "\u{feff}{\"x\": \"\t\", \"mcpServers\": {\n/**/ \"a\": {\"command\": \"x\", KEYS},}}",
            "mcp.json:2:7",
        ),
        ("mcp.json", "{\"mcpServers\": {\n  \"a\": {\"command\": \"x\", KEYS}}}", "mcp.json:2:4"),
        ("opencode.json", "{\"mcp\": {\n\n \"a\": {\"command\": [\"x\"], KEYS}}}", "opencode.json:3:3"),
    ];
    for (name, text, place) in files {
        let own = r#""keep": "listed", "idle": "3m", "protocol": "2025-11-25""#;
        let plan = mcp_json(name, &text.replace("KEYS", own));
        assert!(plan.warnings.iter().all(|warning| !warning.contains("is not used")), "{name}: {:?}", plan.warnings);
        let idle = spec(&plan).policy.idle.idle;
        assert_eq!(idle, std::time::Duration::from_secs(180), "{name}");
        let plan = mcp_json(name, &text.replace("KEYS", r#""keep": [], "idel": "3m""#));
        for key in ["keep", "idel"] {
            let warning = format!("{place}: `a`: `{key}` is not used");
            assert!(plan.warnings.contains(&warning), "{name}: {:?}", plan.warnings);
        }
    }
}
