//! Secrets are placed everywhere in a configuration, and servers echo them everywhere. Then no file and no output of
//! the satellite may contain one.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::json;
use testkit::home::Home;
use testkit::process::processes;
use testkit::wait::wait_for;

use crate::SATELLITE;
use crate::mcp::Client;

/// A marker that is part of every secret, so that the tests also find fragments of a secret.
fn marker(home: &Home, number: usize) -> String {
    format!("sekrit{number}x{}", home.mark().rsplit('-').next().unwrap())
}

struct PlantedSecrets {
    /// The markers that must not appear anywhere.
    markers: Vec<String>,
}

impl PlantedSecrets {
    fn new(home: &Home, count: usize) -> Self {
        Self { markers: (0..count).map(|number| marker(home, number)).collect() }
    }

    #[track_caller]
    fn assert_not_in(&self, place: &str, text: &str) {
        for marker in &self.markers {
            let found = text.lines().find(|line| line.contains(marker.as_str()));
            assert!(found.is_none(), "secret {marker} found in {place}:\n{}", found.unwrap_or_default());
        }
    }

    /// Checks logs, the output of every command and the data directory.
    #[track_caller]
    fn assert_not_in_output(&self, home: &Home) {
        let mut files = files_below(home.data_dir());
        let ours =
            |path: &PathBuf| path.extension().is_some_and(|extension| extension == "stdout" || extension == "stderr");
        files.extend(fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().path()).filter(ours));
        assert!(files.iter().any(|path| path.ends_with("journal/journal.db")), "{files:?}");
        for path in files {
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
            self.assert_not_in(&path.display().to_string(), &text);
        }
    }

    #[track_caller]
    fn assert_not_in_arguments(&self) {
        for (pid, cmdline) in processes() {
            self.assert_not_in(&format!("the arguments of {pid}"), &cmdline);
        }
    }
}

/// Every regular file below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] })
        .filter(|path| path.is_file())
        .collect()
}

fn log_at_trace_level(home: &mut Home) {
    home.env.push(("RUST_LOG".into(), "mcp_satellite=trace,mcp_satellite_actors=trace".into()));
}

/// Runs every command that prints data.
fn run_all_commands(home: &Home) {
    for verb in [
        &["status"][..],
        &["status", "--json"],
        &["tools"],
        &["tools", "--json"],
        &["events"],
        &["events", "--json"],
        &["logs", "notes"],
    ] {
        home.satellite(verb).exits(0);
    }
}

