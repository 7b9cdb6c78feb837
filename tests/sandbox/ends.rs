//! How a server in a sandbox ends, and what is said of it: its own SIGTERM handler, its codes and signals, its limits.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{pid, send, wait_for};
use crate::yard::{Running, Sandbox, Yard};

everywhere!(
    its_own_handler_runs_when_it_is_stopped,
    one_without_a_handler_ends_at_once_and_is_not_killed_for_it,
    what_it_started_inside_ends_with_it,
    exit_codes_and_signals_are_the_servers,
    a_limit_that_ends_it_is_named,
    the_home_of_one_that_is_gone_is_kept_for_its_return_and_pruned_on_request,
);

/// A grace that no test waits out: who needs it is given up.
const NO_GRACE: &str = "[policy.session]\nterminate_grace = \"1h\"";

#[track_caller]
fn stopped(running: &Running, server: &str) -> Value {
    running.satellite(&["stop", server]).exits(0);
    running.wait_event(0, "mcp.server.stopped", |event| event["data"]["server_slug"] == server)["data"].take()
}

fn its_own_handler_runs_when_it_is_stopped(yard: &Yard) {
    let lines = "command = \"ESCAPE\"\nargs = [\"--on-term\", \"ended\"]";
    let running = yard.run("", NO_GRACE, &[("acme", "escape", lines)]);
    running.wait_online("escape");
    let file = yard.home_of("team_acme", "user_alice", "escape1").join("ended");
    assert_eq!(fs::read_to_string(&file).unwrap(), "");
    let event = stopped(&running, "escape");
    assert_eq!(fs::read_to_string(&file).unwrap(), "handled\n");
    assert_eq!((&event["exit_code"], &event["signal"]), (&0.into(), &Value::Null), "{event:#}");
    assert_eq!((&event["kind"], &event["forced"]), (&"manual".into(), &false.into()), "{event:#}");
    running.end();
}

fn one_without_a_handler_ends_at_once_and_is_not_killed_for_it(yard: &Yard) {
    let lines = "command = \"ESCAPE\"\nargs = [\"--no-term-handler\"]";
    let running = yard.run("", NO_GRACE, &[("acme", "escape", lines)]);
    running.wait_online("escape");
    let event = stopped(&running, "escape");
    assert_eq!(event["forced"], false, "{event:#}");
    // The first of its namespace does not die of what it does not handle, and is ended as the kernel would have.
    let signal = if yard.sandbox == Sandbox::Nsjail { Signal::SIGKILL } else { Signal::SIGTERM };
    assert_eq!(event["signal"], signal as i32, "{event:#}");
    running.end();
}

fn what_it_started_inside_ends_with_it(yard: &Yard) {
    let flags = |kind: &str| format!("SIM \"--grandchild\", \"{kind}\"");
    let [plain, deaf, apart] = ["plain", "ignore-term", "setsid"].map(flags);
    let servers = [("acme", "plain", &*plain), ("acme", "deaf", &*deaf), ("acme", "apart", &*apart)];
    let running = yard.run("", "", &servers);
    running.wait_all_online();
    let grandchildren = || {
        let is_grandchild = |pid: &i32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.trim() == "sleep"
        };
        yard.home.traces().into_iter().filter(is_grandchild).collect::<Vec<_>>()
    };
    let wait = |count| {
        let there = || (grandchildren().len() == count).then_some(());
        wait_for(&format!("{count} grandchildren"), there, || format!("{:?}", yard.home.traces()));
    };
    wait(3);
    // One by a kill from outside, the others in order.
    send(pid(&running.row("apart").unwrap()), Signal::SIGKILL);
    running.crash_of("apart");
    stopped(&running, "plain");
    wait(1);
    running.end();
}

fn exit_codes_and_signals_are_the_servers(yard: &Yard) {
    let servers = [
        ("acme", "three", "SIM \"--exit-after\", \"1ms\", \"--exit-code\", \"3\""),
        ("acme", "killed", "SIM"),
        ("acme", "segv", "SIM \"--exit-after\", \"1ms\", \"--exit-signal\", \"11\""),
    ];
    // Over before it can be seen that it was there.
    let at_once = "command = \"/bin/sh\"\nargs = [\"-c\", \"echo gone >&2; exit 4\"]";
    let names = ["one", "two", "more", "many"].map(|name| ("acme", name, at_once));
    let running = yard.run("", "", &[servers.as_slice(), &names].concat());
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
    // The first of a PID namespace cannot signal itself.
    if yard.sandbox == Sandbox::Bubblewrap {
        let (crash, _) = running.crash_of("segv");
        assert_eq!((&crash["exit_code"], &crash["signal"]), (&Value::Null, &11.into()), "{crash:#}");
    }
    running.end();
}

fn a_limit_that_ends_it_is_named(yard: &Yard) {
    let crash = |what: &str, limit: &str| {
        format!("command = \"ESCAPE\"\nargs = [\"--crash\", \"{what}\"]\npolicy = {{ isolation = {{ {limit} }} }}")
    };
    let cpu = crash("cpu", "cpu_time_max = \"1s\"");
    let memory = crash("memory", "memory_max = \"64MiB\"");
    let size = crash("file-size", "file_size_max = \"1MiB\"");
    let python = "command = \"python3\"\nargs = [\"-c\", \"input(); x = bytearray(1 << 30)\"]\n\
                  policy = { isolation = { memory_max = \"256MiB\" } }";
    let mut servers = vec![("acme", "cpu", &*cpu), ("acme", "memory", &*memory), ("acme", "size", &*size)];
    // The sandbox has its own PATH.
    let has_python = ["/usr/bin/python3", "/usr/local/bin/python3"].iter().any(|path| fs::exists(path).unwrap());
    if has_python {
        servers.push(("acme", "python", python));
    }
    let running = yard.run("", "", &servers);
    let named = |server: &str, how: &str| {
        let (crash, row) = running.crash_of(server);
        for said in [&crash["reason"], &row["last_exit"]] {
            // The last line of its stderr may follow.
            assert!(said.as_str().unwrap().starts_with(how), "{crash:#} {row:#}");
        }
    };
    match yard.sandbox {
        // The first of a PID namespace does not die of a signal that it does not handle, unless it is SIGKILL or a fault:
        // the hard limit ends it a second later, `abort` falls back on a fault, and a write beyond the limit is an error.
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

fn the_home_of_one_that_is_gone_is_kept_for_its_return_and_pruned_on_request(yard: &Yard) {
    let servers = [("acme", "escape", "command = \"ESCAPE\""), ("acme", "other", "command = \"ESCAPE\"")];
    let running = yard.run("", "", &servers);
    running.wait_all_online();
    let file = yard.home_of("team_acme", "user_alice", "escape1").join("kept");
    fs::write(&file, "as before").unwrap();
    let reload = |servers: &[_]| {
        yard.configure("", "", servers);
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
