//! `satellite doctor`: each fault is found and has a next step.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::certificate::write_pair;
use testkit::home::{Home, Outcome};
use testkit::port::free_port;
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;

/// A home whose environment contains no client of the person who runs the tests, and only the programs of `bin`.
fn home() -> Home {
    let mut home = Home::new(SATELLITE);
    fs::create_dir_all(home.path().join("user/.config")).unwrap();
    fs::create_dir(home.path().join("bin")).unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    home.env = vec![
        ("HOME".to_owned(), path("user")),
        ("XDG_CONFIG_HOME".to_owned(), path("user/.config")),
        ("PATH".to_owned(), path("bin")),
    ];
    home
}

fn program(home: &Home, name: &str, text: &str) {
    let path = home.path().join("bin").join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn doctor(home: &Home, args: &[&str]) -> Outcome {
    home.satellite(&[&["doctor", "--json"], args].concat())
}

/// The finding about `subject`.
#[track_caller]
fn finding(outcome: &Outcome, subject: &str) -> Value {
    let report = outcome.json();
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|finding| finding["subject"] == subject);
    found.unwrap_or_else(|| panic!("no finding about {subject}: {report:#}")).clone()
}

#[track_caller]
fn assert_finding(outcome: &Outcome, subject: &str, state: &str, texts: &[&str]) {
    let finding = finding(outcome, subject);
    assert_eq!(finding["state"], state, "{finding:#}");
    let shown = format!("{} {}", finding["message"], finding["next_step"]);
    for text in texts {
        assert!(shown.contains(text), "{text}: {finding:#}");
    }
}

#[test]
fn a_machine_without_a_satellite_is_examined_and_nothing_is_changed() {
    let home = home();
    program(&home, "node", "#!/bin/sh\necho v99.1\n");
    program(&home, "uv", "#!/bin/sh\nexit 3\n");
    program(&home, "docker", "#!/bin/sh\nexec /bin/sleep 60\n");
    let outcome = doctor(&home, &[]).exits(0);
    assert_finding(&outcome, "version", "ok", &[env!("CARGO_PKG_VERSION"), "no satellite is running"]);
    assert_finding(&outcome, "data directory", "ok", &["does not exist"]);
    assert_finding(&outcome, "node", "ok", &["v99.1", "bin/node"]);
    assert_finding(&outcome, "uv", "warning", &["exit status: 3", "uv --version"]);
    assert_finding(&outcome, "docker", "warning", &["no answer within 5 s"]);
    assert_finding(&outcome, "npx", "ok", &["not found"]);
    assert_finding(&outcome, "client", "ok", &["no MCP client"]);
    assert_finding(&outcome, "configuration", "ok", &["--config FILE"]);
    assert_finding(&outcome, "endpoint", "ok", &["no call was made"]);
    for subject in ["disk", "process containment", "nsjail", "bubblewrap", "open files"] {
        finding(&outcome, subject);
    }
    let report = outcome.json();
    let findings = report["findings"].as_array().unwrap();
    let count = |state: &str| findings.iter().filter(|finding| finding["state"] == state).count();
    assert_eq!((count("error"), report["errors"].as_u64()), (0, Some(0)));
    assert_eq!(Some(count("warning") as u64), report["warnings"].as_u64());
    assert!(findings.iter().all(|one| one["state"] == "ok" || one["next_step"].is_string()), "{report:#}");
    assert!(!home.data_dir().exists() && home.processes().is_empty());

    let table = home.satellite(&["doctor"]).exits(0).stdout;
    assert!(table.starts_with(" STATE") && table.contains("tool node") && table.contains("errors: 0, "), "{table}");
}

