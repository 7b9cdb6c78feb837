//! `satellite connect` and `disconnect`: the entry in a client's file, its preview, and the way back.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::inotify;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;
use testkit::home::{Home, Outcome};

use crate::SATELLITE;

/// Names of the clients, and the file that each reads, below the home directory.
const CLIENTS: [(&str, &str); 16] = [
    ("claude-code", ".claude.json"),
    ("claude-desktop", ".config/Claude/claude_desktop_config.json"),
    ("cursor", ".cursor/mcp.json"),
    ("vscode", ".config/Code/User/mcp.json"),
    ("windsurf", ".codeium/windsurf/mcp_config.json"),
    ("cline", ".cline/data/settings/cline_mcp_settings.json"),
    ("roo-code", ".config/Code/User/globalStorage/rooveterinaryinc.roo-cline/settings/mcp_settings.json"),
    ("continue", ".continue/config.yaml"),
    ("zed", ".config/zed/settings.json"),
    ("codex", ".codex/config.toml"),
    ("gemini", ".gemini/settings.json"),
    ("goose", ".config/goose/config.yaml"),
    ("opencode", ".config/opencode/opencode.json"),
    ("lmstudio", ".lmstudio/mcp.json"),
    ("amazon-q", ".aws/amazonq/mcp.json"),
    ("junie", ".junie/mcp/mcp.json"),
];

const CURSOR: &str = ".cursor/mcp.json";

/// The files of a home directory in the fixtures of the clients.
fn fixture_files(client: &str) -> Vec<(PathBuf, Vec<u8>)> {
    fn walk(directory: &Path, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, into) } else { into.push(path) }
        }
    }
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/clients/tests/fixtures").join(format!("home-{client}"));
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.into_iter().map(|path| (path.strip_prefix(&root).unwrap().to_owned(), fs::read(&path).unwrap())).collect()
}

/// A user whose home directory is that of the test.
fn user() -> Home {
    let mut home = Home::new(SATELLITE);
    fs::create_dir(home.path().join("user")).unwrap();
    let directory = user_dir(&home).display().to_string();
    home.env =
        vec![("HOME".to_owned(), directory.clone()), ("XDG_CONFIG_HOME".to_owned(), format!("{directory}/.config"))];
    home
}

fn user_dir(home: &Home) -> PathBuf {
    home.path().join("user")
}

/// Writes a file of the user.
fn put(home: &Home, path: impl AsRef<Path>, contents: impl AsRef<[u8]>) -> PathBuf {
    let path = user_dir(home).join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, contents).unwrap();
    path
}

fn connect(home: &Home, args: &[&str]) -> Outcome {
    home.satellite(&[&["connect"], args].concat())
}

fn disconnect(home: &Home, args: &[&str]) -> Outcome {
    home.satellite(&[&["disconnect"], args].concat())
}

/// All files of the user with their contents and modes.
fn snapshot(home: &Home) -> Vec<(PathBuf, Vec<u8>, u32)> {
    let mut files = Vec::new();
    let mut directories = vec![user_dir(home)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let about = path.symlink_metadata().unwrap();
            if about.is_dir() {
                directories.push(path);
            } else if about.is_file() {
                files.push((path.clone(), fs::read(&path).unwrap(), about.mode()));
            }
        }
    }
    files.sort();
    files
}

/// A pseudo-terminal: the side of the person who types, and the side of the program.
pub(crate) fn open_terminal() -> (fs::File, fs::File) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = ptsname(&ours, Vec::new()).unwrap().into_string().unwrap();
    let terminal = fs::File::options().read(true).write(true).open(path).unwrap();
    (fs::File::from(ours), terminal)
}

#[test]
fn every_client_is_connected_and_restored_byte_for_byte() {
    for (client, file) in CLIENTS {
        let home = user();
        for (path, contents) in fixture_files(client) {
            put(&home, path, contents);
        }
        let file = user_dir(&home).join(file);
        assert!(file.exists(), "{client} has no fixture at {}", file.display());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let before = snapshot(&home);

        let connected = connect(&home, &[client, "--yes"]).exits(0);
        let shown = format!("{}{}", connected.stdout, connected.stderr);
        assert!(
            shown.contains("+++ ") && shown.contains("/satellite") && !shown.contains("PLANTED"),
            "{client}: {shown}"
        );
        let during = snapshot(&home);
        let changed: Vec<_> = during.iter().filter(|file| !before.contains(file)).collect();
        let [(path, contents, _)] = &changed[..] else { panic!("{client}: {changed:?}") };
        let text = String::from_utf8_lossy(contents);
        assert!(text.contains("stdio") && text.contains(home.data_dir().to_str().unwrap()), "{client}: {text}");
        if path == &file {
            assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o640, "{client}");
        }

        let again = connect(&home, &[client, "--yes"]).exits(0);
        assert!(again.stdout.contains("connected already"), "{client}: {again:#?}");
        assert_eq!(snapshot(&home), during, "{client}: the second connect changed something");

        let disconnected = disconnect(&home, &[client, "--yes"]).exits(0);
        assert!(!format!("{}{}", disconnected.stdout, disconnected.stderr).contains("PLANTED"), "{client}");
        assert_eq!(snapshot(&home), before, "{client}: {disconnected:#?}");
        let kept = fs::read_dir(home.data_dir().join("clients")).unwrap().count();
        assert_eq!(kept, 0, "{client}: the backup is left");
        let outcome = disconnect(&home, &[client, "--yes"]).exits(0);
        assert!(outcome.stdout.contains("is not connected"), "{client}: {outcome:#?}");
    }
}

