//! The satellite as host of the link to its backend.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::future::BoxFuture;
use mcp_satellite_actors::RuntimeHandle;
use mcp_satellite_actors::model::ids::InstanceId;

use super::RunningSatellite;
use super::apply::{ACCEPT_HINT, ChangeOrigin};
use crate::backend::link::rules::InstanceScope;
use crate::backend::link::{BackendLink, LinkError, LinkHost, LinkOptions, SpecsById};
use crate::backend::wire::EventProgress;
use crate::config::{BackendDocument, ConfigErrors, Plan};
use crate::connect::suspend;
use crate::data_dir::DataDir;
use crate::journal::Journal;
use crate::state::StateDb;

impl RunningSatellite {
    /// Serves the link to the backend: carries out its commands and reports the state of the satellite. Never returns.
    pub(crate) async fn run_link(&self) {
        match &self.link {
            Some(link) => link.run(self).await,
            None => std::future::pending().await,
        }
    }
}

impl LinkHost for RunningSatellite {
    fn runtime(&self) -> &RuntimeHandle {
        &self.runtime
    }

    fn apply_config<'a>(
        &'a self,
        document: BackendDocument,
        since: Instant,
        expected: Option<&'a InstanceScope>,
    ) -> BoxFuture<'a, Result<Arc<SpecsById>, ConfigErrors>> {
        async move {
            let mut applied = self.applied.clone().lock_owned().await;
            let (files, waiting, hash) = (applied.files.clone(), applied.waiting.clone(), document.hash.clone());
            // Runs on a blocking thread, because thousands of servers take a while.
            let joining = tokio::task::spawn_blocking(move || {
                // Changed files and a changed document that belong together may arrive one after the other. Each
                // conflicts with the old version of the other, so waiting files are tried with the new document first.
                let both =
                    waiting.and_then(|waiting| Some((waiting.clone().with_document(&document).ok()?, Some(waiting))));
                (both.map_or_else(|| Ok((files.with_document(&document)?, None)), Ok), document)
            });
            let (joined, document) = joining.await.map_err(|error| ConfigErrors::internal_error(&error))?;
            let (plan, waiting) = joined?;
            if applied.accepted.as_ref() != Some(&document.hash)
                && let Some(message) = self.check_removals(&plan, expected)
            {
                applied.rejected = Some(document.hash);
                return Err(ConfigErrors::without_place("", vec![(message, ACCEPT_HINT.to_owned())]));
            }
            (applied.rejected, applied.accepted) = (None, None);
            applied.document = Some(document);
            if let Some(waiting) = waiting {
                applied.waiting = None;
                self.commit_files(waiting, &mut applied);
            }
            Ok(Arc::new(self.apply_plan(plan, applied, ChangeOrigin { since, hash: Some(hash) }).await))
        }
        .boxed()
    }

    fn erase<'a>(&'a self, removed: &'a InstanceScope) -> BoxFuture<'a, ()> {
        let admits =
            move |id: &InstanceId| removed.matches(id.installation.as_str(), id.team.as_str(), id.user.as_str());
        async move { drop(self.users.eraser.erase_now(admits).await) }.boxed()
    }

    fn event_progress(&self) -> EventProgress {
        let backlog = self.storage.delivery.as_ref().map_or(0, |delivery| delivery.status().backlog);
        EventProgress { journalled_through: self.storage.journal.status().journalled_through, backlog }
    }
}

pub(super) fn create_link(
    plan: &Plan,
    data_dir: &DataDir,
    database: &StateDb,
    journal: &Journal,
) -> Result<Option<BackendLink>, LinkError> {
    let Some(backend) = &plan.backend else { return Ok(None) };
    let options = LinkOptions {
        name: plan.name.clone(),
        plan: backend.clone(),
        data_dir: data_dir.path().to_owned(),
        database: database.clone(),
        command_log: Arc::new(journal.clone()),
        // `RandomState` seeds each instance randomly.
        seed: RandomState::new().build_hasher().finish(),
        suspended: Arc::new(suspend::total_suspended),
    };
    BackendLink::new(options).map(Some)
}

/// Returns the last document of the backend and the complete plan with it, so that a start does not wait for the
/// backend.
pub(super) async fn load_stored_document(plan: &Plan, database: &StateDb) -> Option<(Plan, BackendDocument)> {
    let (plan, url, database) = (plan.clone(), plan.backend.as_ref()?.url.clone(), database.clone());
    let reading = tokio::task::spawn_blocking(move || {
        let document = BackendLink::load_stored_config(&database, &url)?;
        match plan.with_document(&document) {
            Ok(plan) => Some((plan, document)),
            Err(errors) => {
                let errors = errors.to_single_line();
                tracing::error!(
                    errors,
                    "the stored configuration of the backend is not valid any more; requesting it again"
                );
                None
            }
        }
    });
    // An error means that the task panicked; then the satellite starts without a document.
    reading.await.ok().flatten()
}
