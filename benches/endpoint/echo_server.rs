//! Stdio MCP server that costs a few microseconds per call: no runtime, no JSON parser, one `read` and one `write` for
//! all messages that are in the pipe. Its tools are `echo`, and `reads`, which returns the number of `read` calls and of
//! calls of `echo` so far.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use memchr::memchr;
use memchr::memmem::Finder;

pub(crate) const ROLE: &str = "echo-server";

const TOOLS: &str = r#"{"tools":[{"name":"echo","description":"Returns the text","inputSchema":{"type":"object","properties":{"text":{"type":"string"}}}},{"name":"reads","description":"Returns the number of reads and calls","inputSchema":{"type":"object"}}]}"#;

/// Returns the command of the server. After the first response to `tools/list` it appends one byte to the file `ready`.
pub(crate) fn command(ready: Option<&Path>) -> Vec<String> {
    let program = std::env::current_exe().unwrap();
    let words = [Some(program.as_path()), Some(Path::new(ROLE)), ready];
    words.into_iter().flatten().map(|word| word.to_str().unwrap().to_owned()).collect()
}

/// Serves until the end of the input.
pub(crate) fn serve(ready: Option<&str>) {
    let mut input = File::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut output = File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap());
    let mut server = EchoServer::new(ready);
    let mut buffer = vec![0; 64 * 1024];
    let mut filled = 0;
    loop {
        if filled == buffer.len() {
            buffer.resize(2 * filled, 0);
        }
        let read = input.read(&mut buffer[filled..]).unwrap();
        if read == 0 {
            return;
        }
        server.reads += 1;
        let (mut begin, mut unseen) = (0, filled);
        filled += read;
        while let Some(length) = memchr(b'\n', &buffer[unseen..filled]) {
            server.answer(&buffer[begin..unseen + length]);
            unseen += length + 1;
            begin = unseen;
        }
        buffer.copy_within(begin..filled, 0);
        filled -= begin;
        // A closed pipe is the end of the session.
        if !server.output.is_empty() && output.write_all(&server.output).is_err() {
            return;
        }
        server.output.clear();
        server.report_ready();
    }
}

struct EchoServer<'a> {
    output: Vec<u8>,
    reads: u64,
    calls: u64,
    ready: Option<&'a str>,
    has_listed: bool,
    id: Finder<'static>,
    method: Finder<'static>,
    version: Finder<'static>,
    name: Finder<'static>,
    text: Finder<'static>,
}

impl<'a> EchoServer<'a> {
    fn new(ready: Option<&'a str>) -> Self {
        Self {
            output: Vec::with_capacity(64 * 1024),
            reads: 0,
            calls: 0,
            ready,
            has_listed: false,
            id: Finder::new(r#""id":"#),
            method: Finder::new(r#""method":""#),
            version: Finder::new(r#""protocolVersion":""#),
            name: Finder::new(r#""name":""#),
            text: Finder::new(r#""text":""#),
        }
    }

    /// Appends the response to a request. Notifications have none.
    fn answer(&mut self, line: &[u8]) {
        let (Some(id), Some(method)) = (self.id.find(line), string_after(line, &self.method)) else { return };
        let id = &line[id + self.id.needle().len()..];
        let id = match id[0] {
            b'"' => &id[..id[1..].iter().position(|letter| *letter == b'"').unwrap() + 2],
            _ => &id[..id.iter().position(|letter| b",} ".contains(letter)).unwrap()],
        };
        self.output.extend_from_slice(br#"{"jsonrpc":"2.0","id":"#);
        self.output.extend_from_slice(id);
        match method {
            b"tools/call" if string_after(line, &self.name) == Some(b"reads") => {
                let counts = format!("{} {}", self.reads, self.calls);
                self.result_text(counts.as_bytes());
            }
            b"tools/call" => {
                self.calls += 1;
                self.result_text(string_after(line, &self.text).unwrap_or_default());
            }
            b"tools/list" => {
                self.has_listed = true;
                self.result(TOOLS.as_bytes());
            }
            b"initialize" => {
                let version = string_after(line, &self.version).unwrap_or(b"2025-11-25");
                self.result(
                    &[
                        br#"{"protocolVersion":""#,
                        version,
                        br#"","capabilities":{"tools":{}},"serverInfo":{"name":"echo","version":"0"}}"#,
                    ]
                    .concat(),
                );
            }
            b"ping" => self.result(b"{}"),
            _ => self.output.extend_from_slice(br#","error":{"code":-32601,"message":"method not found"}}"#),
        }
        self.output.push(b'\n');
    }

    fn result(&mut self, result: &[u8]) {
        self.output.extend_from_slice(br#","result":"#);
        self.output.extend_from_slice(result);
        self.output.push(b'}');
    }

    /// Appends a result with one text, which is the inside of a JSON string.
    fn result_text(&mut self, text: &[u8]) {
        self.output.extend_from_slice(br#","result":{"content":[{"type":"text","text":""#);
        self.output.extend_from_slice(text);
        self.output.extend_from_slice(br#""}]}}"#);
    }

    fn report_ready(&mut self) {
        if let Some(path) = self.ready.take_if(|_| self.has_listed) {
            OpenOptions::new().append(true).open(path).unwrap().write_all(b".").unwrap();
        }
    }
}

/// Returns the inside of the JSON string that follows the key.
fn string_after<'a>(line: &'a [u8], key: &Finder<'_>) -> Option<&'a [u8]> {
    let value = &line[key.find(line)? + key.needle().len()..];
    let mut end = 0;
    while *value.get(end)? != b'"' {
        end += if value[end] == b'\\' { 2 } else { 1 };
    }
    Some(&value[..end])
}
