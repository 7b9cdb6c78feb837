//! Reading of configurations: the resulting plan, all errors in one report, and no secret in any output.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use mcp_satellite::config::{
    self, ConfigErrors, EndpointAuth, GatewayLimits, GatewayUser, LISTEN, ListenSetting, Plan, Profile, ResponseStyle,
    SinkPlan, TlsFiles, TokenHash,
};
use mcp_satellite::journal::JournalLimits;
use mcp_satellite_actors::model::era::Era;
use mcp_satellite_actors::model::policy::{
    DegradedAction, HealthCheck, HealthPolicy, IdlePolicy, Policy, ReconnectPolicy,
};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::spec::{InstanceConfig, ProcessLifetime, RemoteTransport, ServerTarget, UpdateMethod};
use testkit::certificate::write_pair;

const FULL: &str = include_str!("fixtures/config/full.toml");
const BAD: &str = include_str!("fixtures/config/bad.toml");

const ALICE_TOKEN: &str = "alice-token-that-nobody-guesses";

const SECRETS: [&str; 7] =
    ["event-sink-token", ALICE_TOKEN, "search-key", "search-token", "correct horse battery", "1234", "hunter2"];

fn environment(name: &str) -> Option<String> {
    let value = match name {
        "ALICE_TOKEN" => ALICE_TOKEN,
        "SHORT_TOKEN" => "short-token",
        "SPACED_TOKEN" => "hunter2 and something more to be long",
        "SEARCH_KEY" => "search-key",
        "SEARCH_TOKEN" => "search-token",
        "BLANK" => "",
        "TWICE" => "Bearer hunter2",
        "LINES" => "hunter2\nhunter2",
        _ => return None,
    };
    Some(value.to_owned())
}

fn parse(text: &str) -> Result<Plan, ConfigErrors> {
    config::parse("tests/fixtures/config/satellite.toml", text, &environment)
}

fn parse_json(text: &str) -> Result<Plan, ConfigErrors> {
    config::parse_mcp_json("mcp.json", text, &config::PlanRestrictions::default(), &environment)
}

/// A configuration that starts with `more` and has one team, one user and one installation with the keys of
/// `installation`.
fn small(more: &str, installation: &str) -> String {
    format!(
        "{more}\n[[teams]]\nid = \"t\"\nslug = \"t\"\n[[teams.users]]\nid = \"u\"\nslug = \"u\"\n\
         [[teams.installations]]\nid = \"i\"\nserver = \"s\"\n{installation}\n"
    )
}

fn messages(errors: &ConfigErrors) -> Vec<String> {
    errors.items().into_iter().map(|item| item.message).collect()
}

fn exposed<'a>(values: impl IntoIterator<Item = &'a Secret>) -> Vec<&'a str> {
    values.into_iter().map(Secret::expose).collect()
}

#[test]
fn a_full_file_becomes_the_expected_plan() {
    let plan = parse(FULL).unwrap();
    assert_eq!((plan.name.as_str(), plan.profile), ("dev-satellite-001", Profile::Production));
    let gateway = &plan.gateway;
    assert_eq!(gateway.address(), Some("127.0.0.1:7301".parse().unwrap()));
    assert_eq!(gateway.public_url.as_deref(), Some("https://mcp.example.com/satellite"));
    assert_eq!(gateway.hosts, ["mcp.example.com", "[2001:db8::1]:8443"]);
    assert_eq!(gateway.origins, ["https://app.example.com", "vscode-webview://panel:*"]);
    assert_eq!(
        (&gateway.auth, gateway.response_style, &gateway.tls),
        (&EndpointAuth::Bearer, ResponseStyle::Sse, &None)
    );
    assert_eq!(gateway.authorization_servers, ["https://login.example.com/acme"]);
    assert_eq!(gateway.trusted_proxies, [IpAddr::from([10, 0, 0, 7])]);
    let limits = GatewayLimits {
        body_max: 1 << 20,
        bodies_max: 8 << 20,
        streams_max: 4 << 20,
        session_idle: Duration::from_secs(600),
        session_age_max: Duration::from_secs(24 * 3600),
        sessions_max: 1000,
        sessions_per_user_max: 10,
        connections_max: 100,
        unauthenticated_max: 50,
        unauthenticated_per_peer_max: 5,
        header_timeout: Duration::from_secs(3),
        requests_per_second: 50,
        burst: 100,
        calls_per_user_max: 0,
        request_timeout: Some(Duration::from_secs(45)),
        resume_grace: Duration::from_secs(1),
        drain_timeout: Duration::from_secs(3),
    };
    assert_eq!(gateway.limits, limits);
    let who = |user: &GatewayUser| format!("{}/{} {} {}", user.team_slug, user.slug, user.tokens.len(), user.flat);
    assert_eq!(
        gateway.users.iter().map(who).collect::<Vec<_>>(),
        ["acme/alice 2 true", "acme/bob 0 false", "umbrella/carol 0 false"]
    );
    assert_eq!(gateway.users[0].tokens, [ALICE_TOKEN, "test"].map(TokenHash::from_token));
    assert_eq!(plan.batch.request_payload_max, 1024);
    let SinkPlan::Http { url, token } = &plan.sink else { panic!("{:?}", plan.sink) };
    assert_eq!(url, "https://events.example.com/ingest?source=satellite");
    assert_eq!(token.as_ref().unwrap().expose(), "event-sink-token", "the trailing newline was not removed");
    assert_eq!((plan.batch.interval, plan.batch.batch_max, plan.batch.queue_max), (Duration::from_secs(1), 50, 10_000));
    assert_eq!((plan.team_budget.window, plan.team_budget.max_exits), (Duration::from_secs(30), 9));
    assert_eq!((plan.start_permits, plan.connect_permits), (Some(6), Some(7)));
    assert_eq!((plan.teams, plan.users), (2, 3));

    let who = |instance: &InstanceConfig| format!("{}/{}/{}", instance.team, instance.user, instance.installation);
    assert_eq!(
        plan.instances.iter().map(who).collect::<Vec<_>>(),
        [
            "team_acme/user_alice/abc123",
            "team_acme/user_bob/abc123",
            "team_acme/user_bob/def456",
            "team_umbrella/user_carol/ghi789",
        ]
    );
    let [alice, bob, search, carol] = &plan.instances[..] else { panic!() };
    let cwd = Some("/srv/acme".to_owned());
    assert_eq!(alice.target, ServerTarget::Stdio { command: "/opt/acme/bin/files".to_owned(), cwd });
    assert_eq!((alice.lifetime, alice.request_logging), (ProcessLifetime::AlwaysOn, true));
    assert_eq!((carol.lifetime, search.request_logging), (ProcessLifetime::Listed, false));
    assert_eq!(
        search.target,
        ServerTarget::Remote {
            transport: RemoteTransport::Http,
            url: "https://search.example.com/mcp".to_owned(),
            health_url: None
        }
    );

    // Global, then team, then installation.
    assert_eq!(carol.policy.restart.max_crashes, 4);
    assert_eq!(carol.policy.restart.delays, [Duration::from_millis(100), Duration::from_secs(1)]);
    assert_eq!(alice.policy.restart.max_crashes, 5);
    assert_eq!((alice.policy.restart.window, alice.policy.session.line_max), (Duration::from_secs(120), 65536));
    assert_eq!(search.policy.restart.max_crashes, 5);
    assert_eq!(search.policy.session.request_timeout, Duration::from_secs(20));
    assert!(Arc::ptr_eq(&alice.policy, &bob.policy) && !Arc::ptr_eq(&alice.policy, &carol.policy));

    let read: Vec<_> = plan.secret_variables.iter().map(String::as_str).collect();
    assert_eq!(read, ["ALICE_TOKEN", "SEARCH_KEY", "SEARCH_TOKEN"]);
    assert_eq!(
        plan.warnings,
        [
            "tests/fixtures/config/satellite.toml:124:9: `LD_PRELOAD` in the env of installation `ghi789` is never passed on \
             to a server; remove it"
        ]
    );
}

#[test]
fn the_tiers_of_template_team_and_user_merge_in_that_order() {
    let instances = parse(FULL).unwrap().instances;
    let [alice, bob, search, _] = <[InstanceConfig; 4]>::try_from(instances).unwrap().map(InstanceConfig::merge);
    assert_eq!(exposed(&alice.args), ["--template", "--team", "--alice"]);
    let env: BTreeMap<_, _> = alice.env.iter().map(|(name, value)| (name.as_str(), value.expose())).collect();
    assert_eq!(
        env.into_iter().collect::<Vec<_>>(),
        [
            ("GREETING", "correct horse battery"),
            ("LOG_LEVEL", "info"),
            ("PIN", "1234"),
            ("REGION", "us"),
            ("ROOT", "/srv/acme")
        ]
    );
    assert_eq!(alice.missing, [] as [&str; 0]);
    assert_eq!(bob.missing, ["PIN"], "missing required values of the user");
    assert_eq!(exposed(&bob.args), ["--template", "--team"]);
    assert_eq!(exposed(search.headers.values()), ["Bearer search-token", "acme"]);
    assert_eq!(exposed(search.query.values()), ["search-key", "acme"]);
}

#[test]
fn the_installation_overrides_the_era_of_its_template() {
    let protocol = |text: &str| parse(text).unwrap().instances[0].policy.session.protocol;
    let with = |more: &str, own: &str| small(&format!("[servers.s]\ncommand = \"npx\"\n{more}"), own);
    assert_eq!(protocol(&with("", "")), None);
    assert_eq!(protocol(&small("", "command = \"npx\"\nprotocol = \"2026-07-28\"")), Some(Era::Stateless));
    for (word, era) in [("auto", None), ("2025-11-25", Some(Era::Sessions)), ("2026-07-28", Some(Era::Stateless))] {
        let word = format!("protocol = \"{word}\"");
        assert_eq!(protocol(&with(&word, "")), era);
        assert_eq!(
            protocol(&with("protocol = \"2025-11-25\"", &word)),
            era,
            "the installation does not override its template"
        );
    }
    let json = r#"{"mcpServers":{"a":{"command":"npx","protocol":"2026-07-28"}}}"#;
    assert_eq!(parse_json(json).unwrap().instances[0].policy.session.protocol, Some(Era::Stateless));
}

#[test]
fn keep_update_and_idle_are_read_from_each_tier() {
    let plan = |global: &str, own: &str| parse(&small(global, &format!("command = \"npx\"\n{own}"))).unwrap();
    let one = |plan: Plan| plan.instances.into_iter().next().unwrap();
    let default = one(plan("", ""));
    assert_eq!((default.lifetime, default.update_method), (ProcessLifetime::Listed, UpdateMethod::Restart));
    let (idle, second) = (&default.policy.idle, Duration::from_secs(1));
    assert_eq!((idle.idle, idle.grace, idle.sweep), (180 * second, 60 * second, 30 * second));
    for (word, keep) in
        [("listed", ProcessLifetime::Listed), ("always_on", ProcessLifetime::AlwaysOn), ("lazy", ProcessLifetime::Lazy)]
    {
        assert_eq!(one(plan("", &format!("keep = \"{word}\""))).lifetime, keep);
    }
    for (word, on_update) in [("restart", UpdateMethod::Restart), ("rolling", UpdateMethod::Rolling)] {
        assert_eq!(one(plan("", &format!("update = \"{word}\""))).update_method, on_update);
    }
    let own = "[teams.installations.policy.idle]\nidle = \"1m\"\ngrace = \"0s\"";
    let tiers = one(plan("[policy.idle]\nidle = \"10m\"\nsweep = \"1s\"", own));
    let idle = &tiers.policy.idle;
    assert_eq!((idle.idle, idle.grace, idle.sweep), (60 * second, Duration::ZERO, second));
}

