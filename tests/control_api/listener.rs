//! The own listener of the console: addresses that are taken, and moves.

use std::net::{TcpListener, TcpStream};

use serde_json::json;
use testkit::port::free_port;
use testkit::wait::wait_until;

use super::client::ApiClient;
use super::fixture::{ADMIN, Fixture, config};

impl Fixture {
    /// Writes a configuration with an own address of the console.
    fn write_own(&self, own: &str) {
        self.home.write("satellite.toml", &config(&self.address, &format!("listen = \"{own}\"")));
    }
}

#[test]
fn a_start_fails_if_the_address_of_the_console_is_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = taken.local_addr().unwrap().to_string();
    let fixture = Fixture::new("");
    fixture.write_own(&own);
    let file = fixture.home.path().join("satellite.toml");
    let outcome = fixture.home.satellite(&["run", "--config", file.to_str().unwrap()]).exits(1);
    for text in ["cannot open the console", &own, "[console] listen"] {
        assert!(outcome.stderr.contains(text), "{text}: {outcome:#?}");
    }
}

#[test]
fn an_address_that_is_taken_at_a_reload_is_tried_again() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = taken.local_addr().unwrap().to_string();
    fixture.write_own(&own);
    let reloaded = fixture.home.satellite(&["reload"]).exits(0);
    let problem = format!("cannot open the console at {own}: ");
    assert!(reloaded.stderr.contains(&problem), "{reloaded:#?}");
    let status = || fixture.home.satellite(&["status", "--satellite"]).exits(0).stdout;
    assert!(status().contains(&problem), "{}", status());
    let refused = fixture.home.satellite(&["console", "--no-browser"]).exits(1);
    assert!(refused.stderr.contains(&problem), "{refused:#?}");
    drop(taken);
    let moved = ApiClient::new(&own);
    wait_until("the console at its address", || TcpStream::connect(&own).is_ok() && moved.get("/readyz").status == 200);
    let link = || fixture.home.satellite(&["console", "--no-browser"]).stdout;
    wait_until("the link of the console", || link().starts_with(&format!("http://{own}/console/")));
    assert!(!status().contains(&problem), "{}", status());
    satellite.terminate().exits(0);
}

#[test]
fn a_console_that_cannot_move_stays_and_reports_it() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let own = format!("127.0.0.1:{}", free_port());
    fixture.write_own(&own);
    fixture.home.satellite(&["reload"]).exits(0);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let wanted = taken.local_addr().unwrap().to_string();
    fixture.write_own(&wanted);
    let admin = ApiClient::new(&own).with_token(ADMIN);
    let applied = admin.post("/v1/reload", &json!({})).ok();
    let problem = applied["console_problem"].as_str().unwrap();
    assert!(problem.starts_with(&format!("cannot open the console at {wanted}: ")), "{problem}");
    assert!(problem.contains(&format!("it stays at {own} ")), "{problem}");
    assert_eq!(admin.get("/v1/satellite").ok()["console_problem"], problem);
    assert!(admin.get("/console/").body.contains(&format!("it stays at {own} ")));
    fixture.write_own(&own);
    assert!(admin.post("/v1/reload", &json!({})).ok()["console_problem"].is_null());
    satellite.terminate().exits(0);
}

#[test]
fn the_reload_that_moves_the_console_is_answered() {
    let fixture = Fixture::new("");
    let satellite = fixture.start();
    let addresses = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
    fixture.write_own(&addresses[0]);
    fixture.home.satellite(&["reload"]).exits(0);
    fixture.write_own(&addresses[1]);
    let clients = addresses.each_ref().map(|own| ApiClient::new(own).with_token(ADMIN));
    assert_eq!(clients[0].post("/v1/reload", &json!({})).status, 200);
    assert_eq!(clients[1].get("/v1/instances").ok()["total"], 3);
    assert!(TcpStream::connect(&addresses[0]).is_err());
    satellite.terminate().exits(0);
}
