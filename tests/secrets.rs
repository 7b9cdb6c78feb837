//! Secrets are planted wherever a configuration can hold one, servers echo them wherever a server can, and then nothing
//! that the satellite wrote or showed may hold one.

#![cfg(all(feature = "cli", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "cli/mcp.rs"]
#[allow(dead_code, reason = "what the tests of the command line need beside this")]
mod mcp;
#[path = "cli/support.rs"]
#[allow(dead_code, reason = "what the tests of the command line need beside this")]
mod support;

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use mcp::Client;
use nix::sys::signal::Signal;
use serde_json::json;
use support::{Home, processes, wait_for};

/// Every secret holds a part of this kind, so that also a piece of one is found.
fn core(home: &Home, number: usize) -> String {
    format!("sekrit{number}x{}", home.mark().rsplit('-').next().unwrap())
}

struct Planted {
    /// What must be found nowhere.
    cores: Vec<String>,
}

impl Planted {
    fn new(home: &Home, count: usize) -> Self {
        Self { cores: (0..count).map(|number| core(home, number)).collect() }
    }

    #[track_caller]
    fn are_not_in(&self, place: &str, text: &str) {
        for core in &self.cores {
            let found = text.lines().find(|line| line.contains(core.as_str()));
            assert!(found.is_none(), "{core} is in {place}:\n{}", found.unwrap_or_default());
        }
    }

    /// Whatever was written by anyone but the operator: logs, output of every verb, and the data directory.
    #[track_caller]
    fn are_in_no_output(&self, home: &Home) {
        let mut files = files_below(home.data_dir());
        let ours =
            |path: &PathBuf| path.extension().is_some_and(|extension| extension == "stdout" || extension == "stderr");
        files.extend(fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().path()).filter(ours));
        assert!(files.iter().any(|path| path.ends_with("journal/journal.db")), "{files:?}");
        for path in files {
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
            self.are_not_in(&path.display().to_string(), &text);
        }
    }

    #[track_caller]
    fn are_in_no_arguments(&self) {
        for (pid, cmdline) in processes() {
            self.are_not_in(&format!("the arguments of {pid}"), &cmdline);
        }
    }
}

/// Every file that can be read; a socket cannot.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] })
        .filter(|path| path.is_file())
        .collect()
}

fn at_trace(home: &mut Home) {
    home.env.push(("RUST_LOG".into(), "mcp_satellite=trace,mcp_satellite_actors=trace".into()));
}

