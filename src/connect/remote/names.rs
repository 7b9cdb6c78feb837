//! Addresses of hosts, as the machine's own resolver knows them. It blocks a thread for as long as it takes (20 s and
//! more with a name server that is silent) and cannot be called off, and the threads for that are everybody's: control
//! socket, sandboxes and files wait for them, too. So a few names are looked up at once, and each of them once, for all
//! who ask meanwhile.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::{OnceCell, Semaphore, watch};
use tokio::task::spawn_blocking;

/// So many lookups block a thread at once. The runtime has 512.
const LOOKUPS_MAX: usize = 32;

/// What is known of a name once it was looked up.
type Answer = Result<Vec<SocketAddr>, Unresolved>;

#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the name cannot be resolved")]
struct Unresolved;

/// One lookup: begun by the first who gets a place for it, and over when its thread says so.
type Lookup = OnceCell<watch::Receiver<Option<Answer>>>;

type LookUp = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// The resolver of all clients.
#[derive(Clone)]
pub(super) struct Names {
    look_up: Arc<LookUp>,
    places: Arc<Semaphore>,
    /// Lookups that somebody waits for, or a thread works on.
    lookups: Arc<Mutex<HashMap<String, Weak<Lookup>>>>,
}

impl Names {
    pub(super) fn new() -> Self {
        Self::with(|host| Ok((host, 0).to_socket_addrs()?.collect()))
    }

    fn with(look_up: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static) -> Self {
        let places = Arc::new(Semaphore::new(LOOKUPS_MAX));
        Self { look_up: Arc::new(look_up), places, lookups: Arc::default() }
    }

    /// The lookup of `host` that is under way, or another.
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
            let place = Arc::clone(&self.places).acquire_owned().await.map_err(|_| Unresolved)?;
            let (told, answered) = watch::channel(None);
            let (resolver, kept) = (Arc::clone(&self.look_up), Arc::clone(&lookup));
            // It ends when it ends, whoever has stopped waiting: until then it keeps its place, and its name.
            spawn_blocking(move || {
                let _until_then = (place, kept);
                told.send_replace(Some(resolver(&host).map_err(|_| Unresolved)));
            });
            Ok(answered)
        });
        let mut answered = begun.await?.clone();
        match answered.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(answer)) => answer.clone(),
            Ok(None) | Err(_) => Err(Unresolved),
        }
    }
}

impl Resolve for Names {
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

    /// A resolver that says which name it is asked for, and answers when it is let go.
    fn slow() -> (Names, UnboundedReceiver<String>, mpsc::Sender<()>) {
        let (asked, asking) = unbounded_channel();
        let (go, gate) = mpsc::channel();
        let gate = Mutex::new(gate);
        let names = Names::with(move |host| {
            asked.send(host.to_owned()).unwrap();
            gate.lock().unwrap().recv().unwrap();
            if host.starts_with("bad") {
                Err(io::ErrorKind::NotFound.into())
            } else {
                Ok(vec![(Ipv4Addr::LOCALHOST, 0).into()])
            }
        });
        (names, asking, go)
    }

    #[tokio::test]
    async fn a_slow_resolver_takes_a_few_threads_and_no_more() {
        let (names, mut asking, go) = slow();
        let all = (0..100).map(|host| tokio::spawn(names.clone().addresses(format!("h{host}"))));
        let all: Vec<_> = all.collect();
        for _ in 0..LOOKUPS_MAX {
            asking.recv().await.unwrap();
        }
        // Others get a thread; what would have begun before them has begun.
        spawn_blocking(|| {}).await.unwrap();
        assert!(asking.try_recv().is_err(), "more than {LOOKUPS_MAX} at once");
        for _ in 0..100 {
            go.send(()).unwrap();
        }
        assert!(join_all(all).await.into_iter().all(|answer| answer.unwrap().is_ok()));
    }

    #[tokio::test]
    async fn a_name_is_looked_up_once_for_all_who_ask_meanwhile() {
        let (names, mut asking, go) = slow();
        let all = (0..100).map(|at| names.clone().addresses(["good", "bad"][at % 2].to_owned()));
        let all = tokio::spawn(join_all(all));
        asking.recv().await.unwrap();
        asking.recv().await.unwrap();
        for _ in 0..101 {
            go.send(()).unwrap();
        }
        let answers = all.await.unwrap();
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 50);
        assert!(asking.try_recv().is_err());
        assert!(names.clone().addresses("good".to_owned()).await.is_ok(), "and nothing is kept");
        assert_eq!(asking.recv().await.as_deref(), Some("good"));
    }

    #[tokio::test]
    async fn a_lookup_that_nobody_waits_for_any_more_is_found_by_the_next_who_asks() {
        let (names, mut asking, go) = slow();
        let gave_up = tokio::spawn(names.clone().addresses("h".to_owned()));
        asking.recv().await.unwrap();
        gave_up.abort();
        assert!(gave_up.await.unwrap_err().is_cancelled());
        let mut next = pin!(names.clone().addresses("h".to_owned()));
        assert!(next.as_mut().now_or_never().is_none());
        go.send(()).unwrap();
        go.send(()).unwrap();
        assert!(next.await.is_ok());
        assert!(asking.try_recv().is_err());
    }

    #[tokio::test]
    async fn who_gives_up_before_there_was_a_place_leaves_nothing() {
        let (names, _asking, _go) = slow();
        let all = Arc::clone(&names.places).acquire_many_owned(u32::try_from(LOOKUPS_MAX).unwrap()).await.unwrap();
        assert!(names.clone().addresses("gone".to_owned()).now_or_never().is_none());
        assert!(names.clone().addresses("here".to_owned()).now_or_never().is_none());
        drop(all);
        assert_eq!(names.places.available_permits(), LOOKUPS_MAX);
        assert_eq!(names.lookups.lock().unwrap().len(), 1);
    }
}
