//! `satellite demo`: every command that it prints works.

use nix::sys::signal::Signal;
use testkit::home::{Home, Running, pid};
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;

#[test]
fn every_command_that_the_demo_prints_works() {
    let mut home = Home::new(SATELLITE);
    home.use_data_dir("data of the demo");
    let data_dir = home.data_dir().display().to_string();
    let mut satellite = home.demo(&["--data-dir", &data_dir]);
    satellite.process.wait_stdout(|text| text.contains("Ctrl-C"));
    let rows = wait_for(
        "both teams to be online",
        || Some(home.rows()).filter(|rows| rows.len() == 6 && rows.iter().all(|row| row["status"] == "online")),
        || format!("{:#?}", home.rows()),
    );
    let of_team = |team: &str| rows.iter().filter(|row| row["team"] == team).count();
    assert_eq!((of_team("acme"), of_team("globex")), (4, 2));
    assert_eq!(home.processes().len(), 6, "number of server processes");

    // Each printed command is run as printed.
    let printed = satellite.process.stdout();
    let command = |what: &str| {
        let line = printed.lines().map(str::trim).find(|line| line.contains(what) && line.contains(SATELLITE));
        line.unwrap_or_else(|| panic!("`{what}` is not printed:\n{printed}")).to_owned()
    };
    let typed = |what: &str| -> Running { home.shell(&command(what)) };
    typed("status --watch").wait_stdout(|text| text.contains("6 of 6 online"));
    let outcome = typed("call notes echo").finish().exits(0);
    assert_eq!(outcome.json()["structuredContent"]["text"], "hello");
    typed("stop search").finish().exits(0);
    let stopped = home.rows().into_iter().find(|row| row["server"] == "search" && row["want"] == "stopped").unwrap();
    assert_eq!((&stopped["user"], &stopped["status"]), (&"dave".into(), &"offline".into()));
    let mut logs = typed("logs flaky");
    wait_for("`logs` to exit", || (!logs.is_running()).then_some(()), String::new);
    logs.finish().exits(0);

    let events = typed("events --follow");
    events.wait_stdout(|text| text.contains("mcp.server.started"));
    let of_alice = |row: &serde_json::Value| row["server"] == "notes" && row["user"] == "alice";
    let victim = pid(home.rows().iter().find(|row| of_alice(row)).unwrap());
    assert!(printed.contains(&format!("kill -9 {victim}\n")), "{printed}");
    send(victim, Signal::SIGKILL);
    events.wait_stdout(|text| text.contains("killed by SIGKILL"));
    wait_for(
        "the killed server to be online",
        || home.rows().into_iter().find(|row| of_alice(row) && row["status"] == "online" && pid(row) != victim),
        || format!("{:#?}", home.rows()),
    );

    let crash = home.wait_event(0, "mcp.server.crashed", |event| event["data"]["server_slug"] == "flaky");
    let reason = "exited with code 1: error: this server crashes on purpose after 20 s";
    assert_eq!(crash["data"]["reason"], reason, "{crash:#}");
    events.wait_stdout(|text| text.contains("exited with code 1"));
    typed("restart flaky").finish().exits(0);

    satellite.signal(Signal::SIGINT);
    satellite.ended().exits(0);
}

#[test]
fn without_data_dir_the_demo_prints_commands_without_the_flag() {
    let mut home = Home::new(SATELLITE);
    home.use_data_dir(".satellite-demo");
    let satellite = home.demo(&[]);
    let printed = satellite.process.wait_stdout(|text| text.contains("Ctrl-C"));
    assert!(!printed.contains("--data-dir"), "{printed}");
    home.bare(&["status"]).exits(0);
    satellite.terminate().exits(0);
}
