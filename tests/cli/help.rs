//! Tests of `--help` and of shell completions.

use std::fs;

use testkit::home::Home;

use crate::SATELLITE;

const VERBS: [&str; 30] = [
    "run",
    "down",
    "demo",
    "check",
    "status",
    "clients",
    "connect",
    "disconnect",
    "doctor",
    "call",
    "tools",
    "events",
    "logs",
    "restart",
    "stop",
    "start",
    "reconnect",
    "reload",
    "prune",
    "configure",
    "auth",
    "token",
    "backend",
    "load",
    "stdio",
    "up",
    "service",
    "completions",
    "man-pages",
    "sim-server",
];

#[test]
fn the_help_of_every_verb_explains_its_purpose_and_arguments() {
    let home = Home::new(SATELLITE);
    for verb in VERBS {
        let help = home.bare(&[verb, "--help"]).exits(0).stdout;
        let about = help.lines().next().unwrap();
        assert!(about.split_whitespace().count() >= 3, "the help of {verb} has no description:\n{help}");
        assert!(help.contains(&format!("Usage: satellite {verb}")), "{help}");
        let mut lines = help.lines().skip_while(|line| !line.starts_with("Usage:")).skip(1).peekable();
        while let Some(line) = lines.next() {
            let entry = line.trim_start();
            let indent = line.len() - entry.len();
            if !(1..=8).contains(&indent) || !entry.starts_with(['-', '<', '[']) {
                continue;
            }
            let beside = entry.split_once("  ").is_some_and(|(_, text)| !text.trim().is_empty());
            let below = lines.peek().is_some_and(|next| next.len() - next.trim_start().len() > indent);
            assert!(beside || below, "{verb}: `{entry}` is not explained:\n{help}");
        }
    }
}

#[test]
fn the_help_lists_verbs_the_demo_and_exit_codes() {
    let home = Home::new(SATELLITE);
    let help = home.bare(&["--help"]).exits(0).stdout;
    for verb in VERBS.iter().filter(|verb| **verb != "sim-server") {
        assert!(help.lines().any(|line| line.trim_start().starts_with(&format!("{verb} "))), "{verb}:\n{help}");
    }
    assert!(!help.contains("sim-server"), "sim-server is for tests only:\n{help}");
    assert!(help.contains("satellite demo") && help.contains("Exit codes"), "{help}");
    assert!(home.bare(&["--version"]).exits(0).stdout.starts_with("satellite "));
}

#[test]
fn an_unknown_verb_is_rejected_with_a_suggestion() {
    let home = Home::new(SATELLITE);
    let outcome = home.bare(&["statsu"]).exits(2);
    assert!(outcome.stderr.contains("'status'"), "{outcome:#?}");
    let outcome = home.bare(&[]).exits(2);
    assert!(outcome.stderr.contains("Usage: satellite"), "{outcome:#?}");
}

#[test]
fn completion_scripts_are_valid_and_contain_the_verbs() {
    let home = Home::new(SATELLITE);
    for shell in ["bash", "zsh", "fish"] {
        let script = home.bare(&["completions", shell]).exits(0).stdout;
        for verb in ["status", "restart", "--mcp-json"] {
            let known = script.contains(verb) || script.contains(verb.trim_start_matches('-'));
            assert!(known, "{shell}: {verb}:\n{script}");
        }
        if shell == "bash" {
            fs::write(home.path().join("completions.bash"), script).unwrap();
        }
    }
    let outcome = home.shell("bash -n completions.bash").finish().exits(0);
    assert_eq!(outcome.stderr, "");
    // The call that bash makes for completion.
    let asked = "source completions.bash; COMP_WORDS=(satellite st); COMP_CWORD=1; _satellite satellite st satellite; \
                 printf '%s\\n' \"${COMPREPLY[@]}\"";
    let offered = home.shell(&format!("bash -c '{}'", asked.replace('\'', r"'\''"))).finish().exits(0).stdout;
    let mut offered: Vec<&str> = offered.lines().collect();
    offered.sort_unstable();
    assert_eq!(offered, ["start", "status", "stdio", "stop"]);
    home.bare(&["completions", "tcsh"]).exits(2);
}

#[test]
fn every_verb_has_a_man_page_with_its_options() {
    let home = Home::new(SATELLITE);
    home.bare(&["man-pages", "man/man1"]).exits(0);
    let page = |name: &str| fs::read_to_string(home.path().join("man/man1").join(name)).unwrap().replace("\\-", "-");
    for verb in VERBS.iter().filter(|verb| **verb != "sim-server") {
        let text = page(&format!("satellite-{verb}.1"));
        assert!(text.lines().any(|line| line.starts_with(&format!(".TH satellite-{verb} 1"))), "{verb}:\n{text}");
        assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{verb}:\n{text}");
        let help = home.bare(&[verb, "--help"]).exits(0).stdout;
        for option in help.split_whitespace().filter(|word| word.starts_with("--")) {
            let option = option.trim_end_matches(|letter: char| !letter.is_ascii_lowercase());
            assert!(text.contains(option), "{verb}: {option} is missing:\n{text}");
        }
    }
    assert!(page("satellite.1").contains("satellite-status(1)"));
    assert!(!home.path().join("man/man1/satellite-sim-server.1").exists(), "sim-server is for tests only");
    fs::write(home.path().join("file"), "").unwrap();
    let outcome = home.bare(&["man-pages", "file"]).exits(1);
    assert!(outcome.stderr.contains("cannot write man pages to `file`"), "{outcome:#?}");
}
