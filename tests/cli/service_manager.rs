//! A service manager of our own: notifications, watchdog and passed sockets.

use std::fmt::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use testkit::home::{Home, Running};
use testkit::process::{send, wait_stopped};
use testkit::wait::{GIVE_UP, wait_until};

use crate::SATELLITE;

/// Interval of the watchdog in the test that measures nothing but its presence.
const WATCHDOG: Duration = Duration::from_secs(2);

/// Home whose satellites notify the returned socket.
fn notified_home() -> (Home, UnixDatagram) {
    let mut home = Home::new(SATELLITE);
    let path = home.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(GIVE_UP)).unwrap();
    home.env.push(("NOTIFY_SOCKET".to_owned(), path.display().to_string()));
    (home, manager)
}

fn receive(manager: &UnixDatagram) -> Option<String> {
    let mut message = [0; 4096];
    let length = manager.recv(&mut message).ok()?;
    Some(String::from_utf8(message[..length].to_vec()).unwrap())
}

/// Receives messages until one is `wanted`, and returns all of them.
#[track_caller]
fn receive_until(manager: &UnixDatagram, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut messages = Vec::new();
    loop {
        let Some(message) = receive(manager) else { panic!("no such message: {messages:#?}") };
        messages.push(message);
        if wanted(&messages[messages.len() - 1]) {
            return messages;
        }
    }
}

