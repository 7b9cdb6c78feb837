//! Writes messages to the client, one per line. A slow client delays the tasks that write; nothing is queued.

use std::pin::Pin;

use bytes::{BufMut as _, BytesMut};
use mcp_satellite_protocol::rpc::put_json;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

/// Maximum size of a message that each stream may buffer. One stream at a time may buffer a larger one.
pub(crate) const SMALL_MAX: usize = 256 << 10;

pub(crate) struct ClientOutput {
    writer: Mutex<Pin<Box<dyn AsyncWrite + Send>>>,
    large: Semaphore,
    closed: CancellationToken,
}

/// Permission of one stream to buffer a message of any size.
#[derive(Default)]
pub(crate) struct BufferPermit<'a>(Option<SemaphorePermit<'a>>);

impl ClientOutput {
    /// `closed` is cancelled when the client does not accept output any more.
    pub(crate) fn new(writer: impl AsyncWrite + Send + 'static, closed: CancellationToken) -> Self {
        Self { writer: Mutex::new(Box::pin(writer)), large: Semaphore::new(1), closed }
    }

    /// Writes a message. Line breaks between its tokens become spaces.
    pub(crate) async fn write(&self, message: &str) {
        let mut line = BytesMut::with_capacity(message.len() + 1);
        put_json(&mut line, message);
        line.put_u8(b'\n');
        let mut writer = self.writer.lock().await;
        let written = async {
            writer.write_all(&line).await?;
            writer.flush().await
        };
        if written.await.is_err() {
            self.closed.cancel();
        }
    }
}

impl<'a> BufferPermit<'a> {
    /// Waits until `bytes` may be buffered. The permission of a large message ends with [`BufferPermit::release`].
    pub(crate) async fn reserve(&mut self, output: &'a ClientOutput, bytes: usize) {
        if bytes > SMALL_MAX && self.0.is_none() {
            // The semaphore is never closed.
            self.0 = output.large.acquire().await.ok();
        }
    }

    pub(crate) fn release(&mut self) {
        self.0 = None;
    }
}
