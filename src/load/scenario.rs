//! What is to happen, as a file says it.

/// What is to happen.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name.
    pub name: String,
}
