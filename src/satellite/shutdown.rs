//! End of a satellite.

use std::sync::PoisonError;
use std::time::Duration;

use mcp_satellite_actors::ShutdownReport;
use mcp_satellite_files::disk::WAIT_MAX;
use mcp_satellite_process::keeper::DescriptorName;

use super::RunningSatellite;

/// Upper limit for the time to finish responses on the control socket at shutdown, and to end leftover processes.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);

impl RunningSatellite {
    pub(crate) async fn shut_down(&self) -> ShutdownReport {
        self.http.close().await;
        // Clients first: their pending requests get real responses, not errors about the shutdown.
        self.endpoint.close().await;
        // Store catalogues that were discovered a moment ago.
        let (catalogues, snapshot) = (self.storage.catalogues.clone(), self.runtime.snapshot());
        let storing = tokio::task::spawn_blocking(move || catalogues.inspect(|catalogues| catalogues.store(&snapshot)));
        let store_deadline = tokio::time::Instant::now() + WAIT_MAX;
        if let Some(delivery) = &self.storage.delivery {
            delivery.hurry().await;
        }
        let report = self.runtime.shutdown().await;
        let telemetry = self.telemetry.close();
        // Stored while the servers end, so that a hanging disk is waited for only once.
        let _ = tokio::join!(tokio::time::timeout_at(store_deadline, storing), telemetry);
        self.users.grants.shut_down().await;
        if let Some(delivery) = &self.storage.delivery {
            let kept = delivery.finish(self.settings.batch.flush_timeout).await;
            if kept > 0 {
                tracing::info!(kept, "some events were not delivered in time; the next start sends them");
            }
        }
        // Last message on the link: the backend takes any later one as a sign that the satellite lives.
        if let Some(link) = &self.link {
            link.send_last_heartbeat(self).await;
        }
        self.close_control_socket().await;
        // A hanging disk keeps what was committed and is not waited for.
        self.storage.journal.close().await;
        // No process should be left; this ends those that a bug has left.
        self.end_all().await;
        if !self.storage.journal.is_hanging() {
            self.storage.directory.remove_socket().await;
        }
        report
    }

    pub(crate) async fn kill(&self) {
        self.runtime.kill();
        self.wait_ended().await;
        self.end_all().await;
    }

    async fn close_control_socket(&self) {
        self.keeper.forget(DescriptorName::Control);
        self.console.ending.cancel();
        let task = self.console.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            // Subscribers receive the last events; one that does not read is not waited for.
            let _ = tokio::time::timeout(FINISH_TIMEOUT, task).await;
        }
    }

    /// Runs on a blocking thread, because it waits for processes to die.
    async fn end_all(&self) {
        let connector = self.connector.clone();
        // An error means that the task panicked; the keeper ends the rest.
        let _ = tokio::task::spawn_blocking(move || connector.kill_all(FINISH_TIMEOUT)).await;
    }
}
