//! Instances that the console lists because they need attention: at every moment all that do not take calls because of
//! a failure.

use std::sync::Arc;

use mcp_satellite_actors::model::remedy::Remedy;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_console::feed::{InstanceRow, RECOVERING};
use serde_json::json;
use testkit::fleet::{Fleet, LONG, Server, exits};
use tokio::time::{Instant, timeout};

use crate::remote_support::{REFUSED, waits_for_next_attempt};

fn row(view: &InstanceView) -> InstanceRow {
    InstanceRow::from_view(view, Instant::now().into_std())
}

#[tokio::test(start_paused = true)]
async fn a_crashing_instance_is_listed_from_its_first_exit_on() {
    let fleet = Fleet::start().await;
    let server = Server::new("a").script(exits(1.0, 3)).policy(|policy| policy.restart.max_crashes = 4);
    let mut published = fleet.runtime.watch();
    let id = fleet.add(server).await;
    let (mut views, mut rows): (Vec<Arc<InstanceView>>, Vec<InstanceRow>) = Default::default();
    while views.last().is_none_or(|view| view.status != Status::PermanentlyFailed) {
        timeout(LONG, published.changed()).await.unwrap().unwrap();
        views.extend(published.borrow_and_update().get(&id).cloned());
        rows.extend(views.last().map(|view| row(view)));
    }
    let first_exit = views.iter().position(|view| view.last_exit.is_some()).unwrap();
    assert!(rows[..first_exit].iter().all(|row| row.attention.is_none()), "{rows:#?}");
    let mut waiting = 0;
    for (view, row) in views.iter().zip(&rows).skip(first_exit) {
        let Some(attention) = &row.attention else {
            assert_eq!(view.status, Status::Online, "{view:#?}");
            continue;
        };
        if view.status == Status::PermanentlyFailed {
            assert_eq!((attention.urgency, attention.remedy), (1, Some(Remedy::Restart)));
        } else if view.status != Status::Online {
            assert!(attention.urgency >= RECOVERING && attention.step.is_none(), "{attention:?}");
            assert_eq!(attention.remedy, Some(Remedy::Restart));
            assert!(attention.message.contains("exited with code 3"), "{attention:?}");
            waiting += usize::from(row.retry.is_some());
        }
    }
    assert!(waiting >= 3, "{rows:#?}");
    let warns = |row: &&InstanceRow| row.attention.as_ref().is_some_and(|it| it.message.contains("the next one ends"));
    let warnings: Vec<&InstanceRow> = rows.iter().filter(warns).collect();
    assert!(warnings.iter().all(|row| row.attention.as_ref().unwrap().urgency == RECOVERING));
    assert!(warnings.iter().any(|row| row.status == Status::Online), "{rows:#?}");
    fleet.finish().await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_remote_server_is_listed_until_it_is_back_and_a_stopped_one_never() {
    let fleet = Fleet::start().await;
    let (remote, process) = (fleet.online(Server::remote("a")).await, fleet.online(Server::new("b")).await);
    assert_eq!(row(&fleet.view(&remote)).attention, None);
    fleet.remote(&remote).kill(REFUSED);
    // Over HTTP only a request detects a loss.
    fleet.call(&remote, "echo", json!({"text": 1})).await.unwrap_err();
    let lost = row(&*fleet.until_view(&remote, waits_for_next_attempt).await);
    let attention = lost.attention.unwrap();
    assert_eq!((attention.urgency, attention.remedy), (RECOVERING + 1, Some(Remedy::Reconnect)), "{attention:?}");
    assert!(lost.retry.is_some() && attention.message.contains("refused"), "{attention:?}");
    fleet.remote(&remote).bring_up();
    fleet.until(&remote, Status::Online).await;
    assert_eq!(row(&fleet.view(&remote)).attention, None);
    for id in [&remote, &process] {
        fleet.runtime.stop(id).await.unwrap();
        assert_eq!(row(&fleet.view(id)).attention, None);
        fleet.runtime.restart(id).await.unwrap_err();
        fleet.runtime.start(id).await.unwrap();
        assert_eq!(row(&fleet.view(id)).attention, None);
    }
    fleet.finish().await;
}
