//! `satellite import`: servers of clients become installations, secrets become files, and everything else remains.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use testkit::home::{Home, Outcome};

use super::SATELLITE;

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
    assert!(preview.contains("+ id = \"github-cursor\"") && preview.contains("`github` is in use"), "{preview}");
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
    assert!(refused.stderr.contains("give --yes"), "{}", refused.stderr);
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
    assert!(outcome.stderr.contains("it is read-only"), "{}", outcome.stderr);
    assert_eq!(user.text(), OWN);
    let secrets = config.with_file_name("secrets");
    assert_eq!(fs::read_dir(&secrets).unwrap().count(), 0, "no secret of a failed import remains");

    fs::set_permissions(&config, fs::Permissions::from_mode(0o640)).unwrap();
    fs::rename(&config, user.user.join("real.toml")).unwrap();
    symlink(user.user.join("real.toml"), &config).unwrap();
    user.import(&["cursor", "--yes"]).exits(0);
    assert!(fs::symlink_metadata(&config).unwrap().is_symlink());
    assert_eq!(fs::metadata(&config).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(user.text().contains("${file:secrets/a.API_KEY}") && secrets.join("a.API_KEY").exists());
}
