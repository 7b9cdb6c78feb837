//! Real servers in the preset `standard`, and in `strict` a small native server and one that exceeds its limits.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::fixture::{Fixture, User, quoted, skip};

in_each_sandbox!(
    #[cfg_attr(
        all(no_real_servers, not(no_sandboxes)),
        ignore = "needs real MCP servers; install them with .ci/install-servers"
    )]
    server_everything_runs_in_standard_and_names_the_memory_limit_in_strict,
    #[cfg_attr(
        all(no_real_servers, not(no_sandboxes)),
        ignore = "needs real MCP servers; install them with .ci/install-servers"
    )]
    mcp_server_time_answers_in_standard,
    a_native_server_answers_in_strict,
);

/// Returns the directory of the real servers. Panics if `file` is missing in it: the test that needs it is ignored then
/// unless `MCP_REAL_SERVERS=required`.
fn installed(file: &str) -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/mcp-servers");
    let directory = std::env::var_os("MCP_SERVERS_DIR").map_or_else(default, PathBuf::from);
    assert!(directory.join(file).exists(), "{} is missing: run .ci/install-servers", directory.join(file).display());
    directory
}

/// Returns whether the satellite's user may enter the directory.
fn reached_by(user: User, directory: &Path) -> bool {
    let for_all = |path: &Path| path.metadata().is_ok_and(|metadata| metadata.permissions().mode() & 0o005 == 0o005);
    let reached = user == User::Ourselves || directory.ancestors().all(for_all);
    if !reached {
        skip(&format!("{} is accessible only to its owner", directory.display()));
    }
    reached
}

fn server_everything_runs_in_standard_and_names_the_memory_limit_in_strict(fixture: &Fixture) {
    const INDEX: &str = "node_modules/@modelcontextprotocol/server-everything/dist/index.js";
    let directory = installed(INDEX);
    if !reached_by(fixture.user, &directory) {
        return;
    }
    let node = Command::new("sh").args(["-c", "command -v node"]).output().unwrap().stdout;
    let node = PathBuf::from(String::from_utf8(node).unwrap().trim()).canonicalize().unwrap();
    // A node of the system is found by its name, as in production; another one may need more than its executable.
    let node = if node.starts_with("/usr/bin") { PathBuf::from("node") } else { node };
    let lines =
        |more: &str| format!("command = {}\nargs = [{}]\n{more}", quoted(&node), quoted(&directory.join(INDEX)));
    let (standard, strict) = (lines(""), lines("policy = { isolation = { preset = \"strict\" } }"));
    let policy = format!("[policy.isolation]\npreset = \"standard\"\nbinds = [{}]", quoted(&directory));
    let running = fixture.run("", &policy, &[("acme", "everything", &standard), ("acme", "cramped", &strict)]);
    running.wait_online("everything");
    let answer = running.call("everything", "get-sum", &json!({"a": 2, "b": 40}));
    assert_eq!(answer["content"][0]["text"], "The sum of 2 and 40 is 42.");
    // Node reserves more address space than the limit allows before it reads its input.
    let (crash, row) = running.crash_of("cramped");
    for text in [&crash["reason"], &row["last_exit"], &row["last_error"]] {
        assert!(text.as_str().unwrap().contains("limit: memory, suspected"), "{row:#}");
    }
    running.end();
}

fn mcp_server_time_answers_in_standard(fixture: &Fixture) {
    let directory = installed("venv/bin/python3");
    if !reached_by(fixture.user, &directory) {
        return;
    }
    let python = directory.join("venv/bin/python3");
    // The interpreter that the virtual environment was made from may be anywhere.
    let base = Command::new(&python).args(["-c", "import sys; print(sys.base_prefix)"]).output().unwrap().stdout;
    let base = fs::canonicalize(String::from_utf8(base).unwrap().trim()).unwrap();
    if !reached_by(fixture.user, &base) {
        return;
    }
    let policy = format!("[policy.isolation]\nbinds = [{}, {}]", quoted(&directory), quoted(&base));
    let lines =
        format!("command = {}\nargs = [\"-m\", \"mcp_server_time\", \"--local-timezone\", \"UTC\"]", quoted(&python));
    let running = fixture.run("", &policy, &[("acme", "time", &lines)]);
    running.wait_online("time");
    let noon = json!({"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kolkata"});
    let answer = running.call("time", "convert_time", &noon);
    assert!(answer["content"][0]["text"].as_str().unwrap().contains("T17:30:00+05:30"), "{answer}");
    running.end();
}

/// The escape program is small enough; a debug build of the satellite needs more than 50 MB of address space.
fn a_native_server_answers_in_strict(fixture: &Fixture) {
    let running = fixture.run_escape("[policy.isolation]\npreset = \"strict\"");
    let answer = running.call("escape", "facts", &json!({}));
    assert_eq!(answer["structuredContent"]["rlimits"]["max_address_space"]["soft"], 50 << 20);
    // The server is the only process that the limit allows.
    assert_eq!(running.is_held("fork", json!({"count": 3})), "0 children, then EAGAIN");
    running.end();
}
