//! Baseline: clients share the server's pipe directly, without a gateway in between.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, oneshot};

use super::common::GIVE_UP;

type PendingAnswers = Arc<Mutex<HashMap<u64, oneshot::Sender<String>>>>;

pub(crate) struct SharedPipe {
    lines: mpsc::UnboundedSender<String>,
    waiting: PendingAnswers,
    next: Arc<AtomicU64>,
    _child: Child,
}

pub(crate) struct PipeCaller {
    lines: mpsc::UnboundedSender<String>,
    waiting: PendingAnswers,
    next: Arc<AtomicU64>,
}

#[derive(Deserialize)]
struct PipeAnswer {
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
        let waiting = PendingAnswers::default();
        tokio::spawn(async move {
            while let Some(mut line) = to_write.recv().await {
                // All waiting lines go into one write, as in every gateway here.
                while let Ok(next) = to_write.try_recv() {
                    line.push_str(&next);
                }
                stdin.write_all(line.as_bytes()).await.unwrap();
            }
        });
        tokio::spawn(read(BufReader::new(stdout), Arc::clone(&waiting)));
        let pipe = Self { lines, waiting, next: Arc::default(), _child: child };
        let caller = pipe.caller();
        caller
            .ask(|id| {
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"method":"initialize","params":{{"protocolVersion":"2025-11-25","capabilities":{{}},"clientInfo":{{"name":"bench","version":"0"}}}}}}"#
                )
            })
            .await;
        caller.lines.send("{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\n".to_owned()).unwrap();
        pipe
    }

    pub(crate) fn caller(&self) -> PipeCaller {
        PipeCaller { lines: self.lines.clone(), waiting: Arc::clone(&self.waiting), next: Arc::clone(&self.next) }
    }
}

impl PipeCaller {
    pub(crate) async fn calls(self, calls: usize) -> Vec<Duration> {
        let mut took = Vec::with_capacity(calls);
        for _ in 0..calls {
            let began = Instant::now();
            let answer = self
                .ask(|id| {
                    format!(
                        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"echo","arguments":{{"text":"hello"}}}}}}"#
                    )
                })
                .await;
            took.push(began.elapsed());
            assert!(answer.contains("hello"), "{answer}");
        }
        took
    }

    async fn ask(&self, request: impl FnOnce(u64) -> String) -> String {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        self.waiting.lock().unwrap().insert(id, answer);
        let mut line = request(id);
        line.push('\n');
        self.lines.send(line).unwrap();
        tokio::time::timeout(GIVE_UP, answered).await.unwrap().unwrap()
    }
}

async fn read(mut stdout: BufReader<ChildStdout>, waiting: PendingAnswers) {
    let mut line = String::new();
    while stdout.read_line(&mut line).await.unwrap() > 0 {
        let PipeAnswer { id } = serde_json::from_str(&line).unwrap();
        let caller = waiting.lock().unwrap().remove(&id).unwrap();
        caller.send(std::mem::take(&mut line)).unwrap();
    }
}
