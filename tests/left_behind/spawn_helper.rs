//! The process that forks the servers as children of the keeper.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use testkit::home::{json_lines, pid};
use testkit::process::send;
use testkit::wait::wait_for;

use super::fixture::{Fixture, LONG, RunningSatellite, SERVERS, SHORT, STUBBORN};
use super::mechanism::{Sandbox, for_each_mechanism, for_each_mechanism_once};
use super::process::{alive, zombies_of};
use crate::SATELLITE;

const SECRET: &str = "planted-in-the-helper-of-a-test";

/// Returns the process ids of the leaders of all servers: the sandboxes or, without one, the servers themselves.
fn leaders(fixture: &Fixture) -> Vec<i32> {
    let leader = |row: Value| row["wrapper_pid"].as_i64().map_or_else(|| pid(&row), |pid| i32::try_from(pid).unwrap());
    fixture.home.rows().into_iter().map(leader).collect()
}

fn children_of_keeper(running: &RunningSatellite<'_>) -> Vec<i32> {
    let keeper = running.keeper();
    let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Returns the targets of the descriptors of a process, in the order of their numbers.
fn descriptors(pid: i32) -> Vec<String> {
    let directory = Path::new("/proc").join(pid.to_string()).join("fd");
    let entries = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut numbers: Vec<u32> = entries.map(|name| name.to_str().unwrap().parse().unwrap()).collect();
    numbers.sort_unstable();
    let target = |number: &u32| fs::read_link(directory.join(number.to_string())).unwrap();
    numbers.iter().map(|number| target(number).to_str().unwrap().to_owned()).collect()
}

#[test]
fn servers_are_forked_by_the_helper_and_are_children_of_the_keeper() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        let (children, leaders) = (children_of_keeper(&running), leaders(&fixture));
        assert_eq!(leaders.len(), SERVERS.len());
        assert!(leaders.iter().all(|leader| children.contains(leader)), "{leaders:?} are not all in {children:?}");
        running.terminate();
    });
}

#[test]
fn neither_helper_nor_server_keeps_a_descriptor_of_another_process() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        let check = || {
            let helper = descriptors(running.helper().unwrap().pid);
            assert_eq!(helper[..3], ["/dev/null"; 3]);
            assert!(helper.len() == 4 && helper[3].starts_with("socket:"), "{helper:?}");
            if mechanism.sandbox == Sandbox::None {
                // The leader of this server is a shell, which opens no descriptor.
                let wrapped = fixture.home.wait_online("wrapped");
                let server = descriptors(pid(&wrapped));
                assert!(server.len() == 3 && server.iter().all(|target| target.starts_with("pipe:")), "{server:?}");
            }
        };
        check();
        // The keeper passes the stream of another helper to the satellite.
        kill_helper(&running);
        fixture.home.satellite(&["restart", "wrapped"]).exits(0);
        check();
        running.terminate();
    });
}

#[track_caller]
fn kill_helper(running: &RunningSatellite<'_>) {
    let helper = running.helper().unwrap();
    send(helper.pid, Signal::SIGKILL);
    wait_for("the helper to end", || (!helper.is_alive()).then_some(()), || format!("{helper:?}"));
}

#[test]
fn after_the_end_of_the_helper_servers_live_on_and_another_one_starts_new_ones() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        let before = running.members();
        kill_helper(&running);
        assert_eq!(alive(&before).len(), before.len(), "servers have ended with the helper");
        for (slug, _) in SERVERS {
            fixture.home.satellite(&["restart", slug]).exits(0);
        }
        fixture.home.wait_all_online();
        assert!(alive(&before).is_empty(), "left behind: {:#?}", alive(&before));
        running.process.wait_stderr(|log| log.contains("the process satellite-spawn has ended"));
        let (children, leaders) = (children_of_keeper(&running), leaders(&fixture));
        assert!(leaders.iter().all(|leader| children.contains(leader)), "{leaders:?} are not all in {children:?}");
        assert!(running.helper().is_some(), "there is no other helper");
        let zombies = || zombies_of(running.keeper());
        wait_for("the helper to be reaped", || zombies().is_empty().then_some(()), || format!("{:?}", zombies()));
        running.terminate();
    });
}

