//! Probes: messages that show whether actors handle their messages, and collect what each actor reports of itself. Each
//! actor passes the probe on to the actors that it supervises.

use std::collections::HashMap;

use tokio::sync::mpsc;
use tokio::time::{Duration, Instant};

use crate::model::actor_tree::{ActorKind, ActorReport, PermitLoad};
use crate::model::ids::{RunNumber, TeamId};

/// Message that an actor answers when it handles it. The receiver of the answers ends once all probes are dropped.
pub(crate) struct ActorProbe {
    answers: mpsc::UnboundedSender<ActorAnswer>,
    sent_at: Instant,
    wants_reports: bool,
}

/// Answer of an actor, with the time that it took to handle the probe.
pub(crate) enum ActorAnswer {
    Root { took: Duration, permits: Vec<PermitLoad>, restarts: PartRestarts, teams: Vec<TeamFacts> },
    Registry { took: Duration },
    Batcher { took: Duration, backlog: usize },
    Team { took: Duration, team: TeamId, backlog: usize, workers: Vec<WorkerFacts> },
    Worker { took: Duration, run: RunNumber },
}

/// Numbers of restarts of the registry and the batcher.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PartRestarts {
    pub(crate) registry: u64,
    pub(crate) batcher: u64,
}

/// Team as Root knows it.
pub(crate) struct TeamFacts {
    pub(crate) team: TeamId,
    pub(crate) name: String,
    pub(crate) restarts: u64,
    pub(crate) permits: Vec<PermitLoad>,
}

/// Worker as the supervisor of its team knows it.
pub(crate) struct WorkerFacts {
    pub(crate) run: RunNumber,
    pub(crate) name: String,
    pub(crate) restarts: u64,
    pub(crate) permits: Vec<PermitLoad>,
}

impl ActorProbe {
    /// Creates a probe. With `wants_reports` it reaches the workers too, and each actor describes itself.
    pub(crate) fn new(wants_reports: bool) -> (Self, mpsc::UnboundedReceiver<ActorAnswer>) {
        let (answers, received) = mpsc::unbounded_channel();
        (Self { answers, sent_at: Instant::now(), wants_reports }, received)
    }

    /// Returns a probe for an actor that this one supervises.
    pub(crate) fn passed_on(&self) -> Self {
        Self { answers: self.answers.clone(), sent_at: Instant::now(), wants_reports: self.wants_reports }
    }

    pub(crate) fn wants_reports(&self) -> bool {
        self.wants_reports
    }

    /// Answers the probe. `describe` receives the time since the probe was sent.
    pub(crate) fn answer(&self, describe: impl FnOnce(Duration) -> ActorAnswer) {
        if self.wants_reports {
            // The send fails if nobody waits any longer.
            let _ = self.answers.send(describe(self.sent_at.elapsed()));
        }
    }
}

/// Answers of all actors, as far as they have arrived.
#[derive(Default)]
pub(crate) struct ActorAnswers {
    root: Option<ActorReport>,
    restarts: PartRestarts,
    expected_teams: Vec<TeamFacts>,
    registry: Option<Duration>,
    batcher: Option<(Duration, usize)>,
    teams: HashMap<TeamId, (Duration, usize, Vec<WorkerFacts>)>,
    workers: HashMap<RunNumber, Duration>,
}

impl ActorAnswers {
    pub(crate) fn add(&mut self, answer: ActorAnswer) {
        match answer {
            ActorAnswer::Root { took, permits, restarts, teams } => {
                let answered_ms = Some(milliseconds(took));
                self.root =
                    Some(ActorReport { answered_ms, permits, ..ActorReport::unanswered(ActorKind::Root, "root") });
                (self.restarts, self.expected_teams) = (restarts, teams);
            }
            ActorAnswer::Registry { took } => self.registry = Some(took),
            ActorAnswer::Batcher { took, backlog } => self.batcher = Some((took, backlog)),
            ActorAnswer::Team { took, team, backlog, workers } => {
                self.teams.insert(team, (took, backlog, workers));
            }
            ActorAnswer::Worker { took, run } => {
                self.workers.insert(run, took);
            }
        }
    }