#[test]
fn only_off_disables_a_limit_or_a_timeout() {
    let servers = "command = \"npx\"";
    let plan = |more: &str| parse(&small(more, servers)).unwrap();
    assert_eq!(plan("[policy.idle]\nidle = \"off\"").instances[0].policy.idle.idle, IdlePolicy::OFF);
    assert_eq!(plan("[policy.isolation]\nmemory_max = \"off\"").instances[0].policy.isolation.memory_max, None);
    let limits = plan("[gateway]\nrequests_per_second = \"off\"\ncalls_per_user_max = \"off\"").gateway.limits;
    assert_eq!((limits.requests_per_second, limits.calls_per_user_max), (0, 0));
    for (more, message, hint) in [
        ("[policy.idle]\nidle = \"never\"", "`never` is not a valid value for `idle`", "write \"off\""),
        (
            "[policy.isolation]\nmemory_max = \"unlimited\"",
            "`unlimited` is not a valid value for `memory_max`",
            "write \"off\"",
        ),
        (
            "[policy.reconnect]\nattempts_max = \"none\"",
            "`none` is not a valid value for `attempts_max`",
            "write \"off\"",
        ),
        (
            "[policy.idle]\nidle = \"0s\"",
            "`idle` must not be zero",
            "give a time, such as \"3m\", or \"off\" for never",
        ),
        (
            "[gateway]\nrequests_per_second = 0",
            "`requests_per_second` is 0, which is too small",
            "give at least 1, or \"off\" for no limit",
        ),
    ] {
        let items = parse(&small(more, servers)).unwrap_err().items();
        let found: Vec<_> = items.iter().map(|item| (item.message.as_str(), item.hint.as_str())).collect();
        assert_eq!(found, [(message, hint)]);
    }
}

#[test]
fn servers_of_an_mcp_json_become_dormant_only_if_configured() {
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let json = r#"{"mcpServers":{
        "a":{"command":"npx"},
        "b":{"command":"npx","idle":"5m","keep":"lazy"},
        "c":{"command":"npx","idle":"off","keep":"always_on"}}}"#;
    let of = |plan: Plan| plan.instances.iter().map(|one| (one.policy.idle.idle, one.lifetime)).collect::<Vec<_>>();
    let own = [(minutes(5), ProcessLifetime::Lazy), (IdlePolicy::OFF, ProcessLifetime::AlwaysOn)];
    let plan = parse_json(json).unwrap();
    assert!(matches!(&plan.warnings[..], [one] if one.contains("`c` is `always_on`")), "{:?}", plan.warnings);
    assert_eq!(of(plan), [&[(IdlePolicy::OFF, ProcessLifetime::Listed)], &own[..]].concat());
    let base = parse("[policy.idle]\nidle = \"10m\"").unwrap().base;
    let plan = config::parse_mcp_json("mcp.json", json, &base, &environment).unwrap();
    assert_eq!(of(plan), [&[(minutes(10), ProcessLifetime::Listed)], &own[..]].concat());
    let text = r#"{"mcpServers":{"a":{"command":"npx","idle":"0s"},"b":{"command":"npx","keep":"lasy"}}}"#;
    let plan = parse_json(text).unwrap();
    assert_eq!(plan.instances.len(), 1);
    assert_eq!(
        plan.warnings,
        [
            "mcp.json:1:17: `a`: `idle` must not be zero; give a time, such as \"3m\", or \"off\" for never",
            "mcp.json:1:51: `b` is left out: `lasy` is not a valid value for `keep`; did you mean \"lazy\"?",
        ]
    );
}

#[test]
fn the_only_user_without_a_token_gets_a_generated_one() {
    let settled = |more: &str, users: &str| {
        let text = format!("{more}\n[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{users}]\n");
        parse(&text).unwrap().finalize().unwrap()
    };
    let one = "{ id = \"u\", slug = \"u\" }";
    let two = "{ id = \"u\", slug = \"u\" }, { id = \"v\", slug = \"v\" }";
    let has_stored_token =
        |plan: &Plan| plan.gateway.users.iter().map(|user| user.has_stored_token).collect::<Vec<_>>();
    let plan = settled("[gateway]", one);
    assert!(has_stored_token(&plan) == [true] && plan.warnings.is_empty(), "{:?}", plan.warnings);
    let plan = settled("[gateway]", two);
    assert_eq!(has_stored_token(&plan), [false, false]);
    assert!(matches!(&plan.warnings[..], [one] if one.contains("no user has a token")), "{:?}", plan.warnings);
    let plan = settled("[gateway]", "{ id = \"u\", slug = \"u\", token = \"env:ALICE_TOKEN\" }");
    assert!(has_stored_token(&plan) == [false] && plan.warnings.is_empty());
    assert_eq!(settled("", one).gateway.address(), None, "no endpoint is configured");
}

const HTTP: &str = "transport = \"http\"\nurl = \"https://example.com/mcp\"";

fn policy(more: &str, installation: &str) -> Policy {
    let plan = parse(&small(more, installation)).unwrap_or_else(|errors| panic!("{}", errors.render(false)));
    Policy::clone(&plan.instances[0].policy)
}

#[test]
fn a_mode_sets_defaults_that_single_keys_override() {
    let second = Duration::from_secs(1);
    let of = |more: &str| {
        let policy = policy(more, HTTP);
        (policy.reconnect, policy.health)
    };
    assert_eq!(of(""), (ReconnectPolicy::persistent(), HealthPolicy::persistent()));
    assert_eq!(of("[policy.reconnect]\nmode = \"persistent\""), of(""));
    let (reconnect, health) = of("[policy.reconnect]\nmode = \"bounded\"");
    assert_eq!((reconnect, health.clone()), (ReconnectPolicy::bounded(), HealthPolicy::bounded()));
    assert_eq!(
        (health.interval, health.timeout, health.on_degraded),
        (30 * second, 5 * second, DegradedAction::Reconnect)
    );

    let own = "[policy.reconnect]\nmode = \"bounded\"\nbackoff_min = \"2s\"\njitter_percent = 0\nattempts_max = 9\n\
               [policy.health]\non_degraded = \"warn\"\nthreshold = 2\ncheck = \"tools_list\"";
    let (reconnect, health) = of(own);
    let wanted = ReconnectPolicy {
        backoff_min: 2 * second,
        jitter_percent: 0,
        attempts_max: Some(9),
        ..ReconnectPolicy::bounded()
    };
    assert_eq!(reconnect, wanted);
    let (check, on_degraded) = (HealthCheck::ToolsList, DegradedAction::Warn);
    assert_eq!(health, HealthPolicy { check, on_degraded, threshold: 2, ..HealthPolicy::bounded() });
    assert_eq!(of("[policy.reconnect]\nmode = \"bounded\"\nattempts_max = \"off\"").0.attempts_max, None);
}

#[test]
fn a_mode_can_be_set_globally_per_team_or_per_installation() {
    let bounded = |attempts_max| ReconnectPolicy { attempts_max, ..ReconnectPolicy::bounded() };
    let all = "[policy.reconnect]\nmode = \"bounded\"\nattempts_max = 7\n[policy.health]\ncheck = \"tools_list\"";
    let of = |own: &str| policy(all, &format!("{HTTP}\n{own}"));
    assert_eq!(of("").reconnect, bounded(Some(7)));
    assert_eq!(of("policy.reconnect.attempts_max = 2").reconnect, bounded(Some(2)));
    // Repeating the mode of an outer tier does not reset its other keys.
    assert_eq!(of("policy.reconnect.mode = \"bounded\"").reconnect, bounded(Some(7)));
    let again = of("policy.reconnect = { mode = \"bounded\", backoff_min = \"2s\" }").reconnect;
    assert_eq!(again, ReconnectPolicy { backoff_min: Duration::from_secs(2), ..bounded(Some(7)) });
    let by_default = policy("policy.health.threshold = 9", &format!("{HTTP}\npolicy.reconnect.mode = \"persistent\""));
    assert_eq!(by_default.health.threshold, 9);
    // Another mode resets the keys of the mode but not the kind of health check.
    let persistent = of("policy.reconnect.mode = \"persistent\"");
    assert_eq!(persistent.reconnect, ReconnectPolicy::persistent());
    assert_eq!(persistent.health, HealthPolicy { check: HealthCheck::ToolsList, ..HealthPolicy::persistent() });
    let of_team = small("", HTTP).replace("slug = \"t\"", "slug = \"t\"\npolicy.reconnect.mode = \"bounded\"");
    assert_eq!(parse(&of_team).unwrap().instances[0].policy.reconnect, ReconnectPolicy::bounded());
}

#[test]
fn retries_and_connection_timeouts_are_read() {
    let text = "[policy.retry]\nattempts_max = 1\ndelays = [\"10ms\"]\n[policy.remote]\nconnect_timeout = \"1s\"\n\
                header_timeout = \"2s\"\nclose_timeout = \"0s\"\nserver_errors_max = 4";
    let Policy { retry, remote, .. } = policy(text, HTTP);
    assert_eq!((retry.attempts_max, retry.delays), (1, vec![Duration::from_millis(10)]));
    let second = Duration::from_secs(1);
    assert_eq!((remote.connect_timeout, remote.header_timeout), (second, 2 * second));
    assert_eq!((remote.close_timeout, remote.server_errors_max), (Duration::ZERO, 4));
}

#[test]
fn a_tier_overrides_a_bearer_token_in_any_spelling_of_the_header() {
    let header = |text: &str| {
        let plan = parse(text).unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        let spec = plan.instances.into_iter().next().unwrap().merge();
        let pairs = spec.headers.iter().map(|(name, value)| format!("{name}: {}", value.expose()));
        (pairs.collect::<Vec<_>>(), spec.missing, spec.mask.apply("alice-token-that-nobody-guesses search-token"))
    };
    let (headers, missing, masked) = header(&small("", &format!("{HTTP}\nbearer_token = \"env:ALICE_TOKEN\"")));
    assert_eq!(headers, ["Authorization: Bearer alice-token-that-nobody-guesses"]);
    assert_eq!((missing.len(), masked.as_str()), (0, "[secret] search-token"));

    let file = small("", &format!("{HTTP}\nheaders = {{ authorization = \"Basic x\" }}"));
    let of_user = "slug = \"u\"\nservers.i.bearer_token = \"env:SEARCH_TOKEN\"";
    let (headers, ..) = header(&file.replace("slug = \"u\"", of_user));
    assert_eq!(headers, ["authorization: Bearer search-token"]);

    let asked = small("", &format!("{HTTP}\nuser_required = [\"bearer_token\"]"));
    assert_eq!(header(&asked).1, ["Authorization"]);
    let (headers, missing, _) = header(&asked.replace("slug = \"u\"", of_user));
    assert_eq!((headers, missing.len()), (vec!["Authorization: Bearer search-token".to_owned()], 0));
}

#[test]
fn each_tier_can_set_the_address_of_a_health_check() {
    let get = "[policy.health]\ncheck = \"get\"";
    let address = |text: &str| {
        let plan = parse(text).unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        let ServerTarget::Remote { health_url, .. } = &plan.instances[0].target else { panic!() };
        (health_url.clone().unwrap_or_default(), plan.warnings)
    };
    let own = small(get, &format!("{HTTP}\nhealth_url = \"https://example.com/health?deep=1#part\""));
    assert_eq!(address(&own), ("https://example.com/health?deep=1".to_owned(), Vec::new()));
    let of_user = own.replace("slug = \"u\"", "slug = \"u\"\nservers.i.health_url = \"https://example.com/u\"");
    assert_eq!(address(&of_user).0, "https://example.com/u");
    let template = format!("{get}\n[servers.s]\n{HTTP}\nhealth_url = \"https://example.com/template\"");
    assert_eq!(address(&small(&template, "")).0, "https://example.com/template");
    let of_team = small(&template, "team.health_url = \"https://example.com/team\"");
    assert_eq!(address(&of_team).0, "https://example.com/team");
    // A local server needs no address.
    parse(&small(get, "command = \"x\"")).unwrap();

    let (_, warnings) = address(&small("", &format!("{HTTP}\nhealth_url = \"https://example.com/\"")));
    assert!(matches!(&warnings[..], [warning] if warning.contains("has no effect without check")), "{warnings:?}");
}

#[test]
fn credentials_over_unencrypted_http_cause_a_warning() {
    let warnings = |url: &str, more: &str| {
        let text =
            small("[policy.health]\ncheck = \"ping\"", &format!("transport = \"http\"\nurl = \"{url}\"\n{more}"));
        parse(&text).unwrap_or_else(|errors| panic!("{}", errors.render(false))).warnings
    };
    let token = "bearer_token = \"env:ALICE_TOKEN\"";
    for url in ["https://e.com/", "http://localhost:1/", "http://127.9.9.9/", "http://[::1]:80/", "http://a.localhost/"]
    {
        assert_eq!(warnings(url, token), [] as [&str; 0]);
    }
    assert_eq!(warnings("http://e.com/", ""), [] as [&str; 0], "no credential is sent");
    let plain = "may send a secret unencrypted: its `url` is http, not https";
    for (url, more) in
        [("http://e.com/", token), ("http://e.com/?api_key=x", ""), ("http://10.0.0.1/", "headers.A = \"b\"")]
    {
        let warnings = warnings(url, more);
        assert!(matches!(&warnings[..], [warning] if warning.contains(plain)), "{url}: {warnings:?}");
    }
    let text =
        small("[policy.health]\ncheck = \"get\"", &format!("{HTTP}\n{token}\nhealth_url = \"http://status.com/\""));
    let warnings = parse(&text).unwrap().warnings;
    let [plain, foreign] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(foreign.ends_with("sends its credentials to the host of its `health_url` as well"), "{foreign}");
    assert!(plain.ends_with("its `health_url` is http, not https"), "{plain}");
}

