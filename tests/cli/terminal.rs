//! The command line on a pseudo-terminal with a size.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use nix::libc::O_NOCTTY;
use nix::sys::signal::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use testkit::home::{Home, Outcome, Running};
use testkit::process::send;
use testkit::wait::wait_for;

use crate::SATELLITE;

/// A pseudo-terminal, which hangs up when it is dropped.
struct Terminal {
    master: File,
    slave: File,
}

impl Terminal {
    fn open(columns: u16, rows: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        tcsetwinsize(&master, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let slave = File::options().read(true).write(true).custom_flags(O_NOCTTY).open(path.to_str().unwrap());
        Self { master: master.into(), slave: slave.unwrap() }
    }

    fn slave(&self) -> File {
        self.slave.try_clone().unwrap()
    }

    /// Starts a program with its input and output on the terminal.
    fn show(self, mut command: Command) -> TerminalProgram {
        command.stdin(self.slave()).stdout(self.slave()).stderr(self.slave());
        let child = command.spawn().unwrap();
        drop(command);
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let (seen, Self { mut master, slave }) = (Arc::clone(&text), self);
        drop(slave);
        let reader = std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            // An error means that no program has the terminal open any more.
            while let Ok(1..) = master.read(&mut chunk).inspect(|count| {
                seen.lock().unwrap().extend_from_slice(&chunk[..*count]);
            }) {}
        });
        TerminalProgram { child, text, reader }
    }

    /// Starts a session leader with this as its controlling terminal.
    fn lead(&self, home: &mut Home, through: &[&str], args: &[&str]) -> SessionLeader {
        home.started_by = ["setsid", "--ctty"].iter().chain(through).map(|word| (*word).to_owned()).collect();
        let mut command = home.command(args);
        home.started_by.clear();
        command.arg("--data-dir").arg(home.data_dir()).stdin(self.slave());
        SessionLeader(home.start(command))
    }
}

struct TerminalProgram {
    child: Child,
    text: Arc<Mutex<Vec<u8>>>,
    reader: std::thread::JoinHandle<()>,
}

impl TerminalProgram {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }

    /// Waits until the program exits and returns exit code and output.
    fn wait_for_exit(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        self.reader.join().unwrap();
        (code, String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned())
    }
}

/// A satellite that leads a session. Dropping it kills it.
struct SessionLeader(Running);

impl SessionLeader {
    #[track_caller]
    fn wait_for_exit(mut self) {
        wait_for("the satellite to exit", || (!self.0.is_running()).then_some(()), String::new);
    }
}

impl Drop for SessionLeader {
    fn drop(&mut self) {
        self.0.signal(Signal::SIGKILL);
    }
}

fn refreshed(home: &Home) -> usize {
    home.events().iter().filter(|event| event["type"] == "config.refreshed").count()
}

fn reloads(home: &Home, pid: i32) {
    let before = refreshed(home);
    send(pid, Signal::SIGHUP);
    wait_for("a reload", || (refreshed(home) > before).then_some(()), || format!("{:#?}", home.events()));
}

