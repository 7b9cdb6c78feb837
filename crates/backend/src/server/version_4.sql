-- Indexes for lists of events, newest first: of a satellite, of a type, and of an instance.
CREATE INDEX events_satellite ON events (satellite);
CREATE INDEX events_type ON events (type);
CREATE INDEX events_instance ON events (satellite, data ->> 'process_id');
