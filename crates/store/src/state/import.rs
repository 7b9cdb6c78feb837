//! Files of the previous version, which the next version does not read any more. They are kept so that a rollback works;
//! but an entry is removed as soon as it changes in the database, so that no file keeps an erased secret.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, ErrorKind};

use mcp_satellite_actors::model::ids::InstanceId;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{StateKey, StateRows, StateTable};
use mcp_satellite_files::data_dir::{DataDir, is_hex};

const FILE_MAX: u64 = 256 << 20;
const VERSION: u32 = 1;

const VALUES: &str = "values.json";
const ERASURES: &str = "to-erase.json";
const GRANTS: &str = "grants";
const CATALOGUES: &str = "catalogues";
const CATALOGUES_KEY: &str = "catalogues.key";
/// Name of the catalogues' key inside their directory, as written by older releases.
const KEY_IN_CACHE: &str = "key";
const KEY_BYTES: usize = 32;
const BACKEND_KEY: &str = "backend.json";
const BACKEND_DOCUMENT: &str = "backend-config.json";

#[derive(Deserialize)]
struct VersionField {
    version: u32,
}

#[derive(Deserialize)]
struct ValuesFile {
    teams: ValuesByTeam,
}

/// Values by team, user, installation and key.
type ValuesByTeam = BTreeMap<String, BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>>>;

#[derive(Deserialize)]
struct ErasureFile {
    instances: Vec<ErasureEntry>,
}

#[derive(Deserialize)]
struct ErasureEntry {
    #[serde(flatten)]
    id: InstanceFields,
    removed_at: String,
}

#[derive(Deserialize)]
struct InstanceFields {
    team: String,
    user: String,
    installation: String,
}

impl From<InstanceFields> for InstanceId {
    fn from(fields: InstanceFields) -> Self {
        Self::new(fields.team.into(), fields.user.into(), fields.installation.into())
    }
}

pub(super) fn unusable_file(directory: &DataDir, name: &str, why: &dyn Display) -> String {
    format!("`{}` cannot be used: {why}", directory.path().join(name).display())
}

/// Rows of a table from the files of the previous version. An incomplete import is repeated at the next start, because
/// the cause may be temporary.
pub(super) struct ImportedRows {
    pub(super) rows: StateRows,
    pub(super) is_complete: bool,
}

/// Reads the rows of a table from the files of the previous version. Errors contain nothing of the content.
pub(super) fn read(directory: &DataDir, table: StateTable) -> Result<ImportedRows, String> {
    let mut is_complete = true;
    let rows = read_rows(directory, table, &mut is_complete)?;
    Ok(ImportedRows { rows, is_complete })
}

fn read_rows(directory: &DataDir, table: StateTable, is_complete: &mut bool) -> Result<StateRows, String> {
    match table {
        StateTable::UserValues => {
            let Some(file) = read_json::<ValuesFile>(directory, VALUES)? else { return Ok(StateRows::new()) };
            let mut rows = StateRows::new();
            for (team, users) in file.teams {
                for (user, installations) in users {
                    for (installation, given) in installations {
                        let id = InstanceId::new(team.as_str().into(), user.as_str().into(), installation.into());
                        rows.insert(id.into(), serde_json::json!(given).to_string().into_bytes());
                    }
                }
            }
            Ok(rows)
        }
        StateTable::Erasures => {
            let Some(file) = read_json::<ErasureFile>(directory, ERASURES)? else { return Ok(StateRows::new()) };
            let entries = file.instances.into_iter();
            Ok(entries.map(|entry| (InstanceId::from(entry.id).into(), entry.removed_at.into_bytes())).collect())
        }
        StateTable::Grants => read_directory(directory, GRANTS, is_complete, |name, bytes| {
            let name = name.strip_suffix(".json").filter(|digits| is_hex(digits, 32))?;
            let id = serde_json::from_slice::<InstanceFields>(&bytes).map(InstanceId::from);
            // A copy under another name must not become the grant of another instance.
            let id = id.ok().filter(|id| grant_digest(id) == name);
            if id.is_none() {
                tracing::error!(
                    file = name,
                    "cannot read an authorization: the file is damaged or belongs to another instance; its server must \
                     be authorized again"
                );
            }
            Some((id?.into(), bytes))
        }),
        StateTable::Catalogues => {
            // Tools can be discovered again, so the import need not be repeated.
            read_directory(directory, CATALOGUES, &mut false, |name, bytes| {
                is_hex(name, 64).then(|| (StateKey::from(name), bytes))
            })
        }
        StateTable::Keys => {
            // Tools can be discovered again, so an unreadable key of them must not prevent the use of the other key.
            let catalogues = read_catalogues_key(directory).unwrap_or_else(|why| {
                tracing::error!(why, "the key of the cached tools is not imported; a new one is created");
                None
            });
            let backend = read_file(directory, BACKEND_KEY)?;
            let rows = [(StateKey::CATALOGUES, catalogues), (StateKey::BACKEND, backend)];
            Ok(rows.into_iter().filter_map(|(name, body)| Some((name.into(), body?))).collect())
        }
        StateTable::BackendDocument => {
            let body = read_file(directory, BACKEND_DOCUMENT)?;
            Ok(body.into_iter().map(|body| (StateKey::BACKEND.into(), body)).collect())
        }
    }
}

fn read_catalogues_key(directory: &DataDir) -> Result<Option<Vec<u8>>, String> {
    if let Some(key) = read_file(directory, CATALOGUES_KEY)? {
        return Ok(Some(key));
    }
    let Some(cache) = open_old(directory, CATALOGUES)? else { return Ok(None) };
    Ok(read_file(&cache, KEY_IN_CACHE)?.filter(|key| key.len() == KEY_BYTES))
}