#[test]
fn a_satellite_reloads_on_sighup_and_ends_with_its_terminal() {
    let mut home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let terminal = Terminal::open(80, 24);
    let leader = terminal.lead(&mut home, &[], &["run", "--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    reloads(&home, leader.0.pid());
    drop(terminal);
    leader.wait_for_exit();
    assert_eq!(home.processes(), Vec::<i32>::new());
    let stopped = home.events().into_iter().rfind(|event| event["type"] == "mcp.server.stopped").unwrap();
    assert_eq!(stopped["data"]["kind"], "shutdown");
}

#[test]
fn a_satellite_under_nohup_survives_its_terminal_and_reloads_on_sighup() {
    let mut home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let terminal = Terminal::open(80, 24);
    let leader = terminal.lead(&mut home, &["nohup"], &["run", "--config", config.to_str().unwrap()]);
    home.wait_online("notes");
    drop(terminal);
    let about = home.satellite(&["status", "--satellite", "--json"]).exits(0).json();
    reloads(&home, i32::try_from(about["pid"].as_i64().unwrap()).unwrap());
    home.satellite(&["down"]).exits(0);
    leader.wait_for_exit();
}

/// A line without colour escapes.
fn plain(line: &str) -> String {
    let mut parts = line.trim_end_matches('\r').split("\x1b[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |line, part| {
        line + part.trim_start_matches(|letter: char| !letter.is_alphabetic()).get(1..).unwrap_or_default()
    })
}

fn with_a_failing_server(home: &Home) -> String {
    let text = include_str!("../fixtures/cli/two_teams.toml");
    let failing = "\n[[teams.installations]]\nid = \"x1\"\nserver = \"a-server-with-a-long-name\"\ncommand = \
                   \"/no/such/directory/with/a/rather/long/name/and/no/such/executable/in/it\"\n";
    let quick = "[policy.restart]\nmax_crashes = 1\n";
    home.write("satellite.toml", &format!("{quick}{text}{failing}")).to_str().unwrap().to_owned()
}

fn wait_settled(home: &Home) {
    home.wait_status("a-server-with-a-long-name", "permanently_failed");
    let online = || home.rows().iter().filter(|row| row["status"] == "online").count();
    wait_for("the other servers to be online", || (online() == 4).then_some(()), || format!("{:#?}", home.rows()));
}

#[test]
fn the_table_fits_the_window_with_messages_below_their_servers() {
    let home = Home::new(SATELLITE);
    let satellite = home.run(&["--config", &with_a_failing_server(&home)]);
    wait_settled(&home);
    let mut columns = Vec::new();
    for width in [80, 100, 200] {
        let mut command = home.command(&["status"]);
        command.arg("--data-dir").arg(home.data_dir());
        let (code, text) = Terminal::open(width, 24).show(command).wait_for_exit();
        assert_eq!(code, Some(0), "{text}");
        let lines: Vec<String> = text.lines().map(plain).take_while(|line| !line.is_empty()).collect();
        for line in &lines {
            assert!(line.chars().count() <= usize::from(width), "{width}: {line:?}");
        }
        let at = lines.iter().position(|line| line.contains("a-server-with-a-long-name")).unwrap();
        assert!(lines[at].contains("permanently_failed"), "{lines:#?}");
        assert!(lines[at + 1].starts_with("    "), "{lines:#?}");
        columns.push(lines[0].split_whitespace().count());
    }
    assert!(columns[0] < columns[1] && columns[1] < columns[2], "{columns:?}");
    let piped = home.satellite(&["status"]).exits(0).stdout;
    let head: Vec<&str> = piped.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(
        head,
        ["SERVER", "TEAM", "USER", "STATUS", "SINCE", "PID", "UPTIME", "TOOLS", "CALLS", "RESTARTS", "MEMORY"]
    );
    satellite.terminate().exits(0);
}

#[test]
fn watch_draws_on_the_alternate_screen_and_restores_the_terminal() {
    let home = Home::new(SATELLITE);
    let satellite = home.run(&["--config", &with_a_failing_server(&home)]);
    wait_settled(&home);
    let mut command = home.command(&["status", "--watch"]);
    command.arg("--data-dir").arg(home.data_dir());
    let rows = 7;
    let program = Terminal::open(100, rows).show(command);
    let frames = |text: &str| text.split("\x1b[H").skip(1).map(ToOwned::to_owned).collect::<Vec<_>>();
    wait_for("two frames", || (frames(&program.text()).len() > 2).then_some(()), || program.text());
    send(i32::try_from(program.child.id()).unwrap(), Signal::SIGINT);
    let (code, text) = program.wait_for_exit();
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("\x1b[?1049h") && text.trim_end().ends_with("\x1b[?1049l"), "{text:?}");
    for frame in frames(&text) {
        let lines: Vec<String> = frame.split("\r\n").map(plain).collect();
        assert!(lines.len() <= usize::from(rows), "{lines:#?}");
        assert!(frame.contains("more than the window shows") && frame.contains("4 of 5 online"), "{lines:#?}");
    }
    satellite.terminate().exits(0);
}

/// A server whose tool names, descriptions, results and logs contain control characters and bidirectional marks.
const HOSTILE: &str = r#"#!/bin/sh
printf '\033[31mred \302\233 \342\200\256log\n' >&2
while read -r line; do
  id=$(printf '%s' "$line" | sed -n 's/.*"id":\([0-9]*\).*/\1/p')
  case "$line" in
    *'"initialize"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"hostile","version":"1"}}}\n' "$id" ;;
    *'"tools/list"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"plain","inputSchema":{"type":"object"}},{"name":"na\342\200\256me","description":"\302\233 \342\201\246text","inputSchema":{"type":"object"}}]}}\n' "$id" ;;
    *'"tools/call"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":"\302\233 \342\200\256txt"}]}}\n' "$id" ;;
    *'"ping"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{}}\n' "$id" ;;
  esac
