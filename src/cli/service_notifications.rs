//! Reports of a running satellite to the processes above it: the keeper and the service manager.

use std::sync::Arc;
use std::time::Duration;

use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::snapshot::Snapshot;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_process::keeper::KeeperClient;
use mcp_satellite_process::service_manager::ServiceManager;
use tokio::sync::watch;
use tokio::time::Instant;

/// Minimum time between two texts.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Number of reports that are due within the limit. One that is late, and the time that the actors have to answer, fit into
/// it as well.
const REPORTS: u32 = 4;

/// Reports to the keeper while the actors answer. Never ends. The keeper notifies the watchdog of the service manager, whose
/// interval is the limit if there is no `hang_timeout`.
pub(super) async fn report_alive(
    keeper: &KeeperClient,
    hang_timeout: Option<Duration>,
    manager: &ServiceManager,
    runtime: &RuntimeHandle,
) {
    let watchdog = manager.watchdog.filter(|_| manager.is_notified());
    let Some(limit) = hang_timeout.or(watchdog) else { return std::future::pending().await };
    let part = limit / REPORTS;
    loop {
        let next = Instant::now() + part;
        if runtime.answers(part).await {
            keeper.report_alive();
        } else {
            tracing::error!("the actors do not answer; if this continues, the satellite is ended");
        }
        tokio::time::sleep_until(next).await;
    }
}

/// Text about the servers, for `systemctl status`.
pub(super) struct StatusText {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    last: String,
    next: Instant,
}

impl StatusText {
    pub(super) fn new(runtime: &RuntimeHandle) -> Self {
        Self { snapshot: runtime.watch(), last: String::new(), next: Instant::now() }
    }

    /// Waits for a text that differs from the last one.
    pub(super) async fn wait_changed(&mut self) -> &str {
        loop {
            tokio::time::sleep_until(self.next).await;
            let text = describe(&self.snapshot.borrow_and_update());
            self.next = Instant::now() + STATUS_INTERVAL;
            if text != self.last {
                self.last = text;
                return &self.last;
            }
            if self.snapshot.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

fn describe(snapshot: &Snapshot) -> String {
    let count = |status: Status| snapshot.iter().filter(|view| view.status == status).count();
    let counts = Status::ALL.iter().map(|status| (status, count(*status))).filter(|(_, count)| *count > 0);
    let counts: Vec<String> = counts.map(|(status, count)| format!("{count} {status}")).collect();
    match snapshot.len() {
        0 => "no servers".to_owned(),
        1 => format!("1 server: {}", counts.join(", ")),
        all => format!("{all} servers: {}", counts.join(", ")),
    }
}
