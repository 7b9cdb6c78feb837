#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use mcp_satellite_files::data_dir::private_tempdir;

use super::*;

const VALUES: &str = r#"{"version": 1, "teams": {"acme": {
    "alice": {"n1": {"KEY": "secret-of-alice", "PIN": "1"}},
    "bob": {"n1": {"KEY": "secret-of-bob"}}}}}"#;
const ERASURES: &str = r#"{"version": 1, "instances": [
    {"team": "acme", "user": "bob", "installation": "n1", "removed_at": "2026-01-01T00:00:00Z"}]}"#;
const BACKEND: &str = r#"{"url": "https://b", "satellite_id": "sat-1", "api_key": "secret-of-the-backend"}"#;
const DOCUMENT: &str = r#"{"url": "https://b", "config": {"hash": "h1", "servers": "secret-of-a-server"}}"#;
const KEY: [u8; 32] = [7; 32];

fn id(user: &str) -> InstanceId {
    InstanceId::new("acme".into(), user.into(), "n1".into())
}

fn grant(user: &str) -> String {
    format!(
        r#"{{"version": 1, "team": "acme", "user": "{user}", "installation": "n1", "access_token": "token-of-{user}"}}"#
    )
}

fn catalogue() -> String {
    "ab".repeat(32)
}

fn write(path: &Path, content: impl AsRef<[u8]>) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Creates a data directory as the previous version wrote it.
fn earlier_data_dir() -> tempfile::TempDir {
    let home = private_tempdir();
    let at = |name: &str| home.path().join(name);
    for directory in ["grants", "catalogues"] {
        fs::create_dir(at(directory)).unwrap();
        fs::set_permissions(at(directory), fs::Permissions::from_mode(0o700)).unwrap();
    }
    write(&at("values.json"), VALUES);
    write(&at("to-erase.json"), ERASURES);
    write(&at("backend.json"), BACKEND);
    write(&at("backend-config.json"), DOCUMENT);
    write(&at("catalogues.key"), KEY);
    write(&at("catalogues").join(catalogue()), "{}");
    write(&at("catalogues").join("notes"), "of a person");
    // The digests are those of the previous version.
    write(&at("grants/1288b2cd02a41a67148c7e7fc0a63c55.json"), grant("alice"));
    write(&at("grants/00000000000000000000000000000000.json"), grant("carol"));
    home
}

fn open(home: &tempfile::TempDir) -> StateDb {
    StateDb::open(&DataDir::open(home.path()).unwrap()).unwrap()
}

fn text(database: &StateDb, table: StateTable, key: impl Into<StateKey>) -> Option<String> {
    database.load_row(table, &key.into()).unwrap().map(|body| String::from_utf8(body).unwrap())
}

fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if let Ok(bytes) = fs::read(&path) {
            // The log disappears when its database is closed, which may be now.
            found.insert(path, bytes);
        }
    }
    found
}

fn contains(home: &tempfile::TempDir, text: &str) -> bool {
    files(home.path()).values().any(|bytes| bytes.windows(text.len()).any(|part| part == text.as_bytes()))
}