#[test]
fn a_file_that_connect_creates_is_private_and_deleted_again() {
    for (client, _) in CLIENTS {
        let home = user();
        connect(&home, &[client, "--yes"]).exits(0);
        let files = snapshot(&home);
        let [(_, _, mode)] = &files[..] else { panic!("{client}: {files:?}") };
        assert_eq!(mode & 0o777, 0o600, "{client}");
        disconnect(&home, &[client, "--yes"]).exits(0);
        assert_eq!(snapshot(&home), [], "{client}");
    }
}

#[test]
fn the_backup_is_private() {
    let home = user();
    put(&home, CURSOR, "{\"mcpServers\": {}}");
    connect(&home, &["cursor", "--yes"]).exits(0);
    let directory = home.data_dir().join("clients");
    assert_eq!(directory.metadata().unwrap().mode() & 0o777, 0o700);
    let files: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    assert!(files.iter().all(|file| file.metadata().unwrap().mode() & 0o777 == 0o600), "{files:?}");
    let backup = files.iter().find(|file| file.extension().unwrap() == "backup").unwrap();
    assert_eq!(fs::read_to_string(backup).unwrap(), "{\"mcpServers\": {}}");
}

#[test]
fn without_a_terminal_the_change_is_shown_and_not_written() {
    let home = user();
    put(
        &home,
        CURSOR,
        "{\n  \"mcpServers\": {\n    \"a\": {\"command\": \"a\", \"env\": {\"K\": \"hunter2\"}}\n  }\n}\n",
    );
    let before = snapshot(&home);
    let outcome = connect(&home, &["cursor"]).exits(2);
    assert!(outcome.stderr.contains("--yes") && outcome.stderr.contains("nothing was changed"), "{outcome:#?}");
    assert!(outcome.stdout.contains("+    \"satellite\""), "{outcome:#?}");
    assert!(outcome.stdout.contains("\"K\": \"…\"") && !outcome.stdout.contains("hunter2"), "{outcome:#?}");
    assert_eq!(snapshot(&home), before);
    assert!(!home.data_dir().exists());
    connect(&home, &["emacs"]).exits(2);
    connect(&home, &[]).exits(2);
}

#[test]
fn changes_of_others_survive_disconnect() {
    let home = user();
    let text = "{\n  // mine\n  \"mcpServers\": {\n    \"a\": {\"command\": \"a\"}\n  }\n}\n";
    let file = put(&home, CURSOR, text);
    connect(&home, &["cursor", "--yes"]).exits(0);
    let connected = fs::read_to_string(&file).unwrap();
    fs::write(&file, connected.replace("// mine", "// changed")).unwrap();
    let outcome = disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert!(
        outcome.stdout.contains("removed only the entry") && outcome.stdout.contains("was changed after"),
        "{outcome:#?}"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), text.replace("// mine", "// changed"));

    // A second connect with other options keeps the way back to the first state.
    connect(&home, &["cursor", "--yes"]).exits(0);
    connect(&home, &["cursor", "--yes", "--flat"]).exits(0);
    assert!(fs::read_to_string(&file).unwrap().contains("--flat"));
    let outcome = disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert!(outcome.stdout.contains("byte for byte"), "{outcome:#?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text.replace("// mine", "// changed"));

    // The record is lost, for example with the data directory.
    connect(&home, &["cursor", "--yes"]).exits(0);
    fs::remove_dir_all(home.data_dir().join("clients")).unwrap();
    let outcome = disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert!(outcome.stdout.contains("there is no record"), "{outcome:#?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text.replace("// mine", "// changed"));
}

#[test]
fn a_symbolic_link_stays_and_its_target_is_edited() {
    let home = user();
    let target = put(&home, "dotfiles/cursor.json", "{\"mcpServers\": {}}");
    let link = user_dir(&home).join(CURSOR);
    fs::create_dir(link.parent().unwrap()).unwrap();
    symlink("../dotfiles/cursor.json", &link).unwrap();
    connect(&home, &["cursor", "--yes"]).exits(0);
    assert!(link.is_symlink() && fs::read_to_string(&target).unwrap().contains("stdio"));
    disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert!(link.is_symlink());
    assert_eq!(fs::read_to_string(&target).unwrap(), "{\"mcpServers\": {}}");

    fs::remove_file(&target).unwrap();
    let outcome = connect(&home, &["cursor", "--yes"]).exits(1);
    assert!(outcome.stderr.contains("a link to a file that does not exist"), "{outcome:#?}");
    assert!(link.is_symlink() && !target.exists());
}

#[test]
fn files_that_cannot_be_edited_safely_are_refused_and_unchanged() {
    let home = user();
    let file = put(&home, CURSOR, "{\"mcpServers\": {}}");
    let directory = file.parent().unwrap().to_owned();
    let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let refused = |message: &str| {
        let before = snapshot(&home);
        let outcome = connect(&home, &["cursor", "--yes"]).exits(1);
        assert!(outcome.stderr.contains(message), "{message}: {outcome:#?}");
        assert_eq!(snapshot(&home), before, "{message}");
        assert!(!outcome.stderr.contains("hunter2"), "{outcome:#?}");
        assert_eq!(outcome.stderr.lines().filter(|line| !line.contains("warning: ")).count(), 1, "{outcome:#?}");
    };
    set_mode(&file, 0o444);
    refused("the file is read-only");
    set_mode(&file, 0o644);
    set_mode(&directory, 0o555);
    refused("is read-only; make it writable");
    set_mode(&directory, 0o755);
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(&file, Some(12345), None).unwrap();
        refused("it belongs to user 12345, and this command runs as user 0");
        std::os::unix::fs::chown(&file, Some(0), None).unwrap();
    }
    for (contents, message) in [
        (&b"{\"mcpServers\": {\"a\": {\"env\": {\"K\": \"hunter2\""[..], "invalid JSON"),
        (b"{\"mcpServers\": {}}\xff", "it is not UTF-8"),
        (b"[]", "it must contain an object"),
        (b"{\"mcpServers\": {\"satellite\": {\"command\": \"orbit\"}}}", "it does not start this satellite"),
    ] {
        fs::write(&file, contents).unwrap();
        refused(message);
    }
    fs::write(&file, vec![b' '; (16 << 20) + 1]).unwrap();
    refused("larger than 16 MiB");
    fs::remove_file(&file).unwrap();
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::from_bits_truncate(0o644)).unwrap();
    refused("not a regular file");
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    refused("not a regular file");
}

