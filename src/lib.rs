pub mod journal;
pub mod sink;
