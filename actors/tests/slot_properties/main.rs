//! The slot against a model of its environment: a root that grants permits late, twice or after their withdrawal,
//! servers with every possible behavior, commands, callers, and a supervisor that panics. For every sequence of steps
//! the invariants in `world.rs` hold after each step, and the slot finally comes to rest.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod away;
#[path = "../samples/mod.rs"]
mod samples;
mod world;

use std::time::Duration;

use away::Loss;
use proptest::prelude::*;
use world::{Command, ConfigShape, End, RemoteShape, ServerAction, Step, World};

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        3 => Just(End::Code(0)),
        2 => Just(End::Code(1)),
        1 => Just(End::Signal),
        1 => Just(End::Wire),
        1 => Just(End::Unresponsive),
        1 => Just(End::Panicked),
    ]
}

fn loss() -> impl Strategy<Value = Loss> {
    prop_oneof![
        4 => Just(Loss::Refused),
        2 => Just(Loss::Cut),
        2 => Just(Loss::Expired),
        1 => Just(Loss::Unauthorized),
        1 => Just(Loss::Forbidden),
        2 => prop_oneof![Just(None), (0..400_u64).prop_map(Some)].prop_map(Loss::Throttled),
        1 => Just(Loss::Unavailable),
        1 => Just(Loss::NotFound),
        1 => Just(Loss::Unhealthy),
        1 => Just(Loss::Panicked),
    ]
}

fn server() -> impl Strategy<Value = ServerAction> {
    prop_oneof![
        2 => Just(ServerAction::Spawns),
        2 => Just(ServerAction::FirstByte),
        2 => Just(ServerAction::Initializes),
        2 => Just(ServerAction::Lists),
        1 => Just(ServerAction::CannotList),
        1 => Just(ServerAction::CallSucceeds),
        1 => prop_oneof![Just(ServerAction::Degrades), Just(ServerAction::Restores)],
        3 => (end(), loss()).prop_map(|(end, loss)| ServerAction::Ends(end, loss)),
    ]
}

fn any_config() -> impl Strategy<Value = ConfigShape> {
    prop_oneof![
        4 => Just(ConfigShape::Listed),
        2 => Just(ConfigShape::AlwaysOn),
        2 => Just(ConfigShape::Incomplete),
        2 => Just(ConfigShape::Lazy),
        3 => any_remote(),
        6 => (0..4_u8).prop_map(ConfigShape::Rolling),
    ]
}

fn any_remote() -> impl Strategy<Value = ConfigShape> {
    let rarely = || prop::bool::weighted(0.1);
    (any::<bool>(), rarely(), rarely(), 0..2_u8, 0..3_u8).prop_map(|(bounded, lazy, incomplete, address, token)| {
        ConfigShape::Remote(RemoteShape { bounded, lazy, incomplete, address, token })
    })
}

fn command() -> impl Strategy<Value = Command> {
    prop_oneof![
        6 => Just(Command::Start),
        4 => Just(Command::Stop),
        3 => Just(Command::Restart),
        3 => Just(Command::Reconnect),
        6 => any_config().prop_map(Command::Update),
        1 => prop_oneof![Just(Command::Uninstall), Just(Command::Shutdown)],
    ]
}

/// `command_weight` is the frequency of commands: 3 is occasional, 20 is more frequent than their effects.
fn any_step(command_weight: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => Just(Step::Progress),
        8 => (any::<bool>(), server()).prop_map(|(last, server)| Step::ServerAction(last, server)),
        command_weight => command().prop_map(Step::Command),
        3 => Just(Step::Call),
        3 => Just(Step::CallEnds),
        1 => Just(Step::CallBeforeSleep),
        2 => Just(Step::RootReads),
        2 => Just(Step::RootGrants),
        2 => Just(Step::GrantArrives),
        2 => (any::<usize>(), server()).prop_map(|(nth, server)| Step::StaleMessage(nth, server)),
        4 => prop_oneof![0..2_000_u64, 0..90_000_u64, 0..400_000_u64].prop_map(|ms| Step::Wait(Duration::from_millis(ms))),
        1 => (0..400_000_u64).prop_map(|ms| Step::Suspended(Duration::from_millis(ms))),
        1 => Just(Step::SpuriousTick),
        1 => Just(Step::SupervisorPanics),
    ]
}

/// Runs the steps, waits until the slot is at rest, and shuts it down.
fn run_steps(first: ConfigShape, known: bool, adopts: bool, steps: Vec<Step>) {
    let mut world = World::new(first, known, adopts);
    for step in steps {
        world.step(step);
    }
    world.settle();
    world.step(Step::Command(Command::Shutdown));
    world.settle();
    assert!(world.removed);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_invariants_hold_for_every_sequence_of_inputs(
        first in any_config(),
        known in any::<bool>(),
        steps in prop::collection::vec(any_step(3), 1..120),
    ) {
        run_steps(first, known, false, steps);
    }

    #[test]
    fn the_invariants_hold_for_a_lazy_instance_with_known_tools(steps in prop::collection::vec(any_step(1), 1..120)) {
        run_steps(ConfigShape::Lazy, true, false, steps);
    }

    #[test]
    fn the_invariants_hold_for_an_instance_that_adopts_a_running_server(
        first in any_config(),
        known in any::<bool>(),
        steps in prop::collection::vec(any_step(3), 1..60),
    ) {
        run_steps(first, known, true, steps);
    }

    #[test]
    fn the_invariants_hold_under_frequent_commands(
        first in any_config(),
        known in any::<bool>(),
        adopts in any::<bool>(),
        steps in prop::collection::vec(any_step(20), 1..80),
    ) {
        run_steps(first, known, adopts, steps);
    }
}
