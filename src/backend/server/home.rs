//! The backend's data directory: for its owner alone, and for one backend.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use mcp_satellite_actors::model::secret::Secret;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::api::TokenWanted;
use super::keys::{self, Purpose};
use super::registration::{self, TOKEN_AGE_MAX};
use super::{App, OpenError};
use crate::config::TokenHash;

/// Where everything is.
#[derive(Debug)]
pub(super) struct Home {
    dir: PathBuf,
}

impl Home {
    pub(super) fn new(dir: &Path) -> Result<Self, OpenError> {
        let failed = |what| move |why| OpenError::DataDir { what, path: dir.to_owned(), why };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed("make the directory"))?;
        Ok(Self { dir: dir.canonicalize().map_err(failed("use the directory"))? })
    }

    pub(super) fn path(&self) -> &Path {
        &self.dir
    }

    pub(super) fn database(&self) -> PathBuf {
        self.dir.join("backend.db")
    }

    pub(super) fn admin_token_file(&self) -> PathBuf {
        self.dir.join("admin-token")
    }

    /// What `curl --config` needs to ask as the administrator, without the token among its arguments.
    pub(super) fn curl_file(&self) -> PathBuf {
        self.dir.join("admin.curl")
    }

    pub(super) fn registration_token_file(&self) -> PathBuf {
        self.dir.join("registration-token")
    }

    pub(super) fn lock(&self) -> Result<Flock<File>, OpenError> {
        let path = self.dir.join("lock");
        let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(|why| OpenError::DataDir { what: "open", path: path.clone(), why })?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            Errno::EWOULDBLOCK => OpenError::InUse(self.dir.clone()),
            errno => OpenError::DataDir { what: "lock", path, why: errno.into() },
        })
    }

    /// The admin token; it is made when it is first asked for, and anew when its file was removed.
    pub(super) fn admin_token(&self) -> Result<Secret, OpenError> {
        let path = self.admin_token_file();
        let failed = |what| {
            let path = path.clone();
            move |why| OpenError::DataDir { what, path, why }
        };
        if let Some(token) = kept(&path).map_err(failed("read"))? {
            return Ok(token);
        }
        let token = keys::credential(Purpose::Admin).map_err(failed("make"))?;
        keep(&path, &token).map_err(failed("write"))?;
        Ok(token)
    }

    /// Every process of the machine sees the arguments of every other one, so the token is told to `curl` by a file.
    pub(super) fn offer_curl(&self, admin: &Secret) -> Result<(), OpenError> {
        let path = self.curl_file();
        let line = Secret::from(format!("header = \"Authorization: Bearer {}\"", admin.expose()));
        keep(&path, &line).map_err(|why| OpenError::DataDir { what: "write", path, why })
    }

    /// Sees to it that the file holds a token that opens, so that the first satellite can come in without anybody asking for one.
    pub(super) async fn offer_token(&self, app: &App) -> Result<(), OpenError> {
        let path = self.registration_token_file();
        let now = app.now();
        let offered = kept(&path).ok().flatten().map(|token| TokenHash::of(token.expose()));
        let token = app.database.run(move |db| {
            if let Some(offered) = offered
                && registration::is_valid(db, offered, now)?
            {
                return Ok(None);
            }
            let note = Some("the file registration-token".to_owned());
            let wanted = TokenWanted { note, ..TokenWanted::default() };
            let (token, _) = registration::new_token(db, now, TOKEN_AGE_MAX, &wanted)?;
            Ok(Some(token))
        });
        let Some(token) = token.await.map_err(|_| OpenError::Token)? else { return Ok(()) };
        keep(&path, &token).map_err(|why| OpenError::DataDir { what: "write", path, why })
    }
}

/// The credential in a file, if there is one.
fn kept(path: &Path) -> io::Result<Option<Secret>> {
    match fs::read_to_string(path) {
        Ok(text) if text.trim().is_empty() => Ok(None),
        Ok(text) => Ok(Some(text.trim().into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whoever reads the file finds the old one or the new one, and nobody but its owner does.
fn keep(path: &Path, secret: &Secret) -> io::Result<()> {
    let new = path.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    writeln!(file, "{}", secret.expose())?;
    file.sync_all()?;
    fs::rename(&new, path)
}
