//! `satellite check`: all errors of a configuration in one report.

use testkit::home::Home;

use crate::SATELLITE;

const BAD: &str = include_str!("../fixtures/cli/bad.toml");

#[test]
fn a_valid_configuration_is_reported_and_nothing_is_started() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[]), ("search", &[])]);
    let outcome = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0);
    assert!(outcome.stdout.contains("good: 1 team, 1 user, 2 servers"), "{outcome:#?}");
    assert_eq!(outcome.stderr, "");
    assert!(home.processes().is_empty() && !home.data_dir().exists());
}

#[test]
fn every_error_is_reported_at_once_with_its_place_and_a_hint() {
    let home = Home::new(SATELLITE);
    let config = home.write("bad.toml", BAD);
    let outcome = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(2);
    assert_eq!(outcome.stdout, "");
    for (place, message, hint) in [
        ("bad.toml:3:9", "`Dev` is not a valid name for a satellite", "10 to 32 characters"),
        ("bad.toml:4:1", "unknown key `profil`", "did you mean `profile`?"),
        ("bad.toml:7:11", "`window` is not a duration", "write it as \"5m\""),
        ("bad.toml:8:15", "`max_crashes` is 0", "give at least 1"),
        ("bad.toml:15:10", "the token of the user `alice` is written in plain text", "\"env:NAME\" or \"file:PATH\""),
        ("bad.toml:21:10", "`args` refers to a secret", "pass the secret in `env`"),
        ("bad.toml:22:20", "environment variable `NOT_SET_ANYWHERE` is not set", "set NOT_SET_ANYWHERE"),
        ("bad.toml:23:11", "the team has no user `user_alise`", "did you mean `user_alice`?"),
        ("bad.toml:28:14", "`stdoi` is not a valid value for `transport`", "did you mean \"stdio\"?"),
    ] {
        for said in [place, message, hint] {
            assert!(outcome.stderr.contains(said), "{said:?} is missing in:\n{}", outcome.stderr);
        }
    }
    assert!(!outcome.stderr.contains("hunter2"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains('\x1b'), "colour without a terminal: {:?}", outcome.stderr);
}

#[test]
fn the_errors_of_two_files_are_reported_together() {
    let home = Home::new(SATELLITE);
    let config = home.write("satellite.toml", "[satellite]\nname = \"x\"\n");
    let mcp_json = home.write("mcp.json", "{\n  \"mcpServers\": {\"files\" {}}\n}");
    let paths = ["--config", config.to_str().unwrap(), "--mcp-json", mcp_json.to_str().unwrap()];
    let outcome = home.bare(&[&["check"], paths.as_slice()].concat()).exits(2);
    assert!(outcome.stderr.contains("satellite.toml:2:9"), "{outcome:#?}");
    assert!(outcome.stderr.contains("mcp.json:2:"), "{outcome:#?}");
}

#[test]
fn an_installation_in_both_files_is_used_from_the_configuration() {
    let home = Home::new(SATELLITE);
    let text = format!(
        "[[teams]]\nid = \"local\"\nslug = \"local\"\nusers = [{{ id = \"me\", slug = \"me\" }}]\n\
         [[teams.installations]]\nid = \"files\"\nserver = \"files\"\ncommand = \"{SATELLITE}\"\n"
    );
    let config = home.write("satellite.toml", &text);
    let mcp_json = home.write("mcp.json", r#"{"mcpServers": {"files": {"command": "SATELLITE"}}}"#);
    let paths = ["--config", config.to_str().unwrap(), "--mcp-json", mcp_json.to_str().unwrap()];
    let outcome = home.bare(&[&["check"], paths.as_slice()].concat()).exits(0);
    assert!(outcome.stderr.contains("the instance `local/me/files` of the second file is left out"), "{outcome:#?}");
}

#[test]
fn servers_of_an_mcp_json_that_cannot_run_are_listed_with_their_reasons() {
    let home = Home::new(SATELLITE);
    let text = r#"{"mcpServers": {
        "good": {"command": "SATELLITE", "args": ["SIM"]},
        "wait": {"command": "SATELLITE", "env": {"K": "${NOT_SET_ANYWHERE}"}},
        "file": {"command": "SATELLITE", "envFile": "none.env"},
        "odd": {"command": "SATELLITE", "args": ["${command:odd}"]}
    }}"#;
    let mcp_json = home.write("mcp.json", text);
    let outcome = home.bare(&["check", "--mcp-json", mcp_json.to_str().unwrap()]).exits(0);
    assert!(outcome.stdout.contains("3 servers"), "{outcome:#?}");
    assert!(outcome.stdout.contains("`satellite configure wait-local-me-wait NOT_SET_ANYWHERE`"), "{outcome:#?}");
    for said in ["`file-local-me-file` cannot start: cannot read the env_file `none.env`", "`odd` is left out"] {
        assert!(outcome.stderr.contains(said), "{said} in {outcome:#?}");
    }
    home.bare(&["check", "--strict", "--mcp-json", mcp_json.to_str().unwrap()]).exits(1);
}

