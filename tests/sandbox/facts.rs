//! Identity and environment of a server in a sandbox, seen from inside and from outside.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use testkit::process::{has_in_environment, processes};

use crate::fixture::{Fixture, NOBODY, RunningSatellite, SERVER_ID, Sandbox, User};

in_each_sandbox!(
    the_identity_of_a_server_is_the_one_in_status,
    a_server_sees_only_configured_environment_variables,
    a_server_in_production_gets_only_permitted_variables,
    no_variable_of_a_server_reaches_its_sandbox,
    process_arguments_show_no_secret_and_no_data_directory,
);

fn cmdline(pid: &Value) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    text.split('\0').map(str::to_owned).collect()
}

fn the_identity_of_a_server_is_the_one_in_status(fixture: &Fixture) {
    let running = fixture.run_escape("");
    let row = running.row("escape").unwrap();
    let facts = running.facts_of("escape");
    assert_eq!((&facts["uid"], &facts["gid"]), (&json!(SERVER_ID), &json!(SERVER_ID)));
    assert_eq!((&facts["euid"], &facts["egid"]), (&json!(SERVER_ID), &json!(SERVER_ID)));
    assert_eq!(facts["groups"], json!([]));
    assert_eq!(facts["hostname"], "mcp-team_acme");
    assert_eq!(facts["cwd"], "/home/mcp");
    let status = &facts["status"];
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!(status["NoNewPrivs"], "1");
    // The satellite disables huge pages for itself only.
    assert_eq!(status["THP_enabled"], "1");
    assert_eq!((&facts["stdin_is_tty"], &facts["controlling_terminal"]), (&json!(false), &json!(false)));

    // The same process seen from outside.
    let status = fs::read_to_string(format!("/proc/{}/status", row["pid"])).unwrap();
    let ids = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_whitespace().map(|id| id.parse::<u32>().unwrap()).collect::<Vec<_>>()
    };
    let (user, group) = match fixture.user {
        User::Nobody => (NOBODY, NOBODY),
        User::Ourselves if fixture.is_root() => (SERVER_ID, SERVER_ID),
        User::Ourselves => (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw()),
    };
    assert_eq!((ids("Uid:"), ids("Gid:")), (vec![user; 4], vec![group; 4]));
    let identity = if fixture.is_root() {
        "99999:99999".to_owned()
    } else {
        format!("99999:99999, outside its user namespace {user}:{group}")
    };
    assert_eq!(row["identity"], identity);
    assert_eq!(row["isolation"], fixture.sandbox.name());

    // `pid` is the server, `wrapper_pid` the sandbox.
    assert_eq!(cmdline(&row["pid"])[0], fixture.escape().to_str().unwrap());
    let wrapper = cmdline(&row["wrapper_pid"]);
    let program = if fixture.sandbox == Sandbox::Nsjail { "/nsjail" } else { "/bwrap" };
    assert!(wrapper[0].ends_with(program), "{wrapper:?}");
    let numbers = fs::read_to_string(format!("/proc/{}/status", row["pid"])).unwrap();
    let numbers = numbers.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap().to_owned();
    assert!(numbers.ends_with(&format!("\t{}", facts["pid"])), "{numbers:?}");
    running.end();
}

