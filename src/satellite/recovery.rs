//! Processes and crashes of earlier satellites.

use mcp_satellite_actors::model::event::Event;
use mcp_satellite_process::keeper::{LostSatellite, SatelliteGeneration};

use super::RunningSatellite;
use super::start::{StartError, run_blocking};
use crate::connect::process::ReclaimedProcesses;
use crate::connect::stdio::{AdoptionCounts, StdioConnector};
use crate::data_dir::DataDir;

impl RunningSatellite {
    /// Reports that this satellite follows one that has crashed.
    pub(super) fn report_recovery(&self, generation: &SatelliteGeneration, left: AdoptionCounts) {
        let SatelliteGeneration { number, previous: Some(LostSatellite { reason, uptime, lost_at }) } = generation
        else {
            return;
        };
        let down_ms = u64::try_from(lost_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        let uptime_seconds = uptime.as_secs();
        let AdoptionCounts { adopted, ended } = left;
        tracing::warn!(
            generation = number,
            reason,
            uptime_seconds,
            down_ms,
            adopted,
            ended,
            "the satellite was restarted after a crash"
        );
        let reason = reason.clone();
        self.runtime.emitter().emit(Event::SatelliteRecovered { generation: *number, reason, down_ms, adopted, ended });
    }
}

/// Ends the processes of the previous satellite, which is dead because this one has locked the data directory.
pub(super) async fn reclaim_processes(data_dir: &DataDir) -> Result<(), StartError> {
    let data_dir = data_dir.clone();
    let step = "end the processes that the last satellite left";
    let reclaimed = run_blocking(step, move || StdioConnector::reclaim(&data_dir)).await?;
    if let Some(ReclaimedProcesses { processes, instances, keeper_pid, left }) = reclaimed {
        let instances = instances.join(", ");
        tracing::warn!(processes, left, keeper_pid, instances, "ended the processes that a killed satellite left");
    }
    Ok(())
}