#[test]
fn a_data_directory_of_the_previous_version_is_imported_completely_and_kept() {
    let home = earlier_data_dir();
    let before = files(home.path());
    for start in 1..=2 {
        let database = open(&home);
        let values = database.load(StateTable::UserValues).unwrap();
        assert_eq!(values.keys().cloned().collect::<Vec<_>>(), [id("alice").into(), id("bob").into()]);
        let alices = text(&database, StateTable::UserValues, id("alice"));
        assert_eq!(alices.as_deref(), Some(r#"{"KEY":"secret-of-alice","PIN":"1"}"#), "start {start}");
        let removed_at = text(&database, StateTable::Erasures, id("bob"));
        assert_eq!(removed_at.as_deref(), Some("2026-01-01T00:00:00Z"));
        let grants = database.load(StateTable::Grants).unwrap();
        assert_eq!(grants, [(id("alice").into(), grant("alice").into_bytes())].into(), "a copied grant is left out");
        assert_eq!(text(&database, StateTable::Keys, StateKey::BACKEND).as_deref(), Some(BACKEND));
        let key = database.load_row(StateTable::Keys, &StateKey::CATALOGUES.into()).unwrap();
        assert_eq!(key.as_deref(), Some(&KEY[..]));
        assert_eq!(text(&database, StateTable::BackendDocument, StateKey::BACKEND).as_deref(), Some(DOCUMENT));
        assert_eq!(database.keys(StateTable::Catalogues).unwrap(), [StateKey::from(catalogue().as_str())]);
    }
    let mut after = files(home.path());
    after.retain(|path, _| !path.file_name().unwrap().to_string_lossy().starts_with(DATABASE));
    assert_eq!(after, before, "the previous version can still start with its files");
    let mode = fs::metadata(home.path().join(DATABASE)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_row_that_is_deleted_is_not_imported_again_and_its_secret_is_in_no_file() {
    let home = earlier_data_dir();
    let database = open(&home);
    for (table, key) in [
        (StateTable::UserValues, id("alice").into()),
        (StateTable::Erasures, id("bob").into()),
        (StateTable::Grants, id("alice").into()),
        (StateTable::Keys, StateKey::from(StateKey::BACKEND)),
        (StateTable::BackendDocument, StateKey::from(StateKey::BACKEND)),
        (StateTable::Catalogues, StateKey::from(catalogue().as_str())),
    ] {
        assert!(database.load_row(table, &key).unwrap().is_some());
        database.set(table, key.clone(), None);
        database.save().unwrap();
        assert_eq!(open(&home).load_row(table, &key).unwrap(), None);
    }
    for secret in ["secret-of-alice", "token-of-alice", "secret-of-the-backend", "secret-of-a-server"] {
        assert!(!contains(&home, secret), "{secret}");
    }
    assert!(contains(&home, "secret-of-bob"), "the others are kept in the old file, too");
    assert!(fs::read_to_string(home.path().join("values.json")).unwrap().contains("secret-of-bob"));
    assert!(!home.path().join("to-erase.json").exists() && home.path().join("catalogues.key").exists());
}

#[test]
fn a_key_inside_the_directory_of_catalogues_is_imported() {
    let home = earlier_data_dir();
    fs::rename(home.path().join("catalogues.key"), home.path().join("catalogues/key")).unwrap();
    let key = open(&home).load_row(StateTable::Keys, &StateKey::CATALOGUES.into()).unwrap();
    assert_eq!(key.as_deref(), Some(&KEY[..]));
}

#[test]
fn replaced_and_deleted_secrets_leave_no_bytes() {
    let home = private_tempdir();
    let database = open(&home);
    let long = "y".repeat(20_000);
    for number in 0..50 {
        let body = format!("secret-{number}-{long}").into_bytes();
        database.set(StateTable::UserValues, id(&format!("user-{number}")), Some(body));
    }
    database.set(StateTable::Grants, id("alice"), Some(b"secret-token".to_vec()));
    database.save().unwrap();
    assert!(contains(&home, "secret-7-yyy") && contains(&home, "secret-token"));
    for number in 0..50 {
        let body = (number % 2 == 0).then(|| b"another".to_vec());
        database.set(StateTable::UserValues, id(&format!("user-{number}")), body);
    }
    database.set(StateTable::Grants, id("alice"), Some(b"another-token".to_vec()));
    database.save().unwrap();
    assert!(!contains(&home, "secret-") && !contains(&home, "yyy") && contains(&home, "another-token"));
}

#[test]
fn an_old_file_that_cannot_be_read_is_imported_after_its_repair() {
    let home = private_tempdir();
    let file = home.path().join("values.json");
    for broken in [r#"{"version": 1, "teams": {"acme": sekrit}}"#, r#"{"version": 2}"#] {
        write(&file, broken);
        let why = open(&home).load(StateTable::UserValues).unwrap_err();
        assert!(why.contains("values.json` cannot be used: ") && !why.contains("sekrit"), "{why}");
        assert_eq!(fs::read_to_string(&file).unwrap(), broken);
    }
    let database = open(&home);
    assert_eq!(database.load(StateTable::Grants).unwrap(), StateRows::new(), "the other tables can be used");
    write(&file, VALUES);
    assert_eq!(database.load(StateTable::UserValues).unwrap().len(), 2);
    database.save().unwrap();
    fs::remove_file(file).unwrap();
    assert_eq!(open(&home).load(StateTable::UserValues).unwrap().len(), 2);
}

#[test]
fn an_authorization_that_cannot_be_read_is_imported_at_a_later_start() {
    let home = earlier_data_dir();
    let unreadable = home.path().join("grants/ee580454ac587d9a661e65a33c23d520.json");
    fs::create_dir(&unreadable).unwrap();
    let database = open(&home);
    let grants = database.load(StateTable::Grants).unwrap();
    assert_eq!(grants.keys().cloned().collect::<Vec<_>>(), [StateKey::from(id("alice"))]);
    database.set(StateTable::Grants, id("alice"), None);
    database.save().unwrap();
    drop(database);

    fs::remove_dir(&unreadable).unwrap();
    write(&unreadable, grant("bob"));
    let database = open(&home);
    let grants = database.load(StateTable::Grants).unwrap();
    assert_eq!(grants.keys().cloned().collect::<Vec<_>>(), [StateKey::from(id("bob"))]);
    database.set(StateTable::Grants, id("bob"), None);
    database.save().unwrap();
    assert_eq!(open(&home).load(StateTable::Grants).unwrap(), StateRows::new());
}

#[test]
fn a_damaged_or_newer_database_is_reported_and_left_unchanged() {
    let home = earlier_data_dir();
    let path = home.path().join(DATABASE);
    drop(open(&home));
    let good = fs::read(&path).unwrap();
    let mut torn = good.clone();
    torn[4096..].fill(0x5a);
    let newer = [&good[..60], &99_u32.to_be_bytes()[..], &good[64..]].concat();
    for (bytes, reason) in [(torn, "cannot be used"), (b"not a database".repeat(90), "not a database"), (newer, "99")] {
        fs::write(&path, &bytes).unwrap();
        let database = open(&home);
        for table in StateTable::ALL {
            let why = database.load(table).unwrap_err();
            assert!(why.contains("state.db` cannot be used: ") && why.contains(reason), "{why}");
        }
        database.set(StateTable::UserValues, id("alice"), Some(b"{}".to_vec()));
        let error = database.save().unwrap_err();
        assert!(matches!(&error, NotSaved::Failed(_)), "{error}");
        assert_eq!(fs::read(&path).unwrap(), bytes);
        assert_eq!(fs::read_to_string(home.path().join("values.json")).unwrap(), VALUES);
    }
}

#[test]
fn changes_on_a_disk_that_refuses_them_stay_pending() {
    let home = earlier_data_dir();
    // Where SQLite creates its log.
    let obstacle = home.path().join("state.db-wal");
    fs::create_dir(&obstacle).unwrap();
    let database = open(&home);
    assert_eq!(database.load(StateTable::UserValues).unwrap().len(), 2, "the old files can be used");
    database.set(StateTable::UserValues, id("alice"), None);
    assert!(database.save().is_err() && database.check_writable().is_err());
    assert_eq!(text(&database, StateTable::UserValues, id("alice")), None);
    assert_eq!(fs::read_to_string(home.path().join("values.json")).unwrap(), VALUES, "nothing is stored elsewhere yet");
    fs::remove_dir(obstacle).unwrap();
    database.check_writable().unwrap();
    let rows = open(&home).load(StateTable::UserValues).unwrap();
    assert_eq!(rows.keys().cloned().collect::<Vec<_>>(), [id("bob").into()]);
    assert!(!contains(&home, "secret-of-alice"));
    assert_eq!(open(&home).load(StateTable::Keys).unwrap().len(), 2, "the probe is removed");
}
