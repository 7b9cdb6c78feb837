-- Name of the satellite that may register with the token; NULL permits any new satellite.
ALTER TABLE registration_tokens ADD COLUMN name TEXT;

-- Number of stored events, maintained by triggers: counting the rows is slow.
ALTER TABLE satellites ADD COLUMN events INTEGER NOT NULL DEFAULT 0;
UPDATE satellites SET events = (SELECT count(*) FROM events WHERE events.satellite = satellites.id);
CREATE TRIGGER events_stored AFTER INSERT ON events BEGIN
    UPDATE satellites SET events = events + 1 WHERE id = new.satellite;
END;
CREATE TRIGGER events_forgotten AFTER DELETE ON events BEGIN
    UPDATE satellites SET events = events - 1 WHERE id = old.satellite;
END;

-- Indexes for polls, lists of satellites and the upkeep.
CREATE INDEX commands_last ON commands (satellite, priority, coalesce(finished_at, created_at));
CREATE INDEX commands_finished ON commands (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX commands_expired ON commands (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX batches_received ON batches (received_at);
CREATE INDEX instances_status ON instances (satellite, body ->> 'status');
