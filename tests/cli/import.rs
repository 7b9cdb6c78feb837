//! `satellite import`: servers of clients become installations, secrets become files, and everything else remains.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use testkit::home::{Home, Outcome};

use super::SATELLITE;
use super::connect::open_terminal;

/// A home whose user has the fixture files of a client.
struct UserHome {
    home: Home,
    user: PathBuf,
}

impl UserHome {
    fn new(client: Option<&str>) -> Self {
        let mut home = Home::new(SATELLITE);
        let user = home.path().join("user");
        fs::create_dir(&user).unwrap();
        if let Some(client) = client {
            let root = Path::new(env!("CARGO_MANIFEST_DIR"));
            copy(&root.join("crates/clients/tests/fixtures").join(format!("home-{client}")), &user);
        }
        for (name, path) in [("HOME", user.clone()), ("XDG_CONFIG_HOME", user.join(".config"))] {
            home.env.push((name.to_owned(), path.display().to_string()));
        }
        Self { home, user }
    }

    fn import(&self, args: &[&str]) -> Outcome {
        self.import_in("", args)
    }

    fn import_in(&self, directory: &str, args: &[&str]) -> Outcome {
        let mut command = self.home.command(&[&["import"], args].concat());
        command.current_dir(self.user.join(directory));
        self.home.start(command).finish()
    }

    fn config(&self) -> PathBuf {
        self.user.join(".config/mcp-satellite/satellite.toml")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.config()).unwrap()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.user.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }
}

pub(super) fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            fs::create_dir_all(&target).unwrap();
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

pub(super) const CLIENTS: [&str; 16] = [
    "claude-code",
    "claude-desktop",
    "cursor",
    "vscode",
    "windsurf",
    "cline",
    "roo-code",
    "continue",
    "zed",
    "codex",
    "gemini",
    "goose",
    "opencode",
    "lmstudio",
    "amazon-q",
    "junie",
];

/// Values in the fixtures that no rule can recognize as secrets.
const UNRECOGNIZABLE: [&str; 3] = ["MY_ENV_VAR", "LITERAL", "PLAIN"];

#[test]
fn servers_of_every_client_are_imported_once_with_their_secrets_in_files() {
    for client in CLIENTS {
        let user = UserHome::new(Some(client));
        let dry = user.import(&[client, "--dry-run"]).exits(0);
        assert!(!user.config().exists(), "a dry run writes nothing");
        let outcome = user.import(&[client, "--yes"]).exits(0);
        let text = user.text();
        let text: Vec<_> = text.lines().filter(|line| !UNRECOGNIZABLE.iter().any(|name| line.contains(name))).collect();
        let text = text.join("\n");
        assert!(!text.contains("PLANTED"), "{client}: {text}");
        for outcome in [&dry, &outcome] {
            let lines = format!("{}\n{}", outcome.stdout, outcome.stderr);
            let shown = lines.lines().filter(|line| !UNRECOGNIZABLE.iter().any(|name| line.contains(name)));
            assert!(!shown.collect::<String>().contains("PLANTED"), "{client}: {lines}");
        }
        let config = user.config();
        let secrets = config.with_file_name("secrets");
        if secrets.exists() {
            assert_eq!(fs::metadata(&secrets).unwrap().permissions().mode() & 0o777, 0o700);
            for entry in fs::read_dir(&secrets).unwrap() {
                let entry = entry.unwrap();
                assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600);
                let name = entry.file_name().into_string().unwrap();
                if name == ".gitignore" {
                    continue;
                }
                assert!(text.contains(&format!("${{file:secrets/{name}}}")), "{client}: {name}\n{text}");
            }
        }
        user.home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0);
        let before = user.text();
        let again = user.import(&[client, "--yes"]).exits(0);
        assert!(again.stdout.contains("nothing to change"), "{client}: {}", again.stdout);
        assert_eq!(user.text(), before, "{client}: a second import changes nothing");
    }
}

const OWN: &str = "\
# Mine.
[[teams]] # one team
id = \"t\"
slug = \"t\"
[[teams.users]]
id = \"me\"
slug = \"me\"

