//! The slot against a model of its world: a root that grants permits late, twice or after they were withdrawn, servers
//! that do everything a server can do, people who change their minds, callers, and a supervisor that panics. Whatever
//! comes in whatever order, the promises in `world.rs` hold after every step, and in the end the dust settles.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod away;
#[path = "../samples/mod.rs"]
mod samples;
mod world;

use std::time::Duration;

use away::Loss;
use proptest::prelude::*;
use world::{End, Person, Remote, Server, Shape, Step, World};

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

fn server() -> impl Strategy<Value = Server> {
    prop_oneof![
        2 => Just(Server::Appears),
        2 => Just(Server::FirstByte),
        2 => Just(Server::Initializes),
        2 => Just(Server::Lists),
        1 => Just(Server::CannotList),
        1 => Just(Server::Answers),
        1 => prop_oneof![Just(Server::Degrades), Just(Server::Restores)],
        3 => (end(), loss()).prop_map(|(end, loss)| Server::Ends(end, loss)),
    ]
}

fn any_shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        4 => Just(Shape::Listed),
        2 => Just(Shape::AlwaysOn),
        2 => Just(Shape::Incomplete),
        2 => Just(Shape::Lazy),
        3 => any_remote(),
        6 => (0..4_u8).prop_map(Shape::Rolling),
    ]
}

fn any_remote() -> impl Strategy<Value = Shape> {
    let rarely = || prop::bool::weighted(0.1);
    (any::<bool>(), rarely(), rarely(), 0..2_u8, 0..3_u8).prop_map(|(bounded, lazy, incomplete, address, token)| {
        Shape::Remote(Remote { bounded, lazy, incomplete, address, token })
    })
}

fn person() -> impl Strategy<Value = Person> {
    prop_oneof![
        6 => Just(Person::Start),
        4 => Just(Person::Stop),
        3 => Just(Person::Restart),
        3 => Just(Person::Reconnect),
        6 => any_shape().prop_map(Person::Update),
        1 => prop_oneof![Just(Person::Uninstall), Just(Person::Shutdown)],
    ]
}

/// `people` is how often a person acts: 3 is now and then, 20 is before anything comes of what they said.
fn any_step(people: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => Just(Step::AllGoesWell),
        8 => (any::<bool>(), server()).prop_map(|(last, server)| Step::Server(last, server)),
        people => person().prop_map(Step::Person),
        3 => Just(Step::Call),
        3 => Just(Step::CallEnds),
        1 => Just(Step::SlipsIn),
        2 => Just(Step::RootReads),
        2 => Just(Step::RootGrants),
        2 => Just(Step::GrantArrives),
        2 => (any::<usize>(), server()).prop_map(|(nth, server)| Step::OldNews(nth, server)),
        4 => prop_oneof![0..2_000_u64, 0..90_000_u64, 0..400_000_u64].prop_map(|ms| Step::Wait(Duration::from_millis(ms))),
        1 => (0..400_000_u64).prop_map(|ms| Step::Suspended(Duration::from_millis(ms))),
        1 => Just(Step::SpuriousTick),
        1 => Just(Step::SupervisorPanics),
    ]
}

/// Lives through these steps, then comes to rest, then ends.
fn live(first: Shape, known: bool, steps: Vec<Step>) {
    let mut world = World::new(first, known);
    for step in steps {
        world.step(step);
    }
    world.settle();
    world.step(Step::Person(Person::Shutdown));
    world.settle();
    assert!(world.removed);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_comes_in_whatever_order_the_promises_hold(
        first in any_shape(),
        known in any::<bool>(),
        steps in prop::collection::vec(any_step(3), 1..120),
    ) {
        live(first, known, steps);
    }

    #[test]
    fn the_promises_hold_for_what_is_known_from_another_day(steps in prop::collection::vec(any_step(1), 1..120)) {
        live(Shape::Lazy, true, steps);
    }

    #[test]
    fn the_promises_hold_when_people_change_their_minds_before_anything_comes_of_it(
        first in any_shape(),
        known in any::<bool>(),
        steps in prop::collection::vec(any_step(20), 1..80),
    ) {
        live(first, known, steps);
    }
}