#[test]
fn start_reload_and_end_are_reported_and_servers_do_not_get_the_socket() {
    let (home, manager) = notified_home();
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let mut text = std::fs::read_to_string(&config).unwrap();
    text.insert_str(0, "[gateway]\nlisten = \"127.0.0.1:0\"\n");
    std::fs::write(&config, &text).unwrap();
    let satellite = home.run_at_once(&["--config", config.to_str().unwrap()]);
    let ready = receive_until(&manager, |message| message.contains("READY=1\n"));
    assert!(ready.len() == 1 && ready[0].contains("STATUS=1 server: 1 "), "{ready:?}");
    let url = home.satellite(&["status", "--satellite", "--json"]).exits(0).json()["endpoint"]["url"].clone();
    let address = url.as_str().unwrap().trim_start_matches("http://").trim_end_matches("/mcp").to_owned();
    TcpStream::connect(address).expect("the endpoint is not open after READY");
    let is_online = |message: &str| message.contains("STATUS=1 server: 1 online\n");
    if !is_online(&ready[0]) {
        receive_until(&manager, is_online);
    }
    let outcome = home.satellite(&["call", "notes", "env", r#"{"name": "NOTIFY_SOCKET"}"#]);
    assert!(!outcome.stdout.contains("/notify"), "{outcome:?}");

    std::fs::write(&config, text.replace("sim-server\", ", "sim-server\", \"--tools\", \"3\", ")).unwrap();
    home.satellite(&["reload"]).exits(0);
    let reload = receive_until(&manager, |message| message.starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert!(reload.iter().all(|message| !message.contains("STOPPING")), "{reload:?}");
    receive_until(&manager, |message| message.starts_with("READY=1\n"));
    satellite.terminate().exits(0);
    manager.set_nonblocking(true).unwrap();
    receive_until(&manager, |message| message.starts_with("STOPPING=1\n"));
}

#[test]
fn without_a_limit_of_the_keeper_the_watchdog_is_notified_only_while_the_actors_answer() {
    let (mut home, manager) = notified_home();
    home.env.push(("WATCHDOG_USEC".to_owned(), WATCHDOG.as_micros().to_string()));
    let text = std::fs::read_to_string(home.servers("servers.toml", &[("notes", &[])])).unwrap();
    let config = home.write("satellite.toml", &format!("[satellite]\nhang_timeout = \"off\"\n{text}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    receive_until(&manager, |message| message == "WATCHDOG=1\n");
    receive_until(&manager, |message| message == "WATCHDOG=1\n");
    let pid = satellite.pid();
    send(pid, Signal::SIGSTOP);
    manager.set_read_timeout(Some(WATCHDOG)).unwrap();
    // Those sent before the stop.
    while receive(&manager).is_some() {}
    send(pid, Signal::SIGCONT);
    manager.set_read_timeout(Some(GIVE_UP)).unwrap();
    receive_until(&manager, |message| message == "WATCHDOG=1\n");
    satellite.terminate().exits(0);
}

#[test]
fn the_keeper_notifies_the_watchdog_while_a_satellite_does_not_answer_and_restarts() {
    let (mut home, manager) = notified_home();
    home.env.push(("WATCHDOG_USEC".to_owned(), WATCHDOG.as_micros().to_string()));
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let pid = satellite.pid();
    send(pid, Signal::SIGSTOP);
    wait_stopped(pid);
    let notified = |intervals: u32| {
        // Four notifications belong to one interval. The first ones were sent before.
        (0..(intervals + 1) * 4).for_each(|_| drop(receive_until(&manager, |message| message == "WATCHDOG=1\n")));
    };
    notified(1);
    send(pid, Signal::SIGKILL);
    receive_until(&manager, |message| message == "STATUS=the satellite has crashed and is started again\n");
    let started = receive_until(&manager, |message| message.contains("READY=1\n"));
    assert!(started.iter().any(|message| message == "WATCHDOG=1\n"), "{started:?}");
    notified(1);
    satellite.terminate().exits(0);
}

#[test]
fn an_abstract_socket_is_notified_and_one_that_nobody_reads_delays_nothing() {
    let mut home = Home::new(SATELLITE);
    let name = home.mark().to_owned();
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    home.env.extend([
        ("NOTIFY_SOCKET".to_owned(), format!("@{name}")),
        // Fills the queue of the socket.
        ("WATCHDOG_USEC".to_owned(), Duration::from_millis(4).as_micros().to_string()),
    ]);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    let address = manager.local_addr().unwrap();
    wait_until("a full queue", || sender.send_to_addr(b"X", &address).is_err());
    satellite.kill();
    manager.set_nonblocking(true).unwrap();
    receive_until(&manager, |message| message.contains("READY=1\n"));
}

/// Starts `satellite run` with `sockets` from a service manager.
fn run_with_sockets(home: &Home, config: &Path, sockets: &[OwnedFd]) -> Running {
    let (count, data_dir) = (sockets.len(), home.data_dir().display());
    let config = config.display();
    let mut line =
        format!("env LISTEN_FDS={count} LISTEN_PID=$$ {SATELLITE} run --config {config} --data-dir {data_dir}");
    for (at, socket) in sockets.iter().enumerate() {
        write!(line, " {}<&{}", at + 3, socket.as_raw_fd()).unwrap();
    }
    home.shell(&line)
}

/// A duplicate that programs inherit.
fn inheritable(socket: impl AsFd) -> OwnedFd {
    let duplicate = rustix::io::dup(socket).unwrap();
    rustix::io::fcntl_setfd(&duplicate, rustix::io::FdFlags::empty()).unwrap();
    duplicate
}

#[test]
fn a_passed_socket_is_the_endpoint_and_queues_connections_from_before_the_start() {
    let home = Home::new(SATELLITE);
    let config = home.write("satellite.toml", "[gateway]\nlisten = \"127.0.0.1:9\"\n");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut early = TcpStream::connect(address).unwrap();
    let satellite = run_with_sockets(&home, &config, &[inheritable(&listener)]);
    early.set_read_timeout(Some(GIVE_UP)).unwrap();
    std::io::Write::write_all(&mut early, b"GET /mcp HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut answer = [0; 8];
    std::io::Read::read_exact(&mut early, &mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1");
    let url = || home.satellite(&["status", "--satellite", "--json"]).exits(0).json()["endpoint"]["url"].clone();
    assert_eq!(url(), format!("http://{address}/mcp"));
    // A reload does not move the endpoint to the configured address.
    home.satellite(&["reload"]).exits(0);
    assert_eq!(url(), format!("http://{address}/mcp"));
    // The next satellite gets the same socket.
    let status = || home.satellite(&["status", "--satellite", "--json"]);
    let before = status().exits(0).json();
    send(testkit::home::pid(&before), Signal::SIGKILL);
    wait_until("the next satellite serves the socket", || {
        let after = Some(status()).filter(|outcome| outcome.code == Some(0)).map(|outcome| outcome.json());
        after.is_some_and(|after| after["generation"] == 2 && after["endpoint"]["url"] == before["endpoint"]["url"])
    });
    drop(satellite);
}

#[test]
fn sockets_that_cannot_be_used_are_refused_with_the_reason() {
    let home = Home::new(SATELLITE);
    let config = home.write("satellite.toml", "[gateway]\n");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
    let unix = UnixListener::bind(home.path().join("socket")).unwrap();
    let everyone = TcpListener::bind("0.0.0.0:0").unwrap();
    let refused: [(&[OwnedFd], &str); 4] = [
        (&[inheritable(&tcp), inheritable(&tcp)], "there are 2, but only one can be used"),
        (&[inheritable(&connected)], "the socket does not listen"),
        (&[inheritable(&unix)], "the socket is not a TCP socket"),
        (&[inheritable(&everyone)], "`hosts` does not list its host names"),
    ];
    for (sockets, expected) in refused {
        let outcome = run_with_sockets(&home, &config, sockets).finish();
        assert!(outcome.code != Some(0) && outcome.stderr.contains(expected), "{expected}: {outcome:#?}");
    }
}
