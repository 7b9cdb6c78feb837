//! The supervision runtime of mcp-satellite: actors and rules, with no process, socket, file or wall clock of their
//! own. What touches the world comes in through the two traits of [`seam`].

#![forbid(unsafe_code)]

pub mod model;
pub mod seam;