/// Every verb that shows anything.
fn look_at_everything(home: &Home) {
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
fn a_secret_that_a_server_echoes_is_found_nowhere() {
    let mut home = Home::new();
    at_trace(&mut home);
    let planted = Planted::new(&home, 11);
    let secret = |number: usize| planted.cores[number].clone();
    let environment = [
        ("PLANTED_ENV", secret(1)),
        ("PLANTED_HEADER", secret(4)),
        ("PLANTED_TOKEN", secret(6)),
        ("PLANTED_IN_URL", secret(10)),
    ];
    home.env.extend(environment.map(|(name, value)| (name.to_owned(), value)));
    // Two lines: what is read back from stderr is a line at a time.
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
    planted.are_in_no_arguments();

    // In errors, and in the last words of a crash.
    let outcomes: Vec<_> = [secret(0), secret(1), secret(2), secret(3), secret(5), weird, secret(9)]
        .into_iter()
        .map(|text| {
            // The whole value, as a server knows it.
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
    home.wait_row("notes", "back", |row| row["status"] == "online" && row["restarts"] == 1);
    home.satellite(&["call", "remote", "echo"]).exits(1);

    // A file that cannot be used is shown, but not its values.
    fs::write(&config, text.replace("[[teams]]", "[[teams")).unwrap();
    satellite.signal(Signal::SIGHUP);
    home.wait_event(0, "config.error", |_| true);
    home.satellite(&["check", "--config", config.to_str().unwrap()]);
    fs::write(&config, text.replace("server = ", "servr = ")).unwrap();
    satellite.signal(Signal::SIGHUP);
    let errors = || home.events().iter().filter(|event| event["type"] == "config.error").count();
    wait_for("the second error", || (errors() == 2).then_some(()), String::new);

    // It did reach what is looked at, masked.
    let logged = home.wait_event(0, "mcp.server.logs", |event| {
        event["data"]["logs"][0]["message"].as_str().unwrap().contains("key=[secret] error [secret]")
    });
    assert_eq!(logged["data"]["server_slug"], "notes");
    satellite.process.wait_stderr(|log| log.contains("skipped a message of the server"));
    look_at_everything(&home);
    planted.are_in_no_arguments();
    satellite.terminate().exits(0);
    home.satellite(&["events", "--json"]).exits(0);
    planted.are_in_no_output(&home);
}

#[test]
fn what_a_user_configures_is_found_in_its_one_file_and_nowhere_else() {
    let mut home = Home::new();
    at_trace(&mut home);
    let planted = Planted::new(&home, 6);
    let secret = |number: usize| planted.cores[number].clone();
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
    // As a value, as a key, and where there is none to give.
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
    planted.are_in_no_arguments();

    for text in [secret(0), format!("-----{}-----", secret(1)), format!("second-{}", secret(2))] {
        let arguments = json!({"message": format!("login as {text} refused")}).to_string();
        let outcome = home.satellite(&["call", "notes", "fail", &arguments]).exits(1);
        assert!(outcome.stderr.contains("login as [secret] refused"), "{outcome:#?}");
    }
    home.satellite(&["call", "notes", "crash", r#"{"code": 9}"#]).exits(1);
    home.wait_row("notes", "back", |row| row["status"] == "online" && row["restarts"] == 1);
    home.satellite(&["call", "remote", "echo"]).exits(1);
    home.satellite(&["configure", "notes", "--json"]).exits(0);
    home.wait_event(0, "mcp.server.logs", |event| {
        event["data"]["logs"][0]["message"].as_str().unwrap().contains("key=[secret] [secret]")
    });
    // Another configuration, good and bad.
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("key={env:API_KEY} {env:PEM}", "key={env:API_KEY} {env:PEM} again")).unwrap();
    satellite.signal(Signal::SIGHUP);
    home.wait_row("notes", "changed", |row| row["status"] == "online" && row["restarts"] == 2);
    fs::write(&config, text.replace("server = ", "servr = ")).unwrap();
    satellite.signal(Signal::SIGHUP);
    home.wait_event(0, "config.error", |_| true);
    look_at_everything(&home);
    satellite.terminate().exits(0);

    let values = home.data_dir().join("values.json");
    let kept = fs::read_to_string(&values).unwrap();
    for number in [0, 1, 2, 3, 5] {
        assert!(kept.contains(&secret(number)), "{number}");
    }
    fs::remove_file(values).unwrap();
    // What is not asked for was said again by nobody but the one who typed it: clap's own words are not ours.
    planted.are_in_no_output(&home);
}

#[test]
fn what_a_client_shows_and_what_it_is_given_is_found_nowhere() {
    let mut home = Home::new();
    at_trace(&mut home);
    let mut planted = Planted::new(&home, 4);
    let [token, wrong, key, other] = [0, 1, 2, 3].map(|number| format!("sat_{}", planted.cores[number]));
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
    let greeted = satellite.greeted();
    let url = greeted.split("MCP: ").nth(1).unwrap().split_whitespace().next().unwrap();
    let at = |path: &str, token: &str| Client::new(url, Some(token)).at(path);

    // Wrong tokens, and the right one in every wrong place.
    assert_eq!(at("/mcp", &wrong).initialize().status, 401);
    assert_eq!(at(&format!("/mcp?access_token={token}"), &wrong).initialize().status, 400);
    assert_eq!(at(&format!("/i/{token}/mcp"), &token).initialize().status, 404);
    assert_eq!(at(&format!("/{token}"), &token).initialize().status, 404);
    assert_eq!(at("/mcp", &token).in_session(&token).call_anyway("list_servers", &json!({})).status, 404);

    // What a server gives its client is the client's; of what is logged of it nothing is secret.
    let (mut direct, mut all) = (at("/i/notes/mcp", &token), at("/mcp", &token));
    for client in [&mut direct, &mut all] {
        let session = client.initialize().header("mcp-session-id").unwrap().to_owned();
        // The second half opens a session; the first may be told.
        planted.cores.push(session[16..].to_owned());
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
    look_at_everything(&home);
    planted.are_in_no_arguments();
    satellite.terminate().exits(0);
    planted.are_in_no_output(&home);
}

/// Starts a server for each script, with the same secret in `API_KEY`, and waits until `told` says that each is through.
fn scripts(home: &Home, policy: &str, scripts: &[(&str, &str)], told: impl Fn(&str, &str) -> bool) -> String {
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
            core(home, 0)
        )
        .unwrap();
    }
    let config = home.write("satellite.toml", &text);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let through = |log: &str| scripts.iter().all(|(name, _)| told(name, log));
    satellite.process.wait_stderr(through);
    home.satellite(&["status", "--json"]).exits(0);
    home.satellite(&["events", "--json"]).exits(0);
    satellite.terminate().exits(0).stderr
}

#[test]
fn a_secret_in_a_handshake_that_fails_and_in_last_words_is_found_nowhere() {
    let mut home = Home::new();
    at_trace(&mut home);
    let planted = Planted::new(&home, 1);
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
    for said in ["bad key [secret]", "npm warn [secret]", "no newline after [secret]"] {
        assert!(log.contains(said), "{said} is missing in:\n{log}");
    }
    planted.are_in_no_output(&home);
    planted.are_in_no_arguments();
}

/// A handshake that succeeds, with its three places for a text.
const GREETING: &str = r#"read -r _
printf '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"a","version":"1"}}}\n'
read -r _
"#;

#[test]
fn a_secret_in_an_answer_that_is_of_no_use_is_found_nowhere() {
    let mut home = Home::new();
    at_trace(&mut home);
    let planted = Planted::new(&home, 1);
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
            let said = |word: &str| log.lines().filter(of_it).any(|line| line.contains(word));
            said("\"error\"") || said("for no request")
        },
    );
    assert!(log.contains("bad key [secret]"), "{log}");
    planted.are_in_no_output(&home);
}

#[test]
fn a_secret_that_a_server_gives_as_a_name_is_in_no_log() {
    let mut home = Home::new();
    at_trace(&mut home);
    let planted = Planted::new(&home, 1);
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
            let said = |word: &str| log.lines().filter(of_it).any(|line| line.contains(word));
            match name {
                "info" => said("initialized"),
                "method" => said("\"notification\""),
                "cursor" => said("the rest of a list is left out"),
                _ => said("without a usable definition"),
            }
        },
    );
    planted.are_not_in("the log", &log);
    planted.are_in_no_output(&home);
}

#[test]
fn a_secret_referred_to_in_an_argument_is_refused() {
    let mut home = Home::new();
    let planted = Planted::new(&home, 2);
    home.env.push(("PLANTED_ENV".into(), planted.cores[0].clone()));
    fs::write(home.path().join("key"), &planted.cores[1]).unwrap();
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
            planted.are_not_in(verb, &format!("{outcome:?}"));
        }
    }
}

#[test]
fn a_server_inherits_no_variable_that_the_satellite_reads_as_a_secret() {
    let mut home = Home::new();
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
    assert_eq!(seen("other", "API_KEY"), "not set", "one server's secret is not another's");
    satellite.terminate().exits(0);
}
