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

/// Words in names of which the value is a secret, unless it is a URL or a path.
const SECRET_WORDS: [&str; 11] = [
    "PASSW",
    "PASSPHRASE",
    "SECRET",
    "APIKEY",
    "ACCESSKEY",
    "ACCOUNTKEY",
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

/// The largest depth of nested texts.
const DEPTH_MAX: u8 = 12;

/// Returns true if the value of an environment variable or a header is probably a secret.
pub fn looks_secret(name: &str, value: &str) -> bool {
    find_secret(name, value.trim(), DEPTH_MAX).is_some()
}

/// Returns true if the value must be masked. In doubt it returns true: a needless mask is harmless, a visible secret is
/// not.
pub fn may_be_secret(name: &str, value: &str) -> bool {
    let is_harmless = value.chars().count() < 8
        || value.parse::<f64>().is_ok()
        || is_path(value)
        || value.chars().all(|letter| letter.is_ascii_lowercase())
        || is_plain_url(value);
    let is_doubtful =
        |name: &str| name_words(name).iter().any(|word| matches!(word.as_str(), "PRIVATE" | "CONN" | "CONNECTION"));
    !is_harmless || has_secret_word(name) || has_weak_word(name) || is_doubtful(name) || looks_secret(name, value)
}

/// Returns true if the literal text of an environment variable or a header probably contains a secret. In a text with
/// variables, such as `Bearer ${TOKEN}`, the name does not decide.
pub fn template_has_secret(name: &str, value: &TextTemplate) -> bool {
    if let Some(text) = value.as_literal() {
        return looks_secret(name, text);
    }
    value.parts.iter().any(|part| matches!(part, TemplatePart::Literal(text) if looks_secret("", text.expose())))
}

/// Finds the secret in an argument. `previous` is the argument before it, which can be an option such as `--api-key`.
/// Returns the bytes of the secret in `arg`.
pub fn secret_in_arg(previous: Option<&str>, arg: &str) -> Option<Range<usize>> {
    find_after(previous, arg, DEPTH_MAX)
}

fn find_after(previous: Option<&str>, arg: &str, depth: u8) -> Option<Range<usize>> {
    let option = previous.filter(|previous| is_option(previous) && !previous.contains('=') && !is_option(arg));
    find_secret(option.unwrap_or_default(), arg, depth)
}

/// Finds the secret in a text that belongs to `name`. Returns its bytes; with more than one secret, the range reaches
/// from the first to the last.
fn find_secret(name: &str, text: &str, depth: u8) -> Option<Range<usize>> {
    if is_known_token(text) || is_secret_by_name(name, text) {
        let start = scheme_length(text);
        return (start < text.len()).then_some(start..text.len());
    }
    if let Some(inner) = depth.checked_sub(1).filter(|_| text.len() <= NESTED_TEXT_MAX) {
        // OPENAPI_MCP_HEADERS={"Authorization": "Bearer X"}: the whole text is the secret.
        if text.trim_start().starts_with(['{', '[']) && has_secret_in_json(text, inner) {
            return Some(0..text.len());
        }
        let nested = secret_in_url(text, inner).or_else(|| match named_value(text) {
            Some((name, at)) => shifted(find_secret(name, &text[at..], inner), at),
            None => secret_in_words(text, inner),
        });
        if nested.is_some() {
            return nested;
        }
    }
    (is_random(text) && !is_about_a_secret(name)).then_some(0..text.len())
}

fn shifted(range: Option<Range<usize>>, by: usize) -> Option<Range<usize>> {
    range.map(|range| range.start + by..range.end + by)
}

/// Adds a range to those that were found.
fn extend(found: &mut Option<Range<usize>>, more: Range<usize>) {
    *found = Some(found.as_ref().map_or(more.start, |found| found.start.min(more.start))..more.end);
}

/// Splits `--token=X`, `API_KEY=X` (`docker run -e`) and `Authorization: Bearer X` (`mcp-remote --header`). Returns the
/// name and the place of the value.
fn named_value(text: &str) -> Option<(&str, usize)> {
    let at = text.find(['=', ':'])?;
    let (name, value) = (&text[..at], &text[at + 1..]);
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    (is_name && !value.starts_with("//")).then(|| (name, text.len() - value.trim_start().len()))
}

/// Finds the secrets in the words of a shell command, or in the fields of a connection string such as
/// `Server=db;Password=X`.
fn secret_in_words(text: &str, depth: u8) -> Option<Range<usize>> {
    let words: Vec<String> = if text.contains(char::is_whitespace) {
        shlex::split(text).unwrap_or_else(|| text.split_whitespace().map(str::to_owned).collect())
    } else {
        text.split([';', ',']).map(str::to_owned).collect()
    };
    if words.first().is_some_and(|word| word == text) {
        return None;
    }
    let (mut found, mut at, mut previous) = (None, 0, None);
    for word in &words {
        let range = find_after(previous, word, depth);
        previous = Some(word.as_str());
        let start = text[at..].find(word).map(|offset| at + offset);
        // The shell replaces a variable.
        if let Some(range) = range.filter(|range| !word[range.start..].starts_with('$')) {
            // A word with quotes or escapes inside does not occur in the text, but its secret may.
            let secret = &word[range.clone()];
            let start = start.map(|start| start + range.start);
            let Some(start) = start.or_else(|| text[at..].find(secret).map(|offset| at + offset)) else {
                return Some(0..text.len());
            };
            extend(&mut found, start..start + secret.len());
        }
        at = start.map_or(at, |start| start + word.len());
    }
    found
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
fn has_secret_in_json(text: &str, depth: u8) -> bool {
    let mut key = "";
    let mut strings = text.split('"').skip(1);
    while let Some(string) = strings.next() {
        let between = strings.next().unwrap_or_default();
        if between.trim_start().starts_with(':') {
            key = string;
        } else if find_secret(key, string, depth).is_some() {
            return true;
        }
    }
    false
}

/// Finds the secrets of a URL: password, random segments of the path, and key parameters. The text can be the rest of a
/// URL after a variable, such as `:password@host` or `&key=X`.
fn secret_in_url(text: &str, depth: u8) -> Option<Range<usize>> {
    let is_scheme = |scheme: &str| scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    let scheme = text.find("://").filter(|&at| at > 0 && is_scheme(&text[..at]));
    let start = match scheme {
        Some(scheme) => scheme + 3,
        None if text.starts_with([':', '?', '&']) => 0,
        None => return None,
    };
    let mut found: Option<Range<usize>> = None;
    let authority_end = text[start..].find(['/', '?', '#', '&']).map_or(text.len(), |at| start + at);
    if let Some(at) = text[start..authority_end].rfind('@') {
        let userinfo = &text[start..start + at];
        let password = userinfo.find(':').map_or(0, |colon| colon + 1);
        // `ssh://git@host` and `postgres://user@host` have no password.
        let is_secret = password > 0 || is_known_token(userinfo) || is_random(userinfo);
        if is_secret && password < userinfo.len() {
            extend(&mut found, start + password..start + at);
        }
    }
    let query = if text.starts_with('&') { 0 } else { text.find('?').unwrap_or(text.len()) };
    let mut at = authority_end;
    for segment in text[authority_end.min(query)..query].split('/') {
        if is_known_token(segment) || is_random(segment) {
            extend(&mut found, at..at + segment.len());
        }
        at += segment.len() + 1;
    }
    let mut at = query + 1;
    for pair in text.get(query + 1..).unwrap_or_default().split(['&', '#']) {
        if let Some((name, value)) = pair.split_once('=')
            && !value.is_empty()
            && (find_secret(name, value, depth).is_some() || is_key_parameter(name) && !is_plain(value))
        {
            let start = at + name.len() + 1;
            extend(&mut found, start..start + value.len());
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

/// Returns true if the name makes the value a secret.
fn is_secret_by_name(name: &str, value: &str) -> bool {
    if value.is_empty() || is_url(value) || is_flag(value) || is_about_a_secret(name) {
        return false;
    }
    let has_secret_word = has_secret_word(name);
    if is_number(value) {
        // MAX_TOKENS=4096 and GPIO_PIN=17 are no secrets; PASSWORD=1, TOKEN=12345678 and PIN=4321 are.
        let letters = letters(name);
        let is_counted = name_words(name).iter().any(|word| matches!(word.as_str(), "MAX" | "MIN" | "NUM"));
        let ends = SECRET_WORDS.iter().any(|word| letters.ends_with(word)) || is_password(name);
        return letters.contains("PASSW")
            || letters.contains("SECRET")
            || ends && !is_counted
            || name_words(name).last().is_some_and(|word| word == "PIN") && value.len() >= 4;
    }
    if is_path(value) {
        return has_secret_word && is_base64(value);
    }
    has_secret_word || has_weak_word(name) && !is_plain(value)
}

fn has_secret_word(name: &str) -> bool {
    let letters = letters(name);
    SECRET_WORDS.iter().any(|word| letters.contains(word)) || is_password(name)
}

fn has_weak_word(name: &str) -> bool {
    name_words(name).iter().any(|word| WEAK_WORDS.contains(&word.as_str())) || letters(name).ends_with("KEY")
}

/// Returns true for `DB_PASS`, `MYSQL_PWD` and `smtppass`.
fn is_password(name: &str) -> bool {
    let last = name_words(name).pop().unwrap_or_default();
    ["PASS", "PWD"].iter().any(|word| last.ends_with(word)) && last != "BYPASS" && last != "COMPASS" || last == "PW"
}

fn letters(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_uppercase()
}

/// Returns true for names such as `API_KEY_FILE`, `TOKEN_URL` or `KEYBOARD`, of which the value is not the secret itself.
fn is_about_a_secret(name: &str) -> bool {
    let mut words = name_words(name);
    let last = words.pop().unwrap_or_default();
    // VAULT_SECRET_ID is a secret, AWS_ACCESS_KEY_ID is none.
    if last == "ID" && words.last().is_some_and(|word| word == "SECRET" || word == "SESSION") {
        return false;
    }
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

/// Returns true for a URL with a host and without credentials and query.
fn is_plain_url(value: &str) -> bool {
    value.split_once("://").is_some_and(|(scheme, rest)| {
        let has_host = rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[');
        !scheme.is_empty() && has_host && !rest.contains(|c: char| c == '@' || c == '?' || c.is_whitespace())
    })
}

/// Returns true for the text of random bytes, such as a key of AWS, which can begin with a slash.
fn is_base64(value: &str) -> bool {
    let has = |test: fn(&char) -> bool| value.chars().any(|c| test(&c));
    value.len() >= 16
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "+/=".contains(c))
        && has(char::is_ascii_digit)
        && has(char::is_ascii_uppercase)
        && has(char::is_ascii_lowercase)
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
