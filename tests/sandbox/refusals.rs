//! Starts that fail, and their messages: a missing or broken sandbox, a command that is not allowed, and paths that do
//! not exist in the sandbox.

use std::fs;

use serde_json::Value;
use testkit::home::{Home, pid};
use testkit::process::processes;

use crate::SATELLITE;
use crate::fixture::{Fixture, RunningSatellite, quoted};

in_each_sandbox!(
    a_working_directory_outside_the_sandbox_is_an_error,
    a_bind_of_a_missing_directory_is_an_error,
    production_resolves_a_command_once_and_ignores_the_users_path,
);

const PRODUCTION: &str = "[satellite]\nname = \"sandbox-tests\"\nprofile = \"production\"\n";

/// Returns a production configuration with one server whose command is allowed and exists.
fn one_server(satellite: &str) -> String {
    format!(
        "{PRODUCTION}{satellite}\nallowed_commands = [\"SATELLITE\"]\n[policy.restart]\nmax_crashes = 1\n\
         [[teams]]\nid = \"team_acme\"\nslug = \"acme\"\nusers = [{{ id = \"user_alice\", slug = \"alice\" }}]\n\
         [[teams.installations]]\nid = \"s1\"\nserver = \"server\"\nSIM"
    )
}

/// Asserts that the satellite starts no server and that its messages contain `words`.
#[track_caller]
fn is_refused(home: &Home, config: &str, words: &[&str]) {
    let check = home.bare(&["check", "--config", config]).exits(1);
    assert!(check.stderr.contains("no server will be started on this machine"), "{check:#?}");
    let satellite = home.run(&["--config", config]);
    let row = home.wait_status("server", "permanently_failed");
    let message = [&row["last_error"], &row["status_message"]].map(Value::to_string).join(" ");
    for word in words.iter().chain(&["`satellite check` shows details", "isolation = \\\"none\\\" under [satellite]"]) {
        assert!(message.contains(word), "{word:?} is missing: {message}");
    }
    assert_eq!((&row["pid"], &row["wrapper_pid"]), (&Value::Null, &Value::Null));
    assert!(home.processes().is_empty(), "the server was started");
    satellite.terminate().exits(0);
}

#[test]
fn production_without_a_sandbox_starts_no_server_and_names_the_remedy() {
    let mut home = Home::new(SATELLITE);
    let empty = home.path().join("empty");
    fs::create_dir(&empty).unwrap();
    home.env.push(("PATH".to_owned(), empty.to_str().unwrap().to_owned()));
    let config = home.write("satellite.toml", &one_server(""));
    let words = [
        "production needs a sandbox and none works here",
        "executable `nsjail` not found in PATH",
        "executable `bwrap` not found in PATH",
    ];
    is_refused(&home, config.to_str().unwrap(), &words);
}

#[test]
fn a_broken_sandbox_is_not_used() {
    use std::os::unix::fs::PermissionsExt;
    let mut home = Home::new(SATELLITE);
    let tools = home.path().join("tools");
    fs::create_dir(&tools).unwrap();
    fs::write(tools.join("nsjail"), "#!/bin/sh\necho no namespaces for you >&2\nexit 1\n").unwrap();
    fs::set_permissions(tools.join("nsjail"), fs::Permissions::from_mode(0o755)).unwrap();
    home.env.push(("PATH".to_owned(), tools.to_str().unwrap().to_owned()));
    let config = home.write("satellite.toml", &one_server("isolation = \"nsjail\""));
    let words = ["nsjail is configured and does not work here", "no namespaces for you"];
    is_refused(&home, config.to_str().unwrap(), &words);
    let check = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(1);
    assert!(check.stdout.contains("nsjail: cannot be used") && check.stdout.contains("no namespaces"), "{check:#?}");
}