done
"#;

#[track_caller]
fn assert_no_control_characters(outcome: &Outcome) {
    let controls = |letter: char| letter.is_control() && letter != '\n' || "\u{202e}\u{2066}".contains(letter);
    for text in [&outcome.stdout, &outcome.stderr] {
        assert!(!text.chars().any(controls), "{outcome:#?}");
    }
}

#[test]
fn control_characters_of_servers_are_removed_and_json_keeps_them_escaped() {
    let home = Home::new(SATELLITE);
    let script = home.path().join("hostile.sh");
    std::fs::write(&script, HOSTILE).unwrap();
    let text = format!(
        "[policy.logs]\nbatch_delay = \"100ms\"\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\
         users = [{{ id = \"u\", slug = \"alice\" }}]\n[[teams.installations]]\nid = \"h\"\nserver = \"hostile\"\n\
         command = \"/bin/sh\"\nargs = [{:?}]\n",
        script.to_str().unwrap()
    );
    let config = home.write("satellite.toml", &text);
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_online("hostile");
    home.wait_event(0, "mcp.server.logs", |_| true);
    for verb in [&["tools"][..], &["events"], &["logs", "hostile"], &["status"], &["call", "hostile", "plain"]] {
        let outcome = home.satellite(verb).exits(0);
        assert_no_control_characters(&outcome);
        let json = match verb {
            ["call", ..] => outcome,
            _ => home.satellite(&[verb, &["--json"]].concat()).exits(0),
        };
        assert_no_control_characters(&json);
        let hidden = match verb {
            ["tools"] => json.json().to_string().contains("na\u{202e}me"),
            ["call", ..] => json.json()["content"][0]["text"] == "\u{9b} \u{202e}txt",
            ["status"] => true,
            _ => json.json_lines().iter().any(|line| line.to_string().contains("\u{202e}log")),
        };
        assert!(hidden, "{verb:?}: {json:#?}");
    }
    satellite.terminate().exits(0);
}

#[test]
fn top_shows_the_instances_and_restores_the_terminal() {
    let home = Home::new(SATELLITE);
    let address = format!("127.0.0.1:{}", testkit::port::free_port());
    let servers = home.servers("servers.toml", &[("files", &[]), ("notes", &[])]);
    let text = std::fs::read_to_string(servers).unwrap();
    let config = home.write("satellite.toml", &format!("[console]\nlisten = \"{address}\"\n{text}"));
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    home.wait_all_online();
    for ends_by_key in [true, false] {
        let before = home.row("files").unwrap();
        let terminal = Terminal::open(120, 20);
        let mut typed = terminal.master.try_clone().unwrap();
        let mut command = home.command(&["top"]);
        command.arg("--data-dir").arg(home.data_dir());
        let program = terminal.show(command);
        let shows = |what: &str| wait_for(what, || program.text().contains(what).then_some(()), || program.text());
        shows("files");
        shows("online");
        let mut press = |keys: &str| std::io::Write::write_all(&mut typed, keys.as_bytes()).unwrap();
        press("r");
        shows("restart files-acme-alice-files? y/n");
        press("y");
        home.wait_row("files", "another process", |row| row["status"] == "online" && row["pid"] != before["pid"]);
        press("t");
        shows("batcher");
        if ends_by_key {
            press("qq");
        } else {
            send(program.child.id().cast_signed(), Signal::SIGTERM);
        }
        let (code, text) = program.wait_for_exit();
        assert_eq!(code, Some(0), "{text}");
        // The alternate screen is left, and the cursor is shown.
        let left = text.rfind("\u{1b}[?1049l").unwrap_or_else(|| panic!("{text:?}"));
        assert!(text[left..].contains("\u{1b}[?25h") || text[..left].ends_with("\u{1b}[?25h"), "{:?}", &text[left..]);
    }
    satellite.terminate().exits(0);
}

#[test]
fn top_without_a_terminal_says_what_to_use() {
    let home = Home::new(SATELLITE);
    let outcome = home.satellite(&["top"]).exits(2);
    assert!(outcome.stderr.contains("satellite status"), "{outcome:#?}");
}