#[test]
fn a_missing_file_is_named() {
    let home = Home::new(SATELLITE);
    let outcome = home.bare(&["check", "--config", "no-such.toml"]).exits(2);
    assert!(outcome.stderr.contains("no-such.toml") && outcome.stderr.contains("No such file"), "{outcome:#?}");
    home.bare(&["check"]).exits(2);
}

#[test]
fn a_suspicious_variable_is_a_warning() {
    let home = Home::new(SATELLITE);
    let text = format!(
        "{{\"mcpServers\": {{\"files\": {{\"command\": \"{SATELLITE}\", \"env\": {{\"LD_PRELOAD\": \"x\"}}}}}}}}"
    );
    let mcp_json = home.write("mcp.json", &text);
    let check = ["check", "--mcp-json", mcp_json.to_str().unwrap()];
    let outcome = home.bare(&check).exits(0);
    assert!(outcome.stderr.contains("warning: ") && outcome.stderr.contains("LD_PRELOAD"), "{outcome:#?}");
    home.write("mcp.json", &text.replace("LD_PRELOAD", "PYTHONPATH"));
    assert_eq!(home.bare(&check).exits(0).stderr, "");
    // The profile of the satellite's own file applies to the servers of the other one.
    let config =
        format!("[satellite]\nprofile = \"production\"\nisolation = \"none\"\nallowed_commands = [\"{SATELLITE}\"]");
    let config = home.write("satellite.toml", &config);
    let outcome = home.bare(&[&check[..], &["--config", config.to_str().unwrap()]].concat()).exits(0);
    let warning = "warning: installation `files` of team `local`: `PYTHONPATH` is not passed on in the production profile; \
                   list it in `allow_env` under [policy.isolation]\n";
    assert!(outcome.stderr.contains(warning), "{outcome:#?}");
}

#[test]
fn a_missing_command_is_a_warning_and_an_error_with_strict() {
    let home = Home::new(SATELLITE);
    let text = format!(
        r#"
[[teams]]
id = "t"
slug = "acme"
users = [{{ id = "u", slug = "alice" }}, {{ id = "v", slug = "bob" }}]
[[teams.installations]]
id = "good"
server = "good"
command = "{SATELLITE}"
cwd = "/"
[[teams.installations]]
id = "lost"
server = "lost"
command = "no-such-command-anywhere"
[[teams.installations]]
id = "moved"
server = "moved"
command = "/no/such/program"
[[teams.installations]]
id = "homeless"
server = "homeless"
command = "sh"
cwd = "/no/such/directory"
"#
    );
    let config = home.write("satellite.toml", &text);
    let check = ["check", "--config", config.to_str().unwrap()];
    let outcome = home.bare(&check).exits(0);
    let warnings: Vec<&str> = outcome.stderr.lines().collect();
    assert_eq!(warnings.len(), 3, "each warning once, although there are two users: {outcome:#?}");
    for (warning, said) in warnings.into_iter().zip([
        "installation `lost` of team `acme`: cannot find executable `no-such-command-anywhere`",
        "installation `moved` of team `acme`: cannot find executable `/no/such/program`",
        "installation `homeless` of team `acme`: directory `/no/such/directory` does not exist",
    ]) {
        assert!(warning.contains(said), "{said}\n{outcome:#?}");
    }
    home.bare(&[&check[..], &["--strict"]].concat()).exits(1);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    home.bare(&["check", "--strict", "--config", config.to_str().unwrap()]).exits(0);
}
