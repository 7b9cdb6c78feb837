//! Calls to real processes: each caller receives one response or error, whatever happens to the server.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use mcp_satellite_actors::model::event::Event;
use mcp_satellite_actors::model::exit::{CallError, CallFate};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::wait::until;

use super::support::{Instance, Server, real, text};

/// Waits until the server has received this many calls.
async fn calls_received(server: &Instance, calls: u64) {
    let received = async || server.received().await;
    until("the calls are received", received, |received| received["calls"].as_u64() == Some(calls)).await;
}

/// Waits until the server has received this many cancellations. Returns the number of polls, each of which is a call.
async fn cancellations_received(server: &Instance, count: usize) -> u64 {
    let mut polls = 0;
    let received = async || {
        polls += 1;
        server.received().await
    };
    until("the cancellations are received", received, |received| {
        received["cancelled"].as_array().unwrap().len() == count
    })
    .await;
    polls
}

#[test]
fn two_hundred_concurrent_callers_receive_their_own_responses() {
    real(async |satellite| {
        // Each response has another delay, so that the responses arrive in another order than the calls.
        let server = satellite.online(Server::sim(&["--call-delay=100ms", "--jitter=0.9", "--seed=7"])).await;
        let calls = (0..200).map(|caller| {
            let server = server.clone();
            tokio::spawn(async move {
                let arguments = json!({"text": format!("caller {caller}"), "number": caller});
                let answer = server.call("echo", arguments.clone()).await.unwrap();
                assert_eq!(answer["structuredContent"], arguments);
            })
        });
        for call in join_all(calls.collect::<Vec<_>>()).await {
            call.unwrap();
        }
        let view = server.view();
        assert_eq!((view.counters.calls(), view.counters.errors()), (200, 0));
        assert_eq!(view.port.as_ref().unwrap().calls_in_flight(), 0);
    });
}

#[test]
fn a_result_of_8_mib_arrives_whole() {
    const SIZE: usize = 8 * 1024 * 1024;
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        assert_eq!(server.text("big", json!({"bytes": SIZE})).await.len(), SIZE);
        server.assert_callable().await;
    });
}

#[test]
fn arguments_of_several_mib_arrive_whole() {
    // The response contains the arguments twice, and a line may have 16 MiB.
    const SIZE: usize = 7 * 1024 * 1024;
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let answer = server.call("echo", json!({"text": "x".repeat(SIZE)})).await.unwrap();
        assert_eq!(answer["structuredContent"]["text"].as_str().unwrap().len(), SIZE);
    });
}

#[test]
fn a_timed_out_call_is_cancelled_and_its_late_answer_is_dropped() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let before = server.view().counters.messages();
        let late = json!({"ms": 1000, "ignore_cancel": true});
        let limit = Duration::from_millis(100);
        let answer = server.call_within(Some(limit), "sleep", late).await;
        assert!(matches!(answer, Err(CallError::TimedOut { after, .. }) if after >= limit), "{answer:?}");
        let polls = cancellations_received(&server, 1).await;

        // The late response counts as a message, and no caller receives it.
        until(
            "the late response is received",
            async || server.view().counters.messages(),
            |messages| *messages == before + polls + 1,
        )
        .await;
        server.assert_callable().await;
        assert_eq!(server.view().counters.malformed(), 0);
    });
}

#[test]
fn the_call_of_a_caller_that_disconnects_is_cancelled() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&["--hang-calls"])).await;
        let caller = tokio::spawn({
            let server = server.clone();
            async move { server.call("echo", json!({})).await }
        });
        calls_received(&server, 1).await;
        caller.abort();
        cancellations_received(&server, 1).await;
        assert_eq!(server.view().port.as_ref().unwrap().calls_in_flight(), 0);
    });
}

#[test]
fn progress_extends_a_deadline() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let long = json!({"ms": 5000, "progress_every_ms": 100});
        let answer = server.call_within(Some(Duration::from_secs(3)), "sleep", long).await.unwrap();
        assert_eq!(text(&answer), "slept 5000 ms");
    });
}

#[test]
fn progress_extends_a_deadline_up_to_the_cap() {
    real(async |satellite| {
        let (limit, cap) = (Duration::from_millis(700), Duration::from_millis(1500));
        let server = Server::sim(&[]).policy(|policy| policy.session.request_timeout_max = cap);
        let server = satellite.online(server).await;
        let endless = json!({"ms": 3_600_000, "progress_every_ms": 50});
        let answer = server.call_within(Some(limit), "sleep", endless).await;
        assert!(matches!(answer, Err(CallError::TimedOut { after, .. }) if after >= cap), "{answer:?}");
        cancellations_received(&server, 1).await;
    });
}

