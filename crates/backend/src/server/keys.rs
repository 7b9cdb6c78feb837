//! Credentials: 256 random bits, returned once and stored only as digests.

use std::fmt::Write as _;
use std::io;

use mcp_satellite_actors::model::secret::Secret;
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;

use mcp_satellite_config::TokenHash;

// The purpose determines the prefix of a credential, so that a leaked one can be recognized.
#[derive(Debug, Clone, Copy)]
pub(super) enum CredentialKind {
    Satellite,
    Registration,
    Admin,
}

impl CredentialKind {
    fn prefix(self) -> &'static str {
        match self {
            Self::Satellite => "sbk_",
            Self::Registration => "sbr_",
            Self::Admin => "sba_",
        }
    }
}

pub(super) fn generate_credential(purpose: CredentialKind) -> io::Result<Secret> {
    Ok(format!("{}{}", purpose.prefix(), random_digits::<32>()?).into())
}

pub(super) fn generate_id(prefix: &str) -> io::Result<String> {
    Ok(format!("{prefix}{}", random_digits::<12>()?))
}

fn random_digits<const BYTES: usize>() -> io::Result<String> {
    let mut bits = [0; BYTES];
    SystemRandom::new().fill(&mut bits).map_err(|_| io::Error::other("the system provides no random numbers"))?;
    Ok(hexadecimal(&bits))
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut digits, byte| {
        // Writing to a string does not fail.
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}

// Compares in constant time.
pub(super) fn is_same_hash(one: &TokenHash, other: &[u8]) -> bool {
    one.0.as_slice().ct_eq(other).into()
}
