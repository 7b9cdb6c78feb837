//! Recognition of secrets in clear text. A wrong positive moves a harmless value into the file of secrets; a wrong negative
//! leaves a secret in the configuration. Names decide first, then known prefixes, then the look of the value.

use std::ops::Range;

use crate::template::{TemplatePart, TextTemplate};

/// A secret in an argument list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretArg {
    /// The argument.
    pub index: usize,
    /// The part of the argument's template.
    pub part: usize,
    /// The bytes of the secret in that literal part.
    pub range: Range<usize>,
}

/// Words in names of which the value is a secret, whatever it looks like.
const SECRET_WORDS: [&str; 12] = [
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "PASSW",
    "SECRET",
    "APIKEY",
    "ACCESSKEY",
    "PRIVATEKEY",
    "CREDENTIAL",
    "TOKEN",
    "AUTHORIZATION",
    "COOKIE",
];

/// Words in names of which the value may be a secret, unless it is a word, a number, a path or a package.
const WEAK_WORDS: [&str; 8] = ["KEY", "AUTH", "SIGNATURE", "SESSION", "BEARER", "PAT", "DSN", "PIN"];

/// Prefixes of the tokens of well-known services.
const PREFIXES: [&str; 38] = [
    "sk-",
    "sk_live_",
    "sk_test_",
    "rk_live_",
    "rk_test_",
    "pk_live_",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "gldt-",
    "xoxb-",
    "xoxp-",
    "xoxa-",
    "xoxs-",
    "xapp-",
    "AKIA",
    "ASIA",
    "AIza",
    "ya29.",
    "hf_",
    "npm_",
    "pypi-",
    "dop_v1_",
    "shpat_",
    "SG.",
    "ntn_",
    "secret_",
    "lin_api_",
    "figd_",
    "tvly-",
    "pplx-",
    "gsk_",
    "whsec_",
    "ATATT",
];

/// The longest text in bytes that is searched for nested texts, such as a URL in the query of a URL.
const NESTED_TEXT_MAX: usize = 8192;

/// Returns true if the value of an environment variable or a header is probably a secret.
pub fn looks_secret(name: &str, value: &str) -> bool {
    let value = value.trim();
    if value.is_empty() {
        return false;
    }
    if is_known_token(value) || secret_in_url(value).is_some() {
        return true;
    }
    // OPENAPI_MCP_HEADERS={"Authorization": "Bearer X"}
    if value.starts_with('{') && has_secret_in_json(value) {
        return true;
    }
    if is_url(value) || is_path(value) || is_flag(value) {
        return false;
    }
    let letters: String = name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_uppercase();
    if is_about_a_secret(name) {
        return false;
    }
    if SECRET_WORDS.iter().any(|word| letters.contains(word)) {
        // MAX_TOKENS=4096 and TOKEN_LIMIT=100 are no secrets; PASSWORD=1234 is one.
        return !is_number(value) || letters.contains("PASSW") || letters.contains("SECRET");
    }
    let words = name_words(name);
    let is_weak = words.iter().any(|word| WEAK_WORDS.contains(&word.as_str())) || letters.ends_with("KEY");
    if is_weak && !is_plain(value) {
        return true;
    }
    is_random(value)
}

/// Returns true if the literal text of an environment variable or a header probably contains a secret. In a text with
/// variables, such as `Bearer ${TOKEN}`, the name does not decide.
pub fn template_has_secret(name: &str, value: &TextTemplate) -> bool {
    if let Some(text) = value.as_literal() {
        return looks_secret(name, text);
    }
    value.parts.iter().any(|part| match part {
        TemplatePart::Literal(text) => {
            let text = text.expose();
            is_known_token(text) || is_random(text) || secret_in_url(text).is_some()
        }
        _ => false,
    })
}