#[test]
fn development_uses_no_sandbox() {
    let mut home = Home::new(SATELLITE);
    let tools = home.path().join("tools");
    fs::create_dir(&tools).unwrap();
    home.env.push(("PATH".to_owned(), tools.to_str().unwrap().to_owned()));
    let config = home.write("satellite.toml", &one_server("").replace("production", "development"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let row = home.wait_online("server");
    assert_eq!((&row["isolation"], &row["wrapper_pid"]), (&"none".into(), &Value::Null));
    satellite.terminate().exits(0);
}

#[test]
fn production_rejects_a_command_that_is_not_allowed() {
    let home = Home::new(SATELLITE);
    let config = home.write("satellite.toml", &one_server("").replace("\"SATELLITE\"", ""));
    let outcome = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(2);
    assert!(outcome.stderr.contains("allowed_commands") && outcome.stderr.contains("satellite.toml:"), "{outcome:#?}");
    home.background(&["run", "--config", config.to_str().unwrap()]).finish().exits(2);
}

#[track_caller]
fn cannot_start(running: &RunningSatellite, server: &str, why: &str) {
    let row = running.wait_status(server, "permanently_failed");
    let error = row["last_error"].as_str().unwrap();
    assert!(error.starts_with("cannot start `") && error.contains(why), "{error}");
}

fn a_working_directory_outside_the_sandbox_is_an_error(fixture: &Fixture) {
    let (seen, unseen) = (fixture.directory("seen"), fixture.directory("unseen"));
    let lines = |cwd: &std::path::Path| format!("command = \"ESCAPE\"\ncwd = {}", quoted(cwd));
    let (good, bad) = (lines(&seen), lines(&unseen));
    let policy = format!("[policy.isolation]\nbinds = [{}]", quoted(&seen));
    let running = fixture.run("", &policy, &[("acme", "good", &good), ("acme", "bad", &bad)]);
    running.wait_online("good");
    assert_eq!(running.facts_of("good")["cwd"], seen.to_str().unwrap());
    let why = format!("the working directory `{}` is not visible in the sandbox", unseen.display());
    cannot_start(&running, "bad", &why);
    cannot_start(&running, "bad", "to `binds` in [policy.isolation]");
    running.end();
}

fn a_bind_of_a_missing_directory_is_an_error(fixture: &Fixture) {
    let policy = "[policy.isolation]\nbinds = [\"/no/such/directory\"]";
    let running = fixture.run("", policy, &[("acme", "escape", "command = \"ESCAPE\"")]);
    let why = "cannot bind `/no/such/directory` into the sandbox: it does not exist; check `binds`";
    cannot_start(&running, "escape", why);
    running.end();
}

fn production_resolves_a_command_once_and_ignores_the_users_path(fixture: &mut Fixture) {
    let (first, second, of_the_user) =
        (fixture.directory("first"), fixture.directory("second"), fixture.directory("user"));
    fixture.prepend_to_path(&[&first, &second]);
    let escape = fixture.escape().display().to_string();
    Fixture::script(&second.join("tool"), &format!("#!/bin/sh\nexec {escape}\n"));
    // The tools that must not be started exit with code 66.
    let wrong = "#!/bin/sh\nexit 66\n";
    Fixture::script(&of_the_user.join("tool"), wrong);
    let lines = format!("command = \"tool\"\nenv = {{ PATH = \"{}:/usr/bin:/bin\" }}", of_the_user.display());
    let binds = [&first, &second, &of_the_user].map(|directory| quoted(directory)).join(", ");
    let policy = format!("[policy.isolation]\nbinds = [{binds}, \"{escape}\"]");
    let running =
        fixture.run("profile = \"production\"\nallowed_commands = [\"tool\"]", &policy, &[("acme", "tool", &lines)]);
    running.wait_online("tool");
    // From now on a tool exists earlier in PATH.
    Fixture::script(&first.join("tool"), wrong);
    running.satellite(&["restart", "tool"]).exits(0);
    running.wait_online("tool");
    let sandboxes: Vec<_> = processes()
        .into_iter()
        .filter(|(_, arguments)| arguments.contains(second.join("tool").to_str().unwrap()))
        .collect();
    assert!(!sandboxes.is_empty(), "the second tool does not run");
    running.end();
}

#[test]
fn production_resolves_a_command_once() {
    let mut home = Home::new(SATELLITE);
    let [first, second] = ["first", "second"].map(|name| home.path().join(name));
    for directory in [&first, &second] {
        fs::create_dir(directory).unwrap();
    }
    let path = format!("{}:{}:{}", first.display(), second.display(), std::env::var("PATH").unwrap());
    home.env.push(("PATH".to_owned(), path));
    let tool = |which: &str| format!("#!/bin/sh\nexec {SATELLITE} sim-server --name {}-{which}\n", home.mark());
    Fixture::script(&second.join("tool"), &tool("second"));
    let config = one_server("isolation = \"none\"").replace("SIM", "command = \"tool\"");
    let config = home.write("satellite.toml", &config.replace("\"SATELLITE\"", "\"tool\""));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let runs = |pid: i32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    let before = pid(&home.wait_online("server"));
    assert!(runs(before).contains("-second\0"), "{}", runs(before));
    // From now on a tool exists earlier in PATH.
    Fixture::script(&first.join("tool"), &tool("first"));
    home.satellite(&["restart", "server"]).exits(0);
    let again = home.wait_row("server", "online again", |row| row["status"] == "online" && row["pid"] != before);
    assert!(runs(pid(&again)).contains("-second\0"), "{}", runs(pid(&again)));
    satellite.terminate().exits(0);
}
