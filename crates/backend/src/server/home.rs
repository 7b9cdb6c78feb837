//! Data directory of the backend, accessible only to its owner and locked by one backend.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use mcp_satellite_actors::model::secret::Secret;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::api::TokenRequest;
use super::keys::{self, CredentialKind};
use super::registration::{self, TOKEN_AGE_MAX};
use super::{BackendOpenError, BackendState};
use mcp_satellite_config::TokenHash;
use mcp_satellite_files::data_dir::{DataDir, OpenMode};

const DATABASE: &str = "backend.db";
const ADMIN_TOKEN: &str = "admin-token";
const ADMIN_CURL: &str = "admin.curl";
const REGISTRATION_TOKEN: &str = "registration-token";
const LOCK: &str = "lock";
// A credential file contains a single line.
const CREDENTIAL_MAX: u64 = 4096;

#[derive(Debug)]
pub(super) struct BackendDataDir {
    dir: DataDir,
}

impl BackendDataDir {
    pub(super) fn new(dir: &Path) -> Result<Self, BackendOpenError> {
        let failed = |why| BackendOpenError::DataDir { what: "use the directory", path: dir.to_owned(), why };
        let dir = DataDir::create(dir).map_err(failed)?;
        dir.inspect().map_err(failed)?;
        Ok(Self { dir })
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    // Creates an empty file, readable only by its owner, if there is none.
    pub(super) fn create_database_file(&self) -> Result<PathBuf, BackendOpenError> {
        let created =
            self.dir.stat(DATABASE).map_or_else(|| self.dir.open_file(DATABASE, OpenMode::Write).map(drop), |_| Ok(()));
        let path = created.and_then(|()| self.dir.database_path(DATABASE));
        path.map_err(|why| self.data_dir_error("open", DATABASE, why))
    }

    fn data_dir_error(&self, what: &'static str, name: &str, why: io::Error) -> BackendOpenError {
        BackendOpenError::DataDir { what, path: self.dir.path().join(name), why }
    }

    pub(super) fn curl_file(&self) -> PathBuf {
        self.dir.path().join(ADMIN_CURL)
    }

    pub(super) fn registration_token_file(&self) -> PathBuf {
        self.dir.path().join(REGISTRATION_TOKEN)
    }

    pub(super) fn lock(&self) -> Result<Flock<File>, BackendOpenError> {
        let file = self.dir.open_file(LOCK, OpenMode::Write).map_err(|why| self.data_dir_error("open", LOCK, why))?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            Errno::EWOULDBLOCK => BackendOpenError::InUse(self.dir.path().to_owned()),
            errno => self.data_dir_error("lock", LOCK, errno.into()),
        })
    }

    pub(super) fn load_or_create_admin_token(&self) -> Result<Secret, BackendOpenError> {
        if let Some(token) =
            read_credential(&self.dir, ADMIN_TOKEN).map_err(|why| self.data_dir_error("read", ADMIN_TOKEN, why))?
        {
            return Ok(token);
        }
        let token = keys::generate_credential(CredentialKind::Admin)
            .map_err(|why| self.data_dir_error("create", ADMIN_TOKEN, why))?;
        write_credential(&self.dir, ADMIN_TOKEN, &token)
            .map_err(|why| self.data_dir_error("write", ADMIN_TOKEN, why))?;
        Ok(token)
    }

    // In a file, because other processes can read the arguments of `curl`.
    pub(super) fn write_curl_file(&self, admin: &Secret) -> Result<(), BackendOpenError> {
        let line = Secret::from(format!("header = \"Authorization: Bearer {}\"", admin.expose()));
        write_credential(&self.dir, ADMIN_CURL, &line).map_err(|why| self.data_dir_error("write", ADMIN_CURL, why))
    }

    /// Ensures that the file contains a valid registration token, so that a first satellite can register.
    pub(super) async fn ensure_registration_token(&self, app: &BackendState) -> Result<(), BackendOpenError> {
        let now = app.now();
        let offered = read_credential(&self.dir, REGISTRATION_TOKEN)
            .ok()
            .flatten()
            .map(|token| TokenHash::from_token(token.expose()));
        let token = app.database.run(move |db| {
            if let Some(offered) = offered
                && registration::is_valid(db, offered, now)?
            {
                return Ok(None);
            }
            let note = Some("the file registration-token".to_owned());
            let request = TokenRequest { note, ..TokenRequest::default() };
            let (token, _) = registration::insert_token(db, now, TOKEN_AGE_MAX, &request)?;
            Ok(Some(token))
        });
        let Some(token) = token.await.map_err(|_| BackendOpenError::Token)? else { return Ok(()) };
        write_credential(&self.dir, REGISTRATION_TOKEN, &token)
            .map_err(|why| self.data_dir_error("write", REGISTRATION_TOKEN, why))
    }
}

fn read_credential(dir: &DataDir, name: &str) -> io::Result<Option<Secret>> {
    let text = String::from_utf8(dir.read(name, CREDENTIAL_MAX)?.unwrap_or_default());
    let text = text.map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(Some(text.trim()).filter(|text| !text.is_empty()).map(Secret::from))
}

fn write_credential(dir: &DataDir, name: &str, secret: &Secret) -> io::Result<()> {
    dir.replace(name, format!("{}\n", secret.expose()).as_bytes())
}
