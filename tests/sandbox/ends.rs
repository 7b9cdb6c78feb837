//! The end of a server in a sandbox and its reported reason: SIGTERM handler, exit codes, signals, limits.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::pid;
use testkit::process::send;
use testkit::wait::wait_for;

use crate::fixture::{Fixture, RunningSatellite, Sandbox};

in_each_sandbox!(
    a_stop_runs_the_sigterm_handler_of_the_server,
    a_server_without_a_sigterm_handler_ends_at_once_and_unforced,
    processes_started_inside_end_with_the_server,
    exit_codes_and_signals_are_those_of_the_server,
    the_exit_reason_names_the_limit_that_ended_the_server,
    the_home_of_a_removed_server_is_kept_until_satellite_prune,
);

/// A grace that no test waits for: a test that needs it fails by its own time limit.
const NO_GRACE: &str = "[policy.session]\nterminate_grace = \"1h\"";

#[track_caller]
fn stopped(running: &RunningSatellite, server: &str) -> Value {
    running.satellite(&["stop", server]).exits(0);
    running.wait_event(0, "mcp.server.stopped", |event| event["data"]["server_slug"] == server)["data"].take()
}

fn a_stop_runs_the_sigterm_handler_of_the_server(fixture: &Fixture) {
    let lines = "command = \"ESCAPE\"\nargs = [\"--on-term\", \"ended\"]";
    let running = fixture.run("", NO_GRACE, &[("acme", "escape", lines)]);
    running.wait_online("escape");
    let file = fixture.home_of("team_acme", "user_alice", "escape1").join("ended");
    assert_eq!(fs::read_to_string(&file).unwrap(), "");
    let event = stopped(&running, "escape");
    assert_eq!(fs::read_to_string(&file).unwrap(), "handled\n");
    assert_eq!((&event["exit_code"], &event["signal"]), (&0.into(), &Value::Null), "{event:#}");
    assert_eq!((&event["kind"], &event["forced"]), (&"manual".into(), &false.into()), "{event:#}");
    running.end();
}

fn a_server_without_a_sigterm_handler_ends_at_once_and_unforced(fixture: &Fixture) {
    let lines = "command = \"ESCAPE\"\nargs = [\"--no-term-handler\"]";
    let running = fixture.run("", NO_GRACE, &[("acme", "escape", lines)]);
    running.wait_online("escape");
    let event = stopped(&running, "escape");
    assert_eq!(event["forced"], false, "{event:#}");
    // The first process of a PID namespace ignores a SIGTERM that it does not handle, so the satellite sends SIGKILL.
    let signal = if fixture.sandbox == Sandbox::Nsjail { Signal::SIGKILL } else { Signal::SIGTERM };
    assert_eq!(event["signal"], signal as i32, "{event:#}");
    running.end();
}

fn processes_started_inside_end_with_the_server(fixture: &Fixture) {
    let flags = |kind: &str| format!("SIM \"--grandchild\", \"{kind}\"");
    let [plain, deaf, apart] = ["plain", "ignore-term", "setsid"].map(flags);
    let servers = [("acme", "plain", &*plain), ("acme", "deaf", &*deaf), ("acme", "apart", &*apart)];
    let running = fixture.run("", "", &servers);
    running.wait_all_online();
    let grandchildren = || {
        let is_grandchild = |pid: &i32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.trim() == "sleep"
        };
        fixture.home.traces().into_iter().filter(is_grandchild).collect::<Vec<_>>()
    };
    let wait = |count| {
        let there = || (grandchildren().len() == count).then_some(());
        wait_for(&format!("{count} grandchildren"), there, || format!("{:?}", fixture.home.traces()));
    };
    wait(3);
    // One server is killed from outside, the others are stopped.
    send(pid(&running.row("apart").unwrap()), Signal::SIGKILL);
    running.crash_of("apart");
    stopped(&running, "plain");
    wait(1);
    running.end();
}

