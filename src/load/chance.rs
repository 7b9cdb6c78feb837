//! What is drawn, from one seed.

/// One seed, many streams: what one draws does not shift what another does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub u64);