#[test]
fn large_files_byte_order_marks_and_line_ends_survive() {
    let filler = format!("  \"history\": [\n{}    \"end\"\n  ],\n", "    \"0123456789abcdef\",\n".repeat(450_000));
    for text in [
        format!("{{\n{filler}  \"mcpServers\": {{}}\n}}\n"),
        "\u{feff}{\n  \"mcpServers\": {}\n}\n".to_owned(),
        "{\r\n  \"mcpServers\": {\r\n    \"a\": {\"command\": \"a\"}\r\n  }\r\n}\r\n".to_owned(),
    ] {
        let home = user();
        let file = put(&home, ".claude.json", &text);
        let outcome = connect(&home, &["claude-code", "--yes"]).exits(0);
        assert!(outcome.stdout.len() < 10_000, "{} bytes of preview", outcome.stdout.len());
        let connected = fs::read_to_string(&file).unwrap();
        assert_eq!(connected.starts_with('\u{feff}'), text.starts_with('\u{feff}'));
        assert_eq!(connected.replace("\r\n", "").contains('\n'), text.replace("\r\n", "").contains('\n'));
        disconnect(&home, &["claude-code", "--yes"]).exits(0);
        assert!(fs::read_to_string(&file).unwrap() == text, "the file differs");
    }
}

#[test]
fn a_change_during_the_question_is_not_overwritten() {
    let home = user();
    let file = put(&home, CURSOR, "{\"mcpServers\": {}}");
    let (mut typing, terminal) = open_terminal();
    let ask = || {
        let mut command = home.command(&["connect", "cursor"]);
        command.arg("--data-dir").arg(home.data_dir()).stdin(Stdio::from(terminal.try_clone().unwrap()));
        let asking = home.start(command);
        asking.wait_stderr(|text| text.contains("[y/N] "));
        asking
    };
    let mut answer = |text: &str| std::io::Write::write_all(&mut typing, text.as_bytes()).unwrap();

    let asking = ask();
    answer("n\n");
    let outcome = asking.finish().exits(1);
    assert!(outcome.stderr.contains("nothing was changed"), "{outcome:#?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"mcpServers\": {}}");

    let asking = ask();
    fs::write(&file, "{\"mcpServers\": {\"new\": {\"command\": \"x\"}}}").unwrap();
    answer("y\n");
    let outcome = asking.finish().exits(1);
    assert!(outcome.stderr.contains("another program has just changed it"), "{outcome:#?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"mcpServers\": {\"new\": {\"command\": \"x\"}}}");
    let records = fs::read_dir(home.data_dir().join("clients")).unwrap().count();
    assert_eq!(records, 0, "a connection that failed is recorded");
    let left: Vec<_> = fs::read_dir(file.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["mcp.json"], "a temporary file is left");

    let asking = ask();
    answer("y\n");
    asking.finish().exits(0);
    assert!(fs::read_to_string(&file).unwrap().contains("stdio"));
}

