-- Times are milliseconds since 1970 of the backend's clock, but for what a satellite says itself, which stays text.

CREATE TABLE satellites (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    -- SHA-256 of its API key.
    key_hash BLOB NOT NULL UNIQUE,
    -- As it introduced itself last.
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

-- One for all under '', and those of single satellites under their ids.
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
    -- 0 is immediate, 3 is low.
    priority INTEGER NOT NULL,
    payload TEXT NOT NULL,
    expires_at INTEGER,
    created_at INTEGER NOT NULL,
    -- Queued by the backend itself, because the configuration has changed.
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
    -- A satellite that has lost its data counts from 1 again, at other times.
    UNIQUE (satellite, seq, timestamp)
) STRICT;
CREATE INDEX events_received ON events (received_at);

-- Answers to batches, so that one that comes again is answered alike.
CREATE TABLE batches (
    satellite TEXT NOT NULL REFERENCES satellites (id) ON DELETE CASCADE,
    key TEXT NOT NULL,
    digest BLOB NOT NULL,
    answer TEXT NOT NULL,
    received_at INTEGER NOT NULL,
    PRIMARY KEY (satellite, key)
) STRICT;

-- How each instance is, by what its satellite has told last.
CREATE TABLE instances (
    satellite TEXT NOT NULL REFERENCES satellites (id) ON DELETE CASCADE,
    instance TEXT NOT NULL,
    seq INTEGER NOT NULL,
    since TEXT NOT NULL,
    -- The last of its changes.
    change INTEGER NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (satellite, instance)
) STRICT;
CREATE INDEX instances_change ON instances (change);

-- What streams follow. Outlives its satellite, whose instances are removed by changes.
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
-- The hash of a configuration is told to others, and a short credential could be guessed from one that anybody can make.
INSERT INTO keys (name, value) VALUES ('config', randomblob(32));
