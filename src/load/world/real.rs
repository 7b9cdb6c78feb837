//! world/real
