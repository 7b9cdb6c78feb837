-- Indexes for lists of instances, in the order of the list.
CREATE INDEX instances_team ON instances (body ->> 'team_id', satellite, instance);
CREATE INDEX instances_user ON instances (body ->> 'user_id', satellite, instance);
CREATE INDEX instances_name ON instances (instance, satellite);
