//! Credentials of a registered satellite, kept in the state database.

use mcp_satellite_actors::model::secret::Secret;
use serde::{Deserialize, Serialize};

use mcp_satellite_files::disk::NotSaved;
use mcp_satellite_store::state::{StateDb, StateKey, StateTable};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SatelliteKey {
    // URL of the backend that issued the key.
    pub(super) url: String,
    pub(super) satellite_id: String,
    pub(super) secret: Secret,
}

#[derive(Serialize, Deserialize)]
struct StoredKeyBody {
    url: String,
    satellite_id: String,
    api_key: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum StoredKey {
    Missing,
    Key(SatelliteKey),
    // The key of another backend.
    OtherBackend { url: String },
    // The stored key cannot be used, for this reason.
    Damaged(String),
}

pub(super) fn load(database: &StateDb, url: &str) -> StoredKey {
    let text = match database.load_row(StateTable::Keys, &StateKey::BACKEND.into()) {
        Ok(Some(text)) => text,
        Ok(None) => return StoredKey::Missing,
        Err(why) => return StoredKey::Damaged(why),
    };
    // The serde error would contain the value, which may be a secret.
    let Ok(StoredKeyBody { url: of, satellite_id, api_key }) = serde_json::from_slice(&text) else {
        return StoredKey::Damaged("it is damaged".to_owned());
    };
    if of != url {
        return StoredKey::OtherBackend { url: of };
    }
    if !is_id(&satellite_id) || !is_sendable(&api_key) {
        return StoredKey::Damaged("the id or the key contains characters that cannot be sent".to_owned());
    }
    StoredKey::Key(SatelliteKey { url: of, satellite_id, secret: api_key.into() })
}

pub(super) fn store(database: &StateDb, key: &SatelliteKey) -> Result<(), NotSaved> {
    let SatelliteKey { url, satellite_id, secret } = key;
    let stored =
        StoredKeyBody { url: url.clone(), satellite_id: satellite_id.clone(), api_key: secret.expose().to_owned() };
    let body = serde_json::to_vec(&stored).map_err(|error| NotSaved::Failed(error.to_string()))?;
    database.set(StateTable::Keys, StateKey::BACKEND, Some(body));
    database.save()
}

// Suitable as part of a URL.
pub(super) fn is_id(id: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=128).contains(&id.len()) && id.bytes().all(good) && !matches!(id, "." | "..")
}

// Suitable for a header.
pub(super) fn is_sendable(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use mcp_satellite_files::data_dir::{DataDir, private_tempdir};

    use super::*;

    const URL: &str = "https://backend.example.com";

    fn key() -> SatelliteKey {
        SatelliteKey { url: URL.to_owned(), satellite_id: "sat-1".to_owned(), secret: "0123456789abcdef".into() }
    }

    fn open(home: &tempfile::TempDir) -> StateDb {
        StateDb::open(&DataDir::open(home.path()).unwrap()).unwrap()
    }

    #[test]
    fn a_stored_key_can_be_loaded_and_replaced() {
        let home = private_tempdir();
        let database = open(&home);
        assert_eq!(load(&database, URL), StoredKey::Missing);
        store(&database, &key()).unwrap();
        assert_eq!(load(&database, URL), StoredKey::Key(key()));
        store(&database, &SatelliteKey { satellite_id: "sat-2".to_owned(), ..key() }).unwrap();
        assert!(matches!(load(&open(&home), URL), StoredKey::Key(key) if key.satellite_id == "sat-2"));
    }

    #[test]
    fn a_key_of_another_backend_is_not_used() {
        let home = private_tempdir();
        let database = open(&home);
        store(&database, &key()).unwrap();
        let other = load(&database, "https://elsewhere.example.com");
        assert_eq!(other, StoredKey::OtherBackend { url: URL.to_owned() });
    }

    #[test]
    fn a_damaged_key_is_reported_without_its_content() {
        let home = private_tempdir();
        let database = open(&home);
        for text in [
            "",
            "{",
            "{\"url\":\"https://backend.example.com\",\"satellite_id\":\"sat-1\"}",
            "{\"url\":\"https://backend.example.com\",\"satellite_id\":\"../etc\",\"api_key\":\"secret-of-many\"}",
            "{\"url\":\"https://backend.example.com\",\"satellite_id\":\"s\",\"api_key\":\"secret of many\"}",
            "{\"url\":17,\"satellite_id\":\"s\",\"api_key\":[\"secret-of-many\"]}",
        ] {
            database.set(StateTable::Keys, StateKey::BACKEND, Some(text.into()));
            let StoredKey::Damaged(why) = load(&database, URL) else { panic!("{text}") };
            assert!(!why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn the_debug_output_of_a_key_hides_the_secret() {
        assert!(!format!("{:?}", key()).contains("0123456789abcdef"));
    }
}
