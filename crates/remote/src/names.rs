//! DNS lookups with the machine's resolver. A lookup blocks a thread for its whole duration (20 s and more with a
//! silent name server) and cannot be cancelled, and the thread pool is shared with the control socket, sandboxes and
//! files. Therefore only a few names are looked up at a time, and concurrent callers share the lookup of a name. Names
//! that have failed or were slow have a few places of their own, so that the dead hosts of one team do not delay
//! others.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::{OnceCell, Semaphore, watch};
use tokio::task::spawn_blocking;

// Maximum number of concurrent lookups, each of which blocks a thread. The runtime has 512.
const LOOKUPS_MAX: usize = 32;
// Maximum number of concurrent lookups of suspects: names whose last lookup failed or was slow.
const SUSPECT_LOOKUPS_MAX: usize = 8;
// Duration above which a lookup is slow.
const PATIENCE: Duration = Duration::from_secs(1);
// Maximum number of remembered suspects. Beyond it all are forgotten, at the cost of one lookup for each.
const SUSPECTS_MAX: usize = 4096;

type Answer = Result<Vec<SocketAddr>, ResolveError>;

#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the name cannot be resolved")]
struct ResolveError;

/// A shared lookup, started by the first caller that gets a permit and finished by its thread.
type Lookup = OnceCell<watch::Receiver<Option<Answer>>>;

type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

#[derive(Clone)]
pub(super) struct DnsResolver {
    look_up: Arc<LookUp>,
    permits: Arc<Semaphore>,
    suspect_permits: Arc<Semaphore>,
    suspects: Arc<Mutex<HashSet<String>>>,
    timeout: Duration,
    // Lookups that have a waiter or a running thread.
    lookups: Arc<Mutex<HashMap<String, Weak<Lookup>>>>,
}

impl DnsResolver {
    pub(super) fn new() -> Self {
        Self::with_lookup(PATIENCE, |host| Ok((host, 0).to_socket_addrs()?.collect()))
    }

    fn with_lookup(
        timeout: Duration,
        look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            look_up: Arc::new(look_up),
            permits: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            suspect_permits: Arc::new(Semaphore::new(SUSPECT_LOOKUPS_MAX)),
            suspects: Arc::default(),
            timeout,
            lookups: Arc::default(),
        }
    }

    fn suspects(&self) -> MutexGuard<'_, HashSet<String>> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn permits(&self, host: &str) -> Arc<Semaphore> {
        Arc::clone(if self.suspects().contains(host) { &self.suspect_permits } else { &self.permits })
    }

    fn look_up_blocking(&self, host: &str) -> Answer {
        let asked_at = Instant::now();
        let answer = (self.look_up)(host).map_err(|_| ResolveError);
        let mut suspects = self.suspects();
        if answer.is_ok() && asked_at.elapsed() <= self.timeout {
            suspects.remove(host);
        } else if !suspects.contains(host) {
            if suspects.len() >= SUSPECTS_MAX {
                suspects.clear();
            }
            suspects.insert(host.to_owned());
        }
        answer
    }

    fn lookup(&self, host: &str) -> Arc<Lookup> {
        let mut lookups = self.lookups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lookup) = lookups.get(host).and_then(Weak::upgrade) {
            return lookup;
        }
        lookups.retain(|_, lookup| lookup.strong_count() > 0);
        let lookup = Arc::default();
        lookups.insert(host.to_owned(), Arc::downgrade(&lookup));
        lookup
    }

    async fn addresses(self, host: String) -> Answer {
        let lookup = self.lookup(&host);
        let begun = lookup.get_or_try_init(|| async {
            // The semaphore is never closed.
            let permit = self.permits(&host).acquire_owned().await.map_err(|_| ResolveError)?;
            let (sender, answered) = watch::channel(None);
            let (names, lookup) = (self.clone(), Arc::clone(&lookup));
            // The thread runs to its end even if all callers have given up. Until then it keeps its permit and its
            // entry in `lookups`.
            spawn_blocking(move || {
                let _until_then = (permit, lookup);
                sender.send_replace(Some(names.look_up_blocking(&host)));
            });
            Ok(answered)
        });
        let mut answered = begun.await?.clone();
        match answered.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(answer)) => answer.clone(),
            Ok(None) | Err(_) => Err(ResolveError),
        }
    }
}

