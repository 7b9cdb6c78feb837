//! The built satellite against the built backend.