/// Removes an entry whose row changes from the file of the previous version.
pub(super) fn forget(directory: &DataDir, table: StateTable, key: &StateKey) -> io::Result<()> {
    let remove = |name: &str| remove_file(directory, name);
    let remove_in = |subdirectory: &str, name: &str| match directory.open_subdirectory(subdirectory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        opened => remove_file(&opened?, name),
    };
    match (table, key) {
        (StateTable::UserValues, StateKey::Instance(id)) => forget_values(directory, id),
        // Without the file the retention starts again, which keeps data longer and never shorter.
        (StateTable::Erasures, _) => remove(ERASURES),
        (StateTable::Grants, StateKey::Instance(id)) => remove_in(GRANTS, &format!("{}.json", grant_digest(id))),
        (StateTable::Catalogues, StateKey::Name(name)) => remove_in(CATALOGUES, name),
        (StateTable::Keys, StateKey::Name(name)) if name == StateKey::BACKEND => remove(BACKEND_KEY),
        (StateTable::Keys, StateKey::Name(name)) if name == StateKey::CATALOGUES => remove(CATALOGUES_KEY),
        (StateTable::BackendDocument, _) => remove(BACKEND_DOCUMENT),
        (StateTable::UserValues | StateTable::Grants | StateTable::Catalogues | StateTable::Keys, _) => Ok(()),
    }
}

/// Removes a file, and the unfinished one of a satellite that was killed while writing it.
fn remove_file(directory: &DataDir, name: &str) -> io::Result<()> {
    let mut removed = false;
    for name in [format!("{name}.new"), name.to_owned()] {
        removed |= directory.remove(&name).map_err(|error| {
            let path = directory.path().join(&name);
            io::Error::new(error.kind(), format!("cannot remove `{}` of the previous version: {error}", path.display()))
        })?;
    }
    if removed {
        // Without it a power loss may bring the file back. Not every file system can sync a directory.
        let _ = directory.sync();
    }
    Ok(())
}

fn forget_values(directory: &DataDir, id: &InstanceId) -> io::Result<()> {
    // A satellite that was killed while writing has left all values in this file.
    directory.remove(&format!("{VALUES}.new"))?;
    // If the file cannot be read now, such as without a free descriptor, it is kept and tried again.
    let Some(bytes) = directory.read(VALUES, FILE_MAX)? else { return Ok(()) };
    let file = serde_json::from_slice::<serde_json::Value>(&bytes).ok().filter(|file| file["version"] == VERSION);
    // Imported before and damaged since: no entry can be removed from it.
    let Some(mut file) = file else { return remove_file(directory, VALUES) };
    let users = file.get_mut("teams").and_then(|teams| teams.get_mut(id.team.as_str()));
    let installations = users.and_then(|users| users.get_mut(id.user.as_str()));
    let removed = installations
        .and_then(serde_json::Value::as_object_mut)
        .and_then(|given| given.remove(id.installation.as_str()));
    if removed.is_none() { Ok(()) } else { directory.replace(VALUES, &serde_json::to_vec_pretty(&file)?) }
}

fn read_json<T: DeserializeOwned>(directory: &DataDir, name: &str) -> Result<Option<T>, String> {
    let Some(bytes) = read_file(directory, name)? else { return Ok(None) };
    let broken = |error: serde_json::Error| {
        let why = format!("the content at line {}, column {} is not valid", error.line(), error.column());
        unusable_file(directory, name, &why)
    };
    let VersionField { version } = serde_json::from_slice(&bytes).map_err(broken)?;
    if version != VERSION {
        let why = format!("the file has version {version}, and this satellite supports version {VERSION}");
        return Err(unusable_file(directory, name, &why));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(broken)
}

fn read_file(directory: &DataDir, name: &str) -> Result<Option<Vec<u8>>, String> {
    directory.read(name, FILE_MAX).map_err(|error| unusable_file(directory, name, &error))
}

/// Reads the files of a subdirectory for which `parse` returns a row. An unreadable file is logged and left out.
fn read_directory(
    directory: &DataDir,
    name: &str,
    is_complete: &mut bool,
    parse: impl Fn(&str, Vec<u8>) -> Option<(StateKey, Vec<u8>)>,
) -> Result<StateRows, String> {
    let Some(opened) = open_old(directory, name)? else { return Ok(StateRows::new()) };
    let names = opened.names().map_err(|error| unusable_file(directory, name, &error))?;
    let mut read = |file: &String| match read_file(&opened, file) {
        Ok(bytes) => parse(file, bytes?),
        Err(why) => {
            tracing::error!(why, "a file of the previous version is not imported");
            *is_complete = false;
            None
        }
    };
    Ok(names.iter().filter_map(&mut read).collect())
}

fn open_old(directory: &DataDir, name: &str) -> Result<Option<DataDir>, String> {
    match directory.open_subdirectory(name) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(|error| unusable_file(directory, name, &error)),
    }
}

/// Returns the file name of a grant without its suffix: a digest, because ids may contain any character.
fn grant_digest(id: &InstanceId) -> String {
    let parts = [id.team.as_str(), id.user.as_str(), id.installation.as_str()];
    let digest = ring::digest::digest(&ring::digest::SHA256, serde_json::json!(parts).to_string().as_bytes());
    let (half, _) = digest.as_ref().split_first_chunk().unwrap_or((&[0; 16], &[]));
    format!("{:032x}", u128::from_be_bytes(*half))
}