#[test]
fn the_token_is_in_no_file_of_a_client_no_argument_and_no_output() {
    let home = user();
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("[gateway]\nlisten = \"127.0.0.1:0\"\n{text}")).unwrap();
    let outcome = connect(&home, &["cursor", "--http", "--yes"]).exits(3);
    assert!(outcome.stderr.contains("no satellite is running"), "{outcome:#?}");
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let token = fs::read_to_string(home.data_dir().join("token")).unwrap().trim().to_owned();
    let is_free = |text: &str| !text.contains(&token) && !text.contains(&token[4..]);
    // Windsurf, and not yet Devin Desktop, which replaces no reference.
    fs::create_dir_all(user_dir(&home).join(".codeium/windsurf")).unwrap();
    let devin = ["windsurf", "--http", "--yes", "--file", "user/.config/devin/mcp_config.json"];
    let outcome = connect(&home, &devin).exits(1);
    assert!(outcome.stderr.contains("connect it without `--http`"), "{outcome:#?}");
    for (client, warning) in [("cline", "extension for VS Code"), ("amazon-q", "IDE plugins"), ("gemini", ".env")] {
        let outcome = connect(&home, &[client, "--http"]).exits(2);
        assert!(outcome.stderr.contains("warning: ") && outcome.stderr.contains(warning), "{client}: {outcome:#?}");
        assert_eq!(connect(&home, &[client]).exits(2).stderr.matches(warning).count(), 0, "{client}");
    }
    let opencode = put(&home, ".config/opencode/opencode.json", "{}");
    let outcome = connect(&home, &["opencode", "--http"]).exits(2);
    assert!(outcome.stderr.contains("$schema") && is_free(&outcome.stderr), "{outcome:#?}");
    fs::remove_file(opencode).unwrap();
    for (client, reference) in [
        ("cursor", "${env:SATELLITE_TOKEN}"),
        ("codex", "SATELLITE_TOKEN"),
        ("windsurf", "${file:"),
        ("opencode", "{file:"),
    ] {
        let outcome = connect(&home, &[client, "--http", "--yes"]).exits(0);
        assert!(is_free(&outcome.stdout) && is_free(&outcome.stderr), "{client}: {outcome:#?}");
        let written: String =
            snapshot(&home).iter().map(|(_, text, _)| String::from_utf8_lossy(text).into_owned()).collect();
        assert!(is_free(&written) && written.contains(reference) && written.contains("/mcp"), "{client}: {written}");
        assert!(outcome.stdout.contains(reference), "{client}: {outcome:#?}");
        let needs_variable = reference.contains("SATELLITE_TOKEN");
        assert_eq!(outcome.stderr.contains("export SATELLITE_TOKEN=\"$(cat "), needs_variable, "{outcome:#?}");
    }
    let rows = connect(&home, &["--list", "--json"]).exits(0).json();
    let row = |client: &str| rows.as_array().unwrap().iter().find(|row| row["client"] == client).unwrap().clone();
    assert_eq!(row("windsurf")["state"], "connected");
    assert_eq!(row("windsurf")["form"], "http, token in a file");
    for client in ["zed", "claude-desktop", "lmstudio", "junie"] {
        let outcome = connect(&home, &[client, "--http", "--yes"]).exits(2);
        assert!(outcome.stderr.contains("connect it without --http"), "{outcome:#?}");
    }
    for client in ["cursor", "codex", "windsurf", "opencode"] {
        disconnect(&home, &[client, "--yes"]).exits(0);
    }
    assert_eq!(snapshot(&home), []);
    satellite.terminate().exits(0);
}

