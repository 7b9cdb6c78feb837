//! A satellite with two teams, three users, and tokens of every role.

use std::fs;

use testkit::home::{Home, Satellite};
use testkit::port::free_port;
use testkit::wait::wait_until;

use super::SATELLITE;
use super::client::ApiClient;

pub(crate) const VIEWER: &str = "viewer-token-0123456789abcdef";
pub(crate) const OPERATOR: &str = "operator-token-0123456789abcdef";
pub(crate) const ADMIN: &str = "admin-token-0123456789abcdef";
pub(crate) const READER: &str = "reader-token-0123456789abcdef";
/// Operator of the team `blue` only.
pub(crate) const BLUE: &str = "blue-token-0123456789abcdef";
/// User of the team `acme` with the role operator.
pub(crate) const ALICE: &str = "alice-token-0123456789abcdef";
/// User of the team `acme` without a role.
pub(crate) const BOB: &str = "bob-token-0123456789abcdef";

/// Full names of the instances.
pub(crate) const ALICES: &str = "notes-acme-alice-notes";
pub(crate) const BOBS: &str = "notes-acme-bob-notes";
pub(crate) const CAROLS: &str = "files-blue-carol-files";

pub(crate) const ALL_TOKENS: [&str; 7] = [VIEWER, OPERATOR, ADMIN, READER, BLUE, ALICE, BOB];

pub(crate) struct Fixture {
    pub(crate) home: Home,
    pub(crate) address: String,
}

impl Fixture {
    pub(crate) fn new(console: &str) -> Self {
        let mut home = Home::new(SATELLITE);
        let names = ["VIEWER", "OPERATOR", "ADMIN", "READER", "BLUE", "ALICE", "BOB"];
        home.env.extend(names.iter().zip(ALL_TOKENS).map(|(name, token)| ((*name).to_owned(), token.to_owned())));
        let address = format!("127.0.0.1:{}", free_port());
        home.write("satellite.toml", &config(&address, console));
        Self { home, address }
    }

    pub(crate) fn start(&self) -> Satellite<'_> {
        let satellite = self.home.run(&["--config", self.home.path().join("satellite.toml").to_str().unwrap()]);
        let client = self.client();
        wait_until("readiness", || {
            std::net::TcpStream::connect(&self.address).is_ok() && client.get("/readyz").status == 200
        });
        self.home.wait_all_online();
        satellite
    }

    pub(crate) fn client(&self) -> ApiClient {
        ApiClient::new(&self.address)
    }

    pub(crate) fn with(&self, token: &str) -> ApiClient {
        self.client().with_token(token)
    }

    pub(crate) fn owner(&self) -> ApiClient {
        self.with(fs::read_to_string(self.home.data_dir().join("console-token")).unwrap().trim())
    }
}

pub(crate) fn config(address: &str, console: &str) -> String {
    let token = |name: &str, role: &str, more: &str| {
        let variable = name.to_uppercase();
        format!("[[console.tokens]]\nname = \"{name}\"\ntoken = \"env:{variable}\"\nrole = \"{role}\"\n{more}\n")
    };
    let tokens = [
        token("viewer", "viewer", ""),
        token("operator", "operator", ""),
        token("admin", "admin", "grants = [\"calls:read\", \"act_as\"]"),
        token("reader", "viewer", "grants = [\"calls:read\"]"),
        token("blue", "operator", "team = \"blue\"\ngrants = [\"act_as\"]"),
    ]
    .concat();
    format!(
        r#"
[console]
{console}
{tokens}
[gateway]
listen = "{address}"

[[teams]]
id = "team_acme"
slug = "acme"
[[teams.users]]
id = "u1"
slug = "alice"
token = "env:ALICE"
role = "operator"
[[teams.users]]
id = "u2"
slug = "bob"
token = "env:BOB"
[[teams.installations]]
id = "notes"
server = "notes"
env = {{ API_KEY = "${{value:API_KEY}}" }}
values.API_KEY = {{ default = "none", secret = true }}
SIM

[[teams]]
id = "team_blue"
slug = "blue"
[[teams.users]]
id = "u3"
slug = "carol"
[[teams.installations]]
id = "files"
server = "files"
SIM "--stderr-text", "line of carol", "--stderr-lines-per-second", "20"
"#
    )
}
