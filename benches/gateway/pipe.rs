//! Baseline: clients share the pipe of the server, without a gateway.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};

use super::common::TIMEOUT;

type PendingResponses = Arc<Mutex<HashMap<u64, oneshot::Sender<String>>>>;

pub(crate) struct SharedPipe {
    lines: mpsc::UnboundedSender<String>,
    pending: PendingResponses,
    next: Arc<AtomicU64>,
    _child: Child,
}

pub(crate) struct PipeCaller {
    lines: mpsc::UnboundedSender<String>,
    pending: PendingResponses,
    next: Arc<AtomicU64>,
}

#[derive(Deserialize)]
struct PipeResponse {
    id: u64,
}

impl SharedPipe {
    pub(crate) async fn start(program: &[String]) -> Self {
        let mut child = Command::new(&program[0])
            .args(&program[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (mut stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (lines, mut to_write) = mpsc::unbounded_channel::<String>();
        let pending = PendingResponses::default();
        tokio::spawn(async move {
            while let Some(mut line) = to_write.recv().await {
                // All queued lines are written at once, as in every gateway measured here.
                while let Ok(next) = to_write.try_recv() {
                    line.push_str(&next);
                }
                stdin.write_all(line.as_bytes()).await.unwrap();
            }
        });
        tokio::spawn(read(BufReader::new(stdout), Arc::clone(&pending)));
        let pipe = Self { lines, pending, next: Arc::default(), _child: child };
        let caller = pipe.caller();
        caller
            .request(|id| {
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"method":"initialize","params":{{"protocolVersion":"2025-11-25","capabilities":{{}},"clientInfo":{{"name":"bench","version":"0"}}}}}}"#
                )
            })
            .await;
        caller.lines.send("{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n".to_owned()).unwrap();
        pipe
    }

    pub(crate) fn caller(&self) -> PipeCaller {
        PipeCaller { lines: self.lines.clone(), pending: Arc::clone(&self.pending), next: Arc::clone(&self.next) }
    }
}

impl PipeCaller {
    pub(crate) async fn calls(self, calls: usize) -> Vec<Duration> {
        let mut took = Vec::with_capacity(calls);
        for _ in 0..calls {
            let began = Instant::now();
            let response = self
                .request(|id| {
                    format!(
                        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"echo","arguments":{{"text":"hello"}}}}}}"#
                    )
                })
                .await;
            took.push(began.elapsed());
            assert!(response.contains("hello"), "{response}");
        }
        took
    }

    async fn request(&self, message: impl FnOnce(u64) -> String) -> String {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, response) = oneshot::channel();
        self.pending.lock().unwrap().insert(id, sender);
        let mut line = message(id);
        line.push('\n');
        self.lines.send(line).unwrap();
        tokio::time::timeout(TIMEOUT, response).await.unwrap().unwrap()
    }
}

async fn read(mut stdout: BufReader<ChildStdout>, pending: PendingResponses) {
    let mut line = String::new();
    while stdout.read_line(&mut line).await.unwrap() > 0 {
        let PipeResponse { id } = serde_json::from_str(&line).unwrap();
        let caller = pending.lock().unwrap().remove(&id).unwrap();
        caller.send(std::mem::take(&mut line)).unwrap();
    }
}
