//! Samples of the memory and processor time of servers.

use mcp_satellite::connect::stdio::StdioConnector;
use mcp_satellite_process::usage::UsageSampler;
use testkit::wait::with_limit;

use super::support::{Server, run_alone};

#[test]
fn a_sample_contains_each_running_server_until_it_is_removed() {
    run_alone(async |scope| {
        let connector = StdioConnector::new(Vec::new()).unwrap();
        let satellite = scope.satellite_with(connector.clone()).await;
        let sampler = UsageSampler::new(satellite.handle.clone(), connector);
        let (server, other) = (satellite.online(Server::sim(&[])).await, satellite.online(Server::sim(&[])).await);
        assert_eq!((sampler.latest(&server.id), sampler.status().sampled_at), (None, None));
        sampler.sample().await;
        let first = sampler.latest(&server.id).unwrap();
        assert!(first.rss_bytes > 100_000 && first.cpu_percent.is_none(), "{first:?}");
        sampler.sample().await;
        let second = sampler.latest(&server.id).unwrap();
        assert!(second.at > first.at && second.cpu_percent.is_some(), "{second:?}");
        let series = sampler.series(&server.id);
        assert_eq!(series.last().copied().flatten().unwrap().rss_bytes, second.rss_bytes & !0x3ff);
        assert_eq!(sampler.all_latest().len(), 2);
        let status = sampler.status();
        assert!(status.sampled_at >= Some(second.at) && status.period >= status.cost * 200, "{status:?}");
        server.handle.stop(&server.id).await.unwrap();
        sampler.sample().await;
        assert_eq!(sampler.latest(&server.id), None, "it has no process");
        assert!(!sampler.series(&server.id).is_empty(), "its last hour remains");
        server.handle.uninstall(&server.id).await.unwrap();
        sampler.sample().await;
        assert!(sampler.series(&server.id).is_empty());
        assert!(sampler.latest(&other.id).is_some());
        let task = tokio::spawn(sampler.run());
        satellite.handle.shutdown().await;
        with_limit("the sampler ends with the runtime", task).await.unwrap();
        satellite.ended().await;
    });
}
