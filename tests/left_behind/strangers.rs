//! Processes of others are not ended, whatever the ledger contains and whichever pid was reused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::fixture::{Fixture, LONG, SHORT};
use super::mechanism::{Mechanism, Sandbox, for_each_mechanism};
use super::process::{Bystander, GroupMember, ProcessInfo, alive};

fn ledger(fixture: &Fixture) -> PathBuf {
    fixture.home.data_dir().join("ledger")
}

fn write(fixture: &Fixture, lines: &[Value]) {
    let lines = lines.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n") + "\n";
    fs::write(ledger(fixture), lines).unwrap();
}

fn started(run: u64, pid: i32, start_time: u64) -> Value {
    json!({"started": {"run": run, "instance": "stranger", "pid": pid, "start_time": start_time}})
}

fn inside(run: u64, pid: i32, start_time: u64) -> Value {
    json!({"inside": {"run": run, "pid": pid, "start_time": start_time}})
}

#[test]
fn a_stranger_with_a_reused_pid_survives_the_cleanup() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let killed = fixture.start(LONG).kill_both();
        let recycled = Bystander::start(&[]);
        let member = GroupMember::start();
        let others = Bystander::start(&[("MCP_SATELLITE_RUN", "other.1")]);
        let of_a_longer_name = {
            let id = fixture.ledger()[0]["satellite"]["id"].as_str().unwrap().to_owned();
            Bystander::start(&[("MCP_SATELLITE_RUN", &format!("{id}0.1"))])
        };
        let mut lines = fixture.ledger();
        // The leaders are dead. A stranger has their pids now, with other start times.
        for line in &mut lines {
            if let Some(started) = line.get_mut("started") {
                started["pid"] = recycled.info.pid.into();
            }
        }
        let info = &recycled.info;
        lines.extend([
            started(1001, info.pid, info.start_time - 1),
            started(1002, info.pid, 0),
            inside(1003, info.pid, info.start_time + 1),
            started(1004, member.group, member.info.start_time),
            inside(1005, member.group, member.info.start_time),
        ]);
        write(&fixture, &lines);
        let next = fixture.start_without_servers();
        for stranger in [&recycled, &others, &of_a_longer_name] {
            stranger.survived();
        }
        member.survived();
        // Found by their marks or their cgroup. Processes in a sandbox ended with it.
        killed.is_reclaimed();
        next.terminate();
    });
}

#[test]
fn the_cleanup_leaves_a_foreign_cgroup_alone() {
    for_each_mechanism(|mechanism| {
        if mechanism != (Mechanism { sandbox: Sandbox::None, cgroups: true }) {
            return;
        }
        let fixture = Fixture::new(mechanism);
        let killed = fixture.start(LONG).kill_both();
        let own = killed.cgroup.clone().unwrap();
        let stranger = Bystander::start(&[]);
        let cgroup = Cgroup::with(&own.with_file_name(format!("service-{}", fixture.home.mark())), &stranger.info);
        let mut lines = fixture.ledger();
        lines[0]["satellite"]["cgroup"] = cgroup.0.to_str().into();
        write(&fixture, &lines);
        let next = fixture.start_without_servers();
        stranger.survived();
        // The servers were found by their marks.
        assert!(alive(&killed.members).is_empty(), "left behind: {:#?}", alive(&killed.members));
        assert!(!own.exists(), "the empty cgroup of an ended satellite is left");
        next.terminate();
        drop(stranger);
    });
}

/// A cgroup that is removed when this is dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn with(path: &Path, member: &ProcessInfo) -> Self {
        fs::create_dir(path).unwrap();
        fs::write(path.join("cgroup.procs"), member.pid.to_string()).unwrap();
        Self(path.to_owned())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The member may have ended already. A failed test leaves an empty directory.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn an_invalid_ledger_ends_no_process() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        fixture.start_without_servers().terminate();
        let header = fixture.ledger().remove(0);
        let stranger = Bystander::start(&[]);
        let entry = started(1, stranger.info.pid, stranger.info.start_time);
        let other = |field: &str| {
            let mut header = header.clone();
            header["satellite"][field] = "another".into();
            format!("{header}\n{entry}\n")
        };
        for text in [
            String::new(),
            "\n".to_owned(),
            "not a ledger\u{0}\n".to_owned(),
            format!("{entry}\n"),
            format!("{{\"satellite\":{{\n{entry}\n"),
            other("boot_id"),
            other("pid_namespace"),
        ] {
            fs::write(ledger(&fixture), &text).unwrap();
            let next = fixture.start_without_servers();
            stranger.survived();
            let outcome = next.terminate();
            assert!(!outcome.stderr.contains("ended the processes that"), "{text:?} {outcome:#?}");
        }
        // A valid ledger with the same line ends the process.
        write(&fixture, &[header.clone(), entry.clone()]);
        let next = fixture.start_without_servers();
        assert!(!stranger.info.is_alive());
        next.terminate();
    });
}

#[test]
fn a_ledger_with_invalid_lines_still_ends_the_other_processes() {
    for_each_mechanism(|mechanism| {
        let fixture = Fixture::new(mechanism);
        let killed = fixture.start(LONG).kill_both();
        let lines: Vec<String> = fixture.ledger().iter().map(Value::to_string).collect();
        let torn = format!("{}\n{{\"ended\":{{\"run\":", lines.join("\n[]\nnonsense\n{\"unknown\":1}\n"));
        fs::write(ledger(&fixture), torn).unwrap();
        let next = fixture.start_without_servers();
        killed.is_reclaimed();
        next.terminate();
    });
}

#[test]
fn the_cleanup_leaves_the_servers_of_another_satellite_alone() {
    for_each_mechanism(|mechanism| {
        let (one, other) = (Fixture::new(mechanism), Fixture::new(mechanism));
        let killed = one.start(LONG);
        let running_other = other.start(SHORT);
        let members = running_other.members();
        let killed = killed.kill_both();
        let next = one.start_without_servers();
        killed.is_reclaimed();
        next.terminate();
        assert_eq!(alive(&members).len(), members.len(), "{members:#?}");
        for row in other.home.wait_all_online() {
            assert_eq!(row["restarts"], 0, "{row:#}");
            other.home.satellite(&["call", row["server"].as_str().unwrap(), "echo"]).exits(0);
        }
        running_other.terminate();
    });
}