#[test]
fn files_that_variables_move_are_connected_there() {
    for (variable, client, file) in [
        ("CLAUDE_CONFIG_DIR", "claude-code", "moved/.claude.json"),
        ("CLINE_MCP_SETTINGS_PATH", "cline", "moved"),
        ("CLINE_DATA_DIR", "cline", "moved/settings/cline_mcp_settings.json"),
        ("CLINE_DIR", "cline", "moved/data/settings/cline_mcp_settings.json"),
        ("CODEX_HOME", "codex", "moved/config.toml"),
        ("CONTINUE_GLOBAL_DIR", "continue", "moved/mcpServers/satellite.yaml"),
        ("GEMINI_CLI_HOME", "gemini", "moved/.gemini/settings.json"),
        ("GOOSE_PATH_ROOT", "goose", "moved/config/config.yaml"),
    ] {
        let mut home = user();
        let moved = user_dir(&home).join("moved").display().to_string();
        home.env.push((variable.to_owned(), moved));
        connect(&home, &[client, "--yes"]).exits(0);
        let paths: Vec<_> = snapshot(&home).into_iter().map(|(path, ..)| path).collect();
        assert_eq!(paths, [user_dir(&home).join(file)], "{variable}");
        let rows = connect(&home, &["--list", "--json"]).exits(0).json();
        let row = rows.as_array().unwrap().iter().find(|row| row["client"] == client).unwrap();
        assert_eq!(
            (&row["state"], &row["file"]),
            (&"connected".into(), &paths[0].to_str().unwrap().into()),
            "{variable}"
        );
        disconnect(&home, &[client, "--yes"]).exits(0);
        assert_eq!(snapshot(&home), [], "{variable}");
    }
    // opencode reads these besides its own file.
    for (variable, file) in [("OPENCODE_CONFIG", "moved.json"), ("OPENCODE_CONFIG_DIR", "moved/opencode.json")] {
        let mut home = user();
        put(&home, file, r#"{"mcp": {"notes": {"type": "local", "command": ["notes-mcp"]}}}"#);
        let moved = user_dir(&home).join(file.trim_end_matches("/opencode.json")).display().to_string();
        home.env.push((variable.to_owned(), moved));
        let listed = home.bare(&["import"]).exits(0);
        assert!(listed.stdout.contains("notes"), "{variable}: {listed:#?}");
    }
}

#[test]
fn a_damaged_record_of_another_connection_is_only_reported() {
    let home = user();
    // Without `--data-dir`, all connections have their records in the user's data directory.
    let data_dir = home.path().join("share/mcp-satellite");
    let one = put(&home, "one.json", "{}");
    let named = ["connect", "vscode", "--yes", "--file", one.to_str().unwrap()];
    home.bare(&named).exits(0);
    let connected = fs::read(&one).unwrap();
    let mut records = fs::read_dir(data_dir.join("clients")).unwrap().map(|entry| entry.unwrap().path());
    let damaged = records.find(|path| path.extension().is_some_and(|ending| ending == "json")).unwrap();
    fs::write(&damaged, "{").unwrap();

    for command in [["connect", "vscode", "--yes"], ["disconnect", "vscode", "--yes"]] {
        let outcome = home.bare(&command).exits(0);
        let warning = format!("warning: cannot read the record `{}`", damaged.display());
        assert!(outcome.stderr.contains(&warning) && outcome.stderr.contains("move it away"), "{outcome:#?}");
    }
    let files: Vec<_> = snapshot(&home).into_iter().map(|(path, ..)| path).collect();
    assert_eq!(files, std::slice::from_ref(&one), "the other connection was not undone");
    // Its own connection, and a directory that the user names, need the record.
    let named = [&named[..], &["--flat"]].concat();
    let options = ["connect", "vscode", "--yes", "--data-dir", data_dir.to_str().unwrap()];
    for command in [&named[..], &options[..]] {
        let outcome = home.bare(command).exits(1);
        assert!(outcome.stderr.contains("cannot read the record"), "{outcome:#?}");
    }
    assert_eq!(fs::read(&one).unwrap(), connected);
    assert_eq!(fs::read_to_string(&damaged).unwrap(), "{");
}

#[test]
fn the_entry_of_the_satellite_is_left_out_of_an_mcp_json() {
    let home = user();
    let servers = r#"{"mcpServers": {"notes": {"command": "SATELLITE", "args": ["SIM"]}}}"#;
    let file = home.write("mcp.json", servers);
    let path = file.to_str().unwrap();
    connect(&home, &["cursor", "--yes", "--file", path]).exits(0);
    // Its name does not decide.
    let config = fs::read_to_string(&file).unwrap().replace(r#""satellite":"#, r#""renamed":"#);
    fs::write(&file, config).unwrap();
    let outcome = home.bare(&["check", "--mcp-json", path]).exits(0);
    let warning = "`renamed` is left out: it connects a client to the satellite";
    assert!(outcome.stderr.contains(warning) && outcome.stdout.contains("1 server"), "{outcome:#?}");
    let satellite = home.run(&["--mcp-json", path]);
    home.wait_online("notes");
    assert!(home.row("renamed").is_none());
    satellite.terminate().exits(0);
}

#[test]
fn an_environment_that_the_user_added_to_the_entry_survives_a_second_connect() {
    let home = user();
    let file = put(&home, CURSOR, "{}");
    connect(&home, &["cursor", "--yes"]).exits(0);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace(r#""command""#, r#""env": {"RUST_LOG": "debug"}, "cwd": "/", "command""#)).unwrap();
    connect(&home, &["cursor", "--yes", "--flat"]).exits(0);
    let text = fs::read_to_string(&file).unwrap();
    for kept in ["RUST_LOG", "cwd", "--flat"] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
}

#[test]
fn the_list_shows_each_client_and_print_writes_nothing() {
    let home = user();
    put(&home, CURSOR, "{\"mcpServers\": {\"satellite\": {\"command\": \"orbit\"}}}");
    put(&home, ".gemini/settings.json", "{\"mcpServers\"");
    put(&home, ".config/zed/settings.json", "{}");
    connect(&home, &["codex", "--yes", "--server", "notes", "--user", "acme/alice"]).exits(0);
    let config = fs::read_to_string(user_dir(&home).join(".codex/config.toml")).unwrap();
    assert!(
        config.contains("\"stdio\", \"--server\", \"notes\", \"--user\", \"acme/alice\", \"--data-dir\""),
        "{config}"
    );
    let before = snapshot(&home);
    let rows = connect(&home, &["--list", "--json"]).exits(0).json();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 16);
    for (client, found, state) in [
        ("cursor", true, "foreign_entry"),
        ("gemini", true, "unknown"),
        ("zed", true, "not_connected"),
        ("codex", true, "connected"),
        ("goose", false, "not_connected"),
    ] {
        let row = rows.iter().find(|row| row["client"] == client).unwrap();
        assert_eq!((&row["found"], &row["state"]), (&found.into(), &state.into()), "{row:#}");
    }
    let list = connect(&home, &["--list"]).exits(0).stdout;
    for text in
        ["connected (stdio)", "has another entry `satellite`", "not connected", "not found", "gemini: cannot read"]
    {
        assert!(list.contains(text), "{text}: {list}");
    }
    let printed = connect(&home, &["zed", "--print"]).exits(0);
    let entry = &printed.json()["context_servers"]["satellite"];
    assert_eq!(entry["args"][0], "stdio", "{printed:#?}");
    assert!(Path::new(entry["command"].as_str().unwrap()).is_absolute());
    assert_eq!(snapshot(&home), before);
    // The tests run a binary that cargo has built.
    assert!(printed.stderr.contains("a directory of builds or caches"), "{printed:#?}");
}

#[test]
fn a_named_file_is_connected_and_found_again() {
    let home = user();
    let file = home.path().join("project.json");
    fs::write(&file, "{\"servers\": {}}\n").unwrap();
    connect(&home, &["vscode", "--yes", "--file", "project.json"]).exits(0);
    assert_eq!(snapshot(&home), [], "the file of the user was changed, too");
    let outcome = disconnect(&home, &["vscode", "--yes"]).exits(0);
    assert!(outcome.stdout.contains("project.json byte for byte"), "{outcome:#?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "{\"servers\": {}}\n");

    connect(&home, &["vscode", "--yes", "--file", "project.json"]).exits(0);
    connect(&home, &["vscode", "--yes"]).exits(0);
    let outcome = disconnect(&home, &["vscode", "--yes"]).exits(2);
    assert!(outcome.stderr.contains("in several files") && outcome.stderr.contains("--file"), "{outcome:#?}");
    disconnect(&home, &["vscode", "--yes", "--file", "project.json"]).exits(0);
    disconnect(&home, &["vscode", "--yes"]).exits(0);
    assert_eq!(snapshot(&home), []);
}

/// The configuration that gets the servers of clients.
fn configuration(home: &Home) -> PathBuf {
    user_dir(home).join(".config/mcp-satellite/satellite.toml")
}

/// The ids of the servers in the configuration.
fn configured(home: &Home) -> Vec<String> {
    let text = fs::read_to_string(configuration(home)).unwrap_or_default();
    let ids = text.split("[[teams.installations]]").skip(1).filter_map(|table| table.split('"').nth(1));
    ids.map(str::to_owned).collect()
}

/// The files of the clients: those of the user without the satellite's configuration.
fn client_files(home: &Home) -> Vec<(PathBuf, Vec<u8>, u32)> {
    let own = configuration(home);
    snapshot(home).into_iter().filter(|(path, ..)| !path.starts_with(own.parent().unwrap())).collect()
}

/// The names in a sentence such as `  replaced by the satellite: a, b`.
fn names_after(text: &str, before: &str) -> Vec<String> {
    let names = text.lines().find_map(|line| line.split_once(before)).map(|(_, names)| names.split(", "));
    names.into_iter().flatten().map(str::to_owned).collect()
}

const TWO_SERVERS: &str = r#"{
  // mine
  "mcpServers": {
    "files": {"command": "files", "args": ["/a"]},
    "search": {"command": "search", "env": {"API_KEY": "hush-key-1234"}} // no
  }
}
"#;

#[test]
fn the_servers_of_every_client_move_to_the_satellite_and_return_byte_for_byte() {
    // Values in the fixtures that no rule can recognize as secrets.
    let is_recognizable = |line: &&str| !["MY_ENV_VAR", "LITERAL", "PLAIN"].iter().any(|name| line.contains(name));
    for (client, _) in CLIENTS {
        let home = user();
        for (path, contents) in fixture_files(client) {
            // The current file of Cline has no servers. Without it, connect edits the earlier one.
            if !path.starts_with(".cline") {
                put(&home, path, contents);
            }
        }
        let before = snapshot(&home);
        let asked = connect(&home, &[client, "--replace"]).exits(2);
        assert!(asked.stderr.contains("nothing was changed"), "{client}: {asked:#?}");
        assert_eq!(snapshot(&home), before, "{client}: written without a confirmation");
        assert!(!home.data_dir().exists(), "{client}");

        let connected = connect(&home, &[client, "--replace", "--yes"]).exits(0);
        let shown = format!("{}{}", connected.stdout, connected.stderr);
        assert!(!shown.lines().filter(is_recognizable).any(|line| line.contains("PLANTED")), "{client}: {shown}");
        assert!(
            asked.stdout.contains("satellite.toml\n@@") && asked.stdout.contains("+[[teams.installations]]"),
            "{client}"
        );
        let replaced = names_after(&shown, "replaced by the satellite: ");
        let staying = names_after(&shown, "these servers stay in ").len();
        assert!(!replaced.is_empty(), "{client}: {shown}");
        assert_eq!(configured(&home).len(), replaced.len(), "{client}: {shown}");
        assert_eq!(shown.matches("  not imported: ").count(), staying, "{client}: {shown}");
        home.bare(&["check", "--config", configuration(&home).to_str().unwrap()]).exits(0);

        let during = client_files(&home);
        let changed: Vec<_> = during.iter().filter(|file| !before.contains(file)).collect();
        let [(_, contents, _)] = &changed[..] else { panic!("{client}: {changed:?}") };
        let text = String::from_utf8_lossy(contents);
        assert!(text.contains("stdio") && text.contains(home.data_dir().to_str().unwrap()), "{client}: {text}");
        let rows = connect(&home, &["--list", "--json"]).exits(0).json();
        let row = rows.as_array().unwrap().iter().find(|row| row["client"] == client).unwrap();
        assert_eq!(row["state"], "connected", "{client}: {row:#}");
        let again = connect(&home, &[client, "--replace", "--yes"]).exits(0);
        assert!(again.stdout.contains("connected already"), "{client}: {again:#?}");
        let imported = home.bare(&["import", client, "--yes"]).exits(0).stdout;
        assert!(!imported.contains("satellite  will be imported"), "{client}: {imported}");

        let disconnected = disconnect(&home, &[client, "--yes"]).exits(0);
        assert!(disconnected.stdout.contains("byte for byte"), "{client}: {disconnected:#?}");
        assert!(!format!("{}{}", disconnected.stdout, disconnected.stderr).contains("PLANTED"), "{client}");
        assert_eq!(client_files(&home), before, "{client}: {disconnected:#?}");
        assert_eq!(fs::read_dir(home.data_dir().join("clients")).unwrap().count(), 0, "{client}: the backup is left");
    }
}

#[test]
fn a_preview_shows_both_changes_and_a_server_that_is_not_imported_stays() {
    let home = user();
    let text = r#"{"mcpServers": {
  "files": {"command": "files"},
  "odd": {"command": "${command:odd}"},
  "off": {"command": "y", "disabled": true},
  "satellite": {"command": "orbit", "args": ["--token", "ghp_0123456789abcdefABCDEF"]}
}, "projects": {"/work": {"mcpServers": {"local": {"command": "l"}}}}}
"#;
    let file = put(&home, ".claude.json", text);
    put(&home, "work/.mcp.json", "{\"mcpServers\": {\"foreign-tool\": {\"command\": \"p\"}}}");
    let outcome = connect(&home, &["claude-code", "--replace", "--yes"]).exits(0);
    for said in [
        "files  will be imported",
        "odd  not imported: `command` contains a variable `${command:…}`",
        "off  not imported: it is disabled in the client",
        "local  not imported: it belongs to one project; `satellite import claude-code` imports it",
        "these servers stay in ",
        ": odd, off, local",
        "+id = \"files\"",
        "-  \"files\": {",
        "+  \"satellite\": {",
        "moves to secrets/satellite.args.2",
        "replaced by the satellite: files, satellite",
    ] {
        assert!(outcome.stdout.contains(said), "{said} in {}", outcome.stdout);
    }
    assert!(!outcome.stdout.contains("ghp_0123") && !outcome.stdout.contains("foreign-tool"), "{outcome:#?}");
    let servers: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(servers["mcpServers"]["odd"]["command"], "${command:odd}");
    assert_eq!(servers["mcpServers"]["satellite"]["args"][0], "stdio");
    assert!(servers["mcpServers"].get("files").is_none() && servers["mcpServers"].get("off").is_some());
    assert_eq!(servers["projects"]["/work"]["mcpServers"]["local"]["command"], "l");
    assert_eq!(configured(&home), ["files", "satellite"]);

    // A project's file is imported only if it is named.
    connect(&home, &["claude-code", "--replace", "--yes", "--file", "user/work/.mcp.json"]).exits(0);
    assert_eq!(configured(&home), ["files", "satellite", "foreign-tool"]);
    disconnect(&home, &["claude-code", "--yes", "--file", file.to_str().unwrap()]).exits(0);
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
}

