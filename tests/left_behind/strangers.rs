//! Who is none of a satellite's is not hit, whatever the ledger says and whichever number was used again.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::mechanism::{Mechanism, Sandbox, everywhere};
use super::process::{Bystander, Member, Seen, alive};
use super::scene::{LONG, SHORT, Scene};

fn ledger(scene: &Scene) -> PathBuf {
    scene.home.data_dir().join("ledger")
}

fn write(scene: &Scene, lines: &[Value]) {
    let lines = lines.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n") + "\n";
    fs::write(ledger(scene), lines).unwrap();
}

fn started(run: u64, pid: i32, start_time: u64) -> Value {
    json!({"started": {"run": run, "instance": "stranger", "pid": pid, "start_time": start_time}})
}

fn inside(run: u64, pid: i32, start_time: u64) -> Value {
    json!({"inside": {"run": run, "pid": pid, "start_time": start_time}})
}

#[test]
fn who_has_a_number_of_the_dead_survives_what_is_reclaimed() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let killed = scene.play(LONG).kill_both();
        let recycled = Bystander::start(&[]);
        let member = Member::start();
        let others = Bystander::start(&[("MCP_SATELLITE_RUN", "other.1")]);
        let of_a_longer_name = {
            let id = scene.ledger()[0]["satellite"]["id"].as_str().unwrap().to_owned();
            Bystander::start(&[("MCP_SATELLITE_RUN", &format!("{id}0.1"))])
        };
        let mut lines = scene.ledger();
        // The leaders are dead, and their numbers are a stranger's now; their start times are not.
        for line in &mut lines {
            if let Some(started) = line.get_mut("started") {
                started["pid"] = recycled.seen.pid.into();
            }
        }
        let seen = &recycled.seen;
        lines.extend([
            started(1001, seen.pid, seen.start_time - 1),
            started(1002, seen.pid, 0),
            inside(1003, seen.pid, seen.start_time + 1),
            started(1004, member.group, member.seen.start_time),
            inside(1005, member.group, member.seen.start_time),
        ]);
        write(&scene, &lines);
        let next = scene.play_on();
        for stranger in [&recycled, &others, &of_a_longer_name] {
            stranger.survived();
        }
        member.survived();
        // By their marks or their cgroup; what is in a sandbox has gone with it.
        killed.is_reclaimed();
        next.terminate();
    });
}

#[test]
fn a_cgroup_that_is_none_of_the_satellites_is_left_alone() {
    everywhere(|mechanism| {
        if mechanism != (Mechanism { sandbox: Sandbox::None, cgroups: true }) {
            return;
        }
        let scene = Scene::new(mechanism);
        let killed = scene.play(LONG).kill_both();
        let own = killed.cgroup.clone().unwrap();
        let stranger = Bystander::start(&[]);
        let cgroup = Cgroup::with(&own.with_file_name(format!("service-{}", scene.home.mark())), &stranger.seen);
        let mut lines = scene.ledger();
        lines[0]["satellite"]["cgroup"] = cgroup.0.to_str().into();
        write(&scene, &lines);
        let next = scene.play_on();
        stranger.survived();
        // Found by their marks.
        assert!(alive(&killed.members).is_empty(), "left behind: {:#?}", alive(&killed.members));
        assert!(!own.exists(), "it is empty, and its satellite has ended");
        next.terminate();
        drop(stranger);
    });
}

/// Removed when it is dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn with(path: &Path, member: &Seen) -> Self {
        fs::create_dir(path).unwrap();
        fs::write(path.join("cgroup.procs"), member.pid.to_string()).unwrap();
        Self(path.to_owned())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its one member may be gone already; what a failed test leaves is an empty directory.
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_ledger_that_means_nothing_reclaims_nothing() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        scene.play_on().terminate();
        let header = scene.ledger().remove(0);
        let stranger = Bystander::start(&[]);
        let meant = started(1, stranger.seen.pid, stranger.seen.start_time);
        let other = |field: &str| {
            let mut header = header.clone();
            header["satellite"][field] = "another".into();
            format!("{header}\n{meant}\n")
        };
        for text in [
            String::new(),
            "\n".to_owned(),
            "not a ledger\u{0}\n".to_owned(),
            format!("{meant}\n"),
            format!("{{\"satellite\":{{\n{meant}\n"),
            other("boot_id"),
            other("pid_namespace"),
        ] {
            fs::write(ledger(&scene), &text).unwrap();
            let next = scene.play_on();
            stranger.survived();
            let outcome = next.terminate();
            assert!(!outcome.stderr.contains("ended the processes that"), "{text:?} {outcome:#?}");
        }
        // That it would have been hit otherwise.
        write(&scene, &[header.clone(), meant.clone()]);
        let next = scene.play_on();
        assert!(!stranger.seen.is_alive());
        next.terminate();
    });
}

#[test]
fn a_ledger_with_garbage_in_it_still_reclaims_the_rest() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let killed = scene.play(LONG).kill_both();
        let lines: Vec<String> = scene.ledger().iter().map(Value::to_string).collect();
        let torn = format!("{}\n{{\"ended\":{{\"run\":", lines.join("\n[]\nnonsense\n{\"unknown\":1}\n"));
        fs::write(ledger(&scene), torn).unwrap();
        let next = scene.play_on();
        killed.is_reclaimed();
        next.terminate();
    });
}

#[test]
fn the_servers_of_another_satellite_are_left_alone() {
    everywhere(|mechanism| {
        let (one, other) = (Scene::new(mechanism), Scene::new(mechanism));
        let killed = one.play(LONG);
        let lives = other.play(SHORT);
        let members = lives.members();
        let killed = killed.kill_both();
        let next = one.play_on();
        killed.is_reclaimed();
        next.terminate();
        assert_eq!(alive(&members).len(), members.len(), "{members:#?}");
        for row in other.home.wait_all_online() {
            assert_eq!(row["restarts"], 0, "{row:#}");
            other.home.satellite(&["call", row["server"].as_str().unwrap(), "echo"]).exits(0);
        }
        lives.terminate();
    });
}
