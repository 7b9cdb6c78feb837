//! checks/mod