#[test]
fn replaced_servers_return_to_a_file_that_somebody_changed() {
    let home = user();
    let file = put(&home, CURSOR, TWO_SERVERS);
    let servers = || {
        let value: Value =
            serde_json::from_str(&fs::read_to_string(&file).unwrap().replace("// changed", "").replace("// no", ""))
                .unwrap();
        let mut names: Vec<String> = value["mcpServers"].as_object().unwrap().keys().cloned().collect();
        names.sort();
        names
    };
    let change = || {
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("// mine", "// changed")).unwrap();
    };
    connect(&home, &["cursor", "--replace", "--yes"]).exits(0);
    change();
    let outcome = disconnect(&home, &["cursor", "--yes"]).exits(0);
    for said in ["put only the replaced servers back", "was changed after", "these servers again: files, search"] {
        assert!(outcome.stdout.contains(said), "{outcome:#?}");
    }
    assert!(!outcome.stdout.contains("hush"), "{outcome:#?}");
    assert!(fs::read_to_string(&file).unwrap().contains("// changed"));
    assert_eq!(servers(), ["files", "search"]);

    // A second connect without the option, and the removal of our entry by hand, keep the way back.
    fs::write(&file, TWO_SERVERS).unwrap();
    connect(&home, &["cursor", "--replace", "--yes"]).exits(0);
    change();
    connect(&home, &["cursor", "--flat", "--yes"]).exits(0);
    fs::write(&file, "{\"mcpServers\": {}}").unwrap();
    connect(&home, &["cursor", "--yes"]).exits(0);
    fs::write(&file, "{\"mcpServers\": {}}").unwrap();
    disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert_eq!(servers(), ["files", "search"]);

    // A damaged backup remains until a person has used it.
    fs::write(&file, TWO_SERVERS).unwrap();
    connect(&home, &["cursor", "--replace", "--yes"]).exits(0);
    let kept = || fs::read_dir(home.data_dir().join("clients")).unwrap().map(|entry| entry.unwrap().path());
    let backup = kept().find(|path| path.extension().unwrap() == "backup").unwrap();
    fs::write(&backup, format!("{TWO_SERVERS}\n")).unwrap();
    let outcome = disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert!(
        outcome.stderr.contains("add these servers by hand") && outcome.stderr.contains(": files, search"),
        "{outcome:#?}"
    );
    let outcome = connect(&home, &["cursor", "--yes"]).exits(1);
    assert!(outcome.stderr.contains("cannot connect cursor again: add these servers by hand"), "{outcome:#?}");
    let outcome = disconnect(&home, &["cursor", "--yes"]).exits(1);
    assert!(outcome.stderr.contains("cursor is not connected; add these servers by hand"), "{outcome:#?}");
    assert!(backup.exists());
    fs::write(&file, TWO_SERVERS).unwrap();
    disconnect(&home, &["cursor", "--yes"]).exits(0);
    assert_eq!((kept().count(), fs::read_to_string(&file).unwrap().as_str()), (0, TWO_SERVERS));
}