#[test]
fn a_start_succeeds_while_the_helper_hangs() {
    for_each_mechanism_once(|mechanism| {
        // One case is enough: the start waits ten seconds for the helper.
        if mechanism.sandbox != Sandbox::None || mechanism.cgroups {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let running = fixture.start(SHORT);
        let helper = running.helper().unwrap();
        send(helper.pid, Signal::SIGSTOP);
        fixture.home.satellite(&["restart", "wrapped"]).exits(0);
        fixture.home.wait_all_online();
        running.process.wait_stderr(|log| log.contains("the process satellite-spawn has ended"));
        assert!(!helper.is_alive(), "the keeper has not killed the helper that hangs");
        running.terminate();
    });
}

#[test]
fn a_killed_satellite_leaves_no_helper_and_the_helper_counts_as_no_process() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let running = fixture.start_without_servers();
        let helper = running.helper().unwrap();
        send(running.satellite.pid, Signal::SIGKILL);
        let outcome = running.ended().exits(137);
        assert!(!helper.is_alive());
        assert!(outcome.stderr.contains("the keeper ended 0 remaining processes"), "{outcome:#?}");

        if mechanism.sandbox == Sandbox::None {
            // The name of this server, which the shell starts, is the beginning of the helper's name.
            let served = fixture.run(&fixture.config("served.toml", SHORT, &fixture.server("wrapped", STUBBORN)));
            fixture.home.wait_all_online();
            send(served.satellite.pid, Signal::SIGKILL);
            let outcome = served.ended().exits(137);
            assert!(outcome.stderr.contains("the keeper ended "), "{outcome:#?}");
            assert!(!outcome.stderr.contains("the keeper ended 0 "), "{outcome:#?}");
        }

        let killed = fixture.start_without_servers();
        let helper = killed.helper().unwrap();
        let killed = killed.kill_both();
        wait_for("the helper to end", || (!helper.is_alive()).then_some(()), || format!("{helper:?}"));
        let next = fixture.start_without_servers();
        killed.is_reclaimed();
        let log = json_lines(&next.process.stderr());
        let reclaimed = log.iter().find(|line| line["message"] == "ended the processes that a killed satellite left");
        assert!(reclaimed.is_none(), "{reclaimed:#?}");
        next.terminate();
    });
}

#[test]
fn the_helper_contains_no_secret_after_a_start() {
    for_each_mechanism_once(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let secret = format!("env = {{ TOKEN = \"{SECRET}\",");
        let server = fixture.server("secretive", &[]).replace("env = {", &secret);
        let running = fixture.run(&fixture.config("secret.toml", LONG, &server));
        fixture.home.wait_all_online();
        let has_secret = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(SECRET);
        let read = |pid: i32, file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap();
        let (helper, server) = (running.helper().unwrap().pid, leaders(&fixture)[0]);
        assert!(!has_secret(&read(helper, "cmdline")));
        // Only root may read the others.
        if nix::unistd::geteuid().is_root() {
            assert!(!has_secret(&read(helper, "environ")));
            assert!(!has_secret(&resident_memory(helper)), "the secret is in the memory of the helper");
            let found = mechanism.sandbox != Sandbox::None || has_secret(&resident_memory(server));
            assert!(found, "the search does not find the secret in the server, which has it");
        }
        running.terminate();
    });
}

/// Returns the contents of all writable pages that a process has in memory.
fn resident_memory(pid: i32) -> Vec<u8> {
    const PAGE: u64 = 4096;
    const PRESENT: u64 = 1 << 63;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let open = |file: &str| fs::File::open(format!("/proc/{pid}/{file}")).unwrap();
    let (memory, pages) = (open("mem"), open("pagemap"));
    let mut contents = Vec::new();
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (from, to) = fields.next().unwrap().split_once('-').unwrap();
        if !fields.next().unwrap().starts_with("rw") {
            continue;
        }
        let [from, to] = [from, to].map(|address| u64::from_str_radix(address, 16).unwrap() / PAGE);
        let mut entries = vec![0; usize::try_from(to - from).unwrap() * 8];
        pages.read_exact_at(&mut entries, from * 8).unwrap();
        for (page, entry) in (from..to).zip(entries.chunks_exact(8)) {
            let mut bytes = [0; 4096];
            let is_present = u64::from_ne_bytes(entry.try_into().unwrap()) & PRESENT != 0;
            if is_present && memory.read_exact_at(&mut bytes, page * PAGE).is_ok() {
                contents.extend(bytes);
            }
        }
    }
    contents
}