/// Finds the secret in an argument. `previous` is the argument before it, which can be an option such as `--api-key`.
/// Returns the bytes of the secret in `arg`.
pub fn secret_in_arg(previous: Option<&str>, arg: &str) -> Option<Range<usize>> {
    if arg.is_empty() {
        return None;
    }
    if let Some(range) = secret_in_url(arg) {
        return Some(range);
    }
    // --config '{"apiKey": "X"}': the whole argument is the secret.
    if arg.trim_start().starts_with('{') && has_secret_in_json(arg) {
        return Some(0..arg.len());
    }
    // --token=X, API_KEY=X (`docker run -e`) and `Authorization: Bearer X` (`mcp-remote --header`).
    for separator in ['=', ':'] {
        let Some(at) = arg.find(separator) else { continue };
        let (name, value) = (&arg[..at], &arg[at + 1..]);
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if is_name && !value.starts_with("//") && looks_secret(name, value) {
            let start = at + 1 + (value.len() - value.trim_start().len());
            let start = start + scheme_length(&arg[start..]);
            return (start < arg.len()).then_some(start..arg.len());
        }
        // --header=Authorization: Bearer X, --env=API_KEY=X.
        if separator == '=' && is_option(name) && arg.len() <= NESTED_TEXT_MAX {
            return secret_in_arg(Some(name), value).map(|range| range.start + at + 1..range.end + at + 1);
        }
    }
    let option = previous.filter(|previous| is_option(previous) && !previous.contains('='));
    let follows_option = option.is_some_and(|option| !is_option(arg) && looks_secret(option, arg));
    if follows_option || is_known_token(arg) || is_random(arg) {
        let start = scheme_length(arg);
        return (start < arg.len()).then_some(start..arg.len());
    }
    None
}

/// Finds the secrets in an argument list. Variables of a template are no secrets in clear text.
pub fn secret_args(args: &[TextTemplate]) -> Vec<SecretArg> {
    let mut secrets = Vec::new();
    let mut previous = None;
    for (index, arg) in args.iter().enumerate() {
        for (part, literal) in arg.parts.iter().enumerate() {
            let TemplatePart::Literal(text) = literal else { continue };
            let previous = if part == 0 { previous } else { None };
            if let Some(range) = secret_in_arg(previous, text.expose()) {
                secrets.push(SecretArg { index, part, range });
            }
        }
        previous = arg.as_literal();
    }
    secrets
}

/// Returns true for JSON with a string that is a secret by its key or its look.
fn has_secret_in_json(text: &str) -> bool {
    let mut key = "";
    let mut strings = text.split('"').skip(1).peekable();
    while let Some(string) = strings.next() {
        let between = strings.next().unwrap_or_default();
        if between.trim_start().starts_with(':') {
            key = string;
        } else if looks_secret(key, string) {
            return true;
        }
    }
    false
}

/// Returns the bytes of a URL that contain its secrets: password, random segments of the path, and key parameters. With
/// more than one secret, the range reaches from the first to the last.
fn secret_in_url(text: &str) -> Option<Range<usize>> {
    let scheme = text.find("://")?;
    if text.len() > NESTED_TEXT_MAX
        || scheme == 0
        || !text[..scheme].chars().all(|c| c.is_ascii_alphanumeric() || "+-.=".contains(c))
    {
        return None;
    }
    let mut found: Option<Range<usize>> = None;
    let mut add = |start: usize, end: usize| {
        let first = found.as_ref().map_or(start, |range| range.start);
        found = Some(first..end);
    };
    let start = scheme + 3;
    let authority_end = text[start..].find(['/', '?', '#']).map_or(text.len(), |at| start + at);
    if let Some(at) = text[start..authority_end].rfind('@') {
        let userinfo = &text[start..start + at];
        let password = userinfo.find(':').map_or(0, |colon| colon + 1);
        // `ssh://git@host` and `postgres://user@host` have no password.
        let is_secret = password > 0 || is_known_token(userinfo) || is_random(userinfo);
        if is_secret && password < userinfo.len() {
            add(start + password, start + at);
        }
    }
    let query = text.find('?').unwrap_or(text.len());
    let mut at = authority_end;
    for segment in text[authority_end.min(query)..query].split('/') {
        if is_known_token(segment) || is_random(segment) {
            add(at, at + segment.len());
        }
        at += segment.len() + 1;
    }
    let mut at = query + 1;
    for pair in text.get(query + 1..).unwrap_or_default().split(['&', '#']) {
        if let Some((name, value)) = pair.split_once('=')
            && !value.is_empty()
            && (looks_secret(name, value) || is_key_parameter(name) && !is_plain(value))
        {
            let start = at + name.len() + 1;
            add(start, start + value.len());
        }
        at += pair.len() + 1;
    }
    found
}

fn is_key_parameter(name: &str) -> bool {
    matches!(name.to_ascii_lowercase().as_str(), "key" | "sig" | "code" | "auth" | "access")
}

/// The length of `Bearer ` and the like at the beginning of a header.
fn scheme_length(text: &str) -> usize {
    let scheme = ["Bearer ", "Basic ", "Token ", "ApiKey "]
        .iter()
        .find(|scheme| text.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)));
    scheme.map_or(0, |scheme| scheme.len())
}

