//! Credentials of a registered satellite, stored in the data directory and readable only by its owner.

use std::io::Write;

use mcp_satellite_actors::model::secret::Secret;
use serde::{Deserialize, Serialize};

use mcp_satellite_files::data_dir::DataDir;

pub const KEY_FILE: &str = "backend.json";

const KEY_MAX: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SatelliteKey {
    // URL of the backend that issued the key.
    pub(super) url: String,
    pub(super) satellite_id: String,
    pub(super) secret: Secret,
}

#[derive(Serialize, Deserialize)]
struct StoredKeyFile {
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
    // The file cannot be used, for this reason.
    Damaged(String),
}

pub(super) fn load(data_dir: &DataDir, url: &str) -> StoredKey {
    let text = match data_dir.read(KEY_FILE, KEY_MAX) {
        Ok(Some(text)) => text,
        Ok(None) => return StoredKey::Missing,
        Err(error) => return StoredKey::Damaged(error.to_string()),
    };
    // The serde error would contain the value, which may be a secret.
    let Ok(StoredKeyFile { url: of, satellite_id, api_key }) = serde_json::from_slice(&text) else {
        return StoredKey::Damaged("the file is damaged".to_owned());
    };
    if of != url {
        return StoredKey::OtherBackend { url: of };
    }
    if !is_id(&satellite_id) || !is_sendable(&api_key) {
        return StoredKey::Damaged("the id or the key contains characters that cannot be sent".to_owned());
    }
    StoredKey::Key(SatelliteKey { url: of, satellite_id, secret: api_key.into() })
}

pub(super) fn store(data_dir: &DataDir, key: &SatelliteKey) -> std::io::Result<()> {
    let SatelliteKey { url, satellite_id, secret } = key;
    let stored =
        StoredKeyFile { url: url.clone(), satellite_id: satellite_id.clone(), api_key: secret.expose().to_owned() };
    data_dir.replace(KEY_FILE, &serde_json::to_vec_pretty(&stored)?)
}

/// Checks that a key can be stored, before the single-use token is spent.
pub(super) fn check_writable(data_dir: &DataDir) -> std::io::Result<()> {
    let name = format!("{KEY_FILE}.rehearsal");
    let mut file = data_dir.create_file(&name)?;
    file.write_all(&[b' '; 4096])?;
    file.sync_all()?;
    data_dir.remove(&name).map(drop)
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

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const URL: &str = "https://backend.example.com";

    fn key() -> SatelliteKey {
        SatelliteKey { url: URL.to_owned(), satellite_id: "sat-1".to_owned(), secret: "0123456789abcdef".into() }
    }

    #[test]
    fn a_key_is_stored_privately_and_can_be_loaded_and_replaced() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let dir = DataDir::open(home.path()).unwrap();
        assert_eq!(load(&dir, URL), StoredKey::Missing);
        store(&dir, &key()).unwrap();
        let path = dir.path().join(KEY_FILE);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(load(&dir, URL), StoredKey::Key(key()));
        store(&dir, &SatelliteKey { satellite_id: "sat-2".to_owned(), ..key() }).unwrap();
        assert!(matches!(load(&dir, URL), StoredKey::Key(key) if key.satellite_id == "sat-2"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn a_key_of_another_backend_is_not_used() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let dir = DataDir::open(home.path()).unwrap();
        store(&dir, &key()).unwrap();
        let other = load(&dir, "https://elsewhere.example.com");
        assert_eq!(other, StoredKey::OtherBackend { url: URL.to_owned() });
    }

    #[test]
    fn a_damaged_key_file_is_reported_without_its_content() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let dir = DataDir::open(home.path()).unwrap();
        let long = "x".repeat(100_000);
        for text in [
            "",
            "{",
            "{\"url\":\"https://backend.example.com\",\"satellite_id\":\"sat-1\"}",
            "{\"url\":\"https://backend.example.com\",\"satellite_id\":\"../etc\",\"api_key\":\"secret-of-many\"}",
            "{\"url\":\"https://backend.example.com\",\"satellite_id\":\"s\",\"api_key\":\"secret of many\"}",
            "{\"url\":17,\"satellite_id\":\"s\",\"api_key\":[\"secret-of-many\"]}",
            long.as_str(),
        ] {
            dir.replace(KEY_FILE, text.as_bytes()).unwrap();
            let StoredKey::Damaged(why) = load(&dir, URL) else { panic!("{text}") };
            assert!(!why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn check_writable_detects_a_missing_directory_and_leaves_no_file() {
        let home = mcp_satellite_files::data_dir::private_tempdir();
        let dir = DataDir::open(home.path()).unwrap();
        check_writable(&dir).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        home.close().unwrap();
        assert!(check_writable(&dir).is_err());
    }

    #[test]
    fn the_debug_output_of_a_key_hides_the_secret() {
        assert!(!format!("{:?}", key()).contains("0123456789abcdef"));
    }
}
