//! The example server `mirror` returns messages unchanged and sends the given messages unchanged. A difference that is
//! seen through an endpoint is therefore caused by the endpoint.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

struct Mirror {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // Errors mean that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Mirror {
    fn start() -> Self {
        let path = Path::new(env!("CARGO_BIN_EXE_satellite")).with_file_name("examples").join("mirror");
        assert!(path.exists(), "{} does not exist: run cargo build --example mirror", path.display());
        let mut child = Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    fn send(&mut self, line: &[u8]) {
        self.input.write_all(line).unwrap();
        self.input.write_all(b"\n").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.pop(), Some('\n'), "the mirror closed its stdout");
        line
    }
}

/// JSON that a typed parser would lose or change: order, numbers out of range, lone surrogates, and a null.
const STRANGE: &str = r#"{ "x":1e400,"params":{"\ud800":"\udfff","n":123456789012345678901234567890,"z":null},"#;

#[test]
fn a_response_contains_the_request_unchanged() {
    let mut mirror = Mirror::start();
    for id in ["7", r#""7""#, "-1.50e1"] {
        let request = format!(r#"{STRANGE}"id":{id},"method":"x/unknown","jsonrpc":"2.0"}}"#);
        mirror.send(request.as_bytes());
        assert_eq!(mirror.line(), format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"reflected":{request}}}}}"#));
    }
}

#[test]
fn notifications_responses_and_malformed_lines_are_mirrored_as_notifications() {
    let mut mirror = Mirror::start();
    let mirrored = |params: &str| format!(r#"{{"jsonrpc":"2.0","method":"notifications/mirrored","params":{params}}}"#);
    for end in [r#""method":"x""#, r#""id":1,"result":[]"#, r#""id":1,"error":{"code":1,"message":""}"#] {
        let message = format!(r#"{STRANGE}"jsonrpc":"2.0",{end}}}"#);
        mirror.send(message.as_bytes());
        assert_eq!(mirror.line(), mirrored(&format!(r#"{{"reflected":{message}}}"#)));
    }
    mirror.send(b"{\"half\xff");
    assert_eq!(mirror.line(), mirrored("{\"malformed\":\"{\\\"half\u{fffd}\"}"));
}

#[test]
fn mirror_say_sends_the_given_messages_with_id_and_token_of_its_request() {
    let mut mirror = Mirror::start();
    let messages = [
        format!(r#"{STRANGE}"jsonrpc":"2.0","method":"notifications/x"}}"#),
        r#"{"params":{"progressToken":"$token","progress":1},"method":"notifications/progress","jsonrpc":"2.0"}"#
            .into(),
        format!(r#"{STRANGE}"jsonrpc":"2.0","id":"$id","result":{{}}}}"#),
    ];
    let request = format!(
        r#"{{"jsonrpc":"2.0","id":"a","method":"mirror/say","params":{{"_meta":{{"progressToken":9}},"messages":[{}]}}}}"#,
        messages.join(" , ")
    );
    mirror.send(request.as_bytes());
    assert_eq!(mirror.line(), messages[0]);
    assert_eq!(mirror.line(), messages[1].replace(r#""$token""#, "9"));
    assert_eq!(mirror.line(), messages[2].replace(r#""$id""#, r#""a""#));
}