fn is_known_token(value: &str) -> bool {
    let scheme = scheme_length(value);
    if scheme > 0 && value.len() > scheme {
        let token = value[scheme..].trim();
        return !token.is_empty() && !token.contains(char::is_whitespace) && scheme_length(token) == 0;
    }
    if value.contains("-----BEGIN") {
        return true;
    }
    // A JSON Web Token.
    if value.starts_with("eyJ") && value.len() >= 20 && value.contains('.') {
        return true;
    }
    let has_word = |rest: &str| rest.chars().any(|c| c.is_ascii_digit() || c.is_ascii_uppercase());
    PREFIXES.iter().any(|prefix| {
        value.strip_prefix(prefix).is_some_and(|rest| {
            rest.len() >= 8 && has_word(rest) && !rest.contains(|c: char| c.is_whitespace() || "/@:".contains(c))
        })
    })
}

/// Returns true for names such as `API_KEY_FILE`, `TOKEN_URL` or `KEYBOARD`, of which the value is not the secret itself.
fn is_about_a_secret(name: &str) -> bool {
    let last = name_words(name).pop().unwrap_or_default();
    let kinds = [
        "FILE",
        "PATH",
        "DIR",
        "URL",
        "URI",
        "ENDPOINT",
        "NAME",
        "TYPE",
        "MODE",
        "METHOD",
        "LIMIT",
        "TTL",
        "TIMEOUT",
        "COUNT",
        "LENGTH",
        "SIZE",
        "ENABLED",
        "PROVIDER",
        "HEADER",
        "ID",
        "VAR",
        "ENV",
        "VERSION",
        "PREFIX",
        "ALGORITHM",
        "REGION",
    ];
    kinds.contains(&last.as_str())
}

/// Splits `apiKey`, `API_KEY` and `--api-key` into upper-case words.
fn name_words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut previous_is_lower = false;
    for c in name.chars() {
        let begins_word = !c.is_ascii_alphanumeric() || (c.is_ascii_uppercase() && previous_is_lower);
        if begins_word && words.last().is_some_and(|word| !word.is_empty()) {
            words.push(String::new());
        }
        if c.is_ascii_alphanumeric()
            && let Some(word) = words.last_mut()
        {
            word.push(c.to_ascii_uppercase());
        }
        previous_is_lower = c.is_ascii_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

fn is_option(text: &str) -> bool {
    text.len() > 1 && text.starts_with('-')
}

fn is_url(value: &str) -> bool {
    value.contains("://")
}

fn is_path(value: &str) -> bool {
    ["/", "./", "../", "~/"].iter().any(|start| value.starts_with(start))
}

fn is_flag(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "true" | "false" | "yes" | "no" | "on" | "off" | "none" | "null")
}

fn is_number(value: &str) -> bool {
    value.chars().any(|c| c.is_ascii_digit()) && value.chars().all(|c| c.is_ascii_digit() || "+-.,_:".contains(c))
}

/// Returns true for numbers and for words of letters, such as `production`, `Europe/Berlin` or `my-file.txt`.
fn is_plain(value: &str) -> bool {
    let is_word = |segment: &str| segment.len() < 20 && segment.chars().all(|c| c.is_ascii_alphabetic());
    is_number(value) || value.split(|c: char| !c.is_ascii_alphanumeric()).all(is_word)
}

/// Returns true for a value of at least 20 characters that contains a long segment of mixed letters and digits.
fn is_random(value: &str) -> bool {
    if value.len() < 20 || is_url(value) || is_path(value) || value.contains(|c: char| c.is_whitespace() || c == '@') {
        return false;
    }
    if !value.chars().all(|c| c.is_ascii_alphanumeric() || "+/=_-.~:".contains(c)) || is_uuid(value) {
        return false;
    }
    let segments = value.split(|c: char| !c.is_ascii_alphanumeric());
    let longest = segments.max_by_key(|segment| segment.len()).unwrap_or_default();
    let digits = longest.chars().filter(char::is_ascii_digit).count();
    longest.len() >= 16 && digits >= 2 && digits < longest.len() && entropy(longest) >= 3.0
}

fn is_uuid(value: &str) -> bool {
    value.len() == 36 && value.split('-').map(str::len).eq([8, 4, 4, 4, 12])
}

/// Returns the Shannon entropy in bits per character.
fn entropy(text: &str) -> f64 {
    let mut counts = [0_u32; 128];
    for byte in text.bytes() {
        counts[usize::from(byte & 0x7F)] += 1;
    }
    let length = text.len() as f64;
    counts.iter().filter(|&&count| count > 0).map(|&count| f64::from(count) / length).map(|p| -p * p.log2()).sum()
}