impl Resolve for DnsResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let answer = self.clone().addresses(name.as_str().to_owned());
        Box::pin(async move { Ok(Box::new(answer.await?.into_iter()) as Addrs) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::net::Ipv4Addr;
    use std::pin::pin;
    use std::sync::mpsc;

    use futures::FutureExt;
    use futures::future::join_all;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    fn slow_resolver() -> (DnsResolver, UnboundedReceiver<String>, mpsc::Sender<()>) {
        slow_resolver_with(Duration::MAX)
    }

    fn slow_resolver_with(slow_after: Duration) -> (DnsResolver, UnboundedReceiver<String>, mpsc::Sender<()>) {
        let (requests, lookups) = unbounded_channel();
        let (release, gate) = mpsc::channel();
        let gate = Mutex::new(gate);
        let names = DnsResolver::with_lookup(slow_after, move |host| {
            requests.send(host.to_owned()).unwrap();
            gate.lock().unwrap().recv().unwrap();
            if host.starts_with("bad") {
                Err(io::ErrorKind::NotFound.into())
            } else {
                Ok(vec![(Ipv4Addr::LOCALHOST, 0).into()])
            }
        });
        (names, lookups, release)
    }

    #[tokio::test]
    async fn a_slow_resolver_uses_a_limited_number_of_threads() {
        let (names, mut lookups, release) = slow_resolver();
        let all = (0..100).map(|host| tokio::spawn(names.clone().addresses(format!("h{host}"))));
        let all: Vec<_> = all.collect();
        for _ in 0..LOOKUPS_MAX {
            lookups.recv().await.unwrap();
        }
        // This task gets a thread only after all lookups that were started before it.
        spawn_blocking(|| {}).await.unwrap();
        assert!(lookups.try_recv().is_err(), "more than {LOOKUPS_MAX} at once");
        for _ in 0..100 {
            release.send(()).unwrap();
        }
        assert!(join_all(all).await.into_iter().all(|answer| answer.unwrap().is_ok()));
    }

    #[tokio::test]
    async fn names_that_failed_or_were_slow_do_not_block_other_names() {
        for (slow_after, kind) in [(Duration::MAX, "bad"), (Duration::ZERO, "slow")] {
            let (names, mut lookups, release) = slow_resolver_with(slow_after);
            let suspects: Vec<_> = (0..2 * LOOKUPS_MAX).map(|at| format!("{kind}{at}")).collect();
            let all = || suspects.iter().map(|host| tokio::spawn(names.clone().addresses(host.clone())));
            let before: Vec<_> = all().collect();
            for _ in &suspects {
                lookups.recv().await.unwrap();
                release.send(()).unwrap();
            }
            join_all(before).await;

            let again: Vec<_> = all().collect();
            for _ in 0..SUSPECT_LOOKUPS_MAX {
                assert!(lookups.recv().await.unwrap().starts_with(kind));
            }
            spawn_blocking(|| {}).await.unwrap();
            assert!(lookups.try_recv().is_err(), "more than {SUSPECT_LOOKUPS_MAX} at once");
            let good = tokio::spawn(names.clone().addresses("good".to_owned()));
            assert_eq!(lookups.recv().await.as_deref(), Some("good"));
            for _ in 0..=suspects.len() {
                release.send(()).unwrap();
            }
            assert!(good.await.unwrap().is_ok());
            join_all(again).await;
        }
    }

    #[tokio::test]
    async fn a_name_that_is_found_again_is_no_longer_suspect() {
        let (names, mut lookups, release) = slow_resolver();
        names.suspects().insert("good".to_owned());
        release.send(()).unwrap();
        assert!(names.clone().addresses("good".to_owned()).await.is_ok());
        lookups.recv().await.unwrap();
        assert!(names.suspects().is_empty());
    }

    #[tokio::test]
    async fn concurrent_requests_for_a_name_share_one_lookup() {
        let (names, mut lookups, release) = slow_resolver();
        let all = (0..100).map(|at| names.clone().addresses(["good", "bad"][at % 2].to_owned()));
        let all = tokio::spawn(join_all(all));
        lookups.recv().await.unwrap();
        lookups.recv().await.unwrap();
        for _ in 0..101 {
            release.send(()).unwrap();
        }
        let answers = all.await.unwrap();
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 50);
        assert!(lookups.try_recv().is_err());
        assert!(names.clone().addresses("good".to_owned()).await.is_ok(), "the lookup after the shared one failed");
        assert_eq!(lookups.recv().await.as_deref(), Some("good"));
    }

    #[tokio::test]
    async fn an_abandoned_lookup_is_reused_by_the_next_request() {
        let (names, mut lookups, release) = slow_resolver();
        let gave_up = tokio::spawn(names.clone().addresses("h".to_owned()));
        lookups.recv().await.unwrap();
        gave_up.abort();
        assert!(gave_up.await.unwrap_err().is_cancelled());
        let mut next = pin!(names.clone().addresses("h".to_owned()));
        assert!(next.as_mut().now_or_never().is_none());
        release.send(()).unwrap();
        release.send(()).unwrap();
        assert!(next.await.is_ok());
        assert!(lookups.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_request_that_is_dropped_without_a_permit_leaves_nothing() {
        let (names, _lookups, _release) = slow_resolver();
        let all = Arc::clone(&names.permits).acquire_many_owned(u32::try_from(LOOKUPS_MAX).unwrap()).await.unwrap();
        assert!(names.clone().addresses("gone".to_owned()).now_or_never().is_none());
        assert!(names.clone().addresses("here".to_owned()).now_or_never().is_none());
        drop(all);
        assert_eq!(names.permits.available_permits(), LOOKUPS_MAX);
        assert_eq!(names.lookups.lock().unwrap().len(), 1);
    }
}