    /// Returns the tree of all actors that are known to exist. Without an answer of Root, no other is known.
    pub(crate) fn into_tree(mut self) -> ActorReport {
        let Some(root) = self.root.take() else { return ActorReport::unanswered(ActorKind::Root, "root") };
        let registry = ActorReport {
            answered_ms: self.registry.map(milliseconds),
            restarts: self.restarts.registry,
            ..ActorReport::unanswered(ActorKind::Registry, "registry")
        };
        let batcher = ActorReport {
            answered_ms: self.batcher.map(|(took, _)| milliseconds(took)),
            restarts: self.restarts.batcher,
            backlog: self.batcher.map(|(_, backlog)| backlog),
            ..ActorReport::unanswered(ActorKind::Batcher, "batcher")
        };
        let expected = std::mem::take(&mut self.expected_teams);
        let teams = expected.into_iter().map(|facts| self.team_report(facts));
        let children = [registry, batcher].into_iter().chain(teams).collect();
        ActorReport { children, ..root }
    }

    fn team_report(&mut self, facts: TeamFacts) -> ActorReport {
        let TeamFacts { team, name, restarts, permits } = facts;
        let answer = self.teams.remove(&team);
        let team_id = Some(team);
        let report = ActorReport {
            team_id: team_id.clone(),
            restarts,
            permits,
            ..ActorReport::unanswered(ActorKind::Team, name)
        };
        let Some((took, backlog, mut workers)) = answer else { return report };
        workers.sort_unstable_by(|one, other| (&one.name, one.run.0).cmp(&(&other.name, other.run.0)));
        let worker_report = |worker: WorkerFacts| ActorReport {
            team_id: team_id.clone(),
            answered_ms: self.workers.remove(&worker.run).map(milliseconds),
            restarts: worker.restarts,
            permits: worker.permits,
            ..ActorReport::unanswered(ActorKind::Worker, worker.name)
        };
        let children = workers.into_iter().map(worker_report).collect();
        ActorReport { answered_ms: Some(milliseconds(took)), backlog: Some(backlog), children, ..report }
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::actor_tree::PermitKind;

    const SLOW: Duration = Duration::from_millis(250);

    fn answers(answers: impl IntoIterator<Item = ActorAnswer>) -> ActorReport {
        let mut all = ActorAnswers::default();
        answers.into_iter().for_each(|answer| all.add(answer));
        all.into_tree()
    }

    #[test]
    fn an_actor_without_an_answer_is_reported_by_the_actor_above_it() {
        let load = PermitLoad { pool: PermitKind::Processes, held: 1, waiting: 2, max: None };
        let facts =
            |team: &str| TeamFacts { team: team.into(), name: team.to_owned(), restarts: 3, permits: vec![load] };
        let worker =
            |run, name: &str| WorkerFacts { run: RunNumber(run), name: name.to_owned(), restarts: 0, permits: vec![] };
        let tree = answers([
            ActorAnswer::Worker { took: SLOW, run: RunNumber(7) },
            ActorAnswer::Team {
                took: SLOW,
                team: "a".into(),
                backlog: 5,
                workers: vec![worker(8, "y"), worker(7, "y"), worker(9, "x")],
            },
            ActorAnswer::Registry { took: SLOW },
            ActorAnswer::Root {
                took: SLOW,
                permits: Vec::new(),
                restarts: PartRestarts { registry: 1, batcher: 2 },
                teams: vec![facts("a"), facts("blocked")],
            },
        ]);
        let answered = |report: &ActorReport| (report.kind, report.name.clone(), report.answered_ms, report.restarts);
        let named = |kind, name: &str, time, restarts| (kind, name.to_owned(), time, restarts);
        let children: Vec<_> = tree.children.iter().map(answered).collect();
        assert_eq!(
            children,
            [
                named(ActorKind::Registry, "registry", Some(250.0), 1),
                named(ActorKind::Batcher, "batcher", None, 2),
                named(ActorKind::Team, "a", Some(250.0), 3),
                named(ActorKind::Team, "blocked", None, 3),
            ]
        );
        let [_, _, team, blocked] = &tree.children[..] else { panic!("{tree:?}") };
        assert_eq!((team.backlog, blocked.backlog, blocked.children.len()), (Some(5), None, 0));
        assert_eq!((&team.permits, &blocked.permits), (&vec![load], &vec![load]));
        let workers: Vec<_> = team.children.iter().map(|worker| (worker.name.as_str(), worker.answered_ms)).collect();
        assert_eq!(workers, [("x", None), ("y", Some(250.0)), ("y", None)]);
        assert_eq!(answers([ActorAnswer::Registry { took: SLOW }]), ActorReport::unanswered(ActorKind::Root, "root"));
    }
}