/// The names of the files that appear in the directories while `action` runs, in order.
fn written_files(directories: &[PathBuf], action: impl FnOnce()) -> Vec<String> {
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    for directory in directories {
        let events = inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::CREATE;
        inotify::add_watch(&watch, directory, events).unwrap();
    }
    action();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 16384];
    let mut reader = inotify::Reader::new(watch, &mut buffer);
    let mut names = Vec::new();
    // The last error means that there is no further event.
    while let Ok(event) = reader.next() {
        let name = event.file_name().unwrap().to_str().unwrap();
        if !name.starts_with('.') {
            names.push(name.to_owned());
        }
    }
    names
}

#[test]
fn the_backup_is_written_first_and_the_file_of_the_client_last() {
    let home = user();
    // The directories exist.
    connect(&home, &["zed", "--yes"]).exits(0);
    let config = configuration(&home);
    fs::create_dir_all(config.with_file_name("secrets")).unwrap();
    fs::set_permissions(config.with_file_name("secrets"), fs::Permissions::from_mode(0o700)).unwrap();
    let file = put(&home, CURSOR, TWO_SERVERS);
    let directories = [
        home.data_dir().join("clients"),
        config.with_file_name("secrets"),
        config.parent().unwrap().to_owned(),
        file.parent().unwrap().to_owned(),
    ];
    let mut written = written_files(&directories, || drop(connect(&home, &["cursor", "--replace", "--yes"]).exits(0)));
    let extension = |name: &String| name.rsplit('.').next().unwrap().to_owned();
    written.retain(|name| extension(name) != "new");
    let kinds: Vec<String> = written.iter().map(extension).collect();
    assert_eq!(kinds, ["backup", "json", "API_KEY", "toml", "json"], "{written:?}");
    assert!(written[1].starts_with("cursor-") && written[4] == "mcp.json", "{written:?}");
}