#[test]
fn an_empty_file_gives_the_defaults() {
    let plan = parse("").unwrap();
    assert_eq!((plan.name.as_str(), plan.profile), ("mcp-satellite", Profile::Development));
    assert_eq!((plan.gateway.address(), plan.gateway.listen), (None, ListenSetting::DefaultAddress));
    assert_eq!(plan.sink, SinkPlan::Journal);
    assert_eq!((plan.start_permits, plan.instances.len(), plan.warnings.len()), (None, 0, 0));
}

#[test]
fn limits_of_the_journal_are_read_and_validated() {
    assert_eq!(parse("").unwrap().journal, JournalLimits::default());
    let text = "[journal]\nevents_age_max = \"7d\"\nsize_max = \"64MiB\"\nserver_logs_max = 1000\nrequest_logs_max = 0\nlogs_age_max = \"12h\"";
    let expected = JournalLimits {
        events_age_max: Duration::from_secs(7 * 24 * 3600),
        size_max: 64 << 20,
        server_logs_max: 1000,
        request_logs_max: 0,
        logs_age_max: Duration::from_secs(12 * 3600),
    };
    assert_eq!(parse(text).unwrap().journal, expected);
    for (text, message) in [
        ("size_max = \"64KiB\"", "`size_max` is too small for the data that must be kept"),
        ("events_age_max = \"0s\"", "`events_age_max` must not be zero"),
        ("logs_age_max = 7", "`logs_age_max` must be a duration"),
        ("server_logs_max = -1", "`server_logs_max` is -1"),
        ("keep = 3", "unknown key `keep` in `journal`"),
    ] {
        let errors = messages(&parse(&format!("[journal]\n{text}")).unwrap_err());
        assert!(errors.len() == 1 && errors[0].contains(message), "{errors:?}");
    }
    // The sink does not change the limits of the journal.
    assert_eq!(parse("[events]\nsink = \"journal\"").unwrap().sink, SinkPlan::Journal);
    assert_eq!(messages(&parse("[events]\nkeep = 3").unwrap_err()), ["`keep` has no effect with this sink"]);
    let plan = parse("[events]\nsink = \"file\"").unwrap();
    assert_eq!(plan.sink, SinkPlan::File { rotate_bytes: 64 * 1024 * 1024, keep: 8 });
}

#[test]
fn every_error_of_a_file_is_reported_with_its_position() {
    let errors = parse(BAD).unwrap_err();
    let drawn: Vec<_> = errors
        .items()
        .into_iter()
        .map(|item| format!("{}:{} {} -- {}", item.line, item.column, item.message, item.hint))
        .collect();
    insta::assert_snapshot!("errors_as_a_list", drawn.join("\n"));
    assert_eq!(errors.count(), drawn.len());
    insta::assert_snapshot!("errors_as_drawn", errors.render(false));
}

#[test]
fn a_syntax_error_states_the_position_without_values() {
    let errors = parse("[gateway]\nlisten = \"127.0.0.1:1\"\n\n[events]\ntoken = hunter2\n").unwrap_err();
    assert_eq!((errors.count(), errors.items()[0].line, errors.items()[0].column), (1, 5, 9));
    insta::assert_snapshot!("a_syntax_error", errors.render(false));
}

#[test]
fn a_long_line_is_cut_around_the_marker_and_colours_change_no_text() {
    let line = format!("env = {{ FIRST = \"{long}\", \"A=B\" = \"x\", LAST = \"{long}\" }}", long = "x".repeat(300));
    let errors = parse(&small("", &line)).unwrap_err();
    let plain = errors.render(false);
    assert!(plain.lines().all(|line| line.chars().count() <= 110), "{plain}");
    assert!(plain.contains("\"A=B\" = ") && plain.contains("^^^") && plain.contains("help: use a name"), "{plain}");
    let styled = errors.render(true);
    assert!(styled.contains("\u{1b}["), "{styled:?}");
    let parts = styled.split("\u{1b}[").enumerate();
    let text: String = parts.map(|(at, part)| if at == 0 { part } else { part.split_once('m').unwrap().1 }).collect();
    assert_eq!(text, plain);
}

#[test]
fn names_of_hosts_may_have_letters_of_every_language() {
    let plain = |text: &str| url::Url::parse(text).unwrap().host_str().unwrap().to_owned();
    assert_eq!(plain("https://B\u{dc}CHER.example/mcp"), "xn--bcher-kva.example");
    assert_eq!(plain("https://\u{4f8b}\u{3048}.jp/"), plain("https://xn--r8jz45g.jp/"));
    assert!(url::Url::parse("https://xn--a.example/").is_err());
}

