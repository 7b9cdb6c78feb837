-- Times are milliseconds since 1970 of the backend's clock. Times that a satellite reports are stored as text.

CREATE TABLE satellites (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    -- SHA-256 of its API key.
    key_hash BLOB NOT NULL UNIQUE,
    -- The last registration request of the satellite, as JSON.
    registration TEXT NOT NULL,
    registered_at INTEGER NOT NULL,
    heartbeat TEXT,
    heartbeat_at INTEGER
) STRICT;

CREATE TABLE registration_tokens (
    hash BLOB PRIMARY KEY,
    note TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    used_at INTEGER,
    used_by TEXT
) STRICT;

-- Configurations: that of all satellites under '', those of single satellites under their ids.
CREATE TABLE configs (
    scope TEXT PRIMARY KEY,
    hash TEXT NOT NULL,
    body TEXT NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;

CREATE TABLE commands (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    satellite TEXT NOT NULL REFERENCES satellites (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    command_type TEXT NOT NULL,
    -- From 0 (immediate) to 3 (low).
    priority INTEGER NOT NULL,
    payload TEXT NOT NULL,
    expires_at INTEGER,
    created_at INTEGER NOT NULL,
    -- True if the backend queued the command itself after a change of the configuration.
    by_itself INTEGER NOT NULL,
    first_sent_at INTEGER,
    times_sent INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    finished_at INTEGER,
    UNIQUE (satellite, id)
) STRICT;
CREATE INDEX commands_waiting ON commands (satellite, priority, number) WHERE finished_at IS NULL;

CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    satellite TEXT NOT NULL REFERENCES satellites (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    type TEXT NOT NULL,
    timestamp TEXT NOT NULL,
    data TEXT NOT NULL,
    received_at INTEGER NOT NULL,
    -- A satellite that has lost its data numbers its events from 1 again, with other timestamps.
    UNIQUE (satellite, seq, timestamp)
) STRICT;
CREATE INDEX events_received ON events (received_at);

-- Responses to batches: a batch that is sent again gets the same response.
CREATE TABLE batches (
    satellite TEXT NOT NULL REFERENCES satellites (id) ON DELETE CASCADE,
    key TEXT NOT NULL,
    digest BLOB NOT NULL,
    answer TEXT NOT NULL,
    received_at INTEGER NOT NULL,
    PRIMARY KEY (satellite, key)
) STRICT;

-- State of each instance, as last reported by its satellite.
CREATE TABLE instances (
    satellite TEXT NOT NULL REFERENCES satellites (id) ON DELETE CASCADE,
    instance TEXT NOT NULL,
    seq INTEGER NOT NULL,
    since TEXT NOT NULL,
    -- Id of the last change.
    change INTEGER NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (satellite, instance)
) STRICT;
CREATE INDEX instances_change ON instances (change);

-- Changes of instances, read by streams. They outlive the satellite: its removal is a change of each instance.
CREATE TABLE changes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    satellite TEXT NOT NULL,
    instance TEXT NOT NULL,
    removed INTEGER NOT NULL,
    body TEXT NOT NULL,
    at INTEGER NOT NULL
) STRICT;

CREATE TABLE keys (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT;
-- Key of the hashes of configurations. A hash without a key would let its readers guess a short credential.
INSERT INTO keys (name, value) VALUES ('config', randomblob(32));
