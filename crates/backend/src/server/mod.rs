//! Small backend server. Satellites register, fetch their configuration, receive commands and report events. All data
//! is in one database, and every request is validated as the published schemas demand.
//!
//! Routes: [`wire`](super::wire) below `/api/satellites`, [`api`] below `/api/admin`, and `/health` as liveness check.
//! [`BackendServer::set_pages`] adds a console.
//! The server has no TLS: use a reverse proxy where others can reach it.

mod access;
pub mod api;
mod body;
mod clock;
mod commands;
mod config;
mod database;
pub mod decode;
mod events;
mod handle;
mod heartbeat;
mod home;
mod instances;
mod keys;
mod pages;
mod refusal;
mod registration;
mod satellites;
pub mod schema;
mod state;
mod upkeep;

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_http::server::IncomingRequest;
use nix::fcntl::Flock;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Duration, Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tower_service::Service as _;

pub use self::clock::BackendClock;
use self::database::Database;
pub use self::database::DatabaseError;
pub use self::events::{EventRange, StoredEventFilter, StoredEventPage};
pub use self::handle::BackendHandle;
pub use self::instances::{InstanceChange, InstanceChanges};
pub use self::pages::PageService;
use self::pages::{ClientAddress, is_page_path};
pub use self::refusal::ApiError;
pub use self::satellites::SatelliteConnection;
use self::state::BackendState;
pub use self::state::{BackendOpenError, BackendSettings, EVENTS_BODY_MAX, EVENTS_MAX};
use mcp_satellite_config::TokenHash;
use mcp_satellite_http::server::{AdmitAll, HttpServer};

// From the head of a request to the head of its response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
// Requests in progress. A stream counts until its response begins.
const REQUESTS_MAX: usize = 512;
// Requests in progress may finish within this time on shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

pub struct BackendServer {
    app: Arc<BackendState>,
    data_dir: home::BackendDataDir,
    admin_token: Secret,
    // Lock on the data directory.
    lock: Flock<File>,
}

impl BackendServer {
    /// Opens the data directory in `settings` and creates what is missing.
    ///
    /// # Errors
    ///
    /// Returns an error if another backend uses the directory, or if files or database cannot be used.
    pub async fn open(settings: BackendSettings) -> Result<Self, BackendOpenError> {
        let home = home::BackendDataDir::new(&settings.data_dir)?;
        let lock = home.lock()?;
        let database = Database::open(&home.create_database_file()?)?;
        let admin = home.load_or_create_admin_token()?;
        home.write_curl_file(&admin)?;
        let app = BackendState {
            database,
            admin: TokenHash::from_token(admin.expose()),
            last_contacts: Mutex::default(),
            change_signal: watch::Sender::new(()),
            event_signal: watch::Sender::new(()),
            pages: OnceLock::new(),
            request_permits: Semaphore::new(REQUESTS_MAX),
            queue_signal: watch::Sender::new(()),
            hold_permits: Semaphore::new(REQUESTS_MAX / 2),
            ending: CancellationToken::new(),
            settings,
        };
        home.ensure_registration_token(&app).await?;
        Ok(Self { app: Arc::new(app), data_dir: home, admin_token: admin, lock })
    }

    /// Returns the path of a file for `curl --config` that sends the admin token.
    pub fn curl_file(&self) -> PathBuf {
        self.data_dir.curl_file()
    }

    pub fn registration_token_file(&self) -> PathBuf {
        self.data_dir.registration_token_file()
    }

    pub fn admin_token(&self) -> &Secret {
        &self.admin_token
    }

    /// Returns a handle that reads the data of the backend.
    pub fn handle(&self) -> BackendHandle {
        BackendHandle(self.app.clone())
    }

    /// Serves the paths of the console by `pages`. Only the first call has an effect.
    pub fn set_pages(&self, pages: PageService) {
        let _ = self.app.pages.set(pages);
    }

    pub fn data_dir(&self) -> &Path {
        self.data_dir.path()
    }