#[test]
fn fifty_callers_of_a_killed_server_each_receive_maybe_executed_once() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&["--hang-calls"])).await;
        let old = server.pid();
        let callers: Vec<_> = (0..50)
            .map(|caller| {
                let server = server.clone();
                tokio::spawn(async move { server.call("echo", json!({"text": caller})).await })
            })
            .collect();
        calls_received(&server, 50).await;
        server.signal(Signal::SIGKILL);
        let fate = CallError::Terminated { fate: CallFate::MaybeExecuted, reason: "killed by SIGKILL".to_owned() };
        for answer in join_all(callers).await {
            assert_eq!(answer.unwrap(), Err(fate.clone()));
        }
        server.online_again(old).await;
        let is_failed_call = |event: &Event| matches!(event, Event::ToolExecuted { tool_name, success: false, .. } if tool_name == "echo");
        until(
            "all failed calls are reported",
            async || server.events(),
            |events| events.iter().filter(|event| is_failed_call(&event.event)).count() >= 50,
        )
        .await;
        let failed_calls = server.events().iter().filter(|event| is_failed_call(&event.event)).count();
        assert_eq!((failed_calls, server.view().counters.errors()), (50, 50));
        assert_eq!(server.received().await["calls"], 0, "a call was repeated");
    });
}

#[test]
fn a_repeatable_call_is_answered_by_the_next_run() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&["--call-delay=500ms"])).await;
        let caller = tokio::spawn({
            let server = server.clone();
            async move { server.text("add", json!({"a": 2, "b": 40})).await }
        });
        calls_received(&server, 1).await;
        server.signal(Signal::SIGKILL);
        assert_eq!(caller.await.unwrap(), "42");
        assert_eq!(server.view().restarts, 1);
    });
}

#[test]
fn calls_to_a_server_that_does_not_read_time_out_without_affecting_others() {
    real(async |satellite| {
        let deaf = satellite.online(Server::sim(&["--hang-after=0"])).await;
        let other = satellite.online(Server::sim(&[])).await;
        // More than the capacity of the pipe and of the satellite's queue for one server.
        let load = "x".repeat(256 * 1024);
        let callers: Vec<_> = (0..24)
            .map(|_| {
                let (deaf, arguments) = (deaf.clone(), json!({"text": load}));
                tokio::spawn(async move { deaf.call_within(Some(Duration::from_secs(1)), "echo", arguments).await })
            })
            .collect();
        for _ in 0..20 {
            other.assert_callable().await;
        }
        for answer in join_all(callers).await {
            let answer = answer.unwrap();
            assert!(matches!(answer, Err(CallError::TimedOut { .. })), "{:?}", answer.map(|_| "an answer"));
        }
        assert_eq!(deaf.view().port.as_ref().unwrap().calls_in_flight(), 0);
        other.assert_callable().await;
        deaf.handle.restart(&deaf.id).await.unwrap();
    });
}

#[test]
fn errors_of_a_server_are_returned_unchanged() {
    real(async |satellite| {
        let server = satellite.online(Server::sim(&[])).await;
        let answer = server.call("fail", json!({"message": "disk full"})).await;
        assert!(
            matches!(&answer, Err(CallError::Server { message, .. }) if message.contains("disk full")),
            "{answer:?}"
        );
        let answer = server.call("tool_error", json!({"message": "no such row"})).await.unwrap();
        assert_eq!((&answer["isError"], text(&answer).contains("no such row")), (&Value::Bool(true), true));
    });
}

#[test]
fn thirty_servers_run_in_thirty_separate_processes() {
    real(async |satellite| {
        let mut servers = Vec::new();
        for number in 0..30 {
            servers.push(satellite.install(Server::sim(&[]).env("NUMBER", &number.to_string())).await);
        }
        let mut pids = BTreeSet::new();
        for (number, server) in servers.iter().enumerate() {
            server.online().await;
            pids.insert(server.pid());
            assert_eq!(server.text("env", json!({"name": "NUMBER"})).await, number.to_string());
        }
        assert_eq!(pids.len(), servers.len());
        assert_eq!(satellite.scope.processes().len(), servers.len());
    });
}
