//! world/sim
