//! What a server in a sandbox is and sees, and what others see of it.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};

use crate::support::processes;
use crate::yard::{NOBODY, SERVER_ID, Sandbox, User, Yard};

everywhere!(
    it_is_who_status_says,
    its_environment_is_what_the_configuration_gives,
    a_secret_is_in_no_argument_and_paths_of_the_data_directory_are_not_shown,
);

fn cmdline(pid: &Value) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    text.split('\0').map(str::to_owned).collect()
}

fn it_is_who_status_says(yard: &Yard) {
    let running = yard.run_escape("");
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
    // The satellite turns huge pages off for itself, and for no server.
    assert_eq!(status["THP_enabled"], "1");
    assert_eq!((&facts["stdin_is_tty"], &facts["controlling_terminal"]), (&json!(false), &json!(false)));

    // Outside.
    let status = fs::read_to_string(format!("/proc/{}/status", row["pid"])).unwrap();
    let ids = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_whitespace().map(|id| id.parse::<u32>().unwrap()).collect::<Vec<_>>()
    };
    let (user, group) = match yard.user {
        User::Nobody => (NOBODY, NOBODY),
        User::Ourselves if yard.is_root() => (SERVER_ID, SERVER_ID),
        User::Ourselves => (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw()),
    };
    assert_eq!((ids("Uid:"), ids("Gid:")), (vec![user; 4], vec![group; 4]));
    let identity = if yard.is_root() {
        "99999:99999".to_owned()
    } else {
        format!("99999:99999, outside its user namespace {user}:{group}")
    };
    assert_eq!(row["identity"], identity);
    assert_eq!(row["isolation"], yard.sandbox.name());

    // The pid is the server's, and the other one the sandbox's.
    assert_eq!(cmdline(&row["pid"])[0], yard.escape().to_str().unwrap());
    let wrapper = cmdline(&row["wrapper_pid"]);
    let program = if yard.sandbox == Sandbox::Nsjail { "/nsjail" } else { "/bwrap" };
    assert!(wrapper[0].ends_with(program), "{wrapper:?}");
    let numbers = fs::read_to_string(format!("/proc/{}/status", row["pid"])).unwrap();
    let numbers = numbers.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap().to_owned();
    assert!(numbers.ends_with(&format!("\t{}", facts["pid"])), "{numbers:?}");
    running.end();
}

fn its_environment_is_what_the_configuration_gives(yard: &mut Yard) {
    for name in ["OF_THE_SATELLITE", "LD_DEBUG_OUTPUT", "SSH_AUTH_SOCK"] {
        yard.home.env.push((name.to_owned(), "not for servers".to_owned()));
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
    let running = yard.run("", "", &[("acme", "escape", &lines)]);
    running.wait_online("escape");
    let facts = running.facts_of("escape");
    let names = facts["environment"].as_array().unwrap();
    let names: BTreeSet<&str> = names.iter().map(|name| name.as_str().unwrap()).collect();
    let mut expected = BTreeSet::from(["GIVEN", "HOME", "LANG", "PATH", "TEST_MARK"]);
    if yard.sandbox == Sandbox::Bubblewrap {
        // It says where it went, and cannot be told not to.
        expected.insert("PWD");
    }
    assert_eq!(names, expected);
    running.end();
}

fn a_secret_is_in_no_argument_and_paths_of_the_data_directory_are_not_shown(yard: &mut Yard) {
    const SECRET: &str = "planted-secret-4711";
    yard.home.env.push(("PLANTED".to_owned(), SECRET.to_owned()));
    let lines = "command = \"ESCAPE\"\nenv = { API_KEY = \"env:PLANTED\", OTHER = \"planted-secret-4712\" }";
    let running = yard.run("", "", &[("acme", "escape", lines)]);
    running.wait_online("escape");
    // It got there,
    running.escapes("read_environ", json!({"needle": SECRET}));
    // and by no argument of any process, ours and those of the sandbox included.
    let told: Vec<_> =
        processes().into_iter().filter(|(_, arguments)| arguments.contains("planted-secret-471")).collect();
    assert_eq!(told, []);
    let facts = running.facts_of("escape");
    assert!(!facts["processes"].to_string().contains(yard.home.data_dir().to_str().unwrap()), "{facts}");
    running.end();
}
