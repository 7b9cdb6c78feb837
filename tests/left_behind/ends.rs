//! The matrix: every way to end, with every mechanism. Each test is one way.

use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::mechanism::{Sandbox, everywhere};
use super::process::{alive, zombies_of};
use super::scene::{LONG, SERVERS, SHORT, Scene};
use super::support::{Home, json_lines, pid, send, wait_for};

#[test]
fn a_stop_leaves_nothing() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let playing = scene.play(SHORT);
        std::thread::scope(|scope| {
            for (slug, _) in SERVERS {
                let home = &scene.home;
                scope.spawn(move || home.satellite(&["stop", slug]).exits(0));
            }
        });
        // It is answered when all is gone.
        assert!(playing.members().is_empty(), "left behind: {:#?}", playing.members());
        playing.terminate();
    });
}

#[test]
fn a_crash_leaves_nothing_to_the_next_run() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let playing = scene.play(SHORT);
        let old = playing.members();
        let killed: Vec<_> = scene.home.rows().iter().map(pid).collect();
        for pid in &killed {
            send(*pid, Signal::SIGKILL);
        }
        let back = |row: &Value| row["status"] == "online" && row["restarts"] == 1 && !killed.contains(&pid(row));
        let all_back = || Some(scene.home.rows()).filter(|rows| rows.iter().all(back));
        wait_for("all to be back", all_back, || format!("{:#?}", scene.home.rows()));
        assert!(alive(&old).is_empty(), "left behind: {:#?}", alive(&old));
        playing.terminate();
    });
}

#[test]
fn sigterm_to_the_reaper_is_passed_on_and_leaves_nothing() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        scene.play(SHORT).terminate();
    });
}

#[test]
fn sigterm_to_the_satellite_itself_leaves_nothing() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let playing = scene.play(SHORT);
        send(playing.satellite.pid, Signal::SIGTERM);
        playing.ended_cleanly().exits(0);
    });
}

#[test]
fn sigterm_to_the_whole_group_is_one_request_and_leaves_nothing() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let mut playing = scene.play(SHORT);
        playing.signal_group(Signal::SIGTERM);
        let outcome = playing.ended_cleanly().exits(0);
        assert!(outcome.stderr.contains("every server gets its grace"), "{outcome:#?}");
    });
}

#[test]
fn a_second_sigterm_ends_all_at_once_and_leaves_nothing() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let mut playing = scene.play(LONG);
        playing.process.signal(Signal::SIGTERM);
        playing.process.wait_stderr(|log| log.contains("a second signal kills at once"));
        playing.process.signal(Signal::SIGTERM);
        let outcome = playing.ended_cleanly().exits(1);
        assert!(outcome.stderr.contains("killed by a second signal"), "{outcome:#?}");
    });
}

#[test]
fn a_killed_reaper_takes_everything_with_it() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let mut playing = scene.play(LONG);
        let (home, members) = (&scene.home, playing.members());
        playing.process.signal(Signal::SIGKILL);
        assert_eq!(playing.process.finish().signal, Some(9));
        wait_for("everything to end", || home.traces().is_empty().then_some(()), || format!("{:?}", home.traces()));
        assert!(alive(&members).is_empty());
        scene.play_on().terminate();
    });
}

#[test]
fn a_killed_satellite_is_cleared_away_by_its_reaper() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let playing = scene.play(LONG);
        send(playing.satellite.pid, Signal::SIGKILL);
        playing.ended().exits(137);
        scene.play_on().terminate();
    });
}

#[test]
fn what_both_left_when_they_were_killed_is_reclaimed_by_the_next_start() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let killed = scene.play(LONG).kill_both();
        let next = scene.play_on();
        killed.is_reclaimed();
        let log = json_lines(&next.process.stderr());
        let reclaimed = log.iter().find(|line| line["message"] == "ended the processes that a killed satellite left");
        // A sandbox ends with the thread that started it, and what is in it with the sandbox, mostly before we look.
        if mechanism.sandbox == Sandbox::None {
            assert!(killed.left.len() >= SERVERS.len(), "there was something to reclaim: {:#?}", killed.left);
            let reclaimed = reclaimed.unwrap_or_else(|| panic!("{log:#?}"));
            for (slug, _) in SERVERS {
                let instance = format!("{slug}-acme-alice-{slug}");
                assert!(reclaimed["instances"].as_str().unwrap().contains(&instance), "{reclaimed:#}");
            }
        }
        next.terminate();
    });
}

#[test]
fn an_orphan_is_adopted_by_the_satellite() {
    everywhere(|mechanism| {
        // In a sandbox there is somebody nearer.
        if mechanism.sandbox != Sandbox::None {
            return;
        }
        let scene = Scene::new(mechanism);
        let playing = scene.play(SHORT);
        let members = playing.members();
        let servers: Vec<_> = scene.home.rows().iter().map(pid).collect();
        let sleepers: Vec<_> = members.iter().filter(|member| member.line.starts_with("sleep ")).collect();
        let adopted = sleepers.iter().filter(|sleeper| sleeper.parent == playing.satellite.pid).count();
        let children = sleepers.iter().filter(|sleeper| servers.contains(&sleeper.parent)).count();
        assert_eq!((adopted, children), (2, 1), "{members:#?}");
        playing.terminate();
    });
}

#[test]
fn orphans_that_have_ended_are_reaped_by_the_satellite() {
    everywhere(|mechanism| {
        let scene = Scene::new(mechanism);
        let playing = scene.play(SHORT);
        for (slug, _) in SERVERS {
            scene.home.satellite(&["stop", slug]).exits(0);
        }
        let zombies = || zombies_of(playing.satellite.pid);
        wait_for("all to be reaped", || zombies().is_empty().then_some(()), || format!("{:?}", zombies()));
        playing.terminate();
    });
}

#[test]
fn a_check_leaves_no_cgroup() {
    let home = Home::new();
    let config = home.write("satellite.toml", "");
    for _ in 0..5 {
        let said = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0).stdout;
        if let Some((_, rest)) = said.split_once("under `") {
            let cgroup = rest.split('`').next().unwrap();
            assert!(!Path::new(cgroup).exists(), "{said}");
        }
    }
}