#[test]
fn neither_plans_nor_errors_contain_secrets() {
    let plan = parse(FULL).unwrap();
    let merged: Vec<_> = plan.instances.iter().cloned().map(InstanceConfig::merge).collect();
    let errors = parse(BAD).unwrap_err();
    let typed_nowhere_else = small("", "env = { A = [\"hunter2\"] }\nheaders = \"hunter2\"\nport = 5 # args");
    let more = parse(&typed_nowhere_else).unwrap_err();
    let remote = |more: &str| parse(&small("", &format!("{HTTP}\n{more}"))).unwrap_err();
    let bearer = remote("bearer_token = \"hunter2\"");
    let lines = remote("bearer_token = \"env:LINES\"");
    let twice = remote("bearer_token = \"env:TWICE\"");
    let health = remote("health_url = \"https://hunter2:hunter2@e/?key=hunter2\"");
    let query = remote("health_url = \"https://e/?key=hunter2\"");
    assert_eq!(messages(&query), ["`health_url` seems to contain a secret"]);
    let broken = parse("[[teams]]\nid = \"x\"\nenv = { A = \"hunter2\" \"hunter2\" }").unwrap_err();
    let json =
        parse_json(r#"{"mcpServers": {"a": {"command": {}, "env": {"A": "hunter2", "B": ["hunter2"]}}}}"#).unwrap();
    assert_eq!((json.instances.len(), json.warnings.len()), (0, 1));
    let left_out = json.warnings.concat();
    let broken_json = parse_json("{\"mcpServers\": {\"a\": {\"env\": {\"A\": \"hunter2\" \"hunter2\"}}}}").unwrap_err();
    let all = [&errors, &more, &bearer, &lines, &twice, &health, &query, &broken, &broken_json];
    let drawn: Vec<_> = all.iter().map(|errors| format!("{} {errors:?} {errors}", errors.render(false))).collect();
    let text = format!("{plan:?} {plan:#?} {merged:?} {left_out} {json:?} {}", drawn.concat());
    for secret in SECRETS {
        // `1234` is also part of other numbers.
        let secret = if secret == "1234" { "\"1234\"" } else { secret };
        assert!(!text.contains(secret), "{secret}");
    }
}

#[test]
fn referenced_required_and_secret_looking_values_are_masked() {
    let plan = parse(FULL).unwrap();
    let [alice, _, search, _] = &plan.instances[..] else { panic!() };
    assert!(alice.team_tier.env["GREETING"].secret && alice.user_tier.env["PIN"].secret);
    assert!(!alice.server_tier.env["LOG_LEVEL"].secret && !alice.team_tier.env["ROOT"].secret);
    assert!(search.server_tier.query["api_key"].secret && !search.server_tier.query["tenant"].secret);
    assert!(search.server_tier.headers["X-Client"].secret, "every header value is a secret");
}

#[test]
fn a_reference_in_args_is_rejected_in_every_tier() {
    for (text, line) in [
        (small("", "command = \"npx\"\nargs = [\"-y\", \"env:ALICE_TOKEN\"]"), 12),
        (small("", "command = \"npx\"\nargs = [\"--token=file:token.txt\"]"), 12),
        (small("", "command = \"npx\"\n[teams.installations.team]\nargs = [\"env:ALICE_TOKEN\"]"), 13),
        (small("[servers.s]\ncommand = \"npx\"\nargs = [\"env:ALICE_TOKEN\"]", ""), 3),
    ] {
        let items = parse(&text).unwrap_err().items();
        assert_eq!(items.len(), 1, "{items:?}");
        assert_eq!((items[0].line, items[0].message.as_str()), (line, "`args` refers to a secret"));
        assert!(items[0].hint.contains("visible to every process on the machine; pass the secret in `env`"));
    }
}

#[test]
fn invalid_values_are_errors() {
    let http = "transport = \"http\"\nurl = \"https://example.com\"";
    for (more, installation, message) in [
        ("", "", "installation `i` has no `command`"),
        ("", "transport = \"sse\"", "installation `i` has no `url`"),
        ("", "transport = \"http\"\nurl = \"ftp://example.com\"", "`url` is neither http nor https"),
        ("", "transport = \"http\"\nurl = \"nonsense\"", "`url` is not a URL: relative URL without a base"),
        ("", "command = \"npx -y server\"", "`command` is a command line, not a program"),
        ("", "command = \"\"", "`command` is empty"),
        ("", "command = \"x\"\nheaders = { A = \"b\" }", "installation `i` is a stdio server with `headers`"),
        ("", &format!("{http}\nenv = {{ A = \"b\" }}"), "installation `i` is a remote server with `env`"),
        ("", &format!("{http}\nheaders = {{ \"A B\" = \"b\" }}"), "`A B` is not a valid name for a header"),
        ("", &format!("{http}\nheaders = {{ A = \"b\\nc\" }}"), "the value of the header `A` cannot be sent"),
        ("", "command = \"x\"\nkeep = \"always\"", "`always` is not a valid value for `keep`"),
        ("", "command = \"x\"\nprotocol = \"2025-06-18\"", "`2025-06-18` is not a valid value for `protocol`"),
        (
            "",
            "transport = \"sse\"\nurl = \"https://example.com\"\nprotocol = \"2026-07-28\"",
            "installation `i` uses the older HTTP+SSE, which does not support `2026-07-28`",
        ),
        (
            "[servers.s]\ntransport = \"sse\"\nurl = \"https://example.com\"",
            "protocol = \"2026-07-28\"",
            "installation `i` uses the older HTTP+SSE, which does not support `2026-07-28`",
        ),
        ("", "command = \"x\"\nusers = []", "`users` is empty"),
        ("", "command = \"x\"\nuser_required = [\"\"]", "`user_required` has an empty name"),
        ("", "command = \"x\"\nenv = { A = \"\\u0000\" }", "the value of `A` contains a zero byte"),
        (
            "[servers.s]\ncommand = \"a\"",
            "command = \"b\"",
            "installation `i` and its template `s` both have a `command`",
        ),
        ("[servers.ss]\ncommand = \"a\"", "", "installation `i` has no `command`"),
        (
            "[policy.session]\nrequest_timeout = \"10m\"",
            "command = \"x\"",
            "`request_timeout` is longer than `request_timeout_max`",
        ),
        ("[policy.reconnect]\nbackoff_max = \"1ms\"", "command = \"x\"", "`backoff_min` is longer than `backoff_max`"),
        ("[policy.reconnect]\nmode = \"endless\"", "command = \"x\"", "`endless` is not a valid value for `mode`"),
        (
            "[policy.reconnect]\njitter_percent = 101",
            "command = \"x\"",
            "`jitter_percent` is 101, which is more than 100 percent",
        ),
        (
            "[policy.reconnect]\njitter_percent = 300",
            "command = \"x\"",
            "`jitter_percent` is 300, which is more than 100 percent",
        ),
        ("[policy.reconnect]\njitter_percent = -1", "command = \"x\"", "`jitter_percent` is -1, which is too small"),
        ("[policy.reconnect]\nattempts_max = 0", "command = \"x\"", "`attempts_max` is 0, which is too small"),
        (
            "[policy.reconnect]\nattempts_max = \"none\"",
            "command = \"x\"",
            "`none` is not a valid value for `attempts_max`",
        ),
        (
            "[policy.reconnect]\nmode = \"bounded\"\nbackoff_min = \"1m\"",
            "command = \"x\"",
            "`backoff_min` is longer than `backoff_max`",
        ),
        ("[policy.health]\ncheck = \"pong\"", "command = \"x\"", "`pong` is not a valid value for `check`"),
        ("[policy.health]\non_degraded = \"die\"", "command = \"x\"", "`die` is not a valid value for `on_degraded`"),
        ("[policy.health]\nthreshold = 0", "command = \"x\"", "`threshold` is 0, which is too small"),
        ("[policy.retry]\nattempts_max = 0", "command = \"x\"", "`attempts_max` is 0, which is too small"),
        ("[policy.retry]\ndelays = []", "command = \"x\"", "`delays` is empty"),
        (
            "[policy.remote]\nheader_timeout = \"2s\"",
            "command = \"x\"",
            "`connect_timeout` is longer than `header_timeout`, which includes it",
        ),
        ("[policy.remote]\nconnect_timeout = \"0s\"", "command = \"x\"", "`connect_timeout` must not be zero"),
        (
            "[policy.health]\ncheck = \"get\"",
            http,
            "installation `i` has check = \"get\" in its policy.health and no `health_url`",
        ),
        (
            "",
            "command = \"x\"\nbearer_token = \"env:ALICE_TOKEN\"",
            "installation `i` is a stdio server with `bearer_token`",
        ),
        ("", "command = \"x\"\nhealth_url = \"https://e/\"", "installation `i` is a stdio server with `health_url`"),
        (
            "",
            &format!("{http}\nbearer_token = \"hunter2\""),
            "the `bearer_token` of installation `i` is written in plain text",
        ),
        ("", &format!("{http}\nbearer_token = \"env:BLANK\""), "the `bearer_token` of installation `i` is empty"),
        (
            "",
            &format!("{http}\nbearer_token = \"env:TWICE\""),
            "the `bearer_token` of installation `i` begins with `Bearer`",
        ),
        ("", &format!("{http}\nbearer_token = \"env:LINES\""), "the `bearer_token` of installation `i` cannot be sent"),
        (
            "",
            &format!("{http}\nbearer_token = \"env:ALICE_TOKEN\"\nheaders = {{ authorization = \"x\" }}"),
            "installation `i` has a `bearer_token` and a header `Authorization`, which are the same",
        ),
        ("", &format!("{http}\nheaders = {{ A = \"b\", a = \"c\" }}"), "the header `a` is given twice"),
        (
            "",
            &format!("{http}\nheaders = {{ Mcp-Session-Id = \"b\" }}"),
            "the header `Mcp-Session-Id` cannot be configured: the satellite sets it",
        ),
        (
            "",
            &format!("{http}\nheaders = {{ Proxy-Authorization = \"b\" }}"),
            "the header `Proxy-Authorization` cannot be configured: the satellite sets it",
        ),
        (
            "",
            &format!("{http}\nheaders = {{ Keep-Alive = \"b\" }}"),
            "the header `Keep-Alive` cannot be configured: the satellite sets it",
        ),
        (
            "",
            &format!("{http}\nheaders = {{ trailer = \"b\" }}"),
            "the header `trailer` cannot be configured: the satellite sets it",
        ),
        ("", &format!("{http}\nhealth_url = \"nonsense\""), "`health_url` is not a URL: relative URL without a base"),
        ("", &format!("{http}\nhealth_url = \"https://a:b@e/\""), "`health_url` contains a user name or a password"),
        ("[policy.idle]\nsweep = \"0s\"", "command = \"x\"", "`sweep` must not be zero"),
        ("", "command = \"x\"\nkeep = \"lasy\"", "`lasy` is not a valid value for `keep`"),
        ("", "command = \"x\"\nupdate = \"roling\"", "`roling` is not a valid value for `update`"),
        ("[policy.watchdog]\nsilence = \"0s\"", "command = \"x\"", "`silence` must not be zero"),
        ("[policy.session]\nexit_drain = \"2000 years\"", "command = \"x\"", "`exit_drain` is longer than a year"),
        (
            "[policy.session]\nline_max = 2147483648",
            "command = \"x\"",
            "`policy.session.line_max` is larger than 1 GiB",
        ),
        ("[events]\nqueue_max = 1099511627776", "command = \"x\"", "`events.queue_max` is larger than a million"),
        ("[policy.start]\npermits = 0", "command = \"x\"", "`permits` is 0, which is too small"),
        ("[events]\nsink = \"http\"", "command = \"x\"", "the http sink has no `url`"),
        ("[events]\nsink = \"stdout\"\nkeep = 2", "command = \"x\"", "`keep` has no effect with this sink"),
        (
            "[events]\nsink = \"http\"\nurl = \"https://e/?api_key=abc\"",
            "command = \"x\"",
            "the URL of the sink seems to contain a secret",
        ),
        (
            "[events]\nqueue_max = 10",
            "command = \"x\"",
            "`batch_max` is larger than `queue_max`: a full batch could never be gathered",
        ),
        (
            "[events]\nsink = \"http\"\nurl = \"https://e/\"\ntoken = \"env:BLANK\"",
            "command = \"x\"",
            "the token is empty",
        ),
        (
            "[satellite]\nprofile = \"production\"",
            "command = \"/tmp/npx\"",
            "the command `/tmp/npx` is not allowed in the production profile",
        ),
    ] {
        let result = parse(&small(more, installation));
        assert_eq!(result.map_or_else(|errors| messages(&errors), |plan| plan.warnings), [message]);
    }
}

#[test]
fn keys_without_effect_cause_a_warning() {
    let http = "transport = \"http\"\nurl = \"https://example.com\"";
    for (installation, message) in [
        (
            "command = \"x\"\nkeep = \"always_on\"\n[teams.installations.policy.idle]\nidle = \"1m\"".to_owned(),
            "installation `i` is `always_on`, so its [policy.idle] has no effect",
        ),
        (
            format!("{http}\nkeep = \"lazy\""),
            "installation `i` is a remote server: `lazy` has an effect only on child processes",
        ),
        (
            format!("{http}\nupdate = \"rolling\""),
            "installation `i` is a remote server: `rolling` has an effect only on child processes",
        ),
        (
            format!("{http}\npolicy.restart.max_crashes = 9"),
            "installation `i` is a remote server, so its [policy.restart] has no effect",
        ),
        (
            "command = \"x\"\npolicy.health.threshold = 9".to_owned(),
            "installation `i` is a stdio server, so its [policy.health] has no effect",
        ),
    ] {
        let warnings = parse(&small("", &installation)).unwrap().warnings;
        assert!(matches!(&warnings[..], [warning] if warning.ends_with(message)), "{warnings:?}");
    }
}

#[test]
fn production_allows_only_known_and_listed_commands() {
    let production = "[satellite]\nprofile = \"production\"\nallowed_commands = [\"/opt/server\"]";
    for command in ["npx", "deno", "/opt/server"] {
        parse(&small(production, &format!("command = \"{command}\""))).unwrap();
    }
    parse(&small(production, "command = \"bash\"")).unwrap_err();
    parse(&small("", "command = \"bash\"")).unwrap();
}

#[test]
fn ambiguous_instance_names_are_an_error() {
    let team = |slug: &str, user: &str| {
        format!(
            "[[teams]]\nid = \"{slug}\"\nslug = \"{slug}\"\n[[teams.users]]\nid = \"u\"\nslug = \"{user}\"\n\
             [[teams.installations]]\nid = \"i\"\nserver = \"s\"\ncommand = \"x\"\n"
        )
    };
    parse(&(team("a", "b") + &team("c", "b"))).unwrap();
    let errors = parse(&(team("a-b", "c") + &team("a", "b-c"))).unwrap_err();
    assert_eq!(messages(&errors), ["two instances would be named `s-a-b-c-i`"]);
}

#[test]
fn two_users_with_one_token_are_an_error() {
    let text = "[[teams]]\nid = \"t\"\nslug = \"t\"\n[[teams.users]]\nid = \"a\"\nslug = \"a\"\ntoken = \
                \"env:ALICE_TOKEN\"\n[[teams.users]]\nid = \"b\"\nslug = \"b\"\ntoken = \"env:ALICE_TOKEN\"\n";
    assert_eq!(messages(&parse(text).unwrap_err()), ["the token of the user `b` is also the token of another user"]);
}

/// One line per instance with the fields that clients write differently.
fn summary(plan: &Plan) -> Vec<String> {
    let line = |config: &InstanceConfig| {
        let spec = config.clone().merge();
        let target = match &spec.target {
            ServerTarget::Stdio { command, .. } => command.clone(),
            ServerTarget::Remote { url, .. } => url.clone(),
        };
        let values = |tier: &BTreeMap<String, _>| exposed(tier.values()).join(",");
        let (env, headers, query) = (values(&spec.env), values(&spec.headers), values(&spec.query));
        let (name, transport, args) = (&spec.name, spec.transport(), exposed(&spec.args).join(" "));
        format!("{name} {transport} {target} [{args}] [{env}] [{headers}] [{query}]")
    };
    plan.instances.iter().map(line).collect()
}

#[test]
fn the_mcp_json_formats_of_claude_cursor_and_vs_code_are_read() {
    let claude = parse_json(include_str!("fixtures/config/claude_desktop_config.json")).unwrap();
    assert_eq!(
        summary(&claude),
        [
            "filesystem-local-me-filesystem stdio npx [-y @modelcontextprotocol/server-filesystem /srv] [] [] []",
            "github-local-me-github stdio uvx [mcp-server-github] [search-token] [] []",
            "remote-local-me-remote http https://mcp.example.com/mcp [] [] [Bearer search-token] []",
        ]
    );
    assert_eq!((claude.teams, claude.users), (1, 1));
    let cursor = parse_json(include_str!("fixtures/config/cursor.json")).unwrap();
    assert_eq!(
        summary(&cursor),
        [
            "linear-local-me-linear sse https://mcp.linear.app/sse [] [] [] []",
            "search-local-me-search http https://search.example.com/mcp [] [] [Bearer literal] [acme]",
        ]
    );
    assert_eq!(
        cursor.warnings,
        [
            "mcp.json:6:6: `search`: `autoApprove` (tools that run without confirmation) is not used",
            "mcp.json:12:6: `old` is disabled and left out",
        ]
    );
    let code = parse_json(include_str!("fixtures/config/vscode.json")).unwrap();
    assert_eq!(
        summary(&code),
        [
            "playwright-local-me-playwright stdio npx [@playwright/mcp@latest] [] [] []",
            "remote-local-me-remote sse https://example.com/events [] [] [] []",
        ]
    );
}

#[test]
fn the_transport_of_an_mcp_json_is_recognized_in_every_spelling() {
    for (given, transport) in [
        (r#""url": "https://e.com/mcp""#, "http"),
        (r#""url": "https://e.com/sse/?a=b""#, "sse"),
        (r#""type": "http", "url": "https://e.com/sse""#, "http"),
        (r#""type": "sse", "url": "https://e.com/mcp""#, "sse"),
        (r#""type": "streamable-http", "url": "https://e.com/sse""#, "http"),
        (r#""type": "streamableHttp", "url": "https://e.com/sse""#, "http"),
        (r#""transport": "sse", "url": "https://e.com/mcp""#, "sse"),
        (r#""transport": "streamable_http", "url": "https://e.com/sse""#, "http"),
    ] {
        let plan = parse_json(&format!("{{\"mcpServers\": {{\"a\": {{{given}}}}}}}")).unwrap();
        assert_eq!((plan.instances[0].clone().merge().transport(), plan.warnings.len()), (transport, 0), "{given}");
    }
}

#[test]
fn headers_that_the_satellite_sets_are_ignored_with_a_warning() {
    let text = r#"{"mcpServers": {"a": {"url": "https://e.com/mcp", "headers": {
        "Accept": "application/json", "Content-Type": "application/json", "Accept-Encoding": "br", "X-Team": "acme"}}}}"#;
    let plan = parse_json(text).unwrap();
    assert_eq!(summary(&plan), ["a-local-me-a http https://e.com/mcp [] [] [acme] []"]);
    assert_eq!(
        plan.warnings,
        [
            "mcp.json:1:18: `a`: the header `Accept` is not used: the satellite sets it",
            "mcp.json:1:18: `a`: the header `Content-Type` is not used: the satellite sets it",
            "mcp.json:1:18: `a`: the header `Accept-Encoding` is not used: the satellite sets it",
        ]
    );
}

#[test]
fn only_an_mcp_json_that_cannot_be_parsed_is_an_error() {
    for (text, place) in
        [("{\n \"mcpServers\": {\"a\" {}}}", (2, 21)), ("{\"mcpServers\": {\"a\": {", (1, 23)), ("nonsense", (1, 1))]
    {
        let items = parse_json(text).unwrap_err().items();
        assert_eq!((items.len(), items[0].line, items[0].column), (1, place.0, place.1), "{text}: {items:?}");
    }
}

#[test]
fn a_server_that_cannot_be_used_is_left_out_with_a_warning() {
    let good = r#""good": {"command": "npx", "args": ["-y"]}"#;
    for (entry, warning) in [
        (r#""a": {"args": []}"#, "`a` is left out: neither `command` nor `url` is set; add one of them"),
        (r#""a": 5"#, "`a` is left out: the entry is a number, not an object"),
        (r#""a": {"type": "websocket", "url": "wss://e.com"}"#, "`a` is left out: WebSocket is not a transport"),
        (
            r#""a": {"command": "x", "args": ["${command:pick}"]}"#,
            "`a` is left out: `args` contains a variable `${command:…}`, which is not supported",
        ),
        (r#""a": {"command": "x", "env": {"": "1"}}"#, "`a` is left out: `` is not a valid name"),
        (r#""a": {"url": "https://u:hunter2@e.com/mcp"}"#, "`a` is left out: `url` contains a user name or a password"),
        (r#""good": {"command": "y"}"#, "`good` is left out: the name occurs again later in the file"),
        (
            r#""a": {"command": "x", "enabledTools": ["git/*"]}"#,
            "`a`: the selection of tools is not used, because `git/*`",
        ),
        (r#""My Server": {"command": "x"}"#, "`My Server` has the id `My-Server`"),
    ] {
        let plan = parse_json(&format!("{{\"mcpServers\": {{{entry}, {good}}}}}")).unwrap();
        let names: Vec<_> = plan.instances.iter().map(|config| config.server.as_str()).collect();
        assert!(names.ends_with(&["good"]), "{entry}: {names:?}");
        assert!(plan.warnings.iter().any(|text| text.contains(warning)), "{entry}: {:?}", plan.warnings);
        assert!(!format!("{plan:?}").contains("hunter2"));
    }
    let same = r#"{"servers": {"My Server": {"command": "x"}, "My/Server": {"command": "y"}}}"#;
    let plan = parse_json(same).unwrap();
    assert_eq!(plan.instances.len(), 1);
    let warning =
        "mcp.json:1:46: `My/Server` is left out: another server of the file has the id `My-Server`; rename it";
    assert!(plan.warnings.contains(&warning.to_owned()), "{:?}", plan.warnings);
    let plan = parse_json("{}").unwrap();
    assert!(plan.instances.is_empty() && plan.warnings[0].contains("contains no servers"), "{:?}", plan.warnings);
}

#[test]
fn variables_of_an_mcp_json_are_replaced_or_become_values_of_the_user() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("project/.vscode/mcp.json");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file.parent().unwrap().join("dev.env"), "export FROM_FILE='file value'\nLEVEL=file\n").unwrap();
    let text = r#"{
        "inputs": [
            {"type": "promptString", "id": "api key", "description": "The key of the service", "password": true},
            {"type": "promptString", "id": "region", "description": "Region", "default": "eu"}
        ],
        "servers": {
            "a": {
                "command": "${workspaceFolder}/server",
                "args": ["--all", "${env:HOME}", "${input:region}"],
                "env": {"LEVEL": "info", "KEY": "k-${input:api key}", "T": "${SEARCH_TOKEN}", "D": "${NO:-d}", "U": "${NO}"},
                "cwd": "${userHome}/x",
                "envFile": "${workspaceFolder}/.vscode/dev.env"
            },
            "b": {"command": "x", "envFile": "missing.env"},
            "c": {"command": "x", "args": ["--token", "${SEARCH_TOKEN}", "--key=ghp_0123456789abcdefABCD"]}
        }
    }"#;
    let environment = |name: &str| if name == "HOME" { Some("/home/me".to_owned()) } else { environment(name) };
    let name = file.to_str().unwrap();
    let plan = config::parse_mcp_json(name, text, &config::PlanRestrictions::default(), &environment).unwrap();
    let project = folder.path().join("project").display().to_string();
    let [a, b, c] = &plan.instances[..] else { panic!("{:?}", plan.warnings) };

    let spec = a.clone().merge();
    assert_eq!(spec.missing, ["api-key", "NO"]);
    let ServerTarget::Stdio { command, cwd } = &spec.target else { panic!() };
    assert_eq!((command.as_str(), cwd.as_deref()), (&*format!("{project}/server"), Some("/home/me/x")));
    assert_eq!(exposed(&spec.args), ["--all", "/home/me", "eu"]);
    assert_eq!((spec.env["LEVEL"].expose(), spec.env["FROM_FILE"].expose()), ("info", "file value"));
    assert_eq!((spec.env["T"].expose(), spec.env["D"].expose()), ("search-token", "d"));
    let declared = &a.inputs.declared;
    assert_eq!(declared["api-key"].description.as_deref(), Some("The key of the service"));
    assert!(!declared["api-key"].is_public && declared["region"].is_public);
    assert_eq!(spec.mask.apply("search-token file value /home/me"), "[secret] [secret] /home/me");
    assert!(plan.secret_variables.contains("SEARCH_TOKEN") && !plan.secret_variables.contains("HOME"));

    let spec = b.clone().merge();
    assert!(matches!(&spec.problems[..], [one] if one.contains("cannot read the env_file `missing.env`")), "{spec:?}");
    let spec = c.clone().merge();
    assert_eq!(exposed(&spec.args), ["--token", "search-token", "--key=ghp_0123456789abcdefABCD"]);
    assert_eq!(spec.mask.apply("ghp_0123456789abcdefABCD search-token --token"), "[secret] [secret] --token");
    let warning = "`c`: `args` contains a secret or a variable, which every process on the machine can read";
    assert!(plan.warnings.iter().any(|text| text.ends_with(warning)), "{:?}", plan.warnings);
}

#[test]
fn variables_are_replaced_in_every_text_of_a_server() {
    let plan = parse(&small(
        "",
        "command = \"${env:HOME_OF_TOOLS:-/opt}/tool\"\ncwd = \"/srv/${value:project}\"\nsecret_args = true\n\
         args = [\"--key=${env:SEARCH_KEY}\", \"--token=env:SEARCH_TOKEN\", \"$${env:A}\", \"${value:project}\"]\n\
         [teams.installations.env]\nURL = \"db://u:${file:hunter}@${env:UNSET_HOST}/\"\nEMPTY = \"${env:BLANK:-x}\"\n\
         [teams.installations.values.project]\ndescription = \"The project\"\nsecret = false\n",
    ))
    .unwrap();
    let mut config = plan.instances[0].clone();
    let spec = config.clone().merge();
    assert_eq!(spec.missing, ["project", "UNSET_HOST"]);
    assert!(matches!(&spec.problems[..], [one] if one.contains("cannot read the file `hunter`")), "{spec:?}");
    config.inputs.given =
        [("project", "p1"), ("UNSET_HOST", "db.example.com")].map(|(k, v)| (k.to_owned(), v.into())).into();
    let spec = config.merge();
    let ServerTarget::Stdio { command, cwd } = &spec.target else { panic!() };
    assert_eq!((command.as_str(), cwd.as_deref(), spec.missing.len()), ("/opt/tool", Some("/srv/p1"), 0));
    assert_eq!(exposed(&spec.args), ["--key=search-key", "--token=search-token", "${env:A}", "p1"]);
    assert_eq!((spec.env["EMPTY"].expose(), spec.env["URL"].expose()), ("x", "db://u:@db.example.com/"));
    assert_eq!(spec.mask.apply("search-key db.example.com /srv/p1"), "[secret] [secret] /srv/p1");
}

#[test]
fn variables_in_the_url_of_a_remote_server_are_masked_and_checked() {
    let remote = |url: &str| parse(&small("", &format!("transport = \"http\"\nurl = \"{url}\"")));
    let spec = |url: &str, given: &[(&str, &str)]| {
        let mut config = remote(url).unwrap_or_else(|errors| panic!("{errors:?}")).instances.remove(0);
        config.inputs.given = given.iter().map(|(key, text)| ((*key).to_owned(), (*text).into())).collect();
        config.merge()
    };
    let known = spec("https://e.com/${env:SEARCH_TOKEN}/mcp?key=${env:SEARCH_KEY}&tenant=a", &[]);
    let ServerTarget::Remote { url, .. } = &known.target else { panic!() };
    assert_eq!((url.as_str(), known.query["key"].expose()), ("https://e.com/search-token/mcp", "search-key"));
    assert_eq!(known.mask.apply(url), "https://e.com/[secret]/mcp");
    assert_eq!(known.mask.apply("search-key"), "[secret]");

    let url = "https://${value:HOST}/mcp?tenant=a%20b&key=k-${value:KEY}-e&last=1#x";
    assert_eq!(spec(url, &[]).missing, ["HOST", "KEY"]);
    let given = spec(url, &[("HOST", "e.com:8443"), ("KEY", "hush-key")]);
    let ServerTarget::Remote { url, .. } = &given.target else { panic!() };
    assert!(given.is_complete() && url == "https://e.com:8443/mcp", "{given:?}");
    let query: Vec<_> = given.query.iter().map(|(name, value)| (name.as_str(), value.expose())).collect();
    assert_eq!(query, [("key", "k-hush-key-e"), ("last", "1"), ("tenant", "a b")]);
    for (url, message) in [
        ("ftp://${value:HOST}/", "`url` is neither http nor https"),
        ("https://u:p@${value:HOST}/", "`url` contains a user name or a password"),
        ("https://e.com/?${value:QUERY}", "a variable in the query of `url` has no name"),
        ("https://e.com/${value:a b}", "the variable `${value:…` is not valid"),
    ] {
        assert_eq!(messages(&remote(url).unwrap_err()), [message]);
    }
}

#[test]
fn variables_in_args_require_secret_args_unless_they_are_public() {
    for args in ["${env:SEARCH_KEY}", "--x=${value:KEY}", "${file:x}"] {
        let errors = parse(&small("", &format!("command = \"x\"\nargs = [\"{args}\"]"))).unwrap_err();
        assert_eq!(messages(&errors), ["`args` refers to a secret"], "{args}");
        parse(&small("", &format!("command = \"x\"\nargs = [\"{args}\"]\nsecret_args = true"))).unwrap();
    }
    let public =
        "command = \"x\"\nargs = [\"${env:PATH:-p}\", \"${value:KEY}\"]\nvalues = { KEY = { secret = false } }";
    parse(&small("", public)).unwrap();
    let template = "[servers.s]\ncommand = \"x\"\nsecret_args = true";
    let added = parse(&small(template, "args = [\"env:SEARCH_KEY\"]")).unwrap();
    assert_eq!(exposed(&added.instances[0].clone().merge().args), ["search-key"]);
    let revoked = small(template, "args = [\"env:SEARCH_KEY\"]\nsecret_args = false");
    assert_eq!(messages(&parse(&revoked).unwrap_err()), ["`args` refers to a secret"]);
}

#[test]
fn an_unknown_variable_is_a_warning() {
    let plan =
        parse(&small("", "command = \"x\"\nenv = { A = \"${HOME}/x\", B = \"$${HOME}\", C = \"${line%x}\" }")).unwrap();
    let message = "`${HOME}` is not replaced; write `${env:HOME}`, or `$${HOME}` for this text";
    assert!(matches!(&plan.warnings[..], [one] if one.ends_with(message)), "{:?}", plan.warnings);
    let env = plan.instances[0].clone().merge().env;
    assert_eq!(exposed(env.values()), ["${HOME}/x", "${HOME}", "${line%x}"]);
}

#[test]
fn a_backend_cannot_use_variables_and_files_of_the_machine() {
    use mcp_satellite::config::{BackendDocument, PlanRestrictions};
    let server = |value: &str| serde_json::json!({"s": {"command": "x", "env": {"A": value}}});
    let parse = |value: &str| {
        let document = BackendDocument::new("h".to_owned(), &server(value), &serde_json::json!([])).unwrap();
        document.plan(&PlanRestrictions::default())
    };
    parse("${value:KEY}").unwrap();
    for value in ["${env:SEARCH_KEY}", "${file:x}", "${env:HOME:-x}"] {
        assert!(messages(&parse(value).unwrap_err())[0].contains("cannot refer to variables"), "{value}");
    }
}

#[test]
fn a_config_and_an_mcp_json_merge_and_the_config_takes_precedence() {
    let json = |name: &str| parse_json(&format!("{{\"mcpServers\": {{\"{name}\": {{\"command\": \"x\"}}}}}}")).unwrap();
    let both = parse(FULL).unwrap().merge(json("files")).unwrap();
    assert_eq!((both.instances.len(), both.teams, both.users), (5, 3, 4));
    assert_eq!((both.name.as_str(), both.warnings.len()), ("dev-satellite-001", 1));
    let both = json("one").merge(json("two")).unwrap();
    assert_eq!((both.instances.len(), both.teams, both.users), (2, 1, 1));

    let both = json("files").merge(json("files")).unwrap();
    assert_eq!(both.instances.len(), 1);
    let message = "the instance `local/me/files` of the second file is left out: the first file configures it as well";
    assert_eq!(both.warnings, [message]);
}

#[test]
fn references_are_relative_and_a_missing_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("satellite.toml");
    std::fs::write(folder.path().join("token"), "from-a-file\r\n").unwrap();
    std::fs::write(&file, small("", "command = \"x\"\nenv = { T = \"file:token\" }")).unwrap();
    assert_eq!(config::load(&file).unwrap().instances[0].server_tier.env["T"].text.expose(), "from-a-file");

    let missing = folder.path().join("none.toml");
    let errors = config::load(&missing)
        .unwrap_err()
        .merge(config::load_mcp_json(&missing, &config::PlanRestrictions::default()).unwrap_err());
    assert_eq!(errors.count(), 2);
    assert!(errors.items()[0].message.starts_with("cannot read the configuration: No such file"));
}

#[test]
fn restrictions_of_the_config_apply_to_an_mcp_json() {
    let toml = "[satellite]\nprofile = \"production\"\n[policy.restart]\nmax_crashes = 9\n";
    let own = config::parse("satellite.toml", toml, &|_| None).unwrap();
    let json = |command: &str| format!(r#"{{"mcpServers": {{"files": {{"command": "{command}"}}}}}}"#);
    let plan = config::parse_mcp_json("mcp.json", &json("/bin/sh"), &own.base, &|_| None).unwrap();
    let message = "`files` is left out: the command `/bin/sh` is not allowed in the production profile";
    assert!(plan.instances.is_empty() && plan.warnings[0].contains(message), "{:?}", plan.warnings);
    let plan = config::parse_mcp_json("mcp.json", &json("npx"), &own.base, &|_| None).unwrap();
    assert_eq!(plan.instances[0].policy.restart.max_crashes, 9);
}

/// A configuration with the keys `section` in `[gateway]` and two users with the keys `alice` and `bob`.
fn gateway(section: &str, alice: &str, bob: &str) -> Result<Plan, ConfigErrors> {
    parse(&format!(
        "[gateway]\n{section}\n[[teams]]\nid = \"team_acme\"\nslug = \"acme\"\n\
         [[teams.users]]\nid = \"user_alice\"\nslug = \"alice\"\n{alice}\n\
         [[teams.users]]\nid = \"user_bob\"\nslug = \"bob\"\n{bob}\n"
    ))
}

/// Asserts the errors of a gateway; `expected` contains a part of each message and of each hint.
fn assert_gateway_errors(section: &str, alice: &str, bob: &str, expected: &[(&str, &str)]) {
    let errors = gateway(section, alice, bob).unwrap_err();
    let items = errors.items();
    assert_eq!(items.len(), expected.len(), "{section}\n{items:#?}");
    for (item, (message, hint)) in items.iter().zip(expected) {
        assert!(item.message.contains(message) && item.hint.contains(hint), "{section}\n{item:#?}");
        assert!(item.line > 0, "{item:#?}");
    }
    let drawn = errors.render(false);
    assert!(SECRETS.iter().all(|secret| !drawn.contains(secret)), "{drawn}");
}

#[test]
fn an_endpoint_is_opened_only_if_configured() {
    let address = |text: &str| parse(text).unwrap().gateway.address();
    assert_eq!(address(&small("", "command = \"x\"")), None);
    assert_eq!(address(&small("[gateway]", "command = \"x\"")), Some(LISTEN));
    assert_eq!(address(&small("[gateway]\nlisten = \"off\"", "command = \"x\"")), None);
    let with_token =
        "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{ id = \"u\", slug = \"u\", token = \"env:ALICE_TOKEN\" }]";
    let plan = parse(with_token).unwrap();
    assert_eq!((plan.gateway.listen, plan.gateway.address()), (ListenSetting::DefaultAddress, Some(LISTEN)));
    assert_eq!(plan.gateway.limits, GatewayLimits::default());

    let mut plan = parse_json(r#"{"mcpServers": {"x": {"command": "x"}}}"#).unwrap();
    assert_eq!(plan.gateway.address(), Some(LISTEN));
    plan.gateway.add_stored_token(&"kept".into());
    assert_eq!(plan.gateway.users[0].tokens, [TokenHash::from_token("kept")]);
}

#[test]
fn users_of_both_files_share_the_endpoint_of_the_config() {
    let toml = "[gateway]\nlisten = \"127.0.0.1:7400\"\n[[teams]]\nid = \"local\"\nslug = \"local\"\n\
                users = [{ id = \"me\", slug = \"me\", token = \"env:ALICE_TOKEN\" }, { id = \"you\", slug = \"you\" }]\n";
    let json = parse_json(r#"{"mcpServers": {"x": {"command": "x"}}}"#).unwrap();
    let mut plan = parse(toml).unwrap().merge(json).unwrap();
    plan.gateway.add_stored_token(&"kept".into());
    assert_eq!(plan.gateway.address(), Some("127.0.0.1:7400".parse().unwrap()));
    let who = |user: &GatewayUser| format!("{}/{} {:?}", user.team, user.user, user.tokens.len());
    assert_eq!(plan.gateway.users.iter().map(who).collect::<Vec<_>>(), ["local/me 2", "local/you 0"]);
}

#[test]
fn a_token_must_be_a_digest_or_a_reference() {
    let users = gateway("", "token = \"env:ALICE_TOKEN\"", "tokens = [\"file:token.txt\"]").unwrap().gateway.users;
    let tokens: Vec<_> = users.into_iter().flat_map(|user| user.tokens).collect();
    assert_eq!(tokens, [ALICE_TOKEN, "event-sink-token"].map(TokenHash::from_token));
    assert_eq!(
        TokenHash::from_token("test").to_string(),
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    );
    assert_gateway_errors(
        "",
        "token = \"hunter2-literal\"\nmcp_mode = \"flt\"",
        "tokens = [\"sha256:hunter2\", \"env:SPACED_TOKEN\", \"env:BLANK\", \"env:NOT_SET\"]",
        &[
            ("token of the user `alice` is written in plain text", "`satellite token` creates both"),
            ("`flt` is not a valid value for `mcp_mode`", "did you mean \"flat\"?"),
            ("is not the 64 hexadecimal digits", "`satellite token`"),
            ("cannot be sent as a bearer token", "letters, digits"),
            ("is empty", "protects nothing"),
            ("`NOT_SET` is not set", "set NOT_SET"),
        ],
    );
    let digest = format!("tokens = [\"{}\"]", TokenHash::from_token(ALICE_TOKEN));
    assert_gateway_errors("", "token = \"env:ALICE_TOKEN\"", &digest, &[("also the token of another user", "line 9")]);
    assert_gateway_errors(
        "",
        &format!("token = \"env:ALICE_TOKEN\"\n{digest}"),
        "",
        &[("is given twice", "remove one")],
    );
    let warnings = gateway("", "token = \"env:SHORT_TOKEN\"", "").unwrap().warnings;
    assert!(warnings.len() == 1 && warnings[0].contains(":9:") && warnings[0].contains("guessed"), "{warnings:?}");
}

#[test]
fn all_errors_of_an_endpoint_are_reported_together() {
    assert_gateway_errors(
        "listen = \"localhost\"\npublic_url = \"https://bob:hunter2@example.com\"\n\
         hosts = [\"https://example.com\", \"a b\", \"x:99999\"]\norigins = [\"example.com\", \"https://example.com/app\", \"null\"]\n\
         auth = \"hunter2\"\nas = \"acme/alice\"\ntls = { cert = \"no-such.pem\" }\nanswers = \"xml\"\n\
         trusted_proxies = [\"proxy:80\"]\nbody_max = \"10 elephants\"\nsession_idle = \"0s\"\nburst = 0\nsesions_max = 3",
        "",
        "",
        &[
            ("`localhost` is not an address", "\"127.0.0.1:7300\""),
            ("contains a user name or a password", "Authorization"),
            ("`https://example.com` is not a host name", "mcp.example.com:8443"),
            ("`a b` is not a host name", ""),
            ("`x:99999` is not a host name", ""),
            ("`example.com` is not a web origin", "without a path"),
            ("`https://example.com/app` is not a web origin", ""),
            ("`null` is not a web origin", ""),
            ("the value of `auth` is not valid", "\"bearer\" or \"none\""),
            ("`as` has no effect", "auth = \"none\""),
            ("`tls` has no `key`", "cert = "),
            ("cannot read the file of `cert`", "PEM"),
            ("`xml` is not a valid value for `answers`", "\"json\", \"sse\""),
            ("`proxy:80` is not an IP address", "without a port"),
            ("`body_max` is not a size", "64MiB"),
            ("`session_idle` must not be zero", "1s"),
            ("`burst` is 0", "at least 1"),
            ("unknown key `sesions_max`", "`sessions_max`"),
        ],
    );
}

#[test]
fn body_max_must_not_exceed_bodies_max() {
    assert_gateway_errors("body_max = \"512MiB\"", "", "", &[("`bodies_max` is less than `body_max`", "\"256MiB\"")]);
    assert!(gateway("body_max = \"256MiB\"", "", "").is_ok());
}

#[test]
fn a_public_address_requires_hosts_and_authentication() {
    let everywhere = "listen = \"0.0.0.0:7300\"";
    assert_gateway_errors(everywhere, "", "", &[("`hosts` does not list", "mcp.example.com")]);
    let open = format!("{everywhere}\nauth = \"none\"\nas = \"acme/alice\"\nhosts = [\"x\"]");
    assert_gateway_errors(&open, "", "", &[("may only listen on this machine", "127.0.0.1")]);
    let named = gateway(&format!("{everywhere}\nhosts = [\"mcp.example.com\"]"), "", "").unwrap();
    assert!(named.warnings.len() == 1 && named.warnings[0].contains("unencrypted"), "{:?}", named.warnings);

    let at = |address: &str| gateway("", "", "").unwrap().with_listen_address(address.parse().unwrap());
    assert_eq!(at("[::1]:7400").unwrap().gateway.address(), Some("[::1]:7400".parse().unwrap()));
    let errors = at("192.0.2.7:7400").unwrap_err().items();
    assert!(errors[0].message.contains("192.0.2.7:7400") && errors[0].hint.contains("hosts"), "{errors:?}");
}

#[test]
fn without_authentication_several_users_require_as() {
    let two = ("without authentication all clients are one user, but 2 are configured", "as = \"acme/alice\"");
    assert_gateway_errors("auth = \"none\"", "", "", &[two]);
    assert_gateway_errors("auth = \"none\"\nas = \"acme/carol\"", "", "", &[("no user `acme/carol`", "TEAM/USER")]);
    assert_gateway_errors(
        "auth = \"none\"\nas = \"alice\"",
        "",
        "",
        &[("does not name a team and a user", "TEAM/USER")],
    );
    for named in ["acme/bob", "team_acme/user_bob"] {
        let plan = gateway(&format!("auth = \"none\"\nas = \"{named}\""), "", "").unwrap();
        assert_eq!(plan.gateway.single_user().unwrap().user.as_str(), "user_bob");
        assert!(plan.warnings.len() == 1 && plan.warnings[0].contains("without a token"), "{:?}", plan.warnings);
    }

    // An `mcp.json` can add the user, so the check runs after both files are read.
    let json = || parse_json(r#"{"mcpServers": {"x": {"command": "x"}}}"#).unwrap();
    let open = parse("[gateway]\nauth = \"none\"\n").unwrap();
    assert!(open.clone().finalize().unwrap_err().items()[0].message.contains("but 0 are configured"));
    let plan = open.merge(json()).unwrap().finalize().unwrap();
    assert_eq!(plan.gateway.single_user().unwrap().user.as_str(), "me");
    let both = gateway("auth = \"none\"\nas = \"local/me\"", "", "").unwrap();
    assert!(both.clone().finalize().is_err() && both.merge(json()).unwrap().finalize().is_ok());
}

#[test]
fn certificate_paths_are_relative_to_the_file() {
    let home = tempfile::tempdir().unwrap();
    write_pair(home.path());
    let path = |name: &str| home.path().join(name);
    let text = "[gateway]\ntls = { cert = \"cert.pem\", key = \"key.pem\" }";
    let plan = config::parse(path("satellite.toml").to_str().unwrap(), text, &environment).unwrap();
    assert_eq!(plan.gateway.tls, Some(TlsFiles { cert: path("cert.pem"), key: path("key.pem") }));
}

#[test]
fn an_unusable_certificate_is_reported_without_showing_the_key() {
    let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_pair(home.path());
    write_pair(other.path());
    let file = |name: &str, text: &str| {
        std::fs::write(home.path().join(name), text).unwrap();
        home.path().join(name)
    };
    let (cert, key) = (home.path().join("cert.pem"), home.path().join("key.pem"));
    let empty = file("empty.pem", "");
    let broken = file("broken.pem", "-----BEGIN hunter2\nhunter2\n");
    let garbled = file("garbled.pem", "-----BEGIN PRIVATE KEY-----\n?hunter2?\n-----END PRIVATE KEY-----\n");
    for (cert, key, expected) in [
        (&cert, &other.path().join("key.pem"), ("cannot use the file of `cert`", "its own private key")),
        (&cert, &cert, ("cannot use the file of `key`: it contains no private key", "PEM")),
        (&key, &key, ("cannot use the file of `cert`: it contains no certificate", "PEM")),
        (&empty, &key, ("cannot use the file of `cert`", "PEM")),
        (&cert, &broken, ("cannot use the file of `key`: it is not a complete PEM file", "PEM")),
        (&cert, &garbled, ("cannot use the file of `key`: it is not a complete PEM file", "PEM")),
    ] {
        assert_gateway_errors(&format!("tls = {{ cert = {cert:?}, key = {key:?} }}"), "", "", &[expected]);
    }
}

mod backend {
    use mcp_satellite::backend::wire;
    use mcp_satellite::config::{BackendDocument, PlanRestrictions, PollIntervals};
    use serde_json::json;

    use super::*;

    fn token(name: &str) -> Option<String> {
        match name {
            "REGISTRATION" => Some("registration-hunter2".to_owned()),
            "SPACED" => Some("registration hunter2".to_owned()),
            _ => environment(name),
        }
    }

    fn parse(text: &str) -> Result<Plan, ConfigErrors> {
        config::parse("satellite.toml", text, &token)
    }

    #[test]
    fn a_backend_has_defaults_for_all_keys_except_url() {
        let plan = parse("[backend]\nurl = \"https://backend.example.com/satellites/\"\n").unwrap();
        let backend = plan.backend.unwrap();
        assert_eq!((backend.url.as_str(), &backend.token), ("https://backend.example.com/satellites", &None));
        let seconds = [
            backend.request_timeout,
            backend.heartbeat_interval,
            backend.config_interval,
            backend.command_timeout,
            backend.backoff_max,
            backend.poll.immediate,
            backend.poll.high,
            backend.poll.normal,
            backend.poll.idle,
        ];
        assert_eq!(seconds.map(|limit| limit.as_secs()), [10, 30, 300, 60, 300, 2, 10, 30, 60]);
        assert_eq!(parse("").unwrap().backend, None);
    }

    #[test]
    fn every_key_of_a_backend_is_read() {
        let text = "[backend]\nurl = \"http://localhost:7400\"\ntoken = \"env:REGISTRATION\"\nrequest_timeout = \"5s\"\n\
                    heartbeat_interval = \"15s\"\nconfig_interval = \"1h\"\ncommand_timeout = \"2m\"\nbackoff_max = \"1m\"\n\
                    [backend.poll]\nimmediate = \"1s\"\nhigh = \"2s\"\nnormal = \"3s\"\nidle = \"4s\"\n";
        let plan = parse(text).unwrap();
        assert!(plan.warnings[0].contains("http, not https"), "{:?}", plan.warnings);
        assert!(plan.secret_variables.contains("REGISTRATION"), "servers would inherit the secret");
        assert!(!format!("{plan:?}").contains("hunter2"));
        let backend = plan.backend.unwrap();
        assert_eq!(backend.token.unwrap().expose(), "registration-hunter2");
        let seconds = |seconds| Duration::from_secs(seconds);
        let poll = PollIntervals { immediate: seconds(1), high: seconds(2), normal: seconds(3), idle: seconds(4) };
        assert_eq!((backend.poll, backend.backoff_max), (poll, seconds(60)));
    }

    #[test]
    fn errors_of_a_backend_state_the_line_and_a_hint() {
        for (text, line, message, hint) in [
            ("[backend]\n", 1, "no `url`", "https://"),
            ("[backend]\nurl = \"http://backend.example.com\"\n", 2, "http, not https", "https://"),
            ("[backend]\nurl = \"ftp://backend.example.com\"\n", 2, "neither http nor https", "https://"),
            ("[backend]\nurl = \"https://me:hunter2@backend.example.com\"\n", 2, "user name or a password", ""),
            ("[backend]\nurl = \"https://b.example.com/?key=hunter2\"\n", 2, "a query", "remove it"),
            (
                "[backend]\nurl = \"https://b.example.com\"\ntoken = \"hunter2\"\n",
                3,
                "is written in plain text",
                "env:NAME",
            ),
            (
                "[backend]\nurl = \"https://b.example.com\"\ntoken = \"env:UNSET\"\n",
                3,
                "`UNSET` is not set",
                "set UNSET",
            ),
            ("[backend]\nurl = \"https://b.example.com\"\ntoken = \"env:SPACED\"\n", 3, "cannot be sent", ""),
            ("[backend]\nurl = \"https://b.example.com\"\nrequest_timeout = \"0s\"\n", 3, "must not be zero", ""),
            (
                "[backend]\nurl = \"https://b.example.com\"\npoll = { idel = \"1s\" }\n",
                3,
                "unknown key `idel`",
                "`idle`",
            ),
            ("[backend]\nurl = \"https://b.example.com\"\n[servers.a]\ncommand = \"a\"\n", 3, "`servers.a`", "remove"),
            (
                "[backend]\nurl = \"https://b.example.com\"\n[[teams]]\nid = \"t\"\nslug = \"t\"\n",
                3,
                "`teams` conflicts with",
                "remove",
            ),
            ("[backend]\nurl = \"https://b.example.com\"\n[events]\nsink = \"stdout\"\n", 4, "events go to", "remove"),
            (
                "[satellite]\nname = \"short\"\n[backend]\nurl = \"https://b.example.com\"\n",
                2,
                "not a valid name",
                "10 to 32",
            ),
        ] {
            let errors = parse(text).unwrap_err();
            let items = errors.items();
            assert_eq!(items.len(), 1, "{text}\n{items:?}");
            assert_eq!(items[0].line, line, "{text}");
            assert!(items[0].message.contains(message) && items[0].hint.contains(hint), "{items:?}");
            assert!(!errors.render(false).contains("hunter2") && !format!("{items:?}").contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn an_mcp_json_together_with_a_backend_is_an_error() {
        let plan = parse("[backend]\nurl = \"https://b.example.com\"\n").unwrap();
        let errors = plan.merge(parse_json("{\"mcpServers\": {\"a\": {\"command\": \"a\"}}}").unwrap()).unwrap_err();
        assert!(errors.items()[0].hint.contains("--mcp-json"), "{errors:?}");
    }

    fn document(text: &serde_json::Value) -> BackendDocument {
        let sent = serde_json::from_value::<wire::SatelliteConfig>(text.clone()).unwrap();
        BackendDocument::new(sent.hash.clone(), &sent.servers, &sent.teams).unwrap()
    }

    #[test]
    fn restrictions_of_the_file_apply_to_a_backend_configuration() {
        let given = json!({
            "hash": "h", "more": "than we know",
            "servers": {"files": {"command": "files", "env": {"KEY": "hunter2-key", "LEVEL": null}}},
            "teams": [{"id": "t", "slug": "t", "users": [{"id": "u", "slug": "u"}],
                "policy": {"restart": {"window": "7s"}},
                "installations": [
                    {"id": "a", "server": "files"},
                    {"id": "b", "server": "b", "transport": "http", "url": "https://e.com/mcp", "bearer_token": "hunter2-bearer"},
                ]}],
        });
        let given = document(&given);
        let files = parse("[backend]\nurl = \"https://b.example.com\"\n[policy.restart]\nmax_crashes = 9\n").unwrap();
        let plan = files.clone().with_document(&given).unwrap();
        assert_eq!((plan.instances.len(), plan.teams, plan.users), (2, 1, 1));
        let restart = &plan.instances[0].policy.restart;
        assert_eq!((restart.window, restart.max_crashes), (Duration::from_secs(7), 9), "values of both tiers");
        let specs: Vec<_> = plan.instances.clone().into_iter().map(InstanceConfig::merge).collect();
        assert_eq!(exposed(specs[0].env.values()), ["hunter2-key"]);
        assert_eq!(exposed(specs[1].headers.values()), ["Bearer hunter2-bearer"]);
        assert!(!format!("{plan:?} {given:?}").contains("hunter2"));

        let strict =
            parse("[satellite]\nprofile = \"production\"\n[backend]\nurl = \"https://b.example.com\"\n").unwrap();
        let errors = strict.with_document(&given).unwrap_err();
        assert!(messages(&errors)[0].contains("`files` is not allowed"), "{errors:?}");
    }

    #[test]
    fn a_backend_configuration_cannot_refer_to_local_secrets() {
        let server = |member: serde_json::Value| {
            let mut server = json!({"id": "a", "server": "a", "transport": "http", "url": "https://e.com/mcp"});
            server.as_object_mut().unwrap().extend(member.as_object().unwrap().clone());
            let users = json!([{"id": "u", "slug": "u"}]);
            json!({"hash": "h", "servers": {}, "teams": [{"id": "t", "slug": "t", "users": users, "installations": [server]}]})
        };
        for member in [
            json!({"bearer_token": "env:SEARCH_KEY"}),
            json!({"bearer_token": "file:/etc/passwd"}),
            json!({"headers": {"X-Key": "env:SEARCH_KEY"}}),
            json!({"headers": {"X-Key": "Key file:/etc/passwd"}}),
            json!({"query": {"key": "file:/etc/passwd"}}),
        ] {
            let errors = document(&server(member.clone())).plan(&PlanRestrictions::default()).unwrap_err();
            assert!(messages(&errors)[0].contains("cannot refer to"), "{member}: {errors:?}");
        }
    }

    #[test]
    fn without_authentication_a_backend_must_configure_exactly_one_user() {
        let text = "[gateway]\nauth = \"none\"\n[backend]\nurl = \"https://b.example.com\"\n";
        let files = parse(text).unwrap().finalize().unwrap();
        let team = |users: serde_json::Value| {
            document(&json!({"hash": "h", "servers": {}, "teams": [{"id": "t", "slug": "t", "users": users}]}))
        };
        let one = team(json!([{"id": "u", "slug": "u"}]));
        assert!(files.clone().with_document(&one).is_ok());
        let two = team(json!([{"id": "u", "slug": "u"}, {"id": "v", "slug": "v"}]));
        assert!(messages(&files.with_document(&two).unwrap_err())[0].contains("but 2 are configured"));
    }
}

#[test]
fn a_configuration_is_watched_by_default() {
    assert!(parse("").unwrap().watch && parse("[satellite]\nwatch = true").unwrap().watch);
    assert!(!parse("[satellite]\nwatch = false").unwrap().watch);
    assert!(parse_json(r#"{"mcpServers": {}}"#).unwrap().watch);
    assert_eq!(
        messages(&parse("[satellite]\nwatch = \"no\"").unwrap_err()),
        ["`watch` must be true or false, not a string"]
    );
}

#[test]
fn required_user_values_over_unencrypted_http_cause_a_warning() {
    let text = "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{ id = \"u\", slug = \"u\" }]\n\
                [[teams.installations]]\nid = \"a\"\nserver = \"a\"\ntransport = \"http\"\n\
                url = \"http://e.com/mcp\"\nuser_required = [\"X-Key\"]\n";
    let warnings = parse(text).unwrap().warnings;
    assert!(matches!(&warnings[..], [warning] if warning.contains("unencrypted")), "{warnings:?}");
}

/// A server with the keys `more` and the inline table `table` as `oauth`.
fn with_oauth(table: &str, more: &str) -> String {
    format!(
        "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{{ id = \"u\", slug = \"u\" }}]\n\
         [[teams.installations]]\nid = \"x\"\nserver = \"x\"\n{more}\noauth = {{ {table} }}\n"
    )
}

const REMOTE: &str = "transport = \"http\"\nurl = \"https://mcp.example.com/mcp\"";

#[test]
fn the_oauth_table_is_read_and_its_secret_is_not_shown() {
    let table = "grant = \"client_credentials\", client_id = \"me\", client_secret = \"env:SEARCH_TOKEN\", issuer = \"https://as.example.com\", scopes = [\"a\"]";
    let plan = parse(&with_oauth(table, REMOTE)).unwrap();
    let [oauth] = &plan.oauth.values().collect::<Vec<_>>()[..] else { panic!("{plan:?}") };
    assert!(oauth.machine && oauth.client_id.as_deref() == Some("me") && oauth.scopes == ["a"]);
    assert_eq!(oauth.client_secret.as_ref().unwrap().expose(), "search-token");
    assert!(!format!("{plan:?}").contains("search-token"));
    assert!(plan.secret_variables.contains("SEARCH_TOKEN"), "servers would inherit the secret");
}

#[test]
fn all_errors_of_an_oauth_table_are_reported_together() {
    let table = "grant = \"password\", client_secret = \"hunter2\", scopes = [\"a b\"], client_metadata_url = \"http://x.example.com/\", color = \"red\"";
    let errors = parse(&with_oauth(table, &format!("{REMOTE}\nbearer_token = \"env:SEARCH_TOKEN\""))).unwrap_err();
    let messages: Vec<_> = errors.items().into_iter().map(|item| item.message).collect();
    for wanted in [
        "`password` is not a valid value for `grant`",
        "has no `client_id`",
        "has no `issuer`",
        "is written in plain text",
        "is not a valid scope",
        "not an https URL",
        "unknown key `color`",
        "a credential of its own",
    ] {
        assert!(messages.iter().any(|message| message.contains(wanted)), "{wanted}: {messages:#?}");
    }
    assert!(!format!("{errors}").contains("hunter2"));
    for (table, more, wanted) in [
        ("grant = \"client_credentials\"", REMOTE, "no client credentials"),
        ("client_id = \"me\"", "command = \"x\"", "a stdio server with `oauth`"),
        ("client_id = \"me\", client_metadata_url = \"https://x.example.com/me\"", REMOTE, "a `client_id` and a"),
    ] {
        let errors = parse(&with_oauth(table, more)).unwrap_err();
        let messages: Vec<_> = errors.items().into_iter().map(|item| item.message).collect();
        assert!(messages.iter().any(|message| message.contains(wanted)), "{messages:#?}");
    }
}

#[test]
fn memory_limits_are_read_and_an_invalid_uid_range_is_an_error() {
    let text = "[satellite]\nuid_range = \"200000-200999\"\n\n[policy.memory]\npressure_max_percent = 30\n\
                available_min_percent = 10\nstart_interval = \"5s\"\n";
    let plan = parse(text).unwrap_or_else(|errors| panic!("{}", errors.render(false)));
    let memory = &plan.memory;
    assert_eq!((memory.pressure_max_percent, memory.available_min_percent), (30, 10));
    assert_eq!((memory.start_interval, plan.uid_range), (Duration::from_secs(5), "200000-200999".parse().ok()));
    let errors = parse("[satellite]\nuid_range = \"0-10\"\n").map(drop).unwrap_err();
    assert!(errors.render(false).contains("user ids below 1000 belong to the system"), "{}", errors.render(false));
}

#[test]
fn variables_that_a_server_does_not_get_cause_a_warning_with_the_next_step() {
    let warnings = |head: &str, policy: &str| {
        let server =
            "command = \"npx\"\nenv = { PYTHONPATH = \"/x\", NODE_OPTIONS = \"-x\", LD_LIBRARY_PATH = \"/l\" }";
        let plan = parse(&small(&format!("[satellite]\n{head}\n{policy}"), server));
        let plan = plan.and_then(Plan::finalize).unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        // A backend's configuration finalizes the plan again.
        let again = plan.clone().finalize().unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        assert_eq!(plan.warnings, again.warnings);
        let mut warnings = plan.warnings;
        warnings.retain(|warning| warning.starts_with("installation"));
        warnings
    };
    let of = |name: &str, reason: &str| format!("installation `i` of team `t`: `{name}` {reason}");
    let not_allowed = "is not passed on in the production profile; list it in `allow_env` under [policy.isolation]";
    let in_sandbox =
        of("LD_LIBRARY_PATH", "is not passed on in a sandbox; remove it, or set it in a script that is the command");
    assert_eq!(warnings("", ""), [""; 0]);
    assert_eq!(warnings("isolation = \"bubblewrap\"", ""), std::slice::from_ref(&in_sandbox));
    assert_eq!(
        warnings("profile = \"production\"", "[policy.isolation]\nallow_env = [\"PYTHONPATH\"]"),
        [in_sandbox, of("NODE_OPTIONS", not_allowed)]
    );
    assert_eq!(
        warnings("profile = \"production\"\nisolation = \"none\"", ""),
        ["LD_LIBRARY_PATH", "NODE_OPTIONS", "PYTHONPATH"].map(|name| of(name, not_allowed))
    );
}

#[test]
fn a_tier_replaces_the_permitted_variables_of_the_tier_above_and_a_preset_keeps_them() {
    let allowed = |more: &str, own: &str| policy(more, &format!("command = \"x\"\n{own}")).isolation.allow_env;
    let above = "[policy.isolation]\nallow_env = [\"PYTHONPATH\", \"NODE_PATH\"]";
    assert_eq!(allowed("", ""), [""; 0]);
    assert_eq!(allowed(above, ""), ["PYTHONPATH", "NODE_PATH"]);
    assert_eq!(allowed(above, "policy.isolation.preset = \"strict\""), ["PYTHONPATH", "NODE_PATH"]);
    assert_eq!(allowed(above, "policy.isolation.allow_env = [\"NODE_OPTIONS\"]"), ["NODE_OPTIONS"]);
    for (name, message) in [
        ("LD_PRELOAD", "`LD_PRELOAD` cannot be permitted: it is never passed on to a server"),
        ("API_KEY", "`API_KEY` in `allow_env` is not a variable that needs permission"),
    ] {
        let errors = parse(&small(&format!("[policy.isolation]\nallow_env = [\"{name}\"]"), "command = \"x\""));
        assert_eq!(messages(&errors.unwrap_err()), [message]);
    }
}

#[test]
fn users_cannot_set_a_variable_that_runs_other_code() {
    let text = "[[teams]]\nid = \"t\"\nslug = \"t\"\n[[teams.users]]\nid = \"u\"\nslug = \"alice\"\n\
                [teams.users.servers.i]\nenv = { PYTHONPATH = \"/mine\", LD_PRELOAD = \"/x.so\", REGION = \"eu\" }\n\
                [[teams.installations]]\nid = \"i\"\nserver = \"s\"\ncommand = \"npx\"\n\
                env = { PYTHONPATH = \"/of/the/team\" }\nuser_required = [\"NODE_OPTIONS\"]\n";
    let plan = parse(text).unwrap();
    let places: Vec<&str> = plan.warnings.iter().map(|warning| warning.split(' ').nth(1).unwrap()).collect();
    assert_eq!(places, ["`PYTHONPATH`", "`LD_PRELOAD`", "installation"], "{:#?}", plan.warnings);
    for warning in &plan.warnings {
        assert!(warning.contains("users cannot set a variable that makes a server run other code"), "{warning}");
    }
    let spec = plan.instances.into_iter().next().unwrap().merge();
    let env: Vec<_> = spec.env.iter().map(|(name, value)| (name.as_str(), value.expose())).collect();
    assert_eq!(env, [("PYTHONPATH", "/of/the/team"), ("REGION", "eu")]);
    assert_eq!(spec.missing, ["NODE_OPTIONS"]);
    // The header of a remote server is no variable.
    let remote = "transport = \"http\"\nurl = \"https://example.com\"\nuser_required = [\"ENV\"]";
    assert_eq!(parse(&small("", remote)).unwrap().warnings, [""; 0]);
}

#[test]
fn several_teams_without_a_sandbox_cause_a_warning() {
    let team = |name: &str| {
        format!(
            "[[teams]]\nid = \"team_{name}\"\nslug = \"{name}\"\nusers = [{{ id = \"u_{name}\", slug = \"u\" }}]\n\
             [[teams.installations]]\nid = \"i_{name}\"\nserver = \"s\"\ncommand = \"cat\"\n"
        )
    };
    let (one, two) = (team("one"), team("one") + &team("two"));
    let warned = |head: &str, teams: &str| {
        let plan =
            parse(&format!("[satellite]\n{head}\n{teams}")).unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        let plan = plan.finalize().unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        plan.warnings.iter().filter(|warning| warning.contains("/proc/PID/environ")).count()
    };
    assert_eq!(warned("", &two), 1);
    assert_eq!(warned("isolation = \"none\"", &two), 1);
    assert_eq!(warned("", &one), 0);
    assert_eq!(warned("isolation = \"nsjail\"", &two), 0);
    assert_eq!(warned("profile = \"production\"\nallowed_commands = [\"cat\"]", &two), 0);
    assert_eq!(warned("uid_range = \"200000-200999\"", &two), 0);
}

#[test]
fn telemetry_is_read_and_checked() {
    let plan = |telemetry: &str| parse(&small(&format!("[telemetry]\n{telemetry}"), "command = \"x\""));
    let default = plan("").unwrap().telemetry;
    assert_eq!((default.listen, default.endpoint, default.payloads), (None, None, false));
    assert!((default.sample - config::SAMPLE).abs() < f64::EPSILON);
    let text = "listen = \"[::1]:9464\"\nendpoint = \"http://collector:4318\"\nsample = 1\npayloads = true";
    let full = plan(text).unwrap().telemetry;
    assert_eq!(full.listen, Some("[::1]:9464".parse().unwrap()));
    assert_eq!(full.endpoint.as_deref(), Some("http://collector:4318/"));
    assert!((full.sample - 1.0).abs() < f64::EPSILON && full.payloads);
    for (text, wanted) in [
        ("listen = \"0.0.0.0:9464\"", "`listen` of [telemetry] is 0.0.0.0:9464, not loopback"),
        ("endpoint = \"ftp://x\"", "`endpoint` is neither http nor https"),
        ("endpoint = \"https://me:hunter2@x\"", "`endpoint` contains a user name or a password"),
        ("endpoint = \"https://x/?api_key=hunter2\"", "the URL of the OTLP receiver seems to contain a secret"),
        ("sample = 1.5", "`sample` is 1.5, not a share of the traces"),
    ] {
        let errors = plan(text).unwrap_err();
        assert_eq!(messages(&errors), [wanted]);
        assert!(!errors.render(false).contains("hunter2"), "{}", errors.render(false));
    }
}

/// Filters, tokens and events accept the id and the slug of a team.
#[test]
fn no_name_means_two_teams() {
    let two = |first: [&str; 2], second: [&str; 2]| {
        let team = |[id, slug]: [&str; 2]| format!("[[teams]]\nid = \"{id}\"\nslug = \"{slug}\"\n");
        parse(&(team(first) + &team(second)))
    };
    assert!(two(["a", "a"], ["b", "b"]).is_ok());
    let slug = two(["alpha", "one"], ["other", "alpha"]).unwrap_err().to_single_line();
    assert!(slug.contains("the slug `alpha` of a team is the id of another team"), "{slug}");
    let id = two(["other", "alpha"], ["alpha", "one"]).unwrap_err().to_single_line();
    assert!(id.contains("the id `alpha` of a team is the slug of another team"), "{id}");
}
