//! A separate user id for each team, for servers without a sandbox, so that servers of one team cannot read the
//! environment, files and memory of another team's.
//!
//! A team gets its id once; the ids are stored in `team-uids.json` in the data directory. An id is never given to
//! another team, not even after the first one is gone, because its files may still exist.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use mcp_satellite_actors::model::ids::TeamId;
use nix::unistd::geteuid;

use super::PrepareError;
use mcp_satellite_actors::model::settings::UidRange;
use mcp_satellite_files::data_dir::DataDir;

const FILE: &str = "team-uids.json";
// Maximum size in bytes; a larger file was not written by a satellite.
const FILE_MAX: u64 = 16 << 20;
// Mode of the directory of homes: every user may enter it, only the owner may list it.
const HOMES_MODE: u32 = 0o711;

pub(super) struct TeamUids {
    range: UidRange,
    directory: DataDir,
    homes: PathBuf,
    assigned_ids: Mutex<BTreeMap<String, u32>>,
    // Locked while an id is stored. `assigned_ids` is not locked then, so that servers of other teams can restart
    // meanwhile.
    write_lock: Mutex<()>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TeamUser {
    pub(super) id: u32,
    pub(super) home: PathBuf,
}

impl TeamUids {
    pub(super) fn open(range: UidRange, data_dir: &DataDir) -> io::Result<Self> {
        if !geteuid().is_root() {
            return Err(io::Error::other("uid_range needs a satellite that runs as root: remove it, or use a sandbox"));
        }
        let assigned_ids = match data_dir.read(FILE, FILE_MAX)? {
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                let file = data_dir.path().join(FILE);
                io::Error::other(format!("cannot read `{}`: {error}", file.display()))
            })?,
            None => BTreeMap::new(),
        };
        // Beside the data directory, which only the satellite can enter.
        let mut homes = data_dir.path().as_os_str().to_owned();
        homes.push(".homes");
        let directory = data_dir.clone();
        Ok(Self {
            range,
            directory,
            homes: homes.into(),
            assigned_ids: Mutex::new(assigned_ids),
            write_lock: Mutex::default(),
        })
    }

    pub(super) fn ensure_user(&self, team: &TeamId) -> Result<TeamUser, PrepareError> {
        let id = self.ensure_id(team)?;
        Ok(TeamUser { id, home: self.ensure_home(id)? })
    }

    fn assigned_id(&self, team: &TeamId) -> Result<Option<u32>, PrepareError> {
        let UidRange { first, last } = self.range;
        let assigned_ids = self.assigned_ids.lock().unwrap_or_else(PoisonError::into_inner);
        match assigned_ids.get(team.as_str()) {
            Some(id) if !(first..=last).contains(id) => {
                Err(format!("the team has the user id {id}, which is not in uid_range: extend the range").into())
            }
            id => Ok(id.copied()),
        }
    }

    fn ensure_id(&self, team: &TeamId) -> Result<u32, PrepareError> {
        if let Some(id) = self.assigned_id(team)? {
            return Ok(id);
        }
        let _writing = self.write_lock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = self.assigned_id(team)? {
            return Ok(id);
        }
        let UidRange { first, last } = self.range;
        let mut after = self.assigned_ids.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let used_ids: Vec<u32> = after.values().copied().collect();
        let free = (first..=last).find(|id| !used_ids.contains(id));
        let id = free.ok_or_else(|| "every user id of uid_range was given to a team: extend the range".to_owned())?;
        after.insert(team.to_string(), id);
        // Stored before use: after a kill the id is not given to another team.
        self.write(&after).map_err(|error| PrepareError::from_io_error("cannot store the team's user id", &error))?;
        *self.assigned_ids.lock().unwrap_or_else(PoisonError::into_inner) = after;
        Ok(id)
    }

    fn write(&self, assigned_ids: &BTreeMap<String, u32>) -> io::Result<()> {
        self.directory.replace(FILE, &serde_json::to_vec(assigned_ids)?)
    }

    /// Returns the home of a user; creates it if it is missing. Other users cannot replace it: only root can write to
    /// the directory of homes.
    fn ensure_home(&self, id: u32) -> Result<PathBuf, PrepareError> {
        let home = self.homes.join(id.to_string());
        let failed = |error: io::Error| {
            PrepareError::from_io_error(&format!("cannot create the home `{}`", home.display()), &error)
        };
        create_dir_if_missing(&self.homes, HOMES_MODE).map_err(failed)?;
        let homes = self.homes.symlink_metadata().map_err(failed)?;
        if !homes.is_dir() || homes.uid() != 0 || homes.mode() & 0o022 != 0 {
            let homes = self.homes.display();
            let why = format!("the directory of homes `{homes}` must belong to root, and only root may write to it");
            return Err(format!("{why}: correct or remove it").into());
        }
        for above in self.homes.ancestors().skip(1) {
            if above.metadata().map_err(failed)?.mode() & 0o001 == 0 {
                let above = above.display();
                let why =
                    format!("other users cannot enter `{above}`, and homes are below it: choose another --data-dir");
                return Err(why.into());
            }
        }
        if create_dir_if_missing(&home, 0o700).map_err(failed)? {
            chown(&home, Some(id), Some(id)).map_err(failed)?;
        }
        let owner = home.symlink_metadata().map_err(failed)?;
        if owner.is_dir() && owner.uid() == 0 {
            // A satellite was killed before it changed the owner.
            chown(&home, Some(id), Some(id)).map_err(failed)?;
        } else if !owner.is_dir() || owner.uid() != id {
            return Err(format!("the home `{}` belongs to another user: remove it", home.display()).into());
        }
        Ok(home)
    }
}

fn create_dir_if_missing(directory: &Path, mode: u32) -> io::Result<bool> {
    // Creating a directory that exists would block on a disk that hangs.
    match directory.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => return found.map(|_| false),
    }
    match DirBuilder::new().mode(mode).create(directory) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uids(data_dir: &Path, range: &str) -> TeamUids {
        let (range, directory) = (range.parse().unwrap(), DataDir::open(data_dir).unwrap());
        let stored = directory.read(FILE, FILE_MAX).unwrap();
        let stored = stored.map_or_else(BTreeMap::new, |text| serde_json::from_slice(&text).unwrap());
        TeamUids {
            range,
            directory,
            homes: data_dir.join("homes"),
            assigned_ids: Mutex::new(stored),
            write_lock: Mutex::default(),
        }
    }

    #[test]
    fn each_team_gets_its_own_uid_and_keeps_it_after_a_restart() {
        let directory = mcp_satellite_files::data_dir::private_tempdir();
        let id = |uids: &TeamUids, team: &str| uids.ensure_id(&team.into()).map_err(|error| error.reason);
        let before = uids(directory.path(), "2000-2001");
        assert_eq!(id(&before, "acme"), Ok(2000));
        assert_eq!(id(&before, "globex"), Ok(2001));
        assert_eq!(id(&before, "acme"), Ok(2000));
        let after = uids(directory.path(), "2000-2001");
        assert_eq!(id(&after, "globex"), Ok(2001));
        assert!(id(&after, "third").unwrap_err().contains("extend the range"));
        let moved = uids(directory.path(), "3000-3001");
        assert!(id(&moved, "acme").unwrap_err().contains("2000"));
        assert_eq!(id(&moved, "third"), Ok(3000));
    }
}
