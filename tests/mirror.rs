//! That the mirror shows what has arrived as it arrived, and says what it is told as it is told: so that what is seen in it
//! from the other side of an endpoint is the endpoint's doing.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

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
        // Errors say that it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Mirror {
    fn start() -> Self {
        let path = Path::new(env!("CARGO_BIN_EXE_satellite")).with_file_name("examples").join("mirror");
        assert!(path.exists(), "{} is not there: cargo build --example mirror", path.display());
        let mut child = Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    fn tell(&mut self, line: &[u8]) {
        self.input.write_all(line).unwrap();
        self.input.write_all(b"\n").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.pop(), Some('\n'), "the mirror is gone");
        line
    }
}

/// What a typed reader would lose or change: the order, a number beyond all integers and floats, half a character, a null.
const STRANGE: &str = r#"{ "x":1e400,"params":{"\ud800":"\udfff","n":123456789012345678901234567890,"z":null},"#;

#[test]
fn a_request_is_answered_with_itself() {
    let mut mirror = Mirror::start();
    for id in ["7", r#""7""#, "-1.50e1"] {
        let request = format!(r#"{STRANGE}"id":{id},"method":"x/unknown","jsonrpc":"2.0"}}"#);
        mirror.tell(request.as_bytes());
        assert_eq!(mirror.line(), format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"reflected":{request}}}}}"#));
    }
}

#[test]
fn notifications_and_answers_are_told_back_and_so_is_what_is_neither() {
    let mut mirror = Mirror::start();
    let mirrored = |what: &str| format!(r#"{{"jsonrpc":"2.0","method":"notifications/mirrored","params":{what}}}"#);
    for end in [r#""method":"x""#, r#""id":1,"result":[]"#, r#""id":1,"error":{"code":1,"message":""}"#] {
        let message = format!(r#"{STRANGE}"jsonrpc":"2.0",{end}}}"#);
        mirror.tell(message.as_bytes());
        assert_eq!(mirror.line(), mirrored(&format!(r#"{{"reflected":{message}}}"#)));
    }
    mirror.tell(b"{\"half\xff");
    assert_eq!(mirror.line(), mirrored("{\"malformed\":\"{\\\"half\u{fffd}\"}"));
}

#[test]
fn it_says_what_it_is_told_to_under_the_id_and_the_token_of_who_tells_it() {
    let mut mirror = Mirror::start();
    let said = [
        format!(r#"{STRANGE}"jsonrpc":"2.0","method":"notifications/x"}}"#),
        r#"{"params":{"progressToken":"$token","progress":1},"method":"notifications/progress","jsonrpc":"2.0"}"#
            .into(),
        format!(r#"{STRANGE}"jsonrpc":"2.0","id":"$id","result":{{}}}}"#),
    ];
    let say = format!(
        r#"{{"jsonrpc":"2.0","id":"a","method":"mirror/say","params":{{"_meta":{{"progressToken":9}},"messages":[{}]}}}}"#,
        said.join(" , ")
    );
    mirror.tell(say.as_bytes());
    assert_eq!(mirror.line(), said[0]);
    assert_eq!(mirror.line(), said[1].replace(r#""$token""#, "9"));
    assert_eq!(mirror.line(), said[2].replace(r#""$id""#, r#""a""#));
}