#[test]
fn every_obstacle_of_a_server_is_named_before_the_start() {
    let home = home();
    for name in ["npx", "npm", "node", "zzzzzzzz", "nx"] {
        program(&home, name, "#!/bin/sh\necho 1\n");
    }
    fs::write(home.path().join("plain"), "text").unwrap();
    write_pair(home.path());
    let (tls_port, closed_port) = (free_port(), free_port());
    let gateway = home.write(
        "gateway.toml",
        &format!(
            "[gateway]\nlisten = \"127.0.0.1:{tls_port}\"\ntls = {{ cert = \"cert.pem\", key = \"key.pem\" }}\n\
             [[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{{ id = \"u\", slug = \"alice\" }}]\n"
        ),
    );
    let plain = home.path().join("plain").display().to_string();
    let mut text = "[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{ id = \"u\", slug = \"alice\" }]\n".to_owned();
    for (server, keys) in [
        ("good", format!("command = \"{SATELLITE}\"")),
        ("typo", "command = \"npxx\"\nargs = [\"PLANTED-arg\"]\nenv = { KEY = \"PLANTED-env\" }".to_owned()),
        ("plain", format!("command = \"{plain}\"")),
        ("homeless", "command = \"npx\"\ncwd = \"/no/such/directory\"".to_owned()),
        ("loud", format!("command = \"{SATELLITE}\"\nargs = [\"--key\", \"${{file:plain}}\"]\nsecret_args = true")),
        ("loud-typo", "command = \"npxxx\"\nargs = [\"--key=${value:API_KEY}\"]\nsecret_args = true".to_owned()),
        ("asks", format!("command = \"{SATELLITE}\"\nuser_required = [\"API_KEY\"]")),
        (
            "lost",
            "transport = \"http\"\nurl = \"https://nobody.invalid/PLANTED-path/mcp?key=PLANTED-query\"".to_owned(),
        ),
        ("closed", format!("transport = \"http\"\nurl = \"http://127.0.0.1:{closed_port}/mcp\"")),
        ("distrusted", format!("transport = \"http\"\nurl = \"https://localhost:{tls_port}/mcp\"")),
    ] {
        writeln!(text, "[[teams.installations]]\nid = \"{server}\"\nserver = \"{server}\"\n{keys}").unwrap();
    }
    let config = home.write("satellite.toml", &text);
    let satellite = home.run(&["--config", gateway.to_str().unwrap()]);
    {
        let examine = |flag: &[&str]| {
            home.bare(&[&["doctor", "--data-dir", "elsewhere", "--config", config.to_str().unwrap()], flag].concat())
        };
        let outcome = examine(&["--json"]).exits(1);
        let name = |server: &str| format!("{server}-acme-alice-{server}");
        assert_finding(&outcome, &name("good"), "ok", &["nothing prevents its start"]);
        assert_finding(&outcome, &name("typo"), "error", &["cannot find executable `npxx`", "`npx`, `npm`, `nx`"]);
        assert_finding(&outcome, &name("plain"), "error", &["not executable"]);
        assert_finding(&outcome, &name("homeless"), "error", &["/no/such/directory"]);
        let visible = "a secret in `args` is visible to every process";
        assert_finding(
            &outcome,
            &name("loud"),
            "warning",
            &["nothing prevents its start", visible, "set it in `env` and remove `secret_args`"],
        );
        assert_finding(&outcome, &name("loud-typo"), "error", &["cannot find executable `npxxx`"]);
        assert_eq!(outcome.stdout.matches(visible).count(), 2, "{}", outcome.stdout);
        assert_finding(
            &outcome,
            &name("asks"),
            "warning",
            &["API_KEY", "satellite configure asks-acme-alice-asks API_KEY"],
        );
        assert_finding(&outcome, &name("lost"), "error", &["`nobody.invalid` cannot be resolved"]);
        assert_finding(&outcome, &name("closed"), "error", &["cannot connect to `127.0.0.1`"]);
        assert_finding(
            &outcome,
            &name("distrusted"),
            "error",
            &["TLS connection to `localhost` failed", "SSL_CERT_FILE"],
        );
        let table = examine(&[]).exits(1);
        for text in [&outcome.stdout, &outcome.stderr, &table.stdout, &table.stderr] {
            assert!(!text.contains("PLANTED"), "{text}");
        }
    }
    // The satellite's own endpoint has a certificate that nobody trusts.
    let outcome = doctor(&home, &[]).exits(1);
    assert_finding(&outcome, "endpoint", "error", &["TLS connection failed", "certificate that clients trust"]);
    satellite.terminate().exits(0);

    fs::write(&config, "[satellite]\nname = \"x\"\n").unwrap();
    let outcome = doctor(&home, &["--config", config.to_str().unwrap()]).exits(1);
    assert_finding(&outcome, "configuration", "error", &["`x` is not a valid name", "satellite check"]);
}