    pub fn serve(self, listener: TcpListener) -> io::Result<RunningBackend> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let router = router(self.app.clone());
        let answer = move |peer, mut request: IncomingRequest| {
            let mut router = router.clone();
            request.extensions_mut().insert(ClientAddress(peer));
            async move {
                match router.call(request).await {
                    Ok(answer) => answer,
                    Err(never) => match never {},
                }
            }
        };
        let server = HttpServer::start(listener, AdmitAll, answer)?;
        let upkeep = AbortOnDropHandle::new(tokio::spawn(upkeep::run_maintenance(self.app.clone())));
        Ok(RunningBackend { address, app: self.app, server, _upkeep: upkeep, _lock: self.lock })
    }
}

/// Running backend. Dropping it stops the server at once.
pub struct RunningBackend {
    address: SocketAddr,
    app: Arc<BackendState>,
    server: HttpServer,
    _upkeep: AbortOnDropHandle<()>,
    _lock: Flock<File>,
}

impl RunningBackend {
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until the server ends without a shutdown, and returns the cause.
    pub async fn wait_ended(&mut self) -> io::Error {
        self.server.wait_ended().await
    }

    /// Stops the server: requests in progress have 5 s to finish, and streams end.
    pub async fn shut_down(mut self) {
        self.app.ending.cancel();
        self.server.close(SHUTDOWN_TIMEOUT).await;
        self.app.database.close();
    }
}

impl Drop for RunningBackend {
    fn drop(&mut self) {
        self.app.ending.cancel();
    }
}

fn router(app: Arc<BackendState>) -> Router {
    let satellites = Router::new()
        .route("/register", post(registration::register))
        .route("/{satellite}/commands", get(commands::poll))
        .route("/{satellite}/commands/{command}/result", post(commands::receive_result))
        .route("/{satellite}/config", get(config::fetch))
        .route("/{satellite}/events", post(events::receive))
        .route("/{satellite}/fleet", get(satellites::fleet))
        .route("/{satellite}/heartbeat", post(heartbeat::receive));
    let admin = Router::new()
        .route("/registration-tokens", post(registration::make_token))
        .route("/config", get(config::show_shared).put(config::put_shared))
        .route("/satellites", get(satellites::list))
        .route("/satellites/{satellite}", get(satellites::show).delete(satellites::delete))
        .route("/satellites/{satellite}/config", get(config::show).put(config::put).delete(config::delete_own))
        .route("/satellites/{satellite}/commands", get(commands::list).post(commands::queue))
        .route("/satellites/{satellite}/commands/{command}", get(commands::show))
        .route("/satellites/{satellite}/instances/{instance}", get(instances::show))
        .route("/events", get(events::list))
        .route("/instances", get(instances::list))
        .route("/instances/stream", get(instances::follow));
    Router::new()
        .route("/health", get(|| async { Json(serde_json::json!({"status": "ok"})) }))
        .nest("/api/satellites", satellites)
        .nest("/api/admin", admin)
        .fallback(answer_page)
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this HTTP method is not allowed for this path")
        })
        .layer(middleware::from_fn_with_state(app.clone(), limit_requests))
        .with_state(app)
}

async fn answer_page(State(app): State<Arc<BackendState>>, request: Request) -> Response {
    let address = request.extensions().get::<ClientAddress>().copied();
    match (app.pages.get(), address) {
        (Some(pages), Some(ClientAddress(peer))) if is_page_path(request.uri().path()) => pages(peer, request).await,
        _ => ApiError::not_found("path").into_response(),
    }
}

async fn limit_requests(State(app): State<Arc<BackendState>>, request: Request, next: Next) -> Response {
    let Ok(_place) = app.request_permits.try_acquire() else {
        return ApiError::unavailable("too many requests are in progress; try again").into_response();
    };
    let (began, method, path) = (Instant::now(), request.method().clone(), request.uri().path().to_owned());
    let answer = timeout(ANSWER_TIMEOUT, next.run(request)).await;
    let late = |_| ApiError::unavailable("the request took too long; try again").into_response();
    let answer = answer.unwrap_or_else(late);
    tracing::debug!(%method, path, status = answer.status().as_u16(), took = ?began.elapsed(), "answered");
    answer
}