[[teams.installations]]
id = \"github\" # by hand
server = \"github\"
command = \"own-server\"
env = { API_KEY = \"hush-own-key\" }

# At the end.
[gateway]
listen = \"off\"
";

#[test]
fn an_import_keeps_comments_and_order_and_masks_them_in_the_preview() {
    let user = UserHome::new(None);
    user.write(".config/mcp-satellite/satellite.toml", OWN);
    user.write(
        ".cursor/mcp.json",
        r#"{"mcpServers": {
            "github": {"command": "npx", "args": ["-y", "server-github", "--token", "ghp_0123456789abcdefABCDEF"]},
            "home": {"command": "${HOME}/run", "args": ["${TOKEN_NAME}"], "env": {"A": "${B:-c}", "DB": "file:./dev.db"}}}}"#,
    );
    let preview = user.import(&["cursor", "--dry-run"]).exits(0).stdout;
    assert!(preview.contains("+id = \"github-cursor\"") && preview.contains("`github` is in use"), "{preview}");
    assert!(!preview.contains("hush-own-key") && !preview.contains("ghp_0123"), "{preview}");
    assert!(preview.contains("the secret in `args.4` moves to secrets/github-cursor.args.4"), "{preview}");
    assert_eq!(user.text(), OWN);

    user.import(&["cursor", "--yes"]).exits(0);
    let text = user.text();
    let added: Vec<_> = text.lines().filter(|line| !OWN.lines().any(|own| own == *line)).collect();
    let kept: Vec<_> = text.lines().filter(|line| OWN.lines().any(|own| own == *line)).collect();
    assert!(OWN.lines().filter(|line| !line.is_empty()).all(|line| kept.contains(&line)), "{text}");
    let home = user.user.display();
    for line in [
        "args = [\"-y\", \"server-github\", \"--token\", \"${file:secrets/github-cursor.args.4}\"]",
        "secret_args = true",
        &format!("command = \"{home}/run\""),
        "args = [\"${env:TOKEN_NAME}\"]",
        "env = { A = \"${env:B:-c}\", DB = \"${value:text-file}./dev.db\" }",
    ] {
        assert!(added.contains(&line), "{line} in {added:#?}");
    }
    let secret = user.config().with_file_name("secrets").join("github-cursor.args.4");
    assert_eq!(fs::read_to_string(secret).unwrap(), "ghp_0123456789abcdefABCDEF");
}