fn a_server_sees_only_configured_environment_variables(fixture: &mut Fixture) {
    for name in ["OF_THE_SATELLITE", "LD_DEBUG_OUTPUT", "SSH_AUTH_SOCK"] {
        fixture.home.env.push((name.to_owned(), "not for servers".to_owned()));
    }
    let lines = format!("command = \"ESCAPE\"\nenv = {{ GIVEN = \"by the configuration\", {} }}", code_variables());
    let running = fixture.run("", "", &[("acme", "escape", &lines)]);
    running.wait_online("escape");
    let given = ["GIVEN", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH"];
    assert_eq!(variables_of(&running, "escape"), expected_variables(fixture, &given));
    running.end();
}

/// Variables that make programs run other code, as the entries of a table.
fn code_variables() -> String {
    let names = [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "LD_DEBUG",
        "LD_PROFILE",
        "NODE_OPTIONS",
        "NODE_PATH",
        "PYTHONSTARTUP",
        "PYTHONPATH",
        "BASH_ENV",
        "ENV",
        "SHELL",
    ];
    names.map(|name| format!("{name} = \"/nowhere\"")).join(", ")
}

fn variables_of(running: &RunningSatellite<'_>, server: &str) -> BTreeSet<String> {
    let facts = running.facts_of(server);
    let names = facts["environment"].as_array().unwrap();
    names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

fn expected_variables(fixture: &Fixture, given: &[&str]) -> BTreeSet<String> {
    let mut expected = [&["HOME", "LANG", "PATH", "TEST_MARK"], given].concat();
    if fixture.sandbox == Sandbox::Bubblewrap {
        // bubblewrap always sets PWD.
        expected.push("PWD");
    }
    expected.into_iter().map(str::to_owned).collect()
}

fn a_server_in_production_gets_only_permitted_variables(fixture: &Fixture) {
    let satellite = format!("profile = \"production\"\nallowed_commands = [\"{}\"]", fixture.escape().display());
    let lines = format!("command = \"ESCAPE\"\nenv = {{ {} }}", code_variables());
    let permitted = format!("{lines}\npolicy = {{ isolation = {{ allow_env = [\"PYTHONPATH\", \"NODE_PATH\"] }} }}");
    let policy = "[policy.isolation]\nallow_env = [\"NODE_OPTIONS\"]";
    let servers = [("acme", "escape", &*lines), ("globex", "permitted", &*permitted)];
    let running = fixture.run(&satellite, policy, &servers);
    running.wait_all_online();
    assert_eq!(variables_of(&running, "escape"), expected_variables(fixture, &["NODE_OPTIONS"]));
    assert_eq!(variables_of(&running, "permitted"), expected_variables(fixture, &["NODE_PATH", "PYTHONPATH"]));
    running.end();
}

/// Builds a library that creates the file `loaded` in `directory` when a program loads it.
fn planted_library(directory: &std::path::Path) -> PathBuf {
    let (source, library) = (directory.join("planted.c"), directory.join("planted.so"));
    let code = "#include <fcntl.h>\n__attribute__((constructor)) static void load(void) { creat(LOADED, 0666); }\n";
    fs::write(&source, code).unwrap();
    let loaded = format!("-DLOADED=\"{}\"", directory.join("loaded").display());
    let built = Command::new("cc").args(["-shared", "-fPIC", &loaded, "-o"]).arg(&library).arg(&source).status();
    assert!(built.unwrap().success());
    library
}

fn no_variable_of_a_server_reaches_its_sandbox(fixture: &Fixture) {
    const SECRET: &str = "planted-secret-4713";
    let directory = fixture.directory("planted");
    fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let (library, loaded) = (planted_library(&directory), directory.join("loaded"));
    // The library works: otherwise the absence of the file proves nothing.
    assert!(Command::new("true").env("LD_PRELOAD", &library).status().unwrap().success() && loaded.exists());
    fs::remove_file(&loaded).unwrap();

    let library = library.to_str().unwrap();
    let directory = directory.to_str().unwrap();
    let planted = [
        ("API_KEY", SECRET),
        ("GCONV_PATH", directory),
        // One setting only: the C library writes a zero byte after the first of several.
        ("GLIBC_TUNABLES", "glibc.malloc.perturb=7"),
        ("LD_BIND_NOW", "planted"),
        ("LD_LIBRARY_PATH", directory),
        ("LD_PRELOAD", library),
        ("MALLOC_ARENA_MAX", "7"),
        ("quoted \\\" a-b", "\\\"two\\nlines\\\\"),
    ];
    let env = planted.map(|(name, value)| format!("\"{name}\" = \"{value}\"")).join(", ");
    let lines = format!("command = \"ESCAPE\"\nenv = {{ {env} }}");
    let policy = format!("[policy.isolation]\nbinds = [\"{directory}:rw\"]");
    let running = fixture.run("", &policy, &[("acme", "escape", &lines)]);
    let row = running.wait_online("escape");
    let (server, wrapper) = (row["pid"].as_i64().unwrap(), row["wrapper_pid"].as_i64().unwrap());

    // From the first process of the sandbox to the server.
    let mut process = wrapper;
    while process != server {
        let environment = fs::read(format!("/proc/{process}/environ")).unwrap();
        assert_eq!(String::from_utf8_lossy(&environment), "", "environment of process {process}");
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        assert!(maps.contains("libc") && !maps.contains("planted"), "{maps}");
        let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
        process = children.trim().parse().unwrap();
    }
    assert!(!loaded.exists(), "a process has loaded the library");
    // The server has all variables but those of the loader that no server gets, byte by byte.
    let server = i32::try_from(server).unwrap();
    for (name, value) in planted {
        let unquoted = |text: &str| text.replace("\\n", "\n").replace("\\\"", "\"").replace("\\\\", "\\");
        // As root, bubblewrap passes variables of the C library on through a shell, and some shells drop such a name.
        if name.contains(' ') && fixture.sandbox == Sandbox::Bubblewrap && fixture.is_root() {
            continue;
        }
        let has = has_in_environment(server, &format!("{}={}", unquoted(name), unquoted(value)));
        assert_eq!(has, !["LD_LIBRARY_PATH", "LD_PRELOAD"].contains(&name), "{name}");
    }
    running.end();
}

fn process_arguments_show_no_secret_and_no_data_directory(fixture: &mut Fixture) {
    const SECRET: &str = "planted-secret-4711";
    fixture.home.env.push(("PLANTED".to_owned(), SECRET.to_owned()));
    let lines = "command = \"ESCAPE\"\nenv = { API_KEY = \"env:PLANTED\", OTHER = \"planted-secret-4712\" }";
    let running = fixture.run("", "", &[("acme", "escape", lines)]);
    running.wait_online("escape");
    // The server has the secret,
    running.escapes("read_environ", json!({"needle": SECRET}));
    // and no process has it in its arguments, including those of the satellite and of the sandbox.
    let exposing: Vec<_> =
        processes().into_iter().filter(|(_, arguments)| arguments.contains("planted-secret-471")).collect();
    assert_eq!(exposing, []);
    let facts = running.facts_of("escape");
    assert!(!facts["processes"].to_string().contains(fixture.home.data_dir().to_str().unwrap()), "{facts}");
    running.end();
}
