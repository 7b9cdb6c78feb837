//! Prober: it repeatedly calls a random instance that is shown as online. No fault excuses a failed call. A failure is
//! excused only if the status, process or connection of the instance changes within the time in which the runtime must
//! detect a silent server.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use mcp_satellite_actors::model::policy::Policy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::runtime::RuntimeHandle;
use rand::RngExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::LoadCaller;
use crate::fleet::LoadFleet;
use crate::random::RunSeed;
use crate::recorder::RunRecorder;
use crate::types::{CallOutcome, InstanceNo, PlannedCall, ProbeResult};

// Maximum number of concurrent probes; further ones are skipped.
const PROBES_MAX: usize = 256;
// Pause between the attempts of a probe.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
// Tolerance for the detection of a silent server, beyond the times of its policy.
const DETECTION_TOLERANCE: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(crate) struct Prober {
    pub caller: Arc<dyn LoadCaller>,
    pub runtime: RuntimeHandle,
    pub fleet: Arc<LoadFleet>,
    pub recorder: Arc<RunRecorder>,
    pub policy: Arc<Policy>,
    // Longest timeout of the other calls.
    pub timeout: Duration,
    pub seed: RunSeed,
    // Interval between probes.
    pub every: Duration,
    pub stop: CancellationToken,
}

impl Prober {
    // Stops when `stop` is cancelled and the probes in flight have ended.
    pub(crate) async fn run(self) {
        let mut chance = self.seed.stream("probe", 0);
        let mut looks = JoinSet::new();
        for number in 0_u64.. {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                () = sleep(self.every) => {}
            }
            while looks.try_join_next().is_some() {}
            // Draw in any case, so that later draws do not depend on the status of this instance.
            let nth =
                InstanceNo(chance.random_range(0..u32::try_from(self.fleet.ids.len()).unwrap_or(u32::MAX).max(1)));
            let view = self.runtime.status(self.fleet.id(nth)).filter(|view| view.status == Status::Online);
            if let Some(view) = view.filter(|_| looks.len() < PROBES_MAX) {
                let prober = self.clone();
                looks.spawn(async move { prober.probe(nth, &view, &number.to_string()).await });
            }
        }
        while looks.join_next().await.is_some() {}
    }

    /// Calls each of these instances that is online and returns those that answered. Stops early if the prober is
    /// stopped.
    pub(crate) async fn probe_all(&self, instances: Vec<InstanceNo>) -> Vec<InstanceNo> {
        let now = self.recorder.clock.now().as_millis();
        let ask = |nth: InstanceNo| async move {
            let view = self.runtime.status(self.fleet.id(nth)).filter(|view| view.status == Status::Online)?;
            let has_answered = self.probe(nth, &view, &format!("all-{now}-{}", nth.0)).await;
            has_answered.then_some(nth)
        };
        let probes = futures::stream::iter(instances).map(ask).buffer_unordered(PROBES_MAX);
        probes.take_until(self.stop.cancelled()).filter_map(futures::future::ready).collect().await
    }

    // Returns true if the instance answered.
    async fn probe(&self, nth: InstanceNo, before: &InstanceView, name: &str) -> bool {
        let at = self.recorder.clock.now();
        let (session, watchdog) = (&self.policy.session, &self.policy.watchdog);
        // A call in flight counts as activity until its deadline.
        let deadline = session.request_timeout.max(self.timeout);
        let limit = deadline + watchdog.silence + watchdog.ping_timeout + session.terminate_grace + DETECTION_TOLERANCE;
        let deadline = Instant::now() + limit;
        let moved = || {
            let now = self.runtime.status(self.fleet.id(nth));
            now.is_none_or(|now| has_changed(before, &now))
        };
        for attempt in 0_u32.. {
            let call = PlannedCall {
                pause: Duration::ZERO,
                nth,
                after: Duration::ZERO,
                token: format!("{:x}-probe-{name}-{attempt}", self.seed.0).into(),
                timeout: session.request_timeout,
            };
            // Stop waiting if the runtime loses the call.
            let answer = timeout(limit, self.caller.call(&call)).await;
            let answer =
                answer.unwrap_or_else(|_| CallOutcome::Failed { fate: None, why: "the call did not end".to_owned() });
            let moved = moved();
            let is_settled = moved || !matches!(answer, CallOutcome::Failed { .. });
            if is_settled || Instant::now() >= deadline {
                let has_answered = !moved && !matches!(answer, CallOutcome::Failed { .. });
                let token = call.token;
                self.recorder.record_probe(&ProbeResult { nth, at, answer, token, changed: moved });
                return has_answered;
            }
            sleep(RETRY_PAUSE).await;
        }
        false
    }
}

fn has_changed(before: &InstanceView, now: &InstanceView) -> bool {
    now.status != Status::Online
        || now.pid != before.pid
        || now.restarts != before.restarts
        || now.attempt != before.attempt
        || now.initialized_at != before.initialized_at
}
