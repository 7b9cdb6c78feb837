-- What a list of instances asks for, in the order in which it is told.
CREATE INDEX instances_team ON instances (body ->> 'team_id', satellite, instance);
CREATE INDEX instances_user ON instances (body ->> 'user_id', satellite, instance);
CREATE INDEX instances_name ON instances (instance, satellite);