fn exit_codes_and_signals_are_those_of_the_server(fixture: &Fixture) {
    let servers = [
        ("acme", "three", "SIM \"--exit-after\", \"1ms\", \"--exit-code\", \"3\""),
        ("acme", "killed", "SIM"),
        ("acme", "segv", "SIM \"--exit-after\", \"1ms\", \"--exit-signal\", \"11\""),
    ];
    // These servers end before the satellite can look at their processes.
    let at_once = "command = \"/bin/sh\"\nargs = [\"-c\", \"echo gone >&2; exit 4\"]";
    let names = ["one", "two", "more", "many"].map(|name| ("acme", name, at_once));
    let running = fixture.run("", "", &[servers.as_slice(), &names].concat());
    for (_, name, _) in names {
        let (crash, row) = running.crash_of(name);
        assert_eq!((&crash["exit_code"], &crash["signal"]), (&4.into(), &Value::Null), "{crash:#}");
        assert_eq!(row["last_exit"], "exited with code 4: gone");
    }
    let (crash, row) = running.crash_of("three");
    assert_eq!((&crash["exit_code"], &crash["signal"]), (&3.into(), &Value::Null), "{crash:#}");
    assert_eq!(row["last_exit"], "exited with code 3");
    send(pid(&running.wait_online("killed")), Signal::SIGKILL);
    let (crash, row) = running.crash_of("killed");
    assert_eq!((&crash["exit_code"], &crash["signal"]), (&Value::Null, &9.into()), "{crash:#}");
    assert_eq!(row["last_exit"], "killed by SIGKILL");
    // The first process of a PID namespace cannot end itself by a signal.
    if fixture.sandbox == Sandbox::Bubblewrap {
        let (crash, _) = running.crash_of("segv");
        assert_eq!((&crash["exit_code"], &crash["signal"]), (&Value::Null, &11.into()), "{crash:#}");
    }
    running.end();
}

fn the_exit_reason_names_the_limit_that_ended_the_server(fixture: &Fixture) {
    let crash = |what: &str, limit: &str| {
        format!("command = \"ESCAPE\"\nargs = [\"--crash\", \"{what}\"]\npolicy = {{ isolation = {{ {limit} }} }}")
    };
    let cpu = crash("cpu", "cpu_time_max = \"1s\"");
    let memory = crash("memory", "memory_max = \"64MiB\"");
    let size = crash("file-size", "file_size_max = \"1MiB\"");
    let python = "command = \"python3\"\nargs = [\"-c\", \"input(); x = bytearray(1 << 30)\"]\n\
                  policy = { isolation = { memory_max = \"256MiB\" } }";
    let mut servers = vec![("acme", "cpu", &*cpu), ("acme", "memory", &*memory), ("acme", "size", &*size)];
    // PATH in the sandbox is its own, not that of the tests.
    let has_python = ["/usr/bin/python3", "/usr/local/bin/python3"].iter().any(|path| fs::exists(path).unwrap());
    if has_python {
        servers.push(("acme", "python", python));
    }
    let running = fixture.run("", "", &servers);
    let named = |server: &str, how: &str| {
        let (crash, row) = running.crash_of(server);
        for text in [&crash["reason"], &row["last_exit"]] {
            // The last line of its stderr may follow.
            assert!(text.as_str().unwrap().starts_with(how), "{crash:#} {row:#}");
        }
    };
    match fixture.sandbox {
        // The first process of a PID namespace ignores signals that it does not handle, except SIGKILL and faults: the
        // hard limit kills it a second later, `abort` falls back to a fault, and a write beyond the limit fails.
        Sandbox::Nsjail => {
            named("cpu", "killed by SIGKILL (limit: cpu)");
            named("memory", "killed by SIGSEGV (limit: memory, suspected)");
            named("size", "exited with code 1");
        }
        Sandbox::Bubblewrap => {
            named("cpu", "killed by SIGXCPU (limit: cpu)");
            named("memory", "killed by SIGABRT (limit: memory, suspected)");
            named("size", "killed by SIGXFSZ (limit: file size)");
        }
    }
    if has_python {
        named("python", "exited with code 1 (limit: memory, suspected)");
    }
    running.end();
}

fn the_home_of_a_removed_server_is_kept_until_satellite_prune(fixture: &Fixture) {
    let servers = [("acme", "escape", "command = \"ESCAPE\""), ("acme", "other", "command = \"ESCAPE\"")];
    let running = fixture.run("", "", &servers);
    running.wait_all_online();
    let file = fixture.home_of("team_acme", "user_alice", "escape1").join("kept");
    fs::write(&file, "as before").unwrap();
    let reload = |servers: &[_]| {
        fixture.configure("", "", servers);
        running.satellite(&["reload"]).exits(0);
    };
    reload(&servers[1..]);
    assert!(running.row("escape").is_none());
    reload(&servers);
    running.wait_online("escape");
    assert_eq!(fs::read_to_string(&file).unwrap(), "as before");
    reload(&servers[1..]);
    let pruned = running.satellite(&["prune"]).exits(0).stdout;
    assert_eq!(pruned, "erased the data of team_acme/user_alice/escape1\n");
    assert!(!file.parent().unwrap().exists());
    running.end();
}
