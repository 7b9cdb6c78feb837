//! Database and the thread that owns it, so that no async task waits for the disk. Acknowledged data is synced to the
//! disk before the response, because satellites discard what was acknowledged.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use rusqlite::{Connection, OpenFlags, Transaction};
use tokio::sync::oneshot;

use super::refusal::ApiError;

// Further requests are rejected as unavailable.
const QUEUE_MAX: usize = 1024;

// Each entry upgrades the schema by one version. A published version is never changed.
const MIGRATIONS: [&str; 4] = [
    include_str!("version_1.sql"),
    include_str!("version_2.sql"),
    include_str!("version_3.sql"),
    include_str!("version_4.sql"),
];

type DatabaseJob = Box<dyn FnOnce(&mut Connection) + Send>;

// On drop, the queued jobs still run.
#[derive(Debug)]
pub(super) struct Database {
    running: Mutex<Option<DatabaseThread>>,
}

#[derive(Debug)]
struct DatabaseThread {
    jobs: mpsc::SyncSender<DatabaseJob>,
    thread: JoinHandle<()>,
}

#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("cannot open the database {path}: {why}")]
    Open {
        path: PathBuf,
        /// Cause of the failure.
        why: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the database {path} has the schema {found}, but this backend supports {known}; use a newer backend")]
    Newer {
        path: PathBuf,
        found: usize,
        /// Newest version that this backend supports.
        known: usize,
    },
}

impl Database {
    pub(super) fn open(path: &Path) -> Result<Self, DatabaseError> {
        fn open_error(path: &Path, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> DatabaseError {
            DatabaseError::Open { path: path.to_owned(), why: why.into() }
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let mut connection = Connection::open_with_flags(path, flags).map_err(|why| open_error(path, why))?;
        prepare(&connection).map_err(|why| open_error(path, why))?;
        let version: usize = connection
            .query_row("SELECT user_version FROM pragma_user_version", [], |row| row.get(0))
            .map_err(|why| open_error(path, why))?;
        let Some(missing) = MIGRATIONS.get(version..) else {
            return Err(DatabaseError::Newer { path: path.to_owned(), found: version, known: MIGRATIONS.len() });
        };
        for (step, migration) in missing.iter().enumerate() {
            migrate(&mut connection, migration, version + step + 1).map_err(|why| open_error(path, why))?;
        }
        let (jobs, inbox) = mpsc::sync_channel::<DatabaseJob>(QUEUE_MAX);
        let thread = thread::Builder::new()
            .name("backend-database".into())
            .spawn(move || {
                for job in inbox {
                    job(&mut connection);
                }
            })
            .map_err(|why| open_error(path, why))?;
        Ok(Self { running: Mutex::new(Some(DatabaseThread { jobs, thread })) })
    }

    /// Runs `act` in one transaction, which is rolled back on an error. A started job finishes even if its caller has
    /// gone.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Transaction<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let job: DatabaseJob = Box::new(move |connection| {
            let outcome = catch_unwind(AssertUnwindSafe(|| in_transaction(connection, act)));
            let outcome =
                outcome.unwrap_or_else(|_| Err(ApiError::unavailable("internal error of the backend; try again")));
            // The caller may have gone; it will send the request again.
            let _ = reply.send(outcome);
        });
        let is_queued = match &*self.running.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(running) => running.jobs.try_send(job).is_ok(),
            None => false,
        };
        if !is_queued {
            return Err(ApiError::unavailable("the backend is overloaded or stopping; try again"));
        }
        answer.await.unwrap_or_else(|_| Err(ApiError::unavailable("the backend is stopping; try again")))
    }

    /// Runs the queued jobs and ends the thread, which also closes the write-ahead log.
    pub(super) fn close(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(DatabaseThread { jobs, thread }) = running {
            drop(jobs);
            // An error means that the thread panicked, so it has ended too.
            let _ = thread.join();
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.close();
    }
}

fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; PRAGMA busy_timeout = 5000;
         PRAGMA secure_delete = ON;",
    )
}

fn migrate(connection: &mut Connection, migration: &str, version: usize) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute_batch(migration)?;
    transaction.pragma_update(None, "user_version", version)?;
    transaction.commit()
}

fn in_transaction<T>(
    connection: &mut Connection,
    act: impl FnOnce(&Transaction<'_>) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let transaction = connection.transaction()?;
    // Without a commit, dropping the transaction rolls it back.
    let outcome = act(&transaction)?;
    transaction.commit()?;
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(path: &Path) -> usize {
        let connection = Connection::open(path).unwrap();
        connection.query_row("SELECT user_version FROM pragma_user_version", [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn opening_a_database_applies_all_migrations_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("backend.db");
        for _ in 0..2 {
            Database::open(&path).unwrap().close();
            assert_eq!(version(&path), MIGRATIONS.len());
        }
    }

    #[test]
    fn a_newer_database_is_rejected_and_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("backend.db");
        Connection::open(&path).unwrap().pragma_update(None, "user_version", 77).unwrap();
        let refused = Database::open(&path).unwrap_err();
        assert!(matches!(refused, DatabaseError::Newer { found: 77, .. }), "{refused}");
        assert_eq!(version(&path), 77);
    }

    #[test]
    fn a_file_that_is_not_a_database_is_rejected_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("backend.db");
        std::fs::write(&path, "this is no database, and long enough to be seen as none at the first look").unwrap();
        let refused = Database::open(&path).unwrap_err().to_string();
        assert!(refused.contains("backend.db") && refused.contains("not a database"), "{refused}");
    }

    #[tokio::test]
    async fn a_failed_request_is_rolled_back_and_the_next_one_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(&dir.path().join("backend.db")).unwrap();
        let insert = "INSERT INTO registration_tokens (hash, created_at, expires_at) VALUES (x'00', 0, 0)";
        let refused = database
            .run(move |db| {
                db.execute(insert, [])?;
                Err::<(), _>(ApiError::bad_request("no"))
            })
            .await;
        assert!(refused.is_err());
        let panicked = database
            .run(move |db| -> Result<(), ApiError> {
                db.execute(insert, [])?;
                panic!("on purpose");
            })
            .await;
        assert!(panicked.is_err());
        let count = |db: &Transaction<'_>| {
            Ok(db.query_row("SELECT count(*) FROM registration_tokens", [], |row| row.get::<_, i64>(0))?)
        };
        assert_eq!(database.run(count).await.unwrap(), 0);
    }
}