#[test]
fn secrets_that_a_server_echoes_appear_nowhere() {
    let mut home = Home::new(SATELLITE);
    log_at_trace_level(&mut home);
    let planted = PlantedSecrets::new(&home, 11);
    let secret = |number: usize| planted.markers[number].clone();
    let environment = [
        ("PLANTED_ENV", secret(1)),
        ("PLANTED_HEADER", secret(4)),
        ("PLANTED_TOKEN", secret(6)),
        ("PLANTED_IN_URL", secret(10)),
    ];
    home.env.extend(environment.map(|(name, value)| (name.to_owned(), value)));
    // A secret of two lines, because stderr is read line by line.
    fs::write(home.path().join("key.pem"), format!("-----{}-----\nsecond-{}\n", secret(2), secret(3))).unwrap();
    let weird = format!(r#"a"quote\and-{}"#, secret(7));
    let text = format!(
        r#"
[policy.restart]
delays = ["50ms"]
[policy.logs]
batch_delay = "50ms"

[[teams]]
id = "team_acme"
slug = "acme"

[[teams.users]]
id = "user_alice"
slug = "alice"
token = "env:PLANTED_TOKEN"
[teams.users.servers.n1]
env = {{ PIN = "{user}" }}

[[teams.installations]]
id = "n1"
server = "notes"
user_required = ["PIN"]
env = {{ API_KEY = "{literal}", FROM_ENV = "env:PLANTED_ENV", FROM_FILE = "file:key.pem", WEIRD = '{weird}' }}
SIM "--all-tools", "--garbage-lines", "1", "--stderr-text", "key={{env:API_KEY}} error {{env:FROM_ENV}} {{env:FROM_FILE}} {{env:PIN}} {{env:WEIRD}}"

[teams.installations.team]
env = {{ TEAM_SETTING = "{team}" }}

[[teams.installations]]
id = "r1"
server = "remote"
transport = "http"
url = "http://127.0.0.1:9/mcp?tenant=acme&api_key=env:PLANTED_IN_URL"
headers = {{ Authorization = "Bearer env:PLANTED_HEADER", X-Api-Key = "{header}" }}
"#,
        literal = secret(0),
        user = secret(5),
        header = secret(8),
        team = format_args!("Tr0ub4dor-{}", secret(9)),
    );
    let config = home.write("satellite.toml", &text);
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    planted.assert_not_in_arguments();

    // Secrets in errors and in the stderr before a crash.
    let outcomes: Vec<_> = [secret(0), secret(1), secret(2), secret(3), secret(5), weird, secret(9)]
        .into_iter()
        .map(|text| {
            // The complete value as the server receives it.
            let text = match text {
                text if text == secret(2) => format!("-----{text}-----"),
                text if text == secret(3) => format!("second-{text}"),
                text if text == secret(9) => format!("Tr0ub4dor-{text}"),
                text => text,
            };
            let arguments = serde_json::json!({"message": format!("login as {text} refused")}).to_string();
            home.satellite(&["call", "notes", "fail", &arguments]).exits(1)
        })
        .collect();
    for outcome in outcomes {
        assert!(outcome.stderr.contains("login as [secret] refused"), "{outcome:#?}");
    }
    home.satellite(&["call", "notes", "crash", r#"{"code": 9}"#]).exits(1);
    home.wait_row("notes", "online again", |row| row["status"] == "online" && row["restarts"] == 1);
    home.satellite(&["call", "remote", "echo"]).exits(1);

    // Errors in the file are shown without its values.
    fs::write(&config, text.replace("[[teams]]", "[[teams")).unwrap();
    satellite.signal(Signal::SIGHUP);
    home.wait_event(0, "config.error", |_| true);
    home.satellite(&["check", "--config", config.to_str().unwrap()]);
    fs::write(&config, text.replace("server = ", "servr = ")).unwrap();
    satellite.signal(Signal::SIGHUP);
    let errors = || home.events().iter().filter(|event| event["type"] == "config.error").count();
    wait_for("the second error", || (errors() == 2).then_some(()), String::new);

    // The masked secret did reach the logs.
    let logged = home.wait_event(0, "mcp.server.logs", |event| {
        event["data"]["logs"][0]["message"].as_str().unwrap().contains("key=[secret] error [secret]")
    });
    assert_eq!(logged["data"]["server_slug"], "notes");
    satellite.process.wait_stderr(|log| log.contains("skipped a message of the server"));
    run_all_commands(&home);
    planted.assert_not_in_arguments();
    satellite.terminate().exits(0);
    home.satellite(&["events", "--json"]).exits(0);
    planted.assert_not_in_output(&home);
}

#[test]
fn configured_values_appear_only_in_their_file() {
    let mut home = Home::new(SATELLITE);
    log_at_trace_level(&mut home);
    let planted = PlantedSecrets::new(&home, 6);
    let secret = |number: usize| planted.markers[number].clone();
    home.env.push(("PLANTED_IN_A_SHELL".to_owned(), secret(0)));
    fs::write(home.path().join("key.pem"), format!("-----{}-----\nsecond-{}\n", secret(1), secret(2))).unwrap();
    let config = home.write(
        "satellite.toml",
        r#"
[policy.restart]
delays = ["50ms"]
[policy.logs]
batch_delay = "50ms"
[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice" }]
[[teams.installations]]
id = "n1"
server = "notes"
user_required = ["API_KEY", "PEM"]
SIM "--all-tools", "--stderr-text", "key={env:API_KEY} {env:PEM}"
[[teams.installations]]
id = "r1"
server = "remote"
transport = "http"
url = "http://127.0.0.1:9/mcp"
user_required = ["bearer_token", "X-Api-Key"]
"#,
    );
    let mut satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_status("notes", "awaiting_user_config");
    // As a value, as a key, and for servers that do not require it.
    home.satellite(&["configure", "notes", "API_KEY=env:PLANTED_IN_A_SHELL", "PEM=file:key.pem"]).exits(0);
    let typed_wrongly = home.path().join("typed");
    fs::write(&typed_wrongly, secret(3)).unwrap();
    let with_stdin = |args: &[&str]| {
        let mut command = home.command(&[&["configure"], args].concat());
        let stdin = fs::File::open(&typed_wrongly).unwrap();
        command.arg("--data-dir").arg(home.data_dir()).stdin(std::process::Stdio::from(stdin));
        home.start(command).finish()
    };
    with_stdin(&["remote", "API_KEY"]).exits(2);
    with_stdin(&["nobody", "API_KEY"]).exits(2);
    home.satellite(&["configure", "notes", &secret(4)]).exits(2);
    home.satellite(&["configure", "notes", &format!("{}=1", secret(4))]).exits(2);
    home.satellite(&["configure", "notes", "--unset", &secret(4)]).exits(2);
    with_stdin(&["remote", "bearer_token", "--no-wait"]).exits(0);
    let bearer = format!("Bearer {}", secret(5));
    fs::write(&typed_wrongly, &bearer).unwrap();
    with_stdin(&["remote", "bearer_token"]).exits(2);
    with_stdin(&["remote", "X-Api-Key", "--no-wait"]).exits(0);
    planted.assert_not_in_arguments();

    for text in [secret(0), format!("-----{}-----", secret(1)), format!("second-{}", secret(2))] {
        let arguments = json!({"message": format!("login as {text} refused")}).to_string();
        let outcome = home.satellite(&["call", "notes", "fail", &arguments]).exits(1);
        assert!(outcome.stderr.contains("login as [secret] refused"), "{outcome:#?}");
    }
    home.satellite(&["call", "notes", "crash", r#"{"code": 9}"#]).exits(1);
    home.wait_row("notes", "online again", |row| row["status"] == "online" && row["restarts"] == 1);
    home.satellite(&["call", "remote", "echo"]).exits(1);
    home.satellite(&["configure", "notes", "--json"]).exits(0);
    home.wait_event(0, "mcp.server.logs", |event| {
        event["data"]["logs"][0]["message"].as_str().unwrap().contains("key=[secret] [secret]")
    });
    // A changed configuration, first valid and then invalid.
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("key={env:API_KEY} {env:PEM}", "key={env:API_KEY} {env:PEM} again")).unwrap();
    satellite.signal(Signal::SIGHUP);
    home.wait_row("notes", "changed", |row| row["status"] == "online" && row["restarts"] == 2);
    fs::write(&config, text.replace("server = ", "servr = ")).unwrap();
    satellite.signal(Signal::SIGHUP);
    home.wait_event(0, "config.error", |_| true);
    run_all_commands(&home);
    satellite.terminate().exits(0);

    let kept: String = home.stored("user_values").into_iter().flatten().collect();
    for number in [0, 1, 2, 3, 5] {
        assert!(kept.contains(&secret(number)), "{number}");
    }
    fs::remove_file(home.state_database()).unwrap();
    // Arguments that are not required keys must not be repeated in any output.
    planted.assert_not_in_output(&home);
}

#[test]
fn tokens_of_clients_and_secrets_in_results_appear_nowhere() {
    let mut home = Home::new(SATELLITE);
    log_at_trace_level(&mut home);
    let mut planted = PlantedSecrets::new(&home, 4);
    let [token, wrong, key, other] = [0, 1, 2, 3].map(|number| format!("sat_{}", planted.markers[number]));
    home.env.push(("PLANTED_TOKEN".into(), token.clone()));
    home.env.push(("PLANTED_KEY".into(), key.clone()));
    let config = home.write(
        "satellite.toml",
        &format!(
            r#"
[gateway]
listen = "127.0.0.1:0"
[[teams]]
id = "team_acme"
slug = "acme"
[[teams.users]]
id = "user_alice"
slug = "alice"
token = "env:PLANTED_TOKEN"
[[teams.installations]]
id = "n1"
server = "notes"
env = {{ API_KEY = "env:PLANTED_KEY", PLAIN = "{other}" }}
SIM "--all-tools"
"#
        ),
    );
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    let greeted = satellite.wait_start_message();
    let url = greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap();
    let at = |path: &str, token: &str| Client::new(url, Some(token)).at(path);

    // Wrong tokens, and the right token in wrong places.
    assert_eq!(at("/mcp", &wrong).initialize().status, 401);
    assert_eq!(at(&format!("/mcp?access_token={token}"), &wrong).initialize().status, 400);
    assert_eq!(at(&format!("/i/{token}/mcp"), &token).initialize().status, 404);
    assert_eq!(at(&format!("/{token}"), &token).initialize().status, 404);
    assert_eq!(at("/mcp", &token).in_session(&token).call_anyway("list_servers", &json!({})).status, 404);

    // Results reach the client unchanged; in logs they are masked.
    let (mut direct, mut all) = (at("/i/notes/mcp", &token), at("/mcp", &token));
    for client in [&mut direct, &mut all] {
        let session = client.initialize().header("mcp-session-id").unwrap().to_owned();
        // The second half of a session id is secret; the first half may be logged.
        planted.markers.push(session[16..].to_owned());
    }
    for (tool, arguments) in [
        ("env", json!({"name": "API_KEY"})),
        ("echo", json!({"text": format!("my key is {key}")})),
        ("fail", json!({"message": format!("login as {key} refused")})),
    ] {
        let path = format!("notes:{tool}");
        let through = all.call("execute_mcp_tool", &json!({"tool_path": path, "arguments": arguments}));
        let answer = direct.call(tool, &arguments);
        for answer in [through, answer] {
            let is_error = answer.to_string().contains("refused");
            assert!(is_error || answer["result"].to_string().contains(&key), "{answer:#}");
        }
    }
    let logs = home.wait_event(0, "mcp.request.logs", |_| true);
    assert!(logs.to_string().contains("my key is [secret]"), "{logs:#}");
    run_all_commands(&home);
    planted.assert_not_in_arguments();
    satellite.terminate().exits(0);
    planted.assert_not_in_output(&home);
}

/// Starts a server per script with the same secret in `API_KEY` and waits until `is_done` accepts the log for each.
fn scripts(home: &Home, policy: &str, scripts: &[(&str, &str)], is_done: impl Fn(&str, &str) -> bool) -> String {
    let mut text = format!(
        "{policy}\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = [{{ id = \"user_alice\", slug = \"alice\" }}]\n"
    );
    for (name, script) in scripts {
        fs::write(home.path().join(name), script).unwrap();
        write!(
            text,
            "[[teams.installations]]\nid = \"{name}\"\nserver = \"{name}\"\ncommand = \"sh\"\nargs = [\"{name}\", \"{}\"]\n\
             env = {{ API_KEY = \"{}\" }}\n",
            home.mark(),
            marker(home, 0)
        )
        .unwrap();
    }
    let config = home.write("satellite.toml", &text);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let through = |log: &str| scripts.iter().all(|(name, _)| is_done(name, log));
    satellite.process.wait_stderr(through);
    home.satellite(&["status", "--json"]).exits(0);
    home.satellite(&["events", "--json"]).exits(0);
    satellite.terminate().exits(0).stderr
}

#[test]
fn a_secret_in_a_failed_handshake_or_in_stderr_appears_nowhere() {
    let mut home = Home::new(SATELLITE);
    log_at_trace_level(&mut home);
    let planted = PlantedSecrets::new(&home, 1);
    let answer = |result: &str| {
        format!("read -r _\nprintf '{{\"jsonrpc\":\"2.0\",\"id\":1,{result}}}\\n' \"$API_KEY\"\nread -r _\n")
    };
    let log = scripts(
        &home,
        "[policy.restart]\ndelays = [\"50ms\"]",
        &[
            ("error", &answer(r#""error":{"code":-32000,"message":"bad key %s"}"#)),
            ("error-data", &answer(r#""error":{"code":-32000,"message":"bad key","data":{"key":"%s"}}"#)),
            ("shape", &answer(r#""result":"%s""#)),
            (
                "version",
                &answer(
                    r#""result":{"protocolVersion":"%s","capabilities":{},"serverInfo":{"name":"a","version":"1"}}"#,
                ),
            ),
            ("words", "printf 'no newline after %s' \"$API_KEY\" >&2\nexit 3\n"),
            ("cut", "printf '%01020d%s\\n' 0 \"$API_KEY\" >&2\nexit 3\n"),
            (
                "garbage",
                "printf 'npm warn %s\\n{\"key\": \"%s\"}\\n[\"%s\"]\\n' \"$API_KEY\" \"$API_KEY\" \"$API_KEY\"\nexit 3\n",
            ),
        ],
        |name, log| {
            let failed = |line: &str| line.contains("permanently_failed") && line.contains(&format!("\"{name}-acme"));
            log.lines().any(failed)
        },
    );
    for text in ["bad key [secret]", "npm warn [secret]", "no newline after [secret]"] {
        assert!(log.contains(text), "{text} is missing in:\n{log}");
    }
    planted.assert_not_in_output(&home);
    planted.assert_not_in_arguments();
}

/// A successful handshake.
const GREETING: &str = r#"read -r _
printf '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"a","version":"1"}}}\n'
read -r _
"#;

#[test]
fn a_secret_in_an_invalid_response_appears_nowhere() {
    let mut home = Home::new(SATELLITE);
    log_at_trace_level(&mut home);
    let planted = PlantedSecrets::new(&home, 1);
    let after_greeting =
        |line: &str| format!("{GREETING}read -r _\nprintf '{line}\\n' \"$API_KEY\"\ncat > /dev/null\n");
    let log = scripts(
        &home,
        "",
        &[
            (
                "list-error",
                &after_greeting(r#"{"jsonrpc":"2.0","id":2,"error":{"code":-32000,"message":"bad key %s"}}"#),
            ),
            ("list-shape", &after_greeting(r#"{"jsonrpc":"2.0","id":2,"result":{"tools":"%s"}}"#)),
            ("no-request", &after_greeting(r#"{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"bad key %s"}}"#)),
        ],
        |name, log| {
            let of_it = |line: &&str| line.contains(&format!("\"{name}-acme"));
            let is_logged = |word: &str| log.lines().filter(of_it).any(|line| line.contains(word));
            is_logged("\"error\"") || is_logged("without an id")
        },
    );
    assert!(log.contains("bad key [secret]"), "{log}");
    planted.assert_not_in_output(&home);
}

#[test]
fn a_secret_used_as_a_name_by_a_server_is_not_logged() {
    let mut home = Home::new(SATELLITE);
    log_at_trace_level(&mut home);
    let planted = PlantedSecrets::new(&home, 1);
    let after_greeting =
        |line: &str| format!("{GREETING}read -r _\nprintf '{line}\\n' \"$API_KEY\"\ncat > /dev/null\n");
    let named = GREETING
        .replace(r#""name":"a","version":"1""#, r#""name":"%s","version":"%s""#)
        .replace("}}}\\n'", "}}}\\n' \"$API_KEY\" \"$API_KEY\"");
    let log = scripts(
        &home,
        "[policy.session]\nlist_pages_max = 1",
        &[
            ("info", &format!("{named}cat > /dev/null\n")),
            ("method", &after_greeting(r#"{"jsonrpc":"2.0","method":"notifications/%s"}"#)),
            ("cursor", &after_greeting(r#"{"jsonrpc":"2.0","id":2,"result":{"tools":[],"nextCursor":"%s"}}"#)),
            ("tool", &after_greeting(r#"{"jsonrpc":"2.0","id":2,"result":{"tools":[{"name":{"%s":1}}, "x"]}}"#)),
            ("tool-text", &after_greeting(r#"{"jsonrpc":"2.0","id":2,"result":{"tools":["%s"]}}"#)),
        ],
        |name, log| {
            let of_it = |line: &&str| line.contains(&format!("\"{name}-acme"));
            let is_logged = |word: &str| log.lines().filter(of_it).any(|line| line.contains(word));
            match name {
                "info" => is_logged("initialized"),
                "method" => is_logged("\"notification\""),
                "cursor" => is_logged("the rest of a list is left out"),
                _ => is_logged("without a usable definition"),
            }
        },
    );
    planted.assert_not_in("the log", &log);
    planted.assert_not_in_output(&home);
}

#[test]
fn a_reference_to_a_secret_in_an_argument_is_rejected() {
    let mut home = Home::new(SATELLITE);
    let planted = PlantedSecrets::new(&home, 2);
    home.env.push(("PLANTED_ENV".into(), planted.markers[0].clone()));
    fs::write(home.path().join("key"), &planted.markers[1]).unwrap();
    for argument in ["env:PLANTED_ENV", "--key=env:PLANTED_ENV", "file:key"] {
        let config = home.servers("satellite.toml", &[("notes", &[argument])]);
        for verb in ["check", "run"] {
            let data_dir = home.data_dir().display().to_string();
            let mut args = vec![verb, "--config", config.to_str().unwrap()];
            if verb == "run" {
                args.extend(["--data-dir", &data_dir]);
            }
            let outcome = home.bare(&args).exits(2);
            assert!(outcome.stderr.contains("`args` refers to a secret"), "{outcome:#?}");
            planted.assert_not_in(verb, &format!("{outcome:?}"));
        }
    }
}

#[test]
fn servers_do_not_inherit_variables_that_contain_secrets() {
    let mut home = Home::new(SATELLITE);
    for name in ["PLANTED_ENV", "PLANTED_HEADER", "ALICE_TOKEN", "HARMLESS"] {
        home.env.push((name.into(), format!("value-of-{name}")));
    }
    let config = home.write(
        "satellite.toml",
        r#"
[[teams]]
id = "team_acme"
slug = "acme"
users = [{ id = "user_alice", slug = "alice", token = "env:ALICE_TOKEN" }]

[[teams.installations]]
id = "n1"
server = "notes"
env = { API_KEY = "env:PLANTED_ENV" }
SIM

[[teams.installations]]
id = "o1"
server = "other"
SIM

[[teams.installations]]
id = "r1"
server = "remote"
transport = "http"
url = "http://127.0.0.1:9/mcp"
headers = { Authorization = "Bearer env:PLANTED_HEADER" }
"#,
    );
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let seen = |server: &str, name: &str| {
        let outcome = home.satellite(&["call", server, "env", &format!(r#"{{"name": "{name}"}}"#)]);
        outcome.json()["content"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(seen("notes", "API_KEY"), "value-of-PLANTED_ENV");
    for server in ["notes", "other"] {
        for name in ["PLANTED_ENV", "PLANTED_HEADER", "ALICE_TOKEN"] {
            assert_eq!(seen(server, name), "not set", "{server}: {name}");
        }
        assert_eq!(seen(server, "HARMLESS"), "value-of-HARMLESS");
    }
    assert_eq!(seen("other", "API_KEY"), "not set", "a server has the secret of another server");
    satellite.terminate().exits(0);
}
