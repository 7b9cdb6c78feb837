//! Identity and environment of a server in a sandbox, seen from inside and from outside.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use testkit::process::processes;

use crate::fixture::{Fixture, NOBODY, SERVER_ID, Sandbox, User};

in_each_sandbox!(
    the_identity_of_a_server_is_the_one_in_status,
    a_server_sees_only_configured_environment_variables,
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
    let denied = [
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
    let given = denied.map(|name| format!("{name} = \"/nowhere\"")).join(", ");
    let lines = format!("command = \"ESCAPE\"\nenv = {{ GIVEN = \"by the configuration\", {given} }}");
    let running = fixture.run("", "", &[("acme", "escape", &lines)]);
    running.wait_online("escape");
    let facts = running.facts_of("escape");
    let names = facts["environment"].as_array().unwrap();
    let names: BTreeSet<&str> = names.iter().map(|name| name.as_str().unwrap()).collect();
    let mut expected = BTreeSet::from(["GIVEN", "HOME", "LANG", "PATH", "TEST_MARK"]);
    if fixture.sandbox == Sandbox::Bubblewrap {
        // bubblewrap always sets PWD.
        expected.insert("PWD");
    }
    assert_eq!(names, expected);
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