#[test]
fn the_same_server_in_two_clients_is_imported_once_and_others_get_the_name_of_the_client() {
    let user = UserHome::new(None);
    let with = |token: &str| {
        format!(r#"{{"mcpServers": {{"files": {{"command": "files", "env": {{"API_KEY": "{token}"}}}}}}}}"#)
    };
    user.write(".cursor/mcp.json", &with("first-key-1234"));
    user.write(".codeium/windsurf/mcp_config.json", &with("first-key-1234"));
    user.write(".lmstudio/mcp.json", &with("other-key-5678"));
    let outcome = user.import(&["cursor", "windsurf", "lmstudio", "--yes", "--json"]).exits(0).json();
    let rows: Vec<_> = outcome["servers"].as_array().unwrap().iter().map(|row| (&row["id"], &row["outcome"])).collect();
    let (files, other) = ("files".into(), "files-lmstudio".into());
    let (added, known) = ("added".into(), "already_imported".into());
    assert_eq!(rows, [(&files, &added), (&files, &known), (&other, &added)]);
    assert_eq!(outcome["written"], true);
    assert!(!outcome.to_string().contains("key-"), "{outcome:#}");
    user.import(&["lmstudio", "windsurf", "--yes"]).exits(0);
    assert_eq!(user.text().matches("[[teams.installations]]").count(), 2);
}

#[test]
fn a_server_of_a_projects_file_is_imported_only_if_the_file_is_named() {
    let user = UserHome::new(None);
    let file = user.write("work/.mcp.json", r#"{"mcpServers": {"evil": {"command": "./run", "args": ["--all"]}}}"#);
    let outcome = user.import_in("work", &["claude-code", "--yes"]).exits(0);
    assert!(outcome.stdout.contains("evil  not imported: a file of a project contains it"), "{}", outcome.stdout);
    assert!(!user.config().exists());
    user.import_in("work", &[file.to_str().unwrap(), "--yes"]).exits(0);
    let text = user.text();
    assert!(text.contains("command = \"./run\""), "{text}");
    let work = fs::canonicalize(user.user.join("work")).unwrap();
    assert!(text.contains(&format!("cwd = \"{}\"", work.display())), "{text}");
}

#[test]
fn without_an_argument_all_servers_are_listed_and_nothing_is_written() {
    let user = UserHome::new(None);
    user.write(".cursor/mcp.json", r#"{"mcpServers": {"good": {"command": "x"}, "odd": {"command": "${command:odd}"}, "off": {"command": "y", "disabled": true}}}"#);
    user.write(".junie/mcp/mcp.json", "{\"mcpServers\": {");
    let outcome = user.import(&[]).exits(0);
    for said in [
        "good  would be imported",
        "odd  not imported: `command` contains a variable `${command:…}`, which is not supported",
        "off  not imported: it is disabled in the client",
    ] {
        assert!(outcome.stdout.contains(said), "{said} in {}", outcome.stdout);
    }
    assert!(outcome.stderr.contains("the file is truncated"), "{}", outcome.stderr);
    assert!(!user.config().exists());
    let refused = user.import(&["cursor"]).exits(2);
    assert!(refused.stderr.contains("add --yes"), "{}", refused.stderr);
    assert!(!user.config().exists());
}

#[test]
fn a_configuration_that_cannot_be_edited_is_an_error_and_remains() {
    let user = UserHome::new(None);
    user.write(".cursor/mcp.json", r#"{"mcpServers": {"a": {"command": "x", "env": {"API_KEY": "hush-key-1234"}}}}"#);
    let config = user.config();
    for (text, message) in [
        ("[[teams]]\nid = \"hush\n", "line 2 is not valid TOML"),
        ("teams = []\n", "write [[teams]]"),
        ("[backend]\nurl = \"https://e.com\"\n", "it has a [backend]"),
        ("[[teams]]\nid = \"a\"\n[[teams]]\nid = \"b\"\n", "none has the id `local`"),
    ] {
        user.write(".config/mcp-satellite/satellite.toml", text);
        let outcome = user.import(&["cursor", "--yes"]).exits(2);
        assert!(outcome.stderr.contains(message) && !outcome.stderr.contains("hush"), "{}", outcome.stderr);
        assert_eq!(user.text(), text);
    }
    fs::write(&config, OWN).unwrap();
    fs::set_permissions(&config, fs::Permissions::from_mode(0o444)).unwrap();
    let outcome = user.import(&["cursor", "--yes"]).exits(1);
    assert!(outcome.stderr.contains("the file is read-only"), "{}", outcome.stderr);
    assert_eq!(user.text(), OWN);
    let secrets = config.with_file_name("secrets");
    assert!(!secrets.exists(), "nothing is written");

    fs::set_permissions(&config, fs::Permissions::from_mode(0o640)).unwrap();
    fs::rename(&config, user.user.join("real.toml")).unwrap();
    symlink(user.user.join("real.toml"), &config).unwrap();
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(fs::symlink_metadata(&config).unwrap().is_symlink());
    assert_eq!(fs::metadata(&config).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(user.text().contains("${file:secrets/a.API_KEY}") && secrets.join("a.API_KEY").exists());
}

#[test]
fn every_byte_of_a_configuration_remains_and_no_value_of_it_is_shown() {
    for (mark, line_ending, end) in [("\u{feff}", "\r\n", "\r\n"), ("", "\r\n", ""), ("\u{feff}", "\n", "")] {
        let user = UserHome::new(None);
        let before = format!("{mark}{}{end}", OWN.trim_end().replace('\n', line_ending));
        user.write(".config/mcp-satellite/satellite.toml", &before);
        user.write(".cursor/mcp.json", r#"{"mcpServers": {"new": {"command": "x"}}}"#);
        let preview = user.import(&["cursor", "--dry-run"]).exits(0).stdout;
        assert!(preview.contains("+id = \"new\"") && preview.contains("+# Imported from cursor"), "{preview}");
        for hidden in ["hush-own-key", "own-server", "by hand"] {
            assert!(!preview.contains(hidden), "{preview}");
        }
        let removed = preview.lines().filter(|line| line.starts_with('-') && !line.starts_with("---")).count();
        assert_eq!(removed, 0, "{preview}");
        user.import(&["cursor", "--yes"]).exits(0);
        let text = user.text();
        let at = text.find(&format!("{line_ending}# Imported")).unwrap();
        let next = format!("{line_ending}# At the end.");
        let (first, rest) = (&text[..at], &text[text.find(&next).unwrap()..]);
        assert_eq!(format!("{first}{rest}"), before, "{text:?}");
        let added = text.matches('\n').count();
        assert_eq!(text.matches("\r\n").count(), if line_ending == "\n" { 0 } else { added }, "{text:?}");
    }
}

#[test]
fn the_entry_of_the_satellite_is_not_imported() {
    for client in CLIENTS {
        let user = UserHome::new(None);
        user.home.satellite(&["connect", client, "--yes"]).exits(0);
        let outcome = user.import(&[client, "--yes", "--json"]).exits(0).json();
        let row = &outcome["servers"][0];
        assert_eq!(row["outcome"], "not_imported", "{outcome:#}");
        assert_eq!(row["reason"], "it connects the client to the satellite", "{outcome:#}");
        assert!(!user.config().exists(), "{client}");
    }
    let user = UserHome::new(None);
    let other = r#"{"mcpServers": {"gateway": {"command": "/opt/satellite", "args": ["stdio", "--flat"]}, "http":
        {"url": "http://127.0.0.1:7300/mcp", "headers": {"Authorization": "Bearer ${env:SATELLITE_TOKEN}"}}}}"#;
    user.write(".junie/mcp/mcp.json", other);
    let outcome = user.import(&["junie", "--yes"]).exits(0);
    for name in ["gateway", "http"] {
        let said = format!("{name}  not imported: it connects the client to the satellite");
        assert!(outcome.stdout.contains(&said), "{said} in {}", outcome.stdout);
    }
    let user = UserHome::new(None);
    user.write(".cursor/mcp.json", r#"{"mcpServers": {"satellite": {"command": "nasa", "args": ["stdio"]}}}"#);
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(user.text().contains("command = \"nasa\""), "a server of this name is imported");
}

#[test]
fn settings_of_a_whole_file_that_are_not_imported_are_listed() {
    let user = UserHome::new(None);
    let inputs = r#"[{"type": "promptString"}, {"id": "region", "type": "pickString", "description": "Region", "options": ["eu", "us"]}]"#;
    let server = r#"{"a": {"command": "x", "args": ["${input:region}"]}}"#;
    for (name, text, note) in [
        ("list.json", r#"[{"command": "x"}]"#.to_owned(), "`file`: the file contains a list instead of an object"),
        (
            "servers.json",
            r#"{"mcpServers": [{"command": "x"}]}"#.to_owned(),
            "`mcpServers`: contains no servers, because it is a list",
        ),
        (
            ".vscode/mcp.json",
            format!(r#"{{"servers": {server}, "mcpServers": {{"b": {{"command": "y"}}}}, "inputs": {inputs}}}"#),
            "ignored key `mcpServers`",
        ),
        (
            ".vscode/mcp.json",
            format!(r#"{{"servers": {server}, "inputs": {inputs}}}"#),
            "`inputs`: an input without an id is not imported",
        ),
        (
            ".gemini/settings.json",
            format!(r#"{{"mcpServers": {server}, "mcp": {{"serverCommand": "z"}}}}"#),
            "`mcp.serverCommand` (a command that starts further servers) is not imported",
        ),
        (
            ".claude.json",
            format!(r#"{{"projects": {{"/p": {{"mcpServers": {server}, "disabledMcpServers": ["a"]}}}}}}"#),
            "`projects./p.disabledMcpServers` (servers that are switched on or off in one project) is not imported",
        ),
    ] {
        let file = user.write(name, &text);
        let file = file.to_str().unwrap();
        let shown = user.import(&[file, "--dry-run"]).exits(0).stdout;
        assert!(shown.contains(&format!("  note: {note}")), "{shown}");
        let json = user.import(&[file, "--dry-run", "--json"]).exits(0).json();
        assert!(json["files"][0]["notes"].as_array().unwrap().contains(&note.into()), "{json:#}");
    }
    let file = user.user.join(".vscode/mcp.json");
    user.import(&[file.to_str().unwrap(), "--yes"]).exits(0);
    assert!(user.text().contains("description = \"Region (one of: eu, us)\""), "{}", user.text());
}

#[test]
fn a_secret_file_that_exists_is_used_only_for_the_same_secret() {
    let user = UserHome::new(None);
    let server = |name: &str, key: &str| {
        format!(r#"{{"mcpServers": {{"{name}": {{"command": "x", "env": {{"API_KEY": "{key}"}}}}}}}}"#)
    };
    let secrets = user.config().with_file_name("secrets");
    user.write(".cursor/mcp.json", &server("a", "first-key-1234"));
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(user.text().contains("${file:secrets/a.API_KEY}"));
    assert_eq!(fs::read_to_string(secrets.join(".gitignore")).unwrap(), "*\n", "git does not store secrets");

    fs::remove_file(user.config()).unwrap();
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(user.text().contains("${file:secrets/a.API_KEY}"), "the file of the same secret is used again");

    fs::remove_file(user.config()).unwrap();
    user.write(".cursor/mcp.json", &server("a", "other-key-5678"));
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(user.text().contains("${file:secrets/a.API_KEY-2}"), "{}", user.text());
    assert_eq!(fs::read_to_string(secrets.join("a.API_KEY")).unwrap(), "first-key-1234");
    assert_eq!(fs::read_to_string(secrets.join("a.API_KEY-2")).unwrap(), "other-key-5678");

    fs::write(secrets.join(".gitignore"), "mine\n").unwrap();
    fs::write(secrets.join("b.API_KEY"), "first-key-1234").unwrap();
    fs::set_permissions(secrets.join("b.API_KEY"), fs::Permissions::from_mode(0o644)).unwrap();
    symlink("a.API_KEY-3", secrets.join("b.API_KEY-2")).unwrap();
    user.write(".cursor/mcp.json", &server("b", "first-key-1234"));
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(user.text().contains("${file:secrets/b.API_KEY-3}"), "{}", user.text());
    assert!(!secrets.join("a.API_KEY-3").exists(), "a link is not followed");
    assert_eq!(fs::read_to_string(secrets.join(".gitignore")).unwrap(), "mine\n");
}

#[test]
fn two_secrets_never_get_the_same_file() {
    let user = UserHome::new(None);
    user.write(
        ".cursor/mcp.json",
        r#"{"mcpServers": {
            "a": {"command": "x", "env": {"X.KEY": "first-key-1234", "KEY": "other-key-5678"}},
            "a.X": {"command": "y", "env": {"KEY": "third-key-9012"}}}}"#,
    );
    user.import(&["cursor", "--yes"]).exits(0);
    let text = user.text();
    let secrets = user.config().with_file_name("secrets");
    let mut contents: Vec<_> = text
        .split("${file:secrets/")
        .skip(1)
        .map(|rest| fs::read_to_string(secrets.join(rest.split_once('}').unwrap().0)).unwrap())
        .collect();
    contents.sort();
    assert_eq!(contents, ["first-key-1234", "other-key-5678", "third-key-9012"], "{text}");
}

#[test]
fn the_question_for_a_projects_server_shows_all_that_decides_what_it_does() {
    let user = UserHome::new(None);
    user.write(
        "work/.mcp.json",
        r#"{"mcpServers": {
            "local": {"command": "./run", "args": ["--all"], "cwd": "/srv", "envFile": "/srv/vars", "env": {
                "NODE_OPTIONS": "--require ./evil.js", "API_KEY": "hush-key-1234", "LD_PRELOAD": "/tmp/evil.so",
                "LINES": "a\nb"}},
            "remote": {"url": "https://evil.example/mcp", "headers": {"X-Team": "blue", "Authorization": "Bearer ${env:TOKEN}"}}}}"#,
    );
    let (mut typing, terminal) = open_terminal();
    let mut command = user.home.command(&["import", "claude-code"]);
    command.current_dir(user.user.join("work")).stdin(Stdio::from(terminal));
    let asking = user.home.start(command);
    asking.wait_stderr(|text| text.contains("import it? [y/N] "));
    std::io::Write::write_all(&mut typing, b"n\n").unwrap();
    asking.wait_stderr(|text| text.matches("import it? [y/N] ").count() == 2);
    std::io::Write::write_all(&mut typing, b"y\n").unwrap();
    asking.wait_stderr(|text| text.contains("write these changes? [y/N] "));
    std::io::Write::write_all(&mut typing, b"y\n").unwrap();
    let outcome = asking.finish().exits(0);
    for line in [
        "  ./run --all",
        "  cwd = /srv",
        "  env_file = /srv/vars",
        "  env.NODE_OPTIONS = --require ./evil.js",
        "  env.API_KEY = ${file:secrets/local.API_KEY}",
        "  https://evil.example/mcp",
        "  headers.X-Team = blue",
        "  headers.Authorization = Bearer ${env:TOKEN}",
    ] {
        assert!(outcome.stdout.lines().any(|shown| shown == line), "{line} in {}", outcome.stdout);
    }
    assert!(outcome.stdout.contains("`LD_PRELOAD` in the env of"), "{}", outcome.stdout);
    assert!(outcome.stdout.lines().any(|shown| shown.starts_with("  env.LINES = a") && shown.ends_with('b')));
    assert!(!outcome.stdout.contains("hush-key"), "{}", outcome.stdout);
    let text = user.text();
    assert!(text.contains("https://evil.example/mcp") && !text.contains("./run"), "{text}");

    // `--yes` answers the last question only, and without a terminal nobody is asked.
    let mut command = user.home.command(&["import", "claude-code", "--yes"]);
    command.current_dir(user.user.join("work"));
    let outcome = user.home.start(command).finish().exits(0);
    assert!(outcome.stdout.contains("local  not imported: a file of a project contains it"), "{}", outcome.stdout);
}

#[test]
fn warnings_about_an_imported_server_are_listed() {
    let user = UserHome::new(None);
    user.write(
        ".config/mcp-satellite/satellite.toml",
        &format!("[satellite]\nprofile = \"production\"\nisolation = \"none\"\nallowed_commands = [\"x\"]\n\n{OWN}"),
    );
    user.write(
        ".cursor/mcp.json",
        r#"{"mcpServers": {"a": {"command": "x", "env": {"LD_PRELOAD": "/tmp/x.so", "PYTHONPATH": "/opt/lib"}}}}"#,
    );
    let outcome = user.import(&["cursor", "--dry-run", "--json"]).exits(0).json();
    let notes = outcome["servers"][0]["notes"].to_string();
    assert!(notes.contains("`LD_PRELOAD` in the env of") && notes.contains("`PYTHONPATH`"), "{notes}");
    assert!(!notes.contains("without a sandbox in production") && !notes.contains("satellite.toml"), "{notes}");
}

#[test]
fn without_an_argument_servers_are_listed_although_the_configuration_is_not_valid() {
    let user = UserHome::new(None);
    user.write(".cursor/mcp.json", r#"{"mcpServers": {"good": {"command": "x"}}}"#);
    for text in ["[[teams]\nid = \"hush\n", "[backend]\nurl = \"https://e.com\"\n"] {
        user.write(".config/mcp-satellite/satellite.toml", text);
        let outcome = user.import(&[]).exits(0);
        assert!(outcome.stdout.contains("good  would be imported"), "{outcome:#?}");
        assert!(outcome.stderr.contains("cannot add servers to") && !outcome.stderr.contains("hush"), "{outcome:#?}");
        user.import(&["cursor", "--dry-run"]).exits(2);
        assert_eq!(user.text(), text);
    }
}

#[test]
fn a_fifo_or_a_large_file_does_not_block_an_import() {
    let user = UserHome::new(None);
    let fifo = |path: &Path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    user.write(".cursor/mcp.json", r#"{"mcpServers": {"a": {"command": "x", "env": {"API_KEY": "hush-key-1234"}}}}"#);
    let other = OWN.replace("hush-own-key", "${file:secrets/a.API_KEY}");
    user.write(".config/mcp-satellite/satellite.toml", &other);
    let secrets = user.config().with_file_name("secrets");
    fs::create_dir(&secrets).unwrap();
    fs::set_permissions(&secrets, fs::Permissions::from_mode(0o700)).unwrap();
    fifo(&secrets.join("a.API_KEY"));
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(user.text().contains("${file:secrets/a.API_KEY-2}"), "{}", user.text());

    fs::remove_file(user.config()).unwrap();
    fifo(&user.config());
    let outcome = user.import(&["cursor", "--yes"]).exits(1);
    assert!(outcome.stderr.contains("is not a regular file"), "{outcome:#?}");
    fs::remove_file(user.config()).unwrap();
    let large = user.write("large.json", "{}");
    fs::File::options().write(true).open(&large).unwrap().set_len(1 << 40).unwrap();
    let outcome = user.import(&[large.to_str().unwrap(), "--yes"]).exits(2);
    assert!(outcome.stderr.contains("it is larger than 16 MiB"), "{outcome:#?}");
}

#[test]
fn a_file_of_another_user_is_an_error() {
    // Only root can give a file away.
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let give = |path: &Path, owner| std::os::unix::fs::chown(path, Some(owner), None).unwrap();
    let user = UserHome::new(None);
    let file =
        user.write(".cursor/mcp.json", r#"{"mcpServers": {"a": {"command": "x", "env": {"API_KEY": "hush-key-1"}}}}"#);
    give(&file, 12345);
    let outcome = user.import(&["cursor", "--yes"]).exits(1);
    for said in ["it belongs to the user 12345", "check it, then run `satellite import /"] {
        assert!(outcome.stderr.contains(said), "{said} in {}", outcome.stderr);
    }
    assert!(!user.config().exists());
    user.import(&[file.to_str().unwrap(), "--yes", "--dry-run"]).exits(0);

    give(&file, 0);
    user.write(".config/mcp-satellite/satellite.toml", OWN);
    give(&user.config(), 12345);
    let outcome = user.import(&["cursor", "--yes"]).exits(1);
    assert!(
        outcome.stderr.contains("it belongs to user 12345, and this command runs as user 0; run it as the owner"),
        "{}",
        outcome.stderr
    );
    assert!(!outcome.stderr.contains("hush"), "{}", outcome.stderr);
    assert_eq!(user.text(), OWN);
    assert!(!user.config().with_file_name("secrets").exists());
}

#[test]
fn the_tools_that_a_client_shows_and_hides_are_imported() {
    let user = UserHome::new(None);
    user.write(
        ".gemini/settings.json",
        r#"{"mcpServers": {"a": {"command": "x", "includeTools": ["read", "write"], "excludeTools": ["write"]},
            "b": {"command": "y", "excludeTools": ["delete(path)"]}}}"#,
    );
    let outcome = user.import(&["gemini", "--yes"]).exits(0);
    let text = user.text();
    assert!(text.contains("allow_tools = [\"read\", \"write\"]\ndeny_tools = [\"write\"]\n"), "{text}");
    assert!(outcome.stdout.contains("because `delete(path)` is no name of a tool"), "{}", outcome.stdout);
    user.home.bare(&["check", "--config", user.config().to_str().unwrap()]).exits(0);
}
