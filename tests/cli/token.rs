//! `satellite token`, and tokens in the configuration.

use testkit::home::Home;

use crate::SATELLITE;

#[test]
fn token_prints_a_token_and_the_digest_for_the_configuration() {
    let home = Home::new(SATELLITE);
    let made = || {
        let outcome = home.bare(&["token"]).exits(0);
        let lines: Vec<_> = outcome.stdout.lines().map(str::to_owned).collect();
        let [token, digest] = &lines[..] else { panic!("{outcome:#?}") };
        assert!(token.starts_with("sat_") && token.len() > 40 && digest.starts_with("sha256:"), "{outcome:#?}");
        assert_eq!(outcome.stderr, "");
        (token.clone(), digest.clone())
    };
    let (first, second) = (made(), made());
    assert!(first.0 != second.0 && first.1 != second.1);

    let text = format!(
        "[[teams]]\nid = \"t\"\nslug = \"acme\"\n[[teams.users]]\nid = \"u\"\nslug = \"alice\"\n\
         tokens = [\"{}\", \"{}\"]\n[[teams.users]]\nid = \"v\"\nslug = \"bob\"\n",
        first.1, second.1
    );
    let config = home.write("satellite.toml", &text);
    let check = ["check", "--config", config.to_str().unwrap()];
    let outcome = home.bare(&check).exits(0);
    let expected = "the MCP endpoint is http://127.0.0.1:7300/mcp: 1 of 2 users have a token";
    assert!(outcome.stdout.contains(expected), "{outcome:#?}");

    home.write("satellite.toml", &text.replace(&first.1, &first.0));
    let outcome = home.bare(&check).exits(2);
    assert!(outcome.stderr.contains("is written in plain text") && !outcome.stderr.contains(&first.0), "{outcome:#?}");
}

#[test]
fn check_prints_the_endpoint_and_its_users() {
    let home = Home::new(SATELLITE);
    let users = "[[teams]]\nid = \"t\"\nslug = \"acme\"\nusers = [{ id = \"u\", slug = \"alice\" }]\n";
    for (gateway, expected) in [
        ("", "the MCP endpoint is not configured"),
        ("[gateway]\nlisten = \"off\"\n", "the MCP endpoint is switched off"),
        ("[gateway]\nlisten = \"[::1]:81\"\n", "http://[::1]:81/mcp: 1 of 1 users have a token"),
        ("[gateway]\nauth = \"none\"\n", "http://127.0.0.1:7300/mcp: every process on this machine acts as acme/alice"),
        ("[gateway]\npublic_url = \"https://mcp.example.com\"\n", "is https://mcp.example.com/mcp: 1 of 1 users"),
    ] {
        let config = home.write("satellite.toml", &format!("{gateway}{users}"));
        let outcome = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0);
        assert!(outcome.stdout.contains(expected), "{expected}\n{outcome:#?}");
        assert_eq!(outcome.stderr.contains("without a token"), gateway.contains("none"), "{outcome:#?}");
    }
}

#[test]
fn a_public_listen_address_without_hosts_is_refused_before_any_start() {
    let home = Home::new(SATELLITE);
    let config = home.servers("satellite.toml", &[("notes", &[])]);
    let outcome = home.satellite(&["run", "--config", config.to_str().unwrap(), "--listen", "0.0.0.0:7300"]).exits(2);
    assert!(outcome.stderr.contains("0.0.0.0:7300") && outcome.stderr.contains("hosts = "), "{outcome:#?}");
    home.satellite(&["run", "--config", config.to_str().unwrap(), "--listen", "localhost"]).exits(2);
    assert!(home.processes().is_empty());
}

#[test]
fn an_endpoint_of_one_user_without_a_token_gets_a_generated_one() {
    let home = Home::new(SATELLITE);
    let servers = std::fs::read_to_string(home.servers("servers.toml", &[("notes", &[])])).unwrap();
    let config = home.write("satellite.toml", &format!("[gateway]\nlisten = \"127.0.0.1:0\"\n{servers}"));
    let outcome = home.bare(&["check", "--config", config.to_str().unwrap()]).exits(0);
    assert!(outcome.stdout.contains("`satellite run` keeps the token of acme/alice"), "{outcome:#?}");
    let satellite = home.run(&["--config", config.to_str().unwrap()]);
    let file = home.data_dir().join("token");
    let greeting = satellite.wait_start_message();
    assert!(greeting.contains("/mcp") && greeting.contains(file.to_str().unwrap()), "{greeting}");
    assert!(std::fs::read_to_string(file).unwrap().trim().len() >= 22);
    satellite.terminate().exits(0);
}

#[test]
fn an_endpoint_of_several_users_without_a_token_causes_a_warning() {
    let home = Home::new(SATELLITE);
    let text = "[gateway]\n[[teams]]\nid = \"t\"\nslug = \"acme\"\n\
                users = [{ id = \"u\", slug = \"alice\" }, { id = \"v\", slug = \"bob\" }]\n";
    let config = home.write("satellite.toml", text);
    let check = ["check", "--config", config.to_str().unwrap()];
    let outcome = home.bare(&check).exits(0);
    assert!(outcome.stderr.contains("no user has a token; run `satellite token`"), "{outcome:#?}");
    home.bare(&[&check[..], &["--strict"]].concat()).exits(1);
}