#[test]
fn a_running_satellite_is_called_through_its_endpoint() {
    let mut home = home();
    home.env.retain(|(name, _)| name != "PATH");
    let servers = fs::read_to_string(home.servers("servers.toml", &[("notes", &[])])).unwrap();
    let lame = "[[teams.installations]]\nid = \"lame\"\nserver = \"lame\"\ncommand = \"/bin/false\"\n";
    let config = format!("[gateway]\nlisten = \"127.0.0.1:0\"\n[policy.restart]\nmax_crashes = 1\n{servers}\n{lame}");
    let config = home.write("satellite.toml", &config);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    home.wait_status("lame", "permanently_failed");
    let token = fs::read_to_string(home.data_dir().join("token")).unwrap().trim().to_owned();
    let outcome = doctor(&home, &[]).exits(1);
    assert_finding(&outcome, "version", "ok", &[&format!("pid {}", satellite.pid())]);
    assert_finding(&outcome, "data directory", "ok", &["private to this user"]);
    assert_finding(
        &outcome,
        "endpoint",
        "ok",
        &["opened a session and listed 6 tools, and answered a call of `list_servers`"],
    );
    assert_finding(&outcome, "notes-acme-alice-notes", "ok", &["online"]);
    assert_finding(&outcome, "lame-acme-alice-lame", "error", &["permanently_failed", "satellite restart"]);
    let ports = outcome.json()["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["message"] == "used by the running satellite")
        .count();
    assert_eq!(ports, 1, "{outcome:#?}");
    assert!(!outcome.stdout.contains(&token[4..]), "the token was printed");
    assert_eq!(home.satellite(&["clients", "--json"]).exits(0).json(), serde_json::json!([]), "the session is left");

    // Changed files that the satellite rejects.
    fs::write(&config, "[satellite]\nname = \"x\"\n").unwrap();
    let status = || home.satellite(&["status", "--satellite", "--json"]).json()["rejected_configuration"].clone();
    wait_for("the files to be rejected", || status().is_object().then_some(()), || format!("{:#}", status()));
    assert_finding(
        &doctor(&home, &[]).exits(1),
        "changed files",
        "error",
        &["`x` is not a valid name", "satellite check"],
    );

    // A satellite that does not answer.
    let pid = satellite.pid();
    send(pid, Signal::SIGSTOP);
    let outcome = doctor(&home, &[]);
    send(pid, Signal::SIGCONT);
    assert_finding(&outcome.exits(1), "control socket", "error", &["has not answered for 5 s"]);
    satellite.terminate().exits(0);
}

#[test]
fn a_port_that_another_process_uses_is_found_with_its_process() {
    let home = home();
    let listener = TcpListener::bind(("127.0.0.1", free_port())).unwrap();
    let port = listener.local_addr().unwrap().port();
    let users = "[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{ id = \"u\", slug = \"alice\" }]\n";
    let config = home.write("satellite.toml", &format!("[gateway]\nlisten = \"127.0.0.1:{port}\"\n{users}"));
    let outcome = doctor(&home, &["--config", config.to_str().unwrap()]).exits(1);
    let pid = format!("(pid {})", std::process::id());
    assert_finding(&outcome, &format!("port {port}"), "error", &[&pid, "the satellite cannot start", "--listen"]);
    drop(listener);
    let outcome = doctor(&home, &["--config", config.to_str().unwrap()]).exits(0);
    assert_finding(&outcome, &format!("port {port}"), "ok", &["free"]);
}

#[test]
fn clients_and_an_unsafe_data_directory_are_reported() {
    let home = home();
    let put = |path: &str, text: &str| {
        let path = home.path().join("user").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    put(".cursor/mcp.json", "{\"mcpServers\": {}}");
    put(".codex/config.toml", "[mcp_servers.satellite]\ncommand = \"/no/such/satellite\"\nargs = [\"stdio\"]\n");
    put(".gemini/settings.json", "{\"mcpServers\": {\"satellite\": {\"command\": \"orbit\"}}}");
    put(".config/zed/settings.json", "{\"context_servers\": ");
    home.satellite(&["connect", "cursor", "--yes"]).exits(0);
    put(".junie/mcp/mcp.json", "{}");
    fs::set_permissions(home.data_dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let outcome = doctor(&home, &[]).exits(1);
    assert_finding(&outcome, "cursor", "ok", &["connected (stdio)"]);
    assert_finding(
        &outcome,
        "codex",
        "error",
        &["`/no/such/satellite`, which does not exist", "satellite connect codex"],
    );
    assert_finding(&outcome, "gemini", "warning", &["rename that entry"]);
    assert_finding(&outcome, "zed", "warning", &["invalid JSON"]);
    assert_finding(&outcome, "junie", "ok", &["not connected", "satellite connect junie"]);
    let directory = Path::new(home.data_dir()).display().to_string();
    assert_finding(&outcome, "data directory", "error", &["chmod 700", &directory]);
}

#[test]
fn the_endpoint_is_called_with_a_token_of_the_control_socket() {
    let home = home();
    // The tokens of the users are known by their digests only.
    let user = |slug: &str| format!("{{ id = \"{slug}\", slug = \"{slug}\", token = \"sha256:{}\" }}", slug.repeat(64));
    let config = home.write(
        "satellite.toml",
        &format!(
            "[gateway]\nlisten = \"127.0.0.1:0\"\n[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{}, {}]\n\
             [[teams.installations]]\nid = \"notes\"\nserver = \"notes\"\nSIM\n",
            user("a"),
            user("b")
        ),
    );
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    assert!(!home.data_dir().join("token").exists());
    let outcome = doctor(&home, &[]).exits(0);
    assert_finding(
        &outcome,
        "endpoint",
        "ok",
        &["opened a session and listed 6 tools, and answered a call of `list_servers`"],
    );
    satellite.terminate().exits(0);
}

#[test]
fn the_configuration_of_the_user_is_examined_without_an_option() {
    let home = home();
    let directory = home.path().join("user/.config/mcp-satellite");
    fs::create_dir(&directory).unwrap();
    let text = "[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{ id = \"u\", slug = \"alice\" }]\n\
                [[teams.installations]]\nid = \"typo\"\nserver = \"typo\"\ncommand = \"npxx\"\n";
    fs::write(directory.join("satellite.toml"), text).unwrap();
    let outcome = doctor(&home, &[]).exits(1);
    assert_finding(&outcome, "typo-acme-alice-typo", "error", &["cannot find executable `npxx`"]);
}
