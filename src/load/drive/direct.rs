//! drive/direct