#[test]
fn nothing_is_lost_if_the_command_is_killed_between_its_writes() {
    for has_configuration in [false, true] {
        let home = user();
        let file = put(&home, CURSOR, TWO_SERVERS);
        let config = configuration(&home);
        connect(&home, &["cursor", "--replace", "--yes"]).exits(0);
        let connected = fs::read(&file).unwrap();
        // The state between the backup, the secrets, the configuration and the file of the client.
        let interrupt = || {
            fs::write(&file, TWO_SERVERS).unwrap();
            if !has_configuration {
                fs::remove_file(&config).unwrap();
            }
        };
        interrupt();
        connect(&home, &["cursor", "--replace", "--yes"]).exits(0);
        assert_eq!(
            (configured(&home), fs::read(&file).unwrap()),
            (vec!["files".to_owned(), "search".to_owned()], connected)
        );
        disconnect(&home, &["cursor", "--yes"]).exits(0);
        assert_eq!(fs::read_to_string(&file).unwrap(), TWO_SERVERS);

        connect(&home, &["cursor", "--replace", "--yes"]).exits(0);
        interrupt();
        let outcome = disconnect(&home, &["cursor", "--yes"]).exits(0);
        assert!(outcome.stdout.contains("is not connected"), "{outcome:#?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), TWO_SERVERS);
        assert_eq!(fs::read_dir(home.data_dir().join("clients")).unwrap().count(), 0);
    }
}

#[test]
fn a_configuration_that_cannot_be_written_leaves_the_client_as_it_was() {
    let home = user();
    let file = put(&home, CURSOR, TWO_SERVERS);
    connect(&home, &["zed", "--replace", "--yes"]).exits(0);
    put(&home, ".junie/mcp/mcp.json", "{\"mcpServers\": {\"first\": {\"command\": \"first\"}}}");
    connect(&home, &["junie", "--replace", "--yes"]).exits(0);
    let config = configuration(&home);
    let before = snapshot(&home);
    let records = || {
        let mut names: Vec<_> =
            fs::read_dir(home.data_dir().join("clients")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let recorded = records();
    let refused = |message: &str| {
        let outcome = connect(&home, &["cursor", "--replace", "--yes"]).exits(1);
        assert!(outcome.stderr.contains(message), "{message}: {outcome:#?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), TWO_SERVERS);
        assert_eq!(records(), recorded, "a connection that failed is recorded");
    };
    fs::set_permissions(&config, fs::Permissions::from_mode(0o444)).unwrap();
    refused("the file is read-only");
    fs::set_permissions(&config, fs::Permissions::from_mode(0o600)).unwrap();
    if nix::unistd::geteuid().is_root() {
        for path in [&config, &file] {
            std::os::unix::fs::chown(path, Some(12345), None).unwrap();
            refused("it belongs to user 12345");
            std::os::unix::fs::chown(path, Some(0), None).unwrap();
        }
    }
    assert_eq!(snapshot(&home), before);
    fs::write(&file, "{\"mcpServers\": {\"a\": {\"command\": \"a\"}, \"a\": {\"command\": \"b\"}}}").unwrap();
    let outcome = connect(&home, &["cursor", "--replace", "--yes"]).exits(1);
    assert!(outcome.stderr.contains("the key `a` occurs twice"), "{outcome:#?}");
    assert_eq!(configured(&home), ["first"]);
}

#[test]
fn a_client_with_two_files_is_not_connected_twice() {
    let home = user();
    for (path, contents) in fixture_files("continue") {
        put(&home, path, contents);
    }
    connect(&home, &["continue", "--yes"]).exits(0);
    let before = snapshot(&home);
    let outcome = connect(&home, &["continue", "--replace", "--yes"]).exits(2);
    assert!(outcome.stderr.contains("run `satellite disconnect continue` first"), "{outcome:#?}");
    assert_eq!(snapshot(&home), before);
    disconnect(&home, &["continue", "--yes"]).exits(0);
    connect(&home, &["continue", "--replace", "--yes"]).exits(0);
    let outcome = connect(&home, &["continue", "--yes"]).exits(0);
    assert!(outcome.stdout.contains("connected already"), "{outcome:#?}");
}