#[test]
fn a_failed_start_has_the_same_error_with_the_helper() {
    for_each_mechanism(|mechanism| {
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let server =
            |slug: &str, keys: &str| format!("[[teams.installations]]\nid = \"{slug}\"\nserver = \"{slug}\"\n{keys}\n");
        let servers = [
            server("missing", "command = \"no-such-command\""),
            server("nowhere", &format!("command = \"{SATELLITE}\"\ncwd = \"/no/such/place\"")),
        ];
        let running = fixture.run(&fixture.config("failing.toml", SHORT, &servers.concat()));
        for (slug, error) in [
            ("missing", "executable \"no-such-command\" not found in PATH".to_owned()),
            (
                "nowhere",
                format!("cannot start `{SATELLITE}`: working directory `/no/such/place`: No such file or directory"),
            ),
        ] {
            let row = fixture.home.wait_status(slug, "permanently_failed");
            assert_eq!(row["last_error"], error, "{row:#}");
        }
        let own = [running.helper().unwrap().pid, running.satellite.pid];
        let children = || children_of_keeper(&running);
        let are_reaped = || (children() == own).then_some(());
        wait_for("failed children to be reaped", are_reaped, || format!("{:?}", children()));
        running.terminate();
    });
}

#[test]
fn a_server_with_the_user_of_its_team_is_forked_by_the_helper() {
    for_each_mechanism(|mechanism| {
        if mechanism.sandbox != Sandbox::None || !nix::unistd::geteuid().is_root() {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let text = fs::read_to_string(fixture.config("users.toml", SHORT, "")).unwrap();
        let text = text.replacen("[satellite]\n", "[satellite]\nuid_range = \"200000-200009\"\n", 1);
        // Every user may execute the shell, but perhaps not the satellite of this build.
        let server = "[[teams.installations]]\nid = \"user\"\nserver = \"user\"\ncommand = \"/bin/sh\"\nargs = [\"-c\", \"exec sleep 3600\"]\n";
        let running = fixture.run(&fixture.home.write("users.toml", &(text + server)));
        let row = fixture.home.wait_row("user", "a process id", |row| row["pid"].is_number());
        assert!(children_of_keeper(&running).contains(&pid(&row)));
        let status = fs::read_to_string(format!("/proc/{}/status", pid(&row))).unwrap();
        assert!(status.contains("Uid:\t200000\t200000\t200000\t200000\n"), "{status}");
        assert!(status.contains("NoNewPrivs:\t1\n") && status.contains("SigBlk:\t0000000000000000\n"), "{status}");
        running.terminate();
    });
}

#[test]
fn a_leader_is_not_reaped_like_an_orphan() {
    for_each_mechanism(|mechanism| {
        // In a sandbox its first process adopts the orphans.
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let [leader, orphan] = ["leader", "orphan"].map(|name| fixture.home.path().join(name));
        // The leader ends at once. One child ends later; the other keeps stdout open, so that the satellite waits.
        let script = "echo $$ >\"$0\"; sh -c 'echo $$ >\"$0\"; exec sleep 0.3' \"$1\" & sleep 3600 & exit 7";
        let args = ["-c", script, leader.to_str().unwrap(), orphan.to_str().unwrap()];
        let server = format!(
            "[[teams.installations]]\nid = \"leader\"\nserver = \"leader\"\ncommand = \"/bin/sh\"\nargs = {args:?}\n"
        );
        let text = fs::read_to_string(fixture.config("leader.toml", SHORT, &server)).unwrap();
        let text = text.replacen("[policy.session]\n", "[policy.session]\nexit_drain = \"5s\"\n", 1);
        let running = fixture.run(&fixture.home.write("leader.toml", &text));
        let pid_in = |file: &Path| fs::read_to_string(file).ok()?.trim().parse::<i32>().ok();
        let [leader, orphan] = [leader, orphan].map(|file| wait_for("a pid", || pid_in(&file), String::new));
        let is_reaped = || (!Path::new(&format!("/proc/{orphan}")).exists()).then_some(());
        wait_for("the orphan to be reaped", is_reaped, || format!("{:?}", zombies_of(running.keeper())));
        assert!(zombies_of(running.keeper()).contains(&leader), "the leader was reaped before its tree was empty");
        running.terminate();
    });
}
