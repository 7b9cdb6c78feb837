//! Files with environment variables (`env_file`): lines `KEY=VALUE` as VS Code, Docker Compose and Node.js read them.
//!
//! The crate dotenvy is not used: it replaces `$NAME` in values, so that a password with a dollar sign is damaged. VS Code
//! (`src/vs/base/common/envfile.ts`), whose `envFile` this is, replaces nothing.

/// Parses the text of a file. Returns the variables in the order of the file, the later of a name last, and the numbers
/// of the lines that are neither variables nor comments.
pub(crate) fn parse_env_file(text: &str) -> (Vec<(&str, String)>, Vec<usize>) {
    let (mut variables, mut bad_lines) = (Vec::new(), Vec::new());
    let mut rest = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut number = 0;
    while !rest.is_empty() {
        number += 1;
        let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
        let content = line.trim();
        rest = after;
        if content.is_empty() || content.starts_with('#') {
            continue;
        }
        let content = content.strip_prefix("export ").map_or(content, str::trim_start);
        let is_name = |name: &&str| {
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
        };
        let Some((name, value)) = content.split_once('=').map(|(name, value)| (name.trim_end(), value.trim_start()))
        else {
            bad_lines.push(number);
            continue;
        };
        if !is_name(&name) {
            bad_lines.push(number);
            continue;
        }
        let Some(quote) = value.chars().next().filter(|c| matches!(c, '"' | '\'' | '`')) else {
            // A comment begins after white space, so that `a#b` is a value.
            let comment = value.find(" #").or_else(|| value.find("\t#")).or(value.starts_with('#').then_some(0));
            variables.push((name, value[..comment.unwrap_or(value.len())].trim_end().to_owned()));
            continue;
        };
        // A quoted value can have several lines.
        let from = value.as_ptr() as usize - text.as_ptr() as usize + 1;
        let quoted = &text[from..];
        let Some(end) = closing_quote(quoted, quote) else {
            bad_lines.push(number);
            continue;
        };
        let inner = &quoted[..end];
        let lines = inner.matches('\n').count();
        if lines > 0 {
            number += lines;
            rest = quoted[end + 1..].split_once('\n').map_or("", |(_, after)| after);
        }
        variables.push((name, if quote == '"' { unescape(inner) } else { inner.to_owned() }));
    }
    (variables, bad_lines)
}

fn closing_quote(text: &str, quote: char) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if quote == '"' => is_escaped = true,
            _ if c == quote => return Some(at),
            _ => {}
        }
    }
    None
}

fn unescape(text: &str) -> String {
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, if c == '\\' { chars.next() } else { None }) {
            ('\\', Some('n')) => plain.push('\n'),
            ('\\', Some('r')) => plain.push('\r'),
            ('\\', Some('t')) => plain.push('\t'),
            ('\\', Some(escaped @ ('"' | '\\' | '$'))) => plain.push(escaped),
            (_, Some(other)) => plain.extend(['\\', other]),
            (_, None) => plain.push(c),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_quotes_comments_and_export_are_read() {
        let text = "\u{feff}# comment\r\nA=1\r\nexport B = two words # comment\n\nC='$A #x'\nD=\"a\\n\\\"b\\\" $A\" # c\nE=\n\
                    F=pa$$w#rd\nG=\"first\nsecond\"\nH=`h`\nA=3\nI.J-K=l=m\n";
        let (variables, bad) = parse_env_file(text);
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(
            variables,
            [
                ("A", "1"),
                ("B", "two words"),
                ("C", "$A #x"),
                ("D", "a\n\"b\" $A"),
                ("E", ""),
                ("F", "pa$$w#rd"),
                ("G", "first\nsecond"),
                ("H", "h"),
                ("A", "3"),
                ("I.J-K", "l=m"),
            ]
        );
        assert_eq!(bad, [0_usize; 0]);
    }

    #[test]
    fn lines_that_are_no_variables_are_reported_by_number() {
        let (variables, bad) = parse_env_file("A=1\nno variable\n=x\nB C=d\nD=\"open\nE=\"1\n2\"\nbad\n");
        let names: Vec<_> = variables.iter().map(|(name, _)| *name).collect();
        assert_eq!((names, bad), (vec!["A", "D"], vec![2, 3, 4, 7, 8]));
    }
}
