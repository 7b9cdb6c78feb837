//! Minimal MCP server: line by line, one request at a time, on one thread, so that a child forked by an attempt is in a
//! consistent state.

use std::io::{self, BufRead, Write};

use serde_json::{Value, json};

use crate::arguments::AttemptArguments;
use crate::flags::CrashKind;
use crate::outcome::AttemptOutcome;
use crate::{facts, files, kernel, keys, limits, network, privileges, processes};

type Attempt = fn(&AttemptArguments) -> Result<AttemptOutcome, String>;

const ATTEMPTS: [(&str, &str, Attempt); 33] = [
    ("read_file", "path: of a file or a folder", files::read_file),
    ("read_environ", "pid, or \"any\"; needle", files::read_environ),
    ("write_file", "path: of a file, of a folder, or of neither", files::write_file),
    ("descriptors", "", files::descriptors),
    ("see_processes", "pid, start_time", processes::see_processes),
    ("signal", "pid, start_time", processes::signal),
    ("ptrace", "pid, start_time", processes::ptrace),
    ("fork", "count, limit", processes::fork),
    ("setuid", "", privileges::setuid),
    ("setuid_binary", "path, args", privileges::setuid_binary),
    ("chroot", "", privileges::chroot),
    ("raise_limits", "", limits::raise_limits),
    ("fill_tmp", "bytes, path: of the folder, /tmp if not given", limits::fill_tmp),
    ("many_files", "count, path: of the folder, /tmp if not given", limits::many_files),
    ("big_file", "bytes, path: of the folder, HOME if not given", limits::big_file),
    ("memory", "bytes", limits::memory),
    ("open_files", "count", limits::open_files),
    ("set_hostname", "", kernel::set_hostname),
    ("mount", "", kernel::mount),
    ("remount", "path: of a mount, each that is read-only if not given", kernel::remount),
    ("unshare", "", kernel::unshare),
    ("setns", "pid", kernel::setns),
    ("device", "", kernel::device),
    ("sysctl_write", "", kernel::sysctl_write),
    ("cgroup_escape", "", kernel::cgroup_escape),
    ("network", "address: host:port", network::connect),
    ("listen", "address: host:port", network::listen),
    ("unix_socket", "path, or @name", network::unix_socket),
    ("raw_socket", "", network::raw_socket),
    ("vsock", "", network::vsock),
    ("io_uring", "", kernel::io_uring),
    ("keyring", "needle: a key's description", keys::find),
    ("plant_key", "name: of a key in the user's keyring, for a minute", keys::plant),
];

pub(crate) fn serve(input: impl BufRead, mut output: impl Write, crash: Option<CrashKind>) -> io::Result<()> {
    for line in input.lines() {
        // A line that is not JSON is ignored.
        let Ok(message) = serde_json::from_str::<Value>(&line?) else { continue };
        let Some(method) = message["method"].as_str() else { continue };
        if method == "notifications/initialized"
            && let Some(crash) = crash
        {
            crash.crash();
        }
        let Some(id) = message.get("id") else { continue };
        let mut response = json!({"jsonrpc": "2.0", "id": id});
        match answer(method, &message["params"]) {
            Ok(result) => response["result"] = result,
            Err((code, text)) => response["error"] = json!({"code": code, "message": text}),
        }
        writeln!(output, "{response}")?;
        output.flush()?;
    }
    Ok(())
}

fn answer(method: &str, params: &Value) -> Result<Value, (i32, String)> {
    match method {
        "initialize" => Ok(json!({
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "escape", "version": env!("CARGO_PKG_VERSION")},
        })),
        "ping" => Ok(json!({})),
        "tools/list" => Ok(json!({"tools": [
            {
                "name": "attempt",
                "description": "Tries one escape, and tells whether it came off.",
                "inputSchema": {
                    "type": "object",
                    "properties": {
                        "what": {"type": "string", "enum": ATTEMPTS.iter().map(|(name, ..)| *name).collect::<Vec<_>>()},
                    },
                    "required": ["what"],
                    "additionalProperties": true,
                },
            },
            {
                "name": "facts",
                "description": "What this process sees of itself and of the machine.",
                "inputSchema": {"type": "object"},
            },
        ]})),
        "tools/call" => match params["name"].as_str() {
            Some("attempt") => Ok(attempt(&params["arguments"])),
            Some("facts") => Ok(result(&facts::facts())),
            _ => Err((-32602, "there are two tools: attempt, facts".to_owned())),
        },
        _ => Err((-32601, format!("no such method: {method}"))),
    }
}

fn result(structured: &Value) -> Value {
    json!({"content": [{"type": "text", "text": structured.to_string()}], "structuredContent": structured})
}

fn attempt(arguments: &Value) -> Value {
    let arguments = AttemptArguments(arguments);
    let outcome = arguments.text("what").and_then(|what| {
        let Some((name, takes, attempt)) = ATTEMPTS.iter().find(|(name, ..)| *name == what) else {
            let names = ATTEMPTS.map(|(name, ..)| name).join(", ");
            return Err(format!("no such attempt: {what}; there are: {names}"));
        };
        let outcome = attempt(&arguments).map_err(|error| format!("{name}: {error} (it takes {takes})"))?;
        Ok(json!({"what": name, "escaped": outcome.escaped, "detail": outcome.detail}))
    });
    match outcome {
        Ok(structured) => result(&structured),
        Err(error) => json!({"content": [{"type": "text", "text": error}], "isError": true}),
    }
}
